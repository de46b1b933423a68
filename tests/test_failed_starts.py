"""Runs without a world, and runs that fail at the first reset of one: what is said, and what may follow in out=."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from verb_lab import refused

from burnish.policies.best import BEST, CANDIDATE
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.data.lerobot import read_lerobot
from burnish.policies.runs.run import Run, find_policy, read_metrics
from burnish.sim.point_reach import PointReach

BROKEN = "this world cannot be reset"
EVALUATION = ["eval.episodes=2", "eval.worlds=2", "eval.confirm=2"]
NET = ["policy=flow", "policy.net.mlp.hidden=[8]", "policy.steps=2", "train.batch=8", "chunk.execute=4"]
# Each resets a world before its first checkpoint.
VERBS = {
    "pretrain": [*NET, "data={lab}/data", "train.steps=2"],
    "more imitation": ["policy.path={lab}/bc", "data={lab}/data", "train.steps=2"],
    "offline": ["method=iql", "data={lab}/data", "steps=2", "batch=8", "method.critic.hidden=[8]"],
    "distill": ["teachers={lab}/bc", "episodes=2", "keep=all", *NET[:3], "train.steps=2", "chunk.horizon=4"],
    "finetune": ["policy.path={lab}/bc", "method=residual_ppo", "method.agent.hidden=[8]", "worlds=2", "total=8"],
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    assert main(["collect", "env=point_reach", "env.max_steps=6", "episodes=4", f"out={folder}/data"]) == 0
    words = [*NET, *EVALUATION, "train.steps=2"]
    assert main(["pretrain", *words, f"data={folder}/data", f"out={folder}/bc"]) == 0
    return folder


def command(lab: Path, name: str, out: Path, *more: str) -> list[str]:
    verb = "pretrain" if name == "more imitation" else name
    evaluation = EVALUATION[:2] if verb == "distill" else EVALUATION  # which confirms nothing
    return [verb, *(word.format(lab=lab) for word in VERBS[name]), *evaluation, *more, f"out={out}"]


def breaks(monkeypatch: pytest.MonkeyPatch, behind: int = 0) -> None:
    """From the reset with this number on."""
    reset, count = PointReach.reset, 0

    def broken(self, *given):
        nonlocal count
        count += 1
        if count > behind:
            raise BurnishError(BROKEN)
        return reset(self, *given)

    monkeypatch.setattr(PointReach, "reset", broken)


@pytest.mark.parametrize("name", VERBS)
def test_a_run_that_fails_at_the_first_reset_does_not_occupy_its_folder(name, lab, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        breaks(patch)
        for _ in range(2):  # the same call again meets the same trouble, and no other
            assert main(command(lab, name, tmp_path / "run")) == 2
            assert capsys.readouterr().err.splitlines()[-1].endswith(BROKEN)
    assert main(command(lab, name, tmp_path / "run", "seed=1")) == 0
    assert find_policy(tmp_path / "run").config["origin"]
    steps = [row["step"] for row in read_metrics(tmp_path / "run")]
    assert steps == sorted(set(steps)), "the lines of the failed calls have gone"
    assert main(command(lab, name, tmp_path / "run", "seed=1")) == 2, "the control: now it holds a policy"
    assert "is not empty" in capsys.readouterr().err


def test_a_run_that_fails_in_its_rollouts_does_not_occupy_its_folder(lab, tmp_path, capsys, monkeypatch):
    """It has its start evaluated, which is a file and a line of the log, and no policy of its own."""
    with monkeypatch.context() as patch:
        breaks(patch, behind=3)
        assert BROKEN in refused(capsys, *command(lab, "finetune", tmp_path / "run"))
    assert (tmp_path / "run/start.json").exists(), "the control: something was written"
    assert main(command(lab, "finetune", tmp_path / "run", "seed=1", "eval.episodes=0")) == 0
    assert not (tmp_path / "run/start.json").exists(), "it was of other settings"


KEPT: dict[str, Callable[[Path], object]] = {
    "a candidate": lambda run: (run / CANDIDATE).mkdir(),
    "a policy to deploy": lambda run: (run / BEST).mkdir(),
    "a checkpoint": lambda run: (run / "checkpoints/00000001").mkdir(),
    "a file of the user's": lambda run: (run / "notes.txt").write_text("precious"),
    "a configuration of another program": lambda run: (run / ".lock").unlink(),
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_a_folder_with_anything_worth_keeping_stays_as_it_is(tmp_path, keep):
    with pytest.raises(RuntimeError), Run(tmp_path / "run", {"lr": 1}, tensorboard=False):
        raise RuntimeError
    keep(tmp_path / "run")
    before = {path: path.read_bytes() if path.is_file() else b"" for path in (tmp_path / "run").rglob("*")}
    with pytest.raises(BurnishError, match="is not empty"), Run(tmp_path / "run", {"lr": 2}, tensorboard=False):
        pass
    assert {path: path.read_bytes() if path.is_file() else b"" for path in (tmp_path / "run").rglob("*")} == before


def test_leftovers_that_are_links_are_removed_and_not_followed(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/events").write_text("precious")
    with Run(tmp_path / "run", {"lr": 1}, tensorboard=False):
        pass
    (tmp_path / "run/tensorboard").symlink_to(tmp_path / "theirs")
    with Run(tmp_path / "run", {"lr": 2}, tensorboard=False):
        pass
    assert (tmp_path / "theirs/events").read_text() == "precious"
    assert not (tmp_path / "run/tensorboard").is_symlink()


@pytest.mark.parametrize("name", ["pretrain", "more imitation", "offline"])
def test_training_without_trials_needs_no_world(name, lab, tmp_path, capsys, monkeypatch):
    def absent(*given, **more):
        raise BurnishError("this world is not installed")

    monkeypatch.setattr(PointReach, "__init__", absent)
    assert main(command(lab, name, tmp_path / "tried")) == 2
    said = capsys.readouterr().err
    assert "not installed" in said and "eval.episodes=0" in said, "the refusal says the way out"
    assert main(command(lab, name, tmp_path / "run", "eval.episodes=0")) == 0
    said = capsys.readouterr().out
    assert sum("eval.episodes=0" in line for line in said.splitlines()) == 1
    assert find_policy(tmp_path / "run").config["origin"]["env"] == read_lerobot(lab / "data").meta["env"]
    assert not any("eval/" in key for row in read_metrics(tmp_path / "run") for key in row)


def test_refinement_without_trials_builds_no_world_but_its_own(lab, tmp_path, monkeypatch):
    built: list[int] = []
    build = PointReach.__init__
    monkeypatch.setattr(
        PointReach,
        "__init__",
        lambda self, count, *given, **more: (built.append(count), build(self, count, *given, **more))[1],
    )
    for words, expected in (([], [2, 2]), (["eval.episodes=0"], [2])):
        built.clear()
        assert main(command(lab, "finetune", tmp_path / f"run{len(words)}", *words)) == 0
        assert built == expected


def test_an_evaluation_of_no_episodes_is_refused(lab, capsys):
    assert "episodes=0 plays nothing" in refused(capsys, "evaluate", f"policy.path={lab}/bc", "eval.episodes=0")
