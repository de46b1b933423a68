"""Policies that LeRobot trained, rebuilt under the names of their weights: they act, and are refined, as others do."""
