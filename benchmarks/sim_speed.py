"""How fast N worlds run, beside the machine's limit, Gymnasium's vector environments and envpool.

    python benchmarks/sim_speed.py [--quick] [--tasks NAME ...] [--worlds N ...] [--threads 2] [--out DIR]

``ours`` is `BatchedMujoco.step`: observations, rewards, ends and the resets that follow. ``limit`` is a native loop
per thread over `mj_step` (native_loop.c, compiled here), of the same model, states, controls and restarts: it ends in
the same state as ours bit for bit, which is checked, because the cost of a step depends on who lies on the ground.
``sync`` and ``async`` are Gymnasium's vector environments as they come, ``envpool`` is envpool with as many threads, in
an environment of its own that the first full run installs; all of them restart what ended. Gymnasium lacks `insert`:
there they hold single worlds of ours, through `as_gymnasium`.

All contenders of one task and number of worlds take turns, so that a slow moment of the machine touches all alike; what
is compared is compared within a turn, and numbers are medians over turns. ``engines`` are two ways to step, physics
only: `Physics` (a MjData per world, threads) and `mujoco.rollout`.

RESULT: ``of_raw`` (ours over the limit), ``over_async``, ``over_sync``, ``over_envpool``: each the worst task, at
the number of worlds at which ours is fastest, 0 where it was not measured; and ``half_cheetah_over_async``.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import gymnasium
import mujoco
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from measure import machine, markdown, options, page, publish, table
from mujoco import rollout
from sim_peers import ENVPOOL, GYMNASIUM, Effort, Envpool, Gymnasium, install_envpool, single, worlds
from tqdm import tqdm

from burnish.sim.build import ENVS
from burnish.sim.physics import STATE, Physics

HERE = Path(__file__).resolve().parent
TASKS = (*GYMNASIUM, "insert")
ENGINES = ("half_cheetah", "ant")  # whose physics alone is measured too


FULL = Effort(worlds=(16, 64, 256), rounds=7, block=0.5, burn_in=50)
QUICK = Effort(worlds=(16,), rounds=2, block=0.1, burn_in=5)


class Entrant(Protocol):
    def play(self) -> float:
        """One turn; returns steps per second, of all worlds together."""
        ...

    def close(self) -> None: ...


class Ours:
    """Every turn plays the same ticks: from one saved state, with the same actions."""

    def __init__(self, name: str, num_worlds: int, threads: int, effort: Effort) -> None:
        self.env = env = worlds(name, num_worlds, threads)
        low, high = torch.tensor(env.spec.action.low), torch.tensor(env.spec.action.high)
        source = torch.Generator().manual_seed(0)

        def actions(ticks: int) -> torch.Tensor:
            return low + (high - low) * torch.rand(ticks, num_worlds, len(low), generator=source)

        env.reset()
        begin = time.perf_counter()
        self._run(actions(effort.burn_in))
        speed = effort.burn_in / (time.perf_counter() - begin)
        self.start = env.state_dict()
        self.actions = actions(max(4, round(effort.block * speed)))

    def _run(self, actions: torch.Tensor) -> None:
        for action in actions:
            step = self.env.step(action)
            ended = step.terminated | step.truncated
            if ended.any():
                self.env.reset(ended)

    def play(self) -> float:
        self.env.load_state_dict(self.start)
        begin = time.perf_counter()
        self._run(self.actions)
        return self.actions.shape[0] * self.actions.shape[1] / (time.perf_counter() - begin)

    def close(self) -> None:
        pass


class Script(NamedTuple):
    """The controls of a turn of ours, and where worlds began anew: enough to play it without our code."""

    model: mujoco.MjModel
    frame_skip: int
    start: np.ndarray  # (N, S)
    ctrl: np.ndarray  # (ticks, N, nu)
    begins: np.ndarray  # (ticks, N): row of ``starts`` from which a world goes on after that tick, or -1
    starts: np.ndarray  # (episodes, S)
    end: np.ndarray  # (N, S)


def record(ours: Ours) -> Script:
    env = ours.env
    env.load_state_dict(ours.start)
    begins = np.full(ours.actions.shape[:2], -1, np.int32)
    start, ctrl, starts = env.physics.state(), [], []
    for tick, action in enumerate(ours.actions):
        step = env.step(action)
        ctrl.append(env.physics.ctrl())
        ended = step.terminated | step.truncated
        if ended.any():
            env.reset(ended)
            rows = ended.nonzero()[:, 0].numpy()
            begins[tick, rows] = len(starts) + np.arange(len(rows))
            starts += list(env.physics.state()[rows])
    anew = np.array(starts).reshape(-1, start.shape[1])
    return Script(env.physics.model, env.task.frame_skip, start, np.array(ctrl), begins, anew, env.physics.state())


def compiled() -> ctypes.CDLL:
    """native_loop.c, linked with the library that is inside the Python package mujoco."""
    package = Path(mujoco.__file__).parent
    library = next(package.glob("libmujoco*"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "native_loop.so")
        source = [str(HERE / "native_loop.c"), f"-I{package / 'include'}", str(library), f"-Wl,-rpath,{package}"]
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", *source, "-o", str(out)], check=True)
        return ctypes.CDLL(str(out))


class Limit:
    """ctypes lets go of Python's lock for the whole turn; threads meet only at its end."""

    def __init__(self, script: Script, native: ctypes.CDLL, threads: int) -> None:
        self.script, self._native = script, native
        count = len(script.start)
        self.data = [mujoco.MjData(script.model) for _ in range(count)]
        self._addresses = (ctypes.c_void_p * count)(*(data._address for data in self.data))
        self._edges = np.linspace(0, count, threads + 1).astype(int).tolist()
        self._pool = ThreadPoolExecutor(threads)

    def play(self) -> float:
        script = self.script
        for data, state in zip(self.data, script.start, strict=True):
            mujoco.mj_setState(script.model, data, state, STATE)
        ticks, count = script.begins.shape

        def share(low: int, high: int) -> None:
            self._native.play(
                *(ctypes.c_void_p(script.model._address), self._addresses),
                *(ctypes.c_void_p(array.ctypes.data) for array in (script.ctrl, script.begins, script.starts)),
                *(int(STATE), count, low, high, ticks, script.frame_skip),
            )

        begin = time.perf_counter()
        list(self._pool.map(share, self._edges[:-1], self._edges[1:]))
        return ticks * count / (time.perf_counter() - begin)

    def check(self) -> None:
        """The last turn ended where ours did."""
        state = np.empty_like(self.script.end)
        for data, row in zip(self.data, state, strict=True):
            mujoco.mj_getState(self.script.model, data, row, STATE)
        if not np.array_equal(state, self.script.end):
            raise RuntimeError("the native loop and BatchedMujoco did not do the same work")

    def close(self) -> None:
        self._pool.shutdown()


class Threads:
    """The engine that `BatchedMujoco` stands on, alone; nobody begins anew."""

    def __init__(self, script: Script, threads: int) -> None:
        self.script, self._physics = script, Physics(script.model, len(script.start), threads)
        self._columns = [self._physics.column("qpos"), self._physics.column("qvel")]

    def play(self) -> float:
        self._physics.restore(self.script.start)
        begin = time.perf_counter()
        for ctrl in self.script.ctrl:
            self._physics.step(ctrl, self.script.frame_skip)
            for column in self._columns:
                column.read()
        return self.script.begins.size / (time.perf_counter() - begin)

    def close(self) -> None:
        pass


class Rollout:
    """MuJoCo's own pool of threads. It returns states, from which the next tick goes on."""

    KIND = mujoco.mjtState.mjSTATE_FULLPHYSICS

    def __init__(self, script: Script, threads: int) -> None:
        self.script, self._pool = script, rollout.Rollout(nthread=threads)
        size, count = mujoco.mj_stateSize(script.model, self.KIND), len(script.start)
        self._data = [mujoco.MjData(script.model) for _ in range(threads)]
        self._state, self._out = np.empty((count, size)), np.empty((count, script.frame_skip, size))

    def play(self) -> float:
        script, data = self.script, self._data[0]
        for state, row in zip(script.start, self._state, strict=True):
            mujoco.mj_setState(script.model, data, state, STATE)
            mujoco.mj_getState(script.model, data, row, self.KIND)
        models = [script.model] * len(script.start)
        begin = time.perf_counter()
        for ctrl in script.ctrl:
            held = np.repeat(ctrl[:, None], script.frame_skip, axis=1)
            self._pool.rollout(models, self._data, self._state, held, nstep=script.frame_skip, state=self._out)
            self._state[:] = self._out[:, -1]
        return script.begins.size / (time.perf_counter() - begin)

    def close(self) -> None:
        self._pool.close()


def entrants(
    name: str, num_worlds: int, threads: int, effort: Effort, native: ctypes.CDLL, envpool: bool
) -> dict[str, Entrant]:
    # Gymnasium first: it forks, which is best before other threads are there.
    fns: list[Callable[[], gymnasium.Env]] = [partial(single, name)] * num_worlds
    found: dict[str, Entrant] = {"async": Gymnasium(AsyncVectorEnv(fns), effort)}
    found["sync"] = Gymnasium(SyncVectorEnv(fns), effort)
    if envpool and name in GYMNASIUM:
        found["envpool"] = Envpool(name, num_worlds, threads, effort)
    ours = Ours(name, num_worlds, threads, effort)
    script = record(ours)
    limit = Limit(script, native, threads)
    limit.play()
    limit.check()
    found |= {"ours": ours, "limit": limit}
    if name in ENGINES:
        found |= {"threads": Threads(script, threads), "rollout": Rollout(script, threads)}
    return found


def measure(name: str, num_worlds: int, threads: int, effort: Effort, native: ctypes.CDLL, envpool: bool) -> dict:
    """One row; what was not measured is None."""
    playing = entrants(name, num_worlds, threads, effort, native, envpool)
    speeds: dict[str, list[float]] = {key: [] for key in playing}
    for _ in range(effort.rounds):
        for key, entrant in playing.items():
            speeds[key].append(entrant.play())
    for entrant in playing.values():
        entrant.close()

    def ratio(key: str, other: str) -> float | None:
        if not (speeds.get(key) and speeds.get(other)):
            return None
        return statistics.median(a / b for a, b in zip(speeds[key], speeds[other], strict=True))

    names = ("ours", "limit", "sync", "async", "envpool", "threads", "rollout")
    return {
        "task": name,
        "worlds": num_worlds,
        **{key: statistics.median(speeds[key]) if key in speeds else None for key in names},
        **{key: ratio("ours", other) for key, other in RATIOS.items()},
        "threads_over_rollout": ratio("threads", "rollout"),
    }


RATIOS = {"of_raw": "limit", "over_async": "async", "over_sync": "sync", "over_envpool": "envpool"}
COLUMNS = {
    "task": "",
    "worlds": "d",
    **dict.fromkeys(("ours", "limit", "sync", "async", "envpool"), ",.0f"),
    **dict.fromkeys(RATIOS, ".2f"),
    **dict.fromkeys(("threads", "rollout"), ",.0f"),
}


def result(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    best = {}
    for row in rows:
        if row["task"] not in best or row["ours"] > best[row["task"]]["ours"]:
            best[row["task"]] = row
    known = {key: [float(row[key]) for row in best.values() if row[key] is not None] for key in RATIOS}
    return {key: min(values, default=0.0) for key, values in known.items()} | {
        "half_cheetah_over_async": best["half_cheetah"]["over_async"] if "half_cheetah" in best else 0.0
    }


def main() -> None:
    parser = options(__doc__)
    tasks = [name for name in TASKS if name in ENVS]
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks, help="default: %(default)s")
    parser.add_argument("--worlds", nargs="+", type=int, help="default: 16 64 256, with --quick 16")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    chosen: argparse.Namespace = parser.parse_args()
    if any(count < 1 for count in [chosen.threads, *(chosen.worlds or [])]):
        parser.error("--threads and --worlds must be at least 1")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    effort = QUICK if chosen.quick else FULL
    missing, native = install_envpool(chosen.quick), compiled()
    cases = [(name, count) for name in chosen.tasks for count in chosen.worlds or effort.worlds]
    rows = [
        measure(name, count, chosen.threads, effort, native, not missing) for name, count in tqdm(cases, disable=None)
    ]
    report = {
        "machine": machine(torch.device("cpu")),
        "quick": chosen.quick,
        "setting": {"threads": chosen.threads, "rounds": effort.rounds, "block_s": effort.block},
        "versions": {"mujoco": mujoco.__version__, "gymnasium": gymnasium.__version__, "envpool": missing or ENVPOOL},
        "rows": rows,
    }
    path = chosen.out / ("sim_speed_quick.json" if chosen.quick else "sim_speed.json")
    publish(path, report, table(rows, COLUMNS), result(rows))
    page(path, markdown(rows, COLUMNS))


if __name__ == "__main__":
    main()
