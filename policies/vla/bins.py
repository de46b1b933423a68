"""Actions as tokens: each number of a chunk is one of 256 bins, by one pass of the expert of a vision-language-action
model over H placeholders.

The bins are those of OpenVLA (Kim et al. 2024, arXiv 2406.09246): 256 edges from -1 to 1, and a token stands for the
middle between two of them. All numbers of a chunk are decided at once, as in OpenVLA-OFT (Kim et al. 2025, arXiv
2502.19645). There are no other tokens, so none has to be masked. The temperature divides the logits in the draw and in
its density alike. Tokens are drawn apart from each other, so those that an end cut off are left out of the evidence
exactly. As published, the last two tokens stand for the same action, the second of them for a limit of exactly 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..chain import masked_mean, require_chunk, start_noise, with_prefix
from ..core.ranges import check_ranges
from ..core.seed import Noise
from ..core.spec import PolicySpec
from ..core.tree import check
from ..core.types import Draw, Obs, Prefix
from .smolvla import SmolVLA, TinyVLAConfig


class Factor(Enum):
    """The tokens whose likelihoods are one factor, with a ratio and a clip of its own."""

    chunk = "chunk"  # all that are executed, as in VLA-RL
    action = "action"  # those of one control tick


@dataclass
class BinsConfig:
    """Settings of a policy that acts by tokens."""

    bins: int = 256  # tokens of each number of an action
    temperature: float = 1.0  # divides the logits, in the draw and in its density
    factor: Factor = Factor.chunk  # tokens that share a likelihood ratio when PPO trains them: chunk or action
    model: TinyVLAConfig = field(default_factory=TinyVLAConfig)  # the model behind the tokens

    def __post_init__(self) -> None:
        check_ranges(self, {"[2, 4096]": "bins", "(0, inf)": "temperature"}, "policy.")


def token_of(action: Tensor, bins: int) -> Tensor:
    """The number of the bin, 0 to bins - 1, of actions in [-1, 1]."""
    edges = torch.from_numpy(np.linspace(-1, 1, bins)).to(action.device)  # NumPy's, to the last bit
    return torch.bucketize(action.double().clamp(-1, 1), edges, right=True) - 1


def action_of(token: Tensor, bins: int) -> Tensor:
    """The middle of a bin, in [-1, 1]."""
    return ((2 * token.clamp(0, bins - 2).double() + 1) / (bins - 1) - 1).float()


class BinsPolicy(nn.Module):
    """A ``StochasticPolicy`` whose trace is its tokens (B, H, A)."""

    def __init__(self, spec: PolicySpec, config: BinsConfig) -> None:
        super().__init__()
        self.vla = SmolVLA(spec, config.model)
        self.config = replace(config, model=self.vla.config)
        self.spec = replace(spec, noise_shape=spec.chunk_shape, goal_free=False)
        width, dim = config.model.expert.width, spec.action.dim
        self.placeholders = nn.Parameter(torch.randn(self.vla.spec.noise_shape or ()))
        self.head = nn.Linear(width, dim * config.bins)
        self.vla.model.action_out_proj.requires_grad_(False)

    @property
    def coordinates(self) -> Tensor:
        execute, dim = self.spec.execute, float(self.spec.action.dim)
        whole = self.config.factor is Factor.chunk
        return torch.tensor([execute * dim] if whole else [dim] * execute, device=self.head.weight.device)

    @property
    def transitions(self) -> Tensor:
        return torch.ones_like(self.coordinates)

    def is_frozen(self, name: str) -> bool:
        """Whether a parameter is never trained."""
        inner = name.removeprefix("vla.")
        return inner.startswith("model.action_out_proj") or (inner != name and self.vla.is_frozen(inner))

    def is_encoder(self, name: str) -> bool:
        """Whether a parameter belongs to what looks and reads, and not to what acts."""
        return self.vla.is_encoder(name.removeprefix("vla."))

    def adapts(self, name: str) -> bool:
        """Whether low-rank changes are made to a layer."""
        return name == "head" or (
            "action_out_proj" not in name and name.startswith("vla.") and self.vla.adapts(name.removeprefix("vla."))
        )

    def log_shares(self, obs: Obs) -> Tensor:
        """(B, H, A, bins): the log-probability of every token, at the temperature."""
        cond = self.vla.encode(obs)
        x = self.placeholders.expand(len(cond.given), -1, -1)
        hidden = self.vla.model.hidden(x, x.new_ones(len(x)), cond)
        logits = self.head(hidden).unflatten(2, (self.spec.action.dim, self.config.bins))
        return F.log_softmax(logits.float() / self.config.temperature, -1)

    def act(
        self,
        obs: Obs,
        *,
        noise: Tensor | None = None,
        prefix: Prefix | None = None,
        greedy: bool = False,
        generator: Noise | None = None,
    ) -> Tensor:
        shares = self.log_shares(obs)
        start = start_noise(self.spec, shares, noise, False, generator)
        token = shares.argmax(-1) if greedy and noise is None else drawn(shares, start)
        return with_prefix(action_of(token, self.config.bins), prefix)

    def draw(self, obs: Obs, *, generator: Noise | None = None) -> Draw:
        shares = self.log_shares(obs)
        token = drawn(shares, start_noise(self.spec, shares, None, False, generator))
        steps = torch.full((len(token),), self.spec.execute, device=token.device)
        return Draw(action_of(token, self.config.bins), token, self._evidence(shares, token, steps))

    def log_prob(self, obs: Obs, trace: Tensor, steps: Tensor) -> Tensor:
        """(B, 1), or (B, n) with a factor for each action; 0 where an action was not executed."""
        return self._evidence(self.log_shares(obs), trace, steps)

    def _evidence(self, shares: Tensor, token: Tensor, steps: Tensor) -> Tensor:
        check(steps, "B", check(token, "B H A"))
        each = self.spec.executed(shares.gather(-1, token[..., None])[..., 0]).sum(2)
        executed = torch.arange(self.spec.execute, device=steps.device) < steps[:, None]
        each = each * executed
        return each.sum(1, keepdim=True) if self.config.factor is Factor.chunk else each

    def bc_loss(
        self,
        obs: Obs,
        action: Tensor,
        *,
        mask: Tensor | None = None,
        drop: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """(B,): the cross-entropy of the tokens of ``action``."""
        del drop, generator  # there are no goals, and nothing is drawn
        require_chunk(self.spec, action, len(next(iter(obs.values()))))
        token = token_of(action, self.config.bins)
        return masked_mean(-self.log_shares(obs).gather(-1, token[..., None])[..., 0], mask)


def drawn(shares: Tensor, noise: Tensor) -> Tensor:
    """A token for each row of log-probabilities (..., bins), by the inverse of their distribution at standard normals
    (...), so that a higher number is a higher action."""
    total = shares.double().exp().cumsum(-1)
    u = torch.special.ndtr(noise.double())[..., None]
    return torch.searchsorted(total, u * total[..., -1:], right=True)[..., 0].clamp(max=shares.shape[-1] - 1)
