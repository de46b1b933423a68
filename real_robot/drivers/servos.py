"""The servos of an arm on a serial bus: what either family is asked for, and what both do in the same way.

A family adds its packets, its registers and its units (`feetech`, `dynamixel`); `bus` makes an arm of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..adapter import Vector
from ..clock import Clock, ns
from .port import LinkLost, Lost, Port

T = TypeVar("T")
Register = tuple[int, int]  # address and size

TRIES = 8  # for what is not done in a hurry: at ten percent losses one in a hundred million fails
ANSWER_S = 0.03
CALM_S = 0.1  # for an answer while nothing moves and no watchdog runs
SEND_S = 0.01


@dataclass(frozen=True, slots=True)
class Reading:
    """Of all servos, in the order of the bus, in their own direction."""

    ticks: Vector
    speed_rad_s: Vector
    effort_nm: Vector | None = None
    t_device_s: float | None = None


def insist(call: Callable[[], T]) -> T:
    """For what has to succeed before the arm may move, and does no harm twice."""
    for _ in range(TRIES - 1):
        with suppress(Lost):
            return call()
    return call()


def agreed(i: int, once: Callable[[], int]) -> int:
    """Two answers of servo ``i`` have to agree: one that is late, of another register, or that noise has bent, is taken
    for the first of them at most."""
    first = once()
    if once() != first:
        raise Lost(f"two answers of servo {i} differ")
    return first


class Servos(Protocol):
    """A family inherits from this class. All of these raise `Lost` where an answer is missing, and `DeviceFault` where
    one says what is wrong."""

    fastest_rad_s: float  # without load
    own: Sequence[tuple[int, int]] = ()  # ticks between which each takes goals, known since `identify`

    _clock: Clock
    _port: Port
    _handler: Any  # of the vendor's SDK
    _ids: Sequence[int] = ()

    @property
    def stall_nm(self) -> Sequence[float]:
        """The largest torque of each, known since `identify`."""
        ...

    def connect(self, port: Port, ids: Sequence[int]) -> None: ...
    def identify(self, offsets: Sequence[int], ranges: Sequence[tuple[int, int]]) -> int:
        """They are who they should be, set as the calibration was made, and without complaints; so many ns do they
        wait before they answer, one after the other."""
        ...

    def revive(self) -> None:
        """Those that have shut themselves down, where that takes no torque from an arm and gives none."""
        ...

    def read(self, deadline_ns: int) -> Reading: ...
    def send(self, ticks: Sequence[int], deadline_ns: int) -> None:
        """Goals for all; nobody answers."""
        ...

    def prepare(self, ticks: Sequence[int], velocity: Sequence[float], acceleration: float) -> None:
        """The profile, and goals that move nothing, confirmed by reading them back."""
        ...

    def arm(self, watchdog_s: float) -> None:
        """`Refused` where they cannot; 0 clears."""
        ...

    def disarm(self) -> None: ...
    def enable(self) -> None: ...
    def release(self) -> None: ...
    def load(self) -> Any:
        """The packet handler of the vendor's SDK; `Refused` where it is missing."""
        ...

    def freeze(self, measured: Callable[[], Reading]) -> None:
        """Stop them, and keep their torque, after they were moved by hand."""
        ...

    def _get(self, i: int, register: Register) -> int: ...
    def _checked(self, i: int, data: list[int], size: int, result: int, error: int) -> list[int]:
        """``data``, if the answer is whole and complains of nothing."""
        ...

    def _put(self, i: int, register: Register, value: int) -> None:
        address, size = register
        data = list(value.to_bytes(size, "little", signed=value < 0))

        def once() -> None:
            with self._port.exchange(self._clock.now_ns() + ns(CALM_S), patient=True):
                result, error = self._handler.writeTxRx(self._port, i, address, size, data)
                self._checked(i, [], 0, result, error)
            # Two late answers of another register agree too, now and then.
            if (found := self._get(i, register)) != value:
                raise Lost(f"servo {i} has {found} in register {address} where {value} was written")

        insist(once)

    def _tell(self, register: Register, value: int) -> None:
        """To all, three times: nobody answers to a packet for all."""
        for _ in range(3):
            self._send_all(register, [value] * len(self._ids), self._clock.now_ns() + ns(SEND_S))

    def _send_all(self, register: Register, values: Sequence[int], deadline_ns: int) -> None:
        address, size = register
        rows = [[i, *v.to_bytes(size, "little", signed=v < 0)] for i, v in zip(self._ids, values, strict=True)]
        parameters = [byte for row in rows for byte in row]
        with self._port.exchange(deadline_ns, settle=False):
            result = self._handler.syncWriteTxOnly(self._port, address, size, parameters, len(parameters))
        if result:
            raise LinkLost(f"goals could not be sent: {self._handler.getTxRxResult(result)}")
