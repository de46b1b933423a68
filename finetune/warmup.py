"""The warm-up of a method: decisions that are played before anything is learnt. A run that ends in it is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..policies.core.errors import BurnishError
from .method import LoopKind
from .methods.mbpo import MBPOConfig
from .table import method_of


class Warmup(NamedTuple):
    """The real decisions of a warm-up, of all worlds together, and the setting that says how many."""

    decisions: int
    setting: str


def warmup_of(config: Any) -> Warmup:
    """The warm-up in the settings of a method: 0 for methods that have none."""
    within = isinstance(config, MBPOConfig)  # whose inner method plays the world; that of `imagine` plays a model
    playing = config.inner if within else config
    decisions = playing.loop.warmup if method_of(playing).loop is LoopKind.off_policy else 0
    return Warmup(decisions, f"method.{'inner.' * within}loop.warmup")


def require_longer(config: Any, total: int) -> None:
    """Refuse a run of ``total`` decisions in which nothing would be learnt."""
    decisions, setting = warmup_of(config)
    if total <= decisions:
        raise BurnishError(
            f"total={total} decisions end within the warm-up of {decisions}, so nothing would be learnt; raise total "
            f"or lower {setting}"
        )
