"""Chunks in real time: inference while the arm moves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from burnish.policies.build import load_policy
from burnish.policies.controllers import ChunkController
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.measure.evaluate import evaluate, evaluation_seeds
from burnish.real_robot.clock import VirtualClock, ns
from burnish.real_robot.control.link import LocalLink
from burnish.real_robot.drivers.twin import Twin, TwinConfig
from burnish.real_robot.env import RobotEnv, each_anew
from burnish.real_robot.errors import Refused, RobotError
from burnish.real_robot.inference.chunk_settings import Chunks, Hold, Mode, fading
from burnish.real_robot.inference.predictors import PolicyPredictor
from burnish.real_robot.inference.realtime_chunking import RealtimeChunking, RobotTime
from burnish.real_robot.inference.worker import Facts, InferenceRequest, Latency, Pulling, Simulated
from burnish.real_robot.safety.safe_robot import Rung, Safety
from burnish.sim.mirror import Mirror
from burnish.sim.tasks.insert import InsertConfig
from export_lab import EXECUTE, small
from realtime_chunking_lab import (
    EVERYONE,
    HZ,
    PERIOD_S,
    REFINED,
    Failing,
    Lab,
    Telling,
    jittery,
    latency,
    two_mode_flow,
)


def test_with_no_latency_a_queue_is_the_chunk_controller_bit_for_bit():
    policy = small()
    ours = RealtimeChunking(
        Simulated(PolicyPredictor(policy), VirtualClock()), Chunks(rehearsals=2, forget=0), HZ, seed=3
    )
    theirs, other = (ChunkController(policy, 1, seed=seed) for seed in (3, 4))
    source = torch.Generator().manual_seed(0)
    ours.warm_up({"state": torch.zeros(1, 3)})
    differed = False
    for length in (7, 4, 5):  # the first ends in the middle of a chunk
        for controller in (ours, theirs, other):
            controller.reset(EVERYONE)
        for _ in range(length):
            obs = {"state": torch.randn(1, 3, generator=source)}
            a, b = ours.step(obs), theirs.step(obs)
            assert torch.equal(a, b) and a.dtype == b.dtype
            differed |= not torch.equal(a, other.step(obs))
    assert differed, "whatever the seed, the same is played"
    assert ours.report.questions == sum(-(-length // EXECUTE) for length in (7, 4, 5))


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("mode", [Mode.queue, Mode.realtime])
def test_a_chunk_takes_over_at_the_action_whose_turn_it_is(mode, start):
    lab = Lab(Telling(start=start), latency(1.9), mode=mode).warm()
    played = lab.play(24)
    # (tick of the observation, row of the chunk): d = 2, so the first two rows of each later chunk were never played.
    assert lab.controller.delay == 2
    expected = [(0, tick) if tick < 6 else (4 * ((tick - 2) // 4), 2 + (tick - 2) % 4) for tick in range(24)]
    assert [(asked, row - start) for asked, row in played[:, :2].tolist()] == expected
    assert all(asked + row == tick for tick, (asked, row) in enumerate(expected)), "the expectation itself is aligned"
    report = lab.controller.report
    assert (report.late, report.waited, report.failed) == (0, 0, 0)


def test_naive_switching_would_be_seen():
    """The control of the test above: a controller that plays each chunk from its beginning."""

    class Naive(RealtimeChunking):
        def _take_over(self):
            before = self._lines
            super()._take_over()
            if self._lines != before:
                self._lines = [line._replace(asked=self._tick) for line in self._lines]

    played = Lab(Telling(), latency(1.9), Naive).warm().play(24)
    assert (played[:, 0] + played[:, 1] != np.arange(24)).sum() > 10


@pytest.mark.parametrize(("start", "overlap"), [(0, 0), (2, 0), (2, 1)])
def test_the_prefix_is_what_is_played_meanwhile(start, overlap):
    lab = Lab(Telling(horizon=10, start=start), latency(1.9), mode=Mode.realtime, overlap=overlap).warm()
    played = lab.play(30)
    first, *others = lab.predictor.asked
    assert first.prefix is None and len(others) == 7
    for question in others[:-1]:
        tick = int(question.obs["state"][0])
        assert np.array_equal(question.prefix, played[tick - start : tick + 2 + overlap])
    assert all(q.prefix is None for q in _asked_by(Mode.queue, start)), "a queue asks without"


@pytest.mark.parametrize(("start", "overlap"), [(0, 0), (2, 0), (2, 1)])
def test_what_guides_is_all_that_is_left(start, overlap):
    """Asked at the fourth of eight actions with two ticks to go: those two are committed, and two more fade."""
    lab = Lab(
        Telling(horizon=8 + start, start=start, guides=True),
        latency(1.9),
        mode=Mode.realtime,
        hold=Hold.guide,
        overlap=overlap,
    ).warm()
    played = lab.play(30)
    first, *others = lab.predictor.asked
    assert first.prefix is None and len(others) == 7
    for question in others[:-1]:
        tick, (actions, weights) = int(question.obs["state"][0]), question.prefix
        committed = start + 2 + overlap
        assert len(actions) == len(weights) == start + 4 and (weights == 1).sum() == committed
        assert np.array_equal(actions[:committed], played[tick - start : tick + 2 + overlap])
        assert 0 < weights[-1] < 1


def test_the_mask_is_the_published_one():
    """W_i of real-time chunking, with d = 3 committed and H - s = 8 left."""
    ours, (d, left) = fading(3, 8), (3, 8)
    for i in range(8):
        c = (left - i) / (left - d + 1)
        assert ours[i] == pytest.approx(1 if i < d else c * (np.exp(c) - 1) / (np.e - 1), rel=1e-6)
    assert (np.diff(ours[2:]) < 0).all() and (fading(4, 4) == 1).all() and fading(0, 4)[0] < 1


def test_being_guided_is_rehearsed_as_well():
    """It takes longer than to answer a first question, which is guided by nothing."""
    lab = Lab(Telling(guides=True), latency(1.9), mode=Mode.realtime, hold=Hold.guide)
    lab.controller.warm_up(lab.obs(0))
    assert all(isinstance(question.prefix, Pulling) for question in lab.predictor.asked)


def _asked_by(mode: Mode, start: int) -> list[InferenceRequest]:
    lab = Lab(Telling(horizon=10, start=start), latency(1.9), mode=mode).warm()
    lab.play(30)
    return lab.predictor.asked


def test_what_came_early_does_not_move_the_switch_and_runs_replay():
    """Latencies between 1.1 and 1.9 ticks play as 1.9 does; one of 2.9 does not."""
    steady, jitter = Lab(Telling(), latency(1.9)).warm().play(40), Lab(Telling(), jittery).warm().play(40)
    assert np.array_equal(steady, jitter)
    assert not np.array_equal(steady, Lab(Telling(), latency(1.9, {3: 2.9})).warm().play(40))
    spread = [Lab(Telling(), Latency(0.1, 0.08)).warm() for _ in range(2)]
    assert np.array_equal(*[lab.play(60) for lab in spread])
    assert spread[0].controller.report == spread[1].controller.report


def test_a_late_answer_is_played_from_where_it_then_is():
    lab = Lab(Telling(), latency(1.9, {1: 3.9}), share=0.5).warm()
    played = lab.play(12)
    assert played[:, 0].tolist() == [0] * 8 + [4] * 2 + [8] * 2, "asked at 4, expected at 6, come at 8"
    assert (played[:, 0] + played[:, 1] == np.arange(12)).all()
    assert lab.controller.report.late == 1 and lab.controller.report.waited == 0


def test_when_nothing_is_left_to_play_it_waits_and_then_gives_up():
    lab = Lab(Telling(), latency(1.9, {1: 9.0})).warm()
    before = lab.clock.now_ns()
    played = lab.play(12)
    report = lab.controller.report
    assert (played[:, 0] + played[:, 1] == np.arange(12)).all(), "no action is skipped by waiting"
    # Asked at tick 4, there is something to play until tick 8; five ticks later the answer comes. The first decision of
    # the episode waits as well, at rest, and is not counted.
    assert report.waited == 1 and report.held_s == pytest.approx(5 * PERIOD_S)
    assert lab.clock.now_ns() - before == ns((12 + 5 + 1.9) * PERIOD_S)
    with pytest.raises(RobotError, match=r"no answer came within chunks\.patience_s=0\.2"):
        Lab(Telling(), latency(1.9, {1: 9.0}), patience_s=0.2).warm().play(12)


def test_a_question_that_failed_is_asked_again_while_there_is_something_to_play():
    lab = Lab(Failing({1, 2}), latency(1.9)).warm()
    played = lab.play(20)
    assert lab.controller.report.failed == 2 and (played[:, 0] + played[:, 1] == np.arange(20)).all()
    with pytest.raises(RobotError, match="the policy does not answer: the network is down"):
        Lab(Failing(set(range(1, 99))), latency(1.9)).warm().play(20)
    with pytest.raises(RobotError, match="the network is down"):
        Lab(Failing({0}), latency(1.9)).warm().play(1)


def test_an_ensemble_is_the_mean_of_all_that_speak_of_a_tick_the_oldest_first():
    """Against an explicit loop; a negative decay of the wrong end would be seen, as the last line says."""
    lab = Lab(Telling(horizon=5), latency(0.0), mode=Mode.ensemble, decay=0.3).warm()
    played = lab.play(12)
    backwards = False
    for tick in range(12):
        asked = range(max(0, tick - 4), tick + 1)
        weights = [np.exp(-0.3 * i) for i in range(len(asked))]
        for column, value in ((0, lambda t: t), (1, lambda t: tick - t), (2, lambda t: t)):  # noqa: B023
            expected = sum(w * value(t) for w, t in zip(weights, asked, strict=True)) / sum(weights)
            assert played[tick, column] == pytest.approx(expected, abs=1e-5)
        other = sum(w * t for w, t in zip(weights[::-1], asked, strict=True)) / sum(weights)
        backwards |= abs(other - played[tick, 0]) > 0.1
    assert backwards


def test_an_ensemble_asks_again_as_soon_as_it_was_answered():
    lab = Lab(Telling(), latency(1.9), mode=Mode.ensemble, decay=0.0).warm()
    played = lab.play(20)
    assert [int(q.obs["state"][0]) for q in lab.predictor.asked] == [0, *range(1, 20, 2)]
    assert (played[:, 0] + played[:, 1]).tolist() == list(range(20)), "every chunk speaks of the same tick"


@pytest.mark.slow
def test_what_a_flow_with_two_opinions_plays():
    """Chunks of -0.5 and of +0.5 are equally right. A queue changes sides at half of its seams, an ensemble plays what
    neither says. In real time a prefix keeps the flow on its side, the better the longer it is: of 114 seams, 48
    changed sides in a queue, 38 with two actions as prefix, and 7 with four. With two, and
    guided to the other two that are left: 7."""
    policy, changes, off = two_mode_flow(), {}, {}
    ways = {
        "queue": {},
        "real": {"mode": Mode.realtime, "overlap": 2},
        "guide": {"mode": Mode.realtime, "hold": Hold.guide},
        "mean": {"mode": Mode.ensemble},
    }
    for name, way in ways.items():
        lab = Lab(PolicyPredictor(policy), latency(1.9), blind=True, **way).warm()
        played = np.stack([lab.play(80, seed) for seed in range(1, 7)])[:, :, 0]
        changes[name] = (np.abs(np.diff(played, axis=1)) > 0.5).sum()
        off[name] = (np.abs(np.abs(played) - 0.5) > 0.3).mean()
    assert changes["queue"] > 30 and max(changes["real"], changes["guide"]) < 0.4 * changes["queue"]
    assert off["mean"] > 0.25 > 3 * off["queue"]


class Homing:
    """Says by how much to move, all of it in the first two actions: 0.8, and what is left."""

    facts = Facts(8, 4, 0, 1, True)

    def __call__(self, obs, prefix, seed, decision):
        away = -float(obs["state"][0])
        first = np.clip(away, -0.8, 0.8)
        return np.array([[first], [away - first], *[[0.0]] * 6], np.float32)


@pytest.mark.parametrize(("relative", "ticks", "arrives"), [(True, 1.9, True), (False, 1.9, False), (False, 0.0, True)])
def test_displacements_that_are_skipped_are_owed(relative, ticks, arrives):
    """Something pushes the arm away at tick 8, and only actions that are skipped would bring it back."""
    lab, place, largest = Lab(Homing(), latency(ticks), relative=relative).warm(), 1.0, 0.0
    lab.controller.reset(EVERYONE, [1])
    for tick in range(30):
        place += 1.5 * (tick == 8)
        action = float(lab.controller.step({"state": torch.full((1, 1), place)}))
        place, largest = place + action, max(largest, abs(action))
        lab.clock.advance_ns(ns(PERIOD_S))
    assert (abs(place) < 1e-5) == arrives and largest <= 1


def test_the_first_answers_are_no_latencies():
    def cold(seed, decision):
        return 1.0 if seed == 0 and decision < 3 else 1.9 * PERIOD_S

    lab = Lab(Telling(), cold, rehearsals=20, forget=3).warm()
    assert lab.controller.delay == 2
    with pytest.raises(Refused, match="takes 20 ticks of 50 ms"):
        Lab(Telling(), cold, rehearsals=20, forget=0).warm()


def test_the_delay_follows_what_is_measured_and_forgets():
    lab = Lab(Telling(), latency(0.9, dict.fromkeys(range(10, 40), 2.9)), window=10, share=0.95).warm()
    assert lab.controller.delay == 1
    lab.play(4 * 20)
    assert lab.controller.delay == 3
    lab.play(4 * 60)
    assert lab.controller.delay == 1, "a bad time is forgotten"


def test_what_was_thought_for_another_episode_is_not_played():
    lab = Lab(Telling(), latency(1.9)).warm()
    for ticks in (5, 6, 9):  # each ends while something is thought about
        played = lab.play(ticks)
        assert (played[:, 0] + played[:, 1] == np.arange(ticks)).all() and played[0, 2] == 0
    assert lab.controller.report.discarded == 2
    lab.controller.reset(torch.zeros(1, dtype=torch.bool), [9])
    assert float(lab.controller.step(lab.obs(9))[0, 0]) == 4, "an episode that was not reset goes on"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Lab(Telling(continues=False), mode=Mode.realtime), "takes no prefix"),
        (lambda: Lab(Telling(), mode=Mode.realtime, hold=Hold.guide), "which bundles and servers do not give"),
        (
            lambda: Lab(PolicyPredictor(small(steps=1)), mode=Mode.realtime, hold=Hold.guide).controller.warm_up(SEEN),
            "two steps",
        ),
        (lambda: Chunks(hold=Hold.guide), "is for realtime alone"),
        (lambda: Lab(PolicyPredictor(small(steps=1)), mode=Mode.realtime).controller.warm_up(SEEN), "do not depend on"),
        (lambda: Lab(Telling()).play(1), r"call warm_up\(obs\)"),
        (lambda: Lab(Telling(), latency(4.5)).warm(), "the 8 actions that are played of a chunk would be over"),
        (lambda: Lab(Telling(), reach=9), "at most 8"),
        (lambda: Lab(Telling(), reach=4, every=5), "chunks.every=5 must be at most chunks.reach=4"),
        (lambda: Chunks(every=0), "at least 1"),
        (lambda: Chunks(decay=-1.0), "decay=-1.0 must be at least 0"),
        (lambda: Chunks(overlap=-1), "overlap=-1 must be at least 0"),
        (lambda: Chunks(share=0.0), r"must lie in \(0, 1\]"),
        (lambda: Chunks(rehearsals=3, forget=3), "no latency is known"),
        (lambda: Latency(0.1, 0.2), "none that can be simulated"),
        (lambda: Lab(Failing(set())).controller.peek({}), "cannot be told beforehand"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_work_is_one_sentence(make, sentence):
    with pytest.raises((Refused, BurnishError), match=sentence):
        make()


SEEN = {"state": torch.zeros(1, 3)}


def test_a_prefix_that_is_continued_is_taken():
    Lab(PolicyPredictor(small(steps=3)), mode=Mode.realtime).controller.warm_up(SEEN)


# ---- on a robot that is a model ----


def twin() -> RobotEnv:
    mirror = Mirror(InsertConfig())

    def connect(start):
        config = TwinConfig(mjcf=mirror.mjcf, joints=mirror.joints, start=start.tolist())
        return LocalLink(Twin(config, VirtualClock()), Safety(rate_hz=100.0, blend_s=0.0))

    return RobotEnv(mirror, each_anew(connect))


def on_twin(env: RobotEnv, policy, latency=None, **chunks) -> RealtimeChunking:
    inference = Simulated(PolicyPredictor(policy), RobotTime(env), latency)
    controller = RealtimeChunking(inference, Chunks(**({"rehearsals": 3, "forget": 1} | chunks)), env.spec.control_hz)
    controller.warm_up({"state": torch.zeros(1, *policy.spec.obs.shapes["state"])})
    return controller


@pytest.mark.sim
def test_on_the_twin_no_latency_changes_nothing_and_a_latency_something():
    policy, env, seeds = load_policy(REFINED)[0], twin(), evaluation_seeds(2, stream="receding")
    expected = evaluate(ScaledEnv(env), ChunkController(policy, 1), seeds)
    assert evaluate(ScaledEnv(env), on_twin(env, policy), seeds) == expected and all(expected.success)
    slow = [evaluate(ScaledEnv(env), on_twin(env, policy, latency(0.9)), seeds) for _ in range(2)]
    assert slow[0] == slow[1] != expected
    env.close()


@pytest.mark.sim
def test_on_the_twin_waiting_holds_the_arm_and_giving_up_brings_it_to_rest():
    policy, env = load_policy(REFINED)[0], twin()
    controller = on_twin(env, policy, latency(0.9, {1: 12.0, 2: 99.0}), patience_s=0.7)
    scaled, rungs = ScaledEnv(env), []
    obs = scaled.reset(seeds=[1])
    controller.reset(EVERYONE, [1])
    with pytest.raises(RobotError, match="the robot has to stop"):
        for _ in range(20):
            obs = scaled.step(controller.step(obs)).obs
            rungs.append(env.link.state().rung)
    # In the first tick the control loop has not heard of the plan yet.
    assert controller.report.waited == 1 and set(rungs[1:]) == {Rung.RUN}
    assert env.link.state().rung is Rung.HOLD, "while it waited, the control loop held the arm"
    env.close()
    assert env.reports[-1]["counts"]["stopped"] == 1
