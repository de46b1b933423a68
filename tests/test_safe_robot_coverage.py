"""No branch of what protects goes untested: the tests of these modules run under coverage.py, in a process of their
own, and leave neither a line nor a branch of them out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.real_robot.safety import safe_robot

HERE, THERE = Path(__file__).resolve().parent, Path(str(safe_robot.__file__)).parent
MODULES = ("guard", "safe_robot", "settings", "protection", "fallback", "collision", "reflex", "monitors")
TESTS = ("guard", "safe_robot", "safe_robot_protected", "protection", "fallback", "collision", "reflex", "monitors")
TESTS += ("hostile_requests", "outside_starts", "safe_robot_refusals")
# Long ones, and what needs a process or a policy: they go over the same lines again.
SPARED = (
    *("deploy", "control_process", "walks", "costs", "hostile", "each_kind", "thousand", "brute", "mujoco_is"),
    *(
        "makes_commands",
        "mutant",
        "our_arm",
        "whatever",
        "everyday",
        "frozen_encoder",
        "break_no_limit",
        "stalled_joint_is",
    ),
)
CONFIG = """
[run]
branch = true
[report]
exclude_also =
    if TYPE_CHECKING
"""


def uncovered(folder: Path, only: str) -> dict[str, list]:
    """Lines and branches of each module that the chosen tests do not reach."""
    (folder / "coverage.rc").write_text(CONFIG)
    environment = {**os.environ, "COVERAGE_FILE": str(folder / "data")}
    files = [str(THERE / f"{name}.py") for name in MODULES]
    tests = [str(HERE / f"test_{name}.py") for name in TESTS]
    run = [sys.executable, "-m", "coverage"]
    words = ["--rcfile", str(folder / "coverage.rc"), f"--include={','.join(files)}"]
    pytest_words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", only, *tests]
    played = subprocess.run(
        [*run, "run", *words, *pytest_words],
        cwd=HERE.parent,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert played.returncode == 0, played.stdout[-3000:]
    subprocess.run(
        [*run, "json", *words, "-o", str(folder / "found.json")], env=environment, check=True, capture_output=True
    )
    found = json.loads((folder / "found.json").read_text())["files"]
    assert len(found) == len(MODULES), sorted(found)
    return {Path(path).stem: [*x["missing_lines"], *x["missing_branches"]] for path, x in found.items()}


@pytest.mark.slow
def test_every_branch_is_tested(tmp_path, require):
    require("coverage")
    missing = uncovered(tmp_path, " and ".join(f"not {word}" for word in SPARED))
    assert not any(missing.values()), missing


@pytest.mark.slow
def test_it_would_be_seen(tmp_path, require):
    """The control: with a handful of these tests, much is left out."""
    require("coverage")
    missing = uncovered(tmp_path, "settings_are_checked or mlp or refuses")
    assert len(missing["safe_robot"]) > 50 and len(missing["guard"]) > 20 and len(missing["collision"]) > 20
