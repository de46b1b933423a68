"""Everything that Burnish writes, locks, moves or removes goes through here, and none of it follows a planted link.

A run, a comparison or a dataset may be untrusted, with links planted where Burnish writes. A folder that
the user named is believed, also where links lead to it: that is the user's own word. Every folder inside it comes from
``below``, which makes it or refuses a link in its place. In such a folder

* a file is written beside its place and renamed: that replaces a link, symbolic or hard, and leaves what it led to;
* a file that grows is made anew, or opened without following links and refused if it has other names;
* a library that opens paths itself finds its name free (``vacant``) in a folder that was just looked at;
* removing and moving act on names, never on what a link under that name leads to.

``below`` looks and the writer opens a moment later. So this protects from what lies there, and not from a program that
may write to the folder at the same time: with it even a lock would be no protection.

Windows has no O_NOFOLLOW, no flush of folders, and junctions besides symbolic links. So a file that was opened is
compared with what has its name then, and a junction counts as a link; a power cut there may undo a rename.

It imports the standard library alone until a lock is asked for, because a robot's own programs write files too.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO

from .errors import BurnishError

WINDOWS = os.name == "nt"
# Without following a link, without waiting should it be a pipe, and not for children: as far as the system knows that.
CAREFUL = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))
_NAME_SURROGATE = 0x20000000  # the bit in a tag of Windows of all that stands for another place: links and junctions


def named(folder: Path | str) -> Path:
    """A folder that the user named, made if it is missing."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def new(folder: Path) -> Path:
    """A folder where nothing was."""
    folder.mkdir()
    return folder


def below(folder: Path | str, *names: str) -> Path:
    """``folder/name/...``, each made if it is missing and refused if it is a link. ``folder`` is believed."""
    path = named(folder)
    for name in names:
        path = refuse_link(path / name)
        path.mkdir(exist_ok=True)
    return path


def is_link(path: Path) -> bool:
    """A symbolic link, or a junction of Windows; False for a path that does not exist."""
    try:
        about = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISLNK(about.st_mode) or bool(getattr(about, "st_reparse_tag", 0) & _NAME_SURROGATE)


def is_plain(path: Path, root: Path | None = None) -> bool:
    """Whether there is a file at ``path`` to which no link leads, from ``root`` on (the folder in which it is). In the
    cache of Hugging Face files are links to those beside its folders."""
    root = root or path.parent
    home, found = root.resolve(), path.resolve()
    cached = home.parent.name == "snapshots" and found.parent == (home.parent.parent / "blobs").resolve()
    return path.is_file() and (cached or found == home / path.relative_to(root))


def refuse_link(path: Path) -> Path:
    """``path`` itself, which may be missing."""
    if is_link(path):
        raise BurnishError(
            f"{path} is a link to another place, and inside a folder that may be untrusted nothing is written "
            "through links; remove it, or put there what it leads to"
        )
    return path


def for_guests(folder: Path | str, name: str) -> Path:
    """``below``, for a library that makes a folder of its own there each time, and lays links to it."""
    path = below(folder, name)
    for inner in path.iterdir():
        if is_link(inner) and not Path(os.path.normpath(path / inner.readlink())).is_relative_to(path):
            refuse_link(inner)
    return path


def require_writable(folder: Path | str) -> None:
    """Make ``folder`` and write to it once: hours of work must not end at a disk that never could take them."""
    with tempfile.TemporaryFile(dir=named(folder)):
        pass


def write_new(path: Path, content: str | bytes) -> None:
    """A file where nothing was, on the disk when this returns."""
    with open(path, "xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        _flush(file)


def write_folder(folder: Path | str, files: Mapping[str, str | bytes]) -> Path:
    """A folder where nothing was, with these files (``name`` or ``folder/name``), whole or not at all."""
    folder = Path(folder).absolute()
    if os.path.lexists(folder):
        raise BurnishError(f"{folder} exists already and is not overwritten; choose another name")
    scratch = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    try:
        named(folder.parent)
        new(scratch)
        for name, content in files.items():
            named((scratch / name).parent)
            write_new(scratch / name, content)
        return move(scratch, folder)
    finally:
        remove(scratch)


@contextmanager
def replacing(path: Path | str) -> Iterator[IO[bytes]]:
    """A file for ``path``: a reader, or a process that follows a killed one, finds the old content or the new one."""
    path = Path(path)
    scratch = vacant(path.with_name(f".{path.name}.scratch"))
    try:
        with open(scratch, "xb") as file:
            yield file
            _flush(file)
        move(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    sync(path.parent)


def replace(path: Path | str, content: str | bytes) -> None:
    """The file at ``path`` with new content (text as UTF-8), whole or not at all."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def fresh(path: Path) -> TextIO:
    """An empty file in place of what is there, for text that is to be seen while it grows."""
    return open(vacant(path), "x", encoding="utf-8", newline="\n")


def growing(path: Path) -> TextIO:
    """A file to append to. One that has a second name would grow under that too."""
    descriptor = _opened(path, os.O_WRONLY | os.O_APPEND)
    if os.fstat(descriptor).st_nlink != 1:
        os.close(descriptor)
        raise BurnishError(
            f"{path} has a second name elsewhere, under which it would grow too; put a copy of it in its place"
        )
    return open(descriptor, "a", encoding="utf-8", newline="\n")


@contextmanager
def locked(path: Path, taken: str | None = None) -> Iterator[None]:
    """``taken`` is what is said if another process holds it; without that, its end is waited for. The kernel frees a
    lock with its process, however that ends; the file stays, and is never changed."""
    descriptor = lock(path, taken)
    try:
        yield
    finally:
        os.close(descriptor)


def lock(path: Path, taken: str | None) -> int:
    """A descriptor that holds the lock until it is closed. A file system that knows no locks counts as free."""
    from filelock import lock_descriptor

    descriptor = _opened(path, os.O_RDWR)
    free = True
    with suppress(OSError):
        free = lock_descriptor(descriptor, blocking=taken is None)
    if taken is not None and not free:
        os.close(descriptor)
        raise BurnishError(taken)
    return descriptor


@contextmanager
def passing(prefix: str) -> Iterator[Path]:
    """A new file in the folder for temporary files, whose name is gone afterwards; who maps it keeps its content.
    Windows keeps the name of a file while it is mapped, so that the next call removes it."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*") if WINDOWS else ():
        with suppress(PermissionError):
            os.unlink(left)
    handle, name = tempfile.mkstemp(prefix=prefix)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        with suppress(PermissionError):
            os.unlink(name)


@contextmanager
def temporary(prefix: str) -> Iterator[Path]:
    """A new folder, of this user alone, among those for temporary files; it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield Path(folder)


def vacant(path: Path) -> Path:
    """``path``, once no file and no link has that name."""
    path.unlink(missing_ok=True)
    return path


def remove(path: Path) -> None:
    """Removes the file or folder of this name, of a link the link alone. A folder goes as far as that is permitted."""
    if path.is_dir() and not is_link(path):
        shutil.rmtree(path, ignore_errors=True)  # which follows no links either
    else:
        path.unlink(missing_ok=True)


def move(source: Path, target: Path) -> Path:
    """In one act. A file or link at ``target`` is replaced."""
    os.replace(source, target)
    return target


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for a file that never changes, or a copy where this file system, or its owner, refuses that. A
    symbolic link stays one."""
    try:
        os.link(source, target, follow_symlinks=False)
    except (OSError, NotImplementedError):
        shutil.copy2(source, target, follow_symlinks=False)


def shared_memory() -> IO[bytes]:
    """An empty file without a name, to be mapped by several processes; it goes with the last of them."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("burnish"), "w+b")
    return tempfile.TemporaryFile()


def mapped(memory: IO[bytes], size: int) -> mmap.mmap:
    """The open file ``memory``, set to ``size`` bytes and mapped into this process."""
    memory.truncate(size)
    return mmap.mmap(memory.fileno(), size)


def sync(path: Path) -> None:
    """A rename is durable only once the files *and* the folder that names them are on the disk. Windows flushes no
    folders, and files only for who may write to them."""
    if WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(stream: IO[Any]) -> None:
    """``stream`` writes to the null device from now on, its buffer included."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _flush(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _opened(path: Path, flags: int) -> int:
    """A descriptor of the file that has this name, made if it is missing."""
    refuse_link(path)
    descriptor = os.open(path, flags | os.O_CREAT | CAREFUL, 0o666)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise BurnishError(f"{path} is no file, but a pipe or a device, so nothing is written to it; remove it")
        if not os.path.samestat(about, os.lstat(refuse_link(path))):
            raise BurnishError(f"{path} was replaced while it was opened, so nothing is written to it; try again")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
