"""The controller of a Universal Robots arm: modes, safety, registers, one program, and the joints, in steps of 2 ms.

No input and no output here, and no time but its own, so that a test can step it by hand. `universal` puts it on the
network. The program that a client uploads is never read: any program is taken to speak the handshake over registers
which ur-rtde has ("input" and "output" as the controller sees them):

    input int 0   a command, 0: none          output int 0   1: ready, 2: finished (until input int 0 is 0 again)

Commands that stream (`STREAMING`) leave the controller ready. The arguments of a command are in the other registers.

**Departures** from a controller: set-points are followed by a first-order lag (the look-ahead of ``servoj``) within
limits of velocity and acceleration, then by a pure delay; there are no dynamics, no collisions, no Cartesian motion; a
set-point that is not a number is answered by a protective stop (what a controller does is not documented).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

STEP_S = 0.002
Vector = NDArray[np.float64]


class Do(IntEnum):
    """Commands of ur-rtde's program, as far as they are emulated; any other is finished at once, without effect."""

    NOTHING = 0
    MOVEJ = 1
    SPEEDJ = 9
    SERVOJ = 11
    SPEED_STOP = 15
    SERVO_STOP = 16
    PROTECTIVE_STOP = 31
    STOPJ = 34
    SET_WATCHDOG = 35
    JOINTS_WITHIN_LIMITS = 37
    END = 255


STREAMING = frozenset({6, Do.SPEEDJ, 10, Do.SERVOJ, 24, 25, 26, 27, 38, 58, *range(66, 72)})
READY, FINISHED = 1, 2


class RobotMode(IntEnum):
    """The modes of the emulated robot, by the numbers of RTDE."""

    POWER_OFF = 3
    IDLE = 5
    RUNNING = 7


class SafetyMode(IntEnum):
    """The safety modes of the emulated robot, by the numbers of RTDE."""

    NORMAL = 1
    PROTECTIVE_STOP = 3
    ROBOT_EMERGENCY_STOP = 7


SAFETY_BITS = {SafetyMode.NORMAL: 1, SafetyMode.PROTECTIVE_STOP: 1 << 2 | 1 << 10}
SAFETY_BITS[SafetyMode.ROBOT_EMERGENCY_STOP] = 1 << 6 | 1 << 7 | 1 << 10


@dataclass(frozen=True)
class ArmSettings:
    """A UR5e with PolyScope 5."""

    home: tuple[float, ...] = (0.0, -1.57, 1.57, -1.57, -1.57, 0.0)  # rad
    velocity: float = math.pi  # rad/s, of each joint
    acceleration: float = 40.0  # rad/s^2, also when a program is stopped
    delay_steps: int = 2  # from target to joint
    lookahead_s: float | None = None  # None: as the client asks, at least 0.03 s
    unlock_after_s: float = 5.0  # a protective stop is not unlocked sooner
    remote_control: bool = True
    version: tuple[int, int, int, int] = (5, 13, 0, 113898)

    def __post_init__(self) -> None:
        if len(self.home) != 6 or min(self.velocity, self.acceleration) <= 0 or self.delay_steps < 0:
            raise ValueError(f"six joints with positive limits are needed, got {self}")


class Controller:
    """The emulated controller, advanced by steps of 2 ms."""

    def __init__(self, settings: ArmSettings | None = None, note: Callable[[str], None] = lambda what: None) -> None:
        self.settings = settings or ArmSettings()
        self.note = note  # is told of events, in words
        self.steps = 0
        self.inputs: dict[str, Any] = {}
        self.output_int = [0] * 48
        self.output_double = [0.0] * 48
        self.robot_mode = RobotMode.RUNNING
        self.safety = SafetyMode.NORMAL
        self.running = False  # a program
        self.watchdog_s: float | None = None
        self.stuck = False  # fault: the program never becomes ready
        self.deaf = False  # fault: set-points arrive and are not followed
        self._silent_steps = 0
        self._stopped_at = 0
        self._executing = False
        self._motion: Callable[[], bool] = self._rest  # one step of it; true once it is over
        home = np.array(self.settings.home)
        self.target_q, self.target_qd = home.copy(), np.zeros(6)
        self.q, self.qd = home.copy(), np.zeros(6)
        self._on_the_way: deque[Vector] = deque([home.copy()] * self.settings.delay_steps)

    # Input from outside.

    def receive(self, values: dict[str, Any]) -> None:
        self.inputs.update(values)
        if "input_int_register_0" in values:
            self._silent_steps = 0

    def start_program(self) -> None:
        if self.robot_mode is RobotMode.RUNNING and self.safety is SafetyMode.NORMAL:
            self.running, self.watchdog_s, self._executing = True, None, False
            self._motion = self._rest
            self.output_int[0] = READY
            self.note("program started")

    def stop_program(self, why: str) -> None:
        if self.running:
            self.running, self.watchdog_s = False, None
            self.output_int[0] = 0
            self._motion = self._braking(self.settings.acceleration)
            self.note(f"program stopped: {why}")

    def protective_stop(self, why: str) -> None:
        self.safety, self._stopped_at = SafetyMode.PROTECTIVE_STOP, self.steps
        self.stop_program(f"protective stop, {why}")

    def emergency_stop(self) -> None:
        self.safety = SafetyMode.ROBOT_EMERGENCY_STOP
        self.power_off("emergency stop")

    def release_emergency_stop(self) -> None:
        if self.safety is SafetyMode.ROBOT_EMERGENCY_STOP:
            self.safety = SafetyMode.NORMAL

    def power_off(self, why: str = "power off") -> None:
        self.stop_program(why)
        self.robot_mode = RobotMode.POWER_OFF

    def ask(self, line: str) -> str:
        """One command to the dashboard, and its answer."""
        words = line.strip().lower()
        if words == "stop":
            self.stop_program("dashboard")
            return "Stopped"
        if words == "power on" and self.safety is SafetyMode.NORMAL:
            self.robot_mode = max(self.robot_mode, RobotMode.IDLE)
            return "Powering on"
        if words == "power off":
            self.power_off()
            return "Powering off"
        if words == "brake release" and self.safety is SafetyMode.NORMAL:
            self.robot_mode = RobotMode.RUNNING
            return "Brake releasing"
        if words == "unlock protective stop":
            return self._unlock()
        major, minor, bugfix, build = self.settings.version
        answers = {
            "robotmode": f"Robotmode: {self.robot_mode.name}",
            "safetymode": f"Safetymode: {self.safety.name}",
            "safetystatus": f"Safetystatus: {self.safety.name}",
            "running": f"Program running: {str(self.running).lower()}",
            "programstate": f"{'PLAYING' if self.running else 'STOPPED'} <unnamed>",
            "is in remote control": str(self.settings.remote_control).lower(),
            "polyscopeversion": f"URSoftware {major}.{minor}.{bugfix}.{build} (Oct 25 2022)",
            "version": f"{major}.{minor}.{bugfix}.{build}",
            "get serial number": "20225300001",
            "get robot model": "UR5",
            "close safety popup": "closing safety popup",
            "close popup": "closing popup",
            "quit": "Disconnected",
        }
        return answers.get(words, f'could not understand: "{line.strip()}"')

    def _unlock(self) -> str:
        if self.safety is not SafetyMode.PROTECTIVE_STOP:
            return "Protective stop releasing"
        if (self.steps - self._stopped_at) * STEP_S < self.settings.unlock_after_s:
            return "Cannot unlock protective stop until 5s after occurrence. Always inspect cause of protective stop"
        self.safety = SafetyMode.NORMAL
        return "Protective stop releasing"

    # One step of time.

    def step(self) -> None:
        self.steps += 1
        self._silent_steps += 1
        if self.running:
            if self.watchdog_s is not None and self._silent_steps * STEP_S > self.watchdog_s:
                self.stop_program("watchdog")
            else:
                self._obey()
        before = self.q
        if self._motion():
            self._motion = self._rest
            if self._executing and self.running:
                self.output_int[0] = FINISHED
        self._on_the_way.append(self.target_q.copy())
        self.q = self._on_the_way.popleft()
        self.qd = (self.q - before) / STEP_S

    def _obey(self) -> None:
        command = self.inputs.get("input_int_register_0", 0)
        if self.stuck:
            self.output_int[0] = FINISHED
        elif command in STREAMING:
            self._stream(command)
            self._executing, self.output_int[0] = False, READY
        elif command == Do.NOTHING:
            self._executing, self.output_int[0] = False, READY
        elif not self._executing:
            self._executing, self.output_int[0] = True, 0
            self._execute(command)

    def _numbers(self, first: int, count: int) -> Vector:
        names = [f"input_double_register_{i}" for i in range(first, first + count)]
        return np.array([self.inputs.get(name, 0.0) for name in names])

    def _stream(self, command: int) -> None:
        asked = self._numbers(0, 6)
        if not np.isfinite(asked).all():
            self.protective_stop("a set-point that is not a number")
        elif command == Do.SERVOJ and not self.deaf:
            lookahead = self.settings.lookahead_s or max(0.03, float(self._numbers(9, 1)[0]))
            self._motion = self._towards(asked, lookahead)
        elif command == Do.SPEEDJ:
            self._motion = self._at_speed(asked, float(self._numbers(6, 1)[0]))

    def _execute(self, command: int) -> None:
        number = float(self._numbers(0, 1)[0])
        if command == Do.MOVEJ:
            self._motion = self._line(self._numbers(0, 6), *map(float, self._numbers(6, 2)))
        elif command in (Do.SERVO_STOP, Do.SPEED_STOP):
            self._motion = self._braking(number or 10.0)
        elif command == Do.STOPJ:
            self._motion = self._braking(number)
        elif command == Do.PROTECTIVE_STOP:
            self.protective_stop("asked for")
        elif command == Do.END:
            self.stop_program("asked for")
        else:
            if command == Do.SET_WATCHDOG:
                self.watchdog_s = 1 / number if number > 0 else None
            elif command == Do.JOINTS_WITHIN_LIMITS:
                self.output_int[1] = int(bool((np.abs(self._numbers(0, 6)) <= 2 * math.pi).all()))
            self.output_int[0] = FINISHED

    # Motions.

    def _rest(self) -> bool:
        self.target_qd = np.zeros(6)
        return False

    def _go(self, wish: Vector, acceleration: float) -> None:
        change = acceleration * STEP_S
        qd = np.clip(wish, self.target_qd - change, self.target_qd + change)
        self.target_qd = np.clip(qd, -self.settings.velocity, self.settings.velocity)
        self.target_q = self.target_q + self.target_qd * STEP_S

    def _towards(self, goal: Vector, lag_s: float) -> Callable[[], bool]:
        def step() -> bool:
            self._go((goal - self.target_q) / lag_s, self.settings.acceleration)
            return False

        return step

    def _at_speed(self, qd: Vector, acceleration: float) -> Callable[[], bool]:
        def step() -> bool:
            self._go(qd, acceleration)
            return False

        return step

    def _braking(self, acceleration: float) -> Callable[[], bool]:
        """All joints along one line, as ``stopj`` does: the fastest brakes with ``acceleration``."""

        def step() -> bool:
            fastest = float(np.abs(self.target_qd).max())
            share = max(0.0, 1 - acceleration * STEP_S / fastest) if fastest > 0 else 0.0
            self.target_qd = self.target_qd * share
            self.target_q = self.target_q + self.target_qd * STEP_S
            return share == 0

        return step

    def _line(self, goal: Vector, velocity: float, acceleration: float) -> Callable[[], bool]:
        speed = 0.0

        def step() -> bool:
            nonlocal speed
            gap = goal - self.target_q
            far = float(np.abs(gap).max())
            fastest = min(velocity, self.settings.velocity, math.sqrt(2 * acceleration * far))
            speed = min(fastest, speed + acceleration * STEP_S)
            over = far <= max(speed * STEP_S, 1e-6)
            move = gap if over else gap * (speed * STEP_S / far)
            self.target_q, self.target_qd = self.target_q + move, np.zeros(6) if over else move / STEP_S
            return over

        return step

    # Output that can be read.

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: self._value(name) for name in names}

    def _value(self, name: str) -> Any:
        if name.startswith("output_int_register_"):
            return self.output_int[int(name.rpartition("_")[2])]
        if name.startswith("output_double_register_"):
            return self.output_double[int(name.rpartition("_")[2])]
        on = self.robot_mode is RobotMode.RUNNING
        known: dict[str, Callable[[], Any]] = {
            "timestamp": lambda: self.steps * STEP_S,
            "actual_q": self.q.tolist,
            "actual_qd": self.qd.tolist,
            "target_q": self.target_q.tolist,
            "target_qd": self.target_qd.tolist,
            "robot_mode": lambda: int(self.robot_mode),
            "safety_mode": lambda: int(self.safety),
            "safety_status": lambda: int(self.safety),
            "robot_status_bits": lambda: int(self.robot_mode > RobotMode.POWER_OFF) | self.running << 1,
            "safety_status_bits": lambda: SAFETY_BITS[self.safety],
            "runtime_state": lambda: 2 if self.running else 1,
            "joint_mode": lambda: [253 if on else 239] * 6,
            "speed_scaling": lambda: 1.0,
            "target_speed_fraction": lambda: 1.0,
            "actual_main_voltage": lambda: 48.0,
        }
        found = known.get(name)
        return found() if found else None
