"""How episodes begin, as evaluations keep it: every number of the first state, under the name that its world gives it."""

from __future__ import annotations

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


@pytest.mark.sim
def test_names_say_what_the_numbers_are():
    env = make_env("insert", 3)
    state = dict(zip(env.state_names, env.reset(seeds=[1, 2, 3])["state"].T, strict=True))
    hole = torch.from_numpy(env.task.believed())
    torch.testing.assert_close(state["hole x"].double(), 20 * hole[:, 0] - 4, rtol=0, atol=1e-5)
    torch.testing.assert_close(state["hole y"].double(), 20 * hole[:, 1], rtol=0, atol=1e-5)
    torch.testing.assert_close(state["tool height"].double(), torch.from_numpy(env.task.hand.arm.tcp()[:, 2]))
    arm = env.task.hand.arm
    for k, joint in enumerate(JOINTS):
        torch.testing.assert_close(state[f"angle {joint}"].double(), torch.from_numpy(arm.q()[:, k]), rtol=0, atol=1e-5)
    env.step(torch.tensor(env.spec.action.high).expand(3, -1))
    state = dict(zip(env.state_names, env.task.observe()["state"].T, strict=True))
    for k, joint in enumerate(JOINTS):
        assert np.allclose(state[f"speed {joint}"], 0.2 * arm.velocity()[:, k])
        assert np.allclose(state[f"ahead {joint}"], np.clip(100 * (arm.target[:, k] - arm.q()[:, k]), -10, 10))
    env = make_env("push", 3)
    state = dict(zip(env.state_names, env.reset(seeds=[1, 2, 3])["state"].T, strict=True))
    tool = torch.from_numpy(env.task.hand.arm.tcp())
    torch.testing.assert_close(state["tool x"].double(), 20 * (tool[:, 0] - TARGET[0]), rtol=0, atol=1e-5)
    torch.testing.assert_close(state["ball height"].double(), 50 * tool[:, 2].clamp(max=0.1), rtol=0, atol=1e-5)
    for name in ("pick_place", "stack"):
        env = make_env(name, 3)
        env.reset(seeds=[1, 2, 3])
        state = dict(zip(env.state_names, env.task.observe()["state"].T, strict=True))
        assert np.allclose(state["goal x"], 20 * env.task.goal()[:, 0])
        assert np.allclose(state["goal z from cube"], 20 * (env.task.goal() - env.task.cube.position())[:, 2])
        assert np.allclose(state["cube y from tool"], 20 * (env.task.cube.position() - env.task.hand.arm.tcp())[:, 1])
    env = make_env("avoid", 3)
    env.reset(seeds=[1, 2, 3])
    state = dict(zip(env.state_names, env.task.observe()["state"].T, strict=True))
    tip = env.task.tip()
    assert np.allclose(state["tip y"], 20 * (tip - FIELD)[:, 1])
    assert np.allclose(state["gap"], 50 * np.minimum(env.task.clearance(tip, tip), 0.05))
    env = make_env("reach", 3)
    env.reset(seeds=[1, 2, 3])
    state = dict(zip(env.state_names, env.task.observe()["state"].T, strict=True))
    assert np.allclose(state["goal y"], env.task.goal()[:, 1])
    assert np.allclose(state["goal z from tool"], (env.task.goal() - env.task.hand.arm.tcp())[:, 2])


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
