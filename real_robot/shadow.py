"""Shadow mode: a policy beside a robot that is moved otherwise, or lies still. It observes and infers, no more.

The adapter is opened and read, and never activated: `Adapter` takes no command then, whatever this module did. At each
tick the set-point that would have been sent is passed through a guard of its own, and written down beside where the
robot was and where it went.

The robot does not follow, so what a policy remembers of its own set-points would drift away from the arm; therefore
each tick begins anew, as if the set-points so far had been where the robot is (`Body.follow`).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from ..policies.core.errors import BurnishError
from ..policies.core.types import Controller, Obs, Step, VecEnv
from .adapter import Adapter, RobotState, Vector
from .clock import ns
from .env import Body, joined, observed, parted
from .errors import RobotError, StaleState
from .robots import Connect
from .safety.guard import JointGuard
from .safety.safe_robot import SafeRobot, Safety

READ_S = 0.5  # so long is a new state waited for
LOST = 20  # states in a row that may be missing
MOVED_RAD = 1e-3  # less is no motion whose direction could be compared


@dataclass
class Log:
    """Columns over all ticks; each row is written as a line of JSON too, if there is a file."""

    file: TextIO | None = None
    q: list[Vector] = field(default_factory=list)  # where the robot was
    wanted: list[Vector] = field(default_factory=list)  # the set-points that would have been asked for
    guarded: list[Vector] = field(default_factory=list)  # what the guard would have made of them by the end of the tick
    after: list[Vector] = field(default_factory=list)  # where the robot was a tick later
    first: list[bool] = field(default_factory=list)  # of an episode
    periods: int = 0  # of the guard
    changed: int = 0  # of these, with another set-point than was asked for
    kinds: Counter[str] = field(default_factory=Counter)
    stale: int = 0  # ticks without a new state
    late: int = 0  # ticks that began after their time was over
    inference_ms: list[float] = field(default_factory=list)

    def add(self, about: dict[str, Any], **row: Any) -> None:
        for name, x in row.items():
            getattr(self, name).append(x)
        if self.file is not None:
            plain = {name: np.round(x, 6).tolist() if isinstance(x, np.ndarray) else x for name, x in row.items()}
            self.file.write(json.dumps({**about, **plain}) + "\n")


class ShadowEnv:
    """One robot that is only looked at, as a world: ``step`` takes an action, sends nothing, and waits for the tick to
    be over."""

    num_envs, device = 1, torch.device("cpu")

    def __init__(self, body: Body, connect: Connect, anew: bool, safety: Safety, log: Log) -> None:
        self.spec, self.body, self.log = body.spec, body, log
        self._connect, self._anew, self._safety = connect, anew, safety
        self._adapter: Adapter | None = None
        self._state: RobotState | None = None
        self._period_ns = ns(1 / body.spec.control_hz)
        self._tick = self._seed = self._lost = self._next_ns = 0

    @property
    def instructions(self) -> list[str] | None:
        return getattr(self.body, "instructions", None)

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        self._seed = 0 if seeds is None else int(seeds[0])
        start = self.body.begin(self._seed)
        if self._adapter is None or self._anew:
            self.close()
            self._adapter = self._connect(start)
            # It is asked what it would refuse, and started by nobody.
            self._limits = SafeRobot(self._adapter, self._safety).limits
            self._adapter.configure()
        self._state = state = self._adapter.read(READ_S)
        self._parts = max(1, round(1 / (self.spec.control_hz * self._limits.period_s)))
        self._guard = JointGuard(self._limits)
        self._guard.reset(state.q)
        self._tick, self._lost, self._next_ns = 0, 0, self._adapter.clock.now_ns()
        return self._observe(state)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        adapter, before, log = self._adapter, self._state, self.log
        if adapter is None or before is None:
            raise BurnishError("a robot is reset before its first step")
        asked = action[0].detach().cpu().numpy().astype(np.float64)
        wanted, _ = parted(self.body, self.body.targets(np.clip(asked, self.spec.action.low, self.spec.action.high)))
        guarded = self._guarded(wanted)
        self._next_ns += self._period_ns
        now_ns = adapter.clock.now_ns()
        if now_ns > self._next_ns:
            log.late += 1
            self._next_ns = now_ns
        adapter.clock.sleep_until_ns(self._next_ns)
        after = self._read(adapter, before)
        about = {"seed": self._seed, "tick": self._tick, "t_ns": before.t_ns}
        log.add(about, q=before.q, wanted=wanted, guarded=guarded, after=after.q, first=self._tick == 0)
        self._state, self._tick = after, self._tick + 1
        over = self._tick >= self.spec.max_steps
        nothing = torch.zeros(1)
        return Step(self._observe(after), nothing, torch.tensor([False]), torch.tensor([over]), {})

    def close(self) -> None:
        if self._adapter is not None:
            self._adapter.close()
            self._adapter = None

    def _read(self, adapter: Adapter, before: RobotState) -> RobotState:
        try:
            state, self._lost = adapter.read(READ_S), 0
            return state
        except StaleState as error:
            self._lost += 1
            self.log.stale += 1
            if self._lost >= LOST:
                raise RobotError(f"the robot has said nothing for {LOST} ticks: {error}") from error
            return before

    def _guarded(self, wanted: Vector) -> Vector:
        """Where a guard that was alone with this policy would be at the end of the tick."""
        guard, log = self._guard, self.log
        for _ in range(self._parts):
            q, v = guard.q, guard.v
            log.periods += 1
            if guard(wanted).changed:
                log.changed += 1
                log.kinds.update(kind.value for kind, broken in guard.why(wanted, q, v).items() if broken)
        return guard.q

    def _observe(self, state: RobotState) -> Obs:
        q, qd = joined(self.body, state.q, state.qd, np.nan if state.gripper is None else state.gripper)
        self.body.see(q, qd)
        self.body.follow(q)
        return observed(self.body)


def watch(
    env: ShadowEnv, seen: VecEnv, controller: Controller, seeds: Sequence[int], stopped: Callable[[], bool]
) -> None:
    """Infer at every tick of so many episodes; ``seen`` is ``env`` as the controller sees it."""
    everyone = torch.ones(1, dtype=torch.bool)
    try:
        for seed in seeds:
            obs, over = seen.reset(None, [seed]), False
            controller.reset(everyone, [seed])
            while not (over or stopped()):
                began = time.perf_counter()
                action = controller.step(obs)
                env.log.inference_ms.append(1e3 * (time.perf_counter() - began))
                step = seen.step(action)
                obs, over = step.obs, bool(step.truncated)
            if stopped():
                return
    finally:
        env.close()


def summary(log: Log) -> dict[str, Any]:
    """All in rad and ms; nothing but a count where nobody has looked."""
    if not log.q:
        return {"ticks": 0}
    q, wanted, guarded, after = (np.stack(x) for x in (log.q, log.wanted, log.guarded, log.after))
    away, moved = np.abs(wanted - q).max(axis=1), np.abs(after - q).max(axis=1)
    first = away[np.array(log.first)]
    both = (away > MOVED_RAD) & (moved > MOVED_RAD)
    ways = [((wanted - q)[i], (after - q)[i]) for i in np.flatnonzero(both)]
    agreed = [float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))) for a, b in ways]
    return {
        "ticks": len(q),
        "late": log.late,
        "stale": log.stale,
        "inference_ms": {"p99": float(np.percentile(log.inference_ms, 99)), "max": max(log.inference_ms)},
        "first_rad": {"median": float(np.median(first)), "max": float(first.max())},
        "away_rad": {"median": float(np.median(away)), "max": float(away.max())},
        "moved_rad": {"median": float(np.median(moved)), "max": float(moved.max())},
        "guard": {
            "periods": log.periods,
            "changed": log.changed,
            "kinds": dict(sorted(log.kinds.items())),
            "furthest_rad": float(np.abs(guarded - wanted).max()),
        },
        "agreement": {"ticks": len(agreed), "cosine": float(np.mean(agreed)) if agreed else None},
    }


def page(found: dict[str, Any], safety: Safety) -> list[str]:
    """``summary`` as lines to read."""
    if not found["ticks"]:
        return ["nothing was seen, and nothing was sent"]
    guard, agreed, first, away = found["guard"], found["agreement"], found["first_rad"], found["away_rad"]
    inference, moved = found["inference_ms"], found["moved_rad"]
    kinds = ", ".join(f"{kind} {count}" for kind, count in guard["kinds"].items()) or "nothing"
    refused = f", which a robot refuses (safety.start_gap_rad={safety.start_gap_rad:g})"
    cosine = "" if agreed["cosine"] is None else f", with a cosine of {agreed['cosine']:+.2f} on average"
    return [
        f"{found['ticks']} ticks were watched, {found['late']} of them late, {found['stale']} without a new state",
        f"inference took {inference['p99']:.1f} ms in 99 of 100 ticks, {inference['max']:.1f} ms at worst",
        f"the first set-points would have been {first['median']:.3f} rad away, {first['max']:.3f} at worst"
        + (refused if first["max"] > safety.start_gap_rad else ""),
        f"all set-points: {away['median']:.3f} rad away, {away['max']:.3f} at worst",
        f"the guard would have changed {guard['changed']} of {guard['periods']} commands ({kinds}), and been up to "
        f"{guard['furthest_rad']:.3f} rad behind at the end of a tick",
        f"the robot itself moved by {moved['median']:.3f} rad a tick, {moved['max']:.3f} at worst; in "
        f"{agreed['ticks']} ticks both had somewhere to go{cosine}",
        "nothing was sent",
    ]
