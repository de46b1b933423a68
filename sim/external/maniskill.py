"""ManiSkill 3 (Tao et al. 2024, arXiv 2410.00425): the settings of its tasks, and one task as a Gymnasium environment.

On the CPU one process simulates one world (`maniskill_world.py`), and a pool of processes plays many. On a GPU one
simulation holds all worlds (`maniskill_gpu.py`). Nothing heavy is imported here: this file is read for ``--help``.

**Departures** from what ``gymnasium.make`` gives: the time limit is ours, because the demonstrations of ManiSkill's
planner are longer than the registered limits, so that a policy that imitates them would never get to the end; images
stand beside the numbers instead of three levels deep; a world that only gives numbers starts no renderer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ...policies.core.config import from_data, to_data
from ...policies.core.errors import BurnishError, did_you_mean
from ...policies.core.ranges import check_ranges
from .settings import GymConfig, Reward

if TYPE_CHECKING:
    import torch

    from ...policies.core.types import VecEnv
    from .maniskill_world import ManiSkillWorld


class Observations(Enum):
    """The observations of a ManiSkill task."""

    state = "state"  # numbers alone, with the poses of the objects
    rgb = "rgb"  # images, and of the numbers those that a robot knows of itself


class RewardMode(Enum):
    """The rewards of a ManiSkill task, by its own names."""

    sparse = "sparse"  # 1 where the task is solved, -1 where it has failed
    dense = "dense"
    normalized_dense = "normalized_dense"  # the dense one, at most 1


class Backend(Enum):
    """The device on which ManiSkill simulates."""

    auto = "auto"  # the GPU if torch finds one, else the CPU
    cpu = "cpu"
    gpu = "gpu"


@dataclass(frozen=True)
class Task:
    """Measured facts of a task. ``max_steps`` is twice the mean length of the planner's demonstrations (PushCube 69,
    PickCube 75, StackCube 107, PegInsertionSide 155), and longer than the longest of them (77, 88, 126, 203)."""

    max_steps: int | None = None  # None: the registered limit
    control_mode: str | None = "pd_ee_delta_pose"  # None: the first one of the robot
    draws: bool = False  # reads what it has drawn, so that it needs a renderer for numbers too


# To pd_ee_delta_pose all demonstrations of PickCube and StackCube can be replayed, but only 15 of 20 of
# PegInsertionSide, all of which can be to pd_joint_delta_pos.
TASKS: Mapping[str, Task] = {
    "PushCube-v1": Task(140),
    "PickCube-v1": Task(150),
    "StackCube-v1": Task(220),
    "PegInsertionSide-v1": Task(310, "pd_joint_delta_pos"),
    "PushT-v1": Task(draws=True),
}
UNKNOWN = Task(control_mode=None)
SHADERS = ("minimal", "default", "rt-fast", "rt-med", "rt")


@dataclass
class ManiSkillConfig:
    """Settings of env=maniskill: the task, its observations, control mode, reward and device."""

    id: str = "PushCube-v1"  # name registered with ManiSkill
    obs: Observations = Observations.state  # observations: state, or rgb (images, and what the robot knows of itself)
    # cameras that are observed with obs=rgb; by default all of the task
    cameras: list[str] = field(default_factory=list)
    image_size: int = 64  # height and width of the images of all cameras
    control_mode: str | None = None  # meaning of the actions; by default pd_ee_delta_pose where demonstrations fit it
    robot_uids: str | None = None  # robot; by default the task's own; StackCube is drawn 3 times faster with panda
    reward_mode: RewardMode = RewardMode.sparse  # reward of ManiSkill: sparse, dense or normalized_dense
    # steps until an episode is truncated; by default twice the length of the planner's demonstrations, else as
    # registered
    max_steps: int | None = None
    control_hz: int | None = None  # control steps per second; by default those of the task, mostly 20
    end_at_success: bool = True  # the solved task ends the episode
    # simulation: auto, cpu (one world per process) or gpu (all worlds in one simulation)
    backend: Backend = Backend.auto
    seed_each: bool = True  # each world begins by its own seed on a GPU; false begins all at once: faster, not paired
    # a scene is built for each episode (0.5 s) on the CPU, so that nothing is left of the last one
    rebuild: bool = False
    # shader of the cameras: minimal, default, rt-fast, rt-med, rt; by default as the task says
    shader: str | None = None
    film: bool = False  # pictures for films can be drawn, which needs Vulkan
    # reward: given, as reward_mode says; until_success, -1 in every step until the first success
    reward: Reward = Reward.given
    processes: int | None = None  # processes that step the worlds on the CPU; 0: this one; by default one a core
    # an episode that an error of its environment ends is truncated; a worker that dies is replaced (on the CPU)
    restart: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf)": "max_steps control_hz", "[4, 4096]": "image_size"}, "env.")
        if not self.id or ":" in self.id or "/" in self.id:
            raise BurnishError(f"env.id={self.id!r} must be the name of a task of ManiSkill, such as PushCube-v1")
        if self.cameras and self.obs is Observations.state:
            raise BurnishError(f"env.cameras={list(self.cameras)} are observed with env.obs=rgb only; set it")
        if self.shader is not None and self.shader not in SHADERS:
            raise BurnishError(f"env.shader={self.shader!r} is not known; {did_you_mean(self.shader, SHADERS)}")
        if self.robot_uids == "":
            raise BurnishError("env.robot_uids='' names no robot; leave it out for the robot of the task")

    @property
    def task(self) -> Task:
        return TASKS.get(self.id, UNKNOWN)

    @property
    def renders(self) -> bool:
        """Whether the simulation starts a renderer, which needs a driver for Vulkan."""
        return self.obs is Observations.rgb or self.film or self.task.draws

    def limit(self, registered: int | None) -> int:
        limit = self.max_steps or self.task.max_steps or registered
        if limit is None:
            raise BurnishError(f"env.id={self.id} is registered without a limit of time; give env.max_steps")
        return limit

    def about_limit(self, registered: int | None) -> str:
        """A sentence for the first lines of a run."""
        limit = self.limit(registered)
        if self.max_steps is not None:
            return f"{self.id}: episodes of at most {limit} steps, as env.max_steps says"
        if self.task.max_steps is not None:
            return (
                f"{self.id}: episodes of at most {limit} steps, twice the planner's demonstrations; registered is "
                f"{registered}, which most of them exceed"
            )
        return (
            f"{self.id}: episodes of at most {limit} steps, as registered; if demonstrations are longer, a policy that "
            "imitates them cannot succeed, so set env.max_steps to about twice their length"
        )

    def on_gpu(self) -> bool:
        if self.backend is not Backend.auto:
            return self.backend is Backend.gpu
        import torch

        return torch.cuda.is_available()


def make(threads: int | None = None, **settings: Any) -> ManiSkillWorld:
    """One world on the CPU, as a Gymnasium environment without a time limit. ``settings`` are those of
    ``ManiSkillConfig`` as plain data. ``threads`` is for processes of a pool, which have to share the cores: how many
    of them torch and the software renderer use, from now on and for all of this process."""
    if threads is not None:
        os.environ["LP_NUM_THREADS"] = str(threads)  # is read when the renderer starts
        import torch

        torch.set_num_threads(threads)
    from .maniskill_world import ManiSkillWorld

    return ManiSkillWorld(from_data(ManiSkillConfig, settings, "env"))


def hosted(config: ManiSkillConfig, num_envs: int) -> GymConfig:
    """The same worlds, one in each environment of `world_server.py`."""
    own = {"reward": config.reward.name, "processes": config.processes, "restart": config.restart}
    settings = {key: x for key, x in to_data(config).items() if key not in own}
    threads = {} if num_envs == 1 or config.processes == 0 else {"threads": 1}
    return GymConfig(
        f"{__name__}:make",
        {**settings, **threads},
        end_at_success=config.end_at_success,
        reward=config.reward,
        processes=config.processes,
        restart=config.restart,
    )


def worlds(num_envs: int, config: ManiSkillConfig, *, seed: int = 0, device: torch.device | str = "cpu") -> VecEnv:
    """The worlds of a ManiSkill task: batched on the GPU, or one by one in worker processes."""
    if config.on_gpu():
        from .maniskill_gpu import ManiSkillEnv

        return ManiSkillEnv(num_envs, config, seed=seed, device=device)
    from .worlds import ExternalEnv

    return ExternalEnv(num_envs, hosted(config, num_envs), seed=seed, device=device)
