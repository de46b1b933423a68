"""``burnish worlds``: makes the Python environments of `recipes.py`, and says which are there.

An environment of Python cannot be moved, since its programs name their interpreter. So it is made in its place, and
counts as there once its marker is written, which is the last thing that happens; what is left of one that was
interrupted is removed before the next begins.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ...policies.cli.machine import say
from ...policies.core import files
from ...policies.core.errors import BurnishError, plain
from ...policies.runs.manifest import burnish_version
from ...policies.runs.run import progress_bar
from . import side_worlds
from .recipes import MARKER, RECIPES, Recipe, home, made, place, recipe

GROUPS: dict[str, dict[str, dict[str, type]]] = {}
GIGABYTE = 1e9
TOLD = 5  # lines of pip that a refusal quotes


class Do(Enum):
    """The two actions of `burnish worlds`."""

    list = "list"
    add = "add"


@dataclass
class WorldsConfig:
    """Settings of `burnish worlds`: list what is there, or add an environment."""

    do: Do = Do.list  # list what is there, or add an environment; `burnish worlds add NAME` says the same
    name: str | None = None  # name of the recipe; `burnish worlds list` shows them
    force: bool = False  # make anew what is there
    python: str | None = None  # interpreter to make it with; by default this one, or pythonX.Y on the PATH

    def __post_init__(self) -> None:
        if (self.do is Do.add) != (self.name is not None):
            raise BurnishError(f"write `burnish worlds list`, or `burnish worlds add NAME`: {', '.join(RECIPES)}")
        if self.name is not None:
            recipe(self.name)


def worlds(config: WorldsConfig) -> int:
    """The list of Python environments, printed, or one more made; exit status."""
    if config.name is None:
        for line in listed():
            say(line)
    else:
        add(config.name, config.force, config.python)
    return 0


# ---- The list ----


def listed() -> Iterator[str]:
    """The lines of `burnish worlds list`, one per recipe under a heading."""
    rows = [("name", "there", "python", "size", "what for")]
    for name, row in RECIPES.items():
        found = made(name)
        if found is None:
            there, version, size = "no", " or ".join(row.pythons), f"about {row.gigabytes:.1f} GB"
        else:
            there = "yes" if found.get("recipe") == row.fingerprint else "older recipe"
            version, size = plain(found.get("python", "?"), 20), f"{_bytes(place(name)) / GIGABYTE:.1f} GB"
        rows.append((name, there, version, size, row.purpose))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True)).rstrip()
    yield f"in {home()}; `burnish worlds add NAME` makes one"


def _bytes(folder: Path) -> int:
    """On the disk."""
    found = 0
    for root, _, names in os.walk(folder):
        found += sum(os.lstat(os.path.join(root, name)).st_blocks for name in names)
    return 512 * found


# ---- Making one ----


def add(name: str, force: bool = False, python: str | None = None) -> None:
    """The Python environment of a recipe, made and tried; one that is there already is kept unless ``force``."""
    row, folder = recipe(name), place(name)
    files.named(home())
    with files.locked(home() / f".{name}.lock", f"{name} is being made by another process; wait for it"):
        found = made(name)
        if found is not None and not force:
            old = found.get("recipe") != row.fingerprint
            say(f"{name} is there already{', made by an older recipe' if old else ''}; force=true makes it anew")
            return
        chosen, version = interpreter_for(row, name, python)
        _require_room(row, name)
        began = time.monotonic()
        say(f"{name}: {row.packages} packages for Python {version}, about {row.gigabytes:.1f} GB, into {folder}")
        files.remove(folder / MARKER)
        files.remove(folder)
        try:
            _install(row, name, chosen, folder)
            said = _probed(row, name, folder)
            about = {"recipe": row.fingerprint, "python": version, "burnish": burnish_version(), "probe": said}
            files.replace(folder / MARKER, json.dumps(about))
        except BaseException:
            say(f"{name} was not finished, and what there was of it is removed")
            files.remove(folder)
            raise
    say(f"{name}: {said}" if said else f"{name}: nothing to try")
    say(f"made in {time.monotonic() - began:.0f} s; use it so: env=remote env.name={name} env.id={row.example}")


def interpreter_for(row: Recipe, name: str, given: str | None) -> tuple[str, str]:
    """One of a version that the recipe is known to work with, and this version."""
    tried = [given] if given else [sys.executable, *(f"python{version}" for version in row.pythons)]
    seen = {}
    for python in tried:
        version = _version(python)
        if version and version.rpartition(".")[0] in row.pythons:
            return python, version
        seen[python] = f"{python} is {version}" if version else f"no {python} works"
    raise BurnishError(
        f"{name} needs Python {' or '.join(row.pythons)}, and {', '.join(seen.values())}; install one, with its module "
        f"venv, or name one: python=/path/to/python{row.pythons[0]}"
    )


def _version(python: str) -> str | None:
    """Asked of the program itself: a name on the PATH may be a stand-in for what is not installed."""
    code = "import platform; print(platform.python_version())"
    try:
        found = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def _require_room(row: Recipe, name: str) -> None:
    free = shutil.disk_usage(home()).free / GIGABYTE
    if free < 1.5 * row.gigabytes:  # packed and unpacked
        raise BurnishError(
            f"{name} takes about {row.gigabytes:.1f} GB, and {home()} has {free:.1f} GB left; make room, or let "
            "BURNISH_WORLDS name a folder on another disk"
        )


def _install(row: Recipe, name: str, python: str, folder: Path) -> None:
    for _ in _lines([python, "-m", "venv", str(folder)], f"{name} cannot be made by `{python} -m venv`"):
        pass
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--no-deps", "--no-input", "--progress-bar", "off"]
    with progress_bar(row.packages, "package") as bar:
        for step in row.steps:
            for line in _lines([*pip, *step.split()], f"pip could not install the packages of {name}"):
                bar.update(line.startswith("Collecting "))


def _probed(row: Recipe, name: str, folder: Path) -> str:
    """What the maker's probe says: its last line."""
    if not row.maker:
        return ""
    say(f"{name}: trying it")
    words = [str(folder / "bin/python"), side_worlds.__file__, row.maker]
    said = deque(_lines(words, f"the packages of {name} are installed, but its probe failed"), 1)
    return plain(said[0], 400) if said else ""


def _lines(words: list[str], failing: str) -> Iterator[str]:
    """What a program writes, as it writes it. A failure quotes the end of that."""
    last: deque[str] = deque(maxlen=TOLD)
    with subprocess.Popen(
        words, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in filter(str.strip, process.stdout):
                last.append(line.strip())
                yield line.rstrip()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        said = "; ".join(plain(line, 300) for line in last) or f"status {process.returncode}"
        raise BurnishError(
            f"{failing} ({said}); see that the package index can be reached (pip's settings hold: PIP_INDEX_URL, "
            f"PIP_FIND_LINKS), that {platform.system()} on {platform.machine()} has such packages, and try again"
        )


def _environment() -> dict[str, str]:
    """Of pip, and of what it installed: this one, without what leads pip or Python to other places."""
    elsewhere = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV")
    kept = {key: value for key, value in os.environ.items() if key not in elsewhere}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1"}
