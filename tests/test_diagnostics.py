"""Numbers about the health of a run, on a replay whose returns are known in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from burnish.finetune.diagnostics import distance, q_against_return
from burnish.offline.critics import saturation
from burnish.offline.replay import Replay
from burnish.policies.core.types import Learner

GAMMA, LENGTH, CHUNK = 0.5, 4, 2


Mute: Any = type("Mute", (Learner,), {})  # with nothing but the defaults


class Critic:
    """Says what it is told: the reward of every decision is 1, so Q follows from how many are left."""

    def __init__(self, value):
        self.value = value

    def q_values(self, batch):
        return self.value(batch["obs"]["left"][:, 0])


def filled(*, terminated: bool, last_steps: int = CHUNK, unfinished: int = 0, latent: bool = False) -> Replay:
    """Two episodes of LENGTH decisions in one world; ``left`` counts the decisions to the end, this one included. With
    ``latent`` the action is a noise, which the chunk that was executed stands beside."""
    replay = Replay(64)
    for _ in range(2):
        for t in range(LENGTH):
            add(replay, LENGTH - t, ended=t == LENGTH - 1, terminated=terminated, last_steps=last_steps, latent=latent)
    for _ in range(unfinished):
        add(replay, 99, ended=False, terminated=False, last_steps=CHUNK)
    return replay


def add(replay, left, *, ended, terminated, last_steps, latent=False):
    over = torch.tensor([ended and terminated])
    columns = {
        "action": torch.zeros(1, CHUNK, 1),
        "reward": torch.ones(1),
        "discount": GAMMA * (~over).float(),
        "ended": torch.tensor([ended]),
        "terminated": over,
        "steps": torch.tensor([last_steps if ended else CHUNK]),
    }
    if latent:
        columns |= {"action": torch.zeros(1, 1, 3), "executed": columns["action"]}
    replay.add({"left": torch.tensor([[float(left)]])}, columns, {"left": torch.tensor([[left - 1.0]])})


def finite(left):
    """1 + GAMMA + ... over the decisions that are left."""
    return (1 - GAMMA**left) / (1 - GAMMA)


def for_ever(left):
    return torch.full_like(left, 1 / (1 - GAMMA))


def test_a_right_critic_is_found_right_and_a_wrong_one_wrong():
    replay = filled(terminated=True, unfinished=3)
    right = q_against_return(Critic(finite), replay)
    assert float(right["q/overestimate"]) == pytest.approx(0, abs=1e-6)
    assert float(right["q/mean"]) == pytest.approx(float(finite(torch.arange(1.0, LENGTH + 1)).mean()))
    wrong = q_against_return(Critic(lambda left: finite(left) + 0.25), replay)
    assert float(wrong["q/overestimate"]) == pytest.approx(0.25) and float(wrong["q/error"]) == pytest.approx(0.25)


def test_a_cut_is_continued_by_the_critic_and_an_end_is_not():
    assert float(q_against_return(Critic(for_ever), filled(terminated=False))["q/error"]) == pytest.approx(0, abs=1e-6)
    assert float(q_against_return(Critic(for_ever), filled(terminated=True))["q/error"]) > 0.5


def test_episodes_cut_in_mid_chunk_say_nothing_and_those_that_end_there_do():
    for latent in (False, True):
        assert q_against_return(Critic(for_ever), filled(terminated=False, last_steps=1, latent=latent)) == {}
        assert "q/error" in q_against_return(Critic(finite), filled(terminated=True, last_steps=1, latent=latent))


def test_nothing_is_said_before_an_episode_is_over():
    replay = Replay(64)
    assert q_against_return(Critic(finite), replay) == {}
    add(replay, 5, ended=False, terminated=False, last_steps=CHUNK)
    assert q_against_return(Critic(finite), replay) == {}
    assert q_against_return(Mute(), filled(terminated=True)) == {}, "a learner without a critic"


def test_saturation_and_distance():
    assert float(saturation(torch.tensor([1.0, -0.96, 0.5, 0.0]))) == 0.5
    assert float(distance(torch.zeros(2, 2), torch.full((2, 2), 0.3))) == pytest.approx(0.3)
