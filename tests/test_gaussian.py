"""The Gaussian policy: densities against torch.distributions, partial chunks, ratio one, least squares."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal as Reference
from torch.distributions import TanhTransform, TransformedDistribution

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.gaussian import GaussianConfig, GaussianLoss, GaussianPolicy

H, A, EXECUTE, START = 5, 2, 3, 1
SPEC = PolicySpec(ObsSpec({"state": (3,)}), ActionSpec((-1, -1), (1, 1)), H, EXECUTE, START, noise_shape=(H, A))


def make(**settings):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GaussianPolicy(SPEC, GaussianConfig(hidden=[16], **settings)).double()


def observe(size):
    return {"state": torch.randn(size, 3, generator=torch.Generator().manual_seed(1)).double()}


@torch.no_grad()
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("squash", [False, True])
def test_log_prob_of_executed_actions_equals_the_reference(squash, dependent):
    policy, obs = make(squash=squash, state_dependent_std=dependent), observe(4)
    law = policy.law(obs)
    std = law.std.expand_as(law.mean)
    u = law.mean + std * torch.randn(4, H, A, generator=torch.Generator().manual_seed(2)).double()
    steps = torch.tensor([0, 1, 2, 3])
    given = policy.log_prob(obs, u, steps)
    assert given.shape == (4, 1)
    for i in range(4):
        expected = 0.0
        for h in range(START, START + int(steps[i])):
            for a in range(A):
                reference = Reference(law.mean[i, h, a], std[i, h, a])
                if squash:
                    squashed = TransformedDistribution(reference, TanhTransform())
                    expected += float(squashed.log_prob(torch.tanh(u[i, h, a])))
                else:
                    expected += float(reference.log_prob(u[i, h, a]))
        # The reference goes through atanh(tanh(u)), which loses digits in the tails.
        assert float(given[i]) == pytest.approx(expected, abs=1e-6)


def test_the_ratio_before_any_update_is_exactly_one():
    policy, obs = make(squash=True), observe(6)
    draw = policy.draw(obs, generator=torch.Generator().manual_seed(3))
    again = policy.log_prob(obs, draw.trace, torch.full((6,), EXECUTE))
    assert torch.equal(again, draw.log_prob)
    assert torch.equal(draw.action, torch.tanh(draw.trace))


@torch.no_grad()
def test_squashed_density_integrates_to_one():
    """Trapezoid over a in (-1, 1) of one coordinate; leaving the tanh correction out gives another number."""
    policy, obs = make(squash=True), observe(1)
    a = torch.linspace(-1 + 1e-9, 1 - 1e-9, 200_001, dtype=torch.float64)
    law = policy.law(obs)
    one = type(law)(law.mean[:, :1, :1], law.std[:1, :1])
    density = policy._log_density(one, torch.atanh(a).view(-1, 1, 1)).exp().flatten()
    assert float(torch.trapezoid(density, a)) == pytest.approx(1, abs=1e-4)
    wrong = one.log_prob(torch.atanh(a).view(-1, 1, 1)).exp().flatten()
    assert abs(float(torch.trapezoid(wrong, a)) - 1) > 0.01


@torch.no_grad()
def test_losses_are_what_their_names_say():
    obs, action = observe(4), torch.rand(4, H, A, generator=torch.Generator().manual_seed(4)).double() * 1.8 - 0.9
    mask = torch.tensor([[True] * n + [False] * (H - n) for n in (5, 1, 3, 4)])
    fitted = make(loss=GaussianLoss.least_squares)
    likely = make(loss=GaussianLoss.likelihood)
    law = likely.law(obs)
    for i in range(4):
        error = (fitted.law(obs).mean[i] - action[i])[mask[i]] ** 2
        assert float(fitted.bc_loss(obs, action, mask=mask)[i]) == pytest.approx(float(error.mean()))
        surprise = -Reference(law.mean[i], law.std).log_prob(action[i])[mask[i]]
        assert float(likely.bc_loss(obs, action, mask=mask)[i]) == pytest.approx(float(surprise.mean()))


def test_spread_starts_where_asked_and_has_a_floor():
    policy = make(init_std=0.3, min_std=0.05)
    torch.testing.assert_close(policy.law(observe(1)).std, torch.full((H, A), 0.3).double())
    with torch.no_grad():
        policy.raw_std.fill_(-50.0)
    torch.testing.assert_close(policy.law(observe(1)).std, torch.full((H, A), 0.05).double())
    with pytest.raises(BurnishError, match="min_std"):
        GaussianConfig(init_std=0.1, min_std=0.2)


def test_limits_of_the_action_cost_a_finite_likelihood():
    policy = make(squash=True)
    loss = policy.bc_loss(observe(2), torch.ones(2, H, A).double())
    loss.sum().backward()
    assert torch.isfinite(loss).all() and all(torch.isfinite(p.grad).all() for p in policy.parameters())


def test_greedy_is_the_mean_noise_is_the_draw_and_a_prefix_is_kept():
    policy, obs = make(), observe(3)
    law = policy.law(obs)
    assert torch.equal(policy.act(obs, greedy=True), law.mean.clamp(-1, 1))
    noise = torch.full((3, H, A), 0.5).double()
    assert torch.equal(policy.act(obs, noise=noise), (law.mean + law.std * noise).clamp(-1, 1))
    prefix = torch.full((3, 2, A), 0.25).double()
    assert torch.equal(policy.act(obs, greedy=True, prefix=prefix)[:, :2], prefix)
