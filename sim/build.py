"""The table of worlds: name -> configuration, builder. A world joins by one row here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..policies.core.chunk import HistoryEnv
from ..policies.core.config import from_data, to_data
from ..policies.core.errors import BurnishError, did_you_mean
from ..policies.core.language import Spoken
from ..policies.core.scale import ScaledEnv
from ..policies.core.spec import PolicySpec, check_compatible, unlike_names
from ..policies.core.types import VecEnv
from ..policies.core.wrapper import feature_names
from ..policies.runs.stored_world import Named, plain_world
from .discs import DiscsConfig
from .external.maniskill import ManiSkillConfig
from .external.settings import GymConfig, RemoteConfig
from .locomotion.settings import AntConfig, HalfCheetahConfig, HopperConfig, HumanoidConfig, Walker2dConfig
from .multi_task import MultiTaskConfig
from .point_reach import PointReachConfig
from .task import Backend
from .tasks.avoid import AvoidConfig
from .tasks.insert import InsertConfig
from .tasks.pick_place import PickPlaceConfig
from .tasks.push import PushConfig
from .tasks.reach import ReachConfig
from .tasks.stack import StackConfig
from .tasks.tabletop import TabletopConfig
from .toy import ConstantRewardConfig, LQRConfig
from .two_mode import TwoModeConfig


@dataclass(frozen=True)
class EnvKind:
    """``builder`` is "module:attribute" in this folder, imported when it is first needed: simulators are heavy. It
    makes the worlds, or the task that `BatchedMujoco` makes worlds of (``task``)."""

    config: type
    builder: str
    doc: str
    task: bool = False


ENVS: dict[str, EnvKind] = {
    "point_reach": EnvKind(PointReachConfig, "point_reach:PointReach", "a point goes to a goal drawn per episode"),
    "lqr": EnvKind(LQRConfig, "toy:LQR", "linear dynamics and quadratic cost, with the value known by Riccati"),
    "constant_reward": EnvKind(ConstantRewardConfig, "toy:ConstantReward", "reward 1 for ever, V = 1 / (1 - gamma)"),
    "two_mode": EnvKind(TwoModeConfig, "two_mode:TwoMode", "around an obstacle, where the mean of both ways crashes"),
    "discs": EnvKind(DiscsConfig, "discs:Discs", "words say which of three coloured discs a dot goes to"),
    "multi_task": EnvKind(MultiTaskConfig, "multi_task:MultiTask", "several worlds as one, told apart by words"),
    "gym": EnvKind(
        GymConfig, "external.worlds:ExternalEnv", "any Gymnasium environment with continuous actions, by env.id"
    ),
    "remote": EnvKind(RemoteConfig, "external.worlds:ExternalEnv", "the same in another Python or machine"),
    "maniskill": EnvKind(ManiSkillConfig, "external.maniskill:worlds", "a task of ManiSkill 3, on the CPU or a GPU"),
    "half_cheetah": EnvKind(
        HalfCheetahConfig, "locomotion.robots:HalfCheetah", "Gymnasium's HalfCheetah-v5", task=True
    ),
    "hopper": EnvKind(HopperConfig, "locomotion.robots:Hopper", "Gymnasium's Hopper-v5", task=True),
    "walker2d": EnvKind(Walker2dConfig, "locomotion.robots:Walker2d", "Gymnasium's Walker2d-v5", task=True),
    "ant": EnvKind(AntConfig, "locomotion.robots:Ant", "Gymnasium's Ant-v5", task=True),
    "humanoid": EnvKind(HumanoidConfig, "locomotion.robots:Humanoid", "Gymnasium's Humanoid-v5", task=True),
    "reach": EnvKind(ReachConfig, "tasks.reach:Reach", "an arm's tool goes to a point and stays there", task=True),
    "pick_place": EnvKind(PickPlaceConfig, "tasks.pick_place:PickPlace", "a cube is put onto a low stand", task=True),
    "stack": EnvKind(StackConfig, "tasks.stack:Stack", "a cube is put onto another", task=True),
    "tabletop": EnvKind(
        TabletopConfig, "tasks.tabletop:Tabletop", "words say which of three cubes to lift, push or stack", task=True
    ),
    "push": EnvKind(PushConfig, "tasks.push:Push", "a T on the desk is pushed into a pose, side by side", task=True),
    "avoid": EnvKind(AvoidConfig, "tasks.avoid:Avoid", "a stylus goes between posts, by any of 24 routes", task=True),
    "insert": EnvKind(InsertConfig, "tasks.insert:Insert", "a square peg goes into a hole with little room", task=True),
}

WORLDS = {name: kind.config for name, kind in ENVS.items()}  # choices of env= on the command line


def env_name(config: Any) -> str:
    """The name in the table of worlds under which a configuration of this type stands."""
    for name, kind in ENVS.items():
        if type(config) is kind.config:
            return name
    raise BurnishError(
        f"{type(config).__name__} is not the configuration of an environment ({', '.join(sorted(ENVS))})"
    )


def env_config(name_or_config: Any) -> Any:
    """A configuration as it is, or the defaults of the environment of that name."""
    if not isinstance(name_or_config, str):
        env_name(name_or_config)
        return name_or_config
    if name_or_config not in ENVS:
        raise BurnishError(f"there is no environment {name_or_config!r}; {did_you_mean(name_or_config, ENVS)}")
    return ENVS[name_or_config].config()


def named(config: Any) -> Named:
    """A configuration of a world as plain data, with the name of the world."""
    return Named(name=env_name(config), config=to_data(config))


def world_from(data: Mapping[str, Any]) -> Any:
    """The configuration that a dataset or a checkpoint remembers as ``{"name": ..., "config": {...}}``."""
    if not isinstance(data, Mapping):
        raise BurnishError(f"the stored world must be a name and its settings, but it is {data!r:.80}; give env=...")
    name, settings = data.get("name"), data.get("config", {})
    if strange := sorted(map(str, data.keys() - {"name", "config"})):
        raise BurnishError(
            f"a stored world is a name and its settings below config, but this one says {strange[0]!r:.80} beside them"
        )
    if not isinstance(name, str) or name not in ENVS:
        raise BurnishError(f"there is no environment {name!r:.80}; {did_you_mean(str(name)[:80], ENVS)}")
    if not isinstance(data, Named):
        plain_world(settings, "the world that is stored with the policy or the data")
    return from_data(ENVS[name].config, settings, "env")


def make_env(name_or_config: Any, num_envs: int, seed: int = 0, device: torch.device | str = "cpu") -> VecEnv:
    """N worlds in actuator units; ``ScaledEnv`` puts policies on top."""
    config = env_config(name_or_config)
    kind = ENVS[env_name(config)]
    module, attribute = kind.builder.split(":")
    build = getattr(importlib.import_module(f".{module}", __package__), attribute)
    if kind.task:
        if config.backend is Backend.warp:
            from .warp_batch import BatchedWarp

            return BatchedWarp(build(config), num_envs, seed=seed, device=device)
        from .batch import BatchedMujoco

        return BatchedMujoco(build(config), num_envs, seed=seed, device=device)
    return build(num_envs, config, seed=seed, device=device)


def origin_of(env: Any) -> dict[str, Any] | None:
    """A configured world as the plain data that datasets and checkpoints remember."""
    return None if env is None else named(env)


def world_for(
    spec: PolicySpec, data: Mapping[str, Any] | None, worlds: int, device: torch.device, seed: int = 0
) -> VecEnv:
    """The world as a policy sees it. ``seed`` decides its own episodes."""
    return seen_by(spec, raw_world(data, worlds, device, seed))


def raw_world(data: Mapping[str, Any] | None, worlds: int, device: torch.device, seed: int = 0) -> VecEnv:
    """The worlds that plain data of a dataset or checkpoint describe, in units of their actuators."""
    if data is None:
        raise BurnishError("neither the data nor the checkpoint says which world it is for; give env=...")
    return make_env(world_from(data), worlds, seed=seed, device=device)


def observed_by(spec: PolicySpec, raw: VecEnv, swap: Sequence[str] = ()) -> VecEnv:
    """Its history stacked, its instructions as tokens; with ``swap`` others than its own (`Spoken`)."""
    env: VecEnv = raw if spec.history == 1 else HistoryEnv(raw, spec.history)
    if "tokens" in spec.obs.shapes and "tokens" not in raw.spec.obs.shapes:
        env = Spoken(env, spec.words, swap)
    check_compatible(spec, env.spec)
    unlike_names("the policy", spec.names, "the environment", feature_names(raw))
    return env


def seen_by(spec: PolicySpec, raw: VecEnv, swap: Sequence[str] = ()) -> ScaledEnv:
    """As ``observed_by``, its actions scaled."""
    return ScaledEnv(observed_by(spec, raw, swap), spec.action)
