"""`burnish deploy` and `burnish export`: the whole chain from a checkpoint to motors that are models.

What is deployed was refined by DSRL on `insert` (benchmarks/refined/insert, made by benchmarks/rehearsal.py); it
succeeds in 100 % of simulated episodes, and its base in 40 %.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.policies.core.cli import main

pytestmark = pytest.mark.sim
ROOT = Path(__file__).resolve().parents[1] / "benchmarks"
REFINED, BASE = ROOT / "refined" / "insert", ROOT / "bases" / "insert"


def deployed(tmp_path, *words: str, policy: Path = REFINED) -> dict:
    assert main(["deploy", f"policy.path={policy}", f"out={tmp_path / 'out'}", *words]) == 0
    return json.loads((tmp_path / "out" / "deploy.json").read_text())


def test_a_refined_policy_on_the_twin(tmp_path):
    """Twenty episodes: below 0.83 for a policy that succeeds in 0.97 would be a chance of one in a thousand."""
    found = deployed(tmp_path, "realtime=false", "episodes=20", "robot.device.noise_rad=0.0003")
    assert found["simulation"]["success_rate"] >= 0.85 and found["robot"]["success_rate"] >= 0.85
    assert sum(report["counts"].get("acceleration", 0) for report in found["reports"]) > 0, (
        "the guard had nothing to do"
    )


def test_a_refined_policy_on_the_emulated_arm(tmp_path):
    """The driver of the real arm, its vendor's SDK, and servos with twelve bits per turn; losses too."""
    words = ["robot=so101_emulated", "realtime=false", "episodes=10", "compare=false", "robot.loss=0.01"]
    assert deployed(tmp_path, *words)["robot"]["success_rate"] >= 0.8


@pytest.mark.parametrize("robot", ["twin", "so101_emulated"])
def test_in_real_time_with_every_process(tmp_path, robot):
    """One episode: whether it succeeds depends on how busy the machine is, that it comes to rest does not."""
    found = deployed(tmp_path, f"robot={robot}", "episodes=1", "compare=false")
    report = found["reports"][0]
    assert report["counts"]["start"] == 1 and "stopped" in report["counts"]
    assert not report["counts"].get("fault") and report["timing"]["ticks"] > 50


def test_a_dry_run_moves_nothing(tmp_path, capfd):
    assert main(["deploy", f"policy.path={BASE}", "dry_run=true"]) == 0
    said = capfd.readouterr().out
    assert "no safety-rated function" in said and "nothing was moved" in said and "thinks for" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["robot=feetech", "realtime=false"], "whose time cannot be chosen"),
        (["robot=feetech"], "somebody has to stand beside it"),
        (["env=push"], "things move that a robot's joints do not tell about"),
        (["episodes=0"], "must be at least 1"),
        (["safety.rate_hz=7000", "realtime=false"], "takes commands at"),
        (["robot.device.colour=red", "realtime=false"], "colour"),
        (["supervisor=parrot"], "choices: keyboard"),
    ],
    ids=str,
)
def test_what_cannot_be_deployed_is_one_sentence(words, sentence, capfd):
    assert main(["deploy", f"policy.path={BASE}", *words]) == 2
    said = capfd.readouterr().err.strip()
    assert sentence in said and len(said.splitlines()) == 1


def test_an_export_runs_without_torch(tmp_path):
    assert main(["export", f"policy.path={BASE}", f"out={tmp_path / 'bundle'}", "samples=200"]) == 0
    code = f"""
import sys
from burnish.real_robot.runtime import ChunkController, load
policy = load({str(tmp_path / "bundle")!r})
controller = ChunkController(policy)
controller.reset(1)
action = controller.step({{"state": [0.0] * 35}})
sys.exit("torch" in sys.modules or len(action) != 4)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert main(["export", f"policy.path={BASE}", f"out={tmp_path / 'bundle'}"]) == 2
