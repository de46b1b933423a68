"""Experts that live beside the environments of other packages, in their workers, and the errors that they are given.

An expert is a callable of one environment; its result has ``reset(obs, info)`` and ``act(obs, info)``, in the units of
the environment. `external/` has experts for some packages. Errors are made here, on actions in [-1, 1], so that any
expert can be imperfect: new ones in each step are averaged away by imitation, one that is always the same is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policies.core.clock import Clock, restored
from ...policies.core.errors import BurnishError, did_you_mean
from ...policies.core.ranges import check_ranges
from ...policies.core.scale import Scale
from ...policies.core.seed import normal
from ...policies.core.types import Obs
from ..external import experts
from ..external.settings import RemoteConfig
from ..external.worlds import ExternalEnv

USUAL = f"{experts.__name__}:make"  # chooses by the package of the environment
GROUP = "burnish.experts"  # of entry points, by which installed packages announce experts
WAVES = 64  # of which the bias is the sum: enough that it looks alike in all directions


@dataclass
class Errors:
    """Settings of the errors that a hosted expert is given: noise, bias and pauses."""

    noise: float = 0.0  # standard deviation of an error that is new in each step, where actions lie in [-1, 1]
    bias: float = 0.0  # standard deviation, over situations, of an error that is the same in the same situation
    scale: float = 0.3  # change of the observation, in its own units, after which the bias is another
    hesitation: float = 0.0  # probability, in each step, that the hand stops
    pause: float = 4.0  # steps of a stop, on average

    def __post_init__(self) -> None:
        intervals = {"[0, inf)": "noise bias", "(0, inf)": "scale", "[0, 1]": "hesitation", "[1, inf)": "pause"}
        check_ranges(self, intervals, "errors.")


LEVELS = {
    "clean": Errors(),
    "noisy": Errors(noise=0.4),
    "clumsy": Errors(noise=0.1, bias=0.4, hesitation=0.03),
}


class Bias:
    """A smooth random function of the situation, of mean 0 and standard deviation 1: a Gaussian process by random
    Fourier features (Rahimi and Recht 2007). The situation is what is observed and the action that would be right."""

    def __init__(self, size: int, actions: int, scale: float, seed: int) -> None:
        draw = np.random.default_rng([seed, 0xB1A5])
        waves = draw.normal(size=(WAVES, size + actions))
        waves[:, :size] /= scale
        self._waves, self._phases = torch.from_numpy(waves), torch.from_numpy(draw.uniform(0, 2 * np.pi, WAVES))
        self._sizes = torch.from_numpy(draw.normal(size=(actions, WAVES)) * np.sqrt(2 / WAVES))

    def __call__(self, seen: Tensor, action: Tensor) -> Tensor:
        """(N, S), (N, A) -> (N, A)."""
        situation = torch.cat([seen, action], 1).double()
        return (torch.cos(situation @ self._waves.T + self._phases) @ self._sizes.T).float()


def hosted_expert(env: ExternalEnv, name: str, errors: Errors | None = None, seed: int = 0) -> HostedExpert:
    """``name`` is a level of the expert that Burnish has for the package, an entry point of `GROUP`, or
    ``module:callable``. ``errors`` take the place of those of the level."""
    if ":" not in name and name not in LEVELS:
        offered = {entry.name: entry.value for entry in entry_points(group=GROUP)}
        if name not in offered:
            near = did_you_mean(name, [*LEVELS, *offered])
            raise BurnishError(f"{env.config.id} has no expert {name!r}; {near}, or name your own: module:callable")
        name = offered[name]
    level = "clean" if ":" in name else name
    config, usual = env.config, USUAL
    if isinstance(config, RemoteConfig) and config.address is None:  # a Python that may not have us: by the path
        usual = f"{experts.__file__}:make"
    said = env.workers.take_on(name if ":" in name else usual, name)
    changes = (said.get("levels") or {}).get(level, {})
    return HostedExpert(env, errors or replace(LEVELS[level], **changes), said.get("still"), seed)


class HostedExpert:
    """A `Controller` of the worlds of ``env``, in [-1, 1]; it must act in step with them. ``still`` (A,), in actuator
    units, is the action in which the hand rests, NaN where the last one goes on; by default 0, if limits are symmetric.
    """

    def __init__(self, env: ExternalEnv, errors: Errors, still: list[float] | None = None, seed: int = 0) -> None:
        self.env, self.errors = env, errors
        n, dim = env.num_envs, env.spec.action.dim
        self._scale = Scale(env.spec.action)
        limits = zip(env.spec.action.low, env.spec.action.high, strict=True)
        still = still or [0.0 if low == -high else float("nan") for low, high in limits]
        self._still = self._scale.to_unit(torch.tensor(still, dtype=torch.float32))
        shapes = env.spec.obs.shapes
        self._keys = [key for key in ("state", "environment_state", "goal") if key in shapes]
        self._bias = Bias(sum(shapes[key][0] for key in self._keys), dim, errors.scale, seed)
        self._clock = Clock(n, seed)
        self._state = {"pause": torch.zeros(n, dtype=torch.int64), "last": torch.zeros(n, dim)}

    def reset(self, mask: Tensor, seeds: Sequence[int] | None = None) -> None:
        mask = self._clock.begin(mask.cpu(), seeds)
        self._state["pause"] = self._state["pause"].masked_fill(mask, 0)

    def peek(self, obs: Obs) -> Tensor:
        return self._act(obs)[0].to(self.env.device)

    def step(self, obs: Obs) -> Tensor:
        action, self._state["pause"] = self._act(obs)
        self._state["last"] = action
        self._clock.advance()
        return action.to(self.env.device)

    def _act(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """(N, A), and the steps for which each hand will go on pausing."""
        errors, pause = self.errors, self._state["pause"]
        action = self._scale.to_unit(self.env.advice().float())  # also in a pause: a person goes on thinking
        noise = normal(action.shape, self._clock.noise("error"))
        stops, length = self._clock.noise("pause").uniform((len(pause), 2)).unbind(1)
        if errors.bias > 0:
            seen = [obs[key].cpu() for key in self._keys]
            action = action + errors.bias * self._bias(torch.cat([*seen, action[:, :0]], 1), action)
        action = (action + errors.noise * noise).clamp(-1, 1)
        # Lengths are geometric, at least 1.
        drawn = 1 + (length.log() / math.log1p(-1 / errors.pause)).long() if errors.pause > 1 else pause.new_ones(())
        pause = torch.where((pause == 0) & (stops < errors.hesitation), drawn, pause)
        fresh = self._clock.tick[:, None] == 0  # nothing went before
        still = torch.where(self._still.isnan(), torch.where(fresh, action, self._state["last"]), self._still)
        return torch.where(pause[:, None] > 0, still, action), (pause - 1).clamp(min=0)

    def state_dict(self) -> dict[str, Any]:
        return {**self._clock.state_dict(), **{key: x.clone() for key, x in self._state.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._clock.load_state_dict(state)
        self._state = restored(self._state, state)
