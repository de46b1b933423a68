"""The only PPO: it sees likelihoods of J factors and does not know what kind of policy they come from.

Schulman et al. 2017 (arXiv 1707.06347). An actor draws chunks with their evidence and can evaluate that evidence again;
values, advantages, the clipped surrogate and the optimiser are the same for Gaussians, chains and corrections.

**Departures.** The Gaussian, DPPO and ReinFlow implementations treat a truncation as a termination or bootstrap it from
the wrong observation; here every row bootstraps from where it led. A minibatch holds all factors of its rows, so that
observations are encoded once. Advantages are normalised once per update by default, because a minibatch's own mean and
deviation are noise; ``normalize=minibatch`` is the published way. Gradients are clipped to a norm of 1 (DPPO and
ReinFlow: not at all, but for two tasks). A minibatch may pass in slices whose gradients add up to its own: where it
does not fit (``slice``), and on a CPU always, because what a slice leaves for the way back stays in the caches, and its
memory is used again instead of asked for anew. Decisions of an expert or a person are not learnt from, and end the sum
over later rewards (`people/intervened_rows.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..offline.critics import explained_variance
from ..offline.replay import Batch
from ..policies.core.config import LATER
from ..policies.core.errors import BurnishError
from ..policies.core.execute import Execution, execution
from ..policies.core.graphed_policy import executed_actor
from ..policies.core.normalize import Running
from ..policies.core.ranges import check_ranges
from ..policies.core.ranks import sharing, whole
from ..policies.core.seed import derive
from ..policies.core.seed import generator as named_generator
from ..policies.core.spec import ObsSpec
from ..policies.core.tree import index
from ..policies.core.types import Actor, Learner, Metrics, Obs, Policy, Source
from ..policies.nets.critic import ValueConfig, ValueNet
from ..policies.nets.encoder import require_shift, shifted
from ..policies.runs.module_state import restore, state_of
from . import surrogate
from .actors.drawing import Network, PPOActor
from .reward_scale import RewardScale
from .rollout import flat
from .sharded_actor import shared_out
from .surrogate import Reduction, clip_fraction, clipped_surrogate, divisor, effective_clip, gae, kl_k3

# A further loss per row: (obs of the minibatch, the minibatch) -> (B,). Its mean is added, weighted by the method.
Auxiliary = Callable[[Obs, Batch], Tensor]

# The advantages (T, N) of a rollout, and which of them count: in the place of a critic.
Comparison = Callable[[Batch], tuple[Tensor, Tensor]]

# Numbers that are only looked at, from the rows of an update.
Watch = Callable[[Batch], Metrics]

FORWARD = 8192  # rows per forward pass where nothing is learnt, so that a long rollout of images fits in memory
LOOSE = 1.0  # nats: a draw that becomes e times as likely in one update
SLICE = 4096  # rows of the actor's network per pass of a CPU where something is learnt


class Normalize(Enum):
    """The rows over which advantages are normalised."""

    update = "update"
    minibatch = "minibatch"
    none = "none"


@dataclass
class PPOConfig:
    """Settings of PPO: passes, minibatches, clipping, learning rates, and treatment of rewards."""

    epochs: int = 5  # passes over each rollout
    minibatch: int = 256  # rows of a minibatch; all factors of a row are in the same one
    # rows that pass at once, whose gradients add up to those of the minibatch; null: all, on a CPU what its caches hold
    slice: int | None = field(default=None, metadata=LATER)
    clip: float = 0.2  # limit of the change of a likelihood ratio
    reduction: Reduction = Reduction.sum  # reduction to a ratio: sum or mean over a factor's coordinates
    lam: float = 0.95  # lambda of the advantages (GAE), per decision
    lr: float = 3e-4  # learning rate of the actor
    critic_lr: float = 1e-3  # learning rate of the critic
    lr_decay: int = 0  # iterations of half a cosine down to min_lr_ratio; 0: constant
    min_lr_ratio: float = 0.0  # share of the learning rate that is left in the end
    weight_decay: float = 0.0  # weight decay of the actor, by AdamW
    critic_weight_decay: float = 0.0  # weight decay of the critic, by AdamW
    value_coef: float = 0.5  # weight of the critic's loss
    value_clip: float | None = None  # largest change of a value in an update, as in PPO2; null: no limit
    target_kl: float | None = None  # divergence at which an update stops early; null: never
    max_grad_norm: float = 1.0  # norm to which gradients are clipped, of actor and critic, each for itself
    normalize: Normalize = Normalize.update  # rows over which advantages are normalised
    scale_reward: bool = False  # rewards are divided by the running deviation of the discounted return
    reward_clip: float = 10.0  # limit of scaled rewards
    advantage_quantiles: list[float] | None = None  # normalised advantages are limited to these two of theirs
    image_shift: float = 0.0  # largest random shift of each row's images, as a share of their shorter side
    critic_warmup: int = 0  # first updates that train the critic alone
    # each of several ranks holds its share of the policy, its gradients and moments (FSDP2), in place of all
    shard: bool = field(default=False, metadata=LATER)
    value: ValueConfig = field(default_factory=ValueConfig)  # the value network
    execution: Execution = Execution.eager  # execution of an update: eager, or compiled, or CUDA graphs

    def __post_init__(self) -> None:
        check_ranges(
            self,
            {
                "[1, inf)": "epochs slice",
                "[2, inf)": "minibatch",
                "[0, inf)": "lr_decay critic_warmup weight_decay critic_weight_decay value_coef",
                "(0, inf)": "clip lr critic_lr max_grad_norm reward_clip value_clip target_kl",
                "[0, 1]": "lam min_lr_ratio",
            },
            "ppo.",
        )
        require_shift("ppo.image_shift", self.image_shift)
        ends = self.advantage_quantiles
        if ends is not None and (len(ends) != 2 or not 0 <= ends[0] < ends[1] <= 1):
            raise BurnishError(
                f"ppo.advantage_quantiles={ends} must be two numbers in [0, 1], the lower first, or null"
            )
        if ends is not None and self.normalize is Normalize.none:
            raise BurnishError(
                f"ppo.advantage_quantiles={ends} limits advantages as they are normalised, which ppo.normalize=none "
                "does not; leave one of them out"
            )


class PPO(Learner):
    """Of ``actor`` the parameters with ``requires_grad`` are trained; ``policy`` is what is deployed: the trained part
    without the noise that training added.

    ``weight`` and ``clip`` (J,) say how much each factor counts, and how far it may move; by default 1 and
    ``config.clip``. ``auxiliary`` maps a name to (coefficient, loss). ``watch`` measures, after each update, what the
    method wants to see of the rows that it was made from. ``observed`` is what the value sees, where it is not what the
    actor is specified to see. ``normalize`` scales observations as those of all rollouts
    lie, for actors that know no data: between two updates, so that a first ratio is 1 as everywhere.
    """

    def __init__(
        self,
        actor: Network,
        policy: Policy,
        config: PPOConfig,
        *,
        num_envs: int,
        weight: Tensor | None = None,
        clip: Tensor | None = None,
        auxiliary: Mapping[str, tuple[float, Auxiliary]] | None = None,
        watch: Watch = lambda rows: {},
        observed: ObsSpec | None = None,
        normalize: bool = False,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.network, self.config, self.ranks = actor, config, sharing()
        self.device = torch.device(device)
        self.shares = shared_out(actor, policy, config, self.device, seen_as_features=observed is not None)
        self.policy = self.shares.policy
        self.actor: Actor = executed_actor(PPOActor(actor), config.execution, self.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "value"))
            spec = actor.spec if observed is None else replace(actor.spec, obs=observed)
            self.value = ValueNet(spec, config.value).to(device)
        factors = torch.ones_like(actor.coordinates)
        self.weight = (factors if weight is None else weight).to(device)
        self.clip = (config.clip * factors if clip is None else clip).to(device)
        self.divisor = divisor(config.reduction, actor.coordinates, actor.transitions).to(device)
        self.auxiliary, self.watch = dict(auxiliary or {}), watch
        passes = int(actor.transitions.sum())  # rows of the network that one decision takes
        usual = max(1, SLICE // passes) if self.device.type == "cpu" else config.minibatch
        self.slice, self.forward = config.slice or usual, config.slice or FORWARD
        self.scale = RewardScale(num_envs * self.ranks.size, device) if config.scale_reward else None
        self.seen = Running(actor, self.value) if normalize else None
        self.comparison: Comparison | None = None
        self.rows = named_generator(seed, "minibatches")
        self.updates = self.gradient_steps = 0
        self.actor_parameters = [p for p in actor.parameters() if p.requires_grad]
        graphed = config.execution is Execution.cudagraph
        self.rates = [torch.tensor(rate, device=device) for rate in (config.lr, config.critic_lr)]
        own = {"params": self.actor_parameters, "lr": self.rates[0], "weight_decay": config.weight_decay}
        critic = {"params": self.value.parameters(), "lr": self.rates[1], "weight_decay": config.critic_weight_decay}
        self.optimizer = torch.optim.AdamW([own, critic], lr=self.rates[0], fused=True, capturable=graphed)
        # One recording with the actor and one without it: a recording is of one kind of update only.
        self._descend = {
            kind: execution(partial(self._descent, train_actor=kind), config.execution, device=device)
            for kind in (False, True)
        }

    def compare(self, comparison: Comparison) -> None:
        """From now on advantages are those of ``comparison``, and there is no critic."""
        self.comparison, self.value = comparison, nn.Identity()
        self.optimizer.param_groups.pop()
        self.seen = self.seen and Running(self.network)

    def describe(self) -> str:
        """The effective strength of the clip; printed once."""
        bounds = effective_clip(self.clip, self.divisor)
        low, high = float(bounds.min()), float(bounds.max())
        limit = f"{high:.3g}" if high - low < 1e-6 * high else f"{low:.3g} to {high:.3g}"
        loose = "; that is hardly a limit, so lower method.ppo.clip if success falls" if high > LOOSE else ""
        return (
            f"clip {self.config.clip:g} with reduction={self.config.reduction.value}: the summed log-likelihood of a "
            f"factor rises by at most {limit} before the clip stops it{loose}"
        )

    # ---- one update ----

    def update(self, source: Source) -> Metrics:
        """The batch is that of ``Rollout``: T decisions of N worlds, in the order of time."""
        batch = source.sample()
        metrics = self._learn(batch)
        if self.seen is not None:
            self.seen.absorb(batch["obs"])
        self.shares.publish()
        return metrics

    def _learn(self, batch: Batch) -> Metrics:
        self._set_rates()
        rows, before = self._prepare(batch)
        count = len(rows["advantage"])
        if not count:  # a person played all of it, or no group tells
            self.updates += self.comparison is not None  # it counts for schedules; a critic's warm-up goes on
            return before
        played = batch["reward"].numel()
        size, graphed = min(self.config.minibatch, played), self.config.execution is Execution.cudagraph
        if graphed:
            parts = -(-played // size)
            if played % parts:
                raise BurnishError(
                    f"execution=cudagraph replays minibatches of one size, but {played} decisions do not divide into "
                    f"{parts} equal ones; change minibatch, or use execution=eager"
                )
            size = played // parts
        train_actor = self.updates >= self.config.critic_warmup
        metrics: Metrics = {}
        stopped = False
        for _ in range(self.config.epochs):
            order = torch.randperm(count, generator=self.rows).to(self.device)
            if graphed and count % size:  # decisions were left out; some of the others count twice
                order = order.repeat(-(-size // count) + 1)[: -(-count // size) * size]
            # Minibatches of equal size, give or take a row, that leave none out.
            for chosen in order.tensor_split(-(-len(order) // size)):
                metrics = self._descend[train_actor](index(rows, chosen))
                self.gradient_steps += 1
                if self.config.target_kl is not None and train_actor and metrics["kl"] > self.config.target_kl:
                    stopped = True
                    break
            if stopped:
                break
        self.updates += 1
        found: Metrics = {
            **metrics,
            **before,
            **({} if self.shares.divided else self.watch(rows)),
            "lr": self.rates[0].clone(),
            "kl_stopped": float(stopped),
        }
        return {**found, "gradient_steps": self.gradient_steps}

    @torch.no_grad()
    def _prepare(self, batch: Batch) -> tuple[Batch, Metrics]:
        rows = flat(batch)
        # Whole chunks were drawn. Of those that an end cut short, both evidences must count what was executed; and of
        # shifted images, what the policy makes of them.
        again = rows["steps"] < self.network.spec.execute
        if self.config.image_shift > 0:
            # Once per update, so that all epochs and both evidences see the same images.
            rows["obs"], again = shifted(rows["obs"], self.config.image_shift, self.rows), torch.ones_like(again)
        stale = again.nonzero()[:, 0]
        for part in stale.split(self.forward) if len(stale) else ():
            drawn: Batch = index({name: rows[name] for name in ("obs", "trace", "steps")}, part)
            evidence = self.network.log_prob(drawn["obs"], drawn["trace"], drawn["steps"])
            rows["log_prob"] = rows["log_prob"].index_copy(0, part, evidence)
        if self.comparison is None:
            return self._estimated(batch, rows)
        advantage, counted = (x.flatten() for x in self.comparison(batch))
        return index({**rows, "advantage": advantage}, counted.nonzero()[:, 0]), {"compared": counted.float().mean()}

    def _estimated(self, batch: Batch, rows: Batch) -> tuple[Batch, Metrics]:
        """Generalised advantages, by the critic."""
        shape = batch["reward"].shape
        value = self._values(rows["obs"])
        following = torch.cat([value[shape[1] :], value[: shape[1]]])
        led = batch["bootstrap"]
        following[led["rows"]] = self._values(led["obs"])
        reward = batch["reward"]
        ended, valid = batch["ended"], batch["valid"]
        intervened = not bool(valid.all())
        if intervened:  # a sum ends before an intervention, in the value of the state in which it begins
            ended = ended | torch.cat([~valid[1:], torch.zeros_like(ended[:1])])
        if self.scale is not None:
            own = valid if intervened else None
            reward = self.scale(reward, batch["discount"], ended, self.config.reward_clip, own)
        value, following = value.view(shape), following.view(shape)
        advantage, target = gae(reward, batch["discount"], ended, value, following, self.config.lam)
        rows |= {"advantage": advantage.flatten(), "target": target.flatten(), "value": value.flatten()}
        if intervened:
            rows = index(rows, valid.flatten().nonzero()[:, 0])
            advantage, value = rows["advantage"], rows["value"]
        if not len(rows["advantage"]):
            return rows, {}
        if self.config.normalize is Normalize.update:
            rows["advantage"] = surrogate.normalized(rows["advantage"], self.config.advantage_quantiles)
        report: Metrics = {
            "explained_variance": explained_variance(rows["value"], rows["target"]),
            "value": value.mean(),
            "advantage_std": advantage.std(correction=0),
            "clip/effective": effective_clip(self.clip, self.divisor).max(),
        }
        return rows, report

    def _values(self, obs: Obs) -> Tensor:
        count = len(next(iter(obs.values())))
        return torch.cat([self.value(index(obs, slice(i, i + self.forward))) for i in range(0, count, self.forward)])

    def _descent(self, rows: Batch, train_actor: bool) -> Metrics:
        """One step on the mean over a minibatch, of which each rank computes the rows that are its own."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.config.normalize is Normalize.minibatch:
            rows = rows | {"advantage": surrogate.normalized(rows["advantage"], self.config.advantage_quantiles)}
        count = len(rows["advantage"])
        rank, size = self.ranks.rank, self.ranks.size
        own, metrics = index(rows, slice(rank, None, size)) if size > 1 else rows, Metrics()
        for start in range(0, -(-count // size), self.slice):  # as many passes on each rank
            part = index(own, slice(start, start + self.slice))
            share = len(part["advantage"]) / count
            if not share:  # without a row, a rank adds one that counts nothing
                part = index(rows, slice(0, 1))
            loss, found = self._loss(part, train_actor)
            (share * loss).backward()
            metrics = {name: metrics.get(name, 0.0) + share * x for name, x in found.items()}
        self.shares.add_up_gradients()
        parameters = [p for group in self.optimizer.param_groups[int(self.shares.divided) :] for p in group["params"]]
        summed: list[Any] = [*(p.grad for p in parameters if p.grad is not None), *metrics.values()]
        self.ranks.add_up(summed)
        limit = self.config.max_grad_norm
        if self.comparison is None:
            metrics["grad_norm/critic"] = nn.utils.clip_grad_norm_(self.value.parameters(), limit)
        if train_actor:
            metrics["grad_norm/actor"] = whole(nn.utils.clip_grad_norm_(self.actor_parameters, limit))
        self.optimizer.step()
        return metrics

    def _loss(self, rows: Batch, train_actor: bool) -> tuple[Tensor, Metrics]:
        weight = rows.get("weight", 1.0)  # of an imagined world, which may not believe itself everywhere
        loss, metrics = (0.0, {}) if self.comparison else self._value_loss(rows, weight)
        if not train_actor:
            return torch.as_tensor(loss), metrics
        log_prob = self.network.log_prob(rows["obs"], rows["trace"], rows["steps"])
        log_ratio = (log_prob - rows["log_prob"]) / self.divisor
        policy_loss = clipped_surrogate(log_ratio, rows["advantage"] * weight, self.weight, self.clip)
        loss = loss + policy_loss
        with torch.no_grad():
            metrics |= {
                "policy_loss": policy_loss.detach(),
                "kl": kl_k3(log_ratio),
                "clip/fraction": clip_fraction(log_ratio, self.clip),
            }
        for name, (weight, auxiliary) in self.auxiliary.items():
            term = auxiliary(rows["obs"], rows).mean()
            metrics[name] = term.detach()
            loss = loss + weight * term
        return loss, metrics

    def _value_loss(self, rows: Batch, weight: Tensor | float) -> tuple[Tensor, Metrics]:
        error = surrogate.value_error(self.value(rows["obs"]), rows["target"], rows["value"], self.config.value_clip)
        value_loss = 0.5 * (error * weight).mean()
        return self.config.value_coef * value_loss, {"value_loss": value_loss.detach()}

    def _set_rates(self) -> None:
        config = self.config
        share = 1.0
        if config.lr_decay:
            progress = min(1.0, self.updates / config.lr_decay)
            share = config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
        for tensor, rate in zip(self.rates, (config.lr, config.critic_lr), strict=True):
            tensor.fill_(rate * share)

    # ---- keeping ----

    def _parts(self) -> dict[str, Any]:
        parts = {"actor": self.network, "value": self.value, "optimizer": self.optimizer, "rows": self.rows}
        return parts | {name: x for name, x in (("scale", self.scale), ("seen", self.seen)) if x is not None}

    def abandon(self) -> None:
        if self.scale is not None:
            self.scale.abandon()

    def state_dict(self) -> dict[str, Any]:
        state = self.shares.state_of_one(state_of(self._parts()))
        return {**state, "updates": self.updates, "gradient_steps": self.gradient_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = {"gradient_steps": 0, **state}  # older states do not count them
        restore(self._parts(), self.shares.own_part(state))
        self.shares.publish()
        self.updates, self.gradient_steps = int(state["updates"]), int(state["gradient_steps"])
