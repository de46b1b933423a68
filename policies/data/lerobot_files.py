"""Files of a LeRobot set that may be untrusted: opened where they are files of the set, read where they are small.

A few kilobytes of parquet can hold gigabytes, because what repeats is stored once. So the numbers that a file promises
are compared with those that ``meta/info.json`` promises before any of them is read, and while they are read the bytes
are counted: a footer can lie too. ``SLACK`` times what the features need is allowed (double precision instead of single
is 2, offsets of lists 2 more), and ``ROOM`` beside it for names and small tables.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from string import Formatter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..core.errors import BurnishError, reason
from ..core.files import is_plain
from ..runs.manifest import memory

LARGEST_INFO = 1 << 24  # bytes; parsed it may be thirty times as large
SLACK, ROOM = 4, 1 << 26  # a factor; bytes
ROWS = 1024  # of which the bytes are counted at a time
# A width would do, and a million would be a path of a megabyte.
WIDTH = re.compile(r"(0?[0-9]{1,2})?d?")


def regular(root: Path, name: str | Path, largest: int | None = None) -> Path:
    """A file of the set, of bounded size: a link may lead to any other, and a pipe or a device may be read for ever."""
    path = root / name
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise BurnishError(f"the dataset {root} has a {name} that is no file")
    if not is_plain(path, root):
        raise BurnishError(f"the dataset {root} has a link in the place of {name}; put there what it leads to")
    if largest is not None and found.st_size > largest:
        raise BurnishError(f"the dataset {root} has a {name} of {found.st_size} bytes, and {largest} are read at most")
    return path


def fingerprint(data: str | Path) -> str:
    """Which dataset it is, wherever it lies: the hash of its description and of its table of episodes."""
    root, digest = Path(data), hashlib.sha256()
    for path in sorted((root / "meta").rglob("*")):
        if path.is_file():
            name = path.relative_to(root).as_posix()
            digest.update(name.encode())
            with open(regular(root, name), "rb") as file:
                hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def read_info(root: Path) -> Any:
    """The content of a set's ``meta/info.json``; ValueError where it is nested too deeply."""
    try:
        return json.loads(regular(root, "meta/info.json", LARGEST_INFO).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


NUMBERS = ("chunk_index", "file_index", "episode_chunk", "episode_index")  # in the paths of info.json


def checked_template(root: Path, info: Mapping[str, Any], name: str, words: Sequence[str] = ()) -> str:
    """A path of ``info.json``: it names files of this folder, by numbers and ``words``, and nothing else."""
    template = info.get(name)
    try:
        parts = list(Formatter().parse("{" if template is None else template))
        fits = all(
            part is None
            or (not how and ((part in NUMBERS and WIDTH.fullmatch(form or "")) or (part in words and not form)))
            for _, part, form, how in parts
        )
        inside = PurePosixPath("".join(text for text, *_ in parts))
    except (TypeError, ValueError):
        fits, inside = False, PurePosixPath("..")
    if not fits or inside.is_absolute() or ".." in inside.parts or "\0" in str(inside):
        raise BurnishError(f"the dataset {root} has a malformed {name} in info.json: {template!r:.200}")
    return str(template)


@contextmanager
def _readable(root: Path, name: str | Path) -> Iterator[None]:
    """Errors of the system and of pyarrow say which file cannot be read."""
    try:
        yield
    except FileNotFoundError as error:
        raise BurnishError(f"the dataset {root} lacks {name}") from error
    except (OSError, MemoryError, pa.ArrowException) as error:
        raise BurnishError(f"the dataset {root} has a damaged or truncated {name} ({reason(error)})") from error


def read_lines(root: Path, name: str, most: int) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, at most ``most`` of them."""
    with _readable(root, name):
        text = regular(root, name, LARGEST_INFO).read_text(encoding="utf-8")
    try:
        found = [json.loads(line) for line in text.split("\n")[: most + 1] if line.strip()]
    except (RecursionError, ValueError) as error:
        raise BurnishError(f"the dataset {root} has a {name} that is not JSON: {error}") from None
    if len(found) > most or not all(isinstance(each, dict) for each in found):
        raise BurnishError(f"the dataset {root} has a {name} of other lines than info.json promises")
    return found


def read_table(
    root: Path, name: str | Path, needed: Sequence[str] | None, *, rows: int, width: int, group: int | None = None
) -> pa.Table:
    """The columns ``needed``, or all, of one parquet file or of one row group in it. It may have ``SLACK`` times
    ``rows`` rows, of ``width`` bytes each in memory."""
    largest = min(SLACK * rows * width + ROOM, memory() // 2)
    with _readable(root, name), pq.ParquetFile(regular(root, name), page_checksum_verification=True) as parquet:
        missing = sorted(set(needed or ()) - set(parquet.schema_arrow.names))
        if missing:
            raise BurnishError(f"the dataset {root} lacks the columns {missing} in {name}")
        groups = range(parquet.num_row_groups) if group is None else [group]
        parts = [parquet.metadata.row_group(i) for i in groups]
        found = sum(part.num_rows for part in parts)
        if found > SLACK * rows + 1000:
            raise _bomb(root, name, f"{found} rows", f"info.json promises {rows}")
        # Repetitions are stored once, so the numbers of values count too.
        columns = [part.column(i) for part in parts for i in range(part.num_columns)]
        wanted = [x for x in columns if needed is None or _within(x.path_in_schema, needed)]
        size = sum(max(x.total_uncompressed_size, x.num_values * WIDTHS.get(x.physical_type, 0)) for x in wanted)
        if size > largest:
            raise _bomb(root, name, f"{size} bytes", f"{largest} are allowed for what info.json promises")
        batches, size = [], 0
        for batch in parquet.iter_batches(ROWS, row_groups=list(groups), columns=None if needed is None else [*needed]):
            size += batch.nbytes
            if size > largest:
                raise _bomb(root, name, f"more than {size} bytes", f"{largest} are allowed for what info.json promises")
            batches.append(batch)
        schema = batches[0].schema if batches else parquet.schema_arrow
        return pa.Table.from_batches(batches, schema)


WIDTHS = {"BOOLEAN": 0.125, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12, "BYTE_ARRAY": 4}


def _within(path: str, needed: Sequence[str]) -> bool:
    """Names of columns have dots in them, and so have the paths of what is nested in them."""
    return any(path == name or path.startswith(f"{name}.") for name in needed)


def _bomb(root: Path, name: str | Path, found: str, allowed: str) -> BurnishError:
    return BurnishError(f"the dataset {root} has a {name} that unpacks to {found}, but {allowed}")
