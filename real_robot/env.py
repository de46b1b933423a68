"""A robot as a world, and worlds with a robot's guard.

`RobotEnv` is one robot behind `VecEnv`: whatever evaluates, records or trains in simulation does so on a robot, or on
its twin. `GuardedEnv` is N simulated worlds whose set-points pass the guard that a robot's pass, so that a refinement
learns with the limits active.

The body (`Body`) is what a world's numbers mean on this robot; `sim.mirror` makes it of a simulated task. A `Stage`
brings about the beginning of an episode, which on hardware may take a person.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..policies.core.errors import BurnishError
from ..policies.core.seed import EpisodeSeeds
from ..policies.core.spec import EnvSpec
from ..policies.core.types import Obs, Step, VecEnv
from ..policies.core.wrapper import Wrapper
from .adapter import Phase
from .clock import ns
from .errors import RobotError
from .guard import JointGuard, Limits
from .link import Link, Snapshot
from .safe_robot import Rung
from .supervisor import NOTHING, Supervisor

OVERLAP = 1.5  # of a tick: so long is a set-point good for, so that a policy may be late by half a tick


class Judgement(Protocol):
    """Each (1,)."""

    @property
    def reward(self) -> Any: ...
    @property
    def terminated(self) -> Any: ...
    @property
    def success(self) -> Any: ...


class Body(Protocol):
    """Between a world's numbers and a robot's. Arrays have no leading 1 but in observations and judgements."""

    spec: EnvSpec

    def begin(self, seed: int) -> np.ndarray: ...
    def see(self, q: np.ndarray, qd: np.ndarray) -> None: ...
    def observe(self) -> dict[str, np.ndarray]: ...
    def targets(self, action: np.ndarray) -> np.ndarray: ...
    def judge(self, action: np.ndarray) -> Judgement: ...


Stage = Callable[[Body, int], Link]  # begin an episode of that seed; the robot is held, where the episode begins


class RobotEnv:
    """``stage`` is called at each reset, and the link that it returns is used until the next one. A ``supervisor``
    may play actions of its own, in [-1, 1] of the action's range, and has the last word on success; without one, it is
    the body that judges, by the truth of a simulated robot or by what was measured."""

    num_envs = 1
    device = torch.device("cpu")

    def __init__(self, body: Body, stage: Stage, seed: int = 0, supervisor: Supervisor | None = None) -> None:
        self.body, self.spec, self.supervisor = body, body.spec, supervisor
        low, high = (np.array(x) for x in (body.spec.action.low, body.spec.action.high))
        self._middle, self._half = (high + low) / 2, (high - low) / 2
        self.reports: list[dict[str, Any]] = []  # what each episode's link has left to say
        self._stage, self._link = stage, None
        self._seeds = EpisodeSeeds(seed, 1)
        self._period_ns = ns(1 / self.spec.control_hz)
        self._tick = self._next_ns = 0

    @property
    def link(self) -> Link:
        if self._link is None:
            raise BurnishError("a robot is reset before its first step")
        return self._link

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        if mask is None or bool(mask[0]):
            self._retire()
            current = self._seeds.begin(torch.ones(1, dtype=torch.bool), seeds)
            self._link = self._stage(self.body, int(current[0]))
            self._see(self.link.state())
            self._tick, self._next_ns = 0, self.link.clock.now_ns()
        return self._observe()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        spec, link = self.spec, self.link
        requested = action[0].detach().cpu().numpy().astype(np.float64)
        word = NOTHING if self.supervisor is None else self.supervisor.poll(self.body.observe())
        if word.stop:
            link.stop()
        taken = word.action is not None
        wanted = requested if word.action is None else self._middle + self._half * word.action
        executed = np.clip(wanted, spec.action.low, spec.action.high)
        targets = self.body.targets(executed)
        now_ns = link.clock.now_ns()
        if now_ns > self._next_ns + self._period_ns:
            self._next_ns = now_ns  # whoever decides was late: what is over is not caught up
        link.plan(targets[None], OVERLAP * self._period_ns / 1e9)
        self._next_ns += self._period_ns
        link.wait_until_ns(self._next_ns)
        snapshot = link.state()
        verdict = self._judge(snapshot, executed)
        self._see(snapshot)
        self._tick += 1
        held = snapshot.phase is Phase.ACTIVE and snapshot.rung is not Rung.STOPPED
        terminated = torch.as_tensor(np.asarray(verdict.terminated))
        over = self._tick >= spec.max_steps or not held
        info = {
            "requested": torch.from_numpy(requested[None].astype(np.float32)),
            "executed": torch.from_numpy(executed[None].astype(np.float32)),
            "intervened": torch.tensor([taken]),
            "held": torch.tensor([held]),  # False: the robot was stopped, by whatever stops it
        }
        reward = torch.as_tensor(np.asarray(verdict.reward), dtype=torch.float32)
        if verdict.success is not None:
            info["success"] = torch.as_tensor(np.asarray(verdict.success))
        if word.success is not None:
            terminated, info["success"] = torch.tensor([True]), torch.tensor([word.success])
            reward = torch.tensor([float(word.success)])
        return Step(self._observe(), reward, terminated, torch.tensor([over]) & ~terminated, info)

    def close(self) -> None:
        self._retire()

    def _retire(self) -> None:
        if self._link is not None:
            self.reports.append(self._link.close())
            self._link = None

    def _judge(self, snapshot: Snapshot, executed: np.ndarray) -> Judgement:
        """By what is, where that is known: a peg in its hole is half a millimetre from where rounding puts it."""
        truth = self.link.truth()
        self.body.see(snapshot.q if truth is None else truth, snapshot.qd)
        return self.body.judge(executed)

    def _see(self, snapshot: Snapshot) -> None:
        self.body.see(snapshot.q, snapshot.qd)

    def _observe(self) -> Obs:
        return {key: torch.from_numpy(np.asarray(x, np.float32)) for key, x in self.body.observe().items()}


def each_anew(connect: Callable[[np.ndarray], Link]) -> Stage:
    """Of a robot that is a model: every episode has one of its own, which begins in the state of the episode's seed."""

    def stage(body: Body, seed: int) -> Link:
        link = connect(body.begin(seed))
        try:
            link.start()
        except RobotError:
            link.close()
            raise
        return link

    return stage


class _Guarding:
    """A `JointGuard` of N rows as what stands between a task and its actuators (`sim.batch.Shaper`)."""

    def __init__(self, limits: Limits, num_envs: int, parts: int) -> None:
        self.parts, self.changed = parts, np.zeros(num_envs, np.int64)
        self._guard = JointGuard(limits, (num_envs,))
        self._rows = np.zeros(num_envs, bool)

    def begin(self, ctrl: np.ndarray, rows: np.ndarray) -> None:
        mask = np.zeros(len(ctrl), bool)
        mask[rows] = True
        self._guard.reset(ctrl, mask)
        self.changed[rows] = 0

    def shape(self, ctrl: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
        if rows is None:
            guarded = self._guard(ctrl)
            self.changed += guarded.changed
            return guarded.q
        kept = self._guard.state()
        guarded = self._guard(ctrl)
        idle = np.ones(len(ctrl), bool)
        idle[rows] = False
        self._guard.restore(kept, idle)
        self.changed += guarded.changed & ~idle
        return guarded.q

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(x.copy()) for name, x in self._guard.state().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._guard.restore({name: x.numpy() for name, x in state.items()})


class GuardedEnv(Wrapper):
    """``limits`` are those of the actuators, at the rate at which a robot's control loop commands. ``info`` says in
    how many parts of the episode so far the guard has changed a set-point ("guarded")."""

    def __init__(self, env: VecEnv, limits: Limits) -> None:
        super().__init__(env)
        if not hasattr(env, "shaper"):
            raise BurnishError(f"{type(env).__name__} has no set-points that a guard could stand before")
        world: Any = env
        randomize = world.task.randomize
        if randomize is not None and randomize.latency_s > 0:
            raise BurnishError("a guard and late actions cannot be had at once; set randomize.latency_s=0")
        skip, tick_s = world.task.frame_skip, 1 / env.spec.control_hz
        parts = round(tick_s / limits.period_s)
        if abs(parts * limits.period_s - tick_s) > 1e-9 or parts < 1 or skip % parts:
            whole = [k / tick_s for k in range(1, skip + 1) if skip % k == 0]
            raise BurnishError(
                f"a guard at {1 / limits.period_s:g} Hz does not divide a tick of {tick_s:g} s into whole physics "
                f"steps; choices: {', '.join(f'{rate:g}' for rate in whole)} Hz"
            )
        if len(limits.lower) != world.physics.model.nu:
            raise BurnishError(f"limits of {len(limits.lower)} actuators for a world of {world.physics.model.nu}")
        self._guarding = world.shaper = _Guarding(limits, env.num_envs, parts)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.env.step(action, active)
        step.info["guarded"] = torch.from_numpy(self._guarding.changed.copy())
        return step
