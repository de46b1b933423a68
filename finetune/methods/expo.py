"""An expressive base that only ever imitates, a small edit that climbs the critic, and the best of what both propose.

Dong, Li, Sadigh and Finn 2025 (EXPO, arXiv 2507.07986). No gradient of the critic passes through the base, so the base
may be any imitator. Three losses, one per part:

    base      bc_loss on every batch, half of it recordings
    edit      max mean_i Q_i(s, a_b + e) - alpha log pi_e, e = bound * pi_e(s, a_b), with a_b the actions of the batch
    critic    Q_i(s, a) -> r + gamma' min over a random subset of Q'(s', a*), without entropy

a* is the answer of the on-the-fly policy (algorithm 1): N chunks of the base and their N edits, of which the critics
choose the best. The target asks the base as it is now; what acts and is deployed asks a slow average of its weights,
which is for acting only. All 2N candidates are valued in one pass over an observation that is encoded once. The
discount counts control ticks. Recordings are mixed in as ``offline.dataset.decisions`` makes them.

**Departures.** Decisions are chunks, with the n-step backup inside ``ChunkEnv`` (Q-chunking, Li et al. 2025, arXiv
2507.07969). The sum a_b + e is clipped to [-1, 1] wherever it stands. The entropy is that of pi_e in [-1, 1], before
the scaling by the bound: the published code measures it on the scaled edit, log pi_e - D log bound
(``scaled_entropy``), whose largest value D log(2 bound) lies below its target -D/2 for every bound under 0.303, so that
the temperature grows for ever; such a setting is refused. Choice and value draw their random subsets separately, which
weakens the optimism of the maximum; when deployed, all members choose. The base learns at a constant rate, as often as
the edit. Rows whose chunk was cut short by a truncation do not train the critic (``td.chunk_weight``).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ...offline.actors import trainable_imitator
from ...offline.critics import adopt_normalizers, saturation, spread
from ...offline.descent import adam, descend
from ...offline.imitation import imitation_chunk, neighbours, played_around
from ...offline.learner import CriticLearner, columns_of
from ...offline.returns import Discount
from ...offline.sac import soft_agent
from ...offline.soft import Temperature, polyak, soft_step
from ...offline.td import pessimistic, row_weight, td_target
from ...policies.build import build_policy
from ...policies.chain import draws
from ...policies.compose import BestOf, corrected, picked
from ...policies.core.chunk import ChunkEnv
from ...policies.core.errors import BurnishError
from ...policies.core.execute import Execution, execution
from ...policies.core.graphed_policy import executed_actor
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import derive
from ...policies.core.spec import ObsSpec, agent_spec
from ...policies.core.tree import map_tree
from ...policies.core.types import Decision, Metrics, Obs, Source, VecEnv
from ...policies.gaussian import GaussianConfig, GaussianPolicy
from ...policies.nets.critic import CriticConfig
from ...policies.nets.encoder import require_shift, shifted
from ..diagnostics import distance
from ..loops import Assembly, OffPolicyConfig


class Select(Enum):
    """The critics that choose among candidates: the target networks, or those that are trained."""

    target = "target"
    online = "online"


@dataclass
class EXPOConfig:
    """Settings of EXPO: candidates, the edit and its bound, the base's imitation, and the critic."""

    count: int = 8  # N: chunks of the base per choice, each once as it is and once edited
    edit_bound: float = 0.1  # bound of the edit, in units of the action range [-1, 1]
    select: Select = Select.target  # critics that choose among the candidates
    subset: int = 2  # critics of which the minimum is taken, drawn afresh at each use; 0: all
    lr: float = 3e-4  # learning rate of the critic
    actor_lr: float = 3e-4  # learning rate of the edit and the temperature
    base_lr: float = 3e-4  # learning rate of the base's imitation
    tau: float = 0.005  # share by which target networks follow, at every update
    base_tau: float = 0.001  # share by which the average of the base, which acts, follows at every update
    alpha: float = 1.0  # temperature at the start
    target_entropy: float | None = None  # target entropy in nats; null: entropy_per_dim times the size of the edit
    entropy_per_dim: float = -0.5  # target entropy for each coordinate of the action, in nats
    scaled_entropy: bool = False  # measure the entropy on the scaled edit, as published
    actor_every: int = 20  # critic updates per update of edit and base
    max_grad_norm: float | None = None  # gradients are clipped to this norm; null: not clipped
    image_shift: float = 0.05  # largest random shift of each row's images in an update, as a share of their side
    discount: Discount = field(default_factory=Discount)  # discount of later rewards
    # amounts that are played, stored and learnt
    loop: OffPolicyConfig = field(default_factory=lambda: OffPolicyConfig(warmup=5000, updates_per_decision=20))
    # the network that edits proposals
    edit: GaussianConfig = field(default_factory=lambda: soft_agent(hidden=[256, 256, 256]))
    # the Q network
    critic: CriticConfig = field(default_factory=lambda: CriticConfig(members=10, hidden=[256, 256, 256]))
    execution: Execution = Execution.eager  # execution of an update: eager, or compiled, or CUDA graphs

    def __post_init__(self) -> None:
        require_shift("image_shift", self.image_shift)
        if not self.edit.squash:
            raise BurnishError("edit.squash=false: EXPO needs an edit that is bounded by tanh")
        check_ranges(
            self,
            {
                "(0, inf)": "edit_bound lr actor_lr base_lr alpha",
                "(0, 1]": "tau base_tau",
                "[1, inf)": "count actor_every",
                "[0, inf)": "subset",
            },
        )
        if self.scaled_entropy and self.target_entropy is None:
            most = math.log(2 * self.edit_bound)
            if self.entropy_per_dim >= most:
                raise BurnishError(
                    f"entropy_per_dim={self.entropy_per_dim} can never be reached: with scaled_entropy an edit of "
                    f"bound {self.edit_bound} has at most {most:.2f} per dimension; lower it, or scaled_entropy=false"
                )


class EXPOActor:
    """The on-the-fly policy: proposes, edits, chooses. During the warm-up it plays the base alone."""

    def __init__(self, base: Any, edit: GaussianPolicy, critic: Any, config: EXPOConfig) -> None:
        self.base, self.edit, self.critic, self.config = base, edit, critic, config
        self.judge = critic.target if config.select is Select.target else critic.online

    @torch.no_grad()
    def act(self, obs: Obs, *, warm: bool, generator: torch.Generator, fresh: Tensor | None = None) -> Decision:
        if warm:
            return Decision(self.base.spec.executed(self.base.act(obs, generator=generator)), {})
        candidates = self.propose(self.base, obs, generator)
        values = self.judge.values(self.judge.encode(obs), candidates)
        return Decision(picked(candidates, self.choose(values, generator)), {})

    def propose(self, base: Any, obs: Obs, generator: torch.Generator) -> Tensor:
        """(B, 2N, n, A): N chunks of ``base``, then their edits."""
        count = self.config.count
        wide = map_tree(lambda x: x.repeat_interleave(count, 0), obs)
        proposed = base.spec.executed(draws(base, obs, count, generator=generator))
        edit = self.edit.draw({**wide, "base_action": proposed}, generator=generator).action
        both = torch.stack([proposed, corrected(proposed, edit, self.config.edit_bound)])
        return both.unflatten(1, (-1, count)).transpose(0, 1).flatten(1, 2)

    def choose(self, values: Tensor, generator: torch.Generator) -> Tensor:
        """(E, B, M) -> (B,): the best candidate by a random subset of critics."""
        return pessimistic(values, self.config.subset, generator).argmax(1)

    def state_dict(self) -> dict[str, Any]:
        parts = {"base": self.base, "edit": self.edit, "judge": self.judge}
        return {name: part.state_dict() for name, part in parts.items()}


class EXPO(CriticLearner):
    """``base`` is an imitator that is trained in place, and proposes in the targets; what acts and is deployed is its
    average ``proposer``."""

    columns = ("executed",)
    saved = ("base", "proposer", "edit", "critic", "temperature", "noise")
    saved += ("critic_optimizer", "edit_optimizer", "base_optimizer")

    def __init__(
        self, base: Any, edit: GaussianPolicy, config: EXPOConfig, *, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        spec = edit.spec
        super().__init__(replace(spec, obs=_without_base(spec.obs)), config, seed=seed, device=device)
        self.base, self.edit = base.to(device), edit.to(device)
        self.proposer = copy.deepcopy(base).eval().requires_grad_(False)
        adopt_normalizers(self.critic, base)
        self.choosing = EXPOActor(self.proposer, edit, self.critic, config)
        self.actor = executed_actor(self.choosing, config.execution, device)
        self.around = neighbours(base.spec)
        self.policy = BestOf(self.proposer, self.choosing.judge, config.count, edit, config.edit_bound)
        size = spec.execute * spec.action.dim
        target = config.entropy_per_dim * size if config.target_entropy is None else config.target_entropy
        self.temperature = Temperature(config.alpha, target).to(device)
        # The density of the scaled edit is that of pi_e divided by bound^D.
        self.log_scale = size * math.log(config.edit_bound) if config.scaled_entropy else 0.0
        self.edit_side = [*(p for p in edit.parameters() if p.requires_grad), *self.temperature.parameters()]
        self.base_side = [p for p in self.base.parameters() if p.requires_grad]

        self.critic_optimizer = adam(self.critic.online.parameters(), config.lr, config.execution)
        self.edit_optimizer = adam(self.edit_side, config.actor_lr, config.execution)
        self.base_optimizer = adam(self.base_side, config.base_lr, config.execution)
        self._step_critic = execution(self._critic_step, config.execution, device=device, generators=[self.noise])
        self._step_actor = execution(self._actor_step, config.execution, device=device, generators=[self.noise])

    def update(self, source: Source) -> Metrics:
        batch = source.sample(around=self.around)
        self.updates += 1
        columns = {**columns_of(batch), "action": self._played(batch)}
        obs, next_obs = (shifted(batch[name], self.config.image_shift, self.noise) for name in ("obs", "next_obs"))
        metrics = self._step_critic(obs, next_obs, columns)
        if self.updates % self.config.actor_every == 0:
            metrics |= self._step_actor(obs, columns["action"], columns["steps"], played_around(batch))
        return metrics

    def q_values(self, batch: dict[str, Any]) -> Tensor:
        return self.critic(batch["obs"], self._played(batch)).mean(0)

    def _played(self, batch: dict[str, Any]) -> Tensor:
        """The executed actions (B, n, A), zero behind ``steps``."""
        action = batch.get("executed", batch["action"])
        real = torch.arange(action.shape[1], device=action.device) < batch["steps"][:, None]
        return torch.where(real[..., None], action, 0.0)

    @torch.no_grad()
    def _target(self, next_obs: Obs, columns: dict[str, Tensor]) -> Tensor:
        critic, actor, subset = self.critic, self.choosing, self.config.subset
        candidates = actor.propose(self.base, next_obs, self.noise)
        values = critic.target.values(critic.target.encode(next_obs), candidates)
        opinions = values
        if actor.judge is not critic.target:
            opinions = actor.judge.values(actor.judge.encode(next_obs), candidates)
        best = picked(values.movedim(0, -1), actor.choose(opinions, self.noise))  # (B, E)
        return td_target(columns["reward"], columns["discount"], pessimistic(best.T, subset, self.noise))

    def _critic_step(self, obs: Obs, next_obs: Obs, columns: dict[str, Tensor]) -> Metrics:
        target = self._target(next_obs, columns)
        online = self.critic.online
        weight = row_weight(columns, self.edit.spec.execute)
        loss, q = online.loss(online.encode(obs), columns["action"], target, weight)
        descend(self.critic_optimizer, loss, self.config.max_grad_norm)
        self.critic.follow(self.config.tau)
        q = q.detach()
        return {"critic_loss": loss.detach(), "q": q.mean(), "q/spread": spread(q), "target": target.mean()}

    def _actor_step(self, obs: Obs, action: Tensor, steps: Tensor, around: dict[str, Tensor]) -> Metrics:
        # The edit climbs the critic, which it does not teach: gradients go to the edit and the temperature alone.
        draw = self.edit.draw({**obs, "base_action": action}, generator=self.noise)
        log_prob = draw.log_prob[:, 0] - self.log_scale
        better = corrected(action, draw.action, self.config.edit_bound)
        q, limit = self.critic.online(obs, better).mean(0), self.config.max_grad_norm
        metrics = soft_step(q, log_prob, self.temperature, self.edit_optimizer, limit)
        # The base imitates whatever was played, recordings and its own chosen chunks alike.
        chunk, mask = imitation_chunk(self.base.spec, action, steps, around)
        base_loss = self.base.bc_loss(obs, chunk, mask=mask, generator=self.noise).mean()
        descend(self.base_optimizer, base_loss, limit)
        polyak(self.proposer.parameters(), self.base.parameters(), self.config.base_tau)
        return {
            "edit_loss": metrics.pop("actor_loss"),
            "base_loss": base_loss.detach(),
            **metrics,
            "saturation": saturation(draw.action.detach()),
            "base_distance": distance(better.detach(), action),
        }


def build(config: EXPOConfig, base: Any, env: VecEnv, *, seed: int = 0, device: torch.device | str = "cpu") -> Assembly:
    """The learner of EXPO and its view of the worlds, one chunk to a decision."""
    trained = trainable_imitator(base, "method=expo")
    view = ChunkEnv(env, base.spec.execute, config.discount.per_step(base.spec.execute))
    plain = agent_spec(view.spec, base.spec.execute, base.spec.history)
    seen = {**_without_base(plain.obs).shapes, "base_action": (plain.execute, plain.action.dim)}
    spec = replace(plain, obs=ObsSpec(seen))
    edit: GaussianPolicy = build_policy(config.edit, spec, seed=derive(seed, "edit"), device=device)
    adopt_normalizers(edit, base)
    return Assembly(view, EXPO(trained, edit, config, seed=seed, device=device))


def _without_base(obs: ObsSpec) -> ObsSpec:
    return ObsSpec({key: shape for key, shape in obs.shapes.items() if key != "base_action"})
