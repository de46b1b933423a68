"""A comparison on a cluster that SLURM runs: one array job, each of whose tasks plays one run, by `burnish compare
only=RUN`, in folders that all nodes share. Nothing but `sbatch` is needed, and the user types that.

Later the same command with ``resume=true`` collects: it writes a script for what is not there yet, such as runs that a
time limit stopped, or the free baselines, which last as long as the median run; or the comparison, once all is there.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from ...policies.cli.verb_process import child_imports, verb_command
from ...policies.core.errors import BurnishError
from ...policies.core.imports import VARIABLE
from ...policies.core.threads import CORES
from .comparison import BASE, EVALUATIONS, RUNS

SLURM, SCRIPT = "slurm", "slurm.sh"
NOTICE_S = 120  # between the signal, on which a run saves, and the end of its time


def directive(path: Path) -> str:
    """A path as `sbatch` reads it in its lines: in quotes, with a backslash before special characters, where a single %
    begins a pattern and the end of the line is the end."""
    if "\n" in str(path):
        raise BurnishError(f"out={str(path)!r} has a line break, which a script for SLURM cannot name; choose another")
    return '"' + re.sub(r'(["\\])', r"\\\1", str(path)).replace("%", "%%") + '"'


def array_script(
    names: Sequence[str], words: Sequence[str], out: Path, gpu: bool, jobs: int = 0, cores: int = 1
) -> str:
    """The script that plays the runs ``names`` of the comparison that ``words`` describe, ``jobs`` at a time or all,
    with so many ``cores`` each."""
    imports = child_imports()
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=burnish",
        f"#SBATCH --array=0-{len(names) - 1}" + (f"%{jobs}" if jobs else ""),
        f"#SBATCH --cpus-per-task={cores}",
        *(["#SBATCH --gres=gpu:1"] if gpu else []),
        "#SBATCH --requeue",
        f"#SBATCH --signal=B:TERM@{NOTICE_S}",
        f"#SBATCH --output={directive(out.absolute())}/slurm-%a.log",
        "#SBATCH --open-mode=append",
        f"cd {shlex.quote(os.getcwd())} || exit 1",
        *([f"export {VARIABLE}={shlex.quote(','.join(imports))}"] if imports else []),
        f'export {CORES}="${{SLURM_CPUS_PER_TASK:-{cores}}}"',
        f"runs=({shlex.join(names)})",
        f'exec {shlex.join(verb_command(["compare", *words]))} only="${{runs[$SLURM_ARRAY_TASK_ID]}}"',
    ]
    return "\n".join(lines) + "\n"


def waiting_runs(out: Path, first: Sequence[str], later: Sequence[str]) -> list[str]:
    """The runs that can be played now and have neither ended nor failed; ``later`` ones need a run that has ended."""

    def state(name: str) -> str:
        ended = (out / EVALUATIONS / f"{name}.json").exists()
        return "ended" if ended else "failed" if (out / RUNS / f"{name}.failed").exists() else "waiting"

    waiting = [name for name in first if state(name) == "waiting"]
    if waiting or not any(state(name) == "ended" for name in first if name != BASE):
        return waiting
    return [name for name in later if state(name) == "waiting"]
