"""A policy server in a child process with a Python of its own, over a private socket: `lerobot_server.py`.

It is asked as `policies/wire/connection.py` asks a server, by ``ask``. The child ends with this process, at once where
it does not end by itself. Its words reach the terminal through here, escaped, because libraries print what checkpoints
say.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections import deque
from multiprocessing.connection import Connection
from typing import IO, Any

from ..core.errors import BurnishError, plain
from . import lerobot_server as server

LONGEST_LINE, QUOTED = 500, 3  # characters of a line of its words; lines that are quoted when it has died
ENDING_S = 2.0  # time that a child has to end by itself


class SideProcess:
    """``python`` with `lerobot_server.py`, which is sent ``first``; its answer, within ``start_s`` seconds, is the
    ``metadata``. Each later one has ``timeout_s``. ``where`` names it in sentences."""

    def __init__(self, python: str, first: dict[str, Any], where: str, *, start_s: float, timeout_s: float) -> None:
        if os.name == "nt":
            raise BurnishError(f"{where} cannot be played on Windows, where a process inherits no socket; use WSL")
        self.where, self.timeout_s = where, timeout_s
        ours, theirs = socket.socketpair()
        # A child that stands still neither reads nor finishes a message that it has begun.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(timeout_s) + 1, 0))
        words = [python, server.__file__, str(theirs.fileno()), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace",
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise BurnishError(f"{python} cannot be started ({error.strerror})") from error
        finally:
            theirs.close()
        self._connection, self._said = Connection(ours.detach()), deque[str](maxlen=QUOTED)
        self.close = weakref.finalize(self, _end, self._connection, self._process)
        assert self._process.stdout is not None
        self._words = threading.Thread(target=_tell, args=(self._process.stdout, self._said), daemon=True)
        self._words.start()
        self.metadata = self._asked(first, start_s, "policy.start_s")

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request."""
        return self._asked(message, self.timeout_s, "policy.timeout_s")

    def _asked(self, message: dict[str, Any], limit_s: float, setting: str) -> dict[str, Any]:
        try:
            server.send(self._connection, message)
            if not self._connection.poll(limit_s):
                self.close()  # a late answer would be taken for that of the next request
                raise BurnishError(f"{self.where} took longer than {setting}={limit_s:g} to answer")
            reply = server.receive(self._connection)
        except (EOFError, OSError, ValueError) as error:
            if isinstance(error, BurnishError):
                raise
            raise BurnishError(f"{self.where} has ended: {self._how()}") from error
        if "error" in reply:
            raise BurnishError(f"{self.where} failed: {plain(reply['error'], 1000)}")
        return reply

    def _how(self) -> str:
        self.close()
        self._words.join(ENDING_S)
        status = self._process.returncode
        ended = f"killed by signal {-status}" if status and status < 0 else f"status {status}"
        return f"{ended}{'; it said last: ' if self._said else ''}{'; '.join(self._said)}"


def _tell(stream: IO[str], said: deque[str]) -> None:
    with stream:
        for line in iter(lambda: stream.readline(LONGEST_LINE), ""):
            if line.strip():
                said.append(plain(line.rstrip()))
                sys.stderr.write(f"LeRobot: {said[-1]}\n")


def _end(connection: Connection, process: subprocess.Popen[str]) -> None:
    connection.close()
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
