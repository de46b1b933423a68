"""``rewards.model=NAME``: a model of rewards of an installed package, by the name under which the package announces it.

    [project.entry-points."burnish.rewards"]
    my_reward = "my_package.rewards:make"        # make(world: EnvSpec) -> model(obs, action, next_obs) -> (N,)

A model judges single control ticks, by what the world shows and is commanded. ``rewarded`` and ``relabelled`` change
the rewards of a world and of recordings by the same settings.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..core.errors import BurnishError
from ..core.rewards import RewardConfig, RewardMap, RewardModel
from ..core.spec import EnvSpec
from ..core.tree import index
from ..core.types import Obs, VecEnv
from ..data.episodes import NO_REWARD, Episode, Episodes
from .plugins import loaded

GROUP = "burnish.rewards"


def reward_model(name: str, world: EnvSpec) -> RewardModel:
    """The installed model of rewards of that name for this world, with each answer checked for shape and NaN."""
    made = loaded(GROUP, name, "rewards.model", "a model of rewards")(world)
    if not callable(made):
        raise BurnishError(
            f"rewards.model={name} made a {type(made).__name__}, which is no model of rewards: it is called with "
            "(obs, action, next_obs) and answers one reward for each row"
        )

    def judge(obs: Obs, action: Tensor, next_obs: Obs) -> Tensor:
        with torch.no_grad():
            reward = torch.as_tensor(made(obs, action, next_obs), device=action.device)
        if reward.shape != (len(action),) or not bool(reward.isfinite().all()):
            raise BurnishError(
                f"rewards.model={name} answered with shape {tuple(reward.shape)}; it must be one finite number for "
                f"each of {len(action)} rows"
            )
        return reward.float()

    return judge


def rewarded(env: VecEnv, config: RewardConfig) -> VecEnv:
    """The world, ``env`` itself where nothing is changed."""
    if config == RewardConfig():
        return env
    model = None if config.model is None else reward_model(config.model, env.spec)
    return RewardMap(env, scale=config.scale, shift=config.shift, model=model)


def relabelled(episodes: Episodes, config: RewardConfig) -> Episodes:
    """The same recordings with other rewards; refused where they hold none, and no model says any."""
    if config.model is None and NO_REWARD in episodes.meta.get("notes", ()):
        raise BurnishError(
            "the recordings hold no rewards (a LeRobot set has them as next.reward), so nothing can be learnt from "
            "them by value; give a model of the reward, rewards.model=..., or imitate: burnish pretrain"
        )
    model = None if config.model is None else reward_model(config.model, episodes.spec)

    def judged(episode: Episode) -> Tensor:
        if model is None:
            return episode.reward
        at = torch.arange(len(episode))
        return model(index(episode.obs, at), episode.action, index(episode.obs, at + 1))

    changed = [replace(episode, reward=config(judged(episode))) for episode in episodes]
    return replace(episodes, episodes=changed)
