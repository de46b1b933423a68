"""envpool's side of sim_speed.py, in an environment of its own: it has no part in ours.

    python envpool_loop.py TASK WORLDS THREADS

Reads a number of ticks per line, plays them with random actions, and answers with the seconds that they took.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import numpy as np

ACTIONS = 64  # drawn beforehand, and played in turn


def main() -> None:
    task, worlds, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    envpool: Any = importlib.import_module("envpool")
    env = envpool.make_gymnasium(task, num_envs=worlds, num_threads=threads, seed=0)
    low, high = env.action_space.low, env.action_space.high
    actions = np.random.default_rng(0).uniform(low, high, (ACTIONS, worlds, low.shape[-1]))
    env.reset()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    tick = 0
    for line in sys.stdin:
        begin = time.perf_counter()
        for _ in range(int(line)):
            env.step(actions[tick % ACTIONS])
            tick += 1
        sys.stdout.write(f"{time.perf_counter() - begin}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
