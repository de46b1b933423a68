"""Entry points: ``burnish pretrain | evaluate``. No other file of this folder imports ``sim``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING

from ..offline.actors import trainable_imitator
from ..sim.build import ENVS, make_env, named, world_from
from .best import Best
from .build import POLICIES, CheckpointConfig, build_policy, load_policy, weights_of
from .cli.cli import main
from .controllers import controller_for
from .core import files
from .core.chunk import HistoryEnv
from .core.config import to_data
from .core.errors import BurnishError, plain_text
from .core.scale import ScaledEnv
from .core.spec import ChunkConfig, PolicySpec, check_compatible
from .core.types import VecEnv
from .core.wrapper import state_names
from .data.episodes import Episodes
from .data.lerobot import fingerprint, read_lerobot
from .external.table import OUTSIDE, connect, place_of
from .imitate import ImitateConfig, ImitationLearner, imitate
from .measure.evaluate import Evaluation, compare, evaluation_seeds
from .measure.evaluate import evaluate as run_evaluation
from .runs.run import Run

# Hydra groups of each verb below: verb -> group -> choice -> dataclass.
WORLDS = {name: kind.config for name, kind in ENVS.items()}
# A policy that acts already: saved by us, or somebody else's.
ACTING: dict[str, type] = {"checkpoint": CheckpointConfig, **{name: kind.config for name, kind in OUTSIDE.items()}}
STARTS = 64  # numbers of a first state that are kept

GROUPS: dict[str, dict[str, dict[str, type]]] = {
    "pretrain": {
        "policy": {name: kind.config for name, kind in POLICIES.items()} | {"checkpoint": CheckpointConfig},
        "env": WORLDS,
    },
    "evaluate": {"policy": ACTING, "env": WORLDS},
}


@dataclass
class TrialConfig:
    episodes: int = 100  # of each evaluation
    worlds: int = 50  # stepped at once; changes the result by no more than rounding
    greedy: bool = False  # act from noise 0
    confirm: int = 256  # fresh episodes on which a run decides at its end what it delivers (best.py)

    def __post_init__(self) -> None:
        if min(self.episodes, self.worlds, self.confirm) < 1:
            raise BurnishError(
                f"episodes={self.episodes}, worlds={self.worlds} and confirm={self.confirm} must be at least 1"
            )


@dataclass
class PretrainConfig:
    data: str = MISSING  # a folder that `burnish collect` (or LeRobot) wrote
    out: str = "runs/bc"  # folder of the run
    track: list[str] = field(default_factory=list)  # besides JSONL and TensorBoard: wandb, trackio, rerun
    policy: Any = MISSING  # kind of the policy: flow, diffusion, gaussian; or checkpoint, to go on from one
    env: Any = None  # where to try the policy; by default the world that the data came from
    chunk: ChunkConfig = field(default_factory=ChunkConfig)  # of a fresh policy; one from a checkpoint keeps its own
    train: ImitateConfig = field(default_factory=ImitateConfig)  # imitation
    trial: TrialConfig = field(default_factory=TrialConfig)  # evaluations during training and at the end
    seed: int = 0  # of every random draw
    device: str = "cpu"  # where networks run: cpu, cuda, cuda:1
    threads: int = 0  # 0: as torch chooses
    resume: bool = False  # continue the run that an interrupted call left at out=

    def __post_init__(self) -> None:
        if isinstance(self.policy, CheckpointConfig) and self.chunk != ChunkConfig():
            raise BurnishError("a policy from a checkpoint keeps the chunk that it was trained with; leave out chunk.*")


@dataclass
class EvaluateConfig:
    policy: Any = MISSING  # policy=checkpoint policy.path=FOLDER, or another kind
    env: Any = None  # by default the world that the policy was trained for
    trial: TrialConfig = field(default_factory=TrialConfig)  # how it is evaluated
    against: str | None = None  # another policy's folder: paired comparison on the same seeds
    seed: int = 0  # of the episodes
    videos: int = 0  # mp4 of the first so many episodes
    out: str | None = None  # folder for evaluation.json and videos
    device: str = "cpu"  # where networks run: cpu, cuda, cuda:1
    threads: int = 0  # CPU threads of torch; 0: as torch chooses


def pretrain(config: PretrainConfig) -> int:
    device = prepare(config.device, config.threads)
    if not Path(config.data).is_dir():
        raise BurnishError(f"there is no dataset at {config.data}; `burnish collect` makes one")
    episodes = read_lerobot(config.data)
    env_data = origin_of(config.env) or episodes.meta.get("env")
    # Other threads may round otherwise; a run that was moved is still the same run.
    settings = to_data(config) | {"data_sha256": fingerprint(config.data)}
    free, origin = {"resume", "threads", "out", "data", "track"}, {"data": config.data}
    base = None
    if isinstance(config.policy, CheckpointConfig):
        base, known = acting_policy(config.policy, device, config.env)
        policy = trainable_imitator(base, "imitation")
        check_compatible(policy.spec, replace(episodes.spec, obs=episodes.spec.obs.with_history(policy.spec.history)))
        env_data = env_data or known.get("env")
        settings, free = settings | {"policy_sha256": weights_of(config.policy.path)}, free | {"policy.path"}
        origin["base"] = config.policy.path
    else:
        policy = build_policy(config.policy, spec_of(episodes, config.chunk), seed=config.seed, device=device)
    # A network reads its inputs through the normalisers that it learnt with, so only fresh ones are fitted.
    fit = base is None
    learner = ImitationLearner(policy, episodes, config.train, fit=fit, seed=config.seed, device=device)
    trial = trial_of(env_data, policy.spec, config.trial, device)
    with Run(
        config.out, settings, resume=config.resume, changeable=free, progress_every_s=10, trackers=config.track
    ) as run:
        if run.start >= config.train.steps:
            say(f"{config.out} has reached its {config.train.steps} steps already; nothing is trained")
        origin |= {"env": env_data}
        if trial is not None:
            trial.best = Best(config.out, origin)
            if base is not None and run.start == 0:
                with run.watch("exams"):
                    exam = trial(base, 0, start=True)
                run.log(0, exam)
        finished = imitate(learner, run, evaluate=trial, origin=origin)
        if finished and trial is not None:
            trial.confirm(base, learner.average, learner.step)
    if not finished:
        say(f"stopped at step {learner.step} of {config.train.steps}; continue with resume=true")
        return 130
    say(f"policy: {config.out}  (burnish evaluate policy.path={config.out})")
    if trial is not None and trial.best is not None:
        say(trial.best.sentence())
    return 0


def spec_of(episodes: Episodes, chunk: ChunkConfig) -> PolicySpec:
    """Of a fresh policy that learns from recordings."""
    recorded = episodes.spec
    return PolicySpec(
        obs=recorded.obs,
        action=recorded.action,
        control_hz=recorded.control_hz,
        action_mode=recorded.action_mode,
        pixels=recorded.pixels,
        **to_data(chunk),
    )


def evaluate(config: EvaluateConfig) -> int:
    device = prepare(config.device, config.threads)
    if config.videos and config.out is None:
        raise BurnishError(f"videos={config.videos} needs a folder to write to: out=...")
    if not 0 <= config.videos <= config.trial.episodes:
        raise BurnishError(f"videos={config.videos} must lie between 0 and trial.episodes={config.trial.episodes}")
    out = Path(config.out) if config.out else None
    if out is not None:
        files.require_writable(out)
    chosen = config.policy
    seeds = evaluation_seeds(config.trial.episodes, base=config.seed)
    # Everything is loaded and checked before anything is played.
    entries = [("evaluation", where_of(chosen), acting_policy(chosen, device, config.env))]
    if config.against is not None:
        entries.append(("against", config.against, load_policy(config.against, device)))
    world = shared_world(config.env, [(path, origin.get("env")) for _, path, (_, origin) in entries])
    if out is not None:
        about = {"world": world, "settings": to_data(config)}
        for stale in ("against.json", "comparison.json"):
            files.remove(out / stale)  # of an earlier call: it would pass for a result of this one
        files.replace(out / "about.json", json.dumps(about, indent=1) + "\n")
    results: list[Evaluation] = []
    for name, path, (policy, _) in entries:
        env = world_for(policy.spec, world, config.trial.worlds, device)
        unseen = sorted(set(policy.spec.inputs.shapes) - set(env.spec.obs.shapes))
        if unseen:
            say(f"note: this world gives no {', '.join(unseen)}; {path} acts without")
        controller = controller_for(policy, env.num_envs, greedy=config.trial.greedy, device=device)
        filmed = seeds[: config.videos] if name == "evaluation" else []
        video = files.below(out, "videos") if out is not None and filmed else None
        results.append(run_evaluation(env, controller, seeds, video=video, video_seeds=filmed))
        say(f"{path}: {in_words(results[-1])}")
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


def acting_policy(chosen: Any, device: torch.device, env: Any) -> tuple[Any, dict[str, Any]]:
    """The policy of ``policy=...``, and its origin. ``env`` is the configured world, without which nobody knows what
    the actions of somebody else's policy mean."""
    if isinstance(chosen, CheckpointConfig):
        return load_policy(chosen.path, device, steps=chosen.steps, guidance=chosen.guidance, base=chosen.base)
    if env is None:
        raise BurnishError(f"{place_of(chosen)} does not say which world it is for; give env=...")
    world = make_env(env, 1, device=device)
    return connect(chosen, world.spec, world.reset()), {"env": origin_of(env)}


def where_of(chosen: Any) -> str:
    return chosen.path if isinstance(chosen, CheckpointConfig) else place_of(chosen)


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


def prepare(device: str, threads: int) -> torch.device:
    if threads < 0:
        raise BurnishError(f"threads={threads} must be at least 1, or 0 for as many as torch chooses")
    if threads > 0:
        torch.set_num_threads(threads)
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise BurnishError(f"device={device} is not a device; take cpu, cuda or cuda:0") from error
    if chosen.type not in ("cpu", "cuda"):
        raise BurnishError(f"device={device} is not supported; take cpu, cuda or cuda:0")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise BurnishError(f"device={device}, but torch finds no CUDA GPU; take device=cpu, or see `burnish doctor`")
    return chosen


def origin_of(env: Any) -> dict[str, Any] | None:
    """A configured world as the plain data that datasets and checkpoints remember."""
    return None if env is None else named(env)


def world_for(
    spec: PolicySpec, data: Mapping[str, Any] | None, worlds: int, device: torch.device, seed: int = 0
) -> VecEnv:
    """The world as a policy sees it. ``seed`` decides its own episodes."""
    return seen_by(spec, raw_world(data, worlds, device, seed))


def raw_world(data: Mapping[str, Any] | None, worlds: int, device: torch.device, seed: int = 0) -> VecEnv:
    if data is None:
        raise BurnishError("neither the data nor the checkpoint says which world it is for; give env=...")
    return make_env(world_from(data), worlds, seed=seed, device=device)


def seen_by(spec: PolicySpec, raw: VecEnv) -> VecEnv:
    """Its history stacked, its actions scaled."""
    env: VecEnv = raw if spec.history == 1 else HistoryEnv(raw, spec.history)
    check_compatible(spec, env.spec)
    return ScaledEnv(env, spec.action)


class Trial:
    """An evaluation during training; the best goes to ``best``, where that is set."""

    def __init__(self, env: VecEnv, config: TrialConfig, device: torch.device) -> None:
        self.best: Best | None = None
        self._env, self._config, self._device = env, config, device
        # Not the seeds on which `burnish evaluate` reports: what is looked at during training must not choose its own
        # exam.
        self._seeds = evaluation_seeds(config.episodes, stream="select")

    def _play(self, policy: Any, seeds: Sequence[int]) -> Evaluation:
        controller = controller_for(policy, self._env.num_envs, greedy=self._config.greedy, device=self._device)
        return run_evaluation(self._env, controller, seeds)

    def confirm(self, start: Any, last: Any, step: int) -> None:
        """At the end of a run: decide on fresh seeds what it delivers (``best.py``)."""
        if self.best is not None:
            seeds = evaluation_seeds(self._config.confirm, stream="confirm")
            self.best.confirm(start, last, step, lambda policy: self._play(policy, seeds))

    def __call__(self, policy: Any, step: int, *, start: bool = False) -> dict[str, Any]:
        """``start``: it is the one that the training begins with."""
        exam = self._play(policy, self._seeds)
        say(f"step {step}, on seeds kept for selection: {in_words(exam)}")
        if self.best is not None:
            if start:
                self.best.begin(exam)
            else:
                self.best.offer(policy, step, exam)
        return {f"trial/{key}": value for key, value in exam.summary().items()}


def trial_of(
    data: Mapping[str, Any] | None, spec: PolicySpec, config: TrialConfig, device: torch.device
) -> Trial | None:
    """None where no world is known."""
    if data is None:
        return None
    worlds = min(config.worlds, max(config.episodes, config.confirm))
    return Trial(world_for(spec, data, worlds, device), config, device)


def in_words(result: Evaluation) -> str:
    facts = result.summary()
    words = [f"{len(result.seeds)} episodes"]
    if "success_rate" in facts:
        low, high = facts["success_low"], facts["success_high"]
        words.insert(0, f"success {facts['success_rate']:.1%} [{low:.1%}, {high:.1%}]")
    return ", ".join([*words, f"return {facts['return_mean']:.2f}", f"length {facts['length_mean']:.1f}"])


def say(line: str) -> None:
    sys.stdout.write(plain_text(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
