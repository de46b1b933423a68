"""The model of many actors and one learner, and the simulation of their protocol that it is compared with."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.finetune.advice import useful_actors

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def model() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return import_module("scale_model")


def costs(model: Any, rows: Any, update: float = 0.004, **changes: float) -> Any:
    seconds = {"message": 2e-4, "keep": 1e-5, "store": 1e-4, "watch": 1e-7, "pack": 1e-3, "post": 1e-4, "adopt": 5e-4}
    made = {**seconds, "turn": 1e-4, **changes}
    return model.Costs(worlds=2, rows=np.atleast_1d(rows), updates=np.array([update]), **made)


def by_hand(c: Any, terms: Any, actors: int, rows: int) -> float:
    """Seconds until the learner is free after ``rows`` rows whose times never vary, one event after the other. Weights
    cost nothing here."""
    ahead, free, owed = max(1, terms.backlog // (c.worlds * actors)), 0.0, 0.0
    sent, receipts = [0.0] * actors, [[] for _ in range(actors)]
    for row in range(rows):
        for actor in range(actors):
            begin = max(sent[actor], receipts[actor][row - ahead]) if row >= ahead else sent[actor]
            sent[actor] = begin + float(c.rows[0])
        for came in sorted(sent):
            free = max(free, came + c.turn / 2) + c.message
        free += c.store
        for actor in range(actors):
            free += c.keep
            receipts[actor].append(free + c.turn / 2)
        owed += terms.ratio * c.worlds * actors
        while owed >= 1:
            owed -= 1
            free += float(c.updates[0]) + actors * c.watch
    return free


@pytest.mark.parametrize(("actors", "ratio", "backlog"), [(1, 1.0, 64), (3, 0.25, 6), (3, 0.05, 24), (7, 0.5, 1)])
def test_the_simulation_is_the_protocol_event_by_event(model: Any, actors: int, ratio: float, backlog: int):
    c, terms = costs(model, 0.03, pack=0.0, post=0.0, adopt=0.0), model.Terms(ratio, backlog)
    played = model.simulate(c, terms, actors, 100)
    assert played.row_s == pytest.approx((by_hand(c, terms, actors, 100) - by_hand(c, terms, actors, 10)) / 90)
    assert played.updates == int(ratio * 2 * actors * 100 + 1e-9), "as many as are owed"


def test_whoever_is_slower_sets_the_pace(model: Any):
    slow_learner = costs(model, 0.01, 0.02)
    assert model.row_s(slow_learner, model.Terms(1.0), 4) == pytest.approx(
        model.learner_s(slow_learner, model.Terms(1.0), 4)
    )
    slow_actors = costs(model, 0.5)
    assert model.row_s(slow_actors, model.Terms(0.1), 4) == pytest.approx(0.5, rel=0.001)
    for c in (slow_learner, slow_actors):
        for ratio in (0.1, 1.0):
            played, told = (
                f(c, model.Terms(ratio), 4) for f in (lambda *x: model.simulate(*x, 300).row_s, model.row_s)
            )
            assert told == pytest.approx(played, rel=0.02)


def test_weights_to_many_actors_cost_the_learner_time(model: Any):
    c = costs(model, 0.01)
    often, seldom = model.Terms(1.0, publish_every=1), model.Terms(1.0, publish_every=1000)
    assert model.learner_s(c, often, 100) - model.learner_s(c, seldom, 100) == pytest.approx(200 * 0.011, rel=0.01)
    assert model.simulate(c, often, 100, 60).row_s == pytest.approx(model.row_s(c, often, 100), rel=0.02)


@pytest.mark.parametrize(("rate", "binds"), [(1e4, True), (1e6, False)])
def test_a_network_carries_one_row_after_the_other(model: Any, rate: float, binds: bool):
    c, terms = costs(model, 0.2), model.Terms(0.01)
    slower = model.over(c, model.Network("slow", rate, 0.03), 1000, 50_000)
    told, played = model.row_s(slower, terms, 10), model.simulate(slower, terms, 10, 600).row_s
    assert told == pytest.approx(played, rel=0.03)
    assert bool(told == pytest.approx(10 * 1000 / rate)) is binds
    assert model.enough(slower, terms) < model.enough(c, terms) or not binds
    # A row of all owes .2 updates, and weights go to each of ten actors after ten of them.
    assert model.weights_share(slower, terms, 10, told) == pytest.approx(0.02 * 10 * 50_000 / rate / told)


def test_things_queue_for_a_network(model: Any):
    assert model.queued(np.array([0.0, 0.1, 5.0]), 1.0, 0.5).tolist() == [1.5, 2.5, 6.0]


@pytest.mark.parametrize("actors", [1, 10, 40])  # who may be 32, 3 and 1 rows ahead
def test_the_slowest_actor_is_foreseen(model: Any, actors: int):
    c, terms = costs(model, 0.2 * np.random.default_rng(0).lognormal(-0.125, 0.5, 1000)), model.Terms(0.01)
    played = model.simulate(c, terms, actors, 600).row_s
    assert 0.85 < model.row_s(c, terms, actors) / played < 1.15
    # A control: the mean of an actor's times is not the pace of many.
    assert bool(c.rows.mean() / played < 0.9) is (actors > 1)


def test_processes_that_share_two_cores(model: Any):
    """Two actors of 1 s and a learner of 0.5 s: until it is over each has two thirds of a core, which takes 0.75 s;
    then the actors have a core each for their other half."""
    c = costs(model, 1.0, 0.25, **dict.fromkeys(("message", "keep", "store", "watch", "pack", "post", "adopt"), 0.0))
    terms = model.Terms(0.5)
    assert model.row_s(c, terms, 2, lambda n: min(n, 2)) == pytest.approx(0.75 + 0.5, rel=0.001)
    assert model.row_s(c, terms, 2) == pytest.approx(1.0)


def test_a_run_says_how_many_actors_are_enough(model: Any):
    c, terms = costs(model, 0.2), model.Terms(0.5)
    many = model.enough(c, terms)
    assert 10 < many < 100
    before, after = (model.row_s(c, terms, n) for n in (many // 2, 2 * many))
    assert before == pytest.approx(0.2, rel=0.05) and after > 0.3, "beyond it a row takes longer"
    # As far as the share of one actor costs the learner the same among few and among many.
    for actors in (1, 4, many):
        played = model.simulate(c, terms, actors, 300)
        assert useful_actors(actors, played.learner_waits, played.actor_waits) == pytest.approx(many, rel=0.25)
