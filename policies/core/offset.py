"""A correction that lasts: the agent moves an offset from the base's actions, which persists and decays.

Where actions are absolute targets, a correction that is added to one of them is undone at the next tick, because the
base goes on to where it wanted to go; noise of a tick moves the robot hardly at all, so little is found out
(amazon-far/residual-offpolicy-rl, issue 3). An offset stays until the agent takes it back or it has decayed:

    offset' = clip(decay * offset + gain * action, -1, 1)       in units of the bound
    decay   = 2^(-dt / half_life)
    gain    = (1 - decay) / (1 - 2^(-rise / half_life))         the action 1 reaches the bound within ``rise`` seconds

Both are times, so equal settings mean the same at every control rate, except that nothing rises in less than a tick.
The offset begins each episode at 0, and is observed, because what comes next depends on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .errors import BurnishError
from .ranges import check_ranges

OFFSET = "residual_offset"  # (N, A) in units of the bound: the offset before the agent acts


@dataclass(frozen=True)
class Offset:
    """An offset at a given control rate."""

    decay: float
    gain: float

    def after(self, offset: Tensor, action: Tensor) -> Tensor:
        """The offset that is added to the base's action in this tick."""
        return (self.decay * offset + self.gain * action).clamp(-1, 1)


@dataclass
class OffsetConfig:
    """Times of an offset that persists between ticks, for bases whose actions are absolute targets."""

    half_life: float = 0.0  # seconds in which the offset decays to its half; 0: each correction is of its tick alone
    rise: float = 0.25  # seconds in which the largest action moves the offset from 0 to its bound

    def __post_init__(self) -> None:
        check_ranges(self, {"[0, inf)": "half_life", "(0, inf)": "rise"}, "offset.")

    def at(self, control_hz: float | None) -> Offset | None:
        """None where corrections do not last."""
        if self.half_life == 0:
            return None
        if control_hz is None:
            raise BurnishError(
                f"offset.half_life={self.half_life} is in seconds, and neither the policy nor the world has a "
                "control_hz, the number of ticks in a second; give one of them a control_hz"
            )
        rate, dt = math.log(2) / self.half_life, 1 / control_hz
        return Offset(math.exp(-rate * dt), math.expm1(-rate * dt) / math.expm1(-rate * max(self.rise, dt)))
