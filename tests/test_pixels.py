"""Pictures: right, the same whoever draws them, drawn from the state of now, and known to be plain or lavish."""

from __future__ import annotations

import gc
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from verb_lab import refused

from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import agent_spec, check_compatible
from burnish.policies.data.lerobot_layout import burnish_entry, read_burnish_entry
from burnish.policies.measure.evaluate import evaluate
from burnish.sim import gl
from burnish.sim.build import make_env
from burnish.sim.desk import Observe
from burnish.sim.experts import make_expert
from burnish.sim.randomize import RandomizeConfig
from burnish.sim.task import PixelConfig
from burnish.sim.tasks.reach import ReachConfig

mujoco = pytest.importorskip("mujoco")
from burnish.sim.physics import Physics  # noqa: E402
from burnish.sim.pixels import Pixels  # noqa: E402

pytestmark = pytest.mark.sim

SEEDS = [11, 12, 13, 14, 15]
LOOKING = ReachConfig(observe=Observe.pixels, image_size=48)
CAMERAS = ("image.front", "image.wrist")

# Seen from above: red to the right, green further up in the picture, on black.
BALLS = """
<mujoco>
  <visual><headlight ambient="1 1 1" diffuse="0 0 0" specular="0 0 0"/></visual>
  <worldbody>
    <light pos="0 0 3" castshadow="true"/>
    <camera name="above" pos="0 0 2" fovy="60"/>
    <body pos="0.5 0 0"><freejoint/><geom name="red" size="0.1" rgba="1 0 0 1"/></body>
    <body pos="0 0.7 0"><freejoint/><geom name="green" size="0.1" rgba="0 1 0 1"/></body>
  </worldbody>
</mujoco>"""


def middle_of(picture, channel):
    """(x, y) in pixels from the middle, y upwards, of what has this colour and no other."""
    others = np.delete(picture, channel, axis=0).max(0)
    rows, columns = np.nonzero((picture[channel] > 100) & (others < 50))
    assert len(rows), "nothing of this colour is to be seen"
    half = picture.shape[1] / 2
    return columns.mean() + 0.5 - half, half - rows.mean() - 0.5


@pytest.fixture
def balls():
    physics = Physics(mujoco.MjModel.from_xml_string(BALLS), 5, threads=2)
    physics.forward()
    return physics, Pixels(physics, PixelConfig(("above",), 90))


def test_things_are_seen_where_a_pinhole_camera_sees_them(balls):
    _, pixels = balls
    picture = pixels.draw(None)["image.above"][0]
    assert picture.shape == (3, 90, 90) and picture.dtype == np.uint8
    metre = 45 / (2 * np.tan(np.radians(30)))  # pixels, in the plane of the balls
    # A ball off the axis is seen a little further out than its middle, and pixels are whole: two of them.
    assert middle_of(picture, 0) == pytest.approx((0.5 * metre, 0), abs=2)
    assert middle_of(picture, 1) == pytest.approx((0, 0.7 * metre), abs=2)


def test_a_world_with_a_model_of_its_own_is_drawn_by_that_model(balls):
    physics, pixels = balls
    before = pixels.draw(None)["image.above"].copy()
    assert all((picture == before[0]).all() for picture in before)
    own = physics.own_model(3, ("geom_rgba", "cam_pos"))
    own.geom_rgba[own.geom("red").id] = (0, 0, 1, 1)
    own.cam_pos[0, 0] = 0.5
    after = pixels.draw(None)["image.above"]
    assert [(x == y).all() for x, y in zip(before, after, strict=True)] == [True, True, True, False, True]
    assert middle_of(after[3], 2) == pytest.approx((0, 0), abs=1), "moved with the camera, and blue"


def test_pictures_are_of_the_state_and_drawing_changes_nothing_in_it(balls):
    physics, pixels = balls
    x = physics.column("qpos", slice(0, 1))
    before, derived = pixels.draw(None)["image.above"].copy(), physics.column("xpos").read()
    x.write(np.full((5, 1), -0.5))
    after = pixels.draw(None)["image.above"].copy()
    assert middle_of(after[0], 0)[0] == pytest.approx(-middle_of(before[0], 0)[0], abs=1)
    assert (physics.column("xpos").read() == derived).all(), "what MuJoCo derived last belongs to the task"
    state = physics.state()
    physics.step(np.zeros((5, 0)), 50)
    assert (pixels.draw(None)["image.above"] != after).any()
    physics.restore(state)
    assert (pixels.draw(None)["image.above"] == after).all()


def test_only_the_worlds_asked_for_are_drawn(balls):
    physics, pixels = balls
    before = pixels.draw(None)["image.above"].copy()
    physics.column("qpos", slice(0, 1)).write(-0.5)
    after = pixels.draw(np.array([1, 4]))["image.above"]
    assert [(x == y).all() for x, y in zip(before, after, strict=True)] == [True, False, True, True, False]
    assert pixels.draw(np.array([], np.int64))["image.above"] is after


def test_plain_pictures_leave_the_model_as_it_is(balls):
    physics, pixels = balls
    model = physics.model
    before = model.light_castshadow.copy(), model.vis.quality.offsamples, model.vis.global_.offwidth
    plain = pixels.draw(None)["image.above"]
    lavish = Pixels(physics, PixelConfig(("above",), 90, lavish=True)).draw(None)["image.above"]
    assert (model.light_castshadow == before[0]).all() and before[0].all()
    assert (model.vis.quality.offsamples, model.vis.global_.offwidth) == before[1:] and before[1] > 0
    edges = [((x > 20) & (x < 200)).sum() for x in (plain, lavish)]
    assert edges[1] > 2 * edges[0], "only lavish pictures have smooth edges"


def test_a_camera_that_is_not_there_is_refused(balls):
    with pytest.raises(BurnishError, match="no camera 'abov'; did you mean 'above'"):
        Pixels(balls[0], PixelConfig(("abov",), 48))


def episode(seeds, steps=4, camera_m=0.01):
    """What each seed's world shows at each tick, drawn in as many worlds as there are seeds."""
    env = make_env(replace(LOOKING, randomize=RandomizeConfig(camera_m=camera_m)), len(seeds))
    low, high = torch.tensor(env.spec.action.low), torch.tensor(env.spec.action.high)
    shown = [{key: x.clone() for key, x in env.reset(seeds=seeds).items()}]
    for tick in range(steps):
        # A world acts by its seed, not by its place.
        share = torch.tensor([[(seed * 7 + tick * 3) % 10 / 9] for seed in seeds])
        shown.append({key: x.clone() for key, x in env.step(low + (high - low) * share).obs.items()})
    return shown


def test_pictures_depend_neither_on_the_number_of_worlds_nor_on_the_thread():
    five, two, one = episode(SEEDS), episode(SEEDS[:2:-1]), episode(SEEDS[3:4])
    for all_, pair, single in zip(five, two, one, strict=True):
        for key in CAMERAS:
            assert (all_[key][3] == pair[key][1]).all() and (all_[key][4] == pair[key][0]).all()
            assert (all_[key][3] == single[key][0]).all()
            assert (all_[key][3] != all_[key][4]).any(), "different episodes look different"
    assert (five[0]["image.wrist"] != five[1]["image.wrist"]).any()
    assert (episode(SEEDS[:1], 0, camera_m=0.0)[0]["image.front"][0] != five[0]["image.front"][0]).any()


def test_inactive_and_other_worlds_keep_their_last_picture():
    env = make_env(LOOKING, 3)
    before = env.reset(seeds=[1, 2, 3])["image.front"].clone()
    after = env.reset(torch.tensor([False, True, False]), [7, 7, 7])["image.front"]
    assert [(x == y).all().item() for x, y in zip(before, after, strict=True)] == [True, False, True]


def test_contexts_are_opened_late_and_freed():
    before = set(threading.enumerate())

    def painters():
        return [x for x in threading.enumerate() if x not in before and x.name.startswith("pixels")]

    env = make_env(LOOKING, 5)
    assert not painters()
    env.reset()
    assert painters()
    del env
    gc.collect()
    deadline = time.monotonic() + 10
    while painters() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not painters()


def test_contexts_that_outlive_their_threads_go_quietly(monkeypatch):
    said: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    env: Any = make_env(LOOKING, 1)
    env.reset()
    (painter,) = env._pixels._painters
    painter.thread.shutdown()  # as the interpreter does at the end of a program that still holds the worlds
    del env, painter
    gc.collect()
    assert not said


def test_the_first_backend_that_works_is_taken(monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(gl, "_ASK", "import sys; sys.exit(sys.argv[1] != 'osmesa')")
    assert gl.choose() == "osmesa"
    monkeypatch.setattr(gl, "_ASK", "import os; os.abort()")  # as some drivers do
    with pytest.raises(BurnishError, match=r"egl: .*status -6; osmesa: .*status -6\); run `apt-get install"):
        gl.choose()
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    with pytest.raises(BurnishError, match=r"here \(glfw: "):
        gl.choose()
    monkeypatch.setenv("MUJOCO_GL", "off")
    with pytest.raises(BurnishError, match="MUJOCO_GL=off forbids"):
        gl.choose()


def test_a_broken_egl_is_passed_over(monkeypatch, require):
    """Not by a stand-in: MuJoCo's own EGL fails, and its OSMesa answers."""
    for name in ("MUJOCO_GL", "PYOPENGL_PLATFORM"):  # the second is set by other tests, which draw with EGL
        monkeypatch.delenv(name, raising=False)
    require(gl._complaint("osmesa") is None, "OSMesa is not installed")
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "99")
    assert gl.choose() == "osmesa"


def test_a_policy_of_plain_pictures_is_refused_where_they_are_lavish():
    plain, lavish = make_env(LOOKING, 1).spec, make_env(replace(LOOKING, lavish=True), 1).spec
    blind = make_env(ReachConfig(), 1).spec
    assert (plain.pixels, lavish.pixels, blind.pixels) == ("plain", "lavish", None)
    check_compatible(agent_spec(plain), plain)
    check_compatible(agent_spec(blind), replace(blind, pixels="lavish"))
    check_compatible(agent_spec(replace(plain, pixels=None)), lavish)  # data of others, which do not say
    with pytest.raises(BurnishError, match="trained on plain pictures, but the environment draws lavish ones"):
        check_compatible(agent_spec(plain), lavish)


@pytest.mark.slow
def test_plain_or_lavish_goes_from_the_world_to_the_dataset_to_the_policy(tmp_path, capsys):
    world = ["env=reach", "env.observe=pixels", "env.image_size=32"]
    assert main(["collect", *world, "episodes=2", f"out={tmp_path}/data"]) == 0
    small = ["policy=gaussian", "policy.hidden=[8]", "train.steps=2", "train.batch=4", "eval.episodes=1"]
    assert main(["pretrain", *small, f"data={tmp_path}/data", f"out={tmp_path}/run"]) == 0
    evaluation = ["evaluate", f"policy.path={tmp_path}/run", "eval.episodes=1"]
    assert main(evaluation) == 0
    capsys.readouterr()
    assert "trained on plain pictures" in refused(capsys, *evaluation, *world, "env.lavish=true")


def test_a_dataset_remembers_how_its_pictures_were_drawn():
    spec = make_env(LOOKING, 1).spec
    entry = burnish_entry(spec, {})
    assert read_burnish_entry(entry)[0] == spec
    older = {key: value for key, value in entry.items() if key != "pixels"}
    assert read_burnish_entry(older)[0] == replace(spec, pixels=None)


def test_films_draw_the_worlds_asked_for_and_are_sharp():
    env: Any = make_env("reach", 4)
    env.reset(seeds=[1, 2, 3, 4])
    everyone, some = env.render(), env.render(rows=[2])
    assert everyone.shape == (4, 256, 256, 3) and everyone.dtype == torch.uint8
    assert (some == everyone[2:3]).all() and (everyone[2] != everyone[1]).any()
    assert ScaledEnv(env).render(64, [0, 3]).shape == (2, 64, 64, 3)


def test_an_evaluation_is_filmed(tmp_path):
    import av

    env = make_env("reach", 2)
    seeds = [3, 4, 5]
    played = evaluate(ScaledEnv(env), make_expert("reach", 2, env=env), seeds, video=tmp_path, video_seeds=seeds[1:])
    assert played.success == [True] * 3
    assert sorted(file.name for file in tmp_path.iterdir()) == ["seed_4_success.mp4", "seed_5_success.mp4"]
    with av.open(str(tmp_path / "seed_4_success.mp4")) as film:
        frames = [frame.to_ndarray(format="rgb24").astype(int) for frame in film.decode(video=0)]
        assert film.streams.video[0].average_rate == env.spec.control_hz
    assert len(frames) == played.lengths[1] + 1 and frames[0].shape == (256, 256, 3)
    # The arm moves through some hundredths of the picture; what the codec changes by itself is far less than 30 of 255.
    assert (abs(frames[-1] - frames[0]).max(-1) > 30).mean() > 0.01
