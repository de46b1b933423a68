"""How punctual the control process is, beside an idle loop; and how long what it does takes.

    python benchmarks/control_loop.py [--quick] [--core N] [--out FOLDER]

**Loops.** The real control process (`SafeRobot`, guard, watchdog, a device of seven joints that answers at once) gets a
plan every 50 ms from this process, made by an exported policy out of what the robot reports. In turns with it a process
with the same rights sleeps to the same deadlines and does nothing: what is late there is due to the machine.
A deadline is as late as the tick that serves it begins; those that a loop skips count too, as late as the next tick. It
is missed where that is more than a tenth of a period. ``work`` is the time of a whole tick, with the wait after a late
one that keeps two commands nearly a period apart; ``plan`` that from the call of `link.plan` in this process to the
device's first command of that plan, of which half a period on average is waiting for the next tick; ``act`` that of the
policy. The row `other` asks for no real-time scheduler. A turn in which the robot came to rest too early is taken
again, and counted.

**Calls.** One chunk of a flow of 3 x 256 in one step, by the runtime in a process that has not imported torch,
beside the matrix products of its body alone, in NumPy, and beside torch; the guard for seven joints; the boards of
shared memory. Wall-clock and own time of each call, in turns, in rounds: of p99 the median over rounds and the best
round stand in the table, because a round in which another process had the core says nothing about us. Under both
schedulers.

RESULT: ``loop200_p999_us`` lateness, 99.9 % of the deadlines at 200 Hz, and ``idle200_p999_us`` that of the idle loop;
``loop200_miss_share``; ``infer_p99_us`` and ``infer_best_p99_us`` of a chunk, median and best round, without real-time
rights; ``guard_us`` the median of a call that changes what is asked; ``parity`` with torch, the largest difference.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from control_parts import CODE_RAD, JOINTS, lateness, timed
from measure import RESULTS, embed, machine, markdown, options, page, publish, table
from torch import nn
from tqdm import tqdm

from burnish.policies.build import build_policy
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.flow import FlowConfig
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from burnish.policies.nets.mlp import Activation
from burnish.real_robot.clock import ns
from burnish.real_robot.control.link import RobotLink
from burnish.real_robot.control.process import TICKS
from burnish.real_robot.export import bundle
from burnish.real_robot.export.exporter import assembled
from burnish.real_robot.export.runtime import ExportedPolicy, load
from burnish.real_robot.safety.safe_robot import Rung
from burnish.real_robot.safety.settings import Safety

HERE = Path(__file__).resolve().parent
ROBOTS = HERE.parent / "docs" / "robots_safety.md"
OBS, HORIZON, WIDTH = 48, 8, 256
PLAN_S = 0.05  # between plans
SETTLE_S = 0.3  # after the start, not measured
MISSED = 0.1  # of a period
PRIORITY = 50
RESTS = 20  # of a row, in all its rounds
POINTS = (50, 99, 99.9)


@dataclass(frozen=True)
class Effort:
    rounds: int
    seconds: float  # of each loop in a round
    call_rounds: int
    calls: int  # of each kind in a round
    inputs: int  # on which runtime and torch are compared


FULL = Effort(rounds=10, seconds=10.0, call_rounds=40, calls=500, inputs=1000)
QUICK = Effort(rounds=1, seconds=2.0, call_rounds=5, calls=100, inputs=100)


def flow() -> Any:
    """Untrained, which costs the same time, with normalisers that do something."""
    spec = PolicySpec(ObsSpec({"state": (OBS,)}), ActionSpec((-1.0,) * JOINTS, (1.0,) * JOINTS), HORIZON, HORIZON)
    body = MlpBodyConfig([WIDTH] * 3, activation=Activation.mish, layer_norm=False, residual=False)
    policy = build_policy(FlowConfig(steps=1, shortcut=True, net=DenoiserConfig(mlp=body)), spec, seed=0)
    source = torch.Generator().manual_seed(5)
    for name, x in policy.named_buffers():
        if ".scalers." in name:
            x.copy_(torch.rand(x.shape, generator=source) + (0.5 if name.endswith("scale") else 0.0))
    return policy.eval()


def observed(link: RobotLink) -> np.ndarray:
    state = link.state()
    obs = np.zeros(OBS, np.float32)
    obs[:JOINTS], obs[JOINTS : 2 * JOINTS] = state.q, state.qd
    return obs


class Child:
    """A part of `control_parts.py`, which waits on standard input while the others have their turn."""

    def __init__(self, part: str, **settings: Any) -> None:
        words = [sys.executable, str(HERE / "control_parts.py"), part, json.dumps(settings)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._heard()

    def __call__(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a part of the benchmark ended with status {self._process.wait()}; what it said is above")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()  # the end of its input is the end of it


class Timed(RobotLink):
    """Keeps when the control process did what."""

    ticks: np.ndarray

    def _end(self) -> dict[str, Any]:
        left = super()._end()
        self.ticks = np.load(self.folder / TICKS)
        return left


@dataclass
class Loop:
    """One row: a rate and the rights that are asked for."""

    hz: float
    priority: int
    core: int | None
    idle: Child
    rounds: list[dict[str, list[float]]] = field(default_factory=list)
    scheduling: Mapping[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    rests: list[str] = field(default_factory=list)  # why a robot came to rest before its turn was over

    def turn(self, policy: ExportedPolicy, seconds: float, folder: Path) -> None:
        both = [lambda: self._moved(policy, seconds, folder), lambda: self._idle(seconds)]
        if len(self.rounds) % 2:
            both.reverse()
        found: dict[str, list[float]] = {}
        for part in both:
            found |= part()
        self.rounds.append(found)

    def _idle(self, seconds: float) -> dict[str, list[float]]:
        return {"idle": [x / 1e3 for x in self.idle(hz=self.hz, seconds=seconds)["late_ns"]]}

    def _moved(self, policy: ExportedPolicy, seconds: float, folder: Path) -> dict[str, list[float]]:
        while len(self.rests) < RESTS:
            if (found := self._driven(policy, seconds, folder)) is not None:
                return found
        raise SystemExit(f"at {self.hz:g} Hz the robot came to rest again and again: {self.rests}")

    def _driven(self, policy: ExportedPolicy, seconds: float, folder: Path) -> dict[str, list[float]] | None:
        log = folder / "commands.npy"
        safety = Safety(rate_hz=self.hz, no_device_watchdog=True)  # nothing moves
        with Timed("still", {"log": str(log)}, safety, priority=self.priority, core=self.core) as link:
            link.start()
            began_ns = link.clock.now_ns() + ns(SETTLE_S)
            ended_ns = began_ns + ns(seconds)
            planned = list(plans(link, policy, ended_ns))
            state = link.state()
            left = link.close()
        if state.rung is Rung.STOPPED:
            self.rests += [event["text"] for event in left["events"] if event["kind"] in ("ramp", "fault")]
            return None
        ticks = link.ticks[(link.ticks[:, 0] >= began_ns) & (link.ticks[:, 0] < ended_ns)]
        arrived = {int(code): int(t_ns) for code, t_ns in np.load(log) if code}
        planned = [plan for plan in planned if plan.code in arrived and plan.handed_ns >= began_ns]
        self.scheduling = left["scheduling"] or {"scheduler": "other", "locked": False, "core": None}
        for kind, count in left["counts"].items():
            self.counts[kind] = self.counts.get(kind, 0) + count
        late = lateness(ticks, ns(1 / self.hz))
        return {
            "late": (late / 1e3).tolist(),
            "work": (ticks[:, 2] / 1e3).tolist(),
            "plan": [(arrived[plan.code] - plan.handed_ns) / 1e3 for plan in planned],
            "act": [plan.act_ns / 1e3 for plan in planned],
        }

    def row(self) -> dict[str, Any]:
        whole = {name: np.concatenate([x[name] for x in self.rounds]) for name in self.rounds[0]}
        missed_us = 1e6 * MISSED / self.hz
        found: dict[str, Any] = {"hz": self.hz, "scheduler": self.scheduling["scheduler"]}
        for name, values in whole.items():
            points = np.percentile(values, POINTS)
            found |= {f"{name}_p{point:g}".replace(".", ""): float(x) for point, x in zip(POINTS, points, strict=True)}
            found[f"{name}_max"] = float(values.max())
        for name in ("late", "idle"):
            found[f"{name}_missed"] = float((whole[name] > missed_us).mean())
            found[f"{name}_rounds_p999"] = [float(np.percentile(x[name], 99.9)) for x in self.rounds]
        found |= {"deadlines": len(whole["late"]), "plans": len(whole["plan"]), "missed_above_us": missed_us}
        return {
            **found,
            "over_idle": found["late_p999"] / found["idle_p999"],
            "counts": self.counts,
            "rests": self.rests,
        } | {
            "scheduling": dict(self.scheduling),
            "idle_scheduling": self.idle.about["scheduling"],
        }


def looped(policy: ExportedPolicy, effort: Effort, core: int | None, folder: Path) -> list[dict[str, Any]]:
    """Rates in turns, so that a slow minute of the machine touches all rows alike."""
    gc.collect()
    gc.freeze()  # as a policy process does
    idle = {PRIORITY: Child("idle", priority=PRIORITY, core=core), 0: Child("idle", priority=0, core=None)}
    wanted = [(100.0, PRIORITY), (200.0, PRIORITY), (500.0, PRIORITY), (200.0, 0)]
    loops = [Loop(hz, priority, core if priority else None, idle[priority]) for hz, priority in wanted]
    for _ in tqdm(range(effort.rounds), disable=None):
        for loop in loops:
            loop.turn(policy, effort.seconds, folder)
    for child in idle.values():
        child.close()
    return [loop.row() for loop in loops]


class Sent(NamedTuple):
    code: int
    act_ns: int  # the policy took, whose caches had 50 ms to fill with other things
    handed_ns: int  # when it was handed to the link


def plans(link: RobotLink, policy: ExportedPolicy, until_ns: int) -> Iterator[Sent]:
    """Sends them until then, each at any moment of a period."""
    random = np.random.default_rng(0)
    noise = np.zeros((HORIZON, JOINTS), np.float32)
    began_ns, code = link.clock.now_ns(), 0
    while (now_ns := link.clock.now_ns()) < until_ns:
        obs = {"state": observed(link)}
        begun_ns, code = link.clock.now_ns(), code + 1
        chunk = policy.act(obs, noise=noise)
        act_ns = link.clock.now_ns() - begun_ns
        times_s = (now_ns - began_ns) / 1e9 + PLAN_S * np.arange(HORIZON)[:, None]
        targets = 0.3 * np.sin(times_s + np.arange(JOINTS)) - 0.3 * np.sin(np.arange(JOINTS)) + 0.01 * chunk
        targets[:, -1] = code * CODE_RAD
        handed_ns = link.clock.now_ns()
        link.plan(targets, PLAN_S, linear=True)
        yield Sent(code, act_ns, handed_ns)
        link.wait_until_ns(now_ns + ns(PLAN_S * random.uniform(0.8, 1.2)))


@contextmanager
def announced(folder: Path) -> Iterator[None]:
    """The device of `control_parts.py`, for every process begun meanwhile, as if a package had been installed."""
    about = folder / "still_robot-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: still-robot\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[burnish.robots]\nstill = control_parts:make\n")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(HERE), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def torch_peer(connection: Any) -> None:
    """In a process of its own: the same policy as torch runs it, eagerly, on one thread."""
    torch.set_num_threads(1)
    policy = flow()
    obs, noise = {"state": torch.ones(1, OBS)}, torch.zeros(1, HORIZON, JOINTS)
    gc.collect()
    gc.freeze()
    with torch.inference_mode():
        while (count := connection.recv()) > 0:
            connection.send(timed(lambda: policy.act(obs, noise=noise), count))


def called(folder: Path, policy: Any, effort: Effort, core: int | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of calls; and of the process that acts: which modules it has."""
    linear = [part for part in policy.net.body.modules() if isinstance(part, nn.Linear)]
    layers = [[part.in_features, part.out_features] for part in linear]
    children = {
        "other": Child("calls", bundle=str(folder), layers=layers, priority=0, core=None),
        "real-time": Child("calls", bundle=str(folder), layers=layers, priority=PRIORITY, core=core),
    }
    ours, theirs = get_context("spawn").Pipe()
    peer = get_context("spawn").Process(target=torch_peer, args=(theirs,), daemon=True)
    peer.start()
    found: dict[tuple[str, str], list[dict[str, list[int]]]] = {}
    for _ in range(effort.call_rounds):
        for scheduler, child in children.items():
            for name, times in child(count=effort.calls).items():
                found.setdefault((name, scheduler), []).append(times)
        ours.send(effort.calls)
        found.setdefault(("act, torch", "other"), []).append(ours.recv())
    ours.send(0)
    peer.join()
    for child in children.values():
        child.close()
    rows = [call_row(name, scheduler, rounds) for (name, scheduler), rounds in found.items()]
    return rows, {scheduler: child.about for scheduler, child in children.items()}


def call_row(name: str, scheduler: str, rounds: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Any]:
    """Microseconds. p50 and own time are those of the median round; p99 that of the median round and of the best."""
    wall = np.array([x["wall_ns"] for x in rounds]) / 1e3
    cpu = np.array([x["cpu_ns"] for x in rounds]) / 1e3
    p99 = np.percentile(wall, 99, axis=1)
    return {
        "call": name,
        "scheduler": scheduler,
        "p50_us": float(np.median(np.percentile(wall, 50, axis=1))),
        "p99_us": float(np.median(p99)),
        "best_p99_us": float(p99.min()),
        "worst_p99_us": float(p99.max()),
        "own_p50_us": float(np.median(np.percentile(cpu, 50, axis=1))),
        "own_p99_us": float(np.median(np.percentile(cpu, 99, axis=1))),
        "calls": wall.size,
    }


def difference(policy: Any, runtime: ExportedPolicy, count: int) -> float:
    """The largest between torch and the runtime, over random observations and noise."""
    random = np.random.default_rng(7)
    obs = random.standard_normal((count, OBS), np.float32)
    noise = random.standard_normal((count, HORIZON, JOINTS), np.float32)
    with torch.inference_mode():
        theirs = policy.act({"state": torch.from_numpy(obs)}, noise=torch.from_numpy(noise)).numpy()
    ours = np.stack([runtime.act({"state": x}, noise=z) for x, z in zip(obs, noise, strict=True)])
    return float(np.abs(ours - theirs).max())


TIMES = {f"{name}_{point}": ",.0f" for name in ("late", "idle") for point in ("p50", "p99", "p999")}
SHARES = {"over_idle": ".2f", "late_missed": ".5f", "idle_missed": ".5f"}
WORK = {f"{name}_{point}": ",.0f" for name in ("work", "plan", "act") for point in ("p50", "p99")}
LOOP_COLUMNS = {"hz": ".0f", "scheduler": "", **TIMES, **SHARES, **WORK}
CALL_TIMES = dict.fromkeys(("p50_us", "p99_us", "best_p99_us", "own_p50_us", "own_p99_us"), ".1f")
CALL_COLUMNS = {"call": "", "scheduler": "", **CALL_TIMES}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--core", type=int, help="for the control process and the idle loop (default: any, as deployed)"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    effort = QUICK if chosen.quick else FULL
    with tempfile.TemporaryDirectory() as name, announced(Path(name)):
        folder = Path(name)
        policy = flow()
        bundle.write(assembled(policy), folder / "bundle")
        runtime = load(folder / "bundle")
        parity = difference(policy, runtime, effort.inputs)
        calls, processes = called(folder / "bundle", policy, effort, chosen.core)
        loops = looped(runtime, effort, chosen.core, folder)
    if any(about["torch"] for about in processes.values()):
        raise SystemExit("the process that acts has imported torch")
    by_call = {(row["call"], row["scheduler"]): row for row in calls}
    at_200 = next(row for row in loops if row["hz"] == 200)
    act = by_call["act", "other"]
    result = {
        "loop200_p999_us": at_200["late_p999"],
        "idle200_p999_us": at_200["idle_p999"],
        "loop200_miss_share": at_200["late_missed"],
        "infer_p99_us": act["p99_us"],
        "infer_best_p99_us": act["best_p99_us"],
        "guard_us": by_call["guard, changed", "other"]["p50_us"],
        "parity": parity,
    }
    about = machine(torch.device("cpu"))
    report = {"machine": about, "quick": chosen.quick, "effort": asdict(effort), "missed_periods": MISSED}
    report |= {"loops": loops, "calls": calls, "processes": processes}
    path = chosen.out / ("control_loop_quick.json" if chosen.quick else "control_loop.json")
    head = f"{about['processor']}, {about['cores']} cores, load {about['load']}; at 200 Hz {at_200['scheduling']}"
    publish(path, report, "\n\n".join([head, table(loops, LOOP_COLUMNS), table(calls, CALL_COLUMNS)]), result)
    tables = {"control_loop": markdown(loops, LOOP_COLUMNS), "control_calls": markdown(calls, CALL_COLUMNS)}
    page(path, *tables.values())
    if path == RESULTS / "control_loop.json":
        for name, text in tables.items():
            embed(ROBOTS, name, text)


if __name__ == "__main__":
    main()
