"""Shared by the benchmarks that compare this tree with an older revision: its worktree, its command, its words."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def worktree(revision: str, folder: Path) -> Iterator[Path]:
    """The tree of ``revision`` in ``folder``, a worktree of git, which is removed afterwards."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--detach", str(folder), revision], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True, capture_output=True)


def linked(tree: Path) -> Path:
    """The folder in which the folders of ``tree`` are linked as the package."""
    subprocess.run(["make", "-C", str(tree), "dev"], check=True, capture_output=True)
    return tree / ".dev"


def entry(tree: Path) -> str:
    """The module whose ``main`` is the command `burnish` of ``tree``."""
    return tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"]["burnish"].split(":")[0]


def translated(tree: Path, words: Sequence[str]) -> list[str]:
    """``words`` as ``tree`` knows them: before policies/evaluator.py, ``eval.*`` was ``trial.*``."""
    if (tree / "policies" / "evaluator.py").exists():
        return list(words)
    return [f"trial.{word.removeprefix('eval.')}" if word.startswith("eval.") else word for word in words]
