"""The energy tank: kinetic energy + spring + tank never grow, whatever the policy; an innocent policy is never cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from burnish.real_robot.errors import Refused
from burnish.real_robot.safety.energy_tank import (
    EnergyTank,
    EnergyTankLimits,
    SetpointLimits,
    clip_setpoint,
    share_within,
    step,
)

Policy = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
LIMITS = EnergyTankLimits(most_j=1.0, floor_j=0.1)


class Spring:
    """A mass on the controller's spring and damper, integrated exactly enough (semi-implicit, 0.1 ms), from rest. Heat
    is what kinetic energy and spring have lost, so that the integrator's error is not mistaken for the tank's."""

    def __init__(self, mass: float, stiffness: np.ndarray, damping: np.ndarray) -> None:
        self.mass, self.k, self.d = mass, stiffness, damping
        self.x, self.v, self.setpoint = np.zeros(3), np.zeros(3), np.zeros(3)

    def energy(self) -> float:
        return float(0.5 * self.mass * self.v @ self.v + 0.5 * self.k @ (self.setpoint - self.x) ** 2)

    def run(self, seconds: float) -> float:
        before, h = self.energy(), 1e-4
        for _ in range(round(seconds / h)):
            self.v = self.v + h / self.mass * (self.k * (self.setpoint - self.x) - self.d * self.v)
            self.x = self.x + h * self.v
        return before - self.energy()


def episode(
    policy: Policy, spring: Spring, ticks: int, filtered: bool = True, k: Any = None
) -> tuple[float, float, int]:
    """Greatest growth of the sum of energies at a set-point, greatest kinetic energy, and jumps that were cut."""
    tank = EnergyTank(0.5, spring.setpoint, spring.k)
    growth, kinetic, cuts, heat = -np.inf, 0.0, 0, 0.0
    for tick in range(ticks):
        before = spring.energy() + tank.energy_j + heat
        wanted = policy(spring.x, spring.v, tick)
        if filtered:
            stiffness = None if k is None else k(tick)
            result = step(tank, LIMITS, spring.x, wanted, stiffness_n_m=stiffness, dissipated_j=heat)
            tank, cuts = result.tank, cuts + (result.share < 1 or result.stiffness_share < 1)
            spring.setpoint, spring.k = tank.setpoint_m, tank.stiffness_n_m
        else:
            spring.setpoint = np.where(np.isfinite(wanted), wanted, spring.setpoint)
        growth = max(growth, spring.energy() + tank.energy_j - before)
        heat = spring.run(0.05)
        kinetic = max(kinetic, 0.5 * spring.mass * float(spring.v @ spring.v))
    return growth, kinetic, cuts


def pump(x: np.ndarray, v: np.ndarray, tick: int) -> np.ndarray:
    """Pulls the way the mass goes, as far as it can."""
    return x + 0.3 * np.sign(v + 1e-9)


def hostile(rng: np.random.Generator) -> Policy:
    kind = rng.integers(5)
    size = rng.choice([0.05, 0.5, 5.0])
    if kind == 0:
        return lambda x, v, tick: size * rng.normal(size=3)
    if kind == 1:
        return pump
    if kind == 2:
        return lambda x, v, tick: np.where(
            rng.random(3) < 0.3, rng.choice([np.nan, np.inf, -np.inf]), size * rng.normal(size=3)
        )
    if kind == 3:
        return lambda x, v, tick: rng.choice([1e308, -1e308, 1e160, 1e-320], 3)
    return lambda x, v, tick: x + size * rng.normal(size=3)


@pytest.mark.parametrize("part", range(4))
def test_energy_never_grows(part: int):
    """200 episodes in all, over policies, masses, stiffness (which jumps too) and damping."""
    rng = np.random.default_rng(part)
    for _ in range(50):
        stiffness, damping = 10 ** rng.uniform(1, 3, 3), 10 ** rng.uniform(-1, 1.5, 3)
        spring = Spring(float(10 ** rng.uniform(-0.5, 1)), stiffness, damping)
        change = [None, lambda tick, s=stiffness: s * (1 + 9 * (tick % 3 == 0)), lambda tick: np.full(3, np.nan)][
            rng.integers(3)
        ]
        growth, _, _ = episode(hostile(rng), spring, 12, k=change)
        assert growth <= 1e-6


def test_a_pump_is_stopped_and_without_the_filter_it_is_not():
    def spring() -> Spring:
        return Spring(3.0, np.full(3, 600.0), np.full(3, 5.0))

    growth, kinetic, cuts = episode(pump, spring(), 60)
    assert growth <= 1e-6 and kinetic < 1 and cuts > 10
    growth, kinetic, _ = episode(pump, spring(), 60, filtered=False)
    assert growth > 1 and kinetic > 10


def test_an_innocent_policy_is_never_cut():
    """A slow sine on a well damped arm: what the damper takes is more than what the spring asks for."""
    for mass, k in ((1.0, 200.0), (3.0, 600.0)):
        spring = Spring(mass, np.full(3, k), np.full(3, 2 * np.sqrt(mass * k)))
        policy = lambda x, v, tick: 0.05 * np.sin(0.05 * tick * np.array([0.5, 1.0, 1.5]))  # noqa: E731
        growth, _, cuts = episode(policy, spring, 200)
        assert growth <= 1e-6 and cuts == 0 and np.abs(spring.x).max() > 0.01


def test_the_share_is_the_largest_that_fits():
    """Against ten thousand shares tried one by one."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        linear, quadratic, budget = (
            rng.normal() * 10 ** rng.uniform(-3, 3),
            10 ** rng.uniform(-3, 3),
            10 ** rng.uniform(-3, 2),
        )
        budget = budget if rng.random() < 0.8 else 0.0
        grid = np.linspace(0, 1, 10001)
        fits = grid * linear + grid**2 * quadratic <= budget
        g = share_within(linear, quadratic, budget)
        assert g * linear + g * g * quadratic <= budget * (1 + 1e-9) + 1e-12
        assert g >= grid[fits].max() - 1e-9 and g <= 1
    assert share_within(3.0, 0.0, 1.0) == pytest.approx(1 / 3)
    assert share_within(1.0, 0.0, 0.0) == 0 and share_within(-1.0, 0.0, 0.0) == share_within(0.0, 0.0, 0.0) == 1


def test_the_books():
    """By hand: K = 100, from 0 to 0.1 m costs 0.5 J; back at 0.1 m it gives 0.5 J, of which 0.9 return."""
    x, k = np.zeros(3), np.full(3, 100.0)
    out = step(EnergyTank(0.9, np.zeros(3), k), LIMITS, x, np.array([0.1, 0, 0]))
    assert out.share == 1 and out.tank.energy_j == pytest.approx(0.4) and out.tank.setpoint_m[0] == 0.1
    again = step(out.tank, LIMITS, x, np.array([0.2, 0, 0]))  # 0.3 J may be spent: (0.1 + 0.1 g)^2 50 = 0.8
    assert again.share == pytest.approx(10 * np.sqrt(0.016) - 1) and again.tank.energy_j == pytest.approx(0.1)
    back = step(out.tank, LIMITS, x, np.zeros(3))
    assert back.tank.energy_j == pytest.approx(0.4 + 0.45)
    full = step(back.tank, LIMITS, x, np.zeros(3), dissipated_j=0.1, granted_j=5.0)
    assert full.tank.energy_j == 1.0
    assert step(back.tank, LIMITS, x, np.zeros(3), dissipated_j=0.1).tank.energy_j == pytest.approx(0.94)
    for amount in (-1.0, np.nan, np.inf):
        assert (
            step(back.tank, LIMITS, x, np.zeros(3), dissipated_j=amount, granted_j=amount).tank.energy_j
            == back.tank.energy_j
        )
    stiff = step(out.tank, LIMITS, x, out.tank.setpoint_m, stiffness_n_m=np.array([120.0, 900, 900]))  # 0.1 J
    assert stiff.stiffness_share == 1 and stiff.tank.energy_j == pytest.approx(0.3)
    for bad in (step(out.tank, LIMITS, x, np.full(3, np.nan)), step(out.tank, LIMITS, x, x, stiffness_n_m=-k)):
        assert bad.bad and bad.share == 0 and (bad.tank.setpoint_m == out.tank.setpoint_m).all()


SETPOINT = SetpointLimits(np.array([-0.5, -0.5, 0.0]), np.array([0.5, 0.5, 0.8]), error_m=0.05, angle_rad=0.3)


def angle_between(a: np.ndarray, b: np.ndarray) -> float:
    return 2 * float(np.arccos(min(abs(a @ b) / np.linalg.norm(a) / np.linalg.norm(b), 1.0)))


def test_setpoints_are_clipped():
    """In the box, within the spring error of a tool in the box, turned by at most the angle, on the shortest way."""
    rng = np.random.default_rng(0)
    for _ in range(500):
        tool = np.concatenate([rng.uniform(SETPOINT.lower_m, SETPOINT.upper_m), rng.normal(size=4)])
        tool[3:] /= np.linalg.norm(tool[3:])
        pose = tool + rng.choice([1e-3, 0.1, 10.0]) * rng.normal(size=7)
        got, changed = clip_setpoint(pose, tool, SETPOINT)
        assert (got[:3] >= SETPOINT.lower_m).all() and (got[:3] <= SETPOINT.upper_m).all()
        assert np.linalg.norm(got[:3] - tool[:3]) <= 0.05 + 1e-12
        assert np.linalg.norm(got[3:]) == pytest.approx(1, abs=1e-12)
        turned, rest, whole = (
            angle_between(a, b) for a, b in ((tool[3:], got[3:]), (got[3:], pose[3:]), (tool[3:], pose[3:]))
        )
        assert turned <= 0.3 + 1e-6 and turned + rest == pytest.approx(whole, abs=1e-5)
        assert changed or whole <= 0.3
    tool = np.array([0.1, 0, 0.4, 1, 0, 0, 0.0])
    near = np.array([0.12, 0, 0.4, np.cos(0.1), np.sin(0.1), 0, 0])
    got, changed = clip_setpoint(near, tool, SETPOINT)
    assert (got == near).all() and not changed
    got, changed = clip_setpoint(np.array([0.12, 0, 0.4, -1, 0, 0, 0]), tool, SETPOINT)
    assert angle_between(got[3:], tool[3:]) == 0 and not changed
    for bad in (np.full(7, np.nan), np.zeros(7), np.full(7, 1e308), np.zeros(3)):
        got, changed = clip_setpoint(bad, tool, SETPOINT)
        assert (got == tool).all() and changed


def test_it_refuses_nonsense():
    for make in (
        lambda: EnergyTankLimits(most_j=0.1, floor_j=0.1),
        lambda: EnergyTankLimits(returned=1.1),
        lambda: EnergyTank(np.nan, np.zeros(3), np.ones(3)),
        lambda: EnergyTank(1.0, np.zeros(3), -np.ones(3)),
        lambda: SetpointLimits(np.ones(3), np.zeros(3), 0.1, 1.0),
        lambda: SetpointLimits(np.zeros(3), np.ones(3), 0.1, 4.0),
    ):
        with pytest.raises(Refused):
            make()
