"""An emulator in a process of its own says what has become of it."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest
from servo_plants import ProfilePlant

from burnish.real_robot.emulators import pty
from burnish.real_robot.emulators.pty import PtyProcess
from burnish.real_robot.errors import DeviceFault
from dynamixel_emulator import DynamixelChain


def broken() -> DynamixelChain:
    raise ValueError("no such chain")


def test_one_that_cannot_begin_is_noticed_at_once(capfd):
    began = time.monotonic()
    with pytest.raises(DeviceFault, match="ended with an error"), PtyProcess(broken):
        pass
    assert time.monotonic() - began < pty.PATIENCE_S / 2 and "no such chain" in capfd.readouterr().err


def test_one_that_dies_and_one_that_hangs_are_told_apart(monkeypatch):
    with PtyProcess(partial(DynamixelChain, [1, 2], ProfilePlant([2048, 2048]))) as device:
        assert device.motion()[1] == [2048, 2048]
        assert device.pid is not None
        monkeypatch.setattr(pty, "PATIENCE_S", 0.2)
        os.kill(device.pid, signal.SIGSTOP)
        with pytest.raises(DeviceFault, match=r"has not answered for 0\.2 s"):
            device.motion()
        os.kill(device.pid, signal.SIGKILL)
        monkeypatch.setattr(pty, "PATIENCE_S", 20.0)
        with pytest.raises(DeviceFault, match="ended with an error"):
            for _ in range(3):  # the question that it had not read may still be on its way
                device.motion()
