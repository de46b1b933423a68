"""`burnish deploy robot=feetech` and `burnish record` as a person meets them: the driver, the vendor's SDK, a serial
port, servos with a model behind them, and somebody at the keyboard, who is asked before the arm moves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from burnish.policies.cli.cli import main
from burnish.policies.core.seed import derive
from burnish.policies.data.lerobot import read_lerobot
from burnish.policies.measure.evaluate import evaluation_seeds
from burnish.real_robot.recorder import read_beside
from person_lab import NEAR, Place, someone

pytestmark = [pytest.mark.sim, pytest.mark.real_time]
BASE = Path(__file__).resolve().parents[1] / "benchmarks" / "bases" / "insert"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Iterator[Place]:
    with someone(tmp_path, monkeypatch) as place:
        yield place


def test_a_person_lays_out_each_episode_and_the_arm_goes_there(place, tmp_path):
    words = ["env=insert", "env.max_steps=8", "episodes=2", "compare=false", "supervisor=keyboard"]
    assert main(["deploy", f"policy.path={BASE}", f"out={tmp_path}", *words, *place.words()]) == 0
    layouts = place.layouts(evaluation_seeds(2))
    assert len(place.asked) == len(place.went) == 2 and layouts[0] != layouts[1]
    for (text, then), (here, there, afterwards), layout in zip(place.asked, place.went, layouts, strict=True):
        assert layout in text and text.endswith("then press Enter\n")
        assert np.abs(then - here).max() < NEAR, "it has not moved before a person said so"
        assert np.abs(afterwards - there).max() < NEAR < np.abs(there - here).max(), "it went where the episode begins"
    reports = json.loads((tmp_path / "deploy.json").read_text())["reports"]
    assert len(reports) == 2
    for report in reports:
        assert report["counts"]["start"] == 1 and "stopped" in report["counts"] and not report["counts"].get("fault")


def test_a_person_records_with_a_policy_on_the_arm(place, tmp_path):
    place.keys = {0: "t", 1: "dw", 3: "ts"}  # takes over, moves, gives back and judges; while it is held, s is a way
    words = ["env=insert", "episodes=2", "seed=3", f"policy.path={BASE}", f"out={tmp_path / 'set'}"]
    assert main(["record", *words, *place.words()]) == 0
    layouts = place.layouts([derive(3, "record", i) for i in range(2)])
    assert all(layout in text for layout, (text, _) in zip(layouts, place.asked, strict=True))
    assert all(np.abs(afterwards - there).max() < NEAR for _, there, afterwards in place.went)
    episodes, beside = read_lerobot(tmp_path / "set"), read_beside(tmp_path / "set")
    assert len(episodes) == 2 and episodes.meta["robot"] == "feetech"
    for episode, (requested, intervened) in zip(episodes, beside, strict=True):
        assert episode.success and episode.terminated
        # Somebody is asked once more where a tick is late, so how many ticks it took is the machine's affair.
        assert len(intervened) == len(requested) == len(episode) >= 2
        assert intervened[:-1].all() and not intervened[-1]


def test_nobody_at_the_keyboard_is_one_sentence_and_an_arm_at_rest(place, capfd):
    before = place.bus.truth()
    os.close(place.pressed)
    place.write = lambda text: None  # type: ignore[method-assign]
    try:
        words = ["env=insert", "episodes=1", "supervisor=keyboard", *place.words()]
        assert main(["deploy", f"policy.path={BASE}", *words]) == 2
    finally:
        place.pressed = os.open(os.devnull, os.O_WRONLY)
    said = capfd.readouterr().err.strip()
    assert "nobody is at the keyboard" in said and len(said.splitlines()) == 1
    assert np.abs(place.bus.truth() - before).max() < NEAR and not place.went
