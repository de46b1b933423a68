"""A moving average of the weights, which is what acts and what is saved after imitation.

Diffusion Policy, Chi et al. 2023 (arXiv 2303.04137), and DDPM, Ho et al. 2020 (arXiv 2006.11239), evaluate the average.

**Departures.** The warm-up is min(decay, (1 + n) / (10 + n)) after n updates, so that the random first weights are
forgotten at once; the average is kept in float32 whatever the precision of training, since at decay 0.999 an update in
bfloat16 would round to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import BurnishError
from ..core.ranks import whole


class Ema:
    """Parameters that are trained are averaged in one group of kernels; buffers (normalisers, schedules) are copied."""

    def __init__(self, module: nn.Module, decay: float = 0.999, warmup: bool = True) -> None:
        if not 0 <= decay < 1:
            raise BurnishError(f"the decay of a moving average lies in [0, 1), got {decay}")
        self.decay = decay
        self.warmup = warmup
        self.count = 0
        self.parameters = {name: _precise(x) for name, x in module.named_parameters() if x.requires_grad}
        self.buffers = {name: x.detach().clone() for name, x in module.named_buffers()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        decay = min(self.decay, (1 + self.count) / (10 + self.count)) if self.warmup else self.decay
        self.count += 1
        latest = [x.to(mean.dtype) for x, mean in self._pairs(module)]
        if latest:
            # The foreach kernels have no public name, but are what torch's own optimisers run on.
            torch._foreach_lerp_(list(self.parameters.values()), latest, 1 - decay)  # pyright: ignore
        for mine, buffer in zip(self.buffers.values(), module.buffers(), strict=True):
            mine.copy_(buffer)

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        for target, mean in self._pairs(module):
            target.copy_(whole(mean))
        for target, mine in zip(module.buffers(), self.buffers.values(), strict=True):
            target.copy_(mine)

    def _pairs(self, module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Each averaged parameter of ``module``, or of a copy, with its mean."""
        named = dict(module.named_parameters())
        return [(named[name], mean) for name, mean in self.parameters.items()]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "parameters": dict(self.parameters), "buffers": dict(self.buffers)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for kind, mine in (("parameters", self.parameters), ("buffers", self.buffers)):
            theirs = state[kind]
            if {name: x.shape for name, x in theirs.items()} != {name: x.shape for name, x in mine.items()}:
                raise BurnishError(
                    f"a saved moving average has other {kind} than the network; they differ in name or shape"
                )
            for name, x in mine.items():
                x.copy_(theirs[name])
        self.count = int(state["count"])


def _precise(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32), copy=True)
