"""MBPO: an off-policy method learns from what was played, and from much more that a model of the world imagines.

    burnish finetune method=mbpo env=gym env.id=Hopper-v5 total=20000
    burnish finetune method=mbpo policy.path=BASE method.inner=residual_td3 method.inner.algorithm=sac

Janner et al. 2019 (MBPO, arXiv 1906.08253), algorithm 2. Every ``refit`` real ticks the model (`finetune/world_model`)
is fitted again to all ticks so far, and ``rollouts`` short rollouts of the present policy for each of these ticks
branch from real states. They go into a memory of their own, which stands where the loop has prior data: ``real`` of
each batch was played, the rest was imagined. Their depth grows from ``depth.first`` to ``depth.last`` decisions while
the model gets better. Short branches keep its errors from adding up, and the policy that is tried is the one that
learns, so real returns stand in the log beside imagined rewards.

The method within is any off-policy row of the table that is not made for recordings: ``sac`` (published), ``td3``,
``residual_td3`` with either algorithm on a base, ``dsrl``, and so on, with its view and its settings.

Two options of COPlanner (2310.07220, `world_model/imagination.py`): ``optimistic`` > 0 plays, of several draws of the
policy, the one of the best value plus so much for the disagreement of the model; ``conservative`` > 0 imagines the one
of the best value minus so much for it. With ``lookahead`` > 0 each draw is imagined for as many ticks, as published,
and rewards and disagreement are summed over them.

``greedy``, of LIFT (2601.21363), plays the world without noise: exploration happens in the model alone, where it costs
nothing. It needs a base that already works, or a twin: such ticks do not say what another action would have done.

**Ends and rewards.** The published code knows the function by which each task ends. Here heads learn successes and
failures, and a tick is an end where they find it more likely than not; with ``known_ends`` failures are those of the
world's own rule, where what it shows says it. Rewards are learnt as published, except where all data say that they
follow from success and failure.

**Departures.** A rollout follows one of the elites, not another at each tick. The model is fitted for a fixed number of
updates, not until held-out error stops falling. Published: 400 rollouts a tick, 20 to 40 updates a tick, 7 members of
which 5 are elites; the defaults here are what a CPU can do. A base that plays chunks begins one where a rollout begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...offline.actor_critic import ActorCritic
from ...offline.learner import Wrapping, weigh
from ...offline.sac import SACConfig
from ...policies.cli.machine import say
from ...policies.core.config import LATER
from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges, require_usual
from ...policies.core.seed import derive
from ...policies.core.types import KnownDynamics, Learner, Metrics, Obs, VecEnv
from ...policies.core.views import BaseEnv, ResidualEnv
from ...policies.core.wrapper import known_failure
from ..feature_env import require_sight, without_pictures
from ..loops import OffPolicy, OffPolicyConfig
from ..world_model.check import examined
from ..world_model.env import Guard, GuardConfig, ImaginedEnv, Starts, stacked
from ..world_model.imagination import Choosing, Greedy, Imagination
from ..world_model.model import Fit, ModelConfig, WorldModel
from ..world_model.ticks import Tape, Ticks
from .rlpd import RLPDConfig

CANDIDATES = 5  # draws of the policy of which COPlanner takes one


@dataclass
class DepthConfig:
    """Depth of imagined rollouts, which grows with the real ticks."""

    first: int = 1  # decisions of a rollout at the beginning
    last: int = 1  # decisions of a rollout in the end
    begin: int = 0  # real ticks at which it begins to grow
    end: int = 0  # real ticks at which it has grown

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf)": "first last", "[0, inf)": "begin end"}, "depth.")

    def at(self, ticks: int) -> int:
        grown = min(max((ticks - self.begin) / max(self.end - self.begin, 1), 0.0), 1.0)
        return int(self.first + grown * (self.last - self.first))


@dataclass
class MBPOConfig:
    """Settings of MBPO: the method within, the share of real rows, rollouts, the model, and COPlanner's options."""

    inner: Any = None  # off-policy method that learns, with its settings; null: sac with 10 updates per decision
    real: float = 0.05  # share of each batch that was played; the rest is imagined
    refit: int = 250  # real ticks between two fits of the model, each followed by new rollouts
    refit_updates: int = 250  # gradient steps of each fit but the first, which takes model.updates
    rollouts: int = 50  # imagined rollouts for each real tick
    # real ticks between two rounds of rollouts, which the latest policy makes of those ticks; behind each fit there are
    # those of all ticks since the last one. 0: there alone
    imagine_every: int = 0
    imagined_worlds: int = 500  # rollouts that are played at once
    capacity: int = 100_000  # imagined decisions that are kept, the newest
    depth: DepthConfig = field(default_factory=DepthConfig)  # decisions of a rollout
    known_ends: bool = False  # failures are those of the world's own rule, where what it shows says it
    greedy: bool = False  # the world is played without exploration noise, which is drawn in the model alone
    optimistic: float = 0.0  # value of the disagreement of the model, where the policy explores; 0: not chosen by it
    conservative: float = 0.0  # cost of the disagreement, where the policy is imagined; 0: not chosen by it
    # imagined ticks by which the draws are compared, before the critic is asked; 0: the critic alone
    lookahead: int = field(default=0, metadata=LATER)
    # the model of the world
    model: ModelConfig = field(default_factory=lambda: ModelConfig(elites=3, hidden=[200, 200, 200]))
    guard: GuardConfig = field(default_factory=lambda: GuardConfig(Guard.none))  # answer to a model that does not know

    def __post_init__(self) -> None:
        usual = RLPDConfig(loop=OffPolicyConfig(updates_per_decision=10), sac=SACConfig())
        self.inner = usual if self.inner is None else self.inner
        if isinstance(self.inner, str):
            raise BurnishError(f"method.inner={self.inner!r} is not a method; see `burnish finetune --help`")
        if isinstance(loop := getattr(self.inner, "loop", None), OffPolicyConfig):
            why, place = "by mbpo, where method.real is the share that was played", "method.inner.loop."
            require_usual(loop, type(self.inner)().loop, "prior_share", why, place)
        least_1 = "refit refit_updates rollouts imagined_worlds capacity"
        ranges = {"[1, inf)": least_1, "[0, 1]": "real", "[0, inf)": "imagine_every optimistic conservative lookahead"}
        check_ranges(self, ranges)
        if self.greedy and self.optimistic:
            raise BurnishError(
                "greedy=true plays the world without exploration, and optimistic chooses among what explores; "
                "leave one of them out"
            )
        if self.lookahead and not (self.optimistic or self.conservative):
            raise BurnishError(
                f"lookahead={self.lookahead} compares draws of the policy, and none are compared; set optimistic or "
                "conservative too, or leave it out"
            )
        if self.capacity < self.imagined_worlds:
            raise BurnishError(
                f"capacity={self.capacity} imagined decisions are less than one of each of the "
                f"imagined_worlds={self.imagined_worlds}; raise capacity"
            )


def build(
    config: MBPOConfig,
    base: Any,
    env: VecEnv,
    *,
    prepare: Callable[..., Any],
    history: int,
    recordings: Ticks | None = None,
    twin: KnownDynamics | None = None,
    samples: Obs | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> MBPOLoop:
    """``prepare(config, base, env)`` makes the loop of the method within; ``history`` is the number of frames that
    ``env`` stacks. ``recordings`` teach the model, and rollouts begin there too; ``twin`` is a
    simulation of the world, of which the model learns what it leaves unexplained."""
    env = without_pictures(env, base, data=recordings, twin=twin, known_ends=config.known_ends or None)
    tape = Tape(env, Ticks(device) if recordings is None else recordings, history)
    failed = known_failure(env) if config.known_ends else None
    if config.known_ends and failed is None:
        raise BurnishError("this world cannot say by what it shows where episodes fail; leave method.known_ends out")
    known: dict[str, Any] = {"twin": twin, "failed": failed}
    model = WorldModel(tape.single_frames, config.model, seed=derive(seed, "model"), **known).to(device)
    options: dict[str, Any] = {"starts": Starts.any, "seed": derive(seed, "imagined"), "device": device}
    worlds = ImaginedEnv(model, config.imagined_worlds, config.guard, **options)
    real = prepare(config.inner, base, tape, seed=seed, probe=samples is not None, samples=samples)
    require_sight(real.learner.policy)
    # Of a second loop like the first the view is used: the worlds that the model imagines, as the learner sees them.
    view = prepare(config.inner, base, stacked(worlds, history), seed=derive(seed, "imagined"), probe=False).env
    learner, acting = real.learner, real.learner.actor
    if config.optimistic or config.conservative:
        core = judged(learner, view)
        if config.lookahead and isinstance(view.env, ResidualEnv):
            raise BurnishError("method.lookahead imagines no base, and this method.inner has one; leave it 0")
        ahead = {"lookahead": config.lookahead, "gamma": view.gamma}
        if config.conservative:
            acting = Choosing(core, worlds, -config.conservative, CANDIDATES, history, **ahead)
        if config.optimistic:
            learner.actor = Choosing(core, worlds, config.optimistic, CANDIDATES, history, **ahead)
    if config.greedy:
        learner.actor = Greedy(actor_critic(learner, "method.greedy plays the mean of an actor"), base is None)
    if config.guard.kind is Guard.weight:
        weigh(learner)
    imagination = Imagination(worlds, view, acting, learner, config.capacity, derive(seed, "imagination"))
    if config.guard.kind is Guard.cut and imagination.ticks * max(config.depth.first, config.depth.last) == 1:
        raise BurnishError(
            "guard.kind=cut ends rollouts where the model does not know, and these end after one tick anyway; take "
            "guard.kind=weight or halt, or a larger depth.last"
        )
    return MBPOLoop(config, tape, real, imagination, seed)


def actor_critic(learner: Learner, wanted: str) -> ActorCritic:
    """The critic and the actor of a learner, or a refusal of what is ``wanted`` of them."""
    while isinstance(learner, Wrapping):
        learner = learner.inner
    if not isinstance(learner, ActorCritic):
        raise BurnishError(
            f"{wanted}, which this method.inner does not have; take sac, td3 or residual_td3, or leave it out"
        )
    return learner


def judged(learner: Learner, view: Any) -> ActorCritic:
    """The critic and the actor of a learner that chooses each action of the world, or a refusal."""
    wanted = "method.optimistic and method.conservative compare single actions of the world by a critic"
    core = actor_critic(learner, wanted)
    if isinstance(view, BaseEnv) or core.agent.spec.execute > 1:
        raise BurnishError(f"{wanted}, but this method.inner chooses more at once; leave both 0")
    return core


class MBPOLoop:
    """An iteration is that of the method within, before which the model is fitted and imagines, when that is due."""

    pretraining = 0

    def __init__(
        self, config: MBPOConfig, tape: Tape, real: OffPolicy[Any], imagination: Imagination, seed: int
    ) -> None:
        self.config, self.tape, self.real, self.imagination = config, tape, real, imagination
        self.learner, self.env, self.replay, self.statistics = real.learner, real.env, real.replay, real.statistics
        self.decisions_per_iteration, self.deliver = real.decisions_per_iteration, real.deliver
        self.ticks, self.model = tape.ticks, imagination.worlds.model
        self.fit = Fit(self.model, derive(seed, "fit"))
        self.fits, self.fitted_at = 0, 0  # how often, and at how many real ticks the last time
        self.imagined_at = 0  # the same of rollouts
        self._mix()
        self.latest: Metrics = {}

    def iterations(self, total: int) -> int:
        return self.real.iterations(total)

    def iterate(self) -> Metrics:
        played, worlds = int(self.statistics.ticks), self.imagination.worlds
        if not self.real.warm and played - self.fitted_at >= self._patience(played):
            self._refit(played)
        elif self.fits and 0 < self.config.imagine_every <= played - self.imagined_at:
            self.latest |= self._imagine(played, played - self.imagined_at, worlds.limit)
        return self.real.iterate()

    def _patience(self, played: int) -> int:
        """Ticks that the next fit waits for: none where a warm-up or recordings come before the first one."""
        begun = not self.fits and (self.real.config.warmup or len(self.ticks) > played)
        return 0 if begun else self.config.refit

    def _mix(self) -> None:
        """Before the first fit nothing was imagined, and all that is learnt from was played."""
        self.real.mix(self.imagination, 1 - self.config.real if self.fits else 0.0)

    def _imagine(self, played: int, ticks: int, limit: float | None = None) -> Metrics:
        """The rollouts of so many ticks, from all that were played so far; a ``limit`` that is given stays."""
        self.imagination.worlds.begin(self.ticks, limit)
        depth, self.imagined_at = self.config.depth.at(played), played
        return {**self.imagination.grow(self.config.rollouts * ticks, depth), "imagined/depth": float(depth)}

    def _refit(self, played: int) -> None:
        config = self.config
        self.model.prepare(self.ticks)
        updates = config.refit_updates if self.fits else config.model.updates
        metrics = self.fit.steps(self.ticks.split()[0], updates)
        self.model.choose_elites(self.ticks)
        found = {f"model/{key}": x for key, x in examined(self.model, self.ticks).items()}
        grown = self._imagine(played, played - self.fitted_at if self.fits else config.refit)
        self.latest = {**metrics, **found, **grown}
        self.fits, self.fitted_at = self.fits + 1, played
        self._mix()
        if self.fits & (self.fits - 1) == 0:  # 1, 2, 4, ...: a run may have hundreds
            say(
                f"after {played:,} real ticks the model explains {found['model/r2']:.0%} of the changes in ticks that "
                f"it was not fitted to; {int(grown['imagined/rows']):,} decisions were imagined, "
                f"{grown['imagined/depth']:.0f} in a row"
            )

    def report(self) -> Metrics:
        return {**self.real.report(), **self.latest}

    def state_dict(self) -> dict[str, Any]:
        return {
            "real": self.real.state_dict(),
            "model": self.model.state_dict(),
            "fit": self.fit.state_dict(),
            "ticks": self.ticks.state_dict(),
            "fits": self.fits,
            "fitted_at": self.fitted_at,
            "imagined_at": self.imagined_at,
            "latest": {key: float(x) for key, x in self.latest.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.ticks.load_state_dict(state["ticks"])
        self.real.load_state_dict(state["real"])
        self.fit.load_state_dict(state["fit"])
        self.fits, self.fitted_at, self.latest = int(state["fits"]), int(state["fitted_at"]), dict(state["latest"])
        self.imagined_at = int(state.get("imagined_at", self.fitted_at))  # older states lack it
        self._mix()
