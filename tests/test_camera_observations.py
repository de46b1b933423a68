"""What a policy sees on a robot: pictures that are turned and fitted, drawn of the model, or of cameras alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from burnish.policies.core.errors import BurnishError
from burnish.real_robot.camera import Fit, Fitted, fitted
from burnish.real_robot.clock import VirtualClock
from burnish.sim.build import make_env
from burnish.sim.desk import Observe
from burnish.sim.mirror import Mirror
from burnish.sim.tasks.insert import InsertConfig
from burnish.sim.tasks.push import PushConfig
from fake_camera import FakeCamera

SIZE = 32
RED, BLACK = (200, 0, 0), (0, 0, 0)


def marked() -> np.ndarray:
    """Twice as wide as high: green, with a red left edge of a quarter of the width."""
    image = np.zeros((20, 40, 3), np.uint8)
    image[..., 1] = 100
    image[:, :10] = RED
    return image


def test_turned_clockwise():
    camera = FakeCamera(VirtualClock())
    camera.spoil = lambda image: marked()
    seen = {turn: Fitted(camera, turn, Fit.CROP, None).read(1.0).image for turn in (0, 90, 180, 270)}
    assert seen[0].shape == seen[180].shape == (20, 40, 3) and seen[90].shape == seen[270].shape == (40, 20, 3)
    # Left goes up, then right, then down.
    edges = seen[0][10, 0], seen[90][0, 10], seen[180][10, -1], seen[270][-1, 10]
    assert all(tuple(x) == RED for x in edges)


def test_fitted_in_three_ways(require):
    require("cv2")
    image = marked()
    crop, pad, stretch = (fitted(image, fit, (10, 10)) for fit in Fit)
    assert all(x.shape == (10, 10, 3) and x.dtype == np.uint8 for x in (crop, pad, stretch))
    assert tuple(crop[5, 0]) == (0, 100, 0), "the red edge is cut off"
    assert tuple(pad[0, 5]) == tuple(pad[-1, 5]) == BLACK and tuple(pad[5, 0]) == RED, "all of it, with black beside it"
    assert tuple(stretch[0, 0]) == RED and tuple(stretch[0, 5]) == (0, 100, 0)
    assert fitted(image, Fit.CROP, (20, 40)) is image, "what fits is not touched"
    larger = fitted(image, Fit.STRETCH, (40, 80))
    assert larger.shape == (40, 80, 3) and tuple(larger[20, 0]) == RED
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    means = noise.reshape(10, 4, 10, 4, 3).mean(axis=(1, 3))
    assert np.abs(fitted(noise, Fit.CROP, (10, 10)) - means).max() <= 0.5 + 1e-6, "the mean of those that it stands for"


@pytest.mark.sim
def test_pictures_of_the_model_are_those_of_the_world(require):
    config = InsertConfig(observe=Observe.pixels, image_size=SIZE)
    world, mirror = make_env(config, 1), Mirror(config)
    try:
        there = world.reset(None, [7])
    except BurnishError as error:
        require(None, str(error))
    mirror.begin(7)
    here = mirror.observe()
    assert mirror.spec == world.spec and here.keys() == there.keys()
    for key in there:
        assert np.array_equal(here[key], there[key].numpy()), key
    before = here["image.front"].copy()
    mirror.see(mirror.start + 0.3, np.zeros(6))
    after = mirror.observe()
    assert not np.array_equal(after["image.front"], before), "they are of where the robot is"


@pytest.mark.sim
def test_what_moves_has_to_be_seen_by_cameras():
    seen = PushConfig(observe=Observe.pixels)
    mirror = Mirror(seen, draws=False)
    assert set(mirror.spec.obs.shapes) == {"state"} and mirror.spec.pixels is None
    mirror.begin(0)
    verdict = mirror.judge(np.zeros(mirror.spec.action.dim))
    assert verdict.success is None and not verdict.terminated.any(), "nobody here knows where the block is"
    for config, draws in [(seen, True), (replace(seen, observe=Observe.state), False)]:
        with pytest.raises(BurnishError, match="things move"):
            Mirror(config, draws=draws)
    mirror = Mirror(InsertConfig(observe=Observe.pixels), draws=False)
    mirror.begin(0)
    assert mirror.judge(np.zeros(mirror.spec.action.dim)).success is not None, "the control: a hole stays where it is"
