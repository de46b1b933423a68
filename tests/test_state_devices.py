"""A state was saved from any device and is read on the CPU: what is restored of it lies where its owner computes.

No GPU is needed: tensors of the device ``meta`` have a shape and a place, and no numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.finetune.episode_statistics import EpisodeStatistics
from burnish.finetune.loops import OnPolicy
from burnish.finetune.people.interventions import ReportedEnv
from burnish.finetune.world_model.ticks import Tape, Ticks
from burnish.policies.controllers import ChunkController
from burnish.policies.core.chunk import ChunkEnv, HistoryEnv
from burnish.policies.core.offset import OffsetConfig
from burnish.policies.core.rewards import RewardMap
from burnish.policies.core.seed import EpisodeSeeds
from burnish.policies.core.views import BaseEnv, ResidualEnv
from seam import SeamWorld, make_base, seam_env, seam_spec

META = torch.device("meta")
WORLDS = 3


def base_and_world() -> tuple[Any, Any]:
    env = seam_env(SeamWorld(WORLDS))
    return make_base("flow", seam_spec(env)), env


def residual() -> Any:
    base, env = base_and_world()
    return ResidualEnv(env, ChunkController(base, WORLDS), offset=OffsetConfig(half_life=1.0))


def chosen(residual: float | None = None) -> Any:
    base, env = base_and_world()
    latent = 1.0 if residual is None else None
    return BaseEnv(ChunkEnv(env, base.spec.execute, 0.9), base, latent=latent, residual=residual)


# Name of a view: how it is made, and what of it is restored.
VIEWS: dict[str, tuple[Any, list[str]]] = {
    "history": (lambda: HistoryEnv(SeamWorld(WORLDS), 2), ["_frames"]),
    "residual": (residual, ["_obs", "_offset"]),
    "latent": (chosen, ["_obs", "_decision"]),
    "chunk": (lambda: chosen(0.1), ["_obs", "_decision"]),
    "tape": (lambda: Tape(SeamWorld(WORLDS), Ticks()), ["_episode", "_first", "_seen"]),
    "reported": (lambda: ReportedEnv(SeamWorld(WORLDS)), ["_tick"]),
    "rewards": (lambda: RewardMap(SeamWorld(WORLDS), model=lambda obs, action, after: action[:, 0]), ["_obs"]),
}


def leaves(x: Any) -> list[Tensor]:
    if isinstance(x, Mapping):
        return [leaf for item in x.values() for leaf in leaves(item)]
    return [x] if isinstance(x, Tensor) else []


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_restores_on_its_own_device(name):
    make, restored = VIEWS[name]
    view = make()
    view.reset()
    state = view.state_dict()
    before = [x for attribute in restored for x in leaves(getattr(view, attribute))]
    view.device = META
    view.load_state_dict(state)
    after = [x for attribute in restored for x in leaves(getattr(view, attribute))]
    assert len(before) == len(after) > 0 and not any(x.is_meta for x in before) and all(x.is_meta for x in after)


def test_seeds_restore_on_their_own_device_and_share_nothing():
    state, other = EpisodeSeeds(0, WORLDS).state_dict(), EpisodeSeeds(0, WORLDS, META)
    other.load_state_dict(state)
    assert other.count.is_meta and other.current.is_meta
    same = EpisodeSeeds(0, WORLDS)
    same.load_state_dict(state)
    assert same.count is not state["count"]


def test_a_controller_restores_on_its_own_device():
    base, env = base_and_world()
    made = ChunkController(base, WORLDS)
    made.reset(torch.ones(WORLDS, dtype=torch.bool))
    made.peek(env.reset())
    state = made.state_dict()
    assert state["plan"] is not None
    other = ChunkController(base, WORLDS, device=META)
    other.load_state_dict(state)
    assert all(x.is_meta for x in leaves(other.state_dict()))


class Nothing:
    """A learner without a state."""

    afresh = False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state


def test_a_loop_restores_where_its_worlds_are():
    base, env = base_and_world()
    loop: Any = OnPolicy(Nothing(), ChunkEnv(env, base.spec.execute, 0.9), decisions_per_update=1)  # pyright: ignore
    loop.obs = loop.env.reset()
    state = loop.state_dict()
    loop.env.device, loop.statistics = META, EpisodeStatistics(WORLDS, META)
    loop.load_state_dict(state)
    kept = [*leaves(loop.obs), loop.fresh, *leaves(vars(loop.statistics))]
    assert len(kept) > 7 and all(x.is_meta for x in kept)
