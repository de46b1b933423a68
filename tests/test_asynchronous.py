"""Acting and learning apart: nothing is lost, doubled or learnt ahead of time.

Both sides are threads here, which run the same code, so that a test can look at them; processes are killed in
`test_asynchronous_kill.py`.
"""

from __future__ import annotations

import random
import time
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
import torch

from asynchronous_lab import (
    CONTROL,
    PLAIN,
    Teller,
    Telling,
    Threads,
    controlling,
    telling,
    together,
    within,
)
from burnish.finetune.build import prepare
from burnish.finetune.loops import OffPolicy, OffPolicyConfig
from burnish.finetune.method import Needs
from burnish.finetune.processes.actor_process import adopt
from burnish.finetune.processes.asynchronous import Asynchronous, AsynchronousConfig
from burnish.finetune.processes.mailbox import Mailbox, pack, unpack
from burnish.offline.replay import Replay
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.seed import generator
from burnish.policies.runs.state_codec import encode
from seam import EXECUTE, METHODS, SeamWorld, Watched, checker, make_base, replay_rows, seam_env, seam_spec, shrunk

# ---- what travels ----


def test_a_letter_says_what_was_written():
    row = {"obs": {"state": torch.randn(2, 3)}, "columns": {}, "ended": torch.tensor([True, False]), "age": 7, "s": 0.1}
    read = unpack(pack(row))
    assert read["age"] == 7 and read["s"] == 0.1 and read["columns"] == {}
    assert torch.equal(read["obs"]["state"], row["obs"]["state"]) and torch.equal(read["ended"], row["ended"])


def test_nobody_waits_until_the_other_listens():
    """Both write what no pipe holds before either reads anything, and the last words of the dead are heard."""
    ends = [Mailbox(connection) for connection in Pipe()]
    with within(30):
        for number in range(8):
            for end in ends:
                end.send(b"x", {"number": number, "weights": torch.zeros(250_000)})
        ends[0].stop()
        heard = []
        while message := ends[1].take(wait=True):
            heard.append(message.read()["number"])
    assert heard == list(range(8)) and ends[1].closed
    ends[1].send(b"x")  # nobody is there any more, which is no error


def seaming(config: OffPolicyConfig, seed: int) -> OffPolicy[Any]:
    view = Watched(ChunkEnv(seam_env(SeamWorld(6)), EXECUTE, 0.9))
    return OffPolicy(Teller(EXECUTE, 2), view, Replay(config.capacity, 6), config, seed=seed)


def test_every_decision_arrives_once_and_in_order_with_where_it_led():
    """Six worlds end in every way at every sub-step; the checker knows nothing of the package."""
    threads = Threads()
    both = together(seaming, PLAIN, launch=threads)
    with within(60):
        for _ in range(60):
            both.iterate()
        both.close()
    played, stored = threads.launched[0].loop.env.rows(), replay_rows(both.replay)
    for name in ("reward", "discount", "ended", "terminated", "steps", "executed"):
        assert np.array_equal(stored[name], played[name][:60]), name
    for name in ("obs", "next_obs"):
        assert np.array_equal(stored[name]["state"], played[name]["state"][:60]), name
    world = threads.launched[0].loop.env.env.env.env
    assert isinstance(world, SeamWorld)
    ear = checker(world, 0.9, EXECUTE, 1)
    ear.rows(stored)
    assert ear.complaints == [] and stored["ended"].sum() > 100
    assert stored["heard"].ndim == 2 and (np.diff(stored["heard"], axis=0) >= 0).all()
    # A control: one row that is doubled does not go unnoticed.
    ear = checker(world, 0.9, EXECUTE, 1)
    ear.rows(
        {name: np.insert(x, 9, x[9], 0) for name, x in stored.items() if isinstance(x, np.ndarray)}
        | {name: {key: np.insert(x, 9, x[9], 0) for key, x in stored[name].items()} for name in ("obs", "next_obs")}
    )
    assert ear.complaints


OFF_POLICY = [name for name, row in METHODS.items() if isinstance(row.config().loop, OffPolicyConfig)]


@pytest.mark.parametrize("name", OFF_POLICY)
def test_the_weights_that_travel_are_all_that_an_actor_is(name: str):
    """Two builds of a method act alike once one has adopted the weights of the other."""
    env = seam_env(SeamWorld(2))
    kinds: dict[Needs, Any] = {Needs.squashed: "squashed", Needs.planner: None}
    kind = kinds.get(METHODS[name].needs, "flow")
    base = None if kind is None else make_base(kind, seam_spec(env))
    config = shrunk(METHODS[name].config())
    ours, theirs = (prepare(config, base, env, probe=False, seed=seed) for seed in (0, 1))
    for x in encode(ours.learner.actor.state_dict())[1].values():
        x.add_(0.1 * torch.randn(x.shape, generator=generator(0, "other weights")))
    obs = ours.env.reset()

    def choice(loop: OffPolicy, warm: bool) -> torch.Tensor:
        fresh = torch.ones(loop.env.num_envs, dtype=torch.bool)  # a planner begins where its last plan ends
        return loop.learner.actor.act(obs, warm=warm, generator=generator(0, "choice"), fresh=fresh).action

    assert not torch.equal(choice(ours, False), choice(theirs, False))
    adopt(theirs.learner.actor, unpack(pack({"actor": ours.learner.actor.state_dict()}))["actor"])
    for warm in (False, True):
        assert torch.equal(choice(ours, warm), choice(theirs, warm))
    # One of several actors plays fewer worlds than the learner knows.
    alone = prepare(config, base, seam_env(SeamWorld(1)), probe=False, seed=2)
    adopt(alone.learner.actor, ours.learner.actor.state_dict())
    mine, given = (encode(loop.learner.actor.state_dict())[1] for loop in (alone, ours))
    assert all(torch.equal(mine[name], x) for name, x in given.items()) and given


# ---- who waits for whom ----


def paced(config: Telling, seed: int) -> OffPolicy[Any]:
    """Both sides at the mercy of chance, each for stretches of time: now one is slow, now the other."""
    loop, chance = telling(config, seed), random.Random(seed)
    env: Any = loop.env

    def pause() -> float:
        slow = int(time.monotonic() / 0.05) % 2 == (seed == 0)  # seed 0 is the learner, others act
        return chance.choice((0.0, 0.004, 0.02)) if slow else 0.0

    loop.learner.pause = env.env.env.pause = pause
    return loop


# Ratios that add up without rounding, as 0.3 would not.
@pytest.mark.parametrize(("ratio", "backlog", "study"), [(0.75, 2, 0), (1.5, 12, 30), (0.375, 40, 0), (1.0, 0, 11)])
def test_the_ratio_is_never_exceeded_and_exact_in_the_end(ratio: float, backlog: int, study: int):
    config = OffPolicyConfig(capacity=4000, warmup=9, updates_per_decision=ratio, initial_updates=study, batch=4)
    threads = Threads()
    both = together(paced, Telling(config), AsynchronousConfig(backlog, 3), launch=threads)
    loop, ahead = both.loop, []
    warm = 10  # the first number of decisions of two worlds that is at least the warm-up

    def before() -> None:
        made = int(loop.learner.weights) + 1
        assert len(loop.replay) >= warm, "nothing is learnt in the warm-up"
        assert made - study <= ratio * (len(loop.replay) - warm), "more updates than are owed"
        ahead.append(threads.launched[0].loop.statistics.decisions - loop.statistics.decisions)

    loop.learner.before = before
    total = 160
    with within(60):
        for _ in range(loop.iterations(total)):
            both.iterate()
        report = both.report()
        both.close()
    made, owed = int(loop.learner.weights) - study, ratio * (total - warm)
    assert loop.statistics.decisions == total and report["asynchronous/updates_per_decision"] == made / (total - warm)
    if backlog:
        assert made == int(owed)
        assert 0 < max(ahead) <= max(backlog, 2) + 2  # what waits, and the row that is being learnt from
    else:
        assert made <= owed


def test_an_actor_that_never_waits_goes_on_and_the_ratio_falls():
    config = OffPolicyConfig(capacity=4000, warmup=8, updates_per_decision=2.0, batch=4)
    both = together(telling, Telling(config, world_pause_s=0.002), AsynchronousConfig(0, 5), launch=Threads())
    both.loop.learner.pause = lambda: 0.01
    with within(60):
        for _ in range(60):
            both.iterate()
        report = both.report()
        both.close()
    # A decision of both worlds takes 4 ms, an update 10 ms: of the four that it calls for at most about .4 are made.
    assert 0 < report["asynchronous/updates_per_decision"] < 1.0
    assert report["time/actor_waits"] < 0.5 < 1 - report["time/learner_waits"]


def test_what_is_reported_is_what_happened():
    both = together(telling, Telling(PLAIN, world_pause_s=0.015), AsynchronousConfig(4, 5), launch=Threads())
    with within(60):
        for _ in range(40):
            both.iterate()
        report = both.report()
        both.close()
    heard = both.loop.replay.latest()["heard"][:, 0]
    assert set(heard.tolist()) - {0}, "no weights were heard of"
    assert report["asynchronous/deaths"] == 0 and 0 < report["asynchronous/staleness"] < 5 + 0.75 * (4 + 2 + 2)
    assert report["time/learner_waits"] > 0.5 > report["time/actor_waits"]  # updates cost nothing here
    steps = float(both.loop.statistics.ticks)
    assert report["time/control_steps_per_s"] / report["time/decisions_per_s"] == pytest.approx(steps / 80)


# ---- learning ----


def played(seed: int, publish_every: int = 20) -> float:
    """The mean reward of the last 50 decisions of each world, as the acting side played them."""
    terms = AsynchronousConfig(backlog=64, publish_every=publish_every)
    both = Asynchronous(controlling(CONTROL, seed), controlling, CONTROL, terms, seed=seed, launch=Threads())
    with within(120):
        for _ in range(both.loop.iterations(1200)):
            both.iterate()
        both.close()
    return float(both.replay.latest(50)["reward"].mean())


# Over 20 seeds: in turn -0.43 to -0.93, apart -0.62 to -1.25, without weights -3.88 to -8.23.
REACHED = -2.5


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_acting_side_becomes_as_good_as_when_it_acts_and_learns_in_turn(seed: int):
    assert played(seed) > REACHED


def test_it_does_not_where_no_weights_are_sent():
    assert played(0, publish_every=10**9) < REACHED
