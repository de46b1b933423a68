"""A crowd before the door of the policy server that has no key, and dials again as soon as it is sent away.

Like `hostile_lab` it imports nothing of ours. As a program (``python dialling_lab.py HOST PORT COUNT [KIND ...]``) it
keeps COUNT connections, says when all are there, and when its input ends, how often each kind came through, as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import sys
from collections import Counter
from functools import partial
from typing import Any

from hostile_lab import BINARY, HELLO, framed, packed

OFFER = HELLO.replace(b"Host: x", b"Host: x\r\nSec-WebSocket-Protocol: burnish.hmac-sha256")
GUESS = framed(BINARY, packed({"nonce": b"x" * 32, "proof": b"y" * 32}))
KINDS = {
    "silent": b"",  # connects, and says nothing
    "half": OFFER[:-2],  # half a greeting
    "plain": HELLO,  # a whole one, and no word of a key
    "wrong": HELLO.replace(b"Host: x", b"Host: x\r\nAuthorization: Api-Key of somebody else's"),
    "offer": OFFER,  # would prove the key, and then does not
    "guess": OFFER + GUESS,  # and proves it wrongly
}


class Dialler(asyncio.Protocol):
    def __init__(self, said: bytes, left: asyncio.Future[None]) -> None:
        self._said, self._left = said, left

    def connection_made(self, transport: Any) -> None:
        transport.write(self._said)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._left.done():
            self._left.set_result(None)


async def dial(host: str, port: int, kind: str, dialled: Counter[str]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        left = loop.create_future()
        try:
            await loop.create_connection(partial(Dialler, KINDS[kind], left), host, port)
            dialled[kind] += 1
            await left
        except OSError:
            await asyncio.sleep(0.01)


async def main(host: str, port: str, count: str, *kinds: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    dialled: Counter[str] = Counter()
    turns = itertools.islice(itertools.cycle(kinds or KINDS), int(count))
    crowd = [asyncio.create_task(dial(host, int(port), kind, dialled)) for kind in turns]
    while sum(dialled.values()) < int(count):
        await asyncio.sleep(0.05)
    sys.stdout.write("all are there\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for one in crowd:
        one.cancel()
    sys.stdout.write(json.dumps(dialled) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
