"""Older versions of LeRobot's sets, and videos: frame i of episode e is itself, and hostile files are refused."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lerobot_sets import CAMERA, colour, encode, write
from PIL import Image
from test_lerobot import write_foreign

from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.data import lerobot_images
from burnish.policies.data.lerobot import read_lerobot
from burnish.policies.data.read import fingerprint

LENGTHS = (5, 7, 6)
LEVELS = 6  # of 255, that a codec may be off at its best quality; neighbours differ by 8 and more


def shown(episode, number):
    """How far the pictures of an episode are from those that were written."""
    means = episode.obs["image.top"].float().mean((2, 3)).numpy()
    expected = [colour(number, k) for k in range(LENGTHS[number])]
    return np.abs(means - np.array([*expected, expected[-1]], float)).max()


# H.264 with B-frames, which are stored in another order than they are shown in.
CODECS = {"h264": {"bf": "2", "g": "4"}, "libsvtav1": {"g": "2"}, "hevc": {"g": "2"}}
CASES = [("v2.0", "h264"), ("v2.1", "h264"), ("v2.1", "hevc"), *(("v3.0", codec) for codec in CODECS)]


@pytest.mark.parametrize(("version", "codec"), CASES)
def test_each_frame_is_itself(version, codec, tmp_path):
    options = {"crf": "1", **CODECS[codec]}
    episodes = read_lerobot(write(tmp_path / "set", version, codec=codec, **options)).episodes
    assert [len(episode) for episode in episodes] == list(LENGTHS)
    for number, episode in enumerate(episodes):
        assert shown(episode, number) < LEVELS
        assert shown(episode, (number + 1) % 3) > 2 * LEVELS if len(episode) == LENGTHS[(number + 1) % 3] else True
        assert float(episode.obs["state"][0, 0]) == 100.0 * number and episode.truncated
    if version != "v3.0":
        assert {episode.task for episode in episodes} == {"push"}


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_picture_is_found_by_the_time_of_its_row(version, tmp_path):
    """Of episode 0 the first two rows are gone, and their pictures are not."""
    root = write(tmp_path / "set", version)
    (data,) = root.glob("data/chunk-000/*000.parquet")
    pq.write_table(pq.read_table(data).slice(2), data)
    if version == "v3.0":
        listed(0, length=3)(root)
    else:
        lines = root / "meta/episodes.jsonl"
        lines.write_text(lines.read_text().replace('"length": 5', '"length": 3'))
    read = read_lerobot(root)[0]
    assert read.obs["state"][:, 1].tolist() == [2, 3, 4, 4]
    means = read.obs["image.top"].float().mean((2, 3)).numpy()
    assert np.abs(means - np.array([colour(0, k) for k in (2, 3, 4, 4)], float)).max() < LEVELS


STAMPS = (np.arange(5) % 3) / 30  # of episodes of 3 and 2 rows
CLOCKS = {
    "NaN": ({"timestamp": [0.0, np.nan, 2 / 30, 0.0, 1 / 30]}, r"timestamp in row 1 is nan after 0,"),
    "NaN alone": ({"timestamp": [np.nan] * 5}, "timestamp in row 0 is nan,"),
    "infinite": ({"timestamp": [np.inf] * 5}, "timestamp in row 0 is inf,"),
    "falling": ({"timestamp": STAMPS[[2, 1, 0, 3, 4]]}, r"timestamp in row 1 is 0\.0333333 after 0\.0666667,"),
    "milliseconds": ({"timestamp": 1000 * STAMPS}, r"timestamp in row 1 is 33\.3333 after 0, and seconds are needed"),
    "a gap": ({"timestamp": [0.0, 1 / 30, 3 / 30, 0.0, 1 / 30]}, "rise by 1/30 in each row"),
    "before the beginning": ({"timestamp": STAMPS - 1 / 30}, r"timestamp in row 0 is -0\.033"),
    "since 1970, rounded": ({"timestamp": (1.7e9 + STAMPS).astype(np.float32)}, "timestamp in row 1 is"),
    "another order": ({"frame_index": [2, 1, 0, 0, 1]}, "frame_index does not rise in row 1; sort its rows"),
}


@pytest.mark.parametrize("case", CLOCKS)
def test_rows_that_are_not_in_the_order_of_time_are_refused(case, tmp_path):
    columns, sentence = CLOCKS[case]
    with pytest.raises(BurnishError, match=f"episode 0 of .*{sentence}") as error:
        read_lerobot(write_foreign(tmp_path / "set", columns))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("begin", [0, 2 / 30, 3600, 36000], ids=["0", "frame 2", "an hour", "ten hours"])
def test_rounded_time_stamps_are_read(begin, tmp_path):
    """After an hour float32 has steps of 0.00024 s, more than LeRobot's tolerance, and after ten of 0.004 s."""
    stamps = (begin + STAMPS[:3]).astype(np.float32)
    assert begin < 3600 or np.abs(np.diff(stamps) - 1 / 30).max() > 1e-4, "the control"
    clock = {"timestamp": [*stamps, *STAMPS[3:]], "frame_index": np.arange(5) + 7}
    assert len(read_lerobot(write_foreign(tmp_path / "set", clock))) == 2


def edit(**changes):
    def change(root):
        path = root / "meta/info.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def features(**changes):
    def change(root):
        found = json.loads((root / "meta/info.json").read_text())["features"]
        found[CAMERA] |= changes
        edit(features=found)(root)

    return change


def listed(episode=1, **changes):
    def change(root):
        path = root / "meta/episodes/chunk-000/file-000.parquet"
        rows = pq.read_table(path).to_pylist()
        rows[episode] |= {x if x in rows[episode] else f"videos/{CAMERA}/{x}": value for x, value in changes.items()}
        pq.write_table(pa.Table.from_pylist(rows), path)

    return change


def late(root):
    edit(fps=1)(root)
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    stamps = 1e15 + table["frame_index"].to_numpy()
    pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", pa.array(stamps)), path)


def video(make):
    return lambda root: make(root / f"videos/{CAMERA}/chunk-000/file-000.mp4")


def playlist(path):
    path.write_text("#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n")


NEW = {
    "a path outside": (edit(video_path="../{video_key}.mp4"), "malformed video_path"),
    "an absolute path": (edit(video_path="/{video_key}.mp4"), "malformed video_path"),
    "a path with an attribute": (edit(video_path="{video_key.__class__}.mp4"), "malformed video_path"),
    "a path that asks for what is not there": (edit(video_path="{episode_index}.mp4"), "asks for"),
    "another size": (features(shape=[32, 64, 3]), "instead of"),
    "a bomb": (features(shape=[100_000, 100_000, 3]), "memory"),
    "a time that is no frame's": (listed(from_timestamp=0.537), "no frame at 0.5370 s"),
    "a time behind the end": (listed(from_timestamp=60.0), "no frame at"),
    "a time that is none": (listed(from_timestamp=float("nan")), "no time"),
    "a time that no film reaches": (late, "no readable video"),
    "a file that is missing": (video(lambda path: path.unlink()), "lacks"),
    "a file that is cut off": (video(lambda path: path.write_bytes(path.read_bytes()[:700])), "no readable video"),
    "a playlist": (video(playlist), "no readable video"),
    "another codec": (
        video(lambda path: encode(path, [(0, k) for k in range(12)], codec="mjpeg", pixels="yuvj420p", q="1")),
        "codec",
    ),
    "too few frames": (video(lambda path: encode(path, [(0, k) for k in range(7)])), "no frame at"),
}
OLD = {
    "no list of episodes": (lambda root: (root / "meta/episodes.jsonl").unlink(), "lacks"),
    "a list that is not JSON": (lambda root: (root / "meta/episodes.jsonl").write_text("{"), "not JSON"),
    "too many episodes": (edit(total_episodes=2), "other lines"),
    "a length that is not an integer": (
        lambda root: (root / "meta/episodes.jsonl").write_text('{"episode_index": 0, "length": "5"}\n' * 3),
        "malformed row",
    ),
    "a task without a number": (
        lambda root: (root / "meta/tasks.jsonl").write_text('{"task_index": "0", "task": "push"}'),
        "task_index and task",
    ),
    "another size of chunks": (edit(chunks_size=0), "chunks_size"),
}


@pytest.mark.parametrize(
    ("version", "change", "sentence"),
    [("v3.0", *x) for x in NEW.values()] + [("v2.1", *x) for x in OLD.values()],
    ids=[*NEW, *OLD],
)
def test_it_is_refused(version, change, sentence, tmp_path):
    root = write(tmp_path / "set", version)
    read_lerobot(root)  # the control
    change(root)
    with pytest.raises(BurnishError, match=sentence) as refusal:
        read_lerobot(root)
    assert "\n" not in str(refusal.value)


@pytest.fixture
def cached(tmp_path):
    """A set as the cache of Hugging Face holds it: each file is a link to one in ``blobs``."""
    root = write(tmp_path / "datasets--me--set/snapshots/1f", "v3.0")
    blobs = root.parent.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(x for x in root.rglob("*") if x.is_file())):
        path.rename(blobs / f"{number}")
        path.symlink_to(Path(*[".."] * len(path.relative_to(root.parent).parts)) / "blobs" / f"{number}")
    return root


@pytest.mark.parametrize("place", ["meta/info.json", "data", "data/*/*", "videos/*/*/*"])
def test_a_link_leads_into_the_cache_or_nowhere(place, cached, tmp_path):
    (tmp_path / "mine").symlink_to(cached)
    shutil.copytree(cached, copy := tmp_path / "copy")
    assert len(read_lerobot(tmp_path / "mine")) == len(read_lerobot(copy)) == 3, "the control"
    path = next(cached.glob(place))
    path.rename(tmp_path / "gone")
    path.symlink_to(copy / path.relative_to(cached))
    with pytest.raises(BurnishError, match=r"has a link in the place of .*; put there what it leads to"):
        read_lerobot(cached)


def test_the_fingerprint_is_that_of_the_description_and_no_other_file(cached, tmp_path):
    digest = hashlib.sha256()
    for name in ("meta/episodes/chunk-000/file-000.parquet", "meta/info.json"):
        digest.update(name.encode() + (cached / name).read_bytes())
    assert fingerprint(cached) == digest.hexdigest()
    (tmp_path / "private").write_text("x")
    (cached / "meta/more.json").symlink_to(tmp_path / "private")
    with pytest.raises(BurnishError, match=r"a link in the place of meta/more\.json"):
        fingerprint(cached)


DEPTH = {
    "as LeRobot says it": {"info": {"is_depth_map": True}},
    "as it was said before": {"info": {"video.is_depth_map": True}},
    "as it was said first": {"video_info": {"video.is_depth_map": True}},
    "as images": {"dtype": "image", "shape": [48, 64, 1], "info": {"is_depth_map": True}},
    "by its shape alone": {"shape": [48, 64, 1]},
}


@pytest.mark.parametrize("change", DEPTH.values(), ids=DEPTH)
def test_a_camera_that_sees_no_colours_is_passed_over_and_said(change, tmp_path):
    root = write(tmp_path / "set", "v3.0")
    assert set(read_lerobot(root).spec.obs.shapes) == {"state", "image.top"}  # the control
    features(**change)(root)
    read = read_lerobot(root)
    assert set(read.spec.obs.shapes) == {"state"} and f"columns passed over: {CAMERA}" in read.meta["notes"]


def test_a_picture_of_16_bits_is_refused():
    """As 8 bits all depths from a quarter of a metre on would be white."""

    def cell(kind):
        file = io.BytesIO()
        Image.fromarray(np.full((4, 5), 200, kind)).save(file, "PNG")
        return {"bytes": file.getvalue()}

    assert (lerobot_images.decode([cell(np.uint8)], (1, 4, 5)) == 200).all()  # the control
    with pytest.raises(BurnishError, match="more than 8 bits a channel"):
        lerobot_images.decode([cell(np.uint16)], (1, 4, 5))


def tasks(root, *lines, **info):
    """A set with these tasks, whose numbers the first two episodes have in their frames: 0, 0, 2, 2, 2 and 1, 1, ..."""
    (root / "meta/tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    edit(**info)(root)
    for number, indices in enumerate(([0, 0, 2, 2, 2], [1] * 7)):
        path = root / f"data/chunk-000/episode_{number:06d}.parquet"
        table = pq.read_table(path)
        pq.write_table(table.set_column(table.column_names.index("task_index"), "task_index", pa.array(indices)), path)
    return root


FIVE = [{"task_index": i, "task": f"task {i}"} for i in range(5)]


def test_an_episode_of_several_tasks_is_said(tmp_path):
    """Five tasks of three episodes, as ``total_tasks`` says."""
    read = read_lerobot(tasks(write(tmp_path / "set", "v2.1"), *FIVE, total_tasks=5))
    assert [episode.task for episode in read] == ["task 0", "task 1", "task 0"]
    assert [note for note in read.meta["notes"] if "several tasks" in note] == [
        "episodes of several tasks: 1; each has that of its first frame"
    ]
    with pytest.raises(BurnishError, match=r"other lines than info\.json promises"):  # the control
        read_lerobot(tasks(tmp_path / "set", *FIVE, total_tasks=4))


@pytest.mark.parametrize("mark", ["\u2028", "\x85"])
def test_a_mark_in_a_task_ends_no_line(mark, tmp_path):
    root = tasks(write(tmp_path / "set", "v2.1"), *FIVE[:3])
    assert read_lerobot(root)[0].task == "task 0"  # the control
    path = root / "meta/tasks.jsonl"
    path.write_text(path.read_text().replace("task 0", f"task{mark}0"), encoding="utf-8")
    assert read_lerobot(root)[0].task == f"task{mark}0"


def test_a_task_without_a_text_is_refused(tmp_path):
    root = tasks(write(tmp_path / "set", "v2.1"), *FIVE[:2])
    with pytest.raises(BurnishError, match=r"task_index=2 in episode 0, which meta/tasks.jsonl does not list"):
        read_lerobot(root)
    read_lerobot(root, bad := {})
    assert list(bad) == [0], "the others can be used"
    read = read_lerobot(tasks(root))
    assert {episode.task for episode in read} == {""}, "the control: a set without a single task"


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_film_is_read_whose_shape_begins_with_its_channels(version, tmp_path):
    root = write(tmp_path / "set", version)
    for shape in ([3, 48, 64], [48, 64, 3]):  # the names of the second one are wrong, as its shape says
        features(shape=shape, names=["channels", "height", "width"])(root)
        for number, episode in enumerate(read_lerobot(root)):
            assert shown(episode, number) < LEVELS


def test_what_was_filled_in_is_said(tmp_path, capsys):
    data = write(tmp_path / "set", "v2.1")
    words = ["policy=flow", f"data={data}", "train.steps=1", "eval.episodes=0", f"out={tmp_path / 'bc'}"]
    assert main(["pretrain", *words, "policy.net.mlp.hidden=[8]"]) == 0
    said = capsys.readouterr().out
    for part in ("there is no reward", "count as truncated", "the last observation is repeated", "range of the data"):
        assert part in said


def test_a_set_without_rewards_teaches_no_values(tmp_path, capsys):
    data, out = write(tmp_path / "set", "v2.1"), tmp_path / "iql"
    assert main(["offline", "method=iql", f"data={data}", "steps=1", "eval.episodes=0", f"out={out}"]) == 2
    assert "hold no rewards" in capsys.readouterr().err
    assert not out.exists()
