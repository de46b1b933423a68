"""The manifest of a folder of files: what each one held when it was written, and a verdict on what it holds now.

A manifest lists its folder's own files and the manifests of the folders inside it, so that every file is hashed once
and the whole is one hash tree. It ends in its own hash: a flipped byte has nowhere to hide.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import stat
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from ..core.errors import BurnishError
from ..core.files import is_link, sync, write_new

SCHEMA = 1
MANIFEST = "manifest.json"
# Parsed text becomes up to thirty times as large in memory, and YAML takes some seconds for a megabyte. The longest
# of ours have some ten kilobytes of YAML, and a few megabytes of JSON.
LARGEST_TEXT, LARGEST_YAML = 1 << 25, 1 << 19  # bytes, characters

# No separator, no leading dot: a name that matches can neither leave the folder nor hide in it.
_CHILD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
TENSOR_FILE, FROZEN = ".safetensors", "frozen-{}.safetensors"  # the latter with the sha256 of its content


def check_child(name: str) -> None:
    """A check that ``name`` may name a part of a checkpoint: letters, digits, '_', '-' and '.'."""
    if not _CHILD.fullmatch(name):
        raise BurnishError(f"{name!r} cannot name a part of a checkpoint; use letters, digits, '_', '-' and '.'")


def write_manifest(folder: Path, files: Sequence[str], children: Sequence[str], metrics: Any) -> None:
    """The manifest of a folder, written: sizes and SHA-256 of its files and parts, versions and metrics."""
    names = [*files, *(f"{child}/{MANIFEST}" for child in children)]
    manifest = {
        "schema": SCHEMA,
        "burnish": burnish_version(),
        "torch": str(torch.__version__),
        "git": _git_revision(),
        "metrics": metrics,
        "files": {name: {"size": (folder / name).stat().st_size, "sha256": _sha256(folder / name)} for name in names},
    }
    write_new(folder / MANIFEST, _seal(manifest))
    sync(folder)


# File -> what a folder that has it is, and how it is named in a command.
KINDS = {
    MANIFEST: "a checkpoint: policy.path=...",
    "meta/info.json": "a dataset: data=...",
    "tick.onnx": "a bundle: policy=bundle policy.path=...",
    "config.yaml": "a training",
}


def kind_of(folder: Path) -> str:
    """The end of a sentence on a folder that is not of the kind that was expected."""
    kind = next((kind for name, kind in KINDS.items() if (folder / name).exists()), None)
    return "" if kind is None else f"; it is {kind}"


def read_manifest(folder: Path, files: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The manifest of ``folder`` once every file that it lists is verified, and the names of its children, of which
    only the manifests are: they verify the rest. ``files`` are needed, more files of tensors may be there."""
    if not folder.is_dir():
        lacks = "there is no such folder"
        if folder.exists():
            lacks = "it is a file of another library, which is not read; export its network by torch.onnx.export for "
            lacks += "policy=onnx, or take another way of docs/checkpoint.md"
            if folder.suffix == ".onnx":
                lacks = "it is a model, which is read by policy=onnx"
        raise BurnishError(f"{folder} is not a checkpoint: {lacks}")
    path = folder / MANIFEST
    if not os.path.lexists(path):
        raise BurnishError(f"{folder} is not a checkpoint: it has no {MANIFEST}{kind_of(folder)}")
    _check_no_link(path)
    if not path.is_file():
        raise BurnishError(f"{path} is no file, but a pipe, a device or a folder")
    manifest = parse(path, json.loads)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("schema"), int):
        raise BurnishError(f"{path} is malformed: it names no schema version")
    if manifest["schema"] != SCHEMA:
        raise BurnishError(
            f"{path} has schema version {manifest['schema']}, but this Burnish reads version {SCHEMA}; "
            "use the Burnish that wrote it"
        )
    if _read_bytes(path) != _seal(manifest).encode():
        raise BurnishError(f"{path} was changed after it was written: its sha256 differs")
    entries = manifest.get("files")
    if (
        not isinstance(entries, dict)
        or not set(files) <= entries.keys()
        or not isinstance(manifest.get("metrics"), dict)
    ):
        raise BurnishError(f"{path} is malformed: it must list {', '.join(files)}, and metrics")
    children = []
    for name, entry in entries.items():
        if name not in files and not (_CHILD.fullmatch(name) and name.endswith(TENSOR_FILE)):
            child, _, rest = name.partition("/")
            if not _CHILD.fullmatch(child) or rest != MANIFEST:
                raise BurnishError(f"{path} lists {name!r}, which cannot be a part of a checkpoint")
            _check_no_link(folder / child)
            children.append(child)
        _verify(folder / name, entry)
        if name.startswith("frozen-") and name != FROZEN.format(entry["sha256"]):
            raise BurnishError(f"{path} lists {name!r}, which is not the name of its content")
    return manifest, children


def _check_no_link(path: Path) -> None:
    if is_link(path):
        raise BurnishError(f"{path} is a symbolic link, which a checkpoint must not hold")


def _verify(path: Path, entry: Any) -> None:
    _check_no_link(path)
    if not path.is_file():
        raise BurnishError(f"{path} is missing, though the manifest lists it; the checkpoint is incomplete")
    if not isinstance(entry, dict) or not {"size", "sha256"} <= entry.keys():
        raise BurnishError(f"{path} has no size and sha256 in its manifest, which is malformed")
    size = path.stat().st_size
    if size != entry["size"]:
        raise BurnishError(f"{path} has {size} bytes, but {entry['size']} were written; the file is damaged")
    if size > memory():
        raise BurnishError(f"{path} has {size} bytes, more than the {memory()} of memory that this machine has")
    try:
        digest = _sha256(path)
    except OSError as error:
        raise BurnishError(f"{path} cannot be read: {error.strerror}") from error
    if digest != entry["sha256"]:
        raise BurnishError(f"{path} was changed after it was written: its sha256 differs")


def parse(path: Path, parser: Callable[[str], Any]) -> Any:
    """The text of ``path``, read by ``parser``; every error in it is one sentence."""
    try:
        return parser(_read_bytes(path).decode())
    except BurnishError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BurnishError(f"{path} is malformed: {' '.join(str(error).split())}") from error


class _Plain(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it refers to itself (*), and in a few lines that can be more than any memory")
        return super().compose_node(parent, index)


def plain_yaml(text: str) -> Any:
    """Data that are as large as their text. We write no anchors, so what has them is not ours."""
    if len(text) > LARGEST_YAML:
        raise yaml.YAMLError(f"it has {len(text)} characters, and {LARGEST_YAML} are read at most")
    loader = _Plain(text)
    try:
        return loader.get_single_data()
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    finally:
        loader.dispose()


def _read_bytes(path: Path) -> bytes:
    """Of a file of bounded size: to open a pipe, or to read a device, may take for ever."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise BurnishError(f"{path} cannot be read: it is no file, but a pipe, a device or a folder")
        if about.st_size > LARGEST_TEXT:
            raise BurnishError(f"{path} has {about.st_size} bytes, and {LARGEST_TEXT} are read at most")
        return path.read_bytes()
    except OSError as error:
        raise BurnishError(f"{path} cannot be read: {error.strerror}") from error


def memory() -> int:
    """Bytes of this machine, or as many of them as this process, or its container, may have."""
    sizes = [psutil.virtual_memory().total]
    with suppress(ImportError):  # Windows has no such limits
        import resource

        sizes.append(resource.getrlimit(resource.RLIMIT_AS)[0])
    with suppress(OSError, ValueError):  # no such file, or the word "max"
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(size for size in sizes if size > 0)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(manifest: Mapping[str, Any]) -> str:
    """The text of a manifest, ending in the hash of all that precedes it: its own bytes are guarded too."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1) + "\n"


@functools.cache
def burnish_version() -> str:
    """The version of the installed package, or "unknown" for a bare source tree."""
    try:
        return importlib.metadata.version("burnish")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def _git_revision() -> str | None:
    """Revision of the code that is running, ending in -dirty if it was edited since; None outside a work tree."""
    here = Path(__file__)
    git = ["git", "--no-optional-locks", "-C", str(here.parent)]
    try:
        # An installed package may lie inside a repository of another project, which says nothing about it.
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True, timeout=10)
        describe = [*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        return subprocess.run(describe, check=True, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
