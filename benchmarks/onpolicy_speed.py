"""Control steps per second of on-policy refinement, updates included, beside the machine's limits.

    python benchmarks/onpolicy_speed.py [--quick] [--threads 2] [--iterations 2] [--out DIR]
                                        [--device cuda [--execution cudagraph]] [--published CLONE]

Gymnasium's Hopper at the published settings of DPPO (arXiv 2409.00588) and ReinFlow (arXiv 2505.22094): 40 worlds, 500
chunks of 4 actions, 80 000 control steps in an iteration, 5 passes, minibatches of 5 000 chunks, which are 50 000
denoising steps of DPPO. DPPO trains the last 10 of 20 steps of a diffusion policy, ReinFlow all 4 of a flow. ``dppo_4``
is DPPO on the last 4 of 4 steps of that same flow: the difference between the methods, without that between the lengths
of their chains. The bases are untrained: that costs the same time, but their hoppers fall sooner and are reset more
often.

An iteration is split by the clock into ``world`` (ticks and resets), ``policy`` (drawing chunks), ``update``, the rest.
``update_peak_share`` is the FLOP/s of the matrix products of the update over those of a square product, measured before
and after it; ``sim_over_raw`` the control steps per second of ``world`` over those of a native loop per thread over
`mj_step` (the limit of sim_speed.py), 40 worlds, uniform actions.

``--published`` names a clone of DPPO's own code, of which one iteration at these settings is timed beside ours, in
worlds that cost nothing (`published_dppo.py`); its control steps per second are a row too.

RESULT: ``steps_per_s_reinflow``, ``steps_per_s_dppo``; ``update_peak_share`` and ``sim_over_raw``, the lower of the two
methods; ``reinflow_over_dppo`` and ``reinflow_over_dppo_4``, in control steps per second; ``dppo_over_published``, or
``dppo_over_published_cuda``, of our whole iteration, worlds included, over theirs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import burnish.policies  # noqa: F401  # before torch: it says how torch's threads wait

# isort: split
import torch
from measure import RESULTS, MatmulPeak, embed, machine, markdown, options, page, publish, synchronize, table
from published_dppo import iteration_s
from sim_peers import Effort, worlds
from sim_speed import Limit, Ours, compiled, record
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from burnish.finetune.build import prepare
from burnish.finetune.loops import OnPolicy
from burnish.finetune.methods.dppo import DPPOConfig
from burnish.finetune.methods.reinflow import ReinFlowConfig
from burnish.policies.build import build_policy
from burnish.policies.core.execute import Execution
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import EnvSpec, agent_spec
from burnish.policies.diffusion import DiffusionConfig, Sampler
from burnish.policies.flow import FlowConfig
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig

CHOOSING, SCALE = (Path(__file__).resolve().parents[1] / "docs" / f"{name}.md" for name in ("choosing", "scale"))
WORLDS, CHUNK, DECISIONS = 40, 4, 500
PEAK_BLOCK = 0.5  # seconds of matrix products before and after an update
NET = DenoiserConfig(mlp=MlpBodyConfig(hidden=[512, 512, 512]))
FLOW = FlowConfig(steps=4, net=NET)
DIFFUSION = DiffusionConfig(train_steps=20, steps=20, sampler=Sampler.ddpm, net=NET)


def base(config: Any, spec: EnvSpec, device: torch.device) -> Any:
    return build_policy(config, replace(agent_spec(spec), horizon=CHUNK, execute=CHUNK), device=device)


def methods() -> dict[str, tuple[Any, Any]]:
    """Method -> its configuration, and that of its base."""
    reinflow, dppo = ReinFlowConfig(), DPPOConfig()
    short = replace(dppo, trained_steps=4)
    return {
        "reinflow": (reinflow, FLOW),
        "dppo": (dppo, DIFFUSION),
        "dppo_4": (replace(short, ppo=replace(short.ppo, minibatch=dppo.ppo.minibatch * 10 // 4)), FLOW),
    }


class Clock:
    """Counts the seconds within some calls, on a GPU until their work is done."""

    def __init__(self, device: torch.device) -> None:
        self.seconds, self.device = 0.0, device

    def watch(self, owner: Any, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                synchronize(self.device)
                self.seconds += time.perf_counter() - begin

        setattr(owner, name, timed)


class Timed:
    """One method at work on hoppers of its own."""

    def __init__(self, name: str, threads: int, decisions: int, device: torch.device, execution: Execution) -> None:
        config, policy = methods()[name]
        config = replace(config, loop=replace(config.loop, decisions_per_update=decisions))
        config.ppo = replace(config.ppo, execution=execution)
        world = worlds("hopper", WORLDS, threads, str(device))
        env = ScaledEnv(world)
        loop = prepare(config, base(policy, env.spec, device), env, device=device)
        assert isinstance(loop, OnPolicy)
        self.name, self.loop = name, loop
        self.world, self.policy, self.update = Clock(device), Clock(device), Clock(device)
        self.world.watch(world, "step")
        self.world.watch(world, "reset")
        self.policy.watch(loop.learner.actor, "act")
        self.flops, self._peaks = 0, [0.0]
        learn = loop.learner.update

        def update(source: Any) -> Any:
            if not self.flops:
                with FlopCounterMode(display=False) as counter:
                    learn(source)
                self.flops = counter.get_total_flops()
            before = peak.measure(PEAK_BLOCK)
            begin = time.perf_counter()
            found = learn(source)
            synchronize(device)
            self.update.seconds += time.perf_counter() - begin
            self._peaks.append((before + peak.measure(PEAK_BLOCK)) / 2)
            return found

        peak = MatmulPeak(device)
        loop.learner.update = update
        loop.iterate()  # counts FLOP, and warms up, or records

    def turn(self, limit: float) -> dict[str, Any]:
        clocks = (self.world, self.policy, self.update)
        for clock in clocks:
            clock.seconds = 0.0
        ticks, begin = int(self.loop.statistics.ticks), time.perf_counter()
        self.loop.iterate()
        total = time.perf_counter() - begin
        world_s, policy_s, update_s = (clock.seconds for clock in clocks)
        total -= 2 * PEAK_BLOCK  # the products beside the update
        steps = int(self.loop.statistics.ticks) - ticks
        return {
            "steps": steps,
            "steps_per_s": steps / total,
            "world_s": world_s,
            "policy_s": policy_s,
            "update_s": update_s,
            "other_s": total - world_s - policy_s - update_s,
            "update_peak_share": self.flops / update_s / self._peaks[-1],
            "sim_over_raw": steps / world_s / limit,
        }


COLUMNS = {"method": "", "steps": ",.0f", "steps_per_s": ",.0f"}
COLUMNS |= dict.fromkeys(("world_s", "policy_s", "update_s", "other_s"), ".2f")
COLUMNS |= {"update_peak_share": ".3f", "sim_over_raw": ".3f"}


def peers(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The row of the published code, whose parts are not timed, where it ran."""
    if (theirs := report.get("published")) is None:
        return []
    row = {"method": "published dppo", "steps": theirs["steps_per_s"] * theirs["iteration_s"], **theirs}
    return [{**dict.fromkeys(COLUMNS), **row}]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--threads", type=int, default=2, help="of torch and of the simulation (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=2, help="of each method, after one (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    modes = [Execution.eager.value, Execution.cudagraph.value]
    parser.add_argument("--execution", choices=modes, default=modes[0], help="default: %(default)s")
    parser.add_argument("--published", type=Path, help="a clone of github.com/irom-princeton/dppo")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda needs a CUDA device, and torch finds none; use --device=cpu")
    if chosen.device == "cpu" and chosen.execution != modes[0]:
        parser.error("--execution=cudagraph needs --device=cuda")
    device = torch.device(chosen.device)
    if chosen.threads < 1 or chosen.iterations < 1:
        parser.error("--threads and --iterations must be at least 1")
    torch.set_num_threads(chosen.threads)
    decisions, iterations = (8, 1) if chosen.quick else (DECISIONS, chosen.iterations)
    effort = Effort(worlds=(WORLDS,), rounds=1, block=0.1 if chosen.quick else 1.0, burn_in=50)
    ours = Ours("hopper", WORLDS, chosen.threads, effort)
    native = Limit(record(ours), compiled(), chosen.threads)
    native.play()
    native.check()
    timed = [Timed(name, chosen.threads, decisions, device, Execution(chosen.execution)) for name in methods()]
    turns: dict[str, list[dict[str, Any]]] = {item.name: [] for item in timed}
    # In turns, so that a slow minute of the machine touches all alike.
    for _ in tqdm(range(iterations), disable=None):
        for item in timed:
            turns[item.name].append(item.turn(native.play()))
    native.close()
    rows = [
        {"method": name, **{key: statistics.median(turn[key] for turn in found) for key in found[0]}}
        for name, found in turns.items()
    ]
    speed = {row["method"]: row["steps_per_s"] for row in rows}
    published = [row for row in rows if row["method"] != "dppo_4"]
    result = {
        "steps_per_s_reinflow": speed["reinflow"],
        "steps_per_s_dppo": speed["dppo"],
        "update_peak_share": min(row["update_peak_share"] for row in published),
        "sim_over_raw": min(row["sim_over_raw"] for row in published),
        "reinflow_over_dppo": speed["reinflow"] / speed["dppo"],
        "reinflow_over_dppo_4": speed["reinflow"] / speed["dppo_4"],
    }
    report: dict[str, Any] = {
        "machine": machine(device),
        "quick": chosen.quick,
        "threads": chosen.threads,
        "rows": rows,
    }
    report["execution"] = chosen.execution
    if chosen.published:
        theirs = iteration_s(chosen.published, decisions, device)
        report["published"] = {"iteration_s": theirs, "steps_per_s": WORLDS * CHUNK * decisions / theirs}
        over = speed["dppo"] / report["published"]["steps_per_s"]
        result["dppo_over_published_cuda" if chosen.device == "cuda" else "dppo_over_published"] = over
    parts = ["onpolicy_speed"]
    parts += ["cuda"] if chosen.device == "cuda" else []
    parts += [] if chosen.execution == modes[0] else [chosen.execution]
    parts += ["quick"] if chosen.quick else []
    path = chosen.out / ("_".join(parts) + ".json")
    shown = [*rows, *peers(report)]
    publish(path, report, table(shown, COLUMNS), result)
    page(path, markdown(shown, COLUMNS))
    document = {"onpolicy_speed": CHOOSING, "onpolicy_speed_cuda_cudagraph": SCALE}.get(path.stem)
    if document is not None and path.parent == RESULTS:
        embed(document, path.stem, markdown(shown, COLUMNS))


if __name__ == "__main__":
    main()
