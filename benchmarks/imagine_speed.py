"""How fast worlds are imagined, beside the bare networks of the same model and beside the world itself.

    python benchmarks/imagine_speed.py [--quick] [--out DIR]

The model is the one that `method=imagine` fits by default, of `insert`: five members of 3 x 256 for the dynamics and
2 x 256 for rewards and ends, which have seen random play. **Bare** is one batched pass of both networks on inputs that
are ready; **imagined** is `ImaginedEnv.step`: noise, clamps, ends, disagreement and guard. **Raw** is `insert` itself.
Imagined and raw worlds take the same random actions, and those that end begin anew. A tick is one of one world. All
alternate, and numbers are medians over turns, as are the shares of each turn. Seconds are those that the process spent
on a core, with one thread of torch: all that counts here computes and never waits, and what else the machine does adds
little to them.

**Fitting** is the default number of updates (1000) on 5,000 rows: the time of five of them, two hundred times; also a
median over turns.

RESULT: ``imagined_over_bare`` (at least 0.8) and ``imagined_over_raw`` (at least 5), both of 64 worlds; ``fit_s``
(at most 30 on one core).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import machine, options, publish, table
from tqdm import tqdm

from burnish.finetune.world_model.env import GuardConfig, ImaginedEnv
from burnish.finetune.world_model.model import Fit, ModelConfig, WorldModel
from burnish.finetune.world_model.ticks import Tape, Ticks
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.seed import generator
from burnish.policies.core.types import VecEnv
from burnish.sim.build import make_env

WORLDS, ROWS, CPU = (16, 64, 256), 5000, torch.device("cpu")


def core_s(call: Callable[[], Any], count: int) -> float:
    """Mean of ``count`` calls in a row, in seconds of a core."""
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count


class Random:
    """``env`` stepped with random actions; worlds that end begin anew."""

    def __init__(self, env: VecEnv) -> None:
        self.env, self.dice = env, generator(0, "actions")
        env.reset()

    def __call__(self) -> None:
        shape = self.env.num_envs, self.env.spec.action.dim
        step = self.env.step(torch.rand(*shape, generator=self.dice) * 2 - 1)
        if bool((ended := step.terminated | step.truncated).any()):
            self.env.reset(ended)


def insert(worlds: int) -> VecEnv:
    return ScaledEnv(make_env("insert", worlds))


def ticks_of_insert(rows: int) -> Ticks:
    tape = Tape(insert(50), Ticks())
    play = Random(tape)
    while len(tape.ticks) < rows:
        play()
    return tape.ticks


def bare(model: WorldModel, worlds: int) -> Callable[[], Any]:
    inputs = torch.randn(worlds, sum(model.sizes) + model.spec.action.dim, generator=generator(0, "inputs"))

    @torch.no_grad()
    def forward() -> None:
        model.dynamics(inputs)
        model.outcome(inputs)

    return forward


def measured(config: ModelConfig, ticks: Ticks, rounds: int, block: float) -> tuple[list[dict[str, Any]], float]:
    """The rows of the table, and the seconds of a fit."""
    model = WorldModel(insert(1).spec, config)
    model.prepare(ticks)
    data = ticks.all()
    fit = Fit(model, 0)
    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    for worlds in WORLDS:
        env = ImaginedEnv(model, worlds, GuardConfig())
        env.begin(ticks)
        calls |= {("imagined", worlds): Random(env), ("bare", worlds): bare(model, worlds)}
        calls["raw", worlds] = Random(insert(worlds))
    for call in (*calls.values(), partial(fit.steps, data, 2)):  # the first calls are slower
        call()
    counts = {key: max(1, round(block / core_s(call, 3))) for key, call in calls.items()}
    found: dict[Any, list[float]] = {key: [] for key in calls}
    fits = []
    for _ in tqdm(range(rounds), disable=None):
        for key, call in calls.items():
            found[key].append(key[1] / core_s(call, counts[key]))
        fits.append(core_s(partial(fit.steps, data, 5), 1) / 5 * config.updates)

    def over(kind: str, worlds: int) -> float:
        return statistics.median(a / b for a, b in zip(found["imagined", worlds], found[kind, worlds], strict=True))

    rows = [
        {
            "worlds": worlds,
            **{f"{kind}_per_s": statistics.median(found[kind, worlds]) for kind in ("imagined", "bare", "raw")},
            "over_bare": over("bare", worlds),
            "over_raw": over("raw", worlds),
        }
        for worlds in WORLDS
    ]
    return rows, statistics.median(fits)


COLUMNS = {"worlds": "d", "imagined_per_s": ",.0f", "bare_per_s": ",.0f", "raw_per_s": ",.0f"}
COLUMNS |= {"over_bare": ".2f", "over_raw": ".1f"}


def main() -> None:
    chosen = options(__doc__).parse_args()
    torch.set_num_threads(1)
    config = ModelConfig(members=2, hidden=[32, 32], updates=10) if chosen.quick else ModelConfig()
    ticks = ticks_of_insert(500 if chosen.quick else ROWS)
    rows, fit_s = measured(config, ticks, *(2, 0.01) if chosen.quick else (30, 0.05))
    about = machine(CPU)
    setting = {"members": config.members, "hidden": config.hidden, "updates": config.updates, "rows": len(ticks)}
    report = {"machine": about, "quick": chosen.quick, "setting": setting, "rows": rows, "fit_s": fit_s}
    head = f"{about['processor']}, one core, load {about['load']}; a fit takes {fit_s:.1f} s"
    at_64 = next(row for row in rows if row["worlds"] == 64)
    result = {"imagined_over_bare": at_64["over_bare"], "imagined_over_raw": at_64["over_raw"], "fit_s": fit_s}
    name = "imagine_speed_quick" if chosen.quick else "imagine_speed"
    publish(chosen.out / f"{name}.json", report, f"{head}\n\n{table(rows, COLUMNS)}", result)


if __name__ == "__main__":
    main()
