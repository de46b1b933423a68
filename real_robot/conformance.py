"""Does an adapter keep its word? A hundred checks for those who write one, to be run in their own tests.

    from burnish.real_robot.conformance import check

    def test_my_arm():
        assert check(lambda: make({"port": ...})).passed

``make`` gives a fresh adapter each time, of the same robot, with nothing opened. The robot moves: each joint by
``amplitude_rad``, at a tenth of its limits. On hardware, stand clear and keep the emergency stop at hand.

A check that cannot be made on this robot (no gripper, no watchdog) says so, and does not count. What is checked is in
`promises`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .promises import PARTS, Make, Trial


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool | None  # None: cannot be made on this robot
    text: str = ""


@dataclass(frozen=True)
class Conformance:
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


def check(make: Make, *, amplitude_rad: float = 0.05, still_rad: float = 0.01) -> Conformance:
    """``still_rad``: measured positions of a robot at rest differ by less than that."""
    trial = Trial(make, amplitude_rad, still_rad)
    checks: list[Check] = []
    for part in PARTS:
        found = part(trial)
        while True:
            try:
                name, held, text = next(found)
            except StopIteration:
                break
            except Exception as error:  # the robot broke off this part; the others are still worth seeing
                checks.append(Check(f"{part.__name__}: to its end", False, f"{type(error).__name__}: {error}"))
                break
            checks.append(Check(name, None if held is None else bool(held), text))
    return Conformance(make().spec.name, tuple(checks))
