"""The receding-horizon queue, and noise that belongs to a world."""

from __future__ import annotations

import pytest
import torch

from burnish.policies.controllers import ChunkController
from burnish.policies.core.seed import EpisodeSeeds, RowNoise, normal
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec


class Counting:
    """Plays [call number, chunk position] so that every action tells where it comes from, plus its noise."""

    def __init__(self, horizon=6, execute=3, start=1):
        self.spec = PolicySpec(ObsSpec({"state": (3,)}), ActionSpec((-1, -1, -1), (1, 1, 1)), horizon, execute, start)
        self.asked: list[int] = []

    def act(self, obs, *, noise=None, prefix=None, greedy=False, generator=None):
        self.asked.append(len(obs["state"]))
        batch = len(obs["state"])
        position = torch.arange(self.spec.horizon).float().expand(batch, -1)
        drawn = normal((batch, 1), generator).expand(-1, self.spec.horizon)
        return torch.stack([obs["state"][:, 2:].expand(-1, self.spec.horizon), position, drawn], 2)


def observe(ticks):
    return {"state": torch.stack([torch.tensor([0.0, 0.0, float(t)]) for t in ticks])}


def test_worlds_replan_on_their_own_clock_and_only_the_executed_slice_is_played():
    policy = Counting()
    controller = ChunkController(policy, 2)
    everyone = torch.tensor([True, True])
    controller.reset(everyone, [7, 8])
    played = []
    for tick in range(5):
        if tick == 2:
            controller.reset(torch.tensor([False, True]), [0, 9])
        played.append(controller.step(observe([tick, tick]))[:, :2].tolist())
    # [planned at tick, chunk position]: start=1, execute=3, so positions 1, 2, 3; world 1 begins anew at tick 2.
    assert [row[0] for row in played] == [[0, 1], [0, 2], [0, 3], [3, 1], [3, 2]]
    assert [row[1] for row in played] == [[0, 1], [0, 2], [2, 1], [2, 2], [2, 3]]
    assert policy.asked == [2, 1, 1]


def test_peek_changes_nothing_tells_the_truth_and_costs_no_second_question():
    policy = Counting()
    controller = ChunkController(policy, 2)
    controller.reset(torch.tensor([True, True]), [1, 2])
    for tick in range(7):
        obs = observe([tick, tick])
        before = controller.state_dict()
        peeked = [controller.peek(obs) for _ in range(3)]
        after = controller.state_dict()
        assert torch.equal(before["left"], after["left"]) and torch.equal(before["decision"], after["decision"])
        action = controller.step(obs)
        assert all(torch.equal(p, action) for p in peeked)
    assert policy.asked == [2, 2, 2], "one question per decision, however often it is peeked"


def test_a_plan_made_for_another_observation_is_not_played():
    policy = Counting()
    controller = ChunkController(policy, 2)
    controller.reset(torch.tensor([True, True]), [1, 2])
    controller.peek(observe([0, 0]))
    assert controller.step(observe([0, 5]))[:, 0].tolist() == [0, 5]
    assert policy.asked == [2, 1]


def test_drawing_for_two_worlds_equals_drawing_for_four():
    def play(seeds):
        controller = ChunkController(Counting(), len(seeds))
        controller.reset(torch.ones(len(seeds), dtype=torch.bool), seeds)
        return torch.stack([controller.step(observe([t] * len(seeds))) for t in range(9)], 1)

    four, two = play([3, 1, 4, 15]), play([4, 3])
    assert torch.equal(two, four[[2, 0]])
    assert len(four[:, ::3, 2].unique()) == 12, "every world and every decision draws its own noise"


def test_resume_continues_exactly():
    def play(controller, times):
        return torch.stack([controller.step(observe([t, t])) for t in range(times)])

    controller = ChunkController(Counting(), 2, seed=3)
    controller.reset(torch.tensor([True, True]))
    play(controller, 4)
    saved = controller.state_dict()
    ahead = play(controller, 8)
    fresh = ChunkController(Counting(), 2, seed=99)
    fresh.load_state_dict(saved)
    assert torch.equal(ahead, play(fresh, 8))


def test_row_noise_is_standard_normal_independent_and_addressed_by_seed_and_index():
    rows = RowNoise(range(64), [0] * 64)
    x = rows.normal((64, 2000))
    # 128,000 samples: the standard error of the mean is 2.8e-3, of the variance 4e-3; five of them are allowed.
    assert abs(x.mean()) < 0.014 and abs(x.var() - 1) < 0.02
    assert abs((x**4).mean() - 3) < 0.14
    correlation = torch.corrcoef(x) - torch.eye(64, dtype=torch.float64)
    assert correlation.abs().max() < 5.5 / 2000**0.5
    again = rows.normal((64, 2000))
    assert abs((x * again).mean()) < 0.014, "the second draw of a row is another one"
    assert not torch.equal(x[0], RowNoise([0], [1]).normal((1, 2000))[0])
    assert torch.equal(x[[5, 3]], RowNoise([5, 3], [0, 0]).normal((2, 2000)))
    with pytest.raises(ValueError, match="64 rows"):
        rows.uniform((3, 2))


def test_episode_seeds_are_reproducible_distinct_and_touch_only_their_rows():
    seeds = EpisodeSeeds(5, 3)
    everyone, second = torch.ones(3, dtype=torch.bool), torch.tensor([False, True, False])
    first = seeds.begin(everyone).clone()
    moved = seeds.begin(second).clone()
    assert torch.equal(moved[[0, 2]], first[[0, 2]]) and moved[1] != first[1]
    given = seeds.begin(second, [0, 77, 0])
    assert given.tolist() == [first[0], 77, first[2]]
    # World 1 in company of two draws what it draws in company of one.
    other = EpisodeSeeds(5, 2)
    assert torch.equal(other.begin(torch.ones(2, dtype=torch.bool)), first[:2])
