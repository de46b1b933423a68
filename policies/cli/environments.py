"""Python environments for what cannot live beside Burnish: ``burnish worlds``, ``burnish policies``.

A recipe is a row of plain data, and all of them are ours: no file and no checkpoint can bring one. Every package is
pinned, those that a package asks for too, and installed without asking for more (``--no-deps``). So the same recipe
makes the same environment next year, and demands that contradict each other, or that serve training, do not matter.

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
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..core import files
from ..core.errors import BurnishError, did_you_mean, plain
from ..runs.manifest import burnish_version
from ..runs.run import progress_bar
from .machine import say

MARKER = "burnish.json"  # written last, so an environment that was not finished does not count as there
MODULES = ("PYTHONPATH", "PYTHONHOME")  # by which a Python finds other modules than its own
CPU_TORCH = "--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu"
GIGABYTE = 1e9
QUOTED = 5  # lines of pip that a refusal quotes


class Do(Enum):
    """The two actions of `burnish worlds` and `burnish policies`."""

    list = "list"
    add = "add"


@dataclass
class EnvironmentConfig:
    """Settings of `burnish worlds` and `burnish policies`: list what is there, or add an environment."""

    do: Do = Do.list  # list what is there, or add an environment; `add NAME` says the same
    name: str | None = None  # name of the recipe; `list` shows them
    force: bool = False  # make anew what is there
    python: str | None = None  # interpreter to make it with; by default this one, or pythonX.Y on the PATH


@dataclass(frozen=True)
class Recipe:
    """A Python environment: its packages, the Pythons that it can have, and how it is tried."""

    purpose: str
    pythons: tuple[str, ...]  # versions for which all packages have wheels, the best tried first
    steps: tuple[str, ...]  # words for one `pip install` each, in this order
    maker: str  # the word with which the script that tries it is called; empty: it is not tried
    example: str  # for a line that says how it is used
    gigabytes: float  # on the disk

    @property
    def packages(self) -> int:
        return sum("==" in word for step in self.steps for word in step.split())

    @property
    def fingerprint(self) -> str:
        return sha256("\n".join(self.steps).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Environments:
    """The environments of one verb: their recipes, and where this user has them."""

    verb: str
    recipes: dict[str, Recipe]
    script: str  # runs in a new environment, and says in its last line what it did there
    usage: str  # with {name} and {example} of the recipe

    def recipe(self, name: str) -> Recipe:
        """The recipe of that name; an unknown one is refused."""
        if name not in self.recipes:
            raise BurnishError(f"there is no recipe {name!r:.80}; {did_you_mean(name, self.recipes)}")
        return self.recipes[name]

    @property
    def variable(self) -> str:
        """Of the environment of the shell: the folder that has them, in place of the usual one."""
        return f"BURNISH_{self.verb.upper()}"

    def home(self) -> Path:
        """The folder of this user's environments."""
        data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share"
        return Path(os.environ.get(self.variable) or Path(data) / "burnish" / self.verb).absolute()

    def place(self, name: str) -> Path:
        """Of the environment of a recipe, whether it is there or not."""
        self.recipe(name)
        return self.home() / name

    def made(self, name: str) -> dict[str, Any] | None:
        """The notes that were written when the environment was finished; None where it is not there."""
        try:
            said = json.loads((self.place(name) / MARKER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return said if isinstance(said, dict) and (self.place(name) / "bin/python").exists() else None

    def python(self, name: str) -> str:
        """The Python of an environment that was made."""
        if self.made(name) is None:
            raise BurnishError(f"the environment {name} is not there; `burnish {self.verb} add {name}` makes it")
        return str(self.place(name) / "bin/python")

    def run(self, config: EnvironmentConfig) -> int:
        """The verb: the list, printed, or one more made; exit status."""
        if (config.do is Do.add) != (config.name is not None):
            raise BurnishError(
                f"write `burnish {self.verb} list`, or `burnish {self.verb} add NAME`: {', '.join(self.recipes)}"
            )
        if config.name is None:
            for line in self.listed():
                say(line)
        else:
            self.add(config.name, config.force, config.python)
        return 0

    def listed(self) -> Iterator[str]:
        """The lines of the list, one per recipe under a heading."""
        rows = [("name", "there", "python", "size", "what for")]
        for name, row in self.recipes.items():
            found = self.made(name)
            if found is None:
                there, version, size = "no", " or ".join(row.pythons), f"about {row.gigabytes:.1f} GB"
            else:
                there = "yes" if found.get("recipe") == row.fingerprint else "older recipe"
                version, size = plain(found.get("python", "?"), 20), f"{_bytes(self.place(name)) / GIGABYTE:.1f} GB"
            rows.append((name, there, version, size, row.purpose))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield "  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True)).rstrip()
        yield f"in {self.home()}; `burnish {self.verb} add NAME` makes one"

    def add(self, name: str, force: bool = False, python: str | None = None) -> None:
        """The Python environment of a recipe, made and tried; one that is there already is kept unless ``force``."""
        row, folder = self.recipe(name), self.place(name)
        files.named(self.home())
        with files.locked(self.home() / f".{name}.lock", f"{name} is being made by another process; wait for it"):
            found = self.made(name)
            if found is not None and not force:
                old = found.get("recipe") != row.fingerprint
                say(f"{name} is there already{', made by an older recipe' if old else ''}; force=true makes it anew")
                return
            chosen, version = interpreter_for(row, name, python)
            self._require_room(row, name)
            began = time.monotonic()
            say(f"{name}: {row.packages} packages for Python {version}, about {row.gigabytes:.1f} GB, into {folder}")
            files.remove(folder / MARKER)
            files.remove(folder)
            try:
                _install(row, name, chosen, folder)
                said = self._probed(row, name, folder)
                about = {"recipe": row.fingerprint, "python": version, "burnish": burnish_version(), "probe": said}
                files.replace(folder / MARKER, json.dumps(about))
            except BaseException:
                say(f"{name} was not finished, and what there was of it is removed")
                files.remove(folder)
                raise
        say(f"{name}: {said}" if said else f"{name}: nothing to try")
        used = self.usage.format(name=name, example=row.example)
        say(f"made in {time.monotonic() - began:.0f} s; use it so: {used}")

    def _require_room(self, row: Recipe, name: str) -> None:
        free = shutil.disk_usage(self.home()).free / GIGABYTE
        if free < 1.5 * row.gigabytes:  # packed and unpacked
            raise BurnishError(
                f"{name} takes about {row.gigabytes:.1f} GB, and {self.home()} has {free:.1f} GB left; make room, or "
                f"let {self.variable} name a folder on another disk"
            )

    def _probed(self, row: Recipe, name: str, folder: Path) -> str:
        """The last line of what the script says."""
        if not row.maker:
            return ""
        say(f"{name}: trying it")
        words = [str(folder / "bin/python"), self.script, row.maker]
        said = deque(_lines(words, f"the packages of {name} are installed, but its probe failed"), 1)
        return plain(said[0], 400) if said else ""


def _bytes(folder: Path) -> int:
    """On the disk."""
    found = 0
    for root, _, names in os.walk(folder):
        found += sum(os.lstat(os.path.join(root, name)).st_blocks for name in names)
    return 512 * found


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


def _install(row: Recipe, name: str, python: str, folder: Path) -> None:
    for _ in _lines([python, "-m", "venv", str(folder)], f"{name} cannot be made by `{python} -m venv`"):
        pass
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--no-deps", "--no-input", "--progress-bar", "off"]
    with progress_bar(row.packages, "package") as bar:
        for step in row.steps:
            for line in _lines([*pip, *step.split()], f"pip could not install the packages of {name}"):
                bar.update(line.startswith("Collecting "))


def _lines(words: list[str], failing: str) -> Iterator[str]:
    """The lines of a program, as it writes them. A failure quotes the end of that."""
    last: deque[str] = deque(maxlen=QUOTED)
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
    elsewhere = (*MODULES, "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV")
    kept = {key: value for key, value in os.environ.items() if key not in elsewhere}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1"}
