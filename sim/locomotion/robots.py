"""Gymnasium's running robots, version 5: HalfCheetah, Hopper, Walker2d, Ant and Humanoid, equal to the originals.

The same seed and the same actions give the same observations, rewards and ends (Towers et al. 2024, arXiv 2407.17032;
the tasks are of Todorov, Tassa, Erez, Wawrzynski and Schulman). The models are the files that the package gymnasium
carries; its code is not imported.

Details of equality: after a tick, quantities derived from the state (poses, inertias, the centre of mass) are
those of the last physics step's beginning, and speeds are differences of such; contact forces are brought up to date
after a tick, but are zero after a reset; initial states come from NumPy's generator of the seed, position before
velocity.

**Departures.** Actions beyond the limits are clipped, where Gymnasium charges for what was asked and MuJoCo clips what
acts. An episode that ends in its last tick is terminated and not also truncated. The centre of mass of Humanoid is
MuJoCo's own, which sums in another order, so its speed agrees to rounding.
"""

from __future__ import annotations

import importlib.util
import operator
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import mujoco
import numpy as np

from ...policies.core.errors import BurnishError
from ...policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from ..arrays import library, put
from ..randomize import scaled
from ..task import Draw, PixelConfig, Verdict
from .settings import (
    AntConfig,
    Bounds,
    FallingConfig,
    HopperConfig,
    HumanoidConfig,
    LocomotionConfig,
    Walker2dConfig,
    limits,
)

if TYPE_CHECKING:
    from ..physics import Array, Physics, Rows

Terms = dict[str, np.ndarray]  # what a tick earned or cost, each (N,), under the names of Gymnasium's info


def _inside(x: Array, bounds: Bounds) -> np.ndarray:
    low, high = limits(bounds)
    return (low < x) & (x < high)


def _squares(x: Array) -> Array:
    """(N, ...) -> (N,), summed per world in NumPy's order for a vector, as Gymnasium does."""
    return (x * x).reshape(len(x), -1).sum(axis=1)


class Locomotion:
    """Common to the five robots; ``spec`` is known once the task is bound, because its numbers are the model's."""

    version = 1
    autoreset = True
    spec: EnvSpec
    derive: tuple[str, ...] = ()
    asset: str
    frame_skip: int
    roaming = 1  # so many coordinates come first that say where on the ground the robot is
    normal_speed = False  # initial velocities are drawn from a normal distribution, not from a uniform one
    speed_limit: float | None = None  # observed velocities are clipped to it
    mortal = False  # an episode ends where the robot is not healthy

    def __init__(self, config: LocomotionConfig) -> None:
        self.config = config
        self.pixels = PixelConfig(tuple(config.cameras), config.image_size, config.lavish) if config.cameras else None
        self.randomize, self.guard = config.randomize, None  # motors have no set-points
        self.memory: dict[str, Array] = {}

    def mjcf(self) -> str:
        found = importlib.util.find_spec("gymnasium")
        folders = found.submodule_search_locations if found is not None else None
        if not folders:
            raise BurnishError("the robot models are files of the package gymnasium; install it with pip")
        return Path(folders[0], "envs", "mujoco", "assets", self.asset).read_text(encoding="utf-8")

    def bind(self, physics: Physics) -> None:
        model = physics.model
        if factors := self.config.factors.changed():
            scaled(model, factors, mujoco.MjData(model))
        self._qpos, self._qvel = physics.column("qpos"), physics.column("qvel")
        self._start, self._dt = self._qpos.read(), float(model.opt.timestep) * self.frame_skip
        self.memory["place"] = physics.zeros(self.roaming)  # at the end of the last tick
        # The limits are float32 in Gymnasium: 0.4 is a little more there, and costs a little more.
        low, high = model.actuator_ctrlrange.astype(np.float32).T.tolist()
        state = tuple(self.observe()["state"].shape[1:])
        self.state_names = self._names(model, state[0])
        self.action_names = [model.joint(int(i)).name for i in model.actuator_trnid[:, 0]]
        action = ActionSpec(tuple(low), tuple(high))
        self.spec = EnvSpec(ObsSpec({"state": state}), action, 1 / self._dt, "torque", self.config.max_steps)

    def _names(self, model: mujoco.MjModel, size: int) -> list[str]:
        """The joints' positions, their speeds, and whatever is felt beside these."""
        joints = [(model.joint(i).name, int(kind)) for i, kind in enumerate(model.jnt_type)]
        positions, speeds = (
            [
                f"{what} {name}_{i}" if widths[kind] > 1 else f"{what} {name}"
                for name, kind in joints
                for i in range(widths[kind])
            ]
            for what, widths in (("position", (7, 4, 1, 1)), ("speed", (6, 3, 1, 1)))  # free, ball, slide, hinge
        )
        if self.config.exclude_current_positions_from_observation:
            positions = positions[self.roaming :]
        known = [*positions, *speeds]
        return [*known, *(f"felt_{i}" for i in range(size - len(known)))]

    def begin(self, rows: Rows, draw: Draw) -> None:
        drawn = self._drawn_as_gymnasium if isinstance(self._start, np.ndarray) else self._drawn_on_device
        shift, qvel = drawn(rows, draw)
        self._qpos.write(self._start + shift, rows)
        self._qvel.write(qvel, rows)

    def _drawn_as_gymnasium(self, rows: Rows, draw: Draw) -> tuple[Array, Array]:
        """The noise on positions, and the speeds, of each seed."""
        scale, seeds = self.config.reset_noise_scale, draw.seeds.tolist()
        shift, qvel = self._qpos.read(), self._qvel.read()
        for i in rows.tolist():
            generator = np.random.default_rng(seeds[i])
            shift[i] = generator.uniform(-scale, scale, shift.shape[1])
            if self.normal_speed:
                qvel[i] = scale * generator.standard_normal(qvel.shape[1])
            else:
                qvel[i] = generator.uniform(-scale, scale, qvel.shape[1])
        return shift, qvel

    def _drawn_on_device(self, rows: Rows, draw: Draw) -> tuple[Array, Array]:
        """The same distributions, but other numbers: NumPy's would need the seeds on the host."""
        shift, speed = (np.full(x.shape[1], self.config.reset_noise_scale) for x in (self._qpos, self._qvel))
        qvel = draw.normal("speed", speed) if self.normal_speed else draw.uniform("speed", -speed, speed)
        return draw.uniform("position", -shift, shift), qvel

    def settle(self, rows: Rows) -> None:
        put(self.memory["place"], self.place(), rows)

    def control(self, action: Array, rows: Rows | None) -> Array:
        return action

    def observe(self) -> dict[str, Array]:
        qpos, qvel = self._qpos.read(), self._qvel.read()
        if self.config.exclude_current_positions_from_observation:
            qpos = qpos[:, self.roaming :]
        if self.speed_limit is not None:
            qvel = qvel.clip(-self.speed_limit, self.speed_limit)
        return {"state": library(qpos).concatenate([qpos, qvel, *self.felt()], axis=1)}

    def shows_all(self) -> bool:
        """Whether positions and speeds are all that is seen, so that a state can be set to an observation."""
        return not self.felt()

    def behind(self, state: Array) -> tuple[Array, Array]:
        """Positions and speeds that are shown as ``state`` (B, D); positions on the ground that it leaves out are 0."""
        seen = state.shape[1] - self._qvel.shape[1]
        qpos = np.zeros((len(state), self._qpos.shape[1]))
        qpos[:, qpos.shape[1] - seen :] = state[:, :seen]
        return qpos, state[:, seen:]

    def place_at(self, state: Array, rows: Rows) -> None:
        """The worlds ``rows`` as they would show ``state`` (N, D)."""
        qpos, qvel = self.behind(state)
        self._qpos.write(qpos, rows)
        self._qvel.write(qvel, rows)

    def judge(self, action: Array) -> Verdict:
        place, qpos = self.place(), self._qpos.read()
        velocity = (place - self.memory["place"]) / self._dt
        self.memory["place"][:] = place
        healthy = self.healthy(qpos, self._qvel.read())
        gains, costs = self.gains(velocity[:, 0], healthy), self.costs(action)
        reward = reduce(operator.add, gains.values()) - reduce(operator.add, costs.values())
        info = {"x_position": qpos[:, 0], "x_velocity": velocity[:, 0], **gains}
        return Verdict(reward, ~healthy & self.mortal, info=info | {name: -x for name, x in costs.items()})

    def place(self) -> Array:
        """(N, roaming) metres: what is to move forward."""
        return self._qpos.read()[:, : self.roaming]

    def healthy(self, qpos: Array, qvel: Array) -> np.ndarray:
        return library(qpos).ones_like(qpos[:, 0], dtype=bool)

    def gains(self, x_velocity: Array, healthy: np.ndarray) -> Terms:
        return {"reward_forward": self.config.forward_reward_weight * x_velocity}

    def costs(self, action: Array) -> Terms:
        return {"reward_ctrl": self.config.ctrl_cost_weight * _squares(action)}

    def felt(self) -> list[Array]:
        """The observations beside positions and velocities, each (N, K)."""
        return []


class HalfCheetah(Locomotion):
    """A flat cheetah that cannot fall out of its plane, and is paid for speed alone."""

    asset, frame_skip, normal_speed = "half_cheetah.xml", 5, True


class Falling(Locomotion):
    """Robots that are paid for being upright, and whose episode ends when they are not."""

    config: FallingConfig
    speed_limit = 10.0

    def __init__(self, config: FallingConfig) -> None:
        super().__init__(config)
        self.mortal = config.terminate_when_unhealthy

    def known_failure(self, state: Array) -> np.ndarray:
        """(B, D) as it is shown -> (B,) bool: the robot ends an episode there."""
        return ~self.healthy(*self.behind(state)) & self.mortal

    def gains(self, x_velocity: Array, healthy: np.ndarray) -> Terms:
        return {**super().gains(x_velocity, healthy), "reward_survive": healthy * self.config.healthy_reward}


class Hopper(Falling):
    """One leg in a plane."""

    config: HopperConfig
    asset, frame_skip = "hopper.xml", 4

    def healthy(self, qpos: Array, qvel: Array) -> np.ndarray:
        upright = _inside(qpos[:, 1], self.config.healthy_z_range)
        upright &= _inside(qpos[:, 2], self.config.healthy_angle_range)
        state = library(qpos).concatenate([qpos[:, 2:], qvel], axis=1)
        return upright & _inside(state, self.config.healthy_state_range).all(axis=1)


class Walker2d(Falling):
    """Two legs in a plane."""

    config: Walker2dConfig
    asset, frame_skip = "walker2d_v5.xml", 4

    def healthy(self, qpos: Array, qvel: Array) -> np.ndarray:
        c = self.config
        return _inside(qpos[:, 1], c.healthy_z_range) & _inside(qpos[:, 2], c.healthy_angle_range)


class Roaming(Falling):
    """Robots that are free in space, and feel and pay for what touches them."""

    roaming, speed_limit = 2, None
    derive = ("mj_rnePostConstraint",)

    def bind(self, physics: Physics) -> None:
        self._force = physics.column("cfrc_ext")  # (N, bodies, 6), the world's body first
        super().bind(physics)

    def settle(self, rows: Rows) -> None:
        self._force.write(0.0, rows)  # Gymnasium computes forces after a tick, but not after a reset
        super().settle(rows)

    def costs(self, action: Array) -> Terms:
        return {**super().costs(action), "reward_contact": self.contact_cost()}

    def contact_cost(self) -> Array:
        raise NotImplementedError


class Ant(Roaming):
    """Four legs; it goes forward as its torso does. Contact forces are clipped before they are felt or paid for."""

    config: AntConfig
    asset, frame_skip, normal_speed = "ant.xml", 5, True

    def bind(self, physics: Physics) -> None:
        self._torso = physics.column("xpos", 1)
        super().bind(physics)

    def place(self) -> Array:
        return self._torso.read()[:, :2]

    def healthy(self, qpos: Array, qvel: Array) -> np.ndarray:
        low, high = limits(self.config.healthy_z_range)
        xp = library(qpos)
        finite = xp.isfinite(qpos).all(axis=1) & xp.isfinite(qvel).all(axis=1)
        return finite & (low <= qpos[:, 2]) & (qpos[:, 2] <= high)

    def forces(self) -> Array:
        return self._force.read().clip(*limits(self.config.contact_force_range))

    def contact_cost(self) -> Array:
        return self.config.contact_cost_weight * _squares(self.forces())

    def felt(self) -> list[Array]:
        if not self.config.include_cfrc_ext_in_observation:
            return []
        forces = self.forces()[:, 1:]
        return [forces.reshape(len(forces), -1)]


class Humanoid(Roaming):
    """Two legs, two arms; it goes forward as its centre of mass does. It feels nearly all that MuJoCo knows."""

    config: HumanoidConfig
    asset, frame_skip = "humanoid.xml", 5

    def bind(self, physics: Physics) -> None:
        self._mass_centre = physics.column("subtree_com", 0)
        c, bodies = self.config, slice(1, None)
        chosen = {
            "cinert": (c.include_cinert_in_observation, bodies),
            "cvel": (c.include_cvel_in_observation, bodies),
            "qfrc_actuator": (c.include_qfrc_actuator_in_observation, slice(6, None)),  # nothing drives the root
            "cfrc_ext": (c.include_cfrc_ext_in_observation, bodies),
        }
        self._felt = [physics.column(name, at) for name, (include, at) in chosen.items() if include]
        super().bind(physics)

    def place(self) -> Array:
        return self._mass_centre.read()[:, :2]

    def healthy(self, qpos: Array, qvel: Array) -> np.ndarray:
        return _inside(qpos[:, 2], self.config.healthy_z_range)

    def contact_cost(self) -> Array:
        cost = self.config.contact_cost_weight * _squares(self._force.read())
        return cost.clip(*limits(self.config.contact_cost_range))

    def felt(self) -> list[Array]:
        return [column.read().reshape(column.shape[0], -1) for column in self._felt]
