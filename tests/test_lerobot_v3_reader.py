"""The strict reader of the tests: it accepts what `collect` writes, and notices each kind of damage."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import lerobot_v3_reader
from burnish.policies.cli.cli import main
from burnish.policies.data import lerobot_writer
from burnish.policies.data.lerobot import read_lerobot
from lerobot_v3_reader import Violation

CAMERA = "observation.images.top"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
EPISODES, DATA = "meta/episodes/chunk-000/file-000.parquet", "data/chunk-000/file-000.parquet"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """What the verb writes, in several data files; the camera is the one of the toy world."""
    out = tmp_path_factory.mktemp("sound") / "set"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lerobot_writer, "MEGABYTE", 100)  # so 10 kB a file
        words = ["env=point_reach", "env.image=true", "env.max_steps=9", "expert=noisy", "episodes=4", "worlds=3"]
        assert main(["collect", *words, f"out={out}"]) == 0
    assert len(list(out.glob("data/chunk-000/*"))) == 2, "files roll over"
    return out


def test_it_reads_what_collect_writes(sound):
    frames = iter(lerobot_v3_reader.read(sound))
    for episode in read_lerobot(sound):
        for t in range(len(episode)):
            frame = next(frames)
            assert frame["observation.state"] == episode.obs["state"][t].tolist()
            assert frame["action"] == episode.action[t].tolist() and frame["task"] == episode.task
            assert np.array_equal(frame[CAMERA], episode.obs["image.top"][t].permute(1, 2, 0).numpy())
    assert next(frames, None) is None


Damage = Callable[[Path], Any]


def edit(file: str, change: Callable[[Any], Any]) -> Damage:
    """Change the JSON of a file in place."""

    def damage(root: Path) -> None:
        data = json.loads((root / file).read_text())
        change(data)
        (root / file).write_text(json.dumps(data))

    return damage


def column(file: str, name: str, change: Callable[[list], list], kind: Any = None) -> Damage:
    """Change the values of one column, row group by row group."""

    def damage(root: Path) -> None:
        with pq.ParquetFile(root / file) as parquet:
            groups = [parquet.read_row_group(i) for i in range(parquet.num_row_groups)]
        changed = []
        for group in groups:
            place, old = group.column_names.index(name), group[name]
            changed.append(group.set_column(place, name, pa.array(change(old.to_pylist()), kind or old.type)))
        with pq.ParquetWriter(root / file, changed[0].schema) as writer:
            for group in changed:
                writer.write_table(group)

    return damage


def small_image(cells: list[dict]) -> list[dict]:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(buffer, "PNG")
    return [{**cells[0], "bytes": buffer.getvalue()}, *cells[1:]]


def flip(root: Path) -> None:
    data = bytearray((root / DATA).read_bytes())
    data[len(data) // 3] ^= 64
    (root / DATA).write_bytes(bytes(data))


DAMAGE: dict[str, tuple[Damage, str]] = {
    "older version": (edit(INFO, lambda i: i.update(codebase_version="v2.1")), "codebase_version"),
    "path template": (edit(INFO, lambda i: i.update(data_path="data/{chunk_index}/{file_index}")), "data_path"),
    "fps no integer": (edit(INFO, lambda i: i.update(fps=12.5)), "fps"),
    "too many frames promised": (edit(INFO, lambda i: i.update(total_frames=999)), "total_frames"),
    "too few episodes promised": (
        edit(INFO, lambda i: i.update(total_episodes=3, splits={"train": "0:3"})),
        "total_episodes",
    ),
    "split": (edit(INFO, lambda i: i.update(splits={"train": "0:3"})), "splits"),
    "shape of a feature": (edit(INFO, lambda i: i["features"]["action"].update(shape=[3], names=None)), "action"),
    "feature without column": (
        edit(INFO, lambda i: i["features"].update(x={"dtype": "bool", "shape": [1], "names": None})),
        "columns",
    ),
    "column without feature": (edit(INFO, lambda i: i["features"].pop("next.reward")), "columns"),
    "type of a column": (column(DATA, "next.reward", lambda x: x, pa.float64()), "type of next.reward"),
    "missing value": (column(DATA, "next.reward", lambda x: [None, *x[1:]]), "missing value"),
    "gap in index": (column(DATA, "index", lambda x: [i + 1 for i in x]), "index is not contiguous"),
    "frame_index does not restart": (column(DATA, "frame_index", lambda x: [i + 1 for i in x]), "frame_index"),
    "milliseconds": (column(DATA, "timestamp", lambda x: [1000 * t for t in x]), "timestamp"),
    "unknown task": (column(DATA, "task_index", lambda x: [7] * len(x)), "task_index"),
    "other image size": (column(DATA, CAMERA, small_image), "pixels"),
    "one row group": (lambda r: pq.write_table(pq.read_table(r / DATA), r / DATA), "row group of two episodes"),
    "truncated file": (lambda r: (r / DATA).write_bytes((r / DATA).read_bytes()[:-99]), "cannot be read"),
    "flipped bit": (flip, "cannot be read"),
    "missing data file": (lambda r: (r / DATA).unlink(), "number of file-001"),
    "foreign data file": (lambda r: shutil.copy(r / DATA, r / "data/chunk-000/file-007.parquet"), "number of file-007"),
    "dataset range": (column(EPISODES, "dataset_to_index", lambda x: [i + 1 for i in x]), "dataset range"),
    "length of an episode": (column(EPISODES, "length", lambda x: [i - 1 for i in x]), "dataset range"),
    "data file of an episode": (column(EPISODES, "data/file_index", lambda x: [0] * len(x)), "data file"),
    "own place of the table": (column(EPISODES, "meta/episodes/file_index", lambda x: [1] * len(x)), "meta/episodes"),
    "task of an episode": (column(EPISODES, "tasks", lambda x: [["fly"]] * len(x)), "tasks of an episode"),
    "stats of an episode": (column(EPISODES, "stats/action/count", lambda x: [[1]] * len(x)), "count of action"),
    "no pandas index": (lambda r: pq.write_table(pq.read_table(r / TASKS).replace_schema_metadata(), r / TASKS), ""),
    "order of tasks": (column(TASKS, "task_index", lambda x: [i + 1 for i in x]), "tasks"),
    "no quantiles": (edit(STATS, lambda s: s["action"].pop("q99")), "stats of action"),
    "no stats of a feature": (edit(STATS, lambda s: s.pop("action")), "stats: features"),
    "count no list": (edit(STATS, lambda s: s["action"].update(count=9)), "count of action"),
    "wrong minimum": (edit(STATS, lambda s: s["action"].update(min=[-9.0, -9.0])), "min of action"),
    "stats of images flat": (edit(STATS, lambda s: s[CAMERA].update(mean=[0.5, 0.5, 0.5])), "stats shape"),
    "stats of images in 0..255": (
        edit(STATS, lambda s: s[CAMERA].update(max=[[[255.0]]] * 3)),
        f"max of {CAMERA}",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_it_notices(case, sound, tmp_path):
    damage, words = DAMAGE[case]
    shutil.copytree(sound, tmp_path / "set")
    damage(tmp_path / "set")
    with pytest.raises(Violation, match=words):
        lerobot_v3_reader.read(tmp_path / "set")
