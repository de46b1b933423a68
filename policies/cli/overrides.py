"""Settings of the command line in the grammar of Hydra, which reads less than a shell passes on."""

from __future__ import annotations

import os
import re
import typing

from ..core.errors import BurnishError


def require_literal(word: str, where: str = "a setting") -> str:
    """A setting is what it says. OmegaConf would look up ``${oc.env:KEY}``, and words may come from an untrusted file:
    what lies in the environment would go into run folders, checkpoints and error sentences."""
    if "${" in word:
        raise BurnishError(
            f"{where} holds '${{...}}' ({word!r:.120}), which is never looked up here; write the value itself, or let "
            "the shell fill it in: out=$HOME/runs"
        )
    return word


def literal(word: str, schema: type) -> str:
    """A setting in Hydra's grammar, which knows neither ``out=größe`` nor ``out=a#b``, and takes commas for a sweep:
    such a value in quotes, and ``key=a,b`` of a setting that is a list as ``key=[a,b]``."""
    key, _, value = word.partition("=")
    if value[:1] in tuple("[{'\""):
        return word  # the user writes that grammar
    many = typing.get_origin(typing.get_type_hints(schema).get(key)) is list
    values = [_at_home(x) for x in (value.split(",") if many else [value])]
    values = [x if _reads(x) else quoted(x) for x in values]
    return f"{key}=[{','.join(values)}]" if many else f"{key}={values[0]}"


def _at_home(value: str) -> str:
    """A shell leaves the ``~`` of ``out=~/runs`` as it is."""
    return os.path.expanduser(value) if value.startswith("~/") else value


def _reads(value: str) -> bool:
    """Hydra's grammar takes it for one value."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return not OverridesParser.create().parse_override(f"key={value}").is_sweep_override()
    except HydraException:
        return False


def quoted(value: str) -> str:
    """In Hydra's quotes, within which backslashes count where a quote follows."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), value) + "'"
