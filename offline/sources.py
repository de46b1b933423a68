"""Sources of batches: ``Learner.update(source)`` begins with ``batch = source.sample()``.

    Mixture     an online replay, or prior data beside it: what the loops hand to off-policy and offline learners
    Rows        a batch that exists already: the rollout of an on-policy loop, or what a wrapper has sampled
    Mapped      another source, whose batches are changed on the way
    ahead(...)  another source, whose next batch is drawn while the last one is learnt from

A learner that needs sequences, the neighbours of a decision, or another number of decisions asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..policies.core.errors import BurnishError
from ..policies.core.prefetch import Prefetch
from ..policies.core.tree import stack
from ..policies.core.types import Memory, Source
from .replay import ALONE, Batch

OBSERVED = ("obs", "next_obs")


class Mixture:
    """``share`` of each batch from ``prior``, the rest from ``online`` (Ball et al. 2023, RLPD, arXiv 2302.02948).

    With ``share`` None every decision of both is as likely, as if they lay in one replay (FQL, arXiv 2502.02538). Only
    the columns that both hold are returned, on the device of ``online``; while ``online`` is empty all comes from
    ``prior``. Prior data may hold more observations than ``online`` does, but not fewer. ``batch`` and ``n_step`` are
    what ``sample`` uses unless it is told otherwise.
    """

    def __init__(
        self, online: Memory, prior: Memory | None = None, *, batch: int, n_step: int = 1, share: float | None = 0.5
    ) -> None:
        self.online, self.prior = online, prior
        self.batch, self.n_step, self.share = batch, n_step, share

    def sample(
        self,
        n: int | None = None,
        *,
        n_step: int | None = None,
        sequence: int = 1,
        around: tuple[int, int] = ALONE,
    ) -> Batch:
        count = self.batch if n is None else n
        summed = 1 if sequence > 1 else self.n_step
        options: dict[str, Any] = {"n_step": summed if n_step is None else n_step, "sequence": sequence}
        options["around"] = around
        return self._read(count, lambda memory, rows: memory.sample(rows, **options))

    def several(self, times: int) -> Batch:
        """(times, B, ...): what ``sample`` would return one after the other. Of two replays, each is read at once."""
        if self.share is None and self.prior is not None:
            return stack([self.sample() for _ in range(times)])
        return self._read(self.batch, lambda replay, rows: replay.several(rows, times, n_step=self.n_step), 1)

    def _read(self, count: int, read: Callable[[Any, int], Batch], dim: int = 0) -> Batch:
        """``count`` rows, of the memories that they come from; ``dim`` of what is read counts rows."""
        if self.prior is None or (self.share == 0 and len(self.online)):
            return read(self.online, count)
        if len(self.online) == 0:
            return read(self.prior, count)
        if self.share is None:
            # How many of a batch are old is chance: a rounded share would leave out a replay that has just begun.
            union = len(self.prior) + len(self.online)
            picked = torch.randint(union, (count,), generator=self.prior.generator, device=self.prior.device)
            old = int((picked < len(self.prior)).sum())
        else:
            old = round(self.share * count)
        return joined(read(self.prior, old), read(self.online, count - old), dim)


def ahead(source: Source, memories: Sequence[Memory], count: int) -> Iterator[Prefetch]:
    """A source for each of ``count`` updates in a row, during which nothing is stored."""
    with ThreadPoolExecutor(1) as thread:
        drawn = Prefetch(source.sample, [memory.generator for memory in memories], memories[0].device, thread=thread)
        for left in reversed(range(count)):
            drawn.more = left > 0
            yield drawn
        drawn.put_back()


class Rows:
    """One batch, which every ``sample`` returns as it is."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def sample(self, n: int | None = None, **options: Any) -> Batch:
        """``around`` is taken from what the batch holds; anything else cannot be had of a batch that is there."""
        if n is not None or options.keys() - {"around"}:
            raise BurnishError("this source is one fixed batch; sample() takes it whole")
        return self.batch


class Mapped:
    """``source``, with ``change`` applied to each of its batches."""

    def __init__(self, source: Source, change: Callable[[Batch], Batch]) -> None:
        self.source, self.change = source, change

    def sample(self, n: int | None = None, **options: Any) -> Batch:
        return self.change(self.source.sample(n, **options))


def joined(old: Batch, new: Batch, dim: int = 0) -> Batch:
    """One batch of two, whose dimension ``dim`` counts rows: all observations of ``new`` and the columns that both
    hold, on the device of ``new``."""
    out: Batch = {}
    for key in (key for key in new if key in old):
        was, x = old[key], new[key]
        missing = sorted(x.keys() - was.keys()) if key in OBSERVED else []
        if missing:
            raise BurnishError(f"the prior data lacks {', '.join(missing)}, which the decisions of this method hold")
        out[key] = joined(was, x, dim) if isinstance(x, dict) else torch.cat([was.to(x.device), x], dim)
    return out
