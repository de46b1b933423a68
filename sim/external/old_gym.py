"""An environment of the old Gym as Gymnasium has it, for `world_server.py`, which runs this file where it is needed.

Before 0.26 an environment was seeded by a method of its own, and asked how to draw in every call. As that file: NumPy
alone, for Python 3.8 and newer.
"""

from __future__ import annotations

import inspect
from typing import Any


def modern(worlds: list[Any], limit: int | None) -> list[Any]:
    """``worlds``, which are alike, or as they are behind today's interface where their ``reset`` takes no seed.
    ``limit`` (steps) takes the place of the one that they were registered with."""
    given = inspect.signature(getattr(worlds[0], "unwrapped", worlds[0]).reset).parameters.values()
    knows = any(x.name == "seed" or x.kind is x.VAR_KEYWORD for x in given)
    return worlds if knows else [OldGym(world, limit) for world in worlds]


class OldGym:
    """``world``, seeded and drawn as worlds are today."""

    def __init__(self, world: Any, limit: int | None) -> None:
        self.world = world
        if limit and hasattr(world, "_max_episode_steps"):  # of the wrapper that cuts episodes off
            world._max_episode_steps = limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def reset(self, seed: int) -> Any:
        self.world.seed(seed % (1 << 32))  # the old generators take no more
        return self.world.reset()

    def render(self) -> Any:
        asked = inspect.signature(getattr(self.world, "unwrapped", self.world).render).parameters
        return self.world.render(**({"mode": "rgb_array"} if "mode" in asked else {}))
