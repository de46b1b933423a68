"""Shaping terms in [0, 1], in the manner of dm_control's `rewards.tolerance` (Tassa et al. 2018, arXiv 1801.00690).

A dense reward is a product or a weighted mean of such terms over named physical quantities, so that each says in metres
or radians what is good enough.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .arrays import library

if TYPE_CHECKING:
    from .physics import Array


def tolerance(x: Array, low: float = 0.0, high: float = 0.0, margin: float = 0.0, at_margin: float = 0.1) -> Array:
    """1 where ``x`` lies in [low, high]; outside it falls off as a Gaussian, to ``at_margin`` at a distance of
    ``margin``, in the unit of ``x``; with a margin of 0 it is 0 outside."""
    if low > high or margin < 0 or not 0 < at_margin < 1:
        raise ValueError(f"low={low} <= high={high}, margin={margin} >= 0 and 0 < at_margin={at_margin} < 1 are needed")
    xp = library(x)
    away = xp.maximum(low - x, x - high).clip(min=0.0)
    if margin == 0:
        return 1.0 * (away == 0)
    return xp.exp(math.log(at_margin) * (away / margin) ** 2)
