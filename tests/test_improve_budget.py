"""The budget of `burnish improve`: it is kept, it is used, and who would not learn within it is told so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from race_lab import Skilled, Toy, flat, planned, played, race

from burnish.finetune.improve.race import Preparation
from burnish.finetune.improve.shares import survivors
from burnish.policies.measure.evaluate import Evaluation


@pytest.mark.parametrize("budget", [{"steps": 1000}, {"minutes": 8}])
def test_the_budget_is_kept(tmp_path, budget):
    toy = Toy({name: flat(0.3 + 0.1 * i) for i, name in enumerate("abc")})
    found = played(tmp_path, toy, list("abc"), **budget)
    spent = sum(share["steps"] for share in found.record.shares)
    if "steps" in budget:
        assert 1000 <= spent <= 1010, "an iteration may end beyond it"
    else:
        assert 0.7 * 8 * 60 <= toy.now <= 8 * 60 and found.record.seconds == pytest.approx(toy.now)


def test_minutes_that_are_too_few_for_all_episodes_play_fewer(tmp_path):
    """256 episodes take 26 s here, and seven times that is more than a minute."""
    toy = Toy({"a": flat(0.9)})
    found = played(tmp_path, toy, ["a"], minutes=1)
    assert toy.now <= 60 and found.record.chosen == "a" and found.record.delivered is True


def test_an_entrant_plays_for_its_share_however_long_it_takes_to_start(tmp_path):
    """All play 10 steps a second. An entrant that starts slowly plays about as much as one that does not."""
    curves = {"quick": flat(0.4), "slow": flat(0.7), "other": flat(0.5)}
    toy = Toy(curves, start_s={"base": 5.0, "slow": 9.0})
    found = played(tmp_path, toy, list(curves), minutes=5)
    first = {share["entrant"]: share for share in reversed(found.record.shares)}
    assert first["slow"]["steps"] >= 0.9 * first["quick"]["steps"] > 50
    assert first["slow"]["start_s"] == pytest.approx(9)
    assert first["slow"]["seconds"] == pytest.approx(first["slow"]["steps"] / 10)
    looks = [share["seconds"] for share in found.record.shares if share["entrant"] == "slow"][2:]
    assert looks and min(looks) >= 9, "starts and evaluations come out of the total, and take less than training"
    assert toy.now <= 5 * 60 and found.record.chosen == "slow" and found.record.delivered is True


def test_evaluations_leave_a_small_budget_its_training(tmp_path):
    """64 episodes take 6.4 s, those of the race less; all starts and evaluations are paid before shares are cut."""
    curves = {"a": flat(0.9), "b": flat(0.2), "c": flat(0.4)}
    toy = Toy(curves, start_s={"base": 1.0, "a": 1.0, "b": 1.0, "c": 1.0})
    found = played(tmp_path, toy, list(curves), minutes=1.5)
    trained = [share["seconds"] for share in found.record.shares]
    assert len(trained) > sum(survivors(3)[:-1]) and 70 <= toy.now <= 90


def test_entrants_that_would_not_learn_within_their_share_are_dropped_before_anything_is_played(tmp_path):
    """Of 1000 steps one of three plays 100 before it can be beaten, one of two 250, and one alone all."""
    toy = Toy({name: flat(0.6) for name in "abc"})
    found = race(tmp_path, toy, steps=1000)
    assert planned(found, a=99, b=99, c=99) == ["a", "b", "c"] and found.record.dropped == {}
    found = race(tmp_path / "two", toy, steps=1000)
    found.free()
    assert planned(found, a=0, b=100, c=249) == ["a", "b"]
    assert planned(race(tmp_path / "two", toy, steps=1000), a=0, b=100, c=249) == ["a", "b"], "it is written down"
    assert "its warm-up takes 249 steps and its first share is 100; raise steps" in found.record.dropped["c"]
    assert planned(race(tmp_path / "one", toy, steps=1000), a=250, b=300) == ["a"]
    assert planned(race(tmp_path / "none", toy, steps=1000), a=1000) == []


def test_minutes_of_a_warm_up_are_told_by_the_speed_of_the_base(tmp_path):
    """An episode of 5 steps takes 0.1 s, so a learner's 1000 steps take 40 s."""
    toy = Toy({"a": flat(0.6), "b": flat(0.6)})
    for minutes, kept in ((5, ["a"]), (20, ["a", "b"])):
        found = race(tmp_path / str(minutes), toy, minutes=minutes)
        found.free()
        assert planned(found, a=0, b=1000) == kept
        assert all(
            "its warm-up takes 40 s and its first share is" in why for why in (found.record.dropped or {}).values()
        )


@pytest.mark.parametrize(("minutes", "proof"), [(1.5, 80), (2, 100), (3, 180)])
def test_minutes_are_used_where_many_worlds_play_at_once(tmp_path, minutes, proof):
    """64 episodes in 50 worlds take two waves, of 2.4 s each, and 256 take six."""
    toy = Toy({"a": flat(0.4), "b": flat(0.7), "c": flat(0.3)}, worlds=50, wave_s=2.4)
    toy.start_s = dict.fromkeys(("base", "a", "b", "c"), 2.0)
    found = played(tmp_path, toy, list(toy.curves), minutes=minutes)
    assert 0.85 * 60 * minutes <= toy.now <= 60 * minutes, "what the race leaves is the proof's"
    assert len(found.confirm()[0].seeds) >= proof and found.record.chosen == "b" and found.record.delivered is True


def test_initial_updates_count_as_a_part_of_the_warm_up(tmp_path):
    toy = Toy({"a": flat(0.6), "b": flat(0.6)})
    found = race(tmp_path, toy, minutes=5)
    found.free()
    assert found.plan({"a": Preparation(0), "b": Preparation(10, 90.0)}) == ["a"]
    assert "its warm-up and its initial updates take 90 s and its first share is" in found.record.dropped["b"]


def test_an_entrant_that_has_not_learnt_is_no_contender(tmp_path):
    """It has the score of the base, under another name."""
    toy = Toy({"late": flat(0.9), "good": flat(0.6)}, learns_after={"late": 10_000})
    found = played(tmp_path, toy, list(toy.curves), steps=500)
    assert found.contenders() == ["good"] and {x["learnt"] for x in found.record.shares} == {True, False}


def test_of_those_who_succeed_as_often_the_one_that_is_paid_most_is_chosen(tmp_path, monkeypatch):
    toy = Toy({})
    found = race(tmp_path, toy, steps=500)
    paid = {"slow": 1.0, "fast": 2.0, "fails": 9.0}

    def evaluated(name: str, stream: str) -> Evaluation:
        skill = 0.0 if name == "fails" else 1.0
        return replace(toy.play(Skilled(name, skill), stream, 4), returns=[paid[name]] * 4)

    monkeypatch.setattr(found, "contenders", lambda: list(paid))
    monkeypatch.setattr(found, "evaluated", evaluated)
    assert found.choose() == "fast"


def test_an_entrant_without_a_share_is_named_with_the_reason(tmp_path, capsys):
    toy = Toy({"slow": flat(0.5), "other": flat(0.9)}, start_s={"slow": 200.0})
    found = played(tmp_path, toy, list(toy.curves), minutes=4)
    why = "the budget was spent before its first share; raise minutes"
    assert found.record.dropped == {"other": why} and f"other was not tried: {why}" in capsys.readouterr().out
    toy = Toy({"quick": flat(1.1), "other": flat(0.9)})
    found = played(tmp_path / "won", toy, list(toy.curves), steps=500)
    assert "another one succeeded in all episodes" in found.record.dropped["other"]
