"""The workers of N worlds: each has a share, all get a request at the same time, and one that dies is replaced."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ...policies.core.errors import BurnishError, WorldError, plain
from ...policies.core.imports import named_modules
from ...policies.core.threads import usable_cores
from .links import Died, Failed, InProcess, Link, Process, Remote
from .recipes import WORLDS, maker_of
from .settings import GUESSES, GymConfig, RemoteConfig, packages_of, registered

_log = logging.getLogger(__name__)

Reply = tuple[dict[str, Any], bytes]
LARGEST = float(np.finfo(np.float32).max)
SHORT, IN_A_ROW = 10, 3  # steps of an episode, and episodes, of a world that fails for good; the latter of resets too


class Workers:
    """``lost`` (N,) marks the worlds whose episode an error has ended, or went with a worker that was replaced. While
    it is ``checked``, an environment that shows or pays what is not finite has failed."""

    checked = True

    def __init__(self, config: GymConfig, num_envs: int) -> None:
        self.config = config
        self.lost = np.zeros(num_envs, dtype=bool)
        self._recipe, self._expert, self._called = recipe_of(config), "", ""
        self._age, self._short = np.zeros((2, num_envs), dtype=int)  # steps of an episode; short ones in a row
        self._failures = 0
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
                return Remote(config.address, count, patience, config.said_success, config.max_steps)
            python, apart = interpreter(config), config.name is not None
            return Process(self._recipe, count, patience, python, apart, quiet=share.start > 0)
        if self._processes:
            return Process(self._recipe, count, patience, quiet=share.start > 0)
        return InProcess(self._recipe, count)

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
        self._age[chosen] = 0 if letter == b"r" else self._age[chosen] + (letter == b"s")
        self._short[self._age > SHORT] = 0
        died = self._ask(dict(enumerate(self.links)), letter)
        for k, error in died.items():
            self._replace(k, error, letter, chosen, begun)
        if letter == b"r" and self._expert:
            self.request(b"b", chosen, begun)

    def _ask(self, links: dict[int, Link], letter: bytes) -> dict[int, Died | Failed]:
        """Those that are to be replaced. An error of an expert, or without ``restart`` of an environment, is raised
        when all have answered; with it, a step ends that world's episode, and a reset is tried again."""
        died: dict[int, Died | Failed] = {}
        failed: Failed | None = None
        for step in ("begin", "finish"):
            for k, link in links.items():
                try:
                    if k not in died:
                        link.begin(letter) if step == "begin" else self._finish(k, link, letter)
                except Died as error:
                    died[k] = error
                except Failed as error:
                    if self.config.restart and (letter == b"r" or (letter == b"s" and error.world is None)):
                        died[k] = error
                    else:
                        failed = error
        if failed is not None:
            who = f"the expert beside {self.config.label}" if letter in b"bx" else self.config.label
            way_on = ""
            if letter == b"s" and (self.config.restart or self._age.max() <= 1):  # in the first step of all
                way_on = "; correct it"
            elif letter == b"s":
                way_on = "; with env.restart=true its episode alone would end"
            raise WorldError(f"{who} failed: {failed}{way_on}") from failed
        return died

    def _finish(self, k: int, link: Link, letter: bytes) -> None:
        """The answer of a link; where a world fails and may, those after it are asked once more."""
        mask, at, tries = link.arrays["mask"], -1, 0
        asked = mask.copy()
        while True:
            try:
                link.finish()
                break
            except Failed as error:
                if not self.config.restart or error.world is None or letter not in b"rs":
                    raise
                if not (0 <= error.world < link.count and mask[error.world]):
                    raise Died("it spoke of a world that it was not asked about") from error
                at, tries = error.world, tries + 1 if error.world == at else 1
                if letter == b"s":
                    self._give_up(k, at, error)
                elif tries >= IN_A_ROW:
                    raise
                mask[: at + (letter == b"s")] = False
                link.begin(letter)  # of none too: only an answer without an error has the others' results
        if self.checked and letter in b"rs":
            self._refuse_not_finite(k, link, letter, asked)

    def _refuse_not_finite(self, k: int, link: Link, letter: bytes, asked: np.ndarray) -> None:
        """What is infinite as float32 too, since all is learnt from in that type."""
        for name, x in link.arrays.items():
            checked = name.startswith("obs.") or (name == "reward" and letter == b"s")
            if not checked or x.dtype.kind != "f" or (np.abs(x) <= LARGEST).all():
                continue
            bad = ~(np.abs(x) <= LARGEST).reshape(link.count, -1).all(axis=1) & ~self.lost[self.shares[k]]
            for world in np.flatnonzero(bad & (asked > 0)).tolist():
                place = np.argwhere(~(np.abs(x[world]) <= LARGEST))[0].tolist()
                key = name.removeprefix("obs.")
                what = "its reward" if name == "reward" else f"number {place} of its observation {key}".rstrip()
                error = Failed(f"{what} is {x[(world, *place)]}; what is not finite as float32 cannot be learnt from")
                if not self.config.restart or letter != b"s":
                    raise error
                self._give_up(k, world, error)

    def _give_up(self, k: int, i: int, error: Failed) -> None:
        """The episode of a world, whose next reset begins another one."""
        world = self.shares[k].start + i
        self.lost[world] = True
        if self._always_short(slice(world, world + 1)):
            raise Failed(f"in {IN_A_ROW} episodes in a row within {SHORT} steps: {error}", i) from error
        self._warn(f"the episode of world {world} of {self.config.label} is truncated", error)

    def _always_short(self, worlds: slice) -> bool:
        """Whether the episodes of all of them, which end now, are short ones once too often."""
        self._short[worlds] += self._age[worlds] <= SHORT
        return bool((self._short[worlds] >= IN_A_ROW).all())

    def _warn(self, what: str, error: Exception) -> None:
        """At the first, second, fourth, eighth, ... failure."""
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            count = f"; {self._failures} so far, of which not each is told" if self._failures > 2 else ""
            _log.warning("%s: %s%s", what, error, count)

    def _replace(self, k: int, error: Exception, letter: bytes, chosen: np.ndarray, begun: np.ndarray) -> None:
        share = self.shares[k]
        if not self.config.restart:
            raise WorldError(
                f"the process with worlds {share.start} to {share.stop - 1} of {self.config.label} died ({error}); "
                "env.restart=true would replace it"
            ) from error
        if self._always_short(share):
            raise WorldError(
                f"the process with worlds {share.start} to {share.stop - 1} of {self.config.label} died ({error}) in "
                f"{IN_A_ROW} episodes in a row within {SHORT} steps; correct the environment"
            ) from error
        self._warn(f"worlds {share.start} to {share.stop - 1} of {self.config.label} are made anew", error)
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
        link.arrays["mask"][:] = chosen[share]
        anew = chosen[share] if letter == b"r" else np.zeros_like(chosen[share])
        self.lost[share] = begun[share] & ~anew
        if anew.any() and (again := self._ask({k: link}, letter)):
            raise WorldError(f"{self.config.label} failed again when it was made anew and reset ({again[k]})")

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
                raise WorldError(f"a process of {self.config.label} died ({error})") from error
            if failed is not None:
                raise failed
        return [found[i] for i in sorted(found)]

    def info_keys(self) -> list[str]:
        """Of the last infos in the first worker."""
        try:
            keys = self.of_each_world(b"i", lambda i: ({}, b"") if i == 0 else None)[0][0].get("keys")
        except Failed:  # a server that was started before there was this question
            return []
        return [plain(str(key), 60) for key in keys[:20]] if isinstance(keys, list) else []

    def take_on(self, expert: str, called: str = "") -> dict[str, Any]:
        """``module:callable``, called with each environment beside it; its result has ``reset`` and ``act``. Returned
        are its ``still`` and ``levels``, None where it has none. ``called``: the user's name of it."""
        self._expert, self._called = expert, called or expert
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
                f"expert={self._called} cannot be made beside {self.config.label} ({error}); name a callable of one "
                "environment, module:callable"
            ) from error

    def close(self) -> None:
        _close(self.links)

    def _not_made(self, error: Exception) -> str:
        config = self.config
        if isinstance(error, Failed) and error.ours:
            return str(error)
        given = f" with env.kwargs={config.kwargs}" if config.kwargs else ""
        why = plain(error, 1000).rstrip(".")
        why += "; what it printed, if anything, stands above" if isinstance(error, Died) else ""
        module = config.id.partition(":")[0]
        root = module.partition(".")[0]
        if f"No module named {root!r}" in str(error) and Path(f"{root}.py").is_file():
            return (
                f"env.id={config.id} cannot be made, since {module} lies in this folder, where Python does not look; "
                "say PYTHONPATH=. before the command"
            )
        return (
            f"env.id={config.id} cannot be made{given} ({why}); correct it, install what is missing, or name the "
            "package that registers it: env.package=..."
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
        "success": config.said_success,
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
