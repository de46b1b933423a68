"""How fast the learners update, beside the machine's matmul peak and beside Stable-Baselines3.

    python benchmarks/update_speed.py [--quick] [--device cuda] [--execution eager cudagraph] [--threads N] [--report]
                                      [--out DIR]

An update is what a loop asks for: drawing 256 decisions from a replay of 10 000, losses, gradients, Adam, targets. The
networks are 2 x 256, observations have 17 numbers and actions 6, as in MuJoCo's half cheetah. SAC and SB3's SAC are the
same algorithm at the same settings (no layer norm), and alternate. ``ppo_flow`` is ReinFlow at its settings for the
hopper: 11 observed numbers, chunks of 4 actions of 3, K = 4 steps of a 512 x 3 network, one pass over one minibatch of
5000 decisions (--quick: 520), with values, advantages and the likelihoods of whole chains.

``peak_share`` is the FLOP/s of the matrix products over those of a square one; both are measured in turns, and numbers
are medians over turns. Only matrix products count, so that the rest shows as time in which nothing counts.

RESULT: ``sac_over_sb3``, or ``sac_over_sb3_cuda``, updates per second of SAC over those of SB3; ``sac_peak_share``,
``ppo_flow_peak_share``; all of the first mode of execution that was asked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from measure import RESULTS, MatmulPeak, calls_for, embed, machine, markdown, options, publish, seconds, table
from stable_baselines3 import SAC as TheirSAC
from stable_baselines3.common.logger import Logger
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from burnish.finetune.methods.dsrl import DSRLConfig, Variant, latent_sac
from burnish.finetune.methods.dsrl import build as build_dsrl
from burnish.finetune.methods.reinflow import ReinFlowConfig
from burnish.finetune.methods.reinflow import build as build_reinflow
from burnish.finetune.rollout import Rollout
from burnish.offline.iql import IQL, IQLConfig
from burnish.offline.replay import Replay
from burnish.offline.sac import SAC, SACConfig
from burnish.offline.sources import Mixture, Rows
from burnish.offline.td3 import TD3, TD3Config
from burnish.policies.build import build_policy
from burnish.policies.core.execute import Execution
from burnish.policies.core.seed import generator
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec, agent_spec
from burnish.policies.core.types import Outcome
from burnish.policies.flow import FlowConfig
from burnish.policies.nets.critic import CriticConfig
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
STATE, ACTION, BATCH, STORED, GAMMA = 17, 6, 256, 10_000, 0.99
HOPPER_STATE, HOPPER_ACTION, CHUNK, WORLDS = 11, 3, 4, 40


@dataclass(frozen=True)
class Effort:
    rounds: int  # how often each row has its turn
    block: float  # seconds of updates in one turn, or one update if that is longer
    decisions: int  # of each of the 40 worlds in one minibatch of the flow


FULL = Effort(rounds=16, block=0.4, decisions=125)
FULL_CUDA = replace(FULL, rounds=3)  # more rows, on a steadier machine
QUICK = Effort(rounds=3, block=0.05, decisions=13)
PEAK_BLOCK = 0.05  # seconds of matrix products before, and again after, each block of updates

PLAIN = CriticConfig(layer_norm=False)
TEN = CriticConfig(members=10)


class Place(NamedTuple):
    """Where and how a learner is to work."""

    device: torch.device
    execution: Execution
    effort: Effort


class StillWorld:
    """A world of the right shapes, in which nothing is ever played."""

    def __init__(self, state: int, action: int, device: torch.device) -> None:
        self.num_envs, self.device = WORLDS, device
        limits = ActionSpec((-1.0,) * action, (1.0,) * action)
        self.spec = EnvSpec(ObsSpec({"state": (state,)}), limits, 20.0, "torque", 1000)


def memory(spec: PolicySpec, device: torch.device, **columns: tuple[int, ...]) -> Replay:
    """Decisions without meaning, which cost the same time; ``columns`` are further ones, with their shapes."""
    draw = generator(0, "memory")

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    never = torch.zeros(STORED, dtype=torch.bool)
    stored = {
        "action": normal(STORED, spec.execute, spec.action.dim).clamp(-1, 1),
        "reward": normal(STORED),
        "discount": torch.full((STORED,), GAMMA),
        "ended": never,
        "terminated": never,
        "steps": torch.full((STORED,), spec.execute),
        **{name: normal(STORED, *shape).clamp(-1, 1) for name, shape in columns.items()},
    }
    shapes = spec.inputs.shapes
    replay = Replay(STORED, device=device)
    replay.extend(
        {key: normal(STORED, *shape) for key, shape in shapes.items()},
        stored,
        {key: normal(1, *shape) for key, shape in shapes.items()},
    )
    return replay


def from_memory(learner: Any, replay: Replay) -> Callable[[], Any]:
    return lambda: learner.update(Mixture(replay, batch=BATCH))


def cheetah(place: Place) -> PolicySpec:
    return agent_spec(StillWorld(STATE, ACTION, place.device).spec)


# ---- the rows ----


def sac(place: Place, critic: CriticConfig = PLAIN, **settings: Any) -> Callable[[], Any]:
    config = SACConfig(critic=critic, execution=place.execution, **settings)
    spec = cheetah(place)
    learner = SAC(build_policy(config.agent, spec), config, device=place.device)
    return from_memory(learner, memory(spec, place.device))


def sac_of_ten(place: Place) -> Callable[[], Any]:
    """The critics of RLPD; its actor is stepped here at every update."""
    return sac(place, TEN, subset=2, actor_mean=True)


def td3(place: Place) -> Callable[[], Any]:
    config = TD3Config(critic=PLAIN, execution=place.execution)
    spec = cheetah(place)
    learner = TD3(build_policy(config.agent, spec), config, device=place.device)
    return from_memory(learner, memory(spec, place.device))


def iql(place: Place) -> Callable[[], Any]:
    config = IQLConfig(critic=PLAIN, execution=place.execution)
    spec = cheetah(place)
    learner = IQL(build_policy(config.policy, spec), config, device=place.device)
    return from_memory(learner, memory(spec, place.device))


def hopper_flow(device: torch.device) -> Any:
    spec = replace(agent_spec(StillWorld(HOPPER_STATE, HOPPER_ACTION, device).spec), horizon=CHUNK, execute=CHUNK)
    net = DenoiserConfig(mlp=MlpBodyConfig(hidden=[512, 512, 512]))
    return build_policy(FlowConfig(steps=4, net=net), spec, device=device)


def dsrl_aliased(place: Place) -> Callable[[], Any]:
    """Noise of the hopper's flow; every update asks the flow for the chunks of its noises."""
    base = hopper_flow(place.device)
    env: Any = StillWorld(HOPPER_STATE, HOPPER_ACTION, place.device)
    config = DSRLConfig(Variant.aliased, sac=latent_sac(execution=place.execution))
    view, learner = build_dsrl(config, base, env, device=place.device)
    spec = agent_spec(view.spec)
    return from_memory(learner, memory(spec, place.device, executed=(CHUNK, HOPPER_ACTION)))


def ppo_flow(place: Place) -> Callable[[], Any]:
    base = hopper_flow(place.device)
    env: Any = StillWorld(HOPPER_STATE, HOPPER_ACTION, place.device)
    usual = ReinFlowConfig()
    config = replace(usual, ppo=replace(usual.ppo, epochs=1, execution=place.execution))
    _, learner = build_reinflow(config, base, env, device=place.device)
    rollout, draw = Rollout(place.effort.decisions, WORLDS), generator(0, "rollout", device=place.device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=place.device)

    never = torch.zeros(WORLDS, dtype=torch.bool, device=place.device)
    steps = torch.full((WORLDS,), CHUNK, device=place.device)
    obs = {"state": normal(WORLDS, HOPPER_STATE)}
    for _ in range(place.effort.decisions):
        action, columns = learner.actor.act(obs, warm=False, generator=draw)
        after = {"state": normal(WORLDS, HOPPER_STATE)}
        discount = torch.full((WORLDS,), GAMMA, device=place.device)
        rollout.add(obs, columns, Outcome(after, after, normal(WORLDS), discount, never, never, steps, action, {}))
        obs = after
    batch = rollout.batch()
    return lambda: learner.update(Rows(batch))


class _Idle(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (STATE,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (ACTION,), np.float32)


def sb3_sac(place: Place) -> Callable[[], Any]:
    agent = TheirSAC("MlpPolicy", _Idle(), batch_size=BATCH, buffer_size=STORED, gamma=GAMMA, device=place.device)
    agent.set_logger(Logger(None, []))
    draw, buffer = np.random.default_rng(0), agent.replay_buffer
    assert buffer is not None
    for _ in range(STORED):
        obs, after = draw.standard_normal((2, 1, STATE))
        buffer.add(obs, after, draw.uniform(-1, 1, (1, ACTION)), draw.standard_normal(1), np.zeros(1), [{}])
    return lambda: agent.train(1, BATCH)


class Case(NamedTuple):
    name: str
    make: Callable[[Place], Callable[[], Any]]
    recordable: bool = True  # in other modes than eager


SB3 = Case("SB3 sac", sb3_sac, recordable=False)
OURS = Case("sac", sac)
PPO_FLOW = Case("ppo_flow", ppo_flow)
CASES = [
    OURS,
    SB3,  # next to ours, so that both see the machine in the same mood
    Case("sac, 10 members", sac_of_ten),
    Case("td3", td3),
    Case("iql", iql),
    Case("dsrl aliased", dsrl_aliased),
    PPO_FLOW,
]


# ---- measuring ----


def flops(update: Callable[[], Any]) -> float:
    """Of matrix products per update, over two of them: some learners do a thing every other time."""
    with FlopCounterMode(display=False) as counter:
        update()
        update()
    return counter.get_total_flops() / 2


class Measured:
    """One row, ready to run, and what its turns have shown so far."""

    def __init__(self, case: Case, place: Place) -> None:
        self.case, self.place = case, place
        eager = case.make(place._replace(execution=Execution.eager))
        self.flops = flops(eager)
        self.update = eager if place.execution is Execution.eager else case.make(place)
        for _ in range(8):  # a step is recorded when it is taken for the fourth time, and compiled at the first two
            self.update()
        self.count = calls_for(place.effort.block, self.update, place.device)
        self.update_s: list[float] = []
        self.shares: list[float] = []

    def turn(self, peak: MatmulPeak) -> float:
        """The peak that was measured beside the updates."""
        before = peak.measure(PEAK_BLOCK)
        update_s = seconds(self.update, self.count, self.place.device)
        beside = (before + peak.measure(PEAK_BLOCK)) / 2
        self.update_s.append(update_s)
        self.shares.append(self.flops / update_s / beside)
        return beside

    def faster_than(self, other: Measured) -> float:
        """The median over turns of how many updates this one makes in the time of one of the other."""
        return statistics.median(b / a for a, b in zip(self.update_s, other.update_s, strict=True))

    def row(self, sb3: Measured) -> dict[str, Any]:
        update_s = statistics.median(self.update_s)
        return {
            "learner": self.case.name,
            "execution": self.place.execution.value,
            "rows": WORLDS * self.place.effort.decisions if self.case is PPO_FLOW else BATCH,
            "flops_per_update": self.flops,
            "updates_per_s": 1 / update_s,
            "gflop_per_s": self.flops / update_s / 1e9,
            "peak_share": statistics.median(self.shares),
            "over_sb3": self.faster_than(sb3) if self.case is OURS else None,
        }


COLUMNS = {
    "learner": "",
    "execution": "",
    "rows": ",d",
    "flops_per_update": ",.0f",
    "updates_per_s": ",.1f",
    "gflop_per_s": ",.1f",
    "peak_share": ".3f",
    "over_sb3": ".2f",
}

SHOWN = ("learner", "execution", "rows", "updates_per_s", "peak_share", "over_sb3")


def measure_all(device: torch.device, modes: Sequence[Execution], effort: Effort) -> tuple[list[dict[str, Any]], float]:
    """The rows of the table, and the matmul peak."""
    measured = [
        Measured(case, Place(device, mode, effort))
        for case in CASES
        for mode in (modes if case.recordable else [Execution.eager])
    ]
    peak = MatmulPeak(device)
    # In turns, so that a slow minute of the machine touches all rows alike.
    peaks = [item.turn(peak) for _ in tqdm(range(effort.rounds), disable=None) for item in measured]
    sb3 = next(item for item in measured if item.case is SB3)
    return [item.row(sb3) for item in measured], statistics.median(peaks)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    modes = [mode.value for mode in Execution]
    parser.add_argument("--execution", nargs="+", choices=modes, default=["eager"], help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="only print and write the table of what is there")
    chosen = parser.parse_args()
    if chosen.threads < 1:
        parser.error(f"--threads={chosen.threads} must be at least 1")
    if chosen.device == "cuda" and not chosen.report and not torch.cuda.is_available():
        parser.error("--device=cuda needs a CUDA device, and torch finds none; use --device=cpu")
    if chosen.device == "cpu" and "cudagraph" in chosen.execution:
        parser.error("--execution=cudagraph needs --device=cuda")
    # One file for each way to measure, so that a quick look never replaces a result.
    parts = ["update_speed"]
    parts += ["cuda"] if chosen.device == "cuda" else []
    parts += [] if chosen.execution == ["eager"] else chosen.execution
    parts += [f"threads{chosen.threads}"] if chosen.threads > 1 else []
    parts += ["quick"] if chosen.quick else []
    name = "_".join(parts)
    path = chosen.out / f"{name}.json"
    report = json.loads(path.read_text(encoding="utf-8")) if chosen.report else measured_report(chosen)
    about, peak, rows = report["machine"], report["matmul_peak"]["gflop_per_s"], report["rows"]
    head = [
        f"{about.get('gpu', about['processor'])}, {about['threads']} threads, load {about['load']}, batch {BATCH}",
        f"matmul peak: {peak:,.1f} GFLOP/s",
    ]
    first = {row["learner"]: row for row in reversed(rows)}  # the first mode that was asked for
    result = {
        "sac_over_sb3_cuda" if chosen.device == "cuda" else "sac_over_sb3": first[OURS.name]["over_sb3"],
        "sac_peak_share": first[OURS.name]["peak_share"],
        "ppo_flow_peak_share": first[PPO_FLOW.name]["peak_share"],
    }
    publish(path, report, "\n".join([*head, "", table(rows, COLUMNS)]), result)
    if path == RESULTS / "update_speed_cuda_cudagraph_eager.json":
        embed(DOCUMENT, name, markdown(rows, {name: COLUMNS[name] for name in SHOWN}))


def measured_report(chosen: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(chosen.threads)
    device = torch.device(chosen.device)
    effort = QUICK if chosen.quick else FULL_CUDA if device.type == "cuda" else FULL
    rows, peak = measure_all(device, [Execution(name) for name in chosen.execution], effort)
    return {
        "machine": machine(device),
        "quick": chosen.quick,
        "setting": {"state": STATE, "action": ACTION, "batch": BATCH, "rounds": effort.rounds},
        "matmul_peak": {"gflop_per_s": peak / 1e9},
        "rows": rows,
    }


if __name__ == "__main__":
    main()
