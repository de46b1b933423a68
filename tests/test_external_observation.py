"""What becomes of Gymnasium's observations: sorted by rules, in an order of our own, and not one number changed."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from burnish.policies.core.errors import BurnishError
from burnish.policies.data.observation import Layout
from burnish.sim.external.world_server import arrays, fields, leaves, read, sizes


def seen(space, samples):
    """The layout of ``space``, and the samples, one per world, as its rows."""
    parts = list(leaves(space))
    layout, placed = Layout(parts, "Test-v0"), fields(parts, 1)
    memory = arrays(bytearray(sizes(placed, len(samples))[1]), placed, len(samples))
    for i, sample in enumerate(samples):
        for leaf in parts:
            row = memory["obs." + ".".join(leaf["path"])]
            row[i] = read(sample, leaf["path"], row.dtype, row.shape[1:])
    rows = layout.room(len(samples))
    layout.write(memory, rows)
    return layout, rows


def numbers(*shape):
    return spaces.Box(-9.0, 9.0, shape, np.float64)


def pixels(*shape):
    return spaces.Box(0, 255, shape, np.uint8)


PARTS = {
    "observation": numbers(2, 2),
    "achieved_goal": numbers(3),
    "desired_goal": numbers(3),
    "arm": spaces.Dict({"wrist": pixels(4, 5, 3), "angle": numbers(1)}),
    "top": pixels(1, 6, 6),
}


def in_order(keys):
    space = spaces.Dict()
    space.spaces = {key: PARTS[key] for key in keys}  # the constructor would sort them
    return space


def test_numbers_are_named_by_the_keys_of_the_environment():
    layout = Layout(list(leaves(spaces.Dict(PARTS))), "Test-v0")
    achieved, seen_ones = ([f"{key}_{i}" for i in range(n)] for key, n in (("achieved_goal", 3), ("observation", 4)))
    assert layout.names("state") == [*achieved, "arm.angle", *seen_ones]
    assert layout.names("goal") == ["desired_goal_0", "desired_goal_1", "desired_goal_2"]
    assert Layout(list(leaves(numbers(3))), "Test-v0").names("state") == [], "a Box alone has no key"


def test_a_key_with_a_slash_stands_where_files_have_it():
    flat = spaces.Dict({"arm/pos": numbers(1), "arm-goal": numbers(1)})
    nested = spaces.Dict({"arm": spaces.Dict({"pos": numbers(1)}), "arm-goal": numbers(1)})
    assert Layout(list(leaves(flat)), "Test-v0").names("state") == ["arm/pos", "arm-goal"]
    assert Layout(list(leaves(nested)), "Test-v0").names("state") == ["arm.pos", "arm-goal"]


def test_a_dict_is_sorted_into_state_goal_and_images_whatever_its_order():
    obs = in_order(PARTS)
    obs.seed(0)
    obs = obs.sample()
    nothing = {**obs, "top": obs["top"] * 0}
    written = []
    for keys in (list(PARTS), list(reversed(PARTS))):
        layout, rows = seen(in_order(keys), [nothing, {key: obs[key] for key in reversed(keys)}])
        assert layout.spec.shapes == {
            "state": (8,),
            "goal": (3,),
            "image.arm.wrist": (3, 4, 5),
            "image.top": (1, 6, 6),
        }
        written.append(rows)
    first, second = written
    assert list(first) == list(second) and all(np.array_equal(first[key], second[key]) for key in first)
    state = np.concatenate([obs["achieved_goal"], obs["arm"]["angle"], obs["observation"].ravel()])
    assert np.array_equal(first["state"][1], state.astype(np.float32))
    assert np.array_equal(first["goal"][1], obs["desired_goal"].astype(np.float32))
    assert np.array_equal(first["image.arm.wrist"][1], obs["arm"]["wrist"].transpose(2, 0, 1))
    assert np.array_equal(first["image.top"][1], obs["top"])
    assert (first["image.top"][0] == 0).all(), "another world's row is its own"


@pytest.mark.parametrize(
    ("space", "key", "shape"),
    [
        (pixels(8, 9, 3), "image.main", (3, 8, 9)),
        (pixels(4, 8, 9), "image.main", (4, 8, 9)),
        (pixels(8, 9), "image.main", (1, 8, 9)),
        (pixels(8), "state", (8,)),  # the memory of a game console, say
        (numbers(), "state", (1,)),
        (spaces.Dict(desired_goal=pixels(8, 9, 3)), "goal_image.main", (3, 8, 9)),
        (spaces.Dict(pixels=pixels(8, 9, 3)), "image.main", (3, 8, 9)),
        (spaces.Dict(pixels=spaces.Dict(top=pixels(8, 9, 3))), "image.top", (3, 8, 9)),
        (spaces.Dict(desired_goal=spaces.Dict(kettle=numbers(2), light=numbers(1))), "goal", (3,)),
        (spaces.Tuple([numbers(2), spaces.Dict(a=numbers(1))]), "state", (3,)),
    ],
)
def test_what_becomes_of_a_single_part(space, key, shape):
    layout, rows = seen(space, [space.sample()])
    assert layout.spec.shapes == {key: shape}
    assert rows[key].shape == (1, *shape) and rows[key].dtype == (np.uint8 if "image" in key else np.float32)


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        (spaces.Discrete(3), "observes something of kind Discrete, but only Box, Dict and Tuple"),
        (spaces.Dict(a=numbers(1), b=spaces.Dict(c=spaces.Text(4))), r"observes b\.c of kind Text"),
        (spaces.Box(0.0, 1.0, (8, 8, 3)), r"\(8, 8, 3\) and type float32, but images must be uint8"),
        (pixels(2, 8, 8, 3), "images must be uint8 with at most 3 dimensions"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(space, sentence):
    with pytest.raises(BurnishError, match=sentence) as caught:
        Layout(list(leaves(space)), "Test-v0")
    assert "\n" not in str(caught.value) and "env.id=Test-v0" in str(caught.value)


def test_a_camera_among_pixels_keeps_its_whole_name_where_its_short_one_is_taken():
    space = spaces.Dict(pixels=spaces.Dict(top=pixels(4, 5, 3), side=pixels(4, 5, 3)), top=pixels(4, 5, 3))
    layout, _ = seen(space, [space.sample()])
    assert set(layout.spec.shapes) == {"image.top", "image.side", "image.pixels.top"}
