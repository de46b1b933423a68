"""`burnish data mirror`: the mirror image of a recording is a recording of the mirror image of its world."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, ObsSpec
from burnish.policies.data.episodes import NO_LIMITS, Episode, Episodes
from burnish.policies.data.lerobot import write_lerobot
from burnish.policies.data.mirror import Mirror, mirrored
from burnish.policies.data.read import read_dataset
from burnish.sim.discs import Discs

SIDEWAYS = Mirror(flip=["image.top"], negate=["state.0", "action.0"])
LEFT = torch.tensor([-1.0, 1.0])


def recording(world: Discs, actions: torch.Tensor) -> Episode:
    frames = [world._observe(), *(world.step(action[None]).obs for action in actions)]
    obs = {key: torch.cat([frame[key] for frame in frames]) for key in frames[0]}
    facts = {"terminated": False, "truncated": True, "success": False, "seed": 3, "task": "keep left of the red disc"}
    return Episode(obs, actions, torch.zeros(len(actions)), **facts)


def played(change: torch.Tensor) -> Episodes:
    """A few random actions in a world whose coordinates are ``change`` times those of a seed."""
    world = Discs(1, seed=3)
    world.reset()
    world._state |= {key: world._state[key] * change for key in ("dot", "discs")}
    actions = torch.rand(6, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    names = {"state": ["x", "y"], "action": ["x", "y"]}
    return Episodes([recording(world, actions * change)], world.spec, {}, names)


def same(one: Episodes, other: Episodes) -> bool:
    pairs = [(one[0].action, other[0].action), *((x, other[0].obs[key]) for key, x in one[0].obs.items())]
    return all(torch.equal(a, b) for a, b in pairs)


def test_the_image_is_what_the_mirrored_world_shows():
    here, there = played(torch.ones(2)), played(LEFT)
    assert same(mirrored(here, SIDEWAYS), there) and same(mirrored(here, replace(SIDEWAYS, negate=["x"])), there)
    twice = replace(SIDEWAYS, negate=["x", "action.0"])  # a number that is named twice is negated once
    assert same(mirrored(here, twice), there)
    for less in (replace(SIDEWAYS, flip=[]), replace(SIDEWAYS, negate=["state.0"])):  # negative controls
        assert not same(mirrored(here, less), there)
    assert same(mirrored(mirrored(here, SIDEWAYS), SIDEWAYS), here)


def test_limits_that_are_the_range_of_the_data_are_mirrored_too():
    """Control: limits that are known are kept to."""
    here = played(torch.ones(2))
    low, high = here[0].action.amin(0), here[0].action.amax(0)
    known = replace(here, spec=replace(here.spec, action=ActionSpec(tuple(low.tolist()), tuple(high.tolist()))))
    with pytest.raises(BurnishError, match="would leave the limits"):
        mirrored(known, SIDEWAYS)
    found = mirrored(replace(known, meta={"notes": [NO_LIMITS]}), SIDEWAYS)
    assert found.spec.action.low[0] == pytest.approx(-float(high[0]))


def test_words_and_numbers_of_two_sides_change_places():
    found = mirrored(played(torch.ones(2)), Mirror(swap=["action.0:action.1"], words=["left:right"]))[0]
    assert found.task == "keep right of the red disc" and "bright" not in found.task
    assert torch.equal(found.action, played(torch.ones(2))[0].action.flip(1))


def test_tokens_stay_whole_numbers():
    here = played(torch.ones(2))
    tokens = torch.arange(14).reshape(7, 2)
    spec = replace(here.spec, obs=ObsSpec({**here.spec.obs.shapes, "tokens": (2,)}))
    spoken = replace(here, episodes=[replace(here[0], obs={**here[0].obs, "tokens": tokens})], spec=spec)
    assert torch.equal(mirrored(spoken, SIDEWAYS)[0].obs["tokens"], tokens)
    assert mirrored(spoken, SIDEWAYS)[0].obs["tokens"].dtype == torch.int64


def test_a_set_is_mirrored_from_the_command_line(tmp_path):
    write_lerobot(played(torch.ones(2)), tmp_path / "set")
    words = ["flip=image.top", "negate=x", "words=left:right"]
    assert main(["data", "mirror", str(tmp_path / "set"), *words, f"out={tmp_path / 'image'}"]) == 0
    assert same(read_dataset(tmp_path / "image"), played(LEFT))


@pytest.mark.parametrize(
    ("mirror", "sentence"),
    [
        (Mirror(flip=["image.tip"]), "no picture 'image.tip' to turn; did you mean 'image.top'"),
        (Mirror(negate=["z"]), "the set has no number 'z'"),
        (Mirror(negate=["action.2"]), "the set has no number 'action.2'"),
        (Mirror(words=["left"]), "words=left is no pair; write it as left:right"),
        (Mirror(swap=["state.0:action.0"]), "two numbers of the same columns"),
        (Mirror(negate=["action.1"]), "would leave the limits of the actions in number 1"),
    ],
)
def test_what_cannot_be_mirrored_is_one_sentence(mirror, sentence):
    found = played(torch.ones(2))
    one_sided = replace(found, spec=replace(found.spec, action=ActionSpec((-1.0, -1.0), (1.0, 0.1))))
    over = replace(found[0], action=found[0].action.clamp(-1.0, 0.1))
    with pytest.raises(BurnishError, match=sentence):
        mirrored(replace(one_sided, episodes=[over]), mirror)
