"""A training that is tracked: what tests/test_tracking.py and tests/test_trackers.py have in common."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from burnish.policies.runs.run import Run


def train(out: Path, total: int = 6, *, stop_at: int = 0, crash_at: int = 0, trackers=("recorder",), **config: Any):
    """Logs every step and saves every second."""
    options = {"resume": True, "tensorboard": False, "changeable": {"total"}, "trackers": trackers}
    with Run(out, {"total": total, **config}, **options) as run:
        run.latest()
        for step in run.steps(total):
            run.log(step, {"loss": 1 / step, "eval/success": float("nan")})
            if step % 2 == 0 or step == total or run.stopping:
                run.save(step, {})
            if step == stop_at:
                os.kill(os.getpid(), signal.SIGINT)
            if step == crash_at:
                raise ZeroDivisionError
