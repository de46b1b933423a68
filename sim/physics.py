"""N copies of one MuJoCo model, stepped on all cores of the machine.

One `MjData` per world, and threads that take the next world until none is left: `mj_step` releases Python's lock, so
nothing but the call itself is Python. State is read and written by one gather over all of them (`Column`),
so the cost per world of a task's arithmetic is that of an array operation. `mujoco.rollout` was measured beside it
(docs/simulation.md): it is no faster up to 64 worlds, forgets the solver's warm start between calls (so trajectories
leave Gymnasium's), and returns the state but none of the quantities derived from it, such as contact forces.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from ..policies.core.errors import BurnishError
from ..policies.core.threads import usable_cores

Array = NDArray[Any]  # float64, or bool where it says yes or no
Rows = NDArray[np.int64]  # which worlds
Derive = Callable[[mujoco.MjModel, mujoco.MjData], None]
Work = Callable[[Iterable[int]], None]

# All that decides what `mj_step` does next, the solver's warm start included.
STATE = mujoco.mjtState.mjSTATE_INTEGRATION
FEW = 2  # worlds, that begin anew after a tick


class Column:
    """One float64 field of all worlds: ``read()`` copies it out as (N, *shape), ``write`` copies it in.

    A world's fields keep their address as long as it lives. So the offsets of all of them from the lowest one are
    computed once, and NumPy gathers across the worlds as if their memory were one array. Only addresses of the fields
    themselves are ever touched.
    """

    def __init__(self, fields: Sequence[Array]) -> None:
        """``fields`` are the arrays of N worlds, or views of them (a body's row, a joint's slice), of one shape."""
        first = fields[0]
        if any(x.dtype != np.float64 or x.shape != first.shape or x.strides != first.strides for x in fields):
            raise ValueError("a column joins float64 fields of one shape")
        inner = np.zeros(1, np.int64)  # offsets of the elements of one field, in elements
        for extent, stride in zip(first.shape, first.strides, strict=True):
            inner = (inner[:, None] + np.arange(extent) * (stride // first.itemsize)).reshape(-1)
        starts = np.array([x.ctypes.data for x in fields], np.int64)
        lowest = int(starts.min() + 8 * inner.min(initial=0))
        self.shape = (len(fields), *first.shape)
        self._index = (starts[:, None] - lowest) // 8 + inner
        count = int(self._index.max(initial=0)) + 1
        self._memory: Array = np.ctypeslib.as_array((ctypes.c_double * count).from_address(lowest))
        self._kept = list(fields)  # the views keep their worlds alive

    def read(self) -> Array:
        return self._memory.take(self._index).reshape(self.shape)

    def write(self, value: Array | float, rows: Rows | None = None) -> None:
        """Into all worlds, or into the worlds ``rows``; ``value`` has a row for each of N worlds, or broadcasts."""
        value = np.asarray(value, np.float64)
        if value.shape != self.shape:
            value = np.broadcast_to(value, self.shape)
        value = value.reshape(len(self._index), -1)
        if rows is None:
            self._memory[self._index] = value
        else:
            self._memory[self._index[rows]] = value[rows]


class WorkerThreads:
    """Threads that wait for work. Two queues do less than an executor's futures, and a tick of few worlds is so short
    that this shows."""

    def __init__(self, threads: int) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = threads
        for _ in range(threads):
            Thread(target=_serve, args=(self._calls,), name="physics", daemon=True).start()
        weakref.finalize(self, _dismiss, self._calls, threads)

    def share(self, work: Work, worlds: Sequence[int]) -> None:
        """``work`` on these worlds: every thread, the calling one too, has a share of them (the same ones each time,
        whose memory is near its core) and then takes what others have left of theirs. So nobody waits for a thread
        that the machine holds up, or whose robots lie on the ground and cost more."""
        count = min(self._threads + 1, len(worlds))
        size = -(-len(worlds) // max(count, 1))
        # Python's lock makes taking the next one atomic.
        shares = [iter(worlds[k * size : (k + 1) * size]) for k in range(count)]
        finished: SimpleQueue[BaseException | None] = SimpleQueue()

        def call(k: int) -> None:
            try:
                work(chain(*shares[k:], *shares[:k]))
            except BaseException as error:
                finished.put(error)
            else:
                finished.put(None)

        others = count - 1
        for k in range(1, count):
            self._calls.put(partial(call, k))
        try:
            work(chain(*shares))
        finally:
            for _ in chain(*shares):
                pass  # after an error or Ctrl-C nobody begins another world
            with contextlib.suppress(Empty):
                while True:  # what nobody has begun is not needed any more
                    self._calls.get_nowait()
                    others -= 1
            errors = [finished.get() for _ in range(others)]
        for error in errors:
            if error is not None:
                raise error


def _serve(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it holds the worlds, which may be dropped while this thread waits


def _dismiss(calls: SimpleQueue[Callable[[], None] | None], threads: int) -> None:
    for _ in range(threads):
        calls.put(None)


class Physics:
    """``models`` holds the model of each world: N times the same object, until ``own_model`` gives a world its own."""

    def __init__(self, model: mujoco.MjModel, num_worlds: int, threads: int | None = None) -> None:
        if num_worlds < 1:
            raise BurnishError(f"at least one world is needed, got {num_worlds}")
        self.model, self.num_worlds = model, num_worlds
        self.models = [model] * num_worlds
        self.data = [mujoco.MjData(model) for _ in range(num_worlds)]
        self.threads = max(1, min(threads or usable_cores(), num_worlds))
        self._crew = WorkerThreads(self.threads - 1)
        self._everyone = list(range(num_worlds))
        self._state_size = mujoco.mj_stateSize(model, STATE)
        self._ctrl = self.column("ctrl") if model.nu else None

    def column(self, field: str, at: int | slice | None = None) -> Column:
        """``field`` of `MjData`, such as "qpos" or "site_xpos"; ``at`` picks one row of it, or a slice of rows."""
        fields = [getattr(data, field) for data in self.data]
        # `...` keeps a view where an index into a vector would give a bare number.
        return Column(fields if at is None else [x[at, ...] for x in fields])

    def zeros(self, *shape: int) -> Array:
        """(N, *shape): memory of a task."""
        return np.zeros((self.num_worlds, *shape))

    def step(
        self,
        ctrl: Array,
        substeps: int | Rows,
        rows: Rows | None = None,
        derive: Sequence[Derive] = (),
    ) -> None:
        """``ctrl`` (N, nu), held for ``substeps`` physics steps (one number, or one per world) in the worlds ``rows``.
        ``derive`` are MuJoCo functions to call afterwards, in the same thread."""
        if self._ctrl is not None:
            self._ctrl.write(ctrl, rows)
        models, data, mj_step = self.models, self.data, mujoco.mj_step
        counts = [substeps] * self.num_worlds if isinstance(substeps, int) else substeps.tolist()

        def work(worlds: Iterable[int]) -> None:
            for i in worlds:
                if counts[i]:
                    mj_step(models[i], data[i], counts[i])
                for function in derive:
                    function(models[i], data[i])

        self._share(work, rows)

    def play(
        self, ctrls: Sequence[Array], substeps: int, rows: Rows | None = None, derive: Sequence[Derive] = ()
    ) -> None:
        """``ctrls``, each (N, nu), one after the other, as by so many calls of ``step``; but a world plays all of them
        before the next world begins, while its memory is near."""
        models, data, mj_step = self.models, self.data, mujoco.mj_step

        def work(worlds: Iterable[int]) -> None:
            for i in worlds:
                for ctrl in ctrls:
                    data[i].ctrl[:] = ctrl[i]
                    mj_step(models[i], data[i], substeps)
                for function in derive:
                    function(models[i], data[i])

        self._share(work, rows)

    def forward(self, rows: Rows | None = None, derive: Sequence[Derive] = ()) -> None:
        """Everything that follows from the state of the worlds ``rows``, without a step."""

        def work(worlds: Iterable[int]) -> None:
            for i in worlds:
                mujoco.mj_forward(self.models[i], self.data[i])
                for function in derive:
                    function(self.models[i], self.data[i])

        if rows is not None and len(rows) <= FEW:
            work(rows.tolist())  # another thread would wake up when the work is over
        else:
            self._share(work, rows)

    def ctrl(self) -> Array:
        return self._ctrl.read() if self._ctrl is not None else np.zeros((self.num_worlds, 0))

    def reset(self, rows: Rows) -> None:
        """To the model's initial state; nothing of the past remains."""
        for i in rows.tolist():
            mujoco.mj_resetData(self.models[i], self.data[i])

    def own_model(self, world: int, fields: Sequence[str]) -> mujoco.MjModel:
        """A model for this world alone, to be changed (values, not sizes), with the shared values of ``fields``. It is
        copied once, because a copy takes as long as many steps; after that only ``fields`` are laid back."""
        if self.models[world] is self.model:
            self.models[world] = copy.copy(self.model)
        own = self.models[world]
        for name in fields:
            getattr(own, name)[...] = getattr(self.model, name)
        return own

    def state(self) -> Array:
        """(N, S): restored by ``restore``, the next steps are the same bit for bit."""
        state = np.empty((self.num_worlds, self._state_size))
        for model, data, row in zip(self.models, self.data, state, strict=True):
            mujoco.mj_getState(model, data, row, STATE)
        return state

    def restore(self, state: Array, derive: Sequence[Derive] = ()) -> None:
        """Set the state, and everything that follows from it; poses and forces that MuJoCo leaves a physics step behind
        the state after a step are those of the state itself here."""
        for model, data, row in zip(self.models, self.data, state, strict=True):
            mujoco.mj_resetData(model, data)
            mujoco.mj_setState(model, data, row, STATE)
        self.forward(None, derive)
        for model, data, row in zip(self.models, self.data, state, strict=True):
            mujoco.mj_setState(model, data, row, STATE)  # forward has written its own warm start

    def _share(self, work: Work, rows: Rows | None) -> None:
        self._crew.share(work, self._everyone if rows is None else rows.tolist())
