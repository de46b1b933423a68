"""Imitation: exact resume, the averaged policy is what is saved, and nothing of the held-out episodes leaks."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math

import pytest
import torch

from burnish.policies.build import build_policy, load_policy
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.execute import Execution, Precision
from burnish.policies.core.normalize import Scaling
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.diffusion import DiffusionConfig
from burnish.policies.flow import FlowConfig
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.imitate import ImitateConfig, ImitationLearner, Schedule, imitate, learning_rate
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from burnish.policies.runs.checkpoint import newest
from burnish.policies.runs.run import Run

NET = DenoiserConfig(mlp=MlpBodyConfig(hidden=[16], time_dim=8))
CONFIGS = {
    "flow": FlowConfig(net=NET),
    "shortcut": FlowConfig(net=NET, shortcut=True, steps=1),
    "diffusion": DiffusionConfig(net=NET),
    "gaussian": GaussianConfig(hidden=[16]),
}
TRAIN = ImitateConfig(steps=30, batch=16, warmup=5, log_every=3, save_every=10, eval_every=15, valid_fraction=0.2)


def episodes(image=False):
    source = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"state": (3,), **({"image.top": (3, 16, 16)} if image else {})}
    made = []
    for seed in range(10):
        steps = 5 + seed
        obs = {"state": torch.randn(steps + 1, 3, generator=source) * 5 + seed}
        if image:
            obs["image.top"] = torch.randint(0, 256, (steps + 1, 3, 16, 16), generator=source, dtype=torch.uint8)
        action = torch.rand(steps, 2, generator=source) * 2 - 1
        made.append(Episode(obs, action, torch.zeros(steps), True, False, True, seed))
    return Episodes(made, EnvSpec(ObsSpec(shapes), ActionSpec((-1, -1), (1, 1)), 10.0, "velocity", 20))


def learner(kind="flow", train=TRAIN, history=1, image=False, seed=0, data=None, **options):
    data = data or episodes(image)
    spec = PolicySpec(data.spec.obs, data.spec.action, 4, 2, start=history - 1, history=history)
    config = CONFIGS[kind] if isinstance(kind, str) else kind
    return ImitationLearner(build_policy(config, spec, seed=seed), data, train, seed=seed, **options)


def fingerprint(made):
    """One hash over weights, average, optimizer, random generators and counters."""
    digest = hashlib.sha256()

    def feed(value):
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                feed(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                feed(item)
        else:
            digest.update(repr(value).encode())

    feed(made.state_dict())
    return digest.hexdigest()


def metrics(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


class StopAt(Run):
    """A run that is told to stop at a step, as Ctrl-C would."""

    def __init__(self, *args, stop, **kwargs):
        super().__init__(*args, **kwargs)
        self.stop_step = stop

    def steps(self, total):
        for step in super().steps(total):
            self._stop.requested = self._stop.requested or step + 1 >= self.stop_step
            yield step


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_resume_equals_an_uninterrupted_run(kind, tmp_path):
    whole = learner(kind)
    with Run(tmp_path / "whole", {}, tensorboard=False) as run:
        assert imitate(whole, run)
    first = learner(kind)
    with StopAt(tmp_path / "parts", {}, tensorboard=False, stop=14) as run:
        assert not imitate(first, run)
    assert first.step == 14
    second = learner(kind, seed=0)
    with Run(tmp_path / "parts", {}, tensorboard=False, resume=True) as run:
        assert imitate(second, run)
    assert fingerprint(second) == fingerprint(whole)
    # Interrupting saves, but adds no line of metrics of its own.
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert fingerprint(learner(kind)) != fingerprint(whole), "the fingerprint must see training"


def test_resume_after_a_kill_repeats_what_was_lost(tmp_path):
    """The process dies at step 25, after the checkpoint of step 20: metrics of 21 to 25 are cut and made again."""

    class Killed(Exception):
        pass

    class Dies(Run):
        def log(self, step, values):
            super().log(step, values)
            if step > 24:
                raise Killed

    whole = learner()
    with Run(tmp_path / "whole", {}, tensorboard=False) as run:
        imitate(whole, run)
    with pytest.raises(Killed), Dies(tmp_path / "killed", {}, tensorboard=False) as run:
        imitate(learner(), run)
    again = learner()
    with Run(tmp_path / "killed", {}, tensorboard=False, resume=True) as run:
        assert run.start == 20
        imitate(again, run)
    assert fingerprint(again) == fingerprint(whole)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"precision": Precision.bfloat16}, {"execution": Execution.compile}])
def test_other_ways_to_execute_resume_exactly(change):
    config = dataclasses.replace(TRAIN, **change)
    whole, first, second = (learner(train=config) for _ in range(3))
    for _ in range(20):
        whole.update()
    for _ in range(9):
        first.update()
    second.load_state_dict(first.state_dict())
    for _ in range(11):
        second.update()
    assert fingerprint(second) == fingerprint(whole)
    assert fingerprint(first) != fingerprint(whole), "loading must not tie two learners together"


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_what_is_saved_is_the_average_and_acts_the_same_when_loaded(kind, tmp_path):
    made = learner(kind)
    with Run(tmp_path / "run", {}, tensorboard=False) as run:
        imitate(made, run, origin={"env": {"name": "two_mode", "config": {}}})
    obs = {"state": torch.randn(4, 3, generator=torch.Generator().manual_seed(1))}
    for path in (tmp_path / "run", tmp_path / "run/checkpoints/00000030/policy"):
        policy, origin = load_policy(path)
        assert origin["env"]["name"] == "two_mode"
        drawn = [p.act(obs, generator=torch.Generator().manual_seed(2)) for p in (policy, made.average, made.policy)]
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2]), "the last weights are not their average"
    assert newest(tmp_path / "run/checkpoints").children.keys() == {"policy", "learner"}


def test_normalisers_see_only_the_training_episodes():
    made = learner(train=ImitateConfig(valid_fraction=0.5, normalize=Scaling.minmax))
    state = made.windows.columns["state"]
    scaler = made.policy.net.encoder.normalizer.scaler("state")
    torch.testing.assert_close(scaler(state).amax(0), torch.ones(3))
    torch.testing.assert_close(scaler(state).amin(0), -torch.ones(3))
    held_out = scaler(made.valid.columns["state"])
    assert held_out.abs().max() > 1.001, "held-out data would fit exactly, had it been seen"
    assert torch.equal(made.average.net.encoder.normalizer.scaler("state").shift, scaler.shift)


def test_validation_repeats_itself_and_leaves_training_alone():
    made, plain = learner(), learner()
    for _ in range(3):
        made.update()
        made.validate()
        plain.update()
    assert fingerprint(made) == fingerprint(plain)
    assert float(made.validate()["valid_loss"]) == float(made.validate()["valid_loss"])


def test_images_and_history_train():
    made = learner(history=2, image=True)
    before = made.policy.net.encoder.vision["image/top"].state_dict()
    before = {name: x.clone() for name, x in before.items()}
    for _ in range(3):
        assert math.isfinite(float(made.update()["loss"]))
    after = made.policy.net.encoder.vision["image/top"].state_dict()
    assert all(not torch.equal(before[name], x) for name, x in after.items())


def test_rate_warms_up_and_follows_the_cosine():
    config = ImitateConfig(steps=110, warmup=10, lr=1.0, min_lr_ratio=0.1)
    rates = [learning_rate(config, step) for step in range(110)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[60] == pytest.approx(0.1 + 0.9 * 0.5)
    assert learning_rate(config, 110) == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    flat = ImitateConfig(steps=110, warmup=10, lr=1.0, schedule=Schedule.constant)
    assert learning_rate(flat, 100) == 1.0


def test_the_rate_reaches_the_optimizer_also_after_a_resume():
    """Loading an optimizer's state replaces its rate; it must still follow the schedule."""
    made, other = learner(), learner()
    for _ in range(4):
        made.update()
    other.load_state_dict(made.state_dict())
    other.update()
    assert float(other.optimizer.param_groups[0]["lr"]) == pytest.approx(learning_rate(TRAIN, 4))


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"lr": -1.0}, {"ema": 1.0}, {"valid_fraction": 1.0}, {"batch": 0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(BurnishError, match=f"train.{next(iter(wrong))}"):
        ImitateConfig(**wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_a_recorded_graph_trains_as_the_plain_loop_does_on_a_gpu(kind):
    """Same seed, same windows, same noise: the recorded update must follow the eager one; another seed must not."""

    def weights(mode, seed=0):
        data = episodes()
        spec = PolicySpec(data.spec.obs, data.spec.action, 4, 2)
        config = dataclasses.replace(TRAIN, execution=mode)
        policy = build_policy(CONFIGS[kind], spec, seed=0, device="cuda")
        made = ImitationLearner(policy, data, config, seed=seed, device="cuda")
        for _ in range(12):
            made.update()
        return torch.cat([p.detach().flatten() for p in policy.parameters()])

    eager, graphed, other = weights(Execution.eager), weights(Execution.cudagraph), weights(Execution.eager, seed=1)
    # A capturable optimizer forms its bias correction on the device, in float32: 1e-5 of a rate of 1e-3 and 12 steps.
    torch.testing.assert_close(graphed, eager, rtol=0, atol=1e-5)
    assert (other - eager).abs().max() > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_mixed_precision_trains_on_a_gpu(kind):
    data = episodes()
    spec = PolicySpec(data.spec.obs, data.spec.action, 4, 2)
    made = ImitationLearner(
        build_policy(CONFIGS[kind], spec, device="cuda"),
        data,
        dataclasses.replace(TRAIN, precision=Precision.bfloat16),
        device="cuda",
    )
    losses = [float(made.update()["loss"]) for _ in range(10)]
    assert all(math.isfinite(loss) for loss in losses)
    assert all(p.dtype == torch.float32 for p in made.policy.parameters())
