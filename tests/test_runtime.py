"""Exported policies at work: without torch, in time, and never a number out of bad input."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from burnish.policies.compose import Greedy
from burnish.policies.controllers import controller_for
from burnish.policies.core import seed as torch_seed
from burnish.policies.core.scale import Scale
from burnish.real_robot.errors import Refused
from burnish.real_robot.export.bundle import Schema, write
from burnish.real_robot.export.exporter import assembled
from burnish.real_robot.export.runtime import ChunkController, ExportedPolicy, RowNoise, derive
from export_lab import GOALS, by_hand, one_step_flow, residual, small

STATE = np.array([0.1, -0.2, 0.3], np.float32)
ZERO = np.zeros((2, 2), np.float32)


@pytest.mark.parametrize(("seeds", "index"), [([0], [0]), ([2**62 + 5, -7, 3], [9, 0, 1000])])
def test_the_noise_is_that_of_the_policy_side(seeds, index):
    ours, theirs = RowNoise(seeds, index), torch_seed.RowNoise(seeds, index)
    for _ in range(3):  # the third draw is another than the first
        assert np.array_equal(ours.uniform((len(seeds), 4, 3)), theirs.uniform((len(seeds), 4, 3)).numpy())
    # Logarithm and cosine of two libraries, whose last bits may differ.
    np.testing.assert_allclose(ours.normal((len(seeds), 500)), theirs.normal((len(seeds), 500)).numpy(), atol=1e-14)
    assert derive(5, "episodes", 3) == torch_seed.derive(5, "episodes", 3)


PROBE = """
import sys, time
def used():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    peak = int(status["VmHWM"].split()[0]) / 1024  # the rusage of a child begins with that of its parent
    return time.process_time(), peak
begin, _ = used()
import numpy as np
numpy_s, numpy_mib = used()
import burnish.real_robot.export.runtime as runtime
imported_s, _ = used()
import json
policy = runtime.load(sys.argv[1])
controller = runtime.ChunkController(policy, seed=1)
controller.reset(7)
for i in range(20):
    action = controller.step({"state": np.full(48, 0.1 * i)})
names = [name for name in sys.modules if name.split(".")[0] in ("torch", "onnx", "safetensors", "scipy")]
ours = sorted(name for name in sys.modules if name.startswith("burnish."))
cost = {"s": imported_s - begin, "numpy_s": numpy_s - begin, "mib": used()[1] - numpy_mib}
print(json.dumps(cost | {"foreign": names, "ours": ours, "action": action.tolist()}))
"""


def test_it_runs_without_torch_fast_and_small(tmp_path):
    """Measured against NumPy, because machines and the memory that their systems count differ, and the best of three,
    because others compute here too. Importing takes 1.1 times what NumPy alone takes (.19 s in all; mujoco would make
    it 1.7). Onnxruntime adds 19 MB, its session 12 and our own code 4."""
    write(assembled(one_step_flow()), tmp_path / "b")
    words = [sys.executable, "-c", PROBE, str(tmp_path / "b")]
    said = [json.loads(subprocess.run(words, check=True, capture_output=True, cwd=tmp_path).stdout) for _ in range(3)]
    assert said[0]["foreign"] == [] and all(name.startswith("burnish.real_robot") for name in said[0]["ours"])
    assert np.isfinite(said[0]["action"]).all() and said[0]["action"] == said[1]["action"]
    assert min(x["s"] for x in said) <= 1.5 * min(x["numpy_s"] for x in said)
    assert min(x["mib"] for x in said) <= 40


def test_a_chunk_is_made_within_100_microseconds():
    """p99 of the calmest of up to 400 rounds, of this thread's own time: whoever else computes on this machine is not
    what is measured. A round takes 7 ms, about as long as a slice of the scheduler's."""
    policy, rng = ExportedPolicy(assembled(one_step_flow())), np.random.default_rng(0)
    obs, noise = {"state": rng.standard_normal(48, np.float32)}, rng.standard_normal((8, 7), np.float32)
    policy.act(obs, noise=noise)
    rounds = []
    while len(rounds) < 400 and min(rounds, default=100.0) >= 100:
        took = []
        for _ in range(100):
            begin = time.thread_time_ns()
            policy.act(obs, noise=noise)
            took.append(time.thread_time_ns() - begin)
        rounds.append(float(np.percentile(took, 99)) / 1000)
    assert min(rounds) < 100, rounds


class Unreadable:
    def __array__(self, *_, **__):
        raise RuntimeError("no")


BAD = {
    "no_mapping": ([1, 2, 3], "is a mapping"),
    "lacking": ({}, "lacks 'state'"),
    "shape": ({"state": STATE[:2]}, "has the shape"),
    "batch": ({"state": STATE[None]}, "has the shape"),
    "nan": ({"state": STATE * np.nan}, "NaN or infinity"),
    "infinite": ({"state": [0.0, 1.0, float("inf")]}, "NaN or infinity"),
    "text": ({"state": ["a", "b", "c"]}, "but a number is needed"),
    "objects": ({"state": np.array([None, 1, 2])}, "but a number is needed"),
    "ragged": ({"state": [[1], [2, 3], 4]}, "cannot be read as numbers"),
    "unreadable": ({"state": Unreadable()}, "cannot be read as numbers"),
    "complex": ({"state": STATE + 1j}, "but a number is needed"),
    "beyond_float32": ({"state": STATE.astype(np.float64) * 1e300}, "NaN or infinity"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_observations_are_a_sentence_and_change_nothing(name):
    controller, untouched = (ChunkController(ExportedPolicy(by_hand()), seed=1) for _ in range(2))
    obs, sentence = BAD[name]
    for one in (controller, untouched):
        one.reset()
    for i in range(5):
        with pytest.raises(Refused, match=sentence) as refusal:
            controller.step(obs)
        assert "\n" not in str(refusal.value)
        assert np.array_equal(controller.step({"state": STATE * i}), untouched.step({"state": STATE * i}))


def test_bad_noise_and_prefixes_are_a_sentence():
    policy = ExportedPolicy(by_hand())
    obs = {"state": STATE}
    for how, sentence in [
        ({"noise": ZERO[:1]}, "has the shape"),
        ({"noise": ZERO * np.nan}, "NaN or infinity"),
        ({}, "acts on noise"),
        ({"noise": ZERO, "prefix": np.zeros((3, 2))}, "has the shape"),
        ({"noise": ZERO, "prefix": np.zeros((1, 3))}, "has the shape"),
        ({"noise": ZERO, "prefix": 3}, "has the shape"),
    ]:
        with pytest.raises(Refused, match=sentence):
            policy.act(obs, **how)
    with pytest.raises(Refused, match="does not correct single actions"):
        policy.correct(obs, ZERO[0])
    with pytest.raises(Refused, match=r"call reset\(\) first"):
        ChunkController(policy).step(obs)


def test_noise_prefix_and_greed():
    policy, obs = ExportedPolicy(by_hand()), {"state": STATE}
    assert np.array_equal(policy.act(obs, greedy=True), policy.act(obs, noise=ZERO))
    moved = policy.act(obs, noise=ZERO + 0.1, prefix=[[0.5, -0.5]])
    assert np.array_equal(moved[0], [0.5, -0.5]) and not np.array_equal(moved[1], policy.act(obs, greedy=True)[1])
    assert np.array_equal(policy.act(obs, noise=ZERO), policy.act(obs, noise=ZERO, prefix=np.zeros((0, 2))))
    kept = policy.act(obs, greedy=True)
    policy.act({"state": -STATE}, greedy=True)
    assert np.array_equal(kept, policy.act(obs, greedy=True)), "a chunk that was handed out changed afterwards"


def test_actions_are_within_the_limits_to_the_last_bit():
    schema = Schema({"state": (3,)}, (-0.1, 0.3), (0.7, 0.9), 2, 2, noise_shape=(2, 2))
    policy = ExportedPolicy(by_hand(schema=schema))
    actions = policy.to_actuator(np.array([[-1, -1], [1, 1], [-3, 7]], np.float32))
    assert np.array_equal(actions, [[-0.1, 0.3], [0.7, 0.9], [-0.1, 0.9]])


@pytest.mark.parametrize(
    "make",
    [small, lambda: residual("step"), lambda: Greedy(residual("step")), lambda: small(spec=GOALS)],
    ids=["flow", "step", "greedy_step", "history"],
)
@pytest.mark.parametrize("greedy", [False, True])
def test_the_controller_does_what_that_of_the_policy_side_does(make, greedy):
    """Two episodes of its own seeds and one of a given seed, in the units of the actuators."""
    policy = make()
    spec = policy.spec
    ours = ChunkController(ExportedPolicy(assembled(policy)), seed=3, greedy=greedy)
    theirs = controller_for(policy, 1, seed=3, greedy=greedy)
    everyone, scale, rng = torch.ones(1, dtype=torch.bool), Scale(spec.action), np.random.default_rng(0)
    played = []
    for seed in (None, None, 11):
        ours.reset(seed)
        theirs.reset(everyone, None if seed is None else [seed])
        frames: list[np.ndarray] = []
        for _ in range(7):
            obs = {key: rng.standard_normal(shape).astype(np.float32) for key, shape in spec.obs.shapes.items()}
            frames = ([*frames, obs["state"]] if frames else [obs["state"]] * spec.history)[-spec.history :]
            seen = obs if spec.history == 1 else {**obs, "state": np.stack(frames)}
            expected = theirs.step({key: torch.as_tensor(x)[None] for key, x in seen.items()})
            played.append(ours.step(obs))
            np.testing.assert_allclose(played[-1], scale.to_actuator(expected)[0].numpy(), atol=2e-5)
    assert np.std(played, axis=0).min() > 0.01, "the policy always does the same, so this proves nothing"
