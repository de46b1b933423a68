"""Batches from a disk or from host memory: a thread draws the next one while the last is learnt from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import psutil
import torch
from torch import Tensor

from .tree import leaves

SHARE = 0.6  # of the memory that is free: a column that grows is there twice for a moment, and networks need some


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def without_room(sizes: dict[str, int], device: torch.device) -> set[str]:
    """The largest columns, of as many bytes, without which the others fit into the memory of ``device``."""
    left, room = dict(sizes), SHARE * free_bytes(device)
    while left and sum(left.values()) > room:
        left.pop(max(left, key=lambda name: left[name]))
    return sizes.keys() - left.keys()


def sent(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``; from host memory to a GPU through pinned memory."""
    if x.device.type == device.type:  # a replay on cuda lies on cuda:0
        return x
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class Prefetch:
    """The batches, trees of tensors on ``device``, that ``draw`` draws from ``generators``, bit for bit: a thread draws
    the next while ``more`` follow. One that was drawn and is not asked for is put back, with the generators as they
    were before it."""

    def __init__(
        self,
        draw: Callable[..., dict[str, Any]],
        generators: Sequence[torch.Generator],
        device: torch.device,
        *,
        more: bool = True,
        thread: Executor | None = None,
    ) -> None:
        self.draw, self.generators, self.more = draw, generators, more
        self.thread = ThreadPoolExecutor(1) if thread is None else thread
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: tuple[tuple[Any, dict[str, Any]], list[Tensor], Future[dict[str, Any]]] | None = None

    def sample(self, *given: Any, **options: Any) -> dict[str, Any]:
        if self._next is not None and self._next[0] == (given, options):
            batch, self._next = self._arrived(self._next[2].result()), None
        else:
            self.put_back()
            batch = self.draw(*given, **options)
        if self.more:
            if self.stream is not None:  # which sees what was stored so far
                self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            before = [generator.get_state() for generator in self.generators]
            self._next = (given, options), before, self.thread.submit(self._drawn, given, options)
        return batch

    def put_back(self) -> None:
        if self._next is not None:
            self._next[2].result()
            for generator, state in zip(self.generators, self._next[1], strict=True):
                generator.set_state(state)
            self._next = None

    def _drawn(self, given: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        with torch.cuda.stream(self.stream):
            return self.draw(*given, **options)

    def _arrived(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.stream is not None:
            now = torch.cuda.current_stream(self.stream.device)
            now.wait_stream(self.stream)
            for x in leaves(batch):
                x.record_stream(now)
        return batch
