"""A task's model that follows a robot: what the task would observe and command, from what the robot has measured.

A policy that was trained in a world of the desk knows the world's observation and the world's action. On a robot the
joints are measured, and where things lie is known from a calibration (here: from the seed that laid them out). The
code that makes observations in simulation makes them here too, on a model whose joints are those of the robot, and so
does the code that turns an action into servo targets. Nothing is stepped.

So tasks will do whose things do not move: `insert`, `reach`, `avoid`. A cube that is pushed has to be seen: with
``observe=pixels`` and cameras that look at it, any task will do, and a person judges what the mirror cannot know.
Where no camera is given, pictures are drawn of the model.
"""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np

from ..policies.core.errors import BurnishError
from . import arm
from .batch import BatchedMujoco
from .build import env_name, make_env
from .desk import DeskTask, Observe, scene
from .physics import STATE
from .task import Verdict

MOVING = "insert, reach or avoid"


class Mirror:
    """``draws``: pictures are those of the model. Otherwise `real_robot.env.CameraObservations` adds them."""

    joints = arm.JOINTS
    grips = False

    def __init__(self, config: Any, *, draws: bool = True) -> None:
        world = make_env(config, 1)
        if not (isinstance(world, BatchedMujoco) and isinstance(world.task, DeskTask)):
            name = getattr(config, "label", env_name(config))
            raise BurnishError(
                f"{name} is no task of the desktop arm, which is the robot here; env=joints plays a policy of joint "
                "angles, and `burnish export` makes a bundle for a loop of your own (docs/robots.md)"
            )
        task: Any = getattr(world, "task")  # noqa: B009, whatever its quantities are called
        self._judges = world.physics.model.nq == len(self.joints)
        if not self._judges and (draws or task.config.observe is not Observe.pixels):
            raise BurnishError(
                f"in {env_name(config)} things move that a robot's joints do not tell about; deploy {MOVING}, or on "
                "hardware what was trained with observe=pixels, with cameras=..."
            )
        self._draws = draws and task.pixels is not None
        self.spec, self.mjcf = world.spec if self._draws else task.spec, task.mjcf()
        self.state_names, self.action_names = world.state_names, world.action_names
        self._world, self._task = world, task
        self._everyone = np.arange(1)

    @property
    def world(self) -> BatchedMujoco:
        """At which an expert of the task can look."""
        return self._world

    def begin(self, seed: int) -> np.ndarray:
        """Lay things out as that seed does; returns the whole state of such a world (MuJoCo's mjSTATE_INTEGRATION)."""
        self._world.reset(seeds=[seed])
        return self._world.physics.state()[0]

    @property
    def ranges(self) -> np.ndarray:
        """(n, 2) those of the set-points, in rad."""
        return self._world.physics.model.actuator_ctrlrange.copy()

    @property
    def start(self) -> np.ndarray:
        """(n,) joint angles with which an episode begins."""
        return self._task.hand.arm.target[0].copy()

    where = start

    def layout(self) -> str:
        """The places of this episode's movable things, for the person who lays them out."""
        data, model = self._world.physics.data[0], self._world.physics.model
        found = []
        for body, mocap in enumerate(model.body_mocapid):
            if mocap >= 0:
                x, y, z = data.mocap_pos[mocap]
                turn = np.degrees(2 * np.arctan2(data.mocap_quat[mocap, 3], data.mocap_quat[mocap, 0]))
                found.append(f"{model.body(body).name} at ({x:.3f}, {y:.3f}, {z:.3f}) m, turned by {turn:.1f} degrees")
        return "; ".join(found) or "nothing but the arm"

    def see(self, q: np.ndarray, qd: np.ndarray) -> None:
        """The robot's joints now, (n,) in rad and rad/s."""
        robot = self._task.hand.arm
        robot.place(q[None], qd[None])
        self._world.physics.forward(self._everyone)

    def follow(self, q: np.ndarray) -> None:
        """The next command begins at ``q``: for a robot that was moved by something else."""
        self._task.hand.arm.target[:] = q
        self._task.hand.pose[:] = arm.forward(q[None], self._task.hand.links)

    def observe(self) -> dict[str, np.ndarray]:
        """Each (1, ...)."""
        return {key: x.numpy() for key, x in self._world.observe().items()} if self._draws else self._task.observe()

    def targets(self, action: np.ndarray) -> np.ndarray:
        """(A,) in the world's units -> (n,) joint targets, in rad. Remembers what was commanded."""
        return self._task.control(action[None], None)[0].copy()

    def holding(self) -> tuple[np.ndarray, np.ndarray]:
        """(the action that keeps the arm where it was sent last, which of its numbers are displacements)."""
        return self._task.hand.holding()

    def judge(self, action: np.ndarray) -> Verdict:
        """The task's judgement of the robot's present state."""
        if not self._judges:
            return Verdict(np.zeros(1), np.zeros(1, bool))
        return self._task.judge(action[None])


class EmptyDesk:
    """The arm on an empty desk, for bodies that have no task (`real_robot.joints`)."""

    joints = arm.JOINTS

    def __init__(self) -> None:
        self.mjcf = scene("", timestep=0.0025)
        self._model = mujoco.MjModel.from_xml_string(self.mjcf)

    def state(self, q: np.ndarray) -> np.ndarray:
        """At rest there: the whole state (mjSTATE_INTEGRATION)."""
        data = mujoco.MjData(self._model)
        data.qpos[:], data.ctrl[:] = q, q
        mujoco.mj_forward(self._model, data)
        found = np.zeros(mujoco.mj_stateSize(self._model, STATE))
        mujoco.mj_getState(self._model, data, found, STATE)
        return found

    def begin(self, seed: int) -> np.ndarray:
        return self.state(np.zeros(len(self.joints)))
