"""The acting processes of `asynchronous.py` as Ray actors, on whichever nodes have a core for them.

A Ray actor runs what a local process runs (`run_actor`), and Ray carries its messages: `receive` takes one, and `fetch`
returns those that wait. Weights, and the files of the policy that the settings name, are put into Ray's object store
once, and each node reads them from there: it need share no folder with the learner, with whose job the actors end.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from ...policies.build import files_of
from ...policies.cli.ray_tasks import PATHS, connected, find
from ...policies.cli.verb_process import child_imports
from ...policies.core import files
from ...policies.core.errors import reason
from ..loops import OffPolicy
from .actor_process import ActorConfig, Make, Running, run_actor
from .mailbox import Line

RECEIVE, FETCH = "receive", "fetch"  # each method has a thread of its own, beside the one that plays
POLICY_PATHS = tuple(name.removeprefix("policy.") for name in PATHS if name.startswith("policy."))


class Packed(NamedTuple):
    """The files of a folder that a setting names, or the one that it names there."""

    contents: Mapping[str, bytes]  # by their names in the folder
    name: str = ""  # of the one


def packed(config: Any) -> dict[str, Packed]:
    """The files that the settings of a run's policy name, by setting; a name on a hub stays as it is."""
    found, policy = {}, getattr(config, "policy", None)
    for setting in POLICY_PATHS:
        path = Path(getattr(policy, setting, None) or "")
        if path.name and path.exists():
            folder, read = files_of(path)
            contents = {x.relative_to(folder).as_posix(): x.read_bytes() for x in read}
            found[setting] = Packed(contents, path.name if path.is_file() else "")
    return found


@contextmanager
def unpacked(config: Any, sent: Mapping[str, Packed]) -> Iterator[Any]:
    """Meanwhile the settings of the policy name the files that were sent."""
    with files.temporary("burnish-") as place:
        paths = {}
        for setting, given in sent.items():
            paths[setting] = str(files.write_folder(place / setting, given.contents) / given.name)
        yield replace(config, policy=replace(config.policy, **paths)) if paths else config


class RayActor:
    """The actor itself, on its node."""

    def __init__(self, places: Sequence[str]) -> None:
        find(places)
        self._inbox, self._outbox = SimpleQueue[bytes](), SimpleQueue[bytes]()

    def play(
        self,
        folder: str,
        make: Make,
        config: Any,
        acting: ActorConfig,
        modules: Sequence[str],
        sent: Mapping[str, Packed],
    ) -> None:
        def made(config: Any, seed: int) -> OffPolicy[Any]:
            with suppress(OSError):  # a node works where the user does, if it has such a folder
                os.chdir(folder)
            with unpacked(config, sent) as here:
                return make(here, seed)

        try:
            run_actor(self, made, config, acting, modules=modules)
        finally:
            self.close()

    def receive(self, message: bytes) -> None:
        self._inbox.put(message)

    def fetch(self) -> list[bytes]:
        """All messages that wait to be sent, at least one."""
        messages = [self._outbox.get()]
        try:
            while True:
                messages.append(self._outbox.get_nowait())
        except Empty:
            return messages

    # ---- the actor's end of the line ----

    def send_bytes(self, data: bytes, /) -> None:
        self._outbox.put(data)

    def recv_bytes(self) -> bytes:
        return self._inbox.get()

    def close(self) -> None:
        """An empty message is the last."""
        self._outbox.put(b"")


class RayLine:
    """The learner's end of the line to an actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._came: deque[bytes] = deque()
        self._receive, self._fetch = (getattr(actor, name).options(concurrency_group=name) for name in (RECEIVE, FETCH))
        self._next = self._fetch.remote()

    def send_bytes(self, data: Any, /) -> None:
        self._receive.remote(data)

    def recv_bytes(self) -> bytes:
        try:
            while not self._came:
                self._came.extend(self._ray.get(self._next))
                self._next = self._fetch.remote()
        except self._ray.exceptions.RayError as error:
            raise EOFError from error
        return self._came.popleft()

    def close(self) -> None:
        """Nothing is to be closed: the line goes with the actor."""


class RayProcess:
    """An actor, as `multiprocessing` would have it."""

    def __init__(self, ray: Any, actor: Any, played: Any) -> None:
        self._ray, self._actor, self._played = ray, actor, played

    @property
    def exitcode(self) -> int | str | None:
        if self.is_alive():
            return None
        try:
            self._ray.get(self._played)
        except self._ray.exceptions.RayTaskError as error:
            return reason(error.cause, named=True)
        except self._ray.exceptions.RayError as error:
            self.kill()  # in case that it is only out of reach
            return type(error).__name__
        return 0

    def is_alive(self) -> bool:
        return not self._ray.wait([self._played], timeout=0)[0]

    def join(self, timeout: float | None = None) -> None:
        self._ray.wait([self._played], timeout=timeout)

    def kill(self) -> None:
        self._ray.kill(self._actor)


class RayActors:
    """The cluster at ``address``; None is the one of this machine, or a new one. An actor takes one core."""

    def __init__(self, address: str | None = None) -> None:
        self._ray = connected(address)
        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "concurrency_groups": {RECEIVE: 1, FETCH: 1}}
        self._actor = self._ray.remote(**options)(RayActor)
        self._sent: Any = None  # the files of the policy, as they were when the first actor began

    def launch(self, make: Make, config: Any, acting: ActorConfig) -> tuple[Running, Line]:
        actor = self._actor.remote([str(place) for place in sys.path])
        if self._sent is None:
            self._sent = self._ray.put(packed(config))
        played = actor.play.remote(os.getcwd(), make, config, acting, child_imports(), self._sent)
        return RayProcess(self._ray, actor, played), RayLine(self._ray, actor)

    def share(self, message: bytes) -> Any:
        return self._ray.put(message)
