"""The Gaussian kernels of diffusion are those of diffusers, at every step; grids and schedules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from burnish.policies.chain import step_index
from burnish.policies.core.seed import generator
from burnish.policies.diffusion import (
    DiffusionConfig,
    DiffusionPolicy,
    Prediction,
    Sampler,
    Schedule,
    Spacing,
    training_levels,
)
from burnish.policies.nets.denoiser import Cond
from burnish.policies.schedule import train_indices
from diffusion_lab import ACTION, HORIZON, make_policy, observe

DIFFUSERS_NAME = {Prediction.eps: "epsilon", Prediction.sample: "sample", Prediction.v: "v_prediction"}


class Fixed(nn.Module):
    """Stands in for the network and says what it was given."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def encode(self, obs: dict[str, Tensor]) -> Cond:
        return Cond(obs["state"])

    def forward(self, x: Tensor, times: Tensor, cond: Cond) -> Tensor:
        return self.output


def chunks(seed: int, batch: int = 3) -> tuple[Tensor, Tensor]:
    """A state and a network output, wide enough for the clip to act."""
    made = generator(seed, "parity")
    shape = (batch, HORIZON, ACTION)
    return tuple(1.5 * torch.randn(shape, generator=made, dtype=torch.float64) for _ in range(2))  # type: ignore


def reference(kind: type, policy: DiffusionPolicy, **fields: object):
    config = policy.config
    fields |= {"clip_sample": config.clip is not None, "clip_sample_range": config.clip or 1.0}
    made = kind(
        config.train_steps,
        beta_schedule="squaredcos_cap_v2",
        prediction_type=DIFFUSERS_NAME[config.prediction],
        timestep_spacing=config.spacing.value,
        **fields,
    )
    made.alphas_cumprod = made.alphas_cumprod.double()
    return made


@pytest.mark.parametrize("prediction", Prediction)
@pytest.mark.parametrize("clip", [None, 0.8])
@pytest.mark.parametrize(("steps", "spacing"), [(100, "leading"), (10, "leading"), (10, "trailing"), (7, "leading")])
def test_ddpm_kernel_is_that_of_diffusers(float64, prediction, clip, steps, spacing):
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

    policy = make_policy(sampler=Sampler.ddpm, steps=steps, spacing=Spacing(spacing), prediction=prediction, clip=clip)
    scheduler = reference(DDPMScheduler, policy, variance_type="fixed_small")
    if 100 % steps == 0:
        scheduler.set_timesteps(steps)
        assert scheduler.timesteps.tolist() == policy.indices.tolist()
    else:
        scheduler.set_timesteps(timesteps=policy.indices.tolist())
    for k, index in enumerate(policy.indices.tolist()):
        x, output = chunks(k)
        policy.net = Fixed(output)  # type: ignore[assignment]
        law = policy.transition(x, step_index(x, k), policy.encode(observe(3)))
        # Two draws of known noise pin down the mean and the standard deviation.
        for seed in (0, 1):
            stepped = scheduler.step(output, index, x, generator=torch.Generator().manual_seed(seed)).prev_sample
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
            # The weights are of order 1e3 at the capped level, so this is 1e-12 of what is added up.
            torch.testing.assert_close(law.sample(noise), stepped, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prediction", Prediction)
@pytest.mark.parametrize("clip", [None, 0.8])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("steps", "spacing"), [(100, "leading"), (10, "leading"), (10, "trailing")])
def test_ddim_kernel_is_that_of_diffusers(float64, prediction, clip, eta, steps, spacing):
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

    policy = make_policy(eta=eta, steps=steps, spacing=Spacing(spacing), prediction=prediction, clip=clip)
    scheduler = reference(DDIMScheduler, policy)
    scheduler.set_timesteps(steps)
    assert scheduler.timesteps.tolist() == policy.indices.tolist()
    largest = 0.0
    for k, index in enumerate(scheduler.timesteps.tolist()):
        x, output = chunks(k)
        policy.net = Fixed(output)  # type: ignore[assignment]
        law = policy.transition(x, step_index(x, k), policy.encode(observe(3)))
        for noise in (torch.zeros_like(x), torch.ones_like(x)):

            def step(clipped: bool, noise=noise, output=output, index=index, x=x) -> Tensor:
                return scheduler.step(
                    output, index, x, eta=eta, use_clipped_model_output=clipped, variance_noise=noise
                ).prev_sample

            torch.testing.assert_close(law.sample(noise), step(True), rtol=1e-9, atol=1e-9)
            largest = max(largest, float((law.sample(noise) - step(False)).abs().max()))
    # Control: where the clip acts, keeping the old noise would be another law; where there is none, the same.
    assert (largest > 0.1) == (clip is not None)


def test_kernel_in_float32_is_close_to_float64():
    """The tables are made in float64; what remains is the rounding of sqrt(1 - level) near clean, about 1e-4."""
    coarse = make_policy(sampler=Sampler.ddpm, steps=100, prediction=Prediction.v)
    torch.set_default_dtype(torch.float64)
    try:
        fine = make_policy(sampler=Sampler.ddpm, steps=100, prediction=Prediction.v)
    finally:
        torch.set_default_dtype(torch.float32)
    assert coarse.weights.dtype is torch.float32 and fine.weights.dtype is torch.float64
    torch.testing.assert_close(coarse.weights.double(), fine.weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("schedule", Schedule)
def test_every_schedule_runs_from_clean_to_noise(schedule):
    levels = training_levels(DiffusionConfig(schedule=schedule))
    assert (levels.diff() < 0).all() and levels[0] > 0.99
    assert levels[-1] < 0.01  # at diffusers' own betas, made for 1000 levels, `linear` would end at 0.36


def test_rows_may_stand_at_different_steps():
    policy = make_policy(eta=0.5)
    obs, x = observe(10), torch.randn(10, HORIZON, ACTION, generator=generator(0))
    cond = policy.encode(obs)
    k = torch.arange(10).flip(0)
    law = policy.transition(x, k, cond)
    for row in range(10):
        alone = policy.transition(x[row : row + 1], k[row : row + 1], Cond(cond.given[row : row + 1]))
        torch.testing.assert_close(law.mean[row : row + 1], alone.mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(law.std[row : row + 1], alone.std)


def test_grids():
    assert train_indices(10, 3, Spacing.leading).tolist() == [6, 3, 0]
    assert train_indices(10, 3, Spacing.trailing).tolist() == [9, 6, 2]
    for spacing in Spacing:
        assert train_indices(100, 100, spacing).tolist() == list(range(99, -1, -1))
        for steps in range(1, 101):
            grid = train_indices(100, steps, spacing)
            assert len(grid) == steps and (grid.diff() < 0).all() and grid[-1] >= 0 and grid[0] < 100
            assert spacing is not Spacing.trailing or grid[0] == 99
    assert train_indices(100, 60, Spacing.leading)[0] == 98
    assert train_indices(100, 60, Spacing.whole)[0] == 59  # 100 / 60 is truncated first
