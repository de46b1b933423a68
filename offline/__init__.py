"""Learns from fixed data; also the substrate of off-policy fine-tuning."""

if not __name__.startswith("burnish."):
    raise ImportError(
        "this folder is the package burnish.offline: write `import burnish.offline` "
        "(run `make dev` first, and start Python outside the folder)"
    )

from ..policies.core import threads as _threads  # noqa: F401  # before anything loads torch
