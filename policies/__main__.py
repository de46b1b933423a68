"""Entry points: ``burnish pretrain | evaluate``. Besides `acting.py`, no file of this folder imports ``sim``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING as ABSENT
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING

from ..offline.actors import trainable_imitator
from ..sim.build import WORLDS, origin_of, raw_world, seen_by
from .acting import acting_policy, complete, evaluator_of, recordings
from .best import Best
from .build import (
    ACTING,
    SAVED,
    CheckpointConfig,
    build_policy,
    weights_of,
    where_of,
)
from .cli.cli import main
from .cli.machine import prepare_machine, say, say_delivered
from .controllers import controller_for
from .core import files
from .core.config import from_data, to_data
from .core.errors import BurnishError, did_you_mean
from .core.execute import Execution
from .core.graphed_policy import executed
from .core.ranks import Ranks, joined
from .core.spec import ChunkConfig, check_compatible, unlike_names
from .core.types import VecEnv
from .core.wrapper import description, feature_names, instructions, state_names
from .data.episodes import share, with_tokens
from .data.read import fingerprint
from .evaluator import EvalConfig, in_words, unreported
from .imitate import ImitateConfig, ImitationLearner, imitate
from .measure.by_instruction import lines
from .measure.evaluate import Evaluation, compare, evaluation_seeds
from .measure.evaluate import evaluate as run_evaluation
from .results import ABOUT, compare_results
from .runs.run import FollowingRun, Run, episodes_bar, occupied
from .table import POLICIES, policy_name
from .vla.words import words_for

STARTS = 64  # numbers of a first state that are kept

# Hydra groups of each verb below: verb -> group -> choice -> dataclass.
GROUPS: dict[str, dict[str, dict[str, type]]] = {
    "pretrain": {
        "policy": {name: kind.config for name, kind in POLICIES.items()} | SAVED,
        "env": WORLDS,
    },
    "evaluate": {"policy": ACTING, "env": WORLDS},
}


@dataclass
class PretrainConfig:
    """Settings of `burnish pretrain`: recordings, a kind of policy, and how it is trained and tried."""

    data: str = MISSING  # a folder that `burnish collect` (or LeRobot) wrote
    share_episodes: bool = False  # each of several ranks reads the pictures of its share of the episodes alone
    # tokenizer.json by which the policy reads the tasks of the data; "tasks": one of their words alone. By default
    # policies that are made for language read so, and others do not read
    words: str | None = None
    out: str = "runs/bc"  # folder of the run
    track: list[str] = field(default_factory=list)  # trackers besides JSONL and TensorBoard: wandb, trackio, rerun
    policy: Any = MISSING  # kind of the policy: flow, diffusion, gaussian; or checkpoint, to go on from one
    env: Any = None  # world in which the policy is tried; by default the one that the data came from
    # chunk of a fresh policy; one from a checkpoint keeps its own
    chunk: ChunkConfig = field(default_factory=ChunkConfig)
    train: ImitateConfig = field(default_factory=ImitateConfig)  # imitation
    eval: EvalConfig = field(default_factory=EvalConfig)  # evaluations during training and at the end
    seed: int = 0  # seed of every random draw
    device: str = "cpu"  # device of the networks: cpu, cuda, cuda:1
    threads: int = 0  # CPU threads of torch; 0: as torch chooses
    resume: bool = False  # continue the run that an interrupted call left at out=

    def __post_init__(self) -> None:
        if isinstance(self.policy, CheckpointConfig) and self.chunk != ChunkConfig():
            raise BurnishError("a policy from a checkpoint keeps the chunk that it was trained with; leave out chunk.*")
        if isinstance(self.policy, CheckpointConfig) and self.words is not None:
            raise BurnishError("a policy from a checkpoint reads by its own tokenizer; leave out words")


@dataclass
class EvaluateConfig:
    """Settings of `burnish evaluate`: a policy, a world, the episodes, and perhaps a policy to compare with."""

    policy: Any = None  # policy to evaluate: policy=checkpoint policy.path=FOLDER, or another kind
    env: Any = None  # world; by default the one that the policy was trained for
    eval: EvalConfig = field(default_factory=EvalConfig)  # settings of the evaluation
    # another policy, for a paired comparison on the same seeds: its folder, or settings like those of policy=..., as in
    # {path: FOLDER, keys: {image.front: image.top}} or {policy: remote, url: ws://localhost:8000}
    against: Any = None
    results: list[str] = field(default_factory=list)  # finished evaluations to compare instead, ours or LeRobot's
    swap_words: bool = False  # a control: each episode is told another instruction than the one that counts
    paired: bool = False  # the episodes of results that name no seeds were played with the same ones
    seed: int = 0  # seed of the episodes
    videos: int = 0  # episodes, from the first on, that are filmed as mp4
    out: str | None = None  # folder for evaluation.json and videos
    execution: Execution = Execution.eager  # execution of acting: eager, or on a GPU by CUDA graphs
    device: str = "cpu"  # device of the networks: cpu, cuda, cuda:1
    threads: int = 0  # CPU threads of torch; 0: as torch chooses


def pretrain(config: PretrainConfig) -> int:
    """Imitation of recordings by a fresh or given policy, which is saved, tried and delivered as a run; exit status.
    Processes that `torchrun` started do so together."""
    with joined(config.device) as (ranks, device):
        return _pretrain(config, ranks, prepare_machine(device, config.threads, ranks.size))


def _pretrain(config: PretrainConfig, ranks: Ranks, device: torch.device) -> int:
    if ranks.first:
        occupied(config.out, config.resume)
    mine = partial(share, fraction=config.train.valid_fraction, seed=config.seed, ranks=ranks)
    episodes = recordings(config.data, mine if config.share_episodes and ranks.size > 1 else None)
    env_data = origin_of(config.env) or episodes.meta.get("env")
    # Other threads may round otherwise; a run that was moved is still the same run.
    settings = to_data(config) | {"data_sha256": fingerprint(config.data)}
    free, origin = {"resume", "threads", "out", "data", "track", "train.shard", "share_episodes"}, {"data": config.data}
    base = None
    # A policy that is shared out goes to the GPUs in parts.
    home = torch.device("cpu") if config.train.shard and ranks.size > 1 else device
    if isinstance(config.policy, CheckpointConfig):
        base, known = acting_policy(config.policy, home, config.env)
        policy = trainable_imitator(base, "imitation")
        hz = episodes.control_hz or policy.spec.control_hz or episodes.spec.control_hz
        seen = with_tokens(episodes, policy.spec).spec.obs.with_history(policy.spec.history)
        check_compatible(policy.spec, replace(episodes.spec, obs=seen, control_hz=hz))
        unlike_names("the policy", policy.spec.names, "the recordings", episodes.names)
        complete(policy, episodes)
        env_data = env_data or known.get("env")
        settings, free = settings | {"policy_sha256": weights_of(config.policy.path)}, free | {"policy.path"}
        origin["base"] = config.policy.path
    else:
        spec, name = episodes.policy_spec(config.chunk), policy_name(config.policy)
        if config.words is not None or POLICIES[name].language:
            spec = spec.reading(words_for(config.words, [episode.task for episode in episodes], name))
        policy = build_policy(config.policy, spec, seed=config.seed, device=home)
    # A network reads its inputs through the normalisers that it learnt with, so only fresh ones are fitted.
    fit = base is None
    learner = ImitationLearner(policy, episodes, config.train, fit=fit, seed=config.seed, device=device, ranks=ranks)
    evaluator = evaluator_of(env_data, policy.spec, config.eval, device) if ranks.first else None
    options: dict[str, Any] = {"changeable": free, "progress_every_s": 10, "trackers": config.track, "ranks": ranks}
    mine = Run(config.out, settings, resume=config.resume, **options)
    with mine if ranks.first else FollowingRun(config.out, ranks) as run:
        if env_data is None and config.eval.episodes:
            say("no data and no env=... name a world: the policy is not tried, so nothing is known of its success")
        if run.start >= config.train.steps:
            say(f"{config.out} has reached its {config.train.steps} steps already; nothing is trained")
        origin |= {"env": env_data}
        if evaluator is not None:
            evaluator.best = Best(config.out, origin)
            if base is not None and run.start == 0:
                with run.watch("evaluation"):
                    evaluation = evaluator(base, 0, start=True)
                run.log(0, evaluation)
        finished = imitate(learner, run, evaluate=evaluator, origin=origin)
        if finished and evaluator is not None:
            evaluator.confirm(base, learner.average, learner.step)
    if not finished:
        say(f"stopped at step {learner.step} of {config.train.steps}; continue with resume=true")
        return 130
    say_delivered(config.out, env_data)
    if evaluator is not None and evaluator.best is not None:
        say(evaluator.best.sentence())
    return 0


def evaluate(config: EvaluateConfig) -> int:
    """Success and return of a policy on fixed seeds, alone or against another on the same ones; exit status."""
    if config.results:
        return compare_results(config.results, config.paired, config.out)
    if config.policy is None:
        raise BurnishError("policy=... must be given, or results=... to compare finished evaluations; see --help")
    device = prepare_machine(config.device, config.threads)
    if config.videos and config.out is None:
        raise BurnishError(f"videos={config.videos} needs a folder to write to: out=...")
    config.eval.require_episodes()
    if not 0 <= config.videos <= config.eval.episodes:
        raise BurnishError(f"videos={config.videos} must lie between 0 and eval.episodes={config.eval.episodes}")
    out = Path(config.out) if config.out else None
    if out is not None:
        files.require_writable(out)
    chosen = config.policy
    seeds = evaluation_seeds(config.eval.episodes, base=config.seed)
    # Everything is loaded and checked before anything is played.
    entries = [("evaluation", _called(chosen), acting_policy(chosen, device, config.env))]
    if config.against is not None:
        other = opponent(config.against)
        entries.append(("against", _called(other), acting_policy(other, device, config.env)))
    world = shared_world(config.env, [(path, origin.get("env")) for _, path, (_, origin) in entries])
    players = [(name, path, executed(policy, config.execution, device)) for name, path, (policy, _) in entries]
    if out is not None:
        about = {"world": world, "settings": to_data(config)}
        for stale in ("against.json", "comparison.json"):
            files.remove(out / stale)  # of an earlier call: it would pass for a result of this one
        files.replace(out / ABOUT, json.dumps(about, indent=1) + "\n")
    results: list[Evaluation] = []
    for name, path, policy in players:
        if config.swap_words and "tokens" not in policy.spec.obs.shapes:
            raise BurnishError(f"swap_words=true tries who follows words, and {path} reads none")
        raw = raw_world(world, config.eval.worlds, device)
        env = seen_by(policy.spec, raw, all_instructions(raw, seeds) if config.swap_words else ())
        if not results and (line := description(env)):
            say(line)
        unseen = sorted(set(policy.spec.inputs.shapes) - set(env.spec.obs.shapes))
        if unseen:
            say(f"note: this world gives no {', '.join(unseen)}; {path} acts without")
        if note := unlike_names(path, policy.spec.names, "this world", feature_names(raw)):
            say(f"note: {note}")
        controller = controller_for(policy, env.num_envs, greedy=config.eval.greedy, device=device)
        filmed = seeds[: config.videos] if name == "evaluation" else []
        video = files.below(out, "videos") if out is not None and filmed else None
        with episodes_bar(len(seeds)) as progress:
            results.append(run_evaluation(env, controller, seeds, video=video, video_seeds=filmed, progress=progress))
        say(f"{path}{', with swapped words' if config.swap_words else ''}: {in_words(results[-1])}")
        if note := unreported(raw, results[-1]):
            say(note)
        for line in lines(results[-1]):
            say(line)
        if out is not None:
            results[-1].save(out / f"{name}.json")
            if name == "evaluation":
                files.replace(out / "starts.json", json.dumps(starts(env, seeds)) + "\n")
    if len(results) == 2:
        comparison = compare(results[0], results[1])
        say(comparison.sentence(entries[0][1], entries[1][1]))
        if out is not None:
            files.replace(out / "comparison.json", json.dumps(comparison.to_dict(), indent=1) + "\n")
    return 0


def _called(chosen: Any) -> str:
    """A policy in a sentence."""
    return where_of(chosen) + " at noise 0" * getattr(chosen, "greedy", False)


def opponent(chosen: Any) -> Any:
    """The choice of a policy that ``against=`` means: a folder, or settings, of which ``policy`` says the kind."""
    if not isinstance(chosen, Mapping):
        return CheckpointConfig(str(chosen))
    settings = {str(key): x for key, x in chosen.items()}
    kind = str(settings.pop("policy", "checkpoint"))
    if kind not in ACTING:
        raise BurnishError(f"against: policy={kind!r:.60} is not a choice; {did_you_mean(kind, ACTING)}")
    for needed in fields(ACTING[kind]):
        if needed.name not in settings and needed.default is needed.default_factory is ABSENT:
            raise BurnishError(
                f"against says nothing of {needed.name}, which must be given: against={{{needed.name}: ...}}"
            )
    return from_data(ACTING[kind], settings, "against")


def all_instructions(env: VecEnv, seeds: Sequence[int]) -> list[str]:
    """The instructions with which the episodes of these seeds begin."""
    found: set[str] = set()
    for first in range(0, len(seeds), env.num_envs):
        some = list(seeds[first : first + env.num_envs])
        env.reset(None, some + [some[0]] * (env.num_envs - len(some)))
        found.update(instructions(env) or ())
    if not found:
        raise BurnishError("swap_words=true is for worlds that give instructions, and this one gives none")
    return sorted(found)


def starts(env: VecEnv, seeds: Sequence[int]) -> dict[str, Any]:
    """The start of each seed's episode: its first state, or the first numbers of a long one. Nothing where none is
    shown."""
    values: dict[str, list[float]] = {}
    for first in range(0, len(seeds) if "state" in env.spec.obs.shapes else 0, env.num_envs):
        some = list(seeds[first : first + env.num_envs])
        state = env.reset(None, some + [some[0]] * (env.num_envs - len(some)))["state"]
        latest = state.reshape(env.num_envs, -1)[: len(some), -state.shape[-1] :]
        values |= {str(seed): row[:STARTS] for seed, row in zip(some, latest.tolist(), strict=True)}
    width = len(next(iter(values.values()), []))
    names = state_names(env) or [f"state[{i}]" for i in range(width)]
    return {"names": list(names[:width]), "values": values}


def shared_world(chosen: Any, origins: list[tuple[str, dict[str, Any] | None]]) -> dict[str, Any] | None:
    """One world for all: the one that was asked for, else the one that every policy was trained for. Episodes of two
    worlds are no pairs, whatever their seeds."""
    if chosen is not None:
        return origin_of(chosen)
    (first, world), *others = origins
    for path, other in others:
        if other != world:
            raise BurnishError(f"{first} and {path} were trained for different worlds; name one to compare in: env=...")
    return world


if __name__ == "__main__":
    sys.exit(main())
