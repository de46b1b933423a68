"""A code of behaviours, learnt while a search goes on: for STAX in `finetune/methods/serene.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...policies.nets.mlp import MLP

HIDDEN, BATCH, RATE = (64,), 64, 1e-3


class BehaviourCode(nn.Module):
    """An autoencoder of behaviours (N, B): its code of each (N, C), and how badly that gives it back."""

    def __init__(self, numbers: int, code: int) -> None:
        super().__init__()
        self.encoder, self.decoder = MLP(numbers, code, HIDDEN), MLP(code, numbers, HIDDEN)

    @torch.no_grad()
    def code(self, behaviour: Tensor) -> Tensor:
        return self.encoder(behaviour)

    @torch.no_grad()
    def surprise(self, behaviour: Tensor) -> Tensor:
        """(N,): the mean squared error."""
        return self._error(behaviour)

    def _error(self, behaviour: Tensor) -> Tensor:
        return (self.decoder(self.encoder(behaviour)) - behaviour).square().mean(1)

    def fit(self, behaviour: Tensor, steps: int, generator: torch.Generator) -> None:
        """It goes on from where it is."""
        optimizer = torch.optim.Adam(self.parameters(), RATE)
        for _ in range(steps):
            rows = torch.randint(len(behaviour), (BATCH,), generator=generator).to(behaviour.device)
            optimizer.zero_grad()
            self._error(behaviour[rows]).mean().backward()
            optimizer.step()
