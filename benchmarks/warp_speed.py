"""Control ticks per second of `env.backend=warp` on a GPU, beside those of MuJoCo in C on all cores of that machine.

    python benchmarks/warp_speed.py [--quick] [--device cuda] [--out DIR]

Both are the VecEnv that methods see: actions of a uniform draw on the device, observations and rewards back there,
episodes that end and begin anew. C gets one thread per core and 256 worlds, which is past where more help. The first
ticks, in which warp compiles its kernels and captures its graph, do not count; ``first_s`` is how long they took.
Each number is the median of three turns.

RESULT: ``warp_over_c_TASK``, of the largest number of worlds.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from measure import machine, options, publish, synchronize, table
from tqdm import tqdm

from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.types import VecEnv
from burnish.sim.build import ENVS, make_env
from burnish.sim.task import Backend

TASKS = ("hopper", "half_cheetah", "reach", "push")
IN_C = 256
COLUMNS = {"task": "", "backend": "", "worlds": ",d", "ticks_per_s": ",.0f", "over_c": ".2f", "first_s": ".1f"}


def speed(env: VecEnv, seconds: float, device: torch.device) -> tuple[float, float]:
    """Ticks of all worlds per second, and how long the first took."""
    scaled = ScaledEnv(env)
    dice = torch.Generator(device).manual_seed(0)
    action = 2 * torch.rand(16, env.num_envs, len(env.spec.action.low), generator=dice, device=device) - 1

    def play(count: int) -> float:
        synchronize(device)
        begin = time.perf_counter()
        for tick in range(count):
            step = scaled.step(action[tick % len(action)])
            ended = step.terminated | step.truncated
            if bool(ended.any()):
                scaled.reset(ended)
        synchronize(device)
        return time.perf_counter() - begin

    scaled.reset()
    first = play(3)
    count = max(4, round(seconds * 4 / play(4)))
    return env.num_envs * count / statistics.median(play(count) for _ in range(3)), first


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--worlds", type=int, nargs="+", help="default: 1024 and 8192 on a GPU, 8 on a CPU")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="default: all, with --quick the first")
    chosen = parser.parse_args()
    if find_spec("mujoco_warp") is None:
        sys.exit("there is no mujoco-warp: pip install 'burnish[warp]'")
    device = torch.device(chosen.device)
    torch.set_num_threads(os.cpu_count() or 1)
    sizes = chosen.worlds or ([1024, 8192] if device.type == "cuda" else [8])
    seconds, rows, result = (0.1 if chosen.quick else 1.0), [], {}
    for name in tqdm(chosen.tasks or (TASKS[:1] if chosen.quick else TASKS), disable=None):
        config = ENVS[name].config()
        limit, first = speed(make_env(config, IN_C), seconds, torch.device("cpu"))
        about: dict[str, Any] = {"task": name, "backend": "mujoco", "worlds": IN_C, "ticks_per_s": limit}
        rows.append({**about, "over_c": 1.0, "first_s": first})
        for worlds in sizes:
            env = make_env(replace(config, backend=Backend.warp), worlds, device=device)
            found, first = speed(env, seconds, device)
            about = {"task": name, "backend": "warp", "worlds": worlds, "ticks_per_s": found}
            rows.append({**about, "over_c": found / limit, "first_s": first})
            result[f"warp_over_c_{name}"] = found / limit
            del env
    report = {"machine": machine(device), "quick": chosen.quick, "rows": rows}
    parts = ["warp_speed", *(["cuda"] if device.type == "cuda" else []), *(["quick"] if chosen.quick else [])]
    path = chosen.out / f"{'_'.join(parts)}.json"
    head = f"{report['machine'].get('gpu', 'warp on a CPU')}, {os.cpu_count()} cores"
    publish(path, report, f"{head}\n\n{table(rows, COLUMNS)}", result)


if __name__ == "__main__":
    main()
