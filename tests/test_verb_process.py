"""Worlds that a package registers when it is imported: named in a shell, and handed on to every child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from burnish.finetune.compare.compare import CompareConfig, Player
from burnish.finetune.processes.actor_process import FAILED, ActorConfig, gone, spawned
from burnish.finetune.processes.mailbox import Mailbox
from burnish.policies.build import build_policy, describe
from burnish.policies.cli.cli import main
from burnish.policies.cli.verb_process import VARIABLE, child_imports, start_verb
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import agent_spec
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.runs.checkpoint import save
from burnish.policies.runs.interrupt import Stop
from burnish.sim.build import make_env, named
from burnish.sim.external.settings import GymConfig

WORLD = "AcmePendulum-v0"
PACKAGE = """
import gymnasium
from gymnasium.envs.classic_control.pendulum import PendulumEnv

class Pendulum(PendulumEnv): ...

gymnasium.register("AcmePendulum-v0", {entry}, max_episode_steps=5)
"""
# How a package announces its world -> the module that a child has to import.
PACKAGES = {
    "a name": ("__init__.py", '"acme_worlds:Pendulum"', "acme_worlds"),
    "a callable": ("__init__.py", "Pendulum", "acme_worlds"),
    "a module inside": ("desk.py", '"acme_worlds.desk:Pendulum"', "acme_worlds.desk"),
    "a module that is not imported yet": ("__init__.py", '"acme_worlds.later:Pendulum"', "acme_worlds"),
}


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    gymnasium.registry.pop(WORLD, None)
    for name in [name for name in sys.modules if name.startswith("acme_worlds")]:
        del sys.modules[name]


def write(folder: Path, file: str = "__init__.py", entry: str = "Pendulum") -> None:
    (folder / "acme_worlds").mkdir()
    (folder / "acme_worlds/__init__.py").touch()
    (folder / "acme_worlds" / file).write_text(PACKAGE.format(entry=entry))


@pytest.mark.parametrize(("file", "entry", "module"), PACKAGES.values(), ids=PACKAGES)
def test_a_child_imports_what_has_registered_worlds_here(tmp_path, monkeypatch, file, entry, module):
    assert "acme" not in "".join(child_imports()), "the control: nothing is imported yet"
    write(tmp_path, file, entry)
    monkeypatch.syspath_prepend(tmp_path)
    import_module(module)
    assert WORLD in gymnasium.registry and module in child_imports()
    monkeypatch.setenv(VARIABLE, f"mine, {module}")
    assert child_imports()[:2] == ["mine", module] and child_imports().count(module) == 1, "the user's own come first"


@pytest.mark.parametrize("module", ["gymnasium.envs.classic_control", "__main__", "burnish.sim", "made_in_a_notebook"])
def test_a_child_does_not_import_what_it_has_or_cannot_find(module):
    before = child_imports()
    gymnasium.register(WORLD, f"{module}:World")
    assert child_imports() == before


@pytest.mark.parametrize(("modules", "status"), [("acme_worlds", 0), ("", 2)])
def test_a_shell_names_the_module(tmp_path, monkeypatch, capsys, modules, status):
    write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VARIABLE, modules)
    words = ["finetune", "method=gaussian_ppo", "env=gym", f"env.id={WORLD}", "worlds=2", "total=8", "eval.episodes=0"]
    assert main([*words, "method.loop.decisions_per_update=4", f"out={tmp_path}/run"]) == status
    assert (WORLD in capsys.readouterr().err) == (status == 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [(None, "ModuleNotFoundError: No module named 'acme_worlds'"), ("assert False", "(AssertionError)")],
)
def test_a_module_that_cannot_be_imported_is_one_sentence(tmp_path, monkeypatch, capsys, text, told):
    if text is not None:
        (tmp_path / "acme_worlds.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VARIABLE, "acme_worlds")
    assert main(["doctor", "--help"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("burnish doctor: BURNISH_IMPORT names acme_worlds") and told in said
    assert len(said.splitlines()) == 1


def test_a_comparison_evaluates_in_a_world_that_the_program_registered(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import_module("acme_worlds")
    config = GymConfig(WORLD)
    env = make_env(config, 1)
    policy = build_policy(GaussianConfig(hidden=[4]), replace(agent_spec(env.spec), action=env.spec.action), seed=0)
    save(tmp_path / "base", config=describe(policy, {"env": dict(named(config))}), state=policy.state_dict())
    player = Player(CompareConfig(str(tmp_path / "base"), ["dsrl"], episodes=2, videos=0), tmp_path, Stop(), 1)
    player.evaluate(str(tmp_path / "base"), tmp_path / "found.json")
    assert (tmp_path / "found.json").exists()
    del gymnasium.registry[WORLD]  # the control: nothing tells the child
    with pytest.raises(BurnishError, match=WORLD):
        player.evaluate(str(tmp_path / "base"), tmp_path / "other.json")


def knows(config: Any, seed: int) -> Any:
    """In the place of a method: it says whether the acting process knows the world."""
    raise BurnishError(f"known: {WORLD in gymnasium.registry}")


@pytest.mark.parametrize("imported", [True, False])
def test_the_acting_process_knows_the_worlds_of_its_learner(tmp_path, monkeypatch, imported):
    write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if imported:
        import_module("acme_worlds")
    process, connection = spawned(knows, None, ActorConfig(0, 0, 0, None))
    assert answer(connection) == f"known: {imported}"
    assert gone(process) == "exit status 0"


def answer(connection: Connection) -> str:
    message = Mailbox(connection).take(wait=True)
    assert message is not None and message.kind == FAILED
    return message.read()["why"]


def test_a_child_finds_modules_where_its_parent_does(tmp_path, monkeypatch):
    """The folder of a program that is run by its path is on its search path, and on that of no other."""
    (tmp_path / "acme_worlds.py").write_text("import sys; sys.stdout.write('imported')")
    monkeypatch.setenv(VARIABLE, "acme_worlds")
    for told in (b"", b"imported"):
        child = start_verb(["doctor", "--help"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert child.communicate(timeout=120)[0].startswith(told) and child.returncode == (0 if told else 2)
        monkeypatch.syspath_prepend(tmp_path)


def test_a_child_ends_with_a_parent_that_is_killed(tmp_path):
    """Else it would write on in a run that the next command takes for free."""
    begun = tmp_path / "begun"
    (tmp_path / "acme_slow.py").write_text(f"import time; open({str(begun)!r}, 'w').close(); time.sleep(600)")
    program = "from burnish.policies.cli.verb_process import start_verb as s; c = s(['doctor']); print(c.pid); c.wait()"
    told = {**os.environ, VARIABLE: "acme_slow", "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-uc", program], env=told, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            until(begun.exists)
            assert not ended(child)  # the control
            parent.kill()
            until(lambda: ended(child))
        finally:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def ended(pid: int) -> bool:
    """It is gone, or waits for nobody to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(happened: Callable[[], bool], patience_s: float = 120.0) -> None:
    late = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < late, "it does not happen"
        time.sleep(0.05)
