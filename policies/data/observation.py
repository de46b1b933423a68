"""Observations of Gymnasium as observations of ours, whatever the order in which their keys were written down:

    uint8 of 2 or 3 dimensions     an image: ``image.<key>``, channels first; ``image.main`` if it stands alone
    ``pixels`` and below           an image too: ``image.main``, or ``image.<camera>``, as LeRobot names them
    ``desired_goal`` and below     ``goal``, or ``goal_image.main``
    ``environment_state``          as it is; LeRobot's worlds and policies know it by that name
    every other Box                flattened, and concatenated in the order of the keys into ``state``

Dicts may be nested: their keys are joined by dots. Numbers become float32 here, and are rounded nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import BurnishError
from ..core.spec import ObsSpec

ENVIRONMENT_STATE = "environment_state"


@dataclass(frozen=True)
class Image:
    """A camera among the arrays of the worlds, and the key under which it is observed."""

    name: str  # of the array in the memory of the worlds
    key: str
    shape: tuple[int, ...]  # there: (H, W), (H, W, C) or (C, H, W)

    def read(self, value: np.ndarray) -> np.ndarray:
        """(N, C, H, W). The channels are the shorter one of both ends."""
        if len(self.shape) == 2:
            return value[:, None]
        return value if self.shape[0] < self.shape[2] else np.moveaxis(value, 3, 1)


@dataclass(frozen=True)
class Numbers:
    """A stretch of a vector of ours."""

    name: str
    key: str
    start: int
    end: int


class Layout:
    """The place of each leaf of an environment's observation (`world_server.leaves`). ``world`` is for sentences."""

    def __init__(self, leaves: Sequence[Mapping[str, Any]], world: str) -> None:
        self._images: list[Image] = []
        self._numbers: list[Numbers] = []
        ends = {"state": 0, ENVIRONMENT_STATE: 0, "goal": 0}
        keys = {".".join(map(str, leaf["path"])) for leaf in leaves}
        # The key "arm/pos" of a world stands where "pos" of "arm" would: in files they are the same.
        for leaf in sorted(leaves, key=lambda leaf: "/".join(leaf["path"]).split("/")):
            path, shape = [str(key) for key in leaf["path"]], tuple(leaf["shape"])
            name, called = "obs." + ".".join(path), ".".join(path)
            if leaf["kind"] != "Box":
                raise BurnishError(
                    f"env.id={world} observes {called or 'something'} of kind {leaf['kind']}, but only Box, Dict and "
                    "Tuple are read here; register a version that turns it into numbers"
                )
            is_goal = path[:1] == ["desired_goal"]
            if leaf["dtype"] == "uint8" and len(shape) in (2, 3):
                below = ".".join(path[1:]) or "main"
                is_camera = path[:1] == ["pixels"] and below not in keys
                key = f"goal_image.{below}" if is_goal else f"image.{below if is_camera else called or 'main'}"
                self._images.append(Image(name, key, shape))
            elif len(shape) <= 2:
                key = "goal" if is_goal else called if called == ENVIRONMENT_STATE else "state"
                self._numbers.append(Numbers(name, key, ends[key], ends[key] + math.prod(shape)))
                ends[key] = self._numbers[-1].end
            else:
                raise BurnishError(
                    f"env.id={world} observes {called or 'an array'} of shape {shape} and type {leaf['dtype']}, but "
                    "images must be uint8 with at most 3 dimensions; choose or register a version that gives such"
                )
        shapes = {key: (end,) for key, end in ends.items() if end > 0}
        pictures = {image.key: image.read(np.empty((1, *image.shape))).shape[1:] for image in self._images}
        self.spec = ObsSpec({**shapes, **pictures})

    def sources(self) -> dict[str, list[str]]:
        """Key -> the arrays of the environment that it consists of, in their order."""
        parts = [*self._images, *self._numbers]
        return {key: [part.name.removeprefix("obs.") for part in parts if part.key == key] for key in self.spec.shapes}

    def names(self, key: str) -> list[str]:
        """Of the numbers of a vector; none where the environment does not name them."""
        parts = [(x.name.removeprefix("obs."), x.end - x.start) for x in self._numbers if x.key == key]
        if any(name in ("", ENVIRONMENT_STATE) for name, _ in parts):
            return []
        return [f"{name}_{i}" if size > 1 else name for name, size in parts for i in range(size)]

    def room(self, num_envs: int) -> dict[str, np.ndarray]:
        """Observations of ours for so many worlds, still empty."""
        images = {image.key for image in self._images}
        return {
            key: np.zeros((num_envs, *shape), np.uint8 if key in images else np.float32)
            for key, shape in self.spec.shapes.items()
        }

    def write(self, arrays: Mapping[str, np.ndarray], rows: Mapping[str, np.ndarray]) -> None:
        """The memory of some worlds into as many rows of ours."""
        for image in self._images:
            rows[image.key][:] = image.read(arrays[image.name])
        for part in self._numbers:
            rows[part.key][:, part.start : part.end] = arrays[part.name].reshape(len(arrays[part.name]), -1)
