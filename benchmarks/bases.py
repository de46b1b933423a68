"""The tasks of the desktop arm and their experts, and the bases that imitation makes of them.

For each task and level of expert: success and length of its episodes on fresh seeds, demonstrations per minute, and the
success of a flow policy that was imitated from its demonstrations by the configuration `experiment=desk`: with noise as
trained, and with noise 0. A base that noise 0 alone lifts above 0.6 is no test of refinement. Then two checks of the
physics of `insert`: nobody gets a peg into a hole that is smaller, and how deep peg and block overlap.

--tasks and --levels choose some of the table; rows that are not measured again are kept as they stand in the JSON file,
which is written after each row. --missing measures only what it does not hold.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import machine, markdown, options, page, publish, table

from burnish.policies.__main__ import GROUPS, PretrainConfig
from burnish.policies.build import build_policy
from burnish.policies.cli.cli import compose, to_object
from burnish.policies.controllers import ChunkController
from burnish.policies.core.config import to_data
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.seed import derive
from burnish.policies.core.spec import PolicySpec
from burnish.policies.core.threads import usable_cores
from burnish.policies.core.types import Controller, VecEnv
from burnish.policies.data.episodes import Episodes
from burnish.policies.imitate import ImitationLearner
from burnish.policies.measure.evaluate import evaluate, evaluation_seeds
from burnish.sim.__main__ import GROUPS as SIM_GROUPS
from burnish.sim.__main__ import CollectConfig
from burnish.sim.batch import BatchedMujoco
from burnish.sim.build import make_env
from burnish.sim.collect import collect
from burnish.sim.experts import LEVELS, SCRIPTED, make_expert
from burnish.sim.experts import insert as insert_expert
from burnish.sim.experts.scripted import ScriptedExpert
from burnish.sim.frozen import variants
from burnish.sim.physics import Array, Rows
from burnish.sim.tasks.insert import Insert, InsertConfig

WORLDS = 50
NOISE_FREE_LIMIT = 0.6
# No expert was tuned on these seeds.
STREAM, DEMONSTRATIONS_SEED = "bases", 1


class Watched(BatchedMujoco):
    """Worlds that are looked at after every physics step, because a blow is over before the tick is."""

    def __init__(self, config: InsertConfig, num_envs: int) -> None:
        super().__init__(Insert(config), num_envs)
        self.depths: list[float] = []

    def _advance(self, ctrl: Array, rows: Rows | None) -> None:
        for left in reversed(range(self.task.frame_skip)):
            self.physics.step(ctrl, 1, rows, (self._note, *(() if left else self._derive)))

    def _note(self, model: Any, data: Any) -> None:
        if data.ncon:
            self.depths.append(-float(data.contact.dist.min()))


def contact_depths(config: InsertConfig, level: str = "clean", episodes: int = 64) -> Array:
    """(K,) metres: how deep peg and block overlap at their deepest place, in each physics step of the expert's episodes
    in which they touch."""
    env = Watched(config, min(episodes, 64))
    script = insert_expert.LEVELS[level]
    expert = ScriptedExpert(env, script.script, noise=script.noise)
    evaluate(ScaledEnv(env), expert, evaluation_seeds(episodes))
    return np.array(env.depths)


def tasks() -> list[str]:
    """Every task of the arm with its variants."""
    return sorted(name for task in SCRIPTED for name in variants(task))


def world(name: str) -> Any:
    """The configuration that `env=name` chooses."""
    return to_object(compose("collect", CollectConfig, SIM_GROUPS["collect"], [f"env={name}"])).env


def played(env: VecEnv, controller: Controller, episodes: int) -> dict[str, float]:
    return evaluate(ScaledEnv(env), controller, evaluation_seeds(episodes, stream=STREAM)).summary()


def demonstrations(config: Any, level: str, episodes: int) -> Episodes:
    """The episodes that `burnish collect` records."""
    env = make_env(config, WORLDS)
    seeds = [derive(DEMONSTRATIONS_SEED, "collect", i) for i in range(episodes)]
    return collect(env, make_expert(config, WORLDS, level, env=env), seeds)


def expert_row(name: str, level: str, episodes: int, demos: int) -> dict[str, Any]:
    config = world(name)
    env = make_env(config, WORLDS)
    found = played(env, make_expert(config, WORLDS, level, env=env), episodes)
    start = time.perf_counter()
    demonstrations(config, level, demos)
    return {
        "task": name,
        "level": level,
        "expert": found["success_rate"],
        "expert_low": found["success_low"],
        "expert_high": found["success_high"],
        "steps": found["length_mean"],
        "demos_per_minute": 60 * demos / (time.perf_counter() - start),
    }


def imitated(data: Episodes, steps: int | None, seed: int, policy: str = "flow") -> Any:
    words = [f"policy={policy}", "experiment=desk", "data=unused", f"seed={seed}"]
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


def base_row(name: str, level: str, episodes: int, demos: int, steps: int | None, seed: int) -> dict[str, Any]:
    """In a process of its own."""
    torch.set_num_threads(1)
    config = world(name)
    start = time.perf_counter()
    policy = imitated(demonstrations(config, level, demos), steps, seed)
    trained_s = time.perf_counter() - start
    base, still = (
        played(make_env(config, WORLDS), ChunkController(policy, WORLDS, greedy=greedy), episodes)
        for greedy in (False, True)
    )
    return {
        "base": base["success_rate"],
        "base_low": base["success_low"],
        "base_high": base["success_high"],
        "noise_0": still["success_rate"],
        "refinable": still["success_rate"] <= NOISE_FREE_LIMIT,
        "train_s": trained_s,
    }


def physics_checks(episodes: int) -> dict[str, float]:
    """A peg that is larger than its hole, and how deep peg and walls overlap where they touch."""
    config = InsertConfig(clearance_m=-0.0001)
    env = make_env(config, WORLDS)
    smaller = played(env, make_expert(config, WORLDS, "clean", env=env), episodes)
    found = {"smaller_hole_success": smaller["success_rate"]}
    for name in ("insert", "insert_tight"):
        config = world(name)
        depths = contact_depths(config, episodes=min(episodes, 64)) / config.clearance_m
        found[f"{name}_overlap_median"], found[f"{name}_overlap_p99"] = np.percentile(depths, [50, 99]).tolist()
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tasks", nargs="*", default=tasks(), help="default: all")
    parser.add_argument("--levels", nargs="*", default=list(LEVELS))
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--seed", type=int, default=2, help="of the imitation (default: %(default)s)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.quick:
        chosen.tasks, chosen.levels = ["insert"], ["clean", "clumsy"]
    episodes, demos, steps = (50, 20, 150) if chosen.quick else (256, 100, None)
    path = Path(chosen.out) / ("bases_quick.json" if chosen.quick else "bases.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(path.read_text())["rows"] if path.exists() and not chosen.quick else []
    rows = {(r["task"], r["level"]): r for r in kept}
    checks = physics_checks(episodes)
    # One after the other, because demonstrations are timed; the imitations then share the cores.
    wanted = [(task, level) for task in chosen.tasks for level in chosen.levels]
    wanted = [pair for pair in wanted if not (chosen.missing and pair in rows)]
    fresh = {pair: expert_row(*pair, episodes, demos) for pair in wanted}
    with ProcessPoolExecutor(usable_cores(), multiprocessing.get_context("spawn")) as pool:
        jobs = {pool.submit(base_row, *pair, episodes, demos, steps, chosen.seed): pair for pair in wanted}
        for job in as_completed(jobs):
            pair = jobs[job]
            rows[pair] = {**fresh[pair], **job.result(), "seed": chosen.seed}
            sys.stderr.write(json.dumps(rows[pair]) + "\n")
            path.write_text(json.dumps({"rows": list(rows.values())}))  # what a run that is cut short leaves
    ordered = [rows[pair] for pair in sorted(rows, key=lambda pair: (pair[0], LEVELS.index(pair[1])))]
    columns = {"task": "", "level": "", "expert": ".3f", "steps": ".0f", "demos_per_minute": ",.0f", "base": ".3f"}
    columns |= {"base_low": ".3f", "base_high": ".3f", "noise_0": ".3f", "train_s": ".0f"}
    good = {r["task"] for r in ordered if r["refinable"] and 0.2 <= r["base"] <= 0.9}
    result = {
        "worst_clean_expert": min((r["expert"] for r in ordered if r["level"] == "clean"), default=0.0),
        "tasks": len({r["task"] for r in ordered}),
        "refinable_tasks": len(good),
        **checks,
    }
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": ordered}
    report |= {"episodes": episodes, "demonstrations": demos}
    publish(path, report, table(ordered, columns), result)
    page(path, markdown(ordered, columns))


if __name__ == "__main__":
    main()
