"""The free baselines: how good a base gets without a single new episode, for the time that a refinement takes.

    base_greedy      the base from noise 0; nothing is trained
    more_imitation   the base goes on imitating the recordings that it has imitated
    iql              it imitates them weighted by their advantage (`offline/iql.py`)
    best_of_n        it imitates them, and of n draws the one that the critic of IQL prefers is executed

A refinement is worth its episodes if it beats the best of these. This module says which commands make them; it plays
none. Each training gets the wall-clock time of a refinement: a short probe of the same command tells how many updates
fit into it, and that number is a setting of the run, which is therefore a function of its settings alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ...policies.core.errors import BurnishError
from ...policies.runs.run import METRICS, read_metrics

BASE_GREEDY = "base_greedy"
# Of each training: the verb with its words, and where its settings of training stand.
TRAININGS: dict[str, tuple[tuple[str, ...], str]] = {
    "more_imitation": (("pretrain",), "train."),
    "iql": (("offline", "method=iql"), ""),
    "best_of_n": (("offline", "method=iql", "method.extraction=best_of_n"), ""),
}
NAMES = (BASE_GREEDY, *TRAININGS)
# Tried from noise 0 as well. Of best_of_n that is a single draw, which is more imitation once more.
ALSO_GREEDY = ("more_imitation", "iql")
GREEDY = "eval.greedy=true"  # the word of `burnish evaluate` for it
# A training chooses nothing on the way: it is seen in the end, on other episodes, what it is worth.
UNTRIED = ["eval.episodes=1", "eval.worlds=1", "eval.confirm=1"]
PROBE = 200  # updates, of which the second half is timed: the first one pays for what happens once


def free_baseline(
    name: str, *, base: str | Path, data: str | Path, steps: int, log_every: int | None = None
) -> list[str]:
    """The verb of a training and its words, without those of every run (seed, out, threads, eval)."""
    words, place = TRAININGS[name]
    start = ["policy=checkpoint", f"policy.path={base}", f"data={data}"]
    often = {"steps": steps, "log_every": log_every or max(1, steps // 100), "save_every": max(1, steps // 4)}
    return [*words, *start, *(f"{place}{key}={count}" for key, count in often.items())]


def probe(
    name: str,
    play: Callable[[Sequence[str]], object],
    folder: Path,
    *,
    base: str | Path,
    data: str | Path,
    words: Sequence[str] = (),
) -> float:
    """Updates per second of a training, on this machine as busy as it is now. ``play`` runs a command; ``words`` are
    those of the run to come, except for its ``out``, which is ``folder``."""
    often = free_baseline(name, base=base, data=data, steps=PROBE, log_every=PROBE // 2)
    play([*often, *words, f"out={folder}", "resume=true"])  # on another node, where the first one is lost
    rows = read_metrics(folder) if (folder / METRICS).is_file() else []
    times = {row["step"]: net_s(row) for row in rows if "time/elapsed_s" in row}
    half = times.get(PROBE, 0.0) - times.get(PROBE // 2, 0.0)
    if not half > 0:
        raise BurnishError(f"the probe of {name} in {folder} has logged no time, so nothing says how fast it is")
    return PROBE / 2 / half


def steps_for(minutes: float, updates_per_s: float) -> int:
    """The number of updates that fit into so many minutes; at least 1."""
    return max(1, round(60 * minutes * updates_per_s))


def net_s(row: Mapping[str, float]) -> float:
    """Seconds of a run until a line of its log, without its evaluations and its saving."""
    evaluating = row.get("time/evaluation_s", 0.0) + row.get("time/exams_s", 0.0)  # as older versions called it
    return row["time/elapsed_s"] - evaluating - row.get("time/saving_s", 0.0)


def median_minutes(runs: Sequence[Path]) -> float:
    """The training time of the median of some runs."""
    logs = [[row for row in read_metrics(run) if "time/elapsed_s" in row] for run in runs]
    return statistics.median(max(map(net_s, rows), default=0.0) / 60 for rows in logs)


def lacking(names: Sequence[str]) -> str:
    """Which rows are not there although nothing failed, and how to get them."""
    if not names:
        return ""
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return (
        f"the free baselines {listed} are missing, because nothing says which recordings the base has imitated; the "
        "same command with data=FOLDER resume=true adds them"
    )
