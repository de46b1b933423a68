"""The diffusion policy acts as it should, its loss is what it says, and it learns.

Its kernels are tested in test_schedule, its samplers in test_samplers.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.seed import RowNoise, generator
from burnish.policies.diffusion import DiffusionConfig, DiffusionPolicy, Prediction, Sampler, Schedule, training_levels
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from burnish.policies.nets.mlp import Activation
from diffusion_lab import ACTION, HORIZON, make_policy, make_spec, observe, stub


def test_same_noise_same_action_and_greedy_is_zero_noise():
    for sampler in (Sampler.ddim, Sampler.heun, Sampler.dpm):
        policy, obs = make_policy(sampler=sampler), observe(5)
        x_0 = torch.randn(5, HORIZON, ACTION, generator=generator(3))
        first, second = policy.act(obs, noise=x_0), policy.act(obs, noise=x_0)
        assert torch.equal(first, second)
        assert torch.equal(policy.act(obs, greedy=True), policy.act(obs, noise=torch.zeros_like(x_0)))
        assert not torch.equal(first, policy.act(obs, noise=-x_0))


def test_greedy_injects_nothing():
    policy, obs = make_policy(eta=1.0), observe(5)
    greedy = [policy.act(obs, greedy=True, generator=generator(seed)) for seed in (0, 1)]
    drawn = [policy.act(obs, noise=torch.zeros(5, HORIZON, ACTION), generator=generator(seed)) for seed in (0, 1)]
    assert torch.equal(*greedy)
    assert not torch.equal(*drawn)


def test_spread_of_the_kernels():
    x, obs = torch.zeros(10, HORIZON, ACTION), observe(10)
    k = torch.arange(10)

    def spread(**fields: object) -> Tensor:
        policy = make_policy(**fields)
        return policy.transition(x, k, policy.encode(obs)).std.flatten()

    assert (spread(eta=0.0) == 0).all()
    half, full, ddpm = spread(eta=0.5), spread(eta=1.0), spread(sampler=Sampler.ddpm)
    assert (full[:-1] > 0).all() and full[-1] == 0  # the last step has no noise to add
    torch.testing.assert_close(2 * half, full)
    assert torch.equal(full, ddpm)


@pytest.mark.parametrize("fields", [{"eta": 1.0}, {"sampler": Sampler.ddpm}, {"sampler": Sampler.dpm}])
def test_a_draw_does_not_depend_on_the_other_rows(fields):
    policy, obs = make_policy(prediction=Prediction.v, **fields), observe(4)
    four = policy.act(obs, generator=RowNoise([5, 6, 7, 8], [0, 0, 0, 0]))
    two = policy.act({"state": obs["state"][1:3]}, generator=RowNoise([6, 7], [0, 0]))
    torch.testing.assert_close(two, four[1:3], rtol=1e-5, atol=1e-5)  # matmuls of other sizes round differently
    other = policy.act({"state": obs["state"][1:3]}, generator=RowNoise([6, 7], [1, 1]))
    assert (other - two).abs().max() > 1e-2


@pytest.mark.parametrize("fields", [{}, {"eta": 1.0}, {"sampler": Sampler.heun}, {"sampler": Sampler.dpm}])
def test_a_prefix_is_kept_and_seen(fields):
    policy, obs = make_policy(**fields), observe(3)
    x_0 = torch.randn(3, HORIZON, ACTION, generator=generator(4))
    prefix = torch.rand(3, 2, ACTION, generator=generator(5)) * 2 - 1
    chunk = policy.act(obs, noise=x_0, prefix=prefix, generator=generator(6))
    assert torch.equal(chunk[:, :2], prefix)
    # The rest of the chunk follows what is known, through the network.
    other = policy.act(obs, noise=x_0, prefix=-prefix, generator=generator(6))
    assert (chunk[:, 2:] - other[:, 2:]).abs().max() > 1e-3


def test_guidance_reaches_the_transition():
    plain, guided = make_policy(goal=True), make_policy(goal=True, guidance=3.0)
    obs = observe(6, goal=True)
    hidden = obs | {"goal_mask": torch.zeros(6)}
    x = 0.1 * torch.randn(6, HORIZON, ACTION, generator=generator(0))
    k = torch.full((6,), 5)
    given, free, strong = (
        policy.transition(x, k, policy.encode(o)).mean for policy, o in ((plain, obs), (plain, hidden), (guided, obs))
    )
    assert not torch.allclose(given, free)
    # Nothing is clipped here, so the mean is affine in the network's output and so is guidance.
    torch.testing.assert_close(strong, free + 3 * (given - free), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampler", Sampler)
def test_another_number_of_steps(sampler):
    policy, obs = make_policy(steps=10, sampler=sampler), observe(2)
    x_0 = torch.randn(2, HORIZON, ACTION, generator=generator(4))
    before = policy.act(obs, noise=x_0, generator=generator(5))
    policy.num_steps = 4
    after = policy.act(obs, noise=x_0, generator=generator(5))
    assert torch.equal(after, make_policy(steps=4, sampler=sampler).act(obs, noise=x_0, generator=generator(5)))
    assert not torch.equal(after, before)
    with pytest.raises(BurnishError, match="must lie between 1 and"):
        policy.num_steps = 101


@pytest.mark.parametrize("sampler", Sampler)
def test_every_sampler_clips_the_clean_action(sampler):
    """All of them end at the last clean action, which the network here puts at 2."""
    for clip, end in ((0.5, 0.5), (None, 1.0)):
        policy = make_policy(sampler=sampler, clip=clip)
        stub(policy, lambda x, times: torch.full_like(x, 2.0))
        action = policy.act(observe(2), generator=generator(0))
        torch.testing.assert_close(action, torch.full_like(action, end), rtol=1e-5, atol=1e-5)


def test_actions_stay_in_bounds_and_gradients_reach_the_noise():
    for sampler in Sampler:
        policy = make_policy(sampler=sampler, clip=None)
        x_0 = (3 * torch.randn(4, HORIZON, ACTION, generator=generator(4))).requires_grad_()
        action = policy.act(observe(4), noise=x_0, generator=generator(5))
        assert action.abs().max() <= 1
        action.sum().backward()
        assert x_0.grad is not None and x_0.grad.abs().max() > 0


def test_the_tables_are_not_part_of_a_checkpoint():
    policy = make_policy()
    assert all(name.startswith("net.") for name in policy.state_dict())
    make_policy(steps=5, sampler=Sampler.ddpm, seed=1).load_state_dict(policy.state_dict())


@pytest.mark.parametrize("prediction", Prediction)
def test_loss_is_the_mean_square_error_of_its_prediction(prediction):
    policy = make_policy(prediction=prediction)
    net = stub(policy, lambda x, times: 0.3 * x)
    action = torch.rand(50, HORIZON, ACTION, generator=generator(0)) * 2 - 1
    loss = policy.bc_loss(observe(50), action, generator=generator(1))
    assert loss.shape == (50,)
    x, times = net.inputs[0].double().numpy(), net.times[0].double().numpy()
    levels = training_levels(policy.config).numpy()
    for row in range(50):
        level = levels[round(float(times[row, 0]) * 100) - 1]
        clean = action[row].double().numpy()
        noise = (x[row] - np.sqrt(level) * clean) / np.sqrt(1 - level)
        wanted = {
            Prediction.eps: noise,
            Prediction.sample: clean,
            Prediction.v: np.sqrt(level) * noise - np.sqrt(1 - level) * clean,
        }[prediction]
        # Recovering the noise divides a float32 by sqrt(1 - level), 0.025 at the cleanest level.
        assert float(loss[row]) == pytest.approx(((0.3 * x[row] - wanted) ** 2).mean(), rel=1e-3, abs=1e-5)


def test_padding_does_not_count():
    policy = make_policy()
    net = stub(policy, lambda x, times: x * policy_scale)
    policy_scale = torch.ones(HORIZON, 1, requires_grad=True)
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    action = torch.rand(2, HORIZON, ACTION, generator=generator(0))
    loss = policy.bc_loss(observe(2), action, mask=mask, generator=generator(1))
    changed = torch.where(mask[:, :, None], action, 9.0)
    assert torch.equal(loss, policy.bc_loss(observe(2), changed, mask=mask, generator=generator(1)))
    assert not torch.equal(loss, policy.bc_loss(observe(2), changed, generator=generator(1)))
    (gradient,) = torch.autograd.grad(loss[0], policy_scale)
    assert (gradient[2:] == 0).all() and (gradient[:2] != 0).all()
    # A row is divided by its number of real steps.
    x = net.inputs[0]
    assert float(loss[0].detach()) == pytest.approx(float((x - action)[0, :2].square().mean()), rel=1e-5)


def test_derivative_of_the_loss(float64):
    spec = make_spec(horizon=2, action=1)
    net = DenoiserConfig(mlp=MlpBodyConfig(hidden=[3], time_dim=4))
    torch.manual_seed(0)
    policy = DiffusionPolicy(spec, DiffusionConfig(prediction=Prediction.v, net=net))
    names, values = zip(*policy.named_parameters(), strict=True)
    action = torch.rand(3, 2, 1, generator=generator(0), dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False], [True, True]])

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = policy

        def forward(self) -> Tensor:
            return self.policy.bc_loss(observe(3), action, mask=mask, generator=generator(1))

    def loss(*parameters: Tensor) -> Tensor:
        named = {f"policy.{name}": p for name, p in zip(names, parameters, strict=True)}
        return torch.func.functional_call(Loss(), named, ())

    assert torch.autograd.gradcheck(loss, tuple(v.detach().clone().requires_grad_() for v in values))


def test_goals_are_dropped_from_the_generator_that_is_given():
    policy = make_policy(goal=True)
    obs, action = observe(64, goal=True), torch.zeros(64, HORIZON, ACTION)
    by_default = policy.bc_loss(obs, action, generator=generator(0))
    assert torch.equal(by_default, policy.bc_loss(obs, action, generator=generator(0)))
    none, every = (
        policy.bc_loss(obs, action, drop=torch.full((64,), flag), generator=generator(0)) for flag in (False, True)
    )
    assert not torch.allclose(none, every)
    hidden = obs | {"goal": torch.full((64, 2), 5.0)}
    dropped = policy.bc_loss(hidden, action, drop=torch.ones(64, dtype=torch.bool), generator=generator(0))
    assert torch.equal(dropped, every)


def two_mode_share(policy: DiffusionPolicy) -> tuple[float, float]:
    """(share of the upper mode, share of draws within 0.2 of a mode)."""
    with torch.no_grad():
        action = policy.act({"state": torch.zeros(1000, 3)}, generator=generator(9)).flatten()
    return float((action > 0).float().mean()), float(((action.abs() - 0.7).abs() < 0.2).float().mean())


def train_on_two_modes(seed: int, steps: int) -> DiffusionPolicy:
    torch.manual_seed(seed)
    net = DenoiserConfig(
        mlp=MlpBodyConfig(hidden=[64, 64], time_dim=8, activation=Activation.relu, layer_norm=False, residual=False)
    )
    policy = DiffusionPolicy(make_spec(1, 1), DiffusionConfig(net=net))
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=max(steps, 1))
    source = generator(seed, "data")
    obs = {"state": torch.zeros(256, 3)}
    for _ in range(steps):
        sign = torch.randint(0, 2, (256, 1, 1), generator=source) * 2 - 1
        loss = policy.bc_loss(obs, 0.7 * sign.float(), generator=source).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
    return policy


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns_two_modes(seed):
    """Recorded over seeds 0..19: share 0.474 to 0.531, near a mode 0.934 to 0.981; untrained at most 0.0 near."""
    share, near = two_mode_share(train_on_two_modes(seed, 300))
    assert 0.35 < share < 0.65
    assert near > 0.9
    assert two_mode_share(train_on_two_modes(seed, 0))[1] < 0.5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": 0}, "policy.steps=0 must lie between 1 and"),
        ({"steps": 101}, "policy.train_steps=100"),
        ({"steps": 1}, "take spacing=trailing"),
        ({"sampler": Sampler.heun, "steps": 2}, "needs policy.steps of 3 or more"),
        ({"eta": 1.5}, "policy.eta=1.5"),
        ({"sampler": Sampler.ddpm, "eta": 0.5}, "belongs to sampler=ddim"),
        ({"clip": 0.0}, "policy.clip=0.0"),
        ({"schedule": Schedule.linear, "train_steps": 20}, "schedule=cosine"),
    ],
)
def test_refusals(fields, words):
    with pytest.raises(BurnishError, match=words):
        DiffusionConfig(**fields)


def test_noise_of_another_shape_is_refused():
    with pytest.raises(BurnishError, match="the noise has shape"):
        make_policy().act(observe(2), noise=torch.zeros(2, HORIZON, 1))
