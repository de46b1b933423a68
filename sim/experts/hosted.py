"""Experts that live beside the environments of other packages, in their workers, and the errors that they are given.

An expert is a callable of one environment; its result has ``reset(obs, info)`` and ``act(obs, info)``, in the units of
the environment. `external/` has experts for some packages. Errors are made here, on actions in [-1, 1], so that any
expert can be imperfect: new ones in each step are averaged away by imitation, one that is always the same is learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...policies.core.errors import BurnishError, did_you_mean
from ...policies.core.ranges import check_ranges
from ...policies.core.scale import Scale
from ...policies.core.seed import generator, normal
from ...policies.core.types import Obs
from ..external.worlds import ExternalEnv
from ..torch_world import Clock, restored

USUAL = "burnish.sim.experts.external:make"  # chooses by the package of the environment
PAUSE = 5  # steps of a pause, on average


@dataclass
class Errors:
    noise: float = 0.0  # standard deviation of an error that is new in each step, where actions lie in [-1, 1]
    bias: float = (
        0.0  # size of an error that is the same in every step of every episode; its direction follows from seed
    )
    hesitation: float = 0.0  # share of the steps in which the hand pauses

    def __post_init__(self) -> None:
        check_ranges(self, {"[0, inf)": "noise bias", "[0, 1)": "hesitation"}, "errors.")


LEVELS = {
    "clean": Errors(),
    "noisy": Errors(noise=0.3),
    "clumsy": Errors(noise=0.1, bias=0.2, hesitation=0.1),
}


def hosted_expert(env: ExternalEnv, name: str, errors: Errors | None = None, seed: int = 0) -> HostedExpert:
    """``name`` is a level of the expert that Burnish has for the package, or ``module:callable``."""
    if ":" in name:
        return HostedExpert(env, name, errors or Errors(), seed)
    if name not in LEVELS:
        raise BurnishError(
            f"{env.config.id} has no expert {name!r}; {did_you_mean(name, LEVELS)}, or name your own: module:callable"
        )
    given = None if errors in (None, Errors()) else errors
    return HostedExpert(env, USUAL, given or LEVELS[name], seed)


class HostedExpert:
    """A `Controller` of the worlds of ``env``, in [-1, 1]; it must act in step with them. An expert's ``still`` (A,) is
    the action in which its hand rests, NaN where the last action goes on; by default 0, if limits are symmetric."""

    def __init__(self, env: ExternalEnv, expert: str, errors: Errors, seed: int = 0) -> None:
        self.env, self.errors = env, errors
        n, dim = env.num_envs, env.spec.action.dim
        still = env.workers.take_on(expert)
        self._scale = Scale(env.spec.action)
        limits = zip(env.spec.action.low, env.spec.action.high, strict=True)
        still = still or [0.0 if low == -high else float("nan") for low, high in limits]
        self._still = self._scale.to_unit(torch.tensor(still, dtype=torch.float32))
        direction = torch.randn(dim, generator=generator(seed, "bias"))
        self._bias = errors.bias * direction / direction.square().mean().sqrt()
        self._clock = Clock(n, seed)
        self._state = {"pause": torch.zeros(n, dtype=torch.int64), "last": torch.zeros(n, dim)}

    def reset(self, mask: Tensor, seeds: Sequence[int] | None = None) -> None:
        mask = self._clock.begin(mask.cpu(), seeds)
        self._state["pause"] = self._state["pause"].masked_fill(mask, 0)

    def peek(self, obs: Obs) -> Tensor:
        return self._act()[0].to(self.env.device)

    def step(self, obs: Obs) -> Tensor:
        action, self._state["pause"] = self._act()
        self._state["last"] = action
        self._clock.advance()
        return action.to(self.env.device)

    def _act(self) -> tuple[Tensor, Tensor]:
        """(N, A), and the steps for which each hand will go on pausing."""
        right = self._scale.to_unit(self.env.advice().float())
        noise = normal(right.shape, self._clock.noise("error"))
        pause = self._state["pause"]
        begins, length = self._clock.noise("pause").uniform((len(pause), 2)).unbind(1)
        # Pauses of 1 to 2 PAUSE - 1 steps; a pause is left for at least one step, so the share is met on average.
        share = self.errors.hesitation
        start = (pause == 0) & (begins < share / (share + PAUSE * (1 - share)))
        pause = torch.where(start, 1 + (length * (2 * PAUSE - 1)).long(), (pause - 1).clamp(min=0))
        still = torch.where(self._still.isnan(), self._state["last"], self._still)
        moved = right + self._bias + self.errors.noise * noise
        fresh = self._clock.tick[:, None] == 0  # nothing went before
        return torch.where((pause[:, None] > 0) & ~fresh, still, moved).clamp(-1, 1), pause

    def state_dict(self) -> dict[str, Any]:
        return {**self._clock.state_dict(), **{key: x.clone() for key, x in self._state.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._clock.load_state_dict(state)
        self._state = restored(self._state, state)
