"""Entry point: ``burnish distill``. Teachers and a student."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import MISSING

from ...policies.build import SAVED, CheckpointConfig, identity_of, load_policy
from ...policies.cli.cli import main
from ...policies.cli.machine import prepare_machine, say, say_delivered
from ...policies.controllers import controller_for
from ...policies.core.config import to_data
from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges, require_usual
from ...policies.core.scale import ScaledEnv
from ...policies.data.episodes import Episodes
from ...policies.data.read import read_dataset
from ...policies.evaluator import EvalConfig
from ...policies.flow import FlowConfig
from ...policies.imitate import ImitateConfig, ImitationLearner, imitate
from ...policies.measure.evaluate import Evaluation, evaluate, evaluation_seeds
from ...policies.runs.interrupt import interruptible
from ...policies.runs.run import Run
from ...policies.table import POLICIES
from ...sim.build import WORLDS, origin_of, world_for
from ...sim.collect import stream
from ..methods.distill import Distillation, innermost, student_of
from ..people.teachers import (
    Keep,
    StudentChunk,
    Teacher,
    against,
    record,
    require_at_home,
    require_rounds,
    scenes,
    shared_spec,
    student_spec,
)

GROUPS: dict[str, dict[str, Mapping[str, type]]] = {
    "distill": {
        "policy": {name: kind.config for name, kind in POLICIES.items()} | SAVED,
        "env": WORLDS,
    },
}


@dataclass
class DistillConfig:
    """Settings of `burnish distill`: teachers, student, episodes, and rounds of learning."""

    teachers: list[str] = MISSING  # run folders of the teachers, which refinement or pretraining left behind
    env: Any = None  # world in which all of them play; by default each in the one that it was trained for
    policy: Any = None  # the student; null: a fresh flow, or the teacher's base where consolidate=true
    episodes: int = 400  # episodes that each teacher plays, and the student in each round with each teacher
    keep: Keep = Keep.successes  # episodes of the teachers that are imitated
    keys: list[str] = field(default_factory=list)  # observations of a fresh student; empty: all that the worlds show
    chunk: StudentChunk = field(default_factory=StudentChunk)  # chunk of a fresh student
    rounds: int = 0  # DAgger: the student plays, the teachers relabel, and it learns for train.steps more
    consolidate: bool = False  # the base of the one teacher learns to do by itself what was put together
    train: ImitateConfig = field(default_factory=ImitateConfig)  # imitation by the student
    eval: EvalConfig = field(default_factory=EvalConfig)  # evaluations during training and at the end
    worlds: int = 50  # worlds that are stepped at once
    out: str = "runs/student"  # folder of the run
    track: list[str] = field(default_factory=list)  # trackers besides JSONL and TensorBoard: wandb, trackio, rerun
    seed: int = 0  # seed of every random draw
    device: str = "cpu"  # device of the networks: cpu, cuda, cuda:1
    threads: int = 0  # CPU threads of torch; 0: as torch chooses
    resume: bool = False  # continue the run that an interrupted call left at out=

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf)": "episodes worlds", "[0, inf)": "rounds"})
        if not self.teachers or len(set(self.teachers)) < len(self.teachers):
            raise BurnishError(f"teachers={self.teachers} must name at least one policy, and none twice")
        if self.consolidate and (len(self.teachers) > 1 or self.rounds or self.policy is not None):
            raise BurnishError("consolidate=true trains the base of one teacher; leave out policy=, rounds= and others")
        require_usual(
            self.eval, EvalConfig(), "confirm", "by `burnish distill`, which delivers its last student", "eval."
        )
        fresh = not self.consolidate and not isinstance(self.policy, CheckpointConfig)
        if not fresh and (self.keys or self.chunk != StudentChunk()):
            raise BurnishError("keys= and chunk= are of a fresh student; one that was trained before keeps its own")


def distill(config: DistillConfig) -> int:
    """One student, trained on the episodes of all teachers, tried in their worlds and saved; exit status."""
    device, out = prepare_machine(config.device, config.threads), Path(config.out)
    teachers = [_teacher(path, config, device) for path in config.teachers]
    spec = shared_spec(teachers)
    if config.consolidate:
        student, fresh = innermost(teachers[0].policy, teachers[0].name), False
    else:
        made = student_spec(spec, config.keys, config.chunk, teachers[0].policy.spec)
        student, fresh = student_of(config.policy or FlowConfig(), made, seed=config.seed, device=device)
    require_at_home(student.spec, spec)
    if config.rounds:
        require_rounds(student.spec, teachers)
    identity = {"teachers": [identity_of(CheckpointConfig(path)) for path in config.teachers]}
    if isinstance(config.policy, CheckpointConfig):
        identity["policy"] = [identity_of(config.policy)]
    world = teachers[0].world if all(teacher.world == teachers[0].world for teacher in teachers) else None
    about = {"env": world, "keep": config.keep.name, "seed": config.seed, "identity": identity}

    def relabelled(number: int, playing: Any) -> Episodes:
        folder = out / f"round_{number:02d}"
        if playing is not None:
            plays = scenes(teachers, config.episodes, seed=config.seed, round=number, student=playing)
            record(folder, spec, about | {"round": number}, plays, stream)
        return read_dataset(folder)

    settings = to_data(config) | {"identity": identity}
    free = {"resume", "threads", "out", "track", "teachers", "policy.path"}
    with Run(out, settings, resume=config.resume, changeable=free, progress_every_s=10, trackers=config.track) as run:
        if run.start == 0:
            plays = scenes(teachers, config.episodes, seed=config.seed)
            with interruptible() as stop:
                whole = record(out / "data", spec, about, plays, stream, keep=config.keep, stop=lambda: stop.requested)
            if not whole:
                say("stopped while the teachers were playing; continue with resume=true")
                return 130
        episodes = read_dataset(out / "data")
        say(f"{out / 'data'}: {len(episodes)} episodes kept of {config.episodes * len(teachers)}")
        learner = Distillation(
            student,
            episodes,
            config.train,
            fit=fresh,
            asked=teachers[0].policy if config.consolidate else None,
            rounds=config.rounds,
            relabelled=relabelled,
            seed=config.seed,
            device=device,
        )
        if run.start >= learner.config.steps:
            say(f"{out} has reached its {learner.config.steps} steps already; nothing is trained")
        origin = {"env": world, "teachers": config.teachers, "worlds": [teacher.world for teacher in teachers]}
        tried = config.eval.episodes > 0
        evaluator = against(teachers, _examined(config.eval, device), say) if tried else None
        # A distillation has all that `imitate` asks of a learner.
        finished = imitate(cast(ImitationLearner, learner), run, evaluate=evaluator, origin=origin)
    if not finished:
        say(f"stopped at step {learner.step} of {learner.config.steps}; continue with resume=true")
        return 130
    say_delivered(out, world, f"against={config.teachers[0]}")
    return 0


def _teacher(path: str, config: DistillConfig, device: torch.device) -> Teacher:
    policy, origin = load_policy(path, device)
    world = origin_of(config.env) or origin.get("env") or {}
    view = world_for(policy.spec, world or None, min(config.worlds, config.episodes), device)
    return Teacher(path, policy, world, cast(ScaledEnv, view).env)


def _examined(config: EvalConfig, device: torch.device) -> Callable[[Any, dict[str, Any]], Evaluation]:
    """An evaluation of a policy in a world, on seeds kept for selection."""
    seeds = evaluation_seeds(config.episodes, stream="select")

    def examine(policy: Any, world: dict[str, Any]) -> Evaluation:
        env = world_for(policy.spec, world, min(config.worlds, config.episodes), device)
        return evaluate(env, controller_for(policy, env.num_envs, greedy=config.greedy, device=device), seeds)

    return examine


if __name__ == "__main__":
    sys.exit(main())
