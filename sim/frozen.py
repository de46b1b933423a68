"""Tasks whose numbers are quoted do not change: what they are made of is frozen by hash, one hash per task version.

Hashed are the model, the settings and their defaults, what goes in and out, every level of the expert with its errors,
and the recipe by which bases are imitated. A change of one of these raises the task's ``version`` and writes the table
anew by ``python -m burnish.sim.frozen``; the hashes of earlier versions stay. The code of observations and rewards is
not hashed: a change of that raises the version too.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..policies.core.config import to_data
from ..policies.core.files import replace
from .build import ENVS
from .experts import SCRIPTED

TABLE = Path(__file__).with_name("frozen.json")
RECIPE = "experiment/desk.yaml"


def variants(name: str) -> list[str]:
    """Every choice of ``env=`` that is this task: insert, insert_hidden, insert_tight."""
    choices = [file.name.removesuffix(".yaml") for file in files("burnish.configs").joinpath("env").iterdir()]
    return sorted(choice for choice in choices if choice == name or choice.startswith(f"{name}_"))


def contents(name: str) -> dict[str, Any]:
    """Everything that is frozen of a task, as plain data."""
    kind = ENVS[name]
    module, attribute = kind.builder.split(":")
    config = kind.config()
    task = getattr(importlib.import_module(f".{module}", __package__), attribute)(config)
    levels = importlib.import_module(f".experts.{name}", __package__).LEVELS
    configs = files("burnish.configs")
    return {
        "version": task.version,
        "mjcf": task.mjcf(),
        "config": to_data(config),
        "variants": {f"{n}.yaml": configs.joinpath("env", f"{n}.yaml").read_text() for n in variants(name)},
        "spec": asdict(task.spec),
        "experts": {level: repr(chosen) for level, chosen in levels.items()},
        "recipe": configs.joinpath(RECIPE).read_text(),
    }


def fingerprint(name: str) -> tuple[str, str]:
    """(version, hash) of a task as it stands."""
    made = contents(name)
    text = json.dumps(made, sort_keys=True, default=str)
    return str(made["version"]), hashlib.sha256(text.encode()).hexdigest()


def frozen() -> dict[str, dict[str, str]]:
    """Task -> version -> hash, as written down."""
    return json.loads(TABLE.read_text())


def changed(name: str) -> str | None:
    """A sentence if the task is not what was frozen under its version."""
    version, found = fingerprint(name)
    written = frozen().get(name, {}).get(version)
    if written is None:
        return f"{name} has no frozen version {version}: run `python -m burnish.sim.frozen`"
    if written != found:
        return (
            f"{name} is no longer what version {version} was: raise its version, then run "
            "`python -m burnish.sim.frozen`"
        )
    return None


def main() -> int:
    """Write the versions that are new; what a version once was is never overwritten."""
    table = frozen() if TABLE.exists() else {}
    for name in SCRIPTED:
        version, found = fingerprint(name)
        if table.setdefault(name, {}).setdefault(version, found) != found:
            sys.stderr.write(f"error: {changed(name)}\n")
            return 2
    replace(TABLE, json.dumps(table, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
