"""``robot=...`` of the command line: which robot, and how an episode begins on it.

A robot is an adapter by name with the settings of its device (`discovery`), so `plugin` names anybody's. Two are not
hardware: `twin` is a MuJoCo model, `so101_emulated` the driver of a real arm on an emulated bus with the same model
behind it. Of these every episode has one of its own, which begins as the simulated episode of the same seed does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..policies.core.errors import BurnishError
from .clock import VirtualClock, ns
from .drivers.bus import ArmConfig
from .drivers.feetech import FeetechArm
from .drivers.twin import Twin, TwinConfig
from .emulators.line import Loopback
from .emulators.pty import PtyProcess
from .emulators.so101 import calibration, so101
from .env import Body, Stage, each_anew
from .errors import Refused
from .link import Link, LocalLink, RobotLink
from .safe_robot import Safety
from .supervisor import Supervisor

GENTLE = 0.2  # of the velocity limits, on the way to where an episode begins


class Modelled(Body, Protocol):
    """A body whose robot exists as a MuJoCo model."""

    mjcf: str
    joints: Any

    @property
    def start(self) -> np.ndarray: ...


@dataclass
class TwinRobot:
    device: dict[str, Any] = field(default_factory=dict)  # of drivers/twin.py: noise_rad, command_latency_s, ...


@dataclass
class So101Emulated:
    device: dict[str, Any] = field(default_factory=lambda: {"velocity": 4.0, "acceleration": 40.0})
    loss: float = 0.0  # share of packets that never arrive, in either direction
    corruption: float = 0.0  # share of packets with a wrong bit
    seed: int = 0  # of these


@dataclass
class Hardware:
    """``name`` is ours or one that a package adds; ``device`` are the settings of its driver (port, host, ...)."""

    name: str = ""
    device: dict[str, Any] = field(default_factory=dict)
    priority: int = 50  # of the control process under the real-time scheduler; 0: not asked for
    core: int | None = None  # for the control process alone


ROBOTS: dict[str, type] = {
    "twin": TwinRobot,
    "so101_emulated": So101Emulated,
    "feetech": Hardware,
    "dynamixel": Hardware,
    "universal": Hardware,
    "plugin": Hardware,
}


def stage_for(robot: Any, body: Any, safety: Safety, realtime: bool, supervisor: Supervisor | None) -> Stage:
    """``realtime`` is a choice for robots that are models: without it they have a clock of their own, no processes."""
    if isinstance(robot, TwinRobot):
        return each_anew(partial(_twin, robot, body, safety, realtime))
    if isinstance(robot, So101Emulated):
        return each_anew(partial(_so101, robot, body, safety, realtime))
    if not realtime:
        raise BurnishError(f"{robot.name} is hardware, whose time cannot be chosen; leave out realtime=false")
    if supervisor is None:
        raise BurnishError(f"{robot.name} is hardware, and somebody has to stand beside it; give supervisor=keyboard")
    connect = partial(RobotLink, robot.name, robot.device, safety, priority=robot.priority, core=robot.core)
    return _in_person(connect, supervisor)


def _twin(robot: TwinRobot, body: Modelled, safety: Safety, realtime: bool, start: np.ndarray) -> Link:
    given = {"mjcf": body.mjcf, "joints": list(body.joints), "start": start.tolist(), **robot.device}
    if realtime:
        return RobotLink("twin", given, safety)
    try:
        return LocalLink(Twin(TwinConfig(**given), VirtualClock()), safety)
    except TypeError as error:
        raise Refused(f"robot.device of a twin: {error}") from error


def _so101(robot: So101Emulated, body: Modelled, safety: Safety, realtime: bool, start: np.ndarray) -> Link:
    known = calibration(body.mjcf)
    safety = replace(safety, no_device_watchdog=True)  # servos of this kind have none, and these hurt nobody
    make = partial(so101, body.mjcf, start.tolist(), loss=robot.loss, corruption=robot.corruption, seed=robot.seed)
    if realtime:
        stack = ExitStack()
        bus = stack.enter_context(PtyProcess(make))
        joints = {joint.name: {k: x for k, x in asdict(joint).items() if k != "name"} for joint in known.joints}
        link = RobotLink("feetech", {"port": bus.path, "calibration": {"joints": joints}, **robot.device}, safety)
        link.on_close(stack.close)
        link.truth = bus.truth
        return link
    clock, chain = VirtualClock(), make()
    config = ArmConfig("an emulated bus", known, **robot.device)
    link = LocalLink(FeetechArm(config, clock, lambda: Loopback(chain, clock)), safety)
    link.truth = lambda: chain.plant.motion()[0] - np.pi
    return link


def _in_person(connect: Callable[[], Link], supervisor: Supervisor) -> Stage:
    """A person lays things out as the episode's seed says, and the robot goes to where the episode begins, slowly."""

    def stage(body: Any, seed: int) -> Link:
        body.begin(seed)
        supervisor.ready(f"Lay things out as this episode has them ({body.layout()}), stand clear")
        link = connect()
        try:
            here = link.start().q
            _go(link, here, body.start)
        except BaseException:
            link.close()
            raise
        return link

    return stage


def _go(link: Link, here: np.ndarray, there: np.ndarray) -> None:
    velocity = np.array([joint["velocity"] for joint in link.about["joints"]])
    seconds = float((np.abs(there - here) / (GENTLE * velocity)).max())
    began_ns = link.clock.now_ns()
    while True:
        now_ns = link.clock.now_ns()
        share = min((now_ns - began_ns) / ns(max(seconds, 1e-3)), 1.0)
        link.plan((here + share * (there - here))[None], 0.2)
        if share >= 1:
            break
        link.wait_until_ns(now_ns + ns(0.02))
    link.wait_until_ns(link.clock.now_ns() + ns(0.15))
