"""GRPO: the on-policy methods without a critic. An episode is compared with others that began alike.

Shao et al. 2024 (GRPO, arXiv 2402.03300); for vision-language-action policies as in SimpleVLA-RL (Li et al. 2025, arXiv
2509.09674): groups of 8 episodes from one initial state, advantage (R - mean) / std for all decisions of an episode, no
value, no divergence from the base. The members of a group share the seed of their worlds and not the noise of their
policy. ``inner`` says what is trained, and how its draws get a likelihood: any method of PPO.

    burnish finetune policy.path=BASE method=grpo method.inner=flow_sde

Every rollout begins with new episodes in all worlds. The k-th episodes of the members are compared if all of them began
early enough to be over by the end of the rollout whatever happens: to take those that happened to be short would pay
for being short. A group whose episodes all earned the same says nothing and is left out, so that not even the momentum
of the optimiser moves the weights for it. Of groups of 8 with rewards 0 and 1 these are the ones outside the published
[0.1, 0.9]; a policy that always succeeds or never does learns nothing.

**Departures.** One clip for both sides (published: 0.2 and 0.28). Rewards are summed without a discount by default:
otherwise a group of equal successes differs by its ticks alone, and the deviation makes that as loud as failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...offline.replay import Batch
from ...offline.returns import Discount, returns_to_go
from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges, require_usual
from ...policies.core.ranks import sharing
from ...policies.core.seed import EpisodeSeeds, derive
from ...policies.core.tree import check
from ...policies.core.types import Obs, VecEnv
from ...policies.core.wrapper import Wrapper, repeatable
from ..loops import Assembly, OnPolicyConfig
from ..method import Named, resolved
from ..ppo import PPO, Normalize
from .gaussian_ppo import GaussianPPOConfig

# Settings of PPO about advantages and their critic.
UNREAD = "normalize advantage_quantiles scale_reward reward_clip lam value_clip value_coef critic_lr critic_warmup"


@dataclass
class GRPOConfig:
    """Settings of GRPO: what is trained, the groups, and rewards."""

    # method of PPO that says what is trained, with its settings; null: gaussian_ppo. Its loop, discount and network of
    # the critic are not used, and what its ppo says about advantages and the critic is refused
    inner: Any = None
    group: int = 8  # episodes that begin alike and are compared; divides the number of worlds
    deviation: bool = True  # advantages are divided by the deviation of their group, which makes 7 of 8 as loud as 4
    discount: Discount = field(default_factory=lambda: Discount(1.0))  # discount of later rewards
    loop: OnPolicyConfig = field(default_factory=OnPolicyConfig)  # amounts that are played, stored and learnt

    def __post_init__(self) -> None:
        self.inner = GaussianPPOConfig() if self.inner is None else self.inner
        if isinstance(self.inner, str):
            raise BurnishError(f"method.inner={self.inner!r} is not a method; see `burnish finetune --help`")
        check_ranges(self, {"[2, inf)": "group"})


class Grouped(Wrapper):
    """Worlds of which ``group`` neighbours begin their k-th episode since the last reset of all on one seed."""

    def __init__(self, env: VecEnv, group: int, seed: int) -> None:
        super().__init__(env)
        self._seeds, self._ranks = EpisodeSeeds(seed, env.num_envs, env.device, group), sharing()

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        if seeds is None:
            if mask is None:  # members that played more episodes than others wait for them
                most = self._ranks.most(int(self._seeds.count.max()))
                self._seeds.count = torch.full_like(self._seeds.count, most)
            rows = torch.ones(self.num_envs, dtype=torch.bool, device=self.device) if mask is None else mask
            seeds = self._seeds.begin(rows).tolist()
        return self.env.reset(mask, seeds)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seeds": self._seeds.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._seeds.load_state_dict(state["seeds"])


def compared(batch: Batch, *, group: int, longest: int, deviation: bool) -> tuple[Tensor, Tensor]:
    """Advantages (T, N) of a rollout that began with new episodes, and which of them count. An episode takes at most
    ``longest`` decisions."""
    reward, ended, valid = batch["reward"], batch["ended"], batch["valid"]
    length, worlds = check(reward, "T N").values()
    episode = ended.long().cumsum(0) - ended.long()  # (T, N) which of its world's
    shape = int(episode.max()) + 1, worlds
    # In float64, so that equal rewards in another order are equal sums.
    to_go = returns_to_go(reward.double(), batch["discount"].double(), ended, torch.zeros_like(reward).double())
    first = torch.cat([torch.ones_like(ended[:1]), ended[:-1]])
    earned = to_go.new_zeros(shape).scatter_add_(0, episode, to_go * first)
    begins = torch.full(shape, length, device=reward.device).scatter_reduce_(
        0, episode, torch.arange(length, device=reward.device)[:, None].expand_as(episode), "amin"
    )
    intervened = torch.zeros(shape, device=reward.device).scatter_add_(0, episode, (~valid).float())
    whole = (begins <= length - longest) & (intervened == 0)
    earned, whole = earned.unflatten(1, (-1, group)), whole.unflatten(1, (-1, group))
    tells = whole.all(2) & (earned.amax(2) > earned.amin(2))
    advantage = earned - earned.mean(2, keepdim=True)
    if deviation:
        advantage = advantage / (earned.std(2, keepdim=True) + 1e-6)
    counted = tells[..., None].expand_as(earned).flatten(1)
    return advantage.flatten(1).gather(0, episode).to(reward), counted.gather(0, episode)


def build(
    config: GRPOConfig,
    base: Any,
    env: VecEnv,
    *,
    inner: Named[Any],
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Assembly[Any, Any]:
    """The view and the learner that ``inner`` builds, with comparison in the place of the critic."""
    worlds = env.num_envs * sharing().size
    if worlds % config.group:
        raise BurnishError(
            f"worlds={worlds} do not divide into groups of method.group={config.group}; change one of them"
        )
    if not repeatable(env):
        raise BurnishError(
            "method=grpo compares episodes that begin alike, and no seed lays out the same scene of a robot again; "
            "take method=residual_td3, say"
        )
    usual = type(config.inner)().ppo
    why = "by method=grpo, which compares episodes and has no critic"
    require_usual(config.inner.ppo, usual, UNREAD, why, "method.inner.ppo.")
    ppo = replace(config.inner.ppo, normalize=Normalize.none, critic_warmup=0, scale_reward=False)
    settings = replace(config.inner, ppo=ppo, discount=config.discount)
    grouped = Grouped(env, config.group, derive(seed, "groups"))
    made = resolved(inner)(settings, base, grouped, seed=seed, device=device)
    longest = -(-env.spec.max_steps // made.env.execute)
    if config.loop.decisions_per_update < longest:
        raise BurnishError(
            f"method.loop.decisions_per_update={config.loop.decisions_per_update} must be at least {longest}, the "
            "decisions of the longest episode: episodes are compared as a whole"
        )
    learner: PPO = getattr(made.learner, "ppo", made.learner)
    learner.compare(partial(compared, group=config.group, longest=longest, deviation=config.deviation))
    made.learner.afresh = True
    return made
