"""Policies on the Hugging Face hub: ``policy.path=owner/name`` is looked for in the local cache, and fetched into it.

JSON and safetensors alone are fetched: nothing that could run. A name that is in the cache is not asked about again, so
it stays the same policy here until the cache is renewed (``hf download owner/name``).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ..core.errors import BurnishError, reason

FETCHED = ["*.json", "*.safetensors"]
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def is_id(path: Path | str) -> bool:
    """Whether ``path`` can be meant for the hub. With a folder ``runs`` here, ``runs/missing`` is a slip."""
    return _ID.fullmatch(str(path)) is not None and not Path(path).parent.exists()


def snapshot(name: str, needed: Collection[str]) -> Path:
    """The folder of the local cache that holds the files ``needed`` of a policy."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise BurnishError(
            f"{name} is no folder here, and names of the hub need huggingface_hub; pip install 'burnish[hub]'"
        ) from error
    with suppress(OSError, ValueError):
        folder = Path(snapshot_download(name, allow_patterns=FETCHED, local_files_only=True))
        if all((folder / file).is_file() for file in needed):
            return folder
    try:
        folder = Path(snapshot_download(name, allow_patterns=FETCHED))
    except (OSError, ValueError) as error:
        raise BurnishError(
            f"{name} is no folder here and not in the cache of Hugging Face, and could not be fetched from the hub "
            f"({reason(error, 300)}); correct it, log in where it is private (hf auth login), or name a folder that "
            "holds the policy"
        ) from error
    if missing := [file for file in needed if not (folder / file).is_file()]:
        raise BurnishError(f"{name} on the hub is no policy of LeRobot: it has no {' and no '.join(missing)}")
    return folder
