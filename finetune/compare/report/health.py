"""The health of a run: its logged numbers in one sentence each, and which of them look wrong.

A worry is a rule of thumb, named with its number, and no verdict: it says where to look first. All but those about
single events look at the last third of a run, by its median, so that a stormy beginning is forgiven.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ....policies.measure.statistics import wilson
from .charts import sparkline
from .words import number, percent, plural

Values = Sequence[float]
Worry = Callable[[Values], "str | None"]


class Sign(NamedTuple):
    """A logged number: its meaning, and the rule by which it is worrying."""

    says: str
    worry: Worry = lambda values: None


class Finding(NamedTuple):
    """One row of the checkup: a logged number, its meaning, its last value, its curve, and a worry."""

    name: str
    says: str
    last: str
    line: str  # a path, or empty
    worry: str  # empty where there is none


def late(values: Values) -> float:
    """The median of the last third of the values."""
    return statistics.median(values[-max(1, len(values) // 3) :])


def above(limit: float, then: str) -> Worry:
    """The worry that the late values exceed ``limit``; ``then`` is what follows from it."""
    return lambda values: f"{number(late(values))} is above {limit:g}: {then}" if late(values) > limit else None


def below(limit: float, then: str) -> Worry:
    """The worry that the late values are less than ``limit``; ``then`` is what follows from it."""
    return lambda values: f"{number(late(values))} is below {limit:g}: {then}" if late(values) < limit else None


def ever(then: str) -> Worry:
    """The worry that any value is above 0; ``then`` is what follows from it."""
    return lambda values: (
        f"{plural(sum(x > 0 for x in values), 'line')} of the log: {then}" if max(values) > 0 else None
    )


def rose(times: float, then: str) -> Worry:
    """The worry that the late values are more than ``times`` the first; ``then`` is what follows from it."""

    def worry(values: Values) -> str | None:
        grown = late(values) / values[0] if values[0] > 0 else 0.0
        return f"it grew {grown:.0f} times: {then}" if grown > times else None

    return worry


_BOUND = "the agent wants more than its bound allows; raise the bound"
_EXPLAINED = "the value function predicts worse than a constant would"

SIGNS: dict[str, Sign] = {
    "episode/success": Sign("Success of the training episodes, with the noise of exploration."),
    "episode/failure": Sign("Share of the training episodes that ended early without success."),
    "episode/reward": Sign("Mean reward of a training episode."),
    "episode/length": Sign("Mean control steps of a training episode; it falls where success comes sooner."),
    "advice/entropy_trap": Sign(
        "1 where going on pays this agent more than finishing, because it is paid for entropy.",
        ever("it may learn to avoid success; make time cost something, or take the bonus out of the targets"),
    ),
    "advice/quitting_trap": Sign(
        "1 where every decision costs something and failing soon is the cheapest way out.",
        ever("it may learn to fail soon; take no cost of time, or a reward of progress"),
    ),
    "advice/putting_off": Sign(
        "1 where success fell to less than half of what it was while the critic promises more.",
        ever("it may put success off; make time cost something"),
    ),
    "advice/waiting": Sign(
        "1 where the learner or the acting processes wait most of their time; the log says what helps."
    ),
    "kl": Sign(
        "How far an update moves the policy from the one that collected its data.",
        above(0.2, "updates move far beyond their data; lower the learning rate or the epochs"),
    ),
    "kl_stopped": Sign(
        "1 where an update ended early because the policy had moved far enough.",
        above(0.5, "most updates end early; lower the learning rate or the epochs"),
    ),
    "clip/fraction": Sign(
        "Share of the likelihood ratios that the clip stopped.",
        above(0.75, "most of each update is thrown away; lower the learning rate or the epochs"),
    ),
    "clip/effective": Sign("How far the log-likelihood of a draw may rise before the clip stops it."),
    "explained_variance": Sign(
        "Share of the variance of the returns that the values explain: 1 is perfect, 0 no better than a constant.",
        below(0.0, _EXPLAINED),
    ),
    "value/explained": Sign("The same of the value network on recorded data.", below(0.0, _EXPLAINED)),
    "advantage_std": Sign("Spread of the advantages; near 0 there is nothing left to tell good from bad."),
    "saturation": Sign("Share of the action's coordinates that lie at the border.", above(0.5, _BOUND)),
    "latent/saturation": Sign("Share of the chosen noise that lies at the border.", above(0.5, _BOUND)),
    "residual/saturation": Sign("Share of the corrections that lie at the border.", above(0.5, _BOUND)),
    "latent/shift": Sign("How far the chosen noise has moved: 0 is where the base draws from."),
    "latent/size": Sign("Size of the drawn noise: 1 is the base's own."),
    "base_distance": Sign(
        "How far actions are from the base's, in the range from -1 to 1.",
        above(0.5, "little of the base is left; lower the bound or the learning rate"),
    ),
    "actor/away": Sign("How far actions are from those of the data."),
    "noise/max_std": Sign("Largest noise that the chain may add while it explores."),
    "entropy": Sign("How undecided the agent still is; it falls as the agent makes up its mind."),
    "alpha": Sign(
        "What a unit of entropy is worth to the agent.",
        rose(10, "the agent is more decided than its target allows; begin with a larger sac.alpha or a lower target"),
    ),
    "q/mean": Sign("What the critic expects of the latest decisions."),
    "q/return": Sign("What really came of them."),
    "q/overestimate": Sign("Expectation minus outcome: above 0 the critic is too hopeful."),
    "q/error": Sign("How far expectation and outcome are apart in single decisions."),
    "q/spread": Sign("How far the members of the ensemble disagree."),
    "distil/explained_variance": Sign(
        "How well the critic of noise follows the critic of actions: 1 is perfect.",
        below(0.5, "the agent climbs a critic that does not follow; distil more often"),
    ),
    "weight/capped": Sign(
        "Share of the data whose weight is at its cap.", above(0.5, "the data are hardly told apart")
    ),
    "grad_norm/actor": Sign("Length of the actor's gradient before it is cut."),
    "grad_norm/critic": Sign("Length of the critic's gradient before it is cut."),
    "asynchronous/staleness": Sign("Updates between the weights that acted and the learning from what they did."),
    "asynchronous/deaths": Sign(
        "How often the acting process had to be started again.", ever("the acting process died; see the log")
    ),
    "time/learner_waits": Sign("Share of its time that the learner waits.", above(0.5, "acting is the bottleneck")),
    "time/actor_waits": Sign(
        "Share of its time that the acting process waits.", above(0.5, "learning is the bottleneck")
    ),
    "imagined/gap": Sign(
        "Imagined minus real success of the policy that was tried last.",
        above(0.15, "the model flatters its policies; let it see more real episodes, or guard it"),
    ),
    "imagined/unknown": Sign("Share of imagined ticks in which the members of the model disagree beyond their limit."),
    "model/r2": Sign(
        "Share of the changes in ticks it was not fitted to that the model explains.",
        below(0.3, "it hardly knows its world; give it more updates or more episodes"),
    ),
    "model/recall": Sign("Share of held-out successful episodes in which the model sees the success."),
    "model/false_alarms": Sign("Share of held-out failed episodes in which the model sees a success."),
    "loss": Sign("The loss of imitation; its shape says something, its height depends on the kind of policy."),
}


def checkup(rows: Sequence[Mapping[str, float]]) -> list[Finding]:
    """The numbers that are known here, those that look wrong first; and any that ceased to be numbers."""
    found = []
    for name in dict.fromkeys([*SIGNS, *(name for row in rows for name in row)]):
        points = [(row.get("control_steps", row["step"]), row[name]) for row in rows if name in row]
        values = [y for _, y in points]
        good = [y for y in values if math.isfinite(y)]
        # A diagnostic may be unknown for a while (the variance of a single episode); then it must become known.
        broken = bool(values) and not math.isfinite(values[-1])
        if not values or (name not in SIGNS and not broken):
            continue
        sign = SIGNS.get(name, Sign("One of the numbers that this run logs."))
        worry = sign.worry(good) if good else None
        if name == "q/overestimate":
            worry = _hopeful(good, [row["q/return"] for row in rows if "q/return" in row])
        if name == "episode/success":
            worry = _fallen([row for row in rows if math.isfinite(row.get(name, math.nan))])
        if broken:
            worry = "it is not a finite number any more: the run has diverged, or there was nothing to measure"
        found.append(Finding(name, sign.says, number(values[-1]), sparkline(points), worry or ""))
    return sorted(found, key=lambda finding: not finding.worry)


def _fallen(rows: Sequence[Mapping[str, float]]) -> str | None:
    """The last third against the first, by all their episodes: told where the intervals leave no doubt."""
    third, ends = len(rows) // 3, []
    for part in (rows[:third], rows[-third:]) if third else ():
        episodes = round(sum(row.get("episode/count", 0.0) for row in part))
        successes = round(sum(row["episode/success"] * row.get("episode/count", 0.0) for row in part))
        ends.append(wilson(min(successes, episodes), episodes) if episodes else (0.0, 1.0))
    if not ends or ends[1][1] >= ends[0][0]:
        return None
    early, now = (f"[{percent(low, 0)}, {percent(high, 0)}]" for low, high in ends)
    return f"from {early} in the first third it fell to {now}: lower the learning rate, the noise or the bound"


def _hopeful(overestimate: Values, returns: Values) -> str | None:
    """Against the largest return of the run, because returns have no scale of their own."""
    scale = max((abs(x) for x in returns if math.isfinite(x)), default=0.0)
    if not overestimate or scale == 0 or late(overestimate) < 0.5 * scale:
        return None
    share = percent(late(overestimate) / scale, 0)
    return f"{number(late(overestimate))} is {share} of the largest return: the critic believes in what does not come"
