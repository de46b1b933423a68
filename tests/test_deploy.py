"""`burnish deploy` and `burnish export`: the whole chain from a checkpoint to motors that are models.

What is deployed was refined by DSRL on `insert` (benchmarks/refined/insert, made by benchmarks/rehearsal.py); it
succeeds in 100 % of simulated episodes, and its base in 40 %.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from burnish.policies.cli.cli import main
from burnish.real_robot.clock import ns
from burnish.real_robot.compatibility import stricter
from burnish.real_robot.control.link import LocalLink
from burnish.real_robot.deployment import conclude
from burnish.real_robot.safety.guard import Limits
from burnish.real_robot.safety.safe_robot import CALLED, Safety
from robot_lab import spec, twin

pytestmark = [pytest.mark.sim, pytest.mark.real_time]
ROOT = Path(__file__).resolve().parents[1] / "benchmarks"
REFINED, BASE = ROOT / "refined" / "insert", ROOT / "bases" / "insert"
GUARDED = ROOT / "refined" / "insert_guarded"  # from the same base, with env.guard.velocity=0.2 and acceleration=1


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
    found = deployed(tmp_path, f"robot={robot}", "episodes=1", "compare=false", "safety.stale_ramp_s=2")
    report = found["reports"][0]
    assert report["counts"]["start"] == 1 and "stopped" in report["counts"]
    assert not report["counts"].get("fault") and report["timing"]["ticks"] > 50


def test_a_dry_run_moves_nothing(tmp_path, capfd):
    assert main(["deploy", f"policy.path={BASE}", "dry_run=true"]) == 0
    said = capfd.readouterr().out
    assert "no safety-rated function" in said and "nothing was moved" in said and "answers in" in said


SLOW = ["robot.device.velocity=0.1", "robot.device.acceleration=1"]


@pytest.mark.parametrize(
    ("policy", "words", "warned"),
    [
        (GUARDED, SLOW, True),
        (GUARDED, [*SLOW, "env=insert"], True),  # the world is another one, and the policy is what it was
        (GUARDED, [*SLOW, "robot=so101_emulated", "safety.rate_hz=50"], True),  # at 100 Hz less than a tick of a servo
        (GUARDED, ["robot.device.velocity=0.2", "robot.device.acceleration=1"], False),
        (GUARDED, [], False),
        (REFINED, SLOW, False),  # every robot has a guard, and is stricter than none
    ],
)
def test_a_robot_that_is_stricter_than_the_training_is_one_sentence(policy, words, warned, capfd):
    assert main(["deploy", f"policy.path={policy}", "dry_run=true", *words]) == 0
    notes = [line for line in capfd.readouterr().out.splitlines() if "stricter" in line]
    assert len(notes) == warned
    if warned:
        assert "speed of shoulder_pan and 5 more 0.1 instead of 0.2 rad/s, 50% less" in notes[0]
        assert "acceleration of" not in notes[0] and "env.guard.velocity=0.1 env.guard.acceleration=1" in notes[0]


def test_what_makes_a_robot_stricter():
    def said(share: float = 1.0, jerk: float = 0.0, **changes: float) -> str:
        robot = spec(3)
        joints = (robot.joints[0], replace(robot.joints[1], **changes), robot.joints[2])
        return stricter("it", trained, replace(robot, joints=joints), Safety(share=share, jerk=jerk))

    one = np.ones(3)
    trained = Limits(-one, one, 2 * one, 10 * one, 0.01)
    assert said() == "" and said(velocity=3.0, acceleration=11.0, lower=-2.0) == "" and said(quantum=0.0015) == ""
    assert "(speed of j1 0.5 instead of 2 rad/s, 75% less), so it may" in said(velocity=0.5)
    assert "env.guard.velocity=0.5 env.guard.acceleration=10" in said(velocity=0.5)
    assert "(acceleration of j1 4 instead of 10 rad/s^2, 60% less), so it may" in said(acceleration=4.0)
    halved = said(share=0.5, acceleration=4.0)
    assert "speed of j0 and 2 more 1 instead of 2 rad/s, 50% less" in halved
    assert "acceleration of j1 and 2 more 2 instead of 10 rad/s^2, 80% less" in halved
    assert "(position of j1 in a range that is 0.30 rad smaller), so it may" in said(lower=-0.8, upper=0.9)
    assert "refine with" not in said(lower=-0.8) and "jerk of every joint 800 rad/s^3" in said(jerk=800.0)


def test_the_summary_says_how_much_was_changed(capsys):
    """A robot that is gentler changes more; what is asked is counted, and not that nothing is asked for."""
    shares = {}
    for velocity in (4.0, 0.05):
        with LocalLink(twin(velocity=velocity, acceleration=40.0), Safety(blend_s=0.0)) as link:
            here = link.start().q
            link.plan(here + np.linspace(0, 0.2, 20)[:, None] * np.ones(2), 0.01, linear=True)
            link.wait_until_ns(link.clock.now_ns() + ns(1.0))
            left = link.close()
        assert 15 <= left["setpoints"]["asked"] <= 21 < left["timing"]["ticks"]
        shares[velocity] = left["setpoints"]["changed"] / left["setpoints"]["asked"]
        said = f"{shares[velocity]:.0%} of {left['setpoints']['asked']} set-points were changed"
        assert conclude([left]) == 0 and said in capsys.readouterr().out
    assert shares[0.05] > 0.8 > shares[4.0]
    assert conclude([]) == 0 and "no set-point was asked for" in capsys.readouterr().out
    reports = [{"events": [{"kind": "ramp", "text": text}]} for text in (CALLED, "it is late", "it is late")]
    assert conclude(reports) == 1 and capsys.readouterr().out.count("it stopped, because it is late") == 1
    assert conclude(reports[:1]) == 0, "its own program has stopped it, at the end of an episode"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["robot=feetech", "realtime=false"], "whose time cannot be chosen"),
        (["robot=feetech"], "a person has to stand beside it"),
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
from burnish.real_robot.export.runtime import ChunkController, load
policy = load({str(tmp_path / "bundle")!r})
controller = ChunkController(policy)
controller.reset(1)
action = controller.step({{"state": [0.0] * 35}})
sys.exit("torch" in sys.modules or len(action) != 4)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert main(["export", f"policy.path={BASE}", f"out={tmp_path / 'bundle'}"]) == 2
