"""Observations as features of a frozen vision-language model: looked at once, when they are made, and not in updates.

The worlds show pictures; the actor, its value and the rollout get what ``policy.features`` makes of them, at the level
that ``train.remember`` names. A value sees the single vector ``features``, and the rest of the observation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..policies.core.chunk import Chunked, ChunkEnv
from ..policies.core.errors import BurnishError
from ..policies.core.spec import ObsSpec
from ..policies.core.tree import index
from ..policies.core.types import Obs, Outcome
from ..policies.features import summarized
from ..policies.trainable import Remember


class FeatureEnv:
    """``env`` at decision time, with observations as ``policy.features`` makes them."""

    def __init__(self, env: Chunked, policy: Any, level: Remember) -> None:
        self.env, self.policy, self.level = env, policy, level
        self.num_envs, self.device, self.execute = env.num_envs, env.device, env.execute
        self.spec = replace(env.spec, obs=policy.feature_shapes(level))

    def reset(self, seeds: Sequence[int] | None = None) -> Obs:
        return self._features(self.env.reset(seeds))

    def step(self, action: Tensor) -> Outcome:
        outcome = self.env.step(action)
        obs, ended = self._features(outcome.obs), outcome.ended.nonzero()[:, 0]
        next_obs = obs
        if len(ended):  # elsewhere an action led to what is acted on next
            led = self._features(index(outcome.next_obs, ended))
            next_obs = {key: x.index_copy(0, ended, led[key]) for key, x in obs.items()}
        return outcome._replace(obs=obs, next_obs=next_obs)

    def _features(self, obs: Obs) -> Obs:
        return self.policy.features(obs, self.level)

    def state_dict(self) -> dict[str, Any]:
        return self.env.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.env.load_state_dict(state)


def feature_view(env: ChunkEnv, policy: Any, config: Any) -> tuple[ChunkEnv | FeatureEnv, ObsSpec | None]:
    """``env`` as the settings of a method say, ``config.train.remember``, and the observations of its value; None: all
    that the actor sees."""
    level = config.train.remember
    if level is Remember.pictures:
        return env, None
    if config.ppo.image_shift > 0:
        raise BurnishError(
            f"method.ppo.image_shift={config.ppo.image_shift} shifts pictures, which train.remember={level.value} does "
            "not keep; leave one of the two out"
        )
    view = FeatureEnv(env, policy, level)
    return view, summarized(view.spec.obs)
