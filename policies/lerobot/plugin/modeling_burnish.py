"""A policy of Burnish as LeRobot plays one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from lerobot.policies.pretrained import PreTrainedPolicy  # pyright: ignore[reportMissingImports]
from torch import Tensor

from ...build import restore_policy
from ...core.errors import BurnishError
from ..checkpoint import of_plugin
from ..names import PLUGIN
from ..player import Player
from .configuration_burnish import BurnishConfig, refuse_training


class BurnishPolicy(PreTrainedPolicy):
    """Its weights are read strictly, and say which network is built (`checkpoint.of_plugin`)."""

    config_class = BurnishConfig
    name = PLUGIN

    def __init__(self, config: BurnishConfig, **unused: Any) -> None:
        super().__init__(config)
        self._player: Player | None = None

    @classmethod
    def _load_as_safetensor(cls, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        # The file of a hub's cache is a link to where it lies.
        saved = of_plugin({PLUGIN: model.config.burnish}, Path(model_file).resolve())
        model.policy = policy = restore_policy(saved, map_location)
        for name, fixed in (("n_action_steps", policy.spec.execute), ("n_obs_steps", policy.spec.history)):
            if getattr(model.config, name) != fixed:
                raise BurnishError(f"{name}={getattr(model.config, name)}: this policy plays with {fixed}; leave it so")
        return model

    @property
    def player(self) -> Player:
        if self._player is None:
            if not hasattr(self, "policy"):
                refuse_training()
            settings = {"seed": self.config.seed, "greedy": self.config.greedy, "device": self.config.device}
            self._player = Player(self.policy, **settings)
        return self._player

    def reset(self) -> None:
        self.player.reset()

    def select_action(self, batch: dict[str, Any], **unused: Any) -> Tensor:
        return self.player.step(batch)

    def predict_action_chunk(self, batch: dict[str, Any], noise: Tensor | None = None, **unused: Any) -> Tensor:
        return self.player.chunk(batch, noise)

    def forward(self, batch: dict[str, Any]) -> NoReturn:
        refuse_training()

    def get_optim_params(self) -> NoReturn:
        refuse_training()
