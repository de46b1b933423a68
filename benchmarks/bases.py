"""The tasks of the desktop arm and their experts, and the bases that imitation makes of them.

For each task and level of expert: success and length of its episodes on fresh seeds, demonstrations per minute, and the
success of a flow policy that was imitated from its demonstrations by the configuration `experiment=desk`: with noise as
trained, and with noise 0. A base that noise 0 alone lifts above 0.6 is no test of refinement. Then two checks of the
physics of `insert`: nobody gets a peg into a hole that is smaller, and how deep peg and block overlap.

--tasks and --levels choose some of the table; rows that are not measured again are kept as they stand in the JSON file.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measure import machine, options, publish, table

from burnish.policies.__main__ import GROUPS, PretrainConfig
from burnish.policies.build import build_policy
from burnish.policies.core.cli import compose, to_object
from burnish.policies.core.config import to_data
from burnish.policies.core.evaluate import evaluate, evaluation_seeds
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.seed import derive
from burnish.policies.core.spec import PolicySpec
from burnish.policies.core.types import Controller
from burnish.policies.data.episodes import Episodes
from burnish.policies.horizon import ChunkController
from burnish.policies.imitate import ImitationLearner
from burnish.sim.build import make_env
from burnish.sim.collect import collect
from burnish.sim.experts import LEVELS, SCRIPTED, make_expert

WORLDS = 50
NOISE_FREE_LIMIT = 0.6


def expert_row(task: str, level: str, episodes: int) -> dict[str, Any]:
    env = make_env(task, WORLDS)
    played = evaluate(ScaledEnv(env), make_expert(task, WORLDS, level, env=env), evaluation_seeds(episodes))
    found = played.summary()
    return {
        "expert": found["success_rate"],
        "expert_low": found["success_low"],
        "expert_high": found["success_high"],
        "steps": found["length_mean"],
    }


def demonstrations(task: str, level: str, episodes: int) -> tuple[Episodes, float]:
    """What `burnish collect` records, and how many of them in a minute."""
    env = make_env(task, WORLDS)
    seeds = [derive(0, "collect", i) for i in range(episodes)]
    start = time.perf_counter()
    data = collect(env, make_expert(task, WORLDS, level, env=env), seeds)
    return data, 60 * episodes / (time.perf_counter() - start)


def imitated(task: str, data: Episodes, steps: int | None, seed: int) -> Any:
    words = ["policy=flow", "experiment=desk", "data=unused", f"seed={seed}"]
    words += [f"train.steps={steps}"] if steps else []
    config: PretrainConfig = to_object(compose("pretrain", PretrainConfig, GROUPS["pretrain"], words))
    env = data.spec
    spec = PolicySpec(
        env.obs, env.action, control_hz=env.control_hz, action_mode=env.action_mode, **to_data(config.chunk)
    )
    learner = ImitationLearner(build_policy(config.policy, spec, seed=seed), data, config.train, seed=seed)
    while learner.step < config.train.steps:
        learner.update()
    learner.ema.copy_to(learner.average)
    return learner.average


def success(task: str, controller: Controller, episodes: int) -> dict[str, float]:
    return evaluate(ScaledEnv(make_env(task, WORLDS)), controller, evaluation_seeds(episodes)).summary()


def row(task: str, level: str, *, episodes: int, demos: int, steps: int | None, seed: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {"task": task, "level": level, **expert_row(task, level, episodes)}
    data, found["demos_per_minute"] = demonstrations(task, level, demos)
    start = time.perf_counter()
    policy = imitated(task, data, steps, seed)
    found["train_s"] = time.perf_counter() - start
    base = success(task, ChunkController(policy, WORLDS), episodes)
    found |= {"base": base["success_rate"], "base_low": base["success_low"], "base_high": base["success_high"]}
    still = success(task, ChunkController(policy, WORLDS, greedy=True), episodes)
    found |= {"noise_0": still["success_rate"], "refinable": still["success_rate"] <= NOISE_FREE_LIMIT}
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tasks", nargs="*", default=list(SCRIPTED))
    parser.add_argument("--levels", nargs="*", default=list(LEVELS))
    parser.add_argument("--seed", type=int, default=0, help="of the imitation")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.quick:
        chosen.tasks, chosen.levels = chosen.tasks[:1], ["clean", "clumsy"]
    size = {"episodes": 50, "demos": 20, "steps": 300} if chosen.quick else {"episodes": 256, "demos": 100, "steps": None}
    path = Path(chosen.out) / ("bases_quick.json" if chosen.quick else "bases.json")
    kept = json.loads(path.read_text())["rows"] if path.exists() and not chosen.quick else []
    rows = {(r["task"], r["level"]): r for r in kept}
    for task in chosen.tasks:
        for level in chosen.levels:
            rows[task, level] = row(task, level, seed=chosen.seed, **size)
            sys.stderr.write(json.dumps(rows[task, level]) + "\n")
    ordered = [rows[t, v] for t in SCRIPTED for v in LEVELS if (t, v) in rows]
    columns = {"task": "", "level": "", "expert": ".3f", "steps": ".0f", "demos_per_minute": ",.0f", "base": ".3f"}
    columns |= {"base_low": ".3f", "base_high": ".3f", "noise_0": ".3f", "train_s": ".0f"}
    graded = {task: [r for r in ordered if r["task"] == task and r["refinable"]] for task in SCRIPTED}
    result = {
        "worst_clean_expert": min((r["expert"] for r in ordered if r["level"] == "clean"), default=0.0),
        "refinable_tasks": sum(any(0.2 <= r["base"] <= 0.9 for r in found) for found in graded.values()),
    }
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, **size, "rows": ordered}
    publish(path, report, table(ordered, columns), result)


if __name__ == "__main__":
    main()
