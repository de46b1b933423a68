"""Cores, threads, and sums that repeat. Libraries read these when torch is loaded: they come before.

**Spinning.** GNU's OpenMP lets threads spin for milliseconds after each product, on cores that physics, or another run,
needs: two runs with two threads each on two cores take turns at stopping each other. A thousand turns are some
microseconds, enough between two layers of a network.

**Rounding.** Intel's MKL adds up in an order that depends on where in memory a matrix happens to lie, so that on some
processors a resumed run differs from one that was not stopped in the last digit of a gradient. STRICT forbids that; it
costs some speed, which MKL_CBWR=AUTO brings back together with the rounding.

A variable that is set already is obeyed; a program that imports torch before Burnish sets them outside.
"""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


CORES = "BURNISH_CORES"


def usable_cores() -> int:
    """The cores that this process may use, which `taskset`, a container's set of cores or BURNISH_CORES can lower; a
    quota of time cannot be seen here."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get(CORES, "")
    return max(1, min(here, int(given))) if given.isdecimal() else here


def started_by_torchrun() -> int:
    """The number of processes that torchrun started, this one among them; 1 without it. Other programs set WORLD_SIZE
    too, and mean something else."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
