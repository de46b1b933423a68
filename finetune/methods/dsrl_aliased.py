"""The learner of DSRL-NA: what is learnt about an action is known of every noise that leads to it.

Wagenmaker et al. 2025 (arXiv 2506.15799). f(s, w) is the executed chunk of the frozen base.

    Q_A(s, a)   y = r + discount * (min_i Q_A,i'(s', f(s', w')) - alpha log pi(w' | s')),  w' ~ pi; executed chunks
    Q_W(s, w)   each member regressed on the same member of Q_A(s, f(s, w)),  w ~ N(0, I); distillation
    pi          max E[Q_W(s, w) - alpha log pi(w | s)]; no gradient through f, ever

Q_A never needs to know a noise, so it can also learn from recordings (``recorded_for``).

**Departures.** Distillation is interleaved with the critic's updates, one in ``distil_every``, instead of a block of 10
after each 20; both questions to the base then go into one call. Noise is written w = bound * action throughout. Rows
whose chunk a truncation cut short do not train Q_A.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...offline.critics import adopt_normalizers, explained_variance, saturation, spread
from ...offline.descent import adam, descend
from ...offline.learner import CriticLearner, columns_of
from ...offline.replay import Replay
from ...offline.sac import SACActor, SACConfig
from ...offline.soft import Temperature, Warm, soft_step, soft_value
from ...offline.td import pessimistic, row_weight, td_target
from ...policies.core.execute import execution
from ...policies.core.graphed_policy import executed_actor
from ...policies.core.seed import derive
from ...policies.core.types import Metrics, Obs, Policy, Source
from ...policies.gaussian import GaussianPolicy
from ...policies.nets.critic import QEnsemble
from ...policies.nets.encoder import shifted


def distillation_loss(q_latent: Tensor, q_action: Tensor) -> Tensor:
    """(E, B) each: summed over members, like the critic's own loss."""
    return (q_latent - q_action.detach()).square().mean(1).sum()


class AliasedLearner(CriticLearner):
    """The learner of DSRL-NA: a critic of actions, distilled into a critic of noise that the agent climbs."""

    columns = ("executed",)
    saved = ("agent", "critic", "latent_critic", "temperature", "critic_optimizer", "actor_optimizer", "noise")

    def __init__(
        self,
        agent: GaussianPolicy,
        base: Policy,
        config: SACConfig,
        bound: float,
        distil_every: int,
        *,
        policy: Any,
        warm: Warm,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        # The inputs of Q_A: the agent's observations, and the executed chunks of the base.
        executed = replace(agent.spec, action=base.spec.action, horizon=base.spec.execute, execute=base.spec.execute)
        super().__init__(executed, config, seed=seed, device=device)
        self.agent, self.base = agent.to(device), base
        self.bound, self.distil_every, self.policy = bound, distil_every, policy
        self.actor = executed_actor(SACActor(agent, warm), config.execution, device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "latent critic"))
            # It imitates numbers, so it needs no distribution over them.
            self.latent_critic = QEnsemble(agent.spec, replace(config.critic, bins=0)).to(device)
        for part in (self.critic, self.latent_critic):
            adopt_normalizers(part, base)
        size = agent.spec.action.dim
        target = config.entropy_per_dim * size if config.target_entropy is None else config.target_entropy
        self.temperature = Temperature(config.alpha, target if config.tune_alpha else None).to(device)
        critics = [*self.critic.online.parameters(), *self.latent_critic.parameters()]
        self.trained = [p for part in (agent, self.temperature) for p in part.parameters() if p.requires_grad]
        self.critic_optimizer = adam(critics, config.lr, config.execution)
        self.actor_optimizer = adam(self.trained, config.actor_lr, config.execution)
        options: dict[str, Any] = {"device": device, "generators": [self.noise]}
        self._step_critic = execution(partial(self._critic_step, distil=False), config.execution, **options)
        self._step_distilled = execution(partial(self._critic_step, distil=True), config.execution, **options)
        self._step_actor = execution(self._actor_step, config.execution, **options)

    def update(self, source: Source) -> Metrics:
        batch = source.sample()
        self.updates += 1
        # The base is asked about the pictures that the critics see, so that what it answers belongs to them.
        obs, next_obs = (shifted(batch[name], self.config.image_shift, self.noise) for name in ("obs", "next_obs"))
        step = self._step_distilled if self.updates % self.distil_every == 0 else self._step_critic
        metrics = step(obs, next_obs, {**columns_of(batch), "action": batch["executed"]})
        if self.updates > self.config.critic_warmup and self.updates % self.config.actor_every == 0:
            metrics |= self._step_actor(obs)
        return metrics

    def q_values(self, batch: dict[str, Any]) -> Tensor:
        return self.critic(batch["obs"], batch["executed"]).mean(0)

    @torch.no_grad()
    def decode(self, obs: Obs, action: Tensor) -> Tensor:
        """f(s, w): the executed chunk (B, n, A) of what the agent says (B, 1, D)."""
        spec = self.base.spec
        w = (self.bound * action).view(-1, *(spec.noise_shape or ()))
        return spec.executed(self.base.act(obs, noise=w, generator=self.noise)).to(action)

    def _critic_step(self, obs: Obs, next_obs: Obs, columns: dict[str, Tensor], *, distil: bool) -> Metrics:
        online = self.critic.online
        with torch.no_grad():
            draw = self.agent.draw(next_obs, generator=self.noise)
            action, asked = draw.action, next_obs
            if distil:
                # One call answers both questions: where the agent goes next, and where the prior goes now.
                z = torch.randn(action.shape, generator=self.noise, device=action.device, dtype=action.dtype)
                prior = z / self.bound
                action = torch.cat([action, prior])
                asked = {key: torch.cat([x, obs[key]]) for key, x in next_obs.items()}
            chunks = self.decode(asked, action)
            count = len(columns["reward"])
            value = pessimistic(self.critic.target(next_obs, chunks[:count]), self.config.subset, self.noise)
            if self.config.backup_entropy:
                value = soft_value(value, draw.log_prob[:, 0], self.temperature())
            target = td_target(columns["reward"], columns["discount"], value)
        weight = row_weight(columns, self.base.spec.execute)
        loss, q = online.loss(online.encode(obs), columns["action"], target, weight)
        metrics: Metrics = {"critic_loss": loss.detach()}
        if distil:
            with torch.no_grad():
                known = online(obs, chunks[count:])
            imitated = self.latent_critic(obs, prior)
            error = distillation_loss(imitated, known)
            metrics |= {
                "distil_loss": error.detach(),
                "distil/explained_variance": explained_variance(imitated.detach(), known),
            }
            loss = loss + error
        critics = (online.parameters(), self.latent_critic.parameters())
        descend(self.critic_optimizer, loss, self.config.max_grad_norm, *critics)
        self.critic.follow(self.config.tau)
        q = q.detach()
        return {**metrics, "q": q.mean(), "q/spread": spread(q), "target": target.mean()}

    def _actor_step(self, obs: Obs) -> Metrics:
        draw = self.agent.draw(obs, generator=self.noise)
        log_prob = draw.log_prob[:, 0]
        q = self.latent_critic(obs, draw.action)
        q = q.mean(0) if self.config.actor_mean else q.amin(0)
        limit, parts = self.config.max_grad_norm, self.agent.parameters()
        metrics = soft_step(q, log_prob, self.temperature, self.actor_optimizer, limit, parts)
        return {**metrics, "saturation": saturation(draw.action.detach())}


def recorded_for(noise: int, prior: Replay) -> Replay:
    """Recorded decisions, whose action is a chunk, as decisions of an agent that chooses ``noise`` numbers. The noise
    of a recording is unknown and never read: zeros stand in its place."""
    state = prior.state_dict()

    def unknown(rows: dict[str, Any]) -> dict[str, Any]:
        reward = rows["columns"]["reward"]
        return {**rows, "columns": {**rows["columns"], "action": reward.new_zeros(*reward.shape, 1, noise)}}

    out = Replay(prior.rows * prior.num_envs, prior.num_envs, device=prior.device)
    out.load_state_dict({**state, "segments": [unknown(rows) for rows in state["segments"]]})
    return out
