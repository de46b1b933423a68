"""The three ways to the environments of `world_server.py`: in this process, in a worker process, on another machine.

All of them do the same: ``begin`` a request, ``finish`` it, and meet the worlds in ``arrays``. A worker shares its
memory with us by a file without a name, so a process that is killed leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import random
import re
import select
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...policies.core.errors import BurnishError, plain, reason
from ...policies.core.files import mapped, shared_memory
from . import world_server as server
from .settings import environment

SERVER = Path(server.__file__)
LARGEST_BLOCK = 1 << 32  # bytes of observations of one worker
NOT_THEIRS = re.compile(rf"^<|-packages/|/lib\d*/python\d|^{re.escape(str(SERVER.parent))}/|/world_server\.py:")
PATIENCE_S = 10.0  # for a server on another machine to answer for the first time


class Died(Exception):
    """The other side is gone; the text says how."""


class Failed(Exception):
    """The environment raised an error, or the expert beside it; the text is the error's, a sentence where Burnish
    raised it (``ours``). Those after ``world`` were not asked."""

    def __init__(self, text: str, world: Any = None, ours: bool = False) -> None:
        super().__init__(text)
        self.world, self.ours = world if isinstance(world, int) else None, ours


def failed(error: BaseException, world: Any = None) -> Failed:
    """An environment's error, of this process."""
    lines, ours = [x[:2] for x in traceback.extract_tb(error.__traceback__)], isinstance(error, BurnishError)
    text = str(error) if ours else reason(error, named=True) + at_line(lines)
    return Failed(text, world, ours)


def at_line(lines: Any) -> str:
    """Of the files and lines behind an error, the last of the user's own code, such as " (at /path/of.py:12)". Those of
    packages, of Python and of this file's folder are left out."""
    found = lines if isinstance(lines, list) else []  # another program may say anything
    named = [plain(":".join(map(str, x)), 300) for x in found if isinstance(x, Sequence)]
    own = [line for line in named if not NOT_THEIRS.search(line)]
    return f" (at {own[-1]})" if own else ""


class Link(Protocol):
    """The interface of a way to ``count`` environments: requests by one letter, and arrays that are shared."""

    count: int
    description: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def ready(self) -> None:
        """Waits until the worlds are made, and lays out the memory. All workers make theirs at the same time."""
        ...

    def begin(self, letter: bytes, header: Mapping[str, Any] | None = None, data: bytes = b"") -> None: ...

    def finish(self) -> tuple[dict[str, Any], bytes]: ...

    def close(self) -> None: ...


class InProcess:
    """The environments in this process itself."""

    def __init__(self, recipe: Mapping[str, Any], count: int) -> None:
        self.count = count
        ours = np.random.get_state(), random.getstate()  # making worlds begins them anew
        try:
            self._host = server.host_of(dict(recipe), count)
        except (Exception, SystemExit) as error:  # a worker would die of the latter
            raise failed(error) from error
        finally:
            server.dice(ours)

    def ready(self) -> None:
        self.description = checked(json.loads(json.dumps(self._host.describe(), default=lambda _: None)))
        layout = self._host.layout
        self._host.attach(bytearray(server.sizes(layout, self.count)[1]))
        self.arrays = self._host.arrays

    def begin(self, letter: bytes, header: Mapping[str, Any] | None = None, data: bytes = b"") -> None:
        self._request = (letter, dict(header or {}), data)

    def finish(self) -> tuple[dict[str, Any], bytes]:
        try:
            return self._host.answer(*self._request)
        except (Exception, SystemExit) as error:
            raise failed(error, getattr(self._host, "at", None)) from error

    def close(self) -> None:
        for world in self._host.worlds:
            with contextlib.suppress(Exception):
                world.close()


class Connected:
    """Over a socket; how the memory is shared, the two kinds below say."""

    count = 1
    _socket: socket.socket
    _given = 0  # bytes of the memory that travel with a request; none where it is shared
    _most = server.LONGEST  # bytes of an answer
    _patience: float  # seconds until the other side counts as dead
    _waiting = False  # for an answer, which an interrupt may leave half read: it is never taken for that of a later one

    def _make(self, count: int, **asked: Any) -> None:
        self.count = count
        self.begin(b"m", {"count": count, **asked})

    def ready(self) -> None:
        self.description = checked(self.finish()[0])
        layout = server.fields(self.description["observation"], math.prod(self.description["action"]["shape"]))
        given, size = server.sizes(layout, self.count)
        if size > LARGEST_BLOCK:
            raise BurnishError(f"{self.count} worlds would need {size:.3g} bytes of memory; take fewer worlds=")
        memory = self._memory(given, size)
        self.begin(b"a", {})
        self.finish()
        self.arrays = server.arrays(memory, layout, self.count)

    def _memory(self, given: int, size: int) -> Any:
        raise NotImplementedError

    def begin(self, letter: bytes, header: Mapping[str, Any] | None = None, data: bytes = b"") -> None:
        if self._waiting:
            raise Died("its last request was never answered, because it died or the request was interrupted")
        self._waiting = True
        # Worlds are made and begun one after the other, and each takes its time.
        self._socket.settimeout(self._patience * (self.count if letter in b"mrtb" else 1))
        try:
            server.send(self._socket, letter, dict(header or {}), data)
        except OSError as error:
            raise Died(self._how()) from error

    def _wait(self) -> None:
        """For an answer to begin. A pause of this process itself, as by Ctrl-Z, counts as one second at most."""
        left, answer = self._socket.gettimeout() or 0.0, select.poll()
        answer.register(self._socket, select.POLLIN)
        while not answer.poll(1000 * min(left, 1.0)):
            if (left := left - 1.0) <= 0:
                raise TimeoutError

    def finish(self) -> tuple[dict[str, Any], bytes]:
        try:
            self._wait()
            letter, header, data = server.receive(self._socket, self._most)
        except TimeoutError as error:
            waited = self._socket.gettimeout()
            raise Died(
                f"it has not answered for {waited:g} seconds; env.patience_s says how long it may take"
            ) from error
        except (EOFError, OSError) as error:
            raise Died(self._how()) from error
        except (ValueError, RecursionError) as error:
            raise Died(f"it sent no message of ours ({plain(error, 200)})") from error
        self._waiting = False
        if letter == b"e":
            text, kind = plain(header.get("text") or "", 2000), plain(header.get("kind", "error"), 80)
            if not (ours := kind == BurnishError.__name__):
                text = (f"{kind}: {text}" if text else kind) + at_line(header.get("lines"))
            raise Failed(text, header.get("world"), ours)
        return header, data

    def _how(self) -> str:
        return "the connection was closed"

    def close(self) -> None:
        self._socket.close()


class Process(Connected):
    """A worker in ``python``, by default in this one; one ``apart`` inherits no paths of modules, and a ``quiet`` one
    warns of nothing."""

    def __init__(
        self,
        recipe: Mapping[str, Any],
        count: int,
        patience: float,
        python: str = sys.executable,
        apart: bool = False,
        quiet: bool = False,
    ) -> None:
        if os.name != "posix":
            raise BurnishError("Windows hands no socket to a process; set env.processes=0, or serve the environment")
        self._socket, theirs = socket.socketpair()
        self._file = shared_memory()
        fds = (theirs.fileno(), self._file.fileno())
        words = [python, str(SERVER), "--inherited", *map(str, fds)]
        given = environment(apart, quiet)
        try:
            # What packages print goes where our own words do not: a worker has no business on standard output.
            self._process = subprocess.Popen(words, pass_fds=fds, env=given, stdin=subprocess.DEVNULL, stdout=2)
        except OSError as error:
            raise BurnishError(
                f"{python} cannot be started: {error.strerror}; name an interpreter of Python"
            ) from error
        finally:
            theirs.close()
        self._patience = patience
        self._make(count, recipe=recipe)

    def _memory(self, given: int, size: int) -> mmap.mmap:
        return mapped(self._file, size)

    def _how(self) -> str:
        try:
            status = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "it no longer answers"
        return f"killed by signal {-status}" if status < 0 else f"it ended with status {status}"

    def close(self) -> None:
        super().close()  # the worker reads its end, and goes
        self._file.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Remote(Connected):
    """Worlds of `world_server.py --listen` on another machine, whose key is in BURNISH_API_KEY on both."""

    def __init__(
        self, address: str, count: int, patience: float, success: str | None = None, max_steps: int | None = None
    ) -> None:
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S)
        except (OSError, ValueError, OverflowError) as error:
            raise BurnishError(
                f"env.address={address} cannot be reached ({plain(error, 200)}); start "
                f"`python world_server.py --listen {address} --id ...` there"
            ) from error
        server.keep(self._socket)
        self._patience = PATIENCE_S
        try:
            self._most = server.UNPROVEN
            self._prove(os.environ.get(server.KEY, ""))
            self._most = server.LONGEST
            self._patience = patience
            self._make(count, success=success, max_steps=max_steps)
        except BaseException:
            self.close()
            raise

    def _prove(self, key: str) -> None:
        """Both sides hold the key; neither sends it."""
        nonce = str(self.finish()[0].get("nonce", ""))
        if not nonce and key:
            raise BurnishError(
                f"the server of worlds proves no key, though {server.KEY} is set here; set it there too, or not here"
            )
        if not nonce:
            return
        if not key:
            raise BurnishError(f"the server of worlds asks for a key; set {server.KEY} to the one it has")
        mine = os.urandom(16).hex()
        self.begin(b"h", {"proof": server.proof(key, nonce, "client"), "nonce": mine})
        try:
            answer = self.finish()[0]
        except (Failed, Died) as error:
            raise BurnishError(f"the server of worlds refuses the key of {server.KEY} ({error})") from error
        if answer.get("proof") != server.proof(key, mine, "server"):
            raise BurnishError(f"the server of worlds does not hold the key of {server.KEY}, so it is not trusted")

    def _memory(self, given: int, size: int) -> bytearray:
        self._given, self._block = given, bytearray(size)
        return self._block

    def begin(self, letter: bytes, header: Mapping[str, Any] | None = None, data: bytes = b"") -> None:
        self._letter = letter
        super().begin(letter, header, bytes(self._block[: self._given]) if letter in b"rsxb" else data)

    def finish(self) -> tuple[dict[str, Any], bytes]:
        header, data = super().finish()
        if self._given and self._letter in b"rsxp":
            if len(data) != len(self._block) - self._given:
                raise Died("it sent an answer of another size")
            self._block[self._given :] = data
        return header, data

    _letter = b""
    _block = bytearray()


def checked(description: dict[str, Any]) -> dict[str, Any]:
    """The description that another program gives of its worlds, refused where it has not the form of ours."""
    try:
        if description["version"] != server.VERSION:
            raise BurnishError(
                f"the worlds speak version {description['version']!r:.20} of the protocol, we {server.VERSION}"
            )
        leaves, action = description["observation"], description["action"]
        good = isinstance(leaves, list) and 0 < len(leaves) <= 256 and _shaped(action)
        good = good and all(_shaped(x) and all(isinstance(key, str) for key in x["path"]) for x in leaves)
        ends = [action.get("low", []), action.get("high", [])]
        good = good and all(isinstance(x, (int, float)) for end in ends for x in end)
        good = good and all(len(end) == math.prod(action["shape"]) for end in ends if action["kind"] == "Box")
        rates, limit, drawn = (description[name] for name in ("rates", "max_steps", "render_mode"))
        good = good and all(isinstance(x, (int, float)) for x in rates.values())
        good = good and type(description["nondeterministic"]) is bool
        mode, notes = description["says"]["action_mode"], description["says"]["notes"]
        if not good or not isinstance(description.get("id", ""), str):
            raise TypeError
        # These may be anything in a world that does not mean us.
        description["max_steps"] = limit if type(limit) in (int, float) and 0 < limit < 1 << 31 else None
        description["render_mode"] = drawn if isinstance(drawn, str) else None
        notes = [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
        description["says"] = {"action_mode": mode if isinstance(mode, str) else None, "notes": notes}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BurnishError(
            "the worlds describe themselves in no form of ours; take the world_server.py of this version"
        ) from error
    return description


def _shaped(part: Mapping[str, Any]) -> bool:
    shape, dtype = part["shape"], part["dtype"]
    known = isinstance(part["kind"], str) and (not dtype or np.dtype(dtype).kind in "biuf")
    return (
        known and len(shape) <= 8 and all(type(x) is int and 0 <= x < 1 << 24 for x in shape) and len(part["kind"]) < 80
    )
