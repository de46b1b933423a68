"""The costs of many actors and one learner, a model that is fitted to them, and its checks.

    python benchmarks/scale_costs.py [--quick] [--report] [--out DIR]

`scale_parts.py` measures costs, in seconds of a processor: of an actor's row (its ticks, its choice, its packing) by
the worlds of the actor, of an update by its batch, of the row of one actor at the learner, of storing by the number of
actors, and of weights; over the mailbox of this machine, and over Ray where it is installed. An actor steps its worlds
by one thread, as if it had one core. The two cases are SAC on the hopper, and DSRL on a flow base in `insert`.

`scale_model.py` has the model and a simulation of the protocol. The model is compared

* with runs of `processes=2` and `3`, as `burnish finetune` builds them. The cores that one, two and three busy
  processes get are measured right before and right after each run, so that other work on the machine is a part of the
  prediction; the processor seconds of the run are compared too;
* with the same classes at work with actors that sleep instead of playing, in threads: up to 16, with a heavy tail;
* with the simulation of 1 to 1,000 actors with a core each, whose messages go over Ray where that was measured, on one
  machine, and over networks that are added to it: how many bytes a message has was measured, and what a network takes
  for them is computed.

`--report` computes and writes everything anew from the measurements that the JSON file holds.

RESULT: ``predicted_over_measured`` and ``predicted_over_simulated``, the ratios of decisions a second that are farthest
from 1; ``actors_until_learner_bound``, of robots in real time (one world each, DSRL, one update per decision).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from math import log
from multiprocessing import Pipe
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import scale_parts as parts
import torch
from measure import RESULTS, embed, machine, markdown, options, publish, table
from scale_model import (
    NETWORKS,
    Costs,
    Terms,
    Times,
    actors_s,
    apart,
    enough,
    learner_s,
    over,
    row_s,
    simulate,
    weights_share,
)

import burnish.finetune.refinement as refining
from burnish.finetune.advice import useful_actors
from burnish.finetune.loops import OffPolicy
from burnish.finetune.processes.actor_process import run_actor
from burnish.finetune.processes.asynchronous import Asynchronous, AsynchronousConfig
from burnish.sim import physics

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
# Updates per decision: with many the learner sets the pace, with few the actors.
RUNS = [("hopper", 1.0), ("hopper", 0.02), ("insert", 0.02)]
SPIN = "import time; b = time.perf_counter()\nwhile time.perf_counter() - b < 1: pass\nprint(time.process_time())"
ASLEEP_S, UPDATE_S = 0.25, 0.01  # mean of a row, and an update, that is slept through
TAIL = 0.5  # sigma of the logarithm of a heavy tail
ROBOT_S = 0.2  # four ticks of a robot in real time, at 20 a second: a decision of `insert`

# ---- the runs ----


def cores_now(most: int) -> list[float]:
    """Cores that one, two, ... busy processes get together, now."""
    found = []
    for count in range(1, most + 1):
        command = [sys.executable, "-S", "-c", SPIN]
        spinning = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
        found.append(sum(float(process.communicate()[0]) for process in spinning))
    return found


def processor_s() -> Times:
    """Processor seconds of this process, and of those that it started and that still run, as Linux counts them."""
    ticks = 0
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return np.array([time.process_time(), ticks / os.sysconf("SC_CLK_TCK")])


def watched(training: Asynchronous, window_s: float) -> dict[str, float]:
    """A run behind its warm-up: seconds and processor seconds of a row of all worlds, and who waited."""
    try:
        while training.loop.warm:
            training.iterate()
        settled = time.monotonic() + window_s / 5
        while time.monotonic() < settled:
            training.iterate()
        training.report()
        rows, began, cpu = 0, time.monotonic(), processor_s()
        while time.monotonic() < began + window_s or rows < 10:
            training.iterate()
            rows += 1
        elapsed, (learner, acting) = time.monotonic() - began, processor_s() - cpu
        report = training.report()
    finally:
        training.close()
    waits = {name: float(report[f"time/{name}"]) for name in ("learner_waits", "actor_waits")}
    return {"rows": rows, "row_s": elapsed / rows, "learner_s": learner / rows, "acting_s": acting / rows, **waits}


def real_run(case: str, ratio: float, actors: int, window_s: float) -> dict[str, Any]:
    before = cores_now(actors + 1)
    config = parts.settings(case, parts.WORLDS[case] * actors, ratio, actors)
    training: Any = refining.refinement(config, tried=False)[0].training
    found = watched(training, window_s)
    cores = [fmean(pair) for pair in zip(before, cores_now(actors + 1), strict=True)]
    return {"run": case, "case": case, "ratio": ratio, "actors": actors, "cores": cores, **found}


class Acting(threading.Thread):
    """A thread that stands for an acting process."""

    exitcode = None

    def kill(self) -> None:
        """It leaves by itself."""


def in_thread(make: Any, config: Any, terms: Any) -> tuple[Any, Any]:
    ours, theirs = Pipe()
    thread = Acting(target=run_actor, args=(theirs, make, config, terms, lambda: None), daemon=True)
    thread.start()
    return thread, ours


def pauses() -> Times:
    return np.random.default_rng(0).lognormal(log(ASLEEP_S) - TAIL**2 / 2, TAIL, 1000)


def asleep(ratio: float, actors: int, window_s: float) -> dict[str, Any]:
    """Actors that sleep through their rows, with a heavy tail, and a learner that sleeps through its updates."""
    speed, times = cores_now(1)[0], pauses()

    def sleepy(config: Any, seed: int) -> OffPolicy[Any]:
        loop, chance = parts.built("hopper", 1), np.random.default_rng(seed)
        row = loop.played(True)

        def played(warm: bool) -> Any:
            time.sleep(chance.choice(times))
            return row

        loop.played = played
        return loop

    def update(source: Any) -> dict[str, float]:
        time.sleep(UPDATE_S)
        return {}

    loop = parts.built("hopper", actors)
    loop.config.updates_per_decision, loop.config.warmup, loop.learner.update = ratio, 0, update
    found = watched(Asynchronous(loop, sleepy, None, AsynchronousConfig(), actors=actors, launch=in_thread), window_s)
    return {"run": "asleep", "case": "hopper", "ratio": ratio, "actors": actors, "speed": speed, **found}


# ---- the predictions ----


def compared(run: dict[str, Any], costs: Costs) -> dict[str, Any]:
    """A run beside its prediction."""
    terms, actors, worlds = Terms(run["ratio"]), run["actors"], run["actors"] * costs.worlds
    cores = apart
    asleep = run["run"] == "asleep"  # and no processor is busy
    if asleep:
        # The sleepers sleep as long as ever, while what is computed takes longer on a loaded machine.
        slower = {key: x / run["speed"] for key, x in costs._asdict().items() if isinstance(x, float)}
        costs = costs._replace(**slower, rows=pauses(), updates=np.full(2, UPDATE_S))
    else:

        def cores(count: int) -> float:
            return run["cores"][count - 1]

    seconds = row_s(costs, terms, actors, cores)
    cpu_s = learner_s(costs, terms, actors) + actors * float(costs.rows.mean())
    return {
        **{key: run[key] for key in ("run", "ratio", "actors")},
        "measured": worlds / run["row_s"],
        "predicted": worlds / seconds,
        "predicted_over_measured": run["row_s"] / seconds,
        "processors": None if asleep else cpu_s / (run["learner_s"] + run["acting_s"]),
        "learner_waits": run["learner_waits"],
        "actor_waits": run["actor_waits"],
        "advised": useful_actors(actors, run["learner_waits"], run["actor_waits"]),
        "enough": enough(costs, terms),
    }


def scenes(found: dict[str, Costs]) -> dict[str, tuple[Costs, Terms]]:
    """Cases of up to a thousand actors."""
    hopper, insert = found["hopper"], found["insert"]
    robot = insert._replace(worlds=1, rows=ROBOT_S + insert.rows / insert.worlds)
    random = np.random.default_rng(1)
    heavy = robot._replace(rows=random.choice(robot.rows, 4000) * random.lognormal(-(TAIL**2) / 2, TAIL, 4000))
    return {
        "hopper": (hopper, Terms(0.02)),
        "insert": (insert, Terms(0.02)),
        "robot": (robot, Terms(1.0)),
        "robot, fewer updates": (robot, Terms(0.05)),
        "robot, weights seldom": (robot, Terms(0.05, publish_every=200)),
        "robot, heavy tail": (heavy, Terms(0.05)),
        "robot, heavy tail, backlog=4000": (heavy, Terms(0.05, backlog=4000)),
    }


def played_out(found: dict[str, Costs], counts: Sequence[int], effort: int) -> list[dict[str, Any]]:
    rows = []
    for name, (costs, terms) in scenes(found).items():
        many = enough(costs, terms)
        for actors in counts:
            predicted = row_s(costs, terms, actors)
            seen = simulate(costs, terms, actors, max(60, min(2000, effort // actors)))
            bound = learner_s(costs, terms, actors) >= actors_s(costs, terms, actors)
            rows.append(
                {
                    "case": name,
                    "ratio": terms.ratio,
                    "actors": actors,
                    "pace": "learner" if bound else "actors",
                    "predicted": actors * costs.worlds / predicted,
                    "simulated": actors * costs.worlds / seen.row_s,
                    "predicted_over_simulated": seen.row_s / predicted,
                    "learner_waits": seen.learner_waits,
                    "actor_waits": seen.actor_waits,
                    "advised": useful_actors(actors, seen.learner_waits, seen.actor_waits),
                    "enough": many,
                }
            )
    return rows


def networked(costs: Costs, bytes_of: dict[str, int], counts: Sequence[int], effort: int) -> list[dict[str, Any]]:
    """Many robots, and a learner with seldom weights, over networks that get slower and slower."""
    rows, terms = [], Terms(0.05, backlog=4000, publish_every=200)
    for network in NETWORKS:
        slower = over(costs, network, bytes_of["row_bytes"], bytes_of["weight_bytes"])
        for actors in counts:
            predicted, seen = row_s(slower, terms, actors), simulate(slower, terms, actors, max(60, effort // actors))
            rows.append(
                {
                    "network": network.name,
                    "actors": actors,
                    "predicted": actors * costs.worlds / predicted,
                    "simulated": actors * costs.worlds / seen.row_s,
                    "predicted_over_simulated": seen.row_s / predicted,
                    "rows_share": actors * slower.row_wire / predicted,
                    "weights_share": weights_share(slower, terms, actors, predicted),
                    "enough": enough(slower, terms),
                }
            )
    return rows


# ---- the report ----

COST = {"cost": "", **dict.fromkeys(parts.CASES, ",.0f")}
WAITED = {"learner_waits": ".2f", "actor_waits": ".2f", "advised": ",.1f", "enough": ",d"}
RAN = {"run": "", "ratio": "g", "actors": "d", "measured": ".1f", "predicted": ".1f", "predicted_over_measured": ".2f"}
RAN |= {"processors": ".2f", **WAITED}
SIMULATED = {"case": "", "ratio": "g", "actors": ",d", "pace": "", "predicted": ",.0f", "simulated": ",.0f"}
SIMULATED |= {"predicted_over_simulated": ".2f", **WAITED}
NETWORKED = {"network": "", "actors": ",d", "predicted": ",.0f", "simulated": ",.0f"}
NETWORKED |= {"predicted_over_simulated": ".2f", "rows_share": ".3f", "weights_share": ".3f", "enough": ",d"}
SHOWN = (1, 10, 100, 1000)  # actors, in the document


def cost_rows(measured: list[dict[str, Any]], only: int = 0) -> list[dict[str, Any]]:
    """The costs in microseconds, a column for each case; of actors with ``only`` so many worlds, or all."""
    found: dict[str, dict[str, Any]] = {}

    def note(case: str, cost: str, seconds: float) -> None:
        found.setdefault(cost, {"cost": cost})[case] = 1e6 * seconds

    for x in measured:
        case = x["case"]
        for row in x["rows"]:
            if only not in (0, row["worlds"]):
                continue
            note(case, f"an actor's row, {row['worlds']} worlds", row["row_s"])
            note(case, f"of it the ticks, and the base, {row['worlds']} worlds", row["tick_s"])
            note(case, f"of it the agent's choice, {row['worlds']} worlds", row["decide_s"])
        note(case, "an actor's row, fitted: fixed", x["row_fit_s"]["fixed"])
        note(case, "an actor's row, fitted: for each world", x["row_fit_s"]["world"])
        for batch, seconds in x["updates_s"].items():
            note(case, f"an update of {batch} decisions", seconds)
        for way, costs in x["costs"].items():
            note(case, f"{way}: the row of one actor received, read and answered", costs["message"])
            note(case, f"{way}: weights made ready", costs["pack"])
            note(case, f"{way}: weights sent to one actor", costs["post"])
            note(case, f"{way}: from a message to its answer", costs["turn"])
        costs = x["costs"]["mailbox"]
        note(case, "weights adopted by an actor", costs["adopt"])
        note(case, "rows joined and stored: fixed", costs["store"])
        note(case, "rows joined and stored: for each actor", costs["keep"])
    return list(found.values())


def farthest(ratios: Sequence[float]) -> float:
    """From 1, as a factor."""
    return max(ratios, key=lambda x: abs(log(x)))


def costs_from(seconds: dict[str, Any]) -> Costs:
    """As the JSON file has them."""
    made: dict[str, Any] = {key: np.array(x) if isinstance(x, list) else x for key, x in seconds.items()}
    return Costs(**made)


def told(written: dict[str, Any], out: Path) -> None:
    """All that follows from the measurements, in the JSON file, on the screen, and in the document."""
    quick, measured = written["quick"], written["costs"]
    costs = {x["case"]: {way: costs_from(seconds) for way, seconds in x["costs"].items()} for x in measured}
    ran = [compared(run, costs[run["case"]]["mailbox"]) for run in written["runs"]]
    counts = (1, 10, 1000) if quick else (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    far = {case: ways.get("ray", ways["mailbox"]) for case, ways in costs.items()}
    simulated = played_out(far, counts, 20_000 if quick else 50_000)
    heavy = scenes(far)["robot, heavy tail"][0]
    bytes_of = next(x for x in measured if x["case"] == "insert")
    crossed = networked(heavy, bytes_of, counts, 20_000 if quick else 50_000)
    result = {
        "predicted_over_measured": farthest([row["predicted_over_measured"] for row in ran]),
        "predicted_over_simulated": farthest([row["predicted_over_simulated"] for row in [*simulated, *crossed]]),
        "actors_until_learner_bound": next(row["enough"] for row in simulated if row["case"] == "robot"),
    }
    about = written["machine"]
    tables = {"costs": (cost_rows(measured), COST), "runs": (ran, RAN), "simulated": (simulated, SIMULATED)}
    tables["networks"] = (crossed, NETWORKED)
    text = "\n\n".join([f"{about['processor']}, load {about['load']}", *(table(*each) for each in tables.values())])
    report = {**written, "compared": ran, "simulated": simulated, "networks": crossed}
    publish(out / ("scale_costs_quick.json" if quick else "scale_costs.json"), report, text, result)
    if out == RESULTS and not quick:
        tables["costs"] = cost_rows(measured, only=4), COST
        tables["simulated"] = [row for row in simulated if row["actors"] in SHOWN], SIMULATED
        tables["networks"] = [row for row in crossed if row["actors"] in SHOWN[1:]], NETWORKED
        for name, (rows, columns) in tables.items():
            embed(DOCUMENT, f"scale_{name}", markdown(rows, columns))


def ray_here() -> Any:
    """Ray on this machine; None where it is not installed."""
    try:
        ray: Any = import_module("ray")
    except ImportError:
        sys.stderr.write("there is no Ray, so its messages are not measured\n")
        return None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="warning")
    return ray


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--report", action="store_true", help="from the measurements that are there")
    chosen = parser.parse_args()
    if chosen.report:
        told(json.loads((chosen.out / "scale_costs.json").read_text(encoding="utf-8")), chosen.out)
        return
    torch.set_num_threads(1)
    physics.usable_cores = lambda: 1
    quick = chosen.quick
    ray = None if quick else ray_here()
    measured = [parts.costs_of(case, quick, ray) for case in parts.CASES]
    version = None
    if ray is not None:
        version = ray.__version__
        ray.shutdown()
    sys.stderr.write("the costs are measured\n")
    runs = []
    for case, ratio in RUNS[1:2] if quick else RUNS:
        for actors in (1,) if quick else (1, 2):
            runs.append(real_run(case, ratio, actors, 2 if quick else 12))
            sys.stderr.write(f"{runs[-1]}\n")
    for actors in (2,) if quick else (1, 4, 16):
        runs.append(asleep(1.0, actors, 3 if quick else 20))
        sys.stderr.write(f"{runs[-1]}\n")
    report = {"machine": machine(torch.device("cpu")), "quick": quick, "ray": version, "costs": measured, "runs": runs}
    told(json.loads(json.dumps(report)), chosen.out)


if __name__ == "__main__":
    main()
