"""Robots for tests: a small arm as a MuJoCo model, an adapter that does as a test tells it, and a clock that obeys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burnish.real_robot.adapter import Adapter, Command, Fault, JointSpec, Mode, RobotSpec, RobotState, StopKind
from burnish.real_robot.clock import Clock, VirtualClock, ns
from burnish.real_robot.drivers.twin import Twin, TwinConfig
from burnish.real_robot.errors import StaleState

ARM = """
<mujoco>
  <compiler angle="radian" autolimits="true"/>
  <option timestep="0.002" integrator="implicitfast"/>
  <worldbody>
    <body name="upper" pos="0 0 0.3">
      <joint name="shoulder" axis="0 1 0" range="-2 2" damping="1" armature="0.02"/>
      <geom type="capsule" fromto="0 0 0 0.2 0 0" size="0.02" mass="0.2" contype="0" conaffinity="0"/>
      <body name="fore" pos="0.2 0 0">
        <joint name="elbow" axis="0 1 0" range="-2.5 1.5" damping="1" armature="0.02"/>
        <geom type="capsule" fromto="0 0 0 0.2 0 0" size="0.02" mass="0.2" contype="0" conaffinity="0"/>
        <site name="tcp" pos="0.2 0 0"/>
      </body>
    </body>
  </worldbody>
  <actuator>
    <position joint="shoulder" kp="300" kv="3" ctrlrange="-2 2"/>
    <position joint="elbow" kp="300" kv="3" ctrlrange="-2.5 1.5"/>
  </actuator>
</mujoco>"""

LIMITS: dict[str, Any] = {"velocity": 2.0, "acceleration": 10.0}


def twin(clock: Clock | None = None, **settings: Any) -> Twin:
    return Twin(TwinConfig(ARM, **{**LIMITS, **settings}), clock or VirtualClock())


def spec(count: int = 2, **changes: Any) -> RobotSpec:
    values: dict[str, Any] = {
        "name": "puppet",
        "joints": tuple(JointSpec(f"j{i}", -1.0, 1.0, 2.0, 10.0) for i in range(count)),
        "modes": frozenset({Mode.JOINT_POSITION}),
        "rate_hz": (1.0, 100.0, 1000.0),
        "device_watchdog_s": 0.1,
    }
    return RobotSpec(**(values | changes))


@dataclass
class Script:
    """What a puppet does next; a test changes it while the puppet runs."""

    fails: dict[str, Exception] = field(default_factory=dict)  # call -> what it raises
    mute: bool = False
    estop: bool = False
    fault: Fault | None = None
    stuck: bool = False  # the joints do not follow
    repeat: bool = False  # the same sequence number again
    q: Any = None  # instead of what was measured


class Puppet(Adapter):
    """Ideal motors: measured is what was sent. Remembers every call and every command."""

    def __init__(self, clock: Clock | None = None, robot: RobotSpec | None = None) -> None:
        super().__init__(robot or spec(), clock or VirtualClock())
        self.script, self.calls, self.written = Script(), [], []
        self.q = np.zeros(len(self.spec.joints))
        self._seq = 0

    def _play(self, call: str) -> None:
        self.calls.append(call)
        if call in self.script.fails:
            raise self.script.fails[call]

    def _state(self) -> RobotState:
        self._seq += not self.script.repeat
        q = self.q if self.script.q is None else np.asarray(self.script.q)
        zero = np.zeros_like(self.q)
        state = RobotState(self._seq, self.clock.now_ns(), q.copy(), zero, gripper=0.5)
        state.estop, state.fault = self.script.estop, self.script.fault
        return state

    def _configure(self) -> None:
        self._play("configure")

    def _activate(self, mode: Mode) -> RobotState:
        self._play("activate")
        return self._state()

    def _read(self, timeout_s: float) -> RobotState:
        self._play("read")
        if self.script.mute:
            self.clock.sleep_until_ns(self.clock.now_ns() + ns(timeout_s))
            raise StaleState("the puppet is mute")
        return self._state()

    def _write(self, command: Command) -> Command:
        self._play("write")
        self.written.append(command)
        if not self.script.stuck:
            self.q = command.target.copy()
        return command

    def _stop(self, kind: StopKind) -> None:
        self._play(f"stop {kind.value}")

    def _deactivate(self) -> None:
        self._play("deactivate")

    def _recover(self) -> None:
        self._play("recover")

    def _close(self) -> None:
        self._play("close")
