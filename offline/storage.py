"""Storage of a replay's columns: on the device of the learner, in host memory, or in a file.

A setting names the place. With ``auto``, columns that would not fit at full size are kept elsewhere, the largest first:
in host memory where the learner is on a GPU, and in a file where host memory is too small as well. The file lies in the
folder for temporary files (``TMPDIR``), takes space as it is written, and has no name, so nothing is left of it when
the process ends.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Mapping
from enum import Enum

import torch
from torch import Tensor

from ..policies.core import prefetch
from ..policies.core.errors import BurnishError
from ..policies.core.prefetch import SHARE, sent, without_room


class Place(Enum):
    """The places where a replay's columns can be kept: the learner's device, host memory, or a file; auto: by the
    memory that is free."""

    auto = "auto"
    device = "device"
    host = "host"
    file = "file"


def places(sizes: Mapping[str, int], device: torch.device, named: Place = Place.auto) -> dict[str, Place]:
    """Name of a column -> where it is kept; ``sizes`` in bytes, of all rows that there may be. A warning says what is
    kept in a file without having been ``named`` for it."""
    folder = tempfile.gettempdir()
    if named is not Place.auto:
        where = device if named is Place.device else torch.device("cpu")
        room = shutil.disk_usage(folder).free if named is Place.file else prefetch.free_bytes(where)
        if sum(sizes.values()) > SHARE * room:
            raise BurnishError(
                f"loop.place={named.value} is to hold {_gigabytes(sizes)} of the replay, more than is free there; give "
                "a smaller loop.capacity, smaller images, or loop.place=auto"
            )
        return dict.fromkeys(sizes, named)
    chosen = dict.fromkeys(sizes, Place.device)
    host = torch.device("cpu")
    order = [(Place.device, Place.file, host)] if device.type == "cpu" else []
    order = order or [(Place.device, Place.host, device), (Place.host, Place.file, host)]
    for place, refuge, where in order:
        own = {name: size for name, size in sizes.items() if chosen[name] is place}
        chosen |= dict.fromkeys(without_room(own, where), refuge)
    spilled = {name: sizes[name] for name, place in chosen.items() if place is Place.file}
    if sum(spilled.values()) > SHARE * shutil.disk_usage(folder).free:
        raise BurnishError(
            f"a replay of this capacity needs {_gigabytes(sizes)}, more than there is in memory or in {folder}; give a "
            "smaller loop.capacity, smaller images, or another folder by the variable TMPDIR"
        )
    if spilled:
        warnings.warn(
            f"{', '.join(spilled)} of the replay may grow to {_gigabytes(spilled)}, more than memory holds, and is "
            f"kept in a file in {folder}, which is slower; a smaller loop.capacity avoids it",
            stacklevel=2,
        )
    return chosen


def _gigabytes(sizes: Mapping[str, int]) -> str:
    return f"{sum(sizes.values()) / 2**30:.1f} GiB"


def take(x: Tensor, device: torch.device, *where: Tensor) -> Tensor:
    """``x[where]`` on ``device``, wherever ``x`` is kept."""
    return sent(x[tuple(index.to(x.device) for index in where)], device)
