"""The workers of N worlds: each has a share, all get a request at the same time, and one that dies is replaced."""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ...policies.core.errors import BurnishError, plain
from ...policies.core.imports import named_modules
from ...policies.core.threads import usable_cores
from .links import Died, Failed, InProcess, Link, Process, Remote
from .recipes import WORLDS, maker_of
from .settings import GUESSES, GymConfig, RemoteConfig, packages_of, registered

Reply = tuple[dict[str, Any], bytes]
CONTINUE = "continue the run with resume=true"


class Workers:
    """``lost`` (N,) marks the worlds whose episode went with a worker that was replaced."""

    def __init__(self, config: GymConfig, num_envs: int) -> None:
        self.config = config
        self.lost = np.zeros(num_envs, dtype=bool)
        self._recipe, self._expert = recipe_of(config), ""
        self.links: list[Link] = []
        weakref.finalize(self, _close, self.links)
        self._processes = processes_of(config, num_envs)
        parts = max(1, self._processes)
        ends = [num_envs * k // parts for k in range(parts + 1)]
        self.shares = [slice(*pair) for pair in itertools.pairwise(ends)]
        try:
            self.links += [self._open(share) for share in self.shares]  # they make their worlds at the same time
            for link in self.links:
                link.ready()
        except (Died, Failed) as error:
            raise BurnishError(self._not_made(error)) from error
        self.description = self.links[0].description

    def _open(self, share: slice) -> Link:
        config, count = self.config, share.stop - share.start
        patience = config.patience_s
        if isinstance(config, RemoteConfig):
            if config.address is not None:
                return Remote(config.address, count, patience, config.success, config.max_steps)
            return Process(self._recipe, count, patience, interpreter(config), apart=config.name is not None)
        return Process(self._recipe, count, patience) if self._processes else InProcess(self._recipe, count)

    def where(self) -> str:
        kinds = {InProcess: "this process", Process: "a process of their own", Remote: "a server"}
        return kinds[type(self.links[0])] if len(self.links) == 1 else f"{len(self.links)} processes"

    def give(self, name: str, rows: np.ndarray) -> None:
        for link, share in zip(self.links, self.shares, strict=True):
            link.arrays[name][:] = rows[share]

    def get(self, name: str) -> np.ndarray:
        """(N, ...), a copy."""
        return np.concatenate([link.arrays[name] for link in self.links])

    def request(self, letter: bytes, chosen: np.ndarray, begun: np.ndarray) -> None:
        """To the worlds ``chosen`` (N,). ``begun`` (N,) are those in an episode, which may be lost in it."""
        self.give("mask", chosen)
        died = self._ask(self.links, letter)
        for k, error in died.items():
            self._replace(k, error, letter, chosen, begun)

    def _ask(self, links: list[Link], letter: bytes) -> dict[int, Died]:
        """An error of an environment is raised when all have answered."""
        died: dict[int, Died] = {}
        failed: Failed | None = None
        for step in ("begin", "finish"):
            for k, link in enumerate(links):
                try:
                    if k not in died:
                        link.begin(letter) if step == "begin" else link.finish()
                except Died as error:
                    died[k] = error
                except Failed as error:
                    failed = error
        if failed is not None:
            who = f"the expert beside {self.config.label}" if letter == b"x" else self.config.label
            raise BurnishError(f"{who} failed: {failed}") from failed
        return died

    def _replace(self, k: int, error: Died, letter: bytes, chosen: np.ndarray, begun: np.ndarray) -> None:
        share = self.shares[k]
        if not self.config.restart:
            raise BurnishError(
                f"the process with worlds {share.start} to {share.stop - 1} of {self.config.label} died ({error}); "
                f"{CONTINUE}, or let env.restart=true replace such a process"
            ) from error
        seen = self.links[k].arrays
        self.links[k].close()
        try:
            self.links[k] = link = self._open(share)
            link.ready()
        except (Died, Failed) as again:
            raise BurnishError(self._not_made(again)) from again
        self._take_on(link)
        for name, x in link.arrays.items():
            x[:] = seen[name]  # where the worlds were last seen, and what is asked of them
        anew = chosen[share] if letter == b"r" else np.zeros_like(chosen[share])
        self.lost[share] = begun[share] & ~anew
        if anew.any() and self._ask([link], letter):
            raise BurnishError(f"a process of {self.config.label} died again when its worlds were reset ({error})")

    def of_each_world(self, letter: bytes, content: Callable[[int], Reply | None]) -> list[Reply]:
        """A request to each world, with a header and data; None leaves a world out. Workers answer at the same time,
        and where an environment fails, the answers to the others are taken all the same: none is left for later."""
        found: dict[int, Reply] = {}
        failed: Failed | None = None
        for j in range(max(link.count for link in self.links)):
            asked = []
            try:
                for link, share in zip(self.links, self.shares, strict=True):
                    i = share.start + j
                    if i < share.stop and (said := content(i)) is not None:
                        link.begin(letter, {"world": j, **said[0]}, said[1])
                        asked.append((i, link))
                for i, link in asked:
                    try:
                        found[i] = link.finish()
                    except Failed as error:
                        failed = error
            except Died as error:
                raise BurnishError(f"a process of {self.config.label} died ({error}); {CONTINUE}") from error
            if failed is not None:
                raise failed
        return [found[i] for i in sorted(found)]

    def take_on(self, expert: str) -> dict[str, Any]:
        """``module:callable``, called with each environment beside it; its result has ``reset`` and ``act``. Returned
        are its ``still`` and ``levels``, None where it has none."""
        self._expert = expert
        first, *_ = [self._take_on(link) for link in self.links]
        return first

    def _take_on(self, link: Link) -> dict[str, Any]:
        try:
            if self._expert:
                link.begin(b"t", {"expert": self._expert})
                return link.finish()[0]
            return {}
        except (Died, Failed) as error:
            raise BurnishError(
                f"expert={self._expert} cannot be made beside {self.config.label} ({error}); name a callable of one "
                "environment, module:callable"
            ) from error

    def close(self) -> None:
        _close(self.links)

    def _not_made(self, error: Exception) -> str:
        config = self.config
        given = f" with env.kwargs={config.kwargs}" if config.kwargs else ""
        module = config.id.partition(":")[0]
        root = module.partition(".")[0]
        if f"No module named {root!r}" in str(error) and Path(f"{root}.py").is_file():
            return (
                f"env.id={config.id} cannot be made, since {module} lies in this folder, where Python does not look; "
                "say PYTHONPATH=. before the command"
            )
        return (
            f"env.id={config.id} cannot be made{given} ({plain(error, 1000).rstrip('.')}); correct it, install what is "
            "missing, or name the package that registers it: env.package=..."
        )


def recipe_of(config: GymConfig) -> dict[str, Any]:
    """The recipe of an environment, as `world_server.make` reads it."""
    here = not isinstance(config, RemoteConfig)
    named = [config.package] if config.package else []
    packages = [*dict.fromkeys([*named_modules(), *packages_of(config)])] if here else named
    name, kwargs = config.id, dict(config.kwargs or {})
    if not here and config.name is not None and not packages and ":" not in name:
        name, kwargs = maker_of(config.name), {**kwargs, "id": config.id, "max_steps": config.max_steps}
    return {
        "id": name,
        "kwargs": kwargs,
        "max_steps": config.max_steps,
        "success": config.success,
        "vector": config.vector,
        "packages": packages,
        "guesses": GUESSES if "/" not in config.id else (),
        "paths": [path or "." for path in sys.path] if here else [],
    }


def interpreter(config: RemoteConfig) -> str:
    """The Python interpreter of the workers: the one that is set, that of a recipe, or this one."""
    return config.python or (WORLDS.python(config.name) if config.name is not None else sys.executable)


def processes_of(config: GymConfig, num_envs: int) -> int:
    """By default a process for each core; none where the environment is known to this program alone, and none on
    Windows, whose processes inherit no sockets."""
    if config.processes is not None:
        return min(config.processes, num_envs)
    spec = registered(config.id)
    module = "" if spec is None or isinstance(spec.entry_point, str) else getattr(spec.entry_point, "__module__", "")
    root = module.partition(".")[0]
    if root == "__main__" or (root and find_spec(root) is None):
        return 0
    return min(usable_cores(), num_envs) if os.name == "posix" else 0


def _close(links: list[Link]) -> None:
    for link in links:
        link.close()
    links.clear()
