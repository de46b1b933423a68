"""LeRobotDataset v3.0 folders: bitwise round trip, the specification, atomicity, foreign and malformed sets."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import lerobot_v3_reader
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.data.episodes import DONE_ALONE, NO_ENDS, Episode, Episodes
from burnish.policies.data.lerobot import LeRobotWriter, read_lerobot, write_lerobot

SHAPES = {
    "state": (3,),
    "image.front": (3, 6, 8),
    "image.depth": (1, 6, 8),
    "goal": (2,),
    "goal_image.front": (3, 6, 8),
    "goal_mask": (),
    "features": (2, 2),
    "tokens": (4,),
}
SPEC = EnvSpec(ObsSpec(SHAPES), ActionSpec((-0.1, -2.0), (0.3, 2.0)), 12.5, "ee_delta", 40)
META = {"env": {"name": "push", "limits": [1, 2.5]}, "expert": "scripted", "generator_seed": 3}


def make_episode(steps: int, seed: int) -> Episode:
    g = torch.Generator().manual_seed(seed)
    obs = {}
    for key, shape in SHAPES.items():
        rows = (steps + 1, *shape)
        if "image" in key:
            obs[key] = torch.randint(0, 256, rows, generator=g, dtype=torch.uint8)
        else:
            obs[key] = torch.randint(0, 99, rows, generator=g) if key == "tokens" else torch.randn(rows, generator=g)
    obs["goal_image.front"][1:] = obs["goal_image.front"][0]
    obs["image.front"][3:5] = obs["image.front"][3:4].clone()  # equal neighbours in the middle of an episode
    obs["state"][0, 0] = -0.0
    action, reward = torch.rand(steps, 2, generator=g) * 0.1, torch.randn(steps, generator=g)
    ends = [(True, False), (False, True), (True, True), (False, False)][seed % 4]
    return Episode(obs, action, reward, *ends, success=seed % 3 == 0, seed=2**62 + seed, task=f"task {seed % 2}")


def make_episodes(count: int = 5) -> Episodes:
    return Episodes([make_episode(1 + 2 * seed, seed) for seed in range(count)], SPEC, META)


def bits(x: torch.Tensor) -> tuple:
    return x.dtype, tuple(x.shape), x.contiguous().numpy().tobytes()


def assert_same(one: Episodes, two: Episodes) -> None:
    assert one.spec == two.spec and one.meta == two.meta and len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert list(a.obs) == list(b.obs)
        for key in a.obs:
            assert bits(a.obs[key]) == bits(b.obs[key]), key
        assert bits(a.action) == bits(b.action) and bits(a.reward) == bits(b.reward)
        for name in ("terminated", "truncated", "success", "seed", "task"):
            assert getattr(a, name) == getattr(b, name), name


@pytest.fixture(scope="module")
def episodes() -> Episodes:
    return make_episodes()


@pytest.fixture
def folder(tmp_path: Path, episodes: Episodes) -> Path:
    return write_lerobot(episodes, tmp_path / "set")


def edit_info(folder: Path, **changes) -> None:
    path = folder / "meta" / "info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def drop_from_info(folder: Path, *keys: str) -> None:
    path = folder / "meta" / "info.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in keys}))


def test_round_trip_is_bitwise(folder, episodes):
    assert_same(read_lerobot(folder), episodes)
    changed = make_episodes()
    changed[4].obs["image.front"][-1, 0, 0, 0] ^= 1  # one bit of one final observation
    with pytest.raises(AssertionError):
        assert_same(read_lerobot(folder), changed)


def test_files_roll_over_and_stay_readable(tmp_path):
    shapes = {"image.big": (3, 256, 256)}
    spec = replace(SPEC, obs=ObsSpec(shapes))
    g = torch.Generator().manual_seed(0)
    long = []
    for seed in range(4):  # about 0.8 MB of noise each: one to a file of 1 MB
        obs = {"image.big": torch.randint(0, 256, (5, 3, 256, 256), generator=g, dtype=torch.uint8)}
        long.append(Episode(obs, torch.zeros(4, 2), torch.zeros(4), False, True, False, seed))
    written = Episodes(long, spec)
    folder = write_lerobot(written, tmp_path / "set", data_files_size_in_mb=1)
    assert len(list(folder.glob("data/chunk-000/*.parquet"))) == 4
    assert_same(read_lerobot(folder), written)


def test_an_independent_reader_agrees(tmp_path, episodes):
    # LeRobot itself wants three channels of whatever is called an image.
    shapes = {key: shape for key, shape in SHAPES.items() if key != "image.depth"}
    kept = [replace(e, obs={key: e.obs[key] for key in shapes}) for e in episodes]
    folder = write_lerobot(Episodes(kept, replace(SPEC, obs=ObsSpec(shapes)), META), tmp_path / "set")
    frames = iter(lerobot_v3_reader.read(folder))
    for episode in episodes:
        steps = len(episode)
        for t in range(steps):
            frame, last = next(frames), t == steps - 1
            assert frame["observation.state"] == episode.obs["state"][t].tolist()
            assert frame["observation.goal_mask"] == float(episode.obs["goal_mask"][t])
            assert frame["observation.tokens"] == episode.obs["tokens"][t].tolist()
            assert frame["action"] == episode.action[t].tolist()
            assert frame["next.reward"] == float(episode.reward[t])
            assert frame["next.terminated"] == (last and episode.terminated)
            assert frame["next.truncated"] == (last and episode.truncated)
            assert frame["next.done"] == (last and (episode.terminated or episode.truncated))
            assert frame["next.success"] == (last and episode.success) and frame["task"] == episode.task
            for column, key in (("images.front", "image.front"), ("goal_images.front", "goal_image.front")):
                assert np.array_equal(frame[f"observation.{column}"], episode.obs[key][t].permute(1, 2, 0).numpy())
    assert next(frames, None) is None


def test_layout_details_that_lerobot_relies_on(folder, episodes):
    info = json.loads((folder / "meta/info.json").read_text())
    assert info["fps"] == 12 and info["total_tasks"] == 2  # LeRobot wants an integer; 12.5 stands in our own entry
    assert info["features"]["observation.images.front"] == {
        "dtype": "image",
        "shape": [6, 8, 3],
        "names": ["height", "width", "channels"],
    }
    data = pq.ParquetFile(folder / "data/chunk-000/file-000.parquet")
    assert data.num_row_groups == len(episodes)
    assert data.schema_arrow.field("observation.state").type == pa.list_(pa.float32(), 3)
    assert data.schema_arrow.field("next.reward").type == pa.float32()
    assert not list(folder.parent.glob(".*partial"))


def test_an_existing_path_is_never_overwritten(folder, episodes):
    with pytest.raises(BurnishError, match="exists already"):
        write_lerobot(episodes, folder)
    assert_same(read_lerobot(folder), episodes)


def test_an_exception_leaves_nothing(tmp_path, episodes):
    with pytest.raises(RuntimeError), LeRobotWriter(tmp_path / "set", SPEC, META) as writer:
        writer.add(episodes[3])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BurnishError, match="no episodes"):
        write_lerobot(Episodes([], SPEC), tmp_path / "set")
    with pytest.raises(BurnishError, match="JSON"):
        write_lerobot(Episodes([episodes[0]], SPEC, {"x": object()}), tmp_path / "set")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_appears_meanwhile_is_kept(tmp_path, episodes):
    with pytest.raises(BurnishError, match="exists already"), LeRobotWriter(tmp_path / "set", SPEC) as writer:
        writer.add(episodes[0])
        (tmp_path / "set").mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


KILLED = """
import sys, torch
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.data.episodes import Episode
from burnish.policies.data.lerobot import LeRobotWriter
spec = EnvSpec(ObsSpec({"state": (3,)}), ActionSpec((-1.0,), (1.0,)), 10.0, "velocity", 9)
with LeRobotWriter(sys.argv[1], spec) as writer:
    for seed in range(10**6):
        writer.add(Episode({"state": torch.ones(9, 3)}, torch.zeros(8, 1), torch.zeros(8), False, True, False, seed))
        if seed == 20:
            sys.stdout.write("writing\\n")
            sys.stdout.flush()
"""


def test_kill_in_mid_write_leaves_no_dataset(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path / "set"], stdout=subprocess.PIPE, cwd=tmp_path)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"writing\n"
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 1 and left[0].startswith(".set.") and left[0].endswith(".partial")  # it really was writing
    with pytest.raises(BurnishError, match=r"there is no dataset at"):
        read_lerobot(tmp_path / "set")


def write_foreign(root: Path, results: dict[str, list], lengths: tuple[int, ...] = (3, 2)) -> Path:
    """What another tool may write: variable lists, float64, a nameless camera, a nested array, unknown columns."""
    total = sum(lengths)
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 5, 3), 7, np.uint8)).save(buffer, "PNG")
    columns = {
        "observation.state": pa.array([[float(i), 1.0] for i in range(total)], pa.list_(pa.float64())),
        "observation.map": pa.array([[[i, 1], [2, 3]] for i in range(total)], pa.list_(pa.list_(pa.float32()))),
        "observation.image": pa.array([{"bytes": buffer.getvalue(), "path": None}] * total),
        "action": pa.array([[0.5 * i] for i in range(total)], pa.list_(pa.float32())),
        "complementary_info.note": pa.array(["x"] * total),
        "episode_index": pa.array([e for e, n in enumerate(lengths) for _ in range(n)]),
        "task_index": pa.array([0] * total),
        **{name: pa.array(values) for name, values in results.items()},
    }
    features = {name: {"dtype": "float32", "shape": [1], "names": None} for name in columns}
    features["observation.state"] = {"dtype": "float64", "shape": [2], "names": None}
    features["observation.map"] = {"dtype": "float32", "shape": [2, 2], "names": None}
    features["observation.image"] = {"dtype": "image", "shape": [4, 5, 3], "names": ["height", "width", "channels"]}
    features["complementary_info.note"]["dtype"] = "string"
    for path in ("meta/episodes/chunk-000", "data/chunk-000"):
        (root / path).mkdir(parents=True)
    pq.write_table(pa.table(columns), root / "data/chunk-000/file-000.parquet")
    rows = [
        {"episode_index": e, "length": n, "data/chunk_index": 0, "data/file_index": 0} for e, n in enumerate(lengths)
    ]
    pq.write_table(pa.Table.from_pylist(rows), root / "meta/episodes/chunk-000/file-000.parquet")
    pq.write_table(pa.table({"task_index": [0], "task": ["lift"]}), root / "meta/tasks.parquet")
    info = {"codebase_version": "v3.0", "fps": 30, "features": features, "total_episodes": len(lengths)}
    info["total_frames"] = sum(lengths)
    info["data_path"] = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    (root / "meta/info.json").write_text(json.dumps(info))
    return root


def test_a_foreign_set_is_read_as_far_as_it_goes(tmp_path):
    read = read_lerobot(write_foreign(tmp_path / "foreign", {}))
    assert read.spec.obs.shapes == {"state": (2,), "map": (2, 2), "image.main": (3, 4, 5)}
    assert read.spec.action == ActionSpec((0.0,), (2.0,)) and read.spec.action_mode == "unknown"
    assert (read.spec.control_hz, read.spec.max_steps, len(read)) == (30.0, 3, 2)
    second = read[1]
    assert second.obs["state"].tolist() == [[3, 1], [4, 1], [4, 1]]  # the last observation again, for want of the final
    assert second.obs["map"][1].tolist() == [[4, 1], [2, 3]] and bool((second.obs["image.main"] == 7).all())
    assert (second.terminated, second.truncated, second.success, second.seed, second.task) == (
        False,
        True,
        False,
        1,
        "lift",
    )
    assert second.reward.tolist() == [0, 0]
    notes = " ".join(read.meta["notes"])
    for word in ("last observation is repeated", "truncated", "reward", "complementary_info.note", "range of the data"):
        assert word in notes


DONE = [False, False, True, False, True]


@pytest.mark.parametrize(
    ("results", "ends", "note"),
    [
        ({"next.done": DONE}, "cc", DONE_ALONE),
        ({"next.done": DONE, "next.success": DONE}, "tt", None),
        ({"next.done": DONE, "next.success": [False, True, False, False, True]}, "ct", DONE_ALONE),
        ({"next.done": DONE, "next.truncated": [False] * 4 + [True]}, "tc", None),
        ({"next.done": DONE, "next.terminated": DONE}, "tt", None),
        ({"next.done": [False] * 5}, "cc", NO_ENDS),
    ],
    ids=["done", "success", "success before the end", "truncated", "terminated", "never"],
)
def test_foreign_ends_keep_their_meaning(results, ends, note, tmp_path):
    """t is terminated, and c is cut off. ``next.done`` alone may be either, unless the task is a success."""
    read = read_lerobot(write_foreign(tmp_path / "set", {**results, "next.reward": [0.0, 0.0, 1.0, 0.0, 0.5]}))
    assert [(e.terminated, e.truncated) for e in read] == [(end == "t", end == "c") for end in ends]
    assert read[1].reward.tolist() == [0, 0.5]
    assert {DONE_ALONE, NO_ENDS} & {*read.meta["notes"]} == {*[note] * bool(note)}


def renamed_axes(folder: Path, **changes) -> Path:
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"]["observation.image"] |= changes
    edit_info(folder, features=info["features"])
    return folder


@pytest.mark.parametrize("word", ["channel", "channels"])
def test_the_names_of_axes_say_where_the_channels_are(word, tmp_path):
    """The picture itself is a PNG of 4 rows and 5 columns in any case."""
    folder = write_foreign(tmp_path / "set", {})
    read = read_lerobot(renamed_axes(folder, shape=[3, 4, 5], names=[word, "height", "width"]))
    assert read.spec.obs.shapes["image.main"] == (3, 4, 5) and bool((read[0].obs["image.main"] == 7).all())
    for names in (["height", "width", word], None, 5):  # the control
        with pytest.raises(BurnishError, match=r"of shape \(3, 4, 5\); .*channels"):
            read_lerobot(renamed_axes(folder, shape=[3, 4, 5], names=names))


def test_our_set_without_our_key_is_foreign(folder, episodes):
    drop_from_info(folder, "burnish")
    read = read_lerobot(folder)
    assert read[2].obs["image.depth"][:-1].equal(episodes[2].obs["image.depth"][:-1])
    assert read.spec.action_mode == "unknown" and read.meta["notes"]


def test_nan_on_disk_is_named(folder):
    path = folder / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    action = np.array(table["action"].to_pylist(), np.float32)
    action[1 + 3 + 2, 1] = np.nan  # episode 2 (lengths 1, 3, 5), row 2
    column = pa.FixedSizeListArray.from_arrays(pa.array(action.reshape(-1)), 2)
    pq.write_table(table.set_column(table.column_names.index("action"), "action", column), path)
    with pytest.raises(BurnishError, match=r"episode 2 of .*NaN in 'action', first in row 2") as error:
        read_lerobot(folder)
    assert "\n" not in str(error.value)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 64
    path.write_bytes(bytes(data))


def rewrite(path: Path, drop: str) -> None:
    pq.write_table(pq.read_table(path).drop_columns([drop]), path)


def make_ragged(path: Path) -> None:
    """As many numbers as before, of which one is in another row."""
    table = pq.read_table(path)
    rows = table["action"].to_pylist()
    rows[-2:] = [rows[-2][:1], [*rows[-2][1:], *rows[-1]]]
    pq.write_table(table.set_column(table.column_names.index("action"), "action", pa.array(rows)), path)


def shorten(path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(0, 20), path)


DATA, EPISODES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
MALFORMED = {
    "no folder": (lambda f: shutil.rmtree(f), "there is no dataset at"),
    "no info": (lambda f: (f / "meta/info.json").unlink(), "info.json cannot be read"),
    "not json": (lambda f: (f / "meta/info.json").write_text("{"), "not JSON"),
    "not a dict": (lambda f: (f / "meta/info.json").write_text("[]"), "codebase_version None"),
    "old version": (lambda f: edit_info(f, codebase_version="v1.6"), "'v1.6'"),
    "no features": (lambda f: drop_from_info(f, "features"), "without .*features"),
    "bad shape": (
        lambda f: edit_info(f, features={"action": {"dtype": "float32", "shape": ["2"]}}),
        "lacks dtype or sh",
    ),
    "bad fps": (lambda f: edit_info(f, fps="30"), "malformed"),
    "bad entry": (lambda f: edit_info(f, burnish={"obs": 3}), "'burnish' entry"),
    "bad path": (lambda f: edit_info(f, data_path="data/{nothing}"), "data_path"),
    "no data": (lambda f: (f / DATA).unlink(), f"lacks {DATA}"),
    "truncated data": (lambda f: truncate(f / DATA), "damaged or truncated"),
    "flipped bit": (lambda f: flip(f / DATA), "damaged or truncated"),
    "empty data": (lambda f: (f / DATA).write_bytes(b""), "damaged or truncated"),
    "missing rows": (lambda f: shorten(f / DATA), "has 4 rows of episode 4 in .* says 9"),
    "rows of other lengths": (lambda f: make_ragged(f / DATA), "another shape than .* in 'action' of episode 4"),
    "missing column": (lambda f: rewrite(f / DATA, "action"), r"lacks the columns \['action'\]"),
    "truncated episodes": (lambda f: truncate(f / EPISODES), "damaged or truncated"),
    "no episodes": (lambda f: (f / EPISODES).unlink(), "promises 5 episodes"),
    "truncated final": (lambda f: truncate(f / "meta/final_obs.parquet"), "damaged or truncated"),
    "no final": (lambda f: (f / "meta/final_obs.parquet").unlink(), "lacks meta/final_obs.parquet"),
    "truncated tasks": (lambda f: truncate(f / "meta/tasks.parquet"), "damaged or truncated"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_sets_are_one_sentence(folder, case):
    spoil, sentence = MALFORMED[case]
    spoil(folder)
    with pytest.raises(BurnishError, match=sentence) as error:
        read_lerobot(folder)
    assert "\n" not in str(error.value)


def test_unwritable_keys_are_refused(tmp_path):
    for shapes, word in (({"a/b": (1,)}, "'/'"), ({"image.x": (2, 4, 4)}, "2 channels")):
        with pytest.raises(BurnishError, match=word):
            LeRobotWriter(tmp_path / "set", replace(SPEC, obs=ObsSpec(shapes)))
    assert list(tmp_path.iterdir()) == []
