"""Models of rewards as another package would write them: functions of one tick."""

from __future__ import annotations


def near(world):
    """100 for every tick: more than the world ever pays."""
    return lambda obs, action, next_obs: (next_obs["state"] - next_obs["goal"]).norm(dim=-1) * 0 + 100


def wrong(world):
    return lambda obs, action, next_obs: action[:, :1]


def nothing(world):
    return 3
