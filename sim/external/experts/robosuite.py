"""Experts of robosuite (Zhu et al. 2020, arXiv 2009.12293): waypoints for the Panda in Lift, Stack and Door.

They act for the controller that robosuite gives a Panda by default: changes of the pose of the gripper in the frame of
its base (operational space control), and the gripper, in [-1, 1]. The phase follows from the state of the simulation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

REACH, TURN = 0.05, 0.5  # m and rad, that the target of the controller moves ahead of the gripper at an action of 1
GAIN = 1.5  # 1 would be critically damped, as the default stiffness and damping are
STILL = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, np.nan])
OPEN, CLOSE = -1.0, 1.0
ABOVE = 0.10  # m, over an object
UP = np.array([0.0, 0.0, ABOVE])
GRIP = 0.12  # m, from the pivot of the lever to the fingers
LATCH = 1.2  # rad, at which the door is free


def rotation_vector(matrix: NDArray) -> NDArray:
    """Axis times angle, for angles below a half turn."""
    axis = np.array([matrix[2, 1] - matrix[1, 2], matrix[0, 2] - matrix[2, 0], matrix[1, 0] - matrix[0, 1]])
    sine, cosine = np.linalg.norm(axis) / 2, (np.trace(matrix) - 1) / 2
    return axis / max(2 * sine, 1e-9) * np.arctan2(sine, cosine)


def smallest(angle: float, symmetry: float = np.pi / 2) -> float:
    """The smallest turn that looks the same for a shape that looks the same after ``symmetry``, as a square does."""
    return float((angle + symmetry / 2) % symmetry - symmetry / 2)


class _Panda:
    """The simulation as a script sees it: metres and radians in the world's frame."""

    still = STILL

    def __init__(self, env: Any) -> None:
        self.world = env.unwrapped
        door = type(self.world).__name__ == "Door"
        noisy = {} if door else {"noise": 0.2}
        self.levels = {"noisy": noisy, "clumsy": {"bias": 0.5 if door else 0.2, "scale": 0.5}}
        self.robot = self.world.robots[0]
        controller = self.robot.composite_controller_config["body_parts"]["right"]
        if controller["type"] != "OSC_POSE" or controller["input_type"] != "delta" or self.robot.action_dim != 7:
            raise LookupError("the experts of robosuite act for the default controller of a Panda, OSC_POSE by changes")

    @property
    def data(self) -> Any:
        return self.world.sim.data  # robosuite makes a new simulation in a reset

    def reset(self, obs: Any, info: dict[str, Any]) -> None:
        """The phase follows from the state."""

    def hand(self) -> NDArray:
        return np.array(self.data.site_xpos[self.robot.eef_site_id["right"]])

    def axes(self) -> NDArray:
        """The columns are the axes of the gripper: from finger to finger, across the palm, ahead."""
        return np.array(self.data.site_xmat[self.robot.eef_site_id["right"]]).reshape(3, 3)

    def opening(self) -> float:
        """m, from finger to finger."""
        names = self.robot.gripper["right"].joints
        return float(sum(abs(self.data.get_joint_qpos(name)) for name in names))

    def cube(self, body: int) -> tuple[NDArray, float]:
        """Where it is, and its turn about the vertical, which a square has in common with its quarter turns."""
        matrix = np.array(self.data.body_xmat[body]).reshape(3, 3)
        side = int(np.argmin(np.abs(matrix[2])))  # an axis that lies flat
        return np.array(self.data.body_xpos[body]), float(np.arctan2(matrix[1, side], matrix[0, side]))

    def act_towards(self, spot: NDArray, turn: NDArray, gripper: float, gain: float = GAIN) -> NDArray[np.float64]:
        move = gain * (spot - self.hand()) / REACH
        move /= max(1.0, np.abs(move).max())  # straight, also where it is far
        return np.clip([*move, *(turn / TURN), gripper], -1.0, 1.0)

    def upright(self, yaw: float, symmetry: float = np.pi / 2) -> NDArray:
        """The turn that points the fingers down, and from one to the other along ``yaw``, by the shortest way."""
        axes = self.axes()
        angle = smallest(yaw - np.arctan2(axes[1, 0], axes[0, 0]), symmetry)
        tilt = np.cross(axes[:, 2], [0.0, 0.0, -1.0])
        return tilt + np.array([0.0, 0.0, angle])

    def grasp(self, cube: NDArray, yaw: float, width: float) -> NDArray[np.float64] | None:
        """The next action on the way to a cube between the fingers, ``width`` apart then; None once it is there."""
        gap = cube - self.hand()
        turn = self.upright(yaw)
        near, level = np.hypot(*gap[:2]) < 0.012, abs(gap[2]) < 0.012
        if near and level:
            return None if self.opening() < width + 0.006 else self.act_towards(cube, turn, CLOSE)
        aligned = np.hypot(*gap[:2]) < 0.02 and abs(turn[2]) < 0.15
        if not aligned and gap[2] > -ABOVE / 2 and np.hypot(*gap[:2]) < 0.08:
            return self.act_towards(self.hand() + UP, 0 * turn, OPEN)  # up, beside the cube
        return self.act_towards(cube + (not aligned) * UP, turn, OPEN)


class LiftExpert(_Panda):
    """The expert of Lift: grasp the cube, then go up."""

    def act(self, obs: Any, info: dict[str, Any]) -> NDArray[np.float64]:
        cube, yaw = self.cube(self.world.cube_body_id)
        action = self.grasp(cube, yaw, width=0.042)
        return self.act_towards(self.hand() + UP, self.upright(yaw), CLOSE) if action is None else action


class StackExpert(_Panda):
    """The expert of Stack: grasp cube A, carry it above cube B, and let go."""

    def act(self, obs: Any, info: dict[str, Any]) -> NDArray[np.float64]:
        (cube, yaw), (base, base_yaw) = self.cube(self.world.cubeA_body_id), self.cube(self.world.cubeB_body_id)
        gap = base[:2] - cube[:2]
        top = base[2] + 0.045  # the middle of the cube that lies on the base
        stacked = np.hypot(*gap) < 0.02 and abs(cube[2] - top + 0.003) < 0.007
        if stacked and self.hand()[2] > cube[2] - 0.015:
            away = self.opening() > 0.06
            return self.act_towards(self.hand() + away * UP, self.upright(yaw), OPEN)
        action = self.grasp(cube, yaw, width=0.04)
        if action is not None:
            return action
        turn = self.upright(yaw)
        turn[2] = smallest(base_yaw - yaw)
        held = self.hand() - cube
        high = cube[2] > top + 0.02
        if np.hypot(*gap) < 0.008:
            return self.act_towards(np.array([*base[:2], top]) + held, turn, CLOSE, gain=1.0)
        spot = base[:2] if high else cube[:2] if cube[2] < top else cube[:2] + 0.3 * gap
        return self.act_towards(np.array([*spot, top + 0.05]) + held, turn, CLOSE)


class DoorExpert(_Panda):
    """Take the lever from the front, turn it down until the latch is free, and pull."""

    def act(self, obs: Any, info: dict[str, Any]) -> NDArray[np.float64]:
        world, hand, axes = self.world, self.hand(), self.axes()
        door = np.array(self.data.body_xmat[world.object_body_ids["door"]]).reshape(3, 3)
        latch = np.array(self.data.body_xmat[world.object_body_ids["latch"]]).reshape(3, 3)
        pivot = np.array(self.data.body_xpos[world.object_body_ids["latch"]])
        out = -door[:, 1]  # towards the robot
        spot = pivot + 0.10 * out + GRIP * latch[:, 0]
        aims = [np.column_stack([side, np.cross(-out, side), -out]) for side in (latch[:, 2], -latch[:, 2])]
        turn = min((rotation_vector(aim @ axes.T) for aim in aims), key=np.linalg.norm)
        gap = spot - hand
        ahead, aside = gap @ out, np.linalg.norm(gap - (gap @ out) * out)
        hinge, angle = self.data.qpos[world.hinge_qpos_addr], abs(self.data.qpos[world.handle_qpos_addr])
        held = self.opening() < 0.05 and np.linalg.norm(gap) < 0.04
        if not held:
            lined_up = aside < 0.015 and np.linalg.norm(turn) < 0.2
            if lined_up and abs(ahead) < 0.012:
                return self.act_towards(spot, turn, CLOSE)
            away = 0.0 if lined_up else ABOVE if np.linalg.norm(turn) < 0.5 else 2 * ABOVE
            return self.act_towards(spot + away * out, turn, OPEN)
        if angle < LATCH and hinge < 0.03:
            down = -latch[:, 2] * np.sign(latch[2, 2])
            return self.act_towards(hand + REACH * down + 0.5 * gap, turn + 0.3 * np.cross(latch[:, 0], down), CLOSE)
        return self.act_towards(hand + REACH * out + 0.3 * gap, turn, CLOSE)


EXPERTS = {"Lift": LiftExpert, "Stack": StackExpert, "Door": DoorExpert}


def make(env: Any, seed: int = 0) -> _Panda:
    """The expert of an environment of robosuite, by the name of its class; LookupError where there is none."""
    name = type(env.unwrapped).__name__
    if name not in EXPERTS:
        raise LookupError(f"{name} of robosuite has no expert here; {', '.join(EXPERTS)} have")
    return EXPERTS[name](env)
