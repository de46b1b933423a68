"""How far a model can be trusted, on ticks that it was not fitted to: numbers for the log, and for a refusal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...policies.core.tree import index, where
from ...policies.core.types import Controller, VecEnv
from ...policies.measure.statistics import wilson
from .env import ImaginedEnv
from .model import WorldModel, disagreement, ends_of, threshold
from .ticks import Ticks, looked_at, of_episodes

FEWEST = 10  # successes, and failures, from which a model can learn to tell one from the other
LEAST = 0.01  # score of success below which no threshold is set
AHEAD = (5, 20)  # ticks of the open-loop errors
BEGINNINGS = 200  # ticks from which they are looked for, where there are more


@torch.no_grad()
def examined(model: WorldModel, ticks: Ticks) -> dict[str, float]:
    """``r2``: explained share of the variance of a change, mean over numbers that change; ``rank``: Spearman's
    correlation of disagreement and error; ``within_1``, ``within_2``: share of changes within one and two deviations
    (.68 and .95 are right); ``ahead_k``: error after k ticks of recorded actions, in deviations of the state; and of
    success per *episode*, ``recall`` and ``false_alarms``. Of many held-out ticks it looks at some (``looked_at``)."""
    held = looked_at(ticks.split()[1])
    after = model.state_of(held["next_obs"])
    change = model.changes(after - model.expected_in(held))
    means, log_std = model.changes_of(held["obs"], held["action"])
    error = means.mean(0) - change
    # Of the whole change, what a twin knows of it included.
    varies = model.changes(after - model.state_of(held["obs"])).var(0, correction=0)
    moves = varies > 1e-8
    explained = 1 - error.square().mean(0) / varies.clamp(min=1e-8)
    off = (means - change).abs() / log_std.exp()
    found = {
        "ticks": float(len(ticks)),
        "r2": float(explained[moves].mean()) if bool(moves.any()) else 0.0,
        "rank": spearman(disagreement(means), error.square().mean(-1)),
        "within_1": float((off[..., moves] < 1).float().mean()),
        "within_2": float((off[..., moves] < 2).float().mean()),
        **{f"ahead_{k}": ahead(model, held, k) for k in AHEAD},
    }
    if ticks.knows_success:
        (seen, successes), (alarms, failures) = successes_seen(model, held)
        found |= {"recall": seen / max(successes, 1), "false_alarms": alarms / max(failures, 1)}
    return found


@torch.no_grad()
def successes_seen(model: WorldModel, ticks: Mapping[str, Any]) -> list[tuple[int, int]]:
    """In how many of the successful episodes the model sees a success, and in how many of those that failed."""
    believed = model.scores_of(ticks)[:, 0] > model.thresholds[0]
    really, seen = (of_episodes(x, ticks) > 0 for x in (ends_of(ticks)[0], believed))
    return [(int((seen & kind).sum()), int(kind.sum())) for kind in (really, ~really)]


def flatters(model: WorldModel, ticks: Ticks, limit: float) -> bool:
    """Whether the model sees a success in more than ``limit`` of the episodes that failed, beyond doubt (the lower end
    of Wilson's interval, one-sided 95 %). Held-out ones: of those that it was fitted to it has learnt the end."""
    alarms, failures = successes_seen(model, ticks.split()[1])[1]
    return failures > 0 and wilson(alarms, failures, 0.9)[0] > limit


@torch.no_grad()
def calibrate_success(
    env: ImaginedEnv, world: VecEnv, controller: Controller, real: float, seeds: Sequence[int]
) -> None:
    """The threshold of ``env.model`` at which the policy of ``controller``, whose success is ``real``, succeeds as
    often in the imagined ``world``, which is ``env`` or a history on top of it. Where even no threshold makes it
    succeed so often, it seldom does."""
    everyone = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    env.model.thresholds[0] = 2.0  # no episode ends by success
    obs, highest, active = world.reset(everyone, seeds), torch.zeros(env.num_envs, device=env.device), everyone
    controller.reset(everyone, seeds)
    while bool(active.any()):
        step = world.step(controller.step(obs), active)
        highest = torch.where(active, torch.maximum(highest, step.info["score"]), highest)
        obs, active = where(active, step.obs, obs), active & ~(step.terminated | step.truncated)
    env.model.thresholds[0] = max(threshold(highest, real), LEAST)


def lacking(ticks: Ticks) -> str:
    """A sentence where no model can learn from this what a success is, else nothing."""
    data = ticks.all()
    succeeded = of_episodes(ends_of(data)[0], data) > 0
    won, lost = int(succeeded.sum()), int((~succeeded).sum())
    if not ticks.knows_success or min(won, lost) >= FEWEST:
        return ""
    return (
        f"of {won + lost} episodes {won} succeeded: a model needs at least {FEWEST} successes and {FEWEST} failures to "
        "tell them apart, so nothing is refined before more was played; a higher method.collect, or recordings "
        "(data=FOLDER), bring more"
    )


def ahead(model: WorldModel, data: dict[str, Any], ticks: int) -> float:
    """Root mean square error after so many ticks of recorded actions, by the mean of the first elite, in deviations
    of the state. 0 where no episode is so long."""
    order = data["episode"].argsort(stable=True)
    row: dict[str, Any] = index(data, order)
    number = row["episode"]
    start = torch.arange(max(len(number) - ticks + 1, 0), device=number.device)
    start = start[number[start] == number[start + ticks - 1]] if len(start) else start
    if not len(start):
        return 0.0
    start = start[:: -(-len(start) // BEGINNINGS)]
    obs, still = index(row["obs"], start), model.elites[0].expand_as(start)
    for k in range(ticks):
        noise = torch.zeros(len(start), sum(model.sizes), device=start.device)
        obs = model.predict(obs, row["action"][start + k], still, noise).next_obs
    wrong = (model.state_of(obs) - model.state_of(index(row["next_obs"], start + ticks - 1))) / model.states.scale
    return float(wrong.square().mean().sqrt())


def spearman(x: Tensor, y: Tensor) -> float:
    """The correlation of the ranks of two (T,); ties are ranked as they lie."""
    if len(x) < 2:
        return 0.0
    ranks = torch.stack([x.argsort().argsort(), y.argsort().argsort()]).double()
    return float(torch.corrcoef(ranks)[0, 1])
