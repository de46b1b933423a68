"""Verbs in processes of their own, and the modules that the user wants imported before anything else.

A package that registers worlds with Gymnasium does so when it is imported. A shell says that in the environment:
``BURNISH_IMPORT=my_worlds burnish evaluate ...``. A program imports such a package itself. A child process inherits the
variable, but not what its parent has imported; so it is told those modules too, by `child_imports`.

Such a module is named by the user alone, in a shell or in a program. A checkpoint or a dataset cannot name one.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from ..core.errors import BurnishError, reason
from ..core.files import discard
from ..core.imports import VARIABLE, named_modules
from ..core.threads import CORES

UNREAD = 141  # exit status after the reader of stdout has left: 128 + SIGPIPE, as a shell gives it


def import_modules(names: Iterable[str]) -> None:
    """The user's own modules, imported by name; one that fails is a BurnishError with the reason."""
    for name in names:
        try:
            import_module(name)
        except Exception as error:  # it is the user's code, and may raise anything
            raise BurnishError(
                f"{VARIABLE} names {name}, which cannot be imported ({reason(error, named=True)}); install it, or add "
                "its folder to PYTHONPATH"
            ) from error


def unread() -> bool:
    """Whether the reader of stdout has left, as ``| head`` does; if so, further output is discarded."""
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(sys.stdout, 0)
    gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if gone:
        discard(sys.stdout)
    return gone


def registering_modules() -> list[str]:
    """The modules that have registered worlds with Gymnasium in this process, as far as their worlds tell: of each
    entry point the module, or the innermost package around it, that is imported already."""
    registry = getattr(sys.modules.get("gymnasium"), "registry", {})
    return sorted({registering_module(spec.entry_point) for spec in registry.values()} - {""})


def registering_module(entry_point: Any) -> str:
    """Of one entry point; empty where a child has no need of it or cannot import it."""
    return _imported(_module_of(entry_point))


def child_imports() -> list[str]:
    """The modules that a child process has to import first."""
    return list(dict.fromkeys([*named_modules(), *registering_modules()]))


def verb_command(words: Sequence[str], first: str = "pass") -> list[str]:
    """The command of ``burnish`` with ``words``, which imports from the same places; it runs ``first`` before that."""
    places, main = [str(place) for place in sys.path], "from burnish.policies.cli.cli import main; sys.exit(main())"
    return [sys.executable, "-c", f"import sys; sys.path[:] = {places}; {first}; {main}", *words]


def start_verb(words: Sequence[str], cores: int = 0, **options: Any) -> subprocess.Popen[Any]:
    """``burnish`` with ``words`` in a process of its own, which imports the same modules from the same places, and ends
    as by a SIGTERM if this one is killed. It keeps to ``cores`` (0: all). ``options`` are those of ``Popen``."""
    environment = {**os.environ, VARIABLE: ",".join(child_imports()), **({CORES: str(cores)} if cores else {})}
    tied = f"from burnish.policies.core.parent import die_with_parent; die_with_parent(parent={os.getpid()})"
    return subprocess.Popen(verb_command(words, tied), env=environment, **options)


def _module_of(entry_point: Any) -> str:
    """Gymnasium knows "module:attribute" and callables."""
    if isinstance(entry_point, str):
        return entry_point.partition(":")[0]
    return getattr(entry_point, "__module__", None) or ""


def _imported(module: str) -> str:
    """Empty where a child has no need of it or cannot import it."""
    package = module.partition(".")[0]
    if package in ("", "__main__", "burnish", "gymnasium") or not _can_be_found(package):
        return ""
    while module not in sys.modules and module != package:
        module = module.rpartition(".")[0]
    return module


def _can_be_found(package: str) -> bool:
    """In a fresh process. `importlib.util.find_spec` would answer from what is imported here."""
    return any(finder.find_spec(package, None) is not None for finder in sys.meta_path)
