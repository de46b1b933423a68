"""An actor with a memory is told where episodes begin: in both loops, and after a run was resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from burnish.finetune.loops import OffPolicy, OffPolicyConfig, OnPolicy
from burnish.offline.replay import Replay
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.types import Decision, Learner
from scripted import TERMINATED, TRUNCATED, ScriptedWorld

SCRIPT = [
    [(1, TERMINATED), (4, TRUNCATED), (2, TRUNCATED), (6, TERMINATED)],
    [(5, TERMINATED), (1, TRUNCATED), (3, TERMINATED)],
]
ROWS = 12


class Counting:
    """Its memory is the number of its decisions in this episode."""

    def __init__(self, forgets: bool) -> None:
        self.forgets, self.count = forgets, torch.zeros(2)

    def act(self, obs, *, warm, generator, fresh=None) -> Decision:
        if self.forgets:
            self.count = self.count * ~fresh
        action, before = torch.zeros(2, 3, 2), self.count
        self.count = self.count + 1
        return Decision(action, {"action": action, "memory": before})

    def state_dict(self):
        return {"count": self.count}


class Recurrent(Learner):
    def __init__(self, forgets: bool = True) -> None:
        self.actor: Any = Counting(forgets)
        self.policy, self.seen = None, []

    def update(self, source):
        self.seen.append(source.sample())
        return {}

    def state_dict(self):
        return {"count": self.actor.count.clone()}

    def load_state_dict(self, state):
        self.actor.count = state["count"].clone()


def since_the_beginning(ended: torch.Tensor) -> torch.Tensor:
    """(T, N) decisions before each in its episode, one by one."""
    count, found = torch.zeros(ended.shape[1]), []
    for row in ended:
        found.append(count)
        count = torch.where(row, 0.0, count + 1)
    return torch.stack(found)


def world() -> ChunkEnv:
    return ChunkEnv(ScriptedWorld(SCRIPT), 3, 0.9)


def off_policy(learner: Recurrent) -> OffPolicy[Recurrent]:
    return OffPolicy(learner, world(), Replay(2 * ROWS, 2), OffPolicyConfig(warmup=0, batch=2))


@pytest.mark.parametrize("forgets", [True, False])
def test_a_memory_ends_with_its_episode(forgets: bool):
    """The control is an actor that does not listen."""
    learner = Recurrent(forgets)
    OnPolicy(learner, world(), decisions_per_update=ROWS).iterate()
    loop = off_policy(Recurrent(forgets))
    for _ in range(ROWS):
        loop.iterate()
    for rows in (learner.seen[0], loop.replay.latest()):
        expected = since_the_beginning(rows["ended"])
        assert rows["ended"].any(0).all() and torch.equal(rows["memory"], expected) == forgets


def test_it_goes_on_after_a_pause():
    whole, half, second = (off_policy(Recurrent()) for _ in range(3))
    for _ in range(ROWS):
        whole.iterate()
    for _ in range(5):
        half.iterate()
    second.load_state_dict(half.state_dict())
    for _ in range(ROWS - 5):
        second.iterate()
    assert torch.equal(second.replay.latest()["memory"], whole.replay.latest()["memory"])
