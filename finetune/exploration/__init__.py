"""Exploration as an option of every online method that learns from rewards: a part of the reward for what is new."""
