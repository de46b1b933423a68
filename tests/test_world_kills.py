"""kill -9 of a worker, of a world in another Python, of a server of worlds and of the trainer, in mid-run.

The first three end the run with status 2 and one sentence. `resume=true` continues it to the same bytes as a run that
nobody disturbed. Of a trainer nothing is left: no worker, and no memory in /dev/shm.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_refinement_kill import CODE, checkpoints

from burnish.sim.external import world_server

pytestmark = pytest.mark.slow

SERVER = Path(world_server.__file__)
COMMAND = [
    *(sys.executable, "-c", CODE, "finetune", "method=rlpd", "worlds=2", "total=160", "save_every=20", "log_every=80"),
    *(
        "eval.episodes=2",
        "eval.worlds=2",
        "eval.confirm=2",
        "method.loop.warmup=8",
        "method.loop.batch=8",
        "method.loop.updates_per_decision=0.25",
    ),
    *("method.sac.critic.hidden=[8]", "method.sac.critic.members=2", "method.sac.agent.hidden=[8]"),
    *("env.id=Pendulum-v1", "env.max_steps=10"),
]


def children(pid: int) -> list[int]:
    """The servers of worlds that ``pid`` started, or that its own serving process forked; the oldest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and SERVER.name in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:  # it has just ended
            continue
    return sorted(found)


def in_shared_memory(pids: list[int]) -> set[str]:
    """Files of /dev/shm that these processes have."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {line.split()[5] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    """Its address, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [sys.executable, str(SERVER), "--listen", address, "--id", "Pendulum-v1"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and "serving" in process.stderr.readline()
    yield address, process.pid
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """The checkpoints of a run that nobody disturbed, in one pool for all: the way to a world changes no number."""
    run = tmp_path_factory.mktemp("whole") / "run"
    subprocess.run([*COMMAND, "env=gym", "env.processes=2", f"out={run}"], check=True, capture_output=True)
    return checkpoints(run)


def disturbed(command: list[str], run: Path, victim: Callable[[int], int]) -> subprocess.Popen[str]:
    """The process of a run of which ``victim`` was killed after its third checkpoint."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 180
    while len(list((run / "checkpoints").glob("0*"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before anybody could be killed"
        time.sleep(0.005)
    os.kill(victim(process.pid), signal.SIGKILL)
    return process


@pytest.mark.parametrize("kind", ["worker", "remote", "server"])
def test_worlds_that_are_killed_end_the_run_with_a_sentence_and_it_resumes(kind, server, whole, tmp_path):
    address, serving = server
    ways = {
        "worker": ["env=gym", "env.processes=2"],
        "remote": ["env=remote", f"env.python={sys.executable}", "env.processes=1"],
        "server": ["env=remote", f"env.address={address}", "env.processes=1"],
    }
    command, run = [*COMMAND, *ways[kind], f"out={tmp_path}/run", "resume=true"], tmp_path / "run"
    process = disturbed(command, run, lambda pid: children(serving if kind == "server" else pid)[0])
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    words = error.strip().splitlines()[-1]
    how = "the connection was closed" if kind == "server" else "killed by signal 9"
    assert words.startswith("burnish finetune: the process with worlds 0 to ") and f"died ({how})" in words
    assert "resume=true" in words and "Traceback" not in error
    last = max(whole)
    assert last not in checkpoints(run)
    subprocess.run(command, check=True, capture_output=True)
    assert checkpoints(run)[last] == whole[last]


def test_of_a_trainer_that_is_killed_nothing_is_left_and_it_resumes(whole, tmp_path):
    command, run = [*COMMAND, "env=gym", "env.processes=2", f"out={tmp_path}/run", "resume=true"], tmp_path / "run"
    workers: list[int] = []
    shared: set[str] = set()

    def victim(pid: int) -> int:
        workers.extend(children(pid))
        shared.update(in_shared_memory([pid, *workers]))
        return pid

    process = disturbed(command, run, victim)
    assert process.wait(timeout=60) == -signal.SIGKILL and len(workers) >= 2
    deadline = time.monotonic() + 30
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in workers if alive(pid)], "workers outlived the trainer"
    assert not [name for name in shared if Path(name).exists()]
    last = max(whole)
    assert last not in checkpoints(run)
    subprocess.run(command, check=True, capture_output=True)
    assert checkpoints(run)[last] == whole[last]
