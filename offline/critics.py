"""A critic with its slowly following target: what TD methods hold, saved and moved as one."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..policies.core.normalize import Normalizer
from ..policies.core.seed import derive
from ..policies.core.spec import PolicySpec
from ..policies.nets.critic import CriticConfig, QEnsemble
from .soft import polyak


class Critic(nn.Module):
    """``online`` learns; ``target`` follows it by ``follow``, and never receives a gradient."""

    def __init__(self, spec: PolicySpec, config: CriticConfig) -> None:
        super().__init__()
        self.online = QEnsemble(spec, config)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self._pairs = list(self.target.parameters()), list(self.online.parameters())  # found once, used at every update

    def forward(self, obs: Mapping[str, Tensor], action: Tensor) -> Tensor:
        return self.online(obs, action)

    def follow(self, tau: float) -> None:
        polyak(*self._pairs, tau)


def fresh_critic(
    spec: PolicySpec, config: CriticConfig, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Critic:
    """The same seed gives the same weights on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "critic"))
        return Critic(spec, config).to(device)


def adopt_normalizers(module: nn.Module, source: object) -> None:
    """Scale observations as ``source`` does, wherever both know the key; its buffers too, so fit it first."""
    known: dict[str, nn.Module] = {}
    for part in source.modules() if isinstance(source, nn.Module) else ():
        if isinstance(part, Normalizer):
            known.update({name: part.scaler(name) for name in part.names})
    for part in module.modules():
        if isinstance(part, Normalizer):
            for name in part.names.keys() & known.keys():
                part.scaler(name).load_state_dict(known[name].state_dict())


def explained_variance(prediction: Tensor, target: Tensor) -> Tensor:
    """1 - Var[target - prediction] / Var[target]: 1 is perfect, 0 no better than a constant; NaN for one target."""
    return 1 - (target - prediction).var() / target.var()


def spread(q: Tensor) -> Tensor:
    """Mean disagreement of the members (E, B): their standard deviation."""
    return q.std(0, correction=0).mean() if len(q) > 1 else torch.zeros((), device=q.device)


def saturation(action: Tensor) -> Tensor:
    """The share of coordinates at the border of [-1, 1]: near 1 an agent wants more than its bound allows."""
    return (action.abs() > 0.95).float().mean()
