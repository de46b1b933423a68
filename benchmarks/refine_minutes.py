"""Minutes of processor time that a run takes, in all of its sittings, the killed ones too."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from burnish.policies.cli.verb_process import start_verb
from burnish.policies.core import files

KEPT_EVERY = 60.0  # seconds between two writings of what a run has taken so far


def add_up(clock: Path, spent: Mapping[str, float]) -> None:
    earlier = json.loads(clock.read_text()) if clock.exists() else {"cpu_s": 0.0, "wall_s": 0.0}
    files.replace(clock, json.dumps({name: earlier[name] + spent[name] for name in spent}))


def timed(words: Sequence[str], output: Any, sitting: Path | None = None) -> tuple[int, dict[str, float]]:
    """The exit status of `burnish` with ``words`` and the seconds that it took, of its child processes too. It ends
    with this process; what it had taken until then stands in the file ``sitting``."""
    began = kept = time.monotonic()
    process = start_verb(words, stdout=output, stderr=subprocess.STDOUT)
    while True:
        ended, status, usage = os.wait4(process.pid, 0 if sitting is None else os.WNOHANG)
        wall = time.monotonic() - began
        if ended:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, {"cpu_s": usage.ru_utime + usage.ru_stime, "wall_s": wall}
        if sitting is not None and time.monotonic() - kept > KEPT_EVERY:
            kept = time.monotonic()
            files.replace(sitting, json.dumps({"cpu_s": taken(process.pid), "wall_s": wall}))
        time.sleep(0.1)


def taken(pid: int) -> float:
    """Seconds of processor time of a process and those that it started."""
    seconds = 0.0
    with suppress(psutil.Error):  # one has just ended
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            seconds += sum(each.cpu_times()[:4])  # of its own, and of its children that have ended
    return seconds


def known_minutes(run: Mapping[str, Any]) -> float | None:
    """The minutes of processor time that a run took, or None where a sitting of it was not counted. The log of a run
    has a clock that goes on from sitting to sitting: such a run lasted longer by it than was counted. The oldest runs
    were kept without that clock, and are believed."""
    counted = 60 * run.get("wall_minutes", math.inf)
    told = run.get("seconds", {}).get("time/elapsed_s", 0.0)
    return None if told > counted + KEPT_EVERY else run["minutes"]
