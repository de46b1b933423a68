"""A policy that generates by a Gaussian chain, made trainable in its last K' of K steps: the actor of DPPO.

Ren et al. 2024 (DPPO, arXiv 2409.00588), section 4. The chain is a decision process inside each decision: its state is
(observation, x_k, k), its action x_{k+1}, and every transition is one factor of the likelihood, J = K'.

    k        0 ...... K-K'-1 | K-K' ............ K-1
    law      frozen copy     | trained copy, std >= min_std
    trace                    x_{K-K'}, ..., x_K          (K' + 1 states)

A flow is such a chain too, with transitions of std 0: the floor makes it a policy with a likelihood.

**Departures.** The frozen copy is not asked for steps that the trained copy takes over (published: 3/2 to 2 times the
network calls), and the trained copy is evaluated on all K' transitions in one pass. One floor serves sampler and
density, so that the density is that of what was drawn. The floor, and ``eta`` of DDIM, belong to trained steps alone:
the frozen ones follow the base's own law, so that training meets the states that deployment will meet. Coordinates that
were not executed are left out of the last transition, and of no earlier one: there they steer, through the network,
what is executed (published: the first n of H in every transition, and all n of a chunk that an end cut short).
Published liberties are options, off by default: ``min_logprob_std`` (another floor for the density), ``noise_clip``
(3; limits the standard normals that are drawn) and ``density_clamp`` ([-5, 2]; limits the log-density of a coordinate).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...policies.chain import decoded, executed_sum, state_shape, step_index
from ...policies.core.errors import BurnishError
from ...policies.core.seed import Noise, normal
from ...policies.core.tree import check
from ...policies.core.types import ChainPolicy, Condition, Draw, Normal, Obs
from ...policies.diffusion import DiffusionPolicy, Sampler
from ...policies.split_chain import SplitChain
from ...policies.trainable import TrainableConfig, shared, trainable


class DenoisingActor(nn.Module):
    """A ``StochasticPolicy``. ``base`` itself is left alone: what is not trained is shared with it."""

    coordinates: Tensor
    transitions: Tensor

    def __init__(
        self,
        base: Any,
        trained_steps: int,
        *,
        min_std: float = 0.1,
        min_logprob_std: float | None = None,
        eta: float = 1.0,
        noise_clip: float | None = None,
        density_clamp: Sequence[float] | None = None,
        train: TrainableConfig | None = None,
    ) -> None:
        super().__init__()
        _require_chain(base, trained_steps)
        self.spec, self.num_steps, self.switch = base.spec, base.num_steps, base.num_steps - trained_steps
        self.min_std = min_std
        self.min_logprob_std = min_std if min_logprob_std is None else min_logprob_std
        self.noise_clip = noise_clip
        self.density_clamp = None if density_clamp is None else tuple(density_clamp)
        self._frozen = (shared(base),)  # in a tuple, and so no part of this module: it is not saved with it
        self.trained = _with_eta(trainable(base, train or TrainableConfig()), eta)
        horizon, dim = base.spec.chunk_shape
        counts = [horizon * dim] * (trained_steps - 1) + [base.spec.execute * dim]
        self.register_buffer("coordinates", torch.tensor(counts, dtype=torch.float32), persistent=False)
        self.register_buffer("transitions", torch.ones_like(self.coordinates), persistent=False)

    @property
    def trained_steps(self) -> int:
        return self.num_steps - self.switch

    @property
    def frozen(self) -> Any:
        return self._frozen[0]

    def _apply(self, fn: Any, recurse: bool = True) -> DenoisingActor:
        self.frozen._apply(fn, recurse)  # moves with this module
        return super()._apply(fn, recurse)  # type: ignore[return-value]

    def load_state_dict(self, state: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Older states hold the frozen copy too."""
        own = {name: x for name, x in state.items() if not name.startswith("frozen.")}
        return super().load_state_dict(own, *args, **options)

    def deployed(self) -> Any:
        """The policy to keep: the base's own sampler, with the trained weights. It follows every update of them."""
        trained = _sampled_as(shared(self.trained), self.frozen)
        return trained if self.switch == 0 else SplitChain(self.frozen, trained, self.switch)

    def noisy_base(self) -> ChainPolicy:
        """The frozen weights under the sampler of training: what this actor was before its first update."""
        return _sampled_as(shared(self.frozen), self.trained)

    @torch.no_grad()
    def draw(self, obs: Obs, *, generator: Noise | None = None, last: ChainPolicy | None = None) -> Draw:
        """``last`` takes the place of the trained copy. K network calls."""
        trained: Any = self.trained if last is None else last
        x = self._noise(obs, generator)
        if self.switch > 0:
            cond = self.frozen.encode(obs)
            for k in range(self.switch):
                x = self.frozen.transition(x, step_index(x, k), cond).sample(self._noise(obs, generator))
        cond = trained.encode(obs)
        states, densities = [x], []
        for k in range(self.switch, self.num_steps):
            law = trained.transition(x, step_index(x, k), cond)
            x = self._floored(law, self.min_std).sample(self._noise(obs, generator))
            states.append(x)
            densities.append(self._density(law, x))
        steps = torch.full((len(x),), self.spec.execute, device=x.device)
        return Draw(decoded(self.trained, x), torch.stack(states, 1), self._evidence(torch.stack(densities, 1), steps))

    def log_prob(self, obs: Obs, trace: Tensor, steps: Tensor) -> Tensor:
        """(B, K'): one network pass of B K' rows. The observations are encoded once."""
        count = self.trained_steps
        batch = check(trace, f"B {count + 1} H A")["B"]
        check(steps, f"{batch}")
        x, following, cond = trace[:, :-1], trace[:, 1:], self.trained.encode(obs)
        if isinstance(cond, Condition):
            k = torch.arange(self.switch, self.num_steps, device=trace.device).repeat(batch)
            law = self.trained.transition(x.flatten(0, 1), k, cond.repeat(count))
            density = self._density(law, following.flatten(0, 1)).unflatten(0, (batch, count))
        else:
            # The encoding of an observation by another policy need not have rows, so its transitions go one by one.
            laws = [self.trained.transition(x[:, j], step_index(trace, self.switch + j), cond) for j in range(count)]
            density = torch.stack([self._density(law, following[:, j]) for j, law in enumerate(laws)], 1)
        return self._evidence(density, steps)

    def _noise(self, obs: Obs, generator: Noise | None) -> Tensor:
        like, weight = next(iter(obs.values())), next(p for p in self.parameters() if p.requires_grad)
        shape = (len(like), *state_shape(self.spec))
        noise = normal(shape, generator, device=like.device, dtype=weight.dtype)
        return noise if self.noise_clip is None else noise.clamp(-self.noise_clip, self.noise_clip)

    def _floored(self, law: Normal, floor: float) -> Normal:
        """Padding, where a model pads its actions, gets no noise."""
        real = torch.arange(law.mean.shape[-1], device=law.mean.device) < self.spec.action.dim
        return Normal(law.mean, law.std.clamp(min=floor * real))

    def _density(self, law: Normal, x: Tensor) -> Tensor:
        """Elementwise, of the coordinates that are no padding."""
        floored, dim = self._floored(law, self.min_logprob_std), self.spec.action.dim
        density = Normal(floored.mean[..., :dim], floored.std[..., :dim]).log_prob(x[..., :dim])
        return density if self.density_clamp is None else density.clamp(*self.density_clamp)

    def _evidence(self, density: Tensor, steps: Tensor) -> Tensor:
        """(B, K', H, A) -> (B, K'): sums over coordinates; of the last transition, over the executed ones."""
        last = executed_sum(self.spec, density[:, -1], steps)
        return torch.cat([density[:, :-1].sum((2, 3)), last[:, None]], 1)


def sampled_by_ddim(policy: Any) -> list[DiffusionPolicy]:
    """The parts of a policy whose share of injected noise, eta, can be chosen."""
    parts = policy.modules() if isinstance(policy, nn.Module) else ()
    return [x for x in parts if isinstance(x, DiffusionPolicy) and x.config.sampler is Sampler.ddim]


def _with_eta(policy: Any, eta: float) -> Any:
    """DDIM with another share of injected noise; other policies as they are."""
    for part in sampled_by_ddim(policy):
        part.config = replace(part.config, eta=eta)
        part.num_steps = part.config.steps  # which tabulates the chain anew
    return policy


def _sampled_as(policy: nn.Module, other: nn.Module) -> Any:
    """``policy`` with the sampler of ``other``."""
    pairs = ([x for x in chain.modules() if isinstance(x, DiffusionPolicy)] for chain in (policy, other))
    for part, like in zip(*pairs, strict=True):
        part.config = like.config
        part.num_steps = part.config.steps  # which tabulates the chain anew
    return policy


def _require_chain(base: Any, trained_steps: int) -> None:
    parts: list[nn.Module] = [*base.modules()] if isinstance(base, nn.Module) else []
    if not parts or not (hasattr(base, "transition") and hasattr(base, "num_steps")):
        raise BurnishError(
            f"DPPO trains the generation steps of its base, but {type(base).__name__} does not show any: it needs a "
            "torch module with transition and num_steps, such as a flow or diffusion policy. A base that can only act "
            "is refined by a residual method or by one that chooses its noise"
        )
    for part in parts:
        if isinstance(part, DiffusionPolicy) and not part.config.gaussian_chain:
            raise BurnishError(
                f"DPPO needs the likelihood of a Gaussian chain, which sampler={part.config.sampler.value} is not; "
                "load the base with sampler=ddim or sampler=ddpm"
            )
    chain: Any = base
    steps = chain.num_steps
    if not 1 <= trained_steps <= steps:
        raise BurnishError(
            f"trained_steps={trained_steps} must lie between 1 and the {steps} generation steps of the base; "
            "change it, or load the base with more steps (policy.steps=...)"
        )
