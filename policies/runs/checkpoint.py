"""A checkpoint is a folder of plain files, whole or absent. Pickle is never read or written.

    config.yaml          how to build the thing again: plain data
    state.json           its state; each tensor is replaced by its name in state.safetensors
    state.safetensors    the tensors
    frozen-<sha256>.safetensors
                         where there are any, those that no training changes, named by their content: in the checkpoints
                         of a run one file (hard links), written once
    manifest.json        schema version, size and sha256 of every file, versions of the code, metrics
    <child>/             a checkpoint in itself; the first can be copied away and loaded alone, while a later one
                         refers to those before it for tensors that both hold ("policy:net.weight")

``save`` writes beside the target, fsyncs and renames: a process killed at any instant leaves either the whole
checkpoint or a scratch folder, which every reader ignores and ``prune`` removes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import yaml

from ..core.config import to_data
from ..core.errors import BurnishError
from ..core.files import is_link, link_or_copy, move, named, new, remove, sync, write_new
from .manifest import (
    FROZEN,
    LARGEST_TEXT,
    LARGEST_YAML,
    MANIFEST,
    TENSOR_FILE,
    check_child,
    parse,
    plain_yaml,
    read_manifest,
    write_manifest,
)
from .state_codec import Place, decode, encode, place_of, segments_of, separate

CONFIG, STATE, TENSORS = FILES = "config.yaml", "state.json", "state.safetensors"
PART = "part-{:04d}.safetensors"
SCRATCH = ".scratch-"
# The names and shapes of all tensors, some hundred bytes each. A header of zeroes of them would be read for minutes.
LARGEST_HEADER = 1 << 22  # bytes

_NUMBER = re.compile(r"[0-9]{8}|[1-9][0-9]{8,}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: configuration, state, metrics, and the checkpoints of its parts."""

    config: dict[str, Any]
    state: dict[str, Any]
    metrics: dict[str, Any]
    children: dict[str, Checkpoint]
    path: Path


def save(
    path: Path | str,
    *,
    config: Any,
    state: Mapping[str, Any],
    metrics: Mapping[str, Any] | None = None,
    children: Mapping[str, Mapping[str, Any]] | None = None,
    elsewhere: Mapping[Place, str] | None = None,
    before: Path | None = None,
    overwrite: bool = False,
) -> Path:
    """``config`` is a dataclass or plain data. ``children`` maps a folder name to the ``config=``, ``state=`` (and
    ``metrics=``, ``children=``, ``frozen=``, ``elsewhere=``) of a checkpoint inside this one. ``elsewhere`` names
    tensors that are not written (`policies/partial.py`), and ``frozen`` are tensors of the state that no training
    changes. These, and each of the ``segments`` of a state, lie in a file of their own: if the checkpoint
    ``before`` holds the same, its file is given a second name.

    ``overwrite`` moves the old checkpoint aside first; a kill between the two renames leaves both under scratch names.
    """
    path = Path(path).absolute()
    if os.path.lexists(path):
        if not overwrite:
            raise BurnishError(f"{path} exists already and is not overwritten; choose another name")
        if is_link(path) or not (path / MANIFEST).is_file():
            raise BurnishError(f"{path} is not a checkpoint, so it is not overwritten; choose another name")
    scratch, aside = _scratch(path), None
    more: dict[str, Any] = {"metrics": metrics, "children": children, "elsewhere": elsewhere}
    try:
        named(path.parent)
        _write(scratch, config=config, state=state, before=before, **more)
        if overwrite and os.path.lexists(path):
            aside = move(path, _scratch(path))
        move(scratch, path)
        sync(path.parent)
    except OSError as error:
        raise BurnishError(f"the checkpoint {path} could not be written: {error}") from error
    finally:
        remove(scratch)
    if aside is not None:
        remove(aside)
    return path


def load(path: Path | str, device: torch.device | str = "cpu") -> Checkpoint:
    """Everything is verified before anything is believed. ``device`` moves every tensor, also the states of random
    generators, which torch wants on the CPU: the default is right for whatever goes through ``load_state_dict``."""
    return _load(Path(path), device, {})[0]


def _load(
    path: Path, device: torch.device | str, known: Mapping[str, torch.Tensor]
) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    """Also its tensors; ``known`` are those of the children before this one, as "child:name"."""
    manifest, children = read_manifest(path, FILES)
    config = parse(path / CONFIG, plain_yaml)
    structure = parse(path / STATE, json.loads)
    stored = [path / name for name in manifest["files"] if name.endswith(TENSOR_FILE)]
    tensors: dict[str, torch.Tensor] = {}
    for file in stored:
        check_header(file)
    try:
        # Cloned, because the format packs tensors without alignment, and arithmetic on unaligned memory may take
        # another path and round differently: resuming would no longer be exact.
        for file in stored:
            loaded = safetensors.torch.load_file(file, device=str(device))
            tensors |= {name: x.clone() for name, x in loaded.items()}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise BurnishError(f"{file} is malformed: {error}") from error
    try:
        state = decode(structure, {**known, **tensors})
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BurnishError(f"{path / STATE} is malformed: {error}") from error
    for name, content in ((CONFIG, config), (STATE, state)):
        if not isinstance(content, dict):
            raise BurnishError(f"{path / name} is malformed: it must hold a mapping")
    shared: dict[str, torch.Tensor] = {}
    made: dict[str, Checkpoint] = {}
    for name in children:
        made[name], found = _load(path / name, device, shared)
        shared |= {f"{name}:{own}": x for own, x in found.items()}
    return Checkpoint(config, state, manifest["metrics"], made, path), tensors


def check_header(path: Path) -> None:
    """A safetensors file begins with the length of its header; all else about it is checked by the package."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > LARGEST_HEADER:
        raise BurnishError(f"{path} is malformed: its header has {length} bytes, and {LARGEST_HEADER} are read at most")


def number(step: int) -> str:
    """The folder name of a numbered checkpoint."""
    return f"{step:08d}"


def numbered(folder: Path | str) -> list[Path]:
    """Checkpoints named by their step, such as ``00001000``, newest last; anything else in the folder is ignored."""
    folder = Path(folder)
    found = [p for p in folder.iterdir() if _NUMBER.fullmatch(p.name) and p.is_dir()] if folder.is_dir() else []
    return sorted(found, key=lambda p: int(p.name))


def newest(folder: Path | str, device: torch.device | str = "cpu", child: str = "") -> Checkpoint | None:
    """The newest readable checkpoint, or its ``child``; None if there are none. A broken one is passed over with a
    warning; if all are broken that is an error, because starting again silently would be worse."""
    broken: list[BurnishError] = []
    for path in reversed(numbered(folder)):
        try:
            return load(path / child, device)
        except BurnishError as error:
            _log.warning("passing over a broken checkpoint: %s", error)
            broken.append(error)
    if broken:
        raise BurnishError(f"none of the {len(broken)} checkpoints in {folder} is readable: {broken[0]}")
    return None


def prune(folder: Path | str, keep: int) -> None:
    """Remove all but the last ``keep`` numbered checkpoints, and what killed processes left behind. To be called only
    by the one process that writes here: the scratch folder of another would look abandoned."""
    if keep < 1:
        raise BurnishError(f"keep={keep} would remove every checkpoint; it must be at least 1")
    for path in numbered(folder)[:-keep]:
        move(path, _scratch(path))  # first out of sight, so that a half-removed checkpoint never looks like one
    for path in Path(folder).glob(f"{SCRATCH}*"):
        remove(path)


def _scratch(path: Path) -> Path:
    return path.with_name(f"{SCRATCH}{path.name}-{os.getpid()}-{secrets.token_hex(4)}")


def _write(
    folder: Path,
    *,
    config: Any,
    state: Mapping[str, Any],
    metrics: Mapping[str, Any] | None = None,
    children: Mapping[str, Mapping[str, Any]] | None = None,
    frozen: Iterable[torch.Tensor] = (),
    elsewhere: Mapping[Place, str] | None = None,
    before: Path | None = None,
    known: Mapping[Place, str] | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors that were written; ``known`` are those of children before this one, which it refers to."""
    new(folder)
    structure, tensors = encode(dict(state), {**(elsewhere or {}), **(known or {})})
    try:
        still = {x.untyped_storage().data_ptr() for x in frozen}
        parts = enumerate(segments_of(state))
        own = {place_of(x): PART.format(i) for i, part in parts for x in encode(part)[1].values()}
        files: dict[str, dict[str, torch.Tensor]] = {TENSORS: {}}
        for name, x in tensors.items():
            file = own.get(place_of(x), TENSORS) if own else TENSORS
            if still and x.untyped_storage().data_ptr() in still:
                file = FROZEN
            files.setdefault(file, {})[name] = x
        for name, text, largest in (
            (CONFIG, yaml.safe_dump(to_data(config), sort_keys=False, allow_unicode=True), LARGEST_YAML),
            (STATE, json.dumps(structure), LARGEST_TEXT),
        ):
            if len(text) > largest:
                raise ValueError(f"{name} would have {len(text)} characters, and {largest} are read at most")
            write_new(folder / name, text)
        safetensors.torch.save_file(separate(files.pop(TENSORS)), folder / TENSORS)
        stored = [TENSORS, *(_write_once(folder, name, held, before) for name, held in files.items())]
        for name in stored:
            check_header(folder / name)
            sync(folder / name)
        shared: dict[Place, str] = {}
        for name, child in (children or {}).items():
            check_child(name)
            made = _write(folder / name, **child, before=None if before is None else before / name, known=shared)
            shared |= {place_of(x): f"{name}:{own}" for own, x in made.items()}
        write_manifest(folder, (CONFIG, STATE, *stored), list(children or ()), to_data(metrics or {}))
    except BurnishError:
        raise
    except (yaml.YAMLError, safetensors.SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise BurnishError(f"a checkpoint cannot hold this: {error}") from error
    return tensors


def _write_once(folder: Path, name: str, tensors: Mapping[str, torch.Tensor], before: Path | None) -> str:
    """The file of ``before`` once more, if it holds the same bytes, or a new one; its name, which may hold its hash."""
    content = safetensors.torch.save(separate(tensors))
    digest = hashlib.sha256(content).hexdigest()
    name = name.format(digest)
    old = None if before is None else before / name
    if old is not None and old.is_file() and not old.is_symlink() and old.stat().st_size == len(content):
        with open(old, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == digest:
                link_or_copy(old, folder / name)
                return name
    write_new(folder / name, content)
    return name
