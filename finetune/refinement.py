"""A refinement from settings: a policy, a method and a world, joined and carried out.

``burnish finetune`` and `api.py` share this module. It makes worlds, so it is as free as they are to import ``sim``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING

from ..policies.acting import evaluator_of, recordings, starting_policy
from ..policies.build import identity_of, where_of
from ..policies.cli.executors import LOCAL, names_place
from ..policies.cli.machine import prepare_machine, say
from ..policies.cli.ray_tasks import address_of
from ..policies.core.config import LATER
from ..policies.core.errors import BurnishError
from ..policies.core.execute import Execution, with_execution
from ..policies.core.ranges import check_ranges
from ..policies.core.ranks import sharing
from ..policies.core.rewards import RewardConfig
from ..policies.core.scale import ScaledEnv, narrower
from ..policies.core.seed import derive
from ..policies.core.spec import PolicySpec, agent_spec
from ..policies.core.types import Controller, VecEnv
from ..policies.core.wrapper import Wrapper, description
from ..policies.data.read import fingerprint
from ..policies.evaluator import EvalConfig
from ..policies.external.reward_models import relabelled, rewarded
from ..policies.improve import Improvement, improve
from ..policies.runs.checkpoint import newest
from ..policies.runs.run import CHECKPOINTS, METRICS, OnLog, read_metrics
from ..policies.runs.training_loop import to_end
from ..sim.build import make_env, origin_of, raw_world, seen_by, world_from
from ..sim.experts import make_expert
from .advice import advised
from .baselines.sb3 import View
from .build import own_chunk, prepare, prior_data, require
from .data_parallel import share_of
from .exploration.build import explored, require_rewards, row_of
from .loops import Loop, OffPolicy, planned
from .method import LoopKind, Needs
from .people.intervened_rows import InterventionUse
from .people.interventions import supervisor_of
from .processes.asynchronous import Asynchronous, AsynchronousConfig
from .processes.ray_actors import RayActors
from .sharded_actor import home
from .table import METHODS, ONLINE, method_name, method_of
from .warm_critic import adopt_critic
from .warm_model import adopt_model
from .warmup import require_longer


@dataclass
class FinetuneConfig:
    """``total`` and the intervals count decisions of all worlds together; they are rounded to whole iterations."""

    policy: Any = None  # policy to start from; null: from nothing, for methods that can
    method: Any = MISSING  # the method; each has a page in docs/methods
    view: View | None = None  # quantity that the algorithm chooses, of method=sb3
    env: Any = None  # world; by default the one that the policy was trained for
    # a simulation of that world, for the methods that learn a model: it learns what the twin leaves unexplained; or for
    # explore=information
    twin: Any = field(default=None, metadata={**LATER, "group": "env"})
    worlds: int = 8  # worlds that are stepped at once
    total: int = 100_000  # decisions of all worlds together
    data: str | None = None  # a folder of recordings, part of every batch of the methods that can use them
    # updates from the recordings alone, before anything is played: offline to online in one run
    pretrain_updates: int = field(default=0, metadata=LATER)
    # folder of a run whose critic this one begins with; its method and its critic's sizes are those of that run
    critic_from: str | None = field(default=None, metadata=LATER)
    # folder of a run of imagine or mbpo whose model of the world, with its ticks, this one begins with
    model_from: str | None = field(default=None, metadata=LATER)
    # changes to the rewards of the world, for the learner, and to those of the recordings
    rewards: RewardConfig = field(default_factory=RewardConfig, metadata=LATER)
    # a part of the reward for what is new, in the worlds that are learnt in
    explore: Any = field(default=None, metadata=LATER)
    expert: str | None = None  # level of the scripted expert who takes over, for the methods that learn from people
    out: str = "runs/refined"  # folder of the run
    track: list[str] = field(default_factory=list)  # trackers besides JSONL and TensorBoard: wandb, trackio, rerun
    log_every: int = 1000  # decisions between two rows of metrics
    save_every: int = 20_000  # decisions between two checkpoints
    eval_every: int = 0  # decisions between two evaluations; 0: only before and after
    eval: EvalConfig = field(default_factory=EvalConfig)  # evaluations during training and at the end
    seed: int = 0  # seed of every random draw
    # runs that learn together, with the seeds seed, seed + 1, ...; the seed ends the name of each one's folder
    seeds: int = field(default=1, metadata=LATER)
    # processes; 2: one acts while the other learns, for the methods that learn from a replay; with more, all others act
    processes: int = 1
    on: str = LOCAL  # machines of the acting processes: local, ray or ray:HOST:PORT
    asynchronous: AsynchronousConfig = field(default_factory=AsynchronousConfig)  # settings of several processes
    device: str = "cpu"  # device of the networks: cpu, cuda, cuda:1
    threads: int = 0  # CPU threads of torch; 0: as torch chooses
    # checkpoints hold what was trained, and of the weights of the base their sha256 alone
    partial: bool = field(default=False, metadata=LATER)
    resume: bool = False  # continue the run that an interrupted call left at out=

    def __post_init__(self) -> None:
        positive = "worlds total log_every save_every processes seeds"
        check_ranges(self, {"[1, inf)": positive, "[0, inf)": "eval_every pretrain_updates"})
        if not names_place(self.on):
            raise BurnishError(f"on={self.on} is no place for acting processes; take local, ray or ray:HOST:PORT")
        if self.on != LOCAL and self.processes == 1:
            raise BurnishError(
                f"on={self.on} is for acting processes; take some, such as processes=5: four act, one learns"
            )
        if self.seeds > 1 and (self.processes > 1 or self.track):
            raise BurnishError(
                f"seeds={self.seeds} learn together in one process, which tells no tracker; leave processes= and "
                "track= out, or take seeds=1"
            )
        if self.processes > 1 and self.explore is not None:
            raise BurnishError(
                f"explore=... learns from the worlds of one process alone, and processes={self.processes} are several; "
                "take processes=1, or leave explore= out"
            )
        if self.processes > 1 and self.worlds % (self.processes - 1):
            raise BurnishError(
                f"worlds={self.worlds} does not divide among the {self.processes - 1} acting processes of "
                f"processes={self.processes}; take a multiple of them"
            )


def refinement(
    config: FinetuneConfig,
    base: Any = None,
    env: VecEnv | None = None,
    *,
    tried: bool = True,
    tell: Callable[[str], None] = say,
) -> tuple[Improvement, Loop[Any]]:
    """The improvement, ready to start, and the loop in it. A program hands in ``base`` and ``env`` where settings can
    name none, and may try the policies itself (``tried=False``). ``tell`` is given the lines that are said before the
    start."""
    if config.seeds > 1:
        raise BurnishError(f"seeds={config.seeds} are several runs, and this is one; use `burnish finetune`")
    ranks = sharing()
    device, name = prepare_machine(config.device, config.threads, ranks.size), method_name(config.method)
    if ranks.size > 1:
        config = share_of(config, ranks)
    if config.view is not None:
        config.method = on_view(config.method, config.view)
    row = method_of(config.method)
    if config.explore is not None:
        require_rewards(name, row, recordings=config.data is not None)
    base, world, spec, env = scene(config, device, config.seed, base, env)
    for line in filter(None, (description(env), narrower(spec.action, env.env.spec.action))):
        tell(line)
    require_longer(config.method, config.total)
    prior = None
    if config.data is not None:
        data = relabelled(recordings(config.data), config.rewards)
        recorded_in = data.meta.get("env")
        if recorded_in and world and recorded_in["name"] != world["name"]:
            raise BurnishError(
                f"{config.data} was recorded in {recorded_in['name']}, but the policy is refined in {world['name']}; "
                "take recordings of the same world, or none"
            )
        prior, sentence = prior_data(
            config.method, base, env, data, limits=spec.action, seed=config.seed, device=device
        )
        tell(sentence)
    if base is None and prior is None and row.learner:
        raise BurnishError(
            f"method={name} begins with recordings or with a policy, and neither was given; name recordings, "
            "data=FOLDER, or a policy, policy.path=..."
        )
    expert = intervener(config, world, spec, env)
    loop = prepare(
        config.method,
        base,
        env,
        prior=prior,
        pretrain_updates=config.pretrain_updates,
        expert=expert,
        twin=twin_of(config, spec, device),
        limits=spec.action,
        seed=config.seed,
        device=device,
    )
    learner = loop.learner
    resumed = config.resume and newest(Path(config.out) / CHECKPOINTS) is not None  # it has what it began with
    if config.critic_from is not None and not resumed:
        adopt_critic(learner, config.critic_from)
    if config.model_from is not None and not resumed:
        adopt_model(loop, config.model_from, config, world, spec.action)
    training = loop if config.processes == 1 else in_processes(config, loop)
    tries = tried and ranks.first
    work = Improvement(
        training=training,
        learner=learner,
        base=base,
        evaluator=evaluator_of(world, learner.policy.spec, config.eval, device, quiet=True) if tries else None,
        origin={"env": world, "method": name, "base": None if config.policy is None else where_of(config.policy)},
        identity={
            "method": name,
            "env": world,
            "policy": identity_of(config.policy, base),
            "data": None if config.data is None else fingerprint(config.data),
        },
        report=advised(training, say, lambda: read_metrics(config.out) if Path(config.out, METRICS).is_file() else ()),
        iterations=planned(loop, config.total),
        reached=lambda: loop.statistics.decisions,
        pretrained=loop.pretraining,
        partial=config.partial,
        ranks=ranks,
    )
    if sentence := learner.describe():  # of what is planned too
        tell(sentence)
    return work, loop


def carry_out(
    config: FinetuneConfig,
    work: Improvement,
    loop: Loop[Any],
    *,
    keep: bool = True,
    on_log: OnLog | None = None,
    begin: Callable[[], None] | None = None,
    pause: Callable[[], bool] | None = None,
) -> int:
    """The run of a loop that is built already: trained, tried, saved and delivered; exit status."""
    per_iteration, training = loop.decisions_per_iteration, work.training
    with closing(training) if isinstance(training, Asynchronous) else nullcontext():
        options: dict[str, Any] = {"keep": keep, "on_log": on_log, "begin": begin, "pause": pause}
        status = to_end(improve(config, work, config.total, per_iteration=per_iteration, unit="decisions", **options))
    if keep and (sentence := loop.deliver(Path(config.out))):
        say(sentence)
    return status


def scene(
    config: FinetuneConfig, device: torch.device, seed: int, base: Any = None, env: VecEnv | None = None
) -> tuple[Any, dict[str, Any] | None, PolicySpec, ScaledEnv]:
    """The base, which world it acts in, as what, and that world; ``seed`` decides the episodes."""
    origin = getattr(base, "origin", {})
    if base is None:
        base, origin = starting_policy(config.policy, home(config.method, device), config.env)
    require(config.method, base)
    world = None if env is not None else origin_of(config.env) or origin.get("env")
    if base is not None:
        spec = base.spec
    elif world is None and env is None:
        raise BurnishError("without a policy nothing says which world to act in; give env=...")
    else:  # from nothing a policy sees the world as it is, and commands the whole of its actuators
        shown = make_env(world_from(world or {}), 1).spec if env is None else env.spec
        history = own_chunk(config.method).history
        spec = replace(agent_spec(shown, history=1), history=history, action=shown.action)
    raw = raw_world(world, config.worlds, device, seed) if env is None else env
    twin = raw_twin(config, device) if explores_by_twin(config) else None
    raw = explored(rewarded(raw, config.rewards), config.explore, seed, twin)
    return base, world, spec, seen_by(spec, raw)


TWINS = 64  # simulations under a model, whose imagined worlds ask for many ticks at once


def twin_of(config: FinetuneConfig, spec: PolicySpec, device: torch.device) -> VecEnv | None:
    """The simulation that a model stands on, as the policy sees it."""
    twin = None if explores_by_twin(config) else raw_twin(config, device, TWINS)
    return None if twin is None else seen_by(spec, twin)


def raw_twin(config: FinetuneConfig, device: torch.device, worlds: int = 0) -> VecEnv | None:
    """The twin in units of its actuators, as ``worlds`` at once, or as many as are refined in."""
    if config.twin is None:
        return None
    return raw_world(origin_of(config.twin), max(config.worlds, worlds), device, config.seed)


def explores_by_twin(config: FinetuneConfig) -> bool:
    """Whether the twin is for exploration, not for a model."""
    return config.explore is not None and row_of(config.explore).twin


def in_processes(config: FinetuneConfig, loop: Loop[Any]) -> Asynchronous:
    """The off-policy loop with its worlds in processes of their own; another kind of loop is refused."""
    if not isinstance(loop, OffPolicy):
        able = [name for name in ONLINE if METHODS[name].loop is LoopKind.off_policy]
        raise BurnishError(
            f"processes={config.processes} is for methods that learn from our replay, and "
            f"method={method_name(config.method)} does not; take processes=1, or one of "
            f"{', '.join(f'method={name}' for name in able)}"
        )
    actors, theirs, options = config.processes - 1, config, dict[str, Any]()
    if config.on == LOCAL:
        if not config.threads:
            torch.set_num_threads(max(1, torch.get_num_threads() - actors))  # one each is theirs
    else:
        cluster = RayActors(address_of(config.on))
        options = {"launch": cluster.launch, "share": cluster.share}
        method = with_execution(config.method, Execution.eager)
        theirs = replace(config, method=method, device="cpu", threads=1)  # a core each; a GPU is the learner's
    theirs = replace(theirs, worlds=config.worlds // actors, processes=2)
    where = "a process of its own" if actors == 1 else f"{actors} processes of their own"
    say(f"acting in {where}: how all keep pace is up to the clock, so no such run repeats bit for bit")
    options |= {"actors": actors, "total": config.total, "seed": config.seed, "tell": say}
    return Asynchronous(loop, acting, theirs, config.asynchronous, **options)


def acting(config: FinetuneConfig, seed: int) -> OffPolicy[Any]:
    """The same method once more, as the acting process builds it."""
    device = prepare_machine(config.device, config.threads or 1)
    base, world, spec, env = scene(config, device, seed)
    expert = intervener(replace(config, seed=seed), world, spec, env)
    options: dict[str, Any] = {"expert": expert, "limits": spec.action, "seed": seed, "device": device}
    loop = prepare(config.method, base, env, probe=False, **options)
    assert isinstance(loop, OffPolicy), "the learner has one"
    return loop


def on_view(method: Any, view: View) -> Any:
    """The settings of method=sb3 with another view; another method is refused."""
    if method_of(method).needs is not Needs.view:
        raise BurnishError(
            f"view={view.name} is a choice of method=sb3; method={method_name(method)} has the view that it needs, "
            "so leave view= out"
        )
    return replace(method, view=view)


def intervener(
    config: FinetuneConfig, world: dict[str, Any] | None, spec: PolicySpec, env: VecEnv
) -> Controller | None:
    """The scripted expert that takes over in ``env`` and looks at the worlds behind it; None where a person stands
    beside the robot."""
    beside = supervisor_of(env)
    if config.expert is None:
        if method_of(config.method).interventions is InterventionUse.taught and beside is None:
            raise BurnishError(
                f"method={method_name(config.method)} learns from interventions; say who intervenes, for example "
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
