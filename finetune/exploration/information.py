"""Information: a tick is paid for what it says about physical parameters of the world, by a simulation of it.

Optimal experiment design (Chaloner and Verdinelli 1995, "Bayesian experimental design", Statistical Science 10(3)), as
Q-OED (arXiv 2605.12084) brings it into reinforcement learning. Parameters are factors on those of the twin, whose
logarithms phi have a normal prior of deviation ``spread``. Near 1 an observation is o' = f(o, a) + J phi + noise, so a
tick adds J' J / noise^2 to the precision A of phi, and an episode's information about the ``parameters`` is

    (log det A - log det A_nn - the same of the prior) / 2,     n: the ``nuisance`` parameters

which is that of the Schur complement: an action whose effect a nuisance parameter could have had as well says nothing.
A tick earns what it adds. So a policy learns to excite the world where the twin is in doubt, and its episodes tell the
parameters of the real one.

**Departures.** Q-OED pays the trace of the information within the subspace that can be identified. The trace is led by
the direction of the largest scale, again and again; the determinant pays for each as long as it is unknown, and nothing
for a direction that cannot be. The information is that at the twin's own parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges
from ...policies.core.spec import EnvSpec
from ...policies.core.types import Obs, VecEnv
from .observed import ExploreConfig, Observed

STEP = 0.02  # change of a log parameter in central differences; MuJoCo's contacts are not smooth on a smaller scale


@dataclass
class InformationConfig(ExploreConfig):
    """Settings of explore=information: the parameters, and how well the world is seen."""

    parameters: list[str] = field(default_factory=lambda: ["mass"])  # parameters that are to be known
    nuisance: list[str] = field(default_factory=list)  # parameters that are unknown too, but not asked for
    spread: float = 0.2  # deviation of the logarithm of each parameter before anything was seen
    noise: float = 0.01  # deviation of the noise on each number that is seen, in deviations of the number

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, {"(0, inf)": "spread noise"}, "explore.")
        every = [*self.parameters, *self.nuisance]
        if not self.parameters or len(set(every)) < len(every):
            raise BurnishError(
                f"explore.parameters={self.parameters} and explore.nuisance={self.nuisance} must name at least one "
                "parameter that is to be known, and each once"
            )


def information(precision: Tensor, asked: int) -> Tensor:
    """(N, P, P) -> (N,): log det / 2 of the precision of the first ``asked`` parameters, whatever the others are."""
    return (torch.logdet(precision) - torch.logdet(precision[:, asked:, asked:])) / 2


class Information:
    """The precision of the parameters in each world by the episode under way, and what a tick adds to it."""

    def __init__(
        self, config: InformationConfig, world: EnvSpec, num_envs: int, device: torch.device, seed: int, twin: VecEnv
    ) -> None:
        self.config, self.observed = config, Observed(config, world, device)
        self.names = [*config.parameters, *config.nuisance]
        dynamics: Any = getattr(twin, "parametric_dynamics", None)
        if dynamics is None:
            raise BurnishError(
                "this twin cannot be set to what it shows with other parameters; take one such as half_cheetah, hopper "
                "or walker2d, without randomize"
            )
        self.pairs = [[dynamics({name: 1 + sign * STEP}) for sign in (1, -1)] for name in self.names]
        prior = torch.eye(len(self.names), dtype=torch.float64, device=device) / config.spread**2
        self.prior = prior.repeat(num_envs, 1, 1)
        self.precision = self.prior.clone()

    def sensitivity(self, obs: Obs, action: Tensor) -> Tensor:
        """(N, D, P): change of each number, in deviations of its noise, by a unit of each log parameter."""
        each = []
        for pair in self.pairs:
            up, down = (self.observed.raw(known(obs, action)) for known in pair)
            # Scaled vectors are means over numbers, and here each number counts as one.
            moved = (self.observed.scaled(up) - self.observed.scaled(down)) * len(self.observed) ** 0.5
            each.append(moved / (2 * STEP) / self.config.noise)
        return torch.stack(each, -1).double()

    def begin(self, obs: Obs, mask: Tensor) -> None:
        self.observed.absorb(self.observed.raw(obs)[mask])
        self.precision[mask] = self.prior[mask]

    def __call__(self, obs: Obs, action: Tensor, next_obs: Obs, active: Tensor) -> Tensor:
        paid, rows, asked = action.new_zeros(len(action)), active.nonzero()[:, 0], len(self.config.parameters)
        moved = self.sensitivity({key: x[rows] for key, x in obs.items()}, action[rows])
        before = self.precision[rows]
        after = before + moved.mT @ moved
        paid[rows] = (information(after, asked) - information(before, asked)).to(paid)
        self.precision[rows] = after
        self.observed.absorb(self.observed.raw(next_obs)[rows])
        return paid

    def state_dict(self) -> dict[str, Any]:
        return {"precision": self.precision, "observed": self.observed.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.precision = state["precision"].to(self.precision, copy=True)
        self.observed.load_state_dict(state["observed"])
