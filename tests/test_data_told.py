"""Recordings whose owner says more than their file: the rate, and names that a world has for observations."""

import json
from pathlib import Path

import numpy as np
import pytest
from verb_lab import refused

from burnish.policies.cli.cli import main
from burnish.policies.data.read import read_dataset


def recordings(path, **told) -> str:
    rng = np.random.default_rng(len(told))
    np.savez(path, observations=rng.normal(size=(8, 2)), actions=rng.uniform(-1, 1, (8, 1)), episode_ends=[8], **told)
    return str(path)


def test_a_rate_that_only_its_owner_knows_is_given_once(tmp_path, capsys):
    silent, told = recordings(tmp_path / "a.npz"), recordings(tmp_path / "b.npz", control_hz=10.0)
    assert read_dataset(silent).control_hz is None, "nothing in the file says it"
    assert main(["data", "convert", silent, "control_hz=10", f"out={tmp_path}/set"]) == 0
    assert read_dataset(f"{tmp_path}/set").control_hz == 10.0
    assert main(["data", "convert", told, "control_hz=20", f"out={tmp_path}/no"]) == 2
    assert "the set says 10 actions a second" in capsys.readouterr().err


@pytest.mark.parametrize("swap", [False, True])
def test_a_set_without_a_rate_takes_that_of_those_with_which_it_is_merged(swap, tmp_path, capsys):
    silent, told = recordings(tmp_path / "a.npz"), recordings(tmp_path / "b.npz", control_hz=10.0)
    both = [told, silent] if swap else [silent, told]
    assert main(["data", "merge", *both, f"out={tmp_path}/both"]) == 0
    assert read_dataset(f"{tmp_path}/both").control_hz == 10.0
    other = recordings(tmp_path / "c.npz", control_hz=30.0)
    assert "10.0, and" in refused(capsys, "data", "merge", told, other, f"out={tmp_path}/no")


def test_what_is_not_known_is_not_counted(tmp_path, capsys):
    """And a set that knows it loses it beside one that does not, which is said."""
    silent = recordings(tmp_path / "a.npz", control_hz=10.0)
    knows = recordings(tmp_path / "b.npz", control_hz=10.0, rewards=np.ones(8), success=np.ones(8, bool))
    assert main(["data", "merge", knows, silent, f"out={tmp_path}/both"]) == 0
    said = capsys.readouterr().out
    for what in ("rewards", "successes"):
        assert f"no {what} in {silent}, so those of all sets count as unknown" in said
    assert "2 episodes, 16 frames, success unknown" in said
    assert main(["data", "show", f"{tmp_path}/both"]) == 0
    assert "success unknown, return unknown" in capsys.readouterr().out
    assert main(["data", "convert", knows, f"out={tmp_path}/known"]) == 0
    assert "1 successful" in capsys.readouterr().out


def test_observations_take_the_names_of_a_world(tmp_path, capsys):
    rng = np.random.default_rng(0)
    pictures, states = rng.integers(0, 255, (8, 12, 12, 3), np.uint8), rng.normal(size=(8, 2))
    observed = {"observations/camera": pictures, "observations/agent": states}
    np.savez(tmp_path / "a.npz", **observed, actions=rng.uniform(-1, 1, (8, 1)), episode_ends=[8])
    words = ["data", "convert", str(tmp_path / "a.npz")]
    assert main([*words, "rename=image.camera:image.pixels.top", f"out={tmp_path}/set"]) == 0
    before, after = read_dataset(words[-1]), read_dataset(f"{tmp_path}/set")
    assert set(after.spec.obs.shapes) == {"state", "image.pixels.top"}
    assert after[0].obs["image.pixels.top"].equal(before[0].obs["image.camera"]), "the same pictures"
    assert list(after.names["state"]) == list(before.names["state"])
    for rename, sentence in {
        "image.camra:image.x": "did you mean 'image.camera'",
        "image.camera:state": "pictures, and they alone",
        "image.camera": "is no pair",
    }.items():
        assert sentence in refused(capsys, *words, f"rename={rename}", f"out={tmp_path}/no")


@pytest.mark.parametrize(
    ("robots", "said"),
    [
        (("so101", "so100"), "not all sets name the same robot (so101, so100), so the new one names none"),
        (("so101", None), "not all sets name the same robot (so101, unknown), so the new one names none"),
        (("so101", "so101"), ""),
        ((None, None), ""),
    ],
)
def test_robots_that_differ_are_said(robots, said, tmp_path, capsys):
    for name, robot in zip("ab", robots, strict=True):
        silent = recordings(tmp_path / f"{name}.npz", control_hz=10.0)
        assert main(["data", "convert", silent, f"out={tmp_path}/{name}"]) == 0
        info = tmp_path / name / "meta/info.json"
        info.write_text(json.dumps({**json.loads(info.read_text()), "robot_type": robot}))
    capsys.readouterr()
    assert main(["data", "merge", f"{tmp_path}/a", f"{tmp_path}/b", f"out={tmp_path}/both"]) == 0
    printed = capsys.readouterr().out
    assert said in printed if said else "the same robot" not in printed
    both = json.loads(Path(tmp_path, "both/meta/info.json").read_text())["robot_type"]
    assert both == (robots[0] if robots[0] == robots[1] else None)
