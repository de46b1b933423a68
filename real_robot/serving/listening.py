"""Addresses of the policy server: 127.0.0.1, a socket of one user, or, only with a key, an address for others."""

from __future__ import annotations

import ipaddress
import os
import socket as sockets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from ...policies.core.errors import BurnishError
from ...policies.core.execute import Execution
from ...policies.core.files import remove
from ...policies.core.ranges import check_ranges

SHORTEST_KEY = 16  # characters
BACKLOG = 4096  # connections that the kernel holds for us; it takes its own limit where that is less


@dataclass
class ServerConfig:
    """Settings of the policy server: its address, and limits of clients and requests."""

    host: str = "127.0.0.1"  # address to listen on; beyond this machine only with a key, from BURNISH_API_KEY
    port: int = 8000  # port; 0: any that is free
    unix: str | None = None  # path of a socket with mode 0600, instead of host and port
    # our name of an observation: the one that clients give it, which is then taken too
    keys: dict[str, str] = field(default_factory=dict)
    clients: int = 16  # clients at once, at most
    batch: int = 64  # rows of one request, at most
    queue: int = 8  # requests that wait, at most
    rate_hz: float = 1000.0  # requests per second of one client, at most; a faster one waits
    handshake_s: float = 3.0  # time limit of the handshake of a connection, in seconds
    receive_s: float = 5.0  # time limit of the rest of a request that has begun, in seconds
    idle_s: float = 300.0  # seconds without a request until a connection is closed
    execution: Execution = Execution.eager  # execution of acting: eager, or on a GPU by CUDA graphs

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise BurnishError(f"port={self.port} must be a port, or 0 for any that is free")
        check_ranges(self, {"[1, inf)": "clients batch queue", "(0, inf)": "rate_hz handshake_s receive_s idle_s"})
        _address(self.host)

    @property
    def local(self) -> bool:
        return self.unix is not None or _address(self.host).is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Names are not looked up: what a name means is decided by others."""
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as error:
        raise BurnishError(f"host={host!r} is no address; write 127.0.0.1, or that of a network card") from error


def listen(config: ServerConfig, key: str | None) -> sockets.socket:
    """A socket that listens, or a refusal before a client could have dialled."""
    if not config.local and key is None:
        raise BurnishError(
            f"host={config.host} can be reached from other machines, so a key is needed: put one into BURNISH_API_KEY, "
            "or stay on 127.0.0.1 and tunnel (ssh -L 8000:localhost:8000)"
        )
    if key is not None and len(key) < SHORTEST_KEY:
        raise BurnishError(f"a key of {len(key)} characters can be guessed; take at least {SHORTEST_KEY} random ones")
    try:
        return _unix(Path(config.unix)) if config.unix is not None else _tcp(config)
    except OSError as error:
        where = f"unix={config.unix}" if config.unix is not None else f"port={config.port}"
        raise BurnishError(f"{where} cannot be listened on ({error.strerror or error}); choose another") from error


def _tcp(config: ServerConfig) -> sockets.socket:
    address = _address(config.host)
    family = sockets.AF_INET6 if address.version == 6 else sockets.AF_INET
    return sockets.create_server((str(address), config.port), family=family, backlog=BACKLOG)


def _unix(path: Path) -> sockets.socket:
    made = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        try:
            made.connect(str(path))
        except ConnectionRefusedError:
            remove(path)  # of a server that was killed
        else:
            made.close()
            raise OSError(f"a server answers at {path} already")
    before = os.umask(0o177)  # from the first moment on, nobody else can open it
    try:
        made.bind(str(path))
    finally:
        os.umask(before)
    made.listen(BACKLOG)
    return made
