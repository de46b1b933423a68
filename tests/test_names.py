"""The names of the numbers that a policy has learnt from, and those of the world that it meets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from burnish.offline.dataset import decisions
from burnish.policies.acting import evaluator_of
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ChunkConfig, PolicySpec
from burnish.policies.core.wrapper import feature_names
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.evaluator import EvalConfig
from burnish.sim.build import make_env, named, seen_by
from burnish.sim.locomotion.settings import HopperConfig

CPU = torch.device("cpu")


@pytest.fixture
def world():
    return make_env(HopperConfig(), 1)


def recorded(world, change=lambda names: names) -> Episodes:
    width, dim = world.spec.obs.shapes["state"][0], world.spec.action.dim
    episode = Episode({"state": torch.zeros(3, width)}, torch.zeros(2, dim), torch.zeros(2), False, True, False, 0)
    return Episodes([episode], world.spec, names={"state": change(feature_names(world)["state"])})


def swapped(names):
    return [names[1], names[0], *names[2:]]


def test_names_are_saved_with_a_specification(world):
    spec = recorded(world).policy_spec(ChunkConfig())
    assert PolicySpec.from_dict(spec.to_dict()).names == spec.names and spec.names["state"]
    assert "names" not in replace(spec, names={}).to_dict(), "older versions read those without"
    with pytest.raises(BurnishError, match="malformed"):
        PolicySpec.from_dict({**spec.to_dict(), "names": 3})


def test_the_same_numbers_in_another_order_are_refused(world):
    """Their shapes fit, and a policy would take one for the other without a word."""
    right, wrong = (recorded(world, change).policy_spec(ChunkConfig()) for change in (list, swapped))
    seen_by(right, world)
    with pytest.raises(BurnishError, match=r"number 0 of state, and the environment .* in another order"):
        seen_by(wrong, world)
    decisions(recorded(world), right, 0.9)
    with pytest.raises(BurnishError, match=r"the recordings .* in another order"):
        decisions(recorded(world), wrong, 0.9)


@pytest.mark.parametrize("names", ["of its own", "none"])
def test_other_names_are_a_note(world, names, capsys):
    called = {"of its own": lambda found: [f"q{i}" for i in range(len(found))], "none": lambda found: found and []}
    spec = recorded(world, called[names]).policy_spec(ChunkConfig())
    spec = spec if spec.names["state"] else replace(spec, names={"state": tuple(f"state_{i}" for i in range(11))})
    evaluator_of(named(HopperConfig()), spec, EvalConfig(episodes=1, worlds=1, confirm=1), CPU)
    said = capsys.readouterr().out
    assert ("note: the policy has q0 as number 0 of state" in said) == (names == "of its own")
