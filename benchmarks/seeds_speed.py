"""The cost of the update of several seeds as one batched computation, beside the update of one.

    python benchmarks/seeds_speed.py [--quick] [--device cpu cuda] [--report] [--out DIR]

A row is a learner with networks of two layers, on observations of 17 numbers and actions of 6 as in MuJoCo's half
cheetah; an update is drawing from a replay, losses, gradients, Adam, targets, and 8 are made in a row. ``batched`` is
one update of eight seeds (`offline/stacked.py`) over one of one seed (what a run alone makes), and ``apart`` is eight
updates of one seed each, one after the other, over the same. So ``apart`` / ``batched`` is what batching gains. Numbers
are medians over turns. On a CUDA GPU the same is measured line by line and as CUDA graphs.

RESULT: ``seeds8_over_1_cpu``, and where there is a GPU ``seeds8_over_1_cuda``, with CUDA graphs: ``batched`` of SAC
with layers of 256 and batches of 256.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import RESULTS, calls_for, embed, machine, markdown, options, publish, seconds, table
from tqdm import tqdm
from update_speed import Effort, Place, cheetah, memory

from burnish.offline.actor_critic import ActorCritic
from burnish.offline.sac import SAC, SACConfig, soft_agent
from burnish.offline.sources import Mixture
from burnish.offline.stacked import Stacked
from burnish.offline.td3 import TD3, TD3Config, deterministic_agent
from burnish.policies.build import build_policy
from burnish.policies.core.execute import Execution
from burnish.policies.nets.critic import CriticConfig

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
SEEDS, UPDATES = 8, 8
FULL, QUICK = Effort(rounds=8, block=0.2, decisions=0), Effort(rounds=3, block=0.05, decisions=0)
FULL_CUDA = Effort(rounds=4, block=0.2, decisions=0)  # three times the rows


class Case(NamedTuple):
    algorithm: str
    width: int  # of both layers of each network
    batch: int

    def learner(self, seed: int, place: Place) -> ActorCritic:
        hidden = [self.width, self.width]
        critic, spec = CriticConfig(layer_norm=False, hidden=hidden), cheetah(place)
        options: dict[str, Any] = {"seed": seed, "device": place.device}
        if self.algorithm == "sac":
            sac = SACConfig(critic=critic, agent=soft_agent(hidden=hidden), execution=place.execution)
            return SAC(build_policy(sac.agent, spec, seed=seed), sac, **options)
        td3 = TD3Config(critic=critic, agent=deterministic_agent(hidden=hidden), execution=place.execution)
        return TD3(build_policy(td3.agent, spec, seed=seed), td3, **options)

    def source(self, place: Place) -> Mixture:
        return Mixture(memory(cheetah(place), place.device), batch=self.batch)


JUDGED = Case("sac", 256, 256)
CASES = [JUDGED, Case("td3", 256, 256), Case("sac", 64, 256), Case("sac", 64, 64)]


class Measured:
    """One row: the same updates alone, apart and batched, which take turns."""

    def __init__(self, case: Case, place: Place) -> None:
        self.case, self.place = case, place
        sources = [case.source(place) for _ in range(SEEDS)]
        one, *others = [case.learner(seed, place) for seed in range(SEEDS)]
        stacked = Stacked([case.learner(seed, place) for seed in range(SEEDS)])

        def alone(learner: ActorCritic = one, source: Mixture = sources[0]) -> None:
            for _ in range(UPDATES):
                learner.update(source)

        def apart() -> None:
            for learner, source in zip((one, *others), sources, strict=True):
                alone(learner, source)

        self.calls: dict[str, Callable[[], Any]] = {
            "alone": alone,
            "apart": apart,
            "batched": lambda: stacked.learn(sources, UPDATES),
        }
        self.times: dict[str, list[float]] = {name: [] for name in self.calls}
        self.counts = {name: calls_for(place.effort.block, call, place.device) for name, call in self.calls.items()}

    def turn(self) -> None:
        for name, call in self.calls.items():
            self.times[name].append(seconds(call, self.counts[name], self.place.device))

    def over_alone(self, name: str) -> float:
        return statistics.median(a / b for a, b in zip(self.times[name], self.times["alone"], strict=True))

    def row(self) -> dict[str, Any]:
        case = self.case._asdict()
        alone_ms = 1000 * statistics.median(self.times["alone"]) / UPDATES
        ratios = {name: self.over_alone(name) for name in ("batched", "apart")}
        where = {"device": self.place.device.type, "execution": self.place.execution.value}
        return {**case, **where, "alone_ms": alone_ms, **ratios, "gain": ratios["apart"] / ratios["batched"]}


COLUMNS = {
    "algorithm": "",
    "width": "d",
    "batch": "d",
    "device": "",
    "execution": "",
    "alone_ms": ".2f",
    "batched": ".2f",
    "apart": ".2f",
    "gain": ".2f",
}


def measure_all(devices: list[str], usual: Effort) -> dict[str, Any]:
    """The report, with its RESULT."""
    torch.set_num_threads(1)
    modes = {"cpu": (Execution.eager,), "cuda": (Execution.eager, Execution.cudagraph)}
    places = [Place(torch.device(kind), mode, usual) for kind in devices for mode in modes[kind]]
    measured = [Measured(case, place) for place in places for case in CASES]
    for _ in tqdm(range(usual.rounds), disable=None):
        for item in measured:
            item.turn()
    judged = {item.place.device.type: item for item in measured if item.case is JUDGED}  # of a GPU, the CUDA graphs
    result = {f"seeds8_over_1_{device}": item.over_alone("batched") for device, item in judged.items()}
    rows = [item.row() for item in measured]
    return {"machine": machine(places[-1].device), "seeds": SEEDS, "updates": UPDATES, "rows": rows, "result": result}


def main() -> None:
    parser, kinds = options(__doc__), ["cpu", "cuda"]
    there = kinds if torch.cuda.is_available() else kinds[:1]
    parser.add_argument("--device", nargs="+", choices=kinds, default=there, help="default: all that there are")
    parser.add_argument("--report", action="store_true", help="only print and write the table of what is there")
    chosen = parser.parse_args()
    if not chosen.report and not {*chosen.device} <= {*there}:
        parser.error("--device=cuda needs a CUDA device, and torch finds none; use --device=cpu")
    gpu = "cuda" in chosen.device
    name = "_".join(["seeds_speed", *(["cuda"] if gpu else []), *(["quick"] if chosen.quick else [])])
    path = chosen.out / f"{name}.json"
    if chosen.report:
        report = json.loads(path.read_text(encoding="utf-8"))
    else:
        usual = QUICK if chosen.quick else FULL_CUDA if gpu else FULL
        report = {**measure_all(chosen.device, usual), "quick": chosen.quick}
    about, rows = report["machine"], report["rows"]
    head = f"{about.get('gpu', about['processor'])}, 1 thread, load {about['load']}, {SEEDS} seeds"
    publish(path, report, f"{head}\n\n{table(rows, COLUMNS)}", report["result"])
    if path == RESULTS / "seeds_speed_cuda.json":
        embed(DOCUMENT, name, markdown(rows, COLUMNS))


if __name__ == "__main__":
    main()
