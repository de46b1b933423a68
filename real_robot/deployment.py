"""The common part of ``burnish deploy`` and ``burnish record``: settings, errors as sentences, a robot at rest in the
end, and words for what it did."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..policies.cli.machine import say
from ..policies.core.errors import BurnishError
from ..policies.core.files import replace as write
from ..policies.core.ranges import check_ranges
from .discovery import make_adapter
from .env import RobotEnv, joined, parted
from .errors import RobotError
from .inference.action_sources import ActionSource, StillWorld
from .inference.chunk_settings import Chunks
from .inference.realtime_chunking import RealtimeChunking, RobotTime
from .inference.worker import Latency, Simulated, SubprocessWorker
from .robots import ROBOTS, Hardware
from .safety.safe_robot import CALLED, Safety

PERSONS = ("keyboard", "gamepad")
NOT_SAFETY_RATED = (
    "note: the guard is no safety-rated function; the limits of the robot's controller and an emergency stop made of "
    "hardware are still needed"
)
DISPLACEMENTS = "ee_delta"  # the mode of actions that say how far to move
PAD = "/dev/input/js0"


@contextmanager
def in_sentences() -> Iterator[None]:
    """Errors of the robot's side become errors of the command."""
    try:
        yield
    except RobotError as error:
        raise BurnishError(str(error)) from error


class InSentences:
    """Settings of the robot's side as they stand on a command line."""

    def __post_init__(self) -> None:
        with in_sentences():
            super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue]


@dataclass
class Allowed(InSentences, Safety):
    """``safety.*`` of a command line. Lists in lists, because typed further a 0 of a command line would be no float."""

    # box for the tool: [[x, y, z], [x, y, z]] in m, low and high; empty: none
    workspace: list[Any] = field(default_factory=list)
    may_touch: list[Any] = field(default_factory=list)  # pairs of bodies that need not keep apart

    def __post_init__(self) -> None:
        if not all(isinstance(pair, list) and all(isinstance(x, str) for x in pair) for pair in self.may_touch):
            raise BurnishError(f"safety.may_touch={self.may_touch} must be pairs of names of bodies, [[a, b], [a, c]]")
        try:
            self.workspace = [[float(x) for x in corner] for corner in self.workspace]
        except (TypeError, ValueError) as error:
            raise BurnishError(
                f"safety.workspace={self.workspace} must be two corners of numbers, [[x, y, z], [x, y, z]] in m"
            ) from error
        super().__post_init__()


@dataclass
class AllowedChunks(InSentences, Chunks):
    """``chunks.*`` of a command line."""


@dataclass
class AllowedLatency(InSentences, Latency):
    """``latency.*`` of a command line."""


@dataclass
class RobotVerb:
    """Settings that `burnish deploy` and `burnish record` share: robot, policy, cameras, and safety."""

    robot: Any  # robot, twin or emulator
    policy: Any  # policy that plays: policy=checkpoint, bundle, remote or another kind
    # task; by default the one that the policy was trained for; joints: the robot itself, without a task
    env: Any = None
    instruction: str = ""  # task in words, for a policy that reads them
    # cameras by name, each with its settings: source (index or path), turn (degrees), fit, size, oldest_s (seconds),
    # ...
    cameras: dict[str, Any] = field(default_factory=dict)
    safety: Allowed = field(default_factory=Allowed)  # limits, and what happens when they are met
    episodes: int = 10  # episodes that are played
    seed: int = 0  # seed of every random draw
    realtime: bool = True  # false: a robot that is a model plays as fast as it can
    supervisor: str = ""
    gamepad: str = PAD  # device of the pad, with supervisor=gamepad
    threads: int = 1  # CPU threads of torch; 0: as torch chooses

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf)": "episodes threads"})
        if self.cameras and not self.realtime:
            raise BurnishError("cameras= see what happens in real time; leave out realtime=false")
        if self.gamepad != PAD and self.supervisor != "gamepad":
            raise BurnishError(f"gamepad={self.gamepad} is where a pad is, and nobody has it; give supervisor=gamepad")


@dataclass
class DeployConfig(RobotVerb):
    """Settings of `burnish deploy`: chunks, latency, supervision, and what is kept."""

    chunks: Any = None  # way from chunk to chunk during inference; null: each decision is waited for
    # latency of simulated inference, with chunks and realtime=false
    latency: AllowedLatency = field(default_factory=AllowedLatency)
    compare: bool = True  # play the same episodes in simulation too
    dry_run: bool = False  # do all but move: connect, read, infer once, report
    shadow: bool = False  # infer at every tick beside a robot that is moved otherwise, and send nothing
    supervisor: str = ""  # keyboard or gamepad: a person takes over, and says how it went
    record: str | None = None  # folder of a dataset of what was played
    out: str | None = None  # folder for deploy.json, or shadow.json and shadow.jsonl

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.supervisor not in ("", *PERSONS):
            raise BurnishError(f"supervisor={self.supervisor} is not known; choices: {', '.join(PERSONS)}")
        alone = not (self.supervisor or self.dry_run or self.shadow)
        if isinstance(self.robot, Hardware) and self.realtime and alone:
            raise BurnishError(
                f"{self.robot.name} is hardware, and a person has to stand beside it; give supervisor=keyboard"
            )
        if self.shadow and (self.dry_run or self.record is not None):
            raise BurnishError("a shadow plays nothing: leave out dry_run=true and record=")
        if self.chunks is not None and (self.shadow or self.dry_run):
            raise BurnishError("chunks= is how a robot is moved, and nothing is to be moved here; leave it out")
        if self.latency.mean_s and (self.realtime or self.chunks is None):
            raise BurnishError("latency.mean_s is of inference that is simulated; give chunks= and realtime=false")
        if self.chunks is not None and self.chunks.patience_s >= self.safety.silent_ramp_s:
            raise BurnishError(
                f"chunks.patience_s={self.chunks.patience_s:g} must be below safety.silent_ramp_s="
                f"{self.safety.silent_ramp_s:g}, at which the robot stops anyway"
            )


@dataclass
class RecordConfig(RobotVerb):
    """Settings of `burnish record`: the person or expert who acts, and the dataset."""

    policy: Any = None  # policy that plays where the supervisor does not; by default none, and the robot stays
    # keyboard, gamepad, or expert: the scripted one of the task, for robots that are models
    supervisor: str = "keyboard"
    level: str = "clean"  # level of the expert
    after: int = 0  # ticks until the expert takes over from a policy
    out: str = "runs/recorded"  # folder of the dataset
    resume: bool = False  # continue what an interrupted call left at out=, or lengthen it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.supervisor not in (*PERSONS, "expert"):
            raise BurnishError(f"supervisor={self.supervisor} is not known; choices: {', '.join((*PERSONS, 'expert'))}")
        if self.supervisor == "expert" and isinstance(self.robot, Hardware):
            raise BurnishError(f"{self.robot.name} is hardware, and a script is nobody beside it; give a person")
        if self.level != "clean" and self.supervisor != "expert":
            raise BurnishError(f"level={self.level} is of the expert; give supervisor=expert, or leave it out")
        if self.after < 0 or (self.after > 0 and (self.policy is None or self.supervisor != "expert")):
            raise BurnishError(f"after={self.after} is when supervisor=expert takes over from a policy; give both")


def ahead(acting: ActionSource, chunks: Chunks, env: RobotEnv, latency: Latency | None) -> RealtimeChunking:
    """A controller whose inference runs while the robot moves: in a process of its own, or with a ``latency`` in the
    time of a robot that is a model."""
    assert acting.predictor is not None, "every policy of a command line has one"
    spec = env.spec
    if chunks.relative is None:
        chunks = replace(chunks, relative=spec.action_mode == DISPLACEMENTS)
    inference = (
        SubprocessWorker(acting.predictor)
        if latency is None
        else Simulated(acting.predictor(), RobotTime(env), latency)
    )
    try:
        return RealtimeChunking(inference, chunks, spec.control_hz)
    except RobotError:
        inference.close()
        raise


@contextmanager
def at_rest(env: RobotEnv) -> Iterator[RobotEnv]:
    """However it ends, the robot is at rest afterwards; who has lost the policy on the way is told so."""
    try:
        yield env
    except RobotError as error:
        env.close()
        report = env.reports[-1] if env.reports else {}
        if "stopped" in report.get("counts", {}):
            raise BurnishError(f"{error}; the robot was brought to rest") from error
        watched = f"; its watchdog says: {report['why']}" if "why" in report else ""
        raise BurnishError(f"{error}{watched}") from error
    finally:
        env.close()


def name_of(robot: Any) -> str:
    """As in ``robot=...``, or that of a plugin."""
    known = [name for name, kind in ROBOTS.items() if type(robot) is kind]
    return robot.name if isinstance(robot, Hardware) else known[0]


def first_step(
    robot: Any, acting: ActionSource, body: Any, seed: int
) -> tuple[np.ndarray, np.ndarray, list[float] | None]:
    """(where the joints are, the first set-points that the policy asks for, in rad, and of the gripper). Hardware is
    read, a model begins where the episode does, and nothing is moved."""
    body.begin(seed)
    here, gripper = body.start, 0.0
    if isinstance(robot, Hardware):
        adapter = make_adapter(robot.name, robot.device)
        try:
            adapter.configure()
            state = adapter.read(1.0)
            here, gripper = state.q, np.nan if state.gripper is None else state.gripper
        finally:
            adapter.close()
    body.see(*joined(body, here, np.zeros_like(here), gripper))
    controller, still = acting.make(1), StillWorld(body)
    seen = acting.view(still)
    controller.reset(torch.ones(1, dtype=torch.bool), [seed])
    seen.step(controller.step(seen.reset(None, [seed])))
    asked = body.targets(np.clip(still.asked, body.spec.action.low, body.spec.action.high))
    return here, *parted(body, asked)


def conclude(reports: Sequence[Mapping[str, Any]]) -> int:
    """Says what the guard and the loop have counted over all episodes; exit status: 1 if the robot was brought to rest
    within one of them."""
    counts: dict[str, int] = {}
    for report in reports:
        for kind, count in report.get("counts", {}).items():
            counts[kind] = counts.get(kind, 0) + count
    ticks = sum(report.get("timing", {}).get("ticks", 0) for report in reports)
    misses = sum(report.get("timing", {}).get("misses", 0) for report in reports)
    of_note = {
        kind: counts[kind] for kind in sorted(counts) if counts[kind] and kind not in ("start", "stopped", "ramp")
    }
    words = ", ".join(f"{kind} {count}" for kind, count in of_note.items()) or "nothing"
    asked, changed = (
        sum(report.get("setpoints", {}).get(name, 0) for report in reports) for name in ("asked", "changed")
    )
    share = f"{changed / asked:.0%} of {asked} set-points were changed" if asked else "no set-point was asked for"
    events = [event for report in reports for event in report.get("events", [])]
    reasons = dict.fromkeys(x["text"] for x in events if x["kind"] == "ramp" and x["text"] != CALLED)
    why = "".join(f"; it stopped, because {reason}" for reason in reasons)
    say(f"the control loop: {ticks} ticks, {misses} deadlines missed; {share}; the guard and the ladder: {words}{why}")
    return int(bool(reasons))


def require_quick(realtime: bool, body: Any, inference: Mapping[str, float]) -> None:
    """Refuses a policy that needs longer than a control tick; ``inference`` in ms."""
    if inference["p50"] > 1e3 / body.spec.control_hz and realtime:
        raise BurnishError("the policy is slower than its own control rate; export it, or run it on a faster machine")


def write_json(folder: str | None, name: str, data: Mapping[str, Any]) -> None:
    """The file ``name`` in a folder, written with ``data``; nothing where no folder is given."""
    if folder is not None:
        write(Path(folder) / name, json.dumps(data, indent=1) + "\n")
