"""The folder of a comparison or of a race: free, or what it was begun as, or fetched from where it is kept."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ...policies.cli.ray_tasks import key_of
from ...policies.cli.storage import Storage
from ...policies.core import files
from ...policies.core.config import differences
from ...policies.core.errors import BurnishError
from ...policies.runs.manifest import parse, plain_yaml
from ...policies.runs.run import CONFIG, LOCK
from .comparison import EVALUATIONS, RUNS

OWN = 2  # levels of the folder that the comparison itself writes; below them are its runs, which nodes send


def settings_of(path: Path) -> Mapping[str, Any]:
    """Those that the file ``path`` keeps; none where there is no file."""
    if not path.exists():
        return {}
    kept = parse(path, plain_yaml)
    if not isinstance(kept, Mapping):
        raise BurnishError(f"{path} is malformed: it holds no settings; choose another out=...")
    return kept


def claim(path: Path, mine: Mapping[str, Any], usual: Mapping[str, Any], free: Collection[str] = ()) -> None:
    """The folder of the file ``path`` is what it was begun as: settings other than those kept there are refused, but
    for the names in ``free``. ``usual`` stands for settings that came later than the file."""
    if path.exists():
        theirs = {**usual, **settings_of(path)}
        other = [name for name, *_ in differences(theirs, mine) if name.partition(".")[0] not in free]
        if other:
            raise BurnishError(f"{path.parent} was begun with another {', '.join(other)}; choose another out=...")
    files.replace(files.named(path.parent) / path.name, yaml.safe_dump(dict(mine), sort_keys=False))


def require_own(out: Path, what: str) -> set[str]:
    """The names in the folder, which is free or holds a ``what``: before even a lock is written there."""
    names = {entry.name for entry in out.iterdir()} - {LOCK} if out.is_dir() else set()
    if names and CONFIG not in names:
        raise BurnishError(f"{out} is not empty and holds no {what}; choose another out=...")
    return names


def require_room(out: Path, what: str, resume: bool) -> None:
    """The folder is free for a ``what``, or holds the one that goes on. One that failed before its base was evaluated
    leaves it free."""
    names = require_own(out, what)
    if names == {CONFIG, EVALUATIONS} and not any((out / EVALUATIONS).glob("*.json")):
        files.remove(out / CONFIG)
    elif names and not resume:
        raise BurnishError(f"{out} holds a {what}; resume=true continues it, or choose another out=...")


@contextmanager
def owned(out: Path) -> Iterator[None]:
    """Meanwhile no other command writes the folder: both would play the same runs, and each spoil the other's."""
    with files.locked(
        files.named(out) / LOCK, f"another process is writing {out}; wait for it, or choose another out=..."
    ):
        yield


def keep(out: Path, storage: str) -> None:
    """Sends the comparison's own files to the storage, where its nodes have sent its runs."""
    Storage(storage).send(out, key_of(out), deep=OWN)


def restore(out: Path, storage: str, resume: bool) -> None:
    """The folder as it is kept in the storage, where it is missing here. Without ``resume`` nothing may be kept there,
    since nodes would go on with it."""
    if (out / CONFIG).exists():
        return
    kept, own = Storage(storage), key_of(out)
    runs = kept.keys(f"{own}/{RUNS}/")
    if runs and not resume:
        raise BurnishError(
            f"storage={storage} holds runs of {own} already; resume=true continues them, or choose another out=..."
        )
    kept.fetch(own, out)  # also the lock that is held here, which stays the same file
    for key in runs:
        *folders, name = key.removeprefix(f"{own}/").split("/")
        kept.fetch(key, files.refuse_link(files.below(out, *folders) / name))
