"""A robot as a world, and worlds with a robot's guard.

`RobotEnv` is one robot behind `VecEnv`: whatever evaluates, records or trains in simulation does so on a robot, or on
its twin. `GuardedEnv` is N simulated worlds whose set-points pass the guard that a robot's pass, so that a refinement
learns with the limits active.

The body (`Body`) is what a world's numbers mean on this robot; `sim.mirror` makes it of a simulated task. A `Stage`
brings about the beginning of an episode, which on hardware may take a person.

A robot cannot be put back into the middle of an episode. The saved state decides the episodes to come, and where
that is loaded the one under way is over: a reset comes first (``continues``). A training that was interrupted goes on
so, and does not repeat bit for bit. Nor is an episode begun twice to find out whether its seed is honoured
(``repeatable``): evaluations on a robot are never paired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..policies.core.errors import BurnishError
from ..policies.core.seed import EpisodeSeeds
from ..policies.core.spec import EnvSpec, ObsSpec, dtype_of
from ..policies.core.types import Obs, Step, VecEnv
from ..policies.core.wrapper import Wrapper
from .adapter import Phase
from .camera import Sensor
from .clock import Clock, ns
from .control.link import Link, Snapshot
from .errors import RobotError, StaleState
from .safety.guard import Limits
from .safety.safe_robot import Rung
from .supervisor import NOTHING, Supervisor, Word

FULL_RANGES_PER_S = 0.1  # by a key that is held, of an action that says where to go
FIRST_S = 5.0  # until a camera's first picture
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
    """Between a world's numbers and a robot's. Arrays have no leading 1 but in observations and judgements. Where a
    body has ``grips = True``, the last coordinate of ``q``, ``qd`` and the targets is the gripper's own channel: a
    fraction of its width (whose speed is not measured), and the others are the joints."""

    spec: EnvSpec

    def begin(self, seed: int) -> np.ndarray: ...
    def see(self, q: np.ndarray, qd: np.ndarray) -> None: ...
    def observe(self) -> dict[str, np.ndarray]: ...
    def targets(self, action: np.ndarray) -> np.ndarray: ...
    def judge(self, action: np.ndarray) -> Judgement: ...

    # For whom a person's keys are to move:
    def follow(self, q: np.ndarray) -> None: ...  # what is commanded next begins there
    def holding(self) -> tuple[np.ndarray, np.ndarray]: ...  # action that holds the robot; which numbers displace


Stage = Callable[[Body, int], Link]  # begin an episode of that seed; the robot is held, where the episode begins


def with_instruction(body: Any, instruction: str) -> Any:
    """The body, with what its worlds say as ``instructions``; nothing where ``instruction`` is empty."""
    if instruction:
        body.instructions = [instruction]
    return body


class RobotEnv:
    """``stage`` is called at each reset, and the link that it returns is used until the next one. A ``supervisor``
    may play actions of its own, in [-1, 1] of the action's range, and has the last word on success; without one, it is
    the body that judges, by the truth of a simulated robot or by what was measured.

    The supervisor is asked after each tick about the next, so that ``info`` says of a tick who played it
    (``intervened``) and whether the person has reached for the robot because of it (``called``)."""

    num_envs = 1
    device = torch.device("cpu")
    continues = False
    repeatable = False

    def __init__(self, body: Body, stage: Stage, seed: int = 0, supervisor: Supervisor | None = None) -> None:
        self.body, self.spec, self.supervisor = body, body.spec, supervisor
        self.state_names, self.action_names = (getattr(body, f"{what}_names", None) for what in ("state", "action"))
        low, high = (np.array(x) for x in (body.spec.action.low, body.spec.action.high))
        self._middle, self._half = (high + low) / 2, (high - low) / 2
        self.reports: list[dict[str, Any]] = []  # what each episode's link has left to say
        self._stage, self._link = stage, None
        self._seeds = EpisodeSeeds(seed, 1)
        self._period_ns = ns(1 / self.spec.control_hz)
        self._tick = self._next_ns = 0
        self._word = NOTHING  # about the tick to come
        self._by_hand = bool(getattr(supervisor, "moves", False))
        self._held = False  # a person plays instead of the policy

    @property
    def instructions(self) -> list[str] | None:
        return getattr(self.body, "instructions", None)

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
            self._tick, self._next_ns, self._held = 0, self.link.clock.now_ns(), False
            self._word = self._listen()
        return self._observe()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        spec, link = self.spec, self.link
        requested = action[0].detach().cpu().numpy().astype(np.float64)
        if not np.isfinite(requested).all():
            raise RobotError(f"the policy asks for {requested.tolist()}, which are no numbers to send to a robot")
        late = link.clock.now_ns() > self._next_ns + (OVERLAP - 1) * self._period_ns
        word = self._word.renewed(self._listen()) if late else self._word
        if word.stop:
            link.stop()
        taken = word.action is not None
        wanted = requested if word.action is None else self._played(word.action)
        if self._by_hand and self._held and not taken:
            link.blend()
        self._held = taken
        executed = np.clip(wanted, spec.action.low, spec.action.high)
        targets = self.body.targets(executed)
        now_ns = link.clock.now_ns()
        if now_ns > self._next_ns + (OVERLAP - 1) * self._period_ns:
            self._next_ns = now_ns  # the policy was so late that the arm is held: ticks that are over are not caught up
        joints, gripper = parted(self.body, targets)
        link.plan(joints[None], OVERLAP * self._period_ns / 1e9, gripper=gripper)
        self._next_ns += self._period_ns
        link.wait_until_ns(self._next_ns)
        snapshot = link.state()
        held = snapshot.phase is Phase.ACTIVE and snapshot.rung not in (Rung.RAMP, Rung.STOPPED)
        if not held:  # the robot ignores requests: the executed action is to stay where it was sent
            self._follow(snapshot, snapshot.sent)
            executed = np.clip(self.body.holding()[0], spec.action.low, spec.action.high)
        verdict = self._judge(snapshot, executed)
        self._see(snapshot)
        self._tick += 1
        terminated = torch.as_tensor(np.asarray(verdict.terminated))
        over = self._tick >= spec.max_steps or not held
        ends = over or bool(terminated) or word.success is not None
        self._word = NOTHING if ends else self._listen()
        info = {
            "requested": torch.from_numpy(requested[None].astype(np.float32)),
            "executed": torch.from_numpy(executed[None].astype(np.float32)),
            "intervened": torch.tensor([taken]),
            "called": torch.tensor([not taken and self._word.action is not None]),
            "held": torch.tensor([held]),  # False: the robot is at rest or brakes, by whatever stops it
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

    def state_dict(self) -> dict[str, Any]:
        return {name: x.clone() for name, x in self._seeds.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._retire()
        self._seeds.load_state_dict({name: x.clone() for name, x in state.items()})

    def _listen(self) -> Word:
        return NOTHING if self.supervisor is None else self.supervisor.poll(self.body.observe())

    def _played(self, person: np.ndarray) -> np.ndarray:
        """In the units of the actuators, what a supervisor plays."""
        if not self._by_hand:
            return self._middle + self._half * person
        if not self._held:
            self._take_hold()
        return self._middle + self._half * self._goes(person)

    def _take_hold(self) -> None:
        """The last request may be far ahead of the robot: a person who takes over finds it standing still, as soon as
        it has braked."""
        now, joints = self.link.state(), self.link.about["joints"]
        braking = np.array([joint["acceleration"] for joint in joints])
        rest = now.sent + now.qd * np.abs(now.qd) / (2 * braking)
        self._follow(now, rest)

    def _follow(self, now: Snapshot, q: np.ndarray) -> None:
        self.body.follow(joined(self.body, q, now.qd, now.gripper)[0])

    def _goes(self, moved: np.ndarray) -> np.ndarray:
        """The action in [-1, 1] that moves the robot so far from where it was sent last. Where a number says where to
        go, a key that is let go must not send the arm to the middle of its range."""
        held, displaces = self.body.holding()
        step = 2 * FULL_RANGES_PER_S / self.spec.control_hz
        return np.where(displaces, moved, np.clip((held - self._middle) / self._half + step * moved, -1, 1))

    def _retire(self) -> None:
        if self._link is not None:
            self.reports.append(self._link.close())
            self._link = None

    def _judge(self, snapshot: Snapshot, executed: np.ndarray) -> Judgement:
        """By what is, where that is known: a peg in its hole is half a millimetre from where rounding puts it."""
        truth = self.link.truth()
        self._see(snapshot, truth)
        return self.body.judge(executed)

    def _see(self, snapshot: Snapshot, q: np.ndarray | None = None) -> None:
        self.body.see(*joined(self.body, snapshot.q if q is None else q, snapshot.qd, snapshot.gripper))

    def _observe(self) -> Obs:
        return observed(self.body)


def observed(body: Body) -> Obs:
    """The observations of a body as tensors, without an axis of worlds."""
    return {key: torch.tensor(np.asarray(x), dtype=dtype_of(key)) for key, x in body.observe().items()}


def joined(body: Body, q: np.ndarray, qd: np.ndarray, gripper: float) -> tuple[np.ndarray, np.ndarray]:
    """(q, qd) as the body counts: with the gripper's channel, which is closed where nobody has measured it."""
    return (np.append(q, np.nan_to_num(gripper)), np.append(qd, 0.0)) if _grips(body) else (q, qd)


def parted(body: Body, targets: np.ndarray) -> tuple[np.ndarray, list[float] | None]:
    """(joints, gripper) as a robot counts."""
    return (targets[:-1], [float(targets[-1])]) if _grips(body) else (targets, None)


def _grips(body: Body) -> bool:
    return bool(getattr(body, "grips", False))


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


class CameraObservations:
    """A body with cameras: the observations of ``body``, and the pictures of cameras that are open, as "image.<name>".

    The newest picture counts. Where none has come since, or a `Watched` camera is frozen, the one before does, until it
    is older than ``oldest_s`` (of each, or of all); then it is `StaleState`, which ends the episode: nothing is asked
    of the robot any more, so it holds, and stops."""

    def __init__(
        self, body: Body, cameras: Mapping[str, Sensor], clock: Clock, oldest_s: float | Mapping[str, float] = 0.2
    ) -> None:
        self.body, self.cameras, self.clock = body, dict(cameras), clock
        oldest = oldest_s if isinstance(oldest_s, Mapping) else dict.fromkeys(cameras, oldest_s)
        self._oldest_ns = {name: ns(oldest[name]) for name in cameras}
        self._frames = {name: camera.read(FIRST_S) for name, camera in self.cameras.items()}
        shapes = {f"image.{name}": (3, *found.image.shape[:2]) for name, found in self._frames.items()}
        # How a model's pictures are drawn says nothing of these.
        self.spec = replace(body.spec, obs=ObsSpec({**body.spec.obs.shapes, **shapes}), pixels=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.body, name)

    def observe(self) -> dict[str, np.ndarray]:
        found = dict(self.body.observe())
        for name, camera in self.cameras.items():
            why = "none has come"
            try:
                self._frames[name] = camera.read(0.0)
            except StaleState as error:
                why = str(error)
            age_ns = self.clock.now_ns() - self._frames[name].t_ns
            if age_ns > self._oldest_ns[name]:
                raise StaleState(f"the picture {name!r} is {age_ns / 1e9:.2f} s old: {why}")
            found[f"image.{name}"] = self._frames[name].image.transpose(2, 0, 1)[None]
        return found


class GuardedEnv(Wrapper):
    """For a program that has a robot at hand: ``limits`` are those of its spec (`Limits.of`), joint by joint. Worlds of
    settings have the same guard by ``env.guard``. ``info["guarded"]`` says in how many parts of the episode so far a
    set-point was not what was asked."""

    def __init__(self, env: VecEnv, limits: Limits) -> None:
        super().__init__(env)
        guard = getattr(env, "guard", None)
        if guard is None:
            raise BurnishError(f"{type(env).__name__} has no set-points that a guard could stand before")
        guard(limits)
