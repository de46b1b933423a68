"""Several seeds of one method in one process, which learn together: ``burnish finetune seeds=5``.

Each seed is the run that it would be alone, to rounding: with its own worlds, memory, draws, evaluations and run
folder, in which it can also go on alone. Worlds are stepped and agents act seed by seed; the updates of all seeds are
one batched computation (`offline/stacked.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..offline.actor_critic import ActorCritic
from ..offline.learner import Wrapping
from ..offline.stacked import Stacked, require_stackable
from ..policies.core import files
from ..policies.core.errors import BurnishError
from ..policies.core.tree import index
from ..policies.core.types import Metrics
from ..policies.improve import Improvement, improve
from ..policies.runs.interrupt import Stop, interruptible
from .loops import Loop, OffPolicy
from .table import method_name


def each_seed(config: Any) -> Iterator[Any]:
    """The settings of each of the runs, whose folders are OUT-0, OUT-1, ..., as in a comparison."""
    for seed in range(config.seed, config.seed + config.seeds):
        folder = files.refuse_link(Path(f"{Path(config.out)}-{seed}"))
        yield replace(config, seed=seed, seeds=1, out=str(folder))


def refine_together(parts: Iterable[tuple[Any, Improvement, Loop[Any]]]) -> int:
    """The runs of several seeds, each of its settings, its improvement and its loop; exit status. A run that is behind
    the others, because a sitting ended while they saved, first catches up alone."""
    asked, joint = Stop(), None
    members = [Member(*each, asked, shown=not place) for place, each in enumerate(parts)]
    with interruptible() as stop, ExitStack() as stack:
        for member in members:
            stack.enter_context(closing(member.turns))
        live = [member for member in members if member.proceed()]
        while live:
            least = min(member.progress for member in live)
            due = [member for member in live if member.progress == least]
            if len(due) < max(2, len(live)):
                for member in due:
                    member.metrics = member.loop.iterate()
            else:
                joint = joint or Stacked([member.learner for member in due])
                iterate_together(due, joint)
            asked.requested = stop.requested  # all of them see the same
            live = [member for member in live if member not in due or member.proceed()]
    return max(member.status for member in members)


class Member:
    """One of the seeds. Its run pauses before each iteration, which is made from outside."""

    status = 0

    def __init__(self, config: Any, work: Improvement, loop: Loop[Any], stop: Stop, *, shown: bool) -> None:
        self.loop, self.learner = _batchable(config, loop)
        self.metrics: Metrics = {}  # of the iteration that was made last
        work, options = replace(work, training=self), {"stop": stop, "shown": shown}
        per_iteration = loop.decisions_per_iteration
        self.turns = improve(config, work, config.total, per_iteration=per_iteration, unit="decisions", **options)

    @property
    def progress(self) -> tuple[int, int]:
        return self.loop.statistics.decisions, self.loop.gradient_steps

    def proceed(self) -> bool:
        """On to where the next iteration is due; False if there is none."""
        try:
            next(self.turns)
        except StopIteration as end:
            self.status = end.value
            return False
        return True

    def iterate(self) -> Metrics:
        return self.metrics

    def state_dict(self) -> dict[str, Any]:
        return self.loop.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loop.load_state_dict(state)


def iterate_together(members: Sequence[Member], joint: Stacked) -> None:
    """One iteration of each, with the updates made by ``joint``."""
    loops = [member.loop for member in members]
    sources: list[Any] = [loop.source for loop in loops]
    (count,) = {loop.advance() for loop in loops}  # all are as far as each other, and so they owe as much
    with ExitStack() as watches:
        for loop in loops:
            watches.enter_context(loop.watch("learning"))
            loop.gradient_steps += count
        batch, found = joint.learn(sources, count)
        for place, member in enumerate(members):
            outer, metrics = member.loop.learner, index(found, place)
            wrapped = isinstance(outer, Wrapping) and count > 0
            member.metrics = {**metrics, **(outer.extra_metrics(index(batch, place), metrics) if wrapped else {})}


def _batchable(config: Any, loop: Loop[Any]) -> tuple[OffPolicy[Any], ActorCritic]:
    """The loop, and the SAC or TD3 in it; other methods are refused."""
    outer = loop.learner
    inner = outer.inner if isinstance(outer, Wrapping) and type(outer).update is Wrapping.update else outer
    if type(loop) is OffPolicy and isinstance(inner, ActorCritic):
        require_stackable(inner)
        return loop, inner
    raise BurnishError(
        f"method={method_name(config.method)} with these settings does not learn by SAC or TD3 alone, whose updates "
        "several seeds can make together; take seeds=1 for each seed, or `burnish compare`"
    )
