"""A probabilistic ensemble of a world: where an action leads, what it pays, and how episodes end.

Each member predicts a Gaussian of the change of all moving observations (PETS, Chua et al. 2018, arXiv 1805.12114;
MBPO, Janner et al. 2019, 1906.08253), with layer norm (NEUBAY, 2512.04341), from normalised observations and actions;
or it is a sparse sum of functions (`sindy.py`). A second ensemble reads success, failure and reward from where the
action led. Goals and other observations that an episode keeps are copied.

**Hybrid.** With a ``twin``, a simulation of the world that says where an action leads from what is seen, members
predict what the twin leaves unexplained: o' = twin(o, a) + g(o, a).

**Ends.** The threshold of success counts *episodes*: as many have one as really had one, first of those held out
(``calibrate``), then of those that are imagined of the policy just tried (`check.py`). A threshold per tick would turn
a false alarm of 1 % into one in half of all episodes. That of failure counts ticks: where every episode fails, as those
of a robot that learns to walk, episodes say nothing about it.

**Rewards** that are a function of success and failure in all data (success or nothing, a cost per tick) are that
function; others are predicted. Where a world says what a tick pays and how it ends by what it shows (``known``), so
does its model, and there is nothing to calibrate; or it says at least where episodes fail (``failed``).

**Departures.** A number's likelihood is weighted by its variance to the power of 1/2 (beta-NLL, Seitzer et al. 2022,
2203.09168): plain likelihood gives up on what is hard to predict. No early stopping: a fixed number of updates, all
members on all data in other orders. Worlds follow any member, unless ``elites`` asks for the best. Rewards are
predicted from the action and where it led, so one that is a difference of states is fitted as well as that place tells.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...offline.descent import adam, descend
from ...policies.core.config import LATER
from ...policies.core.errors import BurnishError
from ...policies.core.execute import Execution, execution
from ...policies.core.normalize import Affine, Scaling
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import generator as named_generator
from ...policies.core.spec import EnvSpec, dtype_of
from ...policies.core.types import KnownDynamics, KnownFailure, KnownOutcome, Metrics, Obs
from ...policies.nets.ensemble import EnsembleMLP
from ...policies.nets.mlp import Activation, require_widths
from .dynamics import Dynamics, GaussianEnsemble
from .sindy import SINDy, SINDyConfig
from .ticks import Ticks, of_episodes

STILL = 1e-6  # deviation below which a number counts as constant in the data
RESIDUAL = 0.01  # of the deviation of a change: the least unit in which a twin's errors are measured
MARGIN = 0.1  # of the range of the data, by which an imagined state may leave it
WIDE = 10.0  # the same with a twin, which knows how a robot falls that never fell in the data


class Kind(enum.Enum):
    """The kinds of dynamics: networks, or sparse sums of functions."""

    ensemble = "ensemble"
    sindy = "sindy"


@dataclass
class ModelConfig:
    """Settings of the model of a world: members, layers, and how it is fitted."""

    kind: Kind = Kind.ensemble  # networks or sparse sums of functions, which say where an action leads
    members: int = 5  # networks, or sums, of the ensemble
    elites: int = 0  # members that imagined worlds follow, the best on held-out ticks; 0: all
    hidden: list[int] = field(default_factory=lambda: [256, 256, 256])  # width of each hidden layer
    updates: int = 1000  # gradient steps of each fit
    batch: int = 256  # ticks of each member in a gradient step
    lr: float = 1e-3  # learning rate
    weight_decay: float = 1e-5  # weight decay of AdamW
    sindy: SINDyConfig = field(default_factory=SINDyConfig)  # the sparse sums of kind=sindy
    # execution of a gradient step: eager, or compiled, or CUDA graphs
    execution: Execution = field(default=Execution.eager, metadata=LATER)

    def __post_init__(self) -> None:
        require_widths("model.hidden", self.hidden)
        check_ranges(self, {"[2, inf)": "members", "[1, inf)": "updates batch", "(0, inf)": "lr"}, "model.")
        check_ranges(self, {"[0, inf)": "weight_decay"}, "model.")
        if self.elites and not 2 <= self.elites <= self.members:
            raise BurnishError(
                f"model.elites={self.elites} must be 0, or from 2 to the {self.members} members of the ensemble"
            )
        if self.kind is not Kind.sindy and self.sindy != SINDyConfig():
            raise BurnishError(f"model.sindy is not read with model.kind={self.kind.value}; leave its settings out")


class Prediction(NamedTuple):
    """The outcome of a tick in N imagined worlds."""

    next_obs: Obs
    reward: Tensor  # (N,)
    success: Tensor  # (N,) bool
    failure: Tensor  # (N,) bool: an end without success
    score: Tensor  # (N, 2): what the members believe of both
    uncertainty: Tensor  # (N,) disagreement of the members, in deviations of a change


class Vectors(NamedTuple):
    """Ticks as tensors (T, ...)."""

    state: Tensor
    extra: Tensor
    action: Tensor
    expected: Tensor  # where the twin says that the action leads; without one, the state
    after: Tensor  # the state that the action led to
    reward: Tensor  # (T, 1)
    ends: Tensor  # (T, 2): success and failure


class WorldModel(nn.Module):
    """The model of a world of states; ``spec`` is that of the world, of single frames and with actions in [-1, 1]."""

    low: Tensor
    high: Tensor
    thresholds: Tensor
    rewards: Tensor
    known_reward: Tensor
    success_ends: Tensor
    elites: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        config: ModelConfig,
        *,
        seed: int = 0,
        known: KnownOutcome | None = None,
        twin: KnownDynamics | None = None,
        failed: KnownFailure | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.config, self.known, self.twin, self.failed = spec, config, known, twin, failed
        strange = sorted(key for key in spec.obs.shapes if dtype_of(key) != torch.float32 and not _kept(key))
        self.moving = sorted(key for key in spec.obs.shapes if key not in strange and not _kept(key))
        if strange or not self.moving:
            raise BurnishError(
                f"a model of a world predicts numbers, but the policy sees {', '.join(strange) or 'goals alone'}; "
                "train it on a state, or take a method that learns in the world itself"
            )
        self.kept = sorted(key for key in spec.obs.shapes if _kept(key) and dtype_of(key) == torch.float32)
        shapes = spec.obs.shapes
        self.sizes = [int(torch.Size(shapes[key]).numel()) for key in self.moving]
        state, extra = sum(self.sizes), sum(int(torch.Size(shapes[key]).numel()) for key in self.kept)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(named_generator(seed, "world model").initial_seed())
            net: dict[str, Any] = {"activation": Activation.silu, "layer_norm": True}
            inputs, members = state + extra + spec.action.dim, config.members
            self.dynamics: Dynamics = (
                SINDy(config.sindy, members, inputs, spec.action.dim, state, seed)
                if config.kind is Kind.sindy
                else GaussianEnsemble(members, inputs, state, config.hidden)
            )
            self.outcome = EnsembleMLP(members, inputs, 3, config.hidden[:2], **net)
        self.states, self.extras, self.changes, self.earned = map(Affine, ([state], [extra], [state], [1]))
        self.register_buffer("low", torch.zeros(state))
        self.register_buffer("high", torch.zeros(state))
        self.register_buffer("thresholds", torch.full((2,), 0.5))  # of success and failure
        self.register_buffer("rewards", torch.zeros(3))  # of a tick, a success and a failure
        self.register_buffer("known_reward", torch.tensor(False))
        self.register_buffer("success_ends", torch.tensor(True))
        self.register_buffer("elites", torch.arange(config.elites or config.members))

    # ---- what is seen, as vectors ----

    def state_of(self, obs: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([obs[key].flatten(1) for key in self.moving], 1)

    def _extra_of(self, obs: Mapping[str, Tensor]) -> Tensor:
        parts = [obs[key].flatten(1) for key in self.kept]
        return torch.cat(parts, 1) if parts else next(iter(obs.values())).new_zeros(len(next(iter(obs.values()))), 0)

    def with_state(self, obs: Mapping[str, Tensor], state: Tensor) -> Obs:
        """``obs`` with another state."""
        parts = zip(self.moving, state.split(self.sizes, 1), strict=True)
        return {**obs, **{key: x.view_as(obs[key]) for key, x in parts}}

    # ---- prediction ----

    def changes_of(self, obs: Mapping[str, Tensor], action: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log deviation (E, B, D) of the normalised change: from the twin's word, where there is a twin."""
        mean, log_std = self._changes(self.state_of(obs), self._extra_of(obs), action)
        return mean, self.dynamics.bounded(log_std)

    def _changes(self, state: Tensor, extra: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        return self.dynamics(self._inputs(state, extra, action))

    def _inputs(self, state: Tensor, extra: Tensor, action: Tensor) -> Tensor:
        return torch.cat([self.states(state), *([self.extras(extra)] if self.kept else []), action], -1)

    def expected(self, obs: Mapping[str, Tensor], action: Tensor) -> Tensor:
        """(B, D): the state that an action leads to by what is known without a fit."""
        if self.twin is None:
            return self.state_of(obs)
        return self.state_of(self.twin(dict(obs), action)).to(action)

    def expected_in(self, data: Mapping[str, Any]) -> Tensor:
        """(T, D): ``expected`` of recorded ticks, which may know it already."""
        known = "expected" in data and self.twin is not None
        return data["expected"] if known else self.expected(data["obs"], data["action"])

    def outcomes(self, state: Tensor, extra: Tensor, action: Tensor) -> Tensor:
        """(E, B, 3): normalised reward, and the logits of success and failure, of an action that led to ``state``."""
        return self.outcome(self._inputs(state, extra, action))

    def scores(self, out: Tensor) -> Tensor:
        """(B, 2): success and failure, of what the members say (``outcomes``)."""
        return out[..., 1:].sigmoid().mean(0)

    @torch.no_grad()
    def disagreement(self, obs: Mapping[str, Tensor], action: Tensor) -> Tensor:
        """(B,): how far the members are apart, in deviations of a change."""
        return disagreement(self._changes(self.state_of(obs), self._extra_of(obs), action)[0])

    @torch.no_grad()
    def predict(self, obs: Obs, action: Tensor, member: Tensor, noise: Tensor) -> Prediction:
        """One tick of N worlds. ``member`` (N,) is the network that a world follows, ``noise`` (N, D) its dice."""
        row = torch.arange(len(action), device=action.device)
        state, extra = self.state_of(obs), self._extra_of(obs)
        mean, log_std = self._changes(state, extra, action)
        change = mean[member, row] + self.dynamics.bounded(log_std[member, row]).exp() * noise
        foreseen = state if self.twin is None else self.expected(obs, action)
        state = torch.addcmul(foreseen + self.changes.shift, change, self.changes.scale).clamp(self.low, self.high)
        after, uncertainty = self.with_state(obs, state), disagreement(mean)
        if self.known is not None:
            paid, success, failure = self.known(obs, after)
            score = torch.stack([success, failure], 1).to(state)
            return Prediction(after, paid, success, failure & ~success, score, uncertainty)
        out = self.outcomes(state, extra, action)
        score = self.scores(out)
        success, failure = (score > self.thresholds).unbind(-1)
        failure = (failure if self.failed is None else self.failed(after)) & ~success
        if bool(self.known_reward):
            paid = torch.where(success, self.rewards[1], torch.where(failure, self.rewards[2], self.rewards[0]))
        else:
            paid = out[member, row, 0] * self.earned.scale[0] + self.earned.shift[0]
        return Prediction(after, paid, success, failure, score, uncertainty)

    # ---- fitting ----

    @property
    def prepared(self) -> bool:
        """Whether it knows the scales of what was played."""
        return bool((self.high > self.low).any())

    def prepare(self, ticks: Ticks) -> None:
        """Scales and known functions of what was played so far, and dynamics that need no gradient. The scales of the
        first time stay, so that a model that is fitted again goes on from what it knows; a number that was constant
        then gets one once it moves."""
        if self.twin is not None:
            ticks.ask(self.expected)
        data = ticks.split()[0]
        played = self.vectors(data)
        state, after = played.state, played.after
        if self.prepared:
            _scale_what_moves_now(self.states, torch.cat([state, after]))
            _scale_what_moves_now(self.extras, played.extra)
            _scale_what_moves_now(self.changes, after - played.expected)
        else:
            self.states.fit(torch.cat([state, after]), Scaling.standard, STILL)
            if self.kept:
                self.extras.fit(played.extra, Scaling.standard, STILL)
            self.changes.fit(after - state, Scaling.standard, STILL)
            if self.twin is not None:
                least = RESIDUAL * self.changes.scale
                self.changes.shift.zero_()
                self.changes.scale.copy_(torch.maximum((after - played.expected).square().mean(0).sqrt(), least))
            self.earned.fit(data["reward"][:, None], Scaling.standard, STILL)
        inputs = self._inputs(state, played.extra, played.action)
        self.dynamics.solve(inputs, self.changes(after - played.expected))
        everything = ticks.all()
        both = torch.cat([self.state_of(everything["obs"]), self.state_of(everything["next_obs"])])
        room = (MARGIN if self.twin is None else WIDE) * (both.amax(0) - both.amin(0))
        self.low.copy_(both.amin(0) - room)
        self.high.copy_(both.amax(0) + room)
        success, failure = ends_of(everything)
        self.success_ends.fill_(bool(everything["terminated"][success].all()))
        groups = [everything["reward"][rows] for rows in (~success & ~failure, success, failure)]
        self.known_reward.fill_(all(bool((x == x[:1]).all()) for x in groups))
        self.rewards.copy_(torch.stack([x[:1].sum() for x in groups]))  # 0 where nothing ended so

    def vectors(self, data: Mapping[str, Any]) -> Vectors:
        """Ticks as the networks read them."""
        state, after = self.state_of(data["obs"]), self.state_of(data["next_obs"])
        ends, extra = torch.stack(ends_of(data), -1).to(state), self._extra_of(data["obs"])
        return Vectors(state, extra, data["action"], self.expected_in(data), after, data["reward"][:, None], ends)

    def loss(self, ticks: Vectors) -> tuple[Tensor, Metrics]:
        """Of the ticks (E, B, ...) that each member learns from."""
        state, extra, action, expected, after, reward, ends = ticks
        loss, error = self.dynamics.loss(self._inputs(state, extra, action), self.changes(after - expected))
        out = self.outcomes(after, extra, action)
        believed = F.binary_cross_entropy_with_logits(out[..., 1:], ends, reduction="none").mean(1).sum()
        paid = (out[..., :1] - self.earned(reward))[..., 0].square().mean(1).sum()
        return loss + believed + paid, {"model/error": error, "model/ends": believed.detach()}

    @torch.no_grad()
    def calibrate(self, ticks: Ticks) -> None:
        """As many episodes with an imagined success, and ticks with a failure, as really had one; known ends are what
        they are."""
        if self.known is not None:
            return
        held = ticks.split()[1]
        score = self.scores_of(held)
        success, failure = ends_of(held)
        share = float(of_episodes(success, held).mean())
        self.thresholds[0] = threshold(of_episodes(score[:, 0], held), share)
        self.thresholds[1] = threshold(score[:, 1], float(failure.float().mean()))

    @torch.no_grad()
    def choose_elites(self, ticks: Ticks) -> None:
        """The members with the smallest error on ticks that none was fitted to."""
        held = ticks.split()[1]
        change = self.changes(self.state_of(held["next_obs"]) - self.expected_in(held))
        error = (self.changes_of(held["obs"], held["action"])[0] - change).square().mean((1, 2))
        self.elites.copy_(error.argsort()[: len(self.elites)].sort().values)

    def scores_of(self, data: Mapping[str, Any]) -> Tensor:
        """(T, 2): the scores of success and failure of recorded ticks."""
        if self.known is not None:
            return torch.stack(self.known(data["obs"], data["next_obs"])[1:], 1).to(data["reward"])
        after, extra = self.state_of(data["next_obs"]), self._extra_of(data["obs"])
        return self.scores(self.outcomes(after, extra, data["action"]))


class Fit:
    """The gradient steps of a model; ``seed`` decides which ticks each member sees."""

    def __init__(self, model: WorldModel, seed: int) -> None:
        self.model, self.generator = model, named_generator(seed, "fit")
        config = model.config
        decay = {"weight_decay": config.weight_decay, "decoupled_weight_decay": True}  # AdamW
        self.optimizer = adam(model.parameters(), config.lr, config.execution, **decay)
        self._step = execution(self._descend, config.execution, device=model.low.device)

    def steps(self, data: Mapping[str, Any], count: int) -> Metrics:
        shape = (self.model.config.members, self.model.config.batch)
        metrics: Metrics = {}
        vectors = self.model.vectors(data)
        for _ in range(count):
            rows = torch.randint(len(vectors.state), shape, generator=self.generator).to(vectors.state.device)
            metrics = self._step(Vectors(*(x[rows] for x in vectors)))
        if not all(bool(torch.isfinite(x).all()) for x in self.model.parameters()):
            raise BurnishError(
                "the model of the world is no longer finite after a fit; lower its lr, or look for outliers in what "
                "the world shows"
            )
        return metrics

    def _descend(self, ticks: Vectors) -> Metrics:
        loss, metrics = self.model.loss(ticks)
        descend(self.optimizer, loss)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())


def _scale_what_moves_now(scaler: Affine, data: Tensor) -> None:
    """Numbers that were constant when ``scaler`` was fitted, and so kept their unit, are scaled by ``data``."""
    if not scaler.scale.numel():
        return
    fresh = Affine(scaler.scale.shape).to(scaler.scale)
    fresh.fit(data, Scaling.standard, STILL)
    moves = (scaler.scale == 1) & (fresh.scale != 1)
    scaler.shift.copy_(torch.where(moves, fresh.shift, scaler.shift))
    scaler.scale.copy_(torch.where(moves, fresh.scale, scaler.scale))


def disagreement(mean: Tensor) -> Tensor:
    """(B,): the deviation of the members' means (E, B, D), averaged over numbers. `Tensor.std` is slow over a first
    dimension that is so short."""
    return (mean - mean.mean(0)).square().mean(0).sqrt().mean(-1)


def threshold(highest: Tensor, share: float) -> float:
    """The score that ``share`` of the episodes, or ticks, exceed; ``highest`` (n,) is the highest of each."""
    ranked = torch.cat([highest.new_ones(1), highest.sort(descending=True).values, highest.new_zeros(1)])
    count = round(share * len(highest))
    return float((ranked[count] + ranked[count + 1]) / 2)


def ends_of(ticks: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(T,) success, and failure: an end without success."""
    return ticks["success"], ticks["terminated"] & ~ticks["success"]


def _kept(key: str) -> bool:
    """Observations that say what to do stay as they are for an episode."""
    return key.startswith("goal") or key == "tokens"
