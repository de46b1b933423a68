"""`burnish worlds`: environments of recipes. Tiny ones here, of a folder on this disk; the real ones where they are."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from verb_lab import refused

from burnish.policies.cli import environments
from burnish.policies.cli.cli import main
from burnish.policies.cli.environments import MARKER, Recipe
from burnish.policies.core.errors import BurnishError
from burnish.policies.external.recipes import RECIPES as LEROBOT
from burnish.policies.runs.stored_world import plain_world
from burnish.sim.external import side_planner, side_worlds
from burnish.sim.external.recipes import RECIPES, WORLDS
from burnish.sim.external.settings import RemoteConfig
from burnish.sim.external.workers import recipe_of
from burnish.sim.external.worlds import ExternalEnv

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
REAL = {name: WORLDS.made(name) is not None for name in RECIPES}  # before a test names another folder
EMPTY = Recipe("nothing", (HERE,), (), maker="", example="Foo-v0", gigabytes=0.01)
ABSENT = Recipe("fails", (HERE,), ("--no-index burnish-is-not-there==1",), maker="", example="Foo-v0", gigabytes=0.01)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_WORLDS", str(tmp_path / "worlds"))
    monkeypatch.setitem(RECIPES, "empty", EMPTY)
    monkeypatch.setitem(RECIPES, "absent", ABSENT)
    return tmp_path / "worlds"


def left(home: Path) -> list[str]:
    """In the folder of environments, beside locks."""
    return sorted(path.name for path in home.iterdir() if not path.name.endswith(".lock"))


def test_an_environment_is_made_once_and_listed(home, capsys):
    assert main(["worlds"]) == 0 and re.search(r"^empty +no ", capsys.readouterr().out, re.MULTILINE)
    assert main(["worlds", "add", "empty"]) == 0
    assert "env=remote env.name=empty env.id=Foo-v0" in capsys.readouterr().out
    found = Path(WORLDS.python("empty"))
    code = "import sys; print(sys.prefix)"
    prefix = subprocess.run([found, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert prefix == str(home / "empty"), "an interpreter of its own"
    (home / "empty/mine").touch()
    assert main(["worlds", "add", "empty"]) == 0 and "is there already; force=true" in capsys.readouterr().out
    assert (home / "empty/mine").exists()
    assert main(["worlds", "list"]) == 0
    assert re.search(rf"^empty +yes +{re.escape(HERE)}\.\d+ +0\.\d GB +nothing$", capsys.readouterr().out, re.MULTILINE)
    assert main(["worlds", "add", "empty", "force=true"]) == 0
    assert not (home / "empty/mine").exists() and WORLDS.made("empty")


def test_an_environment_of_an_older_recipe_says_so(home, capsys):
    WORLDS.add("empty")
    marker = home / "empty" / MARKER
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "recipe": "of last year"}))
    capsys.readouterr()
    WORLDS.add("empty")
    assert "made by an older recipe; force=true" in capsys.readouterr().out
    assert any(re.match(r"empty +older recipe", line) for line in WORLDS.listed())


def test_packages_that_cannot_be_had_are_one_sentence_and_leave_nothing(home, capsys):
    assert main(["worlds", "add", "absent"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "No matching distribution found for burnish-is-not-there==1" in said
    assert "PIP_INDEX_URL" in said and left(home) == [] and WORLDS.made("absent") is None


def test_a_probe_that_fails_is_one_sentence_and_leaves_nothing(home, monkeypatch):
    monkeypatch.setitem(RECIPES, "broken", Recipe("no", (HERE,), (), maker="robosuite", example="Lift", gigabytes=0.01))
    with pytest.raises(BurnishError, match=r"its probe failed .*ModuleNotFoundError: No module named 'numpy'"):
        WORLDS.add("broken")
    assert left(home) == []


def test_a_probe_that_says_nothing(home, monkeypatch, tmp_path, capsys):
    (tmp_path / "silent.py").touch()
    monkeypatch.setitem(RECIPES, "silent", Recipe("no", (HERE,), (), maker="x", example="Foo-v0", gigabytes=0.01))
    replace(WORLDS, script=str(tmp_path / "silent.py")).add("silent")
    assert WORLDS.made("silent") and "silent: nothing to try" in capsys.readouterr().out


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_was_interrupted_does_not_count_as_there(home, how):
    """In the middle of installing. Killed outright, it leaves a folder that is no environment, and is made anew."""
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a shell in the background switches off
        "from burnish.policies.cli import environments\n"
        "from burnish.sim.external.recipes import WORLDS\n"
        "def install(row, name, python, folder):\n"
        "    folder.mkdir(); (folder / 'half').touch()\n"
        "    print('half', flush=True); time.sleep(60)\n"
        "environments._install = install\n"
        f"WORLDS.recipes['empty'] = environments.Recipe('nothing', ('{HERE}',), (), '', 'Foo-v0', 0.01)\n"
        "WORLDS.add('empty')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as it:
        assert it.stdout is not None and any("half" in line for line in it.stdout)
        with pytest.raises(BurnishError, match="being made by another process"):
            WORLDS.add("empty")
        os.kill(it.pid, how)
        it.communicate(timeout=30)
    assert left(home) == ([] if how == signal.SIGINT else ["empty"]) and WORLDS.made("empty") is None
    with pytest.raises(BurnishError, match="`burnish worlds add empty` makes it"):
        WORLDS.python("empty")
    WORLDS.add("empty")
    assert WORLDS.made("empty") and not (home / "empty/half").exists()


@pytest.mark.parametrize("name", ["../x", "/tmp", ".", "", "robosuite/../libero"])
def test_no_name_leads_elsewhere(home, capsys, name):
    assert "there is no recipe" in refused(capsys, "worlds", "add", f"name={name}", "do=add")
    assert not home.exists(), "nothing was made"
    with pytest.raises(BurnishError, match="there is no recipe"):
        ExternalEnv(1, RemoteConfig(name=name, id="Lift"))


@pytest.mark.parametrize("words", [["add"], ["list", "robosuite"], ["name=robosuite"]])
def test_words_that_say_nothing(home, capsys, words):
    assert "`burnish worlds add NAME`: maniskill-planner, robosuite" in refused(capsys, "worlds", *words)


def test_a_world_of_an_environment_that_is_not_there(home):
    with pytest.raises(BurnishError, match="environment robosuite is not there; `burnish worlds add robosuite`"):
        ExternalEnv(1, RemoteConfig(name="robosuite", id="Lift"))


def test_an_id_is_made_by_the_recipe_unless_its_user_says_how():
    found = recipe_of(RemoteConfig(name="robosuite", id="Lift", kwargs={"robots": "Sawyer"}, max_steps=7))
    assert found["id"] == f"{side_worlds.__file__}:robosuite"
    assert found["kwargs"] == {"robots": "Sawyer", "id": "Lift", "max_steps": 7}
    for config in (RemoteConfig(name="robosuite", id="a:b"), RemoteConfig(name="robosuite", id="b", package="a")):
        assert recipe_of(config)["id"] == config.id and not recipe_of(config)["kwargs"]


def test_what_is_stored_may_name_an_environment_but_no_code_in_it():
    plain_world({"id": "Lift", "name": "robosuite", "python": None}, "it")
    for settings in ({"id": "mine:world", "name": "robosuite"}, {"id": "Lift", "name": "../x"}):
        with pytest.raises(BurnishError):
            plain_world(settings, "it")


def test_an_environment_plays(home, monkeypatch):
    """The way of a real one, with this Python in its place."""
    monkeypatch.setattr(environments.Environments, "python", lambda self, name: {"empty": sys.executable}[name])
    env = ExternalEnv(2, RemoteConfig(name="empty", id="Pendulum-v1", package="gymnasium"))
    env.reset()
    assert env.step(torch.zeros(2, 1)).obs["state"].shape == (2, 3)


def test_an_interpreter_of_another_version_is_looked_for(home, monkeypatch, tmp_path):
    for name in ("python3.1", "python3.2"):  # the first one is a stand-in, as pyenv has them for what is not installed
        (tmp_path / name).write_text(f"#!/bin/sh\n{'exit 127' if name.endswith('1') else 'echo 3.2.7'}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    row = Recipe("old", ("3.1", "3.2"), (), maker="", example="", gigabytes=0)
    assert environments.interpreter_for(row, "old", None) == ("python3.2", "3.2.7")
    (tmp_path / "python3.2").unlink()
    expected = rf"old needs Python 3.1 or 3.2, and {re.escape(sys.executable)} is {HERE}\.\d+, no python3.1 works"
    with pytest.raises(BurnishError, match=f"{expected}, no python3.2 works; install one"):
        environments.interpreter_for(row, "old", None)
    with pytest.raises(BurnishError, match="name one: python="):
        environments.interpreter_for(row, "old", sys.executable)


def test_a_full_disk_is_told_before_anything_is_made(home, monkeypatch):
    monkeypatch.setitem(RECIPES, "large", Recipe("all", (HERE,), (), maker="", example="", gigabytes=1e6))
    with pytest.raises(BurnishError, match="BURNISH_WORLDS"):
        WORLDS.add("large")
    assert left(home) == []


# ---- The rows, and the real ones ----


@pytest.mark.parametrize("name", [*RECIPES, *LEROBOT])
def test_every_package_of_a_recipe_is_pinned(name):
    row = {**RECIPES, **LEROBOT}[name]
    words = [word for step in row.steps for word in step.split() if not word.startswith(("--", "https://"))]
    assert words and all(re.fullmatch(r"[\w.-]+==[\w.+]+", word) for word in words)
    names = [re.sub(r"[-_.]+", "-", word.partition("==")[0]).lower() for word in words]
    assert len(set(names)) == len(names) == row.packages
    assert re.fullmatch(r"[a-z][a-z-]*", name)
    assert name in LEROBOT or (row.maker in side_worlds.PROBES and hasattr(side_worlds, row.maker))


@pytest.mark.parametrize("module", [side_worlds, side_planner])
def test_what_runs_there_needs_python_3_8_and_numpy_alone(module):
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))
    head = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name if isinstance(node, ast.Import) else node.module for node in head for alias in node.names}
    assert {str(name).partition(".")[0] for name in names} <= set(sys.stdlib_module_names) | {"numpy"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_real_one_plays_equal_episodes_on_equal_seeds(name):
    if not REAL[name]:
        pytest.skip(f"`burnish worlds add {name}` was not called on this machine")
    if "none of which can be played" in (WORLDS.made(name) or {}).get("probe", ""):
        pytest.skip("without the meshes of LIBERO")
    env = ExternalEnv(2, RemoteConfig(name=name, id=RECIPES[name].example))
    source = torch.Generator().manual_seed(0)
    seen = []
    for seeds in ([1, 2], [2, 1]):
        env.reset(seeds=seeds)
        for _ in range(5):
            action = 2 * torch.rand(1, env.spec.action.dim, generator=source.manual_seed(0)) - 1
            step = env.step(action.expand(2, -1).contiguous())
        seen.append(step.obs["state"])
    assert torch.equal(seen[0], seen[1].flip(0)) and not torch.equal(seen[0], seen[1])
    assert "success" in step.info
