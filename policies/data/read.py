"""Reads a dataset of any format that is known here into ``Episodes``: what every verb calls.

A format is recognised by what a file or a folder holds, whatever its name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import BurnishError
from ..runs.manifest import kind_of
from . import lerobot, lerobot_files
from .episodes import Bad, Episodes, Mine
from .formats import d4rl, hdf5, maniskill, minari, npz, ogbench, plain, robomimic
from .formats.bounds import refusal, regular
from .formats.columns import Columns

__all__ = ["FORMATS", "fingerprint", "format_of", "read_dataset", "read_part"]

HEAD = 1 << 12  # bytes in which a file says what it is
INFO = "meta/info.json"
Read = Callable[[Path, Bad | None, Mine | None], Episodes]


@dataclass(frozen=True)
class Format:
    """A kind of dataset. ``holds`` are names of which it has all; a * stands for a number."""

    name: str
    container: str  # folder, HDF5 or npz
    holds: tuple[str, ...]
    read: Read


def _hdf5(read: Callable[[Path, hdf5.Group, Bad | None, Mine | None], Episodes], copies: int = 1) -> Read:
    def opened(path: Path, bad: Bad | None, mine: Mine | None) -> Episodes:
        with hdf5.opened(path, copies) as root:
            return read(path, root, bad, mine)

    return opened


def _npz(read: Callable[[Columns, Bad | None], Episodes]) -> Read:
    def opened(path: Path, bad: Bad | None, _: Mine | None) -> Episodes:
        with npz.opened(path) as arrays:
            return read(Columns.of_arrays(path, arrays), bad)

    return opened


# The first that fits is taken.
FORMATS = (
    Format("lerobot", "folder", (INFO,), lerobot.read_lerobot),
    Format("minari", "folder", (minari.METADATA,), minari.read),
    Format("minari", "HDF5", ("episode_*",), lambda path, bad, mine: minari.read(path.parent, bad, mine, path)),
    Format("robomimic", "HDF5", ("data/demo_*",), _hdf5(robomimic.read)),
    Format("maniskill", "HDF5", ("traj_*",), _hdf5(maniskill.read)),
    Format("d4rl", "HDF5", ("observations", "actions", "terminals"), _hdf5(d4rl.read_group, copies=2)),
    Format("d4rl", "npz", ("observations", "actions", "terminals", "timeouts"), _npz(d4rl.read)),
    Format("ogbench", "npz", ("observations", "actions", "terminals", "qpos"), _npz(ogbench.read)),
    Format("ogbench", "npz", ("observations", "actions", "terminals", "masks"), _npz(ogbench.read)),
    Format("ogbench", "npz", ("observations", "actions", "terminals", "valids"), _npz(ogbench.read)),
    Format("d4rl", "npz", ("observations", "actions", "terminals", "next_observations"), _npz(d4rl.read)),
    Format("npz", "npz", ("observations", "actions"), _npz(plain.read)),
)


def read_dataset(path: str | Path, bad: Bad | None = None, mine: Mine | None = None) -> Episodes:
    """The episodes of a dataset, in memory. ``meta["notes"]`` says what its format lacks, and how it was filled in.
    An episode that cannot be used is left out, and noted in ``bad``, where that is given; else the set is refused.
    ``mine`` says of how many episodes which ones are read with their pictures."""
    path = Path(path)
    if mine is not None and (name := format_of(path)) != "lerobot":
        raise refusal(path, f"is a {name} dataset, which is read whole; share_episodes=true takes those of LeRobot")
    return _format(path).read(path, bad, mine)


def read_part(path: str | Path, bad: Bad | None, mine: Mine | None) -> Episodes:
    """As ``read_dataset``. Of a file with a group for each episode those alone that are ``mine``, which is asked for
    them; one of flat arrays is read whole, and ``mine`` is not asked."""
    return _format(Path(path)).read(Path(path), bad, mine)


def format_of(path: str | Path) -> str:
    """The name of the format of the dataset at ``path``."""
    return _format(Path(path)).name


def fingerprint(path: str | Path) -> str:
    """Which dataset it is, wherever it lies: the hash of its files, of a LeRobot set that of its description."""
    path = Path(path)
    if _format(path).name == "lerobot":
        return lerobot_files.fingerprint(path)
    digest = hashlib.sha256()
    for file in _files(path):
        with open(regular(file), "rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    """The files that are read, whose content counts and not their names."""
    if (folder := minari.place_of(path)) is not None:
        return [folder / minari.METADATA, folder / minari.DATA]
    beside = path.with_suffix(".json")
    return [path, beside] if beside.is_file() else [path]


def _format(path: Path) -> Format:
    container, names = _names(path)
    for row in FORMATS:
        if row.container == container and names.issuperset(row.holds):
            return row
    known = "; ".join(f"{', '.join(row.holds)} ({row.name})" for row in FORMATS if row.container == container)
    raise refusal(
        path, f"is of no format that is read here: a {container} dataset holds {known}; see docs/data.md{kind_of(path)}"
    )


def _names(path: Path) -> tuple[str, set[str]]:
    """The container of a dataset, and the names in it."""
    if path.is_dir():
        names = {INFO} if (path / INFO).exists() else set()
        return "folder", names | ({minari.METADATA} if minari.place_of(path) else set())
    if not path.exists():
        raise BurnishError(f"there is no dataset at {path}; `burnish collect` makes one")
    with open(regular(path), "rb") as file:
        head = file.read(len(hdf5.SIGNATURE))
    if head == hdf5.SIGNATURE:
        with hdf5.opened(path) as root:
            groups = [root[name] for name in root if name == "data"]
            below = {f"data/{_kind(x)}" for group in groups if isinstance(group, hdf5.Group) for x in group}
            return "HDF5", below.union(map(_kind, root))
    if head.startswith(npz.SIGNATURE):
        with npz.opened(path) as arrays:
            return "npz", {key[0] for key in arrays}
    if not head or head.startswith(npz.EMPTY):
        raise refusal(path, "is empty")
    raise refusal(path, "is neither a folder, nor an HDF5 file, nor an npz file")


def _kind(name: str) -> str:
    return re.sub(r"_\d+$", "_*", name, flags=re.ASCII)
