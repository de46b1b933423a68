"""The warm-up of a method: decisions that are played before anything is learnt, and updates before the next one. A run
that ends in it is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..policies.core.errors import BurnishError
from .method import LoopKind
from .methods.imagine import ImagineConfig
from .methods.mbpo import MBPOConfig
from .table import method_of


class Warmup(NamedTuple):
    """The real decisions of a warm-up, of all worlds together, the setting that says how many, and the updates that
    follow at once."""

    decisions: int
    setting: str
    updates: int = 0


def warmup_of(config: Any) -> Warmup:
    """The warm-up in the settings of a method: 0 for methods that have none."""
    within = isinstance(config, MBPOConfig)  # whose inner method plays the world; that of `imagine` plays a model
    playing = config.inner if within else config
    off = method_of(playing).loop is LoopKind.off_policy
    decisions, updates = (playing.loop.warmup, playing.loop.initial_updates) if off else (0, 0)
    return Warmup(decisions, f"method.{'inner.' * within}loop.warmup", 0 if within else updates)


def require_longer(config: Any, total: int) -> None:
    """Refuse a run of ``total`` decisions in which nothing would be learnt."""
    if isinstance(config, ImagineConfig):
        within = warmup_of(config.inner).decisions
        if config.imagined <= within:
            raise BurnishError(
                f"method.imagined={config.imagined} decisions of a round end within the warm-up of {within}, so a "
                "policy that learnt nothing would be tried; raise method.imagined or lower method.inner.loop.warmup"
            )
    decisions, setting, _ = warmup_of(config)
    if total <= decisions:
        raise BurnishError(
            f"total={total} decisions end within the warm-up of {decisions}, so nothing would be learnt; raise total "
            f"or lower {setting}"
        )
