"""How environments of other packages are made: alike in every process, of old interfaces, in Pythons apart."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from burnish.policies.core.errors import BurnishError
from burnish.policies.runs.stored_world import plain_world
from burnish.sim import __main__ as verbs
from burnish.sim.build import make_env
from burnish.sim.experts import make_expert
from burnish.sim.external import experts
from burnish.sim.external.maniskill import ManiSkillConfig
from burnish.sim.external.settings import GymConfig, RemoteConfig, environment
from burnish.sim.external.worlds import ExternalEnv


def first(name: str, worlds: int, processes: int) -> torch.Tensor:
    env = ExternalEnv(worlds, GymConfig(f"odd_worlds:{name}", max_steps=9, control_hz=10.0, processes=processes))
    return env.reset(seeds=[1] * worlds)["state"]


def test_worlds_draw_the_same_while_they_are_made_in_whatever_process():
    mine = np.random.get_state()[1:3]
    here, there = first("Unlucky", 2, 0), first("Unlucky", 4, 2)
    assert torch.equal(here[0].expand(4, -1), there) and float(here[0]) > 0
    assert np.array_equal(np.random.get_state()[1], mine[0]) and np.random.get_state()[2] == mine[1]


@pytest.mark.parametrize("processes", [0, 1])
def test_an_error_without_words_is_told_by_its_kind(processes):
    with pytest.raises(BurnishError, match=r"cannot be made \(AssertionError \(at .*odd_worlds\.py:\d+\)\)"):
        first("Silent", 1, processes)


def test_an_old_environment_is_seeded_and_drawn_by_its_own_methods(monkeypatch):
    monkeypatch.setitem(sys.modules, "gym", SimpleNamespace())
    env = ExternalEnv(2, GymConfig("odd_worlds:Ancient", max_steps=3, control_hz=10.0, processes=0))
    begun = env.reset(seeds=[3, 4])["state"][:, 0]
    assert begun.tolist() == pytest.approx([np.random.RandomState(seed).uniform() for seed in (3, 4)])
    step = env.step(torch.zeros(2, 2))
    assert step.truncated.all() and not step.terminated.any() and env.spec.max_steps == 3
    link: Any = env.workers.links[0]
    link.begin(b"v", {"world": 0})
    assert link.finish()[0] == {"shape": [4, 4, 3]}


def test_a_module_may_register_the_environment_that_is_named_with_it():
    env = ExternalEnv(1, GymConfig("odd_worlds:Odd-v0", control_hz=10.0))
    assert env.spec.max_steps == 11


def test_the_python_of_a_recipe_inherits_no_paths_of_modules(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/opt/ros")
    assert "PYTHONPATH" in environment() and "PYTHONPATH" not in environment(apart=True)


ALONE = """
import runpy, sys
sys.modules["burnish"] = None  # it cannot be imported
world = type("World", (), {"__module__": "gym_pusht.envs", "unwrapped": property(lambda self: self)})()
print(type(runpy.run_path(sys.argv[1])["make"](world)).__name__)
"""


def test_the_usual_expert_is_made_where_burnish_is_not_installed(monkeypatch):
    """By the path of its file, which finds that of the package beside it."""
    asked: list[str] = []
    config = RemoteConfig("Pendulum-v1", python=sys.executable)
    env: Any = make_env(config, 1)
    take_on = env.workers.take_on
    monkeypatch.setattr(env.workers, "take_on", lambda name, called: asked.append(name) or take_on(name, called))
    with pytest.raises(BurnishError, match="no expert for environments of gymnasium"):
        make_expert(config, 1, env=env)
    file = asked[0].removesuffix(":make")
    assert file == experts.__file__
    told = subprocess.run([sys.executable, "-c", ALONE, file], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "PushTExpert"


def test_a_stored_world_may_have_a_long_name():
    """The longest of LIBERO has 87 characters."""
    plain_world({"id": "libero_90/" + "x" * 87, "name": "libero"}, "the checkpoint")
    with pytest.raises(BurnishError, match="which is no name"):
        plain_world({"id": "x" * 129}, "the checkpoint")


@pytest.mark.parametrize("processes", [0, 1])
def test_a_constructor_that_ends_its_process_is_a_sentence(processes):
    with pytest.raises(BurnishError, match=r"env\.id=odd_worlds:Refusing cannot be made .*(SystemExit: 3|status 3)"):
        ExternalEnv(1, GymConfig("odd_worlds:Refusing", max_steps=5, processes=processes))


@pytest.mark.maniskill
def test_settings_that_burnish_refuses_are_told_by_its_own_sentence(require):
    require("mani_skill.envs")
    with pytest.raises(BurnishError, match=r"^env\.control_mode=swim is not one of"):
        make_env(ManiSkillConfig("PickCube-v1", control_mode="swim", processes=1), 1)


def test_an_expert_of_maniskill_stands_beside_worlds_on_the_cpu(monkeypatch):
    made: list[Any] = []

    def stop(config: Any, worlds: int) -> Any:
        made.append(config)
        raise BurnishError("stop")

    monkeypatch.setattr(verbs, "make_env", stop)
    with pytest.raises(BurnishError, match="stop"):
        verbs._scene(verbs.CollectConfig(ManiSkillConfig("PickCube-v1")))
    assert made[0].backend.value == "cpu"
