"""Motion as an emulator asks for it: `plant` answers with a physics model, so that registers show sag, inertia and
contact. Angles are the servo's own (tick zero is zero), in rad, in the order of the chain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

TICKS = 4096  # per turn, of both families
QUANTUM_RAD = 2 * math.pi / TICKS


@dataclass(frozen=True, slots=True)
class Drive:
    """The request of a servo's registers to its motor."""

    goal_rad: float
    powered: bool
    velocity: float  # of the profile, rad/s
    acceleration: float  # rad/s^2


class Plant(Protocol):
    """The interface of the motion behind a chain of servos."""

    def drive(self, index: int, drive: Drive) -> None:
        """From the time of the last ``advance`` on."""
        ...

    def advance(self, now_ns: int) -> None: ...

    def motion(self) -> tuple[Array, Array, Array]:
        """Position in rad, velocity in rad/s, and torque as a fraction of what the motor can give, -1 to 1."""
        ...
