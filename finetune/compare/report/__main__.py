"""Entry point: ``burnish report``, one HTML file about a run, a comparison, or comparisons of several tasks."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ....policies.build import ACTING
from ....policies.cli.cli import main
from ....policies.core.config import differences, to_data
from ....policies.core.errors import BurnishError
from ....policies.core.files import named, replace
from ....sim.build import ENVS
from ...refinement import FinetuneConfig
from ...table import ONLINE
from .page import comparison_page, pooled_page, run_page
from .read import RunFolder, command_in, read_comparison, read_run

GROUPS: dict[str, dict[str, dict[str, type]]] = {}
NO_TEXT = ("null", "true", "false", "nan", "inf")  # words that the command line reads as something else


@dataclass
class ReportConfig:
    """Settings of `burnish report`: the folder of a run or of comparisons, and the page."""

    run: str | None = None  # the folder of a training
    compare: list[str] = field(default_factory=list)  # the folder of a comparison; several are pooled over tasks
    out: str | None = None  # the page; by default report.html in that folder
    videos_mib: float = 24.0  # films in the page, at most, in MiB

    def __post_init__(self) -> None:
        if (self.run is None) == (not self.compare):
            raise BurnishError("a report is of one thing: give run=FOLDER, or compare=FOLDER")
        if len(self.compare) > 1 and self.out is None:
            raise BurnishError("a page about several comparisons belongs to no folder of theirs; give out=FILE.html")
        if not 0 <= self.videos_mib <= 1024:
            raise BurnishError(f"videos_mib={self.videos_mib} must lie in [0, 1024]; browsers fail at larger pages")


def report(config: ReportConfig) -> int:
    """The HTML page about a run or about comparisons, written; exit status."""
    folder = Path(config.run or config.compare[0])
    if config.run is not None:
        run = read_run(folder)
        text = run_page(run, command_of(run), config.videos_mib)
    elif len(config.compare) == 1:
        text = comparison_page(read_comparison(folder), config.videos_mib)
    else:
        text = pooled_page([read_comparison(Path(each)) for each in config.compare])
    out = Path(config.out) if config.out else folder / "report.html"
    replace(named(out.parent) / out.name, text)
    sys.stdout.write(f"report: {out}  ({len(text.encode()) / 2**20:.1f} MiB, open it in a browser)\n")
    return 0


def command_of(run: RunFolder) -> str | None:
    """The `burnish finetune` that repeats a run, with what differs from the defaults; None for other kinds of run."""
    config, method = dict(run.config), run.method
    config.pop("identity", None)
    known = {f.name for f in fields(FinetuneConfig)}  # of which an older run may lack some
    if method is None or method not in ONLINE or not {"policy", "method", "env"} <= set(config) <= known:
        return None
    words = [*_policy(config.pop("policy")), f"method={method}"]
    words += _changes("method", to_data(ONLINE[method]()), config.pop("method"))
    world = config.pop("env")
    if world is not None:  # else it is that of the policy
        if run.world not in ENVS:
            return None
        words += [f"env={run.world}", *_changes("env", to_data(ENVS[run.world].config()), world)]
    usual = to_data(FinetuneConfig(method=None))
    rest = {name: config[name] for name in usual if name in config and name not in ("resume", "threads")}
    words += _changes("", {name: usual[name] for name in rest}, rest)
    return command_in(shlex.join(["burnish", "finetune", *words])) or None


def _policy(chosen: Any) -> Iterator[str]:
    if isinstance(chosen, Mapping):
        kind = next(
            (name for name, each in ACTING.items() if {f.name for f in fields(each)} == set(chosen)), "checkpoint"
        )
        yield f"policy={kind}"
        for name, value in chosen.items():
            if value is not None:
                yield f"policy.{name}={_written(value)}"


def _changes(place: str, usual: Any, mine: Any) -> Iterator[str]:
    for name, _, value in differences(usual, mine):
        yield f"{place}.{name}={_written(value)}" if place else f"{name}={_written(value)}"


def _written(value: Any) -> str:
    """As the command line reads it."""
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z0-9_./-]+", value) and value.lower() not in NO_TEXT
        return value if plain else "'" + value.replace("'", "\\'") + "'"
    return json.dumps(value, default=str)


if __name__ == "__main__":
    sys.exit(main())
