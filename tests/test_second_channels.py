"""The second way to stop a robot, where the process that drives it has died or hangs: the drivers', the watchdog's.

The arms here brake softly (half a radian per second squared), so that one that is left alone goes on for a second.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.real_robot.adapter import Command, Mode
from burnish.real_robot.clock import ns
from burnish.real_robot.control import link as link_module
from burnish.real_robot.control.link import RobotLink
from burnish.real_robot.control.watchdog import GONE_S, Watch
from burnish.real_robot.discovery import second_channel
from burnish.real_robot.drivers.bus import UNGUARDED, ArmConfig
from burnish.real_robot.emulators.faults import Faults
from burnish.real_robot.emulators.line import Chain, Loopback
from burnish.real_robot.emulators.pty import PtyProcess
from burnish.real_robot.errors import DeviceFault, Refused, StaleState
from burnish.real_robot.safety.safe_robot import Safety
from bus_lab import CALIBRATION, Arms, Rig
from kill_lab import HIGH, RATE_HZ, Kill, dynamixel_chain, feetech_chain, in_motion, judged, settings
from soak import often
from universal_emulator.emulator import UniversalEmulator
from universal_lab import fresh_address

pytestmark = pytest.mark.real_time

SOFT = {"velocity": 1.0, "acceleration": 0.5, "profile_share": 1.0}
SAFETY = Safety(rate_hz=RATE_HZ, blend_s=0.0, start_gap_rad=10.0, following_rad=3.0, no_device_watchdog=True)
FAR = [3400, 3400, 3400, 3400, 3400, 2500]
SDKS = {"dynamixel": "dynamixel_sdk", "feetech": "scservo_sdk", "universal": "rtde_control"}
SLOWEST = 0.2  # rad/s, that the arms must have to count as moving
OTHERS = {"dynamixel": {"without_watchdog": UNGUARDED}, "feetech": {}}  # a watchdog would stop it as well
SAID = re.compile(r"silent for ([\d.]+) s, and was killed; stopped by its second channel in ([\d.]+) s")
CHAINS: dict[str, Callable[[], Chain]] = {"dynamixel": dynamixel_chain, "feetech": feetech_chain}


def speed(rig: Rig) -> float:
    return float(np.abs(rig.chain.motion(rig.clock.now_ns())[1]).max())


def left_in_motion(family: str, seed: int) -> Rig:
    """An arm on its way to a goal that a program has sent which is not there any more."""
    rig = Rig(family, seed, {**SOFT, **OTHERS[family]})
    rig.started()
    rig.arm.servos.send(FAR, rig.clock.now_ns() + ns(0.01))
    rig.wait(0.6)
    assert speed(rig) > SLOWEST
    return rig


@pytest.mark.parametrize("family", ["dynamixel", "feetech"])
def test_the_bus_of_servos_is_a_second_channel(require, family: str):
    """Within 0.1 s on a line that loses and bends two packets in a hundred, without turning back by a degree."""
    require(SDKS[family])
    for seed in range(often(20, 1000)):
        rig = left_in_motion(family, seed)
        rig.faults(Faults(drop=0.02, corrupt=0.02), Faults(drop=0.02, corrupt=0.02))
        arm, _ = Arms[family]
        config = ArmConfig("emulated", CALIBRATION, **SOFT, **OTHERS[family])
        other = arm(config, rig.clock, lambda rig=rig: Loopback(rig.chain, rig.clock))
        begun, began_ns = rig.chain.motion(rig.clock.now_ns())[0], rig.clock.now_ns()
        other.freeze()
        rig.wait(0.1 - (rig.clock.now_ns() - began_ns) * 1e-9)
        assert speed(rig) == 0
        rest, _ = rig.chain.motion(rig.clock.now_ns())
        assert all(servo.get(64 if family == "dynamixel" else 40) == 1 for servo in rig.chain.servos), "it would fall"
        assert np.abs(np.subtract(rest, begun)).max() < 100, "0.15 rad, and FAR is 1.3 away"
        rig.wait(1.0)
        assert rig.chain.motion(rig.clock.now_ns())[0] == rest
        rig.faults(Faults(), Faults())
        other.configure()  # and it can be used again
        here = other.activate(Mode.JOINT_POSITION).q
        now_ns = rig.clock.now_ns()
        other.write(Command(Mode.JOINT_POSITION, 1, now_ns, now_ns + ns(0.1), here + 0.05))
        rig.wait(1.5)
        with suppress(StaleState):  # after a pause two readings have to agree
            other.read(0.1)
        assert np.abs(other.read(0.1).q - here - 0.05).max() < 0.003


@pytest.mark.parametrize("family", ["dynamixel", "feetech"])
def test_without_it_the_arm_goes_on(require, family: str):
    require(SDKS[family])
    rig = left_in_motion(family, 0)
    for _ in range(5):
        rig.wait(0.1)
        assert speed(rig) > SLOWEST


@pytest.mark.parametrize("family", ["dynamixel", "feetech"])
def test_a_bus_that_somebody_has_is_left_alone(require, family: str):
    require(SDKS[family])
    with PtyProcess(CHAINS[family]) as device:
        arm = Arms[family][0](ArmConfig(device.path, CALIBRATION))
        arm.configure()
        stop_now = second_channel(family, settings(device.path))
        assert stop_now is not None
        with pytest.raises(DeviceFault, match="no other program uses it"):
            stop_now()
        arm.close()
        stop_now()


def test_a_channel_is_prepared_before_anything_moves():
    assert second_channel("twin", {}) is None
    with pytest.raises(Refused, match="address"):
        second_channel("universal", {})
    with pytest.raises(Refused, match="calibration"):
        second_channel("feetech", {"port": "x"})


# ---- the watchdog, with all processes ----


@contextmanager
def driven(robot: str, config: dict[str, Any], target: np.ndarray | None = None) -> Iterator[RobotLink]:
    with RobotLink(robot, config, SAFETY) as link:
        link.start()
        goal = link.state().q + 1.0 if target is None else target
        link.plan(np.repeat(goal[None], 64, axis=0), 0.05)
        yield link


def hung(device: PtyProcess, family: str) -> Kill:
    """The control process is stopped in motion; judged a second and a half later."""
    with driven(family, settings(device.path, **SOFT, **OTHERS[family]), HIGH) as link:
        time.sleep(1.2)
        at_ns = time.monotonic_ns()
        os.kill(link.pid, signal.SIGSTOP)
        time.sleep(1.5)
        found = judged(device, at_ns)
        os.kill(link.pid, signal.SIGKILL)  # where nobody else has
        found.why = str(link.close().get("why"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dynamixel", "feetech"])
def test_a_control_process_that_hangs_is_replaced_by_the_second_channel(require, family: str, record_property):
    """After what the watchdog measured until he acted (``watch_s`` and two periods, where he got his turn), and what
    he then needed, an arm brakes within 30 ms, with 1 rad/s and the hardest that the servos have."""
    require(SDKS[family])
    for _ in range(often(1, 20)):
        with PtyProcess(CHAINS[family]) as device:
            found = in_motion(partial(hung, device, family), SLOWEST)
        said = re.search(
            r"silent for ([\d.]+) s, and was killed; stopped by its second channel in ([\d.]+) s", found.why
        )
        assert said is not None, found
        record_property("figures", f"{family}: rest after {1000 * found.rest_s:.0f} ms; {found.why}")
        assert found.rest_s <= float(said[1]) + GONE_S + float(said[2]) + 0.03
        assert found.drift_rad < 0.01 and found.watched_s > 0.5, found


@pytest.mark.slow
def test_without_a_second_channel_it_goes_on_to_the_last_set_point(require, monkeypatch):
    require(SDKS["feetech"])
    monkeypatch.setattr(link_module, "Watch", partial(Watch, second_channel=False))
    with PtyProcess(feetech_chain) as device:
        found = in_motion(partial(hung, device, "feetech"), SLOWEST)
    assert found.rest_s > 0.5, "half a radian per second, braked with half a radian per second squared"
    assert "no second channel" in found.why


@pytest.mark.slow
@pytest.mark.parametrize("channel", [True, False])
def test_the_dashboard_ends_the_program_of_a_control_process_that_hangs(require, monkeypatch, channel: bool):
    """ur-rtde's process hangs as well, or it would stop the arm as soon as the control process is gone."""
    require(SDKS["universal"])
    monkeypatch.setattr(link_module, "Watch", partial(Watch, second_channel=channel))
    config = {"address": "", "watchdog_hz": None, "why_no_watchdog": "it would stop the arm, too", "silence_s": 0.6}
    with UniversalEmulator(config["address"] or fresh_address()) as emulator:
        with driven("universal", config | {"address": emulator.address}) as link:
            time.sleep(0.5)
            children = [int(pid) for pid in Path(f"/proc/{link.pid}/task/{link.pid}/children").read_text().split()]
            for pid in (*children, link.pid):
                os.kill(pid, signal.SIGSTOP)
            began_ns = time.monotonic_ns()
            while time.monotonic_ns() < began_ns + ns(3) and link.alive:
                time.sleep(0.005)
            why = str(link.close()["why"])
            running = emulator.order("dashboard", line="running")
            ended = [(t_ns - began_ns) * 1e-9 for t_ns, _, what in emulator.events() if what.endswith("dashboard")]
            for pid in children:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if not channel:
            assert running.endswith("true") and not ended and "no second channel" in why
            return
        said = SAID.search(why)
        assert said is not None, why
        assert running.endswith("false") and ended[-1] <= float(said[1]) + GONE_S + float(said[2])
