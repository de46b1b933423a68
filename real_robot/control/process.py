"""The control process: `python -m burnish.real_robot.control.process`.

One JSON line on standard input says what to control:

    {"robot": "twin", "config": {...}, "safety": {"rate_hz": 100}, "folder": "...", "priority": 50, "core": null}

It imports NumPy and the robot's SDK, nothing else. When it has been asked to quit, has lost its parent, or fails, the
robot is brought to rest first. The folder keeps ``control.json``, a summary, and ``ticks.npy``, the times. Its parent
puts standard error there too (``process.log``): a driver that logs for days waits for no reader, and is cut off now and
then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...policies.core.files import replace
from ...policies.core.parent import beside, die_with_parent
from ..adapter import RobotSpec
from ..clock import Clock, ns
from ..discovery import make_adapter
from ..errors import Refused, RobotError
from ..safety.safe_robot import SafeRobot, Safety
from .loop import ControlLoop
from .scheduling import heed, hurry
from .shared_memory import Board, hold, order_dtype, plan_dtype, state_dtype
from .watchdog import WATCH, WATCH_KIND

PLANS, ORDERS, STATES = "plans", "orders", "states"
READY, REPORT, TICKS = "ready.json", "control.json", "ticks.npy"
LOG, LOG_BYTES = "process.log", 1 << 20


@dataclass(frozen=True)
class Job:
    """The task of a control process: the robot, its safety settings, and the folder of shared memory."""

    robot: str
    config: Mapping[str, Any]
    safety: Safety
    folder: Path
    priority: int = 50  # of the real-time scheduler; 0: do not ask for it
    core: int | None = None
    watch_s: float = 0.0  # so old may the watchdog's heartbeat be; 0: there is none
    parent: int | None = None  # the process that began this one, with which it ends; by default the one that it finds

    @classmethod
    def from_json(cls, text: str) -> Job:
        data = json.loads(text)
        return cls(**{**data, "safety": Safety(**data["safety"]), "folder": Path(data["folder"])})

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "config": dict(self.config), "folder": str(self.folder)})


def control(job: Job) -> int:
    """The control loop of a job, run until it is told to quit; exit status."""
    leaving: list[int] = []
    heed(lambda number, frame: leaving.append(number), signal.SIGTERM, signal.SIGINT)
    die_with_parent(parent=job.parent)
    hold(job.folder)
    keep_short(job.folder / LOG)
    adapter = make_adapter(job.robot, job.config)
    robot = SafeRobot(adapter, job.safety)
    boards = boards_of(job.folder, robot.spec)
    obtained = hurry(job.priority, job.core) if job.priority else None
    loop = ControlLoop(robot, *boards, **({"watched": watched_in(job, robot.clock)} if job.watch_s > 0 else {}))
    said = about(robot) | {"scheduling": asdict(obtained) if obtained else None}
    replace(job.folder / READY, json.dumps(said))
    try:
        loop.run(lambda: bool(leaving))
    finally:
        robot.close()
        loop.timing.save(job.folder / TICKS)
        replace(job.folder / REPORT, json.dumps(said | left_by(loop)))
    return 0


def keep_short(log: Path, every_s: float = 1.0) -> None:
    """Starts a thread that empties the file ``log`` whenever it is longer than ``LOG_BYTES``."""

    def look() -> None:
        while True:
            with suppress(OSError):  # the file is not there yet, or no more
                if log.stat().st_size > LOG_BYTES:
                    os.truncate(log, 0)
            time.sleep(every_s)

    beside(look, "log")


def watched_in(job: Job, clock: Clock) -> Callable[[], bool]:
    """Is the watchdog's heartbeat young enough? He begins once this process is ready, so his board comes later."""
    board: list[Board] = []

    def watched() -> bool:
        if not board and (job.folder / WATCH).exists():
            board.append(Board.open(job.folder / WATCH, WATCH_KIND))
        record = board[0].read() if board else None
        return record is not None and clock.now_ns() - int(record["heartbeat_ns"][0]) <= ns(job.watch_s)

    return watched


def boards_of(folder: Path, spec: RobotSpec) -> tuple[Board, Board, Board]:
    """New ones, for plans, orders and states."""
    joints = len(spec.joints)
    kinds = {PLANS: plan_dtype(joints), ORDERS: order_dtype(), STATES: state_dtype(joints)}
    plans, orders, states = (Board.create(folder / name, kind) for name, kind in kinds.items())
    return plans, orders, states


def about(robot: SafeRobot) -> dict[str, Any]:
    """The facts of a robot that the program needs: name, joints, rate and watchdog."""
    return {
        "name": robot.spec.name,
        "joints": [asdict(joint) for joint in robot.spec.joints],
        "rate_hz": robot.safety.rate_hz,
        "device_watchdog_s": robot.spec.device_watchdog_s,
        "stop_s": robot.spec.stop_s,
    }


def left_by(loop: ControlLoop) -> dict[str, Any]:
    """The last words of a loop that has ended."""
    robot = loop.robot
    events = [asdict(event) for event in robot.events]
    setpoints = {"asked": loop.asked, "changed": loop.changed}
    return {"timing": loop.timing.summary(), "setpoints": setpoints, "counts": dict(robot.counts), "events": events}


def main() -> int:
    """The program: the job of standard input; exit status 2 where the robot or its settings are refused."""
    try:
        return control(Job.from_json(sys.stdin.readline()))
    except (RobotError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, Refused) else 1


if __name__ == "__main__":
    sys.exit(main())
