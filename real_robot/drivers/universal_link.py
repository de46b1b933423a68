"""ur-rtde in a process of its own, which may hang or die without taking the control process along.

Measured with ur-rtde 1.6.5 against `tests/universal_emulator`: constructing its control interface holds the lock of the
interpreter, for ever if the controller accepts the connection and is silent; ``servoStop`` and ``disconnect`` of a dead
controller never return; a dropped connection is opened again behind the caller's back, the program uploaded once more
without its watchdog, and this often ends in a segmentation fault; ``servoJ`` to a dead controller returns True.
So the control process keeps a `Link` instead: messages over a socket pair, every wait with a limit, and whatever goes
wrong over there is a `DeviceFault` here. A connection that drops ends the process at once, before ur-rtde repairs it.

Where the control process dies, the socket closes: the link then stops the arm and ends. Where the link dies, the
controller's watchdog stops the program.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..clock import SECOND, Clock, MonotonicClock, ns
from ..errors import DeviceFault, Refused

POLL_S = 0.0005  # of ur-rtde's newest sample
PARTING_S = 1.0  # to stop the arm after the control process is gone
STARTED_S = 3.0  # for an uploaded program to run, and for a stopped one to be seen to have ended
RUNNING = 1 << 1  # of the robot's status: a program
VARIABLES = ("actual_q", "actual_qd", "actual_TCP_pose", "actual_TCP_force")
VARIABLES = (*VARIABLES, "robot_status_bits", "safety_status_bits", "timestamp")

SAMPLE = struct.Struct("=cqd6d6d6d6dIIII")
REPLY = struct.Struct("=cI?")
ORDER = struct.Struct("=cI6d")
LONGEST = 4096


@dataclass(frozen=True, slots=True)
class Sample:
    """One package of the arm's state: q (rad), qd (rad/s), tool pose, wrench, and status words."""

    t_ns: int  # when it was seen here
    t_device_s: float
    q: tuple[float, ...]
    qd: tuple[float, ...]
    tcp: tuple[float, ...]  # position and rotation vector
    wrench: tuple[float, ...]
    status: int
    safety: int
    answered: int  # the number of the set-point that ur-rtde has dealt with last, since ``activate``
    refused: int  # so many of them it did not send

    @classmethod
    def unpack(cls, data: bytes) -> Sample:
        _, t_ns, t_device_s, *x, status, safety, answered, refused = SAMPLE.unpack(data)
        q, qd, tcp, wrench = (tuple(x[first : first + 6]) for first in (0, 6, 12, 18))
        return cls(t_ns, t_device_s, q, qd, tcp, wrench, status, safety, answered, refused)


class Link:
    """The end that the control process holds. No call takes longer than it says."""

    def __init__(self, address: str, sample_hz: float, timeout_s: float, clock: Clock) -> None:
        self._clock = clock
        self._orders = 0
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        ours.setblocking(False)
        settings = json.dumps({"address": address, "sample_hz": sample_hz})
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), settings]
        null = subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, pass_fds=[theirs.fileno()])
        finally:
            theirs.close()
        self.newest: Sample | None = None
        self._replies: dict[int, tuple[bool, str]] = {}
        self._ended = ""
        try:
            self._wait(0, timeout_s, "connect")
        except (DeviceFault, Refused):
            self.close()
            raise

    def request(self, what: bytes, *numbers: float, timeout_s: float) -> None:
        """Until it is carried out over there."""
        self._orders += 1
        self._send(what, self._orders, numbers)
        self._wait(self._orders, timeout_s, what.decode())

    def servo(self, number: int, target: Sequence[float]) -> None:
        """Sent, not waited for: whether ur-rtde took it is told by the samples that follow."""
        self._send(b"q", number, target)

    def wait(self, timeout_s: float) -> None:
        """For news, so long at most; then all of it is read."""
        with suppress(OSError):
            select.select([self._socket], [], [], max(0.0, timeout_s))
        self.drain()

    def drain(self) -> None:
        while not self._ended:
            try:
                data = self._socket.recv(LONGEST)
            except BlockingIOError:
                return
            except OSError as error:
                data, self._ended = b"", str(error)
            if not data:
                self._ended = self._ended or "it died"
            elif data[:1] == b"s":
                self.newest = Sample.unpack(data)
            elif data[:1] == b"r":
                _, number, well = REPLY.unpack_from(data)
                self._replies[number] = well, data[REPLY.size :].decode("utf-8", "replace")
            else:
                self._ended = data[1:].decode("utf-8", "replace")

    def check(self) -> None:
        if self._ended:
            raise DeviceFault(f"the process that holds ur-rtde ended: {self._ended}; look at the robot, then recover()")

    def close(self) -> None:
        """The other process sees its socket close; where it does not end of itself, it is ended."""
        self._socket.close()
        self._ended = self._ended or "it was closed"
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=PARTING_S / 2)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=PARTING_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _send(self, what: bytes, number: int, numbers: Sequence[float]) -> None:
        self.check()
        try:
            self._socket.send(ORDER.pack(what, number, *numbers, *[0.0] * (6 - len(numbers))))
        except OSError as error:  # also where it has not read for long, and the socket is full
            raise DeviceFault(f"the process that holds ur-rtde does not listen: {error}") from error

    def _wait(self, number: int, timeout_s: float, what: str) -> None:
        deadline_ns = self._clock.now_ns() + ns(timeout_s)
        while number not in self._replies:
            left_s = (deadline_ns - self._clock.now_ns()) / SECOND
            if left_s <= 0:
                raise DeviceFault(f"ur-rtde did not finish {what!r} within {timeout_s:g} s")
            self.wait(left_s)
            if number not in self._replies:
                self.check()
        well, text = self._replies.pop(number)
        if not well:
            raise DeviceFault(text)


class _Other:
    """The end in the process of its own: one thread obeys, one reports."""

    def __init__(self, connection: socket.socket, address: str, sample_hz: float) -> None:
        from rtde_receive import RTDEReceiveInterface

        self._socket = connection
        self._address, self._sample_hz = address, sample_hz
        self._receive: Any = RTDEReceiveInterface(address, sample_hz, list(VARIABLES))
        self._control: Any = None
        self._servo: tuple[float, ...] = ()
        self._answered = self._refused = 0

    def run(self) -> None:
        threading.Thread(target=self._report, daemon=True).start()
        self._say(REPLY.pack(b"r", 0, True))
        while data := self._newest_order():
            what, number, *x = ORDER.unpack(data)
            if what == b"q":
                well = self._control is not None and self._control.servoJ(x, 0.0, 0.0, *self._servo)
                self._answered, self._refused = number, self._refused + (not well)
                continue
            try:
                text = self._activate(x) if what == b"a" else self._hold(x)
            except Exception as error:
                text = f"ur-rtde: {error}"
            self._say(REPLY.pack(b"r", number, not text) + text.encode())
        threading.Timer(PARTING_S, os._exit, [1]).start()
        self._hold([10.0])
        self._end()

    def _newest_order(self) -> bytes:
        """Set-points that queued up while this process was not scheduled would arrive in a burst: only the last counts.
        An empty one: the control process is gone."""
        data = self._socket.recv(LONGEST)
        while data[:1] == b"q":
            try:
                later = self._socket.recv(LONGEST, socket.MSG_DONTWAIT | socket.MSG_PEEK)
            except BlockingIOError:
                return data
            if later[:1] != b"q":
                return data
            data = self._socket.recv(LONGEST)
        return data

    def _activate(self, x: Sequence[float]) -> str:
        watchdog_hz, *servo = x
        self._servo, self._answered, self._refused = tuple(servo[:3]), 0, 0
        if self._control is None:
            from rtde_control import RTDEControlInterface

            self._control = RTDEControlInterface(self._address, self._sample_hz)  # uploads the program
        else:
            if not self._wait(lambda: not any(self._running())):
                return f"ur-rtde still sees the program {STARTED_S:g} s after it was stopped"
            self._control.reuploadScript()  # returns before the program runs
        if not self._wait(lambda: all(self._running())):
            return f"the control program does not run {STARTED_S:g} s after its upload"
        if watchdog_hz and not self._control.setWatchdog(watchdog_hz):
            return f"the controller did not arm its watchdog of {watchdog_hz:g} Hz; nothing was moved"
        return ""

    def _running(self) -> tuple[bool, bool]:
        """Whether the program runs, as each of ur-rtde's two streams has it. Threads of their own read them, so either
        may be late, and what one of them still says must not decide alone: a stop that had not come through made the
        program seem to run, and nobody uploaded it again."""
        return self._control.isProgramRunning(), bool(self._receive.getRobotStatus() & RUNNING)

    def _wait(self, holds: Callable[[], bool]) -> bool:
        clock = MonotonicClock()
        deadline_ns = clock.now_ns() + ns(STARTED_S)
        while not (held := holds()) and clock.now_ns() < deadline_ns:
            clock.sleep_until_ns(clock.now_ns() + ns(POLL_S))
        return held

    def _hold(self, x: Sequence[float]) -> str:
        # Both have seen it run since it was uploaded, so one that says no has seen it end.
        well = self._control is None or not all(self._running()) or self._control.servoStop(x[0])
        return "" if well else "the controller did not stop servoing"

    def _end(self) -> None:
        if self._control is not None and self._control.isProgramRunning():
            self._control.stopScript()

    def _report(self) -> None:
        clock, r, before = MonotonicClock(), self._receive, None
        while True:
            if not r.isConnected() or (self._control is not None and not self._control.isConnected()):
                self._say(b"f" + b"the connection to the controller dropped")
                os._exit(1)
            t = r.getTimestamp()
            if t != before:
                vectors = r.getActualQ(), r.getActualQd(), r.getActualTCPPose(), r.getActualTCPForce()
                status, safety = r.getRobotStatus(), r.getSafetyStatusBits()
                if r.getTimestamp() != t or any(len(x) != 6 for x in vectors):
                    continue  # the next package came in between
                before = t
                numbers = [number for x in vectors for number in x]
                counts = status, safety, self._answered, self._refused
                self._say(SAMPLE.pack(b"s", clock.now_ns(), t, *numbers, *counts))
            clock.sleep_until_ns(clock.now_ns() + ns(POLL_S))

    def _say(self, data: bytes) -> None:
        try:
            self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # the control process does not read, and will find the age of what it has
        except OSError:
            threading.Event().wait(PARTING_S)  # the other thread is stopping the arm
            os._exit(1)


def _main(fd: str, settings: str) -> None:
    connection = socket.socket(fileno=int(fd))
    try:
        other = _Other(connection, **json.loads(settings))
    except ImportError as error:
        text = f"a Universal Robots arm needs ur-rtde ({error}); pip install 'burnish[robots]'"
        connection.send(REPLY.pack(b"r", 0, False) + text.encode())
        return
    except Exception as error:
        connection.send(REPLY.pack(b"r", 0, False) + f"ur-rtde: {error}".encode())
        return
    try:
        other.run()
    finally:
        os._exit(0)  # without ur-rtde's own farewell, which may never end


if __name__ == "__main__":
    _main(*sys.argv[1:])
