"""Tasks of the DeepMind Control Suite as worlds: what the suite itself gives, held for two ticks."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
import torch

from burnish.finetune.__main__ import GROUPS, FinetuneConfig
from burnish.policies.cli.cli import compose, to_object
from burnish.policies.core.errors import BurnishError
from burnish.sim.build import make_env

TASKS = ("cartpole-swingup", "reacher-easy", "walker-walk")


def chosen(task: str, steps: int = 500):
    words = ["method=tdmpc", "env=dm_control", f"env.kwargs={{task: {task}, repeat: 2}}", f"env.max_steps={steps}"]
    config = to_object(compose("finetune", FinetuneConfig, GROUPS["finetune"], [*words, "env.processes=0"]))
    return config.env


@pytest.mark.sim
@pytest.mark.skipif(not hasattr(mujoco.MjModel, "flex_bandwidth"), reason="dm_control does not know this MuJoCo yet")
@pytest.mark.parametrize("task", TASKS)
def test_a_task_plays_as_in_the_suite(require, task: str) -> None:
    require("dm_control")
    from dm_control import suite

    env = make_env(chosen(task, steps=5), 2)
    domain, _, name = task.partition("-")
    bare = suite.load(domain, name, task_kwargs={"random": 7})
    obs, found = env.reset(seeds=[7, 8]), bare.reset()
    rng, other = np.random.default_rng(0), env.reset(seeds=[8, 8])
    assert torch.equal(other["state"][0], other["state"][1])
    obs = env.reset(seeds=[7, 8])
    assert not torch.equal(obs["state"][0], obs["state"][1])
    for tick in range(5):
        seen = np.concatenate([np.ravel(found.observation[key]) for key in sorted(found.observation)])
        assert np.allclose(obs["state"][0].numpy(), seen, atol=1e-6)
        action = rng.uniform(-1, 1, env.spec.action.dim).astype(np.float32)
        step = env.step(torch.from_numpy(action).expand(2, -1))
        paid = 0.0
        for _ in range(2):
            found = bare.step(action)
            paid += found.reward
        assert float(step.reward[0]) == pytest.approx(paid, abs=1e-5)
        assert not bool(step.terminated.any()) and bool(step.truncated.all()) == (tick == 4)
        obs = step.obs


@pytest.mark.sim
def test_an_unknown_task_is_refused_with_those_that_there_are(require) -> None:
    require("dm_control")
    with pytest.raises(BurnishError, match="walker-walk"):
        make_env(chosen("walker-fly"), 1)
