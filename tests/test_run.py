"""Run folders: resumed equals uninterrupted, Ctrl-C leaves cleanly, and what is refused is not touched."""

import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from burnish.policies.core.errors import BurnishError
from burnish.policies.runs.checkpoint import numbered
from burnish.policies.runs.interrupt import interruptible
from burnish.policies.runs.run import Run, find_policy, read_metrics


class Learner:
    """Momentum on a noisy quadratic: weights, optimizer, generator and counter all matter for what comes next."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(5))
        self.optimizer = torch.optim.Adam([self.weight], lr=0.1)
        self.generator = torch.Generator().manual_seed(0)
        self.updates = 0

    def update(self) -> dict[str, torch.Tensor | float]:
        self.optimizer.zero_grad()
        loss = (self.weight - torch.randn(5, generator=self.generator)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.updates += 1
        return {"loss": loss.detach(), "updates": float(self.updates)}

    def state_dict(self) -> dict[str, Any]:
        own = {"weight": self.weight.data, "rng": self.generator.get_state(), "updates": self.updates}
        return {**own, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight.data.copy_(state["weight"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["rng"])
        self.updates = state["updates"]


class Crash(Exception):
    pass


def train(out: Path, total: int, *, crash_at: int = 0, interrupt_at: int = 0, restore=True, **options: Any) -> Learner:
    """The loop of the module's docstring; logs every step and saves every fifth."""
    learner = Learner()
    options = {"config": {"lr": 0.1}, "resume": True, "tensorboard": False, **options}
    with Run(out, **options) as run:
        checkpoint = run.latest()
        if checkpoint is not None and restore:
            learner.load_state_dict(checkpoint.children["learner"].state)
        for step in run.steps(total):
            run.log(step, learner.update())
            if step % 5 == 0 or step == total or run.stopping:
                policy = {"config": {"kind": "toy"}, "state": {"weight": learner.weight}}
                run.save(step, {"policy": policy, "learner": {"config": {}, "state": learner.state_dict()}})
            if step == interrupt_at:
                os.kill(os.getpid(), signal.SIGINT)
            if step == crash_at:
                raise Crash
    return learner


def numbers(out: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(out)]


def tree(folder: Path) -> dict[str, str]:
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def checkpoint_hashes(out: Path) -> dict[str, str]:
    return {name: digest for name, digest in tree(out / "checkpoints").items() if not name.endswith("manifest.json")}


@pytest.fixture
def whole(tmp_path) -> Path:
    """A run that was never interrupted."""
    train(tmp_path / "whole", 23)
    return tmp_path / "whole"


@pytest.mark.parametrize("crash_at", [3, 5, 12, 22])
def test_crashed_and_resumed_equals_uninterrupted(tmp_path, whole, crash_at):
    with pytest.raises(Crash):
        train(tmp_path / "run", 23, crash_at=crash_at)
    train(tmp_path / "run", 23)
    assert numbers(tmp_path / "run") == numbers(whole) and len(numbers(whole)) == 23
    assert checkpoint_hashes(tmp_path / "run") == checkpoint_hashes(whole)  # weights, optimizer, generator, counter


def test_seconds_are_totals_of_all_sittings_and_shares_are_not(tmp_path):
    def sitting(total: int) -> dict[str, float]:
        with Run(tmp_path / "run", {}, resume=True, tensorboard=False) as run:
            run.latest()
            with run.watch("evaluation"):
                time.sleep(0.02)
            for step in run.steps(total):
                run.log(step, {"time/acting_s": 3.0, "time/updates_per_s": 7.0, "time/waits": 0.5, "loss_s": 1.0})
                run.save(step, {})
        return read_metrics(tmp_path / "run")[-1]

    first, second = sitting(1), sitting(2)
    assert first["time/acting_s"] == 3.0 and first["time/evaluation_s"] >= 0.02
    assert second["time/acting_s"] == 6.0 and second["time/evaluation_s"] >= first["time/evaluation_s"] + 0.02
    assert second["time/elapsed_s"] >= first["time/elapsed_s"] + 0.02
    assert (second["time/updates_per_s"], second["time/waits"], second["loss_s"]) == (7.0, 0.5, 1.0)


def test_the_comparison_notices_a_learner_that_was_not_restored(tmp_path, whole):
    with pytest.raises(Crash):
        train(tmp_path / "run", 23, crash_at=12)
    train(tmp_path / "run", 23, restore=False)
    assert numbers(tmp_path / "run") != numbers(whole)
    assert checkpoint_hashes(tmp_path / "run") != checkpoint_hashes(whole)


def test_interrupted_twice_and_resumed_equals_uninterrupted(tmp_path, whole):
    train(tmp_path / "run", 23, interrupt_at=7)
    # The signal came when step 7 was over, which could no longer save: step 8 knew that it was the last, and did.
    assert [p.name for p in numbered(tmp_path / "run" / "checkpoints")] == ["00000005", "00000008"]
    train(tmp_path / "run", 23, interrupt_at=11)
    train(tmp_path / "run", 23)
    assert numbers(tmp_path / "run") == numbers(whole)


def test_resuming_a_finished_run_changes_nothing(tmp_path, whole):
    before = tree(whole)
    train(whole, 23)
    assert tree(whole) == before


def test_a_longer_total_continues(tmp_path, whole):
    train(tmp_path / "run", 10, config={"lr": 0.1, "train": {"total": 10}}, changeable={"train.total"})
    train(tmp_path / "run", 23, config={"lr": 0.1, "train": {"total": 23}}, changeable={"train.total"})
    assert numbers(tmp_path / "run") == numbers(whole)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["train"] == {"total": 23}


def test_a_torn_line_and_lines_after_the_checkpoint_are_cut(tmp_path, whole):
    with open(whole / "metrics.jsonl", "a") as file:
        file.write('{"step": 24, "loss": 1.0}\n{"step": 25, "lo')
    assert len(read_metrics(whole)) == 24
    train(whole, 23)
    assert len((whole / "metrics.jsonl").read_text().splitlines()) == 23


def test_a_broken_newest_checkpoint_is_set_aside_and_trained_again(tmp_path, whole, caplog):
    expected = checkpoint_hashes(whole)
    (whole / "checkpoints" / "00000023" / "learner" / "state.safetensors").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        train(whole, 23)
    assert "00000023/learner/state.safetensors" in caplog.text
    got = checkpoint_hashes(whole)
    assert {k: v for k, v in got.items() if ".broken-" not in k} == expected
    assert any(name.startswith("00000023.broken-") for name in got)


def test_only_the_last_checkpoints_are_kept(whole):
    assert [p.name for p in numbered(whole / "checkpoints")] == ["00000015", "00000020", "00000023"]


def test_a_resumed_run_must_be_loaded_before_it_steps(whole):
    with Run(whole, {"lr": 0.1}, resume=True, tensorboard=False) as run, pytest.raises(RuntimeError, match="latest"):
        next(run.steps(30))


def test_metrics_are_numbers_also_when_they_are_not_finite(tmp_path):
    with Run(tmp_path / "run", {}, tensorboard=False) as run:
        run.log(
            1, {"a": torch.tensor(0.5), "b": float("nan"), "c": torch.tensor(float("-inf")), "d": torch.tensor(True)}
        )
    line = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "NaN" not in line and json.loads(line)["step"] == 1  # JSON knows no NaN.
    row = read_metrics(tmp_path / "run")[0]
    assert row["a"] == 0.5 and row["b"] != row["b"] and row["c"] == float("-inf") and row["d"] == 1.0


def test_tensorboard_holds_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path / "run", 3, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    logged = [(float(e.step), e.value) for e in events.Scalars("loss")]
    assert logged == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in numbers(tmp_path / "run")]


class Body(Enum):
    mlp = "mlp"


@dataclass
class Config:
    body: Body = Body.mlp
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    bound: float = float("nan")


def test_a_dataclass_is_stored_and_recognised(tmp_path):
    train(tmp_path / "run", 5, config=Config())
    train(tmp_path / "run", 10, config=Config())
    with pytest.raises(BurnishError, match=r"sizes \(\[1, 2\] saved, \[1, 3\] asked\)"):
        train(tmp_path / "run", 15, config=Config(sizes=[1, 3]))


def test_an_empty_folder_is_no_run_yet(tmp_path):
    train(tmp_path, 2, resume=False)
    assert len(read_metrics(tmp_path)) == 2


def test_a_run_with_nothing_to_resume_says_so(tmp_path, capsys):
    """The controls: one that begins, and one that goes on."""
    for resume, steps, said in ((True, 2, True), (True, 4, False)):
        train(tmp_path / "run", steps, resume=resume)
        assert ("this run begins at its first step" in capsys.readouterr().err) == said
    train(tmp_path / "other", 2, resume=False)
    assert "first step" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"resume": False}, "use resume=true or another out="),
        ({"config": {"lr": 0.2}}, r"lr \(0.1 saved, 0.2 asked\)"),
        ({"config": {}}, r"lr \(0.1 saved, nothing asked\)"),
        ({"config": {"lr": 0.1, "a": {"b": 1}}, "changeable": {"a.c", "b"}}, r"a \(nothing saved, \{'b': 1\} asked\)"),
        ({"config": {"lr": 0.2, "a": 1, "b": 2, "c": 3, "d": 4}}, "lr .*a .*b .* and 2 more"),
    ],
)
def test_refused_runs_are_left_as_they_were(whole, options, sentence):
    before = tree(whole)
    with pytest.raises(BurnishError, match=sentence):
        train(whole, 50, **options)
    assert tree(whole) == before


def test_folders_of_others_are_left_as_they_were(tmp_path):
    (tmp_path / "thesis.tex").write_text("irreplaceable")
    for path, resume, sentence in [
        (tmp_path, False, "is not empty"),
        (tmp_path, True, "is not a run folder"),
        (tmp_path / "thesis.tex", True, "is a file"),
    ]:
        with pytest.raises(BurnishError, match=sentence):
            train(path, 5, resume=resume)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_nonsense_is_refused_before_a_folder_is_made(tmp_path):
    with pytest.raises(BurnishError, match="plain data"):
        train(tmp_path / "run", 5, config={"x": object()})
    with pytest.raises(BurnishError, match="keep=0"):
        train(tmp_path / "run", 5, keep=0)
    assert list(tmp_path.iterdir()) == []


def hold(out: Path, held: Any, release: Any) -> None:
    with Run(out, {"lr": 0.1}, resume=True, tensorboard=False):
        held.set()
        release.wait(60)


def test_two_processes_cannot_write_one_run(whole):
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    other = context.Process(target=hold, args=(whole, held, release))
    other.start()
    assert held.wait(60)
    before = tree(whole)
    with pytest.raises(BurnishError, match="another process is writing"):
        train(whole, 30)
    assert tree(whole) == before
    release.set()
    other.join()
    train(whole, 30)  # The lock went with the process.


def test_policy_is_found_in_runs_checkpoints_and_alone(tmp_path, whole):
    last = whole / "checkpoints" / "00000023"
    found = [find_policy(path) for path in (whole, last, last / "policy")]
    assert all(c.config == {"kind": "toy"} and c.path == last / "policy" for c in found)
    shutil.rmtree(last / "policy")
    assert find_policy(whole).path == whole / "checkpoints" / "00000020" / "policy"
    with Run(tmp_path / "new", {}, tensorboard=False), pytest.raises(BurnishError, match="no checkpoint yet"):
        find_policy(tmp_path / "new")
    with pytest.raises(BurnishError, match="is not a checkpoint"):
        find_policy(tmp_path / "absent")


def test_progress_is_quiet_unless_asked_where_there_is_no_terminal(tmp_path, capsys):
    train(tmp_path / "a", 4, resume=False)
    assert capsys.readouterr().err == ""
    train(tmp_path / "b", 4, resume=False, progress_every_s=0.0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and "2/4" in lines[1] and "step/s" in lines[1]
    train(tmp_path / "b", 6, progress_every_s=1e6)
    assert "6/6" in capsys.readouterr().err  # The last step is always reported.


def test_first_signal_asks_and_second_interrupt_does_not(capfd):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interruptible() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert capfd.readouterr().err.count("stopping") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_is_interrupted_saves_and_leaves_cleanly(tmp_path, number, capfd):
    out = tmp_path / "run"
    process = multiprocessing.get_context("fork").Process(target=train, args=(out, 10**7))
    process.start()
    deadline = time.monotonic() + 60
    while not numbered(out / "checkpoints") and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid or 0, number)
    process.join(60)
    errors = capfd.readouterr().err
    assert process.exitcode == 0 and "stopping" in errors and "Traceback" not in errors
    with Run(out, {"lr": 0.1}, resume=True, tensorboard=False) as run:
        checkpoint = run.latest()
        assert checkpoint is not None and checkpoint.children["learner"].state["updates"] == run.start
    # Nothing after the checkpoint was lost: the step that noticed the signal saved itself.
    assert [row["step"] for row in read_metrics(out)] == list(range(1, run.start + 1))
