"""The page: what was read, brought into the order in which a person asks, and written as one HTML file.

It holds everything that it shows: style, script, drawings and films. Its content security policy forbids every request,
and every script but its own by hash, so that it stays silent whatever a folder's names contain.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from . import health, pooled, settings, timing, verdict, words
from .curves import measure_of, of_comparison, of_run
from .films import Films, films
from .forest import forest
from .imagined import imagined_of
from .instructions import instructions_of
from .read import Comparison, Entry, RunFolder
from .starts import field_of

HERE = Path(__file__).parent
MIB = 2**20
Section = dict[str, Any]


def comparison_page(comparison: Comparison, videos_mib: float) -> str:
    """The HTML of one comparison, with at most ``videos_mib`` MiB of films."""
    order = ranked(comparison)
    styles = {name: i for i, name in enumerate(dict.fromkeys(run.method for run in comparison.runs))}
    leaders: dict[str, Entry] = {}  # of each method the run that ranks first
    for run in order:
        leaders.setdefault(run.method, run)
    labels = ["base", *dict.fromkeys(run.method for run in order)]
    rows = comparison.runs + comparison.rows
    scale = forest(comparison.measure, [(x.low, x.high) for x in rows], verdict.base_value(comparison))
    shown = {run.method: comparison.folders[run.name] for run in leaders.values() if run.name in comparison.folders}
    room = int(videos_mib * MIB)
    return _render(
        {
            "title": verdict.comparison_title(comparison),
            "verdict": verdict.of_comparison(comparison),
            "facts": verdict.comparison_facts(comparison),
            "measure": comparison.measure,
            "unpaired": comparison.unpaired,
            "styles": styles,
            "curves": of_comparison(comparison, styles),
            "table": {
                "methods": comparison.rows,
                "runs": comparison.runs,
                "goal": comparison.goal,
                "free": comparison.best_free,
                "failed": [entry for entry in comparison.free if not entry.finished],
                "lacking": comparison.lacking,
            },
            "scale": scale,
            "instructions": instructions_of(comparison),
            "imagined": {x.path.name: imagined_of(x, room) for x in shown.values() if x.imagined is not None},
            "films": films(comparison.path / "videos", labels, room),
            "field": field_of(comparison, [run.name for run in order]),
            "settings": {
                "between": settings.between(shown),
                "within": {m: t for m in shown if (t := settings.within(_of_method(comparison, m))).rows},
                "changes": {name: settings.from_defaults(folder) for name, folder in shown.items()},
            },
            "timing": _bars(comparison, styles),
            "health": {folder.path.name: health.checkup(folder.rows) for folder in shown.values()},
            "worries": _worries(comparison),
            "command": comparison.command,
            "machine": _machine(comparison),
        }
    )


def run_page(run: RunFolder, command: str | None, videos_mib: float) -> str:
    """The HTML of one run, with the command that compares it where known, and at most ``videos_mib`` MiB of films."""
    curves = of_run(run)
    parts = timing.of_metrics(run.rows)
    minutes = max((row["time/elapsed_s"] for row in run.rows if "time/elapsed_s" in row), default=0.0) / 60
    bar = timing.bar(verdict.run_name(run), parts, minutes, list(timing.seconds(parts)))
    hint = "`burnish compare` keeps them, of the base and of the refined policy on the same seeds."
    checked = health.checkup(run.rows)
    return _render(
        {
            "title": verdict.run_title(run),
            "verdict": verdict.of_run(run),
            "facts": verdict.run_facts(run),
            "measure": measure_of(run),
            "unpaired": "",
            "styles": {verdict.run_name(run): 0},
            "curves": curves,
            "table": None,
            "scale": None,
            "instructions": None,
            "imagined": {}
            if run.imagined is None
            else {verdict.run_name(run): imagined_of(run, int(videos_mib * MIB))},
            "films": Films([], f"A single run films nothing; {hint}"),
            "field": f"A single run keeps no record of single episodes; {hint}",
            "settings": {
                "between": None,
                "within": {},
                "changes": {verdict.run_name(run): settings.from_defaults(run)},
            },
            "timing": {"bars": [bar] if bar else [], "names": _names(parts), "sentence": timing.pace(run.rows)},
            "health": {verdict.run_name(run): checked},
            "worries": [(verdict.run_name(run), finding) for finding in checked if finding.worry],
            "command": command,
            "machine": [],
        }
    )


def pooled_page(comparisons: Sequence[Comparison]) -> str:
    """The HTML of several comparisons, one of each task."""
    return _render(pooled.pooled(comparisons), "pooled.html")


def ranked(comparison: Comparison) -> list[Entry]:
    """Finished runs: the best of the comparison, then by what they reached."""
    best = comparison.best.name if comparison.best else None
    finished = [run for run in comparison.runs if run.finished]
    return sorted(finished, key=lambda r: (r.name != best, -(r.final if r.final is not None else float("-inf"))))


def _of_method(comparison: Comparison, method: str) -> dict[str, RunFolder]:
    runs = [run for run in comparison.runs if run.method == method and run.name in comparison.folders]
    return {run.name: comparison.folders[run.name] for run in runs}


def _worries(comparison: Comparison) -> list[tuple[str, health.Finding]]:
    checked = {name: health.checkup(folder.rows) for name, folder in comparison.folders.items()}
    return [(name, finding) for name, findings in checked.items() for finding in findings if finding.worry]


def _bars(comparison: Comparison, styles: Mapping[str, int]) -> Section:
    """One per method: the mean over those of its runs that tell."""
    timed = {m: [r for r in comparison.runs if r.method == m and timing.seconds(r.timing)] for m in styles}
    names = list(dict.fromkeys(name for runs in timed.values() for run in runs for name in timing.seconds(run.timing)))
    bars = []
    for method, runs in timed.items():
        mean = {
            f"{name}{timing.ENDING}": sum(timing.seconds(run.timing).get(name, 0.0) for run in runs) / len(runs)
            for name in names
            if runs
        }
        minutes = sum(run.minutes or 0.0 for run in runs) / max(1, len(runs))
        bars.append(timing.bar(method, mean, minutes, names))
    known = [bar for bar in bars if bar is not None]
    sentence = (
        "" if known else "No run of this comparison tells where its time went; the table has the minutes of each."
    )
    return {"bars": known, "names": [name.replace("_", " ") for name in names], "sentence": sentence}


def _names(parts: Mapping[str, float]) -> list[str]:
    return [name.replace("_", " ") for name in timing.seconds(parts)]


def _machine(comparison: Comparison) -> list[tuple[str, str]]:
    facts = [(str(name), settings.shown(value)) for name, value in comparison.machine.items()]
    return [("burnish", comparison.burnish), *facts] if comparison.burnish else facts


def _render(context: Section, template: str = "page.html") -> str:
    env = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {name: getattr(words, name) for name in ("number", "percent", "duration", "probability")}
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # The policy lets pass this script and no other, whatever is written into the page.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    whole = {"style": style, "script": script, "script_sha256": digest, **context}
    return env.get_template(template).render(whole)
