"""The acting process of `asynchronous.py`: worlds, a method's view and its actor, which plays what it last heard of.

It begins with an `ActorConfig`, sends each row of decisions as soon as it is played, and reads between two of them
whether there are weights. It lives as long as its learner: when that stops it or is gone, however that came, it plays
no further decision, closes its worlds, and leaves; one that hangs is ended after ``GRACE_S``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...policies.cli.verb_process import child_imports, import_modules
from ...policies.core.errors import BurnishError
from ...policies.core.tree import concatenate, to
from ...policies.core.types import Actor, Obs, Outcome
from ...policies.runs.state_codec import encode
from ..loops import OffPolicy
from .mailbox import Line, Mailbox

READY, ROW, FAILED = b"h", b"r", b"f"  # what the actor writes
WEIGHTS, TAKEN = b"w", b"t"  # what it is written; the second says that one more row was taken up
GRACE_S = 5.0

# Module-level, so that another process finds it by name. It builds the method from plain configuration and the seed of
# its own worlds; of the loop, the actor and the view are used.
Make = Callable[[Any, int], OffPolicy[Any]]


class ActorConfig(NamedTuple):
    """The facts that the acting process needs besides the settings of the run."""

    seed: int
    warm: int  # rows that the actor's prior plays, from the first
    ahead: int  # rows that may wait to be taken up before the actor waits; 0 for any number
    rows: int | None  # in all, behind which the actor stands still; None for any number


class Running(Protocol):
    """A process, as ``multiprocessing`` has it; on a cluster words stand for the exit status."""

    @property
    def exitcode(self) -> int | str | None: ...

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...


def act(mail: Mailbox, make: Make, config: Any, acting: ActorConfig) -> None:
    """Play decisions until the learner says stop, or is gone."""
    loop = make(config, acting.seed)
    mail.send(READY)
    age: int | None = None  # the updates behind the weights; with those that it was built with nothing is played
    played = taken = 0
    left = time.perf_counter()
    try:
        while not mail.closed:
            began = time.perf_counter()
            while message := mail.take(wait=age is None or played == acting.rows or 0 < acting.ahead <= played - taken):
                taken += message.kind == TAKEN
                if message.kind == WEIGHTS:
                    news = message.read()
                    if age is None or news["updates"] > age:  # a cluster may change the order of large messages
                        age = int(news["updates"])
                        adopt(loop.learner.actor, news["actor"])
            if mail.closed or age is None:
                return
            waited_s = time.perf_counter() - began
            decision = loop.played(warm=played < acting.warm)
            played += 1
            now = time.perf_counter()
            facts = {"updates": age, "waited_s": waited_s, "lasted_s": now - left}
            mail.send(ROW, {**as_row(*decision), **facts})
            left = now
    finally:
        release(loop.env)


def as_row(obs: Obs, action: Tensor, columns: dict[str, Tensor], outcome: Outcome) -> dict[str, Any]:
    """Where new episodes begin is left out, since the next row says it; of ``info`` a loop reads success, who played
    and what exploration paid; what a view adds to its outcomes is among the columns, if the learner wants it."""
    facts = {name: getattr(outcome, name) for name in Outcome._fields if name not in ("obs", "info")}
    info = {name: x for name, x in outcome.info.items() if name in ("success", "intervened", "bonus")}
    return {"obs": obs, "action": action, "columns": columns, "facts": facts, "info": info}


def of_rows(rows: Sequence[dict[str, Any]], device: torch.device) -> tuple[Obs, Tensor, dict[str, Tensor], Outcome]:
    """One row of each acting process as one of all: observation, action, columns of the actor, and outcome."""
    parts = [{name: x for name, x in row.items() if isinstance(x, (dict, Tensor))} for row in rows]
    row: dict[str, Any] = to(concatenate(parts), device)
    facts = row["facts"]
    led_to = facts.pop("next_obs")
    return row["obs"], row["action"], row["columns"], Outcome(obs=led_to, next_obs=led_to, info=row["info"], **facts)


@torch.no_grad()
def adopt(actor: Actor, state: dict[str, Any]) -> None:
    """In place: what a ``state_dict`` hands out is the memory of the weights themselves."""
    mine, theirs = encode(actor.state_dict())[1], encode(state)[1]
    for name, x in mine.items():
        x.copy_(theirs[name])


def release(env: Any) -> None:
    """Close whatever world wants to be closed: a robot is to stand still when nobody commands it any more."""
    while env is not None:
        if hasattr(env, "close"):
            env.close()
            return
        env = getattr(env, "env", None)


def leave() -> None:
    """Soon, whatever the rest of the process does: a world that hangs must not outlive its learner."""
    timer = threading.Timer(GRACE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


def run_actor(
    connection: Line,
    make: Make,
    config: Any,
    acting: ActorConfig,
    lost: Callable[[], None] = leave,
    modules: Sequence[str] = (),
) -> None:
    """All that the process does. It imports ``modules`` first."""
    mail = Mailbox(connection, lost)
    try:
        import_modules(modules)
        act(mail, make, config, acting)
    except BurnishError as error:
        mail.send(FAILED, {"why": str(error)})


@contextmanager
def signals_blocked() -> Iterator[None]:
    """For a child that is started meanwhile, until it says `signals_unheeded`. Windows blocks none: there a Ctrl-C ends
    both processes."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # else the start would begin it, which unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signals_unheeded() -> None:
    """From now on signals that were blocked do nothing here. A program that is begun hears them again: it would inherit
    what is blocked, as well as what is ignored, but no handlers."""
    if hasattr(signal, "pthread_sigmask"):
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


def run_spawned(*given: Any, **named: Any) -> None:
    """`run_actor` in a process of its own."""
    signals_unheeded()
    run_actor(*given, **named)


def spawned(make: Make, config: Any, acting: ActorConfig) -> tuple[Running, Connection]:
    """The child heeds no signals from its first instant: a Ctrl-C in the terminal reaches both processes, and the
    learner decides what comes of it."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    modules = {"modules": child_imports()}
    process = context.Process(target=run_spawned, args=(theirs, make, config, acting), kwargs=modules, name="acting")
    with signals_blocked():
        process.start()
    theirs.close()  # the only other end is in the child, so its death is heard here
    return process, ours


def gone(process: Running, grace_s: float = GRACE_S) -> str:
    """How it ended, once it has left or was made to."""
    process.join(grace_s)
    process.kill()  # nothing, where it has left
    process.join(GRACE_S)
    status = process.exitcode
    return status if isinstance(status, str) else f"exit status {status}"
