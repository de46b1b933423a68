"""Recordings as prior data of residuals: labelled by a base, against a controller that plays along."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.offline.dataset import decisions
from burnish.offline.recorded import episodes_of, label_with_base
from burnish.policies.build import build_policy
from burnish.policies.controllers import ChunkController
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.seed import derive
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.core.views import Hidden, ahead
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.flow import FlowConfig
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig

LIMITS = ActionSpec((-2.0, 0.0), (2.0, 1.0))
LENGTHS = (7, 1, 4, 6)  # the base's queue is half played, or empty, where they end


def recordings(extra: bool = True) -> Episodes:
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=source)

    low, high = torch.tensor(LIMITS.low), torch.tensor(LIMITS.high)
    shapes: dict[str, tuple[int, ...]] = {"state": (3,)} | ({"goal": (1,)} if extra else {})
    episodes = [
        Episode(
            obs={key: draw(length + 1, *shape) for key, shape in shapes.items()},
            action=low + (high - low) * draw(length, 2),
            reward=draw(length),
            terminated=i % 2 == 0,
            truncated=i % 2 == 1,
            success=True,
            seed=0,
        )
        for i, length in enumerate(LENGTHS)
    ]
    return Episodes(episodes, EnvSpec(ObsSpec(shapes), LIMITS, 10.0, "test", 10))


def spec_of(history: int, noisy: bool) -> PolicySpec:
    shape = (2,) if noisy else None
    return PolicySpec(ObsSpec({"state": (3,)}), LIMITS, 5, 3, 1, history, noise_shape=shape)


def elementwise(history: int, asked: list | None = None) -> CallablePolicy:
    def act(obs: dict[str, Tensor], noise: Tensor) -> Tensor:
        assert set(obs) == {"state"}, "a base is shown what its specification names, and no more"
        state = obs["state"] if history == 1 else obs["state"][:, -1] - 0.3 * obs["state"][:, 0]
        if asked is not None:
            asked.extend(tuple(row) for row in noise.tolist())
        return torch.sin(3 * state[:, None, :2] + 0.2 * noise[:, None] + torch.arange(5.0)[:, None])

    return CallablePolicy(act, spec_of(history, noisy=True))


def flow(history: int) -> Any:
    net = DenoiserConfig(mlp=MlpBodyConfig([16]))
    return build_policy(FlowConfig(steps=2, net=net), spec_of(history, noisy=False))


@pytest.mark.parametrize("history", [1, 2])
@pytest.mark.parametrize("make", [elementwise, flow])
@pytest.mark.parametrize("rows", [2, 1024])
def test_labels_equal_a_controller_that_plays_along(make: Any, history: int, rows: int) -> None:
    """One episode after another, one tick after another. Equal to the bit for a base whose rows do not mix."""
    base, data, bound = make(history), recordings(), 0.2
    labelled = label_with_base(data, base, 0.9, bound, observe=list(Hidden), seed=4, rows=rows)
    one = PolicySpec(data.spec.obs, LIMITS, 1, 1, history=history)
    far = count = 0
    whole = episodes_of(decisions(data, one, 0.9))
    for i, ((obs, columns, final), (seen, kept, led)) in enumerate(
        zip(whole, episodes_of(labelled.replay), strict=True)
    ):
        controller = ChunkController(base, 1)
        controller.reset(torch.ones(1, dtype=torch.bool), [derive(4, "label", i)])
        for t in range(LENGTHS[i] + 1):
            now = final if t == LENGTHS[i] else {key: x[t : t + 1] for key, x in obs.items()}
            given = led if t == LENGTHS[i] else {key: x[t : t + 1] for key, x in seen.items()}
            hidden = ahead(controller, {"state": now["state"]}, list(Hidden))
            expected = controller.step({"state": now["state"]})
            exact = {"rtol": 0.0, "atol": 0.0} if make is elementwise else {}
            torch.testing.assert_close(given["base_action"], expected, **exact)
            for key, x in hidden.items():
                torch.testing.assert_close(given[key], x, **exact)
            assert all(torch.equal(given[key], now[key]) for key in now)
            if t < LENGTHS[i]:
                action = columns["action"][t]
                residual = kept["action"][t]
                # What the critic is shown is the recorded action, however far it is from the base.
                torch.testing.assert_close((expected + bound * residual).clamp(-1, 1), action, rtol=0, atol=1e-6)
                far += int(((action - expected).abs() > bound).sum())
                count += action.numel()
        for key in columns.keys() - {"action"}:
            assert torch.equal(columns[key], kept[key])
    assert labelled.beyond == far / count and 0.1 < labelled.beyond < 1


def test_each_chunk_is_drawn_once() -> None:
    asked: list = []
    label_with_base(recordings(), elementwise(1, asked), 0.9, 0.2)
    # An episode of T actions needs the base at ticks 0, 3, ... up to T, where it ends.
    assert len(asked) == len(set(asked)) == sum(length // 3 + 1 for length in LENGTHS)


def test_everything_is_in_reach_of_a_wide_bound() -> None:
    assert label_with_base(recordings(), elementwise(1), 0.9, 2.0).beyond == 0


@pytest.mark.parametrize("other", [{"action_mode": "velocity"}, {"control_hz": 20.0}], ids=str)
def test_recordings_of_other_actions_are_refused(other: dict[str, Any]) -> None:
    data = recordings()
    data = replace(data, spec=replace(data.spec, action_mode="position", control_hz=10.0))
    base = elementwise(1)
    base.spec = replace(base.spec, action_mode="position", control_hz=10.0)
    label_with_base(data, base, 0.9, 0.2)
    base.spec = replace(base.spec, **other)
    with pytest.raises(BurnishError, match="the recordings"):
        label_with_base(data, base, 0.9, 0.2)


def test_a_controller_cannot_label() -> None:
    with pytest.raises(BurnishError, match="give the policy itself"):
        label_with_base(recordings(), ChunkController(elementwise(1), 1), 0.9, 0.2)  # type: ignore[arg-type]
