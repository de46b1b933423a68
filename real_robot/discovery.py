"""Robots by name: ours, and those of any package that is installed beside this one.

A package adds a robot by an entry point, without a change here:

    [project.entry-points."burnish.robots"]
    my_arm = "my_package.arm:make"          # make(config: Mapping[str, Any]) -> Adapter

Names are listed without importing anything; only the chosen one is imported. A configuration carries the name, never a
path to code. ``BURNISH_NO_PLUGINS=1`` leaves only ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..policies.core.errors import reason
from .adapter import Adapter
from .errors import Refused, RobotError

GROUP = "burnish.robots"
# name -> "module:function" in `drivers`.
OURS: dict[str, str] = {
    "twin": "twin:make",
    "dynamixel": "dynamixel:make",
    "feetech": "feetech:make",
    "universal": "universal:make",
}

Make = Callable[[Mapping[str, Any]], Adapter]


def names() -> list[str]:
    """The sorted names of all robots, ours and those of installed packages."""
    return sorted({*OURS, *_plugins()})


def make_adapter(name: str, config: Mapping[str, Any]) -> Adapter:
    """The adapter of that name, not configured: nothing has been opened yet."""
    make = _maker(name)
    try:
        made = make(dict(config))
    except RobotError:
        raise
    except Exception as error:  # of another package, at settings that it does not expect
        said = reason(error, named=True)
        raise Refused(f"the package of robot {name!r} does not take {dict(config)}: {said}") from error
    if not isinstance(made, Adapter):
        raise Refused(f"the package of robot {name!r} made a {type(made).__name__}, which is no Adapter")
    return made


def second_channel(name: str, config: Mapping[str, Any]) -> Callable[[], None] | None:
    """The function that stops that robot without the process that drives it, or None. It is made by the function
    ``second_channel`` in the module of the robot's ``make``, which is called with those settings. All that takes time
    (imports, files) is over when it returns, and nothing has been opened; the result may raise, and takes a bounded
    time."""
    prepare = getattr(import_module(_maker(name).__module__), "second_channel", None)
    return None if prepare is None else prepare(dict(config))


def _maker(name: str) -> Make:
    plugins = _plugins()
    if name in OURS:
        if name in plugins:
            raise Refused(f"a package adds a robot {name!r}, which is one of ours; it must choose another name")
        module, _, function = OURS[name].partition(":")
        return getattr(import_module(f".drivers.{module}", __package__), function)
    if name not in plugins:
        raise Refused(f"there is no robot {name!r}; choices: {', '.join(sorted({*OURS, *plugins}))}")
    try:
        return plugins[name].load()
    except (ImportError, AttributeError) as error:
        raise Refused(f"the package of robot {name!r} cannot be imported: {reason(error)}; install it again") from error


def _plugins() -> dict[str, EntryPoint]:
    if os.environ.get("BURNISH_NO_PLUGINS") == "1":
        return {}
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in found and found[point.name].value != point.value:
            raise Refused(
                f"two packages add a robot {point.name!r} ({found[point.name].value} and {point.value}); uninstall "
                "one, or set BURNISH_NO_PLUGINS=1"
            )
        found[point.name] = point
    return found
