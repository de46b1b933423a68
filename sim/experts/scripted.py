"""Experts for the tasks of the arm: a script of waypoints, and the errors in following it.

An expert looks at the world itself, not at the observation, as a person at the desk does: so it demonstrates for
cameras too. A script is stateless: phase, time and per-episode choices are kept here, for all worlds.

Errors come in two kinds. ``noise`` is new in every tick; imitation averages it away. A *bias* (in a script's own
settings) is the same in every episode that meets the same situation, and imitation learns it: that makes a clumsy base.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ...policies.core.clock import Clock, Clocked
from ...policies.core.seed import normal
from ...policies.core.types import Obs
from ..batch import BatchedMujoco
from ..desk import DeskTask
from ..physics import Array


class Move(NamedTuple):
    """The goals of a script in the present phase of each world."""

    pose: Array  # (N, 5): where the tool should go
    gripper: Array | float | None = None  # (N,): angle; None keeps it
    next: Array | bool = False  # (N,): this phase is over; or by how many phases to go on, which may be negative


class Script(Protocol):
    """``phase`` (N,) int, ``ticks`` (N,) control ticks since it began, ``choice`` (N, K) uniform in (0, 1), drawn once
    per episode."""

    @property
    def choices(self) -> int: ...

    def __call__(self, task: Any, phase: Array, ticks: Array, choice: Array) -> Move: ...


class Level(NamedTuple):
    """A level of an expert: its script, and its noise."""

    script: Script
    noise: float = 0.0  # standard deviation of an error of the hand in each tick, in steps of the tool


class ScriptedExpert(Clocked):
    """A `Controller` of the worlds of ``env``, in [-1, 1]; it must act in step with them."""

    def __init__(self, env: BatchedMujoco, script: Script, *, noise: float = 0.0, seed: int = 0) -> None:
        assert isinstance(env.task, DeskTask), "scripts drive the arm"
        self.env, self.task, self.script, self.noise = env, env.task, script, noise
        self._clock = Clock(env.num_envs, seed)
        n = env.num_envs
        self._state = {
            "phase": torch.zeros(n, dtype=torch.int64),
            "ticks": torch.zeros(n, dtype=torch.int64),
            "choice": torch.zeros(n, script.choices, dtype=torch.float64),
        }

    def reset(self, mask: Tensor, seeds: Sequence[int] | None = None) -> None:
        mask = self._clock.begin(mask.cpu(), seeds)
        drawn = self._clock.noise("choice").uniform(tuple(self._state["choice"].shape))
        self._state["choice"] = torch.where(mask[:, None], drawn, self._state["choice"])
        for key in ("phase", "ticks"):
            self._state[key] = self._state[key].masked_fill(mask, 0)

    def peek(self, obs: Obs) -> Tensor:
        return self._act(self._move())

    def step(self, obs: Obs) -> Tensor:
        move = self._move()
        action = self._act(move)
        over = torch.as_tensor(np.broadcast_to(move.next, (self.env.num_envs,)).copy())
        self._state["phase"] = self._state["phase"] + over
        self._state["ticks"] = (self._state["ticks"] + 1).masked_fill(over != 0, 0)
        self._clock.advance()
        return action

    def _move(self) -> Move:
        phase, ticks, choice = (self._state[key].numpy() for key in ("phase", "ticks", "choice"))
        return self.script(self.task, phase, ticks, choice)

    def _act(self, move: Move) -> Tensor:
        gripper = None if move.gripper is None else np.broadcast_to(move.gripper, (self.env.num_envs,))
        error = torch.zeros(self.env.num_envs, self.task.hand.freedoms, dtype=torch.float64)
        if self.noise > 0:
            error = self.noise * normal(error.shape, self._clock.noise("expert"), dtype=error.dtype)
        action = self.task.hand.action_towards(move.pose, gripper, error.numpy())
        return torch.from_numpy(action).float().to(self.env.device)


def by_phase(phase: Array, options: Sequence[Array | bool]) -> Array:
    """Row by row the option (N, ...) of the world's present phase; phases beyond the last take the last."""
    return np.stack(options)[np.minimum(phase, len(options) - 1), np.arange(len(phase))]
