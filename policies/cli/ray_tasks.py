"""Verbs as tasks of a Ray cluster whose nodes share the folders that the words name, under the same paths, or a storage
(`storage.py`), into which those folders are sent and from which each node fetches its own.

A task is a process of its own on some node, with one core and perhaps a GPU. If its node is lost, Ray starts it again
on another: a run is told ``resume=true``, so it goes on from its last checkpoint in the shared folder or storage.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ..core import files
from ..core.errors import BurnishError, reason
from ..core.imports import VARIABLE
from ..core.threads import CORES
from ..runs.checkpoint import numbered
from ..runs.interrupt import Stop
from ..runs.run import CHECKPOINTS, CONFIG
from .storage import Storage, sha256_of
from .verb_process import child_imports

RAY = "ray"
OUT = "out="
PATHS = (
    "out",
    "data",
    "critic_from",
    "model_from",
    "against",
    *(f"policy.{name}" for name in ("path", "base", "words", "stats", "adapter")),
)
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

    def __init__(self, address: str | None = None, cores: int = 1, gpus: float = 0, storage: str | None = None) -> None:
        self._ray = ray = connected(address)
        self._storage, self._cores = storage, cores
        # Each call has a process of its own, which ends with it.
        shared = play_here if storage is None else play_away
        self._task = ray.remote(num_cpus=cores, num_gpus=gpus, max_calls=1, max_retries=LOSSES)(shared)

    def jobs(self, count: int) -> int:
        """All: those that find no core wait, and a node that joins takes some."""
        return max(1, count)

    def play(self, words: Sequence[str], log: Path, stop: Stop) -> int:
        own = [variables(self._cores), [str(place) for place in sys.path]]
        if self._storage is None:
            return self._ended([list(words), str(log), os.getcwd(), *own], stop)
        with stored(words, log, self._storage) as keys:
            return self._ended([list(words), keys, key_of(log), *own, self._storage], stop)

    def _ended(self, given: Sequence[Any], stop: Stop) -> int:
        """The exit status of the task, of which ``given`` are the words and the rest, once it has ended."""
        ray, task, stopped = self._ray, self._task.remote(*given), False
        while not ray.wait([task], timeout=WAIT_S)[0]:
            if stop.requested and not stopped:
                ray.cancel(task)
                stopped = True
        try:
            return ray.get(task)
        except ray.exceptions.TaskCancelledError:
            return 130
        except ray.exceptions.RayError as error:
            raise BurnishError(f"Ray has lost `burnish {given[0][0]}`: {reason(error)}") from error


def variables(cores: int) -> dict[str, str]:
    """The environment of a task on a node: the modules that it imports first, and the cores that it keeps to."""
    return {VARIABLE: ",".join(child_imports()), CORES: str(cores)}


@contextmanager
def stored(words: Sequence[str], log: Path, address: str) -> Iterator[dict[int, str]]:
    """The folders that ``words`` name lie in the storage at ``address``, under the keys for `play_away`; what it has
    made is fetched in the end."""
    storage, named = Storage(address), named_paths(words)
    keys = {number: key_of(path) for number, path in named.items()}
    for number, path in named.items():
        # All exist but a fresh out=; and where this machine was lost, nodes may have sent more of a run than it has.
        if path.exists() and not (words[number].startswith(OUT) and _ahead(storage.listed(keys[number]), path)):
            storage.send(path, keys[number])
    yield keys
    storage.fetch(key_of(log), log)
    for number, path in named.items():
        if words[number].startswith(OUT):
            storage.fetch(keys[number], path)


def _ahead(listed: Mapping[str, str] | None, path: Path) -> bool:
    """Whether a storage lists a later checkpoint of the run in a folder: of the one with these very settings."""
    settings = path / CONFIG
    if listed is None or not settings.is_file() or listed.get(CONFIG) != sha256_of(settings):
        return False
    kept = [name.split("/")[1] for name in listed if name.startswith(f"{CHECKPOINTS}/")]
    here = [int(x.name) for x in numbered(path / CHECKPOINTS)]
    return max((int(x) for x in kept if x.isdecimal()), default=0) > max(here, default=0)


def named_paths(words: Sequence[str]) -> dict[int, Path]:
    """The files and folders that words of a verb name, by the number of the word: those that are here, and ``out``. A
    name on a hub, or an address, stays as it is."""
    said = [(number, *word.partition("=")[::2]) for number, word in enumerate(words)]
    said = [(number, name, json.loads(x) if x.startswith('"') else x) for number, name, x in said if name in PATHS]
    named = [(number, name, Path(value)) for number, name, value in said if value]
    return {number: path for number, name, path in named if name == "out" or path.exists()}


def key_of(path: Path) -> str:
    """The name of a path in the storage: as it is seen from the working folder, if it lies in there."""
    path, here = Path(os.path.abspath(path)), Path.cwd()
    return path.relative_to(here if path.is_relative_to(here) else path.anchor).as_posix()


def play_here(words: Sequence[str], log: str, folder: str, variables: Mapping[str, str], places: Sequence[str]) -> int:
    """The task itself, on whichever node: one verb, with its output in ``log``; exit status."""
    enter(folder)
    return _played(words, Path(log), variables, places)


def play_away(
    words: list[str],
    keys: dict[int, str],
    log: str,
    variables: Mapping[str, str],
    places: Sequence[str],
    address: str,
) -> int:
    """The same on a node that shares the storage at ``address`` alone. ``keys`` name there what the words name. The
    folder that an evaluation reads goes with it; what other tasks read (a base, recordings) is shared, and stays."""
    storage, gone = Storage(address), list[Path]()
    cache = files.below(files.named(Path.home() / ".cache"), "burnish", "storage")
    home = files.below(cache, hashlib.sha256(address.encode()).hexdigest()[:12])
    with ExitStack() as held:
        held.callback(lambda: storage.send(home / log, log))  # when no other thread sends any more
        place = home
        if words[0] == "evaluate":
            gone.append(place := home / f"{log}.read")
        with files.locked(home / ".fetching"):  # tasks of a node share these folders
            for key in keys.values():
                storage.fetch(key, place / key)
        for number, key in keys.items():
            if words[number].startswith(OUT):
                gone.append(place / key)
                held.enter_context(storage.sending(place / key, key, CHECKPOINTS))
            words[number] = f"{words[number].partition('=')[0]}={place / key}"
        status = _played(words, home / log, variables, places)
    for path in gone:  # the storage has it
        files.remove(path)
    return status


def _played(words: Sequence[str], log: Path, variables: Mapping[str, str], places: Sequence[str]) -> int:
    find(places)
    os.environ.update(variables)
    from .cli import main

    with files.fresh(files.named(log.parent) / log.name) as file:
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
