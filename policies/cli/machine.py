"""The device of a command, and the lines that it prints."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..core.errors import BurnishError, plain_text
from ..core.imports import named_modules
from ..core.threads import started_by_torchrun
from ..runs.stored_world import Named, known_elsewhere


def prepare_machine(device: str, threads: int, ranks: int = 1) -> torch.device:
    """The torch device of that name, after a check that it exists and with the number of CPU threads set. Of the
    processes of `torchrun` a command shares its work among ``ranks``."""
    if (count := started_by_torchrun()) > ranks:
        raise BurnishError(
            f"torchrun started {count} processes of a command that is one; `burnish pretrain` and `burnish finetune` "
            "can be shared, others are started without torchrun"
        )
    if threads < 0:
        raise BurnishError(f"threads={threads} must be at least 1, or 0 for as many as torch chooses")
    if threads > 0:
        torch.set_num_threads(threads)
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise BurnishError(f"device={device} is not a device; take cpu, cuda or cuda:0") from error
    if chosen.type not in ("cpu", "cuda"):
        raise BurnishError(f"device={device} is not supported; take cpu, cuda or cuda:0")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise BurnishError(f"device={device}, but torch finds no CUDA GPU; take device=cpu, or see `burnish doctor`")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise BurnishError(f"device={device}: torch finds {torch.cuda.device_count()} GPUs, counted from 0")
    return chosen


def say_delivered(path: Any, world: Mapping[str, Any] | None, *words: str) -> None:
    """A policy's place, and the command that tries it, which names ``world`` where its file alone cannot make it."""
    roots = [name.partition(".")[0] for name in named_modules()]
    where = [] if known_elsewhere(world, roots) else _named(world)
    command = shlex.join(["burnish", "evaluate", f"policy.path={path}", *words, *where])
    say(f"policy: {path}  ({command})")


def _named(world: Mapping[str, Any] | None) -> list[str]:
    """The user's own words; ``env=...`` where a file says them, who may lie, or where they are more than names and
    numbers."""
    settings = {key: x for key, x in ((world or {}).get("config") or {}).items() if x is not None}
    if not isinstance(world, Named) or not all(isinstance(x, (str, int, float)) for x in settings.values()):
        return ["env=..."]
    said = {key: str(x).lower() if isinstance(x, bool) else x for key, x in settings.items()}
    return [f"env={world['name']}", *(f"env.{key}={x}" for key, x in said.items())]


def say(line: str) -> None:
    """One line on stdout, without control characters, and flushed at once."""
    sys.stdout.write(plain_text(line) + "\n")
    sys.stdout.flush()
