"""Environments of packages that do not register theirs with Gymnasium, or make them slowly: ``env.id=metaworld``.

They are entry points of the group `burnish.worlds`, so that a checkpoint may name them. A package of yours offers its
own in the same way. Nothing but NumPy and the package is imported here: these run in worker processes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from . import side_worlds


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


def robosuite(task: str = "Lift", **kwargs: Any) -> Any:
    """A task of robosuite, as `burnish worlds add robosuite` has it in another Python."""
    return side_worlds.robosuite(task, **kwargs)
