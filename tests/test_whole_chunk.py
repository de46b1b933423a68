"""Imitation out of a replay learns all H positions of a chunk, not only the n that a decision executes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.offline.dataset import decisions
from burnish.offline.imitation import imitation_chunk, neighbours, played_around
from burnish.offline.replay import Replay
from burnish.offline.sources import Mixture, joined
from burnish.policies.build import build_policy
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.data.windows import Windows
from offline_lab import CONFIGS, build
from training_lab import train_offline

TICKS, LENGTHS = 13, (13, 9)  # lengths are no multiples of n: the last decisions are cut short
LIMITS = ActionSpec((-1.0,), (1.0,))
EIGHT = PolicySpec(ObsSpec({"tick": (TICKS,)}), LIMITS, horizon=8, execute=4)
SPECS = {
    "H=8 n=4": EIGHT,
    "one behind now": replace(EIGHT, start=1),
    "more behind than is executed": replace(EIGHT, start=3, execute=2),
    "n=H": replace(EIGHT, execute=8),
    "single": replace(EIGHT, horizon=1, execute=1),
}
ACTION = torch.tensor([0.8, -0.6, 0.4, 0.1, -0.9, 0.7, -0.2, 0.5, -0.4, 0.3, -0.7, 0.6, -0.1])[:, None]


def recorded(lengths: tuple[int, ...] = LENGTHS) -> Episodes:
    """Every episode plays ``ACTION`` and sees which tick it is."""
    made = []
    for length in lengths:
        seen = {"tick": torch.eye(TICKS)[torch.arange(length + 1).clamp(max=TICKS - 1)]}
        made.append(Episode(seen, ACTION[:length].clone(), torch.ones(length), False, True, False, 0))
    return Episodes(made, EnvSpec(EIGHT.obs, LIMITS, 10.0, "test", TICKS))


def lesson(spec: PolicySpec, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return imitation_chunk(spec, batch["action"], batch["steps"], played_around(batch))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_recordings_in_a_replay_teach_the_windows_of_imitation(spec: PolicySpec) -> None:
    """The same chunk and mask for every decision as ``Windows`` for its tick, with one exception: the ticks before the
    first decision of a phase are not in that phase, so they are masked."""
    episodes = recorded()
    replay, windows = decisions(episodes, spec, 0.9), Windows(episodes, spec)
    batch = replay.gather(torch.arange(len(replay)), around=neighbours(spec))
    chunk, mask = lesson(spec, batch)
    tick, phases, phase = batch["obs"]["tick"].argmax(1).tolist(), 0, 0
    for row in range(len(replay)):
        if row == 0 or bool(batch["ended"][row - 1]):
            phase, phases = tick[row], phases + 1
        number = tick[row] + (0 if phases <= spec.execute else LENGTHS[0])
        wanted, known = (x[0] for x in windows[torch.tensor([number])][1:])
        seen = tick[row] - spec.start + torch.arange(spec.horizon) >= phase
        assert torch.equal(mask[row], known & seen)
        assert torch.equal(chunk[row, seen], wanted[seen])
    assert phases == 2 * spec.execute


def plays(policy: Any, spec: PolicySpec) -> Tensor:
    """(TICKS - H + 1, H, A): what is played from each tick from which a whole chunk is known, averaged over noise."""
    count = TICKS - spec.horizon + 1
    draw = torch.Generator().manual_seed(0)
    obs = {"tick": torch.eye(TICKS)[:count].repeat(16, 1)}
    with torch.no_grad():
        return policy.act(obs, generator=draw).view(16, count, spec.horizon, 1).mean(0)


WANTED = ACTION.unfold(0, 8, 1).transpose(1, 2)  # (6, H, A)


@pytest.mark.parametrize(("name", "imitator", "updates"), [("fql", "flow", 150), ("iql_best", "imitator", 150)])
def test_all_eight_positions_are_learnt_where_four_are_executed(name: str, imitator: str, updates: int) -> None:
    """Only imitation moves these networks. Largest mean error of a position on 4 seeds: 0.10 (0.13 for positions 0 to
    3 without neighbours). Smallest of positions 4 to 7 without neighbours, the control: 0.35."""
    data = decisions(recorded((TICKS,) * 4), EIGHT, 0.9)
    learner = build(CONFIGS[name], None, EIGHT, data=data, seed=0)
    blind = build(CONFIGS[name], None, EIGHT, data=data, seed=0)
    blind.around = (0, 0)
    for one in (learner, blind):
        train_offline(one, data, batch=64, total=updates)
    error, without = ((plays(getattr(one, imitator), EIGHT) - WANTED).abs().mean((0, 2)) for one in (learner, blind))
    assert bool((error < 0.2).all())
    assert bool((without[:4] < 0.2).all()) and float(without[4:].min()) > 0.25


def test_a_deterministic_policy_learns_all_eight_positions_without_a_critic() -> None:
    """Largest mean error of a position on 4 seeds: 0.003."""
    data = decisions(recorded((TICKS,) * 4), EIGHT, 0.9)
    learner = build(replace(CONFIGS["td3_bc"], alpha=0.0), None, EIGHT, data=data, seed=0)
    train_offline(learner, data, batch=64, total=200)
    assert float((plays(learner.policy, EIGHT) - WANTED).abs().mean((0, 2)).max()) < 0.02


def test_what_lies_behind_an_end_is_masked() -> None:
    """Another second episode changes no lesson of the first; counted as real, its actions would."""
    losses: dict[bool, list[Tensor]] = {False: [], True: []}
    policy = build_policy(CONFIGS["fql"].policy, EIGHT, seed=0)
    for sign in (1.0, -1.0):
        episodes = recorded((5, 9))
        episodes.episodes[1].action *= sign
        replay = decisions(episodes, EIGHT, 0.9)
        batch = replay.gather(torch.tensor([0, 4]), around=neighbours(EIGHT))  # ticks 0 to 3, and 3 to 4
        assert batch["ended"].tolist() == [False, True]
        for padded in losses:
            if padded:
                batch["around"] |= {"valid": torch.ones(2, 2, dtype=torch.bool), "steps": torch.full((2, 2), 4)}
                batch["steps"] = torch.full((2,), 4)
            chunk, mask = lesson(EIGHT, batch)
            noise = torch.Generator().manual_seed(1)
            losses[padded].append(policy.bc_loss(batch["obs"], chunk, mask=mask, generator=noise))
            assert mask.sum(1).tolist() == ([8, 8] if padded else [5, 2])
    assert torch.equal(*losses[False])
    assert not torch.equal(*losses[True])


@pytest.mark.parametrize("capacity", [300, 60])
def test_neighbours_of_a_growing_ring_equal_a_slow_walk(capacity: int) -> None:
    """Three worlds with random ends, cuts and left-out decisions, 60 rows, also in a ring of 20."""
    make = torch.Generator().manual_seed(0)
    replay, past = Replay(capacity, 3), []
    for t in range(60):
        ended = torch.rand(3, generator=make) < 0.2
        row = {"action": torch.full((3, 1, 1), float(t)), "reward": torch.zeros(3), "discount": torch.ones(3)}
        row |= {"ended": ended, "terminated": ended, "steps": torch.ones(3, dtype=torch.int64)}
        past.append({"ended": ended.clone(), "void": torch.zeros(3, dtype=torch.bool)})
        if t % 9 == 8:
            others = torch.tensor([False, t % 2 == 0, True])
            replay.cut(others)
            past[-2]["ended"] |= others
            past[-1]["void"] = others
        replay.add({"x": torch.zeros(3, 1)}, row, {"x": torch.zeros(3, 1)})
        if t % 9 == 8:
            replay.leave_out(others)
    oldest, (back, ahead) = 60 - replay.filled, (2, 3)
    found = replay.gather(torch.arange(len(replay)), around=(back, ahead))["around"]
    for flat in range(len(replay)):
        t, world = oldest + flat // 3, flat % 3
        for slot, other in enumerate(range(t - back, t + ahead + 1)):
            low, high = min(t, other), max(t, other)
            same = oldest <= low and high < 60 and not any(bool(past[k]["ended"][world]) for k in range(low, high))
            known = same and not bool(past[other]["void"][world])
            assert bool(found["valid"][flat, slot]) == known
            if known:
                assert float(found["action"][flat, slot]) == other


def test_a_gap_ends_what_is_known() -> None:
    """A decision that was cut short in the middle: what follows it does not continue this chunk."""
    spec = replace(EIGHT, start=2, execute=2, horizon=7)  # one decision before, two after
    action = torch.arange(1.0, 9.0).view(1, 4, 2, 1) / 10
    for real, expected in (
        ([2, 2, 2, 2], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
        ([2, 2, 1, 2], [0.1, 0.2, 0.3, 0.4, 0.5, None, None]),
        ([2, 1, 2, 2], [0.1, 0.2, 0.3, None, None, None, None]),
        ([1, 2, 2, 2], [None, None, 0.3, 0.4, 0.5, 0.6, 0.7]),  # its second tick is missing
        ([2, 0, 2, 2], [None] * 7),
    ):
        steps = torch.tensor([real])
        around = {"action": action, "real": torch.arange(2) < steps[..., None]}
        chunk, mask = imitation_chunk(spec, action[:, 1], steps[:, 1], around)
        assert mask[0].tolist() == [x is not None for x in expected]
        assert chunk[0, mask[0], 0].tolist() == pytest.approx([x for x in expected if x is not None])


def test_a_mixture_keeps_the_neighbours() -> None:
    one, other = decisions(recorded(), EIGHT, 0.9, seed=1), decisions(recorded(), EIGHT, 0.9, seed=2)
    mixed = Mixture(one, other, batch=6).sample(around=neighbours(EIGHT))
    assert mixed["around"]["action"].shape == (6, 2, 4, 1) and mixed["around"]["valid"].dtype == torch.bool
    again = joined(mixed, mixed)
    assert torch.equal(again["around"]["steps"], mixed["around"]["steps"].repeat(2, 1))
