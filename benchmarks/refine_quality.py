"""Every refinement from one frozen base per task, beside what is free, by the same rules for all.

    python benchmarks/refine_quality.py [--quick] [--search] [--tasks ...] [--methods ...] [--seeds 0 1 2 3 4]
                                        [--budget 100000] [--base 1] [--jobs 1] [--on ray] [--report]

A run is `burnish finetune policy.path=BASE experiment=TASK/METHOD seed=SEED` with the settings that won the search, in
a process of its own with one thread. It leaves one JSON file in `results/refine_quality/`; runs that are
there are not repeated, and one that was killed goes on from its last checkpoint.

* **Bases** lie in `benchmarks/bases/`: imitated from 100 clumsy demonstrations by the recipe of `bases.py`; of the
  running robots, from 100 recordings of mixed quality (`runners.py`). `--bases` makes those that are missing; what is
  there never changes. `--base 2` is a second base, from another seed of imitation.
* **Search**: `--search` tries every method equally often (`--trials`, at most 10) with settings from one declared space
  (`refine_settings.py`), on a training seed of its own, and logs each trial. The best by the last policy on 256 seeds
  of the stream "refine_search" is used; a run that was made with other settings does not count.
* **Like with like**: one discount per task; the base's recordings for every method that can use any; the same control
  steps. Gradient steps and minutes of processor time (one thread, evaluations included) stand beside them.
* **Free baselines**: the base with noise 0; more imitation, IQL and the best of 32 draws by the critic of IQL, each
  trained on the recordings for as long as the median run of the methods.
* **Two numbers**: the last policy, and the policy that the run delivers (`policies/best.py`), each on 256 seeds of the
  stream "refine_quality", unused for training, tuning or choice, paired with the base and with the base at noise 0,
  which have 512 for their own rows. Intervals of a method are over its runs and those seeds together
  (`statistics.pooled_interval`).
* **Running robots** report no success; what stands for it is the return over that of the expert of D4RL.

RESULT, of the runs with 100,000 control steps from the first base: ``greedy_beaten``, the share of pairs of a method
and a task whose last policies beat the base at noise 0 (their interval lies above 0); ``delivered_worse``, the share of
runs whose delivery is worse than their base (the 95 % interval of that run lies below 0; chance gives 0.025 where all
are equal); ``insert_best``, ``push_best``, ``pick_place_best``, the mean of the last policies of the best method;
``insert_minutes``, the slowest run of the best latent and the best residual method. A number that is not there is -1.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, options
from refine_bases import RUNS, base_folder, fingerprint, make_base, recordings_of
from refine_runs import SEARCH_SEED, Case, Suite, add_place, play_all, valid_runs
from refine_settings import (
    BUDGET,
    FAMILIES,
    FURTHER,
    RANKED,
    TASKS,
    TIMED,
    TRIALS,
    common_settings,
    family_of,
    methods_of,
    trial_settings,
)
from refine_tables import publish_tables, rows_of

SUITE = Suite(
    name="refine_quality",
    tasks=TASKS,
    budget=BUDGET,
    runs=RUNS,
    base=base_folder,
    fingerprint=fingerprint,
    recordings=recordings_of,
    common=common_settings,
    tried=trial_settings,
    episodes=256,
    base_episodes=512,
    worlds=64,
    looks=5,
    selected=64,
    confirmed=256,
)


def measured(results: Path) -> list[dict[str, Any]]:
    """The rows of the table."""
    return rows_of(results, valid_runs(SUITE, results))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    every = [*RANKED, *FURTHER, TIMED, *FAMILIES["free"]]
    parser.add_argument("--methods", nargs="+", choices=every, default=every, help="default: those of the task")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)), help="default: %(default)s")
    parser.add_argument("--budget", type=int, default=BUDGET, help="control steps of each run (default: %(default)s)")
    parser.add_argument("--base", type=int, default=1, help="which base of the task (default: %(default)s)")
    add_place(parser)
    parser.add_argument("--search", action="store_true", help="try settings; nothing is reported of these runs")
    parser.add_argument("--trials", type=int, default=3, help=f"of each method, at most {TRIALS}")
    parser.add_argument("--bases", action="store_true", help="make the bases that are missing, and nothing else")
    parser.add_argument("--report", action="store_true", help="only print and write the tables of what is there")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if not 1 <= chosen.trials <= TRIALS:
        parser.error(f"--trials must lie in [1, {TRIALS}]")
    if chosen.bases:
        for task in chosen.tasks:
            if not base_folder(task, chosen.base).exists():
                make_base(task, chosen.base)
        return
    results = chosen.out / ("refine_quality_quick" if chosen.quick else "refine_quality")
    if chosen.quick:
        chosen.tasks, chosen.methods, chosen.seeds = ["insert"], ["dsrl", "residual_sac", "more_imitation"], [0]
        shutil.rmtree(RUNS / "quick", ignore_errors=True)
        shutil.rmtree(results, ignore_errors=True)
    numbers: Sequence[tuple[int, int | None]] = [(seed, None) for seed in chosen.seeds]
    if chosen.search:
        numbers = [(SEARCH_SEED, trial) for trial in range(chosen.trials)]
    cases = [
        Case(SUITE, task, method, seed, chosen.quick, results, chosen.budget, chosen.base, trial)
        for task in chosen.tasks
        for seed, trial in numbers
        for method in (*methods_of(task), *FAMILIES["free"][1:])
        if method in chosen.methods and (trial is None or family_of(method) != "free")
    ]
    without = sorted({case.task for case in cases if not base_folder(case.task, case.base).exists()})
    if without and not chosen.report:
        parser.error(f"no base of {', '.join(without)} yet; --bases --tasks {' '.join(without)} makes it")
    if not chosen.report:
        play_all(cases, chosen.jobs, chosen.on, chosen.storage)
    if not chosen.search:
        publish_tables(results, valid_runs(SUITE, results), quick=chosen.quick, embedded=chosen.out == RESULTS)


if __name__ == "__main__":
    main()
