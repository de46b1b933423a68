"""What a tick pays and how it ends, computed from what a world shows."""

from __future__ import annotations

import pytest
import torch

from burnish.policies.core.scale import ScaledEnv
from burnish.policies.measure.evaluate import evaluation_seeds
from burnish.sim.batch import BatchedMujoco
from burnish.sim.desk import Reward
from burnish.sim.experts import make_expert
from burnish.sim.tasks.insert import Insert, InsertConfig
from burnish.sim.tasks.pick_place import PickPlace, PickPlaceConfig
from burnish.sim.tasks.push import Push, PushConfig

pytestmark = pytest.mark.sim


@pytest.mark.parametrize("task", [Push(PushConfig(reward=Reward.dense)), Insert(InsertConfig(reward=Reward.dense))])
def test_the_state_says_what_a_tick_paid(task):
    """All but a T that tips, and the first tick of an episode, which a dense reward begins to count after."""
    raw = BatchedMujoco(task, 16)
    env, expert, seeds = ScaledEnv(raw), make_expert(task.config, 16, env=raw), evaluation_seeds(16)
    obs, active, succeeded = env.reset(seeds=seeds), torch.ones(16, dtype=torch.bool), 0
    expert.reset(active, seeds)
    assert env.known_outcome is not None
    for tick in range(task.config.max_steps):
        before = obs["state"].clone()
        step = env.step(expert.step(obs), active)
        reward, success, failure = env.known_outcome({"state": before}, step.obs)
        assert tick == 0 or torch.allclose(reward[active], step.reward[active], atol=1e-4)
        assert torch.equal((success | failure)[active], step.terminated[active])
        assert torch.equal(success[active], step.info["success"][active])
        obs, succeeded = step.obs, succeeded + int(success[active].sum())
        active = active & ~(step.terminated | step.truncated)
        if not active.any():
            break
    assert succeeded > 8


@pytest.mark.parametrize("task", [PickPlace(PickPlaceConfig()), Insert(InsertConfig(hole_error_m=0.001))])
def test_a_state_that_does_not_say_it_is_no_outcome(task):
    """A cube's speed is not shown, nor where a hole really is."""
    assert BatchedMujoco(task, 1).known_outcome is None
