"""Refinement in a learned world against refinement in the world itself: how many real control ticks a success takes.

    python benchmarks/imagine_quality.py [--quick] [--variants ...] [--seeds 0 1 2] [--jobs 1] [--report]

From one frozen base, with the settings of the shipped experiments:

* ``imagine``: `method=imagine method.inner=dsrl`, on 15 seeds, each with trials, models and an agent of its own.
* ``imagine_data``: the same with the recordings that the base has imitated (`data=`), to which its models are fitted
  too, and with the world's own rule of rewards and ends (`method.known_outcome`). Trials have 32 episodes.
* ``imagine_residual``: `imagine` with a method inside that can leave what the base does: SAC on a residual of up to
  half of the range of actions.
* ``unguarded`` and ``unguarded_residual``: the negative controls. The same without any trial between fits: one model,
  refined in for as long, no gap that stops it and no guard. Imagined success rises; real success need not.
* ``dsrl``: the same method in the world itself, with its shipped settings, tried every 50 episodes' worth of decisions.

**Ticks** are control ticks of the real world until a policy was first tried at ``LEVEL`` or above. Those of trials are
counted for ``imagine``, because a run cannot do without them; the evaluations of ``dsrl`` on its way are not, which
favours it. Evaluations before and after a run count for neither. **Success** is that of the last policy on 400 fresh
seeds. ``insert_fewer_steps`` is the median over the seeds of dsrl's ticks over the median of imagine's, with or
without recordings, whichever is less; a run that never reaches the level counts as all its ticks. No ticks of
recordings are counted: the base has imitated them, and dsrl has no use for them.

**push and pick_place**, where the question is what so many real ticks can give by any means, and whether an imagined
world helps: `imagine` with 20,000, trials counted, and the best residual method in the world itself with 20,000 and
100,000, which is tried only when it has ended. The residual begins from the base at noise 0, which is better on both
tasks. Its settings are those of `burnish improve`, with the number of updates that did better, of two tried, on a seed
that is not among those here (101). ``push_20k`` and its like are the mean success over the seeds, of the better one of
these variants.

A run leaves one JSON file in `results/imagine_quality/`; runs that are there are not repeated.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, embed, machine, markdown, page, publish, results_of, run_options, table
from refine_bases import recordings_of
from refine_minutes import timed

from burnish.policies.build import describe, load_policy
from burnish.policies.compose import Greedy
from burnish.policies.controllers import controller_for
from burnish.policies.measure.evaluate import evaluate, evaluation_seeds
from burnish.policies.runs.checkpoint import save
from burnish.policies.runs.run import read_metrics
from burnish.sim.build import world_for

BASES = Path(__file__).resolve().parent / "bases"
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "methods" / "imagine.md"
LEVEL, EPISODES = 0.95, 400
SUMMARY = {"task": "", "variant": "", "runs": "d", "ticks": ",.0f", "success": ".3f", "worst": ".3f"}
SUMMARY |= {"promised": ".3f", "reached": "", "reached_after": ",.0f", "minutes": ".1f"}


@dataclass(frozen=True)
class Variant:
    """A run of `burnish finetune`."""

    task: str
    words: list[str]
    less: list[str] | None = None  # further words, of the short run of ``--quick``; null: it is left out there
    seeds: int = 5
    greedy: bool = False  # begin from the base at noise 0
    recorded: bool = False  # with the recordings that the base has imitated


IMAGINE = ["experiment=insert/imagine"]
FEW = ["method.known_outcome=true", "method.collect=32", "total=2400"]
SHORT = ["total=1500", "method.imagined=200", "method.inner.loop.warmup=64", "method.model.updates=20"]
SAC = ["env=push", "env.reward=dense", "experiment=improve/residual_sac", "method.loop.updates_per_decision=0.5"]
PPO = ["env=pick_place", "env.reward=dense", "experiment=improve/residual_ppo", "method.loop.decisions_per_update=96"]
FEWER = ["total=1600", "method.loop.warmup=800", "method.loop.initial_updates=20"]
DREAM = [  # DSRL with the settings of experiment=push/dsrl
    "env.reward=dense",
    "method=imagine",
    "method.inner=dsrl",
    "method.inner.discount={gamma: 0.995, per: step}",
    "method.inner.loop.warmup=1000",
    "method.inner.loop.updates_per_decision=0.1",
    "method.inner.sac={alpha: 0.02, backup_entropy: false}",
    "method.known_outcome=true",
    "method.collect=32",
    "method.imagined=10000",
    "total=8960",
]
RESIDUAL = [  # SAC with its usual settings, and a bound that reaches where no model was fitted
    "method.inner=residual_td3",
    "method.inner.algorithm=sac",
    "method.inner.bound=0.5",
    "method.inner.discount={gamma: 0.995, per: step}",
    "method.inner.loop={warmup: 2000, updates_per_decision: 0.25, n_step: 3}",
    "method.inner.sac={lr: 3e-4, actor_lr: 3e-4, actor_every: 1, subset: 0, critic: {members: 2, hidden: [256, 256]}}",
]
# One round of as many imagined decisions, and nothing that could notice.
UNGUARDED = ["total=1440", "method.imagined=40000", "method.gap=2", "method.guard.kind=none"]
VARIANTS = {
    "imagine": Variant("insert", IMAGINE, SHORT, seeds=15),
    "imagine_data": Variant("insert", [*IMAGINE, *FEW], SHORT, recorded=True),
    "imagine_residual": Variant("insert", [*IMAGINE, *RESIDUAL], seeds=3),
    "unguarded": Variant("insert", [*IMAGINE, *UNGUARDED], SHORT),
    "unguarded_residual": Variant("insert", [*IMAGINE, *RESIDUAL, *UNGUARDED], seeds=3),
    "dsrl": Variant("insert", ["experiment=insert/dsrl", "eval_every=750"], ["total=1500"]),
    "push_imagine_20k": Variant("push", ["env=push", *DREAM], seeds=3),
    "push_residual_20k": Variant("push", [*SAC, "total=20000"], FEWER, seeds=3, greedy=True),
    "push_residual_100k": Variant("push", [*SAC, "total=100000"], seeds=3, greedy=True),
    # PPO plays whole iterations, of 16 worlds times 96 ticks: 13 and 65 of them
    "pick_place_residual_20k": Variant("pick_place", [*PPO, "total=19968"], seeds=3, greedy=True),
    "pick_place_residual_100k": Variant("pick_place", [*PPO, "total=99840"], seeds=3, greedy=True),
}


def command(variant: Variant, base: Path, seed: int, out: Path, quick: bool) -> list[str]:
    words = ["finetune", f"policy.path={base}", *variant.words, f"seed={seed}", f"out={out}"]
    words += ["threads=1", "log_every=16", "eval.worlds=50"]
    words += [f"data={recordings_of(variant.task)}"] if variant.recorded else []
    tried = variant.task == "insert"
    words += ["eval.episodes=100", "eval.confirm=100"] if tried else ["eval.episodes=0", "eval_every=0"]
    few = ["eval.episodes=16", "eval.confirm=16", "eval_every=0"] if tried else []
    return [*words, *(variant.less or []), *few] if quick else words


def start_of(variant: Variant, folder: Path) -> Path:
    """The base, or what makes it act from noise 0, kept in ``folder``."""
    base = BASES / variant.task
    if not variant.greedy:
        return base
    policy, origin = load_policy(base)
    greedy = Greedy(policy)
    return save(folder / "greedy", config=describe(greedy, origin), state=greedy.state_dict())


def played(name: str, seed: int, kept: Path, quick: bool) -> None:
    """One run, written to ``kept``."""
    variant = VARIANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "run", Path(folder) / "log"
        with log.open("w", encoding="utf-8") as file:
            base = start_of(variant, Path(folder))
            status, spent = timed(command(variant, base, seed, out, quick), file)
        if status:
            sys.stderr.write(f"{kept.stem} ended with status {status}: {log.read_text()[-300:]}\n")
            return
        policy, origin = load_policy(out)
        env = world_for(policy.spec, origin["env"], 50, torch.device("cpu"))
        seeds = evaluation_seeds(32 if quick else EPISODES, stream="imagine_quality", base=seed)
        last = evaluate(env, controller_for(policy, 50), seeds).summary()
        rows = read_metrics(out)
    tried = "eval/success_rate" if name == "dsrl" else "real/score"
    curve = [(row["control_steps"], row[tried]) for row in rows if tried in row and row.get("control_steps")]
    curve = [point for i, point in enumerate(curve) if i == 0 or point[1] != curve[i - 1][1]]
    imagined = [(row["control_steps"], row["imagined/promised"]) for row in rows if "imagined/promised" in row]
    reached = [steps for steps, score in curve if score >= LEVEL]
    found = {
        "variant": name,
        "seed": seed,
        "reached": min(reached, default=None),
        "ticks": max(row.get("control_steps", 0) for row in rows),
        "success": last["success_rate"],
        "low": last["success_low"],
        "high": last["success_high"],
        "promised": imagined[-1][1] if imagined else None,
        "curve": curve,
        "minutes": spent["cpu_s"] / 60,
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found) + "\n", encoding="utf-8")
    sys.stderr.write(f"{kept.stem}: {found['success']:.3f}, level reached after {found['reached']} ticks\n")


def main() -> None:
    parser = run_options(__doc__, range(15))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    chosen = parser.parse_args()
    results = results_of("imagine_quality", chosen)
    names = [x for x, variant in VARIANTS.items() if variant.less is not None or not chosen.quick]
    seeds = chosen.seeds[:1] if chosen.quick else chosen.seeds
    cases = [(name, seed) for seed in seeds for name in names if seed < VARIANTS[name].seeds]
    if not chosen.report:
        played_now = [case for case in cases if case[0] in chosen.variants]
        left = [(v, s, kept) for v, s in played_now if not (kept := results / f"{v}-{s}.json").exists()]
        with ThreadPoolExecutor(chosen.jobs) as pool:
            list(pool.map(lambda case: played(case[0], case[1], case[2], chosen.quick), left))
    files = [results / f"{v}-{s}.json" for v, s in sorted(cases)]
    rows: list[dict[str, Any]] = [json.loads(kept.read_text(encoding="utf-8")) for kept in files if kept.exists()]
    ticks, success = (
        {v: [value(row) for row in rows if row["variant"] == v] for v in VARIANTS}
        for value in (lambda row: row["reached"] or row["ticks"], lambda row: row["success"])
    )
    insert = [v for v, variant in VARIANTS.items() if variant.task == "insert"]
    result: dict[str, float] = {f"insert_{v}": statistics.median(success[v]) if success[v] else -1 for v in insert}
    imagined = [statistics.median(ticks[v]) for v in ("imagine", "imagine_data") if ticks[v]]
    real = ticks["dsrl"]
    result["insert_fewer_steps"] = statistics.median(real) / min(imagined) if real and imagined else -1
    for key in ("push_20k", "push_100k", "pick_place_20k", "pick_place_100k"):
        task, _, steps = key.rpartition("_")
        means = [statistics.mean(x) for v, x in success.items() if x and v.startswith(task) and v.endswith(steps)]
        result[key] = max(means, default=-1)
    columns = {"variant": "", "seed": "", "reached": "", "ticks": "", "success": ".3f", "low": ".3f", "high": ".3f"}
    columns |= {"promised": "", "minutes": ".1f"}
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "rows": rows}
    publish(results.with_suffix(".json"), report, table(rows, columns), result)
    page(results, text := markdown(summary(rows), SUMMARY))
    if results.parent == RESULTS and not chosen.quick:
        embed(DOCUMENT, "imagine_quality", text)


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each variant, and those of what needs no episodes, from the committed runs of `refine_quality.py`."""
    found = []
    for task in ("insert", "push", "pick_place"):
        for name, variant in VARIANTS.items():
            runs = [row for row in rows if row["variant"] == name and variant.task == task]
            if runs:
                reached = [run["reached"] for run in runs if run["reached"]]
                tried = any(run["curve"] for run in runs)
                promised = [run["promised"] for run in runs if run["promised"] is not None]
                means = {"success": [run["success"] for run in runs], "minutes": [run["minutes"] for run in runs]}
                found.append(
                    {"task": task, "variant": name, "runs": len(runs)}
                    | {key: statistics.mean(x) for key, x in means.items()}
                    | {"worst": min(means["success"]), "ticks": statistics.median(run["ticks"] for run in runs)}
                    | {
                        "promised": statistics.mean(promised) if promised else None,
                        "reached": len(reached) if tried else None,
                    }
                    | {"reached_after": statistics.median(reached) if reached else None}
                )
        place = RESULTS / "refine_quality" / task
        free = {name: [place / f"{name}.json"] for name in ("base", "base_greedy")}
        free |= {name: sorted(place.glob(f"{name}-[0-9].json")) for name in ("more_imitation", "iql", "best_of_n")}
        for name, paths in free.items():
            each = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
            scores = [statistics.mean(x["last"] if "last" in x else x["success"]) for x in each]
            if scores:
                nothing = dict.fromkeys(("promised", "reached", "reached_after", "minutes"))
                row = {"success": statistics.mean(scores), "worst": min(scores), "ticks": 0, "runs": len(scores)}
                found.append({"task": task, "variant": name, **nothing, **row})
    return found


if __name__ == "__main__":
    main()
