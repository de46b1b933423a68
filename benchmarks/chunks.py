"""Success and smoothness while inference takes time: four ways to go from chunk to chunk.

The ways are those of `real_robot/inference/realtime_chunking.py`.

    python benchmarks/chunks.py [--quick] [--again]

A flow is imitated from demonstrations of `avoid` that take each of its 24 routes as often, in chunks of 16 of which 8
are executed; it is kept in `runs/chunks`, and `--again` makes it anew (half a minute of a core). There two chunks can
both be right and not fit together. It plays the same fresh seeds (stream "chunks") with a simulated latency of 0, 2 and
4 ticks of 50 ms:

* ``queue``    each chunk takes over at the action whose turn it is; without latency, this is what is played anyway,
* ``ensemble`` a question whenever the last one is answered, and the mean of all chunks that speak of a tick,
* ``inpaint``  real time: what is played meanwhile is put into the next chunk,
* ``guide``    and the next chunk is guided to all that is left of the old one.

All chunks may be played to their end (``chunks.reach``). Worlds are simulated without a robot around them, so that
differences come from chunks alone; each has a `RealtimeChunking` and a virtual clock of its own, so a run replays.

Success has Wilson's interval; ``lost`` is its paired difference to the queue without latency. An action is a
displacement of the hand, so a change from one action to the next is an acceleration, in shares of half the actions'
range. ``jump`` is the largest of an episode, in the mean over episodes; ``beyond`` is what it has more than the
demonstrations have; ``rms`` is the root of the mean square of all changes. RESULT, at the longest latency: success and
``beyond`` of each way, and success of the queue without latency (``reference``).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import torch
from bases import demonstrations, world
from measure import RESULTS, embed, machine, markdown, options, page, publish, table
from torch import Tensor

from burnish.policies.__main__ import GROUPS, PretrainConfig
from burnish.policies.build import build_policy, describe, load_policy
from burnish.policies.cli.cli import compose, to_object
from burnish.policies.core.config import to_data
from burnish.policies.core.scale import Scale, ScaledEnv
from burnish.policies.core.spec import PolicySpec
from burnish.policies.core.types import Obs
from burnish.policies.data.episodes import Episodes
from burnish.policies.imitate import ImitationLearner
from burnish.policies.measure.evaluate import evaluate, evaluation_seeds
from burnish.policies.measure.statistics import mean_interval, paired_difference, wilson
from burnish.policies.runs.checkpoint import save
from burnish.real_robot.clock import VirtualClock, ns
from burnish.real_robot.inference.chunk_settings import Chunks, Hold, Mode
from burnish.real_robot.inference.predictors import PolicyPredictor
from burnish.real_robot.inference.realtime_chunking import RealtimeChunking
from burnish.real_robot.inference.worker import Latency, Simulated
from burnish.sim.build import make_env, origin_of

ROOT = Path(__file__).resolve().parents[1]
KEPT, ROBOTS = ROOT / "runs" / "chunks", ROOT / "docs" / "robots.md"
TASK, LEVEL, HORIZON, EXECUTE = "avoid", "multi_modal", 16, 8
LATENCIES = (0, 2, 4)  # ticks
WAYS = {
    "queue": {"mode": Mode.queue, "every": EXECUTE},
    "ensemble": {"mode": Mode.ensemble},
    "inpaint": {"mode": Mode.realtime, "every": EXECUTE},
    "guide": {"mode": Mode.realtime, "every": EXECUTE, "hold": Hold.guide},
}


@dataclass(frozen=True)
class Effort:
    demonstrations: int
    steps: int  # of the imitation
    worlds: int
    episodes: int  # of each way and latency


FULL, QUICK = Effort(200, 4000, 20, 200), Effort(10, 50, 5, 5)


class Fleet:
    """A controller of many worlds: for each a `RealtimeChunking` with a clock of its own. It keeps what was played."""

    def __init__(self, policy: Any, first: Obs, hz: float, ticks: int, chunks: Chunks) -> None:
        # A little less than whole ticks, so that an answer is there when its tick begins.
        predictor, latency = PolicyPredictor(policy), Latency(max(0.0, ticks - 0.1) / hz)
        self._period_ns = ns(1 / hz)
        self._members: list[tuple[RealtimeChunking, VirtualClock]] = []
        for _ in range(len(next(iter(first.values())))):
            clock = VirtualClock()
            self._members.append((RealtimeChunking(Simulated(predictor, clock, latency), chunks, hz), clock))
            self._members[-1][0].warm_up({key: x[:1] for key, x in first.items()})
        self._now: list[list[Tensor]] = [[] for _ in self._members]
        self.played: dict[int, list[Tensor]] = {}  # by the seed of the episode; what follows on its end is not cut off

    def reset(self, mask: Tensor, seeds: Sequence[int] | None = None) -> None:
        assert seeds is not None
        for i in mask.nonzero().flatten().tolist():
            self._members[i][0].reset(torch.ones(1, dtype=torch.bool), [seeds[i]])
            self._now[i] = []
            self.played.setdefault(seeds[i], self._now[i])

    def step(self, obs: Obs) -> Tensor:
        for i, (member, clock) in enumerate(self._members):
            self._now[i].append(member.step({key: x[i : i + 1] for key, x in obs.items()})[0])
            clock.advance_ns(self._period_ns)
        return torch.stack([actions[-1] for actions in self._now])

    def waited(self) -> int:
        return sum(member.report.waited for member, _ in self._members)


def imitated(data: Episodes, effort: Effort) -> Any:
    words = ["policy=flow", "experiment=desk", "data=unused", "seed=2", f"train.steps={effort.steps}"]
    words += [f"chunk.horizon={HORIZON}", f"chunk.execute={EXECUTE}"]
    config: PretrainConfig = to_object(compose("pretrain", PretrainConfig, GROUPS["pretrain"], words))
    env, chunk = data.spec, to_data(config.chunk)
    spec = PolicySpec(env.obs, env.action, control_hz=env.control_hz, action_mode=env.action_mode, **chunk)
    learner = ImitationLearner(build_policy(config.policy, spec, seed=2), data, config.train, seed=2)
    while learner.step < config.train.steps:
        learner.update()
    learner.ema.copy_to(learner.average)
    return learner.average.eval()


def kept(data: Episodes, effort: Effort, again: bool) -> Any:
    """The policy of a full run, made once."""
    if again:
        shutil.rmtree(KEPT, ignore_errors=True)
    if not KEPT.exists():
        policy = imitated(data, effort)
        save(KEPT / "policy", config=describe(policy, {"env": origin_of(world(TASK))}), state=policy.state_dict())
    return load_policy(KEPT)[0]


def changes(episodes: Sequence[np.ndarray]) -> dict[str, Any]:
    """``jump`` of each episode, and ``rms`` of all. The gripper has nothing to do here, and does nothing."""
    found = [np.abs(np.diff(actions, axis=0)) for actions in episodes]
    return {
        "jumps": [float(x.max()) for x in found],
        "rms": float(np.sqrt(np.mean(np.concatenate([x.ravel() for x in found]) ** 2))),
    }


def played(policy: Any, way: str, ticks: int, effort: Effort) -> dict[str, Any]:
    env, seeds = make_env(world(TASK), effort.worlds), evaluation_seeds(effort.episodes, stream="chunks")
    # The latency is always the same, so one rehearsal tells it. Actions of the arm are displacements.
    chunks = Chunks(**WAYS[way], reach=HORIZON, relative=True, rehearsals=1, forget=0)
    # Of a controller it has what evaluation calls.
    fleet: Any = Fleet(policy, env.reset(seeds=seeds[: effort.worlds]), env.spec.control_hz, ticks, chunks)
    found = evaluate(ScaledEnv(env), fleet, seeds)
    episodes = [torch.stack(fleet.played[s][:n]).numpy() for s, n in zip(seeds, found.lengths, strict=True)]
    assert found.success is not None
    return {"way": way, "ticks": ticks, "successes": found.success, **changes(episodes), "waited": fleet.waited()}


def summarised(cell: dict[str, Any], reference: dict[str, Any], demonstrated: float) -> dict[str, Any]:
    success = cell["successes"]
    low, high = wilson(sum(success), len(success))
    lost, lost_low, lost_high = paired_difference(success, reference["successes"])
    jump_low, jump_high = mean_interval(cell["jumps"])
    jump = float(np.mean(cell["jumps"]))
    return {
        **{key: cell[key] for key in ("way", "ticks", "rms", "waited")},
        **{"episodes": len(success), "success": sum(success) / len(success), "low": low, "high": high},
        **{"lost": -lost, "lost_low": -lost_high, "lost_high": -lost_low},
        **{"jump": jump, "jump_low": jump_low, "jump_high": jump_high, "beyond": jump - demonstrated},
    }


COLUMNS = {"way": "", "ticks": "d", "success": ".3f", "low": ".3f", "high": ".3f", "lost": ".3f", "lost_low": ".3f"}
COLUMNS |= {"lost_high": ".3f", "jump": ".3f", "jump_low": ".3f", "jump_high": ".3f", "beyond": ".3f", "rms": ".3f"}


def sentences(rows: Sequence[dict[str, Any]], shown: dict[str, Any], effort: Effort) -> str:
    """For docs/robots.md: figures without a verdict."""
    of = {(row["way"], row["ticks"]): row for row in rows}
    first, longest = of["queue", 0], max(LATENCIES)

    def listed(name: str, ticks: int = longest) -> str:
        return " / ".join(f"{of[way, ticks][name]:.2f}" for way in WAYS)

    rates = " / ".join(f"{row['success']:.2f} ({row['low']:.2f} to {row['high']:.2f})" for row in rows[-len(WAYS) :])
    names = " / ".join(f"`{way}`" for way in WAYS)
    found = f"""
        What that makes of a flow with {HORIZON} actions a chunk on `{TASK}`, whose demonstrations take any of 24
        routes, was measured in simulation, on {effort.episodes} paired episodes each (`benchmarks/chunks.py`; all of it
        is in `benchmarks/results/chunks.md`). Without latency a queue succeeds in {first["success"]:.2f} of them
        ({first["low"]:.2f} to {first["high"]:.2f}); with {longest} ticks, {names} succeed in {rates}, the last two
        being `realtime` with either `hold`. Demonstrations change from one action to the next by {shown["jump"]:.2f} at
        most, in the mean over episodes, of a range of 2; a queue without latency by {first["jump"]:.2f}, the four with
        2 ticks by {listed("jump", 2)}, and with {longest} by {listed("jump")}. The root mean square of all changes is
        {shown["rms"]:.2f} in demonstrations, {first["rms"]:.2f} without latency, and {listed("rms")} with {longest}
        ticks.
        """
    return "\n" + fill(" ".join(found.split()), 120) + "\n\n"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--again", action="store_true", help=f"make the policy anew, instead of taking {KEPT}")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    effort = QUICK if chosen.quick else FULL
    data = demonstrations(world(TASK), LEVEL, effort.demonstrations)
    policy = imitated(data, effort) if chosen.quick else kept(data, effort, chosen.again)
    scale = Scale(data.spec.action)
    shown = changes([scale.to_unit(episode.action).numpy() for episode in data])
    shown["jump"] = float(np.mean(shown["jumps"]))
    cells = []
    for ticks in LATENCIES:
        for way in WAYS:
            cells.append(played(policy, way, ticks, effort))
            share = np.mean(cells[-1]["successes"])
            sys.stderr.write(f"{way} {ticks}: {share:.3f}, jump {np.mean(cells[-1]['jumps']):.3f}\n")
    rows = [summarised(cell, cells[0], shown["jump"]) for cell in cells]
    last = {row["way"]: row for row in rows if row["ticks"] == max(LATENCIES)}
    result = {"reference": rows[0]["success"]}
    result |= {f"{way}_{name}": row[name] for name in ("success", "beyond") for way, row in last.items()}
    path = chosen.out / ("chunks_quick.json" if chosen.quick else "chunks.json")
    about = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "effort": asdict(effort)}
    about |= {"demonstrations": {"jump": shown["jump"], "rms": shown["rms"]}, "rows": rows}
    publish(path, about, table(rows, COLUMNS), result)
    page(path, markdown(rows, COLUMNS))
    if path == RESULTS / "chunks.json":
        embed(ROBOTS, "chunks", sentences(rows, shown, effort))


if __name__ == "__main__":
    main()
