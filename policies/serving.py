"""``burnish serve``: one of our policies on openpi's protocol (`wire.py`), for any robot or library that speaks it.

A request is a dict of observations under our names, pictures as (H, W, 3) uint8; the reply holds ``actions`` (H, A) in
the units of the actuators, the first of which is for now. The metadata announces what else is understood (`remote.py`):
``batch`` rows in one request, ``noise`` where the policy takes any, a ``seed`` per row for what it draws itself.
``GET /healthz`` answers OK.

It is plain on purpose: one process, one policy, requests of all connections one after another, and nobody but this
machine can reach it; from another one, tunnel (``ssh -L 8000:localhost:8000``). A failure is told as one line.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import numpy as np
import torch
from torch import Tensor
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection
from websockets.sync.server import serve as listen

from .core.config import to_data
from .core.errors import BurnishError
from .core.scale import Scale
from .core.seed import RowNoise
from .core.spec import ObsSpec, dtype_of
from .core.types import Policy
from .wire import LIMIT, pack, unpack

INTERNAL_ERROR = 1011


class PolicyServer:
    """Listens from the start, and answers while ``run`` runs, until ``stop`` is called from elsewhere."""

    def __init__(
        self, policy: Policy, *, port: int = 8000, device: torch.device | str = "cpu", limit: int = LIMIT
    ) -> None:
        spec = policy.spec
        self.policy, self.device, self._limit = policy, torch.device(device), limit
        # Others play a chunk from its beginning, so what lies before now stays here.
        self.spec = replace(spec, horizon=spec.horizon - spec.start, start=0)
        self._scale, self._one_at_a_time = Scale(spec.action), threading.Lock()
        blank = {k: torch.zeros(1, *s, dtype=dtype_of(k), device=self.device) for k, s in spec.inputs.shapes.items()}
        with torch.no_grad():
            policy.act(blank, greedy=True)  # who cannot answer with chunks is refused here, not in mid-flight
        extensions = ["batch", "seed"] if spec.noise_shape is None else ["batch", "noise", "seed"]
        self.metadata = {"extensions": extensions, "policy_spec": to_data(self.spec.to_dict())}
        try:
            self._server = listen(
                self._converse, "127.0.0.1", port, compression=None, max_size=limit, process_request=_health
            )
        except OSError as error:
            raise BurnishError(f"port={port} cannot be listened on ({error.strerror}); choose another") from error

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self._server.socket.getsockname()[1]}"

    def run(self) -> None:
        try:
            self._server.serve_forever()
        finally:
            self._server.shutdown()

    def stop(self) -> None:
        self._server.shutdown()

    def _converse(self, socket: ServerConnection) -> None:
        try:
            socket.send(pack(self.metadata))
            for frame in socket:
                socket.send(pack(self._answer(unpack(frame, self._limit))))
        except ConnectionClosed:
            return
        except (BurnishError, RuntimeError) as error:  # what torch cannot do is a RuntimeError
            last = (str(error).strip() or type(error).__name__).splitlines()[-1]
            socket.send(f"{type(error).__name__}: {last}")
            socket.close(INTERNAL_ERROR, "the request failed")

    def _answer(self, message: Any) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise BurnishError(f"a request is a dict of observations, and this is a {type(message).__name__}")
        rows = message.get("batch")
        if rows is not None and (type(rows) is not int or rows < 1):
            raise BurnishError(f"batch={rows!r} must be the number of rows, at least 1")
        begun = time.perf_counter()
        needed = self.spec.inputs.shapes
        obs = {key: self._tensor(key, message[key], rows is None) for key in needed if key in message}
        spared = {key for key in needed if self.spec.goal_free and key.startswith("goal")} - set(obs)
        count = ObsSpec({key: shape for key, shape in needed.items() if key not in spared}).check(obs)
        if count != (rows or 1):
            raise BurnishError(f"the observations have {count} rows, but batch={rows} was said")
        with self._one_at_a_time, torch.no_grad():
            chunk = self.policy.act(obs, **self._source(message, count, rows is None))
        units = self._scale.to_actuator(chunk[:, self.policy.spec.start :].cpu().float()).numpy()
        taken_ms = 1000 * (time.perf_counter() - begun)
        return {"actions": units[0] if rows is None else units, "server_timing": {"infer_ms": taken_ms}}

    def _source(self, message: dict[str, Any], rows: int, single: bool) -> dict[str, Any]:
        """What a generation starts from: noise or seeds of the client's, else our own draws."""
        if "noise" in message:
            if self.spec.noise_shape is None:
                raise BurnishError("this policy takes no noise")
            return {"noise": self._tensor("noise", message["noise"], single)}
        if "seed" in message:
            given = np.asarray(message["seed"]).reshape(-1)
            if given.shape != (rows,) or given.dtype != np.int64:
                raise BurnishError(f"{rows} integers of 64 bits are needed as seed")
            seeds = torch.as_tensor(given)
            return {"generator": RowNoise(seeds, torch.zeros_like(seeds))}
        return {}

    def _tensor(self, key: str, value: Any, single: bool) -> Tensor:
        wanted = dtype_of(key)
        if not isinstance(value, np.ndarray):
            raise BurnishError(f"{key!r} must be an array, and it is a {type(value).__name__}")
        if wanted == torch.uint8 and value.ndim >= 3:
            value = np.moveaxis(value, -1, -3)
        if wanted == torch.float32 and value.dtype.kind == "f":
            value = value.astype(np.float32)
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise BurnishError(f"{key!r} is not finite")
        tensor = torch.from_numpy(np.ascontiguousarray(value)).to(self.device)
        return tensor[None] if single else tensor


def _health(connection: ServerConnection, request: Request) -> Response | None:
    return connection.respond(HTTPStatus.OK, "OK\n") if request.path == "/healthz" else None
