"""Several processes as one training, as `torchrun` starts them: data-parallel, with the numbers of one process.

All ranks hold the same weights and the same generators, and draw the same batch. Each computes the rows that are its
own, every ``size``-th from ``rank`` on; torch's DistributedDataParallel averages the gradients. So the weights differ
from those of one process by rounding alone (and by dropout, of which each rank draws its own), and a checkpoint does
not know how many ranks there were. The first rank alone writes, evaluates and speaks. Where worlds are played, they are
shared out in the same way (`finetune/data_parallel.py`).
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from .errors import BurnishError, reason
from .seed import SHARE, Generator, SharedGenerator
from .threads import started_by_torchrun

# The first rank may evaluate for hours while the others wait. A rank that dies is noticed by its closed connection.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Ranks:
    """One process among ``size``; by default it is alone, and nothing below costs anything."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes, evaluates and speaks."""
        return self.rank == 0

    def require_share(self, count: int, name: str) -> None:
        """``count`` rows or worlds must divide among the ranks."""
        if count % self.size:
            raise BurnishError(f"{name}={count} does not divide among {self.size} ranks; take a multiple of them")

    def rows(self, index: Tensor) -> Tensor:
        """The rows of a batch that are this rank's."""
        return index[self.rank :: self.size]

    def generator(self, generator: torch.Generator) -> Generator:
        """The same draws for this rank's rows as one process makes for all rows."""
        return generator if self.size == 1 else SharedGenerator(generator, self.rank, self.size)

    def averaged(self, network: nn.Module, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``loss`` of this rank's rows, on whose way back the gradients of ``network`` become the mean of all ranks'.
        Each rank must call it equally often."""
        if self.size == 1:
            return loss
        from torch.nn.parallel import DistributedDataParallel

        # The same parameters have a gradient in every update; which ones is found in the first.
        return DistributedDataParallel(_Loss(network, loss), static_graph=True)

    @contextlib.contextmanager
    def own_worlds(self) -> Iterator[None]:
        """Worlds, controllers and learners that are made meanwhile belong to a training of all ranks: of the worlds
        this rank has every ``size``-th, as of the rows of a batch (``sharing``)."""
        before = SHARE.set((self.rank, self.size))
        try:
            yield
        finally:
            SHARE.reset(before)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Each becomes the sum of those of all ranks, in place and in one exchange."""
        if self.size == 1:
            return
        total = torch.cat([x.flatten() for x in tensors])
        torch.distributed.all_reduce(total)
        for x, part in zip(tensors, total.split([x.numel() for x in tensors]), strict=True):
            x.copy_(part.view_as(x))

    def exchanged(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, in their order. On the CPU."""
        sizes = self._all(torch.tensor(len(data)))
        room = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        room[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [x[: int(size)].numpy().tobytes() for x, size in zip(self._all(room), sizes, strict=True)]

    def delivered(self, held: Tensor, owner: Tensor) -> Tensor:
        """The rows of a batch that are this rank's, each from the rank that is its ``owner`` (B,), on the CPU. ``held``
        are the rows that this rank owns, in the order of the batch."""
        to = (torch.arange(len(owner)) % self.size)[owner == self.rank]
        origin = self.rows(owner)
        sent = held[to.argsort(stable=True).to(held.device)].contiguous()
        found = held.new_empty(len(origin), *held.shape[1:])
        received, given = (x.bincount(minlength=self.size).tolist() for x in (origin, to))
        torch.distributed.all_to_all_single(found, sent, received, given)
        back = torch.empty_like(found)
        back[origin.argsort(stable=True).to(held.device)] = found
        return back

    def _all(self, x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(found, x)
        return found

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the ranks of a number that each has of its own rows."""
        if self.size == 1:
            return value
        total = value.detach().clone()
        torch.distributed.all_reduce(total)
        return total / self.size

    def any(self, flag: bool) -> bool:
        """Whether it holds on any rank."""
        return bool(self.most(flag))

    def most(self, number: int) -> int:
        """The largest that a rank has. On the CPU, so that no GPU is waited for."""
        if self.size == 1:
            return number
        found = torch.tensor(int(number))
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return int(found)

    def of_first(self, number: int) -> int:
        """The number that the first rank has."""
        if self.size == 1:
            return number
        sent = torch.tensor(number)
        torch.distributed.broadcast(sent, 0)
        return int(sent)


ALONE = Ranks()


def sharing() -> Ranks:
    """The ranks to which belongs what is made now (``own_worlds``): outside of that, one alone."""
    return Ranks(*SHARE.get())


def whole(x: Tensor) -> Tensor:
    """All of a tensor of which each rank holds a share; each must ask."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # pyright: ignore


class _Loss(nn.Module):
    """A loss as the forward pass of a module, which is what DistributedDataParallel takes. Buffers are left out, since
    they are alike already."""

    def __init__(self, network: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.trained, self.loss = nn.ParameterList(p for p in network.parameters() if p.requires_grad), loss

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        return self.loss(*arguments, **named)


@contextlib.contextmanager
def joined(device: str) -> Iterator[tuple[Ranks, str]]:
    """The ranks of this training and the device of this one: ``cuda`` is the GPU with the number of the process."""
    if started_by_torchrun() == 1:
        yield ALONE, device
        return
    if device not in ("cpu", "cuda"):
        raise BurnishError(f"device={device} is one device for several ranks; say device=cuda, and each takes its own")
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus:
        if (number := int(os.environ["LOCAL_RANK"])) >= gpus:
            raise BurnishError(f"rank {number} of this machine finds {gpus} GPUs; start no more ranks than there are")
        device = f"cuda:{number}"
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=PATIENCE)
    ranks = Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
    try:
        with contextlib.nullcontext() if ranks.first else contextlib.redirect_stdout(io.StringIO()):
            yield ranks, device
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and not any(x in str(error) for x in ("gloo", "NCCL")):
            raise
        raise BurnishError(
            f"rank {ranks.rank} of {ranks.size} has lost another rank ({reason(error)}); the same command with "
            "resume=true goes on from the last checkpoint, with as many ranks as there are"
        ) from error
    torch.distributed.destroy_process_group()
