"""The expert of push: again and again the push that helps most, from one of sixteen places around the T.

How the T answers a push is a model of quasi-static friction: its limit surface is taken for an ellipsoid (Goyal, Ruina,
Papadopoulos 1991) and the ball for one that sticks to where it touches, so a push along a face's normal turns the T at
a constant rate about a point that is fixed in it (Lynch, Maekawa, Tanie 1992). Where each push leads is therefore one
table, made once, and the expert looks two pushes ahead in it. Between pushes the ball is lifted over the T.

A phase is a place and one of four stages: back off and choose the place, go above it, down beside it, push.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import arm
from ..physics import Array
from ..tasks.push import BALL, BAR, BAR_Y, FEET, LIFT, LOW, PITCH, STEM, STEM_Y, TARGET, TOP, Push
from .scripted import Level, Move

BACK, ABOVE, DOWN, PUSH = range(4)

_TOP, _UNDER, _END, _SIDE = BAR_Y + BAR[1] / 2, BAR_Y - BAR[1] / 2, STEM_Y - STEM[1] / 2, STEM[0] / 2
# Places on the outline of the T, and the direction from there into it.
PLACES = np.array(
    [(x, _TOP, 0, -1) for x in (-0.032, -0.016, 0.0, 0.016, 0.032)]
    + [(-BAR[0] / 2, BAR_Y, 1, 0), (BAR[0] / 2, BAR_Y, -1, 0), (-0.030, _UNDER, 0, 1), (0.030, _UNDER, 0, 1)]
    + [(-_SIDE, y, 1, 0) for y in (-0.012, -0.028, -0.045)]
    + [(_SIDE, y, -1, 0) for y in (-0.012, -0.028, -0.045)]
    + [(0.0, _END, 0, 1)]
)
ON, INTO = PLACES[:, :2], PLACES[:, 2:]
LENGTHS = np.array([0.004, 0.008, 0.012, 0.017, 0.023, 0.030, 0.038, 0.046])  # m, of pushes

_SHARE = np.array([-0.5 * FEET[2][1], -0.5 * FEET[2][1], FEET[0][1]]) / (FEET[0][1] - FEET[2][1])  # of the weight
ARM2 = float(np.sum(_SHARE * np.hypot(*np.array(FEET).T))) ** 2  # m^2, (largest torque / largest force)^2
PUSH_COST = 0.5  # tolerances that another push is worth
GAIN = 0.03  # and less is no gain
ROOM, NEAR_ROOM = 0.05, 0.038  # m from the target, and towards the base: a T that is further is soon out of reach
WAY_COST = 5.0  # and a metre of way to its place


def _led() -> Array:
    """(places, lengths, 3): the motion of the T by each push, in the frame it had before."""
    across = np.stack([-ON[:, 1], ON[:, 0]], axis=1)
    rate = np.sum(across * INTO, axis=1) / (ARM2 + np.sum(ON**2, axis=1))  # rad/m
    x, y = (INTO - across * rate[:, None]).T[..., None]
    angle = rate[:, None] * LENGTHS
    safe = np.where(np.abs(angle) < 1e-9, 1e-9, angle)
    along, aside = np.sin(safe) / safe * LENGTHS, (1 - np.cos(safe)) / safe * LENGTHS
    return np.stack([along * x - aside * y, aside * x + along * y, angle], axis=-1)


LED = _led()


def turned(vector: Array, angle: Array) -> Array:
    """(..., 2) by an angle (...)."""
    cos, sin, x, y = np.cos(angle), np.sin(angle), vector[..., 0], vector[..., 1]
    return np.stack([cos * x - sin * y, sin * x + cos * y], axis=-1)


def pushed(error: Array, led: Array) -> Array:
    """The errors (..., 3) of the T after motions ``led``, which broadcast against them."""
    shift = error[..., :2] + turned(led[..., :2], error[..., 2] + TARGET[2])
    return np.concatenate([shift, error[..., 2:] + led[..., 2:]], axis=-1)


def within_reach(spots: Array, height: float, links: arm.Links) -> Array:
    """(...) of ``spots`` (..., 2): whether the hand can hold the ball there at its usual pitch."""
    flat = spots.reshape(-1, 2)
    pose = np.concatenate([flat, np.tile((height, PITCH, 0.0), (len(flat), 1))], axis=1)
    return (np.abs(arm.forward(arm.inverse(pose, links), links) - pose).max(axis=1) < 1e-6).reshape(spots.shape[:-1])


@dataclass(frozen=True)
class PushScript:
    """The script of push: the push among sixteen that brings the T nearest to its target."""

    beside_m: float = 0.0  # along the face, where the ball touches beside the intended place
    choices: int = 1
    orders: bool = False  # first turn and then shift, or the other way round

    def weights(self, task: Push, error: Array, choice: Array) -> Array:
        """(N, 2) what place and angle count now."""
        weight = np.ones((len(error), 2))
        if self.orders:
            far = np.hypot(error[:, 0], error[:, 1]) > 1.5 * task.config.position_m
            skew = np.abs(error[:, 2]) > task.config.angle_rad
            weight[(choice < 0.5) & skew, 0] = 0.2
            weight[(choice >= 0.5) & far, 1] = 0.1
        return weight

    def cost(self, task: Push, error: Array, weight: Array) -> Array:
        """The size of ``error`` (N, ..., 3), in tolerances."""
        weight = weight.reshape(len(weight), *[1] * (error.ndim - 2), 2)
        away = np.hypot(error[..., 0], error[..., 1])
        lost = np.maximum(np.maximum(away - ROOM, -error[..., 0] - NEAR_ROOM), 0) / 0.001
        # Half a tolerance is near enough, or the next push would be chosen for its last millimetres.
        shift = np.maximum(away / task.config.position_m - 0.5, 0)
        turn = np.maximum(np.abs(error[..., 2]) / task.config.angle_rad - 0.5, 0)
        return weight[..., 0] * shift + weight[..., 1] * turn + lost

    def q_values(self, task: Push, error: Array, weight: Array) -> Array:
        """The cost of ``error`` (N, ..., 3), or that after the best next push."""
        after = self.cost(task, pushed(error[..., None, None, :], LED), weight)
        return np.minimum(self.cost(task, error, weight), PUSH_COST + after.min(axis=(-2, -1)))

    def __call__(self, task: Push, phase: Array, ticks: Array, choice: Array) -> Move:
        t, ball, tcp, error = task.t(), task.ball(), task.hand.arm.tcp(), task.error()
        place, stage = phase // 4, phase % 4
        weight = self.weights(task, error, choice[:, 0])
        further = np.zeros(len(t), np.int64)

        high = tcp[:, 2] > TOP + BALL + 0.005
        choosing = np.flatnonzero((stage == BACK) & (high | (ticks >= 1)))
        if len(choosing):
            spots = t[choosing, None, :2] + turned(ON - (BALL + 0.01) * INTO, t[choosing, 2, None])
            way = np.hypot(*np.moveaxis(spots - tcp[choosing, None, :2], -1, 0))
            links = task.hand.links
            far = ~(within_reach(spots, LOW, links) & within_reach(spots, LIFT, links))
            q_values = self.q_values(task, pushed(error[choosing, None, None], LED), weight[choosing]).min(axis=2)
            vain = q_values > self.q_values(task, error[choosing], weight[choosing])[:, None] - GAIN
            best = np.argmin(q_values + WAY_COST * way + 10.0 * vain + 100.0 * far, axis=1)
            further[choosing] = 4 * (best - place[choosing]) + 1

        on = ON[place] + self.beside_m * np.stack([-INTO[place, 1], INTO[place, 0]], axis=1)
        gap = np.sum((on - ball[:, :2]) * INTO[place], axis=1) - BALL  # between ball and face
        speed = np.full(len(t), 0.006)
        pushing = np.flatnonzero(stage == PUSH)
        ended = np.zeros(len(t), bool)
        if len(pushing):
            options = self.q_values(task, pushed(error[pushing, None], LED[place[pushing]]), weight[pushing])
            now = self.q_values(task, error[pushing], weight[pushing])
            ended[pushing] = (options.min(axis=1) > now - GAIN) | (ticks[pushing] > 25)
            speed[pushing] = np.clip(0.5 * LENGTHS[options.argmin(axis=1)], 0.003, 0.008)
        gap = np.where(stage == PUSH, np.clip(gap, 0.0, 0.006) - speed, 0.010)
        spot = t[:, :2] + turned(on - (BALL + gap[:, None]) * INTO[place], t[:, 2])
        spot = np.where((stage == BACK)[:, None], tcp[:, :2] - 0.012 * turned(INTO[place], t[:, 2]), spot)

        spot = np.where(((stage == ABOVE) & ~high)[:, None], tcp[:, :2], spot)
        there = (stage == ABOVE) & high & (np.hypot(*(spot - tcp[:, :2]).T) < 0.004)
        down = (stage == DOWN) & (tcp[:, 2] < LOW + 0.004)
        further = further + there + down - 3 * ended
        height = np.where((stage == ABOVE) | ((stage == BACK) & high), LIFT, LOW)
        pose = np.concatenate([spot, height[:, None], np.tile((PITCH, 0.0), (len(t), 1))], axis=1)
        return Move(pose, next=further)


LEVELS = {
    "clean": Level(PushScript()),
    "noisy": Level(PushScript(), noise=0.25),
    "multi_modal": Level(PushScript(orders=True)),
    "clumsy": Level(PushScript(beside_m=0.008), noise=0.15),
}
