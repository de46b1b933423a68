"""Evaluation, statistics and video."""
