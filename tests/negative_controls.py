"""The control of every learning test: the same world, paid with independent noise, from which nothing can be learnt."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.policies.core.types import Step, VecEnv
from burnish.policies.core.wrapper import Wrapper


class NegativeControl(Wrapper):
    def __init__(self, env: VecEnv, seed: int = 0, scale: float = 1.0) -> None:
        super().__init__(env)
        self.source, self.scale = torch.Generator().manual_seed(seed), scale

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.env.step(action, active)
        return step._replace(reward=self.scale * torch.randn(self.num_envs, generator=self.source))
