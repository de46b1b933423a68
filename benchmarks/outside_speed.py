"""Worlds of other packages through our worker processes, beside the vector environments of Gymnasium and a bare loop.

    python benchmarks/outside_speed.py [--quick] [--worlds 8] [--tasks ...]

The environments are the same objects for all, made by `world_server.make`, and play the same random actions. `bare` is
one environment in a loop, `sync` and `async` are those of `gymnasium.vector`, `in_process` and `pool` are ours without
worker processes and with one for each core. Contenders take turns, so that all see the machine in the same mood; a
figure is the median over the rounds, in steps of all worlds per second.

RESULT: ``pool_over_async``, the smallest ratio over the tasks, and the ratio of each task.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from measure import machine, markdown, options, page, publish, table

from burnish.sim.external.settings import GymConfig
from burnish.sim.external.workers import recipe_of
from burnish.sim.external.world_server import make
from burnish.sim.external.worlds import ExternalEnv

TASKS = {
    "metaworld": GymConfig("metaworld", {"task": "push-v3"}, max_steps=10_000),
    "maniskill": GymConfig("maniskill", {"task": "PushCube-v1"}, max_steps=10_000),
    "robosuite": GymConfig("robosuite", {"task": "Lift"}, max_steps=10_000),
    "pusht": GymConfig("gym_pusht/PushT-v0", max_steps=10_000, control_hz=10),
}
Ticks = Callable[[int], None]


def bare(config: GymConfig, actions: np.ndarray) -> Ticks:
    env = make(recipe_of(config))
    env.reset(seed=0)

    def play(ticks: int) -> None:
        for tick in range(ticks):
            _, _, terminated, truncated, _ = env.step(actions[tick % len(actions), 0])
            if terminated or truncated:
                env.reset()

    return play


def vector(config: GymConfig, actions: np.ndarray, kind: Any) -> Ticks:
    env = kind([partial(make, recipe_of(config))] * actions.shape[1])
    env.reset(seed=0)

    def play(ticks: int) -> None:
        for tick in range(ticks):
            env.step(actions[tick % len(actions)])

    return play


def ours(config: GymConfig, actions: np.ndarray, processes: int | None) -> Ticks:
    env = ExternalEnv(actions.shape[1], GymConfig(**{**vars(config), "processes": processes}))
    given = torch.from_numpy(actions)
    env.reset()

    def play(ticks: int) -> None:
        for tick in range(ticks):
            step = env.step(given[tick % len(given)])
            ended = step.terminated | step.truncated
            if ended.any():
                env.reset(ended)

    return play


CONTENDERS: dict[str, Callable[[GymConfig, np.ndarray], Ticks]] = {
    "bare": bare,
    "sync": partial(vector, kind=gymnasium.vector.SyncVectorEnv),
    "async": partial(vector, kind=gymnasium.vector.AsyncVectorEnv),
    "in_process": partial(ours, processes=0),
    "pool": partial(ours, processes=None),
}


def measured(name: str, worlds: int, rounds: int, duration: float) -> dict[str, Any]:
    config = TASKS[name]
    space = make(recipe_of(config)).action_space
    actions = np.random.default_rng(0).uniform(space.low, space.high, (64, worlds, *space.shape)).astype(np.float32)
    plays = {kind: build(config, actions) for kind, build in CONTENDERS.items()}
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
            each = 1 if kind == "bare" else worlds
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
        row["pool_over_async"] = row["pool"] / row["async"]
    columns = {"task": "", "worlds": "d", **dict.fromkeys(CONTENDERS, ",.0f"), "pool_over_async": ".2f"}
    path = chosen.out / ("outside_speed_quick.json" if chosen.quick else "outside_speed.json")
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": rows}
    result = {"pool_over_async": min(row["pool_over_async"] for row in rows)}
    result |= {row["task"]: row["pool_over_async"] for row in rows}
    publish(path, report, table(rows, columns), result)
    page(path, markdown(rows, columns))


if __name__ == "__main__":
    main()
