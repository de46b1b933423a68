"""Checks of what an adapter promises: each part tries a robot and yields what it found, by name.

They run on any `Adapter`, simulated or real; `conformance` makes the report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..policies.core.errors import reason
from .adapter import API_VERSION, CALLS, TRANSITIONS, Adapter, Command, Mode, Phase, RobotState, StopKind, Vector
from .clock import SECOND, ns
from .errors import DeviceFault, IllegalTransition, Refused, RobotError, StaleState
from .safety.guard import JointGuard, Limits

Make = Callable[[], Adapter]
TIMEOUT_S = 0.5  # in which a state must come
STOP_S = 0.5  # in which stop() must return
GENTLE = 0.1  # of the robot's limits


@dataclass(frozen=True)
class Trial:
    """The settings of the checks."""

    make: Make
    amplitude_rad: float
    still_rad: float  # so much is noise
    outside: Make | None = None  # the robot where it is found outside its limits


Found = Iterator[tuple[str, Any, str]]  # name, did it hold, and what was seen


@contextmanager
def ready(make: Make) -> Iterator[Adapter]:
    """Configured, and closed behind what is tried on it."""
    with closing(make()) as robot:
        robot.configure()
        yield robot


@contextmanager
def _active(trial: Trial) -> Iterator[tuple[Adapter, RobotState]]:
    with ready(trial.make) as robot:
        yield robot, robot.activate(Mode.JOINT_POSITION)


class Driver:
    """Commands at the robot's usual rate, through a guard at a tenth of its limits."""

    def __init__(self, robot: Adapter, state: RobotState) -> None:
        self.robot, self.state, self.seq = robot, state, 0
        rate_hz = robot.spec.rate_hz[1]
        share = max(GENTLE, float((2 * robot.spec.column("quantum") * rate_hz / robot.spec.column("velocity")).max()))
        self.guard = JointGuard(Limits.of(robot.spec, rate_hz, min(share, 1.0)))
        self.period_ns = ns(1 / rate_hz)
        self.guard.reset(state.q)
        self.write_s: list[float] = []
        self.states: list[RobotState] = []

    def command(self, target: Vector, **changes: Any) -> Command:
        now_ns = self.robot.clock.now_ns()
        self.seq += 1
        # Longer than a loop would give it: a machine that pauses this process is not what is tried.
        made = Command(Mode.JOINT_POSITION, self.seq, now_ns, now_ns + ns(TIMEOUT_S), target)
        return dataclasses.replace(made, **changes)

    def go(self, target: Vector, ticks: int) -> Command:
        """So many periods towards it; returns the last command as it was sent."""
        clock, sent = self.robot.clock, None
        for _ in range(ticks):
            began_ns = clock.now_ns()
            with suppress(StaleState):
                self.state = self.robot.read(TIMEOUT_S)
                self.states.append(self.state)
            command = self.command(self.guard(target).q)
            before_ns = clock.now_ns()
            sent = self.robot.write(command)
            self.write_s.append((clock.now_ns() - before_ns) / SECOND)
            clock.sleep_until_ns(began_ns + self.period_ns)
        assert sent is not None
        return sent

    def ticks_for(self, distance_rad: float) -> int:
        """Enough to get there and settle for half a second."""
        limits = self.guard.limits
        slowest_s = float((distance_rad / limits.velocity + 2 * limits.velocity / limits.acceleration).max())
        return int((slowest_s + 0.5) / limits.period_s) + 1


def spec(trial: Trial) -> Found:
    """The checks of the spec: readable before anything is opened, constant, and consistent."""
    robot = trial.make()
    said = robot.spec
    yield "spec: readable before anything is opened", robot.phase is Phase.UNCONFIGURED, str(robot.phase)
    yield "spec: has a name", bool(said.name), said.name
    yield "spec: of this version of the interface", said.api_version == API_VERSION, str(said.api_version)
    yield "spec: cannot be changed", dataclasses.is_dataclass(said) and _frozen(said), "it must be a frozen RobotSpec"
    yield "spec: the same from every make()", trial.make().spec == said, "two adapters of one robot differ"
    yield "spec: takes joint positions", Mode.JOINT_POSITION in said.modes, str(said.modes)
    least, usual, most = said.rate_hz
    yield "spec: rates in order", 0 < least <= usual <= most, str(said.rate_hz)
    yield "spec: rates of a robot", most <= 10_000, f"{most:g} Hz"
    span = said.column("upper") - said.column("lower")
    yield "spec: joints have names", all(joint.name for joint in said.joints), str([j.name for j in said.joints])
    yield "spec: limits in radians", (span <= 8 * np.pi).all(), f"ranges {span.round(2).tolist()}; are these degrees?"
    velocity, acceleration, quantum = (said.column(x) for x in ("velocity", "acceleration", "quantum"))
    yield "spec: velocities of a robot", (velocity <= 50).all(), f"{velocity.tolist()} rad/s"
    yield "spec: accelerations of a robot", (acceleration <= 5000).all(), f"{acceleration.tolist()} rad/s^2"
    yield "spec: it can move at its usual rate", (velocity > quantum * usual).all(), "a step of the device is too large"
    yield "spec: smallest steps are small", (quantum <= span / 100).all(), f"{quantum.tolist()} rad"
    watchdog = said.device_watchdog_s
    yield "spec: a watchdog that can fire", watchdog is None or 0 < watchdog <= 2, f"{watchdog} s"
    gripper = said.gripper
    sane = gripper is not None and 0 < gripper.width_m < 1 and 0 < gripper.speed_m_s < 10
    yield "spec: a gripper in metres", None if gripper is None else sane, str(gripper)


def _frozen(spec: Any) -> bool:
    try:
        spec.name = "other"
    except AttributeError:
        return True
    return False


def _brought_to(trial: Trial, phase: Phase) -> Adapter:
    robot = trial.make()
    if phase is Phase.UNCONFIGURED:
        return robot
    robot.configure()
    if phase in (Phase.ACTIVE, Phase.STOPPING):
        robot.activate(Mode.JOINT_POSITION)
    if phase is Phase.STOPPING:
        robot.stop(StopKind.HOLD)
    if phase is Phase.FAULT:
        _break(robot)
    if phase is Phase.CLOSED:
        robot.close()
    return robot


def _break(robot: Adapter) -> Exception | None:
    """A fault as if the link had failed under a read."""

    def fails(timeout_s: float) -> RobotState:
        raise OSError("conformance: the link is gone")

    robot._read = fails  # type: ignore[method-assign]
    try:
        robot.read(TIMEOUT_S)
    except Exception as error:
        return error
    finally:
        del robot._read
    return None


def _call(robot: Adapter, call: str) -> None:
    if call == "activate":
        robot.activate(Mode.JOINT_POSITION)
    elif call == "read":
        robot.read(TIMEOUT_S)
    elif call == "write":
        now_ns = robot.clock.now_ns()
        held = robot.read(TIMEOUT_S).q if "read" in TRANSITIONS[robot.phase] else np.zeros(len(robot.spec.joints))
        robot.write(Command(Mode.JOINT_POSITION, 1, now_ns, now_ns + SECOND, held))
    elif call == "stop":
        robot.stop(StopKind.HOLD)
    else:
        getattr(robot, call)()


def table(trial: Trial) -> Found:
    """All 48 cells: six phases, eight calls."""
    for phase in Phase:
        for call in CALLS:
            with closing(_brought_to(trial, phase)) as robot:
                name = f"table: {call} in {phase.value}"
                if robot.phase is not phase:
                    yield name, False, f"the phase is {robot.phase.value}"
                    continue
                legal = call in TRANSITIONS[phase]
                expected = (TRANSITIONS[phase].get(call) or phase) if legal else phase
                try:
                    _call(robot, call)
                    raised = None
                except IllegalTransition as error:
                    raised = error
                except RobotError as error:
                    yield name, False, reason(error, named=True)
                    continue
                right = (raised is None) is legal and robot.phase is expected
                yield name, right, f"{'raised' if raised else 'went through'}, and the phase is {robot.phase.value}"


def states(trial: Trial) -> Found:
    """The checks of states: their shapes, types, order and age."""
    with ready(trial.make) as robot:
        n = len(robot.spec.joints)
        seen = [robot.read(TIMEOUT_S) for _ in range(10)]
        first = seen[0]
        yield "state: n positions and velocities", first.q.shape == first.qd.shape == (n,), str(first.q.shape)
        yield "state: float64", first.q.dtype == first.qd.dtype == np.float64, str(first.q.dtype)
        yield "state: numbers", all(np.isfinite([s.q, s.qd]).all() for s in seen), str(first.q)
        seqs, times = [s.seq for s in seen], [s.t_ns for s in seen]
        yield "state: sequence numbers grow", bool((np.diff(seqs) > 0).all()), str(seqs)
        yield "state: time does not go back", bool((np.diff(times) >= 0).all()), str(times)
        yield "state: time of the adapter's clock", times[-1] <= robot.clock.now_ns(), "a state of the future"
        age_s = (robot.clock.now_ns() - times[-1]) / SECOND
        yield "state: fresh", age_s < TIMEOUT_S, f"{age_s:.3f} s old"
        yield "state: its own memory", not np.shares_memory(seen[0].q, seen[1].q), "two states share an array"
        low, high = robot.spec.column("lower") - 0.5, robot.spec.column("upper") + 0.5
        yield "state: in radians, near the limits", ((low < first.q) & (first.q < high)).all(), str(first.q)
        spread = np.ptp([s.q for s in seen], axis=0).max()
        yield "state: still while nobody moves it", spread <= trial.still_rad, f"{spread:.4f} rad"
        effort, quat = first.effort, first.tcp_quat
        yield "state: an effort per joint", None if effort is None else effort.shape == (n,), str(effort)
        unit = None if quat is None else quat.shape == (4,) and abs(float(np.linalg.norm(quat)) - 1) < 1e-3
        yield "state: a unit quaternion", unit, str(quat)
        fraction = None if first.gripper is None else 0 <= first.gripper <= 1
        yield "state: the gripper is a fraction", fraction, str(first.gripper)
        yield "state: no fault, no emergency stop", first.fault is None and not first.estop, str(first.fault)
        before_ns = robot.clock.now_ns()
        with suppress(StaleState):
            robot.read(0.0)
        took_s = (robot.clock.now_ns() - before_ns) / SECOND
        yield "state: a read without patience returns", took_s < 0.1, f"{took_s:.3f} s"


def motion(trial: Trial) -> Found:
    """The checks of motion: no bump at activation, limits kept, and set-points followed."""
    with _active(trial) as (robot, state):
        driver = Driver(robot, state)
        start = state.q.copy()
        driver.go(start, 20)
        bump = max(np.abs(s.q - start).max() for s in driver.states)
        yield "motion: activation without a bump", bump <= trial.still_rad, f"{bump:.4f} rad"
        limits = driver.guard.limits
        inside = np.clip(start, limits.lower, limits.upper)
        # Towards the middle, where there is room.
        target = inside + trial.amplitude_rad * np.where(inside > (limits.lower + limits.upper) / 2, -1, 1)
        count = len(driver.states)
        sent = driver.go(target, driver.ticks_for(trial.amplitude_rad))
        moving = driver.states[count:]
        tolerance = trial.still_rad + 2 * robot.spec.column("quantum")
        gap = np.abs(driver.state.q - target)
        yield "motion: it arrives", (gap <= tolerance).all(), f"{gap.round(4).tolist()} rad away"
        rounding = np.abs(sent.target - target)
        faithful = (rounding <= robot.spec.column("quantum") + 1e-9).all()
        yield "motion: write says what was sent", faithful, f"{rounding.tolist()} rad from what was asked"
        yield "motion: write keeps the command", sent.seq == driver.seq and sent.mode is Mode.JOINT_POSITION, str(sent)
        sign = np.sign(np.mean([s.qd for s in moving], axis=0)) == np.sign(target - start)
        yield "motion: velocities have the sign of motion", sign.all(), str(sign.tolist())
        steps = np.abs(np.diff([s.q for s in moving], axis=0)).max(initial=0.0)
        yield "motion: no jumps", steps <= trial.amplitude_rad, f"{steps:.4f} rad between two states"
        seqs = np.diff([s.seq for s in driver.states])
        yield "motion: states go on while it moves", len(seqs) > 5 and bool((seqs > 0).all()), str(len(seqs))
        slow_s = float(np.percentile(driver.write_s, 95))
        yield "motion: write takes less than a period", slow_s < limits.period_s, f"95 % within {slow_s:.4f} s"
        rate_hz = len(driver.states) / max((driver.states[-1].t_ns - driver.states[0].t_ns) / SECOND, 1e-9)
        yield "motion: states at the least rate", rate_hz >= robot.spec.rate_hz[0], f"{rate_hz:.1f} Hz"
        driver.go(start, driver.ticks_for(trial.amplitude_rad))
        gap = np.abs(driver.state.q - start)
        yield "motion: and back", (gap <= tolerance).all(), f"{gap.round(4).tolist()} rad away"


def refusals(trial: Trial) -> Found:
    """The checks of commands that must be refused: NaN, wrong sizes, late ones, and those in a wrong phase."""
    with _active(trial) as (robot, state):
        driver = Driver(robot, state)
        held = driver.go(state.q, 5).target
        n = len(held)
        cases: dict[str, dict[str, Any]] = {
            "a NaN": {"target": np.full(n, np.nan)},
            "one NaN": {"target": np.where(np.arange(n) == n - 1, np.nan, held)},
            "an infinity": {"target": np.full(n, np.inf)},
            "too few numbers": {"target": held[:-1]},
            "too many numbers": {"target": np.append(held, 0.0)},
            "a matrix": {"target": held[None]},
            "an expired command": {"valid_until_ns": 0},
            "an old command": {"seq": 0},
            "another mode": {"mode": Mode.JOINT_TORQUE},
            "a gripper beyond open": {"gripper": 2.0},
            "a gripper that is no number": {"gripper": float("nan")},
        }
        for name, changes in cases.items():
            try:
                robot.write(driver.command(changes.pop("target", held), **changes))
                yield f"refused: {name}", False, "it was sent"
            except Refused as error:
                yield f"refused: {name}", robot.phase is Phase.ACTIVE, str(error)
        driver.go(held, 10)
        moved = np.abs(driver.state.q - state.q).max()
        yield "refused: nothing of it was sent", moved <= trial.still_rad, f"it moved by {moved:.4f} rad"


def stops(trial: Trial) -> Found:
    """The checks of each kind of stop: three calls in time, a still robot, and the way back."""
    for kind in StopKind:
        with _active(trial) as (robot, state):
            driver = Driver(robot, state)
            driver.go(state.q, 5)
            before_ns = robot.clock.now_ns()
            for _ in range(3):
                robot.stop(kind)
            took_s = (robot.clock.now_ns() - before_ns) / SECOND
            yield f"stop {kind.value}: three times within its time", took_s < 3 * STOP_S, f"{took_s:.3f} s"
            yield f"stop {kind.value}: the phase", robot.phase is Phase.STOPPING, robot.phase.value
            drift = _drift(robot, 0.3)
            released = kind is StopKind.RELEASE and robot.spec.safe_when_unpowered
            yield f"stop {kind.value}: it stays", None if released else drift <= trial.still_rad, f"{drift:.4f} rad"
            robot.deactivate()
            again = robot.activate(Mode.JOINT_POSITION)
            yield f"stop {kind.value}: and can be active again", robot.phase is Phase.ACTIVE, str(again.q)


def _drift(robot: Adapter, seconds: float) -> float:
    first = last = robot.read(TIMEOUT_S).q
    until_ns = robot.clock.now_ns() + ns(seconds)
    while robot.clock.now_ns() < until_ns:
        robot.clock.sleep_until_ns(robot.clock.now_ns() + ns(0.01))
        try:
            last = robot.read(TIMEOUT_S).q
        except StaleState:
            continue
    return float(np.abs(last - first).max())


def watchdog(trial: Trial) -> Found:
    """The checks of the device's watchdog: a robot that hears nothing stops in time."""
    with _active(trial) as (robot, state):
        watchdog_s = robot.spec.device_watchdog_s
        if watchdog_s is None:
            yield "watchdog: it stops a robot that hears nothing", None, "this robot has none"
            return
        driver = Driver(robot, state)
        low, high = robot.spec.column("lower"), robot.spec.column("upper")
        far = np.where(state.q > (low + high) / 2, -1, 1) * trial.amplitude_rad * 20
        driver.go(np.clip(state.q + far, low, high), 30)
        quiet_ns = robot.clock.now_ns()
        robot.clock.sleep_until_ns(quiet_ns + ns(3 * watchdog_s + 0.1))
        try:
            drift = _drift(robot, 0.2)
            yield "watchdog: it stops a robot that hears nothing", drift <= trial.still_rad, f"{drift:.4f} rad after it"
        except DeviceFault as error:
            yield "watchdog: it stops a robot that hears nothing", robot.phase is Phase.FAULT, str(error)


def faults(trial: Trial) -> Found:
    """The checks of faults: reported as such, with a reason, and recovered from."""
    with _active(trial) as (robot, _):
        error = _break(robot)
        message = reason(error, named=True) if error else "nothing was raised"
        yield "fault: a lost link is a DeviceFault", isinstance(error, DeviceFault), message
        yield "fault: and the phase FAULT", robot.phase is Phase.FAULT, robot.phase.value
        yield "fault: which says why", robot.fault is not None and bool(robot.fault.text), str(robot.fault)
        robot.recover()
        yield "fault: recover leads back", robot.phase is Phase.INACTIVE and robot.fault is None, robot.phase.value
        robot.activate(Mode.JOINT_POSITION)
        yield "fault: and it can be active again", robot.phase is Phase.ACTIVE, robot.phase.value
        robot.stop(StopKind.HOLD)
        robot.deactivate()
        robot.recover()
        drift = _drift(robot, 0.3)
        yield "recover: of a robot at rest moves nothing", drift <= trial.still_rad, f"{drift:.4f} rad"


def ends(trial: Trial) -> Found:
    """The checks of closing: twice in a row from ACTIVE, and the device is free afterwards."""
    with _active(trial) as (robot, _):
        robot.close()
    yield "end: close from ACTIVE, twice", robot.phase is Phase.CLOSED, robot.phase.value
    with ready(trial.make) as again:
        yield "end: another adapter finds it free", again.read(TIMEOUT_S).seq >= 0, ""


PARTS: tuple[Callable[[Trial], Found], ...] = (spec, table, states, motion, refusals, stops, watchdog, faults, ends)
