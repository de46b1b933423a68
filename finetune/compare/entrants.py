"""Which command refines by a method: its name as an experiment of a task, as a method, or as a file of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from ...policies.cli.overrides import require_literal
from ...policies.core.config import from_data
from ...policies.core.errors import BurnishError, did_you_mean
from ...policies.runs.manifest import plain_yaml
from ...policies.runs.stored_world import plain_world
from ..build import decision_ticks
from ..people.intervened_rows import InterventionUse
from ..table import METHODS, ONLINE

Made = TypeVar("Made")
ANYWHERE = ("improve", "sparse")  # folders of experiments that fit any task with a success


class Entrant(NamedTuple):
    """A method under the name it has in the tables, and what is said of it on a command line."""

    label: str
    method: str
    words: list[str]
    decisions: int  # the budget, in the unit that a run counts in


def entrant(name: str, task: str | None, budget: int, execute: int) -> Entrant:
    """The command and label behind a name: an experiment of the task, or of another as ``TASK/NAME``, a method, or a
    YAML file."""
    other, _, last = name.rpartition("/")
    task, path = other or task, Path(name)
    experiments = _experiments(task)
    if last in experiments:
        text, words, label = experiments[last], [f"experiment={task}/{last}"], name.replace("/", "_")
    elif name in ONLINE:
        text, words, label = f"defaults: [override /method: {name}]", [f"method={name}"], name
    elif path.suffix in (".yaml", ".yml") and path.is_file():
        text, label = path.read_text(encoding="utf-8"), path.stem
        words = _said(_parsed(text, name), name)
    else:
        fits = [f"{folder}/{name}" for folder in ANYWHERE if name in _experiments(folder)]
        near = f"there is {' and '.join(fits)}" if fits else did_you_mean(name, {*experiments, *ONLINE})
        raise BurnishError(f"methods={name} is neither an experiment of {task}, nor a method, nor a YAML file; {near}")
    data = _parsed(text, name)
    method = next((word.removeprefix("method=") for word in _said(data, name) if word.startswith("method=")), None)
    if method is None or method not in ONLINE:
        raise BurnishError(f"{name} chooses no method: a line `- override /method: dsrl` under `defaults:` does")
    if METHODS[method].interventions is InterventionUse.taught and "expert" not in data:
        raise BurnishError(
            f"{name} learns from an expert who takes over, and nothing says which; take a YAML file in methods= with "
            f"the lines `defaults: [override /method: {method}]` and `expert: clean`"
        )
    given = {key: x for key, x in data.get("method", {}).items() if key in ("execute", "chunk", "view")}
    ticks = decision_ticks(from_data(ONLINE[method], given, "method"), execute)
    return Entrant(label, method, words, -(-budget // ticks))


def settled(entrant: Entrant, settings: Callable[[Sequence[str]], Made], *more: str) -> Made:
    """The settings of an entrant, as ``settings`` makes them of its words; a mistake says whose it is."""
    try:
        return settings([*entrant.words, *more])
    except BurnishError as error:
        raise BurnishError(f"the settings of {entrant.label} in methods= are wrong: {error}") from error


def _experiments(task: str | None) -> dict[str, str]:
    folder = resources.files("burnish.configs").joinpath("experiment")
    # The name of the task may be a checkpoint's word: it is compared, and never joined to a path.
    tasks = (inner for inner in folder.iterdir() if inner.name == task and inner.is_dir())
    files = (f for inner in tasks for f in inner.iterdir() if f.name.endswith(".yaml"))
    return {f.name.removesuffix(".yaml"): f.read_text(encoding="utf-8") for f in files}


def world_words(name: str | None, trusted: bool = False) -> list[str]:
    """The words for the world on each command line; nothing where it is the base's. Where the file ``name`` is
    ``trusted``, it says of the world what the user may say."""
    if name is None:
        return []
    path = Path(name)
    if not path.is_file():
        raise BurnishError(f"world={name} is no file; it holds settings of env, as a file of methods= may")
    words = _said(_parsed(path.read_text(encoding="utf-8"), name), name, trusted)
    if not any(word.startswith("env=") for word in words) or any(not word.startswith("env") for word in words):
        raise BurnishError(
            f"{name} must choose a world by a line `- override /env: insert` under `defaults:`, and say "
            f"nothing else than its settings under `env:`"
        )
    return words


def _parsed(text: str, name: str) -> Mapping[str, Any]:
    try:
        data = plain_yaml(text)
    except yaml.YAMLError as error:
        raise BurnishError(f"{name} is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(data, Mapping):
        raise BurnishError(f"{name} must hold settings as in configs/experiment, but it holds {data!r}")
    return data


def _said(data: Mapping[str, Any], name: str, trusted: bool = False) -> list[str]:
    """The settings of the file ``name`` as words of a command line, which are literal. Where it is not ``trusted``,
    they say of a world no more than a checkpoint's may."""
    try:
        words = list(_as_words(data))
        if not trusted:
            plain_world(data.get("env"), name, "; in a file of your own, say trust_world=true")
    except (AttributeError, RuntimeError, TypeError) as error:
        raise BurnishError(f"{name} must hold settings as in configs/experiment: {error}") from error
    return [require_literal(word, name) for word in words]


def _as_words(data: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Settings as one would type them: the choices under ``defaults`` first, then every number with its dotted name."""
    for choice in data.get("defaults", []) if not place else []:
        group, option = next(iter(choice.items())) if isinstance(choice, Mapping) else (choice, None)
        if option is not None:
            yield f"{str(group).removeprefix('override ').lstrip('/')}={option}"
    for key, value in data.items():
        if f"{place}{key}" == "env.kwargs":  # one setting, whose keys are the environment's own
            yield f"env.kwargs={_inline(value)}"
        elif isinstance(value, Mapping):
            yield from _as_words(value, f"{place}{key}.")
        elif place or key != "defaults":
            yield f"{place}{key}={'null' if value is None else json.dumps(value)}"


def _inline(value: Any) -> str:
    """As Hydra reads it: the keys of a mapping have no quotes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_inline(item)}" for key, item in value.items()) + "}"
    return f"[{', '.join(map(_inline, value))}]" if isinstance(value, list) else json.dumps(value)
