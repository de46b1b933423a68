"""A vision-language-action model in the methods' own hands: each refines one whose actions are padded, for a few
decisions, and delivers a policy that acts. What the methods teach is measured by benchmarks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from burnish.finetune.build import prepare
from burnish.finetune.table import METHODS
from burnish.policies.build import build_policy
from burnish.policies.controllers import controller_for
from burnish.policies.core.spec import ChunkConfig, chunk_spec
from burnish.policies.vla.pi0 import Pi0Config
from burnish.policies.vla.sizes import ExpertConfig, LanguageConfig, VisionConfig
from burnish.policies.vla.smolvla import SmolVLA, TinyVLAConfig
from burnish.policies.vla.words import Words
from burnish.sim.build import make_env, seen_by
from burnish.sim.discs import SENTENCES, DiscsConfig

ON_POLICY = ("dppo", "reinflow", "flow_sde", "residual_ppo")
OFF_POLICY = ("dsrl", "residual_td3", "rfs", "expo", "recap")


def settings_of(kind: str) -> Any:
    small = {"vision": VisionConfig(16, 4, 8, 1, 2, 8, 2), "language": LanguageConfig(32, 8, 2, 2, 1, 4, 8)}
    if kind == "tiny_vla":
        return TinyVLAConfig(steps=2, action_dim=5, frozen=True, expert=ExpertConfig(8, 2, 8), **small)
    small["vision"] = VisionConfig(16, 4, 16, 1, 2, 8, 1)
    return Pi0Config(steps=2, action_dim=5, expert=ExpertConfig(8, 2, 8, 1), adaptive=kind == "pi0.5", **small)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *((method, "tiny_vla") for method in (*ON_POLICY, *OFF_POLICY)),
        *((method, "pi0") for method in ("flow_sde", "dsrl", "residual_td3")),
        ("flow_sde", "pi0.5"),
    ],
)
def test_a_method_refines_it(method, kind):
    spec = chunk_spec(make_env(DiscsConfig(), 1).spec, ChunkConfig(4, 2)).reading(Words.of(SENTENCES))
    base: SmolVLA = build_policy(settings_of(kind), spec, seed=1)
    before = {name: x.clone() for name, x in base.state_dict().items()}
    env = seen_by(base.spec, make_env(DiscsConfig(max_steps=6), 4, seed=3))
    config: Any = METHODS[method].config()
    if method in ON_POLICY:
        config.loop.decisions_per_update, config.ppo.epochs = 4, 1
    else:
        config.loop.warmup, config.loop.batch = 8, 8
    if method == "recap":
        config.head_start = 0
    if method == "dppo":
        config.trained_steps = 2
    loop = prepare(config, base, env, seed=1, probe=False)
    for _ in range(3):
        loop.iterate()
    assert all(torch.equal(x, before[name]) for name, x in base.state_dict().items()), "the base is left alone"
    refined = loop.learner.policy
    controller = controller_for(refined, 4)
    controller.reset(torch.ones(4, dtype=torch.bool), [1, 2, 3, 4])
    assert controller.step(env.reset(None, [1, 2, 3, 4])).abs().max() <= 1
    if method in ("dppo", "reinflow", "flow_sde"):  # trained is the expert; the rest is the base's own memory
        places = {p.data_ptr() for p in base.parameters()}
        named = dict(refined.named_parameters())
        frozen = {name for name in named if ".vlm." in name or ".paligemma." in name}
        assert frozen and all(named[name].data_ptr() in places for name in frozen)
        assert any(
            not torch.equal(x, before[name.removeprefix("last.")]) for name, x in named.items() if "expert" in name
        )
