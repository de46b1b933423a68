"""Learning from fixed data: one update after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..policies.core.prefetch import Prefetch
from ..policies.core.types import Learner, Metrics
from ..policies.improve import Training
from .replay import Replay
from .sources import Mixture

# Called after each iteration with its number and metrics; a true answer ends the loop.
Hook = Callable[[int, Metrics], bool | None]


class Offline:
    """One update per iteration. The replay's generator decides which rows, so it is part of the state; its content is
    not, since it does not change. From elsewhere than the learner's memory batches are fetched ahead."""

    def __init__(self, learner: Learner, replay: Replay, *, batch: int, n_step: int = 1) -> None:
        self.learner, self.replay = learner, replay
        source = Mixture(replay, batch=batch, n_step=n_step)
        self.source = Prefetch(source.sample, [replay.generator], replay.device, more=replay.away)

    def iterate(self) -> Metrics:
        return self.learner.update(self.source)

    def state_dict(self) -> dict[str, Any]:
        self.source.put_back()
        return {"learner": self.learner.state_dict(), "rows": self.replay.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.put_back()
        self.learner.load_state_dict(state["learner"])
        self.replay.generator.set_state(state["rows"].cpu())


def repeat(training: Training, iterations: int, hooks: Sequence[Hook] = ()) -> Metrics:
    """The last metrics of up to ``iterations`` iterations."""
    metrics: Metrics = {}
    for number in range(1, iterations + 1):
        metrics = training.iterate()
        answers = [hook(number, metrics) for hook in hooks]  # each is asked, also when an earlier one says stop
        if any(answers):
            break
    return metrics
