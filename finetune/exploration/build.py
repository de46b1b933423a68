"""The table of explorations, ``explore=NAME``: each pays a part of the reward, through the view on rewards.

It is a `Bonus` (`policies/core/rewards.py`) on single control ticks of the world as it is, below every method's view of
it, or a world around that world. So any method that learns from rewards explores, on policy and off; the worlds in
which policies are tried pay what they always pay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...policies.core.errors import BurnishError
from ...policies.core.rewards import Bonus, RewardMap
from ...policies.core.seed import derive
from ...policies.core.types import Obs, VecEnv
from ..method import LoopKind, Method
from ..people.intervened_rows import InterventionUse
from .adversarial_surprise import AdversarialSurprise, AdversarialSurpriseConfig
from .information import Information, InformationConfig
from .novelty import Novelty, NoveltyConfig
from .observed import ExploreConfig
from .submodular import Submodular, SubmodularConfig


class Exploration(NamedTuple):
    """A row of the table."""

    config: type[ExploreConfig]
    # (config, world: EnvSpec, num_envs, device, seed), and the twin where it asks for one, makes a bonus; where it
    # plays, (config, env, seed) makes a world around the world
    make: Callable[..., Any]
    twin: bool = False  # it asks a simulation of the world
    plays: bool = False  # it has a policy of its own, which plays in the world


EXPLORATIONS: dict[str, Exploration] = {
    "novelty": Exploration(NoveltyConfig, Novelty),
    "submodular": Exploration(SubmodularConfig, Submodular),
    "information": Exploration(InformationConfig, Information, twin=True),
    "adversarial_surprise": Exploration(AdversarialSurpriseConfig, AdversarialSurprise, plays=True),
}
SETTINGS: dict[str, type] = {name: row.config for name, row in EXPLORATIONS.items()}


class Weighted:
    """A bonus times its weight, which may fade; once it has, nothing is computed."""

    def __init__(self, bonus: Bonus, config: ExploreConfig) -> None:
        self.bonus, self.config, self.ticks = bonus, config, 0

    @property
    def weight(self) -> float:
        return self.config.weight_after(self.ticks)

    def begin(self, obs: Obs, mask: Tensor) -> None:
        if self.weight:
            self.bonus.begin(obs, mask)

    def __call__(self, obs: Obs, action: Tensor, next_obs: Obs, active: Tensor) -> Tensor:
        weight = self.weight
        self.ticks += int(active.sum())
        if not weight:  # it never comes back
            return torch.zeros_like(active, dtype=torch.float32)
        return weight * self.bonus(obs, action, next_obs, active)

    def state_dict(self) -> dict[str, Any]:
        return {"ticks": self.ticks, "bonus": self.bonus.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ticks = int(state["ticks"])
        self.bonus.load_state_dict(state["bonus"])


def row_of(config: ExploreConfig) -> Exploration:
    """The row of the table with these settings."""
    return next(row for row in EXPLORATIONS.values() if row.config is type(config))


def explored(env: VecEnv, config: ExploreConfig | None, seed: int, twin: VecEnv | None = None) -> VecEnv:
    """The world with what ``explore=`` pays, ``env`` itself where that is nothing; ``twin`` is a simulation of it, in
    units of the actuators too."""
    if config is None:
        return env
    row, options = row_of(config), {}
    if row.plays:
        return row.make(config, env, derive(seed, "explore"))
    if row.twin:
        if twin is None or (twin.spec.obs, twin.spec.action) != (env.spec.obs, env.spec.action):
            raise BurnishError(
                "explore=information asks a simulation of the world how it depends on its parameters; name one that "
                "shows and takes the same, twin=..."
            )
        options["twin"] = twin
    bonus = row.make(config, env.spec, env.num_envs, torch.device(env.device), derive(seed, "explore"), **options)
    return RewardMap(env, bonus=Weighted(bonus, config))


def require_rewards(name: str, row: Method, *, recordings: bool) -> None:
    """Refuse to explore where a method would not learn from what exploration pays."""
    if row.loop is LoopKind.imagined:
        raise BurnishError(
            f"explore= pays for what was not seen before, which the model of method={name} would take for rewards of "
            "the world; leave it out, or take another method, such as method=rlpd"
        )
    if row.loop is LoopKind.episodes:
        raise BurnishError(f"method={name} looks for what is new by itself; leave explore= out")
    if row.interventions is InterventionUse.taught:
        raise BurnishError(f"method={name} learns from who takes over, not from rewards; leave explore= out")
    if recordings:
        raise BurnishError(
            "explore= pays for what is new while it is played, and recordings were not paid so; leave data= or "
            "explore= out"
        )
