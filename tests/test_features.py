"""What a policy's own network makes of its cameras, in the place of pictures: for agents, and for models of a world."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from burnish.finetune.build import prepare
from burnish.finetune.feature_env import FeatureWorlds
from burnish.finetune.loops import planned
from burnish.finetune.methods.imagine import ImagineConfig
from burnish.finetune.methods.mbpo import MBPOConfig
from burnish.finetune.world_model.model import ModelConfig
from burnish.finetune.world_model.ticks import Ticks
from burnish.policies.build import describe, load_policy
from burnish.policies.controllers import controller_for
from burnish.policies.core.chunk import HistoryEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import agent_spec
from burnish.policies.features import require_features
from burnish.policies.runs.checkpoint import save
from burnish.sim.build import make_env
from burnish.sim.point_reach import PointReachConfig
from seam import FITTED, METHODS, make_base, shrunk

WORLD = PointReachConfig(image=True, goal_in_state=True, control_hz=5.0, max_steps=12)


def worlds(history: int = 1) -> Any:
    env = ScaledEnv(make_env(WORLD, 4, seed=2))
    return env if history == 1 else HistoryEnv(env, history)


def base_of(kind: str, history: int = 1) -> Any:
    base = make_base(kind, agent_spec(worlds(history).spec, 3, history))
    for part in base.modules():  # a camera's picture matters as much as the state
        if hasattr(part, "vision"):
            torch.nn.init.normal_(next(reversed(list(part.vision.parameters()))), std=1.0)
    return base


def played(env: Any, controller: Any, ticks: int = 6) -> torch.Tensor:
    """The actions of a policy that sees pictures."""
    obs, found = env.reset(), []
    controller.reset(torch.ones(4, dtype=torch.bool))
    for _ in range(ticks):
        found.append(controller.step(obs))
        obs = env.step(found[-1]).obs
    return torch.stack(found)


@pytest.mark.parametrize("history", [1, 2])
@pytest.mark.parametrize("kind", ["flow", "diffusion", "gaussian"])
def test_a_policy_acts_on_features_as_on_pictures(kind, history):
    env = worlds(history)
    base = base_of(kind, history)
    looking = require_features(base, "a test")
    seen = FeatureWorlds(worlds(history), looking)
    obs, kept = env.reset(), seen.reset()
    looking.feature_shapes().check(kept)
    assert "vision.top" in kept and "image.top" not in kept and looking.features(kept) is not obs
    noise = torch.randn(4, *base.spec.noise_shape, generator=torch.Generator().manual_seed(1))
    wanted = base.act(obs, noise=noise)
    assert torch.equal(base.act(kept, noise=noise), wanted)
    other = {**kept, "vision.top": kept["vision.top"].flip(0)}
    assert not torch.equal(base.act(other, noise=noise), wanted), "the picture does matter"


@pytest.mark.parametrize("name", ["dsrl", "residual_td3", "residual_ppo", "dppo", "expo"])
def test_a_policy_of_pictures_is_refined_in_imagination(name, monkeypatch, tmp_path):
    env = worlds()
    base = base_of("diffusion" if name == "dppo" else "flow")
    inner = shrunk(METHODS[name].config(**FITTED.get(name, {})))
    small = {"collect": 4, "imagined": 40, "imagined_worlds": 4, "gap": 2.0}
    outer = ImagineConfig(inner, **small, model=ModelConfig(members=2, hidden=[16], updates=5))
    loop: Any = prepare(outer, base, env, seed=1)
    before = [x.clone() for x in loop.learner.policy.state_dict().values()]
    monkeypatch.setattr("burnish.finetune.methods.imagine.lacking", lambda ticks: "")
    for _ in range(planned(loop, 2 * 4 * WORLD.max_steps)):
        loop.iterate()
    assert loop.ticks.all()["obs"].keys() == {"state", "vision.top"}
    policy = loop.learner.policy
    assert any(not torch.equal(x, y) for x, y in zip(before, policy.state_dict().values(), strict=True))
    looking, after = require_features(base, "a test"), require_features(policy, "a test")
    for x, y in zip(looking.vision.parameters(), after.vision.parameters(), strict=True):
        assert torch.equal(x, y), "the network that looks stays as it is"
    save(tmp_path / "refined", config=describe(policy), state=policy.state_dict())
    found = load_policy(tmp_path / "refined")[0]
    one, two = (played(worlds(), controller_for(x, 4, greedy=True)) for x in (policy, found))
    assert torch.equal(one, two) and one.std() > 0


def test_agents_that_steer_see_features():
    env = worlds()
    config: Any = shrunk(METHODS["dsrl"].config(features=True))
    loop: Any = prepare(config, base_of("flow"), env, seed=1, probe=False)
    for _ in range(20):
        loop.iterate()
    assert loop.replay.sample(4)["obs"].keys() == {"state", "vision.top"}
    assert "vision.top" in loop.learner.policy.latent.spec.obs.shapes
    assert loop.learner.policy.act(worlds().reset(), greedy=True).abs().max() <= 1


def test_refusals():
    env = worlds()
    base = base_of("flow")
    with pytest.raises(BurnishError, match=r"a GaussianPolicy of its own .* dsrl"):
        prepare(ImagineConfig(METHODS["rpd"].config()), base, env)
    with pytest.raises(BurnishError, match="no policy was given"):
        prepare(MBPOConfig(), None, env)
    with pytest.raises(BurnishError, match="data= is about pictures"):
        prepare(ImagineConfig(), base, env, prior=Ticks())
