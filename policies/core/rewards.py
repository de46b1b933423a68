"""Rewards, changed on the way from the world to the learner: a scale, a shift, and a model in place of the world's own.

    reward = scale * r + shift + b    r: the reward of the world, or that of a model of rewards
                                      b: an intrinsic reward, where there is one (`finetune/exploration`)

``RewardMap`` changes what is played, tick by tick; `policies/external/reward_models.py` does the same to recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .ranges import check_ranges
from .tree import map_tree, to
from .types import KnownOutcome, Obs, Saved, Step, VecEnv
from .wrapper import Wrapper

# (obs, action (N, A), next_obs) -> (N,): the reward of one control tick, of what the world shows and is commanded.
RewardModel = Callable[[Obs, Tensor, Obs], Tensor]


class Bonus(Saved, Protocol):
    """An intrinsic reward: paid for a tick beside the world's own, by what was seen before, which is its state."""

    def begin(self, obs: Obs, mask: Tensor) -> None:
        """Episodes begin in the worlds of ``mask`` (N,), which show ``obs``."""
        ...

    def __call__(self, obs: Obs, action: Tensor, next_obs: Obs, active: Tensor) -> Tensor:
        """(N,), to be read where ``active``; other rows of what is given are undefined."""
        ...


@dataclass
class RewardConfig:
    """Settings of the rewards that the learner sees: scale * reward + shift, of the world or of a model."""

    scale: float = 1.0  # factor on every reward
    shift: float = 0.0  # added to each scaled reward; -1 makes success-or-nothing a matter of time
    model: str | None = None  # an installed model of rewards (entry point of burnish.rewards) in place of the world's

    def __post_init__(self) -> None:
        check_ranges(self, {"(0, inf)": "scale", "(-inf, inf)": "shift"}, "rewards.")

    def __call__(self, reward: Tensor) -> Tensor:
        return self.scale * reward + self.shift


class RewardMap(Wrapper):
    """A world whose rewards are scaled and shifted, or told by ``model``, with a ``bonus`` added, which ``info`` names
    too. How episodes end stays."""

    def __init__(
        self,
        env: VecEnv,
        *,
        scale: float = 1.0,
        shift: float = 0.0,
        model: RewardModel | None = None,
        bonus: Bonus | None = None,
    ) -> None:
        super().__init__(env)
        self.map, self.model, self.bonus = RewardConfig(scale, shift), model, bonus
        self._obs: Obs | None = None

    @property
    def known_outcome(self) -> KnownOutcome | None:
        known = super().known_outcome
        if known is None or self._looks:
            return None

        def mapped(before: Obs, after: Obs) -> tuple[Tensor, Tensor, Tensor]:
            reward, success, failure = known(before, after)
            return self.map(reward).to(reward), success, failure

        return mapped

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        obs = self._seen(self.env.reset(mask, seeds))
        if self.bonus is not None:
            self.bonus.begin(obs, self._all if mask is None else mask)
        return obs

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        before = self._obs
        step = self.env.step(action, active)
        reward, info = step.reward, step.info
        assert before is not None or not self._looks, "a world is reset before it is stepped"
        if self.model is not None:
            reward = self.model(before or {}, action, step.obs)
        reward = self.map(reward).to(step.reward)
        if self.bonus is not None:
            taken = info.get("executed", action)
            extra = self.bonus(before or {}, taken, step.obs, self._all if active is None else active).to(reward)
            reward, info = reward + extra, {**info, "bonus": extra}
        self._seen(step.obs)
        return step._replace(reward=reward, info=info)

    @property
    def _all(self) -> Tensor:
        return torch.ones(self.num_envs, dtype=torch.bool, device=self.device)

    @property
    def _looks(self) -> bool:
        """Whether rewards follow from what the world shows."""
        return self.model is not None or self.bonus is not None

    def _seen(self, obs: Obs) -> Obs:
        if self._looks:
            self._obs = map_tree(lambda x: x.clone(), obs)  # a world may answer in the same memory again
        return obs

    def state_dict(self) -> dict[str, Any]:
        own = {} if self._obs is None else {"seen": self._obs}
        return {**super().state_dict(), **own, **({} if self.bonus is None else {"bonus": self.bonus.state_dict()})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._obs = to(state["seen"], self.device) if "seen" in state else None
        if self.bonus is not None:
            self.bonus.load_state_dict(state["bonus"])
