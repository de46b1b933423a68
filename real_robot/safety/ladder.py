"""The rungs of `SafeRobot`'s ladder, and what it tells of a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from ..adapter import RobotState, Vector


class Rung(StrEnum):
    """The rungs of the ladder, from running to stopped."""

    RUN = "run"
    SLOW = "slow"
    HOLD = "hold"
    RAMP = "ramp"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the robot, in words, with its time in ns."""

    t_ns: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The result of one step: the newest state, the set-point that was sent, and the rung."""

    state: RobotState  # the newest; old if ``fresh`` is False
    fresh: bool
    sent: Vector  # the set-point that the device has
    rung: Rung
    changed: bool  # what was sent is not what was asked


class Advisor(Protocol):
    """A reflex: the share in [0, 1] of the speed limits that may be used, 0 to brake. It can only be more careful."""

    def __call__(self, state: RobotState, request: Any) -> float: ...
