"""Ensembles against separate networks, initial weights, values as distributions, and the functions of TD targets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from burnish.offline.critics import fresh_critic
from burnish.offline.soft import polyak, q_scale, smoothed, uniform
from burnish.offline.td import advantage_weight, chunk_weight, expectile, pessimistic, td_target
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.nets.critic import CriticConfig, QEnsemble, two_hot
from burnish.policies.nets.ensemble import EnsembleMLP
from burnish.policies.nets.mlp import MLP, Activation

SPEC = PolicySpec(ObsSpec({"state": (4,)}), ActionSpec((-1, -1), (1, 1)), horizon=3, execute=3)


def separate(ensemble: EnsembleMLP, member: int, layer_norm: bool) -> MLP:
    """One member as a network of ``nn.Linear``, with its weights."""
    parts: list[Any] = [part for part in ensemble.layers if hasattr(part, "weight")]
    linear = parts[::2] if layer_norm else parts
    net = MLP(7, linear[-1].weight.shape[2], [16, 16], activation=Activation.relu, layer_norm=layer_norm)
    own: list[Any] = [part for part in net.modules() if isinstance(part, (nn.Linear, nn.LayerNorm))]
    with torch.no_grad():
        for mine, theirs in zip(own, parts, strict=True):
            mine.weight.copy_(theirs.weight[member].mT if isinstance(mine, nn.Linear) else theirs.weight[member, 0])
            mine.bias.copy_(theirs.bias[member, 0])
    return net


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("out", [1, 5])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_an_ensemble_is_its_members(float64, layer_norm, out, shared):
    torch.manual_seed(0)
    ensemble = EnsembleMLP(3, 7, out, [16, 16], layer_norm=layer_norm)
    for p in ensemble.parameters():
        p.data.normal_()  # scales and shifts of norms too
    x = torch.randn(*([] if shared else [3]), 11, 7, requires_grad=True)
    y = ensemble(x)
    assert y.shape == (3, 11, out)
    pull = torch.randn(y.shape)
    (y * pull).sum().backward()
    at_input = torch.zeros_like(x)
    for e in range(3):
        net = separate(ensemble, e, layer_norm)
        own = x.detach().clone().requires_grad_()
        z = net(own if shared else own[e])
        torch.testing.assert_close(y[e], z)
        (z * pull[e]).sum().backward()
        assert own.grad is not None
        at_input += own.grad
        kinds = (nn.Linear, nn.LayerNorm)
        theirs: list[Any] = [part for part in ensemble.layers if hasattr(part, "weight")]
        ours: list[Any] = [m for m in net.modules() if isinstance(m, kinds)]
        for mine, part in zip(ours, theirs, strict=True):
            grad = part.weight.grad[e].mT if isinstance(mine, nn.Linear) else part.weight.grad[e, 0]
            torch.testing.assert_close(grad, mine.weight.grad)
            torch.testing.assert_close(part.bias.grad[e, 0], mine.bias.grad)
    torch.testing.assert_close(x.grad, at_input)


def test_initial_weights_are_those_of_linear():
    """Uniform in +-1/sqrt(in), for weights and biases, as ``nn.Linear`` draws them; a fan of E * in would be a bug."""
    torch.manual_seed(0)
    members, width = 40, 64
    ensemble = EnsembleMLP(members, width, width, [width])
    reference = nn.Linear(width, width)
    bound = 1 / math.sqrt(width)
    assert float(reference.weight.detach().abs().max()) <= bound
    layers: list[Any] = [part for part in ensemble.layers if hasattr(part, "weight")]
    for part in layers:
        for x in (part.weight, part.bias):
            assert float(x.detach().abs().max()) <= bound
            # A uniform deviation, bound / sqrt(3), has a standard error below 0.45 / sqrt(count) of itself.
            assert float(x.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=2 / math.sqrt(x.numel()))
            assert not torch.equal(x[0], x[1])
    critic = fresh_critic(SPEC, CriticConfig(members=3), seed=3)
    for one, other in zip(critic.online.parameters(), critic.target.parameters(), strict=True):
        assert torch.equal(one, other) and one.data_ptr() != other.data_ptr() and not other.requires_grad
    assert torch.equal(
        next(fresh_critic(SPEC, CriticConfig(members=3), seed=3).parameters()), next(critic.parameters())
    )


def test_two_hot_keeps_the_value_and_stays_on_two_neighbours(float64):
    support = torch.linspace(-2, 3, 11)
    value = torch.tensor([-2.0, -1.9, 0.25, 0.5, 2.99, 3.0])
    weight = two_hot(value, support)
    torch.testing.assert_close((weight * support).sum(-1), value)
    torch.testing.assert_close(weight.sum(-1), torch.ones(6))
    assert int((weight > 0).sum(-1).max()) == 2 and float(weight.min()) >= 0
    away = (support - value[:, None]).abs() * (weight > 0)
    assert float(away.max()) < 0.5  # the distance of two values
    torch.testing.assert_close((two_hot(torch.tensor([-7.0, 9.0]), support) * support).sum(-1), torch.tensor([-2.0, 3]))


@pytest.mark.parametrize("bins", [0, 21])
def test_values_of_many_actions_are_those_of_one_at_a_time(float64, bins):
    torch.manual_seed(0)
    q = QEnsemble(SPEC, CriticConfig(members=3, hidden=[8], bins=bins))
    obs, action = {"state": torch.randn(5, 4)}, torch.rand(5, 4, 3, 2)
    many = q(obs, action)
    assert many.shape == (3, 5, 4)
    for m in range(4):
        torch.testing.assert_close(many[:, :, m], q(obs, action[:, m]))


@pytest.mark.parametrize("bins", [0, 51])
def test_both_losses_lead_to_the_target(float64, bins):
    torch.manual_seed(0)
    q = QEnsemble(SPEC, CriticConfig(members=2, hidden=[32], bins=bins, low=-5, high=5))
    obs, action, target = {"state": torch.randn(6, 4)}, torch.rand(6, 3, 2), torch.linspace(-4, 4, 6)
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-2)
    for _ in range(500):
        loss, _ = q.loss(q.encode(obs), action, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # 5 seeds: at most 2e-11 without bins, 1.4e-3 with them, of a support that is spaced by 0.2.
    assert float((q(obs, action) - target).detach().abs().max()) < 0.01


@pytest.mark.parametrize("bins", [0, 11])
def test_the_loss_of_the_members_is_summed_or_averaged(bins):
    losses = []
    for average in (False, True):
        torch.manual_seed(0)
        q = QEnsemble(SPEC, CriticConfig(members=5, hidden=[8], bins=bins, average=average))
        action, target = torch.zeros(6, 3, 2), torch.arange(6.0)
        losses.append(float(q.loss(q.encode({"state": torch.ones(6, 4)}), action, target)[0].detach()))
    assert losses[0] == pytest.approx(5 * losses[1])


def test_weighted_rows_alone_count():
    q = QEnsemble(SPEC, CriticConfig(members=2, hidden=[8]))
    obs, action, target = {"state": torch.randn(6, 4)}, torch.rand(6, 3, 2), torch.randn(6)
    weight = torch.tensor([1.0, 0, 1, 1, 0, 0])
    kept = weight.bool()
    loss, values = q.loss(q.encode(obs), action, target, weight)
    alone, _ = q.loss(q.encode({"state": obs["state"][kept]}), action[kept], target[kept])
    torch.testing.assert_close(loss, alone)
    assert values.shape == (2, 6)
    assert float(q.loss(q.encode(obs), action, target, torch.zeros(6))[0]) == 0  # and not NaN
    with pytest.raises(ValueError, match="shape"):
        q.loss(q.encode(obs), action, target[:, None])


# ---- td ----


def test_targets_against_a_loop(float64):
    reward, discount = torch.randn(6), torch.tensor([0.9, 0.0, 0.81, 0.9, 0.0, 1.0])
    value = torch.tensor([1.0, math.nan, 2, -1, math.inf, 3])  # nothing is read behind a termination
    target = td_target(reward, discount, value)
    for i in range(6):
        expected = float(reward[i]) + (float(discount[i] * value[i]) if discount[i] > 0 else 0.0)
        assert float(target[i]) == pytest.approx(expected)
    assert not td_target(reward, discount, value.requires_grad_()).requires_grad


def test_pessimism_is_a_minimum_over_members_that_change():
    q = torch.randn(10, 7)
    torch.testing.assert_close(pessimistic(q), q.min(0).values)
    torch.testing.assert_close(pessimistic(q, subset=10), q.min(0).values)
    pairs = {tuple(pessimistic(q, 2, torch.Generator().manual_seed(i)).tolist()) for i in range(40)}
    possible = {tuple(torch.minimum(q[i], q[j]).tolist()) for i in range(10) for j in range(10) if i != j}
    assert pairs <= possible and len(pairs) > 20


def test_expectile_weights_both_sides(float64):
    error = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0])
    for tau in (0.5, 0.7, 0.9):
        expected = [(tau if u >= 0 else 1 - tau) * u * u for u in error.tolist()]
        torch.testing.assert_close(expectile(error, tau), torch.tensor(expected))


def test_advantage_weights_are_capped_and_constant():
    advantage = torch.tensor([-1.0, 0.0, 1.0, 1e6], requires_grad=True)
    weight = advantage_weight(advantage, beta=3.0, cap=50.0)
    torch.testing.assert_close(weight, torch.tensor([math.exp(-3), 1.0, math.exp(3), 50.0]))
    assert not weight.requires_grad


def test_chunks_that_tell_their_whole_value():
    terminated = torch.tensor([True, False, True, False])
    steps = torch.tensor([1, 1, 3, 3])
    assert chunk_weight(terminated, steps, 3).tolist() == [1, 0, 1, 1]
    assert chunk_weight(terminated, torch.ones(4, dtype=torch.int64), 1).tolist() == [1, 1, 1, 1]


def test_small_functions_of_actor_critics():
    a = torch.tensor([0.9, -0.9, 0.0])
    torch.testing.assert_close(smoothed(a, torch.tensor([9.0, -9, 9]), 0.1, 0.05), torch.tensor([0.95, -0.95, 0.05]))
    assert float(smoothed(a, torch.full((3,), 99.0), 1.0, 0.5).max()) == 1.0
    q = torch.tensor([2.0, -4.0], requires_grad=True)
    assert float(q_scale(q)) == pytest.approx(1 / 3) and not q_scale(q).requires_grad
    old, new = [torch.zeros(2), torch.ones(1)], [torch.ones(2), torch.full((1,), 3.0)]
    polyak(old, new, 0.25)
    assert [x.tolist() for x in old] == [[0.25, 0.25], [1.5]]
    u = uniform(SPEC)({"state": torch.zeros(4000, 4)}, torch.Generator().manual_seed(0))
    assert u.shape == (4000, 3, 2) and float(u.min()) < -0.99 and float(u.max()) > 0.99


def test_critics_without_members_or_with_one_bin_are_refused():
    for settings in ({"members": 0}, {"bins": 1}, {"bins": 5, "low": 1.0, "high": 1.0}):
        with pytest.raises(BurnishError):
            CriticConfig(**settings)
