"""Models of small worlds for the tests of imagination: random play, a fit, and the dynamics themselves."""

from __future__ import annotations

from typing import Any

import torch

from burnish.finetune.world_model.env import GuardConfig, ImaginedEnv
from burnish.finetune.world_model.model import Fit, ModelConfig, Prediction, WorldModel
from burnish.finetune.world_model.ticks import Tape, Ticks
from burnish.policies.core.types import Obs, VecEnv
from burnish.sim.point_reach import PointReach, PointReachConfig

SMALL = ModelConfig(members=3, hidden=[64, 64], updates=600)


def played(env: VecEnv, ticks: int, seed: int = 0) -> Ticks:
    """So many ticks of uniformly random actions in every world of ``env``, which takes actions in [-1, 1]."""
    tape, dice = Tape(env, Ticks()), torch.Generator().manual_seed(seed)
    tape.reset()
    for _ in range(ticks):
        step = tape.step(torch.rand(env.num_envs, env.spec.action.dim, generator=dice) * 2 - 1)
        if bool((ended := step.terminated | step.truncated).any()):
            tape.reset(ended)
    return tape.ticks


def fitted(env: VecEnv, ticks: Ticks, config: ModelConfig = SMALL) -> WorldModel:
    model = WorldModel(env.spec, config, seed=1)
    model.prepare(ticks)
    Fit(model, 2).steps(ticks.split()[0], config.updates)
    model.calibrate(ticks)
    return model


def imagined(model: WorldModel, ticks: Ticks, worlds: int, guard: GuardConfig, **options: Any) -> ImaginedEnv:
    """Worlds of ``model`` that begin at ``ticks``."""
    made = ImaginedEnv(model, worlds, guard, **options)
    made.begin(ticks)
    return made


class TrueModel(WorldModel):
    """The dynamics of PointReach themselves, in place of a fit; members disagree by ``doubt`` left of x = 0."""

    def __init__(self, config: PointReachConfig, doubt: float = 0.0) -> None:
        self.world, self.doubt = config, doubt
        super().__init__(PointReach(1, config).spec, SMALL)

    def predict(self, obs: Obs, action: Any, member: Any, noise: Any) -> Prediction:
        step = placed(PointReach(len(action), self.world), obs).step(action)
        success = step.info["success"]
        score = torch.stack([success.float(), torch.zeros(len(success))], 1)
        beyond = self.doubt * (obs["state"][:, 0] < 0)
        return Prediction(dict(step.obs), step.reward, success, torch.zeros_like(success), score, beyond)


def placed(world: PointReach, obs: Obs, rows: Any = None) -> PointReach:
    """``world`` in the states that it would show as ``obs``: those of all rows, or of ``rows``."""
    position, goal = obs["state"].clone().split(world.config.dim, 1)
    state = {"position": position, "velocity": torch.zeros_like(position), "goal": goal}
    everyone = torch.ones(world.num_envs, dtype=torch.bool) if rows is None else rows
    world._state = {key: torch.where(everyone[:, None], x, world._state[key]) for key, x in state.items()}
    return world


class BegunAt(PointReach):
    """PointReach whose episodes begin where those of ``starts`` do, by the same seeds."""

    def __init__(self, starts: ImaginedEnv, config: PointReachConfig) -> None:
        super().__init__(starts.num_envs, config)
        self.starts = starts

    def reset(self, mask: Any = None, seeds: Any = None) -> Obs:
        super().reset(mask, seeds)
        return placed(self, self.starts.reset(mask, seeds), mask)._observe()
