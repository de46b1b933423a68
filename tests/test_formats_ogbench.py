"""OGBench's compact form, of which `valids` say where trajectories end: the same episodes as of its own files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from burnish.policies.core.errors import BurnishError
from burnish.policies.data.read import format_of, read_dataset
from format_lab import LENGTHS, WRITERS


def compact(path: Path, *kept: str) -> dict[str, np.ndarray]:
    """What ``load_dataset(compact_dataset=True)`` makes of a file."""
    with np.load(path) as file:
        columns = {key: file[key] for key in ("observations", "actions", "terminals", *kept)}
    last = columns["terminals"]
    return columns | {"valids": ~last, "terminals": last | np.append(last[1:], True)}


@pytest.mark.parametrize("kept", [[], ["qpos"], ["rewards", "masks"]], ids=str)
def test_the_compact_form_has_the_same_episodes(kept, tmp_path):
    path = WRITERS["ogbench"](tmp_path)
    known = read_dataset(path)
    np.savez(tmp_path / "compact.npz", **compact(path, *kept))  # pyright: ignore[reportArgumentType]
    read = read_dataset(tmp_path / "compact.npz")
    assert format_of(tmp_path / "compact.npz") == "ogbench" and [len(x) for x in read] == list(LENGTHS)
    for one, two in zip(read, known, strict=True):
        assert one.obs["state"].equal(two.obs["state"]) and one.action.equal(two.action)
        assert not kept or kept == ["qpos"] or (one.reward.equal(two.reward) and one.terminated == two.terminated)


def test_the_package_makes_that_form(tmp_path, require):
    path = WRITERS["ogbench"](tmp_path)
    theirs = require("ogbench.utils").load_dataset(path, compact_dataset=True)
    ours = compact(path)
    assert theirs.keys() == ours.keys() and all(np.array_equal(theirs[key], ours[key]) for key in ours)


@pytest.mark.parametrize("name", ["valids", "terminals"])
def test_other_ends_are_refused(name, tmp_path):
    columns = compact(WRITERS["ogbench"](tmp_path))
    np.savez(tmp_path / "a.npz", **columns)  # pyright: ignore[reportArgumentType]
    read_dataset(tmp_path / "a.npz")  # the control
    columns[name] = np.full_like(columns[name], name == "valids")
    np.savez(tmp_path / "a.npz", **columns)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BurnishError, match="other terminals than the row of each trajectory that is not valid"):
        read_dataset(tmp_path / "a.npz")
