"""Maps observations to action chunks; learns by imitation."""

if not __name__.startswith("burnish."):
    raise ImportError(
        "this folder is the package burnish.policies: write `import burnish.policies` "
        "(run `make dev` first, and start Python outside the folder)"
    )

from .core import threads as _threads  # noqa: F401  # before anything loads torch
