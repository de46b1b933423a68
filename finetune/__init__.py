"""Learns from interaction, starting from a policy. ``load``, ``refine``, ``evaluate`` and ``save`` are for programs."""

if not __name__.startswith("burnish."):
    raise ImportError(
        "this folder is the package burnish.finetune: write `import burnish.finetune` "
        "(run `make dev` first, and start Python outside the folder)"
    )

from typing import TYPE_CHECKING, Any

from ..policies.core import threads as _threads  # noqa: F401  # before anything loads torch

if TYPE_CHECKING:
    from .api import Refined, evaluate, load, refine, save

__all__ = ["Refined", "evaluate", "load", "refine", "save"]


def __getattr__(name: str) -> Any:
    """Torch, methods and worlds are loaded when one of these is asked for, not by ``import burnish.finetune``."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
