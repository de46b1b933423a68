"""Entry point: ``burnish data info | stats | show | convert | merge | mirror``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from ..cli.machine import say
from ..core.errors import BurnishError
from ..core.ranges import check_ranges
from . import convert, info, show, stats
from .episodes import NO_SUCCESS, Bad, Episodes
from .mirror import Mirror, mirrored, pairs
from .read import format_of, read_dataset

GROUPS: dict[str, dict[str, dict[str, type]]] = {}


class Do(Enum):
    """The actions of `burnish data`."""

    info = "info"  # what a set is, how much it explores, how good it is
    stats = "stats"  # each number of its observations and actions, and what is suspicious
    show = "show"  # one episode
    convert = "convert"  # some of its episodes, or all, as a new LeRobot set
    merge = "merge"  # several sets as one
    mirror = "mirror"  # what would have been recorded on the other side, as a new LeRobot set


@dataclass
class DataConfig:
    """Settings of `burnish data`: an action, the sets, and what that action takes besides."""

    do: Do = Do.info  # info, stats, show, convert, merge or mirror; `burnish data info FOLDER` says the same
    data: list[str] = MISSING  # the dataset, of any format that is read; for merge, two or more
    out: str | None = None  # convert, merge, mirror: folder of the new set; show: a file that ends with .mp4 or .svg
    episode: int = 0  # show: number of the episode
    episodes: list[str] = field(default_factory=list)  # convert: those to keep, as 0:50,60; by default all
    success: bool = False  # convert: keep successful episodes alone
    keys: list[str] = field(default_factory=list)  # convert: observations to keep; by default all
    rename: list[str] = field(default_factory=list)  # convert: observations, as image.main:image.front, the old first
    # convert: leave out the episodes that cannot be used, such as those with NaN, and say which
    drop_bad: bool = False
    control_hz: float | None = None  # convert: actions per second, of a set that does not say
    flip: list[str] = field(default_factory=list)  # mirror: pictures to turn left to right
    # mirror: numbers that point sideways, as shoulder_pan (in all columns that have the name) or action.0
    negate: list[str] = field(default_factory=list)
    swap: list[str] = field(default_factory=list)  # mirror: numbers that change places, as left_x:right_x
    words: list[str] = field(default_factory=list)  # mirror: words of instructions that change places, as left:right
    reference: str | None = None  # info: a set against which SACo is measured, instead of uniform draws
    worst: float | None = None  # info: return at which TQ is 0, as of a random policy
    best: float | None = None  # info: return at which TQ is 1, as of an expert
    json: bool = False  # info, stats: print JSON

    def __post_init__(self) -> None:
        check_ranges(self, {"(0, 10000]": "control_hz", "(-inf, inf)": "worst best"})
        if self.worst is not None and self.best is not None and self.worst >= self.best:
            raise BurnishError(f"worst={self.worst:g} must lie below best={self.best:g}: the returns of TQ 0 and 1")
        many = self.do is Do.merge
        if many != (len(self.data) > 1):
            raise BurnishError(f"`burnish data {self.do.value}` takes {'two sets or more' if many else 'one set'}")
        for setting in fields(self):
            usual = setting.default_factory() if setting.default_factory is not NO_DEFAULT else setting.default
            if setting.name not in ("do", "data", *TAKEN[self.do]) and getattr(self, setting.name) != usual:
                raise BurnishError(
                    f"`burnish data {self.do.value}` has no use for {setting.name}=; it takes "
                    f"{', '.join(f'{name}=' for name in TAKEN[self.do])}"
                )
        if self.do in (Do.convert, Do.merge, Do.mirror) and self.out is None:
            raise BurnishError("out=... must be given: the folder of the new set")


TAKEN = {
    Do.info: ("reference", "worst", "best", "json"),
    Do.stats: ("json",),
    Do.show: ("episode", "out"),
    Do.convert: ("out", "episodes", "success", "keys", "rename", "control_hz", "drop_bad"),
    Do.merge: ("out",),
    Do.mirror: ("out", "flip", "negate", "swap", "words"),
}


def data(config: DataConfig) -> int:
    """A dataset described, shown, converted, mirrored or merged with others; exit status."""
    first = config.data[0]
    if config.do is Do.info:
        reference = None if config.reference is None else (config.reference, _read(config.reference))
        found = info.described(first, _read(first), reference, config.worst, config.best)
        _print(config.json, found, info.lines(found))
    elif config.do is Do.stats:
        found = stats.statistics_of(read_dataset(first))
        _print(config.json, found, stats.table(found))
    elif config.do is Do.show:
        _show(config)
    elif config.out is not None:
        _write(config, config.out)
    return 0


def _read(path: str, *shown: int) -> Episodes:
    """A set with no pictures but those of the episodes ``shown``, where its format allows it."""
    mine = (lambda total: {*range(total)} & {*shown}) if format_of(path) == "lerobot" else None
    return read_dataset(path, mine=mine)


def _show(config: DataConfig) -> None:
    film = Path(config.out or "").suffix == ".mp4"
    episodes = _read(config.data[0], *[config.episode] * film)
    if not 0 <= config.episode < len(episodes):
        raise BurnishError(f"there is no episode {config.episode}; the set has {len(episodes)}, from 0 on")
    for line in show.lines(episodes, config.episode):
        say(line)
    if config.out is not None:
        say(f"written: {show.write(episodes, config.episode, config.out)}")


def _write(config: DataConfig, out: str) -> None:
    notes: list[str] = []
    bad: Bad | None = {} if config.drop_bad else None
    unread: set[int] = set()
    sets = {path: convert.read_whole(path, unread, bad, config.episodes, config.keys) for path in config.data}
    if config.do is Do.merge:
        if len(sets) < len(config.data):
            raise BurnishError("a set stands there twice; name each one once")
        episodes, notes = convert.merged(sets)
        twice = stats.repeated(episodes)
        notes += [f"{twice} of the episodes repeat another one"] * bool(twice)
    elif config.do is Do.mirror:
        (found,) = sets.values()
        episodes = mirrored(found, Mirror(config.flip, config.negate, config.swap, config.words))
    else:
        (found,) = sets.values()
        if bad:
            notes = [f"{len(bad)} of {len(found) + len(bad) + len(unread)} episodes cannot be used, and are left out:"]
            notes += [f"  episode {number}: {why}" for number, why in bad.items()]
        episodes = convert.selected(found, config.episodes, config.success, config.keys, {*unread, *(bad or ())})
        episodes = convert.renamed(episodes, pairs(config.rename, "rename"))
        if config.control_hz is not None:
            episodes = convert.at_rate(episodes, config.control_hz)
    for note in notes:
        say(note)
    totals = convert.write(episodes, out)
    unknown = NO_SUCCESS in episodes.meta.get("notes", ())
    how = "success unknown" if unknown else f"{totals['successes']} successful"
    say(f"{out}: {totals['episodes']} episodes, {totals['frames']} frames, {how}")


def _print(as_json: bool, found: Mapping[str, Any], lines: Iterable[str]) -> None:
    if as_json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")  # which escapes all that is not ASCII
        return
    for line in lines:
        say(line)


if __name__ == "__main__":
    raise SystemExit("write `burnish data`")
