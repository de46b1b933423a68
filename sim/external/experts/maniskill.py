"""Experts of ManiSkill 3 (Tao et al. 2024, arXiv 2410.00425): the solutions of its motion planner, tick by tick.

A solution plays a whole episode by itself: it looks at the world, plans a path, steps along it, and looks again. Here
it runs in a thread that waits in each step for the world to be stepped by others, so that it plans from where the hand
really is, in spite of errors. Where it ends without success it holds still for a while, and begins anew.

It commands joint angles. A command that leads to the same angles, or to the same pose of the tool, is made of them for
the control mode of the world. Paths come from mplib, in the Python of `burnish worlds add maniskill-planner`.
"""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

HOLD = 10  # steps after a solution until it begins anew
SETTLE = 3  # steps until the arm has come to where it was commanded
# Errors that leave about half of the episodes. A cube counts as picked while the arm is still; a peg that errs by 3 mm
# does not go in.
LEVELS: dict[str, dict[str, dict[str, float]]] = {
    "PushCube-v1": {"clumsy": {"bias": 0.35}},
    "PickCube-v1": {"noisy": {"noise": 0.15}, "clumsy": {"bias": 0.13}},
    "StackCube-v1": {"noisy": {"noise": 0.22}, "clumsy": {"bias": 0.2}},
    "PegInsertionSide-v1": {"noisy": {"noise": 0.03}, "clumsy": {"noise": 0.02, "bias": 0.04}},
}


@functools.cache
def solutions() -> Any:
    """ManiSkill's solutions, without the words that they print; beside NumPy 2 on `planning.py`."""
    package = "mani_skill.examples.motionplanning"
    parts = vars(importlib.import_module(f"{package}.base_motionplanner.motionplanner"))
    parts["print"] = lambda *words: None
    if int(np.__version__.partition(".")[0]) > 1:
        parts["mplib"] = importlib.import_module("..planning", __package__)
    return importlib.import_module(f"{package}.panda.solutions")


def solution(task: str) -> Callable[..., Any]:
    """The solution of a task, such as "PickCube-v1"."""
    if task == "PegInsertionSide-v1":
        return insert_peg
    found = getattr(solutions(), f"solve{task.rpartition('-')[0]}", None)
    if found is None:
        known = sorted(name[len("solve") :] for name in vars(solutions()) if name.startswith("solve"))
        raise LookupError(f"ManiSkill's planner has no solution of {task}; it has of {', '.join(known)}")
    return found


def insert_peg(env: Any, debug: bool = False, vis: bool = False) -> None:
    """A peg in the hole: the solution of PegInsertionSide, in place of ManiSkill's.

    That one aligns the peg, and then goes in by a command from before. But the arm hangs 4 mm below what it is
    commanded, and the hole leaves 3 mm around the peg. So each command is corrected here by where the last one has led
    the peg, and paths begin where the arm was commanded to be.
    """
    solutions()
    solver = importlib.import_module("mani_skill.examples.motionplanning.panda.motionplanner")
    pose = importlib.import_module("sapien").Pose
    planner = solver.PandaArmMotionPlanningSolver(
        env, debug, vis, env.agent.robot.pose, visualize_target_grasp_pose=vis, print_env_info=False,
        joint_vel_limits=0.75, joint_acc_limits=0.75,
    )  # fmt: skip
    half = float(env.peg_half_sizes[0, 0])
    tail = env.peg.pose.sp * pose([-max(0.05, half / 2 + 0.01), 0, 0])
    hand, sides = (x.to_transformation_matrix()[:3, :3] for x in (env.agent.tcp.pose.sp, tail))
    across = min((sides[:, 1], sides[:, 2]), key=lambda side: abs(side[2]))
    across = across * [1, 1, 0] * np.sign(across @ hand[:, 1])
    command = env.agent.build_grasp_pose(np.array([0, 0, -1]), across / np.linalg.norm(across), tail.p)
    planner.move_to_pose_with_screw(command * pose([0, 0, -0.05]))
    planner.move_to_pose_with_screw(command)
    planner.close_gripper()
    angles = env.agent.robot.get_qpos()
    planner.robot = SimpleNamespace(get_qpos=lambda: angles.new_tensor([[*env.commanded[:-1], *angles[0, -2:]]]))
    outside = -0.01 - half
    for depth in (outside, outside, outside, 0.02):
        command = env.goal_pose.sp * pose([depth, 0, 0]) * env.peg.pose.sp.inv() * command
        planner.move_to_pose_with_screw(command, refine_steps=SETTLE)


# ---- A solution, tick by tick ----


class GivenUp(Exception):
    """An episode is over; raised in the thread of its solution."""


class Played:
    """A simulation as a solution sees it: others have reset it, and step it."""

    control_mode = "pd_joint_pos"  # which solutions ask for

    def __init__(self, simulation: Any) -> None:
        self._simulation = simulation
        self.asked: SimpleQueue[bool] = SimpleQueue()  # for a command; False: the episode is over
        self.told: SimpleQueue[NDArray | Exception] = SimpleQueue()
        self.commanded = np.array([*joints(simulation)[:-2], 1.0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._simulation, name)

    @property
    def unwrapped(self) -> Played:
        return self

    def reset(self, seed: int | None = None) -> None:
        """Nothing, because it was."""

    def step(self, action: NDArray) -> tuple[None, float, bool, bool, dict[str, Any]]:
        self.commanded = action
        self.told.put(action)
        self._await()
        return None, 0.0, False, False, {}

    def begin(self, solve: Callable[..., Any]) -> None:
        self._thread = threading.Thread(target=self.run, args=(solve,), daemon=True)
        self._thread.start()

    def end(self) -> None:
        self.asked.put(False)
        self._thread.join()

    def run(self, solve: Callable[..., Any]) -> None:
        """The thread: the solution, a pause, and the solution again, until the episode is over."""
        try:
            self._await()
            while True:
                solve(self, debug=False, vis=False)
                for _ in range(HOLD):
                    self.step(self.commanded)
        except GivenUp:
            return
        except Exception as error:
            self.told.put(error)

    def _await(self) -> None:
        if not self.asked.get():
            raise GivenUp


class PlannerExpert:
    """ManiSkill's own solution of the task, in the control mode of the world."""

    def __init__(self, env: Any) -> None:
        self._simulation = env.unwrapped.simulation
        self._solve = solution(env.unwrapped.config.id)
        mode = env.unwrapped.action_mode
        if mode not in COMMANDS:
            raise LookupError(f"the planner does not act in env.control_mode={mode}; choose {', '.join(COMMANDS)}")
        self._command, relative = COMMANDS[mode]
        self.still = np.array([0.0 if relative else np.nan] * (env.action_space.shape[0] - 1) + [np.nan])
        self.levels = LEVELS.get(env.unwrapped.config.id, {})
        self._under_way: list[Played] = []  # at most one
        weakref.finalize(self, give_up, self._under_way)

    def reset(self, obs: Any, info: dict[str, Any]) -> None:
        give_up(self._under_way)
        self._under_way.append(Played(self._simulation))
        self._under_way[0].begin(self._solve)

    def act(self, obs: Any, info: dict[str, Any]) -> NDArray[np.float64]:
        played = self._under_way[0]
        played.asked.put(True)
        told = played.told.get()
        if isinstance(told, Exception):
            played.told.put(told)  # for the next call: the thread has ended
            raise told
        return np.array([*self._command(self._simulation, told[:-1]), told[-1]])


def give_up(under_way: list[Played]) -> None:
    """The threads of these solutions end. A thread that is still in C++ where its process ends would abort it."""
    while under_way:
        under_way.pop().end()


# ---- Commands that lead where a command of joint angles would ----


def joints(simulation: Any) -> NDArray[np.float32]:
    """The angles of all joints now, the two fingers last."""
    return simulation.agent.robot.get_qpos()[0].cpu().numpy()


def as_angles(simulation: Any, target: NDArray) -> NDArray:
    """For pd_joint_pos: the angles themselves."""
    return target


def as_changes(simulation: Any, target: NDArray) -> NDArray:
    """For pd_joint_delta_pos: the way from the present angles."""
    arm = simulation.agent.controller.controllers["arm"]
    return np.clip((target - joints(simulation)[: len(target)]) / arm.config.upper, -1, 1)


def as_motion(simulation: Any, target: NDArray) -> NDArray:
    """For pd_ee_delta_pose: the way of the tool, and its turn about the axes of the base."""
    arm = simulation.agent.controller.controllers["arm"]
    model, link = arm.kinematics.pmodel, arm.kinematics.end_link_idx
    model.compute_forward_kinematics(np.array([*target, *joints(simulation)[len(target) :]]))
    there, here = model.get_link_pose(link), arm.ee_pose_at_base.sp
    m = (there * here.inv()).to_transformation_matrix()  # three turns, about x, the new y and the new z
    turn = np.array([np.arctan2(-m[1, 2], m[2, 2]), np.arcsin(np.clip(m[0, 2], -1, 1)), np.arctan2(-m[0, 1], m[0, 0])])
    angles = turn / arm.config.rot_lower  # by which ManiSkill multiplies
    moved = np.clip((there.p - here.p) / arm.config.pos_upper, -1, 1)
    return np.concatenate([moved, angles / max(1.0, float(np.linalg.norm(angles)))])


# Of a control mode the command, and whether it is a change, so that the arm rests at zero.
COMMANDS: dict[str, tuple[Callable[[Any, NDArray], NDArray], bool]] = {
    "pd_ee_delta_pose": (as_motion, True),
    "pd_joint_delta_pos": (as_changes, True),
    "pd_joint_pos": (as_angles, False),
}


def make(env: Any, seed: int = 0) -> PlannerExpert:
    """The expert of a world of ManiSkill; its ``seed`` is not used."""
    return PlannerExpert(env)
