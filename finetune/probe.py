"""Can this base be steered by its noise? Asked before a robot spends a day on finding out.

A latent method cannot leave the support of its base: if the noise hardly moves the action, or if the base draws noise
of its own besides, there is nothing to choose. For a few observations the base is asked with many noises, and every
question is asked twice, so that the spread of its actions splits (law of total variance) into what the noise explains
and what is hidden: Var[a | s] = Var_w E[a | s, w] + E_w Var[a | s, w].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..policies.core.errors import BurnishError
from ..policies.core.seed import generator as named_generator
from ..policies.core.tree import index, map_tree
from ..policies.core.types import Obs, Policy

IGNORED = 1e-4  # spread in units of the action range: less than the rounding of bfloat16 networks is no steering
HIDDEN = 0.5  # share of the variance beyond which the base's own noise drowns the agent's
ROWS = 8  # observations of which a base is asked
FAINT = 0.1  # share of the range of the actions that a correction of the usual bound, 0.1, reaches


@dataclass(frozen=True)
class Steerability:
    """Of executed actions, means over observations; the action range is 2."""

    std: Tensor  # (n, A): standard deviation over noise from N(0, I): what the base does by itself
    # (n, A): share of the action range between the extremes over noise uniform in [-bound, bound]: what an agent can
    # ask for
    reach_bound: Tensor
    hidden: float  # share of the variance that the noise does not explain
    bound: float

    @property
    def deterministic(self) -> bool:
        """The same noise twice is the same action, up to rounding."""
        return self.hidden < 1e-3

    @property
    def steerable(self) -> bool:
        return float(self.std.max()) > IGNORED and self.hidden < HIDDEN

    @property
    def faint(self) -> bool:
        """A correction reaches further than the noise."""
        return float(self.reach_bound.mean()) < FAINT

    def sentence(self) -> str:
        where = f"the noise moves an action by {float(self.std.mean()):.3f} (standard deviation, of a range of 2)"
        can = f"noise within {self.bound:g} reaches {float(self.reach_bound.mean()):.0%} of the range"
        own = (
            "same noise, same action" if self.deterministic else f"{self.hidden:.0%} of its spread is noise of its own"
        )
        return f"{where}; {can}; {own}"


@torch.no_grad()
def probe(base: Policy, obs: Obs, *, draws: int = 16, bound: float = 1.5, seed: int = 0) -> Steerability:
    """Two calls of 2 * ``draws`` rows per observation; give it few observations if the base is slow."""
    shape = _noise_shape(base)
    count, device = len(next(iter(obs.values()))), next(iter(obs.values())).device
    source = named_generator(seed, "probe", device=device)
    normal = torch.randn(count, draws, *shape, generator=source, device=device)
    within = bound * (2 * torch.rand(count, draws, *shape, generator=source, device=device) - 1)
    noise = torch.cat([normal, within], 1)
    first, again = (_ask(base, obs, noise, named_generator(seed, "own", i, device=device)) for i in range(2))
    own = (first - again).square().mean() / 2
    # About the mean of each observation, with its one lost degree of freedom.
    variance = first.unflatten(1, (2, draws)).var(2).mean()
    spread, box = first[:, :draws], first[:, draws:]
    return Steerability(
        std=spread.std(1).mean(0),
        reach_bound=((box.amax(1) - box.amin(1)) / 2).mean(0),
        hidden=float((own / variance).clamp(max=1)) if float(variance) > 0 else 0.0,
        bound=bound,
    )


def _ask(base: Policy, obs: Obs, noise: Tensor, source: torch.Generator) -> Tensor:
    """Executed actions (B, M, n, A) for noise (B, M, ...), in one call. ``source`` feeds what noise the base has left
    to draw, if it draws from what it is given."""
    batch, count = noise.shape[:2]
    many = map_tree(lambda x: x.repeat_interleave(count, 0), obs)
    chunk = base.act(many, noise=noise.flatten(0, 1), generator=source)
    return base.spec.executed(chunk).float().unflatten(0, (batch, count))


def _noise_shape(base: Any) -> tuple[int, ...]:
    shape = base.spec.noise_shape
    if shape is None:
        raise BurnishError("this policy takes no noise, so there is nothing to probe")
    return shape


def require_noise(base: Any, method: str = "a latent method") -> None:
    """``noise_shape`` is what a base promises; ``require_steerable`` sees whether it keeps the promise."""
    if not hasattr(base, "act") or getattr(getattr(base, "spec", None), "noise_shape", None) is None:
        raise BurnishError(
            f"{method} chooses the noise of its base, but a {type(base).__name__} takes none; "
            "try method=residual_td3 or method=residual_ppo, which correct its actions"
        )


def require_steerable(base: Any, samples: Obs, *, method: str = "a latent method", bound: float = 1.5) -> Steerability:
    """Probe at most ``ROWS`` of ``samples``, and refuse a base that ignores its noise or drowns it in noise of its
    own."""
    require_noise(base, method)
    found = probe(base, index(samples, slice(0, ROWS)), bound=bound)
    if found.steerable:
        return found
    if found.hidden >= HIDDEN:
        why = f"draws noise of its own, which makes {found.hidden:.0%} of the spread of its actions (use ddim, eta=0)"
    else:
        why = f"ignores its noise: its actions move by {float(found.std.max()):.1g} of a range of 2"
    raise BurnishError(
        f"{method} steers its base by noise, but this base {why}; "
        "try method=residual_td3 or method=residual_ppo, which correct its actions"
    )
