"""Teachers at work: who plays where, what is kept of it, and what a student's own episodes are worth to it.

Everything is recorded as any demonstration is, so a set can be read, shown and imitated again. How worlds are made and
how a controller is played in them is handed in, because nothing here knows a simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...policies.controllers import controller_for
from ...policies.core.errors import BurnishError
from ...policies.core.files import refuse_link
from ...policies.core.scale import Scale
from ...policies.core.seed import derive
from ...policies.core.spec import (
    ActionSpec,
    EnvSpec,
    ObsSpec,
    PolicySpec,
    check_compatible,
    require_like_actions,
    says_nothing,
    stacked_by_history,
)
from ...policies.core.types import Controller, Metrics, Obs, Step, VecEnv
from ...policies.core.wrapper import Wrapper
from ...policies.data.episodes import Episode
from ...policies.data.lerobot_writer import LeRobotWriter
from ...policies.measure.evaluate import Evaluation, compare
from ...policies.runs.run import progress_bar

PUBLISH_EVERY_S = 5.0  # so much work a kill costs at most


class Keep(Enum):
    """The episodes of teachers that are kept: successful ones, or all."""

    successes = "successes"
    all = "all"


class Teacher(NamedTuple):
    """A trained policy and the worlds in which it plays."""

    name: str
    policy: Any
    world: dict[str, Any]  # as datasets and checkpoints remember it
    env: VecEnv  # in actuator units, as the policy sees it

    @property
    def shown(self) -> EnvSpec:
        """The world as it is, in single frames."""
        spec = self.env.spec
        return replace(spec, obs=spec.obs.without_history(self.policy.spec.history))


class Scene(NamedTuple):
    """The assignment of teachers to episodes and worlds."""

    teacher: Teacher
    env: VecEnv
    history: int  # of what the player sees
    controller: Controller
    seeds: list[int]


# (env, controller, seeds) -> after each tick the episodes that are next in the order of the seeds.
Play = Callable[[VecEnv, Controller, Sequence[int]], Iterator[list[Episode]]]


def shared_spec(teachers: Sequence[Teacher]) -> EnvSpec:
    """The spec that the worlds of all teachers share, or a refusal."""
    first, spec = teachers[0].name, teachers[0].shown
    worlds = [teacher.shown for teacher in teachers]
    for (name, policy, *_), world in zip(teachers, worlds, strict=True):
        if policy.spec.action != world.action:
            raise BurnishError(
                f"{name} was trained for the actuator limits {_limits(policy.spec.action)}, but its world has "
                f"{_limits(world.action)}"
            )
        facts = [
            ("action limits", _limits(spec.action), _limits(world.action)),
            ("control_hz", spec.control_hz, world.control_hz),
            ("pictures", spec.pixels or world.pixels, world.pixels or spec.pixels),
            ("goals", _goals(spec.obs), _goals(world.obs)),
        ]
        for fact, one, other in facts:
            if one != other:
                raise BurnishError(
                    f"{first} and {name} cannot teach one student, because their worlds differ in {fact}: {one} and "
                    f"{other}; choose teachers of like worlds, or one world for all with env=..."
                )
    modes = [(t.name, world.action_mode) for t, world in zip(teachers, worlds, strict=True)]
    known = [each for each in modes if not says_nothing(each[1])] or modes
    for each in known:
        require_like_actions(*known[0], *each)
    shown = {key: s for key, s in spec.obs.shapes.items() if all(w.obs.shapes.get(key) == s for w in worlds)}
    if not shown:
        raise BurnishError("the worlds of the teachers show nothing in common, so no student could act in all of them")
    return replace(
        spec, obs=ObsSpec(shown), action_mode=known[0][1], max_steps=max(world.max_steps for world in worlds)
    )


@dataclass
class StudentChunk:
    """The sizes of a fresh student's observations and chunks; null: as its first teacher's."""

    horizon: int | None = None  # actions in a chunk; null: as the teacher's
    execute: int | None = None  # actions of each chunk that are played; null: as the teacher's
    start: int | None = None  # position of the first of them; null: as the teacher's
    history: int | None = None  # observations that are stacked; null: as the teacher's


def student_spec(spec: EnvSpec, keys: Sequence[str], chunk: StudentChunk, like: PolicySpec) -> PolicySpec:
    """Of a fresh student in worlds of ``spec`` that sees ``keys`` (all if empty); ``like`` is its first teacher."""
    unknown = sorted(set(keys) - set(spec.obs.shapes))
    if unknown:
        raise BurnishError(
            f"keys={list(keys)} asks for {unknown}, but the teachers' worlds show {sorted(spec.obs.shapes)}; choose "
            "among these, or a world that shows more with env=..."
        )
    chosen = {name: getattr(like, name) if x is None else x for name, x in vars(chunk).items()}
    return PolicySpec(
        obs=ObsSpec({key: shape for key, shape in spec.obs.shapes.items() if not keys or key in keys}),
        action=spec.action,
        control_hz=spec.control_hz,
        action_mode=spec.action_mode,
        pixels=spec.pixels,
        **chosen,
    )


def scenes(
    teachers: Sequence[Teacher], episodes: int, *, seed: int, round: int = 0, student: Any = None
) -> list[Scene]:
    """Each teacher in its own world; with a student, it plays there and the teacher relabels."""
    made = []
    for place, teacher in enumerate(teachers):
        env, player = teacher.env, teacher.policy
        if student is not None:
            asked = controller_for(player, env.num_envs, device=env.device)
            env, player = Relabelled(env, asked), student
        controller = controller_for(player, env.num_envs, device=env.device)
        seeds = [derive(seed, "distill", round, place, i) for i in range(episodes)]
        made.append(Scene(teacher, env, player.spec.history, controller, seeds))
    return made


def require_at_home(student: PolicySpec, spec: EnvSpec) -> None:
    """Whether a student can act in the teachers' worlds, of ``spec``, or a refusal."""
    check_compatible(student, replace(spec, obs=spec.obs.with_history(student.history)))
    if student.action != spec.action:
        raise BurnishError(
            f"the student was trained for the actuator limits {_limits(student.action)}, but the teachers' worlds have "
            f"{_limits(spec.action)}; take a fresh student"
        )


def require_rounds(student: PolicySpec, teachers: Sequence[Teacher]) -> None:
    """Whether the teachers can relabel what a student does, or a refusal."""
    for number, teacher in enumerate(teachers):
        if teacher.policy.spec.history != student.history:
            raise BurnishError(
                f"in a round {teacher.name} relabels what the student sees, so both need as much history; it has "
                f"{teacher.policy.spec.history}, the student {student.history}"
            )
        for other in teachers[:number]:
            if other.world == teacher.world:
                raise BurnishError(
                    f"{other.name} and {teacher.name} play in one world, so in a round nobody could say which of them "
                    "is to relabel what the student does there; use rounds=0"
                )


def against(
    teachers: Sequence[Teacher], examine: Callable[[Any, dict[str, Any]], Evaluation], say: Callable[[str], None]
) -> Callable[[Any, int], Metrics]:
    """The student against each teacher in that teacher's world; ``examine(policy, world)`` plays the same seeds."""
    known: dict[str, Evaluation] = {}

    def evaluation(student: Any, step: int) -> Metrics:
        metrics: Metrics = {}
        for number, teacher in enumerate(teachers):
            place = f"{number}/" if len(teachers) > 1 else ""
            if teacher.name not in known:
                known[teacher.name] = examine(teacher.policy, teacher.world)
            mine, theirs = examine(student, teacher.world), known[teacher.name]
            for whose, result in (("eval", mine), ("teacher", theirs)):
                metrics |= {f"{whose}/{place}{key}": value for key, value in result.summary().items()}
            words = compare(mine, theirs).sentence("the student", teacher.name)
            say(f"step {step}, on seeds kept for selection: {words}")
        return metrics

    return evaluation


class Relabelled(Wrapper):
    """A world in which one plays and a teacher looks on: what is reported as executed is what the teacher would have
    done, seeing the same. Rewards and ends are those of the player."""

    def __init__(self, env: VecEnv, teacher: Controller) -> None:
        super().__init__(env)
        self.teacher, self.scale = teacher, Scale(env.spec.action, env.device)
        self._obs: Obs = {}

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        self._obs = self.env.reset(mask, seeds)
        chosen = torch.ones(self.num_envs, dtype=torch.bool, device=self.device) if mask is None else mask
        self.teacher.reset(chosen, seeds)
        return self._obs

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        answer = self.scale.to_actuator(self.teacher.step(self._obs))
        step = self.env.step(action, active)
        self._obs = step.obs
        return step._replace(info={**step.info, "executed": answer})


def record(
    folder: Path,
    spec: EnvSpec,
    about: dict[str, Any],
    played: Sequence[Scene],
    play: Play,
    *,
    keep: Keep = Keep.all,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Play what is not yet in the set at ``folder``, and add what is to be kept; False if ``stop`` ended it.

    Failures leave no trace in the set, so one that is taken up again plays those behind its last episode once more.
    """
    order = {seed: place for place, seed in enumerate(seed for scene in played for seed in scene.seeds)}
    writer = LeRobotWriter(refuse_link(folder), spec, about, publish_every_s=PUBLISH_EVERY_S, resume=True)
    with writer, progress_bar(len(order), "episode") as bar:
        if not set(writer.seeds) <= set(order):
            raise BurnishError(f"{folder} holds episodes of other seeds, so it cannot be continued; use another out=")
        begin = order[writer.seeds[-1]] + 1 if writer.seeds else 0
        bar.update(begin)
        for scene in played:
            left = [seed for seed in scene.seeds if order[seed] >= begin]
            for ready in play(scene.env, scene.controller, left) if left else ():
                for episode in ready:
                    if keep is Keep.all or episode.success:
                        writer.add(_as_shown(episode, spec.obs, scene))
                bar.update(len(ready))
                writer.publish_if_due()
                if stop():
                    if not writer.seeds:
                        raise KeyboardInterrupt  # there is nothing that could be taken up again
                    return False
            if not set(writer.seeds) & set(scene.seeds):
                name, task = scene.teacher.name, scene.teacher.world["name"]
                raise BurnishError(
                    f"none of the {len(scene.seeds)} episodes of {name} in {task} succeeded, so it has nothing to "
                    "teach; take a better teacher, another world with env=..., or imitate its failures with keep=all"
                )
    return True


def _as_shown(episode: Episode, shown: ObsSpec, scene: Scene) -> Episode:
    """Single frames of what all worlds show."""
    stacked = {key for key in shown.shapes if scene.history > 1 and stacked_by_history(key)}
    obs = {key: episode.obs[key][:, -1] if key in stacked else episode.obs[key] for key in shown.shapes}
    return replace(episode, obs=obs, task=scene.teacher.world["name"])


def _limits(action: ActionSpec) -> str:
    return f"{list(action.low)} .. {list(action.high)}"


def _goals(obs: ObsSpec) -> dict[str, tuple[int, ...]]:
    return {key: shape for key, shape in sorted(obs.shapes.items()) if key.startswith("goal")}
