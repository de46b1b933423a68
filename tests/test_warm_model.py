"""``model_from=RUN``: a refinement that begins with the model of the world, and the ticks, of another run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_warm_critic import MBPO, SMALL, WORLD, first

from burnish.finetune import refine
from burnish.finetune.methods.dsrl import DSRLConfig
from burnish.finetune.methods.imagine import ImagineConfig
from burnish.finetune.methods.mbpo import MBPOConfig
from burnish.finetune.methods.rlpd import RLPDConfig
from burnish.finetune.refinement import FinetuneConfig, refinement
from burnish.finetune.warm_critic import newest_of
from burnish.finetune.world_model.model import ModelConfig
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.rewards import RewardConfig
from burnish.policies.core.spec import agent_spec
from burnish.sim.build import make_env
from burnish.sim.point_reach import Reward
from seam import make_base

__all__ = ["first"]
SIZE = ModelConfig(hidden=[8], updates=2, elites=3)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of MBPO that has fitted a model."""
    out = tmp_path_factory.mktemp("runs") / "played"
    refine(None, WORLD, method="mbpo", out=out, **SMALL, **MBPO)
    return out


def begun(method: Any, world: Any = WORLD, **settings: Any) -> Any:
    """The loop of a run before its first iteration."""
    base = make_base("flow", agent_spec(make_env(WORLD, 1).spec)) if isinstance(method, ImagineConfig) else None
    config = FinetuneConfig(method=method, env=world, worlds=2, total=20_000, seed=1, **settings)
    return refinement(config, base, tried=False)[1]


@pytest.mark.parametrize("method", [MBPOConfig(model=SIZE), ImagineConfig(DSRLConfig(), collect=2, model=SIZE)])
def test_the_model_and_its_ticks_are_those_of_the_run(method, played):
    state = newest_of("model_from", str(played)).children["learner"].state
    saved, ticks = state["model"], state["ticks"]
    kept, fresh = begun(method, model_from=str(played)), begun(method)
    own = [name for name in saved if name.endswith("weight") and name.startswith("dynamics")]
    assert own and all(torch.equal(kept.model.state_dict()[name], saved[name]) for name in saved)
    assert not any(torch.equal(fresh.model.state_dict()[name], saved[name]) for name in own), "else it begins anew"
    assert len(kept.ticks) == len(ticks["ticks"]["reward"]) > 0 and kept.ticks.episodes == ticks["episodes"]
    assert torch.equal(kept.ticks.all()["obs"]["state"], ticks["ticks"]["obs"]["state"]) and not len(fresh.ticks)
    before = len(kept.ticks)
    while len(kept.ticks) == before:
        kept.iterate()
    assert int(kept.ticks.all()["episode"].max()) >= ticks["episodes"], "what is played is numbered behind them"


def test_what_cannot_be_brought_is_one_sentence(first, played, tmp_path):
    given = {"model_from": str(played)}
    with pytest.raises(BurnishError, match=r"this method learns no model of the world .*take method=imagine or"):
        begun(RLPDConfig(), **given)
    with pytest.raises(BurnishError, match=r"the method of model_from=.*first has learnt no such model"):
        begun(MBPOConfig(model=SIZE), model_from=str(first))
    with pytest.raises(BurnishError, match=r"the model of .*played is another one: dynamics"):
        begun(MBPOConfig(model=ModelConfig(hidden=[9], elites=3)), **given)
    with pytest.raises(BurnishError, match=r"model_from=.* has no checkpoints"):
        begun(MBPOConfig(model=SIZE), model_from=str(tmp_path))


def test_numbers_that_mean_something_else_are_refused(played, monkeypatch):
    given: dict[str, Any] = {"model_from": str(played)}
    with pytest.raises(BurnishError, match=r"was learnt with other rewards; restore them"):
        begun(MBPOConfig(model=SIZE), rewards=RewardConfig(shift=-1.0), **given)
    with pytest.raises(BurnishError, match=r"was learnt with other env.reward; restore them"):
        begun(MBPOConfig(model=SIZE), replace(WORLD, reward=Reward.sparse), **given)
    begun(MBPOConfig(model=SIZE), replace(WORLD, max_steps=WORLD.max_steps + 1), **given)
    with pytest.raises(BurnishError, match=r"is another one|of another world"):
        begun(MBPOConfig(model=SIZE), replace(WORLD, goal_in_state=False), **given)
    checkpoint = newest_of("model_from", str(played))
    monkeypatch.setattr("burnish.finetune.warm_model.newest_of", lambda setting, run: checkpoint)
    action = checkpoint.children["policy"].config["spec"]["action"]
    action["low"] = [x / 2 for x in action["low"]]
    with pytest.raises(BurnishError, match=r"was learnt with other limits of actions"):
        begun(MBPOConfig(model=SIZE), **given)
    action["low"] = [x * 2 for x in action["low"]]
    checkpoint.children["learner"].state["ticks"]["ticks"]["reward"][0] = float("nan")
    with pytest.raises(BurnishError, match=r"are not all finite numbers"):
        begun(MBPOConfig(model=SIZE), **given)
