"""Numbers that say whether a refinement is healthy, logged by default."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..offline.replay import Replay
from ..offline.returns import returns_to_go
from ..policies.core.tree import index, map_tree
from ..policies.core.types import Learns, Metrics, Obs, Policy

DECISIONS = 512  # whose returns are held against the critic
SAMPLED = 128  # observations on which a number is computed that is only looked at


@torch.no_grad()
def q_against_return(learner: Learns, replay: Replay) -> Metrics:
    """The critic's opinion of the latest decisions beside what really came of them.

    Of the newest ``DECISIONS`` those count whose episode is over. Behind a truncation the return is continued by the
    critic itself, once, at the cut; behind a termination there is nothing. Episodes that were cut off in mid-chunk are
    left out, since no critic of chunks learns what such a chunk is worth; so is what the replay leaves out. A soft
    critic adds entropy, the return does not. A learner without ``q_values`` has no such diagnostic.
    """
    if len(replay) == 0:
        return {}
    recent = replay.latest(-(-DECISIONS // replay.num_envs))
    shape = recent["ended"].shape
    flat: dict[str, Any] = {key: x.flatten(0, 1) for key, x in recent.items() if isinstance(x, Tensor)}
    flat["obs"] = map_tree(lambda x: x.flatten(0, 1), recent["obs"])
    values = learner.q_values(flat)
    if values is None:
        return {}
    q = values.view(shape)
    cut = recent["ended"] & (recent["discount"] > 0)
    # (Q - r) / d at a cut is what the critic takes to follow, without asking an actor what it would do there.
    follows = torch.where(cut, (q - recent["reward"]) / recent["discount"].clamp(min=1e-9), torch.zeros_like(q))
    inside = cut & (recent["steps"] < recent.get("executed", recent["action"]).shape[-2])
    follows = follows.masked_fill(inside, math.nan)  # which spreads over the whole episode, and no further
    earned = returns_to_go(recent["reward"], recent["discount"], recent["ended"], follows)
    over = (recent["ended"].flip(0).cumsum(0).flip(0) > 0) & earned.isfinite() & replay.learnable(len(earned))
    if not bool(over.any()):
        return {}
    error = (q - earned)[over]
    return {
        "q/mean": q[over].mean(),
        "q/return": earned[over].mean(),
        "q/overestimate": error.mean(),
        "q/error": error.square().mean().sqrt(),
    }


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Root mean square per coordinate: how far a refined action is from the base's, in units of the action range."""
    return (a - b).square().mean().sqrt()


def sampled(obs: Obs) -> Obs:
    """At most ``SAMPLED`` of the observations, evenly spread: enough for a number that is only looked at."""
    count = len(next(iter(obs.values())))
    return index(obs, torch.arange(0, count, max(1, count // SAMPLED))[:SAMPLED])


@torch.no_grad()
def distance_to_base(policy: Policy, base: Policy, obs: Obs) -> Tensor:
    """Between what a refined policy and its base make of the same observations and the same noise."""
    device = next(iter(obs.values())).device
    actions = [p.act(obs, generator=torch.Generator(device).manual_seed(0)) for p in (policy, base)]
    return distance(*actions)
