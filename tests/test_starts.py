"""How episodes begin, as evaluations keep it: every number of the first state, under the name that the world gives it."""

from __future__ import annotations

import pytest
import torch

from burnish.policies.__main__ import starts
from burnish.policies.core.chunk import HistoryEnv
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.wrapper import state_names
from burnish.sim.build import make_env
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
    env = make_env("push", 3)
    state = dict(zip(env.state_names, env.reset(seeds=[1, 2, 3])["state"].T, strict=True))
    tool = torch.from_numpy(env.task.hand.arm.tcp())
    torch.testing.assert_close(state["tool x"].double(), 20 * (tool[:, 0] - TARGET[0]), rtol=0, atol=1e-5)
    torch.testing.assert_close(state["ball height"].double(), 50 * tool[:, 2].clamp(max=0.1), rtol=0, atol=1e-5)


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
