"""[-1, 1] <-> actuator units: the only place where a policy's numbers become the robot's."""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import replace

import torch
from torch import Tensor

from .errors import BurnishError
from .spec import ActionSpec
from .types import KnownDynamics, Step, VecEnv
from .wrapper import Wrapper

_log = logging.getLogger(__name__)
SLACK = 1e-3  # of a range, by which limits differ without being others


class Scale:
    """The affine map of [-1, 1] onto the limits of an ``ActionSpec``, clipped on both sides."""

    def __init__(self, action: ActionSpec, device: torch.device | str = "cpu") -> None:
        if not all(map(math.isfinite, (*action.low, *action.high))):
            raise BurnishError(f"actions can be scaled only between finite limits, got {action.low} and {action.high}")
        low = torch.tensor(action.low, dtype=torch.float64, device=device)
        high = torch.tensor(action.high, dtype=torch.float64, device=device)
        self.low, self.high = low.float(), high.float()
        self.centre, self.half = ((low + high) / 2).float(), ((high - low) / 2).float()

    def to_actuator(self, action: Tensor) -> Tensor:
        """Exact at both ends; clipped twice, because rounding must not leave the limits, not even by one ulp."""
        low, high = self.low.to(action.dtype), self.high.to(action.dtype)
        units = torch.lerp(low, high, (action.clamp(-1, 1) + 1) / 2)
        return torch.minimum(torch.maximum(units, low), high)

    def to_unit(self, action: Tensor) -> Tensor:
        return ((action - self.centre) / self.half).clamp(-1, 1)


@functools.cache
def scale_of(action: ActionSpec, device: torch.device) -> Scale:
    """The same for the same limits, and kept: an act that is recorded as a CUDA graph can bring no numbers from the
    host, and reads these where they lie."""
    with torch.inference_mode(False):  # else gradients could not pass through it later
        return Scale(action, device)


class ScaledEnv(Wrapper):
    """A world that takes actions in [-1, 1]. ``action`` gives the limits of the policy if they are narrower."""

    def __init__(self, env: VecEnv, action: ActionSpec | None = None) -> None:
        super().__init__(env)
        limits = action or env.spec.action
        if limits.dim != env.spec.action.dim:
            raise BurnishError(
                f"the policy acts in {limits.dim} dimensions, but the environment in {env.spec.action.dim}"
            )
        rows = zip(limits.low, limits.high, env.spec.action.low, env.spec.action.high, strict=True)
        for i, (low, high, least, most) in enumerate(rows):
            if high < least or low > most:  # all that the policy can ask for would be clipped to one number
                raise BurnishError(
                    f"dimension {i} of the policy's actions lies in [{low:g}, {high:g}], but the environment takes "
                    f"[{least:g}, {most:g}]; the two have other units"
                )
        _say_clipped(limits, env.spec.action)
        self.scale = Scale(limits, env.device)
        self.spec = replace(env.spec, action=ActionSpec((-1.0,) * limits.dim, (1.0,) * limits.dim))

    @property
    def known_dynamics(self) -> KnownDynamics | None:
        known = super().known_dynamics
        return None if known is None else lambda obs, action: known(obs, self.scale.to_actuator(action))

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.env.step(self.scale.to_actuator(action), active)
        executed = self.scale.to_unit(step.info["executed"]) if "executed" in step.info else action.clamp(-1, 1)
        return step._replace(info={**step.info, "executed": executed})


def narrower(policy: ActionSpec, env: ActionSpec) -> str:
    """A note on the actions of its environment that a policy cannot ask for; empty where there are none."""
    short = _beyond(env, policy)
    if not short:
        return ""
    return (
        "note: the environment takes [{1:g}, {2:g}] in dimension {0} of actions, and the policy commands "
        "[{3:g}, {4:g}]{5}: its limits, mostly those of its recordings, bound what refines it too"
    ).format(*short[0], _further(short))


@functools.lru_cache(maxsize=64)
def _say_clipped(policy: ActionSpec, env: ActionSpec) -> None:
    """Once in a process: which actions of the policy its environment would clip."""
    if over := _beyond(policy, env):
        _log.warning(
            "dimension %d of the policy's actions reaches [%g, %g], but the environment takes [%g, %g] and clips "
            "the rest%s; if one of them has other units, they do not fit each other",
            *(*over[0], _further(over)),
        )


def _beyond(wide: ActionSpec, other: ActionSpec) -> list[tuple[int, float, float, float, float]]:
    """(dimension, its limits in ``wide``, its limits in ``other``) where the former reach further."""
    rows = enumerate(zip(wide.low, wide.high, other.low, other.high, strict=True))
    return [(i, a, b, low, high) for i, (a, b, low, high) in rows if max(low - a, b - high) > SLACK * (high - low)]


def _further(rows: list[tuple[int, float, float, float, float]]) -> str:
    return f" (also in dimensions {', '.join(str(row[0]) for row in rows[1:])})" if rows[1:] else ""
