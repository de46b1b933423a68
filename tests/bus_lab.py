"""Two families of servos on emulated buses: rigs, a judge of every state that is accepted, and what can go wrong.

The judge knows when a servo's position was looked at and what it was (`Watched`), so it can say of each accepted state
whether it was true at a moment shortly before. Rigs live on a virtual clock, so a seed replays a failure.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from servo_plants import ProfilePlant

from burnish.real_robot.adapter import Command, Mode, Phase, RobotState
from burnish.real_robot.clock import Clock, VirtualClock, ns
from burnish.real_robot.drivers.bus import ArmConfig, ServoArm
from burnish.real_robot.drivers.calibration import QUANTUM_RAD, Calibration, GripperCalibration, JointCalibration
from burnish.real_robot.drivers.dynamixel import DynamixelArm
from burnish.real_robot.drivers.feetech import FeetechArm
from burnish.real_robot.emulators.faults import Faults
from burnish.real_robot.emulators.feetech import FeetechChain
from burnish.real_robot.emulators.line import GoalWrite, Loopback
from burnish.real_robot.errors import DeviceFault, RobotError, StaleState
from burnish.real_robot.safety.guard import JointGuard, Limits
from dynamixel_emulator import DynamixelChain
from hostile import mixed
from soak import Progress
from soak import often as often

START = [2100, 2000, 1900, 2300, 2048, 1500]
IDS = [1, 2, 3, 4, 5, 6]
CALIBRATION = Calibration(
    tuple(JointCalibration(f"joint_{i}", i, 600 + 10 * i, 3500, direction=1 if i % 2 else -1) for i in IDS[:5]),
    GripperCalibration(6, 1500, 2500),
)
RATE_HZ = 100.0
PERIOD_NS = ns(1 / RATE_HZ)
# So old may the truth of a state be: an answer takes a few milliseconds, and the counters of Dynamixel servos let one
# pass that is FRESH_MS and one transaction late.
TRUE_FOR_NS = ns(0.015)

Arms = {"dynamixel": (DynamixelArm, DynamixelChain), "feetech": (FeetechArm, FeetechChain)}


class Watched(ProfilePlant):
    """Remembers what there was to see whenever a servo was asked."""

    def __init__(self, start_ticks: Sequence[int]) -> None:
        super().__init__(start_ticks)
        self.seen: deque[tuple[int, np.ndarray]] = deque(maxlen=400)

    def motion(self) -> tuple[Any, Any, Any]:
        q, v, load = super().motion()
        self.seen.append((self._now_ns, np.rint(q / QUANTUM_RAD)))
        return q, v, load

    def jump(self, index: int, by_rad: float) -> None:
        self._q[index] += by_rad
        self._goal[index] = self._q[index]


@dataclass
class Rig:
    """One arm on a virtual clock, and the device behind it."""

    family: str
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    overrides: dict[int, dict[int, int]] = field(default_factory=dict)
    wire: Callable[[Any, Clock], Any] = Loopback
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        arm, chain = Arms[self.family]
        self.plant = Watched(START)
        self.chain = chain(IDS, self.plant, seed=self.seed, overrides=self.overrides)
        config = ArmConfig(**{"port": "emulated", "calibration": CALIBRATION, **self.config})
        self.arm: ServoArm = arm(config, self.clock, lambda: self.wire(self.chain, self.clock))
        self.seq = 0

    def faults(self, replies: Faults | None = None, requests: Faults | None = None) -> None:
        line = self.chain.line
        line.replies.faults = replies or line.replies.faults
        line.requests.faults = requests or line.requests.faults

    def started(self) -> RobotState:
        self.arm.configure()
        return self.arm.activate(Mode.JOINT_POSITION)

    def write(self, q: np.ndarray, gripper: float | None = None) -> Command:
        self.seq += 1
        now_ns = self.clock.now_ns()
        return self.arm.write(Command(Mode.JOINT_POSITION, self.seq, now_ns, now_ns + ns(0.1), q, gripper=gripper))

    def wait(self, seconds: float) -> None:
        self.clock.advance_ns(ns(seconds))

    def is_true(self, state: RobotState) -> bool:
        """Every position was one that its servo had, shortly before."""
        said = self.arm.calibration.ticks(state.q)
        seen = reversed(self.plant.seen)
        recent = [ticks for _, ticks in takewhile(lambda row: state.t_ns - row[0] <= TRUE_FOR_NS, seen)]
        return bool(recent) and all(any(abs(ticks[k] - said[k]) < 0.5 for ticks in recent) for k in range(len(said)))


@dataclass
class Tally:
    states: int = 0
    stale: int = 0
    faults: int = 0
    refused: int = 0
    wrong: int = 0
    unhandled: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.states / max(1, self.states + self.stale + self.faults + self.refused)


def drive(rig: Rig, ticks: int, tally: Tally | None = None) -> Tally:
    """A slow wave of all joints, one write and one read a tick, whatever happens."""
    tally = tally or Tally()
    middle = rig.arm.calibration.radians(np.array(START[:5]))
    for _ in Progress(f"ticks of {rig.family}", ticks).along(range(ticks)):
        begun_ns = rig.clock.now_ns()
        wave = 0.4 * np.sin(begun_ns * 1e-9 * 3 + np.arange(5))
        for call in (lambda wave=wave: rig.write(middle + wave), lambda: rig.arm.read(0.009)):
            try:
                state = call()
            except StaleState:
                tally.stale += 1
            except DeviceFault:
                tally.faults += 1
            except RobotError:
                tally.refused += 1
            except Exception as error:
                tally.unhandled.append(repr(error))
            else:
                if isinstance(state, RobotState):
                    tally.states += 1
                    tally.wrong += not rig.is_true(state)
        rig.clock.sleep_until_ns(begun_ns + PERIOD_NS)
    return tally


def patiently(port: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """What an SDK says to that; on a machine full of other work an answer may take longer than it waits."""
    answer = None
    for _ in range(20):
        answer = call(port, *arguments)
        if answer[-2] == 0:
            break
        time.sleep(0.05)
        port.ser.reset_input_buffer()
    return answer


# ---- what can go wrong ----


class Babbling(Loopback):
    """A line that never stops talking, once ``babbles`` is set."""

    babbles = False

    def read(self, size: int) -> bytes:
        if not self.babbles:
            return super().read(size)
        self._clock.sleep_until_ns(self._clock.now_ns() + 10_000 * min(size, 64))
        return random.Random(self._clock.now_ns()).randbytes(min(size, 64))

    def wait(self, deadline_ns: int) -> None:
        if self.babbles:
            self._clock.sleep_until_ns(min(deadline_ns, self._clock.now_ns() + 100_000))
        else:
            super().wait(deadline_ns)


class Echoing(Loopback):
    """An adapter that hears itself, as cheap half-duplex ones do."""

    echoes = False

    def write(self, data: bytes) -> int:
        if self.echoes:
            self._arrived += data
        return super().write(data)


def _reply(**kind: Any) -> Callable[[Rig], None]:
    return lambda rig: rig.faults(replies=Faults(**kind))


def _request(**kind: Any) -> Callable[[Rig], None]:
    return lambda rig: rig.faults(requests=Faults(**kind))


def _both(**kind: Any) -> Callable[[Rig], None]:
    return lambda rig: rig.faults(Faults(**kind), Faults(**kind))


def _reboot(rig: Rig) -> None:
    rig.chain.restart(3, rig.clock.now_ns())


def _shut_down(rig: Rig) -> None:
    (rig.chain.shut_down if isinstance(rig.chain, DynamixelChain) else rig.chain.overload)(3)


def _gone(rig: Rig) -> None:
    del rig.chain.servos[-1]


def _set_class(kind: type, name: str) -> Callable[[Rig], None]:
    def apply(rig: Rig) -> None:
        setattr(rig.arm._port._wire, name, True)  # type: ignore[union-attr]

    apply.wire = kind  # type: ignore[attr-defined]
    return apply


# kind -> (what happens, the least and the greatest share of calls that answer with a state while it lasts). A driver
# that refused everything would be safe and useless, so there is a least; where nothing can be known, 0 is the most.
KINDS: dict[str, tuple[Callable[[Rig], None], float, float]] = {
    "nothing": (lambda rig: None, 1, 1),
    "reply_drop": (_reply(drop=0.02), 0.6, 1),
    "reply_drop_half": (_reply(drop=0.5), 0, 0.3),
    "reply_bit": (_reply(corrupt=0.02), 0.6, 1),
    "reply_bit_half": (_reply(corrupt=0.5), 0, 0.3),
    "reply_burst": (_reply(burst=0.02), 0.6, 1),
    "reply_burst_half": (_reply(burst=0.5), 0, 0.3),
    "reply_truncate": (_reply(truncate=0.05), 0.5, 1),
    "reply_garbage": (_reply(garbage=0.05), 0.5, 1),
    "reply_garbage_often": (_reply(garbage=0.3), 0, 1),
    "reply_duplicate": (_reply(duplicate=0.05), 0.4, 1),
    "reply_late": (_reply(delay=0.05, delay_s=0.02), 0.3, 1),
    "reply_a_little_late": (_reply(delay=0.2, delay_s=0.003), 0.3, 1),
    "reply_very_late": (_reply(delay=0.3, delay_s=0.2), 0, 0.6),
    "all_late": (_reply(delay=1.0, delay_s=0.012), 0, 0),
    "reply_everything": (
        _reply(drop=0.05, corrupt=0.05, burst=0.05, truncate=0.05, garbage=0.05, delay=0.05, duplicate=0.05), 0, 1,
    ),
    "mute": (_reply(mute=True), 0, 0),
    "one_mute": (_reply(mute=True, only=frozenset({3})), 0, 0),
    "one_noisy": (_reply(burst=0.3, only=frozenset({4})), 0.3, 1),
    "unplugged": (_reply(unplugged=True), 0, 0),
    "request_drop": (_request(drop=0.05), 0.6, 1),
    "request_bit": (_request(corrupt=0.05), 0.6, 1),
    "request_burst": (_request(burst=0.05), 0.3, 1),
    "request_truncate": (_request(truncate=0.05), 0.4, 1),
    "request_garbage": (_request(garbage=0.05), 0.4, 1),
    "request_duplicate": (_request(duplicate=0.05), 0.4, 1),
    "both_two_percent": (_both(drop=0.02, corrupt=0.02), 0.5, 1),
    "both_ten_percent": (_both(drop=0.1, corrupt=0.1), 0, 1),
    "servo_reboots": (_reboot, 0, 0.9),
    "servo_shuts_down": (_shut_down, 0, 0),
    "servo_gone": (_gone, 0, 0),
    "position_jumps": (lambda rig: rig.plant.jump(1, 1.5), 0.3, 0.98),
    "babbling": (_set_class(Babbling, "babbles"), 0, 0),
    "echo": (_set_class(Echoing, "echoes"), 0, 1),
}  # fmt: skip


def bounds(kind: str) -> tuple[float, float]:
    """Of the share of ticks with a state. A jump happens once, and costs a tick at least, of however many."""
    return KINDS[kind][1], 1 - 1 / often(40, 5000) if kind == "position_jumps" else KINDS[kind][2]


def met(family: str, kind: str, ticks: int, seed: int = 0) -> Tally:
    """Some ticks without faults, which must be perfect, and then so many with them."""
    apply, _, _ = KINDS[kind]
    rig = Rig(family, seed, wire=getattr(apply, "wire", Loopback))
    rig.started()
    before = drive(rig, 15)
    assert (before.states, before.stale, before.wrong, before.unhandled) == (15, 0, 0, [])
    apply(rig)
    tally = drive(rig, ticks)
    rig.arm.close()
    assert rig.arm.phase is Phase.CLOSED
    # Without an answer to its writes, a tick has one state at most.
    tally.stale = ticks - tally.states
    tally.faults = tally.refused = 0
    return tally


# ---- limits, from the bytes ----


# Ticks apart, at which speeds are compared.
SPANS = (1, 4, 16)


def hostile_run(rig: Rig, writes: int, guarded: bool = True, hasty: float = 1.0) -> Iterator[list[GoalWrite]]:
    """``writes`` commands from hostile requests; hands over the goals seen on the wire, in parts, each beginning with
    as many of the part before as `outside` looks back; the first, with those of an arm that has been at rest. Controls
    are a guard that allows ``hasty`` times the acceleration, and none."""
    state = rig.started()
    limits = Limits.of(rig.arm.spec, RATE_HZ)
    guard = JointGuard(replace(limits, acceleration=hasty * limits.acceleration))
    guard.reset(state.q)
    rng = np.random.default_rng(rig.seed)
    back, rest_ns = max(SPANS) + 1, rig.clock.now_ns()
    before = [GoalWrite(rest_ns - k * PERIOD_NS, tuple(IDS), tuple(rig.arm._goal or ())) for k in range(back, 0, -1)]
    rig.faults(Faults(drop=0.02, corrupt=0.02), Faults(drop=0.02, corrupt=0.02))
    progress = Progress(f"writes to {rig.family}", writes)
    for count, request in enumerate(progress.along(mixed(rng, limits, (5,), writes)), 1):
        begun_ns = rig.clock.now_ns()
        q = guard(request).q
        if not guarded:  # the negative control: what is asked, as far as it is numbers inside the range
            asked = (
                np.nan_to_num(np.asarray(request, float))
                if isinstance(request, np.ndarray) and request.shape == (5,) and request.dtype == float
                else q
            )
            q = np.clip(asked, limits.lower, limits.upper)
        rig.write(q, gripper=float(rng.random()) if count % 50 == 0 else None)
        try:
            rig.arm.read(0.008)
        except StaleState:
            rig.wait(0)
        rig.clock.sleep_until_ns(begun_ns + PERIOD_NS)
        if count % 10_000 == 0 or count == writes:
            yield (seen := [*before, *rig.chain.log])
            before = seen[-back:]
            rig.chain.log.clear()
            rig.chain.taken.clear()


def outside(rig: Rig, seen: list[GoalWrite]) -> tuple[int, int]:
    """How many goals broke a limit, and the largest step in ticks.

    Accelerations, by the speeds of two steps that lie ``n`` periods apart: the set-points' own, in ticks per period,
    differ by n A h^2 at most. A goal lies less than a tick from its set-point, towards the middle of the range, so the
    four goals of both steps add less than 4. Where they share one (n = 1) that is counted twice, and the goals add less
    than 3: on one side of the middle all errors have one sign (less than 2); a path that crosses once has one goal of
    the other sign (3); one that crosses there and back becomes no more curved by rounding towards the middle. What one
    n cannot tell from rounding, a larger one can.
    """
    limits = rig.arm.spec.column("velocity") / RATE_HZ / QUANTUM_RAD
    change = rig.arm.spec.column("acceleration") / RATE_HZ**2 / QUANTUM_RAD
    low, high = np.array(CALIBRATION.ranges).T
    ticks = np.array([write.ticks for write in seen])
    moved = np.diff(ticks[:, :5], axis=0)
    steps = np.abs(moved)
    broken = ((ticks < low) | (ticks > high)).any(axis=1).sum() + (steps > limits + 1e-9).any(axis=1).sum()
    for n in SPANS:
        broken += (np.abs(moved[n:] - moved[:-n]) >= n * change + (3 if n == 1 else 4)).any(axis=1).sum()
    broken += sum(write.ids != tuple(IDS) for write in seen)
    times_ns = np.diff([write.t_ns for write in seen])
    broken += (times_ns < PERIOD_NS).sum()
    return int(broken), int(steps.max())


# ---- processes that are killed ----


def swing(path: str) -> None:
    """Sends a Dynamixel arm to a goal far away and keeps reading, until somebody ends this process."""
    arm = DynamixelArm(ArmConfig(path, CALIBRATION))
    far, near = [3400, 3400, 3400, 3400, 3400, 2500], [700, 700, 700, 700, 700, 1500]
    next_call = {
        Phase.UNCONFIGURED: arm.configure,
        Phase.FAULT: arm.recover,
        Phase.INACTIVE: lambda: arm.activate(Mode.JOINT_POSITION),
        Phase.ACTIVE: lambda: arm.read(0.01),
    }
    end = time.monotonic() + 30
    while time.monotonic() < end:
        # On a machine full of other work a bus may fall silent for longer than the watchdog allows.
        with suppress(RobotError):
            next_call[arm.phase]()
            if arm.phase is Phase.ACTIVE:
                arm.servos.send(far if time.monotonic() % 2 < 1 else near, arm.clock.now_ns() + ns(0.01))
                time.sleep(0.005)


def start_swing(path: str) -> subprocess.Popen[bytes]:
    here = str(Path(__file__).parent)
    return subprocess.Popen([sys.executable, "-c", f"import bus_lab; bus_lab.swing({path!r})"], cwd=here)


def kill(process: subprocess.Popen[bytes]) -> int:
    """When it was killed."""
    t_ns = time.monotonic_ns()
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    return t_ns
