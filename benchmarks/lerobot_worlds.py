"""The world of `lerobot_round_trip.py` and of docs/lerobot.md: `reach`, observed in two parts, because LeRobot's
diffusion and ACT want a state of the robot beside pictures or a state of its environment.

Burnish makes it by ``env=gym env.id=lerobot_worlds:make``. Where LeRobot is, it is the environment type "burnish"
(``--env.discover_packages_path=lerobot_worlds --env.type=burnish``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import gymnasium
from torch import Tensor

from burnish.policies.core.spec import ObsSpec
from burnish.policies.core.types import Obs, Step
from burnish.policies.core.wrapper import Wrapper
from burnish.policies.gymnasium_adapters import as_gymnasium
from burnish.sim.build import make_env
from burnish.sim.tasks.reach import FACTS, ReachConfig

__path__: list[str] = []  # LeRobot looks for more modules in what it discovers
TASK, GOAL = ReachConfig(), len(FACTS)  # the facts about the goal are the last numbers of the state


class InTwoParts(Wrapper):
    """``state`` of the arm and ``environment_state`` of the goal, in place of one vector."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(make_env(TASK, num_envs))
        (width,) = self.env.spec.obs.shapes["state"]
        self.spec = replace(self.env.spec, obs=ObsSpec({"state": (width - GOAL,), "environment_state": (GOAL,)}))

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        return _parted(self.env.reset(mask, seeds))

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.env.step(action, active)
        return step._replace(obs=_parted(step.obs))


def _parted(obs: Obs) -> Obs:
    return {"state": obs["state"][:, :-GOAL], "environment_state": obs["state"][:, -GOAL:]}


class Named(gymnasium.Wrapper):
    """The names that LeRobot's evaluation expects of an environment."""

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**how)
        return self.observation(obs), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self.observation(obs), reward, terminated, truncated, {"is_success": bool(info["success"])}

    @property
    def observation_space(self) -> Any:
        return gymnasium.spaces.Dict(self.observation(self.env.observation_space))

    @staticmethod
    def observation(obs: Any) -> dict[str, Any]:
        return {"agent_pos": obs["state"], "environment_state": obs["environment_state"]}


def make(**unused: Any) -> gymnasium.Env:
    return Named(as_gymnasium(InTwoParts(1)))


def register() -> None:
    """The environment type "burnish" of LeRobot, with the task `reach`."""
    from lerobot.configs.types import FeatureType, PolicyFeature  # pyright: ignore[reportMissingImports]
    from lerobot.envs.configs import EnvConfig  # pyright: ignore[reportMissingImports]

    shapes = InTwoParts(1).spec.obs.shapes
    gymnasium.register("gym_burnish/reach", make, max_episode_steps=TASK.max_steps, disable_env_checker=True)

    @EnvConfig.register_subclass("burnish")
    @dataclass
    class BurnishEnv(EnvConfig):
        task: str = "reach"
        fps: int = 20

        def __post_init__(self) -> None:
            self.features = {
                "action": PolicyFeature(FeatureType.ACTION, (3,)),
                "agent_pos": PolicyFeature(FeatureType.STATE, shapes["state"]),
                "environment_state": PolicyFeature(FeatureType.ENV, shapes["environment_state"]),
            }
            named = {"agent_pos": "observation.state", "environment_state": "observation.environment_state"}
            self.features_map = {"action": "action", **named}

        @property
        def gym_kwargs(self) -> dict[str, Any]:
            return {}


if find_spec("lerobot"):
    register()
