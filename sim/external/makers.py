"""Environments of packages that do not register theirs with Gymnasium, or make them slowly: ``env.id=metaworld``.

They are entry points of the group `burnish.worlds`, so that a checkpoint may name them. A package of yours offers its
own in the same way. Nothing but NumPy and the package is imported here: these run in worker processes.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import numpy as np


@cache
def _tasks(task: str, seed: int) -> Any:
    """The fifty goals of a task. To draw them takes seconds, and they are the same for every world of a process."""
    import metaworld

    return metaworld.MT1(task, seed=seed)


def metaworld(task: str = "push-v3", seed: int = 0, **kwargs: Any) -> Any:
    """Meta-World's ``MT1`` of a task, its goal among the observations; ``seed`` draws the fifty goals, of which that of
    an episode chooses one."""
    import metaworld as package

    benchmark = _tasks(task, seed)
    # What `gymnasium.make("Meta-World/MT1")` calls, less the drawing of the goals.
    return package._init_each_env(
        env_cls=benchmark.train_classes[task], tasks=list(benchmark.train_tasks), seed=seed, num_tasks=1, **kwargs
    )


def robosuite(task: str = "Lift", robots: str = "Panda", **kwargs: Any) -> Any:
    """robosuite's world behind its own Gymnasium wrapper; success is in the info, and it never ends by itself."""
    import gymnasium
    import robosuite as package
    from robosuite.wrappers import GymWrapper

    logging.getLogger("robosuite_logs").setLevel(logging.WARNING)
    settings = {"has_renderer": False, "has_offscreen_renderer": False, "use_camera_obs": False, "ignore_done": True}
    inner = package.make(task, robots=robots, **{**settings, **kwargs})

    class Told(gymnasium.Wrapper):
        def step(self, action: np.ndarray) -> Any:
            obs, reward, terminated, truncated, info = self.env.step(action)
            return obs, reward, terminated, truncated, {**info, "success": bool(inner._check_success())}

    wrapped: Any = GymWrapper(inner)
    wrapped.metadata = {"render_fps": inner.control_freq}
    return Told(wrapped)
