"""ManiSkill's planner as an expert: its solutions tick by tick, its commands in each control mode, and its paths."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from burnish.policies.cli.environments import Environments
from burnish.policies.core.errors import BurnishError
from burnish.sim.external import planning
from burnish.sim.external.experts import maniskill
from burnish.sim.external.maniskill import make

# ---- A solution, tick by tick ----


class Still:
    """A simulation that shows nothing but joints, all at 0."""

    name = "still"

    def __init__(self) -> None:
        robot = SimpleNamespace(get_qpos=lambda: torch.zeros(1, 9))
        self.agent = SimpleNamespace(robot=robot)


def expert_of(solve: Any, monkeypatch: pytest.MonkeyPatch) -> maniskill.PlannerExpert:
    """Of a world with commands of joint angles."""
    monkeypatch.setattr(maniskill, "solution", lambda task: solve)
    config = SimpleNamespace(id="PickCube-v1")
    world = SimpleNamespace(simulation=Still(), config=config, action_mode="pd_joint_pos")
    return maniskill.make(SimpleNamespace(unwrapped=world, action_space=np.zeros(8)))


def threads() -> int:
    return sum(thread.name.endswith("(run)") for thread in threading.enumerate())


def test_a_solution_is_played_tick_by_tick_held_and_begun_anew(monkeypatch):
    begun = []

    def solve(env: Any, debug: bool, vis: bool) -> None:
        env.reset(seed=1)  # which it does not: it was reset by others
        begun.append((env.name, env.unwrapped.control_mode, debug, vis))
        for k in range(3):
            env.step(np.full(8, 10 * len(begun) + k))

    before, expert = threads(), expert_of(solve, monkeypatch)
    expert.reset(None, {})
    acted = [int(expert.act(None, {})[0]) for _ in range(2 * (3 + maniskill.HOLD))]
    assert acted == [10, 11, *[12] * (1 + maniskill.HOLD), 20, 21, *[22] * (1 + maniskill.HOLD)]
    assert begun[0] == ("still", "pd_joint_pos", False, False)
    expert.reset(None, {})
    assert int(expert.act(None, {})[0]) == 30, "an episode that was given up is not continued"
    assert threads() == before + 1, "that of the episode before has ended"
    del expert
    assert threads() == before, "a thread that outlives its expert is cut off where its process ends, which aborts it"


def test_where_no_path_is_found_the_arm_holds_still(monkeypatch):
    expert = expert_of(lambda env, debug, vis: None, monkeypatch)
    expert.reset(None, {})
    assert expert.act(None, {}).tolist() == [0.0] * 7 + [1.0], "as it began, with an open hand"


def test_an_error_of_a_solution_is_raised_where_the_expert_is_asked(monkeypatch):
    def solve(env: Any, debug: bool, vis: bool) -> None:
        env.step(np.zeros(8))
        raise RuntimeError("no grasp")

    expert = expert_of(solve, monkeypatch)
    expert.reset(None, {})
    expert.act(None, {})
    with pytest.raises(RuntimeError, match="no grasp"):
        expert.act(None, {})


# ---- Commands ----


@pytest.mark.maniskill
@pytest.mark.parametrize(
    ("mode", "nearest"),
    [
        ("pd_joint_delta_pos", 1e-6),  # rad: the same targets, but for the rounding of a difference and a sum
        ("pd_ee_delta_pose", 2e-3),  # ManiSkill solves for angles up to 1e-4, and the arm comes to rest in 20 steps
    ],
)
def test_a_command_in_another_mode_leads_where_the_angles_would(require, mode, nearest):
    require("mani_skill.envs")
    aim = np.array([0.02, -0.02, 0.01, 0.02, -0.01, 0.02, -0.02])  # in each step; the planner moves at most 0.045
    ends = []
    for chosen in ("pd_joint_pos", mode, mode):
        world = make(id="PickCube-v1", control_mode=chosen)
        world.reset(seed=0)
        sign = -1 if len(ends) == 2 else 1  # the control: the other way ends elsewhere
        target = maniskill.joints(world.simulation)[:7].astype(float)
        for tick in range(24):
            target = target + sign * aim * (tick < 8)
            told = maniskill.COMMANDS[chosen][0](world.simulation, target)
            world.step(np.array([*told, 1.0], np.float32))
        ends.append(world.simulation.agent.tcp.pose.sp)
        world.close()
    there, same, other = (np.concatenate([pose.p, pose.to_transformation_matrix()[:3, :3].ravel()]) for pose in ends)
    assert np.abs(there - same).max() < nearest < 0.1 < np.abs(there - other).max()


@pytest.mark.maniskill
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"id": "RollBall-v1"}, "no solution of RollBall-v1; it has of .*PickCube"),
        ({"control_mode": "pd_joint_vel"}, "does not act in env.control_mode=pd_joint_vel; choose pd_ee_delta_pose"),
    ],
)
def test_a_world_that_the_planner_does_not_know(require, settings, sentence):
    require("mani_skill.envs")
    with pytest.raises(LookupError, match=sentence):
        maniskill.make(make(**settings))


# ---- Paths, from another Python ----

MPLIB = """
import os
import numpy as np

class Planner:
    def __init__(self, urdf):
        print("words of a package")
        self.urdf, self.move_group_joint_indices = urdf, [0, 1]
    def set_base_pose(self, pose):
        self.base = pose
    def plan_screw(self, pose, joints, time_step):
        if pose[0] > 5:
            os._exit(3)
        if pose[0] > 1:
            raise ValueError("too far")
        return {"status": "Success", "position": np.outer([0, 1], pose * self.joint_vel_limits) + joints + self.base[0]}
"""


@pytest.fixture
def mplib(tmp_path, monkeypatch):
    """This Python in place of the other one, with a stand-in of mplib. It inherits no PYTHONPATH of ours."""
    (tmp_path / "mplib.py").write_text(MPLIB)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(Environments, "python", lambda self, name: {planning.RECIPE: str(python)}[name])
    planning.service.cache_clear()
    yield planning.Planner(urdf="a.urdf")
    planning.service().kill()
    planning.service().wait()
    planning.service.cache_clear()


def test_a_path_of_another_python(mplib):
    assert mplib.joint_vel_limits.tolist() == [1, 1]
    mplib.joint_vel_limits = np.array([1.0, 0.5])
    mplib.set_base_pose(np.array([0.25] + [0.0] * 6))
    other = planning.Planner(urdf="b.urdf")  # has limits and a base of its own
    for planner, end in ((mplib, [0.45, 0.4]), (other, [0.2, 0.2]), (mplib, [0.45, 0.4])):
        found = planner.plan_screw(np.array([0.1, 0.1]), np.array([0.1, 0.1]), time_step=0.05)
        assert found["status"] == "Success" and np.allclose(found["position"][-1], end)


def test_a_failure_of_the_other_python_is_told_and_it_goes_on(mplib):
    with pytest.raises(RuntimeError, match="mplib failed: ValueError: too far"):
        mplib.plan_screw(np.array([2.0, 0.0]), np.zeros(2), time_step=0.05)
    assert mplib.plan_screw(np.array([0.5, 0.0]), np.zeros(2), time_step=0.05)["position"][-1].tolist() == [0.5, 0.0]


def test_an_end_of_the_other_python_is_told_and_another_one_begins(mplib):
    with pytest.raises(RuntimeError, match="the process that plans ended with status 3"):
        mplib.plan_screw(np.array([9.0, 0.0]), np.zeros(2), time_step=0.05)
    assert mplib.plan_screw(np.array([0.5, 0.0]), np.zeros(2), time_step=0.05)["status"] == "Success"


def test_without_the_other_python_the_sentence_says_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_WORLDS", str(tmp_path))
    planning.service.cache_clear()
    with pytest.raises(BurnishError, match="`burnish worlds add maniskill-planner` makes it"):
        planning.Planner(urdf="a.urdf")
