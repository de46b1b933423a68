"""Robots by name; a third party's wheel adds one without an edit here."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from burnish.real_robot import discovery
from burnish.real_robot.discovery import make_adapter, names
from burnish.real_robot.drivers.twin import Twin
from burnish.real_robot.errors import Refused
from robot_lab import ARM

PLUGIN = '''
"""A robot of somebody else's."""
import sys

import numpy as np
from burnish.real_robot.adapter import Adapter, JointSpec, Mode, RobotSpec, RobotState
from burnish.real_robot.clock import VirtualClock

SPEC = RobotSpec(
    "shaker", (JointSpec("a", -1.0, 1.0, 2.0, 10.0),), frozenset({Mode.JOINT_POSITION}), (1.0, 50.0, 100.0),
    device_watchdog_s=0.1, safe_when_unpowered=True,
)


class Shaker(Adapter):
    q, seq = np.zeros(1), 0
    _configure = _deactivate = _recover = _close = lambda self: None

    def _stop(self, kind):
        pass

    def _activate(self, mode):
        return self._read(0.0)

    def _read(self, timeout_s):
        Shaker.seq += 1
        return RobotState(Shaker.seq, self.clock.now_ns(), self.q.copy(), np.zeros(1))

    def _write(self, command):
        self.q = command.target.copy()
        return command


def make(config):
    return Shaker(SPEC, VirtualClock())
'''

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "burnish-shaker"
version = "1"
[project.entry-points."burnish.robots"]
shaker = "shaker:make"
[tool.setuptools]
py-modules = ["shaker"]
"""

DRIVE = """
import sys
from burnish.real_robot.discovery import make_adapter, names
assert "shaker" in names() and "shaker" not in sys.modules, "listing imported it"
from burnish.real_robot.safety.safe_robot import SafeRobot, Safety
robot = SafeRobot(make_adapter("shaker", {}), Safety(rate_hz=50, blend_s=0, start_gap_rad=1))
robot.start()
for _ in range(60):
    info = robot.step([0.5])
assert info.sent[0] == 0.5, info
robot.close()
from burnish.real_robot.conformance import check
found = check(lambda: make_adapter("shaker", {}))
assert "motion: it arrives" in [c.name for c in found.checks if c.passed]
sys.stdout.write("driven")
"""


@pytest.mark.slow
def test_a_wheel_adds_a_robot(tmp_path):
    source, target = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    (source / "shaker.py").write_text(PLUGIN)
    (source / "pyproject.toml").write_text(PROJECT)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([*pip, str(source)], check=True, capture_output=True)
    path = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))

    def driven(**more: str) -> subprocess.CompletedProcess:
        env = {**os.environ, "PYTHONPATH": path, **more}
        return subprocess.run([sys.executable, "-c", DRIVE], env=env, capture_output=True, text=True, check=False)

    found = driven()
    assert found.stdout == "driven", found.stderr
    assert "AssertionError" in driven(BURNISH_NO_PLUGINS="1").stderr, "plug-ins cannot be switched off"


def plugins(monkeypatch, *points: tuple[str, str]) -> None:
    found = [EntryPoint(name, value, discovery.GROUP) for name, value in points]
    monkeypatch.setattr(discovery, "entry_points", lambda group: found)


def test_ours_are_there_and_made_by_name():
    assert {"twin", "dynamixel", "feetech", "universal"} <= set(names())
    assert isinstance(make_adapter("twin", {"mjcf": ARM}), Twin)


def test_every_one_of_ours_has_its_module():
    folder = Path(discovery.__file__).parent / "drivers"
    for place in discovery.OURS.values():
        module, _, function = place.partition(":")
        assert f"def {function}(" in (folder / f"{module}.py").read_text()


def test_what_cannot_be_made_is_one_sentence(monkeypatch):
    with pytest.raises(Refused, match="there is no robot 'toaster'; choices: "):
        make_adapter("toaster", {})
    plugins(monkeypatch, ("twin", "somebody:make"))
    with pytest.raises(Refused, match="'twin', which is one of ours"):
        make_adapter("twin", {"mjcf": ARM})
    plugins(monkeypatch, ("arm", "a:make"), ("arm", "b:make"))
    with pytest.raises(Refused, match="two packages add a robot 'arm'"):
        names()
    plugins(monkeypatch, ("arm", "no_such_module_anywhere:make"))
    with pytest.raises(Refused, match="cannot be imported"):
        make_adapter("arm", {})
    plugins(monkeypatch, ("arm", "builtins:dict"))
    with pytest.raises(Refused, match="made a dict, which is no Adapter"):
        make_adapter("arm", {})
    monkeypatch.setenv("BURNISH_NO_PLUGINS", "1")
    with pytest.raises(Refused, match="no robot 'arm'"):
        make_adapter("arm", {})
