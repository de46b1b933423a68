"""A server of worlds: the port that it frees, the peers that it bounds, and what it does for its environments."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from burnish.policies.core.errors import BurnishError
from burnish.sim.external import world_server
from burnish.sim.external.links import Remote
from burnish.sim.external.settings import RemoteConfig
from burnish.sim.external.worlds import ExternalEnv

Serve = Callable[..., tuple[str, "subprocess.Popen[str]"]]


def command(address: str, made: str) -> list[str]:
    return [sys.executable, str(Path(world_server.__file__)), "--listen", address, "--id", made]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server, and returns its address and process."""
    started = []

    def start(made: str = "Pendulum-v1", host: str = "127.0.0.1", key: str = "") -> tuple[str, subprocess.Popen[str]]:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            free.bind((host.strip("[]"), 0))
            address = f"{host}:{free.getsockname()[1]}"
        given = {**os.environ, world_server.KEY: key, "PYTHONPATH": str(Path(__file__).parent)}
        started.append(subprocess.Popen(command(address, made), env=given, stderr=subprocess.PIPE, text=True))
        assert "serving" in started[-1].stderr.readline()
        return address, started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_the_port_is_free_when_the_server_has_ended_though_a_user_goes_on(serve):
    address, process = serve()
    env = ExternalEnv(1, RemoteConfig(address=address, processes=1))
    env.reset()
    taken = subprocess.run(command(address, "Pendulum-v1"), capture_output=True, text=True, check=False, timeout=60)
    assert taken.returncode == 2 and "cannot be had" in taken.stderr and "Traceback" not in taken.stderr
    process.kill()
    process.wait()
    socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))).close()
    env.step(torch.zeros(1, 1))


def test_a_process_that_an_environment_starts_says_how_it_ended(serve):
    address, _ = serve("odd_worlds:Starting")
    env = ExternalEnv(1, RemoteConfig(address=address, processes=1, max_steps=5))
    env.reset()
    assert env.step(torch.zeros(1, 2)).info["success"].item()


def test_the_limit_of_steps_that_a_user_sets_is_that_of_the_environment(serve):
    address, _ = serve()
    env = ExternalEnv(1, RemoteConfig(address=address, processes=1, max_steps=203))
    env.reset()
    ends = [bool(env.step(torch.zeros(1, 1)).truncated) for _ in range(203)]
    assert ends.index(True) == 202, "it is registered with 200"


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_of_the_newer_protocol(serve, host):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no address of IPv6")
    address, _ = serve(host=host)
    ExternalEnv(1, RemoteConfig(address=address, processes=1)).reset()


def test_a_peer_that_proved_nothing_has_little_room(serve):
    address, _ = serve(key="secret")
    host, _, port = address.rpartition(":")
    for header, data in ((1 << 20, 0), (2, 1 << 30)):
        with socket.create_connection((host, int(port)), 5) as peer:
            world_server.receive(peer)
            peer.sendall(world_server.HEAD.pack(b"h", header, data) + b"{}")
            with contextlib.suppress(ConnectionResetError):
                assert peer.recv(1) == b"", "it is sent away before it has sent as much"


def test_a_server_that_answers_no_message_is_a_sentence():
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        for text in (b"[" * 4000, b"[" * 200_000):
            message = world_server.HEAD.pack(b"h", len(text), 0) + text
            threading.Thread(target=lambda sent=message: impostor.accept()[0].sendall(sent), daemon=True).start()
            with pytest.raises(BurnishError, match="no message of ours"):
                ExternalEnv(1, RemoteConfig(address=f"127.0.0.1:{impostor.getsockname()[1]}", processes=1))


def test_a_python_without_numpy_is_a_sentence():
    told = subprocess.run([sys.executable, "-S", "-I", world_server.__file__], capture_output=True, text=True)
    assert told.returncode == 1 and "has no NumPy" in told.stderr and "Traceback" not in told.stderr


def test_a_peer_that_vanishes_is_noticed(serve):
    address, _ = serve()
    env = ExternalEnv(1, RemoteConfig(address=address, processes=1))
    link = env.workers.links[0]
    assert isinstance(link, Remote)
    assert link._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
