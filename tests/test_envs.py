"""The contract of every world in the table, with its default configuration."""

from __future__ import annotations

from importlib import resources

import pytest
import torch

from burnish.policies.core.config import to_data
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.types import VecEnv
from burnish.sim.build import ENVS, Named, env_name, make_env, world_from
from burnish.sim.locomotion.settings import HopperConfig
from burnish.sim.task import Backend
from burnish.sim.tasks.reach import ReachConfig

SEEDS = [11, 12, 13]


def play(env, seeds, steps):
    """Everything observed and paid in a number of random steps; ended worlds idle."""
    source = torch.Generator().manual_seed(0)
    obs = env.reset(None, seeds)
    active = torch.ones(len(seeds), dtype=torch.bool)
    seen = [obs["state"].clone()]
    for _ in range(steps):
        unit = torch.rand(3, env.spec.action.dim, generator=source)[: len(seeds)]
        low, high = torch.tensor(env.spec.action.low), torch.tensor(env.spec.action.high)
        step = env.step(low + unit * (high - low), active)
        assert env.spec.obs.check(step.obs) == len(seeds)
        for flag in (step.terminated, step.truncated):
            assert flag.shape == (len(seeds),) and flag.dtype == torch.bool
        assert not (step.terminated & step.truncated & active).any()
        kept = torch.where(active[:, None], step.obs["state"], seen[-1])
        seen.append(kept)
        active = active & ~(step.terminated | step.truncated)
    return torch.stack(seen), active


def test_every_world_has_a_choice():
    names = {f.name.removesuffix(".yaml") for f in resources.files("burnish.configs").joinpath("env").iterdir()}
    assert names >= set(ENVS)
    # The others are variants of a task, which name it first, presets of other packages, and a robot without a world.
    folder = resources.files("burnish.configs").joinpath("env")
    for name in names - set(ENVS) - {"joints"}:
        preset = folder.joinpath(f"{name}.yaml").read_text().startswith("defaults: [gym_schema]\n")
        assert preset or any(name.startswith(f"{task}_") for task in ENVS), name


CASES = [  # but ManiSkill, whose import takes each process 8 s: test_maniskill.py, test_world_conformance.py
    *(pytest.param(name, id=name) for name in ENVS if name != "maniskill"),
    pytest.param(HopperConfig(max_steps=6, backend=Backend.warp), id="hopper-warp", marks=pytest.mark.slow),
    pytest.param(ReachConfig(max_steps=4, backend=Backend.warp), id="reach-warp", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", CASES)
def test_contract(name):
    if not isinstance(name, str):
        pytest.importorskip("mujoco_warp")
    env = make_env(name, 3)
    assert isinstance(env, VecEnv) and env.num_envs == 3
    seen, active = play(env, SEEDS, env.spec.max_steps)
    assert not active.any(), "an episode ends within max_steps"
    again, _ = play(make_env(name, 3, seed=99), SEEDS, env.spec.max_steps)
    assert torch.equal(seen, again), "given seeds decide everything"
    alone, _ = play(make_env(name, 1), SEEDS[:1], 1)
    assert torch.equal(alone[0], seen[0, :1])


@pytest.mark.parametrize("name", ENVS)
def test_a_world_is_remembered_as_plain_data(name):
    config = ENVS[name].config()
    assert env_name(config) == name
    assert world_from(Named(name=name, config=to_data(config))) == config
    with pytest.raises(BurnishError, match="no setting 'gravty'"):
        world_from({"name": name, "config": {"gravty": 1}})


def test_a_world_that_nobody_knows_is_refused():
    with pytest.raises(BurnishError, match="no environment 'two_mod'; did you mean 'two_mode'"):
        world_from({"name": "two_mod"})
