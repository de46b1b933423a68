"""Models of small worlds for the tests of imagination: random play, a fit, and the dynamics themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from burnish.finetune.world_model.env import GuardConfig, ImaginedEnv
from burnish.finetune.world_model.model import Fit, ModelConfig, Prediction, WorldModel
from burnish.finetune.world_model.ticks import Tape, Ticks
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.core.types import Obs, Step, VecEnv
from burnish.sim.point_reach import PointReach, PointReachConfig, Reward
from burnish.sim.torch_world import TorchWorld

# A radius (m) so wide that random play succeeds in a third of its episodes.
REACHING = PointReachConfig(reward=Reward.sparse, goal_in_state=True, radius=0.5, max_steps=25)
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


def fitted(env: VecEnv, ticks: Ticks, config: ModelConfig = SMALL, **options: Any) -> WorldModel:
    model = WorldModel(env.spec, config, seed=1, **options)
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


@dataclass
class PendulumConfig:
    """A rod of 1 m with a mass at its end, driven by a torque at its joint."""

    mass: float = 1.0  # kg
    damping: float = 0.1  # of the joint, N m s
    max_steps: int = 25


class Pendulum(TorchWorld[PendulumConfig]):
    """It shows cos, sin and the speed; products of two of these say nearly all of where a torque leads."""

    Settings = PendulumConfig

    def _set_up(self) -> Any:
        action = ActionSpec((-5.0,), (5.0,))
        spec = EnvSpec(ObsSpec({"state": (3,)}), action, 20.0, "torque", self.config.max_steps)
        return spec, {"x": torch.zeros(self.num_envs, 3)}

    def known_dynamics(self, obs: Obs, action: Any) -> Obs:
        cos, sin, speed = obs["state"].unbind(1)
        torque, dt = action[:, 0].clamp(-5, 5), 1 / self.spec.control_hz
        speed = speed + dt * (9.81 * sin + (torque - self.config.damping * speed) / self.config.mass)
        angle = torch.atan2(sin, cos) + dt * speed
        return {"state": torch.stack([angle.cos(), angle.sin(), speed], 1)}

    def reset(self, mask: Any = None, seeds: Any = None) -> Obs:
        mask = self._clock.begin(mask, seeds)
        angle, speed = (self._clock.noise("reset").uniform((self.num_envs, 2)) * 2 - 1).mul(3.14).unbind(1)
        begun = torch.stack([angle.cos(), angle.sin(), speed], 1)
        self._state = {"x": torch.where(mask[:, None], begun, self._state["x"])}
        return {"state": self._state["x"]}

    def step(self, action: Any, active: Any = None) -> Step:
        new = self.known_dynamics({"state": self._state["x"]}, action)["state"]
        active = self._clock.advance(active)
        self._state = {"x": torch.where(active[:, None], new, self._state["x"])}
        late = self._clock.tick >= self.config.max_steps
        return Step({"state": self._state["x"]}, torch.zeros(len(late)), torch.zeros_like(late), late, {})


def pendulums(seed: int = 0, **changes: Any) -> ScaledEnv:
    return ScaledEnv(Pendulum(8, PendulumConfig(**changes), seed=seed))


@torch.no_grad()
def error(model: WorldModel) -> float:
    """Of the first member's mean after a tick of random play that it has not seen, in deviations of a change."""
    data = played(pendulums(seed=7), 50, seed=9).all()
    state, after = model.state_of(data["obs"]), model.state_of(data["next_obs"])
    mean = model.changes_of(data["obs"], data["action"])[0][0] * model.changes.scale + model.changes.shift
    wrong = model.expected(data["obs"], data["action"]) + mean - after
    return float(wrong.square().mean().sqrt() / (after - state).std(0).square().mean().sqrt())
