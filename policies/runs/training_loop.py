"""The loop of every long training: log, evaluate, save, notice a Ctrl-C; and how long that took."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from ..core.errors import BurnishError
from ..core.types import Metrics
from .run import Run

T = TypeVar("T")
InTurns = Generator[None, None, T]  # pauses before each step, so that its caller can take several trainings forward


def train(
    run: Run,
    total: int,
    step: Callable[[], Metrics],
    children: Callable[[], Mapping[str, Mapping[str, Any]]],
    *,
    log_every: int,
    save_every: int,
    eval_every: int = 0,
    eval_after: int = 0,
    evaluate: Callable[[int], Metrics] | None = None,
    report: Callable[[], Metrics] | None = None,
    pause: Callable[[], bool] | None = None,
) -> InTurns[bool]:
    """Call ``step`` until ``total``; False if it was interrupted, or if ``pause``, asked after each step, said so
    (saved; resuming continues exactly).

    ``children`` gives what a checkpoint holds. ``eval_every`` 0 evaluates at the end only, and after step
    ``eval_after``; an evaluation is logged.
    ``report`` is asked for more whenever something is logged: what is too dear, or adds up, between two lines.
    """
    finished = run.start >= total
    for number in run.steps(total):
        yield
        metrics = step()
        last = number == total
        paused = pause is not None and pause()
        evaluation = last or number == eval_after or (eval_every > 0 and number % eval_every == 0)
        if evaluation and evaluate is not None:
            with run.watch("evaluation"):
                metrics = {**metrics, **evaluate(number)}
        if evaluation or paused or number % log_every == 0:
            run.log(number, {**metrics, **(report() if report is not None else {})})
        if last or paused or run.stopping or number % save_every == 0:
            with run.watch("saving"):
                run.save(number, children())
        finished = last
        if paused:
            break
    return finished


def refuse_diverged(policy: Any) -> None:
    """A policy of numbers that are not finite is never saved: the checkpoint before it stays the last. Of several ranks
    the first alone may have the numbers."""
    weights = policy.named_parameters() if isinstance(policy, nn.Module) else ()
    for name, x in weights:
        if not x.is_meta and not bool(torch.isfinite(x).all()):
            raise BurnishError(
                f"training has diverged: {name} of the policy is not finite, so it is not saved; lower the learning "
                "rates, or look at the data, or at what the world shows and pays"
            )


def to_end(turns: InTurns[T]) -> T:
    """The result of a training that nothing else takes turns with."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value
