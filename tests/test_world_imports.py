"""Which modules a world imports: those that the command line or a program names, and none for a file's word."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest
import torch

from burnish.policies.core.errors import BurnishError
from burnish.policies.runs.stored_world import known_elsewhere
from burnish.sim.build import Named, world_from
from burnish.sim.external.settings import GymConfig
from burnish.sim.external.worlds import ExternalEnv

REGISTERS = """
import gymnasium
gymnasium.register("{}", lambda: gymnasium.make("Pendulum-v1").unwrapped)
"""


@pytest.fixture
def guest(tmp_path, monkeypatch):
    """A package that registers an environment when it is imported, and has a callable that returns one."""
    (tmp_path / "guest_worlds.py").write_text(
        REGISTERS.format("guest_worlds/In-v0")
        + "def made(**kwargs):\n    return gymnasium.make('Pendulum-v1', **kwargs)\n"
        + "from gymnasium.envs.classic_control import PendulumEnv as Swing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "guest_worlds"
    sys.modules.pop("guest_worlds", None)


@pytest.mark.parametrize(
    "config",
    [
        {"id": "guest_worlds/In-v0"},  # by the prefix of its id
        {"id": "guest_worlds:made", "kwargs": {"g": 9.0}},
        {"id": "guest_worlds:made", "processes": 1},
        {"id": "guest_worlds/In-v0", "processes": 2},
    ],
)
def test_the_command_line_imports_what_it_names(guest, config):
    env = ExternalEnv(2, GymConfig(**{"processes": 0, "max_steps": 5, **config}))
    assert env.reset()["state"].shape == (2, 3)
    assert env.step(torch.zeros(2, 1)).truncated.tolist() == [False, False]


@pytest.mark.parametrize(
    ("stored", "sentence"),
    [
        ({"id": "guest_worlds/In-v0"}, "would run code of guest_worlds .BURNISH_IMPORT=guest_worlds"),
        ({"id": "Pendulum-v1", "package": "guest_worlds"}, "would run code of guest_worlds"),
        ({"id": "Pendulum-v1", "package": "guest_worlds.inner"}, "would run code of guest_worlds"),
        ({"id": "guest_worlds:made"}, "would run code of guest_worlds"),
    ],
)
def test_a_stored_world_imports_nothing(guest, stored, sentence):
    with pytest.raises(BurnishError, match=sentence):
        world_from({"name": "gym", "config": stored})
    assert guest not in sys.modules
    world_from(Named(name="gym", config=stored))  # the control: the user's own word


def test_a_stored_world_of_an_imported_package_is_made(guest):
    import_module(guest)
    assert world_from({"name": "gym", "config": {"id": "guest_worlds/In-v0"}}).id == "guest_worlds/In-v0"


CALLED = ["os:abort", "torch.utils.cpp_extension:load", "metaworld.py:make", "argparse:ArgumentParser"]
CALLED += [f"guest_worlds{name}" for name in (".py:made", ":made", ":Swing.reset", ":absent")]


@pytest.mark.parametrize("name", CALLED)
def test_a_stored_world_calls_nothing_but_classes_of_environments(guest, name):
    """Of what is imported already: Python's own modules are, and a file of that name may lie in the folder."""
    import_module(guest)
    with pytest.raises(BurnishError, match="would run code of"):
        world_from({"name": "gym", "config": {"id": name}})
    swing = {"name": "gym", "config": {"id": "guest_worlds:Swing"}}
    assert world_from(swing).id == "guest_worlds:Swing"
    assert not known_elsewhere(swing, []) and known_elsewhere(swing, [guest]), "it is imported in this process alone"


def test_a_stored_world_calls_what_the_user_named(guest, monkeypatch):
    monkeypatch.setenv("BURNISH_IMPORT", guest)
    assert world_from({"name": "gym", "config": {"id": "guest_worlds:made"}}).id == "guest_worlds:made"
    with pytest.raises(BurnishError, match="would run code of"):
        world_from({"name": "gym", "config": {"id": "guest_worlds.py:made"}})


@pytest.mark.parametrize("where", [{"python": "python3"}, {"address": "127.0.0.1:1"}])
def test_a_stored_world_starts_and_reaches_nothing(where):
    with pytest.raises(BurnishError, match="files start and reach nothing"):
        world_from({"name": "remote", "config": {"id": "Pendulum-v1", **where}})


def test_a_module_of_this_folder_is_told_from_one_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slot_task.py").write_text("import no_such_package\n")

    def refusal() -> str:
        with pytest.raises(BurnishError) as caught:
            ExternalEnv(1, GymConfig(id="slot_task:make", processes=0))
        return str(caught.value)

    assert "say PYTHONPATH=. before the command" in refusal()
    monkeypatch.syspath_prepend(tmp_path)
    assert "No module named 'no_such_package'" in refusal() and "PYTHONPATH" not in refusal()
    sys.modules.pop("slot_task", None)
