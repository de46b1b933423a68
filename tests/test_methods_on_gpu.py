"""Every method on a GPU: recorded as CUDA graphs it ends where it ends line by line, bit for bit."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import Any

import pytest
import torch
from test_seam import bases_of
from torch import Tensor

from burnish.finetune.build import prepare
from burnish.finetune.loops import OnPolicy
from burnish.policies.core.execute import Execution
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import agent_spec
from burnish.policies.runs.state_codec import encode, separate
from burnish.sim.build import make_env
from burnish.sim.point_reach import PointReachConfig
from seam import EXECUTE, FITTED, make_base, shrunk
from seam import METHODS as LOOPED

WORLD = PointReachConfig(max_steps=7, noise=0.2, goal_in_state=True, radius=0.4)
METHODS = [name for name in LOOPED if name != "dagger"]  # which learns from an expert alone
ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def executed_as(config: Any, mode: Execution) -> Any:
    """The settings, with this execution wherever they name one."""
    changes = {name: executed_as(x, mode) for name, x in vars(config).items() if is_dataclass(x)}
    changes |= {name: mode for name, x in vars(config).items() if isinstance(x, Execution)}
    return replace(config, **changes)


def state(name: str, mode: Execution, seed: int = 0) -> dict[str, Tensor]:
    """All numbers of the learner after some updates."""
    env = ScaledEnv(make_env(WORLD, 4, seed=seed, device=ON))
    kind = bases_of(name)[0]
    base = None if kind is None else make_base(kind, agent_spec(env.spec, EXECUTE)).to(ON)
    config = executed_as(shrunk(LOOPED[name].config(**FITTED.get(name, {}))), mode)
    loop = prepare(config, base, env, seed=seed, device=ON)
    for _ in range(6 if isinstance(loop, OnPolicy) else 30):
        loop.iterate()
    found = separate(encode(loop.learner.state_dict())[1])
    return {key: x for key, x in found.items() if x.is_floating_point()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_recorded_it_learns_what_it_learns_line_by_line(name, monkeypatch):
    """Bit for bit, with the optimiser of a recording, which counts its steps on the device."""
    recorded = state(name, Execution.cudagraph)
    monkeypatch.setattr("burnish.policies.core.execute._Graphed", lambda fn, generators: fn)
    plain, other = state(name, Execution.cudagraph), state(name, Execution.cudagraph, seed=1)
    assert plain.keys() == recorded.keys()
    for key, x in plain.items():
        assert torch.equal(recorded[key], x), f"{key} differs by {float((recorded[key] - x).abs().max())}"
    assert any(not torch.allclose(x, other[key], rtol=1e-2, atol=1e-3) for key, x in plain.items()), "it can fail"


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_it_learns_line_by_line_as_it_is_by_default(name):
    assert all(bool(x.isfinite().all()) for x in state(name, Execution.eager).values())
