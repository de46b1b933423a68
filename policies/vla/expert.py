"""The action expert: noisy actions, the time and an encoded observation to a velocity.

Layers beside those of the language model take turns. One attends to the prefix and to the actions: an action sees
itself and earlier ones, so the first rows of a velocity follow from the first rows of the noisy chunk alone. The next
looks back at the prefix alone, through keys made of those of the language model, which are rotated already: its queries
are rotated by their place in the chunk. In pi0 all layers are of the first kind, and an action sees all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .layers import LLAMA, Keys, Layer, Style, norm_of
from .prefix import Parts, Prefix
from .sizes import ExpertConfig, LanguageConfig, own_layer


def time_embedding(tau: Tensor, width: int, shortest: float, longest: float) -> Tensor:
    """(B,) -> (B, width) in float64: sines, then cosines, of waves from ``shortest`` to ``longest``."""
    share = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=tau.device)
    angle = tau.double()[:, None] * 2 * math.pi / (shortest * (longest / shortest) ** share)
    return torch.cat([angle.sin(), angle.cos()], 1)


class Expert(nn.Module):
    """The layers of the expert, with those of the language model that they stand beside. ``causal``: an action sees
    itself and earlier ones, instead of all; ``timed``: every layer depends on the time."""

    def __init__(
        self,
        language: LanguageConfig,
        expert: ExpertConfig,
        style: Style = LLAMA,
        causal: bool = True,
        timed: bool = False,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.looks_back = [i % expert.self_every > 0 for i in range(expert.layers)]
        self.beside = [i for i in range(language.layers) if own_layer(i, language, expert) is not None]
        heads = (language.heads, language.key_heads, language.head_dim)
        inner = language.keys_width
        self.layers = nn.ModuleList(
            Layer(expert.width, *heads, expert.hidden, inner if back else None, style, timed)
            for back in self.looks_back
        )
        self.norm = norm_of(expert.width, style, timed)

    def _each(self) -> Iterator[tuple[Layer, bool]]:
        """Each layer, and whether it looks back alone."""
        return zip(cast("list[Layer]", [*self.layers]), self.looks_back, strict=True)

    def mapped(self, prefix: Prefix) -> Prefix:
        """The keys that the layers read of an observation, made once for all steps of a generation."""
        found: list[Keys] = []
        for (layer, back), i in zip(self._each(), self.beside, strict=True):
            found.append(layer.mapped(prefix.layers[i]) if back else prefix.layers[i])
        return prefix._replace(layers=found)

    def forward(self, x: Tensor, prefix: Prefix, time: Tensor | None = None) -> Tensor:
        """x (R, S, width) -> (R, S, width), for a prefix that was ``mapped``; ``time`` (R, width) is embedded."""
        steps = x.shape[1]
        place = torch.arange(steps, device=x.device).expand(len(x), -1)
        seen = torch.ones(1, steps, steps, dtype=torch.bool, device=x.device)
        seen = seen.tril() if self.causal else seen
        for (layer, back), given in zip(self._each(), prefix.layers, strict=True):
            position = place if back else prefix.length[:, None] + place
            x, _ = layer(x, position, [given], None if back else seen, time)
        return self.norm(x, time)


class FlowModel(nn.Module):
    """Everything that the published weights hold, under their names: the language model, the expert, and the maps
    between numbers and tokens."""

    def __init__(
        self, vlm: nn.Module, language: LanguageConfig, expert: ExpertConfig, state_dim: int, action_dim: int
    ) -> None:
        super().__init__()
        width = expert.width
        self.periods = expert.min_period, expert.max_period
        self.vlm_with_expert = Parts(vlm=vlm, lm_expert=Expert(language, expert))
        self.state_proj = nn.Linear(state_dim, language.width)
        self.action_in_proj = nn.Linear(action_dim, width)
        self.action_out_proj = nn.Linear(width, action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    def velocity(self, x: Tensor, tau: Tensor, prefix: Prefix) -> Tensor:
        """d x / d tau of noisy actions x (R, S, D) at ``tau`` (R,), which is 1 at noise and 0 at data."""
        return self.action_out_proj(self.hidden(x, tau, prefix))

    def hidden(self, x: Tensor, tau: Tensor, prefix: Prefix) -> Tensor:
        """(R, S, width): what the expert makes of them."""
        return self.vlm_with_expert.lm_expert(self.timed(x, tau), prefix)

    def timed(self, x: Tensor, tau: Tensor) -> Tensor:
        """(R, S, width): a token for each action, which knows the time."""
        token = self.action_in_proj(x)
        time = time_embedding(tau, token.shape[2], *self.periods).to(token.dtype)[:, None].expand_as(token)
        return self.action_time_mlp_out(F.silu(self.action_time_mlp_in(torch.cat([token, time], 2))))
