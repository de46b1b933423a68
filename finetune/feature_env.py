"""Observations as features of a frozen network: looked at once, when they are made, and not in updates.

The worlds show pictures; the actor, its value and the rollout get what ``policy.features`` makes of them. Of a
vision-language model that is done at the level that ``train.remember`` names, and a value sees the single vector
``features``, and the rest of the observation. ``FeatureEnv`` stands at decision time, ``FeatureWorlds`` at control
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..policies.core.chunk import Chunked, ChunkEnv
from ..policies.core.errors import BurnishError
from ..policies.core.spec import VISION, ObsSpec, is_image
from ..policies.core.tree import index
from ..policies.core.types import Obs, Outcome, Step, VecEnv
from ..policies.core.wrapper import Wrapper
from ..policies.features import read_alone, require_features, summarized
from ..policies.nets.encoder import ObsEncoder
from ..policies.trainable import Remember


class FeatureEnv:
    """``env`` at decision time, with observations as ``policy.features`` makes them."""

    def __init__(self, env: Chunked, policy: Any, level: Remember) -> None:
        self.env, self.policy, self.level = env, policy, level
        self.num_envs, self.device, self.execute = env.num_envs, env.device, env.execute
        self.state_dict, self.load_state_dict = env.state_dict, env.load_state_dict
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


class FeatureWorlds(Wrapper):
    """``env`` at control time, with what the networks of the policy's cameras make of its pictures."""

    # Rules of the world are about what the world itself shows.
    known_outcome = known_dynamics = parametric_dynamics = property(lambda _: None)

    def __init__(self, env: VecEnv, looking: Any) -> None:
        super().__init__(env)
        self.looking = looking
        self.spec = replace(env.spec, obs=looking.feature_shapes(Remember.keys))

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        return self.looking.features(self.env.reset(mask, seeds), Remember.keys)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.env.step(action, active)
        return step._replace(obs=self.looking.features(step.obs, Remember.keys))


def looked_at(env: VecEnv, base: Any, features: bool) -> tuple[VecEnv, set[str]]:
    """``env``, with ``features`` as the network of ``base`` sees it, and the keys that this network alone reads."""
    if features:
        env = FeatureWorlds(env, require_features(base, "features=true"))
    return env, read_alone(env.spec.obs)


def without_pictures(env: VecEnv, policy: Any, **known: Any) -> VecEnv:
    """``env`` for a model, which predicts numbers: pictures are what the policy's own network makes of them. ``known``
    of other observations, recordings or a twin, is refused there."""
    if not any(is_image(key) for key in env.spec.obs.shapes):
        return env
    if policy is None:
        raise BurnishError(
            "a model of a world of pictures predicts what a policy's own network makes of them, and no policy was "
            "given; name one, policy.path=..., or take a method that learns in the world itself"
        )
    looking = require_features(policy, "a model of a world of pictures")
    if not isinstance(looking, ObsEncoder):
        raise BurnishError(
            f"a {type(looking).__name__} acts on more of a picture than a model of a world can predict; take a method "
            "that learns in the world itself, such as method=dsrl method.features=true"
        )
    for name in (name for name, given in known.items() if given is not None):
        raise BurnishError(
            f"{name}= is about pictures, and this model predicts what the policy makes of them; leave {name} out"
        )
    return FeatureWorlds(env, looking)


def require_sight(policy: Any) -> None:
    """Refuse a policy that was trained on features and has no network of its own to look with."""
    if any(key.startswith(VISION) for key in policy.spec.obs.shapes):
        raise BurnishError(
            f"a {type(policy).__name__} of its own would see what the network of another policy makes of pictures; "
            "take a method.inner that refines the policy itself, such as dsrl, residual_td3 or dppo"
        )


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
