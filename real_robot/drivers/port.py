"""The bytes below a vendor's packet layer: a serial port that does not spin, with a clock that does not jump.

The packet handlers of both SDKs ask a port for a dozen methods; `Port` has them. It replaces the SDKs' own because

* theirs spin on the processor for ``2 * 16 + 2`` ms when one reply is lost, three periods at 100 Hz, by a constant of
  the module, and measure that with ``time.time()``, which a time server may set back;
* Feetech's ``clearPort`` flushes what is to be sent and keeps what has arrived, so that a late reply is taken for the
  answer to the next question;
* an unplugged cable leaves ``is_using`` set, and the port "busy" for good.

So here waiting is a system call until the deadline, input is drained before every packet, after a loss the line has to
be quiet before the next one, and a lost link is one kind of error.
"""

from __future__ import annotations

import os
import select
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from ..clock import SECOND, Clock, ns
from ..errors import DeviceFault, Refused

T = TypeVar("T")

CHUNK = 4096


class Lost(DeviceFault):
    """A transaction without a usable answer. It may be tried again."""

    code = "lost"


class LinkLost(DeviceFault):
    """The fault of a serial port that is gone or silent."""

    code = "link"


class Wire(Protocol):
    """A source of bytes; raises OSError when it is gone."""

    def read(self, size: int) -> bytes:
        """The bytes that have arrived, without waiting."""
        ...

    def write(self, data: bytes) -> int: ...

    def wait(self, deadline_ns: int) -> None:
        """Until something has arrived, or the deadline."""
        ...

    def close(self) -> None: ...


def pyserial() -> Any:
    """The module ``serial``, or a refusal that says how to install it."""
    try:
        import serial
    except ImportError as error:
        raise Refused("serial ports need pyserial: pip install 'burnish[robots]'") from error
    return serial


class SerialWire:
    """A serial port of this machine, opened for this program alone."""

    def __init__(self, path: str, baudrate: int, clock: Clock) -> None:
        serial, self._clock = pyserial(), clock
        try:
            # Exclusive, because two programs on one bus take each other's answers.
            self._serial = serial.Serial(path, baudrate, timeout=0, exclusive=True)
        except (OSError, ValueError, termios.error) as error:
            raise LinkLost(
                f"the serial port {path} cannot be opened ({error}); check the cable, the name, your rights to it, and "
                "that no other program uses it"
            ) from error

    def read(self, size: int) -> bytes:
        return self._serial.read(size)

    def write(self, data: bytes) -> int:
        # Whole or not at all, without waiting; pyserial would wait for an adapter that takes nothing.
        return os.write(self._serial.fileno(), data)

    def wait(self, deadline_ns: int) -> None:
        left_ns = deadline_ns - self._clock.now_ns()
        if left_ns > 0:
            select.select([self._serial.fileno()], [], [], left_ns / SECOND)

    def close(self) -> None:
        with suppress(OSError, termios.error):
            self._serial.close()


class Port:
    """The methods in camel case are those that the packet handlers of the SDKs call."""

    def __init__(self, wire: Wire, clock: Clock, baudrate: int, latency_s: float, quiet_s: float) -> None:
        self.is_using = False
        self.is_open = True
        self.latency_ns = ns(latency_s)  # of the adapter and of the servos, on top of the bytes
        self.heard = 0  # bytes since the last packet was sent
        self._wire, self._clock, self._baudrate = wire, clock, baudrate
        self._quiet_ns = ns(quiet_s)
        self._byte_ns = 10 * SECOND / baudrate
        self._deadline_ns = self._packet_ns = 0
        # The last user of the line may have left an answer under way.
        self._dirty, self._patient = True, False

    @contextmanager
    def exchange(self, deadline_ns: int, settle: bool = True, patient: bool = False) -> Iterator[None]:
        """One question and its answers, over by the deadline; without ``settle``, a packet that nobody answers. With
        ``patient`` it waits until the deadline for each answer. An answer that the SDK cannot read is a `Lost`."""
        try:
            if self._dirty and settle:
                self._settle(deadline_ns)
            self._deadline_ns, self._patient = deadline_ns, patient
            yield
        except DeviceFault:
            self._dirty = True
            raise
        except (IndexError, ValueError, TypeError, UnboundLocalError) as error:
            self._dirty = True
            raise Lost(f"the answer was no packet ({error})") from error
        finally:
            self.is_using = False

    def close(self) -> None:
        self.is_open = False
        self._wire.close()

    def clearPort(self) -> None:
        self._drain()
        self.heard = 0

    def readPort(self, length: int) -> bytes:
        if length <= 0:
            return b""
        data = self._io(lambda: self._wire.read(length))
        if not data:
            self._wait(min(self._packet_ns, self._deadline_ns))
            data = self._io(lambda: self._wire.read(length))
        elif self._clock.now_ns() > self._deadline_ns:
            raise Lost("the time is over, and no answer is whole")  # an SDK would read noise for ever
        self.heard += len(data)
        return data

    def writePort(self, packet: Any) -> int:
        return self._io(lambda: self._wire.write(bytes(packet)))

    def setPacketTimeout(self, packet_length: int) -> None:
        soon_ns = self._clock.now_ns() + round(packet_length * self._byte_ns) + self.latency_ns
        self._packet_ns = self._deadline_ns if self._patient else soon_ns

    def setPacketTimeoutMillis(self, msec: float) -> None:
        self._packet_ns = self._clock.now_ns() + ns(msec / 1000)

    def isPacketTimeout(self) -> bool:
        return self._clock.now_ns() >= min(self._packet_ns, self._deadline_ns)

    def getBaudRate(self) -> int:
        return self._baudrate

    def _settle(self, deadline_ns: int) -> None:
        """A late answer must not become the answer to the next question: nothing in it says to which it belongs."""
        quiet_at_ns = self._clock.now_ns() + self._quiet_ns
        while self._clock.now_ns() < min(quiet_at_ns, deadline_ns):
            self._wait(min(quiet_at_ns, deadline_ns))
            if self._drain():
                quiet_at_ns = self._clock.now_ns() + self._quiet_ns
        if self._clock.now_ns() < quiet_at_ns:
            raise Lost("the line did not become quiet in the time that was left")
        self._dirty = False

    def _wait(self, until_ns: int) -> None:
        self._io(lambda: self._wire.wait(until_ns))

    def _drain(self) -> int:
        return len(self._io(lambda: self._wire.read(CHUNK)))

    def _io(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (OSError, termios.error, TypeError) as error:  # TypeError: pyserial's word for a port that was closed
            self.is_using = False
            raise LinkLost(
                f"the link to the servos is gone ({error}); check cable and power, then call recover()"
            ) from error
