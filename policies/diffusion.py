"""Diffusion policy: the action chunk is denoised out of Gaussian noise (Chi et al. 2023, arXiv 2303.04137).

Training is that of DDPM (Ho et al. 2020, arXiv 2006.11239); acting follows one of four samplers over K of the T
training levels. ``ddpm`` and ``ddim`` (Song et al. 2021, arXiv 2010.02502) are Gaussian chains and can be refined
through their likelihood; ``heun`` (Karras et al. 2022, arXiv 2206.00364) and ``dpm`` (DPM-Solver++, Lu et al. 2022,
arXiv 2211.01095) solve the same ODE to second order and only act. The schedules and the two solvers are those of
diffusers; the chain's kernels are ours, vectorised over steps, and tested against its schedulers.

One grid everywhere: the network is told (index + 1) / T (`DiffusionPolicy.time`), in training and in every sampler.

**Departures.** After clipping the clean action the noise is derived again, as DPPO does (Ren et al. 2024, arXiv
2409.00588), so that mean and state stay consistent. The linear schedules are stretched by 1000 / T: with the published
betas, made for T = 1000, a hundred steps would end at a signal of 0.6 and sampling from N(0, I) would be wrong. The
network predicts the clean action by default, not the noise: in few steps fewer draws then fall between the modes of
low-dimensional data, which is the failure that matters here; the price is modes a little narrower than they are. The
solvers take levels that are equidistant in log sigma, from sigma = 20 down: the capped end of the cosine schedule
(sigma 64, then 2029) ruins a second-order step. tests/test_samplers.py bounds the errors with the exact score.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from .chain import (
    Stage,
    committed,
    masked_mean,
    pin_prefix,
    pull_prefix,
    put,
    require_prefix,
    require_steps,
    sample_chain,
    start_noise,
)
from .core.errors import BurnishError
from .core.seed import Generator, Noise, integers, normal
from .core.spec import PolicySpec
from .core.time_limit import go_on
from .core.tree import rows
from .core.types import ActOptions, Masked, Normal, Obs, Prefix, Pull
from .nets.denoiser import Cond, Denoiser, DenoiserConfig
from .schedule import Prediction, Spacing, clean_weights, kernel, noisy, target, train_indices

SOLVER_MAX_SIGMA = 20.0
MOST_LEVELS = 10_000  # noise levels in training, of which tables are made


class Sampler(Enum):
    """The ways to generate an action: DDPM, DDIM, Heun's method or DPM-Solver++."""

    ddpm = "ddpm"
    ddim = "ddim"
    heun = "heun"
    dpm = "dpm"


class Schedule(Enum):
    """The courses of the noise over the levels of training."""

    cosine = "cosine"
    linear = "linear"
    scaled_linear = "scaled_linear"


@dataclass
class DiffusionConfig:
    """Settings of a diffusion policy: noise levels, sampler, prediction and network."""

    train_steps: int = 100  # T, noise levels in training
    steps: int = 10  # K, levels visited when acting; heun calls the network 2 K - 1 times, the others K times
    sampler: Sampler = Sampler.ddim  # sampler that generates actions
    eta: float = 0.0  # share of the DDPM noise that ddim injects
    spacing: Spacing = Spacing.leading  # spacing of the levels of ddpm and ddim; the solvers space in log sigma
    prediction: Prediction = Prediction.sample  # quantity that the network predicts
    schedule: Schedule = Schedule.cosine  # schedule of the noise levels
    clip: float | None = 1.0  # limit of the predicted clean action
    net: DenoiserConfig = field(default_factory=DenoiserConfig)  # the denoising network

    def __post_init__(self) -> None:
        require_steps(self.steps)
        if self.train_steps > MOST_LEVELS:
            raise BurnishError(f"policy.train_steps={self.train_steps} must be at most {MOST_LEVELS}")
        if not self.steps <= self.train_steps:
            raise BurnishError(
                f"policy.steps={self.steps} must lie between 1 and policy.train_steps={self.train_steps}"
            )
        if not self.gaussian_chain and self.steps < 3:
            raise BurnishError(
                f"policy.sampler={self.sampler.value} is of second order and needs policy.steps of 3 or more, "
                f"got {self.steps}; take sampler=ddim for fewer"
            )
        if self.steps == 1 < self.train_steps and self.gaussian_chain and self.spacing is not Spacing.trailing:
            raise BurnishError(
                f"policy.steps=1 with spacing={self.spacing.value} would visit the cleanest level alone and return "
                "noise; take spacing=trailing or more steps"
            )
        if not 0 <= self.eta <= 1:
            raise BurnishError(f"policy.eta={self.eta} must lie between 0 (deterministic) and 1 (as noisy as ddpm)")
        if self.eta > 0 and self.sampler is not Sampler.ddim:
            raise BurnishError(f"policy.eta={self.eta} belongs to sampler=ddim; sampler={self.sampler.value} has none")
        if self.clip is not None and self.clip <= 0:
            raise BurnishError(f"policy.clip={self.clip} must be positive, or null for no clipping")
        if self.schedule is not Schedule.cosine and self.betas()[1] >= 1:
            raise BurnishError(
                f"policy.schedule={self.schedule.value} reaches noise only with policy.train_steps above 20, "
                f"got {self.train_steps}; take more steps or schedule=cosine"
            )

    @property
    def gaussian_chain(self) -> bool:
        return self.sampler in (Sampler.ddpm, Sampler.ddim)

    @property
    def injected(self) -> float:
        """DDPM is DDIM with all of its noise."""
        return 1.0 if self.sampler is Sampler.ddpm else self.eta

    def betas(self) -> tuple[float, float]:
        """The ends of a linear schedule."""
        stretch = 1000 / self.train_steps
        return 1e-4 * stretch, 0.02 * stretch


def training_levels(config: DiffusionConfig) -> Tensor:
    """(T,) float64: the level of each train index, from diffusers."""
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler  # takes two seconds to import

    if config.schedule is Schedule.cosine:
        scheduler = DDPMScheduler(config.train_steps, beta_schedule="squaredcos_cap_v2")
    else:
        first, last = config.betas()
        scheduler = DDPMScheduler(
            config.train_steps, beta_start=first, beta_end=last, beta_schedule=config.schedule.value
        )
    return scheduler.alphas_cumprod.double()


def make_solver(config: DiffusionConfig, levels: Tensor, steps: int) -> Any:
    """A scheduler of diffusers, ready for its first step. It is handed clean actions that are clipped already, so
    that the conversion of predictions is ours alone."""
    from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
    from diffusers.schedulers.scheduling_heun_discrete import HeunDiscreteScheduler

    kind = HeunDiscreteScheduler if config.sampler is Sampler.heun else DPMSolverMultistepScheduler
    usable = levels[(1 - levels) / levels <= SOLVER_MAX_SIGMA**2]
    betas = 1 - usable / torch.cat([usable.new_ones(1), usable[:-1]])
    solver = kind(
        num_train_timesteps=len(betas),
        trained_betas=betas.numpy(),
        prediction_type="sample",
        use_exponential_sigmas=True,
    )
    solver.set_timesteps(steps)
    solver.set_begin_index(0)
    return solver


class DiffusionPolicy(nn.Module):
    """The diffusion policy, whose K steps of generation are a chain of Gaussians (``chain.py``)."""

    levels: Tensor  # (T,) of the train indices
    indices: Tensor  # (K,) train indices that the chain visits
    visited: Tensor  # (K + 1,) levels of the states of the chain; the last is clean
    weights: Tensor  # (K, 5): clean from x and output; next mean from clean and x; std

    def __init__(self, spec: PolicySpec, config: DiffusionConfig) -> None:
        super().__init__()
        self.config = config
        self.net = self.network(spec, config)
        self.spec = replace(spec, noise_shape=spec.chunk_shape, goal_free=self.net.goal_drop > 0)
        # The tables follow from the configuration, so none of them goes into a checkpoint.
        with torch.device("cpu"):  # numbers, also where a network is asked for its shapes alone
            self.register_buffer("levels", training_levels(config).to(torch.get_default_dtype()), persistent=False)
            self._tabulate(config.steps)

    def network(self, spec: PolicySpec, config: Any) -> Any:
        """The denoiser, with the interface of ``Denoiser``."""
        return Denoiser(spec, config.net)

    def _tabulate(self, steps: int) -> None:
        config, levels = self.config, self.levels.double()
        indices = train_indices(config.train_steps, steps, config.spacing).to(levels.device)
        visited = torch.cat([levels[indices], levels.new_ones(1)])
        weights = clean_weights(config.prediction, visited[:-1])
        law = kernel(visited[:-1], visited[1:], config.injected)
        self.register_buffer("indices", indices, persistent=False)
        self.register_buffer("visited", visited.to(self.levels), persistent=False)
        self.register_buffer("weights", torch.stack([*weights, *law], 1).to(self.levels), persistent=False)
        if not config.gaussian_chain:
            self._solver = make_solver(config, levels.cpu(), steps)
            self._log_sigmas = ((1 - levels) / levels).log().div(2).cpu().numpy()

    @property
    def num_steps(self) -> int:
        return self.config.steps

    @num_steps.setter
    def num_steps(self, steps: int) -> None:
        """Act with another number of steps."""
        self.config = replace(self.config, steps=steps)
        self._tabulate(steps)

    def time(self, index: Tensor) -> Tensor:
        """The one time grid: what the network is told about train index 0..T-1, which may be fractional."""
        return (index.double() + 1) / self.config.train_steps

    def encode(self, obs: Obs) -> Cond:
        return self.net.encode(obs)

    def output(self, x: Tensor, index: Tensor, cond: Cond) -> Tensor:
        return self.net(x, self.time(index).to(x.dtype)[:, None], cond)

    def _clip(self, clean: Tensor) -> Tensor:
        limit = self.config.clip
        return clean if limit is None else clean.clamp(-limit, limit)

    def transition(self, x: Tensor, k: Tensor, cond: Cond) -> Normal:
        """From level ``indices[k]`` to the next cleaner one that is visited, or to clean at k = K - 1."""
        if not self.config.gaussian_chain:
            raise BurnishError(
                f"sampler={self.config.sampler.value} is not a Gaussian chain; "
                "use ddim or ddpm for methods that need the likelihood"
            )
        of_x, of_output, of_clean, of_state, std = self.weights[k, :, None, None].unbind(1)
        clean = self._clip(of_x * x + of_output * self.output(x, self.indices[k], cond))
        return Normal(of_clean * clean + of_state * x, std)

    def act(self, obs: Obs, **how: Unpack[ActOptions]) -> Tensor:
        return self.generate(self.encode(obs), **how)

    def generate(
        self,
        cond: Any,
        *,
        noise: Tensor | None = None,
        prefix: Prefix | None = None,
        greedy: bool = False,
        generator: Noise | None = None,
    ) -> Tensor:
        """A chunk for each row of an encoded observation."""
        x_0 = start_noise(self.spec, cond.given, noise, greedy, generator)
        if not self.config.gaussian_chain:
            if isinstance(prefix, Pull):
                raise BurnishError(
                    f"sampler={self.config.sampler.value} cannot be guided to a prefix, but ddim and ddpm can; take "
                    "one of them, or give actions alone as prefix="
                )
            if prefix is not None:
                require_prefix(prefix, x_0)
            return self._solve(x_0, cond, prefix).clamp(-1, 1)

        def level(known: Tensor, k: int) -> Tensor:
            return noisy(known, x_0[:, : known.shape[1]], self.visited[k])

        pin, guide = pin_prefix(self, committed(prefix), x_0, level), pull_prefix(self, prefix, x_0, self._stage)
        start = x_0 if pin is None else pin(x_0, 0)
        inject = self.config.injected > 0 and not greedy
        states = sample_chain(self, start, cond, generator=generator, inject=inject, pin=pin, guide=guide)
        return states[-1].clamp(-1, 1)

    def _stage(self, k: int) -> Stage:
        level, (_, _, of_clean, of_state, _) = float(self.visited[k]), self.weights[k].tolist()
        return Stage(math.sqrt(level), math.sqrt(1 - level), of_clean, of_state)

    def _solve(self, x_0: Tensor, cond: Cond, prefix: Tensor | Masked | None) -> Tensor:
        """The solver's state is x / sqrt(level) for heun and x for dpm; ``scale_model_input`` makes it x for both."""
        # It keeps a history while it runs, and does not change its tensors.
        solver = deepcopy(self._solver, {id(x): x for x in vars(self._solver).values() if isinstance(x, Tensor)})
        state = x_0 * float(solver.init_noise_sigma)
        # Heun lists its inner levels twice: once to predict, once to correct.
        for sigma, tick in zip(solver.sigmas.tolist(), solver.timesteps, strict=False):
            go_on()
            level = torch.tensor(1 / (1 + sigma**2), dtype=torch.float64)
            x = solver.scale_model_input(state, tick)
            if prefix is not None:
                # Only what the network sees is pinned: the solver's own head is dropped at the end.
                x = put(prefix, x, lambda actions, level=level: noisy(actions, x_0[:, : actions.shape[1]], level))
            index = float(np.interp(math.log(sigma), self._log_sigmas, np.arange(len(self._log_sigmas))))
            output = self.output(x, torch.full((len(x),), index, device=x.device), cond)
            of_x, of_output = (float(weight) for weight in clean_weights(self.config.prediction, level))
            state = solver.step(self._clip(of_x * x + of_output * output), tick, state, return_dict=False)[0]
        return state if prefix is None else put(prefix, state)

    def bc_loss(
        self,
        obs: Obs,
        action: Tensor,
        *,
        mask: Tensor | None = None,
        drop: Tensor | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        cond, batch = self.net.encode_for_loss(obs, action, drop, generator), len(action)
        noise = normal(action.shape, generator, device=action.device, dtype=action.dtype)
        index = integers(0, self.config.train_steps, (batch,), generator, device=action.device)
        level = rows(self.levels[index], action)
        output = self.output(noisy(action, noise, level), index, cond)
        return masked_mean((output - target(self.config.prediction, action, noise, level)).square(), mask)
