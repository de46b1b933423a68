"""Advice on a run that is about to teach the wrong thing, from what it has seen itself.

**The entropy trap.** An agent of maximum entropy is paid alpha times its entropy at every decision (Haarnoja et al.
2018, arXiv 1801.01290, equation 1). Where a task pays nothing until success, and success ends the episode, finishing is
worth its reward once, but going on is worth alpha H / (1 - gamma): an agent that gains more by going on learns to avoid
the goal. Training looks healthy (the return with entropy rises) while success falls. A cost of time, or targets without
the bonus, takes the reason away. A world that reports no success may still pay for the end of an episode. If it has
paid nothing yet, there is nothing to advise.

**The quitting trap** is its mirror image. Where every decision costs something, and an episode can end by failing (the
thing to be pushed is out of reach), failing soon costs less than trying on: an agent learns to fail. A reward of
progress, or none until success, takes the reason away.

**Waiting.** A run with acting processes also says how many of them are worth it, if one side waits most of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..offline.replay import Replay
from ..policies.core.tree import index
from ..policies.core.types import Learns, Metrics
from .loops import Loop
from .processes.asynchronous import Asynchronous

ROWS = 4096  # latest decisions that are looked at
SAMPLE = 256  # of them, on which the entropy is measured
EPISODES = 32  # whose success is compared with that of other ones
WAITS = 0.5  # share of its time that the learner, or the actors, wait, from which on it is worth a sentence
FAILURES = 0.1  # share of the episodes that end by failing, from which on it is worth a sentence


@torch.no_grad()
def entropy_trap(learner: Learns, replay: Replay, *, success: bool = True) -> str | None:
    """A sentence, if finishing is worth less than going on to ``learner`` as it is now; else None. ``success``: the
    world reports it.

    It speaks of rewards of which none is negative and none was earned before a termination: all else gives a reason to
    go on, or to finish, of its own."""
    if learner.entropy_bonus is None or len(replay) == 0:
        return None
    recent = replay.latest(-(-ROWS // replay.num_envs))
    reward, finished = recent["reward"].flatten(), recent["terminated"].flatten()
    on = recent["discount"].flatten()[~finished]
    if bool((reward < 0).any()) or bool((reward[~finished] != 0).any()) or not len(on):
        return None
    paid = bool((reward > 0).any())
    if not paid and not success:
        return None
    best = float(reward.max()) or 1.0
    count = len(reward)
    some = torch.arange(0, count, max(1, count // SAMPLE), device=reward.device)
    obs = index({key: x.flatten(0, 1) for key, x in recent["obs"].items()}, some)
    bonus = learner.entropy_bonus(obs)
    going_on = bonus / max(1e-9, 1 - float(on.mean()))
    if going_on <= best:
        return None
    seen = f"finishing is worth {best:.3g}" if paid else "no decision has earned anything yet"
    goal = "success" if success else "the end of an episode"
    return (
        f"advice: rewards are 0 until {goal}, where {seen}, but going on is worth {going_on:.3g} to this agent, which "
        f"earns alpha times its entropy, {bonus:.3g}, at every decision; it will learn to avoid {goal}. Make time "
        "cost something (rewards.shift=-1), take the bonus out of the targets "
        "(method.sac.backup_entropy=false), or begin with a small method.sac.alpha"
    )


def quitting_trap(replay: Replay, metrics: Metrics, *, bonus: bool = False) -> str | None:
    """A sentence, if each decision costs something and episodes end by failing; ``metrics`` are those of the loop.
    ``bonus``: the learner is paid for entropy."""
    failure = float(metrics.get("episode/failure", 0.0))
    if failure < FAILURES or len(replay) == 0:
        return None
    recent = replay.latest(-(-ROWS // replay.num_envs))
    going_on = recent["reward"].flatten()[~recent["terminated"].flatten()]
    if not len(going_on) or bool((going_on >= 0).any()):
        return None
    apart = ", with method.sac.backup_entropy=false against the entropy trap" if bonus else ""
    return (
        f"advice: every decision costs this agent {-float(going_on.mean()):.3g}, and {failure:.0%} of the episodes end "
        "by failing, which costs nothing more: it may learn to fail soon. Take no cost of time (rewards.shift=0, or 1 "
        f"where the world itself takes 1 in each step{apart}), or a reward of progress (env.reward=dense where the "
        "world has it)"
    )


def putting_off(best: Metrics, metrics: Metrics) -> str | None:
    """A sentence, if success has fallen to less than half of what it was in the metrics ``best``, and the critic
    promises more than it did then."""
    then, now = float(best.get("episode/success", 0.0)), float(metrics.get("episode/success", 1.0))
    if metrics.get("episode/count", 0) < EPISODES or now >= then / 2 or "q/mean" not in best or "q/mean" not in metrics:
        return None
    value_then, value_now = float(best["q/mean"]), float(metrics["q/mean"])
    if value_now <= value_then:
        return None
    return (
        f"advice: success has fallen from {then:.0%} to {now:.0%} of the episodes, while the critic's value rose from "
        f"{value_then:.3g} to {value_now:.3g}: this agent may be putting success off. Make time cost something "
        "(rewards.shift=-0.02 with a dense reward, -1 with a sparse one); eval_every=... keeps the best policy so far"
    )


def useful_actors(actors: int, learner_waits: float, actor_waits: float) -> float:
    """The number of actors, each with as many worlds as now, at which the learner begins to set the pace: the time of
    an actor for its share of a row, over the time of the learner for that share and the updates that it owes."""
    return actors * (1 - actor_waits) / max(1e-9, 1 - learner_waits)


def waiting(actors: int, worlds: int, metrics: Metrics) -> str | None:
    """A sentence, if ``metrics``, of decisions behind the warm-up, say that one side waits most of its time; ``worlds``
    are those of one actor."""
    learner, actor = (float(metrics.get(f"time/{side}_waits", 0.0)) for side in ("learner", "actor"))
    useful = max(1, round(useful_actors(actors, learner, actor)))
    settings = f"{useful} with {worlds} worlds each (worlds={useful * worlds} processes={useful + 1})"
    if learner > WAITS and useful > actors:
        return (
            f"advice: the learner waits {learner:.0%} of its time for {actors} acting processes; about {settings} "
            "would keep it busy, if each has a core, here or on other machines (on=ray)"
        )
    if actor > WAITS and useful < actors:
        return f"advice: acting processes wait {actor:.0%} of their time for the learner; {settings} would do"
    if actor > WAITS and learner <= WAITS:
        return (
            f"advice: the acting process waits {actor:.0%} of its time for the learner: more of them would not help; "
            "fewer or smaller updates would (method.loop.updates_per_decision, method.loop.batch), or device=cuda"
        )
    return None


def advised(
    loop: Loop[Learns] | Asynchronous,
    say: Callable[[str], None],
    past: Callable[[], Sequence[Mapping[str, float]]] = lambda: (),
) -> Callable[[], Metrics]:
    """The report of a loop, which looks for what there is to advise, and says each sentence once. ``past``, asked with
    the first report, gives those of a run that goes on."""
    learner, replay = loop.learner, loop.replay
    if replay is None:
        return loop.report
    said: set[str] = set()
    best: Metrics | None = None  # of the report with the most success
    settled = False  # the warm-up, and all updates that follow it, were over before the last report
    success = False  # the world has reported it; a report without ended episodes says nothing of it

    def report() -> Metrics:
        nonlocal best, success, settled
        metrics: Metrics = dict(loop.report())
        # A loop's statistics know it, and remember it in a run that is resumed.
        success = success or (
            "episode/success" in metrics if isinstance(loop, Asynchronous) else loop.statistics.reports_success
        )
        before: Sequence[Mapping[str, Any]] = past() if best is None else [best]
        counted = [row for row in [*before, metrics] if row.get("episode/count", 0) >= EPISODES]
        best = dict(max([{}, *counted], key=lambda row: row.get("episode/success", 0.0)))
        bonus = learner.entropy_bonus is not None
        found = {
            "quitting_trap": quitting_trap(replay, metrics, bonus=bonus),
            "putting_off": putting_off(best, metrics),
        }
        if bonus:
            found["entropy_trap"] = entropy_trap(learner, replay, success=success)
        if isinstance(loop, Asynchronous):
            if settled:
                found["waiting"] = waiting(loop.actors, loop.loop.env.num_envs // loop.actors, metrics)
            settled = settled or "asynchronous/staleness" in metrics
        for name, sentence in found.items():
            if sentence is not None and name not in said:
                say(sentence)
                said.add(name)
        return metrics | {f"advice/{name}": float(sentence is not None) for name, sentence in found.items()}

    return report
