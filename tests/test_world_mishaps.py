"""Worlds after a mishap: an interrupt, a worker that was lost, an expert that failed, an older state."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from odd_worlds import Older
from test_world_workers import killed

from burnish.policies.core.errors import BurnishError
from burnish.sim.external import world_server
from burnish.sim.external.experts import maniskill
from burnish.sim.external.settings import GymConfig, Reward
from burnish.sim.external.worlds import ExternalEnv


@pytest.mark.parametrize("restart", [False, True])
def test_the_answer_to_a_request_that_was_interrupted_is_not_taken_for_the_next(restart, monkeypatch):
    env, other = (ExternalEnv(2, GymConfig(processes=1, restart=restart)) for _ in range(2))
    env.reset(seeds=[1, 2])

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(world_server, "receive", interrupted)
        env.step(torch.ones(2, 1))
    if not restart:
        with pytest.raises(BurnishError, match=r"worlds 0 to 1 of Pendulum-v1 died \(.*was interrupted\)"):
            env.reset()
        return
    assert torch.equal(env.reset(seeds=[3, 4])["state"], other.reset(seeds=[3, 4])["state"])
    for _ in range(3):
        assert torch.equal(env.step(torch.ones(2, 1)).obs["state"], other.step(torch.ones(2, 1)).obs["state"])


def test_the_step_in_which_a_world_is_lost_is_not_paid_as_a_success():
    config = GymConfig(processes=2, restart=True, success="terminated", reward=Reward.until_success)
    env = ExternalEnv(2, config)
    env.reset()
    killed(env, 1)
    step = env.step(torch.zeros(2, 1))
    assert step.truncated.tolist() == [False, True] and step.reward.tolist() == [-1, -1]


def test_a_state_that_is_loaded_over_an_ended_episode_asks_the_expert_anew():
    env = ExternalEnv(2, GymConfig(processes=0, max_steps=4))
    env.workers.take_on("odd_worlds:Looking")
    env.reset(seeds=[1, 2])
    env.step(torch.ones(2, 1))
    saved, expected = env.state_dict(), env.advice()
    while not env.step(torch.ones(2, 1)).truncated.all():
        env.advice()
    ended, last = env.state_dict(), env.advice()
    env.load_state_dict(saved)
    assert torch.equal(env.advice(), expected) and not torch.equal(last, expected)
    env.load_state_dict(ended)
    assert torch.equal(env.advice(), expected), "no expert is asked once its episode has ended"


def test_an_expert_of_another_number_of_actions_is_refused():
    env = ExternalEnv(1, GymConfig("odd_worlds:Passing", max_steps=4, processes=0))
    env.workers.take_on("odd_worlds:One")
    env.reset()
    with pytest.raises(BurnishError, match=r"array of size 1 into shape \(2,\)"):
        env.advice()


def test_keys_that_become_one_name_are_refused():
    with pytest.raises(BurnishError, match="two parts of its observation have one name"):
        ExternalEnv(1, GymConfig("odd_worlds:Twins", max_steps=4, processes=0))


def test_a_planner_that_failed_says_so_again(monkeypatch):
    def broken(env: Any, debug: bool, vis: bool) -> None:
        raise RuntimeError("mplib failed")

    monkeypatch.setattr(maniskill, "joints", lambda simulation: np.zeros(9, np.float32))
    monkeypatch.setattr(maniskill, "solution", lambda task: broken)
    task = SimpleNamespace(simulation=None, config=SimpleNamespace(id="PickCube-v1"), action_mode="pd_joint_pos")
    expert = maniskill.PlannerExpert(SimpleNamespace(unwrapped=task, action_space=np.zeros((8, 1))))
    expert.reset(None, {})
    errors: list[Exception] = []

    def ask() -> None:
        try:
            expert.act(None, {})
        except RuntimeError as error:
            errors.append(error)

    for _ in range(2):
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(10)
    assert list(map(str, errors)) == ["mplib failed"] * 2


@pytest.mark.parametrize("processes", [0, 1, 2])
def test_each_world_has_its_own_state_of_the_generator_that_all_share(processes):
    env = ExternalEnv(2, GymConfig("odd_worlds:Older", max_steps=9, processes=processes))
    bare, learner = Older(), np.random.get_state()[1:3]
    bare.reset(seed=5)
    expected = [float(bare.step(None)[0][0]) for _ in range(9)]
    np.random.set_state(("MT19937", *learner))
    for seeds in ([5, 6], [6, 5]):  # also where it was begun and never stepped
        env.reset(seeds=[1, 2])
        env.reset(seeds=seeds)
        found = torch.stack([env.step(torch.zeros(2, 2)).obs["state"][:, 0] for _ in range(9)], 1)
        assert torch.equal(found[seeds.index(5)], torch.tensor(expected)) and not torch.equal(found[0], found[1])
    now = np.random.get_state()[1:3]
    assert np.array_equal(now[0], learner[0]) and now[1] == learner[1], "the learner's is left alone"
