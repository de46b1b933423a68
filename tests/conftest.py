"""What every test may rely on: one torch thread, and one rule for what is not there.

On a laptop a test whose dependency is missing skips, so that the suite runs everywhere. In CI (``BURNISH_CI=1``) it
fails, so that a test cannot fall silent. Tests marked ``gpu`` are the exception: CI has no GPU and skips them too.
"""

from __future__ import annotations

import importlib
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from soak import SOAK, TURN, in_turn, say

torch.set_num_threads(1)  # Two pytest workers share two cores; more threads would only wait for each other.

SLOW = 12  # Of the slow tests one case in so many is played, or fewer if they say so.
SHARE = int(os.environ.get("BURNISH_SHARE", "1"))  # One file in so many is played.
Require = Callable[..., Any]


def demand(needed: str | bool, reason: str = "") -> Any:
    """The module called ``needed``, or nothing if a condition holds; otherwise skip, and fail in CI."""
    if isinstance(needed, str):
        try:
            return importlib.import_module(needed)
        except ImportError as error:
            reason = f"{reason or needed + ' is not installed'} ({error})"
    elif needed:
        return None
    if os.environ.get("BURNISH_CI"):
        pytest.fail(f"missing in CI: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def require() -> Require:
    """``sb3 = require("stable_baselines3")`` or ``require(condition, "reason")``."""
    return demand


@pytest.fixture
def float64() -> Iterator[None]:
    """Formulae are tested in double precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def pytest_configure(config: pytest.Config) -> None:
    """``make wheel-smoke`` sets BURNISH_WHEEL: then only the installed wheel may be imported, never the tree."""
    if os.environ.get("BURNISH_WHEEL"):
        policies = importlib.import_module("burnish.policies")
        if Path(sysconfig.get_path("purelib")) not in Path(str(policies.__file__)).parents:
            raise pytest.UsageError(f"the wheel is to be tested, but burnish.policies comes from {policies.__file__}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Also in a quiet run, which shows no header."""
    terminalreporter.write_line(f"BURNISH_TURN={TURN} plays the same cases of the rotating tests again")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The soak says what its tests have measured."""
    if SOAK and report.when == "call":
        for name, value in report.user_properties:
            say(f"  {report.nodeid.partition('::')[2]}: {name} {value}")


def core_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Whole files in the order in which they fail fastest: quick ones, those that need a simulator, those with slow
    tests. Of the last the longest come first, so that at the end no process waits long for another."""
    slow, sim = (Counter(item.path for item in items if mark in item.keywords) for mark in ("slow", "sim"))
    return sorted(items, key=lambda item: (bool(slow[item.path]), -slow[item.path], bool(sim[item.path])))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of a ``rotating(n)`` test one in n is played, of a ``slow`` one in ``SLOW``, with BURNISH_SOAK=1 or
    BURNISH_TURN=all all. ``case=`` numbers those that belong together, whatever tests they are of."""
    cases: Counter[str] = Counter()
    waiting = []
    for item in items:
        mark = item.get_closest_marker("rotating")
        if not in_turn(crc32(item.nodeid.partition("::")[0].encode()), SHARE):
            waiting.append(item)
        elif mark is not None or "slow" in item.keywords:
            test = item.nodeid.partition("[")[0]
            given = {} if mark is None else mark.kwargs
            parts = max(1 if mark is None else mark.args[0], SLOW if "slow" in item.keywords else 1)
            if not in_turn(given.get("case", crc32(test.encode()) + cases[test]), parts):
                waiting.append(item)
            cases[test] += 1
    if len(items) > 1 and waiting:  # one that is named alone is played
        config.hook.pytest_deselected(items=waiting)
        items[:] = [item for item in items if item not in set(waiting)]
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    items[:] = core_first(items)
