"""The calibration of one arm: which tick is zero, which way is up, and how far each joint may go.

A plain JSON file, for people to read:

    {"joints":  {"shoulder_pan": {"id": 1, "zero_tick": 2048, "direction": 1, "min_tick": 700, "max_tick": 3400}, ...},
     "gripper": {"id": 6, "closed_tick": 2020, "open_tick": 3200, "width_m": 0.07}}

A file of LeRobot's (`lerobot-calibrate`) will do as well. Its degrees have their zero in the middle of what a joint was
turned through, so the middle becomes the zero here too, and a policy that was trained on such degrees means the same by
them (``env=joints env.units=deg``, `..joints`). Its motor called gripper becomes the gripper, closed at the least tick.

``homing_offset`` is the offset that the servo itself adds (its register, in ticks). It is not written, only compared
with what the servo says, because with another offset the same tick would be another angle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from ..adapter import Vector
from ..errors import Refused

TICKS = 4096  # per turn
QUANTUM_RAD = 2 * math.pi / TICKS
NEAR_TICKS = 2  # a goal may be moved by so much: the guard's promise for what is on the wire has room for three
IDS = range(253)


@dataclass(frozen=True)
class JointCalibration:
    """The calibration of one joint in servo ticks: range, zero and direction."""

    name: str
    id: int
    min_tick: int
    max_tick: int
    zero_tick: int = TICKS // 2  # where the joint's angle is zero
    direction: int = 1  # -1: the angle grows as ticks fall
    homing_offset: int = 0

    def __post_init__(self) -> None:
        _whole_numbers(self, f"joint {self.name!r}")
        if not 0 <= self.min_tick < self.max_tick < TICKS:
            raise Refused(
                f"joint {self.name!r} needs 0 <= min_tick < max_tick < {TICKS}, got {self.min_tick} and "
                f"{self.max_tick}; set the servo's offset so that its range does not pass the end of the turn"
            )
        if self.direction not in (1, -1):
            raise Refused(f"direction={self.direction} of joint {self.name!r} must be 1 or -1")

    @property
    def limits_rad(self) -> tuple[float, float]:
        ends = [self.direction * (tick - self.zero_tick) * QUANTUM_RAD for tick in (self.min_tick, self.max_tick)]
        return min(ends), max(ends)


@dataclass(frozen=True)
class GripperCalibration:
    """The calibration of the gripper: its servo ticks when closed and open, and its width in m."""

    id: int
    closed_tick: int
    open_tick: int
    width_m: float = 0.07
    homing_offset: int = 0

    def __post_init__(self) -> None:
        _whole_numbers(self, "the gripper")
        if not (0 <= min(self.closed_tick, self.open_tick) < max(self.closed_tick, self.open_tick) < TICKS):
            raise Refused(f"the gripper needs two different ticks below {TICKS} for closed and open")
        if not (isinstance(self.width_m, (int, float)) and 0 < self.width_m < 1):
            raise Refused(f"width_m={self.width_m!r} of the gripper must lie between 0 and 1 m")


@dataclass(frozen=True)
class Calibration:
    """The calibration of an arm, with its maps between ticks and rad."""

    joints: tuple[JointCalibration, ...]
    gripper: GripperCalibration | None = None

    def __post_init__(self) -> None:
        if not self.joints or len(set(self.ids)) < len(self.ids):
            raise Refused(f"a calibration needs joints, each of its own id, got ids {self.ids}")

    @property
    def ids(self) -> list[int]:
        """In the order of the bus: the joints, then the gripper."""
        return [joint.id for joint in self.joints] + ([self.gripper.id] if self.gripper else [])

    @property
    def offsets(self) -> list[int]:
        return [j.homing_offset for j in self.joints] + ([self.gripper.homing_offset] if self.gripper else [])

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The least and the greatest tick of each id."""
        ends = [(joint.min_tick, joint.max_tick) for joint in self.joints]
        if self.gripper:
            both = self.gripper.closed_tick, self.gripper.open_tick
            ends.append((min(both), max(both)))
        return ends

    def radians(self, ticks: Vector) -> Vector:
        return self.direction * (np.asarray(ticks, np.float64) - self._zero) * QUANTUM_RAD

    def ticks(self, q_rad: Vector) -> Vector:
        """Not rounded."""
        return self._zero + self.direction * np.asarray(q_rad, np.float64) / QUANTUM_RAD

    def goal_ticks(self, q_rad: Vector, before: Sequence[int] | None = None) -> list[int]:
        """Rounded towards the middle of the range: as far apart as the set-points or less, and never outside it, or
        not farther than the goals ``before`` were."""
        low, high = np.array([(j.min_tick, j.max_tick) for j in self.joints], np.float64).T
        middle = (low + high) / 2
        if before is not None:
            low, high = np.minimum(low, before), np.maximum(high, before)
        exact = self.ticks(q_rad)
        whole = np.rint(exact)
        exact = np.where(np.abs(exact - whole) < 1e-6, whole, exact)  # a tick that was turned into rad and back
        if ((exact < low - NEAR_TICKS) | (exact > high + NEAR_TICKS)).any():
            raise Refused(f"set-points {np.asarray(q_rad).tolist()} leave the calibrated range; nothing was sent")
        inward = np.where(exact > middle, np.floor(exact), np.ceil(exact))
        return np.clip(inward, low, high).astype(int).tolist()

    @property
    def direction(self) -> Vector:
        return np.array([joint.direction for joint in self.joints], np.float64)

    @property
    def _zero(self) -> Vector:
        return np.array([joint.zero_tick for joint in self.joints], np.float64)

    def save(self, path: str | Path) -> None:
        from ...policies.core.files import replace  # which a robot that only reads does without

        joints = {j.name: {k: v for k, v in asdict(j).items() if k != "name"} for j in self.joints}
        content = {"joints": joints} | ({"gripper": asdict(self.gripper)} if self.gripper else {})
        replace(path, json.dumps(content, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        try:
            if Path(path).exists() and not Path(path).is_file():  # a pipe or a device would be read for ever
                raise OSError("it is no file")
            content = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise Refused(f"the calibration {path} cannot be read: {error}") from error
        return cls.of(content)

    @classmethod
    def of(cls, content: Any) -> Calibration:
        if isinstance(content, Mapping) and "joints" not in content and all(map(_is_lerobots, content.values())):
            content = _from_lerobot(content)
        if not (isinstance(content, Mapping) and isinstance(content.get("joints"), Mapping)):
            raise Refused('a calibration is a mapping {"joints": {name: {...}}, "gripper": {...}}')
        if set(content) - {"joints", "gripper"}:
            raise Refused(f"a calibration has joints and a gripper, not {sorted(set(content) - {'joints', 'gripper'})}")
        joints = tuple(_made(JointCalibration, row, name=name) for name, row in content["joints"].items())
        gripper = content.get("gripper")
        return cls(joints, _made(GripperCalibration, gripper) if gripper else None)


LEROBOT = {"id", "drive_mode", "homing_offset", "range_min", "range_max"}


def _is_lerobots(row: Any) -> bool:
    return isinstance(row, Mapping) and set(row) == LEROBOT


def _from_lerobot(content: Mapping[str, Any]) -> dict[str, Any]:
    """**Departures**: LeRobot counts 4095 ticks to a turn of 4096, which is 0.04 degrees in 160, and rounds
    set-points to the tick below."""
    joints, gripper = {}, None
    for name, row in content.items():
        ends = row["range_min"], row["range_max"]
        if row["drive_mode"] != 0:
            raise Refused(
                f"drive_mode={row['drive_mode']!r} of {name!r} reverses some of LeRobot's units and not others; write "
                "a calibration of ours, with direction=-1"
            )
        if not all(type(x) is int for x in ends):
            raise Refused(f"the range of {name!r} must be two whole numbers of ticks, got {ends}")
        same = {"id": row["id"], "homing_offset": row["homing_offset"]}
        if name == "gripper":
            gripper = {**same, "closed_tick": ends[0], "open_tick": ends[1]}
        else:
            joints[name] = {**same, "min_tick": ends[0], "max_tick": ends[1], "zero_tick": sum(ends) // 2}
    return {"joints": joints, **({"gripper": gripper} if gripper else {})}


def _made(kind: type, row: Any, **more: Any) -> Any:
    names = {f.name for f in fields(kind)}
    if not isinstance(row, Mapping) or set(row) - names:
        raise Refused(f"a calibration's row has the fields {', '.join(sorted(names - set(more)))}; got {row}")
    try:
        return kind(**row, **more)
    except TypeError as error:
        raise Refused(f"the calibration's row {dict(row)} {more} is not complete: {error}") from error


def _whole_numbers(row: JointCalibration | GripperCalibration, what: str) -> None:
    for f in fields(row):
        value = getattr(row, f.name)
        if f.type == "int" and (not isinstance(value, int) or isinstance(value, bool)):
            raise Refused(f"{f.name}={value!r} of {what} must be a whole number")
    if row.id not in IDS:
        raise Refused(f"id={row.id} of {what} must be 0 to 252")
