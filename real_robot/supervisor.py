"""The person beside the robot: who says that it has succeeded, takes it over, and stops it.

`RobotEnv` asks once per control tick, and again where the policy was late. A script stands in for a person where
none is needed (`Scripted`); `Keyboard` listens to a terminal, `Gamepad` to a device of Linux's joystick interface. None
of them is an emergency stop.
"""

from __future__ import annotations

import os
import select
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

from .adapter import Vector
from .errors import Refused


@dataclass(frozen=True)
class Word:
    """The person's input in a tick; nothing, most of the time."""

    success: bool | None = None  # the episode has succeeded, or has failed; it ends here
    action: Vector | None = None  # to be played instead of the policy's, in the world's units
    stop: bool = False  # bring the robot to rest; the episode ends here

    @property
    def ends(self) -> bool:
        return self.stop or self.success is not None

    def renewed(self, later: Word) -> Word:
        """The word that holds where a second comes before the first was followed: no verdict is lost, no old action is
        played, and who has the robot in this tick was settled by the first."""
        success = self.success if later.success is None else later.success
        return Word(success, None if self.action is None else later.action, self.stop or later.stop)


NOTHING = Word()


class Supervisor(Protocol):
    """One that has ``moves = True`` says in its actions how far to move, in shares of a step, whatever the numbers of
    the world mean; `RobotEnv` makes the world's action of it."""

    def poll(self, obs: Mapping[str, Any]) -> Word:
        """Never waits."""
        ...

    def ready(self, what: str) -> None:
        """Ask for something that only a person can do (put the peg back), and wait until it is."""
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


class Keyboard:
    """Keys of a terminal: s success, f failure, space stop, t take over and give back, and pairs of keys that move one
    coordinate of the action each, of the first seven. The terminal is put back as it was by ``close``."""

    moves = True
    PAIRS = ("ad", "ws", "qe", "zx", "ol", "km", "[]")  # of the first coordinates: minus, plus

    def __init__(self, coordinates: int, stream: TextIO | None = None, tell: TextIO | None = None) -> None:
        self._stream, self._tell = stream or sys.stdin, tell or sys.stderr
        self._moves = {
            key: (i, sign) for i, pair in enumerate(self.PAIRS) for key, sign in zip(pair, (-1, 1), strict=True)
        }
        self._coordinates, self._holds, self._explained = coordinates, False, False
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
        keys = self._keys()
        if " " in keys:  # whatever else was pressed with it
            return Word(stop=True)
        for key in keys:
            if key in "\n\r":
                continue
            if not self._holds and key in "sf":
                return Word(success=key == "s")
            if key == "t":
                self._holds = not self._holds
            elif key in self._moves and self._moves[key][0] < self._coordinates:
                at, sign = self._moves[key]
                action[at] += sign
        return Word(action=np.clip(action, -1, 1)) if self._holds else NOTHING

    @property
    def manual(self) -> str:
        pairs = ", ".join(" ".join(pair) for pair in self.PAIRS[: self._coordinates])
        most = len(self.PAIRS)
        few = f" the first {most} of {self._coordinates} numbers" if self._coordinates > most else ""
        return f"keys: s success, f failure, space stop, t take over and give back; then {pairs} move{few}"

    def ready(self, what: str) -> None:
        self._holds = False
        self._tell.write(f"{'' if self._explained else self.manual + chr(10)}{what}, then press Enter\n")
        self._explained = True
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

    moves = True
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
