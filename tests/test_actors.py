"""Several actors and one learner: each world has its own column of the replay, whoever plays it, and whoever dies.

Actors are threads here, which run the same code; `test_ray_actors.py` has them on a cluster of Ray.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from asynchronous_lab import LENGTHS, Telling, Threads, killed, telling, together, within
from burnish.finetune.loops import OffPolicy, OffPolicyConfig
from burnish.finetune.people.intervened_rows import InterventionUse
from burnish.finetune.processes import asynchronous
from burnish.finetune.processes.asynchronous import Asynchronous, AsynchronousConfig
from burnish.offline.replay import Replay
from seam import replay_rows

ACTORS, WORLDS = 3, 6
CONFIG = OffPolicyConfig(capacity=6000, warmup=10, updates_per_decision=0.75, batch=4)
TELLING = Telling(CONFIG, actors=ACTORS)


def several(
    make: Any = telling, terms: AsynchronousConfig | None = None, **options: Any
) -> tuple[Asynchronous, Threads]:
    threads = Threads()
    return together(make, TELLING, terms, actors=ACTORS, launch=threads, **options), threads


def test_several_actors_reach_the_ratio_of_one_process():
    both, threads = several()
    alone = OffPolicy(both.learner, both.loop.env, Replay(6000, WORLDS), CONFIG)
    total = 240
    with within(60):
        for _ in range(both.loop.iterations(total)):
            both.iterate()
        report = both.report()
        both.close()
    learnt = int(both.learner.weights)
    for _ in range(alone.iterations(total)):
        alone.iterate()
    assert both.loop.statistics.decisions == alone.statistics.decisions == len(both.replay) == total
    assert learnt == alone.gradient_steps == int(0.75 * (total - 12))
    assert report["asynchronous/updates_per_decision"] == learnt / (total - 12)
    # Each actor plays worlds of its own, with a seed of its own, and none waits for more than its share of the backlog.
    rows = replay_rows(both.replay)
    assert len(threads.launched) == ACTORS and len({int(who) for who in rows["who"][0]}) == ACTORS
    assert (rows["who"] == rows["who"][0]).all() and (rows["who"][:, 0] == rows["who"][:, 1]).all()
    ahead = [thread.loop.statistics.decisions / 2 - total / WORLDS for thread in threads.launched]
    assert 0 <= max(ahead) <= 64 // WORLDS
    tick, led, ended = rows["obs"]["state"][..., 2], rows["next_obs"]["state"][..., 2], rows["ended"]
    assert np.array_equal(tick[1:], np.where(ended, 0, led)[:-1]) and set(led[ended]) == set(LENGTHS)


def test_weights_are_packed_once_for_all():
    shared = []
    both, _ = several(share=lambda message: shared.append(message) or message)
    with within(60):
        for _ in range(60):
            both.iterate()
        both.close()
    assert 10 < len(set(shared)) == len(shared) <= both.updates // 10 + ACTORS
    heard = replay_rows(both.replay)["heard"].max(0)
    assert (heard > 0).all(), "all actors hear of them"


def mixed(both: Asynchronous) -> int:
    """How many sums over several decisions hold rows of two actors, among all that can be drawn."""
    flat = torch.arange(len(both.replay))
    flat = flat[both.replay.learnable().flatten()]
    runs = both.replay.gather(flat, sequence=4)
    assert all(len(runs[name]) > 500 for name in ("who", "valid"))
    return int(((runs["who"] != runs["who"][:, :1]) & runs["valid"]).any(1).sum())


def killed_in_turn(**options: Any) -> Asynchronous:
    both, _ = several(tell=lambda line: None, **options)
    with within(60):
        for number in range(8):
            for _ in range(15):
                both.iterate()
            victim = both._slots[number % ACTORS]
            victim.deaths.clear()  # these are no accidents
            killed(victim.handles[-1].process)
        for _ in range(15):
            both.iterate()
        both.close()
    assert both.deaths >= 7
    return both


def test_no_return_holds_rows_of_two_actors():
    both = killed_in_turn()
    assert mixed(both) == 0
    assert both.loop.statistics.decisions == int(both.replay.learnable().sum()) >= 135 * WORLDS
    assert both.updates == int(0.75 * (both.loop.statistics.decisions - both._warm))
    rows, real = replay_rows(both.replay), both.replay.learnable().numpy()
    tick, led = rows["obs"]["state"][..., 2], rows["next_obs"]["state"][..., 2]
    assert np.array_equal(led[real], (tick + rows["steps"])[real]), "a decision leads as far as it lasted"
    # Episodes that were cut off count as nothing, and those that were played through with all of their ticks.
    report, through = both.loop.statistics.report(), real & rows["ended"] & (led == np.tile(LENGTHS, ACTORS))
    assert report["control_steps"] == rows["steps"][real].sum()
    assert report["episode/count"] == through.sum() and report["episode/length"] == led[through].mean()
    follows = ~rows["ended"][:-1] & real[:-1]
    assert real[1:][follows].all() and np.array_equal(tick[1:][follows], led[:-1][follows])


def test_the_control_mixes_where_nothing_is_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Replay, "cut", lambda self, worlds=None: None)
    assert mixed(killed_in_turn()) > 0


@pytest.mark.parametrize(
    ("use", "stored"), [(InterventionUse.left_out, 2), (InterventionUse.executed, 4), (InterventionUse.taught, 4)]
)
def test_an_absent_world_owes_nothing_whatever_a_person_did(use: InterventionUse, stored: int):
    """Of six worlds two are absent, and a person plays in two others."""
    loop = telling(TELLING, 0)
    loop.interventions = use
    obs, action, columns, outcome = loop.played(warm=False)
    absent, held = torch.arange(6) < 2, torch.arange(6) >= 4
    outcome = outcome._replace(info={"intervened": held[:, None].expand(6, 2)})
    loop.store(obs, action, columns, outcome, warm=False, absent=absent)
    assert loop.owed == 0.75 * stored
    assert torch.equal(loop.replay.learnable()[0], ~absent & ~(held & (use is InterventionUse.left_out)))


def late(gate: threading.Event, number: int) -> Any:
    """The actor of that number, counted from 1, begins once the gate opens."""
    begun = []

    def make(config: Telling, seed: int) -> OffPolicy[Any]:
        if seed:
            begun.append(seed)
            if len(begun) == number:
                gate.wait(30)
        return telling(config, seed)

    return make


def test_an_actor_that_begins_anew_is_not_waited_for():
    gate = threading.Event()
    both, _ = several(late(gate, ACTORS + 1), tell=lambda line: told.append(line))
    told: list[str] = []
    with within(60):
        for _ in range(10):
            both.iterate()
        killed(both._slots[1].handles[-1].process)
        while not both.deaths:
            both.iterate()
        for _ in range(20):
            both.iterate()
        rows, real = replay_rows(both.replay), both.replay.learnable().numpy()
        assert not real[-1, 2:4].any() and real[:, [0, 1, 4, 5]].all(), "the places of its worlds stay empty"
        assert both.loop.statistics.decisions == real.sum() and both.learner.weights == both.updates
        drawn = both.replay.sample(2000)["who"]
        gate.set()
        while not both.replay.learnable()[-1].all():
            both.iterate()
        both.close()
    assert told == [line for line in told if line.startswith("acting process 2 of 3 died (exit status ")] and told
    assert "another one begins" in told[0] and both.begun == ACTORS + 1
    # Of six columns two are empty at last: others are drawn no oftener than they are stored.
    share = (rows["who"] == rows["who"][0, 2])[real].mean()
    assert abs(float((drawn == int(rows["who"][0, 2])).float().mean()) - share) < 0.05


def test_actors_that_find_no_place_join_later(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asynchronous, "PATIENCE_S", 0.3)
    gate, told = threading.Event(), []
    both, _ = several(late(gate, 2), tell=told.append)
    with within(60):
        began = time.monotonic()
        for _ in range(10):
            both.iterate()
        assert time.monotonic() - began > 0.3 and int(both.replay.learnable()[-1].sum()) == 4
        gate.set()
        while not both.replay.learnable()[-1].all():
            both.iterate()
        both.close()
    assert told == ["1 of 3 actors have not begun in 0 s, and join when they do"]


def test_an_actor_that_dies_again_and_again_ends_the_run_in_a_sentence():
    """One death of each is none too many: a node that is lost takes several with it."""
    both, _ = several(tell=lambda line: None)
    with within(60):
        for _ in range(5):
            both.iterate()
        for slot in both._slots:
            killed(slot.handles[-1].process)
        while both.deaths < ACTORS or int(both.replay.learnable()[-1].sum()) < WORLDS:
            both.iterate()
        with pytest.raises(asynchronous.BurnishError, match="acting process 3 of 3 died 3 times in short order"):
            while True:
                both.iterate()
                killed(both._slots[2].handles[-1].process)
        both.close()
