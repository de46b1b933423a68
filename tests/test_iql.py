"""IQL: expectiles in closed form, who moves whom, capped weights, and the best policy that the data supports."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import mdp
from burnish.offline.iql import decayed
from burnish.offline.sources import Rows
from burnish.offline.td import advantage_weight, expectile, row_mean
from burnish.policies.build import build_policy
from burnish.policies.compose import BestOf
from burnish.policies.core.errors import BurnishError
from burnish.policies.gaussian import GaussianConfig
from offline_lab import CHUNKED, CONFIGS, a_batch, build, made, recorded, same, trained, weights
from training_lab import train_offline

# Shares of the best return on 20 seeds: all 1.0 by weights, at least 0.99 by the best of n. Cuts taken for ends: 0.474
# on 5 seeds, which is to leave everywhere but at the prize. Imitation alone, on 5: 0.0 by the mean, 0.37 by a flow.
REACHED, FAILED, UPDATES = 0.9, 0.6, {"iql": 120, "iql_best": 150}


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.7, 0.9])
def test_the_minimum_of_the_loss_is_the_expectile(tau, float64):
    """q is uniform on [0, 1]: tau (1 - v)^2 = (1 - tau) v^2, so v = sqrt(tau) / (sqrt(tau) + sqrt(1 - tau))."""
    q = (torch.arange(4000) + 0.5) / 4000
    v = torch.tensor(0.5, requires_grad=True)
    optimizer = torch.optim.LBFGS([v], max_iter=50, tolerance_change=1e-14, tolerance_grad=1e-12)

    def closure():
        optimizer.zero_grad()
        loss = expectile(q - v, tau).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert float(v.detach()) == pytest.approx(tau**0.5 / (tau**0.5 + (1 - tau) ** 0.5), abs=1e-6)


def test_expectile_loss_is_derived_right(float64):
    error = torch.tensor([-2.0, -0.3, 0.4, 3.0], requires_grad=True)
    assert torch.autograd.gradcheck(lambda u: expectile(u, 0.8), error)


def test_weights_are_capped_before_they_can_overflow():
    advantage = torch.tensor([-1e6, 0.0, 1.0, 2.0, 1e6], requires_grad=True)
    weight = advantage_weight(advantage, 3.0, 100.0)
    torch.testing.assert_close(weight, torch.tensor([0.0, 1.0, 20.0855369, 100.0, 100.0]))
    assert not weight.requires_grad
    learner, batch = made("iql", beta=1e4), a_batch()
    for q in (learner.critic.target, learner.critic.online):
        q.net.layers[-1].bias.data.fill_(50.0)
    metrics = learner.update(Rows(batch))
    assert float(metrics["weight"]) == pytest.approx(100.0, rel=1e-4) and float(metrics["weight/capped"]) == 1.0


def test_rows_that_do_not_count_have_no_influence_on_a_mean():
    x = torch.tensor([[1.0, 2.0, 50.0], [3.0, 5.0, 50.0]])
    torch.testing.assert_close(row_mean(x, torch.tensor([1.0, 1.0, 0.0])), torch.tensor([1.5, 4.0]))
    assert row_mean(x, torch.zeros(3)).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="expected shape"):
        row_mean(x, torch.ones(2))


# What is changed before the update -> what then differs after it, of: V, Q, policy.
INFLUENCE = {
    "reward": {"critic"},  # it is in the target of Q alone: V and policy are not moved by the loss of Q
    "next_obs": {"critic"},
    "target": {"value", "imitator"},  # Q regresses on V, not on the target critic
    "policy": {"imitator"},  # neither V nor Q asks the policy anything
    "value": {"value", "critic", "imitator"},
    "online": {"critic"},  # the target critic of before judges; the online one only learns
}


@pytest.mark.parametrize("change", INFLUENCE)
def test_each_loss_moves_its_own_network_by_the_parameters_of_before(change):
    """Two updates that differ in one thing. ``value`` influences all: Q and weight take the V of before the update;
    that they take exactly this one is the next test."""

    def after(changed: bool):
        learner, batch = made("iql"), a_batch()
        if changed:
            if change in batch:
                batch[change] = {"state": batch[change]["state"] + 1} if change == "next_obs" else batch[change] + 1
            else:
                part = {
                    "target": learner.critic.target.net.layers[-1].bias,
                    "online": learner.critic.online.net.layers[-1].bias,
                    "policy": learner.imitator.trunk.layers[-1].bias,
                    "value": learner.value.net.layers[-1].bias,
                }[change]
                part.data += torch.linspace(0.1, 0.3, part.numel()).view(part.shape)
        before = {name: copy.deepcopy(_part(learner, name)) for name in ("value", "critic", "imitator")}
        learner.update(Rows(batch))
        moves = {}
        for name, old in before.items():
            now = _part(learner, name)
            moves[name] = [p.grad.clone() for p in now.parameters()]
            assert not same(old, now)  # everything learns at every update
        return moves

    plain, other = after(False), after(True)
    moved = {name for name in plain if not all(map(torch.equal, plain[name], other[name]))}
    # A changed bias changes the gradient of its own network too, except where that is what is under test.
    assert moved == INFLUENCE[change]


def _part(learner, name):
    return learner.critic.online if name == "critic" else getattr(learner, name)


def test_order_of_the_update(float64):
    """Q regresses on the V of before the update, and the weight is exp(beta (Q - V)) of before: explicit losses."""
    learner, batch = made("iql", CHUNKED), a_batch(CHUNKED)
    v, v_next = learner.value(batch["obs"]), learner.value(batch["next_obs"])
    q_bar = learner.critic.target(batch["obs"], batch["action"]).amin(0)
    q = learner.critic.online(batch["obs"], batch["action"])
    known = [row for row in range(12) if batch["terminated"][row] or batch["steps"][row] == 3]
    assert len(known) == 9
    sums = {"value_loss": 0.0, "critic_loss": 0.0}
    for row in known:
        error = float((q_bar[row] - v[row]).detach())
        sums["value_loss"] += (0.9 if error > 0 else 0.1) * error**2 / 9
        target = float(batch["reward"][row])
        if not batch["terminated"][row]:
            target += float((batch["discount"][row] * v_next[row]).detach())
        sums["critic_loss"] += sum((float(head) - target) ** 2 for head in q[:, row].detach()) / 9
    law = learner.imitator.law(batch["obs"])
    policy_loss, q_bar, v = 0.0, q_bar.detach(), v.detach()
    for row in known:
        played = int(batch["steps"][row])
        density = law.log_prob(torch.cat([torch.zeros(12, 1, 2), batch["action"], torch.zeros(12, 1, 2)], 1))
        weight = min(float((q_bar[row] - v[row]).exp()), 100.0)
        policy_loss -= weight * float(density.detach()[row, 1 : 1 + played].mean()) / 9
    metrics = learner.update(Rows(batch))
    for name, expected in {**sums, "policy_loss": policy_loss}.items():
        assert float(metrics[name]) == pytest.approx(expected, rel=1e-6), name


def test_the_rate_of_the_policy_falls_to_zero_and_stays():
    assert [decayed(2.0, update, 4) for update in (0, 2, 4, 5, 400)] == pytest.approx([2.0, 1.0, 0.0, 0.0, 0.0])
    assert decayed(2.0, 10**6, 0) == 2.0
    learner, batch = made("iql", decay_steps=2), a_batch()
    learner.update(Rows(batch))
    learner.update(Rows(batch))
    before, q = copy.deepcopy(learner.policy), copy.deepcopy(learner.critic.online)
    learner.update(Rows(batch))
    assert same(before, learner.policy) and not same(q, learner.critic.online)
    resumed = made("iql", decay_steps=2)
    resumed.load_state_dict(learner.state_dict())
    resumed.update(Rows(batch))
    assert same(before, resumed.policy)


def test_the_mean_alone_is_bounded():
    learner = made("iql")
    learner.policy.trunk.layers[-1].bias.data.fill_(30.0)
    law = learner.policy.law(a_batch()["obs"])
    assert torch.equal(law.mean, torch.ones_like(law.mean)) and float(law.std.detach().min()) == 1.0
    with pytest.raises(BurnishError, match="bound the action twice"):
        GaussianConfig(squash=True, tanh_mean=True)


def test_best_of_n_judges_by_the_critic_that_learns():
    learner = made("iql_best")
    assert isinstance(learner.policy, BestOf) and learner.policy.critic is learner.critic.online
    assert learner.policy.base is learner.imitator and learner.policy.config.count == 32


def test_a_frozen_base_stays_and_only_its_judge_learns():
    """IDQL over a base that is given: no bit of it moves; the control moves; the critic is deployed too."""
    base = build_policy(CONFIGS["iql_best"].flow, mdp.SPEC, seed=0)
    data = recorded(0)
    for rate, stays in ((0.0, True), (3e-3, False)):
        learner = build(replace(CONFIGS["iql_best"], actor_lr=rate), base, mdp.SPEC, seed=0)
        critic = weights(learner.critic.online)
        train_offline(learner, data, batch=64, total=5)
        assert same(learner.imitator, base) is stays
        assert not all(torch.equal(a, b) for a, b in zip(critic, weights(learner.critic.online), strict=True))
        assert learner.policy.base is learner.imitator and learner.policy.critic is learner.critic.online


def test_the_best_of_many_draws_of_a_frozen_base_beats_one():
    """A base that imitates the behaviour, and IQL's critic from the same recordings on top."""
    base = trained("iql_best", 0, UPDATES["iql_best"]).imitator
    data = recorded(0)
    learner = build(replace(CONFIGS["iql_best"], actor_lr=0.0), base, mdp.SPEC, seed=1)
    train_offline(learner, data, batch=256, total=UPDATES["iql_best"])
    assert mdp.score(learner.policy) > REACHED > FAILED > mdp.score(base)


def test_nothing_to_keep_is_refused():
    with pytest.raises(BurnishError, match="policy=checkpoint"):
        made("iql_best", actor_lr=0.0)
    with pytest.raises(BurnishError, match="extraction=best_of_n"):
        replace(CONFIGS["iql"], actor_lr=0.0)


UNREAD = [("iql", "count", 8), ("iql_best", "beta", 10.0), ("iql_best", "weight_cap", 50.0)]


@pytest.mark.parametrize(("way", "name", "value"), [*UNREAD, ("frozen", "decay_steps", 100)])
def test_what_an_extraction_does_not_read_is_refused(way, name, value):
    config = replace(CONFIGS["iql_best"], actor_lr=0.0) if way == "frozen" else CONFIGS[way]
    with pytest.raises(BurnishError, match=f"{name}={value} is not read with extraction=.*; leave it out"):
        replace(config, **{name: value})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iql", "iql_best"])
def test_it_finds_the_best_policy_that_the_data_supports(name):
    greedy = name == "iql"
    assert all(mdp.score(trained(name, seed, UPDATES[name]).policy, greedy=greedy) > REACHED for seed in range(3))


def test_imitation_alone_does_not():
    assert mdp.score(trained("iql", 0, UPDATES["iql"], beta=0.0).policy, greedy=True) < FAILED
    assert mdp.score(trained("iql_best", 0, UPDATES["iql_best"], count=1).policy) < FAILED


@pytest.mark.parametrize("name", ["iql", "iql_best"])
def test_it_does_not_where_a_cut_is_taken_for_an_end(name):
    greedy = name == "iql"
    assert mdp.score(trained(name, 0, UPDATES[name], cut_is_end=True).policy, greedy=greedy) < FAILED


def test_its_values_are_the_expectiles_of_the_data():
    """With two equally frequent actions per state, V = tau max Q + (1 - tau) min Q, exactly. On 5 seeds the learned V
    was 0.29 to 0.48 away from it (frequencies are those of 600 draws), and at least 1.5 from that of another tau."""

    def expected(tau: float) -> torch.Tensor:
        value = torch.zeros(mdp.STATES, dtype=torch.float64)
        for _ in range(500):
            further = torch.cat([mdp.GAMMA * value[1:], torch.tensor([mdp.PRIZE]).double()])
            on = mdp.SLIP * mdp.GAMMA * value + (1 - mdp.SLIP) * further
            high, low = torch.maximum(on, torch.tensor(mdp.EXIT).double()), on.clamp(max=mdp.EXIT)
            value = tau * high + (1 - tau) * low
        return value

    learner = trained("iql", 0, 400, expectile=0.7)
    learned = learner.value(mdp.observe()).detach().double()
    assert float((learned - expected(0.7)).abs().max()) < 0.6
    assert float((learned - expected(0.5)).abs().max()) > 1.2
