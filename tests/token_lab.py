"""A tiny policy of tokens, and a world whose best answer is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from burnish.policies.build import build_policy
from burnish.policies.core.clock import Clock
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.core.types import Obs, Step
from burnish.policies.vla.bins import BinsConfig, BinsPolicy
from burnish.policies.vla.sizes import ExpertConfig, LanguageConfig, VisionConfig
from burnish.policies.vla.smolvla import TinyVLAConfig

HORIZON, EXECUTE, BINS = 3, 2, 8
LIMITS = ActionSpec((-1.0, -1.0), (1.0, 1.0))
SHOWN = ObsSpec({"state": (1,), "image.top": (3, 8, 8)})


def tokens(seed: int = 1, horizon: int = HORIZON, execute: int = EXECUTE, **config: Any) -> BinsPolicy:
    small = {"vision": VisionConfig(8, 4, 8, 1, 2, 16, 2), "language": LanguageConfig(8, 8, 2, 2, 1, 4, 16)}
    model = TinyVLAConfig(expert=ExpertConfig(8, 2, 16), **small)
    spec = PolicySpec(SHOWN, LIMITS, horizon, execute)
    return build_policy(BinsConfig(**{"bins": BINS, "model": model, **config}), spec, seed=seed)


def observed(count: int) -> Obs:
    """Pictures that grow brighter from row to row."""
    light = torch.linspace(0, 255, count).to(torch.uint8)
    return {"state": torch.linspace(-1, 1, count)[:, None], "image.top": light[:, None, None, None].expand(-1, 3, 8, 8)}


class Lamp:
    """Two ticks. Each pays 0.5 where the first number of the action has the sign that the lamp of the episode asks for;
    success is to be paid for both. A policy that does not look is paid 0.5 an episode, the best 1."""

    def __init__(self, num_envs: int, seed: int = 0) -> None:
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.spec = EnvSpec(SHOWN, LIMITS, 10.0, "test", 2)
        self._clock = Clock(num_envs, seed)
        self.paid = torch.zeros(num_envs)

    @property
    def lit(self) -> Tensor:
        return self._clock.seeds % 2 == 1

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        self.paid = self.paid.masked_fill(self._clock.begin(mask, seeds), 0.0)
        return self._obs()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        active = self._clock.advance(active)
        reward = 0.5 * ((action[:, 0] > 0) == self.lit).float()
        self.paid = self.paid + reward * active
        over = self._clock.tick >= 2
        return Step(self._obs(), reward, over, torch.zeros_like(over), {"success": over & (self.paid > 0.9)})

    def _obs(self) -> Obs:
        light = (self.lit * 255).to(torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8)
        return {"state": self._clock.tick[:, None].float(), "image.top": light.contiguous()}

    def state_dict(self) -> dict[str, Any]:
        return {**self._clock.state_dict(), "paid": self.paid.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._clock.load_state_dict(state)
        self.paid = state["paid"].clone()
