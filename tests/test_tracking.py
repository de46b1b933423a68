"""Trackers: told everything in order, known again after resuming, and never able to stop a training.

The packages themselves are in tests/test_trackers.py.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import fields
from typing import Any

import pytest
import yaml
from verb_lab import imitating

from burnish.finetune.__main__ import FinetuneConfig
from burnish.finetune.distillation.__main__ import DistillConfig
from burnish.offline.__main__ import OfflineConfig
from burnish.policies.__main__ import PretrainConfig
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.runs import tracking
from burnish.policies.runs.run import read_metrics
from burnish.policies.runs.tracking import TRACKERS, TrackerKind
from tracking_lab import train


class Recorder:
    """A tracker that writes down what it is told, and fails where it is asked to."""

    made: list[Recorder]
    fails: str = ""

    def __init__(self, package: Any, run: tracking.Tracked) -> None:
        if self.fails == "open":
            raise OSError("no route\nto the host")
        self.package, self.run, self.heard, self.closed = package, run, [], 0
        self.made.append(self)

    def log(self, step, metrics):
        lines = (self.run.folder / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["step"] == step, "the file comes first"
        if self.fails == "log" and step == 3:
            raise RuntimeError("the service died")
        self.heard.append((step, dict(metrics)))

    def close(self):
        self.closed += 1
        if self.fails == "close":
            raise TimeoutError("still uploading")


@pytest.fixture
def recorder(monkeypatch) -> type[Recorder]:
    kind = type("Fresh", (Recorder,), {"made": [], "fails": ""})
    monkeypatch.setitem(TRACKERS, "recorder", TrackerKind("json", kind, "for tests"))
    return kind


def steps(run: Recorder) -> list[int]:
    return [step for step, _ in run.heard]


def test_a_tracker_is_told_what_the_file_is_told_and_is_closed(tmp_path, recorder):
    train(tmp_path / "run")
    (made,) = recorder.made
    assert [repr({"step": float(step), **row}) for step, row in made.heard] == [
        repr(row) for row in read_metrics(tmp_path / "run")
    ]
    assert steps(made) == [1, 2, 3, 4, 5, 6] and made.closed == 1
    assert made.run.config == {"total": 6} and made.package is json


def test_trackers_are_told_in_the_order_in_which_they_are_named(tmp_path, recorder, monkeypatch):
    order = []
    for name in "ab":
        kind = type(name, (recorder,), {"log": lambda self, step, metrics, name=name: order.append(name)})
        monkeypatch.setitem(TRACKERS, name, TrackerKind("json", kind, ""))
    train(tmp_path / "ab", 2, trackers=("a", "b"))
    train(tmp_path / "ba", 1, trackers=("b", "a"))
    assert order == ["a", "b", "a", "b", "b", "a"]


def test_a_run_is_the_same_with_and_without(tmp_path, recorder):
    train(tmp_path / "with")
    train(tmp_path / "without", trackers=())
    assert not (tmp_path / "without/tracking.json").exists() and (tmp_path / "with/tracking.json").exists()

    def plain(out):
        return [{k: repr(v) for k, v in row.items() if "time/" not in k} for row in read_metrics(out)]

    assert plain(tmp_path / "with") == plain(tmp_path / "without")


@pytest.mark.parametrize(("fails", "heard"), [("open", None), ("log", [1, 2]), ("close", [1, 2, 3, 4, 5, 6])])
def test_a_tracker_that_fails_is_warned_of_once_and_left_out(tmp_path, recorder, caplog, fails, heard):
    recorder.fails = fails
    steady = type("Steady", (recorder,), {"fails": ""})
    TRACKERS["steady"] = TrackerKind("json", steady, "")
    try:
        with caplog.at_level(logging.WARNING):
            train(tmp_path / "run", trackers=("recorder", "steady"))
    finally:
        del TRACKERS["steady"]
    assert len(read_metrics(tmp_path / "run")) == 6
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("track=recorder failed and is switched off, the training goes on: ")
    assert "\n" not in warning
    *failing, other = recorder.made
    assert [steps(made) for made in failing] == ([] if heard is None else [heard])
    assert steps(other) == [1, 2, 3, 4, 5, 6] and other.closed == 1  # who does not fail is told everything


def test_what_is_no_failure_passes_through(tmp_path, recorder, monkeypatch):
    def interrupted(self, step, metrics):
        raise KeyboardInterrupt

    monkeypatch.setattr(recorder, "log", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run")
    assert recorder.made[0].closed == 1


def test_an_interrupted_run_is_closed_and_known_again(tmp_path, recorder):
    out = tmp_path / "run"
    train(out, stop_at=3)
    identity = json.loads((out / "tracking.json").read_text())
    out.rename(tmp_path / "moved")
    train(tmp_path / "moved")
    first, second = recorder.made
    assert (steps(first), steps(second)) == ([1, 2, 3, 4], [5, 6]) and first.closed == second.closed == 1
    assert (first.run.start, second.run.start) == (0, 4)
    assert identity == {"id": first.run.id, "name": f"run-{first.run.id}"}
    assert (second.run.id, second.run.name) == (first.run.id, first.run.name)
    train(tmp_path / "other")
    assert recorder.made[-1].run.id != first.run.id


def test_after_a_crash_the_steps_behind_the_checkpoint_are_told_again(tmp_path, recorder):
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "run", crash_at=5)
    train(tmp_path / "run")
    first, second = recorder.made
    assert (steps(first), steps(second)) == ([1, 2, 3, 4, 5], [5, 6]) and first.closed == 1

    def numbers(run):
        return {step: row["loss"] for step, row in run.heard}

    assert numbers(first)[5] == numbers(second)[5]


@pytest.mark.parametrize("text", ["{", "[]", '{"id": 3, "name": "x"}', '{"id": "../../../x", "name": "x"}'])
def test_a_torn_identity_costs_the_tracker_and_not_the_training(tmp_path, recorder, caplog, text):
    train(tmp_path / "run", 2)
    (tmp_path / "run/tracking.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        train(tmp_path / "run")
    assert len(read_metrics(tmp_path / "run")) == 6 and len(recorder.made) == 1
    assert "tracking.json is malformed" in caplog.text


def test_what_is_missing_is_said_before_a_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(BurnishError, match=r"track=wandb needs .* pip install 'burnish\[wandb\]'"):
        train(tmp_path / "run", trackers=("wandb",))
    with pytest.raises(BurnishError, match="track=wanbd is not a choice; did you mean 'wandb'"):
        train(tmp_path / "run", trackers=("wanbd",))
    assert not (tmp_path / "run").exists()


# ---- the setting ----


@pytest.mark.parametrize("config", [PretrainConfig, OfflineConfig, FinetuneConfig, DistillConfig])
def test_every_training_has_the_setting_and_tracks_nothing_by_default(config):
    (field,) = [field for field in fields(config) if field.name == "track"]
    assert field.default_factory() == []  # pyright: ignore[reportCallIssue]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return imitating(tmp_path_factory.mktemp("lab"), *EVALUATION)


EVALUATION = ["eval.episodes=2", "eval.worlds=2", "eval.confirm=2"]
VERBS = {
    "pretrain": ["policy=gaussian", "policy.hidden=[8]", "train.steps=4", "train.batch=8", "data={lab}/data"],
    "offline": ["method=iql", "method.critic.hidden=[8]", "data={lab}/data", "steps=4", "batch=8"],
    "finetune": [
        *("policy.path={lab}/bc", "method=residual_ppo", "worlds=2", "total=16"),
        *("method.loop.decisions_per_update=4", "method.ppo.minibatch=4", "method.ppo.epochs=1"),
    ],
    "distill": ["teachers=[{lab}/bc]", "policy=gaussian", "episodes=2", "keep=all", "worlds=2", "train.steps=4"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_training_can_be_tracked_from_any_sitting_on(lab, tmp_path, verb, recorder):
    words = [verb, *(word.format(lab=lab) for word in VERBS[verb]), f"out={tmp_path}/run"]
    words += EVALUATION[:2] if verb == "distill" else EVALUATION  # which confirms nothing
    assert main([*words, "track=recorder"]) == 0
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["track"] == ["recorder"]
    assert main([*words, "resume=true"]) == 0  # no other settings: just not tracked any more
    assert main([*words, "resume=true", "track=[recorder]"]) == 0
    first, second = recorder.made
    assert steps(first) and steps(first) == [int(row["step"]) for row in read_metrics(tmp_path / "run")]
    assert first.run.id == second.run.id and steps(second) == []


def test_an_unknown_tracker_is_one_sentence(lab, tmp_path, capsys):
    words = [word.format(lab=lab) for word in VERBS["pretrain"]]
    assert main(["pretrain", *words, f"out={tmp_path}/run", "track=mlflow"]) == 2
    assert "track=mlflow is not a choice; choices: rerun, trackio, wandb" in capsys.readouterr().err
