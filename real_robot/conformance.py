"""Does an adapter keep its word? A hundred checks for those who write one, to be run in their own tests.

    from burnish.real_robot.conformance import check

    def test_my_arm():
        assert check(lambda: make({"port": ...})).passed

``make`` gives a fresh adapter each time, of the same robot, with nothing opened. The robot moves: each joint by
``amplitude_rad``, at a tenth of its limits. On hardware, stand clear and keep the emergency stop at hand.

A check that cannot be made on this robot (no gripper, no watchdog) says so, and does not count. The checks are in
`adapter_checks`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..policies.core.errors import reason
from .adapter import Mode, Phase
from .adapter_checks import PARTS, TIMEOUT_S, Driver, Found, Make, Trial, ready
from .errors import Refused


@dataclass(frozen=True)
class Check:
    """The result of one check of an adapter."""

    name: str
    passed: bool | None  # None: cannot be made on this robot
    text: str = ""


@dataclass(frozen=True)
class Conformance:
    """The results of all checks of one robot's adapter."""

    robot: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed is not False for check in self.checks)

    def failures(self) -> list[str]:
        return [f"{check.name}: {check.text}" for check in self.checks if check.passed is False]

    def __str__(self) -> str:
        made = [check for check in self.checks if check.passed is not None]
        good = sum(check.passed is True for check in made)
        return "\n".join([f"{self.robot}: {good} of {len(made)} checks passed", *self.failures()])


def outside(trial: Trial) -> Found:
    """A robot that is found outside its limits is taken hold of where it is and let in, or refused without power."""
    if trial.outside is None:
        yield "outside: it stays where it is found", None, "no robot outside its limits was given"
        return
    with ready(trial.outside) as robot:
        found, low, high = robot.read(TIMEOUT_S).q, robot.spec.column("lower"), robot.spec.column("upper")
        is_outside = ((found < low) | (found > high)).any()
        yield "outside: it is", is_outside, f"{found.tolist()} rad is within the limits, so nothing is tried"
        try:
            driver = Driver(robot, robot.activate(Mode.JOINT_POSITION))
        except Refused as error:
            yield "outside: refused without power", robot.phase is Phase.INACTIVE, str(error)
            return
        driver.go(np.full_like(found, np.nan), 20)  # nothing is asked
        moved = max(np.abs(state.q - found).max() for state in driver.states)
        yield "outside: it stays where it is found", moved <= trial.still_rad, f"it moved by {moved:.4f} rad"
        target = np.clip(found, low + trial.amplitude_rad, high - trial.amplitude_rad)
        sent = driver.go(target, driver.ticks_for(float(np.abs(target - found).max()))).target
        gap = np.abs(np.stack([sent, driver.state.q]) - target).max()
        arrived = gap <= trial.still_rad + 2 * robot.spec.column("quantum").max()
        yield "outside: it goes in when it is asked to", arrived, f"it is {gap:.4f} rad from there"


def check(
    make: Make, *, amplitude_rad: float = 0.05, still_rad: float = 0.01, found_outside: Make | None = None
) -> Conformance:
    """``still_rad``: measured positions of a robot at rest differ by less than that. ``found_outside`` makes the robot
    where a joint is a little outside its limits, for those who can put it there."""
    trial = Trial(make, amplitude_rad, still_rad, found_outside)
    checks: list[Check] = []
    for part in (*PARTS, outside):
        found = part(trial)
        while True:
            try:
                name, held, text = next(found)
            except StopIteration:
                break
            except Exception as error:  # the robot broke off this part; the others are still worth seeing
                checks.append(Check(f"{part.__name__}: to its end", False, reason(error, named=True)))
                break
            checks.append(Check(name, None if held is None else bool(held), text))
    return Conformance(make().spec.name, tuple(checks))
