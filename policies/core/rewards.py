"""Rewards, changed on the way from the world to the learner: a scale, a shift, and a model in place of the world's own.

    reward = scale * r + shift        r: the reward of the world, or that of a model of rewards

``RewardMap`` changes what is played, tick by tick; `policies/external/reward_models.py` does the same to recordings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .ranges import check_ranges
from .tree import map_tree
from .types import KnownOutcome, Obs, Step, VecEnv
from .wrapper import Wrapper

# (obs, action (N, A), next_obs) -> (N,): the reward of one control tick, of what the world shows and is commanded.
RewardModel = Callable[[Obs, Tensor, Obs], Tensor]


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
    """A world whose rewards are scaled and shifted, or told by ``model``. How episodes end, and ``info``, stay."""

    def __init__(
        self, env: VecEnv, *, scale: float = 1.0, shift: float = 0.0, model: RewardModel | None = None
    ) -> None:
        super().__init__(env)
        self.map, self.model = RewardConfig(scale, shift), model
        self._obs: Obs | None = None

    @property
    def known_outcome(self) -> KnownOutcome | None:
        known = super().known_outcome
        if known is None or self.model is not None:
            return None

        def mapped(before: Obs, after: Obs) -> tuple[Tensor, Tensor, Tensor]:
            reward, success, failure = known(before, after)
            return self.map(reward).to(reward), success, failure

        return mapped

    def reset(self, *args: Any, **kwargs: Any) -> Obs:
        return self._seen(self.env.reset(*args, **kwargs))

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        before = self._obs
        step = self.env.step(action, active)
        reward = step.reward
        if self.model is not None:
            assert before is not None, "a world is reset before it is stepped"
            reward = self.model(before, action, step.obs)
        self._seen(step.obs)
        return step._replace(reward=self.map(reward).to(step.reward))

    def _seen(self, obs: Obs) -> Obs:
        if self.model is not None:
            self._obs = map_tree(lambda x: x.clone(), obs)  # a world may answer in the same memory again
        return obs

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({} if self._obs is None else {"seen": self._obs})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._obs = state.get("seen")
