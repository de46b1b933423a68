"""Actors and learner in processes of their own."""
