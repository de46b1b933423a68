"""What a learner was given, for tests."""

from __future__ import annotations

from typing import Any

from burnish.offline.sources import Mapped
from burnish.policies.core.types import Source


def heard(source: Source) -> tuple[Source, list[dict[str, Any]]]:
    """The same source, and the list of all batches that are drawn from it from now on."""
    batches: list[dict[str, Any]] = []

    def keep(batch: dict[str, Any]) -> dict[str, Any]:
        batches.append(batch)
        return batch

    return Mapped(source, keep), batches
