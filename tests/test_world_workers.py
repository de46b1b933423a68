"""Worker processes, another Python, another machine: the same episodes as in process; a death is one sentence."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.policies.core.errors import BurnishError
from burnish.sim.external import world_server
from burnish.sim.external.links import Failed, Process, checked
from burnish.sim.external.settings import GymConfig, RemoteConfig
from burnish.sim.external.worlds import ExternalEnv

SERVER = Path(world_server.__file__)


def played(env: ExternalEnv, ticks: int = 30) -> torch.Tensor:
    """(1 + ticks, N, 4): observations and rewards of worlds that are active in turns, on fixed seeds and actions."""
    source, n = torch.Generator().manual_seed(0), env.num_envs
    seen = [torch.cat([env.reset(seeds=list(range(n)))["state"], torch.zeros(n, 1)], 1)]
    for tick in range(ticks):
        active = torch.tensor([(tick + i) % 3 > 0 for i in range(n)])
        step = env.step(4 * torch.rand(n, 1, generator=source) - 2, active)
        seen.append(torch.cat([step.obs["state"], step.reward[:, None]], 1))
    return torch.stack(seen)


@pytest.fixture(scope="module")
def in_process():
    return played(ExternalEnv(5, GymConfig(processes=0)))


@pytest.fixture
def served():
    """A server of pendulums on this machine, with a key, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [sys.executable, str(SERVER), "--listen", address, "--id", "Pendulum-v1", "--most", "3"]
    process = subprocess.Popen(words, env={**os.environ, world_server.KEY: "secret"}, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and "serving Pendulum-v1" in process.stderr.readline()
    yield address, process
    process.kill()
    process.wait()


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_any_number_of_workers_plays_the_same_episodes(in_process, processes):
    env = ExternalEnv(5, GymConfig(processes=processes))
    assert len(env.workers.links) == processes
    assert torch.equal(played(env), in_process)
    assert not torch.equal(in_process[0, 0], in_process[0, 1]), "the control: other seeds begin elsewhere"


def test_another_python_plays_the_same_episodes(in_process):
    assert torch.equal(played(ExternalEnv(5, RemoteConfig(python=sys.executable))), in_process)


def test_another_machine_plays_the_same_episodes_for_the_holder_of_the_key(in_process, served, monkeypatch):
    address, _ = served
    with pytest.raises(BurnishError, match="asks for a key"):
        ExternalEnv(1, RemoteConfig(address=address))
    monkeypatch.setenv(world_server.KEY, "another")
    with pytest.raises(BurnishError, match="refuses the key"):
        ExternalEnv(1, RemoteConfig(address=address))
    monkeypatch.setenv(world_server.KEY, "secret")
    env = ExternalEnv(5, RemoteConfig(address=address, processes=2))
    assert torch.equal(played(env), in_process)
    saved, after = env.state_dict(), env.step(torch.ones(5, 1)).obs["state"]
    env.load_state_dict(saved)
    assert torch.equal(env.step(torch.ones(5, 1)).obs["state"], after)
    with pytest.raises(BurnishError, match="4 worlds were asked for, and 1 to 3 are offered"):
        ExternalEnv(4, RemoteConfig(address=address, processes=1))


def test_who_connects_chooses_no_code_and_believes_no_server_without_the_key(served, monkeypatch, tmp_path):
    (address, _), file = served, tmp_path / "mine.py"
    file.write_text("def run(env):\n    open(__file__ + '.ran', 'w').close()\n")
    monkeypatch.setenv(world_server.KEY, "secret")
    with pytest.raises(BurnishError, match=r"has the world Pendulum-v1, not env\.id=Other-v0; leave env.id out"):
        ExternalEnv(1, RemoteConfig("Other-v0", address=address))
    env = ExternalEnv(1, RemoteConfig(address=address, success="terminated"))
    assert env.config.id == "Pendulum-v1" and env.spec.action_mode == "gym:Pendulum-v1", "the server says what it is"
    env.reset()
    assert "success" in env.step(torch.zeros(1, 1)).info, "the user says what a success is"
    with pytest.raises(BurnishError, match="does not offer that expert"):
        env.workers.take_on(f"{file}:run")
    assert not Path(f"{file}.ran").exists()
    with pytest.raises(BurnishError, match="is said to the server of env"):
        RemoteConfig(address=address, kwargs={"g": 9.0})
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        greeting = (b"h", {"version": world_server.VERSION, "nonce": ""})
        threading.Thread(target=lambda: world_server.send(impostor.accept()[0], *greeting), daemon=True).start()
        with pytest.raises(BurnishError, match="proves no key"):
            ExternalEnv(1, RemoteConfig(address=f"127.0.0.1:{impostor.getsockname()[1]}"))


def test_a_worker_closes_its_worlds(tmp_path):
    env = ExternalEnv(1, GymConfig("odd_worlds:Leaving", {"file": f"{tmp_path}/closed"}, max_steps=5, processes=1))
    env.reset()
    env.close()
    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize(("said", "count"), [(None, 1), ("default", 2)])
def test_one_worker_shows_the_warnings_of_all_unless_the_user_asks_for_more(monkeypatch, capfd, tmp_path, said, count):
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    if said:
        monkeypatch.setenv("PYTHONWARNINGS", said)
    ExternalEnv(2, GymConfig("odd_worlds:Leaving", {"file": f"{tmp_path}/closed"}, max_steps=5, processes=2)).close()
    assert capfd.readouterr().err.count("UserWarning: it will leave a file") == count


def killed(env: ExternalEnv, k: int) -> None:
    link = env.workers.links[k]
    assert isinstance(link, Process)
    os.kill(link._process.pid, signal.SIGKILL)
    link._process.wait()


@pytest.mark.parametrize("moment", ["step", "reset"])
def test_a_worker_that_dies_is_one_sentence(moment):
    env = ExternalEnv(4, GymConfig(processes=2))
    env.reset()
    killed(env, 1)
    with pytest.raises(BurnishError, match=r"worlds 2 to 3 of Pendulum-v1 died \(killed by signal 9\)") as caught:
        env.step(torch.ones(4, 1)) if moment == "step" else env.reset()
    assert "env.restart=true" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("restart", [False, True])
def test_a_worker_that_is_silent_for_too_long_counts_as_dead(restart):
    env = ExternalEnv(2, GymConfig(processes=2, restart=restart, patience_s=20))
    env.reset()
    link = env.workers.links[1]
    assert isinstance(link, Process) and link._socket.gettimeout() == 20
    link._patience = 0.2
    link._process.send_signal(signal.SIGSTOP)
    if restart:
        assert env.step(torch.ones(2, 1)).truncated.tolist() == [False, True]
    else:
        with pytest.raises(BurnishError, match=r"died \(it has not answered for 0.2 seconds; env.patience_s"):
            env.step(torch.ones(2, 1))
        env.close()
    assert link._process.poll() == -signal.SIGKILL


def test_worlds_that_are_begun_one_after_the_other_have_time_for_each():
    env = ExternalEnv(3, GymConfig(processes=1, patience_s=20))
    link = env.workers.links[0]
    env.reset()
    assert isinstance(link, Process) and link._socket.gettimeout() == 60
    env.step(torch.zeros(3, 1))
    assert link._socket.gettimeout() == 20


def test_a_pause_of_the_trainer_is_no_silence_of_its_workers():
    """Both are paused for longer than a worker may be silent; the worker goes on a little later."""
    code = (
        "import signal, torch\n"
        "from burnish.sim.external.settings import GymConfig\n"
        "from burnish.sim.external.worlds import ExternalEnv\n"
        "env = ExternalEnv(1, GymConfig(processes=1))\n"
        "env.reset()\n"
        "link = env.workers.links[0]\n"
        "link._patience = 2\n"
        "link._process.send_signal(signal.SIGSTOP)\n"
        "print(link._process.pid, flush=True)\n"
        "env.step(torch.ones(1, 1))\n"
        "print('answered', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        worker = int(trainer.stdout.readline())
        stopped, again = (trainer.pid, signal.SIGSTOP), (trainer.pid, signal.SIGCONT)
        for waited, sent in ((0.3, stopped), (2.5, again), (0.2, (worker, signal.SIGCONT))):
            time.sleep(waited)
            os.kill(*sent)
        assert trainer.communicate(timeout=60)[0] == "answered\n"


def test_a_worker_that_is_replaced_loses_its_episodes_and_no_others():
    env, other = (ExternalEnv(4, GymConfig(processes=2, restart=True)) for _ in range(2))
    for worlds in (env, other):
        worlds.reset(seeds=[1, 2, 3, 4])
        before = worlds.step(torch.ones(4, 1)).obs["state"]
    killed(env, 1)
    step, expected = (worlds.step(torch.ones(4, 1)) for worlds in (env, other))
    assert step.truncated.tolist() == [False, False, True, True] and not step.terminated.any()
    assert torch.equal(step.obs["state"][:2], expected.obs["state"][:2])
    assert torch.equal(step.obs["state"][2:], before[2:]), "where the lost worlds were last seen"
    for worlds in (env, other):
        worlds.reset(torch.tensor([False, False, True, True]), [0, 0, 5, 6])
    assert torch.equal(env.step(torch.ones(4, 1)).obs["state"], other.step(torch.ones(4, 1)).obs["state"])
    killed(env, 0)
    anew = [worlds.reset(torch.tensor([True, False, False, False]), [7, 0, 0, 0])["state"] for worlds in (env, other)]
    assert torch.equal(anew[0], anew[1]), "a reset in which a worker died is made again"
    assert env.step(torch.ones(4, 1)).truncated.tolist() == [False, True, False, False]


def test_where_one_world_cannot_be_restored_no_answer_of_another_is_left_over():
    """Pendulums in two processes, of which the first one is sent actions of no shape."""
    env, other = (ExternalEnv(2, GymConfig(processes=2), seed=3) for _ in range(2))
    env.reset()

    def broken(i: int):
        return {"seed": 1}, b"" if i else b"x"

    with pytest.raises(Failed, match="buffer"):
        env.workers.of_each_world(b"p", broken)
    assert torch.equal(env.reset(seeds=[4, 5])["state"], other.reset(seeds=[4, 5])["state"])
    assert torch.equal(env.step(torch.ones(2, 1)).reward, other.step(torch.ones(2, 1)).reward)


def test_workers_end_with_their_owner():
    code = (
        "import os, sys, torch\n"
        "from burnish.sim.external.settings import GymConfig\n"
        "from burnish.sim.external.worlds import ExternalEnv\n"
        "env = ExternalEnv(2, GymConfig(processes=2))\n"
        "print(*[link._process.pid for link in env.workers.links], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    pids = [int(word) for word in found.stdout.split()]
    assert found.returncode == -9 and len(pids) == 2
    for pid in pids:
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
                break
            signal.sigtimedwait([], 0.1)
        else:
            raise AssertionError(f"worker {pid} outlived its owner")


def test_the_server_is_one_file_for_python_3_8_that_needs_numpy_alone():
    tree = ast.parse(SERVER.read_text(encoding="utf-8"), feature_version=(3, 8))
    head = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name if isinstance(node, ast.Import) else node.module for node in head for alias in node.names}
    assert {str(name).partition(".")[0] for name in names} <= set(sys.stdlib_module_names) | {"numpy"}


OLD = [*Path.home().glob(".pyenv/versions/3.8.*/bin/python"), shutil.which("python3.8")]  # the latter may be a shim


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.skipif(not any(OLD), reason="needs Python 3.8")
def test_python_3_8_plays_the_same_episodes(in_process, tmp_path):
    """Its newest NumPy is 1.24, by which a pendulum differs in the last bit."""
    subprocess.run([next(filter(None, OLD)), "-m", "venv", str(tmp_path / "old")], check=True)
    python = tmp_path / "old/bin/python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "numpy", "gymnasium"], check=True)
    torch.testing.assert_close(played(ExternalEnv(5, RemoteConfig(python=str(python)))), in_process, rtol=0, atol=1e-6)


BOX = {"kind": "Box", "dtype": "f8", "shape": [1]}
SAID: dict[str, Any] = {
    **{
        "version": world_server.VERSION,
        "id": "x",
        "observation": [{"path": ["a"], **BOX}],
        "action": {**BOX, "low": [-1], "high": [1]},
    },
    **{"rates": {"dt": 0.1}, "max_steps": 5, "says": {"action_mode": None, "notes": []}},
    **{"nondeterministic": False, "render_mode": None},
}


@pytest.mark.parametrize(
    "said",
    [
        *({key: x for key, x in SAID.items() if key != name} for name in SAID if name != "id"),
        {**SAID, "rates": [1]},
        {**SAID, "rates": {"dt": "fast"}},
        {**SAID, "nondeterministic": "no"},
        {**SAID, "action": {**SAID["action"], "low": [-1, -1]}},
        {**SAID, "action": {**SAID["action"], "kind": ["Box"]}},
        {},
        {"version": 99},
        {"version": world_server.VERSION, "observation": [], "action": {}},
        {
            "version": world_server.VERSION,
            "observation": [{"path": ["a"], "kind": "Box", "dtype": "object", "shape": [2]}],
            "action": {},
        },
        {
            "version": world_server.VERSION,
            "observation": [{"path": [], "kind": "Box", "dtype": "f8", "shape": [1 << 40]}],
            "action": {},
        },
    ],
)
def test_worlds_that_describe_themselves_in_another_form_are_refused(said):
    with pytest.raises(BurnishError, match="the worlds"):
        checked(said)
    assert checked({**SAID, "max_steps": "many", "render_mode": 3})["max_steps"] is None, "the control"
