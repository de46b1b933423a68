r"""An energy tank for impedance set-points: a policy may move the spring's end, but only with energy that is there.

An impedance controller holds the tool with a spring K and a damper D at a set-point x_d. A set-point that jumps by d
changes the energy of the spring by exactly

    dV(g) = g K d . (x_d - x) + g^2 d . K d / 2             for the part g d of the jump,

so a policy that jumps at the right moments pumps energy into the robot without end. `step` lets through the largest g
in [0, 1] whose dV is in the tank, books what the spring takes, returns a share of what it gives back, and fills the
tank with a share of what the damper has turned into heat. A change of stiffness by dK costs x~ . dK x~ / 2 with x~ =
x_d - x, and is let through in part likewise. Everything is an exact difference of energies, so no step size makes an
error: kinetic energy + spring + tank never grow, whatever the policy.

The tank is also filled by a grant of a person (``granted``), which is for the caller to log.

`clip_setpoint` comes before it: into a box, turned by no more than an angle, and no farther from the tool than a spring
error that bounds its force.

References. Passivity filter with an energy tank: Zhang et al., passive safe RL, arXiv 2503.00287; the tanks go back to
Franken et al., IEEE T-RO 27 (2011). **Departures.** Discrete differences instead of the rate of a tank state. Stiffness
and damping are diagonal, of translation; of rotation only the angle is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..errors import Refused

Array = NDArray[np.float64]


@dataclass(frozen=True)
class EnergyTankLimits:
    """Limits of the energy in a tank, in J."""

    most_j: float = 2.0  # no more is ever stored
    floor_j: float = 0.1  # below that nothing is let out
    returned: float = 0.9  # of what the spring gives back and of what is dissipated; the rest is a margin

    def __post_init__(self) -> None:
        if not 0 <= self.floor_j < self.most_j < np.inf:
            raise Refused(f"a tank needs 0 <= floor_j < most_j, got {self.floor_j:g} and {self.most_j:g} J")
        if not 0 <= self.returned <= 1:
            raise Refused(f"returned={self.returned:g} is a share between 0 and 1")


@dataclass(frozen=True)
class EnergyTank:
    """The state between two set-points."""

    energy_j: float
    setpoint_m: Array  # (3,) where the spring's end is
    stiffness_n_m: Array  # (3,)

    def __post_init__(self) -> None:
        numbers = (np.array([self.energy_j]), self.setpoint_m, self.stiffness_n_m)
        if not (all(np.isfinite(x).all() for x in numbers) and self.energy_j >= 0 and (self.stiffness_n_m >= 0).all()):
            raise Refused("a tank needs a finite set-point, and energy and stiffness that are not negative")


@dataclass(frozen=True)
class Filtered:
    """The set-point after the tank: the shares of its jump and of the change of stiffness that were let through."""

    tank: EnergyTank  # holds the set-point and the stiffness to be sent
    share: float  # of the jump that was let through
    stiffness_share: float
    bad: bool  # not finite: nothing moved


def share_within(linear: float, quadratic: float, budget: float) -> float:
    """The largest g in [0, 1] for which g linear + g^2 quadratic is at most the budget; quadratic and budget >= 0."""
    if linear + quadratic <= budget:
        return 1.0
    # The root, in the form that loses no digits where ``linear`` is positive and large.
    root = np.sqrt(linear**2 + 4 * quadratic * budget)
    g = 2 * budget / (linear + root) if linear > 0 else (root - linear) / (2 * quadratic)
    return float(min(max(g, 0.0), 1.0))


def step(
    tank: EnergyTank,
    limits: EnergyTankLimits,
    x_m: Array,
    wanted_m: Array,
    *,
    stiffness_n_m: Array | None = None,
    dissipated_j: float = 0.0,
    granted_j: float = 0.0,
) -> Filtered:
    """The next set-point on the way to ``wanted_m``, with the tool at ``x_m``. ``dissipated_j`` is what the damper took
    since the last step, h qd . D qd summed over its ticks; a number that is not finite or negative is none."""
    income = limits.returned * _amount(dissipated_j) + _amount(granted_j)
    energy = min(tank.energy_j + income, max(limits.most_j, tank.energy_j))
    stiffness = tank.stiffness_n_m if stiffness_n_m is None else stiffness_n_m
    bad = not (np.isfinite(x_m).all() and np.isfinite(wanted_m).all() and np.isfinite(stiffness).all())
    if bad or not (stiffness >= 0).all():
        return Filtered(replace(tank, energy_j=energy), 0.0, 0.0, True)

    # A number so large that its square overflows costs more than any tank holds.
    with np.errstate(over="ignore", invalid="ignore"):
        apart = tank.setpoint_m - x_m
        cost = 0.5 * float((stiffness - tank.stiffness_n_m) @ apart**2)
        stiffer = share_within(cost, 0.0, max(energy - limits.floor_j, 0.0)) if np.isfinite(cost) else 0.0
        energy = _booked(energy, stiffer * cost if stiffer else 0.0, limits)
        k = tank.stiffness_n_m + stiffer * (stiffness - tank.stiffness_n_m) if stiffer else tank.stiffness_n_m

        jump = wanted_m - tank.setpoint_m
        linear, quadratic = float(k * jump @ apart), 0.5 * float(k * jump @ jump)
        possible = np.isfinite(linear) and np.isfinite(linear**2) and np.isfinite(quadratic)
    g = share_within(linear, quadratic, max(energy - limits.floor_j, 0.0)) if possible else 0.0
    reached = wanted_m if g == 1 else tank.setpoint_m + g * jump if g else tank.setpoint_m
    # The booked energy is that of the set-point as it was rounded.
    after, before = reached - x_m, apart
    energy = _booked(energy, 0.5 * float(k @ (after**2 - before**2)) if g else 0.0, limits)
    return Filtered(EnergyTank(energy, reached, k), g, stiffer, False)


def _amount(energy_j: float) -> float:
    return energy_j if 0 < energy_j < np.inf else 0.0


def _booked(energy_j: float, taken_j: float, limits: EnergyTankLimits) -> float:
    if taken_j > 0:
        return max(energy_j - taken_j, 0.0)
    return max(energy_j, min(energy_j - limits.returned * taken_j, limits.most_j))


@dataclass(frozen=True)
class SetpointLimits:
    """Limits of a set-point: a box in m, its distance from the tool in m, and its turn in rad."""

    lower_m: Array  # (3,) of the box
    upper_m: Array
    error_m: float  # between set-point and tool, so the spring's force is at most the stiffness times this
    angle_rad: float  # between the tool and its requested orientation

    def __post_init__(self) -> None:
        if not ((self.lower_m < self.upper_m).all() and self.error_m > 0 and 0 < self.angle_rad <= np.pi):
            raise Refused("set-points need lower_m < upper_m, a positive error_m, and angle_rad in (0, pi]")


def clip_setpoint(pose: Array, tool: Array, limits: SetpointLimits) -> tuple[Array, bool]:
    """A requested pose (7,), metres and quaternion wxyz, as near as the limits allow, and whether it was changed; the
    tool is where it is measured. A matrix that is no pose becomes the tool's own, in the box."""
    with np.errstate(over="ignore", invalid="ignore"):
        size = float(np.linalg.norm(pose[3:])) if pose.shape == (7,) else np.nan
    good = np.isfinite(pose).all() and np.isfinite(size) and size > 1e-6
    wanted = pose if good else tool
    here = tool[:3]
    place = np.minimum(np.maximum(wanted[:3], limits.lower_m), limits.upper_m)
    away = place - here
    far = float(np.linalg.norm(away))
    if far > limits.error_m:
        # Along the line to it. From a tool outside the box that line may leave the box, which then has the last word.
        place = np.minimum(np.maximum(here + away * (limits.error_m / far), limits.lower_m), limits.upper_m)
    turn = wanted[3:] / np.linalg.norm(wanted[3:])
    now = tool[3:] / np.linalg.norm(tool[3:])
    result = np.concatenate([place, _turned(now, turn, limits.angle_rad)])
    changed = not good or not np.array_equal(place, pose[:3]) or not np.allclose(result[3:], turn, atol=1e-12)
    return result, changed


def _turned(now: Array, wanted: Array, most_rad: float) -> Array:
    """From one orientation towards another on the shortest way, by at most this angle (spherical interpolation)."""
    cosine = float(now @ wanted)
    # q and -q are one orientation; the nearer of the two is the short way.
    near, cosine = (wanted, cosine) if cosine >= 0 else (-wanted, -cosine)
    half = float(np.arctan2(np.linalg.norm(near - cosine * now), cosine))
    if 2 * half <= most_rad:
        return wanted
    share = most_rad / 2 / half
    mixed = (np.sin((1 - share) * half) * now + np.sin(share * half) * near) / np.sin(half)
    return mixed / np.linalg.norm(mixed)
