"""Avoid: a stylus goes through three rows of posts to a line behind them, by any of 24 routes, and must touch none.

Six posts stand in rows of one, two and three, so there are two, three and four gaps to go through (the arrangement of
the obstacle task of D3IL, Jia et al. 2024, arXiv 2402.14606, has as many solutions). A touch ends the episode. It is
computed from the path of the tip in the plane and not from contacts: what would follow on it is never simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...policies.core.errors import BurnishError
from .. import arm
from ..arrays import constant, everywhere, library, pick, put, whole
from ..desk import DeskConfig, DeskTask, TaskArm
from ..rewards import tolerance
from ..task import Draw, Verdict

if TYPE_CHECKING:
    from ..physics import Array, Physics, Rows

# Metres on the desk.
ROWS = ((0.185, (0.0,)), (0.235, (-0.025, 0.025)), (0.285, (-0.05, 0.0, 0.05)))  # x, and y of the posts
POSTS = np.array([(x, y) for x, places in ROWS for y in places])
FIELD = np.array((0.235, 0.0))  # its middle
START_X, FINISH_X = 0.145, 0.320
HALF_WIDTH = 0.115  # as far as the tip can go to either side
TIP = 0.005  # radius
HEIGHT = 0.025  # of the tip, all the time
PITCH = 1.25  # rad; leaning, the hand reaches from start to finish
ROUTES = 24
FACTS = ("tip x", "tip y", "nearest post x", "nearest post y", "gap")


@dataclass
class AvoidConfig(DeskConfig):
    """Settings of env=avoid: the posts, the start, and the length of an episode."""

    post_m: float = 0.006  # radius of the posts, in m
    start_m: float = 0.02  # largest distance of the tip from the middle at the start, to either side, in m
    max_steps: int = 80  # control ticks until an episode is truncated

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.post_m <= 0.015:
            raise BurnishError("avoid needs post_m in (0, 0.015]: posts that are thicker leave no gap for the tip")
        if not 0 <= self.start_m <= 0.1:
            raise BurnishError("avoid needs start_m in [0, 0.1], which is the width of the desk that the tip reaches")


class Avoid(DeskTask):
    """The task avoid: the tip moves in x and y at a fixed height; a touched post ends the episode."""

    def __init__(self, config: AvoidConfig) -> None:
        low, high = (START_X - 0.01, -HALF_WIDTH, HEIGHT, 0, 0), (FINISH_X + 0.01, HALF_WIDTH, HEIGHT, 2, 0)
        super().__init__(config, TaskArm(config, ("x", "y"), step_m=0.008, low=low, high=high), FACTS)
        self.config: AvoidConfig = config

    def mjcf(self) -> str:
        posts = "".join(
            f'<geom type="cylinder" pos="{x} {y} 0.015" size="{self.config.post_m} 0.015" rgba="0.8 0.25 0.2 1" '
            f"{arm.TOUCHING['nothing']}/>"
            for x, y in POSTS
        )
        line = (
            f'<geom type="box" pos="{FINISH_X} 0 0" size="0.002 {HALF_WIDTH} 0.0005" rgba="0.2 0.8 0.3 1" '
            f"{arm.TOUCHING['nothing']}/>"
        )
        stylus = f'<geom class="link" type="capsule" fromto="0.02 0 0 {arm.TOOL} 0 0" size="{TIP}"/>'
        return self.scene(posts + line, held=stylus, fingers=False, finger_m=0.05)

    def bind(self, physics: Physics) -> None:
        super().bind(physics)
        self.memory["tip"] = physics.zeros(2)
        self.memory["gaps"] = physics.zeros(len(ROWS))  # gone through, counted from -y; -1: not yet

    def begin(self, rows: Rows, draw: Draw) -> None:
        side = draw.uniform("start", (-self.config.start_m,), (self.config.start_m,))
        parts = [everywhere(side, (START_X,)), side, everywhere(side, (HEIGHT, PITCH, 0.0))]
        self.hand.begin(rows, library(side).concatenate(parts, axis=1), gripper=0.0)
        put(self.memory["gaps"], -1.0, rows)

    def settle(self, rows: Rows) -> None:
        super().settle(rows)
        put(self.memory["tip"], self.tip(), rows)

    def tip(self) -> Array:
        """(N, 2) on the desk."""
        return self.hand.arm.tcp()[:, :2]

    def clearance(self, start: Array, end: Array) -> Array:
        """(N,) of the tip from the nearest post, on its way straight from ``start`` (N, 2) to ``end``; a touch is 0."""
        xp, way = library(start), (end - start)[:, None]
        from_start = constant(start, POSTS) - start[:, None]
        length2 = (way[..., 0] ** 2 + way[..., 1] ** 2).clip(min=1e-12)
        share = ((from_start[..., 0] * way[..., 0] + from_start[..., 1] * way[..., 1]) / length2).clip(0, 1)
        near = from_start - share[..., None] * way
        return xp.amin(xp.hypot(near[..., 0], near[..., 1]), axis=1) - self.config.post_m - TIP

    def route(self) -> np.ndarray:
        """(N,) int: the gaps gone through as one number below 24, or -1 as long as rows are ahead."""
        gaps = self.memory["gaps"]
        first, second, third = gaps.T
        return whole(library(gaps).where((gaps >= 0).all(axis=1), (first * 3 + second) * 4 + third, -1.0))

    def facts(self) -> Array:
        tip = self.tip()
        xp, away = library(tip), constant(tip, POSTS) - tip[:, None]
        nearest = xp.argmin(xp.hypot(away[..., 0], away[..., 1]), axis=1)
        post = pick([away[:, i] for i in range(len(POSTS))], nearest).clip(-0.1, 0.1)
        gap = self.clearance(tip, tip).clip(max=0.05)[:, None]
        return xp.concatenate([20 * (tip - constant(tip, FIELD)), 30 * post, 50 * gap], axis=1)

    def judge(self, action: Array) -> Verdict:
        before, tip = 1.0 * self.memory["tip"], self.tip()
        touched = self.clearance(before, tip) <= 0
        self._count_gaps(before, tip)
        self.memory["tip"][:] = tip
        shaped = 0.9 * tolerance(FINISH_X - tip[:, 0], low=-1.0, margin=FINISH_X - START_X)
        verdict = self.verdict(tip[:, 0] >= FINISH_X, shaped, failed=touched)
        return verdict._replace(info={**verdict.info, "route": self.route()})

    def _count_gaps(self, before: Array, tip: Array) -> None:
        xp = library(tip)
        for row, (x, posts) in enumerate(ROWS):
            gap = self.memory["gaps"][:, row]
            share = (x - before[:, 0]) / xp.where(tip[:, 0] == before[:, 0], 1.0, tip[:, 0] - before[:, 0])
            y = before[:, 1] + share * (tip[:, 1] - before[:, 1])
            through = 1.0 * (y[:, None] > constant(y, posts)).sum(axis=1)
            gap[:] = xp.where((before[:, 0] < x) & (tip[:, 0] >= x), through, gap)
            gap[:] = xp.where(tip[:, 0] < x, -1.0, gap)
