"""Sampling from, and the likelihood of, any K-step Gaussian chain x_0 -> x_1 -> ... -> x_K (the action chunk).

Flow policies, DDPM and DDIM are such chains; they differ only in ``transition``. The methods that refine them by
policy gradients (DPPO, Ren et al. 2024, arXiv 2409.00588; ReinFlow, Zhang et al. 2025, arXiv 2505.22094) treat each
transition as a decision, so sampler and density must use one and the same ``transition``: here they do.

Two ways to make a chain continue what was decided before. The committed part is put in at every step (`pin_prefix`)
and holds exactly; but a short prefix says little, so the rest may go elsewhere. A ``Pull`` also guides (`pull_prefix`):
Pi-GDM (Song et al. 2023, "Pseudoinverse-guided diffusion models") as real-time chunking uses it (Black et al. 2025,
arXiv 2506.07339), at the price of a backward pass per step. With x_k = a clean + b noise, the predicted clean chunk
becomes clean + min((a^2 + b^2) / a, limit b) J^T (weights (actions - clean)), where J = d clean / d x_k. For a flow,
a = t and b = 1 - t, that is the published rule; the same serves diffusion.

**Departures.** As published, guidance alone holds the committed actions too, nearly. Here they are put in as well: a
flow with two opinions then changed sides half as often (tests/test_guidance.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .core.errors import BurnishError
from .core.seed import Generator, Noise, normal, uniform
from .core.spec import PolicySpec
from .core.time_limit import go_on
from .core.tree import check, map_tree
from .core.types import ChainPolicy, Masked, Normal, Obs, Prefix, Pull

MOST_STEPS = 1000  # of one generation: as many as diffusion models were first published with

# pin(x_k, k) puts already known actions, at the noise level of step k, back into the state of the chain.
Pin = Callable[[Tensor, int], Tensor]
# guide(x_k, k, cond) is the law of x_{k+1}, in place of the policy's own transition.
Guide = Callable[[Tensor, int, Any], Normal]


class Stage(NamedTuple):
    """Of step k: x_k = signal clean + noise N(0, I), and x_{k+1} = of_clean clean + of_state x_k in the mean."""

    signal: float
    noise: float
    of_clean: float
    of_state: float


def require_steps(steps: int) -> None:
    """A check that the steps of a generation lie between 1 and ``MOST_STEPS``; outside, a BurnishError."""
    if not 1 <= steps <= MOST_STEPS:
        raise BurnishError(f"policy.steps={steps} must lie between 1 and {MOST_STEPS}: each is a pass of the network")


def step_index(x: Tensor, k: int) -> Tensor:
    """Step k of the chain for each row of x, int64 of shape (B,)."""
    return torch.full((x.shape[0],), k, dtype=torch.int64, device=x.device)


def sample_chain(
    policy: ChainPolicy,
    x: Tensor,
    cond: Any,
    *,
    generator: Noise | None = None,
    inject: bool = True,
    pin: Pin | None = None,
    guide: Guide | None = None,
) -> list[Tensor]:
    """The K + 1 states of the chain that starts at ``x`` (B, H, A). ``inject=False`` follows the means alone."""
    check(x, "B H A")
    states = [x]
    for k in range(policy.num_steps):
        go_on()
        law = policy.transition(x, step_index(x, k), cond) if guide is None else guide(x, k, cond)
        x = law.sample(normal(x.shape, generator, device=x.device, dtype=x.dtype)) if inject else law.mean
        if pin is not None:
            x = pin(x, k + 1)
        states.append(x)
    return states


def draws(base: Any, obs: Obs, count: int, **options: Any) -> Tensor:
    """(B count, H, A): ``count`` draws of each row, one behind the other. Where the base can, a row is encoded once."""
    if hasattr(base, "generate"):
        return base.generate(base.encode(obs).repeat(count), **options)
    return base.act(map_tree(lambda x: x.repeat_interleave(count, 0), obs), **options)


def masked_mean(error: Tensor, mask: Tensor | None) -> Tensor:
    """(B, H, A) -> (B,): the mean over the real steps of each row; padding has no influence."""
    check(error, "B H A")
    if mask is None:
        return error.mean((1, 2))
    check(mask, f"{error.shape[0]} {error.shape[1]}")
    real = mask.to(error.dtype)
    kept = torch.where(mask, error.mean(2), torch.zeros((), dtype=error.dtype, device=error.device))
    return kept.sum(1) / real.sum(1).clamp(min=1)


def executed_sum(spec: PolicySpec, density: Tensor, steps: Tensor) -> Tensor:
    """(B, H, A) -> (B,): the sum over the actions that were really executed, the first ``steps`` of the slice."""
    check(steps, "B", check(density, "B H A"))
    executed = torch.arange(spec.execute, device=density.device) < steps[:, None]
    return (spec.executed(density) * executed[:, :, None]).sum((1, 2))


def require_prefix(prefix: Tensor | Masked, like: Tensor) -> None:
    """A prefix (B, p, A) must be the head of a chunk like ``like`` (B, H, A)."""
    prefix = prefix.actions if isinstance(prefix, Masked) else prefix
    batch, horizon, dim = like.shape
    if prefix.ndim != 3 or (prefix.shape[0], prefix.shape[2]) != (batch, dim) or prefix.shape[1] > horizon:
        raise BurnishError(
            f"the prefix has shape {tuple(prefix.shape)}, but ({batch}, p, {dim}) with p of at most {horizon} is needed"
        )


def with_prefix(action: Tensor, prefix: Prefix | None) -> Tensor:
    """For a policy that is no chain: what is committed stays what it is, and the rest does not heed it."""
    if prefix is None:
        return action
    if isinstance(prefix, Pull):
        raise BurnishError(
            "only flow and diffusion policies of several steps can be guided to a prefix; give actions alone as prefix="
        )
    require_prefix(prefix, action)
    return put(prefix, action)


def committed(prefix: Prefix | None) -> Tensor | Masked | None:
    """The actions of a prefix that are already decided, with their mask if they have one; None without a prefix."""
    return prefix.committed if isinstance(prefix, Pull) else prefix


def with_actions(prefix: Prefix | None, change: Callable[[Tensor], Tensor]) -> Prefix | None:
    """The prefix with its actions changed."""
    if isinstance(prefix, (Pull, Masked)):
        return prefix._replace(actions=change(prefix.actions))
    return None if prefix is None else change(prefix)


def put(prefix: Tensor | Masked, x: Tensor, level: Callable[[Tensor], Tensor] = lambda actions: actions) -> Tensor:
    """``x`` (B, H, A) with the committed actions, as ``level`` makes them look, in the place of its head."""
    if isinstance(prefix, Masked):
        return torch.where(prefix.known, level(prefix.actions), x)
    return torch.cat([level(prefix), x[:, prefix.shape[1] :]], 1)


def pin_prefix(
    policy: ChainPolicy, prefix: Tensor | Masked | None, x_0: Tensor, level: Callable[[Tensor, int], Tensor]
) -> Pin | None:
    """Inpainting: actions that are already committed replace the head of the chunk at every step.

    ``level(prefix, k)`` is the prefix as it looks at step k < K of the chain; at k = K it is the prefix itself.
    """
    if prefix is None:
        return None
    require_prefix(prefix, x_0)

    def pin(x: Tensor, k: int) -> Tensor:
        return put(prefix, x, lambda actions: actions if k == policy.num_steps else level(actions, k))

    return pin


def pull_prefix(policy: ChainPolicy, prefix: Prefix | None, x_0: Tensor, stage: Callable[[int], Stage]) -> Guide | None:
    """Guidance, as the module says. It needs a gradient, and makes one under ``no_grad`` too."""
    if not isinstance(prefix, Pull):
        return None
    actions, weights, limit = prefix
    require_prefix(actions, x_0)
    length = actions.shape[1]
    if weights.shape != (length,) or not limit >= 0 or not bool(((weights >= 0) & (weights <= 1)).all()):
        raise BurnishError(
            f"a pull needs a weight in [0, 1] for each of its {length} actions and a limit of at least 0, got weights "
            f"of shape {tuple(weights.shape)} and limit={limit}"
        )
    if policy.num_steps < 2:
        raise BurnishError("a chain of a single step cannot be guided to a prefix; act with two steps or more")
    if torch.is_inference_mode_enabled():
        raise BurnishError("guidance needs a gradient, which torch.inference_mode forbids; use torch.no_grad")

    def guide(x: Tensor, k: int, cond: Any) -> Normal:
        signal, noise, of_clean, of_state = stage(k)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            law = policy.transition(x, step_index(x, k), cond)
            clean = (law.mean - of_state * x) / of_clean
            error = torch.zeros_like(clean)
            error[:, :length] = weights[:, None] * (actions - clean.detach()[:, :length])
            (gradient,) = torch.autograd.grad(clean, x, error)
        most = limit * noise
        scale = most if signal * most <= signal**2 + noise**2 else (signal**2 + noise**2) / signal
        return Normal(law.mean.detach() + of_clean * scale * gradient, law.std)

    return guide


def require_chunk(spec: PolicySpec, action: Tensor, batch: int) -> None:
    """Training actions must be (B, H, A) exactly: another shape could broadcast into a loss without a word."""
    if tuple(action.shape) != (batch, *spec.chunk_shape):
        raise BurnishError(f"the actions have shape {tuple(action.shape)}, but {(batch, *spec.chunk_shape)} is needed")


def drop_rows(rate: float, batch: int, generator: Generator | None, device: torch.device) -> Tensor | None:
    """The rows of a training batch that lose their goal, for classifier-free guidance."""
    if rate == 0:
        return None
    return uniform((batch,), generator, device=device) < rate


def state_shape(spec: PolicySpec) -> tuple[int, ...]:
    """Of a state of the chain: that of a chunk, but for models that pad their actions."""
    return spec.noise_shape or spec.chunk_shape


def decoded(policy: Any, x: Tensor) -> Tensor:
    """Actions in [-1, 1], of the last state of a chain; a policy whose states are in other units says how."""
    return policy.decode(x) if hasattr(policy, "decode") else x.clamp(-1, 1)


def start_noise(spec: PolicySpec, like: Tensor, noise: Tensor | None, greedy: bool, generator: Noise | None) -> Tensor:
    """The start of a generation: the noise that was asked for, zero if greedy, else drawn. An external policy may take
    noise of another shape than its chunk."""
    shape = (like.shape[0], *state_shape(spec))
    if noise is not None:
        if tuple(noise.shape) != shape:
            raise BurnishError(f"the noise has shape {tuple(noise.shape)}, but {shape} is needed")
        return noise
    if greedy:
        return torch.zeros(shape, device=like.device, dtype=like.dtype)
    return normal(shape, generator, device=like.device, dtype=like.dtype)
