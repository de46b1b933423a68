"""Refinement in imagination: any method of the table learns inside a learned model of its world.

    burnish finetune policy.path=BASE method=imagine method.inner=dsrl total=10000

Rounds, as in DiWA (arXiv 2508.03645), World-Env (2509.24948) and LIFT (2601.21363): a *trial* plays ``collect``
episodes of the policy in the real worlds and writes down every tick; the model is *fitted* to all ticks so far
(`finetune/world_model`); the inner method *refines* the policy for ``imagined`` decisions in worlds that the model
imagines. The next trial tells how good the policy really is, and one more follows at the end, so each imagined success
stands beside a real one. ``total`` counts real decisions, those of trials included. The policy of the best trial is
what the run ends with.

A model is trusted while what it imagines is at most ``gap`` above what is real, for the policy that was just tried: if
not, nothing is refined in that round, and its ticks are more to fit. Where success is learnt, its threshold is fitted
to that score, and a wrong model gets a wrong threshold: there it must not see a success in more than ``gap`` of the
real episodes that failed (`world_model/check.py`). A refined policy that is no better than the one before, where the
model promised more than ``gap`` above that, was led astray: the inner method begins anew in the model that has seen it
fail.

An inner method with a replay keeps what earlier models imagined, unless it begins anew.

**Departures.** DiWA collects nothing and takes play data (here data=, with one round); its model is recurrent. LIFT
plays without noise; here ``greedy`` is a choice, as a base whose draws differ needs. Both pretrain otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...offline.learner import weigh
from ...policies.best import mean
from ...policies.cli.machine import say
from ...policies.controllers import Noisy, controller_for
from ...policies.core import tree
from ...policies.core.config import from_data, to_data
from ...policies.core.errors import BurnishError
from ...policies.core.files import named, replace
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import derive
from ...policies.core.types import Controller, KnownDynamics, Learns, Metrics, Obs, VecEnv
from ...policies.measure.evaluate import evaluate, evaluation_seeds
from ..episode_statistics import EpisodeStatistics
from ..feature_env import require_sight, without_pictures
from ..loops import SLICE, Loop
from ..world_model.check import calibrate_success, examined, flatters, lacking
from ..world_model.env import Guard, GuardConfig, ImaginedEnv, Starts, stacked
from ..world_model.films import Course, shoot
from ..world_model.model import Fit, ModelConfig, WorldModel
from ..world_model.record import EPISODES, RECORD, Record, episodes_beside, reliability
from ..world_model.ticks import Tape, Ticks
from .dsrl import DSRLConfig

EVALUATION_WORLDS = 128  # imagined worlds in which the model and the policy are examined


@dataclass
class ImagineConfig:
    """Settings of refinement in imagination: the method inside, rounds, the model, and its guard."""

    inner: Any = None  # method that learns in the imagined worlds, with its settings; null: dsrl
    collect: int = 50  # real episodes of each trial
    greedy: bool = False  # trials act from noise 0
    # deviation of a noise on the actions of as many further episodes, which are not scored; 0: there are none. A base
    # that acts without noise shows no model what other actions do
    noise: float = 0.0
    imagined: int = 20_000  # imagined decisions of each round
    imagined_worlds: int = 16  # imagined worlds that are stepped at once
    # beginning of imagined episodes: where real ones began, anywhere, or near a success, once there was one
    starts: Starts = Starts.first
    horizon: int = 0  # ticks until an imagined episode is truncated; 0: those of the world
    # rewards and ends are those that the world computes from what it shows, where it can, and no predictions
    known_outcome: bool = False
    gap: float = 0.15  # imagined minus real success above which the model is not trusted; of returns in their range
    model: ModelConfig = field(default_factory=ModelConfig)  # the model of the world
    guard: GuardConfig = field(default_factory=GuardConfig)  # answer to a model that does not know

    def __post_init__(self) -> None:
        self.inner = DSRLConfig() if self.inner is None else self.inner
        if isinstance(self.inner, str):
            raise BurnishError(f"method.inner={self.inner!r} is not a method; see `burnish finetune --help`")
        least = {"[1, inf)": "collect imagined imagined_worlds", "[0, inf)": "horizon noise"}
        check_ranges(self, {**least, "(0, inf)": "gap"})


def build(
    config: ImagineConfig,
    base: Any,
    env: VecEnv,
    *,
    prepare: Callable[..., Loop[Any]],
    history: int,
    recordings: Ticks | None = None,
    twin: KnownDynamics | None = None,
    samples: Obs | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> ImagineLoop:
    """``prepare(config, base, env)`` makes the loop of the inner method; ``history`` is the number of frames that
    ``env`` stacks, ``twin`` is a simulation of the world, of which the model learns what it leaves unexplained."""
    env = without_pictures(env, base, data=recordings, twin=twin)
    tape = Tape(env, Ticks(device) if recordings is None else recordings, history)
    known = tape.known_outcome if config.known_outcome else None
    if config.known_outcome and known is None:
        raise BurnishError(
            "this world cannot say what a tick pays and how it ends by what it shows; leave method.known_outcome out"
        )
    model = WorldModel(tape.single_frames, config.model, seed=derive(seed, "model"), known=known, twin=twin).to(device)

    def imagined(worlds: int, name: str, guard: GuardConfig, **options: Any) -> ImaginedEnv:
        return ImaginedEnv(model, worlds, guard, seed=derive(seed, name), device=device, **options)

    begins: dict[str, Any] = {"starts": config.starts, "horizon": config.horizon}
    inside = imagined(config.imagined_worlds, "imagined", config.guard, **begins)
    # Held against trials, and so begun, paid and played to the end as those are: no guard cuts them off.
    whole = GuardConfig(Guard.none, verify=config.guard.verify)
    shown = imagined(min(EPISODES, env.num_envs), "shown", whole)
    evaluated = imagined(EVALUATION_WORLDS, "evaluated", whole)

    def inner(attempt: int) -> Loop[Any]:
        given: dict[str, Any] = {"probe": samples is not None and attempt == 0, "samples": samples}
        made = prepare(config.inner, base, stacked(inside, history), seed=derive(seed, "inner", attempt), **given)
        require_sight(made.learner.policy)
        if config.guard.kind is Guard.weight:
            weigh(made.learner)
        return made

    return ImagineLoop(config, base, tape, inside, evaluated, shown, inner, seed)


class ImagineLoop(Learns):
    """An iteration is one real episode of every world, or a slice of a fit, or one iteration of the inner method. It
    is its own learner, with the policy of the inner one."""

    replay, pretraining = None, 0

    def __init__(
        self,
        config: ImagineConfig,
        base: Any,
        tape: Tape,
        imagined: ImaginedEnv,
        evaluated: ImaginedEnv,
        shown: ImaginedEnv,
        inner: Callable[[int], Loop[Any]],
        seed: int,
    ) -> None:
        self.config, self.base, self.tape, self.imagined, self.evaluated = config, base, tape, imagined, evaluated
        self.shown, self.record, self.courses = shown, Record(), list[Course]()
        self.ticks, self.model, self.seed = tape.ticks, imagined.model, seed
        self.env: Any = tape
        self._inner = inner
        self.attempt = 0  # how often the inner method has begun anew
        self.inner = inner(0)
        self.fit = Fit(self.model, derive(seed, "fit"))
        self.statistics = EpisodeStatistics(tape.num_envs, tape.device)
        self.iteration, self.rounds = 0, 1  # iterations so far, and rounds in all
        self.refined = base is None  # whether the policy that acts is that of the inner method, not the base
        self.scores: list[float] = []  # of the trial under way, one for each iteration
        self.promised: float | None = None  # imagined score of the policy that is tried next
        self.score: float | None = None  # real score of the present policy
        self.start: float | None = None  # and of the one of the first trial
        self.trusted = True
        self.best: tuple[float, dict[str, Any]] | None = None  # score of a refined policy's trial, and its weights
        self.latest: Metrics = {}

    # ---- the plan of a run ----

    @property
    def learner(self) -> ImagineLoop:
        return self

    @property
    def policy(self) -> Any:
        return self.inner.learner.policy

    @property
    def scored(self) -> int:
        """Iterations of a trial that tell how good the policy is."""
        return -(-self.config.collect // self.tape.num_envs)

    @property
    def phases(self) -> tuple[int, int, int]:
        """Iterations of a trial, of a fit and of a refinement."""
        trial = self.scored * (2 if self.config.noise else 1)
        fit = -(-self.config.model.updates // SLICE)
        return trial, fit, math.ceil(self.config.imagined / self.inner.decisions_per_iteration)

    @property
    def decisions_per_iteration(self) -> float:
        played = (self.rounds + 1) * self._decisions_of_a_trial()
        return played / (self.rounds * sum(self.phases) + self.phases[0])

    def iterations(self, total: int) -> int:
        """As many rounds as surely stay within ``total`` real decisions."""
        trial = self._decisions_of_a_trial()
        self.rounds = total // trial - 1
        if self.rounds < 1:
            raise BurnishError(
                f"total={total} real decisions are less than two trials of {trial} (the longest that "
                f"method.collect={self.config.collect} episodes can be), and a result that is not tried is refused; "
                "raise total or lower method.collect"
            )
        return self.rounds * sum(self.phases) + self.phases[0]

    def _decisions_of_a_trial(self) -> int:
        return self.phases[0] * self.tape.num_envs * math.ceil(self.tape.spec.max_steps / self.policy.spec.execute)

    def plan(self, updates: int) -> None:
        self.inner.learner.plan(self.rounds * self.phases[2])

    def describe(self) -> str:
        plan = f"imagined worlds: {self.rounds} rounds, each of {self.config.collect} real episodes"
        return ". ".join(filter(None, [self.inner.learner.describe(), plan]))

    # ---- a run ----

    def iterate(self) -> Metrics:
        trial, fit, refine = self.phases
        finished, at = divmod(self.iteration, trial + fit + refine)
        metrics: Metrics = {}
        if at < trial:
            self._play(at)
            if at == trial - 1:
                self._judge_trial(last=finished == self.rounds)
        elif at < trial + fit:
            metrics = self._fit(at - trial, fit)
        elif self.trusted:
            self.refined = True
            metrics = self.inner.iterate()
            if at == trial + fit + refine - 1:
                self.promised = self._imagine()
        self.iteration += 1
        return metrics

    def _acting(self, env: VecEnv) -> Controller:
        """The present policy in real or imagined worlds: until something was refined, the base."""
        policy = self.policy if self.refined else self.base
        return controller_for(policy, env.num_envs, greedy=self.config.greedy, device=env.device)

    def _play(self, part: int) -> None:
        """One real episode of every world."""
        self.scores = self.scores if part else []
        acting: Any = self._acting(self.tape)
        scored = part < self.scored
        if not scored:
            acting = Noisy(acting, self.config.noise, derive(self.seed, "explore", self.iteration))
        seeds = [derive(self.seed, "trial", self.iteration, world) for world in range(self.tape.num_envs)]
        begun = self.ticks.episodes  # of which the first is that of the first world
        found = evaluate(self.tape, acting, seeds)
        if part == 0 and self.model.prepared:
            which, world = range(self.shown.num_envs), stacked(self.shown, self.tape.history)
            given = self.ticks, [begun + i for i in which], [seeds[i] for i in which]
            beside = episodes_beside(self.shown, world, self._acting(world), *given)
            self.record.names, self.record.episodes, self.courses = beside
        if scored:
            self.scores.append(mean(found))
        execute, statistics = self.policy.spec.execute, self.statistics
        statistics.decisions += sum(math.ceil(length / execute) for length in found.lengths)
        statistics.ticks += sum(found.lengths)
        statistics.reports_success |= found.success is not None

    def _imagine(self) -> float:
        world = stacked(self.evaluated, self.tape.history)
        seeds = evaluation_seeds(EVALUATION_WORLDS, stream="imagined", base=self.iteration)
        return mean(evaluate(world, self._acting(world), seeds))

    def _judge_trial(self, last: bool) -> None:
        real = sum(self.scores) / len(self.scores)
        played = len(self.scores) * self.tape.num_envs
        self.record.trials.append([float(self.statistics.ticks), real, self.promised])
        words = f"after {int(self.statistics.ticks):,} real ticks the policy has {real:.3g} in {played} real episodes"
        before, self.score = self.score, real
        self.start = real if self.start is None else self.start
        if self.refined and (self.best is None or real >= self.best[0]):
            self.best = (real, tree.map_tree(torch.clone, self.policy.state_dict()))
        if self.promised is not None:
            gap, self.latest["imagined/promised"] = self.promised - real, self.promised
            self.latest["imagined/gap"] = gap
            words += f", where {self.promised:.3g} was imagined"
            if self._too_far(gap) and before is not None and real <= before and not last:
                words += "; the model led it astray, so the method begins anew in one that has seen it"
                self._begin_anew(self.attempt + 1)
                self.refined, self.score = self.base is None, self.start
        # Where the base acts again, the policy of a method that began anew was never refined.
        if last and self.best is not None and (real < self.best[0] or not self.refined):
            self.policy.load_state_dict(self.best[1])
            words += f"; the policy of an earlier trial, with {self.best[0]:.3g}, is kept"
        if last and self.base is not None and (self.best is None or self.best[0] < self.start):
            words += f"; nothing refined was as good as the base, with {self.start:.3g} in the first trial: keep that"
        self.promised, self.latest["real/score"] = None, real
        say(words)

    def _begin_anew(self, attempt: int) -> None:
        self.attempt, self.inner = attempt, self._inner(attempt)
        self.plan(0)

    def _too_far(self, gap: float) -> bool:
        """Of returns the gap counts in widths of those that real episodes had."""
        return gap > self.config.gap * (1.0 if self.ticks.knows_success else self.ticks.width_of_returns())

    def _fit(self, part: int, parts: int) -> Metrics:
        if part == 0:
            lacks = "" if self.model.known is not None else lacking(self.ticks)
            self.trusted = not lacks
            if lacks:
                say(lacks)
            else:
                self.model.prepare(self.ticks)
        if not self.trusted:
            return {}
        metrics = self.fit.steps(self.ticks.split()[0], min(SLICE, self.config.model.updates - part * SLICE))
        if part == parts - 1:
            self.model.choose_elites(self.ticks)
            self.model.calibrate(self.ticks)
            learnt = self.ticks.knows_success and self.model.known is None
            if learnt:
                self.record.reliability = reliability(self.model, self.ticks)
            self.show_ticks()
            real = float(self.score or 0.0)
            if learnt:
                world = stacked(self.evaluated, self.tape.history)
                seeds = evaluation_seeds(EVALUATION_WORLDS, stream="calibrate", base=self.iteration)
                calibrate_success(self.evaluated, world, self._acting(world), real, seeds)
            found, imagined = examined(self.model, self.ticks), self._imagine()
            flattered = learnt and flatters(self.model, self.ticks, self.config.gap)
            self.trusted = not (flattered or self._too_far(imagined - real))
            self.latest |= {f"model/{key}": x for key, x in found.items()}
            self.latest |= {"imagined/before": imagined, "imagined/trusted": float(self.trusted)}
            doubt = "" if self.trusted else ": it is not trusted, and nothing is refined before more was played"
            alarms = f", and so have {found['false_alarms']:.0%} of the episodes that failed" if flattered else ""
            say(
                f"the model explains {found['r2']:.0%} of the changes in ticks that it was not fitted to; the policy "
                f"that has {real:.3g} in the world has {imagined:.3g} in it{alarms}{doubt}"
            )
        return metrics

    def show_ticks(self) -> None:
        """To the imagined worlds: where episodes begin, and what is known there."""
        self.imagined.begin(self.ticks)
        for env in (self.evaluated, self.shown):
            env.begin(self.ticks, self.imagined.limit)

    # ---- reports and state ----

    def report(self) -> Metrics:
        inner = {f"imagined/{key}": x for key, x in self.inner.statistics.report().items()}
        real = {"decisions": self.statistics.decisions, "control_steps": self.statistics.ticks}
        return {**inner, **real, **self.latest, "imagined/unknown": self.imagined.share_unknown()}

    def deliver(self, folder: Path) -> str:
        replace(named(folder) / RECORD, json.dumps(to_data(self.record), allow_nan=False))
        films = shoot(folder, self.courses, self.tape)
        return f"imagined beside real, as curves and episodes{films}: burnish report run={folder}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "inner": self.inner.state_dict(),
            "attempt": self.attempt,
            "model": self.model.state_dict(),
            "fit": self.fit.state_dict(),
            "ticks": self.ticks.state_dict(),
            "tape": self.tape.state_dict(),
            "statistics": self.statistics.state_dict(),
            "iteration": self.iteration,
            "scores": self.scores,
            "refined": self.refined,
            "promised": self.promised,
            "score": self.score,
            "start": self.start,
            "trusted": self.trusted,
            "best": None if self.best is None else {"score": self.best[0], "weights": self.best[1]},
            "latest": {key: float(x) for key, x in self.latest.items()},
            "record": to_data(self.record),
            "courses": [tuple(course) for course in self.courses],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if int(state["attempt"]) != self.attempt:
            self._begin_anew(int(state["attempt"]))
        self.model.load_state_dict(state["model"])
        self.ticks.load_state_dict(state["ticks"])
        if len(self.ticks):
            self.show_ticks()
        self.inner.load_state_dict(state["inner"])
        self.fit.load_state_dict(state["fit"])
        self.tape.load_state_dict(state["tape"])
        self.statistics.load_state_dict(state["statistics"])
        self.iteration, self.promised, self.trusted = int(state["iteration"]), state["promised"], bool(state["trusted"])
        self.score, self.start = state["score"], state["start"]
        self.scores, self.refined = list(state["scores"]), bool(state["refined"])
        self.best = None if state["best"] is None else (float(state["best"]["score"]), state["best"]["weights"])
        self.latest = dict(state["latest"])
        self.record = from_data(Record, state.get("record", {}))  # older states have none
        self.courses = [Course(*course) for course in state.get("courses", [])]
