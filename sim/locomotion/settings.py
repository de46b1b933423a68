"""Settings of the running robots: Gymnasium's names and defaults, read without a simulator.

Limits at infinity are written None, because a dataset's JSON holds no infinity.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from ...policies.core.config import LATER
from ...policies.core.errors import BurnishError
from ..randomize import FactorsConfig, RandomizeConfig
from ..task import Backend

Bounds = list[float | None]  # [low, high], None: no limit


def limits(bounds: Bounds) -> tuple[float, float]:
    """The two ends of a range, infinite where they are null."""
    low, high = bounds
    return -math.inf if low is None else low, math.inf if high is None else high


@dataclass
class LocomotionConfig:
    """Settings that all running robots share: weights of the reward, noise, observations."""

    forward_reward_weight: float = 1.0  # reward for each m/s forwards
    ctrl_cost_weight: float = 0.1  # price of squared actions
    reset_noise_scale: float = 0.1  # half the range of the noise on the initial state
    exclude_current_positions_from_observation: bool = True  # leave out the position along the way
    max_steps: int = 1000  # control ticks until an episode is truncated
    backend: Backend = field(default=Backend.mujoco, metadata=LATER)  # physics: mujoco, in C; or warp, on the device
    cameras: list[str] = field(default_factory=list)  # cameras seen beside the state; the models have one, "track"
    image_size: int = 84  # side of the pictures, in pixels
    lavish: bool = False  # shadows, reflections and smooth edges
    # factors on properties of the world, which make it another one
    factors: FactorsConfig = field(default_factory=FactorsConfig)
    # properties of the world that are drawn anew in each episode
    randomize: RandomizeConfig = field(default_factory=RandomizeConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.reset_noise_scale < math.inf or self.max_steps < 1 or self.image_size < 8:
            raise BurnishError("reset_noise_scale >= 0, max_steps >= 1 and image_size >= 8 are needed")
        for name in (f.name for f in dataclasses.fields(self) if f.name.endswith("_range")):
            bounds = getattr(self, name)
            if len(bounds) != 2 or not limits(bounds)[0] < limits(bounds)[1]:
                raise BurnishError(f"{name}={bounds} must be [low, high] with low < high, null: no limit")


@dataclass
class HalfCheetahConfig(LocomotionConfig):
    """Settings of env=half_cheetah; it has none of its own."""

    pass


@dataclass
class FallingConfig(LocomotionConfig):
    """Settings of robots that can fall: the reward and the end that depend on health."""

    healthy_reward: float = 1.0  # reward of each tick in which the robot is healthy
    terminate_when_unhealthy: bool = True  # an episode ends when the robot is no longer healthy


@dataclass
class HopperConfig(FallingConfig):
    """Settings of env=hopper."""

    ctrl_cost_weight: float = 1e-3  # price of squared actions
    reset_noise_scale: float = 5e-3  # half the range of the noise on the initial state
    # values of every other coordinate of the state at which the robot is healthy
    healthy_state_range: Bounds = field(default_factory=lambda: [-100.0, 100.0])
    healthy_z_range: Bounds = field(default_factory=lambda: [0.7, None])  # heights at which the robot is healthy, in m
    # angles at which the robot is healthy, in rad
    healthy_angle_range: Bounds = field(default_factory=lambda: [-0.2, 0.2])


@dataclass
class Walker2dConfig(FallingConfig):
    """Settings of env=walker2d."""

    ctrl_cost_weight: float = 1e-3  # price of squared actions
    reset_noise_scale: float = 5e-3  # half the range of the noise on the initial state
    healthy_z_range: Bounds = field(default_factory=lambda: [0.8, 2.0])  # heights at which the robot is healthy, in m
    # angles at which the robot is healthy, in rad
    healthy_angle_range: Bounds = field(default_factory=lambda: [-1.0, 1.0])


@dataclass
class AntConfig(FallingConfig):
    """Settings of env=ant."""

    ctrl_cost_weight: float = 0.5  # price of squared actions
    contact_cost_weight: float = 5e-4  # price of squared contact forces
    # limits to which contact forces are clipped
    contact_force_range: Bounds = field(default_factory=lambda: [-1.0, 1.0])
    healthy_z_range: Bounds = field(default_factory=lambda: [0.2, 1.0])  # heights at which the robot is healthy, in m
    include_cfrc_ext_in_observation: bool = True  # observe external forces


@dataclass
class HumanoidConfig(FallingConfig):
    """Settings of env=humanoid."""

    forward_reward_weight: float = 1.25  # reward for each m/s forwards
    contact_cost_weight: float = 5e-7  # price of squared contact forces
    # limits to which the price of contact forces is clipped
    contact_cost_range: Bounds = field(default_factory=lambda: [None, 10.0])
    healthy_reward: float = 5.0  # reward of each tick in which the robot is healthy
    healthy_z_range: Bounds = field(default_factory=lambda: [1.0, 2.0])  # heights at which the robot is healthy, in m
    reset_noise_scale: float = 1e-2  # half the range of the noise on the initial state
    include_cinert_in_observation: bool = True  # observe masses and inertias
    include_cvel_in_observation: bool = True  # observe velocities of bodies
    include_qfrc_actuator_in_observation: bool = True  # observe forces of actuators
    include_cfrc_ext_in_observation: bool = True  # observe external forces
