"""Recordings of other libraries: every number comes back, and what the reader filled in is said."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch

import format_lab
from burnish.offline.dataset import decisions
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ChunkConfig
from burnish.policies.data import episodes as notes
from burnish.policies.data.convert import merged
from burnish.policies.data.formats.d4rl import RESETS_SEEN, RESETS_UNSEEN
from burnish.policies.data.lerobot import read_lerobot, write_lerobot
from burnish.policies.data.read import fingerprint, format_of, read_dataset
from format_lab import LENGTHS, WRITERS, flat, hdf5, state

DEPTH, OTHERS = (notes.PASSED_OVER + names for names in ("sensor_data.base_camera.depth", "infos, metadata"))
# Of each format: the parts of the state in their order, the camera, the rate, the mode, limits, and the notes.
EXPECTED = {
    "robomimic": (("a", "b"), "top", 25.0, "unknown", 1.0, ["successes and ends are read from the rewards"]),
    "minari": (("a", "b"), "top", None, "unknown", 2.0, [notes.NO_RATE]),
    "maniskill": (("b", "a"), "base_camera", 10.0, "pd_ee_delta_pos", 1.0, [DEPTH]),
    "d4rl": (("a",), None, None, "unknown", None, [OTHERS, notes.NO_SUCCESS, notes.NO_RATE, notes.NO_LIMITS]),
    "ogbench": (("a",), None, None, "unknown", 1.0, [notes.PASSED_OVER + "qpos", notes.NO_RATE]),
    "npz": (("a", "b"), "top", 30.0, "unknown", None, [notes.NO_LIMITS]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_every_number_comes_back(name, tmp_path):
    path = WRITERS[name](tmp_path)
    keys, camera, hz, mode, limit, said = EXPECTED[name]
    read = read_dataset(path)
    assert format_of(path) == name == read.meta["source"] and read.meta["notes"] == said
    assert [len(episode) for episode in read] == list(LENGTHS)
    assert ("state" in read.names) == (name not in ("d4rl", "ogbench")), "a Box that stands alone has no names"
    assert name not in ("robomimic", "npz") or read.names["state"] == ["a_0", "a_1", "b"]
    assert (read.control_hz, read.spec.action_mode) == (hz, mode)
    for number, (episode, wanted) in enumerate(zip(read, format_lab.episodes(), strict=True)):
        assert np.array_equal(episode.obs["state"], state(wanted, *keys))
        assert np.array_equal(episode.action, wanted["action"]) and np.array_equal(episode.reward, wanted["reward"])
        assert (episode.terminated, episode.truncated) == (number == 0, number != 0)
        assert episode.success == (number == 0 and name != "d4rl"), "D4RL does not say it"
        if camera is not None:
            pictures = episode.obs[f"image.{camera}"].numpy().transpose(0, 2, 3, 1)
            if name != "minari":  # whose JPEGs lose something
                assert np.array_equal(pictures, wanted["top"])
            assert pictures.shape == wanted["top"].shape
        if name in ("minari", "maniskill"):
            assert episode.seed == 40 + number
    if limit is None:
        low, high = (getattr(flat("action")["action"], end)(0).tolist() for end in ("min", "max"))
        assert (list(read.spec.action.low), list(read.spec.action.high)) == (low, high)
    else:
        assert (read.spec.action.low, read.spec.action.high) == ((-limit,) * 2, (limit,) * 2)


@pytest.mark.parametrize("name", WRITERS)
def test_a_set_becomes_one_of_lerobot(name, tmp_path):
    """Its notes go with it, so that a rate that was assumed does not become one that is known."""
    read = read_dataset(WRITERS[name](tmp_path))
    again = read_dataset(write_lerobot(read, tmp_path / "set"))
    assert again.meta == read.meta and again.spec == read.spec and again.control_hz == read.control_hz
    for one, two in zip(read, again, strict=True):
        assert np.array_equal(one.action, two.action) and one.seed == two.seed
        assert all(np.array_equal(x, two.obs[key]) for key, x in one.obs.items())


def test_minari_s_pictures_are_those_that_it_packed(tmp_path):
    read = read_dataset(WRITERS["minari"](tmp_path))
    assert read.spec.max_steps == 50 and read.meta["env_name"] == "Hopper-v5"
    from PIL import Image

    wanted = format_lab.episodes()[1]
    for row, frame in enumerate(wanted["top"]):
        with Image.open(__import__("io").BytesIO(format_lab.jpeg(frame))) as image:
            assert np.array_equal(read[1].obs["image.top"][row], np.asarray(image).transpose(2, 0, 1))
    assert np.array_equal(read[1].obs["goal"], (wanted["a"] + 1).astype(np.float32))


def test_a_file_of_minari_s_is_the_one_that_is_named(tmp_path):
    whole = WRITERS["minari"](tmp_path) / "data" / "main_data.hdf5"
    part = whole.with_name("subset.hdf5")
    part.write_bytes(whole.read_bytes())
    with hdf5(part, "r+") as file:
        del file["episode_0"], file["episode_2"]
    assert [len(read_dataset(path)) for path in (whole, part)] == [3, 1]


def test_names_in_the_masks_of_robomimic_become_numbers_of_episodes(tmp_path):
    read = read_dataset(WRITERS["robomimic"](tmp_path))
    assert read.meta["masks"] == {"train": [0, 2], "valid": [1]}
    assert merged({"a": read, "b": read})[0].meta["masks"] == {"train": [0, 2, 3, 5], "valid": [1, 4]}
    with hdf5(tmp_path / "low_dim.hdf5", "r+") as file:  # the lists still name the demos that are gone
        del file["data/demo_10"], file["data/demo_11"]
    assert read_dataset(tmp_path / "low_dim.hdf5").meta["masks"] == {"train": [0], "valid": []}


def test_ogbench_itself_reads_the_same_transitions(tmp_path, require):
    """``load_dataset`` of the package, with and without the rule on which the two must agree."""
    path = WRITERS["ogbench"](tmp_path)
    theirs, ours = require("ogbench.utils").load_dataset(path), read_dataset(path)
    for name, mine in (
        ("observations", [episode.obs["state"][:-1] for episode in ours]),
        ("next_observations", [episode.obs["state"][1:] for episode in ours]),
        ("actions", [episode.action for episode in ours]),
    ):
        assert np.array_equal(torch.cat(mine), theirs[name])
    ends = np.concatenate([np.arange(length) == length - 1 for length in LENGTHS])
    assert np.array_equal(theirs["terminals"], ends) and not theirs["terminals"].all()
    with np.load(path) as file:  # what relabelling adds for a task of its own
        goal = {key: file[key][~file["terminals"]] for key in ("rewards", "masks")}
    np.savez(tmp_path / "loaded.npz", **theirs, **goal)
    loaded = read_dataset(tmp_path / "loaded.npz")
    assert format_of(tmp_path / "loaded.npz") == "ogbench" and len(loaded) == len(ours)
    for again, once in zip(loaded, ours, strict=True):
        assert torch.equal(again.obs["state"], once.obs["state"]) and torch.equal(again.action, once.action)
        assert (again.terminated, again.truncated) == (once.terminated, once.truncated)
    assert {episode.terminated for episode in loaded} == {False, True}


def without(name, *missing):
    """A change of a file: some of its arrays are gone."""

    def change(path):
        if path.suffix == ".npz":
            with np.load(path) as file:
                kept = {key: file[key] for key in file if key.partition("/")[0] not in missing}
            return np.savez(path, **kept)
        data = path / "data/main_data.hdf5" if path.is_dir() else path
        with hdf5(data, "a") as file:
            groups = [x for key, x in file.get("data", file).items() if key[-1:].isdigit()] or [file]
            for group in groups:
                for key in missing:
                    del group[key]

    return name, change


@pytest.mark.parametrize(
    ("case", "note"),
    [
        (without("robomimic", "rewards"), notes.NO_REWARD),
        (without("robomimic", "rewards"), notes.NO_ENDS),
        (without("robomimic", "next_obs"), notes.NO_FINAL),
        (without("maniskill", "rewards"), notes.NO_REWARD),
        (without("d4rl", "next_observations"), notes.NO_FINAL),
        (without("d4rl", "rewards"), notes.NO_REWARD),
        (without("d4rl", "timeouts"), notes.NO_END),
        (without("d4rl", "timeouts"), RESETS_SEEN),
        (without("d4rl", "timeouts", "next_observations"), RESETS_UNSEEN),
        (without("ogbench", "rewards", "masks"), notes.NO_REWARD),
        (without("npz", "next_observations"), notes.NO_FINAL),
        (without("npz", "control_hz"), notes.NO_RATE),
        (without("npz", "truncated"), notes.NO_END),
    ],
    ids=lambda x: x if isinstance(x, str) else x[0],
)
def test_filled_in_is_said(case, note, tmp_path):
    name, change = case
    path = WRITERS[name](tmp_path)
    assert note not in read_dataset(path).meta["notes"], "the control: nothing is missing"
    change(path)
    read = read_dataset(path)
    assert note in read.meta["notes"]
    if note == notes.NO_FINAL:
        assert all(np.array_equal(episode.obs["state"][-1], episode.obs["state"][-2]) for episode in read)
    if note == notes.NO_REWARD:
        assert not any(episode.reward.any() for episode in read)


@pytest.mark.parametrize("container", ["HDF5", "npz"])
@pytest.mark.parametrize(
    ("missing", "lengths"),
    [
        (["timeouts"], [4, 2, 3]),  # another observation follows than the one that the last action led to
        (["timeouts", "next_observations"], [4, 5]),  # one terminal, and two episodes that cannot be told apart
        (["timeouts", "terminals"], [4, 2, 3]),
        (["timeouts", "terminals", "next_observations"], None),
    ],
    ids=str,
)
def test_d4rl_without_timeouts(missing, lengths, container, tmp_path):
    """A file without terminals has zeros there."""
    with hdf5(WRITERS["d4rl"](tmp_path), "r") as file:
        columns = {key: file[key][:] for key in file if key not in ("infos", "metadata", *missing)}
    columns.setdefault("terminals", np.zeros(9))
    path = tmp_path / "set"
    if container == "npz":
        with open(path, "wb") as target:
            np.savez(target, **columns)
    else:
        with hdf5(path) as file:
            for key, x in columns.items():
                file[key] = x
    if container == "npz" and "next_observations" in missing:
        with pytest.raises(BurnishError, match=r"has terminals, but no timeouts.*terminated and truncated"):
            read_dataset(path)
    elif lengths is None:
        with pytest.raises(BurnishError, match=r"neither a terminal nor timeouts, .* one episode of 9 rows; add"):
            read_dataset(path)
    else:
        read = read_dataset(path)
        assert format_of(path) == "d4rl" and [len(episode) for episode in read] == lengths
        assert read[0].terminated == ("terminals" not in missing) and read[-1].truncated
        following = columns.get("next_observations")
        assert following is None or np.array_equal(read[0].obs["state"][-1], following[3].astype(np.float32))


@pytest.mark.parametrize("missing", [["masks"], ["qpos"], ["masks", "qpos"]], ids=" ".join)
def test_ogbench_is_known_by_its_own_columns(missing, tmp_path):
    """Other files drop no action: a terminal of theirs stands beside one that was played."""
    path = WRITERS["ogbench"](tmp_path)
    without("ogbench", *missing)[1](path)
    if len(missing) == 1:
        assert format_of(path) == "ogbench" and [len(x) for x in read_dataset(path)] == list(LENGTHS)
    else:
        with pytest.raises(BurnishError, match="has terminals, but no timeouts"):
            read_dataset(path)


@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.int64, np.float64])
@pytest.mark.parametrize("name", ["npz", "robomimic"])
def test_rewards_are_numbers_of_any_type(name, kind, tmp_path):
    path = WRITERS[name](tmp_path)
    wanted = [episode.reward for episode in read_dataset(path)]
    if name == "npz":
        with np.load(path) as file:
            columns = {key: file[key] for key in file}
        np.savez(path, **columns | {"rewards": columns["rewards"].astype(kind)})
    else:
        with hdf5(path, "a") as file:
            for demo in file["data"].values():
                rewards = demo["rewards"][:].astype(kind)
                del demo["rewards"]
                demo["rewards"] = rewards[:, None]
    assert all(torch.equal(x.reward, y) for x, y in zip(read_dataset(path), wanted, strict=True))


@pytest.mark.parametrize("rate", [0, -20, 10**6, "20", True, [20], float("nan")])
@pytest.mark.parametrize("name", ["robomimic", "maniskill"])
def test_a_rate_that_is_none_is_refused(name, rate, tmp_path):
    path = WRITERS[name](tmp_path)
    for given, said in ((None, None), (rate, f"control_freq={rate!r}, which is no rate from above 0 to 10000 Hz")):
        if name == "robomimic":
            with hdf5(path, "a") as file:
                world = json.loads(file["data"].attrs["env_args"])
                world["env_kwargs"]["control_freq"] = given
                file["data"].attrs["env_args"] = json.dumps(world)
        else:
            about = json.loads(path.with_suffix(".json").read_text())
            about["env_info"]["env_kwargs"]["sim_config"]["control_freq"] = given
            path.with_suffix(".json").write_text(json.dumps(about))
        if said is None:
            assert read_dataset(path).control_hz is None, "nothing is said"
        else:
            with pytest.raises(BurnishError) as caught:
                read_dataset(path)
            assert said in str(caught.value) and "correct it or leave it out" in str(caught.value)


def test_robomimic_s_dones_do_not_say_how_an_episode_ended(tmp_path):
    """They are 1 at the end of a file, too; with shaped rewards nothing says it."""
    path = WRITERS["robomimic"](tmp_path)
    with hdf5(path, "a") as file:
        for demo in file["data"].values():
            demo["rewards"][...] += 0.5
    read = read_dataset(path)
    assert notes.NO_ENDS in read.meta["notes"] and not any(episode.terminated for episode in read)


def test_limits_give_way_to_actions_beyond_them(tmp_path):
    path = WRITERS["robomimic"](tmp_path)
    with hdf5(path, "a") as file:
        file["data/demo_9/actions"][0, 0] = 3.0
    read = read_dataset(path)
    assert read.spec.action.high[0] == 3.0 and notes.NO_LIMITS in read.meta["notes"]


def test_episode_ends_of_a_plain_file(tmp_path):
    columns, path = flat("a", "action"), tmp_path / "ends.npz"
    np.savez(path, observations=columns["a"], actions=columns["action"], episode_ends=np.cumsum(LENGTHS))
    read = read_dataset(path)
    assert [len(episode) for episode in read] == list(LENGTHS) and all(episode.truncated for episode in read)
    ends = {"episode_ends": np.cumsum(LENGTHS), "control_hz": 29.97}
    np.savez(path, observations=columns["a"], actions=columns["action"][:, 0], **ends)
    read = read_dataset(path)
    assert read.spec.action.dim == 1 and read.spec.control_hz == 29.97
    for rate in (0, -30.0, np.nan, [30, 30]):
        np.savez(path, observations=columns["a"], actions=columns["action"], **(ends | {"control_hz": rate}))
        with pytest.raises(BurnishError, match=r"has control_hz=.*, which is no rate"):
            read_dataset(path)


def test_d4rl_columns_may_say_who_succeeded(tmp_path):
    path = WRITERS["d4rl"](tmp_path)
    with hdf5(path, "a") as file:
        file["success"] = file["terminals"][:]
    read = read_dataset(path)
    assert [episode.success for episode in read] == [number == 0 for number in range(len(read))]
    assert notes.NO_SUCCESS not in read.meta.get("notes", ())


def test_a_rate_that_is_not_known_fits_every_world(tmp_path):
    read = read_dataset(WRITERS["d4rl"](tmp_path))
    spec = read.policy_spec(ChunkConfig(horizon=2, execute=1))
    assert spec.control_hz is None
    known = read_dataset(WRITERS["npz"](tmp_path))
    other = known.policy_spec(ChunkConfig(horizon=2, execute=1))
    assert other.control_hz == 30.0
    from dataclasses import replace

    assert decisions(read, replace(spec, control_hz=125.0), 0.99) is not None
    with pytest.raises(BurnishError, match=r"control_hz=125"):  # the control
        decisions(known, replace(other, control_hz=125.0), 0.99)


def test_a_fingerprint_is_of_the_content(tmp_path):
    for name, write in WRITERS.items():
        (folder := tmp_path / name).mkdir()
        path = write(folder)
        first = fingerprint(path)
        shutil.copytree(folder, tmp_path / f"{name} elsewhere")
        assert fingerprint(tmp_path / f"{name} elsewhere" / path.relative_to(folder)) == first
        data = path / "data/main_data.hdf5" if path.is_dir() else path
        data.write_bytes(data.read_bytes() + b"\0")
        assert fingerprint(path) != first
    beside = tmp_path / "maniskill" / next((tmp_path / "maniskill").glob("*.json")).name
    first = fingerprint(beside.with_suffix(".h5"))
    beside.write_text(json.dumps({**json.loads(beside.read_text()), "more": 1}))
    assert fingerprint(beside.with_suffix(".h5")) != first, "what lies beside is read, too"


def test_a_set_of_lerobot_is_read_as_before(tmp_path):
    folder = write_lerobot(read_dataset(WRITERS["npz"](tmp_path)), tmp_path / "set")
    one, two = read_dataset(folder), read_lerobot(folder)
    assert format_of(folder) == "lerobot" and one.spec == two.spec and one.meta == two.meta


NET = ["policy=flow", "policy.net.mlp.hidden=[8]", "policy.steps=2", "train.batch=4", "train.steps=1"]


@pytest.mark.slow
def test_a_verb_takes_a_file(tmp_path, capsys):
    columns, path = flat("a", "action", "end"), tmp_path / "mine.npz"
    np.savez(path, observations=columns["a"], actions=columns["action"], truncated=columns["end"])
    chunk = ["chunk.horizon=2", "chunk.execute=1", "eval.episodes=0"]
    assert main(["pretrain", f"data={path}", *NET, *chunk, f"out={tmp_path}/run"]) == 0
    assert notes.NO_REWARD in capsys.readouterr().out
    words = ["method=iql", f"data={path}", "steps=1", "eval.episodes=0", f"out={tmp_path}/iql"]
    assert main(["offline", *words]) == 2, "the control: nothing is learnt from rewards that are none"
    assert "hold no rewards" in capsys.readouterr().err


NO_ROWS = np.zeros((0, 1))


def saved(path, **arrays):
    with path.open("wb") as file:  # a path would become one that ends in .npz
        np.savez(file, **arrays)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "there is no dataset at"),
        (lambda path: path.mkdir(), "is of no format that is read here: a folder dataset holds meta/info.json"),
        (lambda path: (path.mkdir(), (path / "config.yaml").touch()), "see docs/data.md; it is a training"),
        (lambda path: path.write_text("hello"), "is neither a folder, nor an HDF5 file, nor an npz file"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (saved, "is empty"),
        (lambda path: saved(path, observations=NO_ROWS, actions=NO_ROWS, episode_ends=[]), "is empty"),
        (os.mkfifo, "is no file"),
        (lambda path: path.symlink_to("/dev/zero"), "is no file"),
        (lambda path: hdf5(path).close(), "is of no format that is read here: a HDF5 dataset holds"),
        (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(99)), "is damaged or truncated"),
        (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(99)), "is damaged or truncated"),
    ],
)
def test_what_is_no_dataset_is_refused(make, said, tmp_path):
    make(tmp_path / "set")
    with pytest.raises(BurnishError) as caught:
        read_dataset(tmp_path / "set")
    assert said in str(caught.value) and str(tmp_path / "set") in str(caught.value)
