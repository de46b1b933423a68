"""Verbs as tasks of a Ray cluster whose nodes share the folders that the words name, under the same paths.

A task is a process of its own on some node, with one core and perhaps a GPU. If its node is lost, Ray starts it again
on another: a run is told ``resume=true``, so it goes on from its last checkpoint in the shared folder.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..core import files
from ..core.errors import BurnishError, reason
from ..core.imports import VARIABLE
from ..runs.interrupt import Stop
from .verb_process import child_imports

RAY = "ray"
LOSSES = 10  # nodes that one verb may lose
WAIT_S = 1.0  # between two looks whether a stop is wanted


def connected(address: str | None) -> Any:
    """Ray, joined to the cluster at ``address``; None is the one of this machine, or a new one."""
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise BurnishError("on=ray needs Ray; pip install 'burnish[ray]'") from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not ray.is_initialized():
        try:
            ray.init(address, log_to_driver=False, logging_level="warning", configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise BurnishError(f"no Ray cluster answers at {address or 'this machine'}: {reason(error)}") from error
    return ray


def address_of(on: str) -> str | None:
    """The address in a setting ``on=ray`` or ``on=ray:ADDRESS``, None where it gives none."""
    return on.removeprefix(RAY).removeprefix(":") or None


class RayTasks:
    """The executor of ``on=ray``; ``address`` as in ``connected``."""

    def __init__(self, address: str | None = None, gpus: int = 0) -> None:
        self._ray = ray = connected(address)
        # Each call has a process of its own, which ends with it.
        self._task = ray.remote(num_cpus=1, num_gpus=gpus, max_calls=1, max_retries=LOSSES)(play_here)

    def jobs(self, count: int) -> int:
        """All: those that find no core wait, and a node that joins takes some."""
        return max(1, count)

    def play(self, words: Sequence[str], log: Path, stop: Stop) -> int:
        ray = self._ray
        places = [str(place) for place in sys.path]
        waiting = [self._task.remote(list(words), str(log), os.getcwd(), child_imports(), places)]
        stopped = False
        while not ray.wait(waiting, timeout=WAIT_S)[0]:
            if stop.requested and not stopped:
                ray.cancel(waiting[0])
                stopped = True
        try:
            return ray.get(waiting[0])
        except ray.exceptions.TaskCancelledError:
            return 130
        except ray.exceptions.RayError as error:
            raise BurnishError(f"Ray has lost `burnish {words[0]}`: {reason(error)}") from error


def play_here(words: Sequence[str], log: str, folder: str, modules: Sequence[str], places: Sequence[str]) -> int:
    """The task itself, on whichever node: one verb, with its output in ``log``; exit status."""
    enter(folder)
    find(places)
    os.environ[VARIABLE] = ",".join(modules)
    from .cli import main

    with files.fresh(files.named(Path(log).parent) / Path(log).name) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        sys.stdout = sys.stderr = file
        try:
            return main(list(words))
        except Exception:  # as a process of its own would say it
            traceback.print_exc()
            return 1


def enter(folder: str) -> None:
    """A node works where the user does."""
    if not Path(folder).is_dir():
        raise BurnishError(f"a node has no folder {folder}; on=ray needs folders that all nodes share")
    os.chdir(folder)


def find(places: Sequence[str]) -> None:
    """A node imports from where the user does."""
    sys.path += [place for place in places if place not in sys.path]
