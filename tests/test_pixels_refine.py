"""Every refinement on pictures: what looks learns, what is stored stays small, and nobody acts on a shifted image.

Random shifts (DrQ) belong to the updates of off-policy methods alone: a ratio of PPO compares the same picture twice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import burnish.policies.nets.encoder as encoder
from burnish.finetune.build import has, prepare
from burnish.finetune.loops import OffPolicy
from burnish.finetune.methods.expo import EXPOConfig
from burnish.finetune.ppo import PPOConfig
from burnish.offline.sac import SACConfig
from burnish.offline.sources import Mapped
from burnish.offline.td3 import TD3Config
from burnish.policies.controllers import ChunkController
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import agent_spec
from burnish.policies.nets.vision import VisionNet
from burnish.sim.build import make_env
from burnish.sim.point_reach import PointReachConfig
from seam import FITTED, METHODS, make_base, shrunk

WORLD = PointReachConfig(image=True, goal_in_state=True, control_hz=5.0, max_steps=8)


class Lab:
    """One method on 4 worlds, and how often pictures were shifted while it acted and while it learnt."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        env = ScaledEnv(make_env(WORLD, 4))
        kinds = [
            kind
            for kind in ("flow", "gaussian", "squashed")
            if has(make_base(kind, agent_spec(env.spec, 2)), METHODS[name].needs)
        ]
        self.base = make_base(kinds[0], agent_spec(env.spec, 2))
        config = shrunk(METHODS[name].config(**FITTED.get(name, {})))
        helper = {"expert": ChunkController(self.base, 4)} if hasattr(config, "intervention") else {}
        self.loop: Any = prepare(config, self.base, env, seed=1, **helper)
        self.shifts = {"acting": 0, "learning": 0}
        self.updates, self.batch = 0, {}
        self._doing = ""
        self._original = encoder.random_shift
        monkeypatch.setattr(encoder, "random_shift", self._shift)
        learner = self.loop.learner
        self._act, self._update = learner.actor.act, learner.update
        monkeypatch.setattr(learner.actor, "act", self._acting)
        monkeypatch.setattr(learner, "update", self._learning)

    def _shift(self, *arguments: Any) -> torch.Tensor:
        self.shifts[self._doing] += 1
        return self._original(*arguments)

    def _acting(self, *arguments: Any, **options: Any) -> Any:
        self._doing = "acting"
        return self._act(*arguments, **options)

    def _learning(self, source: Any) -> Any:
        self._doing = "learning"
        self.updates += 1
        return self._update(Mapped(source, self._keep))

    def _keep(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.batch = batch
        return batch

    def run(self, updates: int) -> None:
        for _ in range(60):
            self.loop.iterate()
            if self.updates >= updates:
                return
        raise AssertionError(f"{self.updates} updates in 60 iterations")


def looking(thing: Any, depth: int = 4) -> Iterator[VisionNet]:
    """Every camera network that can be reached from a learner."""
    if isinstance(thing, nn.Module):
        yield from (module for module in thing.modules() if isinstance(module, VisionNet))
    elif depth and isinstance(thing, dict):
        for part in thing.values():
            yield from looking(part, depth - 1)
    elif depth and type(thing).__module__.startswith("burnish."):
        yield from looking(getattr(thing, "__dict__", {}), depth - 1)


# Published for states alone, they have no setting for it; the other offline methods shift what imitates.
UNSHIFTED = ("cql", "td3_bc")


@pytest.mark.parametrize("name", [name for name in METHODS if name != "tdmpc"])  # a planner has no base
def test_what_looks_learns_and_what_is_stored_stays_small(name, monkeypatch):
    lab = Lab(name, monkeypatch)
    guests = {id(net) for net in looking(lab.base)}
    nets = {id(net): net for net in looking(lab.loop.learner) if id(net) not in guests}
    trained = [net for net in nets.values() if all(p.requires_grad for p in net.parameters())]
    alone = name in ("dagger", "grpo")  # these have no critic
    assert len(trained) >= (1 if alone else 2), "actor and critic look for themselves"
    before, base = copy.deepcopy([net.state_dict() for net in trained]), copy.deepcopy(lab.base.state_dict())
    lab.run(4 if isinstance(lab.loop, OffPolicy) else 2)
    for net, old in zip(trained, before, strict=True):
        for key, x in net.state_dict().items():
            assert not torch.equal(x, old[key]), f"{key} of a camera network received no gradient"
    for key, x in lab.base.state_dict().items():
        assert torch.equal(x, base[key]), "the base that was handed in stays as it is"
    assert lab.batch["obs"]["image.top"].dtype == torch.uint8
    if isinstance(lab.loop, OffPolicy):
        stored = lab.loop.replay.gather(torch.arange(len(lab.loop.replay)))
        for which in ("obs", "next_obs"):
            assert stored[which]["image.top"].dtype == torch.uint8
        assert stored["obs"]["image.top"].unique().numel() > 2, "pictures differ, or nothing was looked at"


@pytest.mark.parametrize("name", [name for name in METHODS if name != "tdmpc"])  # a planner has no base
def test_pictures_are_shifted_in_off_policy_updates_and_nowhere_else(name, monkeypatch):
    lab = Lab(name, monkeypatch)
    lab.run(4 if isinstance(lab.loop, OffPolicy) else 2)
    assert lab.shifts["acting"] == 0
    shifted = isinstance(lab.loop, OffPolicy) and name not in UNSHIFTED
    assert (lab.shifts["learning"] > 0) is shifted


def test_the_same_picture_is_acted_on_in_the_same_way_twice(monkeypatch):
    """Of what is deployed, whatever it was trained with."""
    lab = Lab("expo", monkeypatch)
    lab.run(2)
    obs = make_env(WORLD, 4).reset()
    acts = [lab.loop.learner.policy.act(obs, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*acts)


@pytest.mark.parametrize("config", [SACConfig, TD3Config, EXPOConfig, PPOConfig])
def test_a_shift_is_less_than_half_of_a_picture(config):
    with pytest.raises(BurnishError, match=r"image_shift=0.5 is a share of an image and must lie in \[0, 0.5\)"):
        config(image_shift=0.5)
    assert config(image_shift=0.0).image_shift == 0
