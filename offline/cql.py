"""CQL: SAC whose critic is pushed down where the data is not; and Cal-QL, which does not push below what was earned.

Kumar et al. 2020 (CQL, arXiv 2006.04779): the gap log sum exp Q(s, .) - Q(s, a) of equation 4, estimated as in
appendix F by importance sampling from three proposals: uniform, pi(. | s), and pi(. | s') *at s*. With ``threshold``
its weight is a Lagrange multiplier that holds the gap there. Nakamoto et al. 2023 (Cal-QL, arXiv 2303.05479):
``calibrate`` floors the Q of the policy's actions, and of those alone, at the return that the data earned from there.
In the world it goes on: an episode's returns are known, and floor, from its end on.
With ``weight`` 0 this is SAC, number for number; its target has no entropy unless ``backup_entropy`` is set.

**Published variants, as settings.** The target: one draw without entropy (``backup_entropy=false``, the authors'), with
it, or the best of ``count`` draws (``max_target_backup``, for antmaze). The floor of the gap: ``gap_floor``, none, and
-200 in antmaze; as the gap here is lower by log(3 count), that is -203.4 with 10 draws. Weights: 10 in locomotion, 5 or
a threshold of 0.8 in antmaze and in Cal-QL, 1 for hands. The returns that ``calibrate`` floors with are made from the
same scaled rewards and the same discount as the targets (``dataset.decisions``).

**Departures.** The log-sum-exp is that of a mean, not of a sum, so a published threshold is to be lowered by
``gap_temperature * log(3 count)``. ``gap_temperature`` divides Q and not the density of the proposal, so that the gap
is one of the integral of exp(Q / T) at every T. The multiplier is stepped by its logarithm, as the temperature of SAC
is, by the optimiser of the critic. Layer norm is on (``critic.layer_norm``), which neither paper has: it bounds what a
critic promises beyond the data, as in the Cal-QL of DPPO and WSRL. The actor has the two layers of Cal-QL (CQL: three),
begins with a spread of 1 (e^-1) that stays above e^-5 (e^-20), and learns at 1e-4, as published for antmaze and hands
(3e-5 in locomotion); weights start as layers of torch do (orthogonal). On chunks the uniform density is that of the
whole executed chunk, and rows whose chunk a truncation cut short train neither the critic nor its gap
(``td.chunk_weight``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..policies.core.errors import BurnishError
from ..policies.core.execute import Execution, execution
from ..policies.core.graphed_policy import executed_actor
from ..policies.core.ranges import check_ranges
from ..policies.core.tree import check, index
from ..policies.core.types import Decision, Decisions, Memory, Metrics, Obs, Source
from ..policies.gaussian import GaussianConfig, GaussianPolicy
from ..policies.nets.critic import CriticConfig
from .actors import PolicyActor, trainable_tanh_gaussian
from .critics import adopt_normalizers, spread
from .dataset import BehindCut
from .descent import adam, descend
from .learner import CriticLearner, columns_of
from .returns import returns_to_go
from .sac import SACActor, soft_agent
from .soft import Temperature, soft_step, soft_value
from .td import calibrated, cql_gap, pessimistic, row_mean, row_weight, td_target, uniform_log_density


@dataclass
class CQLConfig:
    """Settings of CQL and Cal-QL: the weight of the gap between proposals and data, and those of SAC."""

    weight: float = 5.0  # weight of the gap; where it starts, with a threshold
    threshold: float | None = None  # the gap that a Lagrange multiplier shall hold; null: the weight is constant
    calibrate: bool = False  # Cal-QL; needs decisions(returns=...)
    # value that is assumed behind a truncation, in the returns that calibrate compares with
    behind_cut: BehindCut = BehindCut.worst
    count: int = 10  # draws of each of the three proposals
    gap_temperature: float = 1.0  # temperature of the log-sum-exp over proposals
    gap_floor: float | None = None  # limit below which a row's gap is not lowered further; null: there is none
    backup_entropy: bool = False  # the target pays the entropy of the policy, as in SAC
    max_target_backup: bool = False  # the target takes the best of ``count`` draws instead of one
    lr: float = 3e-4  # learning rate of the critic
    actor_lr: float = 1e-4  # learning rate of the actor and of the temperature
    tau: float = 0.005  # share by which target networks follow, at every update
    alpha: float = 1.0  # temperature of SAC at the start
    tune_alpha: bool = True  # the temperature follows the target entropy; false: it stays at alpha
    entropy_per_dim: float = -1.0  # target entropy for each coordinate of the action, in nats
    subset: int = 0  # target members of which the minimum is taken; 0: all
    agent: GaussianConfig = field(default_factory=soft_agent)  # the policy where none is given
    # the Q network
    critic: CriticConfig = field(default_factory=lambda: CriticConfig(hidden=[256, 256, 256], layer_norm=True))
    execution: Execution = Execution.eager  # execution of an update: eager, or compiled, or CUDA graphs

    def __post_init__(self) -> None:
        least = {"[0, inf)": "weight subset", "[1, inf)": "count"}
        check_ranges(self, {"(0, inf)": "lr actor_lr alpha gap_temperature", "(0, 1]": "tau", **least})
        if self.threshold is not None and self.weight == 0:
            raise BurnishError(f"threshold={self.threshold} needs a weight above 0 to start from; take weight=1")

    @property
    def policy(self) -> GaussianConfig:
        """The policy where none is given."""
        return self.agent

    def discount_of(self, execute: int) -> float:
        """Discount of a whole decision where decisions are played; recordings bring their own."""
        return 1.0


UNKNOWN = -1e30  # a bound that binds nothing, and with which one can calculate


class CalibratingActor(SACActor):
    """SAC's actor. It stores each decision with a return of -inf, which stands until the episode has ended."""

    def act(self, obs: Obs, *, warm: bool, generator: torch.Generator, fresh: Tensor | None = None) -> Decision:
        action, columns = super().act(obs, warm=warm, generator=generator, fresh=fresh)
        return Decision(action, {**columns, "return_to_go": action.new_full((len(action),), -math.inf)})


class CQL(CriticLearner):
    """The learner of CQL and Cal-QL: a tanh-Gaussian policy, its critics and its temperature."""

    saved = ("policy", "critic", "temperature", "multiplier", "critic_optimizer", "actor_optimizer", "noise")

    def __init__(
        self, policy: GaussianPolicy, config: CQLConfig, *, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(policy.spec, config, seed=seed, device=device)
        self.policy, spec = policy.to(device), policy.spec
        kind = CalibratingActor if config.calibrate else SACActor
        self.actor = executed_actor(kind(policy, PolicyActor(policy).play), config.execution, device)
        self.discount = config.discount_of(spec.execute)
        self.worst = math.inf  # reward of a decision so far
        self.running: Tensor | None = None  # (N,) decisions of the episodes under way
        adopt_normalizers(self.critic, policy)
        self.size = spec.execute * spec.action.dim
        self.temperature = Temperature(
            config.alpha, config.entropy_per_dim * self.size if config.tune_alpha else None
        ).to(device)
        # It rises while gap - threshold > 0, as a temperature does while log_prob + target > 0.
        held = None if config.threshold is None else -config.threshold
        self.multiplier = Temperature(config.weight or 1.0, held).to(device)
        self.trained = [p for part in (policy, self.temperature) for p in part.parameters() if p.requires_grad]
        judges = (self.critic.online, self.multiplier)
        critic_side = [p for part in judges for p in part.parameters() if p.requires_grad]
        self.critic_optimizer = adam(critic_side, config.lr, config.execution)
        self.actor_optimizer = adam(self.trained, config.actor_lr, config.execution)
        generators = [self.noise]
        self._step_critic = execution(self._critic_step, config.execution, device=device, generators=generators)
        self._step_actor = execution(self._actor_step, config.execution, device=device, generators=generators)

    def update(self, source: Source) -> Metrics:
        batch = source.sample()
        self.updates += 1
        columns = columns_of(batch)
        if self.config.calibrate:
            if "return_to_go" not in batch:
                raise BurnishError(
                    "calibrate=true needs the column return_to_go; make the data by decisions(returns=BehindCut.worst)"
                )
            columns["return_to_go"] = batch["return_to_go"]
        metrics = self._step_critic(batch["obs"], batch["next_obs"], columns)
        return metrics | self._step_actor(batch["obs"])

    # ---- calibration in the world ----

    def prior(self, replay: Decisions, recordings: Decisions | None) -> Memory | None:
        if recordings is not None:
            self.worst = float(recordings.latest(None, ("reward",))["reward"].min())
        return recordings

    def stored(self, replay: Decisions) -> None:
        """Where an episode has ended, its decisions get the returns that were earned behind them."""
        if not self.config.calibrate:
            return
        newest = replay.latest(1, ("reward", "ended"))
        self.worst = min(self.worst, float(newest["reward"].min()))
        ended = newest["ended"][0]
        before = torch.zeros_like(ended, dtype=torch.int64) if self.running is None else self.running
        self.running = torch.where(ended, 0, before + 1)
        if not bool(ended.any()):
            return
        length = min(int(before[ended].max()) + 1, replay.filled)
        recent = replay.latest(length, ("reward", "discount", "ended"))
        tail = torch.full_like(recent["reward"], self.worst)
        gamma = torch.full_like(tail, self.discount)
        if self.config.behind_cut is BehindCut.last:
            tail, gamma = recent["reward"], recent["discount"]  # at a cut that of its ticks, which may be fewer
        elif self.config.behind_cut is BehindCut.nothing:
            tail = torch.zeros_like(tail)
        # Without a discount what follows for ever has no finite worth, unless it is nothing.
        tail = torch.where(tail == 0, tail, torch.where(gamma < 1, tail / (1 - gamma), UNKNOWN))
        earned = returns_to_go(recent["reward"], recent["discount"], recent["ended"], tail)
        for world in ended.nonzero()[:, 0].tolist():
            count = min(int(before[world]) + 1, length)
            replay.fill_in("return_to_go", world, earned[length - count :, world])

    def _draws(self, obs: Obs, count: int) -> tuple[Tensor, Tensor]:
        """(actions (B, M, n, A), their log-densities (B, M))."""
        batch, spec = len(next(iter(obs.values()))), self.policy.spec
        rows = torch.arange(batch, device=self.noise.device).repeat_interleave(count)
        draw = self.policy.draw(index(obs, rows), generator=self.noise)
        return spec.executed(draw.action).unflatten(0, (batch, count)), draw.log_prob.view(batch, count)

    def _target(self, next_obs: Obs, columns: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            count = self.config.count if self.config.max_target_backup else 1
            actions, log_prob = self._draws(next_obs, count)
            q = self.critic.target(next_obs, actions)  # (E, B, M)
            value, best = pessimistic(q, self.config.subset, self.noise).max(1)
            if self.config.backup_entropy:  # of the draw that is taken, which Q alone chooses
                value = soft_value(value, log_prob.gather(1, best[:, None])[:, 0], self.temperature())
            return td_target(columns["reward"], columns["discount"], value)

    def gap(self, obs: Obs, next_obs: Obs, features: Tensor, q_data: Tensor, columns: dict[str, Tensor]) -> Tensor:
        """(E, B): how much more the critic promises for any action than for that of the data."""
        count, spec = self.config.count, self.policy.spec
        batch = len(features)
        with torch.no_grad():
            shape = (batch, count, spec.execute, spec.action.dim)
            anywhere = 2 * torch.rand(shape, generator=self.noise, device=self.noise.device) - 1
            here, log_here = self._draws(obs, count)
            after, log_after = self._draws(next_obs, count)
            log_anywhere = torch.full_like(log_here, uniform_log_density(self.size))
            log_proposal = torch.cat([log_anywhere, log_here, log_after], 1)
        check(log_proposal, f"{batch} {3 * count}")
        q = self.critic.online.values(features, torch.cat([anywhere, here, after], 1))
        if self.config.calibrate:
            q = torch.cat([q[:, :, :count], calibrated(q[:, :, count:], columns["return_to_go"])], 2)
        gap = cql_gap(q_data, q, log_proposal, self.config.gap_temperature)
        return gap if self.config.gap_floor is None else gap.clamp(min=self.config.gap_floor)

    def _critic_step(self, obs: Obs, next_obs: Obs, columns: dict[str, Tensor]) -> Metrics:
        target = self._target(next_obs, columns)
        online, execute = self.critic.online, self.policy.spec.execute
        mask = row_weight(columns, execute)
        features = online.encode(obs)
        loss, q = online.loss(features, columns["action"], target, mask if execute > 1 or "weight" in columns else None)
        metrics: Metrics = {"critic_loss": loss.detach(), "q": q.detach().mean(), "q/spread": spread(q.detach())}
        if self.config.weight > 0:
            gap = row_mean(self.gap(obs, next_obs, features, q, columns), mask)  # (E,)
            multiplier = self.multiplier()
            metrics |= {"gap": gap.detach().mean(), "gap/weight": multiplier}
            loss = loss + multiplier * gap.sum() + self.multiplier.loss(gap)
        descend(self.critic_optimizer, loss)
        self.critic.follow(self.config.tau)
        return metrics | {"target": target.mean()}

    def _actor_step(self, obs: Obs) -> Metrics:
        draw = self.policy.draw(obs, generator=self.noise)
        action, log_prob = self.policy.spec.executed(draw.action), draw.log_prob[:, 0]
        return soft_step(self.critic.online(obs, action).amin(0), log_prob, self.temperature, self.actor_optimizer)

    def state_dict(self) -> dict[str, Any]:
        known = {} if self.running is None else {"worst": self.worst, "running": self.running.clone()}
        return {**super().state_dict(), **known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.worst, running = float(state.get("worst", self.worst)), state.get("running")
        self.running = None if running is None else running.to(self.noise.device, copy=True)


def build(config: CQLConfig, policy: Any, *, seed: int = 0, device: torch.device | str = "cpu") -> CQL:
    """The CQL learner of a tanh-Gaussian policy; another kind is refused."""
    return CQL(trainable_tanh_gaussian(policy, "CQL"), config, seed=seed, device=device)
