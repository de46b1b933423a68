"""An environment of the old Gym as Gymnasium has it, for `world_server.py`, which runs this file where it is needed.

Before 0.26 an environment was seeded by a method of its own, and asked how to draw in every call. As that file: NumPy
alone, for Python 3.8 and newer.
"""

from __future__ import annotations

import inspect
from typing import Any


def modern(world: Any, limit: int | None) -> Any:
    """``world`` itself, or behind today's interface where its ``reset`` takes no seed. ``limit`` (steps) takes the
    place of the one that it was registered with."""
    given = inspect.signature(getattr(world, "unwrapped", world).reset).parameters.values()
    knows = any(x.name == "seed" or x.kind is x.VAR_KEYWORD for x in given)
    return world if knows else OldGym(world, limit)


class OldGym:
    """``world``, seeded and drawn as worlds are today."""

    def __init__(self, world: Any, limit: int | None) -> None:
        self.world = world
        if limit and hasattr(world, "_max_episode_steps"):  # of the wrapper that cuts episodes off
            world._max_episode_steps = limit
        elif limit:
            raise ValueError("an environment of the old Gym that is not registered says itself how long it lasts")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def reset(self, seed: int) -> Any:
        self.world.seed(seed % (1 << 32))  # the old generators take no more
        return self.world.reset()

    def render(self) -> Any:
        asked = inspect.signature(getattr(self.world, "unwrapped", self.world).render).parameters
        return self.world.render(**({"mode": "rgb_array"} if "mode" in asked else {}))
