"""A small policy and a server around it, in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from websockets.sync.client import ClientConnection, connect

from burnish.policies.build import build_policy, describe
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.flow import FlowConfig
from burnish.policies.runs import checkpoint
from burnish.real_robot.serving.listening import ServerConfig
from burnish.real_robot.serving.server import PolicyServer
from diffusion_lab import small_net
from openpi_lab import content, frame

LIMITS = ActionSpec((-0.5, 0.0), (1.5, 4.0))
SPEC = PolicySpec(ObsSpec({"state": (3,)}), LIMITS, 5, 2, start=1, history=2, control_hz=10.0, action_mode="test")


STATE = {"state": np.zeros((2, 3), np.float32)}  # an observation of it


def dial(server: PolicyServer, **options: Any) -> ClientConnection:
    socket = connect(server.url, compression=None, **options)
    assert "policy_spec" in content(socket.recv())
    return socket


def asked(socket: ClientConnection, message: Any) -> Any:
    socket.send(message if isinstance(message, (bytes, str)) else frame(message))
    return socket.recv(timeout=10)


def number(x: float) -> dict[str, np.ndarray]:
    return {"state": np.array([x], np.float32)}


def flow(spec: PolicySpec = SPEC) -> Any:
    torch.manual_seed(0)
    return build_policy(FlowConfig(steps=2, net=small_net(8)), spec).eval()


@contextmanager
def served(policy: Any, key: str | None = None, **options: Any) -> Iterator[PolicyServer]:
    server = PolicyServer(policy, ServerConfig(**({"port": 0} | options)), key=key)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive(), "the server did not end"


class Served:
    """``burnish serve`` as a process."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    @property
    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 2**20


@contextmanager
def process(folder: Path, *words: str, env: dict[str, str] | None = None) -> Iterator[Served]:
    policy = flow()
    if not (folder / "policy").exists():
        checkpoint.save(folder / "policy", config=describe(policy), state=policy.state_dict())
    command = [sys.executable, "-m", "burnish.real_robot", "serve", f"policy.path={folder}/policy", "port=0", *words]
    surroundings = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings, cwd=folder) as run:
        try:
            assert run.stdout is not None
            line = run.stdout.readline()
            assert " answers at " in line, line
            yield Served(run, line.split(" answers at ")[1].split(",")[0])
        finally:
            run.kill()
