"""Cameras: what holds for states holds for pictures. `read` gives the newest, none twice, and says where there is none.

A camera is opened, read and closed by one owner, and grabs in a thread of its own, because a picture that waits in a
driver's queue is old: the newest wins, and its time is that of its arrival. OpenCV (``pip install 'burnish[robots]'``)
is imported when a camera is opened.

**Faults that are found.** Silence is a `StaleState`, as is a picture that is equal to the last, bit by bit, too often
in a row (`Watched`): no sensor repeats its noise, but a hung driver repeats its buffer. A lens cap is not detected.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..policies.core.ranges import check_ranges
from .clock import Clock, MonotonicClock, ns
from .errors import DeviceFault, Refused, StaleState

Image = NDArray[np.uint8]
PARTING_S = 1.0


@dataclass(frozen=True, slots=True)
class Frame:
    """One picture of a camera, with its number and the time of its arrival in ns."""

    seq: int  # grows with every picture that the camera has taken
    t_ns: int  # when it arrived
    image: Image  # (H, W, 3), RGB


class Sensor(Protocol):
    """The interface of a camera."""

    def read(self, timeout_s: float) -> Frame:
        """The newest frame, newer than the one before; `StaleState` after ``timeout_s``, `DeviceFault` for good."""
        ...

    def close(self) -> None:
        """Again, too; takes a bounded time."""
        ...


def frame(seq: int, t_ns: int, image: Any) -> Frame:
    """Anything that is no picture is a fault of the device."""
    found = np.asarray(image)
    if found.dtype != np.uint8 or found.ndim != 3 or found.shape[2] != 3 or 0 in found.shape:
        raise DeviceFault(f"a picture is (H, W, 3) bytes, and {found.dtype} of {found.shape} came")
    return Frame(seq, t_ns, found)


class Watched:
    """A sensor whose picture must change: ``frozen_after`` equal ones in a row are one picture, that is stale."""

    def __init__(self, sensor: Sensor, frozen_after: int = 10) -> None:
        if frozen_after < 1:
            raise Refused(f"frozen_after={frozen_after} must be at least 1")
        self._sensor, self._frozen_after = sensor, frozen_after
        self._last: Image | None = None
        self._equal = 0

    def read(self, timeout_s: float) -> Frame:
        found = self._sensor.read(timeout_s)
        self._equal = self._equal + 1 if self._last is not None and np.array_equal(self._last, found.image) else 0
        self._last = found.image
        if self._equal >= self._frozen_after:
            raise StaleState(f"the picture is frozen: {self._equal + 1} in a row are equal; check the camera")
        return found

    def close(self) -> None:
        self._sensor.close()


class Fit(StrEnum):
    """The way in which a picture becomes one of another shape."""

    CROP = "crop"  # the largest part around the middle
    PAD = "pad"  # all of it, with black beside it
    STRETCH = "stretch"  # all of it, distorted


class Fitted:
    """A sensor whose pictures are turned, and of the shape (height, width), if one is given."""

    def __init__(self, sensor: Sensor, turn: int, fit: Fit, shape: tuple[int, int] | None) -> None:
        self._sensor, self._turns, self._fit, self._shape = sensor, -turn // 90, fit, shape

    def read(self, timeout_s: float) -> Frame:
        found = self._sensor.read(timeout_s)
        image = np.ascontiguousarray(np.rot90(found.image, self._turns))
        return Frame(found.seq, found.t_ns, image if self._shape is None else fitted(image, self._fit, self._shape))

    def close(self) -> None:
        self._sensor.close()


def fitted(image: Image, fit: Fit, shape: tuple[int, int]) -> Image:
    """Each pixel is the mean of those that it stands for."""
    import cv2

    height, width = shape
    here = image.shape[:2]
    if here == shape:
        return image
    if fit is Fit.CROP:
        scale = max(height / here[0], width / here[1])
        rows, columns = max(1, round(height / scale)), max(1, round(width / scale))
        top, left = (here[0] - rows) // 2, (here[1] - columns) // 2
        image = image[top : top + rows, left : left + columns]
    inner = shape
    if fit is Fit.PAD:
        scale = min(height / here[0], width / here[1])
        inner = max(1, round(here[0] * scale)), max(1, round(here[1] * scale))
    method = cv2.INTER_AREA if inner[0] <= image.shape[0] else cv2.INTER_LINEAR
    small = np.asarray(cv2.resize(np.ascontiguousarray(image), inner[::-1], interpolation=method), np.uint8)
    if inner == shape:
        return small
    framed = np.zeros((height, width, 3), np.uint8)
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    framed[top : top + inner[0], left : left + inner[1]] = small
    return framed


@dataclass(frozen=True)
class CameraConfig:
    """Settings of a camera: its source, the format that is asked for, and pace."""

    source: int | str  # an index, or the path of a device or a film
    width: int | None = None  # asked for; what the camera makes of it is checked
    height: int | None = None
    fps: float | None = None
    pace_hz: float | None = None  # grab no faster: for films, which would be over at once
    open_s: float = 5.0  # until the first picture

    def __post_init__(self) -> None:
        check_ranges(self, {"(0, inf)": "width height fps pace_hz open_s"}, "camera.", Refused)


class OpenCVCamera:
    """Anything that ``cv2.VideoCapture`` opens, as a USB camera."""

    def __init__(self, config: CameraConfig, clock: Clock | None = None) -> None:
        self.config = config
        self.clock: Clock = clock or MonotonicClock()
        self._news = threading.Condition()
        self._newest: Frame | None = None
        self._trouble = ""
        self._given = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    def open(self) -> Frame:
        """The first picture, at once the proof of width and height."""
        if self._thread is not None:
            raise Refused("a camera is opened once")
        try:
            import cv2
        except ImportError as error:
            raise Refused(f"a camera needs OpenCV ({error}); pip install 'burnish[robots]'") from error
        self._thread = threading.Thread(target=self._grab, args=(cv2,), daemon=True)
        self._thread.start()
        try:
            first = self.read(self.config.open_s)
        except StaleState as error:
            self.close()
            raise DeviceFault(f"camera {self.config.source!r} gave no picture: {error}") from error
        height, width = first.image.shape[:2]
        for name, asked, got in (("width", self.config.width, width), ("height", self.config.height, height)):
            if asked is not None and asked != got:
                self.close()
                raise Refused(
                    f"camera {self.config.source!r} has a {name} of {got} pixels where {asked} were asked for"
                )
        return first

    def read(self, timeout_s: float) -> Frame:
        with self._news:
            self._news.wait_for(lambda: self._trouble or self._fresh(), max(0.0, timeout_s))
            if self._newest is not None and self._fresh():
                self._given = self._newest.seq
                return self._newest
            if self._trouble:
                raise DeviceFault(self._trouble)
        raise StaleState(f"no new picture of camera {self.config.source!r} within {timeout_s:g} s")

    def close(self) -> None:
        """The thread lets go of the camera; where a picture never comes, it is left behind."""
        self._closing = True
        self._fail("the camera is closed")
        if self._thread is not None:
            self._thread.join(PARTING_S)

    def _fresh(self) -> bool:
        return self._newest is not None and self._newest.seq > self._given

    def _fail(self, trouble: str) -> None:
        with self._news:
            self._trouble = self._trouble or trouble
            self._news.notify_all()

    def _grab(self, cv2: Any) -> None:
        capture = cv2.VideoCapture(self.config.source)
        settings = (cv2.CAP_PROP_FRAME_WIDTH, self.config.width), (cv2.CAP_PROP_FRAME_HEIGHT, self.config.height)
        for setting, value in (*settings, (cv2.CAP_PROP_FPS, self.config.fps)):
            if value is not None:
                capture.set(setting, value)
        try:
            if not capture.isOpened():
                self._fail(f"camera {self.config.source!r} cannot be opened; is it there, and not in use?")
            seq = 0
            while not (self._closing or self._trouble):
                began_ns = self.clock.now_ns()
                well, image = capture.read()
                if not well:
                    self._fail(f"camera {self.config.source!r} ended after {seq} pictures; is it unplugged?")
                    return
                seq += 1
                found = frame(seq, self.clock.now_ns(), cv2.cvtColor(image, cv2.COLOR_BGR2RGB))
                with self._news:
                    self._newest = found
                    self._news.notify_all()
                if self.config.pace_hz is not None:
                    self.clock.sleep_until_ns(began_ns + ns(1 / self.config.pace_hz))
        except Exception as error:  # of OpenCV's, in a thread where nobody would hear it
            self._fail(f"camera {self.config.source!r} failed: {error}")
        finally:
            capture.release()
