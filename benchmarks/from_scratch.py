"""SAC, TD3 and PPO of ours beside those of Stable-Baselines3, from nothing, on three tasks of Gymnasium.

    python benchmarks/from_scratch.py [--quick] [--tasks ...] [--algorithms ...] [--seeds 0 1 2 3 4] [--jobs 1]
    python benchmarks/from_scratch.py --report

Ours is what a user runs: `burnish finetune method=sac|td3|gaussian_ppo env=gym`, with its loop, memory and worlds. SB3
is as it comes, on its own `make_vec_env`, with actions in [-1, 1], as it advises and as ours are. Both have the budget
of ``TASKS`` and the settings of ``SETTINGS``, which are the defaults of SB3 but for the warm-up. PPO scales
observations and rewards in both (`VecNormalize`, as the zoo of SB3 does on MuJoCo). SAC and TD3 of SB3 see observations
as they are. So do ours where they are compared; ``normalized`` is ours with the running normaliser.

Where settings cannot be the same: ours draws the weights of PPO as `nn.Linear` does (its last layer is 0), SB3
orthogonally; ours clips the gradients of actor and critic each for itself.

* A run is a process of its own with one thread; what remains of it is one JSON file,
  `results/from_scratch/TASK/ALGORITHM-IMPLEMENTATION-SEED.json`, so runs that are there are not repeated.
* The **return** is the mean over 20 episodes of the policy at the end, without noise, on the same seeds for all.
* A **score** is 0 at the return of uniformly random actions and 1 at the interquartile mean of SB3's on that task.
  RESULT ``sac_over_sb3`` and so on: the interquartile mean of our scores over tasks and seeds over that of SB3's; what
  is not there is -1. Intervals are 95 % of a bootstrap within tasks (Agarwal et al. 2021, arXiv 2108.13264).
* **Seconds** are of one core (the time of the process, which waiting for others does not count), with the worlds'.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import RESULTS, embed, machine, markdown, page, publish, results_of, run_options, table

from burnish.finetune.api import evaluate, refine
from burnish.policies.measure.evaluate import evaluation_seeds
from burnish.policies.measure.statistics import interquartile_mean, stratified_bootstrap
from burnish.sim.external.worlds import cut_seed

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "methods" / "rlpd.md"
EPISODES, SEED = 20, 1000  # of the examination at the end
WORLDS = 4  # of PPO


@dataclass(frozen=True)
class Task:
    steps: int  # of SAC and TD3
    ppo_steps: int
    settings: dict[str, dict[str, float]] = field(default_factory=dict)  # of this task, by the zoo of SB3


# Pendulum with a short horizon, as in the zoo: at 0.99 neither PPO learns it within a million steps.
TASKS = {
    "Pendulum-v1": Task(5_000, 100_000, {"ppo": {"gamma": 0.9, "lr": 1e-3}}),
    "InvertedDoublePendulum-v5": Task(8_000, 100_000),
    "Hopper-v5": Task(10_000, 100_000),
}
OFF_POLICY = {"gamma": 0.99, "tau": 0.005, "batch": 256, "capacity": 1_000_000, "warmup": 1000}
SETTINGS: dict[str, dict[str, Any]] = {
    "sac": {**OFF_POLICY, "lr": 3e-4, "hidden": [256, 256]},
    "td3": {**OFF_POLICY, "lr": 1e-3, "hidden": [400, 300], "explore": 0.1},
    "ppo": {"gamma": 0.99, "lr": 3e-4, "hidden": [64, 64], "rollout": 512, "batch": 64, "epochs": 10, "grad_norm": 0.5},
}
IMPLEMENTATIONS = {"sac": ("sb3", "ours", "normalized"), "td3": ("sb3", "ours", "normalized"), "ppo": ("sb3", "ours")}


@dataclass(frozen=True)
class Case:
    task: str
    algorithm: str
    implementation: str
    seed: int
    quick: bool
    results: Path

    @property
    def result(self) -> Path:
        return self.results / self.task / f"{self.algorithm}-{self.implementation}-{self.seed}.json"

    @property
    def steps(self) -> int:
        task = TASKS[self.task]
        if self.algorithm == "ppo":
            return 2 * WORLDS * self.settings["rollout"] if self.quick else task.ppo_steps
        return 200 if self.quick else task.steps

    @property
    def settings(self) -> dict[str, Any]:
        chosen = SETTINGS[self.algorithm] | TASKS[self.task].settings.get(self.algorithm, {})
        small = {"rollout": 64} if self.algorithm == "ppo" else {"warmup": 100}
        return chosen | (small if self.quick else {})


def ours(case: Case) -> Callable[[], list[float]]:
    """Train, and answer with how to examine."""
    s = case.settings
    off_policy = case.algorithm != "ppo"
    if off_policy:
        method, worlds = case.algorithm, 1
        loop = {"capacity": s["capacity"], "warmup": s["warmup"], "batch": s["batch"], "updates_per_decision": 1}
        learner = {"lr": s["lr"], "actor_lr": s["lr"], "tau": s["tau"]}
        learner |= {"agent": {"hidden": s["hidden"]}, "critic": {"hidden": s["hidden"]}}
        if method == "td3":
            learner["explore_std"] = s["explore"]
        chosen = {"loop": loop, method: learner, "normalize": case.implementation == "normalized"}
    else:
        method, worlds = "gaussian_ppo", WORLDS
        network = {"hidden": s["hidden"], "activation": "tanh"}
        start = {"init_std": 1.0, "log_std_bounds": [-20.0, 2.0], "zero_last": True}
        chosen = {
            "agent": network | start,
            "loop": {"decisions_per_update": s["rollout"]},
            "ppo": {
                **{"epochs": s["epochs"], "minibatch": s["batch"], "lr": s["lr"], "critic_lr": s["lr"]},
                **{"max_grad_norm": s["grad_norm"], "normalize": "minibatch", "scale_reward": True},
                **{"value_coef": 1.0, "value": network},  # ours is of half the squared error
            },
            "normalize": True,
        }
    run: dict[str, Any] = {"worlds": worlds, "threads": 1, "log_every": case.steps, "eval.episodes": 1}
    run["discount"] = {"gamma": s["gamma"]}
    policy = refine(None, case.task, method=method, total=case.steps, seed=case.seed, **run, **chosen).policy
    return lambda: evaluate(policy, case.task, EPISODES, seed=SEED, worlds=EPISODES, greedy=True).returns


def sb3(case: Case) -> Callable[[], list[float]]:
    import stable_baselines3
    from gymnasium.wrappers import RescaleAction
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.vec_env import VecNormalize

    s = case.settings
    unit: dict[str, Any] = {"wrapper_class": RescaleAction, "wrapper_kwargs": {"min_action": -1.0, "max_action": 1.0}}
    common: dict[str, Any] = {"learning_rate": s["lr"], "gamma": s["gamma"], "batch_size": s["batch"]}
    common |= {"policy_kwargs": {"net_arch": s["hidden"]}, "seed": case.seed, "device": "cpu"}
    if case.algorithm == "ppo":
        env: Any = VecNormalize(make_vec_env(case.task, WORLDS, seed=case.seed, **unit), gamma=s["gamma"])
        common |= {"n_steps": s["rollout"], "n_epochs": s["epochs"], "max_grad_norm": s["grad_norm"]}
        seen: Callable[[np.ndarray], np.ndarray] = env.normalize_obs
    else:
        env = make_vec_env(case.task, 1, seed=case.seed, **unit)
        common |= {"buffer_size": s["capacity"], "learning_starts": s["warmup"], "tau": s["tau"]}
        seen = np.asarray
    if case.algorithm == "td3":
        size = env.action_space.shape[0]
        common["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, s["explore"]))
    model = getattr(stable_baselines3, case.algorithm.upper())("MlpPolicy", env, **common)
    model.learn(case.steps)
    return lambda: played(case.task, lambda obs: model.predict(seen(obs), deterministic=True)[0])


def played(task: str, act: Callable[[np.ndarray], np.ndarray]) -> list[float]:
    """Returns on the seeds of the examination, cut as our worlds cut them, by actions in [-1, 1]."""
    import gymnasium
    from gymnasium.wrappers import RescaleAction

    env, returns = RescaleAction(gymnasium.make(task), np.float32(-1), np.float32(1)), []
    for seed in evaluation_seeds(EPISODES, base=SEED):
        (obs, _), total, over = env.reset(seed=cut_seed(seed)), 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


def random_return(task: str, folder: Path) -> float:
    import gymnasium

    path = folder / task / "random.json"
    if not path.exists():
        size, source = gymnasium.make(task).action_space.shape, np.random.default_rng(0)
        returns = played(task, lambda obs: source.uniform(-1, 1, size).astype(np.float32))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"task": task, "returns": returns}) + "\n", encoding="utf-8")
    return statistics.mean(json.loads(path.read_text(encoding="utf-8"))["returns"])


def one(case: Case) -> float:
    torch.set_num_threads(1)
    wall, cpu = time.perf_counter(), time.process_time()
    examine = sb3(case) if case.implementation == "sb3" else ours(case)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    returns = examine()
    found = {
        **{"task": case.task, "algorithm": case.algorithm, "implementation": case.implementation, "seed": case.seed},
        **{"steps": case.steps, "settings": case.settings, "core_s": cpu, "elapsed_s": wall},
        **{"return": statistics.mean(returns), "returns": returns, "machine": machine(torch.device("cpu"))},
    }
    case.result.parent.mkdir(parents=True, exist_ok=True)
    part = case.result.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    part.replace(case.result)
    return found["return"]


def play(cases: Sequence[Case], jobs: int) -> None:
    fresh = None if cases and cases[0].quick else 1
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=fresh) as pool:
        waiting = {pool.submit(one, case): case for case in cases}
        for job in as_completed(waiting):
            case = waiting[job]
            name = f"{case.task} {case.algorithm} {case.implementation} {case.seed}"
            error = job.exception()  # the others go on
            sys.stderr.write(f"{name}: {error!r}\n" if error else f"{name}: {job.result():.1f}\n")


def runs_of(folder: Path) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*/*-*-*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        runs.setdefault((run["task"], run["algorithm"], run["implementation"]), []).append(run)
    return runs


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """One row per task, algorithm and implementation, over its seeds."""
    rows = []
    for (task, algorithm, implementation), found in runs_of(folder).items():
        returns = [run["return"] for run in found]
        low, high = stratified_bootstrap([returns])
        rows.append(
            {
                "task": task,
                "algorithm": algorithm,
                "implementation": implementation,
                "seeds": len(found),
                "steps": found[0]["steps"],
                "random": random_return(task, folder),
                "return": interquartile_mean(returns),
                "low": low,
                "high": high,
                "core_s_per_1000": statistics.median(1000 * run["core_s"] / run["steps"] for run in found),
            }
        )
    order = [list(TASKS), list(SETTINGS), ["sb3", "ours", "normalized"]]
    return sorted(rows, key=lambda row: [names.index(row[key]) for key, names in zip(row, order, strict=False)])


def over_tasks(folder: Path) -> list[dict[str, Any]]:
    """One row per algorithm and implementation, over the tasks of which SB3's runs and these are there."""
    runs, rows = runs_of(folder), []
    for algorithm, implementations in IMPLEMENTATIONS.items():
        for implementation in implementations:
            strata = []
            for task in TASKS:
                mine, theirs = runs.get((task, algorithm, implementation)), runs.get((task, algorithm, "sb3"))
                if mine and theirs:
                    random = random_return(task, folder)
                    unit = interquartile_mean([run["return"] for run in theirs]) - random
                    strata.append([(run["return"] - random) / unit for run in mine])
            if strata:
                low, high = stratified_bootstrap(strata)
                score = interquartile_mean([x for scores in strata for x in scores])
                names = {"algorithm": algorithm, "implementation": implementation, "tasks": len(strata)}
                rows.append({**names, "runs": sum(map(len, strata)), "score": score, "low": low, "high": high})
    return rows


COLUMNS = {"task": "", "algorithm": "", "implementation": "", "seeds": "d", "steps": ",d", "random": ".1f"}
COLUMNS |= {"return": ".1f", "low": ".1f", "high": ".1f", "core_s_per_1000": ".2f"}
OVER_TASKS = {"algorithm": "", "implementation": "", "tasks": "d", "runs": "d"}
OVER_TASKS |= {"score": ".3f", "low": ".3f", "high": ".3f"}


def result(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    scores = {(row["algorithm"], row["implementation"]): row["score"] for row in rows}
    found = {}
    for algorithm, implementations in IMPLEMENTATIONS.items():
        for implementation in implementations[1:]:
            mine, theirs = scores.get((algorithm, implementation)), scores.get((algorithm, "sb3"))
            name = algorithm if implementation == "ours" else f"{algorithm}_{implementation}"
            found[f"{name}_over_sb3"] = -1.0 if mine is None or theirs is None else mine / theirs
    return found


def main() -> None:
    parser = run_options(__doc__, range(5))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: %(default)s")
    parser.add_argument(
        "--algorithms", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: %(default)s"
    )
    chosen = parser.parse_args()
    results = results_of("from_scratch", chosen)
    if chosen.quick:
        chosen.tasks, chosen.seeds = ["Pendulum-v1"], [0]
    cases = [
        Case(task, algorithm, implementation, seed, chosen.quick, results)
        for seed in chosen.seeds
        for task in chosen.tasks
        for algorithm in chosen.algorithms
        for implementation in IMPLEMENTATIONS[algorithm]
    ]
    if not chosen.report:
        play([case for case in cases if not case.result.exists()], chosen.jobs)
    rows, methods = rows_of(results), over_tasks(results)
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "settings": SETTINGS}
    report |= {"rows": rows, "methods": methods}
    path = results.with_suffix(".json")
    publish(path, report, table(rows, COLUMNS) + "\n\n" + table(methods, OVER_TASKS), result(methods))
    page(path, markdown(rows, COLUMNS), markdown(methods, OVER_TASKS))
    if chosen.out == RESULTS and not chosen.quick:
        embed(DOCUMENT, "from_scratch", markdown(methods, OVER_TASKS))


if __name__ == "__main__":
    main()
