"""A training run from a start to a delivered policy: try the start, iterate, save, try the result, confirm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from .best import Best
from .build import CheckpointConfig, describe
from .cli.machine import say, say_delivered
from .core.config import to_data
from .core.errors import WorldError
from .core.ranks import ALONE, Ranks
from .core.types import Learns, Metrics, Saved
from .evaluator import Evaluator
from .external.table import EXTERNAL_KINDS
from .partial import completed, weights_elsewhere
from .runs.checkpoint import numbered
from .runs.interrupt import Stop
from .runs.run import FollowingRun, OnLog, Run, UnsavedRun
from .runs.training_loop import InTurns, refuse_diverged, train


class Training(Saved, Protocol):
    """A training that can be driven and resumed: one call is one iteration."""

    def iterate(self) -> Metrics: ...


@dataclass
class Improvement:
    """A training run that is ready to start. ``identity`` is what must not have changed when it is resumed."""

    training: Training
    learner: Learns
    base: Any  # the policy at the beginning, or None
    evaluator: Evaluator | None
    origin: Mapping[str, Any]
    identity: Mapping[str, Any]
    report: Callable[[], Metrics] | None = None
    iterations: int | None = None  # where an iteration is not always as many units as the last
    reached: Callable[[], int] | None = None  # units so far, likewise
    partial: bool = False  # checkpoints leave out the weights of the base
    pretrained: int = 0  # iterations after which the policy is tried once more
    ranks: Ranks = ALONE  # the processes that train together; the first writes and evaluates


def improve(
    config: Any,
    work: Improvement,
    total: int,
    *,
    per_iteration: float = 1,
    unit: str,
    keep: bool = True,
    on_log: OnLog | None = None,
    begin: Callable[[], None] | None = None,
    pause: Callable[[], bool] | None = None,
    stop: Stop | None = None,
    shown: bool = True,
) -> InTurns[int]:
    """Try the base, iterate until ``total``, try the result. ``total`` and the intervals of ``config`` count in
    ``unit``, of which an iteration is ``per_iteration``; they are rounded to whole iterations. Unless it is to be
    kept, nothing is written. ``begin`` is called when all is loaded, before the first iteration. ``pause``, asked after
    each iteration, ends this sitting as a Ctrl-C would, and without a word: the caller resumes the run. With ``stop``
    the caller is who hears a Ctrl-C, and unless it is ``shown`` there is no progress bar."""
    training, learner, evaluator = work.training, work.learner, work.evaluator
    iterations = math.ceil(total / per_iteration) if work.iterations is None else work.iterations

    def iterations_in(count: int) -> int:
        return max(1, round(count / per_iteration))

    def reached(number: int) -> int:
        return round(number * per_iteration) if work.reached is None else work.reached()

    def evaluate(number: int) -> Metrics:
        return {} if evaluator is None else evaluator(learner.policy, reached(number))

    left_out = weights_elsewhere(work.base) if work.partial else None
    paused = False

    def enough() -> bool:
        nonlocal paused
        paused = pause is not None and pause()
        return paused

    def children() -> dict[str, Any]:
        refuse_diverged(learner.policy)
        policy = {"config": describe(learner.policy, work.origin), "state": learner.policy.state_dict()}
        if isinstance(work.base, nn.Module):  # what a policy holds of the base that it refines is the base itself
            policy["frozen"] = work.base.state_dict().values()
        learnt = {"config": {}, "state": training.state_dict()}
        return {name: {**child, "elsewhere": left_out} for name, child in (("policy", policy), ("learner", learnt))}

    settings = to_data(config) | {"identity": to_data(work.identity)}
    # Other threads may round otherwise, and files may be moved; a run that was moved is still the same run.
    free = {"resume", "threads", "out", "data", "critic_from", "model_from", "track", "on"}
    workers = [
        f"env.{name}" for name in ("processes", "restart", "patience_s")
    ]  # equal seeds play the same in any number
    free |= {*workers, *(f"identity.{name}" for name in workers)}
    free |= {"policy.path", "policy.base", "method.ppo.shard", "method.inner.ppo.shard"}  # shares change no number
    free |= {f"policy.{name}" for kind in EXTERNAL_KINDS.values() for name in kind.free}
    options: dict[str, Any] = {"resume": config.resume, "changeable": free, "trackers": config.track}
    options["ranks"] = work.ranks
    # A caller who pauses tells how far it is.
    options |= {
        "progress_every_s": 10 if pause is None else None,
        "shown": shown,
        "say_fresh": pause is None,
        "counted": (total, f" {unit}", reached),
        "stop": stop,
    }
    mine = Run(config.out, settings, on_log=on_log, **options) if keep else UnsavedRun(on_log)
    with mine if work.ranks.first else FollowingRun(config.out, work.ranks) as run:
        latest = run.latest()
        if evaluator is not None and keep:
            evaluator.best = Best(config.out, work.origin, left_out)
        if latest is not None:
            kept_state = completed(latest.children["learner"].state, work.base, config.out)
            training.load_state_dict(kept_state)
        elif work.base is not None and evaluator is not None:
            with run.watch("evaluation"):
                evaluation = evaluator(work.base, 0, start=True)
            run.log(0, evaluation)
        if run.start >= iterations:
            say(f"{config.out} has reached its {total} {unit} already; nothing is trained")
        if begin is not None:
            begin()
        try:
            finished = yield from train(
                run,
                iterations,
                training.iterate,
                children,
                log_every=iterations_in(config.log_every),
                save_every=iterations_in(config.save_every),
                eval_every=iterations_in(config.eval_every) if config.eval_every else 0,
                eval_after=work.pretrained,
                evaluate=evaluate,
                report=work.report,
                pause=enough,
            )
        except WorldError as error:
            if not keep:
                raise
            saved = next(reversed(numbered(run.checkpoints)), None)
            goes_on = f"resume=true goes on from {saved}"
            raise WorldError(f"{error}; {goes_on if saved else 'nothing was saved yet (see save_every=)'}") from error
        if finished and evaluator is not None:
            evaluator.confirm(work.base, learner.policy, reached(iterations))
        paused = paused and not run.interrupted
    if not finished and not paused:
        say(f"stopped before its {total} {unit}" + ("; continue with resume=true" if keep else ""))
        return 130
    if not keep or pause is not None:
        return 0
    base = config.policy.path if isinstance(config.policy, CheckpointConfig) else None
    start = f"{{path: {base}, greedy: true}}" if getattr(config.policy, "greedy", False) else base
    words = [f"policy.base={base}"] * work.partial + [f"against={start}"] if base is not None else []
    say_delivered(config.out, work.origin.get("env"), *words)
    if evaluator is not None and evaluator.best is not None:
        say(evaluator.best.sentence())
    return 0
