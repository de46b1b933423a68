"""The parts of `control_loop.py` that are measured in processes of its own, none of which imports torch.

    python control_parts.py idle '{"priority": 50, "core": 1}'
    python control_parts.py calls '{"priority": 0, "core": null, "bundle": "folder", "layers": [[48, 256], [256, 56]]}'

Each says on its first line what it is, then answers every line of JSON on standard input by one. ``make`` is a robot
for the real control process, announced to it as any package announces one: a device that answers at once, so that what
is measured is ours.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from burnish.real_robot.adapter import Adapter, Command, JointSpec, Mode, RobotSpec, RobotState, StopKind
from burnish.real_robot.clock import SECOND, MonotonicClock, ns
from burnish.real_robot.control.scheduling import hurry
from burnish.real_robot.control.shared_memory import Board, blank, plan_dtype, shared_folder, state_dtype
from burnish.real_robot.export.runtime import load
from burnish.real_robot.safety.guard import JointGuard, Limits

JOINTS = 7
CODE_RAD = 1e-6  # the last joint says which plan a command comes from: its number, in microradians
LOGGED = 1 << 14
SPEC = RobotSpec(
    name="still",
    joints=tuple(JointSpec(f"joint{i}", -2.8, 2.8, 2.0, 15.0) for i in range(JOINTS)),
    modes=frozenset({Mode.JOINT_POSITION}),
    rate_hz=(10.0, 200.0, 1000.0),
)


class StillAdapter(Adapter):
    """Is where it was sent at once, and writes down when the first command of each plan arrived."""

    def __init__(self, log: str | None = None) -> None:
        super().__init__(SPEC)
        kind = {"dtype": np.int64, "shape": (LOGGED, 2)}
        self._log = np.zeros(**kind) if log is None else np.lib.format.open_memmap(log, "w+", **kind)
        self._q, self._qd = np.zeros((2, JOINTS))
        self._seq = self._logged = self._code = self._written_ns = 0

    def _read(self, timeout_s: float) -> RobotState:
        self._seq += 1
        return RobotState(self._seq, self.clock.now_ns(), self._q.copy(), self._qd.copy())

    def _activate(self, mode: Mode) -> RobotState:
        return self._read(0.0)

    def _write(self, command: Command) -> Command:
        now_ns = self.clock.now_ns()
        self._qd = (command.target - self._q) * SECOND / max(now_ns - self._written_ns, 1)
        self._q, self._written_ns = command.target, now_ns
        code = round(command.target[-1] / CODE_RAD)
        if code != self._code and self._logged < LOGGED:
            self._log[self._logged] = code, now_ns
            self._logged += 1
        self._code = code
        return command

    def _nothing(self, *_: object) -> None:
        pass

    _configure = _deactivate = _recover = _close = _nothing

    def _stop(self, kind: StopKind) -> None:
        pass


def make(config: Mapping[str, Any]) -> StillAdapter:
    return StillAdapter(**config)


class Idle:
    """The loop's own sleep to absolute deadlines, and nothing else: what this machine's kernel and clock cost."""

    def __call__(self, hz: float, seconds: float) -> dict[str, Any]:
        clock, period_ns = MonotonicClock(), ns(1 / hz)
        late_ns = np.zeros(round(hz * seconds), np.int64)
        deadline_ns = clock.now_ns()
        for i in range(len(late_ns)):
            deadline_ns += period_ns
            clock.sleep_until_ns(deadline_ns)
            late_ns[i] = clock.now_ns() - deadline_ns
        return {"late_ns": late_ns.tolist()}


class Calls:
    """The pieces of a period and of a plan, each called in a row, in turns."""

    def __init__(self, bundle: str, layers: list[list[int]]) -> None:
        self.policy = load(bundle)
        random = np.random.default_rng(0)
        noise_shape = self.policy.schema.noise_shape
        assert noise_shape is not None
        obs = {key: random.standard_normal(shape, np.float32) for key, shape in self.policy.schema.obs.items()}
        self.calls: dict[str, Callable[[], Any]] = {
            "matmuls": matmuls(layers),
            "act": partial(self.policy.act, obs, noise=random.standard_normal(noise_shape, np.float32)),
        }
        limits = Limits.of(SPEC, 200.0)
        # A wave that keeps the limits, and one of ten times the speed, which breaks all of them.
        for name, hz in (("guard, as asked", 0.2), ("guard, changed", 2.0)):
            wave = np.sin(2 * np.pi * hz * np.arange(1000)[:, None] / 200.0 + np.arange(JOINTS))
            guard = JointGuard(limits)
            guard.reset(wave[0])
            self.calls[name] = partial(_next, guard, cycle(wave))
        folder = shared_folder()
        for name, kind in (("state", state_dtype(JOINTS)), ("plan", plan_dtype(JOINTS))):
            board, record = Board.create(folder / name, kind), blank(kind)
            self.calls[f"write {name}"], self.calls[f"read {name}"] = partial(board.write, record), board.read
            (folder / name).unlink()  # what is mapped stays
        folder.rmdir()

    def __call__(self, count: int) -> dict[str, Any]:
        """Of each: ``count`` durations in ns, by the clock on the wall and of this thread's own time."""
        return {name: timed(call, count) for name, call in self.calls.items()}


def matmuls(layers: list[list[int]]) -> Callable[[], Any]:
    """The limit: the matrix products of the network alone, into memory that is there."""
    products = []
    for inputs, outputs in layers:
        row, weight, out = (np.ones(shape, np.float32) for shape in ((1, inputs), (inputs, outputs), (1, outputs)))
        products.append(partial(np.dot, row, weight, out))

    def multiply() -> None:
        for product in products:
            product()

    return multiply


def lateness(ticks: np.ndarray, period_ns: int) -> np.ndarray:
    """Of every deadline, in ns: how long after it the tick began that served it, or the next one after it."""
    due, late = ticks[:, 0], ticks[:, 1]
    served = np.append(np.rint(np.diff(due) / period_ns).astype(np.int64), 1)  # deadlines from this one to the next
    first = np.repeat(np.cumsum(served) - served, served)
    return np.repeat(late, served) - (np.arange(served.sum()) - first) * period_ns


def timed(call: Callable[[], Any], count: int) -> dict[str, list[int]]:
    wall, cpu = np.zeros((2, count), np.int64)
    for _ in range(10):  # the first calls find caches full of other things
        call()
    for i in range(count):
        cpu_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
        call()
        wall[i], cpu[i] = time.perf_counter_ns() - wall_ns, time.thread_time_ns() - cpu_ns
    return {"wall_ns": wall.tolist(), "cpu_ns": cpu.tolist()}


def _next(guard: JointGuard, requests: Iterator[np.ndarray]) -> None:
    guard(next(requests))


def main() -> None:
    part, settings = sys.argv[1], json.loads(sys.argv[2])
    priority, core = settings.pop("priority"), settings.pop("core")
    answer = {"idle": Idle, "calls": Calls}[part](**settings)
    if priority:
        obtained = asdict(hurry(priority, core))
    else:  # as a policy process does
        gc.collect()
        gc.freeze()
        obtained = {"scheduler": "other", "locked": False, "core": None}
    said: Any = {"scheduling": obtained, "torch": "torch" in sys.modules}
    _say(said)
    for line in sys.stdin:
        _say(answer(**json.loads(line)))


def _say(data: Any) -> None:
    sys.stdout.write(json.dumps(data) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
