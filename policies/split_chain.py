"""One generation chain, run by two policies: the first steps are one's, the others the other's.

DPPO (Ren et al. 2024, arXiv 2409.00588) trains only the last steps of a chain; the result is such a split chain.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from .core.errors import BurnishError
from .core.types import ActOptions, ChainPolicy, Normal, Obs


@dataclass
class SplitChainConfig:
    """Configuration of a split chain: the step at which the second policy takes over."""

    switch: int


class SplitObservation(NamedTuple):
    """The encodings of an observation by both policies."""

    first: Any
    last: Any

    @property
    def given(self) -> Tensor:
        return self.last.given


class SplitChain(nn.Module):
    """A chain whose steps k < ``switch`` are those of ``first``, and the others those of ``last``."""

    def __init__(self, first: ChainPolicy, last: ChainPolicy, switch: int) -> None:
        super().__init__()
        steps = first.num_steps
        if steps != last.num_steps or first.spec.chunk_shape != last.spec.chunk_shape or not 0 <= switch <= steps:
            raise BurnishError(
                "a split chain needs two chains of the same length and chunk, and a switch between them: "
                f"steps={steps} and {last.num_steps}, chunks {first.spec.chunk_shape} and {last.spec.chunk_shape}, "
                f"switch={switch}"
            )
        for runner in (first, last):
            config: Any = getattr(runner, "config", None)
            if not getattr(config, "gaussian_chain", True):
                raise BurnishError(f"sampler={config.sampler.value} is not a chain that can be handed over; use ddim")
        self.first, self.last, self.config = first, last, SplitChainConfig(switch)
        self.spec = last.spec

    @property
    def num_steps(self) -> int:
        return self.last.num_steps

    def encode(self, obs: Obs) -> SplitObservation:
        return SplitObservation(self.first.encode(obs), self.last.encode(obs))

    def transition(self, x: Tensor, k: Tensor, cond: SplitObservation) -> Normal:
        early = k < self.config.switch
        if bool(early.all()):
            return self.first.transition(x, k, cond.first)
        if not bool(early.any()):
            return self.last.transition(x, k, cond.last)
        pairs = zip(self.first.transition(x, k, cond.first), self.last.transition(x, k, cond.last), strict=True)
        return Normal(*(torch.where(early[:, None, None], a, b) for a, b in pairs))

    def act(self, obs: Obs, **how: Unpack[ActOptions]) -> Tensor:
        # The sampler is the last runner's own, prefix and all; only what it samples from is handed over. The copy is
        # shallow: it shares the weights, and shields the original from the two new names.
        sampler: Any = copy.copy(self.last)
        sampler.encode, sampler.transition = self.encode, self.transition
        return sampler.act(obs, **how)
