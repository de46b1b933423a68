"""Pictures of recordings that memory cannot hold, in files without a name.

They are unpacked once, while a set is read. A learner then asks for frames, and the system reads them from the disk
again where it had to give their memory to something else. So episodes, windows and the batches drawn from them are, bit
for bit, those of a set in memory. The files lie in the folder for temporary files (``TMPDIR``), one for each camera; of
them nothing is left when the process ends.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..core.errors import BurnishError, reason
from ..core.files import passing

SHARE = 0.9  # of the space that is free on the disk
GIB = 2**30


def in_file(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros, in a file without a name."""
    with passing("burnish-mapped-") as path:
        return torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).view(shape)


class PictureFiles:
    """A file for each camera, into which episode after episode is laid."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], rows: int) -> None:
        """``shapes`` are (C, H, W) of each camera; ``rows`` is the number of pictures, of all episodes together."""
        folder, size = tempfile.gettempdir(), rows * sum(map(math.prod, shapes.values()))
        if size > SHARE * (free := shutil.disk_usage(folder).free):
            raise BurnishError(
                f"its pictures need {size / GIB:.3g} GiB, more than memory can hold, and {folder} has {free / GIB:.3g} "
                "free; name a folder with more room by the variable TMPDIR, or take a part of the set: burnish data "
                "convert FOLDER out=... episodes=0:100"
            )
        warnings.warn(
            f"{size / GIB:.3g} GiB of pictures are more than memory can hold; they are kept in a file in {folder}",
            stacklevel=2,
        )
        try:
            self._files = {key: in_file((rows, *shape), torch.uint8) for key, shape in shapes.items()}
        except (OSError, RuntimeError) as error:
            raise BurnishError(
                f"its {size / GIB:.3g} GiB of pictures cannot be kept in {folder}: {reason(error)}"
            ) from error
        self._next = dict.fromkeys(shapes, 0)

    def lay(self, key: str, pictures: Tensor) -> Tensor:
        """The same (T, C, H, W) pictures, in the file behind those that came before."""
        begin = self._next[key]
        self._next[key] = end = begin + len(pictures)
        self._files[key][begin:end] = pictures
        return self._files[key][begin:end]


def rows_in_file(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """All rows of a file (R, ...), and which of them the ``parts`` (T, ...) are, where these lie in one."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in parts}
    (storage, *others) = storages.values()
    if others or storage.filename is None:
        return None
    width = math.prod(parts[0].shape[1:])
    whole = torch.empty(0, dtype=parts[0].dtype).set_(storage).view(-1, *parts[0].shape[1:])
    return whole, torch.cat([torch.arange(len(x)) + int(x.storage_offset()) // width for x in parts])
