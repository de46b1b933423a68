"""Robots with all that can go wrong with them, on a clock on which things happen by themselves.

`Weather` is a virtual clock: what is due happens at its instant, in the middle of whatever waits for longer than that.
A `Stand` is the twin, or one of the two families of servos behind the vendor's SDK, with the kinds of faults of its
emulator, the truth about its joints, and a tap on its wire.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

import numpy as np

from burnish.real_robot.adapter import Adapter, Command, Fault, Phase, RobotState
from burnish.real_robot.clock import VirtualClock, ns
from burnish.real_robot.drivers.calibration import QUANTUM_RAD
from burnish.real_robot.drivers.twin import Twin, TwinConfig
from burnish.real_robot.emulators.faults import NONE
from burnish.real_robot.emulators.line import GoalWrite
from bus_lab import CALIBRATION, IDS, KINDS, TRUE_FOR_NS, Babbling, Echoing, Rig
from robot_lab import ARM, LIMITS

JOINTS = 5  # of the servos; the sixth is the gripper


class Weather(VirtualClock):
    """``at`` an instant something happens, in the middle of whatever waits for longer than that."""

    def __init__(self) -> None:
        super().__init__()
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, t_ns: int, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (t_ns, next(self._order), call))

    def sleep_until_ns(self, deadline_ns: int) -> None:
        while self._due and self._due[0][0] <= deadline_ns:
            due_ns, _, call = heapq.heappop(self._due)
            super().sleep_until_ns(due_ns)
            call()
        super().sleep_until_ns(deadline_ns)

    def pause(self, seconds: float) -> None:
        """The program gets no processor for so long."""
        super().sleep_until_ns(self.now_ns() + ns(seconds))


class Stand(Protocol):
    adapter: Adapter
    rate_hz: float
    safety: dict[str, Any]
    start_rad: float  # so far from the arm may its set-points be when it is activated
    rest_rad_s: float  # slower than that is at rest
    kinds: dict[str, Callable[[np.random.Generator], None]]  # of faults
    written: Callable[[int, np.ndarray], None]

    def truth(self) -> np.ndarray: ...
    def speed(self) -> np.ndarray: ...
    def true(self, state: RobotState, began_ns: int) -> bool: ...
    def passes(self) -> None:
        """What ends by itself."""
        ...

    def mend(self) -> None:
        """What needs a person."""
        ...


class ServoStand:
    """Servos on an emulated bus, at the usual rate, through the vendor's SDK."""

    rate_hz, start_rad, rest_rad_s = 50.0, QUANTUM_RAD, 1e-6

    def __init__(self, family: str, seed: int, clock: Weather) -> None:
        self.rig = Rig(family, seed, wire=type("Wire", (Babbling, Echoing), {}), clock=clock)
        self.adapter, self.clock = self.rig.arm, clock
        self.safety = {"no_device_watchdog": self.adapter.spec.device_watchdog_s is None}
        self.written: Callable[[int, np.ndarray], None] = lambda t_ns, q: None
        self.rig.chain.log, self.rig.chain.taken = Told(self._goal), Told(lambda write: None)
        self._gone: list[Any] = []
        self._frozen_ns, self._thawed_ns, self.believed_s = 0, 0, 0.0
        self.kinds = {name: self._kind(name) for name in KINDS if name != "nothing"}
        self.kinds["frozen"] = self._freeze

    def truth(self) -> np.ndarray:
        self.rig.plant.advance(self.clock.now_ns())
        return CALIBRATION.radians(np.rint(self.rig.plant.motion()[0][:JOINTS] / QUANTUM_RAD))

    def speed(self) -> np.ndarray:
        self.rig.plant.advance(self.clock.now_ns())
        return self.rig.plant.motion()[1]

    def true(self, state: RobotState, began_ns: int) -> bool:
        """Every position was one that its servo had, since a little before it was asked for."""
        said = CALIBRATION.ticks(state.q)
        told = np.zeros(JOINTS, bool)
        for t_ns, ticks in reversed(self.rig.plant.seen):
            if t_ns < began_ns - TRUE_FOR_NS:
                break
            told |= np.abs(ticks[:JOINTS] - said) < 0.5
            if told.all():
                return True
        if self.rig.family == "feetech" and began_ns < self._thawed_ns:
            # Without a counter, only that a servo stays away from its goal tells: measured, not judged.
            self.believed_s = max(self.believed_s, (began_ns - self._frozen_ns) * 1e-9)
            return True
        return False

    def passes(self) -> None:
        self.rig.faults(NONE, NONE)
        self._thawed_ns = min(self._thawed_ns, self.clock.now_ns())
        if self.adapter._port is not None:
            wire: Any = self.adapter._port._wire
            wire.babbles = wire.echoes = False

    def mend(self) -> None:
        self.passes()
        rig = self.rig
        rig.chain.servos += self._gone
        self._gone.clear()
        if self.adapter.phase is Phase.FAULT:
            for number in IDS:
                rig.chain.restart(number, self.clock.now_ns())  # power off and on
        for i in range(len(IDS)):
            low, high = sorted(CALIBRATION.ranges[i])
            ticks = rig.plant.motion()[0][i] / QUANTUM_RAD
            if not low <= ticks <= high:
                rig.plant.jump(i, ((low + high) / 2 - ticks) * QUANTUM_RAD)  # by hand

    def _goal(self, write: GoalWrite) -> None:
        self.written(write.t_ns, CALIBRATION.radians(np.array(write.ticks[:JOINTS], np.float64)))

    def _kind(self, name: str) -> Callable[[np.random.Generator], None]:
        apply = KINDS[name][0]

        def strike(rng: np.random.Generator) -> None:
            if name == "servo_gone":
                self._gone += self.rig.chain.servos[-1:]
            if name not in ("servo_gone", "position_jumps") or not self._gone[1:]:
                apply(self.rig)

        return strike

    def _freeze(self, rng: np.random.Generator) -> None:
        self._frozen_ns, self._thawed_ns = self.clock.now_ns(), 1 << 62
        self.rig.faults(replies=replace(NONE, frozen=True))


class Told(list[GoalWrite]):
    """In the place of an emulator's log: tells, and keeps nothing."""

    def __init__(self, tell: Callable[[GoalWrite], None]) -> None:
        super().__init__()
        self._tell = tell

    def append(self, write: GoalWrite) -> None:
        self._tell(write)


class WatchedTwin(Twin):
    """A twin that can be unplugged, pressed and ill, and remembers what was true when."""

    def __init__(self, config: TwinConfig, clock: Weather) -> None:
        super().__init__(config, clock)
        self.unplugged = self.pressed = self.ill = False
        self.seen: deque[tuple[int, np.ndarray, float]] = deque(maxlen=1000)
        self.written: Callable[[int, np.ndarray], None] = lambda t_ns, q: None

    def _newest(self, timeout_s: float) -> RobotState:
        if self.unplugged:
            raise OSError(5, "the cable is gone")
        state = super()._newest(timeout_s)
        state.estop = self.pressed
        state.fault = Fault("overload", "joint 1 is too hot", state.t_ns) if self.ill else None
        return state

    def _write(self, command: Command) -> Command:
        if self.unplugged:
            raise OSError(5, "the cable is gone")
        sent = super()._write(command)
        self.written(self.clock.now_ns(), self._commands.items[-1][1])
        return sent

    def _measure(self) -> None:
        self.seen.append((self._physics_ns, self.truth(), self.config.noise_rad))
        super()._measure()


class TwinStand:
    rate_hz, start_rad, rest_rad_s = 100.0, 0.1, 0.02

    def __init__(self, seed: int, clock: Weather) -> None:
        # Measured as often as it is asked, which is what costs; nothing is lost by it.
        self.usual = TwinConfig(ARM, seed=seed, state_hz=100.0, **LIMITS)
        self.twin = WatchedTwin(self.usual, clock)
        self.adapter: Adapter = self.twin
        self.clock = clock
        self.safety: dict[str, Any] = {}
        self.damping = self.twin.model.dof_damping.copy()
        settings: dict[str, dict[str, Any]] = {
            "mute": {"drop": 0.9999},
            "half lost": {"drop": 0.5},
            "states late": {"state_latency_s": 0.05},
            "states very late": {"state_latency_s": 0.15},
            "commands late": {"command_latency_s": 0.05},
            "jitter": {"jitter_s": 0.02},
            "noise": {"noise_rad": 0.01},
            "loud": {"noise_rad": 0.01, "drop": 0.3, "jitter_s": 0.01, "state_latency_s": 0.02},
        }
        self.kinds = {name: self._set(changes) for name, changes in settings.items()}
        self.kinds |= {
            "jammed": lambda rng: self.twin.model.dof_damping.fill(1e4),
            "pushed": lambda rng: self.twin.data.qfrc_applied.__setitem__(slice(None), rng.uniform(-60, 60, 2)),
            "unplugged": lambda rng: setattr(self.twin, "unplugged", True),
            "emergency stop": lambda rng: setattr(self.twin, "pressed", True),
            "overload": lambda rng: setattr(self.twin, "ill", True),
        }

    @property
    def written(self) -> Callable[[int, np.ndarray], None]:
        return self.twin.written

    @written.setter
    def written(self, tell: Callable[[int, np.ndarray], None]) -> None:
        self.twin.written = tell

    def truth(self) -> np.ndarray:
        return self.twin.truth()

    def speed(self) -> np.ndarray:
        self.twin._pass()
        return self.twin.data.qvel

    def true(self, state: RobotState, began_ns: int) -> bool:
        assert state.t_device_s is not None
        measured_ns = ns(state.t_device_s)
        for t_ns, q, noise_rad in reversed(self.twin.seen):
            if abs(t_ns - measured_ns) < 1000:
                return bool((np.abs(state.q - q) <= 7 * noise_rad + 1e-12).all())
        return False

    def passes(self) -> None:
        self.twin.config = self.usual
        self.twin.data.qfrc_applied[:] = 0
        self.twin.model.dof_damping[:] = self.damping
        self.twin.unplugged = self.twin.pressed = False

    def mend(self) -> None:
        self.passes()
        self.twin.ill = False

    def _set(self, changes: dict[str, Any]) -> Callable[[np.random.Generator], None]:
        changed = replace(self.usual, **changes)
        return lambda rng: setattr(self.twin, "config", changed)


STANDS: dict[str, Callable[[int, Weather], Any]] = {
    "twin": TwinStand,
    "dynamixel": lambda seed, clock: ServoStand("dynamixel", seed, clock),
    "feetech": lambda seed, clock: ServoStand("feetech", seed, clock),
}
