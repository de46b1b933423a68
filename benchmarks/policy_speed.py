"""How fast the policies train and act, beside the machine's matmul peak.

    python benchmarks/policy_speed.py [--quick] [--device cuda] [--threads N] [--out FOLDER]

Training is the update of ``burnish pretrain`` whole: drawing 256 windows, loss, gradient, AdamW, moving average.
``train_peak_share`` is its FLOP/s over those of a square matrix product; both are measured in turns, and the share is
the median over turns. Only the FLOPs of matrix products and convolutions count, forward and backward, so the rest
(activations, normalisation, optimiser, Python) shows as time in which nothing counts.

Acting is one call of the averaged policy for one robot: float32, noise from a torch generator, observation at hand, a
chunk on the device as the result. A CUDA row with ``cudagraph`` acts through a recorded graph too.

RESULT: ``train_peak_share`` of the flow with an MLP body and K = 10, ``act_p99_us`` of the same flow in one step
(shortcut); both in float32 and eager.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from measure import MatmulPeak, calls_for, latencies, machine, options, percentile, publish, seconds, table
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from burnish.policies.build import build_policy
from burnish.policies.core.execute import Execution, Precision, execution
from burnish.policies.core.seed import generator
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.diffusion import DiffusionConfig
from burnish.policies.flow import FlowConfig
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.imitate import ImitateConfig, ImitationLearner
from burnish.policies.nets.denoiser import Body, DenoiserConfig
from burnish.policies.table import policy_name

STATE, ACTION, HORIZON, EXECUTE, BATCH = 20, 7, 16, 8, 256
CAMERA = (3, 84, 84)


class Case(NamedTuple):
    policy: Any  # the policy's configuration
    camera: bool = False
    execution: Execution = Execution.eager
    precision: Precision = Precision.float32


TRAIN = Case(FlowConfig(steps=10))
ACT = Case(FlowConfig(steps=1, shortcut=True))


def cases(device: torch.device) -> Iterator[Case]:
    """K = 4 and K = 10 of the flow train alike: how far the two differ shows the noise of the measurement."""
    unet = DenoiserConfig(body=Body.unet)
    plain = [
        Case(GaussianConfig()),
        ACT,
        Case(FlowConfig(steps=4)),
        TRAIN,
        Case(FlowConfig(steps=10, net=unet)),
        Case(DiffusionConfig(steps=10)),
        Case(DiffusionConfig(steps=10, net=unet)),
        Case(ACT.policy, camera=True),
        Case(TRAIN.policy, camera=True),
    ]
    if device.type != "cuda":
        yield from plain
        return
    for case in plain:
        for mode in (Execution.eager, Execution.cudagraph):
            for precision in Precision:
                yield case._replace(execution=mode, precision=precision)


@dataclass(frozen=True)
class Effort:
    rounds: int  # how often each case has its turn
    calls: int  # of act in one turn
    block: float  # seconds of training in one turn, or one update if that is longer
    episodes: int


FULL = Effort(rounds=16, calls=125, block=0.3, episodes=40)
FULL_CUDA = Effort(rounds=4, calls=125, block=0.2, episodes=40)  # four times the cases, on a steadier machine
QUICK = Effort(rounds=2, calls=20, block=0.02, episodes=4)
PEAK_BLOCK = 0.05  # seconds of matrix products before, and again after, each block of training


def demonstrations(count: int, length: int = 100, seed: int = 0) -> Episodes:
    """Random walks: as smooth as a robot's motion, and otherwise without meaning, which costs the same time."""
    draw = generator(seed, "demonstrations")
    limits = ActionSpec((-1.0,) * ACTION, (1.0,) * ACTION)
    obs = ObsSpec({"state": (STATE,), "image.front": CAMERA})
    episodes = []
    for number in range(count):
        state = 0.1 * torch.randn(length + 1, STATE, generator=draw).cumsum(0)
        action = torch.tanh(0.1 * torch.randn(length, ACTION, generator=draw).cumsum(0))
        image = torch.randint(0, 256, (length + 1, *CAMERA), generator=draw, dtype=torch.uint8)
        seen = {"state": state, "image.front": image}
        episodes.append(Episode(seen, action, torch.zeros(length), False, True, False, seed=number))
    return Episodes(episodes, EnvSpec(obs, limits, control_hz=20.0, action_mode="ee_delta", max_steps=length))


class Measured:
    """One case, ready to run, and what its turns have shown so far."""

    def __init__(self, case: Case, data: Episodes, effort: Effort, device: torch.device) -> None:
        self.case, self.effort, self.device = case, effort, device
        keys = ["state", "image.front"] if case.camera else ["state"]
        seen = ObsSpec({key: data.spec.obs.shapes[key] for key in keys})
        spec = PolicySpec(seen, data.spec.action, HORIZON, EXECUTE, noise_shape=(HORIZON, ACTION))
        config = ImitateConfig(batch=BATCH, precision=case.precision, execution=case.execution)
        policy = build_policy(case.policy, spec, device=device)
        self.learner = ImitationLearner(policy, data, config, device=device)
        # The first update runs line by line, even where later ones replay a graph.
        with FlopCounterMode(display=False) as counter:
            self.learner.update()
        self.flops = counter.get_total_flops()
        self.updates = calls_for(effort.block, self.learner.update, device)
        self.act = self._actor({key: data[0].obs[key][:1].to(device) for key in keys})
        self.update_s: list[float] = []
        self.shares: list[float] = []
        self.act_s: list[float] = []

    def _actor(self, obs: dict[str, torch.Tensor]) -> Callable[[], Any] | None:
        """None where acting would repeat another row: weights stay float32, and so does acting."""
        if self.case.precision is not Precision.float32:
            return None
        noise = generator(0, "act", device=self.device)
        policy = self.learner.average

        def act(obs: dict[str, torch.Tensor]) -> torch.Tensor:
            return policy.act(obs, generator=noise)

        self.learner.ema.copy_to(policy)
        ready = partial(execution(act, self.case.execution, device=self.device, generators=[noise]), obs)
        with torch.inference_mode():
            latencies(ready, 20, self.device)
        return ready

    def turn(self, peak: MatmulPeak) -> float:
        """Train and act for a while; the peak that was measured beside."""
        before = peak.measure(PEAK_BLOCK)
        update_s = seconds(self.learner.update, self.updates, self.device)
        after = peak.measure(PEAK_BLOCK)
        self.update_s.append(update_s)
        self.shares.append(self.flops / update_s / ((before + after) / 2))
        if self.act is not None:
            with torch.inference_mode():
                latencies(self.act, 10, self.device)  # the first finds caches full of other things: 5 times slower
                self.act_s += latencies(self.act, self.effort.calls, self.device)
        return (before + after) / 2

    def row(self) -> dict[str, Any]:
        policy = self.case.policy
        update_s = statistics.median(self.update_s)
        name = policy_name(policy)
        return {
            "policy": f"{name} shortcut" if getattr(policy, "shortcut", False) else name,
            "body": policy.net.body.value if hasattr(policy, "net") else "mlp",
            "steps": getattr(policy, "steps", 1),
            "camera": "84x84" if self.case.camera else "none",
            "execution": self.case.execution.value,
            "precision": self.case.precision.value,
            "parameters": sum(p.numel() for p in self.learner.policy.parameters()),
            "flops_per_update": self.flops,
            "samples_per_s": BATCH / update_s,
            "gflop_per_s": self.flops / update_s / 1e9,
            "peak_share": statistics.median(self.shares),
            "act_p50_us": 1e6 * percentile(self.act_s, 50) if self.act_s else None,
            "act_p99_us": 1e6 * percentile(self.act_s, 99) if self.act_s else None,
            "act_calls": len(self.act_s),
        }


COLUMNS = {
    "policy": "",
    "body": "",
    "steps": "d",
    "camera": "",
    "execution": "",
    "precision": "",
    "parameters": ",d",
    "samples_per_s": ",.0f",
    "gflop_per_s": ",.1f",
    "peak_share": ".3f",
    "act_p50_us": ",.0f",
    "act_p99_us": ",.0f",
}


def measure_all(device: torch.device, effort: Effort) -> tuple[list[Measured], dict[str, Any]]:
    """All cases, and the matmul peak of each precision."""
    data = demonstrations(effort.episodes)
    measured = [Measured(case, data, effort, device) for case in cases(device)]
    precisions = sorted({item.case.precision for item in measured}, key=list(Precision).index)
    peaks = {precision: MatmulPeak(device, getattr(torch, precision.value)) for precision in precisions}
    rates: dict[Precision, list[float]] = {precision: [] for precision in precisions}
    # In turns, so that a slow minute of the machine touches all rows alike.
    for _ in tqdm(range(effort.rounds), disable=None):
        for item in measured:
            precision = item.case.precision
            rates[precision].append(item.turn(peaks[precision]))
    return measured, {
        precision.value: {"size": peak.size, "gflop_per_s": statistics.median(rates[precision]) / 1e9}
        for precision, peak in peaks.items()
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU (default: %(default)s)")
    chosen = parser.parse_args()
    if chosen.threads < 1:
        parser.error(f"--threads={chosen.threads} must be at least 1")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda needs a CUDA device, and torch finds none; use --device=cpu")
    torch.set_num_threads(chosen.threads)
    device = torch.device(chosen.device)
    effort = QUICK if chosen.quick else FULL_CUDA if device.type == "cuda" else FULL
    measured, peaks = measure_all(device, effort)
    about, rows = machine(device), [item.row() for item in measured]
    train, act = (next(item.row() for item in measured if item.case == case) for case in (TRAIN, ACT))
    report = {
        "machine": about,
        "quick": chosen.quick,
        "setting": {"state": STATE, "action": ACTION, "horizon": HORIZON, "batch": BATCH, "rounds": effort.rounds},
        "matmul_peak": peaks,
        "rows": rows,
    }
    head = [f"{about.get('gpu', about['processor'])}, {chosen.threads} threads, load {about['load']}, batch {BATCH}"]
    for kind, peak in peaks.items():
        head.append(f"matmul peak, {kind}: {peak['gflop_per_s']:,.1f} GFLOP/s at {peak['size']} x {peak['size']}")
    # One file for each way to measure, so that a quick look never replaces a result.
    parts = ["policy_speed"]
    parts += ["cuda"] if chosen.device == "cuda" else []
    parts += [f"threads{chosen.threads}"] if chosen.threads > 1 else []
    parts += ["quick"] if chosen.quick else []
    text = "\n".join([*head, "", table(rows, COLUMNS)])
    result = {"train_peak_share": train["peak_share"], "act_p99_us": act["act_p99_us"]}
    publish(chosen.out / ("_".join(parts) + ".json"), report, text, result)


if __name__ == "__main__":
    main()
