"""``burnish doctor env=...``: an examination of a world as sentences, each problem with what to do about it, and a file
with which the world can be made again.

Two processes play the same episodes, on the same seeds and the same random actions, in opposite orders; one of them
saves an episode half way, and goes on in a fresh world.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from ...policies.cli.machine import say
from ...policies.core.config import from_data, to_data
from ...policies.core.errors import BurnishError, plain_text
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import derive
from ...policies.core.spec import ActionSpec
from ...policies.runs.manifest import plain_yaml
from ...policies.runs.stored_world import plain_world
from ..build import ENVS, env_name
from .examination import Seen, first_difference, look, speed, unchecked
from .settings import GymConfig

WIDTH = 110
EPISODES = 2  # that are compared
NOT_FINITE = "Training stops at such: mend the world, or let env.restart=true end the episode there."


@dataclass
class DoctorConfig:
    """The world, and how long it is examined."""

    env: Any = None  # the world to examine; without one it is the machine
    worlds: int = 8  # worlds whose joint speed is measured
    seconds: float = 10.0  # seconds of steps in each look at it; longer episodes are compared as far as that goes

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf)": "worlds", "(0, inf)": "seconds"})


class Line(NamedTuple):
    """A sentence of the examination, and its remedy where it names a problem."""

    text: str
    advice: str = ""


def doctor(config: DoctorConfig) -> int:
    """The examination of a world, printed, and its settings as a file; exit status."""
    if config.env is None:
        raise BurnishError("no world was named; give env=gym env.id=..., or nothing at all to examine the machine")
    for line in examined(config):
        said(*line)
    text = as_yaml(config.env)
    if read_back(text) != config.env:
        raise BurnishError(f"the settings of env={env_name(config.env)} cannot be written down as YAML: {text!r:.500}")
    unchecked(read_back(text), 1).reset()
    said(
        "This file makes it again, as was tried: for `burnish compare world=FILE`, or as an experiment.", refused(text)
    )
    sys.stdout.write("\n" + text)
    return 0


def said(text: str, advice: str = "") -> None:
    """A sentence and its remedy, wrapped and printed."""
    say("\n".join(textwrap.wrap(plain_text(text), WIDTH, subsequent_indent="  ")))
    if advice:
        say("\n".join(textwrap.wrap(plain_text(advice), WIDTH, initial_indent="  > ", subsequent_indent="    ")))


def refused(text: str) -> str:
    """Why the word of a file, which might be a stranger's, is not enough for this world."""
    try:
        plain_world(plain_yaml(text).get("env", {}), "it")
    except BurnishError as error:
        return f"A later command refuses this world where only this file, a checkpoint or a dataset names it: {error}."
    return ""


def examined(config: DoctorConfig) -> Iterator[Line]:
    """The sentences, each as soon as it is known."""
    world, seeds = config.env, [derive(0, "doctor", i) for i in range(EPISODES)]
    seen = look(world, dict.fromkeys(seeds), config.seconds, restores=True)
    yield from described(world, seen)
    yield quickness(config, seen)
    lengths = {seed: len(seen.prints[seed]) - 1 for seed in reversed(seeds)}
    again = look(world, lengths, config.seconds)
    if again.not_finite and not seen.not_finite:
        yield Line(f"Played once more it gave a number that is not finite: {again.not_finite}.", NOT_FINITE)
    yield seeding(seen, again)
    yield restoring(seen)


def described(world: Any, seen: Seen) -> Iterator[Line]:
    """The sentences on a world's observations, actions, rate, length and success."""
    spec = seen.spec
    use = "gives numbers that are not finite" if seen.not_finite else "can be used"
    yield Line(f"{seen.name} {use}. It observes {observations(seen)}.")
    if seen.not_finite:
        yield Line(f"The first was {seen.not_finite}.", NOT_FINITE)
    dim = spec.action.dim
    yield Line(f"Policies act in {dim} dimension{'s' * (dim > 1)}, {limits(spec.action)} ({spec.action_mode}).")
    assumed = seen.rate_from.startswith("assumed")
    who = "is assumed" if assumed else f"{seen.rate_from} says"
    yield Line(
        f"It is commanded {spec.control_hz:g} times a second, as {who}.",
        "If it is another rate, say env.control_hz=...; recordings and bundles remember it." if assumed else "",
    )
    yield Line(
        f"An episode has at most {spec.max_steps} steps, {spec.max_steps / spec.control_hz:.3g} seconds"
        + (f", but the world itself cut one off after {seen.cut}." if seen.cut else "."),
        f"Say env.max_steps={seen.cut}, if that is its limit." if seen.cut else "",
    )
    if not seen.drawn:
        how = "env.film=true" if hasattr(world, "film") else "'env.kwargs={render_mode: rgb_array}'"
        yield Line("It draws no pictures, so no films.", f"If it can, say {how}.")
    told = f"Success is read from {seen.success_from}"
    if seen.reported:
        won = "and random actions succeeded" if seen.won else "though random actions had none"
        yield Line(f"{told}. It was reported in the {seen.steps} steps that were played, {won}.")
    else:
        yield Line(
            f"{told}, but in the {seen.steps} steps that were played none was reported, not even its absence.",
            "Evaluations tell returns alone then."
            + (
                " Where the world knows of success, say how to read it: env.success=KEY of its info, "
                f"env.success=terminated, or env.success_reward=AMOUNT{seen.info_keys}."
                if isinstance(world, GymConfig)
                else ""
            ),
        )


def observations(seen: Seen) -> str:
    """The observations of a world in words: key, size, and the world's own names."""
    parts = []
    for key, shape in seen.spec.obs.shapes.items():
        size = f"{shape[0]} number{'s' * (shape[0] != 1)}" if len(shape) == 1 else " x ".join(map(str, shape))
        theirs = [name for name in seen.sources.get(key, ()) if name]
        parts.append(f"{key} ({size}{', of ' + ', '.join(theirs) if theirs else ''})")
    return ", ".join([*parts[:-2], " and ".join(parts[-2:])])


def limits(action: ActionSpec) -> str:
    """The limits of the actions in words, one pair where all are equal."""
    pairs = sorted(set(zip(action.low, action.high, strict=True)))
    if len(pairs) == 1:
        return f"between {pairs[0][0]:g} and {pairs[0][1]:g}"
    return "between " + ", ".join(f"{low:g} and {high:g}" for low, high in zip(action.low, action.high, strict=True))


def quickness(config: DoctorConfig, seen: Seen) -> Line:
    """The sentence on steps per second, of one world and of all together."""
    together, place = speed(config.env, config.worlds, min(config.seconds, 3.0))
    alone = seen.steps / max(seen.stepping_s, 1e-9)
    return Line(
        f"One world alone makes {alone:,.0f} steps a second, {config.worlds} worlds in {place} make "
        f"{together:,.0f} together."
    )


def seeding(seen: Seen, again: Seen) -> Line:
    """The sentence on whether equal seeds give equal episodes in two processes."""
    for seed, prints in seen.prints.items():
        if (place := first_difference(prints, again.prints[seed])) is not None:
            where = "from their first observation on" if place == 0 else f"from step {place} on"
            return Line(
                f"Equal seeds do not give equal episodes: two processes played the same actions, and saw other things "
                f"{where}.",
                "Evaluations in it are not paired: compare policies on more episodes. If its constructor takes a seed, "
                "or a package of its own draws, hand in what makes it repeat: 'env.kwargs={seed: 0}'.",
            )
    same = "Equal seeds give equal episodes: two processes played the same actions, and saw the same"
    steps = " and ".join(str(len(prints) - 1) for prints in seen.prints.values())
    one, other = seen.prints.values()
    if first_difference(one, other) is None:
        return Line(
            f"{same} in {steps} steps. But other seeds give the same episode again.",
            "Evaluations on many seeds tell no more than one. If it has several tasks or starts, its constructor may "
            "choose: env.kwargs={...}.",
        )
    return Line(f"{same} in {steps} steps, bit for bit. Other seeds give other episodes.")


def restoring(seen: Seen) -> Line:
    """The sentence on whether a state can be saved and restored."""
    if seen.restored:
        return Line(
            f"Its state cannot be saved and restored: {seen.restored}.",
            "Runs in it are saved all the same; one that is resumed begins its episodes anew, and does not repeat an "
            "uninterrupted one bit for bit.",
        )
    return Line("Its state can be saved in mid-episode: restored in a fresh world, it went on bit for bit.")


def as_yaml(world: Any) -> str:
    """Of the settings those that are not the defaults; an id always, since it is the name of the world."""
    usual = to_data(type(world)())
    named = not getattr(world, "address", None)  # else its server knows which one it is
    said = {
        key: x for key, x in to_data(world).items() if (key == "id" and named) or key not in usual or usual[key] != x
    }
    choice = {"defaults": [{"override /env": env_name(world)}], **({"env": said} if said else {})}
    return "# @package _global_\n" + yaml.safe_dump(choice, sort_keys=False, allow_unicode=True)


def read_back(text: str) -> Any:
    """The settings of a world, read from the YAML text that was written of them."""
    data = plain_yaml(text)
    return from_data(ENVS[data["defaults"][0]["override /env"]].config, data.get("env", {}), "env")
