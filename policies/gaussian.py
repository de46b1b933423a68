"""Gaussian policy over chunks: one forward pass, one likelihood factor (J = 1), plain or tanh-squashed.

Trained by maximum likelihood or by least squares. With least squares it predicts the *mean* of the demonstrations,
which is the honest baseline for everything generative: where demonstrators pass an obstacle on both sides, the mean
crashes into it. Squashing: u ~ N(mean, std), a = tanh(u), density corrected by log(1 - a^2)
(Haarnoja et al. 2018, arXiv 1801.01290, appendix C).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .chain import drop_rows, executed_sum, masked_mean, require_chunk, start_noise, with_prefix
from .core.errors import BurnishError
from .core.ranges import check_ranges
from .core.seed import Generator, Noise
from .core.spec import PolicySpec
from .core.types import Draw, Normal, Obs, Prefix
from .nets.encoder import EncoderConfig, ObsEncoder
from .nets.mlp import MLP, Activation, require_widths


class GaussianLoss(Enum):
    """The losses of imitation: negative log-likelihood, or squared error of the mean."""

    likelihood = "likelihood"
    least_squares = "least_squares"


@dataclass
class GaussianConfig:
    """Settings of a Gaussian policy: layers, squashing, deviation, and loss of imitation."""

    hidden: list[int] = field(default_factory=lambda: [256, 256, 256])  # width of each hidden layer
    squash: bool = False  # a tanh behind the Gaussian, as in SAC
    # bounds on the mean alone, not the distribution, which regression on weighted data asks for
    tanh_mean: bool = False
    loss: GaussianLoss = GaussianLoss.likelihood  # loss of imitation: likelihood or squared error
    state_dependent_std: bool = False  # the deviation is an output of the network
    init_std: float = 0.3  # deviation at the start
    min_std: float = 0.01  # least deviation
    # Not null: the spread is exp(log std), clamped to these bounds of log std, as in SAC; init_std is where it starts.
    log_std_bounds: list[float] | None = None
    activation: Activation = Activation.silu  # activation between layers
    layer_norm: bool = False  # layer normalisation behind each hidden layer
    zero_last: bool = False  # begin with a mean of exactly 0: a correction that corrects nothing yet
    goal_drop: float = 0.0  # share of training rows whose goal is hidden
    encoder: EncoderConfig = field(default_factory=EncoderConfig)  # encoder of observations

    def __post_init__(self) -> None:
        require_widths("policy.hidden", self.hidden)
        if not 0 < self.min_std < self.init_std:
            raise BurnishError(f"policy.min_std={self.min_std} must lie between 0 and policy.init_std={self.init_std}")
        check_ranges(self, {"[0, 1)": "goal_drop"}, "policy.")
        if self.squash and self.tanh_mean:
            raise BurnishError("policy.squash and policy.tanh_mean bound the action twice; choose one of them")
        bounds = self.log_std_bounds
        if bounds is not None and (len(bounds) != 2 or not bounds[0] < bounds[1]):
            raise BurnishError(f"policy.log_std_bounds={bounds} must be two numbers, the lower first, or null")


class GaussianPolicy(nn.Module):
    """The Gaussian policy: one pass of a network to the mean and deviation of a whole chunk."""

    def __init__(self, spec: PolicySpec, config: GaussianConfig) -> None:
        super().__init__()
        self.spec = replace(spec, noise_shape=spec.chunk_shape, goal_free=config.goal_drop > 0)
        self.config = config
        self.encoder = ObsEncoder(spec, config.encoder)
        if config.goal_drop > 0 and not self.encoder.goal_keys:
            raise BurnishError(f"goal_drop={config.goal_drop} hides the goal, but the policy observes none")
        size = math.prod(spec.chunk_shape)
        self.trunk = MLP(
            self.encoder.dim,
            2 * size if config.state_dependent_std else size,
            config.hidden,
            activation=config.activation,
            layer_norm=config.layer_norm,
            zero_last=config.zero_last,
        )
        # A spread per state comes from a head that has a bias: this would be a second one, of twice the learning rate.
        self.raw_std = nn.Parameter(torch.zeros(spec.chunk_shape), requires_grad=not config.state_dependent_std)
        self.coordinates, self.transitions = torch.tensor([float(spec.execute * spec.action.dim)]), torch.ones(1)

    def law(self, obs: Obs, *, drop: Tensor | None = None, augment: Generator | None = None) -> Normal:
        """The Gaussian over u (B, H, A), before any squashing."""
        out = self.trunk(self.encoder(obs, drop=drop, augment=augment))
        raw = self.raw_std
        if self.config.state_dependent_std:
            out, head = out.chunk(2, -1)
            raw = raw + head.view(-1, *self.spec.chunk_shape)
        if self.config.tanh_mean:
            out = torch.tanh(out)
        if self.config.log_std_bounds is not None:
            low, high = self.config.log_std_bounds
            log_std = (raw + math.log(self.config.init_std)).clamp(low, high)
            return Normal(out.view(-1, *self.spec.chunk_shape), log_std.exp())
        # softplus is exactly init_std at raw = 0, and never falls below min_std.
        spread = self.config.init_std - self.config.min_std
        std = self.config.min_std + F.softplus(raw + math.log(math.expm1(spread)))
        return Normal(out.view(-1, *self.spec.chunk_shape), std)

    def _played(self, u: Tensor) -> Tensor:
        """The action that is played: in [-1, 1], where a tanh already is."""
        return torch.tanh(u) if self.config.squash else u.clamp(-1, 1)

    def act(
        self,
        obs: Obs,
        *,
        noise: Tensor | None = None,
        prefix: Prefix | None = None,
        greedy: bool = False,
        generator: Noise | None = None,
    ) -> Tensor:
        # Least squares learns a mean and no spread, so such a policy acts by its mean unless noise is asked for.
        mean_only = greedy or (self.config.loss is GaussianLoss.least_squares and noise is None)
        law = self.law(obs)
        u = law.sample(start_noise(self.spec, law.mean, noise, mean_only, generator))
        return with_prefix(self._played(u), prefix)

    def draw(self, obs: Obs, *, generator: Noise | None = None) -> Draw:
        """The trace is u itself, unclamped, so that the likelihood is that of what was drawn. It explores with
        ``std``, also after least squares, which leaves it at ``init_std``."""
        law = self.law(obs)
        u = law.sample(start_noise(self.spec, law.mean, None, False, generator))
        return Draw(self._played(u), u, self.spec.executed(self._log_density(law, u)).sum((1, 2))[:, None])

    def log_prob(self, obs: Obs, trace: Tensor, steps: Tensor) -> Tensor:
        """(B, 1): summed over the coordinates that were really executed."""
        return executed_sum(self.spec, self._log_density(self.law(obs), trace), steps)[:, None]

    def _log_density(self, law: Normal, u: Tensor) -> Tensor:
        density = law.log_prob(u)
        if self.config.squash:
            # log(1 - tanh(u)^2), in the form that does not cancel for large |u|.
            density = density - 2 * (math.log(2) - u - F.softplus(-2 * u))
        return density

    def bc_loss(
        self,
        obs: Obs,
        action: Tensor,
        *,
        mask: Tensor | None = None,
        drop: Tensor | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        require_chunk(self.spec, action, len(next(iter(obs.values()))))
        if drop is None and self.training:
            drop = drop_rows(self.config.goal_drop, len(action), generator, action.device)
        law = self.law(obs, drop=drop, augment=generator if self.training else None)
        if self.config.loss is GaussianLoss.least_squares:
            mean = torch.tanh(law.mean) if self.config.squash else law.mean
            return masked_mean((mean - action).square(), mask)
        # Demonstrations touch the limits, where atanh is infinite; the margin costs 3 units of u at most.
        u = torch.atanh(action.clamp(-1 + 1e-3, 1 - 1e-3)) if self.config.squash else action
        return masked_mean(-self._log_density(law, u), mask)
