"""Entry points: ``burnish finetune``, a policy, a method, a world, and ``burnish distill``, teachers and a student."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import MISSING

from ..offline.__main__ import Work, identity_of, improve, recordings, starting_policy
from ..policies.__main__ import ACTING, WORLDS, TrialConfig, origin_of, say, seen_by, trial_of, where_of, world_for
from ..policies.__main__ import prepare as prepare_machine
from ..policies.build import POLICIES, CheckpointConfig, load_policy
from ..policies.cli.cli import main
from ..policies.controllers import controller_for
from ..policies.core.config import require_least, to_data
from ..policies.core.errors import BurnishError
from ..policies.core.files import replacing
from ..policies.core.scale import ScaledEnv
from ..policies.core.seed import derive
from ..policies.core.spec import EnvSpec, PolicySpec, agent_spec
from ..policies.core.types import Controller, VecEnv
from ..policies.core.wrapper import Wrapper
from ..policies.data.episodes import Episodes
from ..policies.data.lerobot import fingerprint, read_lerobot
from ..policies.flow import FlowConfig
from ..policies.imitate import ImitateConfig, ImitationLearner, imitate
from ..policies.measure.evaluate import Evaluation, evaluate, evaluation_seeds
from ..policies.runs.interrupt import interruptible
from ..policies.runs.run import OnLog, Run
from ..sim.build import make_env, world_from
from ..sim.collect import stream
from ..sim.experts import make_expert
from .advice import advised
from .baselines.sb3 import SB3Config, View
from .build import CHOICES, METHODS, method_name, prepare, prior_data, require
from .loops import OffPolicy, OffPolicyConfig, planned
from .methods.distill import Distillation, innermost, student_of
from .people.interventions import supervisor_of
from .people.teachers import (
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
from .processes.asynchronous import Asynchronous, AsynchronousConfig

GROUPS: dict[str, dict[str, dict[str, type]]] = {
    "finetune": {
        "policy": ACTING,
        "method": {name: method.config for name, method in CHOICES.items()},
        "env": WORLDS,
    },
    "distill": {
        "policy": {name: kind.config for name, kind in POLICIES.items()} | {"checkpoint": CheckpointConfig},
        "env": WORLDS,
    },
}


@dataclass
class FinetuneConfig:
    """``total`` and the intervals count decisions of all worlds together; they are rounded to whole iterations."""

    policy: Any = None  # where to start; null: from nothing, for methods that can
    method: Any = MISSING  # the method; each has a page in docs/methods
    view: View | None = None  # of method=sb3: what its algorithm chooses
    env: Any = None  # by default the world that the policy was trained for
    worlds: int = 8  # stepped at once
    total: int = 100_000  # decisions of all worlds together
    data: str | None = None  # a folder of recordings, part of every batch of the methods that can use them
    expert: str | None = None  # for the methods that learn from people: how good the scripted one is who takes over
    out: str = "runs/refined"  # folder of the run
    track: list[str] = field(default_factory=list)  # besides JSONL and TensorBoard: wandb, trackio, rerun
    log_every: int = 1000  # decisions between two rows of metrics
    save_every: int = 20_000  # decisions between two checkpoints
    eval_every: int = 0  # 0: only before and after
    trial: TrialConfig = field(default_factory=TrialConfig)  # evaluations during training and at the end
    seed: int = 0  # of every random draw
    processes: int = 1  # 2: one acts while the other learns, for the methods that learn from a replay
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)  # of processes=2
    device: str = "cpu"  # where networks run: cpu, cuda, cuda:1
    threads: int = 0  # 0: as torch chooses
    resume: bool = False  # continue the run that an interrupted call left at out=

    def __post_init__(self) -> None:
        require_least(self, {**dict.fromkeys(("worlds", "total", "log_every", "save_every"), 1), "eval_every": 0})
        if self.processes not in (1, 2):
            raise BurnishError(f"processes={self.processes} must be 1, or 2: one acts while the other learns")


def finetune(config: FinetuneConfig) -> int:
    return carry_out(config, *refinement(config))


def refinement(config: FinetuneConfig, base: Any = None, env: VecEnv | None = None) -> tuple[Work, Any]:
    """What is to be done, ready to start, and the loop in it. ``base`` and ``env`` are what a program hands in where
    settings can name none."""
    device, name = prepare_machine(config.device, config.threads), method_name(config.method)
    if config.view is not None:
        config.method = on_view(config.method, config.view)
    base, world, spec, env = scene(config, device, config.seed, base, env)
    warmup = getattr(getattr(config.method, "loop", None), "warmup", 0)
    if config.total <= warmup:
        raise BurnishError(
            f"total={config.total} decisions end within the warm-up of {warmup}, so nothing would be learnt; "
            "raise total or lower method.loop.warmup"
        )
    prior = None
    if config.data is not None:
        data = recordings(config.data)
        recorded_in = data.meta.get("env")
        if recorded_in and world and recorded_in["name"] != world["name"]:
            raise BurnishError(
                f"{config.data} was recorded in {recorded_in['name']}, but the policy is refined in {world['name']}; "
                "take recordings of the same world, or none"
            )
        prior, sentence = prior_data(
            config.method, base, env, data, limits=spec.action, seed=config.seed, device=device
        )
        say(sentence)
    expert = intervener(config, world, spec, env)
    loop = prepare(
        config.method, base, env, prior=prior, expert=expert, limits=spec.action, seed=config.seed, device=device
    )
    training = loop if config.processes == 1 else apart(config, loop)
    learner = loop.learner
    if sentence := learner.describe():
        say(sentence)
    work = Work(
        training=training,
        learner=learner,
        base=base,
        trial=trial_of(world, learner.policy.spec, config.trial, device),
        origin={"env": world, "method": name, "base": None if config.policy is None else where_of(config.policy)},
        identity={
            "method": name,
            "env": world,
            "policy": identity_of(config.policy, base),
            "data": None if config.data is None else fingerprint(config.data),
        },
        report=advised(training, say),
        iterations=planned(loop, config.total),
        reached=lambda: loop.statistics.decisions,
    )
    return work, loop


def carry_out(config: FinetuneConfig, work: Work, loop: Any, *, keep: bool = True, on_log: OnLog | None = None) -> int:
    per_iteration, training = loop.decisions_per_iteration, work.training
    with closing(training) if isinstance(training, Asynchronous) else nullcontext():
        status = improve(
            config, work, config.total, per_iteration=per_iteration, unit="decisions", keep=keep, on_log=on_log
        )
    if keep and getattr(config.method, "keep_zip", False):
        target = Path(config.out) / "sb3.zip"
        with replacing(target) as file:
            loop.learner.model.save(file)
        say(
            f"{target} is for SB3 alone; it is pickle, which can run code when it is loaded, and Burnish never reads it"
        )
    return status


def scene(
    config: FinetuneConfig, device: torch.device, seed: int, base: Any = None, env: VecEnv | None = None
) -> tuple[Any, dict[str, Any] | None, PolicySpec, VecEnv]:
    """The base, which world it acts in, as what, and that world; ``seed`` decides the episodes."""
    origin = getattr(base, "origin", {})
    if base is None:
        base, origin = starting_policy(config.policy, device, config.env)
    require(method_name(config.method), base)
    world = None if env is not None else origin_of(config.env) or origin.get("env")
    if base is not None:
        spec = base.spec
    else:
        spec = _spec_in(_specified(world) if env is None else env.spec, getattr(config.method, "history", 1))
    return base, world, spec, world_for(spec, world, config.worlds, device, seed) if env is None else seen_by(spec, env)


def apart(config: FinetuneConfig, loop: Any) -> Asynchronous:
    if type(loop) is not OffPolicy:
        able = [name for name, row in METHODS.items() if isinstance(row.config().loop, OffPolicyConfig)]
        raise BurnishError(
            f"processes=2 is for methods that learn from our replay, and method={method_name(config.method)} does not; "
            f"take processes=1, or one of {', '.join(f'method={name}' for name in able)}"
        )
    if not config.threads:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # one is the actor's
    say("acting in a process of its own: how the two keep pace is up to the clock, so no such run repeats bit for bit")
    return Asynchronous(loop, acting, config, config.asynchronous, total=config.total, seed=config.seed, tell=say)


def acting(config: FinetuneConfig, seed: int) -> OffPolicy[Any]:
    """The same method once more, as the acting process builds it."""
    device = prepare_machine(config.device, config.threads or 1)
    base, world, spec, env = scene(config, device, seed)
    expert = intervener(config, world, spec, env)
    options: dict[str, Any] = {"expert": expert, "limits": spec.action, "seed": seed, "device": device}
    loop = prepare(config.method, base, env, probe=False, **options)
    assert isinstance(loop, OffPolicy), "the learner has one"
    return loop


def on_view(method: Any, view: View) -> Any:
    if not isinstance(method, SB3Config):
        raise BurnishError(
            f"view={view.name} is a choice of method=sb3; method={method_name(method)} has the view that it needs, "
            "so leave view= out"
        )
    return replace(method, view=view)


def intervener(
    config: FinetuneConfig, world: dict[str, Any] | None, spec: PolicySpec, env: VecEnv
) -> Controller | None:
    """Who takes over in ``env``: a scripted expert, who looks at the worlds behind it; nobody of ours, where somebody
    stands beside the robot."""
    beside = supervisor_of(env)
    if config.expert is None:
        if hasattr(config.method, "intervention") and beside is None:
            raise BurnishError(
                f"method={method_name(config.method)} learns from somebody who takes over; say who, for example "
                "expert=clean or expert=noisy, or in Python a RobotEnv with a supervisor"
            )
        return None
    if beside is not None:
        raise BurnishError("the robot has a supervisor, who takes it over; leave expert= out")
    if world is None:
        raise BurnishError("an expert plays in worlds that settings name; give env=... instead of an object")
    raw = env
    while isinstance(raw, Wrapper):
        raw = raw.env
    if raw.spec.action != spec.action:
        raise BurnishError(
            f"an expert commands the whole of the actuators of {world['name']}, {raw.spec.action}, but the policy "
            f"{spec.action}; train it with the limits of the world"
        )
    seed = derive(config.seed, "expert")
    return make_expert(world_from(world), config.worlds, config.expert, seed=seed, device=raw.device, env=raw)


def _spec_in(world: EnvSpec, history: int) -> PolicySpec:
    """Of a policy that starts from nothing: it sees the world as it is, and commands the whole of its actuators."""
    return replace(agent_spec(world, history=1), history=history, action=world.action)


def _specified(world: dict[str, Any] | None) -> EnvSpec:
    if world is None:
        raise BurnishError("without a policy nothing says which world to act in; give env=...")
    return make_env(world_from(world), 1).spec


@dataclass
class DistillConfig:
    teachers: list[str] = MISSING  # what refinement (or pretraining) left behind: run folders
    env: Any = None  # where all of them play; by default each in the world that it was trained for
    policy: Any = None  # the student; null: a fresh flow, or the teacher's base where consolidate=true
    episodes: int = 400  # that each teacher plays, and the student in each round with each teacher
    keep: Keep = Keep.successes  # which episodes of the teachers are imitated
    keys: list[str] = field(default_factory=list)  # what a fresh student sees; empty: all that the worlds show
    chunk: StudentChunk = field(default_factory=StudentChunk)  # of a fresh student
    rounds: int = 0  # DAgger: the student plays, the teachers relabel, and it learns for train.steps more
    consolidate: bool = False  # the base of the one teacher learns to do by itself what was put together
    train: ImitateConfig = field(default_factory=ImitateConfig)  # imitation by the student
    trial: TrialConfig = field(default_factory=TrialConfig)  # evaluations during training and at the end
    worlds: int = 50  # stepped at once
    out: str = "runs/student"  # folder of the run
    track: list[str] = field(default_factory=list)  # besides JSONL and TensorBoard: wandb, trackio, rerun
    seed: int = 0  # of every random draw
    device: str = "cpu"  # where networks run: cpu, cuda, cuda:1
    threads: int = 0  # 0: as torch chooses
    resume: bool = False  # continue the run that an interrupted call left at out=

    def __post_init__(self) -> None:
        require_least(self, {"episodes": 1, "worlds": 1, "rounds": 0})
        if not self.teachers or len(set(self.teachers)) < len(self.teachers):
            raise BurnishError(f"teachers={self.teachers} must name at least one policy, and none twice")
        if self.consolidate and (len(self.teachers) > 1 or self.rounds or self.policy is not None):
            raise BurnishError("consolidate=true trains the base of one teacher; leave out policy=, rounds= and others")
        fresh = not self.consolidate and not isinstance(self.policy, CheckpointConfig)
        if not fresh and (self.keys or self.chunk != StudentChunk()):
            raise BurnishError("keys= and chunk= are of a fresh student; one that was trained before keeps its own")


def distill(config: DistillConfig) -> int:
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
        return read_lerobot(folder)

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
        episodes = read_lerobot(out / "data")
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
        trial = against(teachers, _examined(config.trial, device), say)
        # What `imitate` asks of a learner, a distillation has.
        finished = imitate(cast(ImitationLearner, learner), run, evaluate=trial, origin=origin)
    if not finished:
        say(f"stopped at step {learner.step} of {learner.config.steps}; continue with resume=true")
        return 130
    where = "" if world is not None and config.env is None else " env=..."
    say(f"policy: {out}  (burnish evaluate policy.path={out} against={config.teachers[0]}{where})")
    return 0


def _teacher(path: str, config: DistillConfig, device: torch.device) -> Teacher:
    policy, origin = load_policy(path, device)
    world = origin_of(config.env) or origin.get("env") or {}
    view = world_for(policy.spec, world or None, min(config.worlds, config.episodes), device)
    return Teacher(path, policy, world, cast(ScaledEnv, view).env)


def _examined(config: TrialConfig, device: torch.device) -> Callable[[Any, dict[str, Any]], Evaluation]:
    """An evaluation of a policy in a world, on seeds kept for selection."""
    seeds = evaluation_seeds(config.episodes, stream="select")

    def examine(policy: Any, world: dict[str, Any]) -> Evaluation:
        env = world_for(policy.spec, world, min(config.worlds, config.episodes), device)
        return evaluate(env, controller_for(policy, env.num_envs, greedy=config.greedy, device=device), seeds)

    return examine


if __name__ == "__main__":
    sys.exit(main())
