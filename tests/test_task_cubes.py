"""pick_place and stack: the reward on the way, the grasp, the experts."""

from __future__ import annotations

import cubes_lab as lab
import pytest

from burnish.sim.experts.carrying import Carry

pytestmark = pytest.mark.sim
TASKS = ["pick_place", "stack"]


@pytest.fixture(scope="module", params=TASKS)
def shown(request):
    return lab.demonstration(request.param)


def test_the_dense_reward_rises_to_success(shown):
    lab.check_rising(shown["reward"], shown["active"])


def test_the_grasp_holds(shown):
    lab.check_grasp(shown["place"], shown["carried"], shown["overlap"])


# With 64 episodes one standard error is at most 0.06; bounds are three of them around what 256 episodes gave. The
# clumsy expert fails wherever the goal lies far out.
LEVELS = [("clean", 0.95, 1), ("multi_modal", 0.95, 1), ("clumsy", 0.3, 0.7)]
LEVELS = [(task, *level) for task in TASKS for level in LEVELS]


@pytest.mark.parametrize(
    ("task", "level", "low", "high"), [*LEVELS, ("pick_place", "noisy", 0.75, 1), ("stack", "noisy", 0.62, 1)]
)
def test_experts(task, level, low, high):
    assert low <= lab.played(task, level).summary()["success_rate"] <= high


@pytest.mark.parametrize("task", TASKS)
def test_who_carries_it_elsewhere_or_acts_at_random_fails(task):
    assert lab.played(task, "clean", 16, Carry(short=1.0)).summary()["success_rate"] == 0
    env = lab.worlds(task, 16)
    env.reset(seeds=range(16))
    assert not any(env.step(a).info["success"].any() for a in lab.random_actions(env, 60))
