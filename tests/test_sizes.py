"""Bounds of time and memory that no hostile file on disk shows: draws, work, a machine's memory, the first act."""

from __future__ import annotations

import pytest
import torch

from artefacts import good
from burnish.policies.build import build_policy, load_policy
from burnish.policies.compose import LARGEST_DRAWS, MOST_DRAWS, BestOf
from burnish.policies.controllers import controller_for
from burnish.policies.core import time_limit as patience
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import LARGEST_OBS, ActionSpec, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.data import lerobot, lerobot_files
from burnish.policies.data.lerobot import read_lerobot
from burnish.policies.diffusion import MOST_LEVELS, DiffusionConfig
from burnish.policies.flow import FlowConfig
from burnish.policies.nets.critic import CriticConfig
from burnish.policies.nets.unet1d import LEVELS, UNetConfig
from burnish.policies.runs import manifest
from burnish.sim.external.settings import GymConfig
from burnish.sim.external.worlds import LARGEST_PLAYED, ExternalEnv
from export_lab import small

LIMITS = ActionSpec((-1.0,), (1.0,))


def best_of(base, count: int) -> BestOf:
    critic = build_policy(CriticConfig(hidden=[4]), base.spec)
    return BestOf(base, critic, count)


def test_draws_are_bounded_also_of_draws_of_draws():
    base = small()
    assert best_of(base, MOST_DRAWS).draws == MOST_DRAWS
    with pytest.raises(BurnishError, match=f"more than {MOST_DRAWS}"):
        best_of(base, MOST_DRAWS + 1)
    half = best_of(base, 512)
    assert best_of(half, 2).draws == 1024
    with pytest.raises(BurnishError, match="comes to 1536 draws in all"):
        best_of(half, 3)


def test_draws_are_bounded_by_what_they_observe():
    side = 1024
    spec = PolicySpec(ObsSpec({"state": (2,), "image.top": (3, side, side)}), LIMITS, 2, 2)
    base = small(spec=spec)
    most = LARGEST_DRAWS // spec.inputs.nbytes
    assert best_of(base, most).draws == most
    with pytest.raises(BurnishError, match=r"would need .* bytes, and 268435456 are allowed"):
        best_of(base, most + 1)


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda n: FlowConfig(steps=n), 1000),
        (lambda n: DiffusionConfig(steps=n, train_steps=2000), 1000),
        (lambda n: DiffusionConfig(train_steps=n), MOST_LEVELS),
        (lambda n: UNetConfig(channels=[8] * n), LEVELS),
        (lambda n: CriticConfig(bins=n), 1 << 16),
    ],
)
def test_counts_are_bounded_and_the_bound_is_named(make, most):
    make(most)
    with pytest.raises(BurnishError, match=f"{most}"):
        make(most + 1)


def test_sizes_are_budgeted_in_bytes():
    """Numbers of four bytes, pictures of one."""
    for key, width in (("state", 4), ("image.top", 1)):
        fits = {"state": (LARGEST_OBS // 4,)} if width == 4 else {"image.top": (1, 1, LARGEST_OBS)}
        data = EnvSpec(ObsSpec(fits), LIMITS, 10.0, "velocity", 5)
        written = {"obs": {"shapes": {key: list(fits[key])}}, "action": {"low": [-1], "high": [1]}, "control_hz": 10.0,
                   "action_mode": "velocity", "max_steps": 5}  # fmt: skip
        assert EnvSpec.from_dict(written) == data
        written["obs"]["shapes"][key][-1] += 1
        with pytest.raises(BurnishError, match=r"would need .* bytes"):
            EnvSpec.from_dict(written)


@pytest.mark.parametrize("field", ["horizon", "execute", "history", "noise_shape", "control_hz"])
@pytest.mark.parametrize(
    "value", [pytest.param(10**400, id="long"), -1, 1.5, "x", [1], float("nan"), float("inf"), True]
)
def test_a_specification_of_anything_is_one_sentence(field, value):
    spec = PolicySpec(ObsSpec({"state": (2,)}), LIMITS, 4, 2, noise_shape=(4, 1), control_hz=10.0).to_dict()
    try:
        PolicySpec.from_dict({**spec, field: value})
    except BurnishError as error:
        assert len(str(error)) < 1000
    else:  # a rate is one; and a list of one number is a shape
        assert (field, value) in [("control_hz", 1.5), ("noise_shape", [1]), ("control_hz", True)]


def test_a_file_larger_than_the_memory_is_not_even_hashed(tmp_path, monkeypatch):
    good(tmp_path)
    size = (tmp_path / "checkpoint" / "state.safetensors").stat().st_size
    monkeypatch.setattr(manifest, "memory", lambda: size)
    load_policy(tmp_path / "checkpoint")
    monkeypatch.setattr(manifest, "memory", lambda: size - 1)
    monkeypatch.setattr(
        manifest, "_sha256", lambda path: pytest.fail(str(path)) if path.suffix == ".safetensors" else ""
    )
    with pytest.raises(BurnishError, match="more than the"):
        manifest._verify(tmp_path / "checkpoint" / "state.safetensors", {"size": size, "sha256": "x"})


def test_a_dataset_may_promise_half_of_the_memory(tmp_path, monkeypatch):
    """The other half is for the file that is read beside it."""
    good(tmp_path)
    promised = 10 * 3 * 4  # frames of three numbers
    monkeypatch.setattr(lerobot_files, "memory", lambda: 1 << 30)
    monkeypatch.setattr(lerobot, "memory", lambda: 2 * promised)
    assert len(read_lerobot(tmp_path / "dataset")) == 2
    monkeypatch.setattr(lerobot, "memory", lambda: 2 * promised - 1)
    with pytest.raises(BurnishError, match="more than half of"):
        read_lerobot(tmp_path / "dataset")
    monkeypatch.setattr(lerobot, "memory", lambda: 1 << 30)
    monkeypatch.setattr(lerobot_files, "memory", lambda: 2)
    with pytest.raises(BurnishError, match=r"unpacks to .* 1 are allowed"):
        read_lerobot(tmp_path / "dataset")


def test_the_first_act_has_a_limit_of_time(monkeypatch):
    """Of a thousand steps of a network that its checkpoint made slow; later acts have none, as a robot has its own."""
    policy, seen = small(steps=1000), {"state": torch.zeros(1, 3)}
    controller = controller_for(policy, 1)
    monkeypatch.setattr(patience, "FIRST_ACT_S", 0.0)
    with pytest.raises(BurnishError, match="did not choose its first action within 0 s"):
        controller.step(seen)
    monkeypatch.setattr(patience, "FIRST_ACT_S", 300.0)
    controller.step(seen)
    monkeypatch.setattr(patience, "FIRST_ACT_S", 0.0)
    for _ in range(policy.spec.execute):
        controller.step(seen)  # another decision is among them


def test_the_actions_that_a_gymnasium_world_keeps_are_bounded():
    most = LARGEST_PLAYED // 4
    with pytest.raises(BurnishError, match=r"env\.max_steps=268435457 would need"):
        ExternalEnv(1, GymConfig(max_steps=most + 1))
    assert ExternalEnv(1, GymConfig(max_steps=1000)).spec.max_steps == 1000
