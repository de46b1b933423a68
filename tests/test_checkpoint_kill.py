"""A process that dies while it saves, at any instant, leaves a readable checkpoint."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from burnish.policies.runs import checkpoint
from burnish.policies.runs.checkpoint import load, newest, number, numbered, prune, save


def save_step(folder: Path, step: int) -> None:
    child = {"config": {}, "state": {"x": torch.full((500_000,), float(step)), "step": step}}
    state = {"step": step, "x": torch.full((500_000,), step)}
    save(folder / number(step), config={"step": step}, state=state, children={"policy": child})


def save_until_killed(folder: Path) -> None:
    step = newest(folder).state["step"]
    while True:
        step += 1
        save_step(folder, step)
        prune(folder, keep=2)


@pytest.mark.slow
def test_thirty_kills_while_saving_leave_a_readable_checkpoint_each_time(tmp_path, caplog):
    torch.set_num_threads(1)  # A forked child must not wait for threads that stayed behind.
    chance = random.Random(0)
    began = time.perf_counter()
    save_step(tmp_path, 0)
    save_s = time.perf_counter() - began  # on this machine, as busy as it is
    interrupted, last = 0, 0
    for _ in range(30):
        child = os.fork()
        if child == 0:
            try:
                save_until_killed(tmp_path)
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0.5, 6.0) * save_s)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])  # It was killed while it saved; it did not fail before.
        interrupted += any(p.name.startswith(checkpoint.SCRATCH) for p in tmp_path.iterdir())
        found = newest(tmp_path)
        step = found.state["step"]
        assert found.path.name == number(step) and found.config == {"step": step} and step >= last
        assert (found.state["x"] == step).all()
        assert (found.children["policy"].state["x"] == step).all()
        last = step
    assert not caplog.records  # Never did the newest have to be passed over.
    assert interrupted > 5 and last > 5  # Kills did fall into the writing, and saving went on between them.


def save_and_die(folder: Path, step: int, operation: int) -> None:
    """Save a checkpoint, but die just before the given file operation of it."""
    count = 0

    def watch(event: str, arguments: object) -> None:
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            count += 1
            if count == operation:
                os._exit(9)

    sys.addaudithook(watch)
    child = {"config": {}, "state": {"step": step, "x": torch.ones(2)}}
    save(folder / number(step), config={}, state={"step": step}, children={"policy": child})
    prune(folder, keep=2)


@pytest.mark.slow
def test_death_before_each_single_file_operation_leaves_a_readable_checkpoint(tmp_path, caplog):
    for step in range(2):
        save(tmp_path / number(step), config={}, state={"step": step})
    last, published, operation, status = 1, 0, 0, 9
    while status == 9:
        operation += 1
        child = os.fork()
        if child == 0:
            try:
                save_and_die(tmp_path, last + 1, operation)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        step = newest(tmp_path).state["step"]
        assert step in (last, last + 1)
        assert all(load(path).state["step"] == int(path.name) for path in numbered(tmp_path))
        published += step > last
        last = step
    assert status == 0 and not caplog.records
    assert operation > 15 and published > 3  # It died while writing, and also after, while removing older ones.
    assert [p.name for p in tmp_path.iterdir() if p not in numbered(tmp_path)] == []  # The last one cleared it all.
