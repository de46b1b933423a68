"""Inference while the arm moves.

A `Predictor` maps observations to a chunk of actions. An `InferenceWorker` runs a predictor: it takes one request at a
time, returns at once, and has the response later. There are two:

* `SubprocessWorker` runs it in a process of its own. A thread would share the interpreter's lock with the control
  ticks, and a network in Python takes that lock at every layer; a process takes a free core, and its death is noticed.
  It is given a function of a module that makes the predictor in the new process, so weights are read where they are
  used.
* `Simulated` computes at once, and hands the response over when the simulated latency has passed, on the clock that it
  is given. There is neither thread nor process, so a run replays bit for bit.

Nothing here imports torch: the predictor of a bundle (`BundlePredictor`) runs in a process without it.
"""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...policies.core.parent import die_with_parent
from ..clock import SECOND, Clock, MonotonicClock, ns
from ..errors import Refused, RobotError
from ..export.runtime import RowNoise, load

START_S = 120.0  # a policy may have to be loaded from a slow disk
LEAVE_S = 2.0

Chunk = NDArray[np.float32]  # (H, A) in [-1, 1]


class Facts(NamedTuple):
    """Of the chunks that a mind makes, as in `PolicySpec`; ``continues``: it takes a prefix; ``guides``: it follows a
    ``Pulling``."""

    horizon: int
    execute: int
    start: int
    dim: int
    continues: bool
    guides: bool = False


class Pulling(NamedTuple):
    """As `policies.core.types.Pull`, across processes."""

    actions: Chunk  # (p, A)
    weights: NDArray[np.float32]  # (p,)


class InferenceRequest(NamedTuple):
    """``obs`` has no leading 1; ``prefix`` (p, A) are actions that are committed, from the head of the chunk on; the
    noise of an answer belongs to (``seed``, ``decision``)."""

    obs: Mapping[str, NDArray[Any]]
    prefix: Chunk | Pulling | None
    seed: int
    decision: int


class InferenceResponse(NamedTuple):
    """``chunk`` is None where there is none, and ``why`` says why."""

    chunk: Chunk | None
    took_s: float
    why: str = ""


class Predictor(Protocol):
    """The interface of a policy to a worker: observation and committed actions to a chunk."""

    @property
    def facts(self) -> Facts: ...

    def __call__(
        self, obs: Mapping[str, NDArray[Any]], prefix: Chunk | Pulling | None, seed: int, decision: int
    ) -> NDArray[Any]: ...


class InferenceWorker(Protocol):
    """The interface of inference that runs while the arm moves."""

    @property
    def clock(self) -> Clock: ...

    @property
    def facts(self) -> Facts: ...

    def ask(self, request: InferenceRequest) -> None:
        """One at a time: the next one comes after the answer, or after ``discard``."""
        ...

    def poll(self) -> InferenceResponse | None:
        """The answer, once; None where it is not there yet."""
        ...

    def wait(self, deadline_ns: int) -> InferenceResponse | None:
        """The same, having waited for it as long as until the deadline."""
        ...

    def discard(self) -> None:
        """The answer to the present request is not wanted any more."""
        ...

    def close(self) -> None: ...


def answered(predictor: Predictor, request: InferenceRequest) -> tuple[Chunk | None, str]:
    """A chunk that is one, or why there is none."""
    facts = predictor.facts
    try:
        chunk = np.asarray(predictor(*request), np.float32)
    except Exception as error:  # of whatever library runs there
        return None, str(error).strip() or type(error).__name__
    if chunk.shape != (facts.horizon, facts.dim) or not np.isfinite(chunk).all():
        return None, f"the policy made {chunk.shape} numbers, where {(facts.horizon, facts.dim)} finite ones are needed"
    return chunk, ""


@dataclass
class Latency:
    """Seconds from a request to its answer, uniform around ``mean_s``; of each request always the same."""

    mean_s: float = 0.0  # mean time of one inference, in seconds
    spread_s: float = 0.0  # largest deviation from it, either way, in seconds

    def __post_init__(self) -> None:
        if not 0 <= self.spread_s <= self.mean_s < np.inf:
            raise Refused(
                f"a latency of {self.mean_s} s, give or take {self.spread_s} s, is none that can be simulated"
            )

    def __call__(self, seed: int, decision: int) -> float:
        if self.spread_s == 0:
            return self.mean_s
        share = float(RowNoise([seed], [decision]).uniform((1, 1))[0, 0])
        return self.mean_s + (2 * share - 1) * self.spread_s


class Simulated:
    """Answers in the time of ``clock``; where that is a robot's, waiting lets the robot go on."""

    def __init__(self, predictor: Predictor, clock: Clock, latency: Callable[[int, int], float] | None = None) -> None:
        self.clock, self.facts = clock, predictor.facts
        self._predictor, self._latency = predictor, latency or Latency()
        self._answer: InferenceResponse | None = None
        self._due_ns = 0

    def ask(self, request: InferenceRequest) -> None:
        took_s = self._latency(request.seed, request.decision)
        self._due_ns = self.clock.now_ns() + ns(took_s)
        chunk, why = answered(self._predictor, request)
        self._answer = InferenceResponse(chunk, took_s, why)

    def poll(self) -> InferenceResponse | None:
        if self._answer is None or self.clock.now_ns() < self._due_ns:
            return None
        found, self._answer = self._answer, None
        return found

    def wait(self, deadline_ns: int) -> InferenceResponse | None:
        self.clock.sleep_until_ns(min(self._due_ns, deadline_ns))
        return self.poll()

    def discard(self) -> None:
        self._answer = None

    def close(self) -> None:
        self._answer = None


class SubprocessWorker:
    """``make`` is called in the new process, so it is a function of a module, or a ``partial`` of one."""

    def __init__(self, make: Callable[[], Predictor]) -> None:
        self.clock = MonotonicClock()
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_infer, args=(make, theirs), name="inference", daemon=True)
        self._process.start()
        theirs.close()  # the only other end is over there, so its death is heard here
        self._number = 0  # of the latest request
        self._busy = False
        self._asked_ns = 0
        self._next: InferenceRequest | None = None  # waits for the answer to one that was discarded
        said = self._heard() if self._pipe.poll(START_S) else f"it was not ready after {START_S:g} s"
        if not isinstance(said, Facts):
            self.close()
            raise Refused(f"the policy cannot answer in a process of its own: {said}")
        self.facts = said

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def ask(self, request: InferenceRequest) -> None:
        if self._busy:
            self._next = request  # a second one would fill the pipe, and its writer would wait
        else:
            self._send(request)

    def poll(self) -> InferenceResponse | None:
        return self.wait(0)

    def wait(self, deadline_ns: int) -> InferenceResponse | None:
        while self._busy and self._pipe.poll(max(deadline_ns - self.clock.now_ns(), 0) / SECOND):
            number, chunk, came_ns, why = self._heard()
            self._busy = False
            if number == self._number:
                return InferenceResponse(chunk, (came_ns - self._asked_ns) / SECOND, why)
            if self._next is not None:
                self._send(self._next)
        return None

    def discard(self) -> None:
        self._next = None
        self._number += 1

    def close(self) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        self._process.join(LEAVE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(LEAVE_S)

    def _send(self, request: InferenceRequest) -> None:
        self._next, self._busy = None, True
        self._number += 1
        self._asked_ns = self.clock.now_ns()
        try:
            self._pipe.send((self._number, request))
        except OSError as error:
            raise self._gone() from error

    def _heard(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def _gone(self) -> RobotError:
        self._process.join(LEAVE_S)
        return RobotError(
            f"the inference process has ended (exit status {self._process.exitcode}), so there are no new actions; see "
            "what it wrote last"
        )


def _infer(make: Callable[[], Predictor], pipe: Connection) -> None:
    """All that the process does. A Ctrl-C reaches it too, but what comes of that is decided by whoever moves the
    robot."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    began = parent_process()
    die_with_parent(parent=None if began is None else began.pid)
    try:
        predictor = make()
    except Exception as error:
        pipe.send(str(error).strip() or type(error).__name__)
        return
    # Loaded modules stay: a collection that walks all of torch holds an answer up for some 100 ms.
    gc.collect()
    gc.freeze()
    pipe.send(predictor.facts)
    with suppress(EOFError, OSError):  # the client is gone
        while (asked := pipe.recv()) is not None:
            number, request = asked
            chunk, why = answered(predictor, request)
            pipe.send((number, chunk, time.monotonic_ns(), why))


class BundlePredictor:
    """An exported policy (`runtime`)."""

    def __init__(self, path: str) -> None:
        self._policy = load(path)
        if self._policy.ticks:
            raise Refused(f"{path} corrects every action when its tick has come, so its chunks cannot be made ahead")
        schema = self._policy.schema
        self.facts = Facts(schema.horizon, schema.execute, schema.start, schema.dim, self._policy.continues)

    def __call__(
        self, obs: Mapping[str, NDArray[Any]], prefix: Chunk | Pulling | None, seed: int, decision: int
    ) -> NDArray[Any]:
        return self._policy.act(obs, prefix=prefix, source=RowNoise([seed], [decision]))
