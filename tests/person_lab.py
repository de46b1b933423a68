"""Somebody at the keyboard beside an arm on a serial port, both made up: the driver and the vendor's SDK are real."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import verb_lab
from conftest import demand

import burnish.real_robot.__main__ as verbs
from burnish.real_robot import robots
from burnish.real_robot.emulators.pty import PtyProcess
from burnish.real_robot.emulators.so101 import calibration, so101
from burnish.real_robot.supervisor import Keyboard
from burnish.sim.mirror import Mirror
from burnish.sim.tasks.insert import InsertConfig

NEAR = 0.03  # rad: a servo's tick is 0.0015, and gravity bends the arm by some more


class Place:
    """An arm on a port, and somebody who does at the keyboard what a test has written down."""

    def __init__(self, bus: PtyProcess, folder: Path, measured: Any = None) -> None:
        self.body, self.bus, self.folder = Mirror(InsertConfig()), bus, folder
        self.asked: list[tuple[str, np.ndarray]] = []  # what, and where the arm was then
        self.went: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # from, to, and where the arm is afterwards
        self.keys: dict[int, str] = {}  # tick -> what is pressed
        self.going = False  # the arm is on its way to an episode's start
        calibration(self.body.mjcf).save(folder / "arm.json")
        if measured is not None:
            (folder / "arm.json").write_text(json.dumps(measured))
        ours, self.pressed = os.pipe()
        self.stream = os.fdopen(ours, encoding="utf-8")

    def at_rest(self) -> bool:
        before = self.bus.truth()
        time.sleep(0.2)
        return bool(np.abs(self.bus.truth() - before).max() < 1e-4)

    def words(self) -> list[str]:
        device = {"port": self.bus.path, "calibration": self.folder / "arm.json", "velocity": 4.0, "acceleration": 40.0}
        return [
            "robot=feetech",
            "safety.no_device_watchdog=true",
            "safety.stale_ramp_s=2",  # on a busy machine the emulated bus is silent for longer than a tenth of a second
            *(f"robot.device.{k}={x}" for k, x in device.items()),
        ]

    def write(self, text: str) -> None:
        self.asked.append((text, self.bus.truth()))
        os.write(self.pressed, b"\n")

    def flush(self) -> None: ...

    def layouts(self, seeds: list[int]) -> list[str]:
        found = []
        for seed in seeds:
            self.body.begin(seed)
            found.append(self.body.layout())
        return found


class Person(Keyboard):
    place: Place

    def __init__(self, coordinates: int) -> None:
        super().__init__(coordinates, self.place.stream, self.place)  # type: ignore[arg-type]
        self._tick = 0

    def ready(self, what: str) -> None:
        super().ready(what)
        self._tick = 0

    def poll(self, obs):
        if not self.place.going:
            os.write(self.place.pressed, self.place.keys.get(self._tick, "").encode())
            self._tick += 1
        return super().poll(obs)


def refused(capfd: Any, *words: str, verb: str = "deploy") -> str:
    """The one sentence, before anybody is asked for anything."""
    said = verb_lab.refused(capfd, verb, *words)
    assert "press Enter" not in said
    return said


@contextmanager
def someone(folder: Path, monkeypatch: Any, measured: Any = None) -> Iterator[Place]:
    """``measured``: the calibration, of any kind that can be read; by default the model's own."""
    demand("scservo_sdk")
    body = Mirror(InsertConfig())
    with PtyProcess(partial(so101, body.mjcf, body.begin(12345).tolist())) as bus:
        place = Place(bus, folder, measured)
        while not place.at_rest():  # without torque it gives way a little, until friction holds it
            time.sleep(0.1)
        go = robots._go

        def gone(link, here, there, gripper, stops):
            place.going = True
            go(link, here, there, gripper, stops)
            place.going = False
            place.went.append((here, there, bus.truth()))

        monkeypatch.setattr(robots, "_go", gone)
        monkeypatch.setattr(Person, "place", place, raising=False)
        monkeypatch.setattr(verbs, "Keyboard", Person)
        yield place
        place.stream.close()
        os.close(place.pressed)
