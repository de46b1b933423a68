"""TD3: its steps are SB3's, what learns when, exploration, and one formula for what is played and what is valued."""

from __future__ import annotations

import copy

import pytest
import test_sac
import torch

from burnish.offline.sources import Rows
from burnish.offline.td3 import TD3, TD3Config, deterministic_agent
from burnish.policies.build import build_policy
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.seed import generator
from burnish.policies.nets.critic import CriticConfig
from sb3_lab import (
    ACTION,
    EPS,
    HIDDEN,
    ROWS,
    SPEC,
    copy_weights,
    distance,
    hand_out,
    linears,
    members,
    their_agent,
    transitions,
    weights,
)

AGENT = deterministic_agent(hidden=HIDDEN)


def make(critic: CriticConfig | None = None, **settings) -> TD3:
    options = {name: settings.pop(name) for name in ("transform", "warm") if name in settings}
    config = TD3Config(agent=AGENT, critic=critic or CriticConfig(hidden=HIDDEN, layer_norm=False), **settings)
    return TD3(build_policy(AGENT, SPEC), config, **options)


def test_steps_equal_those_of_sb3(require, float64, monkeypatch):
    """Four steps: two with, two without the delayed actor and targets. What is left is rounding."""
    sb3 = require("stable_baselines3")
    ours, theirs = make(tau=0.01, lr=1e-3, actor_lr=1e-3), their_agent(sb3.TD3)
    for optimizer in (ours.critic_optimizer, ours.actor_optimizer):
        optimizer.param_groups[0]["eps"] = EPS

    def pairs():
        for agent, actor in ((ours.agent, theirs.actor), (ours.target_agent, theirs.actor_target)):
            yield weights(linears(agent.trunk)), weights(linears(actor.mu))
        for name, critic in (("online", theirs.critic), ("target", theirs.critic_target)):
            yield members(getattr(ours.critic, name).net), weights(linears(*critic.q_networks))

    for mine, given in pairs():
        copy_weights(given, mine)
    before = [[x.clone() for x in mine] for mine, _ in pairs()]
    for step in range(4):
        batch, noise = transitions(seed=step), torch.randn(ROWS, ACTION, generator=generator(step, "test"))
        monkeypatch.setattr("burnish.offline.td3.normal", lambda shape, *_, n=noise, **__: n.reshape(tuple(shape)))
        ours.update(Rows(batch))
        hand_out(theirs, batch)
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "normal_", lambda x, mean, std, n=noise: x.copy_(mean + std * n))
            theirs.train(1, ROWS)
    for old, (mine, given) in zip(before, pairs(), strict=True):
        assert distance(mine, given) < 1e-9
        assert distance(mine, old) > 1e-6  # and it moved


def test_who_learns_when():
    learner = make(actor_every=2, critic_warmup=2)
    parts = {
        "agent": learner.agent,
        "target agent": learner.target_agent,
        "critic": learner.critic.online,
        "target critic": learner.critic.target,
    }

    def moved() -> set[str]:
        before = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
        learner.update(Rows(transitions(0)))
        return {
            name
            for name, part in parts.items()
            if any(not torch.equal(x, before[name][key]) for key, x in part.state_dict().items())
        }

    assert moved() == {"critic"}
    assert moved() == {"critic", "target critic"}  # due, but the actor still waits
    assert moved() == {"critic"}
    assert moved() == set(parts)
    learner.config.delay_targets = False
    assert moved() == {"critic", "target critic"}


def test_the_actor_step_leaves_the_critic_alone_and_its_gradients_too():
    learner = make()
    before = copy.deepcopy(learner.critic.state_dict())
    learner._actor_step(transitions(0)["obs"])
    assert all(torch.equal(x, before[key]) for key, x in learner.critic.state_dict().items())
    assert all(p.grad is None for p in learner.critic.parameters())


@pytest.mark.parametrize("mean", [False, True])
def test_the_actor_climbs_the_first_member_or_the_mean(mean):
    learner, obs = make(CriticConfig(members=10, hidden=HIDDEN), actor_mean=mean), transitions(0)["obs"]
    q = learner.critic(obs, learner.agent.act(obs, greedy=True))
    expected = -(q.mean() if mean else q[0].mean())
    torch.testing.assert_close(learner._actor_step(obs)["actor_loss"], expected.detach())


def test_the_target_values_what_would_be_executed():
    """A residual at its bound: base + action is clipped before the critic sees it, in the target and in the data."""
    seen = []

    def transform(obs, action):
        executed = (0.9 + action).clamp(-1, 1)
        seen.append(executed.detach())
        return executed

    learner = make(CriticConfig(members=10, hidden=HIDDEN), subset=2, transform=transform, actor_every=1)
    learner.update(Rows(transitions(0)))
    assert [x.shape for x in seen] == 3 * [(ROWS, 1, ACTION)]  # target, data, actor
    assert all(float(x.max()) == 1.0 and float(x.min()) >= -0.1 - 1e-6 for x in seen)


def test_exploration_has_the_deviation_that_was_asked_for_and_stays_inside():
    learner = make(explore_std=0.05)
    obs = {"state": torch.zeros(20_000, 5)}
    played, _ = learner.actor.act(obs, warm=False, generator=generator(0, "act"))
    mean = learner.agent.act(obs, greedy=True)
    # 20 000 draws of each of 3 coordinates: the standard error of a deviation is 0.05 / sqrt(2 * 60 000) = 1.4e-4.
    assert float((played - mean).detach().std()) == pytest.approx(0.05, abs=6e-4)
    wild, _ = make(explore_std=5.0).actor.act(obs, warm=False, generator=generator(0, "act"))
    assert float(wild.abs().max()) == 1.0
    warm, _ = learner.actor.act(obs, warm=True, generator=generator(0, "act"))
    assert warm.shape == (20_000, 1, ACTION) and float(warm.std()) == pytest.approx(1 / 3**0.5, abs=0.01)


def test_a_large_gradient_is_clipped():
    learner = make(max_grad_norm=1e-3, actor_every=1)
    batch = transitions(0)
    batch["reward"] = 1e4 * batch["reward"]
    learner.update(Rows(batch))
    for parameters in (learner.critic.online.parameters(), learner.trained):
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        assert float(norm) <= 1e-3 * (1 + 1e-4)


def test_settings_out_of_range_are_refused():
    for settings in (
        {"target_std": -1},
        {"actor_every": 0},
        {"tau": 0},
        {"tau": 1.5},
        {"agent": deterministic_agent(squash=False)},
    ):
        with pytest.raises(BurnishError):
            TD3Config(**settings)


@pytest.mark.parametrize("make", [make, test_sac.make], ids=["td3", "sac"])
def test_an_agent_of_one_action_learns_from_decisions_of_any_length(make):
    """A noise is one action that is played for many ticks: its rows count whatever ``steps`` says."""
    batch, learner = transitions(0), make()
    long = {**batch, "steps": 4 * batch["steps"]}
    torch.testing.assert_close(make().update(Rows(long))["critic_loss"], learner.update(Rows(batch))["critic_loss"])
    assert float(learner.update(Rows(batch))["critic_loss"]) > 0
