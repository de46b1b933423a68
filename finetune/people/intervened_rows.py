"""Interventions: decisions in which a person played, in methods that were not made to learn from people.

A person may take a robot over in mid-episode. The result is due to the person, so it says nothing about the policy's
choice: the decision is not ``valid`` (`Outcome`). The use that a method makes of such decisions stands on its row in
the table (``Method.interventions``), and the loops apply it; a learner meets them only where they teach it something.

    decision            0     1     2     3     4          in 2 a person played at least one of the ticks
    valid               yes   yes   no    yes   yes
    on-policy           *     *|    -     *     *          - is left out of actor, critic, and all statistics
    left out            *     *|    -     *     *
    executed            *     *|    e     *     *          e is stored with the actions that were executed

**The seam.** Rewards after an intervention are not the return of the policy. So the sum over later rewards is cut
before the decision (|), as at a truncation: the decision before it is worth its own reward and the value of the state
in which the person took over, which is the return that the policy could expect from there by itself. It is neither
praised for the rescue nor blamed for having needed one. One error remains: a failure that a person prevented is never
seen, so a value may stay too high there. ``method=rlif`` counts interventions against the policy.

**A decision of several ticks** is the person's as a whole, even if the policy played its first ticks: the reward of
the later ticks is theirs. Where executed actions are learnt from, those of the policy count with them. The actions that
the person played later in the chunk answer to observations that a critic of chunks does not see, as in recordings of
people.
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
    refused = "the memory of another library takes every decision for the policy's own"


def as_executed(action: Tensor, outcome: Outcome) -> Tensor:
    """(N, n, A): the executed actions, as far as they went, where a decision is not ``valid``; elsewhere ``action``."""
    real = torch.arange(action.shape[1], device=action.device) < outcome.steps[:, None]
    return torch.where((~outcome.valid[:, None] & real)[..., None], outcome.executed, action)
