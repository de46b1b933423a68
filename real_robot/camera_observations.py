"""``cameras.<name>=...`` of the command line: the pictures that a policy sees, as "image.<name>".

A policy is shown what it was trained on: pictures of its own size, so what a camera gives is turned upright and made
to fit. Cameras are opened before anything moves, and a robot that cannot see stops (`env.CameraObservations`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from ..policies.core.errors import BurnishError
from ..policies.core.ranges import check_ranges
from ..policies.core.spec import PolicySpec
from .camera import CameraConfig, Fit, Fitted, OpenCVCamera, Sensor, Watched
from .clock import MonotonicClock
from .env import CameraObservations
from .errors import Refused
from .settings import settings

KEY = "image."


@dataclass(frozen=True)
class CameraObservationConfig(CameraConfig):
    """Settings of a camera that a policy sees: its source, turn, fit, and the age at which it stops."""

    turn: int = 0  # degrees clockwise, of a camera that is mounted otherwise: 0, 90, 180 or 270
    fit: Fit = Fit.CROP
    size: Sequence[int] = ()  # [height, width], where no policy says; by default the camera's own
    oldest_s: float = 0.2  # so old may a picture be; then the robot stops
    frozen_after: int = 10  # so many equal pictures in a row come from no sensor; 0: they may

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.turn not in (0, 90, 180, 270):
            raise Refused(f"turn={self.turn} of a camera must be 0, 90, 180 or 270 degrees")
        if len(self.size) not in (0, 2) or any(x < 1 for x in self.size):
            raise Refused(f"size={list(self.size)} of a camera must be [height, width] in pixels")
        check_ranges(self, {"(0, inf)": "oldest_s", "[0, inf)": "frozen_after"}, refusal=Refused)


@contextmanager
def with_camera_observations(body: Any, cameras: Mapping[str, Any], policy: PolicySpec | None) -> Iterator[Any]:
    """``body`` with the pictures of ``cameras`` (name -> settings of `CameraObservationConfig`), in the sizes that the
    policy wants."""
    configs = {name: _config(name, said) for name, said in cameras.items()}
    wanted = {} if policy is None else {k: s for k, s in policy.obs.shapes.items() if k.startswith(KEY)}
    drawn = body.spec.obs.shapes
    blind = sorted(key for key in wanted if key not in drawn and key.removeprefix(KEY) not in configs)
    if blind:
        name = blind[0].removeprefix(KEY)
        raise BurnishError(f"the policy needs the picture {name!r}; say where it comes from: cameras.{name}.source=...")
    unseen = sorted(set(configs) - {key.removeprefix(KEY) for key in wanted}) if policy is not None else []
    if unseen:
        known = ", ".join(sorted(key.removeprefix(KEY) for key in wanted)) or "none"
        raise BurnishError(f"the policy sees no picture {unseen[0]!r}; those that it sees: {known}")
    if not configs:
        yield body
        return
    with ExitStack() as stack:
        sensors: dict[str, Sensor] = {}
        for name, config in configs.items():
            camera = stack.enter_context(closing(OpenCVCamera(config)))
            camera.open()
            watched = Watched(camera, config.frozen_after) if config.frozen_after else camera
            shape = tuple(wanted.get(KEY + name, config.size))[-2:]
            if config.size and shape != tuple(config.size):
                raise BurnishError(f"the policy wants pictures of {list(shape)}; leave out cameras.{name}.size")
            sensors[name] = Fitted(watched, config.turn, config.fit, (shape[0], shape[1]) if shape else None)
        yield CameraObservations(
            body, sensors, MonotonicClock(), {name: config.oldest_s for name, config in configs.items()}
        )


def require_shown(cameras: Mapping[str, Any], policy: PolicySpec) -> None:
    """Of a policy that says what it sees when the cameras are open already."""
    unseen = sorted(name for name in cameras if KEY + name not in policy.obs.shapes)
    if unseen:
        raise BurnishError(f"policy.keys does not name image.{unseen[0]}, so nobody would see it; leave the camera out")


def _config(name: str, said: Any) -> CameraObservationConfig:
    if not isinstance(said, Mapping):
        raise BurnishError(
            f"cameras.{name}={said!r} must be settings; give cameras.{name}.source=0, or the path of one"
        )
    return settings(CameraObservationConfig, said, f"camera {name!r}", place=f"cameras.{name}")
