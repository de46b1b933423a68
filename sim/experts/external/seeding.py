"""Equal episodes for equal seeds, also where an environment ignores the seed of its reset.

Gymnasium asks that ``reset(seed=s)`` decides the episode. What each package does instead:

* Meta-World (``Meta-World/MT1``) draws one of 50 tasks with the generator of the bare environment, which its reset
  does not seed. The 50 tasks are drawn when it is made, by ``seed=``: give that too, or every process has its own.
* robosuite draws from ``env.rng``, which nothing reseeds; its Gymnasium wrapper seeds ``numpy.random``, which robosuite
  does not use. The samplers of positions hold the same generator, so its state is set in place.
* OGBench's multi-task worlds draw their task from ``numpy.random``; the option ``task_id`` names it. What its
  single-task worlds draw, their reset seeds.
* gym-pusht, Gymnasium-Robotics and dm_control by shimmy honour the seed; dm_control takes 32 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import package_of

MAKE = {"metaworld": {"seed": 0}, "robosuite": {"seed": 0}}  # keywords without which processes make different worlds


def reset(env: Any, seed: int, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    """``env.reset`` into the episode of ``seed``, whatever was played before and in whichever process."""
    inner, package, seed = env.unwrapped, package_of(env), int(seed)
    options = dict(options or {})
    if package == "metaworld":
        inner.seed(seed)
    elif package == "robosuite":
        inner.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
    elif package == "ogbench" and getattr(inner, "_reward_task_id", 0) is None and not options:
        options["task_id"] = 1 + int(np.random.default_rng(seed).integers(inner.num_tasks))
    return env.reset(seed=seed % 2**32, options=options or None)
