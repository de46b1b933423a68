"""Further columns of a dataset: features of LeRobot's beside ``action``, and to what trains on the set nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lerobot_sets import tree

import lerobot_v3_reader
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.data import lerobot_files, lerobot_writer
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.data.lerobot import LeRobotWriter, read_extra, read_lerobot, write_lerobot
from burnish.policies.data.windows import Windows

SPEC = EnvSpec(
    ObsSpec({"state": (3,), "image.top": (3, 8, 8)}), ActionSpec((-1.0, -1.0), (1.0, 1.0)), 10.0, "velocity", 9
)
WISH, FLAG, COUNTS = "complementary_info.wish", "flag", "counts"


def make_episode(seed: int) -> Episode:
    g = torch.Generator().manual_seed(seed)
    steps = 2 + seed % 3
    obs = {
        "state": torch.randn(steps + 1, 3, generator=g),
        "image.top": torch.randint(0, 256, (steps + 1, 3, 8, 8), generator=g, dtype=torch.uint8),
    }
    action = torch.rand(steps, 2, generator=g)
    extra = {
        WISH: torch.randn(steps, 2, generator=g),
        FLAG: torch.rand(steps, 1, generator=g) > 0.5,
        COUNTS: torch.randint(-(2**62), 2**62, (steps, 3), generator=g),
    }
    extra[WISH][0, 0] = -0.0
    return Episode(obs, action, action[:, 0], seed % 2 == 0, seed % 2 == 1, True, seed, extra=extra)


EPISODES = [make_episode(seed) for seed in range(4)]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(lerobot_writer, "MEGABYTE", 30)  # 3 kB a file, so that there are several
    write_lerobot(Episodes(EPISODES, SPEC), tmp_path / "set")
    assert len(list(tmp_path.glob("set/data/chunk-000/*"))) > 1
    return tmp_path / "set"


def test_every_bit_and_every_type_comes_back(folder):
    read, alone = read_lerobot(folder), read_extra(folder)
    assert "notes" not in read.meta and set(read.spec.obs.shapes) == {"state", "image.top"}
    for wrote, found, extra in zip(EPISODES, read, alone, strict=True):
        assert list(wrote.extra) == list(found.extra) == list(extra)
        for name, x in wrote.extra.items():
            for y in (found.extra[name], extra[name]):
                assert (x.dtype, x.shape, x.numpy().tobytes()) == (y.dtype, y.shape, y.numpy().tobytes()), name
    write_lerobot(read, folder.with_name("again"))
    assert tree(folder.with_name("again")) == tree(folder)


def test_they_are_columns_for_everybody(folder):
    """A reader written after the specification alone, which checks statistics too, and plain pyarrow."""
    frames = lerobot_v3_reader.read(folder)
    wishes = torch.cat([episode.extra[WISH] for episode in EPISODES])
    assert np.array_equal(np.array([frame[WISH] for frame in frames], np.float32), wishes.numpy())
    features = json.loads((folder / "meta/info.json").read_text())["features"]
    assert features[WISH] == {"dtype": "float32", "shape": [2], "names": ["wish_0", "wish_1"]}
    assert features[FLAG] == {"dtype": "bool", "shape": [1], "names": None}
    names = list(features)
    assert names.index("action") + 1 == names.index(WISH) and not any(name.startswith("action_") for name in names)
    stats = json.loads((folder / "meta/stats.json").read_text())
    assert np.allclose(stats[WISH]["mean"], wishes.double().mean(0)) and stats[FLAG]["max"] == [1.0]
    table = pq.read_table(folder / "data/chunk-000/file-000.parquet")
    assert table.schema.field(FLAG).type == pa.bool_() and table.schema.field(WISH).type.list_size == 2
    assert table[FLAG][0].as_py() == bool(EPISODES[0].extra[FLAG][0])


def test_what_trains_sees_no_difference(folder, tmp_path):
    write_lerobot(Episodes([replace(e, extra={}) for e in EPISODES], SPEC), tmp_path / "plain")
    policy = PolicySpec(SPEC.obs, SPEC.action, horizon=2, execute=1)
    index = torch.arange(sum(map(len, EPISODES)))
    one, two = (Windows(read_lerobot(path), policy)[index] for path in (folder, tmp_path / "plain"))
    assert torch.equal(one.action, two.action) and set(one.obs) == set(two.obs) == {"state", "image.top"}
    assert "extra" not in json.loads((tmp_path / "plain/meta/info.json").read_text())["burnish"]
    assert read_extra(tmp_path / "plain") == []


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_set_that_was_taken_up_again_has_the_same_bytes(stop, folder, tmp_path):
    for begin, end in ((0, stop), (stop, len(EPISODES))):
        with LeRobotWriter(tmp_path / "grown", SPEC, extra=EPISODES[0].extra, resume=True) as writer:
            for episode in EPISODES[begin:end]:
                writer.add(episode)
                writer.publish()
    assert tree(tmp_path / "grown") == tree(folder)


def test_a_set_has_the_same_columns_all_over(folder):
    before, last = tree(folder), EPISODES[-1]
    for extra in ({}, {WISH: last.extra[WISH]}, {**last.extra, FLAG: last.extra[FLAG].float()}):
        with (
            pytest.raises(BurnishError, match=r"has the further columns .*but this set complementary_info\.wish"),
            LeRobotWriter(folder, SPEC, extra=last.extra, resume=True) as writer,
        ):
            writer.add(replace(last, extra=extra))
    for extra in (None, {WISH: last.extra[WISH]}):
        with pytest.raises(BurnishError, match=r"recorded with .*cannot continue it"):
            LeRobotWriter(folder, SPEC, extra=extra, resume=True)
    assert tree(folder) == before and [path.name for path in folder.parent.iterdir()] == ["set"]


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"action_of_a_person": torch.zeros(3, 2)}, "LeRobot has a meaning for that name"),
        ({"observation.wish": torch.zeros(3, 2)}, "LeRobot has a meaning"),
        ({"a/b": torch.zeros(3, 2)}, "LeRobot has a meaning"),
        ({"timestamp": torch.zeros(3, 1)}, "LeRobot has a meaning"),
        ({WISH: torch.zeros(3, 2, dtype=torch.float16)}, "float16 of shape"),
        ({WISH: torch.zeros(3, 0)}, r"shape \(3, 0\)"),
        ({WISH: torch.zeros(4, 2)}, "needs 3 rows"),
        ({WISH: torch.zeros(3)}, r"as \(T, n\)"),
        ({WISH: torch.tensor([[0.0], [1.0], [torch.nan]])}, "NaN in 'complementary_info.wish', first in row 2"),
    ],
    ids=str,
)
def test_what_cannot_be_a_column_is_one_sentence(extra, sentence, tmp_path):
    steps = 3
    obs = {"state": torch.zeros(steps + 1, 3), "image.top": torch.zeros(steps + 1, 3, 8, 8, dtype=torch.uint8)}
    with pytest.raises(BurnishError, match=sentence):
        episode = Episode(obs, torch.zeros(steps, 2), torch.zeros(steps), True, False, True, 0, extra=extra)
        write_lerobot(Episodes([episode], SPEC), tmp_path / "set")
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    ("names", "feature", "sentence"),
    [
        ("absent", {}, "names a further column that is none"),
        (["absent"], {}, "names a further column that is none"),
        ([7], {}, "names a further column that is none"),
        ({}, {}, "names a further column that is none"),
        (["action"], {}, "names a further column that is none"),
        (["episode_index"], {}, "names a further column that is none"),
        ([WISH], {"dtype": "string"}, "names a further column that is none"),
        ([WISH], {"shape": [-2]}, "names a further column that is none"),
        ([WISH], {"shape": [3]}, "another shape than"),
        ([WISH], {"shape": [10**13]}, "of memory that there are"),
        ([WISH], {"dtype": "int64"}, ""),  # a harmless lie: rounded
        (["invented"], {"dtype": "float32", "shape": [2]}, "lacks the columns"),
    ],
    ids=str,
)
def test_what_a_file_says_of_its_columns_is_not_believed(names, feature, sentence, folder):
    info = json.loads((folder / "meta/info.json").read_text())
    info["burnish"]["extra"] = names
    if feature:
        info["features"][names[0]] = {**info["features"].get(names[0], {}), **feature}
    (folder / "meta/info.json").write_text(json.dumps(info))
    for read in (read_lerobot, read_extra):
        if sentence:
            with pytest.raises(BurnishError, match=sentence):
                read(folder)
        else:
            assert len(read(folder)) == len(EPISODES)


def test_a_column_that_unpacks_to_more_than_was_promised_is_refused(folder, monkeypatch):
    monkeypatch.setattr(lerobot_files, "ROOM", 1 << 12)  # bytes, instead of 64 MiB: a small bomb will do
    for path in sorted(folder.glob("data/*/*.parquet")):
        table = pq.read_table(path)
        zeros = pa.array([[0.0] * 5000] * len(table), pa.list_(pa.float32()))
        pq.write_table(table.set_column(table.column_names.index(WISH), WISH, zeros), path)
    for read in (read_lerobot, read_extra):
        with pytest.raises(BurnishError, match="unpacks to"):
            read(folder)
