"""TD-MPC2: a model of the world in a latent space of its own, a critic and a prior in it, and planning in every step.

Hansen et al. 2024 (TD-MPC2, arXiv 2310.16828). From sequences of H decisions of the replay the model is unrolled from
its first latent state; at step t, weighted by rho^t, it is to be where the next observation is encoded (consistency),
and to know the reward and the value, whose target is the reward and the least of two critics behind it (a moving
average of them) for an action of the prior. The prior climbs two critics on the states that were unrolled, divided by
the range of their values, with a bonus for its spread. The policy that acts and is deployed plans in the
model (`policies/planner.py`), with the noise of its last round while it learns. It starts from nothing, or goes on from
a planner, which keeps its settings but the discount; recordings, where there are any, are half of every batch.

There are two presets, and a setting that is given wins over both. ``method=tdmpc_cpu``, which is also ``method=tdmpc``,
is what one core can do; ``method=tdmpc_published`` is that of the paper (5 million parameters), for a GPU:

                                             cpu          published
    latent state; hidden layers              64; 128      512; 512 (encoder 256)
    rounds, plans, of the prior, best        4, 128, 16, 24   6, 512, 24, 64
    sequences in an update                   128          256
    observations                             normalised   as they are
    terminations                             predicted    unknown (``agent.model.ends=true`` for worlds that have them)

Both begin with random actions, and then as many updates as there were of these: published are five episodes, at least
1000 decisions (``loop.warmup``, ``loop.initial_updates``), and a discount of 1 - 5 / T in episodes of T decisions,
within .95 and .995.

**Departures.** A sequence may end with its episode, also by a truncation, which bootstraps from where it led; published
sequences lie within episodes. The bonus is the entropy before the tanh, as in the published code. See also
`policies/planner.py` and `policies/nets/latent_model.py`. ``infopower.weight`` adds losses by which the latent state
keeps what actions decide (`finetune/world_model/infopower.py`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...offline.descent import adam, descend
from ...offline.returns import Discount
from ...offline.soft import polyak, uniform
from ...offline.td import td_target
from ...policies.build import build_policy
from ...policies.core.chunk import ChunkEnv
from ...policies.core.config import LATER
from ...policies.core.errors import BurnishError
from ...policies.core.execute import Execution, execution
from ...policies.core.graphed_policy import executed_actor
from ...policies.core.normalize import Running
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import derive
from ...policies.core.seed import generator as named_generator
from ...policies.core.spec import agent_spec, check_compatible
from ...policies.core.tree import map_tree, where
from ...policies.core.types import Decision, Decisions, Learner, Memory, Metrics, Obs, Source, VecEnv
from ...policies.planner import PlannerConfig, PlannerPolicy, rest
from ...policies.runs.module_state import restore, state_of
from ..loops import Assembly, OffPolicyConfig
from ..world_model.infopower import InfoPower, InfoPowerConfig

READ = ("obs", "next_obs", "action", "reward", "discount", "terminated", "valid")  # of a batch
START = "start of the search"  # beside what a world shows


@dataclass
class TDMPCConfig:
    """Settings of TD-MPC2: the planner that it trains, and the weights of its losses."""

    history: int = 1  # observations that are stacked, the newest among them
    discount: Discount = field(default_factory=Discount)  # discount of later rewards
    # amounts that are played, stored and learnt
    loop: OffPolicyConfig = field(default_factory=lambda: OffPolicyConfig(initial_updates=1000, batch=128))
    agent: PlannerConfig = field(default_factory=PlannerConfig)  # the planner that acts; its horizon is learnt on too
    # observations are scaled by all that was seen; those of a planner that is given as its base's are
    normalize: bool = True
    lr: float = 3e-4  # learning rate
    encoder_lr: float = 0.3  # learning rate of the encoder, as a share of lr
    rho: float = 0.5  # weight of a step in the losses, relative to the one before it
    consistency: float = 20.0  # weight of the loss of the next latent state
    reward: float = 0.1  # weight of the loss of the reward
    value: float = 0.1  # weight of the loss of the value
    end: float = 1.0  # weight of the loss of the termination
    entropy: float = 1e-4  # weight of the entropy of the prior
    tau: float = 0.01  # share by which target critics, and the range of values, follow at every update
    max_grad_norm: float = 20.0  # gradients are clipped to this norm
    # losses by which the latent state keeps what actions decide (research)
    infopower: InfoPowerConfig = field(default_factory=InfoPowerConfig, metadata=LATER)
    # execution of an update: eager, or compiled, or CUDA graphs
    execution: Execution = field(default=Execution.eager, metadata=LATER)

    def __post_init__(self) -> None:
        positive = "lr encoder_lr rho consistency reward value end tau max_grad_norm"
        check_ranges(self, {"[1, inf)": "history", "(0, inf)": positive, "[0, inf)": "entropy"})
        if self.agent.horizon < 2 or self.loop.n_step != 1:
            raise BurnishError(
                f"agent.horizon={self.agent.horizon} must be at least 2, and loop.n_step={self.loop.n_step} be 1: "
                "tdmpc learns on sequences of so many decisions, each a step"
            )


class Range(nn.Module):
    """The running distance between the 5 % and 95 % quantiles of what it is shown, 1 at least."""

    value: Tensor
    shares: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.ones(()))
        self.register_buffer("shares", torch.tensor([0.05, 0.95]), persistent=False)

    def follow(self, x: Tensor, tau: float) -> Tensor:
        low, high = torch.quantile(x.detach(), self.shares)
        self.value.lerp_((high - low).clamp(min=1), tau)
        return self.value


class SearchingActor:
    """Plans, each search from ``obs[START]``, and says in the column of that name where the next one begins."""

    def __init__(self, policy: PlannerPolicy) -> None:
        self.policy = policy

    def act(self, obs: Obs, *, warm: bool, generator: torch.Generator, fresh: Tensor | None = None) -> Decision:
        found = self.policy.search(obs, obs[START], generator=generator)
        action, std = found.chunk[:, :1], found.std[:, :1]
        noise = torch.randn(action.shape, generator=generator, device=action.device)
        return Decision((action + std * noise).clamp(-1, 1), {START: rest(found.mean)})

    def state_dict(self) -> dict[str, Any]:
        return self.policy.state_dict()


class PlanningActor:
    """Plans, each search from the rest of the last plan of its world, and anew where an episode is fresh."""

    def __init__(self, policy: PlannerPolicy, num_envs: int, mode: Execution, device: torch.device | str) -> None:
        self.random = uniform(policy.spec)
        self.searching = executed_actor(SearchingActor(policy), mode, device)  # what has no memory can be recorded
        self.start = torch.zeros(num_envs, *policy.spec.chunk_shape, device=device)

    @torch.no_grad()
    def act(self, obs: Obs, *, warm: bool, generator: torch.Generator, fresh: Tensor | None = None) -> Decision:
        if warm:
            return Decision(self.random(obs, generator), {})
        if fresh is not None:
            self.start = self.start.masked_fill(fresh[:, None, None], 0.0)
        action, left = self.searching.act({**obs, START: self.start}, warm=False, generator=generator)
        self.start = left[START]
        return Decision(action, {})

    def state_dict(self) -> dict[str, Any]:
        return self.searching.state_dict()


class TDMPC(Learner):
    """The learner of a planner's model, its critics and its prior."""

    def __init__(
        self,
        policy: PlannerPolicy,
        config: TDMPCConfig,
        num_envs: int,
        *,
        normalize: bool,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.policy, self.config = policy.to(device), config
        self.model = model = policy.model
        self.actor = self.planning = PlanningActor(policy, num_envs, config.execution, device)
        self.target = copy.deepcopy(model.critic).requires_grad_(False)
        self.range = Range().to(device)
        self.seen = Running(policy) if normalize else None
        self.noise = named_generator(seed, "noise", device=device)
        slow = [*model.encoder.parameters(), *model.to_latent.parameters()]
        apart = {id(p) for p in (*slow, *model.prior.parameters())}
        self.infopower = self._infopower(seed).to(device) if config.infopower.weight else None
        further = [] if self.infopower is None else list(self.infopower.parameters())
        groups = [
            {"params": [p for p in model.parameters() if id(p) not in apart] + further},
            {"params": slow, "lr": config.lr * config.encoder_lr},
        ]
        self.optimizer = adam(groups, config.lr, config.execution)
        self.prior_optimizer = adam(model.prior.parameters(), config.lr, config.execution, eps=1e-5)
        self._step = execution(self._descend, config.execution, device=device, generators=[self.noise])
        self._parts = {
            "policy": policy,
            "target": self.target,
            "range": self.range,
            "optimizer": self.optimizer,
            "prior_optimizer": self.prior_optimizer,
            "noise": self.noise,
        }
        self._parts |= {} if self.seen is None else {"seen": self.seen}
        self._parts |= {} if self.infopower is None else {"infopower": self.infopower}

    def _infopower(self, seed: int) -> InfoPower:
        spec, model = self.policy.spec, self.config.agent.model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "infopower"))
            seen = self.model.encoder.dim
            return InfoPower(self.config.infopower, model.latent, seen, spec.action.dim, model.hidden)

    def observe(self, obs: Obs) -> None:
        if self.seen is not None:
            self.seen.absorb(obs)

    def prior(self, replay: Decisions, recordings: Decisions | None) -> Memory | None:
        if self.seen is not None and recordings is not None:
            self.seen.absorb(recordings.latest()["obs"])
        return recordings

    @torch.no_grad()
    def q_values(self, batch: dict[str, Any]) -> Tensor:
        return self.model.values(self.model.encode(batch["obs"]), batch["action"][:, 0]).mean(0)

    def update(self, source: Source) -> Metrics:
        batch = source.sample(sequence=self.config.agent.horizon)
        return self._step({name: batch[name] for name in READ})

    def _descend(self, batch: dict[str, Any]) -> Metrics:
        metrics, states, weight = self._model_step(batch)
        return metrics | self._prior_step(states, weight)

    def _model_step(self, batch: dict[str, Any]) -> tuple[Metrics, Tensor, Tensor]:
        """Also the states (B, H + 1, D) that the model went through, and the weight of each."""
        config, model = self.config, self.model
        valid, action = batch["valid"], batch["action"][:, :, 0]
        rows, horizon = valid.shape
        reached, target = self._targets(batch)
        states = [model.encode(map_tree(lambda x: x[:, 0], batch["obs"]))]
        for t in range(horizon):
            states.append(model.next(states[-1], action[:, t]))
        unrolled = torch.stack(states, 1)
        rho = config.rho ** torch.arange(horizon + 1, device=valid.device)
        weight = (valid * rho[:-1] / valid.numel()).flatten()
        before, after, played = unrolled[:, :-1].flatten(0, 1), unrolled[:, 1:].flatten(0, 1), action.flatten(0, 1)

        consistency = ((after - reached).square().mean(1) * weight).sum()
        rewards = model.bins.loss(model.reward_logits(before, played), batch["reward"].flatten())
        logits = model.value_logits(before, played)
        values = model.bins.loss(logits, target.expand(len(logits), -1)).mean(0)
        reward, value = (rewards * weight).sum(), (values * weight).sum()
        loss = config.consistency * consistency + config.reward * reward + config.value * value
        metrics = {"consistency_loss": consistency, "reward_loss": reward, "value_loss": value}
        if model.end is not None:
            ended = batch["terminated"].flatten().float()
            missed = F.binary_cross_entropy_with_logits(model.end(after)[:, 0], ended, reduction="none")
            metrics["end_loss"] = (missed * valid.flatten()).sum() / valid.numel()
            loss = loss + config.end * metrics["end_loss"]
        if self.infopower is not None:
            # Of the first decision of each sequence, which may be its last.
            first, second = ({key: x[:, t] for key, x in batch["obs"].items()} for t in (0, 1))
            led = where(valid[:, 1], second, batch["next_obs"])
            kept = self.infopower.loss(states[0], action[:, 0], model.encode(led), model.encoder(first))
            loss, metrics = loss + kept[0], metrics | kept[1]
        descend(self.optimizer, loss, config.max_grad_norm)
        polyak(self.target.parameters(), model.critic.parameters(), config.tau)
        metrics |= {"loss": loss, "target": target.mean()}
        lasting = torch.cat([torch.ones_like(valid[:, :1]), valid], 1) * rho / (rows * (horizon + 1))
        return {name: x.detach() for name, x in metrics.items()}, unrolled.detach(), lasting

    @torch.no_grad()
    def _targets(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Of each decision, one row each: the latent state (B H, D) that it led to, and the target (B H,) of its value.
        The next decision observes where one led to; for the last of a sequence that is stored apart."""
        last = batch["valid"].sum(1) - 1
        rows = torch.arange(len(last), device=last.device)

        def led_to(obs: Tensor, final: Tensor) -> Tensor:
            after = obs.roll(-1, 1)
            after[rows, last] = final
            return after.flatten(0, 1)

        z = self.model.encode({key: led_to(x, batch["next_obs"][key]) for key, x in batch["obs"].items()})
        law = self.model.law(z)
        action = law.sample(torch.randn(law.mean.shape, generator=self.noise, device=z.device)).tanh()
        value = self.model.values(z, action, self._two(), self.target).amin(0)
        return z, td_target(batch["reward"].flatten(), batch["discount"].flatten(), value)

    def _prior_step(self, states: Tensor, weight: Tensor) -> Metrics:
        law = self.model.law(states.flatten(0, 1))
        noise = torch.randn(law.mean.shape, generator=self.noise, device=states.device)
        drawn = law.sample(noise)
        q = self.model.values(states.flatten(0, 1), drawn.tanh(), self._two()).mean(0).view_as(weight)
        entropy = -drawn.shape[1] * law.log_prob(drawn).sum(1).view_as(weight)
        scale = self.range.follow(q[:, 0], self.config.tau)
        loss = -((q / scale + self.config.entropy * entropy) * weight).sum()
        descend(self.prior_optimizer, loss, self.config.max_grad_norm)
        return {
            "prior_loss": loss.detach(),
            "q": q.detach().mean(),
            "q_range": scale,
            "entropy": entropy.detach().mean(),
        }

    def _two(self) -> Tensor | None:
        """Two critics, drawn afresh at each call; all, where there are no more."""
        count = self.config.agent.model.members
        order = torch.randperm(count, generator=self.noise, device=self.noise.device)
        return order[:2] if count > 2 else None

    def state_dict(self) -> dict[str, Any]:
        return {**state_of(self._parts), "start": self.planning.start.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore(self._parts, state)
        self.planning.start = state["start"].to(self.planning.start, copy=True)


def require_own(asked: PlannerConfig, own: PlannerConfig) -> None:
    """Refuse settings of a planner that one which is given does not have. Its discount may be another one."""
    usual, names = PlannerConfig(), [x.name for x in fields(own) if x.name != "gamma"]
    strange = [x for x in names if getattr(asked, x) not in (getattr(usual, x), getattr(own, x))]
    if strange:
        raise BurnishError(
            f"{', '.join(f'method.agent.{x}' for x in strange)}: the planner that goes on has other settings, which it "
            "keeps; say these, as the preset that it was trained with does, or start from nothing, without policy.path"
        )


def build(
    config: TDMPCConfig, base: PlannerPolicy | None, env: VecEnv, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Assembly:
    """Recordings come to the loop as its ``prior``, made by ``finetune.build.prior_data``."""
    gamma = config.discount.per_step(1)
    if base is None:
        agent = replace(config.agent, gamma=gamma if config.agent.gamma is None else config.agent.gamma)
        spec = agent_spec(env.spec, history=config.history)
        policy: PlannerPolicy = build_policy(agent, spec, seed=derive(seed, "agent"), device=device)
    else:
        check_compatible(base.spec, env.spec)
        require_own(config.agent, base.config)
        policy = copy.deepcopy(base).train().requires_grad_(True)
        # Behind a plan stands the value of the critics, which learn with this discount.
        policy.gamma = gamma if config.agent.gamma is None else config.agent.gamma
        policy.config = replace(base.config, gamma=policy.gamma)
        config = replace(config, agent=policy.config)
    normalize = config.normalize and base is None
    learner = TDMPC(policy, config, env.num_envs, normalize=normalize, seed=seed, device=device)
    return Assembly(ChunkEnv(env, 1, gamma), learner)
