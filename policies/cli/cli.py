"""`burnish <verb> key=value group=choice ...`: typed, composable, and every mistake is one sentence with exit status 2.

Configuration is composed by Hydra from the YAML of ``burnish.configs`` over the dataclasses of the code, converted once
to those dataclasses, and handed to the verb: nothing below an entry point sees Hydra or OmegaConf. (``@hydra.main`` is
not used, because it exits with status 1 and prints tracebacks for a misspelt key.)
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from importlib import import_module, resources
from typing import Any, NamedTuple

from ..core.errors import BurnishError, did_you_mean, plain, reason
from ..core.imports import named_modules
from .overrides import literal, quoted, require_literal
from .settings_text import beside, texts
from .verb_process import UNREAD, import_modules, unread


class Verb(NamedTuple):
    """One row of the table of verbs: its entry, its line of documentation and the short forms of its arguments."""

    entry: str  # "module:function"; the annotation of its parameter `config` is the schema
    doc: str
    words: tuple[str, ...] = ()  # settings that may be given by their values alone, in this order
    bare: str = ""  # the entry where no settings are given


VERBS: dict[str, Verb] = {
    "collect": Verb("burnish.sim.__main__:collect", "record demonstrations of a scripted expert or of a policy"),
    "data": Verb(
        "burnish.policies.data.__main__:data",
        "datasets: `data info|stats|show|convert FOLDER`, `data merge FOLDER FOLDER ...`",
        ("do", "data..."),
    ),
    "view": Verb("burnish.sim.__main__:view", "watch an expert or a policy: in a window, or as films without a screen"),
    "pretrain": Verb("burnish.policies.__main__:pretrain", "train a policy by imitation"),
    "offline": Verb("burnish.offline.__main__:offline", "improve a policy, or make one, from recordings with rewards"),
    "finetune": Verb("burnish.finetune.__main__:finetune", "refine a policy by letting it act"),
    "improve": Verb(
        "burnish.finetune.improve.__main__:improve",
        "a policy made better by the methods that fit it, which race on one budget of minutes or steps",
    ),
    "distill": Verb(
        "burnish.finetune.distillation.__main__:distill",
        "several policies, or a refined one with its base, into a single policy",
    ),
    "compare": Verb(
        "burnish.finetune.compare.__main__:compare", "every method from one checkpoint: same budget, same seeds"
    ),
    "evaluate": Verb(
        "burnish.policies.__main__:evaluate", "success of a policy on fixed seeds, alone or against another"
    ),
    "serve": Verb(
        "burnish.real_robot.__main__:serve", "a policy behind a websocket, for robots that speak openpi's protocol"
    ),
    "export": Verb("burnish.real_robot.__main__:export", "a policy as a bundle that a robot runs without torch"),
    "deploy": Verb("burnish.real_robot.__main__:deploy", "a policy on a robot, on its twin or on an emulated one"),
    "record": Verb("burnish.real_robot.__main__:record", "episodes of a person or an expert on a robot, as a dataset"),
    "report": Verb(
        "burnish.finetune.compare.report.__main__:report",
        "one page to look at, of a run, a comparison, or comparisons of several tasks",
    ),
    "quickstart": Verb("burnish.finetune.quickstart:quickstart", "a robot that fails, refined until it does not"),
    "worlds": Verb(
        "burnish.sim.external.recipes:worlds",
        "Python environments for worlds that cannot live in this one: `worlds add NAME`, `worlds list`",
        ("do", "name"),
    ),
    "policies": Verb(
        "burnish.policies.external.recipes:policies",
        "Python environments for policies of other libraries: `policies add lerobot`, `policies list`",
        ("do", "name"),
    ),
    "doctor": Verb(
        "burnish.finetune.doctor.__main__:doctor",
        "check this machine and say what to install; with policy.path=... or env=..., examine that policy or world",
        bare="burnish.policies.cli.doctor:doctor",
    ),
}

# Nodes of the schema are stored beside the YAML choices under this ending, and never shown.
SCHEMA = "_schema"
MANY = 40  # settings that a sentence still lists

# Hydra's store -> (group, name) -> the dataclass that it has; storing one takes milliseconds, and there are dozens.
_REGISTERED: dict[Any, dict[tuple[str | None, str], type]] = {}


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry of the command `burnish`: a verb is found and run, and a mistake becomes one line; exit status."""
    verb, *overrides = (sys.argv[1:] if arguments is None else arguments) or ["help"]
    try:
        status = run(verb, overrides)
        sys.stdout.flush()
        return status
    except BurnishError as error:
        sys.stderr.write(f"burnish {verb}: {error}\n")
        return 2
    except OSError as error:
        if isinstance(error, BrokenPipeError) and unread():
            return UNREAD
        # A full disk, a folder that is a file, no right to write: the system's own words name the place.
        place = f": {error.filename}" if error.filename else ""
        sys.stderr.write(f"burnish {verb}: {plain(f'{error.strerror or error}{place}')}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"burnish {verb}: interrupted\n")
        return 130


def run(verb: str, overrides: Sequence[str]) -> int:
    """One verb, with overrides composed into its typed configuration, or its help printed; exit status."""
    if verb in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return 0
    import_modules(named_modules())
    if verb not in VERBS:
        raise BurnishError(f"there is no verb {verb!r}; {did_you_mean(verb, VERBS)}")
    module_name, _, name = (VERBS[verb].entry if overrides else VERBS[verb].bare or VERBS[verb].entry).partition(":")
    module = import_module(module_name)
    entry: Callable[..., int] = getattr(module, name)
    schema = typing.get_type_hints(entry).get("config")
    wants_help = any(word in ("-h", "--help") for word in overrides)
    if schema is None:
        return entry()
    groups: Mapping[str, Mapping[str, type]] = module.GROUPS.get(verb, {})
    words = spelled_out(verb, [word for word in overrides if word not in ("-h", "--help")])
    if wants_help:
        sys.stdout.write(usage(verb, compose(verb, schema, groups, words), groups))
        return 0
    config = to_object(compose(verb, schema, groups, words))
    for group, kinds in groups.items():
        if (chosen := getattr(config, group, None)) is not None and type(chosen) not in kinds.values():
            raise BurnishError(f"this choice of {group} is not for this verb; choices: {', '.join(kinds)}")
    return entry(config)


def spelled_out(verb: str, words: Sequence[str]) -> list[str]:
    """``add NAME`` as ``do=add name=NAME``, of a verb with settings that need no names. One that ends with "..." is a
    list, and takes all that are left."""
    bare, found = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    for name in VERBS[verb].words:
        if name.endswith("...") and bare:
            found.insert(0, f"{name.removesuffix('...')}=[{','.join(map(quoted, bare))}]")
            bare = []
        elif bare:
            found.insert(0, f"{name}={bare.pop(0)}")
    return [*bare, *found]


def overview() -> str:
    """The text of `burnish --help`: usage, and each verb with its line of documentation."""
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {verb.doc}" for name, verb in VERBS.items()]
    return "\n".join(["usage: burnish <verb> [key=value] [group=choice] ... [--help]", "", *lines, ""])


def compose(verb: str, schema: type, groups: Mapping[str, Mapping[str, type]], overrides: Sequence[str]) -> Any:
    """The configuration of a verb as OmegaConf composed and checked it."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import errors

    known = _REGISTERED.setdefault(store := ConfigStore.instance(), {})
    vars(store)["__deepcopy__"] = lambda _: store  # Hydra copies for each command all that it holds, and changes none
    for group, kinds in {None: {verb: schema}, **groups}.items():
        for name, kind in kinds.items():
            if known.get((group, name)) is kind:
                continue
            known[group, name] = kind
            store.store(group=group, name=name + SCHEMA, node=kind)
            if group and not resources.files("burnish.configs").joinpath(group, f"{name}.yaml").is_file():
                store.store(group=group, name=name, node=kind)  # that of another package, which has no file here
    for word in overrides:
        if "=" not in word:
            raise BurnishError(f"{word!r} is not a setting; write key=value, and see `burnish {verb} --help`")
        if word[0] in "+~":
            raise BurnishError(f"{word!r} adds or removes a setting, but settings can only be changed; write key=value")
        require_literal(word)
        if re.match(r"hydra\b", word):
            raise BurnishError(f"{word!r} sets up Hydra, which only composes settings here; there is nothing to set")
        group = word.removesuffix("=null")
        if group != word and group in groups:
            raise BurnishError(f"{word!r} chooses nothing; leave it out, or choose one of {', '.join(groups[group])}")
    overrides = [_nested(literal(word, schema), schema, groups) for word in overrides]
    implied = [
        f"{group}={chosen}"
        for group, names in choices(groups).items()
        if (chosen := _implied(group, names, groups, overrides))
        and not any(word.startswith(f"{group}=") for word in overrides)
    ]
    overrides = [*implied, *overrides]
    # The keys of a mapping are the user's own: Hydra has to add them, and does so where it is told with two signs.
    words = [f"++{word}" if _is_mapping(word, schema, groups) else word for word in overrides]
    outer = GlobalHydra.instance().hydra  # of a program that uses Hydra itself
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("burnish.configs", version_base="1.3"):
            return hydra_compose(verb, overrides=words)
    except (HydraException, errors.OmegaConfBaseException) as error:
        raise BurnishError(_sentence(error, schema, groups, overrides)) from error
    finally:
        GlobalHydra.instance().hydra = outer


def _implied(
    group: str, names: Sequence[str], groups: Mapping[str, Mapping[str, type]], overrides: Sequence[str]
) -> str | None:
    """A setting of a group that has but one choice chooses it, and those of a checkpoint choose that."""
    given = {word.partition("=")[0].removeprefix(f"{group}.") for word in overrides if word.startswith(f"{group}.")}
    if not given or len(names) == 1:
        return names[0] if given else None
    usual = groups.get(group, {}).get("checkpoint")
    fits = usual is not None and given <= {field.name for field in dataclasses.fields(usual)}
    return "checkpoint" if fits else None


def _nested(word: str, schema: type, groups: Mapping[str, Mapping[str, type]]) -> str:
    """``method.inner=dsrl``, of a method within a method, in Hydra's words: its settings are then method.inner.bound
    and so on. Likewise ``twin=hopper``, which is a choice of the group that its field names, ``env``."""
    key, _, value = word.partition("=")
    if other := next((x.metadata.get("group") for x in dataclasses.fields(schema) if x.name == key), None):
        return word if value == "null" else f"{other}@{word}"
    group, _, name = key.partition(".")
    hints = [typing.get_type_hints(kind) for kind in groups.get(group, {}).values()]
    nests = any(kind.get(name) is Any for kind in hints) and value in choices(groups).get(group, ())
    return f"{group}@{key}={value}" if nests else word


def _is_mapping(word: str, schema: type, groups: Mapping[str, Mapping[str, type]]) -> bool:
    """Of the verb or of a group's choice; as a whole, or one of its entries."""
    first, name = (*word.partition("=")[0].split("."), "")[:2]
    places = [(schema, first), *((kind, name) for kind in groups.get(first, {}).values())]
    return any(typing.get_origin(typing.get_type_hints(kind).get(name)) is dict for kind, name in places)


def to_object(composed: Any) -> Any:
    """Real dataclasses; their ``__post_init__`` checks ranges and relations."""
    from omegaconf import OmegaConf, errors

    try:
        if missing := sorted(OmegaConf.missing_keys(composed)):
            raise BurnishError(f"{missing[0]}=... must be given; see --help")
        return OmegaConf.to_object(composed)
    except errors.OmegaConfBaseException as error:
        raise BurnishError(reason(error)) from error


def usage(verb: str, composed: Any, groups: Mapping[str, Mapping[str, type]]) -> str:
    """Groups with their choices, then every setting with its value as composed so far."""
    bare = "".join(f" [{name.upper()}]" for name in VERBS[verb].words)
    lines = [f"usage: burnish {verb}{bare} [key=value] [group=choice] ...", "", f"  {VERBS[verb].doc}", ""]
    text = resources.files("burnish.configs").joinpath(f"{verb}.yaml").read_text()
    used = {str(key) for key in composed} | ({"experiment"} if "experiment:" in text else set())
    shown = {group: names for group, names in choices(groups).items() if group in used}
    if shown:
        lines += ["groups"]
        lines += [f"  {group}={'|'.join(names)}" for group, names in sorted(shown.items())]
        lines += [f"  (choose a group first to see its settings: burnish {verb} policy=... --help)", ""]
    lines += ["settings", *(beside(f"  {key}={value}", text) for key, value, text in _leaves(composed, ""))]
    return "\n".join(lines) + "\n"


def choices(groups: Mapping[str, Mapping[str, type]]) -> dict[str, list[str]]:
    """Group -> names of its YAML files; in a group of the verb only those that stand on one of its dataclasses, and
    behind them those of other packages."""
    found: dict[str, list[str]] = {}
    for folder in resources.files("burnish.configs").iterdir():
        if not folder.is_dir():
            continue
        # Experiments on a task stand in a folder of its own.
        folders = {"": folder, **{f"{inner.name}/": inner for inner in folder.iterdir() if inner.is_dir()}}
        texts = {
            path + f.name.removesuffix(".yaml"): f.read_text()
            for path, inner in folders.items()
            for f in inner.iterdir()
            if f.name.endswith(".yaml")
        }

        def root(name: str, texts: Mapping[str, str] = texts) -> str:
            while name in texts:
                name = _first_default(texts[name])
            return name.removesuffix(SCHEMA)

        kinds = groups.get(folder.name)
        names = sorted(name for name in texts if kinds is None or root(name) in kinds)
        if kinds is not None:  # those of other packages have no file here
            roots = {root(name) for name in texts}
            names += [name for name in kinds if name not in roots]
        if folder.name == "experiment":  # those that choose a method are for the verbs that have one
            names = [name for name in names if ("override /method" in texts[name]) == ("method" in groups)]
        if names:
            found[folder.name] = names
    return found


@functools.cache
def _first_default(text: str) -> str:
    """The file on which the YAML file with this text stands."""
    from ..runs.manifest import plain_yaml

    return str(plain_yaml(text)["defaults"][0])


def _leaves(node: Any, path: str) -> list[tuple[str, str, str]]:
    """(whole name, value, text) of every setting."""
    from omegaconf import DictConfig, OmegaConf

    out: list[tuple[str, str, str]] = []
    kind = OmegaConf.get_type(node)
    help_texts = texts(kind) if kind is not None and dataclasses.is_dataclass(kind) else {}
    for key in node:
        name = f"{path}.{key}" if path else str(key)
        if OmegaConf.is_missing(node, key):
            out.append((name, "???  (must be given)", help_texts.get(key, "")))
            continue
        value = node[key]
        if isinstance(value, DictConfig) and len(value):
            out += _leaves(value, name)
        elif isinstance(value, Enum):
            out.append((name, f"{value.name}  ({'|'.join(type(value).__members__)})", help_texts.get(key, "")))
        else:
            out.append((name, "null" if value is None else str(value), help_texts.get(key, "")))
    return out


def _sentence(
    error: Exception, schema: type, groups: Mapping[str, Mapping[str, type]], overrides: Sequence[str]
) -> str:
    """An error of Hydra or OmegaConf as one sentence of ours."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf import errors

    if isinstance(error, OverrideParseException):
        if str(error.override).startswith("--"):
            return f"settings have no dashes here: say {str(error.override).lstrip('-')} in place of {error.override}"
        return f'cannot read {error.override!r}; between brackets, text that is no plain word is in quotes: ["größe"]'
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = str(error.missing_cfg_file).partition("/")
        if group and choice.endswith(SCHEMA):
            return f"this choice of {group} is not for this verb; choices: {', '.join(groups[group])}"
        if group:
            return f"{group}={choice} is not a choice; {did_you_mean(choice, choices(groups).get(group, []))}"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, errors.OmegaConfBaseException):
        cause = cause.__cause__
    key = getattr(cause, "full_key", None) or _key_of(error, overrides)
    if "No match in the defaults list" in str(error):
        in_file = key == "env" and "world" in dict(_fields(schema, ""))
        how = "write it into a file, world=FILE, which `burnish doctor env=...` prints" if in_file else "leave it out"
        return f"there is no choice of {key} here; {how}"
    if isinstance(cause, (errors.ConfigKeyError, errors.ConfigAttributeError)) or "not in struct" in str(error):
        return f"there is no setting {key!r}; {_nearest(key, schema, groups, overrides)}"
    if isinstance(cause, errors.ValidationError):
        return f"{key}: {reason(cause)}"
    return reason(error)


def _key_of(error: Exception, overrides: Sequence[str]) -> str:
    for word in overrides:
        name = word.partition("=")[0].lstrip("+~")
        if f"'{name}'" in str(error):
            return name
    return ""


def _nearest(key: str, schema: type, groups: Mapping[str, Mapping[str, type]], overrides: Sequence[str]) -> str:
    known = {name for name, _ in _fields(schema, "")}
    picked = dict(word.split("=", 1) for word in overrides)
    for group, kinds in groups.items():
        for name, kind in kinds.items():
            if picked.get(group, name) == name:
                known |= {field for field, _ in _fields(kind, group)}
    if key in known or any(name.startswith(f"{key}.") for name in known):
        group, _, name = key.partition(".")
        having = [kind for kind, x in groups.get(group, {}).items() if name in dict(_fields(x, ""))]
        return f"choose {group}=... first ({'|'.join(having or choices(groups).get(group, []))})"
    tail = did_you_mean(key, known)
    return tail if tail.count(",") < MANY else f"none of the {len(known)} settings is like it; --help lists them"


def _fields(schema: type, path: str) -> list[tuple[str, Any]]:
    hints, out = typing.get_type_hints(schema), []
    for field in dataclasses.fields(schema):
        name = f"{path}.{field.name}" if path else field.name
        kind = hints[field.name]
        nested = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        out += _fields(kind, name) if nested else [(name, kind)]
    return out
