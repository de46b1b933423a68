"""Faults between a computer and a device: messages are lost, bent, cut, repeated or late, by a seeded chance.

`Faults` is plain data and says how often; `FaultInjector` rolls the dice. All emulators use them, each for its own
messages (a status packet, a frame of a stream), once for either direction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..clock import ns
from ..errors import Refused

CHANCES = ("drop", "corrupt", "burst", "truncate", "garbage", "delay", "duplicate")


@dataclass(frozen=True)
class Faults:
    """The chances are per message, and independent of each other."""

    drop: float = 0.0  # nothing arrives
    corrupt: float = 0.0  # one bit is flipped
    burst: float = 0.0  # two to six bytes in a row become noise
    truncate: float = 0.0  # the end is missing
    garbage: float = 0.0  # noise arrives before it
    delay: float = 0.0  # it arrives ``delay_s`` later
    duplicate: float = 0.0  # it arrives twice
    delay_s: float = 0.02
    mute: bool = False  # the device says nothing at all
    frozen: bool = False  # the device says again and again what it measured when this began
    encoder: bool = False  # it says where it was when this began, and all else as it is
    unplugged: bool = False  # the link itself is gone
    only: frozenset[int] | None = None  # the devices that suffer, where they have numbers; None: all

    def __post_init__(self) -> None:
        wrong = [f"{name}={getattr(self, name):g}" for name in CHANCES if not 0 <= getattr(self, name) <= 1]
        if wrong or not self.delay_s >= 0:
            raise Refused(
                f"chances lie between 0 and 1 and a delay is not negative: {', '.join(wrong) or self.delay_s}"
            )

    def concerns(self, device: int | None) -> bool:
        return self.only is None or device is None or device in self.only


NONE = Faults()


class Encoders:
    """The readings of the sensors of a chain: those that hang stay where they were when that began."""

    def __init__(self) -> None:
        self._said: dict[int, int] = {}

    def __call__(self, faults: Faults, device: int, ticks: int) -> int:
        if not (faults.encoder and faults.concerns(device)):
            self._said.pop(device, None)
            return ticks
        return self._said.setdefault(device, ticks)


class FaultInjector:
    """Turns a message into what arrives: pairs of a delay in ns and bytes."""

    def __init__(self, faults: Faults = NONE, seed: int = 0) -> None:
        self.faults = faults
        self._rng = np.random.default_rng(seed)

    def __call__(self, message: bytes, device: int | None = None) -> list[tuple[int, bytes]]:
        faults, rng = self.faults, self._rng
        if faults is NONE or not faults.concerns(device) or not message:
            return [(0, message)]
        # As many rolls for every message, whatever the chances are: other faults do not change who is hit.
        hit = dict(zip(CHANCES, rng.random(len(CHANCES)) < [getattr(faults, name) for name in CHANCES], strict=True))
        if faults.mute or hit["drop"]:
            return []
        spoiled = bytearray(message)
        if hit["corrupt"]:
            bit = int(rng.integers(8 * len(spoiled)))
            spoiled[bit // 8] ^= 1 << bit % 8
        if hit["burst"]:
            start, length = int(rng.integers(len(spoiled))), int(rng.integers(2, 7))
            noise = rng.bytes(min(length, len(spoiled) - start))
            spoiled[start : start + len(noise)] = noise
        if hit["truncate"]:
            del spoiled[int(rng.integers(len(spoiled))) :]
        if hit["garbage"]:
            spoiled[:0] = rng.bytes(int(rng.integers(1, 17)))
        late_ns = ns(faults.delay_s) if hit["delay"] else 0
        return [(late_ns, bytes(spoiled))] * (2 if hit["duplicate"] else 1)
