"""How episodes begin, as evaluations keep it: each number of the first state, by the name that its world gives it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from burnish.policies.__main__ import starts
from burnish.policies.core.chunk import HistoryEnv
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.wrapper import state_names
from burnish.sim.arm import JOINTS
from burnish.sim.build import make_env
from burnish.sim.tasks.avoid import FIELD
from burnish.sim.tasks.push import TARGET

DESK = ["reach", "push", "pick_place", "insert", "stack", "avoid"]


@pytest.mark.sim
@pytest.mark.parametrize("name", DESK)
def test_every_number_has_a_name_of_its_own(name):
    env = make_env(name, 1)
    names = state_names(ScaledEnv(env))
    assert names is not None and len(set(names)) == len(names) == env.spec.obs.shapes["state"][0]


def begun(name: str) -> Any:
    env = make_env(name, 3)
    env.reset(seeds=[1, 2, 3])
    return env


def named(env: Any) -> dict[str, np.ndarray]:
    return dict(zip(env.state_names, env.task.observe()["state"].T, strict=True))


@pytest.mark.sim
def test_the_arm_is_called_what_it_is():
    env = begun("insert")
    env.step(torch.tensor(env.spec.action.high).expand(3, -1))  # now speeds and targets differ
    state, arm = named(env), env.task.hand.arm
    for k, joint in enumerate(JOINTS):
        assert np.allclose(state[f"angle {joint}"], arm.q()[:, k])
        assert np.allclose(state[f"speed {joint}"], 0.2 * arm.velocity()[:, k])
        assert np.allclose(state[f"ahead {joint}"], np.clip(100 * (arm.target[:, k] - arm.q()[:, k]), -10, 10))
    assert np.allclose(state["gripper target"], arm.target[:, 5])
    assert np.allclose(state["tool height"], arm.tcp()[:, 2])


@pytest.mark.sim
def test_so_are_the_things_of_each_task():
    env = begun("insert")
    assert np.allclose(named(env)["hole x"], 20 * env.task.believed()[:, 0] - 4)
    assert np.allclose(named(env)["hole y"], 20 * env.task.believed()[:, 1])
    assert np.allclose(named(env)["hole turned, cos"], np.cos(env.task.memory["yaw"]))
    env = begun("push")
    tool = env.task.hand.arm.tcp()
    assert np.allclose(named(env)["tool x"], 20 * (tool[:, 0] - TARGET[0]))
    assert np.allclose(named(env)["ball height"], 50 * np.minimum(tool[:, 2], 0.1))
    assert np.allclose(named(env)["T turned, cos"], np.cos(env.task.error()[:, 2]))
    for name in ("pick_place", "stack"):
        env = begun(name)
        cube, goal = env.task.cube.position(), env.task.goal()
        assert np.allclose(named(env)["goal x"], 20 * goal[:, 0])
        assert np.allclose(named(env)["goal z from cube"], 20 * (goal - cube)[:, 2])
        assert np.allclose(named(env)["cube y from tool"], 20 * (cube - env.task.hand.arm.tcp())[:, 1])
    env = begun("avoid")
    tip = env.task.tip()
    assert np.allclose(named(env)["tip y"], 20 * (tip - FIELD)[:, 1])
    assert np.allclose(named(env)["gap"], 50 * np.minimum(env.task.clearance(tip, tip), 0.05))
    env = begun("reach")
    assert np.allclose(named(env)["goal y"], env.task.goal()[:, 1])
    assert np.allclose(named(env)["goal z from tool"], (env.task.goal() - env.task.hand.arm.tcp())[:, 2])


@pytest.mark.sim
def test_the_first_state_of_each_seed_is_kept():
    env = ScaledEnv(make_env("insert", 2))
    found = starts(HistoryEnv(env, 2), [5, 6, 7])  # one more than worlds
    assert found["names"] == list(state_names(env) or ()) and list(found["values"]) == ["5", "6", "7"]
    for seed, row in found["values"].items():
        assert row == make_env("insert", 1).reset(seeds=[int(seed)])["state"][0].tolist()


def test_without_names_they_are_counted():
    found = starts(make_env("two_mode", 2), [1])
    assert found["names"][:2] == ["state[0]", "state[1]"] and len(found["values"]["1"]) == len(found["names"])
