"""The long run, for who has the night: ``make soak`` sets ``BURNISH_SOAK=1``, and that is all it means, everywhere.

A test that is worth more of the same asks `often` how much of it the occasion calls for, and tells a `Progress` how far
it has come. As a program (``python tests/soak.py``, by ``make soak``) this runs the long versions and nothing else:
first what measures time, alone, and then what only computes, as many at once as there are cores, up to two. Words after
the command choose parts (``python tests/soak.py guard attack``); ``turn`` is one of the short parts, in each run of CI
another. What each has shown is said in the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SOAK = os.environ.get("BURNISH_SOAK") == "1"
EVERY_S = 60.0  # tells a Progress how it goes
SHORT = 1.0  # minutes that a part may take to be played in CI
# Which share of the rotating tests is played, or "all"; workers of one run inherit it.
TURN = os.environ.setdefault("BURNISH_TURN", str(int(time.time()) // 600))


def often(ci: int, soak: int) -> int:
    """So many in everyday runs, so many in the soak."""
    return soak if SOAK else ci


def in_turn(case: int, parts: int) -> bool:
    """Whether this run plays the case: one run in ``parts``, and every soak."""
    return SOAK or TURN == "all" or (case - int(TURN)) % parts == 0


class Progress:
    """In the soak, a line per minute; otherwise silent."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self._began = self._told = time.monotonic()

    def __call__(self, reached: int) -> None:
        now = time.monotonic()
        if not SOAK or now - self._told < EVERY_S or not reached:
            return
        self._told = now
        left = (now - self._began) * (self.total / reached - 1)
        say(f"  {self.what}: {reached:,} of {self.total:,}, about {spoken(left)} left")

    def along(self, items: Iterable[T]) -> Iterator[T]:
        for reached, item in enumerate(items):
            self(reached)
            yield item


@dataclass(frozen=True)
class Part:
    name: str
    shows: str
    minutes: float  # measured on two shared cores
    tests: tuple[str, ...]  # pytest's names of them
    alone: bool = False  # it measures time, so nothing may run beside it


PARTS = (
    Part(
        "kills",
        "whatever process is killed or hangs, on every robot, 20 times each: the arm stands still in the time it has",
        9,
        (
            "tests/test_dynamixel.py::test_a_killed_program_leaves_an_arm_that_stands_still",
            "tests/test_kills.py::test_whoever_is_killed_the_arm_comes_to_rest",
            "tests/test_second_channels.py::test_a_control_process_that_hangs_is_replaced_by_the_second_channel",
            "tests/test_universal_faults.py::test_killed_in_motion_the_arm_comes_to_rest",
        ),
        alone=True,
    ),
    Part(
        "learners",
        "a training in two processes, either of which is killed 20 times: no orphan, and what had arrived is kept",
        5,
        (
            "tests/test_asynchronous_kill.py::test_actors_are_killed_again_and_again",
            "tests/test_asynchronous_kill.py::test_learners_are_killed_again_and_again",
        ),
        alone=True,
    ),
    Part(
        "crowd",
        "1,000 connections without the key dial all the time: the owner of the key gets in every time within 2 s",
        1,
        ("tests/test_gateway.py::test_a_thousand_diallers_without_the_key_do_not_keep_the_owner_out",),
        alone=True,
    ),
    Part(
        "attack",
        "1,000,000 malformed frames: no crash, no hang over 1 s, the good client's p99 at most doubled",
        44,
        ("tests/test_attack.py::test_thousands_of_strangers_hardly_delay_the_client",),
        alone=True,
    ),
    Part(
        "wire_universal",
        "1,000,000 hostile requests to a Universal Robots arm, in real time, and 200 links that break: the limits hold "
        "on the wire",
        44,
        (
            "tests/test_universal.py::test_ten_thousand_hostile_requests",
            "tests/test_universal.py::test_limits_hold_on_a_link_that_breaks",
        ),
        alone=True,
    ),
    Part(
        "wire_dynamixel",
        "1,000,000 hostile requests to Dynamixel servos, 2 % lost and 2 % corrupted: the limits hold on the wire",
        19,
        ("tests/test_dynamixel.py::test_limits_hold_in_the_bytes_on_the_wire",),
    ),
    Part(
        "wire_feetech",
        "1,000,000 hostile requests to Feetech servos, 2 % lost and 2 % corrupted: the limits hold on the wire",
        12,
        ("tests/test_feetech.py::test_limits_hold_in_the_bytes_on_the_wire",),
    ),
    Part(
        "noise",
        "10,000,000 bent answers of Feetech servos: at most 1e-5 of them are believed",
        1,
        ("tests/test_feetech.py::test_of_bent_answers_hardly_one_is_believed",),
    ),
    Part(
        "faults",
        "every kind of fault for 5,000 ticks on both families of servos: nothing unhandled, nothing wrong accepted; "
        "sensors that hang and joints that are stuck are noticed, and everyday motion is no alarm",
        6,
        (
            "tests/test_dynamixel.py::test_no_fault_is_unhandled_and_no_wrong_value_accepted",
            "tests/test_feetech.py::test_no_fault_is_unhandled_and_no_wrong_value_accepted",
            "tests/test_monitors.py",
            "tests/test_second_channels.py::test_the_bus_of_servos_is_a_second_channel",
        ),
    ),
    Part(
        "outside",
        "200 starts outside the range on every robot, one of them in real time: no limit broken, and no jump",
        9,
        (
            "tests/test_outside_starts.py::test_starts_outside_the_range_break_no_limit",
            "tests/test_outside_starts.py::test_a_limit_of_jerk_holds_from_outside_too",
        ),
    ),
    Part(
        "guard",
        "10,000,000 hostile calls of the guard: no limit broken; 200 random arms behind fallback and protection",
        2,
        (
            "tests/test_guard.py::test_hostile_streams_find_nothing",
            "tests/test_guard.py::test_what_float64_can_express_is_kept_at_every_scale",
            "tests/test_fallback.py::test_hostile_streams_behind_the_guard",
            "tests/test_protection.py::test_hostile_streams",
        ),
    ),
    Part("mutants", "every mutant of the guard: at least 95 of 100 are noticed", 2, ("tests/test_guard_mutants.py",)),
    Part(
        "hours",
        "an hour with faults on the twin, and one on each family of servos: every invariant held at every command",
        6,
        ("tests/test_simulated_hours.py::test_an_hour_with_faults",),
    ),
)


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def spoken(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )


def run(part: Part) -> tuple[bool, float]:
    """Did it hold, and how long did it take."""
    say(f"{part.name} begins: {part.shows} (about {spoken(60 * part.minutes)})")
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--tb=short", *part.tests]
    surroundings = os.environ | {"BURNISH_SOAK": "1", "OMP_NUM_THREADS": "1"}
    holds = subprocess.run(command, env=surroundings, cwd=Path(__file__).parent.parent).returncode == 0
    took = time.monotonic() - began
    say(f"{part.name} {'holds' if holds else 'FAILED'} after {spoken(took)}")
    return holds, took


def whose_turn() -> list[str]:
    """The short part that this run plays; all of them with BURNISH_TURN=all."""
    short = [part.name for part in PARTS if part.minutes <= SHORT]
    return [name for number, name in enumerate(short) if in_turn(number, len(short))]


def main(names: list[str]) -> int:
    names = whose_turn() if names == ["turn"] else names
    unknown = set(names) - {part.name for part in PARTS}
    if unknown:
        say(f"no part is called {sorted(unknown)[0]!r}; choices: {', '.join(part.name for part in PARTS)}")
        return 2
    parts = [part for part in PARTS if not names or part.name in names]
    found = {part.name: run(part) for part in parts if part.alone}
    beside = [part for part in parts if not part.alone]
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        # The longest first, so that neither core ends up waiting for the other.
        beside.sort(key=lambda part: -part.minutes)
        found |= {part.name: result for part, result in zip(beside, pool.map(run, beside), strict=True)}
    say("\nWhat was shown:")
    for part in parts:
        holds, took = found[part.name]
        say(f"  {'holds ' if holds else 'FAILED'}  {part.name} ({spoken(took)}): {part.shows}")
    return 0 if all(holds for holds, _ in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
