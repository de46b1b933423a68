"""Every method and every policy as CUDA graphs. On a GPU a method ends where it ends line by line, bit for bit; a CPU
sees that each update, and each decision, could be recorded (`recording_lab.py`)."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from recording_lab import Watched
from test_build import CHOICES, make, observe
from test_lerobot_policies import NAMES, STORED, recorded
from test_seam import bases_of
from test_vla import SPEC as VLA
from test_vla import observed, vla
from torch import Tensor

from burnish.finetune.build import prepare
from burnish.finetune.loops import OnPolicy
from burnish.finetune.methods.dsrl import Variant
from burnish.finetune.methods.mbpo import MBPOLoop
from burnish.finetune.table import METHODS as TABLE
from burnish.finetune.world_model.infopower import InfoPowerConfig
from burnish.finetune.world_model.model import Fit, ModelConfig
from burnish.policies.build import load_policy
from burnish.policies.core.execute import Execution, with_execution
from burnish.policies.core.graphed_policy import Graphed, GraphedActor
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.seed import RowNoise
from burnish.policies.core.spec import ObsSpec, agent_spec
from burnish.policies.runs.state_codec import encode, separate
from burnish.policies.vla.sizes import LanguageConfig
from burnish.sim.build import make_env
from burnish.sim.point_reach import PointReachConfig
from seam import EXECUTE, FITTED, make_base, shrunk
from seam import METHODS as LOOPED

WORLD = PointReachConfig(max_steps=7, noise=0.2, goal_in_state=True, radius=0.4)
FITS: dict[str, Any] = {"refit": 8, "refit_updates": 6, "rollouts": 1, "imagined_worlds": 4}
# Methods and their settings: with those of a name, those that have more steps, and a model of the world.
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, FITTED.get(name, {})) for name in LOOPED}
CASES |= {
    "dsrl aliased": ("dsrl", {"variant": Variant.aliased}),
    "tdmpc infopower": ("tdmpc", {"infopower": InfoPowerConfig(1.0)}),
    "mbpo": ("mbpo", {**FITS, "model": ModelConfig(updates=6)}),
}


def settings_of(case: str, mode: Execution) -> Any:
    name, given = CASES[case]
    return with_execution(shrunk(TABLE[name].config(**given)), mode)


# Those that name an execution, but for dagger, which learns from an expert alone.
METHODS = [case for case in CASES if settings_of(case, Execution.cudagraph) != settings_of(case, Execution.eager)]
METHODS.remove("dagger")
ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def state(case: str, mode: Execution, seed: int = 0, short: bool = False) -> dict[str, Tensor]:
    """All numbers of the learner after some updates."""
    name, _ = CASES[case]
    env = ScaledEnv(make_env(WORLD, 4, seed=seed, device=ON))
    kind = bases_of(name)[0] if name in LOOPED else None
    base = None if kind is None else make_base(kind, agent_spec(env.spec, EXECUTE)).to(ON)
    config = settings_of(case, mode)
    loop = prepare(config, base, env, seed=seed, device=ON)
    counts = (3, 12) if short else (6, 30)  # short: each recording is called at least five times
    for _ in range(counts[0] if isinstance(loop, OnPolicy) else counts[1]):
        loop.iterate()
    model = loop.model.state_dict() if isinstance(loop, MBPOLoop) else {}
    found = separate(encode({**loop.learner.state_dict(), "model": model})[1])
    return {key: x for key, x in found.items() if x.is_floating_point()}


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
    played = [x for x in made if x.calls]
    assert min(x.calls for x in played) > 5, "each is played again"
    assert {is_decision(x.fn) for x in played} == {True, False}, "an update and a decision"
    fits = [x for x in played if getattr(x.fn, "__func__", None) is Fit._descend]
    assert len(fits) == (name == "mbpo")


def others() -> dict[str, Any]:
    """Policies that came with the code of others, and what they observe."""
    found: dict[str, Any] = {name: (load_policy(STORED / name)[0], recorded(name)[0]) for name in NAMES}
    seen = {key: x.float() if x.is_floating_point() else x for key, x in observed().items() if key != "tokens"}
    spec = replace(VLA, obs=ObsSpec({key: VLA.obs.shapes[key] for key in seen}))
    found["smolvla"] = vla(spec, language=LanguageConfig(40, 12, 4, 4, 2, 6, 20, special=[1, 2])).float(), seen
    return found


@pytest.mark.parametrize("choice", [*CHOICES, *NAMES, "smolvla"])
def test_every_policy_acts_by_what_can_be_recorded(choice, monkeypatch):
    """Words are left out: on a CPU they are compared with what a model knows."""
    monkeypatch.setattr("burnish.policies.core.execute._Graphed", Watched)
    monkeypatch.setattr("burnish.policies.core.seed._words", lambda x: x)  # noise by torch, as on a GPU
    policy, obs = (make(choice), observe(4, choice=choice)) if choice in CHOICES else others()[choice]
    acting = Graphed(policy, "cpu")
    rows = len(obs["state"])
    for _ in range(6):
        acting.act(obs, generator=RowNoise(range(rows), range(rows)))
    assert [x.calls for x in acting._made.values()] == [6]


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
