"""Cameras: the newest picture, none twice, and a sentence where there is none. The film is written by the test."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.real_robot.camera import CameraConfig, OpenCVCamera, Watched
from burnish.real_robot.clock import VirtualClock
from burnish.real_robot.control.link import LocalLink
from burnish.real_robot.drivers.twin import Twin, TwinConfig
from burnish.real_robot.env import each_anew
from burnish.real_robot.errors import DeviceFault, Refused, StaleState
from burnish.real_robot.safety.safe_robot import Safety
from burnish.sim.mirror import Mirror
from burnish.sim.tasks.reach import ReachConfig
from fake_camera import FakeCamera

FILM = 40  # pictures


@pytest.fixture
def film(require, tmp_path: Path) -> str:
    """Red, brighter with every picture."""
    cv2 = require("cv2", "OpenCV is not installed")
    path = str(tmp_path / "film.avi")
    writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*"MJPG"), 30.0, (64, 48))
    require(writer.isOpened(), "this OpenCV writes no films")
    for k in range(FILM):
        image = np.zeros((48, 64, 3), np.uint8)
        image[..., 2] = 40 + 5 * k  # OpenCV's order is blue, green, red
        writer.write(image)
    writer.release()
    return path


def test_a_film(film: str):
    camera = OpenCVCamera(CameraConfig(film, width=64, height=48, pace_hz=100.0))
    frames = [camera.open()]
    while True:
        try:
            frames.append(camera.read(1.0))
        except DeviceFault as error:
            assert f"ended after {FILM}" in str(error)
            break
        if len(frames) == 5:
            time.sleep(0.1)  # about ten pictures, of which only the newest is given
    camera.close()
    camera.close()
    seqs, times = [f.seq for f in frames], [f.t_ns for f in frames]
    assert seqs == sorted(set(seqs)) and times == sorted(set(times)) and max(np.diff(seqs)) >= 4
    for f in frames:
        assert f.image.shape == (48, 64, 3) and f.image.dtype == np.uint8
        red, green, blue = f.image.reshape(-1, 3).mean(axis=0)
        # JPEG changes a flat colour by a few of 255; the order of the channels, and which picture it is, it does not.
        assert abs(red - (40 + 5 * (f.seq - 1))) < 6 and green < 12 and blue < 12
    with pytest.raises(DeviceFault):
        camera.read(0.01)


def test_silence(film: str):
    camera = OpenCVCamera(CameraConfig(film, pace_hz=2.0))
    camera.open()
    began = time.monotonic()
    with pytest.raises(StaleState, match=r"0\.05"):
        camera.read(0.05)
    assert time.monotonic() - began < 0.4
    camera.close()


def test_what_is_not_there(require, tmp_path: Path):
    require("cv2")
    camera = OpenCVCamera(CameraConfig(str(tmp_path / "none.avi")))
    with pytest.raises(DeviceFault, match="cannot be opened"):
        camera.open()
    camera.close()


def test_another_size_is_refused(film: str):
    with pytest.raises(Refused, match="width of 64 pixels where 640"):
        OpenCVCamera(CameraConfig(film, width=640)).open()


def test_closing_does_not_wait_for_a_picture(film: str, monkeypatch):
    import cv2

    class Hanging:
        def __init__(self, source) -> None:
            self.again = threading.Event()

        def isOpened(self) -> bool:
            return True

        def read(self):
            self.again.wait(10)
            return False, None

        def release(self) -> None: ...

    monkeypatch.setattr(cv2, "VideoCapture", Hanging)
    camera = OpenCVCamera(CameraConfig(film, open_s=0.1))
    began = time.monotonic()
    with pytest.raises(DeviceFault, match="no picture"):
        camera.open()
    camera.close()
    assert time.monotonic() - began < 3.0  # twice the second that the thread is given


@pytest.mark.parametrize("wrong", [{"width": 0}, {"fps": -1.0}, {"pace_hz": float("nan")}])
def test_settings_are_checked(wrong):
    with pytest.raises(Refused):
        CameraConfig(0, **wrong)


def test_a_fake_camera_keeps_the_contract():
    clock = VirtualClock()
    camera = FakeCamera(clock, fps=10.0)
    first, second = camera.read(0.2), camera.read(0.2)
    assert second.seq == first.seq + 1 and second.t_ns - first.t_ns == 100_000_000
    with pytest.raises(StaleState):
        camera.read(0.01)
    clock.advance_ns(1_000_000_000)
    assert camera.read(0.0).seq >= second.seq + 9  # the newest, not the next
    camera.silent = True
    with pytest.raises(StaleState):
        camera.read(0.5)
    camera.silent = False
    for spoiled in (lambda x: x[..., 0], lambda x: x.astype(float), lambda x: x[:0], lambda x: None):
        camera.spoil = spoiled
        with pytest.raises(DeviceFault, match="picture"):
            camera.read(0.2)
    camera.gone = True
    with pytest.raises(DeviceFault):
        camera.read(0.2)


def test_a_frozen_picture_is_stale():
    fake = FakeCamera(VirtualClock(), fps=30.0)
    camera = Watched(fake, frozen_after=3)
    for _ in range(20):  # the control: pictures that change are never frozen
        camera.read(0.1)
    fake.frozen = True
    given = 0
    with pytest.raises(StaleState, match="frozen"):
        while given < 10:
            camera.read(0.1)
            given += 1
    assert given == 2  # the third repetition is one too many
    with pytest.raises(StaleState, match="frozen"):
        camera.read(0.1)
    fake.frozen = False
    camera.read(0.1)
    with pytest.raises(Refused):
        Watched(fake, frozen_after=0)
    camera.close()
    assert fake.closed


@pytest.mark.sim
def test_the_page_says_how_a_robot_sees(film: str):
    page = (Path(__file__).parents[1] / "docs" / "robots_own.md").read_text(encoding="utf-8")
    section = page.partition("## Cameras\n")[2].partition("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    printed = "source=0, width=640, height=480"
    assert printed in program
    program = program.replace(printed, f"source={film!r}, width=64, height=48, pace_hz=30.0")
    body = Mirror(ReachConfig())

    def connect(start: np.ndarray) -> LocalLink:
        config = TwinConfig(mjcf=body.mjcf, joints=body.joints, start=start.tolist())
        return LocalLink(Twin(config, VirtualClock()), Safety(rate_hz=100.0))

    action = torch.zeros(1, body.spec.action.dim)
    said: dict[str, Any] = {"body": body, "stage": each_anew(connect), "action": action}
    exec(compile(program, "robots_own.md", "exec"), said)
    for obs in (said["obs"], said["step"].obs):
        assert said["env"].spec.obs.check(obs) == 1
        red, green, blue = obs["image.front"][0].float().mean(dim=(1, 2))
        assert red > 30 and max(green, blue) < 12
