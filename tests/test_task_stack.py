"""stack: what counts as success, a cube that falls, and where cubes lie."""

from __future__ import annotations

import cubes_lab as lab
import numpy as np
import pytest

from burnish.policies.core.errors import BurnishError
from burnish.sim.tasks import cubes
from burnish.sim.tasks.stack import StackConfig

pytestmark = pytest.mark.sim


def test_success_is_the_red_cube_at_rest_on_the_blue_one():
    offset = StackConfig().offset
    offsets = [(0, 0, 0), (0, offset - 5e-4, 0), (0, offset + 5e-4, 0), (0.03, 0, -cubes.EDGE), (0, 0, 0.1)]
    # Well on top, just near enough; just too far off, beside the blue cube, and in the air above it.
    assert lab.put(lab.worlds("stack", 5), offsets, wait=2).tolist() == [True, True, False, False, False]


def test_a_cube_that_is_more_than_half_off_falls():
    env = lab.worlds("stack", 2, offset=0.0119)
    success = lab.put(env, [(0.0115, 0, 0), (0.0125, 0, 0)], wait=20)
    fallen = env.task.cube.position()[:, 2] < 1.4 * cubes.EDGE
    assert success.tolist() == [True, False] and fallen.tolist() == [False, True]


def test_success_needs_that_both_lie_still_and_red_was_let_go():
    env = lab.worlds("stack", 4)
    env.reset(seeds=range(4))
    task, push = env.task, np.array([[0.1, 0, 0, 0, 0, 0]] * 4)
    task.cube.put(np.arange(4), task.goal(), np.zeros(4))
    task.cube._motion.write(push, np.array([0]))
    task.blue._motion.write(push, np.array([1]))
    tool = np.concatenate([task.goal(), np.tile(cubes.START[3:], (4, 1))], axis=1)
    task.hand.begin(np.array([2]), tool, cubes.OPEN)
    env.physics.forward()
    assert task.judge(np.zeros((4, 5))).success.tolist() == [False, False, False, True]


def test_cubes_lie_apart_and_everywhere():
    env = lab.worlds("stack", 256)
    env.reset(seeds=range(256))
    red, blue = env.task.cube.position(), env.task.blue.position()
    assert np.linalg.norm(red - blue, axis=1).min() > 0.08
    assert (red[:, 1] > 0).mean() == pytest.approx(0.5, abs=0.1)  # three standard errors
    low, high = np.vstack([red, blue]).min(axis=0), np.vstack([red, blue]).max(axis=0)
    np.testing.assert_allclose([low[:2], high[:2]], [(0.18, -0.11), (0.28, 0.11)], atol=0.003)


@pytest.mark.parametrize("wrong", [{"offset": 0.012}, {"cube_mass": 1.0}, {"spread": -0.1}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(BurnishError, match="stack needs offset"):
        StackConfig(**wrong)
