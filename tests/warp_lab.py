"""Physics for `BatchedWarp` without mujoco-warp: MuJoCo in C, whose columns are given as tensors and rows as masks.

So formulas on tensors, masks, resets and saved states are compared with `BatchedMujoco` where nothing rounds otherwise;
the difference that mujoco-warp's physics makes is measured by itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from burnish.sim.build import ENVS
from burnish.sim.physics import Column, Physics


class TensorColumn:
    def __init__(self, column: Column) -> None:
        self._column, self.shape = column, column.shape

    def read(self) -> Tensor:
        return torch.from_numpy(self._column.read())

    def write(self, value: Tensor | float, rows: Tensor | None = None) -> None:
        array = value.numpy() if isinstance(value, Tensor) else value
        self._column.write(array, _numbers(rows))


class TensorPhysics:
    def __init__(self, model: mujoco.MjModel, num_worlds: int, device: torch.device) -> None:
        self._physics = Physics(model, num_worlds, threads=1)
        self.model, self.num_worlds, self.device = model, num_worlds, device

    def column(self, field: str, at: int | slice | None = None) -> TensorColumn:
        return TensorColumn(self._physics.column(field, at))

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(self.num_worlds, *shape, dtype=torch.float64)

    def step(self, ctrl: Tensor, substeps: int, rows: Tensor | None = None, derive: Sequence[str] = ()) -> None:
        self._physics.step(ctrl.numpy(), substeps, _numbers(rows), _functions(derive))

    def forward(self, rows: Tensor | None = None, derive: Sequence[str] = ()) -> None:
        self._physics.forward(_numbers(rows), _functions(derive))

    def reset(self, rows: Tensor) -> None:
        self._physics.reset(np.flatnonzero(rows.numpy()))

    def state(self) -> dict[str, Tensor]:
        return {"all": torch.from_numpy(self._physics.state())}

    def restore(self, state: dict[str, Tensor], derive: Sequence[str] = ()) -> None:
        self._physics.restore(state["all"].numpy(), _functions(derive))


def _numbers(rows: Tensor | None) -> np.ndarray | None:
    return None if rows is None else np.flatnonzero(rows.numpy())


def _functions(names: Sequence[str]) -> list[Any]:
    return [getattr(mujoco, name) for name in names]


def task_of(name: str, **settings: Any) -> Any:
    module, attribute = ENVS[name].builder.split(":")
    return getattr(importlib.import_module(f"burnish.sim.{module}"), attribute)(ENVS[name].config(**settings))
