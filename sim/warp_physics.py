"""N copies of one MuJoCo model on one device, stepped by mujoco-warp: `physics.Physics` for tasks of torch tensors.

A field of the simulation is a tensor in its memory (`wp.to_torch`), so nothing is copied to the host. One launch moves
all worlds; the rows that should have stood still are then put back. On a GPU a control tick is one CUDA graph, captured
once. warp's own CPU device, where there are no graphs, is for tests.

**Departures** from C MuJoCo: float32 instead of float64, at a tolerance of the solver of 1e-6 at least; Newton's solver
where a model (humanoid) asks for PGS, which mujoco-warp lacks; other contacts between boxes; no automatic reset of a
world that diverges. `benchmarks/warp_difference.py` measures what these come to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module, metadata
from typing import Any

import mujoco
import torch
from torch import Tensor

from ..policies.core.errors import BurnishError
from .arrays import put

# All that decides what a step does next, as `physics.STATE`; what tasks never write (forces by hand) is left out.
STATE = ("time", "qpos", "qvel", "act", "ctrl", "qacc_warmstart", "mocap_pos", "mocap_quat")
DERIVE = {"mj_kinematics": "kinematics", "mj_rnePostConstraint": "rne_postconstraint"}
# Of each world. Clean experts and random actions make 23 and 82 at most in the tasks here; where a world needs more,
# mujoco-warp says so on the terminal and leaves the others out.
CONTACTS, CONSTRAINTS = 64, 192


class WarpColumn:
    """One field of all worlds: ``read()`` gives it as (N, *shape) in float64, in which tasks compute; ``write`` takes a
    mask (N,)."""

    def __init__(self, view: Tensor) -> None:
        self._view, self.shape = view, tuple(view.shape)

    def read(self) -> Tensor:
        return self._view.double()

    def write(self, value: Tensor | float, rows: Tensor | None = None) -> None:
        put(self._view, value, rows)


class WarpPhysics:
    """``rows`` is a mask (N,) everywhere, or None for all."""

    def __init__(self, model: mujoco.MjModel, num_worlds: int, device: torch.device) -> None:
        try:
            self._warp: Any = import_module("warp")
            self._mjw: Any = import_module("mujoco_warp")
        except ImportError as error:
            raise BurnishError("env.backend=warp needs mujoco-warp; pip install 'burnish[warp]'") from error
        if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
            model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
        self.model, self.num_worlds, self.device = model, num_worlds, device
        self._warp.config.quiet = True
        self._warp.init()
        self._on = self._warp.device_from_torch(str(device))
        self._graphs: dict[tuple[int, tuple[str, ...]], Any] = {}
        self._on_device: Any = None  # the model, put there by the first step: a task may change it when it is bound
        self._put_model()  # refuses what it cannot simulate
        with self._warp.ScopedDevice(self._on):
            self._data = self._mjw.make_data(model, nworld=num_worlds, nconmax=CONTACTS, njmax=CONSTRAINTS)
        # A row that stands still gets these back: its state, and the columns of the task.
        self._fields = {name: self._tensor(name) for name in STATE if 0 not in getattr(self._data, name).shape}
        self._initial = {name: x.clone() for name, x in self._fields.items()}

    def _put_model(self) -> Any:
        try:
            with self._warp.ScopedDevice(self._on):
                return self._mjw.put_model(self.model)
        except (NotImplementedError, ValueError) as error:
            raise BurnishError(
                f"mujoco-warp does not simulate this world ({error}); play it with env.backend=mujoco"
            ) from error

    def _tensor(self, name: str) -> Tensor:
        """(N, ...) in the memory of the simulation; a matrix is a row of 9 numbers, as in C."""
        x = self._warp.to_torch(getattr(self._data, name))
        return x.flatten(2) if name.endswith("mat") else x

    def column(self, field: str, at: int | slice | None = None) -> WarpColumn:
        """``field`` of `MjData`, such as "qpos" or "site_xpos"; ``at`` picks one row of it, or a slice of rows."""
        whole = self._fields.setdefault(field, self._tensor(field))
        return WarpColumn(whole if at is None else whole[:, at])

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(self.num_worlds, *shape, dtype=torch.float64, device=self.device)

    def step(self, ctrl: Tensor, substeps: int, rows: Tensor | None = None, derive: Sequence[str] = ()) -> None:
        """``ctrl`` (N, nu), held for ``substeps`` physics steps; then the functions of MuJoCo that ``derive`` names."""
        with self._others_kept(rows):
            self._fields["ctrl"].copy_(ctrl)
            self._run(substeps, tuple(derive))

    def forward(self, rows: Tensor | None = None, derive: Sequence[str] = ()) -> None:
        """Everything that follows from the state of the worlds ``rows``, without a step."""
        with self._others_kept(rows):
            self._run(0, tuple(derive))

    def reset(self, rows: Tensor) -> None:
        """To the model's initial state; nothing of the past remains."""
        for name, x in self._initial.items():
            put(self._fields[name], x, rows)

    def state(self) -> dict[str, Tensor]:
        return {name: self._fields[name].clone() for name in self._initial}

    def restore(self, state: dict[str, Tensor], derive: Sequence[str] = ()) -> None:
        """Set the state, and everything that follows from it."""
        self._set(state)
        self.forward(None, derive)
        self._set(state)  # forward has written its own warm start

    def _set(self, state: Mapping[str, Tensor]) -> None:
        for name, x in state.items():
            self._fields[name].copy_(x)

    @contextlib.contextmanager
    def _others_kept(self, rows: Tensor | None) -> Iterator[None]:
        """Worlds that are not in ``rows`` are put back afterwards."""
        kept = {} if rows is None else {name: x.clone() for name, x in self._fields.items()}
        yield
        for name, x in kept.items():
            put(x, self._fields[name], rows)
            self._fields[name].copy_(x)

    def _run(self, substeps: int, derive: tuple[str, ...]) -> None:
        """``substeps`` steps, or none and what follows from the state; then ``derive``."""
        if self._on_device is None:
            self._on_device = self._put_model()
        with self._warp.ScopedDevice(self._on):
            if not self._on.is_cuda:
                self._launch(substeps, derive)
                return
            stream = self._warp.stream_from_torch(self.device)  # torch's own, so that neither waits for the host
            if (substeps, derive) not in self._graphs:
                self._graphs[substeps, derive] = self._captured(stream, substeps, derive)
            self._warp.capture_launch(self._graphs[substeps, derive], stream=stream)

    def _captured(self, stream: Any, substeps: int, derive: tuple[str, ...]) -> Any:
        before = self.state()
        with self._warp.ScopedStream(stream):
            self._launch(substeps, derive)  # loads the kernels, which a capture cannot
        self._set(before)
        with self._warp.ScopedCapture() as capture:
            self._launch(substeps, derive)
        return capture.graph

    def _launch(self, substeps: int, derive: tuple[str, ...]) -> None:
        mjw, model, data = self._mjw, self._on_device, self._data
        try:
            for _ in range(substeps):
                mjw.step(model, data)
            if not substeps:
                mjw.forward(model, data)
            for name in derive:
                getattr(mjw, DERIVE[name])(model, data)
        except Exception as error:
            if not type(error).__module__.startswith("warp."):
                raise
            versions = " with ".join(f"{name} {metadata.version(name)}" for name in ("mujoco-warp", "warp-lang"))
            raise BurnishError(f"{versions} cannot be compiled; install the versions of constraints.txt") from error
