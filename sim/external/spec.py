"""The specification of a world, from what its environment says of itself and from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...policies.core.errors import BurnishError
from ...policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from ...policies.data.episodes import ASSUMED_HZ
from .settings import GymConfig


def spec_of(description: Mapping[str, Any], obs: ObsSpec, config: GymConfig) -> tuple[EnvSpec, str]:
    """And who says the rate of commands."""
    found = _boxed(description["action"], config.id)
    action = ActionSpec(found["low"], found["high"])
    hz, hz_from = _control_hz(description["rates"], config)
    mode = config.action_mode or description["says"]["action_mode"] or f"gym:{config.id}"
    limit = config.max_steps or description["max_steps"]
    if limit is None:
        raise BurnishError(f"env.id={config.id} has no limit of time; give env.max_steps")
    return EnvSpec(obs, action, hz, mode, int(limit)), hz_from


def _boxed(action: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if action["kind"] != "Box" or not action["dtype"].startswith("float"):
        kind = f"Box of {action['dtype']}" if action["kind"] == "Box" else action["kind"]
        raise BurnishError(
            f"env.id={name} takes actions of kind {kind}, but policies here act in real numbers; choose its continuous "
            "version, if there is one (some take 'env.kwargs={continuous: true}')"
        )
    if not np.isfinite([*action["low"], *action["high"]]).all():
        raise BurnishError(
            f"env.id={name} takes actions without limits, but policies here act between limits; register a version "
            "whose Box has finite limits"
        )
    fixed = [i for i, (low, high) in enumerate(zip(action["low"], action["high"], strict=True)) if low >= high]
    if fixed:
        raise BurnishError(
            f"env.id={name} takes actions whose number {fixed[0]} has no room between its limits; wrap it so that it "
            "takes the others alone"
        )
    return action


def _control_hz(rates: Mapping[str, float], config: GymConfig) -> tuple[float, str]:
    """And who says so."""
    if config.control_hz is not None:
        return config.control_hz, "env.control_hz"
    for name in ("control_hz", "control_freq", "dt", "render_fps"):  # a simulator's own dt may be a part of a step
        rate = rates.get(name)
        if rate is not None and 0 < rate < float("inf"):
            return (1 / rate if name == "dt" else rate), f"its {name}"
    return ASSUMED_HZ, "assumed, since the world does not say; env.control_hz=... sets it"
