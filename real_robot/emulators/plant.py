"""A MuJoCo model behind the registers of a chain of servos: what the emulated arm does, and what it meets.

Each servo runs its own profile (`Motion`), whose set-point is the target of the model's position actuator, as the
servo's own loop is. Without power a geared servo stays about where it is, so its target follows its angle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mujoco
import numpy as np
from numpy.typing import NDArray

from ..clock import ns
from ..errors import Refused
from .servo import Drive

Array = NDArray[np.float64]
STATE = mujoco.mjtState.mjSTATE_INTEGRATION
LONGEST_NS = ns(1.0)  # that is caught up after a pause of the whole program


class MujocoPlant:
    """``start`` is a whole state of the model (mjSTATE_INTEGRATION), or nothing for the model's own beginning. Where a
    joint's angle is zero, its servo's shaft is at ``zero_rad``."""

    def __init__(
        self, mjcf: str, joints: Sequence[str], start: Sequence[float] = (), zero_rad: float = math.pi
    ) -> None:
        self._zero = zero_rad
        self.model = mujoco.MjModel.from_xml_string(mjcf)
        self.data = mujoco.MjData(self.model)
        if len(start):
            if len(start) != mujoco.mj_stateSize(self.model, STATE):
                raise Refused(f"a start of {len(start)} numbers is no state of this model")
            mujoco.mj_setState(self.model, self.data, np.array(start, np.float64), STATE)
        mujoco.mj_forward(self.model, self.data)
        chosen = [self.model.joint(name).id for name in joints]
        motors = {int(joint): i for i, joint in enumerate(self.model.actuator_trnid[:, 0])}
        self._q, self._v = self.model.jnt_qposadr[chosen], self.model.jnt_dofadr[chosen]
        self._u = np.array([motors[joint] for joint in chosen])
        self._most = self.model.actuator_forcerange[self._u, 1]
        self._step_ns = ns(self.model.opt.timestep)
        self._now_ns: int | None = None
        here = self.data.qpos[self._q].copy()
        self._target, self._goal, self._speed = here, here.copy(), np.zeros(len(chosen))
        self._velocity, self._acceleration = np.ones(len(chosen)), np.ones(len(chosen))
        self._powered = np.zeros(len(chosen), bool)

    def drive(self, index: int, drive: Drive) -> None:
        if drive.powered and not self._powered[index]:
            self._target[index], self._speed[index] = self.data.qpos[self._q[index]], 0.0
        self._powered[index], self._goal[index] = drive.powered, drive.goal_rad - self._zero
        self._velocity[index], self._acceleration[index] = drive.velocity, drive.acceleration

    def advance(self, now_ns: int) -> None:
        if self._now_ns is None:
            self._now_ns = now_ns
        self._now_ns = max(self._now_ns, now_ns - LONGEST_NS)
        while self._now_ns + self._step_ns <= now_ns:
            self._profile(self._step_ns / 1e9)
            self.data.ctrl[self._u] = np.where(self._powered, self._target, self.data.qpos[self._q])
            mujoco.mj_step(self.model, self.data)
            self._now_ns += self._step_ns

    def motion(self) -> tuple[Array, Array, Array]:
        share = self.data.actuator_force[self._u] / np.where(self._most > 0, self._most, 1.0)
        return self.data.qpos[self._q] + self._zero, self.data.qvel[self._v].copy(), np.clip(share, -1, 1)

    def _profile(self, h: float) -> None:
        """Towards the goal, no faster than braking in time allows."""
        gap, push = self._goal - self._target, self._acceleration * h
        reach = np.sqrt(2 * self._acceleration * np.abs(gap) + (push / 2) ** 2) - push / 2
        reach = np.minimum(np.minimum(reach, np.abs(gap) / h), self._velocity)
        self._speed = np.clip(np.copysign(reach, gap), self._speed - push, self._speed + push)
        self._target = self._target + self._speed * h
