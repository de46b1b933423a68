"""The person beside the robot: who says that it has succeeded, takes it over, and stops it.

`RobotEnv` asks once per control tick, and again where whoever decides was late. A script stands in for a person where
none is needed (`Scripted`); `Keyboard` listens to a terminal, `Gamepad` to a device of Linux's joystick interface. None
of them is an emergency stop.
"""

from __future__ import annotations

import os
import select
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

from .adapter import Vector
from .errors import Refused

FULL_RANGES_PER_S = 0.1  # while a key is held, of an action that says where to go


@dataclass(frozen=True)
class Word:
    """What somebody says in a tick; nothing, most of the time."""

    success: bool | None = None  # the episode has succeeded, or has failed; it ends here
    action: Vector | None = None  # to be played instead of the policy's, in the world's units
    stop: bool = False  # bring the robot to rest; the episode ends here

    @property
    def ends(self) -> bool:
        return self.stop or self.success is not None

    def renewed(self, later: Word) -> Word:
        """What holds where a second word comes before the first was followed: no verdict is lost, no old action is
        played, and who has the robot in this tick was settled by the first."""
        success = self.success if later.success is None else later.success
        return Word(success, None if self.action is None else later.action, self.stop or later.stop)


NOTHING = Word()


class Supervisor(Protocol):
    def poll(self, obs: Mapping[str, Any]) -> Word:
        """Never waits."""
        ...

    def ready(self, what: str) -> None:
        """Ask for something that only a person can do (put the peg back), and wait until it is."""
        ...


class Held(Protocol):
    @property
    def spec(self) -> Any: ...  # of the world: its action's range and its rate

    def holding(self) -> tuple[Vector, Vector]:
        """(the action that keeps the robot where it was sent last, which of its numbers are displacements)."""
        ...


class Scripted:
    """A function of the observation and the tick of the episode; whatever is asked for is ready at once."""

    def __init__(self, says: Callable[[Mapping[str, Any], int], Word]) -> None:
        self._says, self._tick = says, 0
        self.asked: list[str] = []

    def poll(self, obs: Mapping[str, Any]) -> Word:
        self._tick += 1
        return self._says(obs, self._tick - 1)

    def ready(self, what: str) -> None:
        self.asked.append(what)
        self._tick = 0


class ByHand:
    """A person's keys and sticks say how far to move. Where a number of the action says where to go instead, they move
    what the robot was sent last; otherwise a key that is let go would send the arm to the middle of its range."""

    def __init__(self, person: Keyboard | Gamepad, body: Held, rate: float = FULL_RANGES_PER_S) -> None:
        spec = body.spec
        low, high = np.array(spec.action.low), np.array(spec.action.high)
        self._person, self._body = person, body
        self._middle, self._half = (high + low) / 2, (high - low) / 2
        self._step = 2 * rate / spec.control_hz

    def poll(self, obs: Mapping[str, Any]) -> Word:
        word = self._person.poll(obs)
        if word.action is None:
            return word
        held, displaces = self._body.holding()
        goes = np.clip((held - self._middle) / self._half + self._step * word.action, -1, 1)
        return replace(word, action=np.where(displaces, word.action, goes))

    def ready(self, what: str) -> None:
        self._person.ready(what)

    def close(self) -> None:
        self._person.close()


class Keyboard:
    """Keys of a terminal: s success, f failure, space stop, t take over and give back, and pairs of keys that move one
    coordinate of the action each. The terminal is put back as it was by ``close``."""

    PAIRS = ("ad", "ws", "qe", "zx", "ol", "km", "[]")  # of the first coordinates: minus, plus

    def __init__(self, coordinates: int, stream: TextIO | None = None, tell: TextIO | None = None) -> None:
        self._stream, self._tell = stream or sys.stdin, tell or sys.stderr
        if coordinates > len(self.PAIRS):
            raise Refused(f"a keyboard moves up to {len(self.PAIRS)} coordinates, and this robot has {coordinates}")
        self._moves = {
            key: (i, sign) for i, pair in enumerate(self.PAIRS) for key, sign in zip(pair, (-1, 1), strict=True)
        }
        self._coordinates, self._holds = coordinates, False
        self._restore: Callable[[], None] = lambda: None
        if self._stream.isatty():
            self._unbuffer()

    def _unbuffer(self) -> None:
        import termios
        import tty

        number = self._stream.fileno()
        before = termios.tcgetattr(number)
        tty.setcbreak(number)
        self._restore = lambda: termios.tcsetattr(number, termios.TCSADRAIN, before)

    def poll(self, obs: Mapping[str, Any]) -> Word:
        action = np.zeros(self._coordinates)
        for key in self._keys():
            if key in "\n\r":
                continue
            if key == " ":
                return Word(stop=True)
            if not self._holds and key in "sf":
                return Word(success=key == "s")
            if key == "t":
                self._holds = not self._holds
            elif key in self._moves and self._moves[key][0] < self._coordinates:
                at, sign = self._moves[key]
                action[at] += sign
        return Word(action=np.clip(action, -1, 1)) if self._holds else NOTHING

    def ready(self, what: str) -> None:
        self._holds = False
        self._tell.write(f"{what}, then press Enter\n")
        self._tell.flush()
        if not self._stream.readline():
            raise Refused("nobody is at the keyboard, and the robot waits for a person")

    def close(self) -> None:
        self._restore()

    def _keys(self) -> str:
        """All that have been pressed, without waiting."""
        found = ""
        while select.select([self._stream], [], [], 0)[0]:
            data = os.read(self._stream.fileno(), 64).decode("utf-8", "replace")
            found += data
            if not data:
                break
        return found


@dataclass
class GamepadKeys:
    """Numbers of the device's buttons and axes; these are those of most pads under Linux."""

    success: int = 0
    failure: int = 1
    stop: int = 2
    hold: int = 4  # while it is pressed, the axes move the robot
    axes: tuple[int, ...] = (0, 1, 4, 3)
    dead: float = 0.1  # of an axis, that counts as nothing


@dataclass
class Gamepad:
    """A pad at ``/dev/input/js0``: events of eight bytes (time, value, kind, number), read without waiting."""

    coordinates: int
    path: Path = Path("/dev/input/js0")
    keys: GamepadKeys = field(default_factory=GamepadKeys)

    EVENT = struct.Struct("<IhBB")
    BUTTON, AXIS, INITIAL = 1, 2, 0x80

    def __post_init__(self) -> None:
        try:
            self._file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise Refused(
                f"there is no gamepad at {self.path}: {error.strerror}; plug it in, or use the keyboard"
            ) from error
        self._pressed: set[int] = set()
        self._values: dict[int, float] = {}

    def poll(self, obs: Mapping[str, Any]) -> Word:
        struck = self._listen()
        keys = self.keys
        if keys.stop in struck:
            return Word(stop=True)
        if keys.success in struck or keys.failure in struck:
            return Word(success=keys.success in struck)
        if keys.hold not in self._pressed:
            return NOTHING
        values = np.array([self._values.get(axis, 0.0) for axis in keys.axes[: self.coordinates]])
        action = np.zeros(self.coordinates)
        action[: len(values)] = np.where(np.abs(values) > keys.dead, values, 0.0)
        return Word(action=action)

    def ready(self, what: str) -> None:
        sys.stderr.write(f"{what}, then press the button for success\n")
        while self.keys.success not in self._listen():
            select.select([self._file], [], [], 1.0)

    def close(self) -> None:
        os.close(self._file)

    def _listen(self) -> set[int]:
        """The buttons that went down since the last time."""
        struck: set[int] = set()
        while True:
            try:
                data = os.read(self._file, self.EVENT.size)
            except BlockingIOError:
                return struck
            if len(data) < self.EVENT.size:
                return struck
            _, value, kind, number = self.EVENT.unpack(data)
            if kind & ~self.INITIAL == self.AXIS:
                self._values[number] = float(np.clip(value / 32767, -1, 1))
            elif kind & ~self.INITIAL == self.BUTTON:
                if value:
                    self._pressed.add(number)
                    struck |= set() if kind & self.INITIAL else {number}
                else:
                    self._pressed.discard(number)
