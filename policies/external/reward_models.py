"""``reward_model=NAME``: a model of rewards of an installed package, by the name under which the package announces it.

    [project.entry-points."burnish.rewards"]
    my_reward = "my_package.rewards:make"        # make(world: EnvSpec) -> model(obs, action, next_obs) -> (N,)

A model judges single control ticks, by what the world shows and is commanded: in the world as it is played
(``core.rewards.RewardMap``), and in recordings.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..core.errors import BurnishError
from ..core.rewards import RewardModel
from ..core.spec import EnvSpec
from ..core.tree import index
from ..core.types import Obs
from ..data.episodes import Episodes
from .plugins import loaded

GROUP = "burnish.rewards"


def reward_model(name: str, world: EnvSpec) -> RewardModel:
    made = loaded(GROUP, name, "reward_model", "a model of rewards")(world)
    if not callable(made):
        raise BurnishError(
            f"reward_model={name} made a {type(made).__name__}, which is no model of rewards: it is called with "
            "(obs, action, next_obs) and answers one reward for each row"
        )

    def judge(obs: Obs, action: Tensor, next_obs: Obs) -> Tensor:
        with torch.no_grad():
            reward = torch.as_tensor(made(obs, action, next_obs), device=action.device)
        if reward.shape != (len(action),) or not bool(reward.isfinite().all()):
            raise BurnishError(
                f"reward_model={name} answered with shape {tuple(reward.shape)}; it must be one finite number for each "
                f"of {len(action)} rows"
            )
        return reward.float()

    return judge


def relabelled(episodes: Episodes, model: RewardModel) -> Episodes:
    """The same recordings, rewarded by ``model``."""
    ticks = [torch.arange(len(episode)) for episode in episodes]
    judged = [
        replace(episode, reward=model(index(episode.obs, at), episode.action, index(episode.obs, at + 1)))
        for episode, at in zip(episodes, ticks, strict=True)
    ]
    return replace(episodes, episodes=judged)
