"""pick_place: what counts as success, the arithmetic of turns, both ways to grasp, a cube that is lost."""

from __future__ import annotations

import itertools

import cubes_lab as lab
import numpy as np
import pytest
import torch

from burnish.policies.core.errors import BurnishError
from burnish.sim import arm
from burnish.sim.experts.carrying import Carry
from burnish.sim.tasks import cubes
from burnish.sim.tasks.pick_place import PickPlaceConfig

pytestmark = pytest.mark.sim


def test_success_is_a_cube_at_rest_on_the_stand():
    radius = PickPlaceConfig().radius
    offsets = [(0, 0, 0), (radius - 5e-4, 0, 0), (radius + 5e-4, 0, 0), (0, 0.03, 0), (0, 0, 0.1)]
    # On the middle and just within the radius; just outside it, beside the stand, and in the air above it.
    assert lab.put(lab.worlds("pick_place", 5), offsets, wait=2).tolist() == [True, True, False, False, False]


def test_success_needs_that_it_lies_still_and_was_let_go():
    env = lab.worlds("pick_place", 3)
    env.reset(seeds=[1, 2, 3])
    task, everyone = env.task, np.arange(3)
    task.cube.put(everyone, task.goal(), np.zeros(3))
    task.cube._motion.write(np.array([[0.1, 0, 0, 0, 0, 0]] * 3), np.array([0]))
    tool = np.concatenate([task.goal(), np.tile(cubes.START[3:], (3, 1))], axis=1)
    task.hand.begin(np.array([1]), tool, cubes.OPEN)
    env.physics.forward()
    assert task.judge(np.zeros((3, 5))).success.tolist() == [False, False, True]


def test_pan_and_roll_together_turn_the_fingers():
    """The direction in which the fingers open, from the angles of the joints and from the physics."""
    env = lab.worlds("pick_place", 64)
    env.reset(seeds=range(64))
    source = np.random.default_rng(0)
    pose = source.uniform((0.18, -0.12, 0.02, np.pi / 2, -2.5), (0.26, 0.12, 0.05, np.pi / 2, 2.5), (64, 5))
    env.task.hand.begin(np.arange(64), pose, arm.PINCH)
    env.physics.forward()
    frames = env.physics.column("site_xmat", env.physics.model.site("tcp").id).read().reshape(64, 3, 3)
    closing = cubes.closing(env.task.hand)
    np.testing.assert_allclose(closing, frames[:, :2, 2], atol=1e-9)
    np.testing.assert_allclose(frames[:, 2, 0], -1, atol=1e-9)  # the tool points down
    expected = pose[:, 4] + cubes.azimuth(pose[:, :3])
    np.testing.assert_allclose(closing, np.stack([np.cos(expected), np.sin(expected)], axis=1), atol=1e-9)


def test_a_cube_is_turned_the_same_whichever_face_is_up():
    env = lab.worlds("pick_place", 24)
    env.reset(seeds=range(24))
    turn, everyone = np.linspace(-0.78, 0.78, 24), np.arange(24)
    cube, half = env.task.cube, np.sqrt(0.5)
    cube.put(everyone, cube.position(), turn)
    np.testing.assert_allclose(cube.turn(), turn, atol=1e-9)
    place = cube._place.read()
    # Quaternions of quarter turns about x and y, multiplied from the right: other faces are up then.
    for x, y in itertools.product((half, 0.0, -half), repeat=2):
        if (x == 0) != (y == 0):
            w, _, _, z = place[:, 3:].T
            tipped = np.stack([w * half, w * x - z * y, w * y + z * x, z * half], axis=1)
            cube._place.write(np.concatenate([place[:, :3], tipped], axis=1))
            np.testing.assert_allclose(cube.turn(), turn, atol=1e-9)
    np.testing.assert_allclose(cubes.quarter(turn + np.pi / 2), turn)


def test_both_ways_are_taken():
    """The cube is grasped by either pair of faces: rolls within an eighth of a turn, and beyond."""
    raw = lab.worlds("pick_place", 32)
    rolls = []
    for choice in (0.2, 0.8):
        raw.reset(seeds=range(32))
        pick = np.full((32, 2), choice)
        move = Carry(ways=True)(raw.task, np.zeros(32, np.int64), np.zeros(32, np.int64), pick)
        rolls.append(move.pose[:, 4])
    np.testing.assert_allclose(np.abs(rolls[0] - rolls[1]), np.pi / 2, atol=1e-9)


def test_a_lost_cube_stays_within_what_is_observed():
    env = lab.worlds("pick_place", 1)
    lab.put(env, [[0.5, 0, 0]], wait=60)
    assert env.task.cube.position()[0, 2] < -1
    assert env.step(torch.tensor([lab.HOLD])).obs["state"].abs().max() <= 10


@pytest.mark.parametrize("wrong", [{"radius": 0.03}, {"cube_mass": 0.0}, {"spread": 1.5}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(BurnishError, match="pick_place needs radius"):
        PickPlaceConfig(**wrong)
