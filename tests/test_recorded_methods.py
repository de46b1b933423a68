"""Every method as CUDA graphs. On a GPU it ends where it ends line by line, bit for bit; a CPU sees that each update,
and each decision, is made of the same operations on the same memory as the last. It does not see what Python changes
beside them, such as a counter."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_seam import bases_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burnish.finetune.build import prepare
from burnish.finetune.loops import OnPolicy
from burnish.policies.core.execute import Execution, with_execution
from burnish.policies.core.graphed_policy import GraphedActor
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import agent_spec
from burnish.policies.runs.state_codec import encode, separate
from burnish.sim.build import make_env
from burnish.sim.point_reach import PointReachConfig
from seam import EXECUTE, FITTED, make_base, shrunk
from seam import METHODS as LOOPED

WORLD = PointReachConfig(max_steps=7, noise=0.2, goal_in_state=True, radius=0.4)


def settings_of(name: str, mode: Execution) -> Any:
    return with_execution(shrunk(LOOPED[name].config(**FITTED.get(name, {}))), mode)


# Those that name an execution, but for dagger, which learns from an expert alone.
METHODS = [name for name in LOOPED if settings_of(name, Execution.cudagraph) != settings_of(name, Execution.eager)]
METHODS.remove("dagger")
ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def state(name: str, mode: Execution, seed: int = 0, short: bool = False) -> dict[str, Tensor]:
    """All numbers of the learner after some updates."""
    env = ScaledEnv(make_env(WORLD, 4, seed=seed, device=ON))
    kind = bases_of(name)[0]
    base = None if kind is None else make_base(kind, agent_spec(env.spec, EXECUTE)).to(ON)
    config = settings_of(name, mode)
    loop = prepare(config, base, env, seed=seed, device=ON)
    counts = (3, 12) if short else (6, 30)  # short: each recording is called at least five times
    for _ in range(counts[0] if isinstance(loop, OnPolicy) else counts[1]):
        loop.iterate()
    found = separate(encode(loop.learner.state_dict())[1])
    return {key: x for key, x in found.items() if x.is_floating_point()}


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


FREE = ("_local_scalar_dense", "nonzero")  # what comes of them is free to differ, and is wanted at once


class Operations(TorchDispatchMode):
    """What was done, and to which memory: that of an argument, of an earlier result, or some that was there before."""

    def __init__(self, arguments: Any) -> None:
        super().__init__()
        self.done: list[Any] = []
        self.places = {self._memory(x): ("argument", i) for i, x in enumerate(tensors(arguments))}

    @staticmethod
    def _memory(x: Tensor) -> int:
        return x.untyped_storage().data_ptr()

    def _of(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return (*x.shape, x.dtype, *x.stride(), x.storage_offset()), self.places.get(
                self._memory(x), ("before", self._memory(x))
            )
        if isinstance(x, torch.Generator):
            return getattr(x, "_cdata", None)  # each call wraps it anew
        return tuple(map(self._of, x)) if isinstance(x, (list, tuple)) else repr(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [self._of(x) for x in (*args, *(kwargs or {}).values())]
        assert str(func).split(".")[1] not in FREE, f"{func} asks the device for a number"
        found = func(*args, **(kwargs or {}))
        held = {self._memory(x) for x in tensors([args, kwargs])}
        for x in tensors(found):
            if self._memory(x) not in held:  # no view, and nothing in place
                self.places[self._memory(x)] = ("result", len(self.done))
        if func.namespace != "profiler":  # that of an optimiser, which only notes the time
            self.done.append((str(func), *given))
        return found


class Watched:
    """In the place of a recording: from the fourth call on all do what the fourth did."""

    def __init__(self, fn: Any, generators: Any, device: Any) -> None:
        self.fn, self.calls, self.recorded = fn, 0, []

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        with Operations(arguments) as seen:
            found = self.fn(*arguments)
        seen.done.append([x for x in tree_leaves(found) if not isinstance(x, Tensor)])  # a replay returns those again
        if self.calls == 4:
            self.recorded = seen.done
        elif self.calls > 4:
            for number, (was, now) in enumerate(zip(self.recorded, seen.done, strict=True)):
                assert was == now, f"operation {number} of call {self.calls} is not that of call 4: {was}, {now}"
        return found


def is_decision(fn: Any) -> bool:
    return getattr(getattr(fn, "func", None), "__func__", None) is GraphedActor._act


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", METHODS)
def test_what_is_recorded_can_be_replayed(name, monkeypatch):
    made: list[Watched] = []

    def watched(*given: Any) -> Watched:
        made.append(Watched(*given))
        return made[-1]

    monkeypatch.setattr("burnish.policies.core.execute._Graphed", watched)
    state(name, Execution.cudagraph, short=True)
    assert {is_decision(x.fn) for x in made if x.calls > 5} == {True, False}, "an update and a decision"


@pytest.mark.parametrize("change", ["memory", "place", "number", "answer", "asked", "operation", ""])
def test_what_a_recording_would_miss_is_seen(change):
    held, calls = [torch.ones(9) for _ in range(5)], itertools.count()

    def update(x: Tensor) -> Any:
        call = next(calls)
        if change == "operation":
            return x.sin() if call < 4 else x.cos()
        if change == "answer":
            return x, call
        weight = held[call if change == "memory" else 0][call if change == "place" else 0 :][:2]
        return x * weight * (float(call) if change == "number" else float(x[0]) if change == "asked" else 1.0)

    watched = Watched(update, (), "cpu")
    wrong = {"": nullcontext(), "asked": pytest.raises(AssertionError, match="asks the device for a number")}
    with wrong.get(change, pytest.raises(AssertionError, match="of call 5")):
        for _ in range(5):
            watched(torch.ones(2))


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_recorded_it_learns_what_it_learns_line_by_line(name, monkeypatch):
    """Bit for bit, with the optimiser of a recording, which counts its steps on the device."""
    recorded = state(name, Execution.cudagraph)
    monkeypatch.setattr("burnish.policies.core.execute._Graphed", lambda fn, generators, device: fn)
    plain, other = state(name, Execution.cudagraph), state(name, Execution.cudagraph, seed=1)
    assert plain.keys() == recorded.keys()
    for key, x in plain.items():
        assert torch.equal(recorded[key], x), f"{key} differs by {float((recorded[key] - x).abs().max())}"
    assert any(not torch.allclose(x, other[key], rtol=1e-2, atol=1e-3) for key, x in plain.items()), "it can fail"


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_it_learns_line_by_line_as_it_is_by_default(name):
    assert all(bool(x.isfinite().all()) for x in state(name, Execution.eager).values())
