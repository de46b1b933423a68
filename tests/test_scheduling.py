"""What a loop obtains of the operating system is what the kernel says it has, and nothing that it lacks stops it.

Each case is a process of its own, because the scheduler, locked memory and garbage collection are a process's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from burnish.real_robot.control.link import RobotLink
from burnish.real_robot.safety.safe_robot import Safety
from robot_lab import ARM, LIMITS

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the others have none of this")

CHILD = """
import gc, json, os, resource, sys
from burnish.real_robot.control.scheduling import hurry
if hasattr(os, "sched_setscheduler"):
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # whatever the thread had that started it
{before}
said = vars(hurry({arguments}))
kernel = {{"policy": os.sched_getscheduler(0), "priority": os.sched_getparam(0).sched_priority}}
with open("/proc/self/status") as status:
    kernel["locked_kb"] = int(status.read().partition("VmLck:")[2].split()[0])
print(json.dumps({{"said": said, **kernel, "collects": gc.isenabled(), "frozen": gc.get_freeze_count(),
                  "cores": sorted(os.sched_getaffinity(0))}}))
"""
# Nobody, with the least that the system gives anybody; root may still do all of it under any limit.
NO_RIGHTS = """
resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
if os.getuid() == 0:
    os.setgroups([])
    os.setuid(65534)
"""
FIFO = "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))"
LOCK = "sys.exit(ctypes.CDLL(None).mlockall(3))"


def hurried(arguments: str = "", before: str = "") -> dict[str, Any]:
    code = CHILD.format(arguments=arguments, before=before)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def may(what: str) -> bool:
    """Asked of the system, and not of ourselves."""
    code = f"import ctypes, os, sys; {what}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_what_may_be_had_is_obtained():
    if not may(FIFO):
        pytest.skip("no right to SCHED_FIFO here (ulimit -r)")
    found = hurried("priority=50")
    assert found["said"]["scheduler"] == "fifo 50"
    assert (found["policy"], found["priority"]) == (os.SCHED_FIFO, 50)
    assert not found["collects"] and found["frozen"] > 1000


def test_memory_is_locked_where_that_may_be_had():
    if not may(LOCK):
        pytest.skip("no right to lock all memory here (ulimit -l)")
    found = hurried()
    assert found["said"]["locked"] is True and found["locked_kb"] > 1000


def test_without_rights_it_runs_all_the_same_and_says_so():
    if os.getuid() == 0 and not may("os.setgroups([]); os.setuid(65534)"):
        pytest.skip("root may not become anybody else here")
    found = hurried(before=NO_RIGHTS)
    assert found["said"] == {"scheduler": "other", "locked": False, "core": None}
    assert (found["policy"], found["locked_kb"]) == (os.SCHED_OTHER, 0)
    assert not found["collects"]


@pytest.mark.parametrize("core", [-1, 5000, 10**12])
def test_a_core_that_does_not_exist_is_not_obtained(core: int):
    """So one is told, and the loop runs on any."""
    found = hurried(f"core={core}")
    assert found["said"]["core"] is None and found["cores"] == sorted(os.sched_getaffinity(0))


def test_one_core_is():
    mine = max(os.sched_getaffinity(0))
    found = hurried(f"core={mine}")
    assert found["said"]["core"] == mine and found["cores"] == [mine]


@pytest.mark.parametrize("priority", [-1, 0, 1000, 10**12])
def test_a_priority_that_does_not_exist_is_not_obtained(priority: int):
    found = hurried(f"priority={priority}")
    assert found["said"]["scheduler"] == "other" and found["policy"] == os.SCHED_OTHER


def test_a_system_without_any_of_it():
    found = hurried("core=0", before="del os.sched_setscheduler, os.sched_setaffinity")
    assert found["said"]["scheduler"] == "other" and found["said"]["core"] is None


def test_the_report_says_what_the_control_process_has():
    with RobotLink("twin", {"mjcf": ARM, **LIMITS}, Safety(rate_hz=100.0), core=0, watch_s=0) as link:
        kernel = os.sched_getscheduler(link.pid), os.sched_getparam(link.pid).sched_priority
        locked = re.search(r"VmLck:\s*(\d+)", Path(f"/proc/{link.pid}/status").read_text())
        cores = os.sched_getaffinity(link.pid)
        report = link.close()
    said = report["scheduling"]
    fifo = kernel == (os.SCHED_FIFO, 50)
    assert said["scheduler"] == ("fifo 50" if fifo else "other") and fifo == may(FIFO)
    assert locked is not None and said["locked"] == (int(locked[1]) > 0) == may(LOCK)
    assert said["core"] == (0 if cores == {0} else None)


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), child.pid, flush=True)
sys.stdin.read()
"""
ORPHAN = """
import time
from burnish.policies.core.parent import die_with_parent
print({call}, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("call", "dies"), [("die_with_parent()", True), ("True", False)], ids=["asked", "control"])
def test_a_child_hears_of_its_parents_death(call: str, dies: bool):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, ORPHAN.format(call=call)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None and parent.stdin is not None
    said, pid = parent.stdout.readline().split()
    assert said == "True"
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    deadline = time.monotonic() + (10 if dies else 0.5)
    while (alive := _runs(int(pid))) and time.monotonic() < deadline:
        time.sleep(0.02)
    if alive:
        os.kill(int(pid), signal.SIGKILL)
    assert alive != dies


def _runs(pid: int) -> bool:
    """A zombie is dead, whoever may still have to bury it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
