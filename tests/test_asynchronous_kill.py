"""Either side of a run in two processes is killed: the other one knows what to do, and what had arrived is kept."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchronous_lab import (
    LENGTHS,
    PLAIN,
    RUN,
    Telling,
    Threads,
    alive,
    all_gone,
    begun,
    descendants,
    killed,
    newest_step,
    telling,
    together,
    within,
)
from burnish.finetune.processes.actor_process import GRACE_S
from burnish.offline.replay import Replay
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.runs.run import read_metrics
from seam import replay_rows
from soak import often

# ---- death ----


def intact(replay: Replay, lives: int) -> None:
    """Every row leads to the next one of its world, or ended; ends that the script does not know are of a death."""
    rows = replay_rows(replay)
    tick, led, ended = rows["obs"]["state"][..., 2], rows["next_obs"]["state"][..., 2], rows["ended"]
    assert np.array_equal(led, tick + rows["steps"]), "a decision leads as far as it lasted"
    assert np.array_equal(tick[1:], np.where(ended, 0, led)[:-1]), "and on to the next one"
    cut = (ended & (led != np.array(LENGTHS))).any(1)
    assert cut.sum() <= lives - 1
    assert (rows["discount"][ended & ~rows["terminated"]] > 0).all(), "whatever was cut off is worth something still"
    assert not rows["warm"][9:].any() and rows["warm"][:4].all()


def killed_at_random(kills: int, seed: int, **options: Any) -> None:
    """Whatever the learner was doing, it notices within a second, and nothing that had arrived is lost."""
    chance, told = random.Random(seed), []

    def tell(line: str) -> None:
        told.append((time.monotonic(), line))

    total = 100 + 60 * kills
    both = together(telling, Telling(PLAIN, 0.002), seed=seed, total=total, tell=tell, **options)
    both.learner.pause = lambda: chance.choice((0.0, 0.003))
    processes = []
    with within(60 + 20 * kills):
        for number in range(1, kills + 1):
            for _ in range(chance.randrange(3, 30)):
                both.iterate()
            processes.append(both._slots[0].handles[-1].process)
            time.sleep(chance.uniform(0, 0.02))
            killed(processes[-1])
            at = time.monotonic()
            while both.deaths < number:
                both.iterate()
            assert told[-1][0] - at < 1, "the learner did not notice"
            both._slots[0].deaths.clear()  # these are no accidents
        while both.loop.statistics.decisions < total:
            both.iterate()
        processes.append(both._slots[0].handles[-1].process)
        both.close()
    assert len(told) == kills and all("another one begins" in line for _, line in told)
    assert not any(process.is_alive() or (process.pid and alive(process.pid)) for process in processes)
    assert both.loop.statistics.decisions == len(both.replay) == total
    assert both.updates_per_decision * (total - 8) == int(0.75 * (total - 8))
    intact(both.replay, kills + 1)


@pytest.mark.slow
def test_an_actor_that_hangs_up_is_replaced_and_its_decisions_are_kept():
    killed_at_random(20, seed=0, launch=Threads())


@pytest.mark.slow
def test_an_actor_that_is_killed_is_replaced_and_its_decisions_are_kept():
    killed_at_random(1, seed=0)


@pytest.mark.rotating(2)
@pytest.mark.slow
def test_actors_are_killed_again_and_again():
    killed_at_random(often(6, 20), seed=1)


def test_who_is_let_go_moves_no_more():
    threads = Threads()
    both = together(telling, Telling(PLAIN), launch=threads)
    with within(20):
        both.iterate()
        both.close()
    assert threads.launched[0].loop.env.env.env.closed and threads.launched[0].exitcode == 0


@pytest.mark.parametrize(("trouble", "lives"), [("sentence", 1), ("bug", 3)])
def test_an_actor_that_cannot_live_ends_the_run_in_a_sentence(trouble: str, lives: int):
    """One that says why is believed at once; of others three deaths in a minute are enough."""
    threads, told = Threads(), []
    both = together(telling, Telling(PLAIN, trouble=trouble), launch=threads, tell=told.append)
    with within(20), pytest.raises(BurnishError, match=r"there is no world today|died 3 times.*exit status 1"):
        both.iterate()
    both.close()
    assert len(threads.launched) == lives and len(told) == lives - 1


@pytest.mark.slow
def test_what_an_actor_begins_hears_signals_though_the_actor_heeds_none():
    """The control process of a robot is such a child, and SIGTERM tells it that the actor is gone."""
    both = together(telling, Telling(PLAIN, trouble="child"))
    with within(120), pytest.raises(BurnishError, match="a child of one who heeds no signals ended by -15"):
        both.iterate()
    both.close()


# ---- the command ----


@pytest.mark.slow
def test_a_learner_that_is_killed_leaves_no_orphan_and_the_run_is_resumed(tmp_path: Path):
    process, children, saved = begun(tmp_path / "run")
    assert len(children) >= 1 and all(alive(pid) for pid in children)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    assert all_gone(children, 5), "somebody goes on acting"
    with within(120):
        assert main([*RUN, f"out={tmp_path}/run", "resume=true"]) == 0
    lines = read_metrics(tmp_path / "run")
    assert [int(line["step"]) for line in lines if line["step"] == saved], "it was begun anew"
    assert int(lines[-1]["step"]) == newest_step(tmp_path / "run") == 200
    assert lines[-1]["decisions"] == 400
    assert lines[-1]["asynchronous/updates_per_decision"] == 0.5
    assert 0 < lines[-1]["asynchronous/staleness"] < 0.5 * (64 + 4) + 20


@pytest.mark.slow
def test_ctrl_c_in_the_terminal_stops_both_and_saves(tmp_path: Path):
    process, children, saved = begun(tmp_path / "run")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert all_gone(children, 5) and newest_step(tmp_path / "run") >= saved


@pytest.mark.rotating(2)
@pytest.mark.slow
def test_learners_are_killed_again_and_again(tmp_path: Path):
    chance = random.Random(0)
    for number in range(often(5, 20)):
        folder = tmp_path / str(number % 4)
        process, children, _ = begun(folder)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        process.wait(timeout=10)
        assert all_gone(children, 5), "somebody goes on acting"
        if newest_step(folder) > 100:
            shutil.rmtree(folder)


@pytest.mark.slow
def test_a_world_that_hangs_does_not_outlive_its_learner():
    code = "import asynchronous_lab as lab; lab.together(lab.telling, lab.Telling(lab.CONTROL, 3600.0)).iterate()"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    deadline = time.monotonic() + 60
    while len(descendants(process.pid)) < 2:  # the actor, and multiprocessing's own
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    children = descendants(process.pid)
    time.sleep(15)  # until it hangs
    process.kill()
    process.wait(timeout=10)
    assert all_gone(children, GRACE_S + 3)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["method=gaussian_ppo", "processes=2"],
            "method=gaussian_ppo does not; take processes=1, or one of method=dsrl",
        ),
        (["method=rlpd", "processes=0"], "processes=0 must be at least 1"),
        (["method=rlpd", "processes=4"], "worlds=8 does not divide among the 3 acting processes of processes=4"),
        (["method=rlpd", "on=ray"], "on=ray is for acting processes; take some, such as processes=5"),
        (["method=rlpd", "processes=3", "on=moon"], "on=moon is no place for acting processes; take local, ray or"),
        (["method=gaussian_ppo", "processes=3", "on=ray"], "method=gaussian_ppo does not; take processes=1, or one of"),
        (["method=rlpd", "processes=2", "asynchronous.backlog=-1"], "asynchronous.backlog=-1 must be at least 0"),
        (["method=rlpd", "asynchronous.publish_every=0"], "asynchronous.publish_every=0 must be at least 1"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main(["finetune", "env=point_reach", f"out={tmp_path}/run", *words]) == 2
    out, err = capsys.readouterr()
    assert sentence in err and err.count("\n") == 1 and "Traceback" not in out + err
    assert not (tmp_path / "run").exists()
