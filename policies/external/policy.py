"""A policy that is not ours: anything that can be called with observations and answers with chunks of actions.

A policy of another library, ten lines of NumPy: wrapped in ``CallablePolicy`` they can be evaluated, corrected by
residual methods and, if they take their noise from outside, steered by latent ones. Nothing of them is saved; a
checkpoint that contains one says ``external``, and a program that loads it hands the policy in again. (Those that
settings can name, servers, ONNX files and installed packages, are in the table of `table.py`, and found again by
themselves.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..chain import start_noise, with_prefix
from ..core.errors import BurnishError
from ..core.seed import Noise
from ..core.spec import ObsSpec, PolicySpec
from ..core.types import Obs, Prefix


class CallablePolicy:
    """``fn(obs)`` -> (B, H, A), tensor or NumPy, in [-1, 1]; it is given the keys that ``spec`` names, and no others.

    With ``spec.noise_shape`` it is called as ``fn(obs, noise=)`` with noise (B, *noise_shape) and must draw none of its
    own: then a world's draw belongs to (episode, decision), as with our policies. ``greedy`` is noise 0. Without
    ``noise_shape`` whatever randomness it has is its own, and a ``generator`` does not reach it.
    """

    def __init__(self, fn: Callable[..., Any], spec: PolicySpec) -> None:
        self.fn, self.spec = fn, spec

    def act(
        self,
        obs: Obs,
        *,
        noise: Tensor | None = None,
        prefix: Prefix | None = None,
        greedy: bool = False,
        generator: Noise | None = None,
    ) -> Tensor:
        spec, shapes = self.spec, self.spec.inputs.shapes
        # Only a policy that was trained to act without its goal may be asked without one.
        needed = {k: s for k, s in shapes.items() if k in obs or not (spec.goal_free and k.startswith("goal"))}
        batch = ObsSpec(needed).check(obs)
        seen = {key: obs[key] for key in needed}
        given: dict[str, Tensor] = {}
        like = torch.zeros(batch, device=next(iter(seen.values())).device)
        if spec.noise_shape is not None:
            given["noise"] = start_noise(spec, like, noise, greedy, generator)
        elif noise is not None:
            raise BurnishError("this policy takes no noise: its spec has no noise_shape, so leave noise= out")
        with torch.no_grad():
            answer = self.fn(seen, **given)
        action = checked(answer, (batch, *spec.chunk_shape), like.device, seen).clamp(-1, 1)
        return with_prefix(action, prefix)


def checked(
    answer: Any, expected: tuple[int, ...], device: torch.device | str = "cpu", seen: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Actions that came from outside, as float32, or a refusal: of another shape, or not finite. Where what
    was ``seen`` is not finite, that is the reason."""
    action = torch.as_tensor(answer, dtype=torch.float32, device=device)
    if tuple(action.shape) != expected or not bool(action.isfinite().all()):
        for key, x in (seen or {}).items():
            if not bool(x.isfinite().all()):
                row, *place = (~x.isfinite()).nonzero()[0].tolist()
                raise BurnishError(f"world {row} gave {key!r} that is not finite, first at {place}; mend the world")
        found = f"of shape {tuple(action.shape)}" if tuple(action.shape) != expected else "that are not finite"
        raise BurnishError(f"the external policy answered with actions {found}, but finite {expected} are needed")
    return action
