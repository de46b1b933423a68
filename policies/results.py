"""``burnish evaluate results=A,B``: finished evaluations compared without running anything, ours and LeRobot's.

evaluation.json   of `burnish evaluate`: seeds, successes and returns
eval_info.json    of `lerobot-eval`: "per_episode", with seeds, or since LeRobot 0.4 "per_task", without

Episodes are pairs where both files name their seeds, and these are the same, and no about.json beside them says that
the worlds were two. LeRobot's newer file names none, though it plays --seed, --seed + 1, and so on: where both were
called with the same --seed, ``paired=true`` says so. It cannot pair files of both kinds. Ours remember whether the
world honoured its seeds; of LeRobot's that cannot be seen, and a line says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

from .cli.machine import say
from .core.errors import BurnishError, plain
from .core.files import named, replace
from .measure.evaluate import Comparison, Evaluation, ReturnComparison, compare
from .measure.statistics import episodes_needed, holm
from .runs.manifest import parse

MOST_EPISODES = 1_000_000
ABOUT = "about.json"  # the world of an evaluation of ours, beside it
_OF_LEROBOT = {"per_task", "per_episode"}  # keys of its files


def read_results(path: Path | str) -> Evaluation:
    """The episodes of a finished evaluation. Those of a file that names no seeds are numbered, and not repeatable."""
    path = Path(path)
    data = parse(path, json.loads)
    if not isinstance(data, dict):
        raise BurnishError(f"{path} is no evaluation: it holds no table")
    return _lerobot(path, data) if _OF_LEROBOT & data.keys() else Evaluation.from_dict(data)


def _lerobot(path: Path, data: Mapping[str, Any]) -> Evaluation:
    try:
        if "per_episode" in data:
            rows = [(x["seed"], x["success"], x["sum_reward"]) for x in data["per_episode"]]
        else:
            lists = [x["metrics"] for x in sorted(data["per_task"], key=_task)]
            rows = [(None, *row) for x in lists for row in zip(x["successes"], x["sum_rewards"], strict=True)]
        if not 1 <= len(rows) <= MOST_EPISODES:
            raise ValueError(f"{len(rows)} episodes")
        found = [seed for seed, _, _ in rows if type(seed) is int]
        named_seeds = len(found) == len(rows)
        seeds = found if named_seeds else list(range(len(rows)))
        if len(set(seeds)) < len(seeds):
            raise ValueError("a seed stands there twice")
        success = [_truth(x) for _, x, _ in rows]
        returns = [float(x) for _, _, x in rows]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BurnishError(
            f"{path} is no eval_info.json of LeRobot that can be read: {plain(repr(error), 200)}"
        ) from error
    blank = [False] * len(rows)
    return Evaluation(seeds, returns, [0] * len(rows), blank, blank, success, None, named_seeds)


def _task(x: Mapping[str, Any]) -> tuple[str, str]:
    return str(x.get("task_group")), str(x.get("task_id"))


def _truth(x: Any) -> bool:
    if x not in (0, 1):  # NaN of a world that reports none, too
        raise ValueError(f"success={x!r}")
    return bool(x)


def compare_results(paths: Sequence[str], paired: bool = False, out: str | None = None) -> int:
    """The first of some finished evaluations against each of the others, in sentences; exit status."""
    if len(paths) < 2:
        raise BurnishError("results= needs at least two files: results=a/eval_info.json,b/eval_info.json")
    every = [read_results(path) for path in paths]
    seedless = [_names_no_seeds(x) for x in every]
    if paired and len({*seedless}) > 1:
        seeds, tasks = (paths[seedless.index(kind)] for kind in (False, True))
        raise BurnishError(
            f"paired=true cannot pair {tasks}, which names no seeds, with {seeds}, which names its own; leave it out"
        )
    first, *others = [
        replace_fields(x, repeatable=True) if paired and bare else x for x, bare in zip(every, seedless, strict=True)
    ]
    apart = [_apart(Path(path), Path(paths[0])) for path in paths[1:]]
    found = [_compared(other, first, why) for other, why in zip(others, apart, strict=True)]
    tests = [x.p_value for x in found if isinstance(x, Comparison)]
    corrected = holm(tests)
    rows = []
    for path, other, comparison in zip(paths[1:], others, found, strict=True):
        if comparison.unpaired and any(map(_names_no_seeds, (first, other))):
            comparison = replace_fields(comparison, unpaired="an eval_info.json of LeRobot names no seeds")
        say(comparison.sentence(path, paths[0]))
        row = {"file": path, "against": paths[0], **comparison.to_dict()}
        if isinstance(comparison, Comparison):
            p = corrected.pop(0)
            if len(tests) > 1:
                say(f"  with Holm's correction for {len(tests)} comparisons: p = {p:.2g}")
            needed = needed_for(comparison)
            say(f"  {claim(comparison, p, needed)}")
            row |= {"holm_p_value": p, "episodes_needed": needed}
        if comparison.unpaired and not paired and all(seedless):
            say("  where both were played with the same --seed in the same environment, say so: paired=true")
        if not comparison.unpaired and not (first.lengths[0] and other.lengths[0]):
            say("  these are pairs if the world honours its seeds, which an eval_info.json does not say")
        rows.append(row)
    if out is not None:
        replace(named(out) / "comparison.json", json.dumps(rows, indent=1) + "\n")
    return 0


def _names_no_seeds(x: Evaluation) -> bool:
    """Whether it is a file of LeRobot's without seeds, which is no evidence of pairs; such files have no lengths."""
    return not x.repeatable and not x.lengths[0]


def _compared(a: Evaluation, b: Evaluation, apart: str) -> Comparison | ReturnComparison:
    """Episodes of two worlds, or of other tasks, are no pairs; ``apart`` says so."""
    if not apart:
        return compare(a, b)
    return replace_fields(compare(replace_fields(a, repeatable=False), b), unpaired=apart)


def _apart(a: Path, b: Path) -> str:
    """The reason why their episodes are no pairs, whatever their seeds; empty where nothing says so."""
    if _differ(_world(a), _world(b)):
        return "they played in two worlds"
    one, two = _tasks(a), _tasks(b)
    return "they played other tasks" if one and two and one != two else ""


def _tasks(path: Path) -> list[tuple[str, str, int]]:
    """Each task of a file of LeRobot's that names no seeds, and the number of its episodes."""
    data = parse(path, json.loads)
    listed = () if "per_episode" in data else data.get("per_task", ())
    return sorted((*_task(x), len(x["metrics"]["successes"])) for x in listed)


def _world(path: Path) -> Mapping[str, Any]:
    """The world of one of our own evaluations, as about.json beside it says; empty where nothing says it."""
    about = path.with_name(ABOUT)
    data = parse(about, json.loads) if about.is_file() else {}
    world = data.get("world") if isinstance(data, dict) else None
    return world if isinstance(world, dict) else {}


def _differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two worlds are surely two: settings that one of them lacks are of another version, and may be alike."""
    settings = [world.get("config") for world in (a, b)]
    one, other = [found if isinstance(found, dict) else {} for found in settings]
    return any(x[key] != y[key] for x, y in ((a, b), (one, other)) for key in x.keys() & y.keys() - {"config"})


def needed_for(comparison: Comparison) -> int | None:
    """Episodes of each evaluation by which a difference as large as this one would be seen four times of five."""
    shares = None
    if comparison.wins is not None and comparison.losses is not None:
        shares = (comparison.wins / comparison.episodes, comparison.losses / comparison.episodes)
    return episodes_needed(comparison.a_rate, comparison.b_rate, shares, confidence=comparison.confidence)


def claim(comparison: Comparison, p: float, needed: int | None) -> str:
    """A sentence about what the numbers carry."""
    if p < 1 - comparison.confidence:
        return "the difference is beyond doubt"
    if needed is None:
        return "the difference is 0, so no number of episodes would show it"
    return (
        f"the difference is not beyond doubt; if it is as large as it looks, about {needed:,} episodes of each would "
        "show it in 80% of such comparisons"
    )
