"""A robot that is a MuJoCo model: what a real one would do, with its latencies, noise and losses as settings.

It is an adapter like any other, so everything above it is what runs on hardware. Physics follow the clock: with the
machine's they run in real time, with a virtual one as fast as they can. Position servos are the model's actuators.

**Departures** from hardware: a pause of the whole program is lost time (at most ``LONGEST_S`` are caught up), and the
device's watchdog is part of the same process, so it survives no kill; the emulators have processes of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mujoco
import numpy as np

from ...policies.core.ranges import check_ranges
from ..adapter import Adapter, Command, JointSpec, Mode, RobotSpec, RobotState, StopKind, sent_as
from ..clock import SECOND, Clock, ns
from ..errors import DeviceFault, Refused, StaleState
from ..settings import settings

LONGEST_S = 1.0
STATE = mujoco.mjtState.mjSTATE_INTEGRATION


@dataclass(frozen=True)
class TwinConfig:
    """Settings of a twin: its model, limits, latencies in s, noise, and losses."""

    mjcf: str  # the model itself, not a path
    joints: Sequence[str] = ()  # names of the driven ones, in order; by default all that actuators drive
    start: Sequence[float] = ()  # the whole state to begin from (MuJoCo's mjSTATE_INTEGRATION); by default the model's
    velocity: float = 4.0  # rad/s, of every joint
    acceleration: float = 40.0  # rad/s^2
    quantum: float = 0.0  # rad
    tool_site: str | None = "tcp"
    watchdog_s: float = 0.1  # 0: the device has none
    command_latency_s: float = 0.0
    state_latency_s: float = 0.0
    jitter_s: float = 0.0  # of both latencies, up to
    noise_rad: float = 0.0  # standard deviation of measured angles
    noise_rad_s: float = 0.0
    drop: float = 0.0  # share of states that never arrive
    state_hz: float = 500.0  # how often the device measures
    seed: int = 0

    def __post_init__(self) -> None:
        least_0 = "watchdog_s command_latency_s state_latency_s jitter_s noise_rad noise_rad_s"
        check_ranges(self, {"[0, inf)": least_0, "[0, 1)": "drop", "(0, inf)": "state_hz"}, "robot.", Refused)
        if self.seed < 0:
            raise Refused(f"seed={self.seed} of a twin must be at least 0")


@dataclass
class _Line:
    """Messages under way: (arrives at, value), in the order in which it was sent."""

    items: deque[tuple[int, Any]] = field(default_factory=deque)

    def put(self, at_ns: int, value: Any) -> None:
        last = self.items[-1][0] if self.items else at_ns
        self.items.append((max(at_ns, last), value))

    def take(self, now_ns: int) -> list[Any]:
        arrived = []
        while self.items and self.items[0][0] <= now_ns:
            arrived.append(self.items.popleft()[1])
        return arrived


class Twin(Adapter):
    """A simulated robot behind the interface of a real one."""

    def __init__(self, config: TwinConfig, clock: Clock | None = None) -> None:
        try:
            self.model = mujoco.MjModel.from_xml_string(config.mjcf)
        except ValueError as error:
            said = " ".join(str(error).split())
            raise Refused(f"mjcf of a twin has to be the text of a MuJoCo model, no path: {said}") from error
        self.config, self._rng = config, np.random.default_rng(config.seed)
        self.data = mujoco.MjData(self.model)
        joints = [self._joint(name) for name in config.joints] or self.model.actuator_trnid[:, 0].tolist()
        self._q = self.model.jnt_qposadr[joints]
        self._v = self.model.jnt_dofadr[joints]
        actuators = {int(j): i for i, j in enumerate(self.model.actuator_trnid[:, 0])}
        if any(j not in actuators for j in joints):
            raise Refused("every joint of robot.joints needs an actuator in the model")
        self._u = np.array([actuators[j] for j in joints])
        low, high = self.model.jnt_range[joints].T
        most = [min(-a, b) if on else 0.0 for (a, b), on in zip(
            self.model.actuator_forcerange[self._u], self.model.actuator_forcelimited[self._u], strict=True
        )]  # fmt: skip
        spec = RobotSpec(
            name="twin",
            joints=tuple(
                JointSpec(
                    self.model.joint(j).name, float(a), float(b), config.velocity, config.acceleration,
                    quantum=config.quantum, effort=float(force) if force > 0 else None,
                )
                for j, a, b, force in zip(joints, low, high, most, strict=True)
            ),
            modes=frozenset({Mode.JOINT_POSITION}),
            rate_hz=(5.0, 100.0, 500.0),
            device_watchdog_s=config.watchdog_s or None,
            mjcf=config.mjcf,
            tool_site=config.tool_site,
        )  # fmt: skip
        super().__init__(spec, clock)
        self._site = None
        if config.tool_site is not None:
            self._site = mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_SITE, config.tool_site)
        self._commands, self._states = _Line(), _Line()
        self._seq = 0
        self._physics_ns = self._measured_ns = self._written_ns = self._counted_ns = 0
        self._powered = False
        self._silent = True  # no commands are expected, so the watchdog sleeps

    def _joint(self, name: str) -> int:
        found = mujoco.mj_name2id(self.model, mujoco.mjtObj.mjOBJ_JOINT, name)
        if found < 0:
            raise Refused(f"robot.joints names {name!r}, which the model does not have")
        return found

    def _configure(self) -> None:
        if len(self.config.start):
            start = np.array(self.config.start, np.float64)
            if start.shape != (mujoco.mj_stateSize(self.model, STATE),):
                raise Refused(f"robot.start has {len(start)} numbers, which is no state of this model")
            mujoco.mj_setState(self.model, self.data, start, STATE)
        mujoco.mj_forward(self.model, self.data)
        self._held()
        self._physics_ns = self._measured_ns = self.clock.now_ns()
        self._pass()

    def _activate(self, mode: Mode) -> RobotState:
        state = self._newest(0.1)
        self._aim(self._held())  # the arm stays where it is, whatever was measured
        self._powered, self._silent = True, False
        self._written_ns = self.clock.now_ns()
        return state

    def _read(self, timeout_s: float) -> RobotState:
        return self._newest(timeout_s)

    def _write(self, command: Command) -> Command:
        self._pass()
        target = command.target.copy()
        if self.config.quantum > 0:
            steps = target / self.config.quantum
            middle = (self.spec.column("lower") + self.spec.column("upper")) / 2
            target = np.where(target > middle, np.floor(steps), np.ceil(steps)) * self.config.quantum
        now_ns = self.clock.now_ns()
        self._written_ns = now_ns
        self._commands.put(now_ns + self._delay_ns(self.config.command_latency_s), target)
        return sent_as(command, target)

    def _stop(self, kind: StopKind) -> None:
        self._pass()
        self._silent = True
        self._commands.items.clear()
        if kind is StopKind.RELEASE:
            self._powered = False

    def _deactivate(self) -> None:
        self._silent = True

    def _recover(self) -> None:
        self._commands.items.clear()
        self._states.items.clear()

    def _close(self) -> None:
        self._commands.items.clear()

    def truth(self) -> np.ndarray:
        """(n,) rad: where the joints are."""
        return self.data.qpos[self._q].copy()

    def _held(self) -> np.ndarray:
        """Where the joints are; an actuator whose range ends before that would pull there, so it is widened."""
        here, ends = self.truth(), self.model.actuator_ctrlrange[self._u]
        self.model.actuator_ctrlrange[self._u] = np.stack([np.fmin(ends[:, 0], here), np.fmax(ends[:, 1], here)], 1)
        return here

    def _delay_ns(self, latency_s: float) -> int:
        return ns(latency_s + self._rng.uniform(0, 1) * self.config.jitter_s)

    def _newest(self, timeout_s: float) -> RobotState:
        """The last state that has arrived; waits for one to arrive."""
        deadline_ns = self.clock.now_ns() + ns(timeout_s)
        while True:
            self._pass()
            arrived = self._states.take(self.clock.now_ns())
            if arrived:
                state: RobotState = arrived[-1]
                state.t_ns = self.clock.now_ns()
                return state
            now_ns = self.clock.now_ns()
            if now_ns >= deadline_ns:
                raise StaleState(f"the twin has sent nothing in {timeout_s:g} s")
            self.clock.sleep_until_ns(min(deadline_ns, now_ns + ns(1 / self.config.state_hz)))

    def _pass(self) -> None:
        """Physics up to now, with commands taking effect and states being measured on the way."""
        now_ns = self.clock.now_ns()
        step_ns = ns(self.model.opt.timestep)
        self._physics_ns = max(self._physics_ns, now_ns - ns(LONGEST_S))
        every_ns = ns(1 / self.config.state_hz)
        while self._physics_ns + step_ns <= now_ns:
            for target in self._commands.take(self._physics_ns):
                self._aim(target)
            if self._silence_ns() > ns(self.config.watchdog_s) > 0 and not self._silent:
                self._aim(self.data.qpos[self._q])  # it stops where it is, and waits to be activated again
                self._silent = True
                raise DeviceFault(f"the device's watchdog fired after {self.config.watchdog_s:g} s without a command")
            if not self._powered:
                self.data.ctrl[self._u] = self.data.qpos[self._q]
            mujoco.mj_step(self.model, self.data)
            self._physics_ns += step_ns
            if self._physics_ns - self._measured_ns >= every_ns:
                self._measured_ns = self._physics_ns
                self._measure()
        if not np.isfinite(self.data.qpos).all():
            raise DeviceFault("the twin's physics have diverged")

    def _silence_ns(self) -> int:
        return self._physics_ns - self._written_ns

    def _aim(self, target: np.ndarray) -> None:
        self.data.ctrl[self._u] = target

    def _measure(self) -> None:
        if self._rng.uniform() < self.config.drop:
            return
        config, rng, n = self.config, self._rng, len(self._q)
        self._seq += 1
        state = RobotState(
            seq=self._seq,
            t_ns=self._physics_ns,
            q=self.data.qpos[self._q] + config.noise_rad * rng.standard_normal(n),
            qd=self.data.qvel[self._v] + config.noise_rad_s * rng.standard_normal(n),
            t_device_s=self._physics_ns / SECOND,
            effort=self.data.actuator_force[self._u].copy(),
        )
        if self._site is not None and self._site >= 0:
            state.tcp_pos = self.data.site_xpos[self._site].copy()
            quaternion = np.empty(4)
            mujoco.mju_mat2Quat(quaternion, self.data.site_xmat[self._site])
            state.tcp_quat = quaternion
        self._states.put(self._physics_ns + self._delay_ns(config.state_latency_s), state)


def make(config: Mapping[str, Any]) -> Twin:
    """The twin of plain settings."""
    return Twin(settings(TwinConfig, config, "a twin"))
