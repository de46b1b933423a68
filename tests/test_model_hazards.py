"""Hazards of a model of a world: numbers that begin to move, fits that diverge, promises where nothing was played."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from imagine_lab import REACHING, SMALL, TrueModel, imagined, played

from burnish.finetune.world_model.env import Guard, GuardConfig
from burnish.finetune.world_model.model import Fit, WorldModel
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import ObsSpec
from burnish.policies.core.wrapper import Wrapper
from burnish.policies.measure.evaluate import evaluate, evaluation_seeds
from burnish.sim.point_reach import PointReach


def test_a_number_that_was_constant_at_first_is_scaled_once_it_moves():
    class Widened(Wrapper):
        """A third number of the state, which is 5 until it moves by ``room``."""

        room = 0.0

        def _seen(self, obs: Any) -> Any:
            moved = 5 + self.room * obs["state"][:, :1]
            return {"state": torch.cat([obs["state"][:, :2], moved], 1)}

        def reset(self, mask=None, seeds=None):
            return self._seen(self.env.reset(mask, seeds))

        def step(self, action, active=None):
            step = self.env.step(action, active)
            return step._replace(obs=self._seen(step.obs))

    env = Widened(ScaledEnv(PointReach(8, REACHING)))
    env.spec = replace(env.spec, obs=ObsSpec({"state": (3,)}))
    model = WorldModel(env.spec, SMALL)
    model.prepare(played(env, 20))
    first = model.states.scale.clone()
    assert first[2] == 1 and model.states.shift[2] == 5
    model.prepare(played(env, 20, seed=1))
    assert torch.equal(model.states.scale, first), "what the networks know stays"
    env.room = 0.01
    model.prepare(played(env, 20))
    assert model.states.scale[2] < 0.01 and model.changes.scale[2] < 0.01
    assert torch.equal(model.states.scale[:2], first[:2])


def test_a_fit_that_is_no_longer_finite_ends_in_a_sentence():
    env = ScaledEnv(PointReach(8, REACHING))
    ticks = played(env, 20)
    model = WorldModel(env.spec, SMALL)
    model.prepare(ticks)
    fit = Fit(model, 2)
    fit.optimizer.param_groups[0]["lr"] = float("inf")
    with pytest.raises(BurnishError, match=r"no longer finite after a fit; lower its lr"):
        fit.steps(ticks.split()[0], 2)


@pytest.mark.parametrize("kind", [Guard.none, Guard.cut, Guard.halt, Guard.penalty])
def test_a_guard_keeps_a_search_out_of_what_the_model_only_believes(kind):
    """The model promises a reward left of x = 0, where nothing was played and its members disagree. A search among
    policies follows it there without a guard, and what is real falls as what is imagined rises."""

    class Trap(TrueModel):
        def predict(self, obs: Any, *given: Any) -> Any:
            found = super().predict(obs, *given)
            return found._replace(reward=found.reward + 0.3 * (obs["state"][:, 0] < 0))

    class Drawn:
        def __init__(self, left: float) -> None:
            self.left = left

        def reset(self, mask, seeds=None): ...

        def step(self, obs):
            return torch.lerp(3 * (obs["state"][:, 2:] - obs["state"][:, :2]), torch.tensor(-1.0), self.left).clamp(
                -1, 1
            )

    ticks = played(ScaledEnv(PointReach(16, REACHING, seed=3)), 150)
    reaching = replace(REACHING, radius=0.1)
    world = imagined(Trap(reaching, doubt=2.0), ticks, 64, GuardConfig(kind))
    world.limit = 1.0
    searched, seeds = [Drawn(left) for left in (0.0, 0.3, 0.6, 1.0)], evaluation_seeds(64)
    promised = [evaluate(world, x, seeds).summary()["return_mean"] for x in searched]
    true = [evaluate(ScaledEnv(PointReach(64, reaching)), x, seeds).summary()["success_rate"] for x in searched]
    best = max(range(len(searched)), key=lambda i: promised[i])
    assert true[0] > 0.6 and true[-1] < 0.2, true
    if kind is Guard.none:
        assert promised[best] > promised[0] + 1 and true[best] < true[0] - 0.5
    else:
        assert best == 0
