"""TD3+BC: its losses written out, who moves whom, and the best policy that the data supports."""

from __future__ import annotations

import copy

import pytest
import torch

import mdp
from burnish.offline.soft import q_scale
from burnish.offline.sources import Rows
from offline_lab import CHUNKED, SINGLE, a_batch, made, same, trained

# Shares of the best return on 20 seeds: all 1.0. Cuts taken for ends: at most 0.474 on 5 seeds. Imitation alone: 0.0 on
# 5, for the mean of two good actions is the trap.
REACHED, FAILED, UPDATES = 0.9, 0.6, 250


def test_losses_are_those_of_the_paper():
    learner, batch = made("td3_bc", CHUNKED, target_std=0.0, actor_every=1), a_batch(CHUNKED)
    obs, spec = batch["obs"], learner.policy.spec
    learner.target_policy.trunk.layers[-1].bias.data += 0.5  # it lags behind
    chosen = learner.policy.act(obs, greedy=True).detach()
    following = spec.executed(learner.target_policy.act(batch["next_obs"], greedy=True))
    q_next = learner.critic.target(batch["next_obs"], following).amin(0).detach()
    q = learner.critic.online(obs, batch["action"]).detach()
    critic = 0.0
    for row in range(12):
        if batch["terminated"][row] or batch["steps"][row] == 3:
            target = batch["reward"][row] + (0.0 if batch["terminated"][row] else batch["discount"][row] * q_next[row])
            critic += sum(float(head - target) ** 2 for head in q[:, row]) / 9
    away = 0.0
    for row in range(12):
        played = int(batch["steps"][row])
        away += float((chosen[row, 1 : 1 + played] - batch["action"][row, :played]).square().mean()) / 12
    metrics = learner.update(Rows(batch))
    assert float(metrics["critic_loss"]) == pytest.approx(critic, rel=1e-5)
    assert float(metrics["actor/away"]) == pytest.approx(away, rel=1e-5)
    # The actor climbs the first critic as it is after its step, by alpha / mean |Q| of its own actions.
    climbed = learner.critic.online(obs, spec.executed(chosen))[0].detach()
    expected = away - 5.0 * float(climbed.mean()) / float(climbed.abs().mean())
    assert float(metrics["actor_loss"]) == pytest.approx(expected, rel=1e-4)
    q = torch.tensor([2.0, -4.0], requires_grad=True)
    assert float(q_scale(q)) == pytest.approx(1 / 3) and not q_scale(q).requires_grad


def test_scaling_all_rewards_changes_the_critic_but_not_how_far_the_actor_goes():
    """lambda divides the scale of Q out of the gradient: Q times 1000 moves the actor as Q does."""

    def gradient(scale: float, alpha: float):
        learner, batch = made("td3_bc", actor_every=1, alpha=alpha), a_batch()
        for parameter in learner.critic.online.net.layers[-1].parameters():
            parameter.data *= scale
        learner._step_actor(batch["obs"], batch["action"], batch["steps"], {})
        return torch.cat([p.grad.flatten() for p in learner.trained if p.grad is not None])

    torch.testing.assert_close(gradient(1000.0, 2.5), gradient(1.0, 2.5), rtol=1e-4, atol=1e-6)
    assert float((gradient(1.0, 5.0) - gradient(1.0, 2.5)).norm()) > 1e-3


def test_delayed_updates_and_who_moves_whom():
    learner, batch = made("td3_bc", actor_every=2), a_batch()
    parts = ("policy", "target_policy")
    before = {name: copy.deepcopy(getattr(learner, name)) for name in parts}
    online, target = copy.deepcopy(learner.critic.online), copy.deepcopy(learner.critic.target)
    learner.update(Rows(batch))
    assert all(same(before[name], getattr(learner, name)) for name in parts) and same(target, learner.critic.target)
    assert not same(online, learner.critic.online)
    online = copy.deepcopy(learner.critic.online)
    learner._step_actor(batch["obs"], batch["action"], batch["steps"], {})
    assert same(online, learner.critic.online) and not same(before["policy"], learner.policy)
    learner.update(Rows(batch))
    assert not same(before["target_policy"], learner.target_policy) and not same(target, learner.critic.target)


def test_without_a_weight_on_q_it_imitates_by_least_squares():
    learner, batch = made("td3_bc", SINGLE, alpha=0.0, actor_every=1), a_batch()
    reference = copy.deepcopy(learner.policy)
    optimizer = torch.optim.Adam(reference.parameters(), lr=3e-3, fused=True)
    for _ in range(3):
        learner.update(Rows(batch))
        optimizer.zero_grad()
        reference.bc_loss(batch["obs"], batch["action"]).mean().backward()
        optimizer.step()
    for ours, theirs in zip(learner.policy.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_it_finds_the_best_policy_that_the_data_supports():
    assert all(mdp.score(trained("td3_bc", seed, UPDATES).policy, greedy=True) > REACHED for seed in range(3))


@pytest.mark.parametrize("change", [{"alpha": 0.0}, {"cut_is_end": True}], ids=["imitation", "cut is end"])
def test_it_does_not_by_imitation_or_where_a_cut_is_taken_for_an_end(change):
    assert mdp.score(trained("td3_bc", 0, UPDATES, **change).policy, greedy=True) < FAILED
