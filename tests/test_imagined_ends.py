"""How imagined episodes end and what that pays: successes that a second member denies, failures, worlds that report no
success, and what is held out to judge by."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from imagine_lab import REACHING, SMALL, TrueModel, fitted, imagined, played

from burnish.finetune.world_model.env import Guard, GuardConfig
from burnish.finetune.world_model.model import Prediction
from burnish.finetune.world_model.ticks import Ticks, tick_of
from burnish.policies.best import mean
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.tree import index
from burnish.policies.measure.evaluate import evaluate
from burnish.sim.point_reach import PointReach
from burnish.sim.toy import LQR, LQRConfig


def reaching() -> ScaledEnv:
    return ScaledEnv(PointReach(16, REACHING, seed=3))


class Lying(TrueModel):
    """Its first member sees a success, of 10, in every tick; the others see none, and pay -0.1."""

    def predict(self, obs, action, member, noise):
        lie, nothing = member == 0, torch.zeros(len(action))
        score = torch.stack([lie.float(), nothing], 1)
        return Prediction(dict(obs), torch.where(lie, 10.0, -0.1), lie, nothing.bool(), score, nothing)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_a_success_that_a_second_member_denies_is_not_paid(verify, known):
    ticks = played(reaching(), 10)
    model = Lying(REACHING)
    model.known_reward.fill_(known)
    model.rewards.copy_(torch.tensor([-0.2, 10.0, 0.0]))
    world = imagined(model, ticks, 32, GuardConfig(Guard.none, verify=verify))
    world.reset()
    step, lied = world.step(torch.zeros(32, 2)), world._member[0] == 0
    assert 0 < lied.sum() < 32 and torch.equal(step.info["success"], lied & (not verify))
    without = -0.2 if known else -0.1
    assert torch.allclose(step.reward[lied], torch.tensor(without if verify else 10.0))
    assert bool((step.info["score"] == 0).all()) == verify, "thresholds are set by what counts"


def test_a_world_that_reports_no_success_has_none_in_imagination():
    ticks = played(env := ScaledEnv(LQR(2, LQRConfig(max_steps=20))), 10)
    world = imagined(fitted(env, ticks, replace(SMALL, updates=1)), ticks, 4, GuardConfig())
    world.reset()
    assert not ticks.knows_success and "success" not in world.step(torch.zeros(4, 1)).info
    still = SimpleNamespace(reset=lambda mask, seeds: None, step=lambda obs: torch.zeros(4, 1))
    found = evaluate(world, still, list(range(4)))
    assert found.success is None and mean(found) < 0, "a return, as in the world"


def test_failures_are_as_many_ticks_as_there_were():
    """Each of 40 episodes fails in its last tick, so episodes say nothing."""
    episode = torch.arange(40).repeat_interleave(50)
    last = torch.arange(2000) % 50 == 49
    x = torch.rand(2000, 4, generator=torch.Generator().manual_seed(0))
    x[:, 0] = torch.where(last, 2.0, x[:, 0])  # a failure is seen
    ticks = Ticks()
    no = torch.zeros(2000, dtype=torch.bool)
    facts = {"reward": torch.zeros(2000), "terminated": last, "success": no, "first": ~no}
    ticks.add(
        {"obs": {"state": x}, "next_obs": {"state": x}, "action": torch.zeros(2000, 2), **facts, "episode": episode}
    )
    model = fitted(reaching(), ticks, replace(SMALL, updates=300))
    held = ticks.split()[1]
    believed = model.scores_of(held)[:, 1] > model.thresholds[1]
    assert torch.equal(believed, held["terminated"])


def test_what_is_held_out_of_long_episodes_is_not_all_of_one():
    seen = played(reaching(), 10)
    for knows in (True, False):
        ticks = Ticks()
        ticks.add({**index(seen.all(), torch.zeros(2500, dtype=torch.int64)), "episode": torch.arange(2500) % 2})
        ticks.knows_success = knows
        fit, held = ticks.split()
        assert len(held["episode"].unique()) == (2 if knows else 4)
        assert len(fit["reward"]) + len(held["reward"]) == (5000 if knows else 2500), "both are all where they are few"
        if not knows:  # of 1250 ticks of each the parts 4 and 9, and 3 and 8
            assert tick_of(torch.arange(2500) % 2)[-1] == 1249 and len(held["reward"]) == 400
