"""A policy with a likelihood as the actor of a loop: it draws, and keeps the evidence of the draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...policies.core.types import Decision, Obs, StochasticPolicy


class Network(StochasticPolicy, Protocol):
    """An ``nn.Module`` that is a ``StochasticPolicy``."""

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def state_dict(self) -> dict[str, Any]: ...


class PPOActor:
    """Draws, and remembers what is needed to evaluate the draw again."""

    def __init__(self, actor: Network) -> None:
        self.actor = actor

    @torch.no_grad()
    def act(self, obs: Obs, *, warm: bool, generator: torch.Generator, fresh: Tensor | None = None) -> Decision:
        draw = self.actor.draw(obs, generator=generator)
        action = self.actor.spec.executed(draw.action)
        return Decision(action, {"action": action, "trace": draw.trace, "log_prob": draw.log_prob})

    def state_dict(self) -> dict[str, Any]:
        return self.actor.state_dict()
