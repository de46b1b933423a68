"""Simulated worlds as `VecEnv`; the only folder that imports mujoco or mani_skill."""

if not __name__.startswith("burnish."):
    raise ImportError(
        "this folder is the package burnish.sim: write `import burnish.sim` "
        "(run `make dev` first, and start Python outside the folder)"
    )

from ..policies.core import threads as _threads  # noqa: F401  # before anything loads torch
