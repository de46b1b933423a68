"""Decisions in which somebody else played, and what becomes of them in a method that was not made to learn from people.

A person may take a robot over in mid-episode. What comes of that is what the person did, not what the policy chose, so
it says nothing about the policy's choice. What a method makes of such decisions follows from its row in the table
(``Method.interventions``), and the loops see to it; a learner meets them only where they teach it something.

    decision            0     1     2     3     4          in 2 somebody played at least one of the ticks
    played by           pi    pi    PI    pi    pi
    on-policy           *     *|    -     *     *          - is left out of actor, critic, and all statistics
    left out            *     *|    -     *     *
    executed            *     *|    e     *     *          e is stored with the actions that were executed

**The seam.** What follows a take-over is not the return of the policy. So the sum over later rewards is cut before the
decision (|), as at a truncation: the decision before it is worth its own reward and the value of the state in which
somebody took over, which is what the policy could expect from there by itself. It is neither praised for the rescue nor
blamed for having needed one. That is the least wrong, not nothing: a failure that a person prevented is never seen, so
a value may stay too high there; who wants take-overs to count against the policy takes ``method=rlif``.

**A decision of several ticks** is somebody else's as a whole, even if the policy played its first ticks: the reward
behind the others is theirs. Where the executed actions are learnt from, those of the policy count with them; what the
person played later in the chunk answers to observations that a critic of chunks does not see, as in the recordings of
people that such methods learn from.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from ...policies.core.types import Outcome


class InterventionUse(Enum):
    """The use that a method makes of decisions in which a person or expert played."""

    taught = "the method was made for them, and reads itself who played what"
    executed = "what was executed stands in place of what was asked for"
    left_out = "they are not learnt from: which choice of the agent would have led to them is unknown"


def by_others(outcome: Outcome) -> Tensor | None:
    """(N,): in which worlds anybody else played a tick of this decision; None if that is so in none."""
    if "intervened" not in outcome.info:
        return None
    others = outcome.info["intervened"].flatten(1).any(1)
    return others if bool(others.any()) else None


def as_executed(action: Tensor, outcome: Outcome, others: Tensor) -> Tensor:
    """(N, n, A): in the worlds of ``others`` what was executed, as far as it went; elsewhere what was asked for."""
    real = torch.arange(action.shape[1], device=action.device) < outcome.steps[:, None]
    return torch.where((others[:, None] & real)[..., None], outcome.executed, action)
