"""Submodular rewards: a tick is paid for what it adds to the coverage of its episode.

Prajapat et al. 2024 (submodular reinforcement learning, arXiv 2307.13372). The value of an episode is a set function F
of the states that it visits, with diminishing returns, and a tick earns F(S + s) - F(S), so that the rewards of an
episode add up to F. Here F = log det(I + sum of phi phi') / 2, the information that the states have about a smooth
function (Srinivas et al. 2010, arXiv 0912.3995, equation 3), with random Fourier features phi of a Gaussian kernel
(Rahimi and Recht 2007): a state much nearer than ``radius`` to a visited one adds little, one far from all log(2) / 2.

**Departures.** The paper's gradient is that of REINFORCE on the gains to come; here any method climbs their discounted
sum. As in the paper, the policy does not see what was visited, so the best one may be random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...policies.core.ranges import check_ranges
from ...policies.core.seed import generator as named_generator
from ...policies.core.spec import EnvSpec
from ...policies.core.types import Obs
from .observed import ExploreConfig, Observed


@dataclass
class SubmodularConfig(ExploreConfig):
    """Settings of explore=submodular: what counts as near."""

    radius: float = 0.5  # root mean square distance, in deviations, within which states are alike
    features: int = 64  # random features of a state; the more, the exacter are distances

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, {"(0, inf)": "radius", "[2, inf)": "features"}, "explore.")


def gain(inverse: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
    """The gain (N,) in log det(A) / 2 by features (N, D), and the inverses of A + phi phi', of inverses (N, D, D)."""
    along = (inverse @ feature[..., None])[..., 0]
    left = 1 + (along * feature).sum(1)
    return left.log() / 2, inverse - along[:, :, None] * along[:, None, :] / left[:, None, None]


class Submodular:
    """The coverage of the episode under way in each world, and what a tick adds to it."""

    def __init__(
        self, config: SubmodularConfig, world: EnvSpec, num_envs: int, device: torch.device, seed: int
    ) -> None:
        self.observed, count = Observed(config, world, device), config.features
        dice = named_generator(seed, "features")
        self.direction = torch.randn(len(self.observed), count, generator=dice).to(device) / config.radius
        self.phase = (torch.rand(count, generator=dice) * 2 * math.pi).to(device)
        self.inverse = torch.eye(count, device=device).repeat(num_envs, 1, 1)

    def features(self, raw: Tensor) -> Tensor:
        """(N, D) -> (N, features), whose products are the kernel."""
        turned = (self.observed.scaled(raw) @ self.direction + self.phase).cos()
        return turned * math.sqrt(2 / len(self.phase))

    def begin(self, obs: Obs, mask: Tensor) -> None:
        self.inverse[mask] = torch.eye(len(self.phase), device=mask.device)
        self._visit(self.observed.raw(obs), mask)

    def __call__(self, obs: Obs, action: Tensor, next_obs: Obs, active: Tensor) -> Tensor:
        paid = action.new_zeros(len(action))
        paid[active] = self._visit(self.observed.raw(next_obs), active)
        return paid

    def _visit(self, raw: Tensor, rows: Tensor) -> Tensor:
        self.observed.absorb(raw[rows])
        found, self.inverse[rows] = gain(self.inverse[rows], self.features(raw[rows]))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"inverse": self.inverse, "observed": self.observed.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inverse = state["inverse"].to(self.inverse, copy=True)
        self.observed.load_state_dict(state["observed"])
