"""Where verbs are played: in processes of this machine, or as tasks of a Ray cluster. `burnish compare` and benchmarks
hand their runs to an executor, which knows nothing of what is run."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ..core import files
from ..core.threads import usable_cores
from ..runs.interrupt import Stop
from .ray_tasks import RAY, RayTasks, address_of
from .verb_process import start_verb

LOCAL = "local"
POLL_S = 0.2


class Executor(Protocol):
    """Plays verbs, several at a time, from as many threads."""

    def jobs(self, count: int) -> int:
        """How many of ``count`` verbs to hand over at a time."""
        ...

    def play(self, words: Sequence[str], log: Path, stop: Stop) -> int:
        """``burnish`` with ``words``, its output in ``log``; exit status. A stop is passed on, and waited for."""
        ...


class Processes:
    """A verb is a process of this machine, one per core; or one for each so many ``cores``, which it keeps to."""

    def __init__(self, cores: int = 0) -> None:
        self._cores = cores

    def jobs(self, count: int) -> int:
        return max(1, usable_cores() // max(1, self._cores))

    def play(self, words: Sequence[str], log: Path, stop: Stop) -> int:
        """The process hears of a Ctrl-C by itself, but not of a SIGTERM to this one."""
        with files.fresh(files.named(log.parent) / log.name) as file:
            process = start_verb(words, self._cores, stdout=file, stderr=subprocess.STDOUT)
            signalled = False
            while process.poll() is None:
                if stop.requested and not signalled:
                    process.send_signal(signal.SIGTERM)
                    signalled = True
                time.sleep(POLL_S)
        return process.returncode


def names_place(on: str) -> bool:
    """Whether a setting is ``on=local``, ``on=ray`` or ``on=ray:ADDRESS``."""
    return on == LOCAL or on.partition(":")[0] == RAY


def executor(on: str, device: str = "cpu", storage: str | None = None, cores: int = 0, gpus: float = 1.0) -> Executor:
    """The one that a setting ``on=local``, ``on=ray`` or ``on=ray:ADDRESS`` names, for verbs that keep to so many
    ``cores`` (0: one, and on this machine all) and take ``gpus`` of a cluster, where they need any. The nodes of Ray
    share all folders, or else a ``storage``."""
    if on == LOCAL:
        return Processes(cores)
    return RayTasks(address_of(on), max(1, cores), 0 if device == "cpu" else gpus, storage)
