"""``robot=...`` of the command line: which robot, and how an episode begins on it.

A robot is an adapter by name with the settings of its device (`discovery`), so `plugin` names those of other packages.
Two are not hardware: `twin` is a MuJoCo model, `so101_emulated` the driver of a real arm on an emulated bus with the
same model behind it. Of these every episode has one of its own, which begins as the simulated episode of the same seed
does.

Mistakes that can be known without opening anything are said first (`inspected`): before a robot moves, and before a
person is asked to lay things out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..policies.core.config import LATER
from ..policies.core.errors import BurnishError
from ..policies.core.ranges import check_ranges
from .adapter import Adapter, RobotSpec
from .clock import Clock, MonotonicClock, VirtualClock, ns
from .compatibility import require_same_joints, require_start
from .control.link import Link, LocalLink, RobotLink, Snapshot, watch_time
from .discovery import make_adapter, names
from .drivers.bus import ArmConfig, ServoArm
from .drivers.feetech import FeetechArm
from .drivers.twin import Twin, TwinConfig
from .emulators.feetech import FeetechChain
from .emulators.line import Loopback
from .emulators.pty import PtyProcess
from .emulators.so101 import calibration, so101
from .env import Body, Stage, each_anew, joined, parted
from .errors import Refused, RobotError
from .safety.safe_robot import Rung, SafeRobot, Safety, require_watchdog
from .settings import settings
from .supervisor import Supervisor

TOOL = "tcp"  # site of a body's model
SETTLE_S, STILL_RAD = 0.15, 1e-3
LOOK_S = 0.02  # between two looks at a robot, and at the person beside it, on the way to where an episode begins
GENTLE = 0.2  # of the velocity limits, on the way to where an episode begins


class ModelledBody(Body, Protocol):
    """A body whose robot exists as a MuJoCo model."""

    mjcf: str
    joints: Any

    @property
    def start(self) -> np.ndarray: ...


@dataclass
class TwinRobot:
    """Settings of robot=twin: the world's own model behind the interface of a robot."""

    # settings of drivers/twin.py: noise_rad, command_latency_s, ...
    device: dict[str, Any] = field(default_factory=dict)


@dataclass
class So101Emulated:
    """Settings of robot=so101_emulated: an SO-101 arm whose serial bus is emulated, with its losses."""

    # limits of the emulated servos
    device: dict[str, Any] = field(default_factory=lambda: {"velocity": 4.0, "acceleration": 40.0})
    loss: float = 0.0  # share of packets that never arrive, in either direction
    corruption: float = 0.0  # share of packets with a wrong bit
    seed: int = 0  # seed of these losses

    def __post_init__(self) -> None:
        check_ranges(self, {"[0, 1)": "loss corruption", "[0, inf)": "seed"}, "robot.")


@dataclass
class Hardware:
    """``name`` is ours or one that a package adds; ``device`` are the settings of its driver (port, host, ...)."""

    name: str = ""  # name of the driver
    device: dict[str, Any] = field(default_factory=dict)  # settings of the driver
    # names of the driver's joints that are called otherwise -> the body's names
    joints: dict[str, str] = field(default_factory=dict)
    priority: int = 50  # priority of the control process under the real-time scheduler; 0: not asked for
    core: int | None = None  # CPU core for the control process alone; null: any
    # seconds of silence after which the watchdog kills the control process; null: 0.1, and at least three periods of it
    watch_s: float | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        if not self.name:
            raise BurnishError(f"robot=plugin needs robot.name=..., which robot it is; choices: {', '.join(names())}")
        check_ranges(self, {"[0, 99]": "priority", "[0, inf)": "core", "(0, inf)": "watch_s"}, "robot.")


ROBOTS: dict[str, type] = {
    "twin": TwinRobot,
    "so101_emulated": So101Emulated,
    "feetech": Hardware,
    "dynamixel": Hardware,
    "universal": Hardware,
    "plugin": Hardware,
}


Connect = Callable[[np.ndarray], Adapter]  # the state in which the episode of a model begins -> not configured yet


def connection(robot: Any, body: Any, realtime: bool) -> tuple[Connect, bool]:
    """The way to the adapter of ``robot=...``, and whether each episode has one of its own, as models do."""
    clock = MonotonicClock() if realtime else VirtualClock()
    if isinstance(robot, TwinRobot):
        return (lambda start: _twin(robot, body, start, clock)), True
    if isinstance(robot, So101Emulated):
        return (lambda start: _so101(robot, body, start, clock)[0]), True
    if not realtime:
        raise BurnishError(f"{robot.name} is hardware, whose time cannot be chosen; leave out realtime=false")
    return (lambda start: make_adapter(robot.name, robot.device)), False


def spec_of(robot: Any, body: Any, realtime: bool) -> RobotSpec:
    """Nothing is opened."""
    adapter = connection(robot, body, realtime)[0](body.begin(0))
    try:
        return adapter.spec
    finally:
        adapter.close()


def inspected(
    robot: Any, body: ModelledBody, safety: Safety, realtime: bool, seeds: Sequence[int], moves: bool
) -> RobotSpec:
    """The spec of a robot that may be used as ``body`` is, for episodes of these seeds; `Refused` if not. Nothing is
    opened. ``moves`` is whether it will be moved."""
    hardware = isinstance(robot, Hardware)
    connect, _ = connection(robot, body, realtime)
    adapter = connect(body.begin(seeds[0]))
    try:
        require_same_joints(adapter.spec, body.joints, robot.joints if hardware else {})
        for seed in seeds:
            body.begin(seed)
            require_start(adapter.spec, body.start, seed)
        SafeRobot(adapter, with_model(safety, adapter.spec, body))  # it is asked what it would refuse, and not started
        if hardware:
            watch_time(robot.watch_s, safety.rate_hz)
        if moves:
            require_watchdog(adapter.spec, allowed(robot, safety))
        if hardware and isinstance(adapter, ServoArm):
            adapter.servos.load()
            if not Path(adapter.config.port).exists():
                raise Refused(f"there is no robot.device.port={adapter.config.port}; plug the arm in, or name its port")
        return adapter.spec
    finally:
        adapter.close()


def allowed(robot: Any, safety: Safety) -> Safety:
    """Emulated servos have no watchdog, as those that they emulate, and hurt nobody."""
    return replace(safety, no_device_watchdog=True) if isinstance(robot, So101Emulated) else safety


def with_model(safety: Safety, spec: RobotSpec, body: ModelledBody) -> Safety:
    """Where a model of the arm is needed, and neither a person nor its driver names one, the body's will do: its joints
    are the robot's, in their order (`require_same_joints`), whatever the robot calls them."""
    if not safety.bounded or safety.model or spec.mjcf is not None or not body.mjcf:
        return safety
    joints = safety.model_joints or list(body.joints)
    return replace(safety, model=body.mjcf, model_joints=joints, tool=safety.tool or TOOL)


def stage_for(robot: Any, body: Any, safety: Safety, realtime: bool, supervisor: Supervisor | None) -> Stage:
    """Of a robot that was `inspected`. ``realtime`` is a choice for robots that are models: without it they have a
    clock of their own, no processes."""
    safety = with_model(allowed(robot, safety), spec_of(robot, body, realtime), body)
    if isinstance(robot, TwinRobot):
        return each_anew(partial(_twin_link, robot, body, safety, realtime))
    if isinstance(robot, So101Emulated):
        return each_anew(partial(_so101_link, robot, body, safety, realtime))
    assert supervisor is not None, "hardware is inspected with a person beside it"
    own = {"priority": robot.priority, "core": robot.core, "watch_s": robot.watch_s}
    connect = partial(RobotLink, robot.name, robot.device, safety, **own)
    return _in_person(connect, supervisor)


def _twin_settings(robot: TwinRobot, body: ModelledBody, start: np.ndarray) -> dict[str, Any]:
    return {"mjcf": body.mjcf, "joints": list(body.joints), "start": start.tolist(), **robot.device}


def _twin(robot: TwinRobot, body: ModelledBody, start: np.ndarray, clock: Clock) -> Twin:
    return Twin(settings(TwinConfig, _twin_settings(robot, body, start), "a twin"), clock)


def _twin_link(robot: TwinRobot, body: ModelledBody, safety: Safety, realtime: bool, start: np.ndarray) -> Link:
    if realtime:
        return RobotLink("twin", _twin_settings(robot, body, start), safety)
    return LocalLink(_twin(robot, body, start, VirtualClock()), safety)


def _chain(robot: So101Emulated, body: ModelledBody, start: np.ndarray) -> Callable[[], FeetechChain]:
    return partial(so101, body.mjcf, start.tolist(), loss=robot.loss, corruption=robot.corruption, seed=robot.seed)


def _so101(
    robot: So101Emulated, body: ModelledBody, start: np.ndarray, clock: Clock
) -> tuple[FeetechArm, Callable[[], FeetechChain]]:
    """The driver, and the servos at the other end of its bus, which are there once it is opened."""
    chain = cache(_chain(robot, body, start))
    given = {"port": "an emulated bus", "calibration": calibration(body.mjcf)}
    config = settings(ArmConfig, robot.device, "so101_emulated", **given)
    return FeetechArm(config, clock, lambda: Loopback(chain(), clock)), chain


def _so101_link(robot: So101Emulated, body: ModelledBody, safety: Safety, realtime: bool, start: np.ndarray) -> Link:
    if realtime:
        known = calibration(body.mjcf).joints
        joints = {joint.name: {k: x for k, x in asdict(joint).items() if k != "name"} for joint in known}
        with ExitStack() as stack:
            bus = stack.enter_context(PtyProcess(_chain(robot, body, start)))
            link = RobotLink("feetech", {"port": bus.path, "calibration": {"joints": joints}, **robot.device}, safety)
            link.on_close(stack.pop_all().close)
        link.truth = bus.truth
        return link
    arm, chain = _so101(robot, body, start, VirtualClock())
    link = LocalLink(arm, safety)
    link.truth = lambda: chain().plant.motion()[0] - np.pi
    return link


def _in_person(connect: Callable[[], Link], supervisor: Supervisor) -> Stage:
    """A person lays things out as the episode's seed says, and the robot goes to where the episode begins, slowly."""

    def stage(body: Any, seed: int) -> Link:
        body.begin(seed)
        what = body.layout()
        things = f"as this episode has them ({what})" if what else "for the next episode"
        supervisor.ready(f"Lay things out {things}, stand clear")
        link = connect()
        try:
            state = link.start()
            body.see(*joined(body, state.q, state.qd, state.gripper))
            _go(link, state.q, *parted(body, body.where), lambda: supervisor.poll(body.observe()).stop)
        except BaseException:
            link.close()
            raise
        return link

    return stage


def _go(
    link: Link, here: np.ndarray, there: np.ndarray, gripper: list[float] | None, stops: Callable[[], bool]
) -> None:
    """``stops`` is whether the person has stopped the robot since it was asked last."""
    velocity = np.array([joint["velocity"] for joint in link.about["joints"]])
    seconds = float((np.abs(there - here) / (GENTLE * velocity)).max())
    began_ns = link.clock.now_ns()
    while True:
        now_ns = link.clock.now_ns()
        share = min((now_ns - began_ns) / ns(max(seconds, 1e-3)), 1.0)
        link.plan((here + share * (there - here))[None], 0.2, gripper=gripper)
        if share >= 1:
            break
        _going(link, LOOK_S, stops)
    # A guard that allows less speed, or that is still blending in, comes later: until nothing moves any more.
    before, sent = here, link.state().sent
    while np.abs(sent - before).max() > STILL_RAD:
        link.plan(there[None], 2 * SETTLE_S, gripper=gripper)
        before, sent = sent, _going(link, SETTLE_S, stops).sent


def _going(link: Link, seconds: float, stops: Callable[[], bool]) -> Snapshot:
    """The state after so many seconds of the way; an error as soon as the robot is not driven any more."""
    until_ns = link.clock.now_ns() + ns(seconds)
    while True:
        link.wait_until_ns(min(link.clock.now_ns() + ns(LOOK_S), until_ns))
        if stops():
            link.stop()
            raise RobotError("the person stopped the robot on its way to the start; look at it, then begin again")
        state = link.state()
        if state.rung in (Rung.RAMP, Rung.STOPPED):
            events = link.close().get("events", [])  # the state's note is of the last event, and that is the rest
            why = next((event["text"] for event in events if event["kind"] in ("ramp", "fault")), state.note)
            raise RobotError(f"the robot came to rest on its way to the start: {why}; look at it, then begin again")
        if link.clock.now_ns() >= until_ns:
            return state
