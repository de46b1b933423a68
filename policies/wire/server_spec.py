"""A policy behind a wire: what its server says of it, and where it says nothing, what one answer shows.

``keys`` is a mapping, our name of an observation: the server's. Empty, it is all of them, as they are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.errors import BurnishError
from ..core.spec import EnvSpec, ObsSpec, PolicySpec


def spec_from_server(data: Any, keys: Mapping[str, str], where: str) -> PolicySpec:
    """Of a server that announces a specification, under our names."""
    try:
        spec = PolicySpec.from_dict(data)
    except (AttributeError, TypeError, ValueError) as error:
        raise BurnishError(f"what {where} announces makes no sense: {error}") from error
    theirs = spec.obs.shapes
    names = keys or {key: key for key in theirs}
    unknown = sorted(set(names.values()) - set(theirs))
    if unknown:
        raise BurnishError(f"policy.keys names {unknown}, but {where} wants {sorted(theirs)}")
    called = {ours: spec.names[name] for ours, name in {**names, "action": "action"}.items() if name in spec.names}
    return replace(spec, obs=ObsSpec({ours: theirs[name] for ours, name in names.items()}), names=called)


def wanted(keys: Mapping[str, str], world: EnvSpec) -> list[str]:
    """Our names of what a server that announces nothing is shown."""
    shapes = world.obs.shapes
    unknown = sorted(set(keys) - set(shapes))
    if unknown:
        raise BurnishError(f"policy.keys names {unknown}, but the environment gives {sorted(shapes)}")
    return list(keys or shapes)


def sent(key: str, x: np.ndarray) -> np.ndarray:
    """As the protocol wants it: floats in single precision, pictures with their colours last."""
    if key.startswith(("image.", "goal_image.")):
        return np.moveaxis(x, -3, -1)
    return x.astype(np.float32) if x.dtype.kind == "f" else x


def shown(actions: np.ndarray, world: EnvSpec, names: list[str], where: str) -> PolicySpec:
    """Of a server that has answered about one observation: it acts in the units of ``world``."""
    if actions.ndim != 2 or len(actions) < 1 or actions.shape[1:] != (world.action.dim,):
        raise BurnishError(
            f"{where} answers with actions of shape {actions.shape}, but the environment takes chunks of "
            f"{world.action.dim} numbers"
        )
    return PolicySpec(
        obs=ObsSpec({key: world.obs.shapes[key] for key in names}),
        action=world.action,
        horizon=len(actions),
        execute=len(actions),
        control_hz=world.control_hz,
        action_mode=world.action_mode,
        pixels=world.pixels,
    )
