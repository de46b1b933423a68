"""Diffusion samplers against the closed form of a Gaussian, and the one time grid that all of them share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.policies.chain import step_index
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.seed import generator
from burnish.policies.diffusion import DiffusionPolicy, Prediction, Sampler, Spacing, training_levels
from burnish.policies.schedule import noisy, target
from diffusion_lab import ACTION, HORIZON, Stub, make_policy, observe, stub

MEAN, STD = 0.3, 0.2


def exact_gaussian(policy: DiffusionPolicy) -> Stub:
    """The perfect network for actions from N(MEAN, STD^2), which reads the noise level off the time it is told."""
    log_sigmas = ((1 - policy.levels) / policy.levels).log().numpy() / 2

    def answer(x: Tensor, times: Tensor) -> Tensor:
        index = times.numpy() * policy.config.train_steps - 1
        sigma = torch.from_numpy(np.exp(np.interp(index, np.arange(len(log_sigmas)), log_sigmas)))[:, :, None]
        level = 1 / (1 + sigma**2)
        clean = MEAN + STD**2 * level.sqrt() / (level * STD**2 + 1 - level) * (x - level.sqrt() * MEAN)
        noise = (x - level.sqrt() * clean) / (1 - level).sqrt()
        return target(policy.config.prediction, clean, noise, level)

    return stub(policy, answer)


def draw(policy: DiffusionPolicy, rows: int = 2000) -> tuple[Tensor, Tensor]:
    x_0 = torch.randn(rows, HORIZON, ACTION, generator=generator(1))
    return x_0, policy.act(observe(rows), noise=x_0, generator=generator(2))


@pytest.mark.parametrize("prediction", Prediction)
@pytest.mark.parametrize(
    ("sampler", "spacing", "bound"),
    # Root mean square errors at 10 steps, of another implementation with the exact score of N(0.5, 0.2^2), times 1.3.
    [("ddim", "leading", 0.059), ("ddim", "trailing", 0.078), ("heun", "leading", 0.022), ("dpm", "leading", 0.012)],
)
def test_few_steps_carry_noise_to_the_gaussian(float64, prediction, sampler, spacing, bound):
    """The exact map of the probability-flow ODE from N(0, 1) to N(m, s^2) is x -> m + s x."""
    errors = []
    for steps in (5, 10, 40):
        policy = make_policy(sampler=Sampler(sampler), spacing=Spacing(spacing), steps=steps, prediction=prediction)
        exact_gaussian(policy)
        x_0, action = draw(policy)
        errors.append(float((action - (MEAN + STD * x_0)).square().mean().sqrt()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[1] < bound
    assert errors[2] < 0.02


def gaussian_after_chain(levels: np.ndarray, eta: float) -> tuple[float, float]:
    """Mean and standard deviation of what the exact network draws, by equation 12 of Song et al. in full."""
    mean, variance = 0.0, 1.0
    for level, following in zip(levels, [*levels[1:], 1.0], strict=True):
        sigma = eta * np.sqrt((1 - following) / (1 - level) * (1 - level / following))
        # clean = intercept + slope x, noise = (x - sqrt(level) clean) / sqrt(1 - level)
        slope = STD**2 * np.sqrt(level) / (level * STD**2 + 1 - level)
        intercept = MEAN - slope * np.sqrt(level) * MEAN
        direction = np.sqrt(max(1 - following - sigma**2, 0.0))
        gain = np.sqrt(following) * slope + direction * (1 - np.sqrt(level) * slope) / np.sqrt(1 - level)
        offset = np.sqrt(following) * intercept - direction * np.sqrt(level) * intercept / np.sqrt(1 - level)
        mean, variance = gain * mean + offset, gain**2 * variance + sigma**2
    return mean, float(np.sqrt(variance))


@pytest.mark.parametrize("steps", [20, 100])
@pytest.mark.parametrize("eta_or_ddpm", [0.5, 1.0, "ddpm"])
def test_noisy_samplers_draw_the_gaussian(float64, eta_or_ddpm, steps):
    fields = {"sampler": Sampler.ddpm} if eta_or_ddpm == "ddpm" else {"eta": eta_or_ddpm}
    policy = make_policy(steps=steps, **fields)
    exact_gaussian(policy)
    x_0, action = draw(policy)
    levels = training_levels(policy.config)[policy.indices].numpy()
    mean, std = gaussian_after_chain(levels, 1.0 if eta_or_ddpm == "ddpm" else float(eta_or_ddpm))
    # Four standard errors of 16000 draws.
    assert abs(float(action.mean()) - mean) < 4 * std / np.sqrt(action.numel())
    assert abs(float(action.std()) - std) < 4 * std / np.sqrt(2 * action.numel())
    if steps == 100:
        assert abs(mean - MEAN) < 0.01 and abs(std - STD) < 0.02  # the closed form approaches the data
    # Control: the noise on the way matters, so the action is no longer a function of the initial noise.
    assert float((action - (MEAN + STD * x_0)).square().mean().sqrt()) > 0.05


def test_heun_looks_twice_and_dpm_once():
    calls = {}
    for sampler in (Sampler.heun, Sampler.dpm):
        policy = make_policy(sampler=sampler, steps=6)
        net = stub(policy, lambda x, times: torch.zeros_like(x))
        draw(policy, 2)
        calls[sampler] = len(net.times)
    assert calls == {Sampler.heun: 11, Sampler.dpm: 6}


@pytest.mark.parametrize("sampler", [Sampler.heun, Sampler.dpm])
def test_a_solver_is_not_a_chain(sampler):
    policy = make_policy(sampler=sampler)
    x = torch.zeros(1, HORIZON, ACTION)
    with pytest.raises(BurnishError, match=f"sampler={sampler.value} is not a Gaussian chain"):
        policy.transition(x, step_index(x, 0), policy.encode(observe(1)))


def test_loss_and_samplers_share_one_grid():
    policy = make_policy(train_steps=20, steps=5)
    net = stub(policy, lambda x, times: torch.zeros_like(x))
    policy.bc_loss(observe(500), torch.zeros(500, HORIZON, ACTION), generator=generator(0))
    grid = net.times[0].flatten().unique()
    # 500 uniform draws miss one of 20 levels with probability below 20 exp(-25).
    assert torch.equal(grid, policy.time(torch.arange(20)).float())
    assert grid[-1] == 1
    for spacing in Spacing:
        for sampler in (Sampler.ddim, Sampler.ddpm):
            policy = make_policy(train_steps=20, steps=5, sampler=sampler, spacing=spacing)
            net = stub(policy, lambda x, times: torch.zeros_like(x))
            draw(policy, 3)
            told = torch.stack(net.times)[:, 0, 0]
            assert torch.isin(told, grid).all() and (told.diff() < 0).all() and len(told) == 5


def test_solvers_tell_the_time_of_the_level_they_are_at():
    """With a clean action of zero and unit noise, the state at each call is sqrt(1 - level) times the noise."""
    for sampler in (Sampler.heun, Sampler.dpm):
        policy = make_policy(sampler=sampler, steps=8)
        net = stub(policy, lambda x, times: torch.zeros_like(x))
        x_0, _ = draw(policy, 2)
        log_sigmas = ((1 - policy.levels) / policy.levels).log().numpy() / 2
        for x, times in zip(net.inputs, net.times, strict=True):
            sigma = np.exp(np.interp(float(times[0, 0]) * 100 - 1, np.arange(100), log_sigmas))
            # init_noise_sigma takes sigma for sqrt(sigma^2 + 1) in one of the solvers: 1 / 800 at sigma = 20.
            torch.testing.assert_close(x, x_0 * float(sigma / np.sqrt(1 + sigma**2)), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("fields", [{}, {"sampler": Sampler.heun}, {"sampler": Sampler.dpm}])
def test_a_prefix_is_at_the_noise_level_of_the_step(fields):
    policy = make_policy(**fields)
    net = stub(policy, lambda x, times: torch.zeros_like(x))
    x_0 = torch.randn(3, HORIZON, ACTION, generator=generator(4))
    prefix = torch.rand(3, 2, ACTION, generator=generator(5)) * 2 - 1
    policy.act(observe(3), noise=x_0, prefix=prefix)
    log_sigmas = ((1 - policy.levels) / policy.levels).log().numpy() / 2
    for x, times in zip(net.inputs, net.times, strict=True):
        sigma = np.exp(np.interp(float(times[0, 0]) * 100 - 1, np.arange(100), log_sigmas))
        level = torch.tensor(1 / (1 + sigma**2), dtype=torch.float32)
        torch.testing.assert_close(x[:, :2], noisy(prefix, x_0[:, :2], level), rtol=1e-3, atol=1e-3)
