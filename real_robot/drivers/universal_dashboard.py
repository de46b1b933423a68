"""The dashboard of a Universal Robots controller: one line asked, one line answered. The second way to stop the arm.

ur-rtde's own client waits 2.5 s for a silent controller and holds the interpreter's lock meanwhile; a plain socket has
the limits that we give it.
"""

from __future__ import annotations

import socket

from ..errors import DeviceFault

PORT = 29999
LONGEST = 4096  # bytes of an answer


class Dashboard:
    """Connects for every question: they are rare, and what is not open cannot be stale."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address, self.timeout_s = address, timeout_s

    def ask(self, question: str) -> str:
        try:
            with socket.create_connection((self.address, PORT), self.timeout_s) as connection:
                connection.settimeout(self.timeout_s)
                rest = self._line(connection, b"")[1]  # the greeting
                connection.sendall(question.encode() + b"\n")
                return self._line(connection, rest)[0]
        except OSError as error:
            raise DeviceFault(
                f"the dashboard at {self.address}:{PORT} did not answer {question!r}: {error or 'silence'}; check the "
                "network cable, and that the controller is on"
            ) from error

    def _line(self, connection: socket.socket, rest: bytes) -> tuple[str, bytes]:
        while b"\n" not in rest:
            more = connection.recv(LONGEST)
            if not more or len(rest) > LONGEST:
                raise OSError("the connection closed")
            rest += more
        line, _, rest = rest.partition(b"\n")
        return line.decode("utf-8", "replace").strip(), rest
