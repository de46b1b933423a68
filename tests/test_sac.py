"""SAC: one step is SB3's, what learns from what, the temperature, and truncations that are no terminations."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from burnish.offline.sac import SAC, SACConfig, soft_agent
from burnish.offline.soft import Temperature
from burnish.offline.sources import Rows
from burnish.policies.build import build_policy
from burnish.policies.core.errors import BurnishError
from burnish.policies.nets.critic import CriticConfig
from sb3_lab import (
    ACTION,
    EPS,
    HIDDEN,
    ROWS,
    SPEC,
    copy_weights,
    distance,
    fixed_noise,
    hand_out,
    linears,
    members,
    their_agent,
    transitions,
    weights,
)


def make(critic: CriticConfig | None = None, **settings) -> SAC:
    agent = settings.pop("agent", soft_agent(hidden=HIDDEN, log_std_bounds=[-20.0, 2.0]))
    config = SACConfig(agent=agent, critic=critic or CriticConfig(hidden=HIDDEN, layer_norm=False), **settings)
    return SAC(build_policy(agent, SPEC), config)


def test_steps_equal_those_of_sb3(require, float64, monkeypatch):
    """Three steps, so that the state of Adam and the target network take part. SB3's guard of 1e-6 in the density of
    tanh is set to 0; what is left is rounding: 1e-16 per operation, enlarged by Adam's division by small gradients."""
    sb3 = require("stable_baselines3")
    ours, theirs = make(tau=0.01), their_agent(sb3.SAC)
    theirs.actor.action_dist.epsilon = 0.0
    theirs.log_ent_coef = theirs.log_ent_coef.detach().double().requires_grad_()
    theirs.ent_coef_optimizer = torch.optim.Adam([theirs.log_ent_coef], lr=3e-4, eps=EPS)
    for optimizer in (ours.critic_optimizer, ours.actor_optimizer):
        optimizer.param_groups[0]["eps"] = EPS

    def pairs():
        actor = theirs.actor
        joined = [
            torch.cat([x, y]) for x, y in zip(weights(linears(actor.mu)), weights(linears(actor.log_std)), strict=True)
        ]
        yield weights(linears(ours.agent.trunk)), [*weights(linears(actor.latent_pi)), *joined]
        for name, critic in (("online", theirs.critic), ("target", theirs.critic_target)):
            yield members(getattr(ours.critic, name).net), weights(linears(*critic.q_networks))
        yield [ours.temperature.log_alpha], [theirs.log_ent_coef[0]]

    for mine, given in pairs():
        copy_weights(given, mine)
    before = [[x.clone() for x in mine] for mine, _ in pairs()]
    for step in range(3):
        batch = transitions(seed=step)
        now, then = torch.randn(2, ROWS, ACTION, generator=torch.Generator().manual_seed(100 + step))
        left = fixed_noise(monkeypatch, "burnish.policies.chain.normal", [then, now])
        ours.update(Rows(batch))
        hand_out(theirs, batch)
        others = fixed_noise(monkeypatch, "torch.distributions.normal._standard_normal", [now, then])
        theirs.train(1, ROWS)
        assert left() == others() == 0
    for old, (mine, given) in zip(before, pairs(), strict=True):
        assert distance(mine, given) < 1e-9
        assert distance(mine, old) > 1e-6  # and it moved


def test_alpha_rises_below_the_target_entropy_and_falls_above_it():
    for log_prob, rises in ((5.0, True), (-5.0, False)):
        temperature = Temperature(0.3, target=-2.0)  # the entropy is -log_prob
        temperature.loss(torch.full((8,), log_prob)).backward()
        assert (temperature.log_alpha.grad < 0) == rises
    fixed = Temperature(0.3)
    assert not fixed.log_alpha.requires_grad and float(fixed()) == pytest.approx(0.3)


def changed(module: torch.nn.Module, before: dict) -> bool:
    return any(not torch.equal(x, before[key]) for key, x in module.state_dict().items())


@pytest.mark.parametrize("subset", [0, 1])
def test_who_learns_from_what(subset):
    learner = make(subset=subset)
    parts = {
        "agent": learner.agent,
        "online": learner.critic.online,
        "target": learner.critic.target,
        "temperature": learner.temperature,
    }

    def moved(step) -> set[str]:
        before = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
        step()
        return {name for name, part in parts.items() if changed(part, before[name])}

    batch = transitions(0)
    columns = {key: x for key, x in batch.items() if key not in ("obs", "next_obs")}
    assert moved(lambda: learner._critic_step(batch["obs"], batch["next_obs"], columns)) == {"online", "target"}
    assert moved(lambda: learner._actor_step(batch["obs"])) == {"agent", "temperature"}
    learner.critic.follow = lambda tau: None
    assert moved(lambda: learner._critic_step(batch["obs"], batch["next_obs"], columns)) == {"online"}


def test_the_target_follows_by_exactly_tau():
    learner = make(tau=0.25)
    before = [x.clone() for x in learner.critic.target.parameters()]
    learner.update(Rows(transitions(0)))
    for old, new, online in zip(
        before, learner.critic.target.parameters(), learner.critic.online.parameters(), strict=True
    ):
        torch.testing.assert_close(new, old + 0.25 * (online - old))


def test_delays_count_updates():
    learner = make(critic_warmup=3, actor_every=2)
    acted = ["actor_loss" in learner.update(Rows(transitions(i))) for i in range(8)]
    assert acted == [False, False, False, True, False, True, False, True]


def test_rows_cut_short_do_not_train_a_critic_of_chunks():
    """Their rewards may be anything: the critic's step is the same, bit for bit."""
    spec = replace(SPEC, horizon=2, execute=2)

    def step(reward: float):
        agent = soft_agent(hidden=HIDDEN)
        config = SACConfig(agent=agent, critic=CriticConfig(hidden=HIDDEN))
        learner = SAC(build_policy(agent, spec), config)
        batch = transitions(0)
        batch["action"] = batch["action"].expand(-1, 2, -1)
        batch["steps"] = torch.where(torch.arange(ROWS) % 3 == 0, 1, 2)
        batch["terminated"] = torch.arange(ROWS) % 6 == 0
        batch["discount"] = 0.9 * (~batch["terminated"]).float()
        cut = (batch["steps"] == 1) & ~batch["terminated"]
        batch["reward"] = torch.where(cut, reward, batch["reward"])
        learner.update(Rows(batch))
        return torch.cat([x.flatten() for x in learner.critic.online.parameters()])

    assert torch.equal(step(0.0), step(1e3))


def test_an_unbounded_actor_is_refused():
    with pytest.raises(BurnishError, match="squash"):
        SACConfig(agent=soft_agent(squash=False))
