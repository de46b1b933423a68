"""Inference in a process of its own, from a checkpoint, a bundle or a server."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

from burnish.policies.build import load_policy
from burnish.real_robot.clock import SECOND, MonotonicClock, ns
from burnish.real_robot.errors import Refused, RobotError
from burnish.real_robot.inference.chunk_settings import Chunks
from burnish.real_robot.inference.predictors import PolicyPredictor, loaded
from burnish.real_robot.inference.realtime_chunking import RealtimeChunking
from burnish.real_robot.inference.worker import BundlePredictor, InferenceRequest, SubprocessWorker
from export_lab import small
from realtime_chunking_lab import EVERYONE, HZ, PERIOD_S, REFINED, Deciding, dying, refusing


class Pace:
    """Ticks at absolute deadlines, as `RobotEnv` has them."""

    def __init__(self) -> None:
        self.clock, self.took_s = MonotonicClock(), []

    def play(self, step, ticks: int) -> None:
        next_ns = self.clock.now_ns()
        for tick in range(ticks):
            began_ns = self.clock.now_ns()
            step({"state": torch.full((1, 1), float(tick))})
            self.took_s.append((self.clock.now_ns() - began_ns) / SECOND)
            next_ns = max(next_ns + ns(PERIOD_S), self.clock.now_ns())
            self.clock.sleep_until_ns(next_ns)


@pytest.mark.slow
def test_inference_for_two_ticks_does_not_stretch_them():
    """The median, since a busy machine may be late now and then. A fifth of a tick is a ninth of the inference."""
    inference = SubprocessWorker(partial(Deciding, 0.09))
    controller = RealtimeChunking(inference, Chunks(reach=8, rehearsals=8, forget=2, share=0.5, patience_s=5), HZ)
    try:
        said = controller.warm_up({"state": torch.zeros(1, 1)})
        assert said["p50"] >= 90 and said["delay"] >= 2
        controller.reset(EVERYONE, [1])
        pids, free = set(), Pace()

        def step(obs):
            pids.add(int(controller.step(obs)[0, 2]))

        free.play(step, 41)
    finally:
        controller.close()
    assert pids == {inference.pid}
    assert controller.report.answers >= 5, "nothing was thought meanwhile"
    assert np.median(free.took_s[1:]) < 0.2 * PERIOD_S

    predictor, blocking = Deciding(0.09), Pace()
    blocking.play(lambda obs: predictor({"state": obs["state"][0].numpy()}, None, 0, 0), 4)
    assert min(blocking.took_s) > 1.5 * PERIOD_S, "the control does not block"


@pytest.mark.slow
def test_a_checkpoint_answers_the_same_in_a_process_of_its_own():
    policy = load_policy(REFINED)[0]
    inference = SubprocessWorker(partial(loaded, partial(load_policy, str(REFINED))))
    state = torch.randn(1, *policy.spec.obs.shapes["state"], generator=torch.Generator().manual_seed(0))
    here = PolicyPredictor(policy)
    try:
        assert inference.facts == here.facts
        for decision, prefix in ((0, None), (1, np.full((2, 4), 0.25, np.float32))):
            question = InferenceRequest({"state": state[0].numpy()}, prefix, 7, decision)
            inference.ask(question)
            answer = inference.wait(inference.clock.now_ns() + 20 * SECOND)
            assert np.array_equal(answer.chunk, here(*question))
        # A thought that nobody wants any more is not taken for the answer to the next question.
        inference.ask(question)
        inference.discard()
        inference.ask(question._replace(seed=8))
        answer = inference.wait(inference.clock.now_ns() + 20 * SECOND)
        assert np.array_equal(answer.chunk, here(*question._replace(seed=8))) and inference.poll() is None
    finally:
        inference.close()


def test_a_bundle_answers_without_torch(tmp_path):
    from burnish.real_robot.export.exporter import ExportConfig, export
    from burnish.real_robot.export.runtime import RowNoise, load

    export(ExportConfig(out=str(tmp_path / "bundle"), samples=10), small(), {})
    code = "import sys, burnish.real_robot.inference.worker; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 0
    predictor, policy = BundlePredictor(str(tmp_path / "bundle")), load(tmp_path / "bundle")
    obs, prefix = {"state": np.full(3, 0.5, np.float32)}, np.zeros((1, 2), np.float32)
    assert predictor.facts == PolicyPredictor(small()).facts._replace(guides=False), "it cannot follow a pull"
    assert np.array_equal(predictor(obs, prefix, 3, 4), policy.act(obs, prefix=prefix, source=RowNoise([3], [4])))
    assert np.allclose(predictor(obs, None, 3, 4), PolicyPredictor(small())(obs, None, 3, 4), atol=1e-5)


def test_a_server_answers_as_its_policy_does(require):
    require("websockets")
    from burnish.real_robot.inference.action_sources import ServedConfig
    from burnish.real_robot.inference.predictors import ClientPredictor
    from server_lab import served

    with served(small()) as server:
        predictor, obs = ClientPredictor(ServedConfig(server.url)), {"state": np.full(3, 0.5, np.float32)}
        here = PolicyPredictor(small())(obs, None, 3, 4)
        start = small().spec.start
        assert not predictor.facts.continues and predictor.facts.horizon == len(here) - start
        assert np.allclose(predictor(obs, None, 3, 4), here[start:], atol=1e-5)
        assert not np.allclose(predictor(obs, None, 3, 5), here[start:], atol=1e-3), "the noise is not sent along"


def test_a_server_is_told_that_an_episode_begins(require, monkeypatch):
    """Once, and also where the first request of the episode was lost."""
    require("websockets")
    from burnish.real_robot.inference.action_sources import ServedConfig
    from burnish.real_robot.inference.client import PolicyClient, PolicyUnavailable
    from burnish.real_robot.inference.predictors import ClientPredictor
    from server_lab import served

    def lost(self):
        raise PolicyUnavailable("the server does not answer")

    policy, told = small(), []
    policy.reset = lambda: told.append(1)
    with served(policy) as server:
        predictor, obs = ClientPredictor(ServedConfig(server.url)), {"state": np.full(3, 0.5, np.float32)}
        for decision, times in ((0, 1), (1, 1), (0, 2), (1, 2)):
            predictor(obs, None, 3, decision)
            assert len(told) == times
        with monkeypatch.context() as patch, pytest.raises(PolicyUnavailable):
            patch.setattr(PolicyClient, "reset", lost)
            predictor(obs, None, 4, 0)
        predictor(obs, None, 4, 1)
        assert len(told) == 3


def test_a_process_that_dies_is_one_sentence():
    inference = SubprocessWorker(dying)
    inference.ask(InferenceRequest({"state": np.zeros(1)}, None, 0, 0))
    with pytest.raises(RobotError, match=r"has ended \(exit status 7\)"):
        inference.wait(inference.clock.now_ns() + 20 * SECOND)
    inference.close()


@pytest.mark.slow
def test_a_policy_that_cannot_be_made_is_one_sentence():
    with pytest.raises(Refused, match="in a process of its own: the disk is gone"):
        SubprocessWorker(refusing)
