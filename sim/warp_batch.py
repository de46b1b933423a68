"""BatchedWarp: N worlds of one MuJoCo task on a device as a `VecEnv`; nothing comes to the host in a tick.

The formulas are those of the task (`Task`), on tensors; the physics is mujoco-warp's (`warp_physics.py`). This file
gives it time, as `batch.BatchedMujoco` does in C: seeds, episodes, truncation, rows that stand by, saved state.

**Departures** from `BatchedMujoco`: no pictures, guard or randomisation; a running robot begins on other numbers of the
same distribution, because Gymnasium's come from NumPy; no experts, whose plans are made of arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from ..policies.core import tree
from ..policies.core.clock import Clock, restored
from ..policies.core.errors import BurnishError
from ..policies.core.types import Obs, Step
from .arrays import constant, put
from .physics import Physics
from .pixels import Pixels, film_camera
from .task import Draw, PixelConfig, Task


class BatchedWarp:
    """``physics`` is for tests: a class with the methods of `WarpPhysics`, which is the default."""

    def __init__(
        self,
        task: Task,
        num_envs: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        physics: Any = None,
    ) -> None:
        _refuse(task)
        if physics is None:
            from .warp_physics import WarpPhysics as physics
        self.task: Any = task
        self.num_envs, self.device = num_envs, torch.device(device)
        self.version, self.config = task.version, task.config
        self._clock = Clock(num_envs, seed, self.device)
        self.physics = physics(mujoco.MjModel.from_xml_string(task.mjcf()), num_envs, self.device)
        task.bind(self.physics)
        self.spec = task.spec
        self.state_names: Sequence[str] | None = getattr(task, "state_names", None)
        self.action_names: Sequence[str] | None = getattr(task, "action_names", None)
        self._film: tuple[Physics, Pixels] | None = None

    @property
    def instructions(self) -> list[str] | None:
        """The instruction of each world, where the task tells its episodes apart by words; they come to the host."""
        return getattr(self.task, "instructions", None)

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        mask = self._clock.begin(mask, seeds)
        self.physics.reset(mask)
        self.task.begin(mask, Draw(self._clock, tensors=True))
        self.physics.forward(mask, self.task.derive)
        self.task.settle(mask)
        return self.observe()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        tree.check(action, f"{self.num_envs} {self.spec.action.dim}")
        ticking = self._clock.advance(active)
        rows = None if active is None else ticking
        asked = action.detach().to(self.device, torch.float64)
        executed = asked.clip(constant(asked, self.spec.action.low), constant(asked, self.spec.action.high))
        kept = {} if rows is None else {key: x.clone() for key, x in self.task.memory.items()}
        self.physics.step(self.task.control(executed, rows), self.task.frame_skip, rows, self.task.derive)
        verdict = self.task.judge(executed)
        for key, x in kept.items():
            put(self.task.memory[key], x, ~ticking)
        truncated = (self._clock.tick >= self.spec.max_steps) & ~verdict.terminated
        info = {key: _float32(x) for key, x in verdict.info.items()}
        if verdict.success is not None:
            info["success"] = verdict.success
        info["executed"] = _float32(executed)
        return Step(self.observe(), _float32(verdict.reward), verdict.terminated, truncated, info)

    def observe(self) -> Obs:
        return {key: _float32(x) for key, x in self.task.observe().items()}

    def render(self, size: int = 256, rows: Sequence[int] | None = None) -> Tensor:
        """(N, size, size, 3) uint8, or of the worlds ``rows`` alone, for films: drawn on the host."""
        chosen = list(range(self.num_envs) if rows is None else rows)
        if self._film is None or self._film[0].num_worlds != len(chosen) or self._film[1].size != size:
            shown = Physics(self.physics.model, len(chosen))
            film = PixelConfig((film_camera(shown.model),), size, lavish=True)
            self._film = shown, Pixels(shown, film)
        shown, pixels = self._film
        for name in ("qpos", "mocap_pos", "mocap_quat") if shown.model.nmocap else ("qpos",):
            shown.column(name).write(self.physics.column(name).read()[chosen].cpu().numpy())
        shown.forward()
        (frames,) = pixels.draw(np.arange(len(chosen))).values()
        return torch.from_numpy(frames.transpose(0, 2, 3, 1).copy()).to(self.device)

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._clock.state_dict(),
            **{f"physics.{key}": x for key, x in self.physics.state().items()},
            **{f"task.{key}": x.clone() for key, x in self.task.memory.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        physics = restored(self.physics.state(), state, "physics.")
        memory = restored(self.task.memory, state, "task.")
        self._clock.load_state_dict(state)
        self.physics.restore(physics, self.task.derive)
        for key, x in memory.items():
            self.task.memory[key].copy_(x)


def _float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float64 else x


def _refuse(task: Any) -> None:
    asked = {"cameras": task.pixels is not None, "randomize": task.randomize is not None and task.randomize.any()}
    asked["guard"] = task.guard is not None and task.guard.any()
    for what, wanted in asked.items():
        if wanted:
            raise BurnishError(f"env.backend=warp has no {what}; leave that out, or set env.backend=mujoco")
