"""Observations of Gymnasium as observations of ours, whatever the order in which their keys were written down:

    uint8 of 2 or 3 dimensions     an image: ``image.<key>``, channels first; ``image.main`` if it stands alone
    ``desired_goal`` and below     ``goal``, or ``goal_image.main``
    every other Box                flattened, and concatenated in the order of the keys into ``state``

Dicts may be nested: their keys are joined by dots. Numbers become float32 here, and are rounded nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from ..policies.core.errors import BurnishError
from ..policies.core.spec import ObsSpec


class Leaf(NamedTuple):
    """One Box of an observation space."""

    path: tuple[str, ...]  # the keys that lead to it
    box: spaces.Box


@dataclass(frozen=True)
class Image:
    path: tuple[str, ...]
    key: str
    shape: tuple[int, ...]  # there: (H, W), (H, W, C) or (C, H, W)

    def read(self, value: np.ndarray) -> np.ndarray:
        """(C, H, W). The channels are the shorter one of both ends."""
        if len(self.shape) == 2:
            return value[None]
        return np.moveaxis(value, 0 if self.shape[0] < self.shape[2] else 2, 0)


@dataclass(frozen=True)
class Numbers:
    """A stretch of a vector of ours."""

    path: tuple[str, ...]
    key: str
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape)


class Layout:
    """The place of each part of an environment's observation. ``name``, of the environment, is for error sentences."""

    def __init__(self, space: spaces.Space, name: str) -> None:
        self._name = name
        self._images: list[Image] = []
        self._numbers: list[Numbers] = []
        ends = {"state": 0, "goal": 0}
        for path, box in sorted(_leaves(space, (), name), key=lambda leaf: leaf.path):
            is_goal = path[:1] == ("desired_goal",)
            if box.dtype == np.uint8 and len(box.shape) in (2, 3):
                key = f"goal_image.{'.'.join(path[1:]) or 'main'}" if is_goal else f"image.{'.'.join(path) or 'main'}"
                self._images.append(Image(path, key, box.shape))
            elif len(box.shape) <= 2:
                key = "goal" if is_goal else "state"
                self._numbers.append(Numbers(path, key, box.shape, ends[key]))
                ends[key] = self._numbers[-1].end
            else:
                raise BurnishError(
                    f"env.id={name} observes {'.'.join(path) or 'an array'} of shape {box.shape} and type {box.dtype}, "
                    "but images must be uint8 with at most 3 dimensions; choose or register a version that gives such"
                )
        shapes = {key: (end,) for key, end in ends.items() if end > 0}
        pictures = {image.key: image.read(np.empty(image.shape)).shape for image in self._images}
        self.spec = ObsSpec({**shapes, **pictures})

    def room(self, num_envs: int) -> dict[str, np.ndarray]:
        """Observations of ours for so many worlds, still empty."""
        images = {image.key for image in self._images}
        return {
            key: np.zeros((num_envs, *shape), np.uint8 if key in images else np.float32)
            for key, shape in self.spec.shapes.items()
        }

    def write(self, obs: Any, rows: dict[str, np.ndarray], i: int) -> None:
        """``obs`` into row ``i``."""
        for image in self._images:
            rows[image.key][i] = image.read(self._look_up(obs, image.path, image.shape))
        for part in self._numbers:
            rows[part.key][i, part.start : part.end] = self._look_up(obs, part.path, part.shape).ravel()

    def _look_up(self, obs: Any, path: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
        for key in path:
            obs = obs[key]
        value = np.asarray(obs)
        if value.shape != shape:  # would be broadcast in silence, or not at all
            raise BurnishError(
                f"{self._name} declares {'.'.join(path) or 'observations'} of shape {shape}, but gave {value.shape}"
            )
        return value


def _leaves(space: spaces.Space, path: tuple[str, ...], name: str) -> Iterator[Leaf]:
    if isinstance(space, spaces.Dict):
        for key, inner in space.items():
            yield from _leaves(inner, (*path, str(key)), name)
    elif isinstance(space, spaces.Box):
        yield Leaf(path, space)
    else:
        raise BurnishError(
            f"env.id={name} observes {'.'.join(path) or 'something'} of kind {type(space).__name__}, but only Box and "
            "Dict are read here; register a version that turns it into numbers"
        )
