"""Who acts when, what is kept of it, and that none of it depends on the company of the world."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.finetune.people import interventions as intervention
from burnish.finetune.people.interventions import (
    Demonstrations,
    InterventionConfig,
    InterventionEnv,
    Rule,
    SupervisedEnv,
)
from burnish.offline.replay import Replay
from burnish.policies.core.chunk import ChunkEnv, HistoryEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.types import Controller, Obs
from burnish.sim.experts import make_expert
from burnish.sim.experts.toy import point_reach_law
from burnish.sim.point_reach import PointReach, PointReachConfig
from scripted import TERMINATED, TRUNCATED, ScriptedWorld

GOOD, BAD, EXPERT = 0.4, -0.7, 0.8  # actions; only BAD is further than 0.5 from the expert's


class Steady:
    """An expert that does the same everywhere, and counts how often it was asked since the reset."""

    def __init__(self, num_envs: int) -> None:
        self.ticks = torch.zeros(num_envs, dtype=torch.int64)

    def reset(self, mask: Tensor, seeds: Any = None) -> None:
        self.ticks = self.ticks.masked_fill(mask, 0)

    def step(self, obs: Obs) -> Tensor:
        self.ticks = self.ticks + 1
        return self.peek(obs)

    def peek(self, obs: Obs) -> Tensor:
        return torch.full((len(self.ticks), 2), EXPERT)

    def state_dict(self) -> dict[str, Any]:
        return {"ticks": self.ticks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ticks = state["ticks"]


def played(asked: str, execute: int, ends: list[tuple[int, str]] | None = None, **settings: Any) -> tuple[str, str]:
    """Who played each tick, and which decisions called for help, where ``asked`` says what the policy wants: x is bad.
    Two worlds: the other one never does anything bad."""
    world = ScriptedWorld([ends or [(1000, TRUNCATED)], [(1000, TRUNCATED)]])
    watched = InterventionEnv(world, Steady(2), InterventionConfig(**settings), execute=execute)
    env = SupervisedEnv(watched, 0.9)
    env.reset()
    who, called = "", ""
    while asked:
        wanted = torch.tensor([BAD if c == "x" else GOOD for c in asked[:execute].ljust(execute, ".")])
        before = len(world.taken)
        chunk = torch.stack([wanted, torch.full((execute,), GOOD)])[..., None].expand(-1, -1, 2)
        outcome = env.step(chunk)
        steps = int(outcome.steps[0])
        real = torch.stack(world.taken[before : before + steps])[:, 0]
        assert torch.equal(outcome.executed[0, :steps], real) and not outcome.executed[0, steps:].any()
        by_expert = real[:, 0] == EXPERT
        assert torch.equal(outcome.intervened[0, :steps], by_expert) and not outcome.intervened[0, steps:].any()
        assert torch.equal(real[~by_expert][:, 0], wanted[:steps][~by_expert])  # exactly what was asked for
        who += "".join("e" if e else "p" for e in by_expert.tolist())
        called += str(int(outcome.called[0]))
        # Chance helps the other one too.
        assert "rule" in settings or not (outcome.intervened[1].any() or outcome.called[1])
        assert (outcome.label == EXPERT).all()
        asked = asked[steps:]
    return who, called


@pytest.mark.parametrize(
    ("asked", "execute", "settings", "who", "called"),
    [
        ("........", 1, {}, "pppppppp", "00000000"),
        (".x......", 1, {"hold": 2}, "ppeepppp", "01000000"),
        (".xxx....", 1, {"hold": 2}, "ppeepppp", "01000000"),  # nobody judges what was not played
        ("xxxxxxx", 1, {"hold": 1}, "pepepep", "1010101"),
        (".x.xx...", 1, {"hold": 2, "patience": 2}, "pppppeep", "00001000"),
        (".x......", 1, {"hold": 2, "late": 2}, "ppppeepp", "00010000"),
        (".xxxx...", 1, {"hold": 2, "late": 2}, "ppppeepp", "00010000"),  # one who is on the way is not called again
        (".x......x...", 3, {"hold": 2, "late": 1}, "pppeeeppppee", "1001"),  # the drawing of the module
        ("x.......", 2, {"hold": 3}, "peeepppp", "1000"),  # in the middle of a chunk; held for 3 ticks when it is over
        (".x......", 4, {"hold": 1}, "ppeepppp", "10"),  # handed back between decisions only
        (".x......", 4, {"hold": 3}, "ppeeeeee", "10"),
        ("xxxxxxxx", 1, {"threshold": 2.0}, "pppppppp", "00000000"),
        ("xxxxxxxx", 1, {"miss": 1.0}, "pppppppp", "00000000"),
        ("......", 2, {"rule": Rule.random, "probability": 1.0, "hold": 1}, "pepepe", "111"),
        ("xxxxxx", 2, {"rule": Rule.random, "probability": 0.0}, "pppppp", "000"),
    ],
)
def test_who_plays(asked: str, execute: int, settings: dict[str, Any], who: str, called: str) -> None:
    assert played(asked, execute, **settings) == (who, called)


def test_an_end_takes_the_robot_out_of_all_hands() -> None:
    """An episode of 2 ticks, one of 6: who would have taken over behind the end does not, and nobody is blamed."""
    ends = [(2, TERMINATED), (6, TRUNCATED)]
    assert played(".x" + "......", 1, ends) == ("pppppppp", "00000000")
    assert played("x." + "......", 1, ends) == ("pepppppp", "10000000")  # a hold of 4 does not reach the next episode
    assert played("x." + "......", 1, ends, late=1) == ("pppppppp", "00000000")


def test_chunks_are_counted_from_the_reset() -> None:
    """A world that ended in mid-chunk begins its next decision with the others."""
    assert played("x." + "...x" + "..", 4, [(2, TERMINATED), (6, TRUNCATED)]) == ("pe" + "pppp" + "ee", "110")


def test_without_an_expert_nobody_takes_over() -> None:
    for rule in Rule:
        config = InterventionConfig(rule=rule, probability=1.0, threshold=0.0)
        env = SupervisedEnv(InterventionEnv(ScriptedWorld([[(9, TRUNCATED)]]), None, config), 0.9)
        env.reset()
        for _ in range(6):
            outcome = env.step(torch.zeros(1, 1, 2))
            assert not outcome.called.any() and not outcome.intervened.any()


def test_a_share_of_the_occasions_is_missed() -> None:
    """Of 400 worlds in which every first tick is bad. The noise of each is its own; 0.3 lies within 4 standard errors,
    4 sqrt(.3 * .7 / 400) = .09."""
    world = ScriptedWorld([[(1000, TRUNCATED)]] * 400)
    env = InterventionEnv(world, Steady(400), InterventionConfig(miss=0.3, hold=3), seed=1)
    env.reset()
    taken = [env.step(torch.full((400, 2), BAD)).info["intervened"] for _ in range(6)]
    assert abs(float((~taken[1]).float().mean()) - 0.3) < 0.09
    missed = ~taken[1]
    for later in taken[2:5]:  # who missed it does not look for 3 ticks
        assert not (later & missed).any()
    assert (taken[5] & missed).any()


def supervised(num_envs: int, level: str = "noisy", **settings: Any) -> SupervisedEnv:
    config = PointReachConfig(noise=0.1, max_steps=17)
    env, expert = ScaledEnv(PointReach(num_envs, config, seed=5)), make_expert(config, num_envs, level, seed=6)
    usual: dict[str, Any] = {"rule": Rule.random, "probability": 0.1, "late": 1, "miss": 0.2}
    watched = InterventionEnv(env, expert, InterventionConfig(**(usual | settings)), execute=3, seed=7)
    return SupervisedEnv(watched, 0.9)


def rollout(env: SupervisedEnv, decisions: int, *, begin: bool = True) -> list[dict[str, Any]]:
    if begin:
        env.reset()
    out = []
    for _ in range(decisions):
        outcome = env.step(torch.full((env.num_envs, 3, 2), 0.25))
        facts = outcome._asdict()
        out.append(
            {**facts.pop("info"), **{f"{k}.{key}": x for k in ("obs", "next_obs") for key, x in facts[k].items()}}
        )
        out[-1] |= {key: x for key, x in facts.items() if isinstance(x, Tensor)}
    return out


@pytest.mark.parametrize("rule", list(Rule))
def test_two_worlds_are_the_first_of_four(rule: Rule) -> None:
    few, many = (rollout(supervised(n, rule=rule), 40) for n in (2, 4))
    for a, b in zip(few, many, strict=True):
        assert a.keys() == b.keys()
        for key, x in a.items():
            assert torch.equal(x, b[key][:2]), key
    assert any(row["intervened"].any() for row in few) and any(row["ended"].any() for row in few)
    assert not torch.equal(few[3]["intervened"][0], few[3]["intervened"][1]) or rule is Rule.disagreement


def test_a_state_is_taken_up_in_the_middle_of_an_intervention(tmp_path: Any) -> None:
    whole = supervised(3)
    rows = rollout(whole, 60)
    half = next(i for i in range(20, 60) if rows[i]["intervened"][:, -1].any())  # somebody holds the robot now
    first = supervised(3)
    rollout(first, half + 1)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    rollout(first, 2, begin=False)  # what was saved must not move with the one that goes on
    second = supervised(3)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for a, b in zip(rollout(second, 59 - half, begin=False), rows[half + 1 :], strict=True):
        for key, x in a.items():
            assert torch.equal(x, b[key]), key


def test_the_expert_sees_the_present_alone() -> None:
    config = PointReachConfig(goal_in_state=True)
    expert: Controller = make_expert(config, 3, "clean")
    env = ScaledEnv(HistoryEnv(PointReach(3, config, seed=2), 2))
    watched = InterventionEnv(env, expert, InterventionConfig(), history=2)
    obs = watched.reset()
    for _ in range(4):
        now = obs["state"][:, -1].clone()
        step = watched.step(torch.zeros(3, 2))
        assert torch.equal(step.info["label"], make_expert(config, 3, "clean").peek({"state": now}))
        obs = step.obs


def test_the_label_is_what_the_expert_would_do_first() -> None:
    env = supervised(3, "clean")
    obs = env.reset()
    for _ in range(12):
        expected = point_reach_law(PointReachConfig())(obs)
        outcome = env.step(torch.full((3, 3, 2), 0.25))
        assert torch.equal(outcome.label, expected)
        first = outcome.intervened[:, 0]
        torch.testing.assert_close(outcome.executed[first, 0], expected[first])
        obs = outcome.obs


def test_a_plain_chunk_env_plays_it_too() -> None:
    """The wrapper is a world like any other: what was executed is what its actuators got."""
    env = ChunkEnv(
        InterventionEnv(ScriptedWorld([[(6, TRUNCATED)]]), Steady(1), InterventionConfig(), execute=2), 2, 1.0
    )
    env.reset()
    outcome = env.step(torch.full((1, 2, 2), BAD))
    assert outcome.executed[0, :, 0].tolist() == pytest.approx([BAD, EXPERT])
    assert outcome.reward.tolist() == [1 + 2]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"probability": 1.5}, "intervention.probability=1.5"),
        ({"miss": -0.1}, "intervention.miss=-0.1"),
        ({"threshold": float("nan")}, "intervention.threshold=nan"),
        ({"patience": 0}, "intervention.patience=0"),
        ({"late": -1}, "intervention.late=-1"),
        ({"hold": 0}, "intervention.hold=0"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BurnishError, match=sentence):
        InterventionConfig(**settings)


# ---- lessons ----


def memory(rows: int, capacity: int = 24, seed: int = 0) -> tuple[Replay, list[list[tuple[float, bool]]]]:
    """A replay of two worlds after so many rows; ``state`` numbers the decisions. Beside it what it was told."""
    replay, told = Replay(capacity, 2, seed=seed), []
    source = torch.Generator().manual_seed(seed)
    for t in range(rows):
        number = torch.tensor([2.0 * t, 2.0 * t + 1])
        held = torch.rand(2, 3, generator=source) < 0.4
        columns = {
            "action": torch.zeros(2, 3, 1),
            "executed": torch.ones(2, 3, 1),
            "reward": torch.ones(2),
            "discount": torch.ones(2),
            "ended": torch.tensor([t % 5 == 4, False]),
            "terminated": torch.zeros(2, dtype=torch.bool),
            "steps": torch.full((2,), 3),
            "intervened": held,
            "called": torch.tensor([True, False]),
            "label": torch.ones(2, 1),
        }
        replay.add({"state": number[:, None]}, columns, {"state": number[:, None] + 2})
        told.append([(float(number[i]), bool(held[i, 0])) for i in range(2)])
    return replay, told


def recorded() -> Replay:
    """Five decisions, numbered from -5, that were paid 7 each."""
    replay = Replay(5)
    ended = torch.arange(5) == 4
    columns = {
        "action": torch.full((5, 3, 1), 0.5),
        "executed": torch.full((5, 3, 1), 0.5),
        "reward": torch.full((5,), 7.0),
        "discount": torch.ones(5),
        "ended": ended,
        "terminated": ended,
        "steps": torch.full((5,), 3) - ended.long(),
    }
    replay.extend({"state": torch.arange(-5.0, 0)[:, None]}, columns, {"state": torch.zeros(1, 1)})
    return replay


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("rows", [3, 12, 31])
def test_demonstrations_are_what_somebody_else_played(rows: int, everything: bool) -> None:
    """Asked now and then while the ring fills and wraps around, or only once."""
    replay, told = memory(rows)
    taught = {n for row in told[-12:] for n, held in row if held or everything}
    often = Demonstrations(memory(0)[0], everything=everything)
    for t in range(1, rows + 1):
        often.replay = memory(t)[0]
        assert len(often) == len({n for row in told[max(0, t - 12) : t] for n, held in row if held or everything})
    for lessons in (Demonstrations(replay, everything=everything), often):
        drawn = lessons.sample(400)
        assert set(drawn["obs"]["state"].flatten().tolist()) == taught
        assert torch.equal(drawn["next_obs"]["state"], drawn["obs"]["state"] + 2)
    replay.leave_out(torch.tensor([True, False]))
    left = Demonstrations(replay, everything=everything).sample(400)["obs"]["state"].flatten().tolist()
    assert set(left) == taught - {told[-1][0][0]}, "what the replay leaves out is no demonstration"


def test_recordings_and_help_are_equally_likely_and_recordings_pay_nothing() -> None:
    replay, told = memory(12)
    lessons = Demonstrations(replay, recorded())
    helped = sum(held for row in told for _, held in row)
    assert len(lessons) == 5 + helped
    drawn = lessons.sample(4000)
    old = drawn["obs"]["state"].flatten() < 0
    share = 5 / (5 + helped)
    assert abs(float(old.float().mean()) - share) < 4 * (share * (1 - share) / 4000) ** 0.5
    assert not drawn["reward"][old].any() and not drawn["called"][old].any()
    assert torch.equal(drawn["intervened"][old].sum(1), drawn["steps"][old])
    assert (drawn["label"][old] == 0.5).all() and drawn.keys() >= {"intervened", "called", "label", "executed"}


def test_before_anybody_taught_anything_the_policy_itself_is_all_there_is() -> None:
    replay, _ = memory(2)
    replay._columns["intervened"].fill_(False)
    assert len(Demonstrations(replay)) == 0
    assert Demonstrations(replay).sample(8)["obs"]["state"].shape == (8, 1)
    assert (Demonstrations(replay, recorded()).sample(8)["obs"]["state"] < 0).all()


def test_the_share_is_that_of_the_latest_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """7 rows of 2 worlds and 3 ticks each are 42; asked at every row, or once, or while there are fewer."""
    monkeypatch.setattr(intervention, "WINDOW", 44)
    often = Demonstrations(memory(1)[0])
    for t in range(1, 20):
        often.replay = memory(t)[0]
        expected = often.replay.latest(7)["intervened"].double().mean()
        assert float(often.share) == pytest.approx(float(expected))
        assert torch.equal(Demonstrations(often.replay).share, often.share)


def test_demonstrations_follow_from_the_replay_and_one_generator() -> None:
    first = Demonstrations(memory(20)[0], recorded(), seed=4)
    first.sample(10)
    second = Demonstrations(Replay(24, 2), recorded(), seed=9)
    second.replay.load_state_dict(first.replay.state_dict())
    second.generator.set_state(first.generator.get_state())
    assert torch.equal(first.sample(50)["obs"]["state"], second.sample(50)["obs"]["state"])
