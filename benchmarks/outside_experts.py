"""Demonstrators of other packages' worlds: how often they succeed, how long they take, and how errors lower that.

    python benchmarks/outside_experts.py [--tasks NAME ...] [--levels NAME ...] [--episodes N] [--quick]

Each expert plays the episodes of seeds 0, 1, ... in the world of its preset (`configs/env`), as `burnish collect` would
record them, on each level of errors. ``--tasks`` and ``--levels`` measure some rows again and keep the others of the
file. ``per_minute`` counts the successes of a minute of processor time, resets included, in one process.

RESULT ``worst_clean``, the lowest success without errors; ``noisy`` and ``clumsy``, means over tasks; ``tasks``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from measure import machine, markdown, options, page, publish, table

from burnish.policies.cli.cli import compose, to_object
from burnish.sim.__main__ import GROUPS, CollectConfig
from burnish.sim.build import make_env
from burnish.sim.collect import collect
from burnish.sim.experts import make_expert
from burnish.sim.experts.hosted import LEVELS

EPISODES, QUICK, WORLDS = 50, 4, 10
FAST = ("metaworld_push", "ogbench_cube_single")
TASKS = (
    *("metaworld_push", "metaworld_pick_place", "metaworld_door_open", "metaworld_button_press"),
    *("ogbench_cube_single", "ogbench_cube_double", "robosuite_lift", "robosuite_stack", "robosuite_door", "pusht"),
    *("fetch_reach", "fetch_push", "fetch_pick_place"),
    *("maniskill_push_cube", "maniskill_pick_cube", "maniskill_stack_cube", "maniskill_peg_insertion"),
)
COLUMNS = {"task": "", "level": "", "success": ".2f", "mean_steps": ".0f", "max_steps": "d", "per_minute": ",.0f"}


def measure(task: str, level: str, episodes: int) -> dict[str, Any]:
    words = [f"env={task}", "env.processes=0"]
    config = to_object(compose("collect", CollectConfig, GROUPS["collect"], words)).env
    env = make_env(config, min(WORLDS, episodes))
    start = time.process_time()
    played = collect(env, make_expert(config, env.num_envs, level, env=env), range(episodes)).episodes
    minutes = (time.process_time() - start) / 60
    lengths = [len(episode) for episode in played if episode.success]
    return {
        "task": task,
        "level": level,
        "success": len(lengths) / episodes,
        "mean_steps": statistics.mean(lengths) if lengths else None,
        "max_steps": max(lengths, default=None),
        "per_minute": len(lengths) / minutes,
        "episodes": episodes,
        "limit": env.spec.max_steps,
    }


def merged(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``rows`` in place of the file's rows of the same task and level, in the order of the tables."""
    kept = {(row["task"], row["level"]): row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    kept |= {(row["task"], row["level"]): row for row in rows}
    return [kept[key] for key in ((task, level) for task in TASKS for level in LEVELS) if key in kept]


def result(rows: list[dict[str, Any]]) -> dict[str, float]:
    of = {level: [row["success"] for row in rows if row["level"] == level] for level in LEVELS}
    means = {level: statistics.mean(of[level] or [0.0]) for level in ("noisy", "clumsy")}
    return {"worst_clean": min(of["clean"], default=0.0), **means, "tasks": len({row["task"] for row in rows})}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="default: all, with --quick the fast ones")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS), help="default: all")
    parser.add_argument("--episodes", type=int, help=f"of each row; default: {EPISODES}, with --quick {QUICK}")
    chosen: argparse.Namespace = parser.parse_args()
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    episodes = chosen.episodes or (QUICK if chosen.quick else EPISODES)
    path = chosen.out / ("outside_experts_quick.json" if chosen.quick else "outside_experts.json")
    tasks = chosen.tasks or (FAST if chosen.quick else TASKS)
    found = [measure(task, level, episodes) for task in tasks for level in chosen.levels]
    rows = found if chosen.quick else merged(path, found)
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": rows}
    publish(path, report, table(rows, COLUMNS), result(rows))
    page(path, markdown(rows, COLUMNS))


if __name__ == "__main__":
    main()
