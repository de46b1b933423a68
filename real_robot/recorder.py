"""Episodes on a robot -> a dataset on disk, of the kind that ``burnish collect`` writes and everything of ours reads.

``action`` is what was executed, in the units of the actuators. The request of the policy, and whether a person
played, stand in columns of the same rows, where every tool that reads LeRobot's sets sees them; they are no
observations. An episode is in the set whole or not at all, and a set can be taken up again.

**Names.** ``intervention`` is LeRobot's own (``lerobot-rollout --strategy.type=dagger``), and known to those who read
such sets. For what a policy asked for it has no column; ``complementary_info.policy_action`` is what others call that
(Evo-RL and its kin), and LeRobot's replay buffer keeps whatever begins so. A name that begins with ``action`` would be
a second action to LeRobot's policies.

**Departures.** A person's success label is the episode's ``next.success``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..policies.core.errors import BurnishError
from ..policies.core.types import Controller, Obs, Step, VecEnv
from ..policies.core.wrapper import Wrapper, feature_names, instructions
from ..policies.data.episodes import Episode
from ..policies.data.lerobot import read_extra
from ..policies.data.lerobot_writer import LeRobotWriter
from .errors import Refused
from .supervisor import NOTHING, Word

POLICY_ACTION, INTERVENTION = "complementary_info.policy_action", "intervention"


def columns(dim: int) -> dict[str, Tensor]:
    """The further columns of a set of actions of that many numbers, without rows."""
    return {POLICY_ACTION: torch.zeros(0, dim), INTERVENTION: torch.zeros(0, 1, dtype=torch.bool)}


class Recorded(Wrapper):
    """One robot, whose episodes go to a writer as they end. One that is cut short by a reset is forgotten, and so is
    one that ends once ``stopped()``: Ctrl-C reaches the robot's control process too, and may have ended it."""

    def __init__(self, env: VecEnv, writer: LeRobotWriter, stopped: Callable[[], bool] = lambda: False) -> None:
        super().__init__(env)
        self._writer, self._stopped, self._seed = writer, stopped, 0
        self._obs: list[Obs] = []
        self._rows: dict[str, list[Tensor]] = {}

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        if seeds is None:
            raise BurnishError("an episode is recorded together with its seed; reset with seeds=")
        obs = self.env.reset(mask, seeds)
        if mask is None or bool(mask[0]):
            self._seed, self._obs, self._rows = int(seeds[0]), [_copied(obs)], {}
        return obs

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.env.step(action, active)
        self._obs.append(_copied(step.obs))
        info = step.info
        facts = {
            "action": info.get("executed", action),
            "requested": info.get("requested", action),
            "intervened": info.get("intervened", torch.tensor([False])),
            "reward": step.reward,
            "success": info.get("success", torch.tensor([False])),
        }
        for name, x in facts.items():
            self._rows.setdefault(name, []).append(x[0].detach().clone())
        if bool(step.terminated | step.truncated) and not self._stopped():
            self._keep(bool(step.terminated), bool(step.truncated))
        return step

    def _keep(self, terminated: bool, truncated: bool) -> None:
        rows = {name: torch.stack(x) for name, x in self._rows.items()}
        self._writer.add(
            Episode(
                obs={key: torch.stack([obs[key][0] for obs in self._obs]) for key in self.spec.obs.shapes},
                action=rows["action"].float(),
                reward=rows["reward"].float(),
                terminated=terminated,
                truncated=truncated,
                success=bool(rows["success"].any()),
                seed=self._seed,
                task="".join(instructions(self.env) or ()),
                extra={POLICY_ACTION: rows["requested"].float(), INTERVENTION: rows["intervened"][:, None]},
            )
        )
        self._obs, self._rows = [], {}


@contextmanager
def recording(
    env: VecEnv,
    out: str,
    meta: Mapping[str, Any],
    robot: str,
    seeds: Sequence[int],
    *,
    resume: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Recorded, LeRobotWriter]]:
    """However it ends, the episodes that had ended before are in the set at ``out``."""
    if Path(out).exists() and not resume:
        raise BurnishError(f"{out} exists already; use another folder, or continue it with resume=true")
    extra = columns(env.spec.action.dim)
    # At 0 an episode is published as soon as it ends, unless that takes more than a twentieth of the time.
    options: dict[str, Any] = {"extra": extra, "names": feature_names(env), "robot_type": robot, "resume": resume}
    writer = LeRobotWriter(out, env.spec, meta, publish_every_s=0.0, **options)
    try:
        begun = len(writer.seeds)
        if begun > len(seeds):
            raise BurnishError(
                f"{out} has {begun} episodes already, more than episodes={len(seeds)}; ask for at least as many, or "
                "use another folder"
            )
        if writer.seeds != list(seeds[:begun]):
            raise BurnishError(f"{out} holds episodes of other seeds, so it cannot be continued; use another folder")
        yield Recorded(env, writer, stopped), writer
    finally:
        if writer.seeds:
            writer.finish()
        else:
            writer.abort()


def play(
    env: VecEnv,
    controller: Controller,
    seeds: Sequence[int],
    begin: Callable[[int], None],
    stopped: Callable[[], bool],
) -> None:
    """Plays one episode per seed until ``stopped()``. ``begin`` is told each seed first, and may wait long."""
    everyone = torch.ones(1, dtype=torch.bool)
    for seed in seeds:
        if stopped():
            return
        begin(seed)
        if stopped():
            return
        obs = env.reset(None, [seed])
        controller.reset(everyone, [seed])
        ended = False
        while not ended and not stopped():
            step = env.step(controller.step(obs))
            obs, ended = step.obs, bool(step.terminated | step.truncated)


class HoldPosition:
    """No policy: the robot stays where it was sent last."""

    def __init__(self, body: Any) -> None:
        low, high = (np.array(x) for x in (body.spec.action.low, body.spec.action.high))
        self._body, self._middle, self._half = body, (high + low) / 2, (high - low) / 2

    def reset(self, mask: Tensor, seeds: Sequence[int] | None = None) -> None:
        pass

    def step(self, obs: Obs) -> Tensor:
        return self.peek(obs)

    def peek(self, obs: Obs) -> Tensor:
        held, _ = self._body.holding()
        return torch.from_numpy(((held - self._middle) / self._half).clip(-1, 1).astype(np.float32))[None]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Demonstrator:
    """A scripted expert as the person beside a robot: takes over after so many ticks, and does not give it back."""

    def __init__(self, expert: Controller, after: int = 0) -> None:
        self._expert, self._after, self._tick = expert, after, 0

    def begin(self, seed: int) -> None:
        self._expert.reset(torch.ones(1, dtype=torch.bool), [seed])
        self._tick = 0

    def poll(self, obs: Mapping[str, Any]) -> Word:
        self._tick += 1
        if self._tick <= self._after:
            return NOTHING
        seen = {key: torch.from_numpy(np.asarray(x, np.float32)) for key, x in obs.items()}
        return Word(action=self._expert.step(seen)[0].numpy().astype(np.float64))

    def ready(self, what: str) -> None:
        raise Refused("a scripted expert lays nothing out; it is for robots that are models")

    def close(self) -> None:
        pass


class EpisodeExtras(NamedTuple):
    """The columns of an episode beside its executed actions."""

    requested: Tensor  # (T, A) in actuator units: of the policy, or of nobody
    intervened: Tensor  # (T,) bool: a person played


def read_beside(folder: str | Path) -> list[EpisodeExtras]:
    """One per episode of a set that was recorded here, in its order."""
    found = read_extra(folder)
    if not all({POLICY_ACTION, INTERVENTION} <= set(kept) for kept in found or [{}]):
        raise BurnishError(f"{folder} holds nothing beside its actions: `burnish record` did not write it")
    return [EpisodeExtras(kept[POLICY_ACTION], kept[INTERVENTION].reshape(-1)) for kept in found]


def _copied(obs: Obs) -> Obs:
    """A world may answer in the same memory again and again."""
    return {key: x.clone() for key, x in obs.items()}
