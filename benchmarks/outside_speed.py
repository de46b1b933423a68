"""Worlds of other packages through our worker processes, beside the vector environments of Gymnasium and a bare loop.

    python benchmarks/outside_speed.py [--quick] [--worlds 8] [--tasks ...]

The environments are the same objects for all but one, made by `world_server.make`, and play the same random actions.
`bare` is one environment in a loop, `sync` and `async` are those of `gymnasium.vector`, `in_process` and `pool` are
ours without worker processes and with one for each core. `limit` is what no pool can exceed on this machine: a bare
loop on each core at the same time. `registered` is `async` of the environment as its package gives it, which is what
one has without Burnish. Contenders take turns, so that all see the machine in the same mood; a figure is the median
over the rounds, in steps of all worlds per second.

RESULT: ``pool_over_async``, the smallest ratio over the tasks, and the ratio of each task; ``pool_over_limit`` and
``pool_over_registered``, the smallest ones too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from measure import machine, markdown, options, page, publish, table

from burnish.sim.external.maniskill import Backend, ManiSkillConfig, hosted
from burnish.sim.external.settings import GymConfig
from burnish.sim.external.workers import recipe_of
from burnish.sim.external.world_server import make
from burnish.sim.external.worlds import ExternalEnv

TASKS = {
    "metaworld": GymConfig("metaworld", {"task": "push-v3"}, max_steps=10_000),
    "maniskill": hosted(ManiSkillConfig("PushCube-v1", backend=Backend.cpu, max_steps=10_000), num_envs=2),
    "robosuite": GymConfig("robosuite", {"task": "Lift"}, max_steps=10_000),
    "pusht": GymConfig("gym_pusht/PushT-v0", max_steps=10_000, control_hz=10),
}
Ticks = Callable[[int], None]


def registered_robosuite() -> Any:
    import robosuite
    from robosuite.wrappers import GymWrapper

    env: Any = GymWrapper(robosuite.make("Lift", robots="Panda", has_renderer=False, **NO_CAMERAS))
    env.metadata = {}  # it has None, at which gymnasium.vector stumbles
    return env


def registered_maniskill() -> Any:
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    torch.set_num_threads(1)
    settings: dict[str, Any] = {"obs_mode": "state", "control_mode": "pd_ee_delta_pose", "sim_backend": "physx_cpu"}
    return CPUGymWrapper(gymnasium.make("mani_skill.envs:PushCube-v1", render_backend="none", **settings))


NO_CAMERAS: dict[str, Any] = {"use_camera_obs": False, "has_offscreen_renderer": False}
REGISTERED: dict[str, Callable[[], Any]] = {
    "metaworld": partial(gymnasium.make, "Meta-World/MT1", env_name="push-v3"),
    "maniskill": registered_maniskill,
    "robosuite": registered_robosuite,
    "pusht": partial(gymnasium.make, "gym_pusht/PushT-v0"),
}


def bare(name: str, actions: np.ndarray) -> Ticks:
    env = make(recipe_of(TASKS[name]))
    env.reset(seed=0)

    def play(ticks: int) -> None:
        for tick in range(ticks):
            _, _, terminated, truncated, _ = env.step(actions[tick % len(actions), 0])
            if terminated or truncated:
                env.reset()

    return play


def at_once(name: str, actions: np.ndarray) -> Ticks:
    """A bare loop on each core; the steps of one are counted."""
    ends = []
    for _ in range(CORES):
        here, there = CONTEXT.Pipe()
        CONTEXT.Process(target=_loop, args=(name, actions, there), daemon=True).start()
        ends.append(here)

    def play(ticks: int) -> None:
        for end in ends:
            end.send(ticks)
        for end in ends:
            end.recv()

    return play


def _loop(name: str, actions: np.ndarray, end: Any) -> None:
    torch.set_num_threads(1)
    play = bare(name, actions)
    with contextlib.suppress(EOFError):  # the benchmark has ended
        while True:
            play(end.recv())
            end.send(None)


def vector(name: str, actions: np.ndarray, kind: Any, registered: bool = False) -> Ticks:
    env = kind([REGISTERED[name] if registered else partial(make, recipe_of(TASKS[name]))] * actions.shape[1])
    env.reset(seed=0)

    def play(ticks: int) -> None:
        for tick in range(ticks):
            env.step(actions[tick % len(actions)])

    return play


def ours(name: str, actions: np.ndarray, processes: int | None) -> Ticks:
    env = ExternalEnv(actions.shape[1], GymConfig(**{**vars(TASKS[name]), "processes": processes}))
    given = torch.from_numpy(actions)
    env.reset()

    def play(ticks: int) -> None:
        for tick in range(ticks):
            step = env.step(given[tick % len(given)])
            ended = step.terminated | step.truncated
            if ended.any():
                env.reset(ended)

    return play


CORES, CONTEXT = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
CONTENDERS: dict[str, Callable[[str, np.ndarray], Ticks]] = {
    "bare": bare,
    "limit": at_once,
    "registered": partial(vector, kind=gymnasium.vector.AsyncVectorEnv, registered=True),
    "sync": partial(vector, kind=gymnasium.vector.SyncVectorEnv),
    "async": partial(vector, kind=gymnasium.vector.AsyncVectorEnv),
    "in_process": partial(ours, processes=0),
    "pool": partial(ours, processes=None),
}
BESIDE = ("async", "limit", "registered")  # of which the pool is how many times as fast


def measured(name: str, worlds: int, rounds: int, duration: float) -> dict[str, Any]:
    space = make(recipe_of(TASKS[name])).action_space
    actions = np.random.default_rng(0).uniform(space.low, space.high, (64, worlds, *space.shape)).astype(np.float32)
    plays = {kind: build(name, actions) for kind, build in CONTENDERS.items()}
    ticks = {}
    for kind, play in plays.items():
        play(2)
        start = time.perf_counter()
        play(4)
        ticks[kind] = max(4, round(4 * duration / (time.perf_counter() - start)))
    speeds: dict[str, list[float]] = {kind: [] for kind in plays}
    for _ in range(rounds):
        for kind, play in plays.items():
            start = time.perf_counter()
            play(ticks[kind])
            each = {"bare": 1, "limit": CORES}.get(kind, worlds)
            speeds[kind].append(each * ticks[kind] / (time.perf_counter() - start))
    return {"task": name, "worlds": worlds, **{kind: statistics.median(found) for kind, found in speeds.items()}}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--worlds", type=int, default=8, help="of each contender but bare (default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.quick:
        chosen.worlds, chosen.tasks = 4, ["pusht"]
    rounds, duration = (3, 0.5) if chosen.quick else (5, 2.0)
    rows = [measured(task, chosen.worlds, rounds, duration) for task in chosen.tasks]
    for row in rows:
        row |= {f"pool_over_{kind}": row["pool"] / row[kind] for kind in BESIDE}
    ratios = [f"pool_over_{kind}" for kind in BESIDE]
    columns = {"task": "", "worlds": "d", **dict.fromkeys(CONTENDERS, ",.0f"), **dict.fromkeys(ratios, ".2f")}
    path = chosen.out / ("outside_speed_quick.json" if chosen.quick else "outside_speed.json")
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": rows}
    result = {ratio: min(row[ratio] for row in rows) for ratio in ratios}
    result |= {row["task"]: row["pool_over_async"] for row in rows}
    publish(path, report, table(rows, columns), result)
    page(path, markdown(rows, columns))


if __name__ == "__main__":
    main()
