"""Settings of a policy of Burnish in LeRobot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

from lerobot.configs.policies import PreTrainedConfig  # pyright: ignore[reportMissingImports]
from lerobot.configs.types import NormalizationMode  # pyright: ignore[reportMissingImports]

from ...core.errors import BurnishError
from ..names import PLUGIN


def refuse_training() -> NoReturn:
    """LeRobot plays these policies, and does not train them."""
    raise BurnishError("LeRobot does not train a policy of Burnish; use `burnish finetune` or `burnish pretrain`")


@PreTrainedConfig.register_subclass(PLUGIN)
@dataclass
class BurnishConfig(PreTrainedConfig):
    """``burnish`` describes the policy, as config.yaml does in a checkpoint of Burnish."""

    normalization_mapping: dict[str, NormalizationMode] = field(default_factory=dict)  # the policy has its own
    n_action_steps: int = 1  # actions of a chunk that are played
    burnish: dict[str, Any] = field(default_factory=dict)
    seed: int = 0  # of its noise
    greedy: bool = False  # noise 0

    def validate_features(self) -> None:
        pass

    def get_optimizer_preset(self) -> NoReturn:
        refuse_training()

    def get_scheduler_preset(self) -> NoReturn:
        refuse_training()

    @property
    def observation_delta_indices(self) -> list[int]:
        return list(range(1 - self.n_obs_steps, 1))

    @property
    def action_delta_indices(self) -> list[int]:
        return list(range(self.n_action_steps))

    @property
    def reward_delta_indices(self) -> None:
        return None
