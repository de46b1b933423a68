"""``burnish data convert`` and ``merge``: episodes of any format that is read here, as one LeRobot set.

A set appears at its place when it is whole, or never. The numbers that a reader has filled in stand in columns then, as
if they had been recorded; so the notes on them are kept with the set, and are read back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import BurnishError, did_you_mean
from ..core.spec import ActionSpec, EnvSpec, ObsSpec, dtype_of, require_like_actions, says_nothing
from ..runs.run import progress_bar
from . import lerobot_files, lerobot_sim_state
from .episodes import NO_LIMITS, NO_RATE, NO_REWARD, NO_SUCCESS, Bad, Episodes, scaled_actions
from .lerobot import LeRobotWriter, read_lerobot
from .lerobot_layout import extra_features
from .read import format_of, read_part


def read_whole(
    path: str, unread: set[int], bad: Bad | None = None, numbers: Sequence[str] = (), keys: Sequence[str] = ()
) -> Episodes:
    """A dataset with all that it holds: simulator states, and the kind of the robot in its ``meta``. Episodes that
    cannot be used go into ``bad`` where it is given. Pictures of LeRobot's that ``selected`` with these ``numbers`` and
    ``keys`` leaves out stay unread, and so do whole episodes where the format allows it, which go into ``unread``."""

    def part(total: int) -> list[int]:
        chosen = _chosen(numbers, total)
        unread.update({*range(total)}.difference(chosen))
        return chosen

    if format_of(path) != "lerobot":
        return read_part(path, bad, part if numbers else None)
    found = read_lerobot(path, bad, (lambda total: _chosen(numbers, total)) if numbers else None, keys)
    if robot := lerobot_files.read_info(Path(path)).get("robot_type"):
        found.meta.setdefault("robot_type", str(robot))
    if lerobot_sim_state.kept_in(path):
        states = lerobot_sim_state.read_sim_states(path)
        pairs = zip(found, [x for number, x in enumerate(states) if number not in (bad or ())], strict=True)
        found = replace(found, episodes=[replace(episode, sim_state=state) for episode, state in pairs])
    return found


def write(episodes: Episodes, out: str) -> dict[str, int]:
    """The set at ``out``; its numbers of episodes, frames and successes."""
    about = {
        "extra": episodes[0].extra,
        "names": episodes.names,
        "robot_type": episodes.meta.get("robot_type"),
    }
    with (
        LeRobotWriter(out, episodes.spec, episodes.meta, **about) as writer,
        progress_bar(len(episodes), "episode") as bar,
    ):
        for episode in episodes:
            writer.add(episode)
            bar.update(1)
        totals = writer.totals()
    return totals


def selected(
    episodes: Episodes,
    numbers: Sequence[str] = (),
    success: bool = False,
    keys: Sequence[str] = (),
    bad: Collection[int] = (),
) -> Episodes:
    """The episodes of ``numbers`` ("3", or "0:50" as in Python), or all; the successful ones of these; and the
    observations ``keys``, or all. Those of the numbers ``bad`` are missing in ``episodes``, and keep their numbers."""
    total = len(episodes) + len(bad)
    there = dict(zip((number for number in range(total) if number not in bad), episodes, strict=True))
    chosen = _chosen(numbers, total)
    found = {number: there[number] for number in chosen if number in there and (there[number].success or not success)}
    if not found:
        unknown = success and NO_SUCCESS in episodes.meta.get("notes", ())
        why = f": {NO_SUCCESS}" if unknown else ""
        raise _none(total, why)
    episodes = replace(episodes, episodes=list(found.values()), meta=_renumbered(episodes.meta, list(found)))
    shapes = episodes.spec.obs.shapes
    for key in keys:
        if key not in shapes:
            raise BurnishError(f"the set has no observation {key!r}; {did_you_mean(key, shapes)}")
    if not keys:
        return episodes
    return replace(
        episodes,
        episodes=[replace(episode, obs={key: episode.obs[key] for key in keys}) for episode in episodes],
        spec=replace(episodes.spec, obs=ObsSpec({key: shapes[key] for key in keys})),
        names={key: names for key, names in episodes.names.items() if key in (*keys, "action")},
    )


def _renumbered(meta: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """With the lists of episodes by the numbers that these have now."""
    now = {name: [i for i, number in enumerate(kept) if number in numbers] for name, numbers in _masks(meta).items()}
    return {**meta, "masks": now} if now else meta


def _masks(meta: Mapping[str, Any]) -> Mapping[str, list[Any]]:
    """The lists of episodes, by their names, where there are any."""
    masks = meta.get("masks")
    good = isinstance(masks, Mapping) and all(isinstance(numbers, list) for numbers in masks.values())
    return masks if good and masks is not None else {}


def renamed(episodes: Episodes, pairs: Sequence[tuple[str, str]]) -> Episodes:
    """With the names that a world has for its observations, as (old, new)."""
    shapes, names = episodes.spec.obs.shapes, dict(pairs)
    for old, new in names.items():
        if old not in shapes:
            raise BurnishError(f"the set has no observation {old!r}; {did_you_mean(old, shapes)}")
        if dtype_of(old) != dtype_of(new):
            raise BurnishError(f"rename={old}:{new} cannot be: pictures, and they alone, are called image.NAME")
    called = {key: names.get(key, key) for key in shapes}
    if len(set(called.values())) < len(called):
        raise BurnishError(f"rename={','.join(map(':'.join, pairs))} gives two observations one name")
    found = [replace(x, obs={called[key]: rows for key, rows in x.obs.items()}) for x in episodes]
    spec = replace(episodes.spec, obs=ObsSpec({called[key]: shape for key, shape in shapes.items()}))
    return replace(episodes, episodes=found, spec=spec, names={called.get(k, k): x for k, x in episodes.names.items()})


def at_rate(episodes: Episodes, hz: float) -> Episodes:
    """With the rate at which actions were sent, which only who recorded them knows."""
    if episodes.control_hz not in (None, hz):
        raise BurnishError(f"the set says {episodes.control_hz:g} actions a second, so control_hz={hz:g} has no place")
    notes = [note for note in episodes.meta.get("notes", ()) if note != NO_RATE]
    spec = replace(episodes.spec, control_hz=hz).checked()
    return replace(episodes, spec=spec, meta={**episodes.meta, "notes": notes})


def _chosen(numbers: Sequence[str], total: int) -> list[int]:
    chosen = list(dict.fromkeys(number for word in numbers or ":" for number in _range(word, total)))
    if not chosen:
        raise _none(total)
    return chosen


def _none(total: int, why: str = "") -> BurnishError:
    return BurnishError(f"none of the {total} episodes is chosen, so nothing is written{why}")


def _range(word: str, most: int) -> range:
    first, colon, last = word.partition(":")
    try:
        begin, end = (int(x) if x.strip() else None for x in (first, last))
    except ValueError:
        begin = end = None
        colon = ""
    if colon:
        return range(most)[begin:end]
    if begin is None or not 0 <= begin < most:
        raise BurnishError(f"there are no episodes {word!r:.40} of {most}; write 3, 0:50 (as in Python) or 0:50,60")
    return range(begin, begin + 1)


def merged(sets: Mapping[str, Episodes]) -> tuple[Episodes, list[str]]:
    """One set out of several (by name), with all their tasks and seeds; and sentences on what not all of them have."""
    rates = {hz for x in sets.values() if (hz := x.control_hz)}
    if len(rates) == 1:  # those that do not know theirs take the known one
        sets = {name: at_rate(x, *rates) for name, x in sets.items()}
    (first, base), *others = sets.items()
    for name, other in others:
        _require_same(first, base, name, other)
    said, every = [], [episode for episodes in sets.values() for episode in episodes]
    kinds = [extra_features(episode.extra) for episode in every]
    shared = [name for name in kinds[0] if all(kind.get(name) == kinds[0][name] for kind in kinds)]
    if left := sorted({name for kind in kinds for name in kind} - set(shared)):
        said.append(f"left out, because not all sets have them alike: {', '.join(left)}")
    states = [lerobot_sim_state.described(x.sim_state) if x.sim_state else None for x in every]
    same = all(state == states[0] for state in states)
    if not same:
        said.append("the simulator's states are left out, because not all sets have them alike")
    every = [
        replace(x, extra={name: x.extra[name] for name in shared}, sim_state=x.sim_state if same else None)
        for x in every
    ]
    metas = [{key: x for key, x in each.meta.items() if key not in ("notes", "masks")} for each in sets.values()]
    if any(meta.get("env") != metas[0].get("env") for meta in metas):
        said.append("the sets are of several worlds, so the new one names none: give env=... where one is needed")
    robots = [str(meta.get("robot_type") or "unknown") for meta in metas]
    if len({*robots}) > 1:
        said.append(f"not all sets name the same robot ({', '.join(dict.fromkeys(robots))}), so the new one names none")
    meta = dict(metas[0]) if all(x == metas[0] for x in metas) else _common(metas)
    for note, what in ((NO_REWARD, "rewards"), (NO_SUCCESS, "successes")):
        without = [name for name, x in sets.items() if note in x.meta.get("notes", ())]
        if 0 < len(without) < len(sets):
            said.append(
                f"no {what} in {', '.join(without)}, so those of all sets count as unknown; leave it out to keep them"
            )
    if notes := list(dict.fromkeys(note for episodes in sets.values() for note in episodes.meta.get("notes", ()))):
        meta["notes"] = notes
    names: dict[str, Any] = {}
    masks: dict[str, list[int]] = {}
    before = 0  # episodes, of the sets that come first
    for episodes in sets.values():
        names = {**episodes.names, **names}
        for name, numbers in _masks(episodes.meta).items():
            masks.setdefault(name, []).extend(before + i for i in numbers if type(i) is int)
        before += len(episodes)
    meta |= {"masks": masks} if masks else {}
    return Episodes(every, _spec(sets), meta, names), said


def _common(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    shared = {key: x for key, x in metas[0].items() if all(meta.get(key) == x for meta in metas)}
    return {**shared, "merged": list(metas)}


def _require_same(first: str, base: Episodes, name: str, other: Episodes) -> None:
    """Refuse two sets that cannot be one, with their first difference."""
    ours, theirs = base.spec, other.spec
    pairs: dict[str, tuple[Any, Any]] = {
        "observations": (sorted(ours.obs.shapes), sorted(theirs.obs.shapes)),
        **{f"{key} of shape": (shape, theirs.obs.shapes.get(key)) for key, shape in ours.obs.shapes.items()},
        "actions of dimension": (ours.action.dim, theirs.action.dim),
        "control_hz": (ours.control_hz, theirs.control_hz),
    }
    if ours.pixels and theirs.pixels:
        pairs["pictures that are"] = (ours.pixels, theirs.pixels)
    for key in base.names.keys() & other.names.keys():
        pairs[f"the names of {key}"] = (list(base.names[key]), list(other.names[key]))
    for what, (one, two) in pairs.items():
        if one != two:
            way = "; keep those of both: burnish data convert FOLDER out=... keys=..." if what == "observations" else ""
            raise BurnishError(f"{first} has {what} {one}, and {name} {two}, so they cannot be merged{way}")
    require_like_actions(first, ours.action_mode, name, theirs.action_mode)


def _spec(sets: Mapping[str, Episodes]) -> EnvSpec:
    """That of all: the limits of actuators where a set knows them, else the range of all data."""
    specs = [episodes.spec for episodes in sets.values()]
    known = {x.spec.action: name for name, x in sets.items() if NO_LIMITS not in x.meta.get("notes", ())}
    if len(known) > 1:
        (one, first), (two, second), *_ = known.items()
        raise BurnishError(
            f"{first} has actions between {one.low} and {one.high}, and {second} between {two.low} and {two.high}, so "
            "they cannot be merged"
        )
    low, high = np.min([x.action.low for x in specs], axis=0), np.max([x.action.high for x in specs], axis=0)
    action = next(iter(known), ActionSpec(tuple(low), tuple(high)))
    for name, episodes in sets.items():
        try:
            scaled_actions(episodes, action)
        except BurnishError as error:
            raise BurnishError(f"{name} cannot be merged with {', '.join(known.values())}: its {error}") from error
    mode = next((x.action_mode for x in specs if not says_nothing(x.action_mode)), specs[0].action_mode)
    pixels, longest = next((x.pixels for x in specs if x.pixels), None), max(x.max_steps for x in specs)
    return replace(specs[0], action=action, action_mode=mode, pixels=pixels, max_steps=longest)
