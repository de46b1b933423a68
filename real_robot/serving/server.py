"""The policy server (``burnish serve``): one of our policies on openpi's protocol, for any robot or library.

A request is a dict of observations under our names, or under those that ``keys`` gives them, pictures as (H, W, 3)
uint8; the reply holds ``actions`` (H, A) in the units of the actuators, the first of which is for now.
`policies/wire/codec.py` has the frames, `gateway.py` says who may send any. The metadata announces further fields,
which a client may ignore:

    extensions      batch    a request holds ``batch`` = B, and B rows of everything, ``largest_batch`` at most
                    prompt   the policy reads instructions: ``prompt`` is a text, or with ``batch`` a list of B
                    noise    ``noise`` starts the generation, where the policy takes any
                    seed     one whole number per row, from which the policy draws
                    reset    ``reset`` = true, alone: a new episode begins; what the policy remembers is forgotten
                    obs_seq  a number of the asker's, which comes back with the answer
                    hmac     how the key was or could be shown (`policies/wire/connection.py`)
    policy_spec     a `PolicySpec` as plain data
    schema_sha256   of names, dtypes and shapes (`policies/wire/schema.py`)

An answer names its ``server_timing``: what it waited for its turn and what it took. There is one thread for inference,
and a short queue: when it is full, the request that has waited longest is answered "busy", because its observation is
the oldest. A refusal is a text frame ``code: sentence``, and the connection stays.

**Departures** from openpi's server: it listens on this machine alone unless there is a key; frames are limited in size
and read by a schema; inference is not done in the event loop; nobody is told a traceback.

From what a hardened server might be: inference is a thread and no worker process, because what comes to it has passed
the schema and torch lets go of the interpreter's lock while it computes; a policy that brings down torch brings down
the server, and then the robot holds, as it does when the link is cut. And no answer has a ``valid_until``: the clocks
of two machines do not agree, so the asker, who knows by its own when it asked and gives up after its ``timeout_s``,
judges how old an answer is; ``obs_seq`` says which question it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policies.core.config import to_data
from ...policies.core.files import remove
from ...policies.core.graphed_policy import executed
from ...policies.core.language import unworded
from ...policies.core.observed import observed
from ...policies.core.scale import Scale
from ...policies.core.seed import RowNoise
from ...policies.core.spec import ObsSpec, dtype_of
from ...policies.core.time_limit import first_act
from ...policies.core.types import Policy
from ...policies.wire.codec import pack
from ...policies.wire.schema import Code, Field, Refusal, Request, Schema
from .gateway import Gateway
from .listening import ServerConfig, listen

GRACE_S = 3.0  # for a clean end
_log = logging.getLogger("burnish.server")

FLOATS, BYTES, INTEGERS = ("<f4", "<f8"), ("|u1",), ("<i4", "<i8")


class PolicyServer:
    """Listens from the start, and answers while ``run`` runs, until ``stop`` is called from elsewhere or, in the main
    thread, SIGTERM or SIGINT comes."""

    def __init__(
        self,
        policy: Policy,
        config: ServerConfig | None = None,
        *,
        key: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        config = config or ServerConfig()
        seen = ObsSpec(observed(policy)).without_history(policy.spec.history)  # by its base, and by what refines it
        spec, policy = replace(policy.spec, obs=seen), executed(policy, config.execution, device)
        self.policy, self.config, self.device = policy, config, torch.device(device)
        # Others play a chunk from its beginning, so what lies before now stays here.
        self.spec = replace(unworded(spec), horizon=spec.horizon - spec.start, start=0)
        self._scale = Scale(spec.action)
        blank = {k: torch.zeros(1, *s, dtype=dtype_of(k), device=self.device) for k, s in spec.inputs.shapes.items()}
        with torch.no_grad(), first_act():
            policy.act(blank, greedy=True)  # who cannot answer with chunks is refused here, not in mid-flight
        self.schema = _schema(self.spec, config, spec.words is not None)
        prompt = ["prompt"] if self.schema.prompts else []
        noise, hidden = (["noise"] if spec.noise_shape else []), (["hmac"] if key else [])
        self.metadata = {
            "extensions": ["batch", *prompt, *noise, "seed", "reset", "obs_seq", *hidden],
            "largest_batch": config.batch,
            "policy_spec": to_data(self.spec.to_dict()),
            "schema_sha256": self.schema.sha256,
        }
        self._socket = listen(config, key)
        self._gateway = Gateway(config, key, pack(self.metadata), self.schema.limit, self._reply)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = threading.Event()
        self._inference = Inference(self._answer, config.queue)

    @property
    def url(self) -> str:
        if self.config.unix is not None:
            return f"unix:{self.config.unix}"
        host, port = self._socket.getsockname()[:2]
        return f"ws://[{host}]:{port}" if ":" in host else f"ws://{host}:{port}"

    def run(self) -> None:
        asyncio.run(self._run())

    def stop(self) -> None:
        self._stopped.set()
        if self._loop is None:
            self._socket.close()
        else:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._ending.set)

    async def _run(self) -> None:
        self._ending = asyncio.Event()
        self._loop = loop = asyncio.get_running_loop()
        if self._stopped.is_set():
            self._socket.close()
            return
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._ending.set)
        self._inference.start(loop)
        server = await self._gateway.open(self._socket)
        await self._ending.wait()
        self._inference.end()
        await self._gateway.close(server, GRACE_S)
        if self.config.unix is not None:
            remove(Path(self.config.unix))

    async def _reply(self, frame: Any) -> bytes:
        return await self._inference.ask(self.schema.read(frame))

    def _answer(self, request: Request, waited_s: float) -> bytes:
        """In the thread of inference. All that came is good."""
        begun = time.perf_counter()
        answer: dict[str, Any] = {} if request.obs_seq is None else {"obs_seq": request.obs_seq}
        if request.reset:
            getattr(self.policy, "reset", lambda: None)()
            answer["reset"] = True
        if request.arrays:
            arrays = {key: self._tensor(key, x) for key, x in request.arrays.items()}
            if (words := self.policy.spec.words) is not None:
                arrays["tokens"] = words.ids(request.prompts).to(self.device)
            seed, noise = arrays.pop("seed", None), arrays.pop("noise", None)
            source: dict[str, Any] = {}
            if noise is not None:
                source["noise"] = noise
            elif seed is not None:
                source["generator"] = RowNoise(seed.cpu(), torch.zeros_like(seed.cpu()))
            with torch.no_grad():
                chunk = self.policy.act(arrays, **source)
            units = self._scale.to_actuator(chunk[:, self.policy.spec.start :].cpu().float()).numpy()
            if not np.isfinite(units).all():
                raise Refusal(Code.FAILED, "the policy answered with actions that are not finite")
            answer["actions"] = units[0] if request.single else units
        taken_s = time.perf_counter() - begun
        return pack(answer | {"server_timing": {"infer_ms": 1000 * taken_s, "wait_ms": 1000 * waited_s}})

    def _tensor(self, key: str, value: np.ndarray) -> Tensor:
        if value.dtype == np.uint8 and value.ndim >= 4:
            value = np.ascontiguousarray(np.moveaxis(value, -1, -3))
        return torch.from_numpy(value).to(self.device)


def _schema(spec: Any, config: ServerConfig, prompts: bool) -> Schema:
    """Pictures have their colours last on the wire."""
    fields = {}
    for key, shape in spec.inputs.shapes.items():
        required = not (spec.goal_free and key.startswith("goal"))
        kind = dtype_of(key)
        if kind == torch.uint8:
            on_wire = (*shape[:-3], *shape[-2:], shape[-3]) if len(shape) >= 3 else shape
            fields[key] = Field(on_wire, BYTES, "|u1", required)
        elif kind == torch.int64:
            fields[key] = Field(shape, INTEGERS, "<i8", required)
        else:
            fields[key] = Field(shape, FLOATS, "<f4", required)
    if spec.noise_shape is not None:
        fields["noise"] = Field(spec.noise_shape, FLOATS, "<f4", required=False)
    fields["seed"] = Field((), ("<i8",), "<i8", required=False)
    return Schema(fields, config.batch, config.keys, prompts)


@dataclass
class _Job:
    request: Request
    answer: asyncio.Future[bytes]
    came_s: float


class Inference:
    """One request after another, in a thread of its own. ``answer(request, waited_s)`` is called there, and everything
    else happens in the event loop."""

    def __init__(self, answer: Callable[[Request, float], bytes], most: int) -> None:
        self._answer, self._most = answer, most
        self._waiting: deque[_Job] = deque()
        self._current: _Job | None = None
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # A daemon: a policy that never returns must not keep the process from ending.
        threading.Thread(target=self._work, name="inference", daemon=True).start()

    async def ask(self, request: Request) -> bytes:
        if len(self._waiting) >= self._most:
            self._refuse(self._waiting.popleft(), Refusal(Code.BUSY, "newer requests took its place; ask again"))
        job = _Job(request, self._loop.create_future(), time.perf_counter())
        self._waiting.append(job)
        self._next()
        return await job.answer

    def end(self) -> None:
        while self._waiting:
            self._refuse(self._waiting.popleft(), Refusal(Code.CLOSING, "the server stops"))
        self._inbox.put(None)

    def _next(self) -> None:
        if self._current is None and self._waiting:
            self._current = self._waiting.popleft()
            self._inbox.put(self._current)

    def _work(self) -> None:
        while (job := self._inbox.get()) is not None:
            answer: bytes | Refusal
            try:
                answer = self._answer(job.request, time.perf_counter() - job.came_s)
            except Refusal as refusal:
                answer = refusal
            except Exception as error:  # whatever a policy raises, the next request is answered
                _log.exception("the policy could not answer")
                kind = type(error).__name__
                answer = Refusal(Code.FAILED, f"the policy could not answer ({kind}); the log of the server says why")
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._deliver, job, answer)

    def _deliver(self, job: _Job, answer: bytes | Refusal) -> None:
        if isinstance(answer, Refusal):
            self._refuse(job, answer)
        elif not job.answer.cancelled():
            job.answer.set_result(answer)
        self._current = None
        self._next()

    @staticmethod
    def _refuse(job: _Job, refusal: Refusal) -> None:
        if not job.answer.cancelled():
            job.answer.set_exception(refusal)
