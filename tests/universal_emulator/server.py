"""The process of an emulated Universal Robots controller: its three ports, and the controller stepped in real time.

Started by `universal.UniversalEmulator`; orders come in and replies leave as JSON lines on standard input and output.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burnish.real_robot.clock import SECOND, MonotonicClock, ns
from burnish.real_robot.control.scheduling import hurry

from . import rtde
from .emulator import Trouble
from .polyscope import STEP_S, ArmSettings, Controller

RTDE, DASHBOARD, SCRIPT = 30004, 29999, 30003
FULL = 1 << 16  # bytes; a client that does not read loses packages, as it would on a controller
# More than so many steps late, time is lost instead of caught up: on a busy machine the controller's clock runs slowly,
# and its watchdog does not count a silence that was its own.
BEHIND_STEPS = 5


ANSWERS = {rtde.Kind.START: b"\x01", rtde.Kind.PAUSE: b"\x01", rtde.Kind.VERSION: b"\x01"}
SPOILED: Mapping[Trouble, tuple[str, Callable[[list[float]], list[float]]]] = {
    Trouble.NAN_Q: ("actual_q", lambda x: [float("nan"), *x[1:]]),
    Trouble.HUGE_Q: ("actual_q", lambda x: [1e9, *x[1:]]),
    Trouble.JUMP_Q: ("actual_q", lambda x: [x[0] + 0.5, *x[1:]]),
    Trouble.INF_QD: ("actual_qd", lambda x: [float("inf"), *x[1:]]),
    Trouble.HUGE_QD: ("actual_qd", lambda x: [1e6, *x[1:]]),
}


@dataclass(eq=False)
class _Client:
    connection: socket.socket
    port: int
    frames: rtde.Frames = field(default_factory=rtde.Frames)
    text: bytes = b""
    sending: bytearray = field(default_factory=bytearray)
    outputs: rtde.Recipe | None = None
    every: int = 1  # steps per package
    inputs: dict[int, rtde.Recipe] = field(default_factory=dict)
    started: bool = False
    last: bytes = b""
    held: deque[tuple[int, bytes]] = field(default_factory=deque)


class _Server:
    """One thread, one selector; steps the controller on absolute deadlines."""

    def __init__(self, address: str, settings: ArmSettings, seed: int) -> None:
        self.controller = Controller(settings, self._note)
        self._address = address
        self._clock = MonotonicClock()
        self._rng = np.random.default_rng(seed)
        self._troubles: dict[Trouble, float] = {}  # with its share of frames
        self._selector = selectors.DefaultSelector()
        self._clients: list[_Client] = []
        self._events: list[tuple[int, int, str]] = []
        self._wire: list[tuple[int, int, str, list[str]]] = []  # with the time and the step, as all of these
        self._motion: deque[tuple[int, int, list[float], list[float]]] = deque(maxlen=round(60 / STEP_S))
        self._orders = b""
        for port in (RTDE, DASHBOARD, SCRIPT):
            listener = socket.create_server((address, port), backlog=8)
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, port)
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ, None)

    def run(self) -> None:
        step_ns = ns(STEP_S)
        due_ns = self._clock.now_ns() + step_ns
        while True:
            events = self._selector.select(max(0.0, (due_ns - self._clock.now_ns()) / 1e9))
            now_ns = self._clock.now_ns()
            if now_ns - due_ns > BEHIND_STEPS * step_ns:
                due_ns = now_ns
            while due_ns <= now_ns:
                self.controller.step()
                c = self.controller
                self._motion.append((now_ns, c.steps, c.q.tolist(), c.qd.tolist()))
                due_ns += step_ns
                self._publish(last=due_ns > now_ns)
            for key, _ in events:
                if key.data is None:
                    if not self._order():
                        return
                elif isinstance(key.data, int):
                    self._accept(key.fileobj, key.data)
                elif key.data in self._clients:
                    self._receive(key.data)

    def _note(self, what: str) -> None:
        self._events.append((self._clock.now_ns(), self.controller.steps, what))

    def _hit(self, trouble: Trouble) -> bool:
        share = self._troubles.get(trouble)
        return share is not None and (share >= 1 or self._rng.random() < share)

    # Connections.

    def _accept(self, listener: Any, port: int) -> None:
        connection, _ = listener.accept()
        if Trouble.REFUSE in self._troubles:
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(connection, port)
        self._clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, client)
        if port == DASHBOARD:
            self._say(client, b"Connected: Universal Robots Dashboard Server\n")

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._selector.unregister(client.connection)
            client.connection.close()

    def _say(self, client: _Client, data: bytes) -> None:
        mute = Trouble.MUTE in self._troubles
        if mute or (client.port == DASHBOARD and Trouble.MUTE_DASHBOARD in self._troubles):
            return
        client.sending += data
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        try:
            sent = client.connection.send(client.sending)
        except BlockingIOError:
            return
        except OSError:
            self._drop(client)
            return
        del client.sending[:sent]

    def _receive(self, client: _Client) -> None:
        try:
            data = client.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
        elif client.port == RTDE:
            try:
                for kind, payload in client.frames.feed(data):
                    self._frame(client, kind, payload)
            except rtde.BadFrame as error:
                self._note(f"bad frame: {error}")
                self._drop(client)
        elif client.port == DASHBOARD:
            *lines, client.text = (client.text + data).split(b"\n")
            for line in lines:
                self._say(client, self.controller.ask(line.decode("utf-8", "replace")).encode() + b"\n")
        else:
            # A program ends with its outermost "end"; what is in between is nobody's business here.
            client.text += data
            if client.text.lstrip().startswith(b"def ") and b"\nend" in client.text[-64:]:
                client.text = b""
                self.controller.start_program()

    def _frame(self, client: _Client, kind: int, payload: bytes) -> None:
        if kind == rtde.Kind.DATA:
            recipe = client.inputs.get(payload[0] if payload else 0)
            if recipe is None:
                raise rtde.BadFrame("a package of no known recipe")
            values = recipe.unpack(payload)
            self._wire.append((self._clock.now_ns(), self.controller.steps, payload.hex(), list(recipe.names)))
            self.controller.receive(values)
        elif kind == rtde.Kind.CONTROLLER:
            version = b"".join(part.to_bytes(4, "big") for part in self.controller.settings.version)
            self._say(client, rtde.frame(rtde.Kind.CONTROLLER, version))
        elif kind == rtde.Kind.OUTPUTS:
            rate_hz = np.frombuffer(payload[:8], ">f8")[0]
            names = rtde.names_of(payload[8:])
            types = tuple(rtde.OUTPUTS.get(name, "NOT_FOUND") for name in names)
            client.every = max(1, round(1 / (STEP_S * rate_hz))) if rate_hz > 0 else 1
            found = "NOT_FOUND" not in types
            client.outputs = rtde.Recipe(1, names, types) if found else None
            self._say(client, rtde.frame(rtde.Kind.OUTPUTS, bytes([found]) + ",".join(types).encode()))
        elif kind == rtde.Kind.INPUTS:
            self._say(client, rtde.frame(rtde.Kind.INPUTS, self._input_recipe(client, rtde.names_of(payload))))
        elif kind in ANSWERS:
            client.started = kind == rtde.Kind.START or (client.started and kind != rtde.Kind.PAUSE)
            self._say(client, rtde.frame(rtde.Kind(kind), ANSWERS[rtde.Kind(kind)]))

    def _input_recipe(self, client: _Client, names: tuple[str, ...]) -> bytes:
        others = [recipe for other in self._clients if other is not client for recipe in other.inputs.values()]
        taken = {name for recipe in others for name in recipe.names}
        types = tuple("IN_USE" if name in taken else rtde.INPUTS.get(name, "NOT_FOUND") for name in names)
        number = 0
        if not {"IN_USE", "NOT_FOUND"} & set(types):
            number = len(client.inputs) + 1
            client.inputs[number] = rtde.Recipe(number, names, types)
        return bytes([number]) + ",".join(types).encode()

    # Packages.

    def _publish(self, last: bool) -> None:
        for client in [c for c in self._clients if c.started and c.outputs]:
            while last and client.held and client.held[0][0] <= self._clock.now_ns():
                client.sending += client.held.popleft()[1]
            if self.controller.steps % (client.every * (10 if Trouble.SLOW in self._troubles else 1)):
                continue
            if Trouble.MUTE_DATA in self._troubles or Trouble.MUTE in self._troubles or len(client.sending) > FULL:
                continue
            data = self._spoiled(client, self._package(client))
            held_s = self._held_s(client)
            if held_s > 0 or client.held:
                client.held.append((self._clock.now_ns() + ns(held_s), data))
            else:
                client.sending += data
        for client in list(self._clients):
            if last and client.sending:
                self._flush(client)

    def _held_s(self, client: _Client) -> float:
        """By how long its packages are late. A package held back keeps its place before later ones."""
        wanted_s = 0.05 if Trouble.LATE in self._troubles else 0.0
        if Trouble.LAG in self._troubles and client.inputs:
            wanted_s = 0.3
        left_s = (client.held[-1][0] - self._clock.now_ns()) / SECOND if client.held else 0.0
        return max(wanted_s, left_s)

    def _package(self, client: _Client) -> bytes:
        recipe = client.outputs
        assert recipe is not None
        if Trouble.FREEZE in self._troubles and client.last:
            return client.last
        values = self.controller.values(recipe.names)
        for name, kind in zip(recipe.names, recipe.types, strict=True):
            if values[name] is None:
                width = rtde.FORMATS[kind][0]
                values[name] = [0] * int(width) if width.isdigit() else 0
        if "timestamp" in values and Trouble.BACKWARD in self._troubles:
            values["timestamp"] -= 1.0
        if "timestamp" in values and Trouble.FORWARD in self._troubles:
            values["timestamp"] += 10.0
        for trouble, (name, spoil) in SPOILED.items():
            if name in values and self._hit(trouble):
                values[name] = spoil(values[name])
        client.last = rtde.frame(rtde.Kind.DATA, recipe.pack(values))
        return client.last

    def _spoiled(self, client: _Client, data: bytes) -> bytes:
        if self._hit(Trouble.GARBAGE):
            data = self._rng.bytes(int(self._rng.integers(1, 40))) + data
        if self._hit(Trouble.NOISE):
            at = int(self._rng.integers(3, len(data)))
            data = data[:at] + self._rng.bytes(1) + data[at + 1 :]
        if self._hit(Trouble.TRUNCATE):
            data = data[: int(self._rng.integers(1, len(data)))]
        if self._hit(Trouble.LENGTH):
            data = b"\xff\xff" + data[2:]
        if self._hit(Trouble.EMPTY):
            data = b"\x00\x00" + data[2:]
        if self._hit(Trouble.STRANGE):
            data = data[:2] + b"z" + data[3:]
        if self._hit(Trouble.TEXT):
            text = bytes([5]) + b"hello" + bytes([4]) + b"test" + b"\x03"
            data = rtde.frame(rtde.Kind.TEXT, text) + data
        return data

    # Orders of the process that started this one.

    def _order(self) -> bool:
        data = os.read(0, 1 << 16)
        *lines, self._orders = (self._orders + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            reply = json.dumps(self._obeyed(order["do"], order))
            sys.stdout.write(reply + "\n")
            sys.stdout.flush()
        return bool(data)

    def _obeyed(self, what: str, order: Mapping[str, Any]) -> Any:
        controller = self.controller
        if what == "trouble":
            self._troubles = {Trouble(name): share for name, share in order["troubles"].items()}
            controller.stuck, controller.deaf = Trouble.STUCK in self._troubles, Trouble.DEAF in self._troubles
        elif what == "drop":
            for client in [c for c in self._clients if order["port"] in (0, c.port)]:
                self._drop(client)
        elif what == "dashboard":
            return controller.ask(order["line"])
        elif what == "protective_stop":
            controller.protective_stop("emulated")
        elif what == "emergency_stop":
            controller.emergency_stop()
        elif what == "release_emergency_stop":
            controller.release_emergency_stop()
        elif what == "read":
            logs = {"wire": self._wire, "events": self._events, "motion": self._motion}
            return list(logs[order["log"]])[-order.get("rows", 0) :]
        elif what == "forget":
            self._wire.clear()
            self._events.clear()
            self._motion.clear()
        return True


def _main(address: str, settings: str, seed: str) -> None:
    server = _Server(address, ArmSettings(**json.loads(settings)), int(seed))
    hurry(priority=60)  # a controller is a machine of its own, however busy this one is
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    server.run()


if __name__ == "__main__":
    _main(*sys.argv[1:])
