"""The executed slice as a chunk for ``bc_loss``: where it lies, what is masked, and that only real actions count."""

from __future__ import annotations

import pytest
import torch

from burnish.offline.imitation import imitation_chunk
from burnish.policies.build import build_policy
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.flow import FlowConfig
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig


def spec_of(horizon: int, execute: int, start: int) -> PolicySpec:
    limits = ActionSpec((-1.0, -1.0), (1.0, 1.0))
    return PolicySpec(ObsSpec({"state": (3,)}), limits, horizon, execute, start)


@pytest.mark.parametrize(("horizon", "execute", "start"), [(1, 1, 0), (4, 4, 0), (6, 3, 1), (5, 2, 3), (7, 1, 2)])
def test_equals_a_slow_loop(horizon: int, execute: int, start: int) -> None:
    torch.manual_seed(0)
    steps = torch.arange(1, execute + 1).repeat(3)
    action = torch.rand(len(steps), execute, 2)
    action = torch.where((torch.arange(execute) < steps[:, None])[..., None], action, 0.0)  # as an outcome has it
    chunk, mask = imitation_chunk(spec_of(horizon, execute, start), action, steps)
    assert chunk.shape == (len(steps), horizon, 2) and mask.dtype == torch.bool
    for row, count in enumerate(steps.tolist()):
        for j in range(horizon):
            assert bool(mask[row, j]) == (start <= j < start + count)
            nearest = min(max(j - start, 0), count - 1)
            assert torch.equal(chunk[row, j], action[row, nearest])


def test_a_whole_chunk_is_itself() -> None:
    action = torch.rand(5, 4, 2)
    chunk, mask = imitation_chunk(spec_of(4, 4, 0), action, torch.full((5,), 4))
    assert torch.equal(chunk, action) and bool(mask.all())


def test_no_step_is_no_data() -> None:
    _, mask = imitation_chunk(spec_of(4, 2, 1), torch.rand(2, 2, 2), torch.tensor([0, 2]))
    assert mask.sum(1).tolist() == [0, 2]


def test_zeros_behind_the_end_have_no_influence() -> None:
    """The loss changes with what is real, and not with what a replay holds behind ``steps``."""
    spec = spec_of(6, 3, 1)
    policy = build_policy(FlowConfig(steps=2, net=DenoiserConfig(mlp=MlpBodyConfig([16]))), spec)
    action, steps = torch.rand(4, 3, 2) - 0.5, torch.tensor([1, 2, 3, 1])
    obs = {"state": torch.randn(4, 3)}

    def loss(given: torch.Tensor) -> torch.Tensor:
        chunk, mask = imitation_chunk(spec, given, steps)
        return policy.bc_loss(obs, chunk, mask=mask, generator=torch.Generator().manual_seed(1))

    real = (torch.arange(3) < steps[:, None])[..., None]
    assert torch.equal(loss(action), loss(torch.where(real, action, 9.0)))
    changed = loss(torch.where(real, action + 0.1, action))
    assert bool((changed != loss(action)).all())


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="expected shape"):
        imitation_chunk(spec_of(6, 3, 1), torch.rand(4, 6, 2), torch.ones(4, dtype=torch.int64))
