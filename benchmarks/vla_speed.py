"""A SmolVLA with random weights, at full size on one core: what it costs to load, to act, and to learn from a rollout.

    python benchmarks/vla_speed.py [--quick] [--report] [--device cuda]

A folder of LeRobot is written with the sizes of the published model (450 million weights, those of the vision-language
model in bfloat16), one camera of 256 x 256 pixels, 48 words. Loading and one decision are as published (10 steps, 50
actions). Then Flow-SDE refines it (4 steps, 10 actions), in worlds that cost nothing, with each of three things
remembered of an observation, and once with the frozen model in bfloat16: decisions collected and rows learnt per
second, both beside the matmul peak in the same run, and bytes kept of a decision. An update is two epochs over its
rows, without what is only looked at. Seconds are those of one core, so that other processes do not count; on a GPU
those of a clock, and decisions are made with 10 and 4 steps and 50 and 10 actions too, line by line and by a recorded
graph. Each case has a process of its own, whose largest memory is told; on a GPU the largest of the device, in one
process. ``--quick`` takes a model of the same form with two thin layers.

RESULT, with pictures, embeddings and keys remembered: ``collected_per_s_...`` decisions, ``learnt_per_s_...`` rows, and
``kept_mb_...`` of a decision; ``collected_peak_share`` and ``learnt_peak_share`` of the matmul peak (keys);
``load_s`` and ``decision_s`` as published; ``peak_gb``, the largest memory of a process in float32, and
``peak_gb_bfloat16``. On a GPU ``decision_ms_K_n`` too, recorded.
"""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, MatmulPeak, embed, latencies, machine, markdown, options, publish, synchronize, table
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from burnish.finetune.build import prepare
from burnish.finetune.methods.flow_sde import FlowSDEConfig
from burnish.finetune.rollout import Rollout
from burnish.offline.sources import Rows
from burnish.policies.build import SmolVLALoadConfig, loaded
from burnish.policies.core.execute import Execution, Precision
from burnish.policies.core.graphed_policy import executed
from burnish.policies.core.seed import generator
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.core.tree import leaves
from burnish.policies.core.types import Obs, Step
from burnish.policies.lerobot.features import Feature, Kind
from burnish.policies.lerobot.scaling import Normalization
from burnish.policies.trainable import Remember, TrainableConfig
from burnish.policies.vla.lerobot import write
from burnish.policies.vla.names import VLM
from burnish.policies.vla.sizes import ExpertConfig, LanguageConfig, VisionConfig
from burnish.policies.vla.smolvla import SmolVLA, SmolVLAConfig

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "vla.md"
PUBLISHED = (VisionConfig(), LanguageConfig(lm_head=True), ExpertConfig())
SMALL = (
    VisionConfig(32, 4, 64, 2, 1, 64, 2),
    LanguageConfig(64, 128, 2, 2, 1, 64, 64, lm_head=True),
    ExpertConfig(96, 2, 256),
)
JOINTS, WORDS, EPOCHS, HORIZON, STEPS = 6, 48, 2, 10, 4
SQUARE = 1024  # rows of the products that the peak is measured with


class Still:
    """Worlds that stand still, and cost nothing: the same random observation for ever."""

    def __init__(self, num_envs: int, spec: PolicySpec, device: torch.device) -> None:
        self.num_envs, self.device = num_envs, device
        self.spec = EnvSpec(spec.obs, spec.action, control_hz=30.0, action_mode="joint_target", max_steps=10**9)
        draw = generator(0, "observations")
        seen: Obs = {"state": torch.randn(num_envs, JOINTS, generator=draw)}
        seen["image.top"] = torch.randint(
            0, 256, (num_envs, *spec.obs.shapes["image.top"]), generator=draw, dtype=torch.uint8
        )
        seen["tokens"] = torch.randint(0, 50, (num_envs, WORDS), generator=draw)
        seen["tokens"][:, 12:] = -1
        self._seen = {key: x.to(device) for key, x in seen.items()}

    def reset(self, mask: torch.Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        return self._seen

    def step(self, action: torch.Tensor, active: torch.Tensor | None = None) -> Step:
        still = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return Step(self._seen, still.float(), still, still, {})


def make_folder(folder: Path, quick: bool) -> int:
    """Random weights in the form of LeRobot; how many."""
    vision, language, expert = SMALL if quick else PUBLISHED
    features = [
        Feature("image.top", Kind.visual, Normalization.identity),
        Feature("state", Kind.state, Normalization.mean_std),
    ]
    camera = (3, 32, 32) if quick else (3, 256, 256)
    obs = ObsSpec({"image.top": camera, "state": (JOINTS,), "tokens": (WORDS,)})
    spec = PolicySpec(obs, ActionSpec((-1.0,) * JOINTS, (1.0,) * JOINTS), 50, 50)
    settings = SmolVLAConfig(
        features=features,
        action=Normalization.mean_std,
        vision=vision,
        language=language,
        expert=expert,
        frozen_dtype=Precision.bfloat16,
        bfloat16=[VLM],
    )
    torch.manual_seed(0)
    policy = SmolVLA(spec, settings)
    write(policy, folder)
    return sum(p.numel() for p in policy.parameters())


def load(folder: Path, **chosen: Any) -> SmolVLA:
    return loaded(SmolVLALoadConfig(str(folder), **chosen))[0]


def memory_gb(device: torch.device) -> float:
    """The largest memory so far, of the device where it has its own, else of this process."""
    if device.type == "cuda":
        return (torch.cuda.max_memory_allocated(device) - gpu_peak(device)[1]) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def published(folder: Path, device: torch.device) -> dict[str, float]:
    """Loading, and one decision, as the folder says."""
    torch.set_num_threads(1)
    began = clock(device)
    policy = load(folder).to(device)
    loading = clock(device) - began
    obs = Still(1, policy.spec, device).reset()
    noise = torch.randn(1, *(policy.spec.noise_shape or ()), device=device)
    times = []
    for _ in range(2):
        synchronize(device)
        began = clock(device)
        with torch.no_grad():
            policy.act(obs, noise=noise)
        synchronize(device)
        times.append(clock(device) - began)
    return {"load_s": loading, "decision_s": min(times), "peak_gb": memory_gb(device)}


def decisions(folder: Path, device: torch.device) -> list[dict[str, Any]]:
    """The time of one decision of several forms."""
    torch.set_num_threads(1)
    return [decision(folder, steps, actions, device) for steps in (10, 4) for actions in (50, 10)]


def decision(folder: Path, steps: int, actions: int, device: torch.device) -> dict[str, Any]:
    """With so many steps and actions, line by line and recorded."""
    policy = load(folder, horizon=actions, execute=actions, steps=steps).to(device)
    obs = Still(1, policy.spec, device).reset()
    noise = torch.randn(1, *(policy.spec.noise_shape or ()), device=device)
    found: dict[str, Any] = {"steps": steps, "actions": actions}
    with torch.no_grad():
        for mode in (Execution.eager, Execution.cudagraph):
            acting = executed(policy, mode, device)
            latencies(partial(acting.act, obs, noise=noise), 5, device)
            times = latencies(partial(acting.act, obs, noise=noise), 20, device)
            found[f"{mode.value}_ms"] = 1000 * statistics.median(times)
    return found


def refined(
    folder: Path, level: Remember, dtype: Precision, worlds: int, rounds: int, device: torch.device
) -> dict[str, Any]:
    """One case of the refinement."""
    torch.set_num_threads(1)
    base = load(folder, horizon=HORIZON, execute=HORIZON, steps=STEPS, frozen_dtype=dtype).to(device)
    config = FlowSDEConfig(train=TrainableConfig(remember=level))
    config.ppo = replace(config.ppo, epochs=EPOCHS, slice=16)
    config.loop.decisions_per_update = 2
    loop: Any = prepare(config, base, Still(worlds, base.spec, device), probe=False, device=device)
    loop.learner.watch = lambda rows: {}
    found: dict[str, list[float]] = {"collected": [], "learnt": [], "peak": []}
    flops: dict[str, float] = {}
    rows = worlds * loop.length
    loop.env.reset()
    for turn in range(rounds):
        before = matmul_peak(device)
        with counter(turn) as played_flops:
            began = clock(device)
            rollout = Rollout(loop.length, worlds)
            for _ in range(loop.length):
                obs, _, columns, outcome = loop.decide(warm=False)
                rollout.add(obs, columns, outcome)
            synchronize(device)
            played = clock(device) - began
        with counter(turn) as learnt_flops:
            began = clock(device)
            loop.learner.update(Rows(rollout.batch()))
            synchronize(device)
            learnt = clock(device) - began
        if played_flops is not None and learnt_flops is not None:
            flops = {"collected": played_flops.get_total_flops(), "learnt": learnt_flops.get_total_flops()}
        found["collected"].append(rows / played)
        found["learnt"].append(rows * EPOCHS / learnt)
        found["peak"].append((before + matmul_peak(device)) / 2)
    kept = sum(x.nbytes for x in leaves(rollout.batch()["obs"])) / rows
    middle = {name: statistics.median(x[1:] or x) for name, x in found.items()}  # the first turn is slower
    share = {name: flops[name] / count * middle[name] / middle["peak"] for name, count in
             (("collected", rows), ("learnt", rows * EPOCHS))}  # fmt: skip
    return {
        "remembered": level.value,
        "frozen": dtype.value,
        "collected_per_s": middle["collected"],
        "collected_share": share["collected"],
        "learnt_per_s": middle["learnt"],
        "learnt_share": share["learnt"],
        "kept_mb": kept / 1e6,
        "peak_gb": memory_gb(device),
    }


def clock(device: torch.device) -> float:
    """Seconds; of this process on a core, which other processes do not lengthen, where a core is all that it has."""
    return time.perf_counter() if device.type == "cuda" else time.process_time()


def matmul_peak(device: torch.device) -> float:
    """FLOP/s of square matrix products, in the same seconds."""
    if device.type == "cuda":
        return gpu_peak(device)[0].measure(0.1)
    a, b = torch.randn(2, SQUARE, SQUARE)
    times = []
    for _ in range(5):
        began = clock(device)
        torch.mm(a, b)
        times.append(clock(device) - began)
    return 2 * SQUARE**3 / statistics.median(times)


@functools.cache
def gpu_peak(device: torch.device) -> tuple[MatmulPeak, int]:
    """The products of a GPU, and the bytes that they hold."""
    before = torch.cuda.memory_allocated(device)
    return MatmulPeak(device), torch.cuda.memory_allocated(device) - before


def counter(turn: int) -> Any:
    """Of the FLOPs of matrix products, in the first turn."""
    return FlopCounterMode(display=False) if turn == 0 else nullcontext()


DECISIONS = {"steps": "d", "actions": "d", "eager_ms": ".1f", "cudagraph_ms": ".1f"}
COLUMNS = {"remembered": "", "frozen": "", "collected_per_s": ".3g", "collected_share": ".2f"}
COLUMNS |= {"learnt_per_s": ".3g", "learnt_share": ".2f", "kept_mb": ".3g", "peak_gb": ".2f"}


def apart(device: torch.device, call: Any, *given: Any) -> Any:
    """The call where the largest memory is its own: in a process of its own, or on a GPU that nothing else holds."""
    if device.type == "cuda":
        gpu_peak(device)
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        return call(*given)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *given).result()


def measured(quick: bool, device: torch.device) -> dict[str, Any]:
    """All cases."""
    cases = [(level, Precision.float32) for level in Remember] + [(Remember.keys, Precision.bfloat16)]
    gpu = device.type == "cuda"
    worlds, rounds = (2 if quick else 16), 4
    if not (quick or gpu):
        worlds, rounds = 1, 1  # where a row takes seconds, counting them takes no time
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "smolvla"
        weights = apart(torch.device("cpu"), make_folder, folder, quick)
        whole = apart(device, published, folder, device)
        rows = []
        for level, dtype in tqdm(cases, disable=None):
            rows.append(apart(device, refined, folder, level, dtype, worlds, rounds, device))
        acted = apart(device, decisions, folder, device) if gpu else []
    return {"weights": weights, "published": whole, "rows": rows, "decisions": acted}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--report", action="store_true", help="only print and write the table of what is there")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    chosen = parser.parse_args()
    name = "vla_speed_cuda" if chosen.device == "cuda" else "vla_speed"
    path = chosen.out / f"{name}{'_quick' if chosen.quick else ''}.json"
    torch.set_num_threads(1)
    if chosen.report:
        found = json.loads(path.read_text(encoding="utf-8"))
        about = found.pop("machine")
    else:
        device = torch.device(chosen.device)
        found, about = measured(chosen.quick, device), machine(device)
    rows = found["rows"]
    plain = {row["remembered"]: row for row in rows if row["frozen"] == "float32"}
    result = {
        f"{name}_{level}": row[name] for level, row in plain.items() for name in ("collected_per_s", "learnt_per_s")
    }
    result |= {f"kept_mb_{level}": row["kept_mb"] for level, row in plain.items()}
    result |= {f"{name}_peak_share": plain["keys"][f"{name}_share"] for name in ("collected", "learnt")}
    result |= {name: found["published"][name] for name in ("load_s", "decision_s")}
    result["peak_gb"] = max(found["published"]["peak_gb"], *(row["peak_gb"] for row in plain.values()))
    result["peak_gb_bfloat16"] = rows[-1]["peak_gb"]
    acted = found.get("decisions", [])
    result |= {f"decision_ms_{row['steps']}_{row['actions']}": row["cudagraph_ms"] for row in acted}
    where = f"{about.get('gpu', about['processor'])}, one core, load {about['load']}"
    head = f"{where}; {found['weights'] / 1e6:.1f} million weights"
    text = f"{head}\n{table(rows, COLUMNS)}" + (f"\n\n{table(acted, DECISIONS)}" if acted else "")
    publish(path, {**found, "machine": about, "quick": chosen.quick}, text, result)
    if path == RESULTS / f"{name}.json":
        tables = [markdown(rows, COLUMNS), *([markdown(acted, DECISIONS)] if acted else [])]
        embed(DOCUMENT, name, "\n".join(tables))


if __name__ == "__main__":
    main()
