"""A set that grows in public: complete at any instant, taken up again after a kill, and always the same bytes."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from lerobot_sets import tree

import lerobot_v3_reader
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.data import growing_folder, lerobot_writer
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.data.lerobot import LeRobotWriter, read_lerobot, write_lerobot

SPEC = EnvSpec(
    ObsSpec({"state": (3,), "image.top": (3, 8, 8), "goal": ()}), ActionSpec((-1.0,), (1.0,)), 12.5, "velocity", 9
)
META = {"env": {"name": "none"}, "seed": 3}
COUNT = 5
Writer = partial(LeRobotWriter, extra={"flag": torch.zeros(0, 1, dtype=torch.bool)})


def make_episode(seed: int) -> Episode:
    g = torch.Generator().manual_seed(seed)
    steps = 2 + seed % 4
    obs = {
        "state": torch.randn(steps + 1, 3, generator=g),
        "image.top": torch.randint(0, 256, (steps + 1, 3, 8, 8), generator=g, dtype=torch.uint8),
        "goal": torch.randn(steps + 1, generator=g),
    }
    state = {"tick": torch.arange(steps + 1), "x": torch.randn(steps + 1, 2, generator=g, dtype=torch.float64)}
    action = torch.rand(steps, 1, generator=g)
    ends = (seed % 2 == 0, seed % 2 == 1)
    return Episode(
        obs, action, action[:, 0] * 2, *ends, seed % 3 == 0, seed, f"task {seed % 2}", state, {"flag": action > 0.5}
    )


EPISODES = [make_episode(seed) for seed in range(COUNT)]


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(lerobot_writer, "MEGABYTE", 30)  # 3 kB of PNGs, numbers and states a file: two episodes


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """The sets of the first 1, 2, ... episodes, each written at one go and read by the reader of the specification."""
    folder = tmp_path_factory.mktemp("library")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lerobot_writer, "MEGABYTE", 30)
        for n in range(1, COUNT + 1):
            write_lerobot(Episodes(EPISODES[:n], SPEC, META), folder / str(n))
            lerobot_v3_reader.read(folder / str(n))
    assert len(list((folder / str(COUNT)).glob("data/chunk-000/*"))) == 3
    return folder


@pytest.fixture(scope="module")
def whole(library) -> dict[int, dict[str, str]]:
    """Number of episodes -> the files of that set."""
    return {n: tree(library / str(n)) for n in range(1, COUNT + 1)}


def grown(path: Path, episodes: list[Episode] = EPISODES, *, resume: bool = False) -> Iterator[LeRobotWriter]:
    """The writer after each publication."""
    with Writer(path, SPEC, META, publish_every_s=3600, resume=resume) as writer:
        for episode in episodes[len(writer.seeds) :]:
            writer.add(episode)
            writer.publish()
            yield writer


def test_every_publication_is_the_whole_set_of_the_episodes_so_far(tmp_path, whole):
    for writer in grown(tmp_path / "set"):
        assert tree(tmp_path / "set") == whole[len(writer.seeds)]
    assert tree(tmp_path / "set") == whole[COUNT]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize("stop", range(1, COUNT + 1))
def test_a_set_that_was_taken_up_again_has_the_same_bytes(stop, tmp_path, whole):
    list(grown(tmp_path / "set", EPISODES[:stop]))
    with Writer(tmp_path / "set", SPEC, META, resume=True) as writer:
        assert writer.seeds == list(range(stop))
        for episode in EPISODES[stop:]:
            writer.add(episode)
        totals = writer.totals()
    assert tree(tmp_path / "set") == whole[COUNT]
    frames = sum(map(len, EPISODES))
    assert totals == {"episodes": COUNT, "frames": frames, "successes": sum(e.success for e in EPISODES)}


def test_full_data_files_are_linked_and_not_written_again(tmp_path):
    first = tmp_path / "set/data/chunk-000/file-000.parquet"
    files = set()
    for writer in grown(tmp_path / "set"):
        if len(writer.seeds) > 2:
            files.add(first.stat().st_ino)
    assert len(files) == 1 and first.stat().st_nlink == 1  # and nothing hidden keeps it


def test_publications_come_by_the_clock_and_never_take_more_than_their_share(tmp_path, monkeypatch):
    now_s, published = [0.0], []
    monkeypatch.setattr(lerobot_writer.time, "monotonic", lambda: now_s[0])
    folder_publish = growing_folder.GrowingFolder.publish

    def slow(self, write):
        folder_publish(self, write)
        published.append(now_s[0])
        now_s[0] += 1.0

    monkeypatch.setattr(growing_folder.GrowingFolder, "publish", slow)
    with Writer(tmp_path / "set", SPEC, META, publish_every_s=5) as writer:
        writer.add(EPISODES[0])  # at once
        for at in (10.0, 20.9):
            now_s[0] = at
            writer.add(EPISODES[len(writer.seeds)])
        assert published == [0.0]  # it took a second, so the next one waits for twenty
        now_s[0] = 21.0
        writer.publish_if_due()
        now_s[0] = 100.0
        writer.publish_if_due()  # nothing is new
        assert published == [0.0, 21.0]
    assert published == [0.0, 21.0], "nothing was left to publish"


def test_an_exception_leaves_what_was_published(tmp_path, whole):
    with pytest.raises(RuntimeError):
        for writer in grown(tmp_path / "set"):
            if len(writer.seeds) == 3:
                writer.add(EPISODES[3])
                raise RuntimeError
    writer.abort()
    assert tree(tmp_path / "set") == whole[3] and [path.name for path in tmp_path.iterdir()] == ["set"]


def test_files_that_others_add_survive(tmp_path, whole):
    for _ in grown(tmp_path / "set"):
        (tmp_path / "set/README.md").write_text("notes")
    assert tree(tmp_path / "set") == {**whole[COUNT], "README.md": hashlib.sha256(b"notes").hexdigest()}


def test_what_replaced_the_set_is_not_touched(tmp_path):
    with pytest.raises(BurnishError, match="moved or replaced"):
        for _ in grown(tmp_path / "set"):
            (tmp_path / "set").rename(tmp_path / "mine")
            (tmp_path / "set").mkdir()
            (tmp_path / "set/precious").write_text("x")
    assert (tmp_path / "set/precious").exists()
    assert len(read_lerobot(tmp_path / "mine")) == 1


def test_one_writer_at_a_time(tmp_path):
    writers = grown(tmp_path / "set")
    next(writers)
    for resume in (False, True):
        with pytest.raises(BurnishError, match="another process is writing"):
            Writer(tmp_path / "set", SPEC, META, resume=resume)
    Writer(tmp_path / "set.other", SPEC, META).abort()  # whose hidden folders look alike
    assert len(list(writers)) == COUNT - 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"meta": {**META, "seed": 4}}, "recorded with seed=3, and seed=4"),
        ({"meta": {**META, "env": {"name": "other"}}}, "env.name='none'"),
        ({"spec": EnvSpec(SPEC.obs, SPEC.action, 12.5, "velocity", 10)}, "max_steps=9"),
        ({"fps": 7}, "fps=12"),
    ],
)
def test_only_the_same_configuration_continues_a_set(change, words, tmp_path, whole):
    list(grown(tmp_path / "set", EPISODES[:2]))
    settings = {"spec": SPEC, "meta": META, **change}
    with pytest.raises(BurnishError, match=words):
        Writer(tmp_path / "set", settings.pop("spec"), settings.pop("meta"), resume=True, **settings)
    with pytest.raises(BurnishError, match="exists already"):
        Writer(tmp_path / "set", SPEC, META)
    stateless = Episode(**{**vars(EPISODES[2]), "sim_state": None})
    with (
        pytest.raises(BurnishError, match="other simulator states"),
        Writer(tmp_path / "set", SPEC, META, resume=True) as writer,
    ):
        writer.add(stateless)
    assert tree(tmp_path / "set") == whole[2] and len(list(tmp_path.iterdir())) == 1


def in_files_of_its_own(root: Path) -> None:
    """As LeRobot appends: a further file of ``meta/episodes``; our own tables lack its episode."""
    listed = root / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(listed)
    pq.write_table(table.slice(2), listed.with_name("file-001.parquet"))
    pq.write_table(table.slice(0, 2), listed)


def without_a_final(root: Path) -> None:
    place = root / "meta/final_obs.parquet"
    pq.write_table(pq.read_table(place).slice(0, 2), place)


@pytest.mark.parametrize("append", [in_files_of_its_own, without_a_final])
def test_what_another_program_has_extended_is_not_continued(append, tmp_path):
    list(grown(tmp_path / "set", EPISODES[:3]))
    Writer(tmp_path / "set", SPEC, META, resume=True).abort()  # the control
    append(tmp_path / "set")
    left = tree(tmp_path / "set")
    with pytest.raises(BurnishError, match="another program has added"):
        Writer(tmp_path / "set", SPEC, META, resume=True)
    assert tree(tmp_path / "set") == left and len(read_lerobot(tmp_path / "set")) == 3


def test_what_cannot_be_continued_is_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(BurnishError, match="no dataset that could be continued"):
        Writer(tmp_path / "empty", SPEC, META, resume=True)
    list(grown(tmp_path / "set", EPISODES[:3]))
    data = tmp_path / "set/data/chunk-000/file-000.parquet"
    data.write_bytes(data.read_bytes()[:-50])
    with pytest.raises(BurnishError, match="damaged and cannot be continued"):
        list(grown(tmp_path / "set", resume=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "set"]


def test_where_links_are_refused_files_are_copied(tmp_path, monkeypatch, whole):
    def refuse(*_, **__):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    list(grown(tmp_path / "set"))
    assert tree(tmp_path / "set") == whole[COUNT]


# ---- kill -9 ----


def grow_and_die(path: Path, operation: int, exchanges: bool, episodes: list[Episode], report: int) -> None:
    """Grow a set up to ``episodes``, report each publication, and die by SIGKILL just before the given operation on
    the disk. (What only reads, and the flushing, changes nothing that a kill could leave behind.)"""
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        if count == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(call):
        def wrapper(*arguments, **options):
            tick()
            return call(*arguments, **options)

        return wrapper

    def watch(event: str, arguments: tuple) -> None:
        creates = event == "open" and arguments[2] & os.O_CREAT
        if creates or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link"):
            tick()

    growing_folder._exchange = watched(growing_folder._exchange if exchanges else lambda one, two: False)
    pq.write_table = watched(pq.write_table)
    pq.ParquetWriter.write_table = watched(pq.ParquetWriter.write_table)
    sys.addaudithook(watch)
    for writer in grown(path, episodes, resume=True):
        os.write(report, bytes([len(writer.seeds)]))


def killed(path: Path, operation: int, exchanges: bool, episodes: list[Episode]) -> tuple[int, int]:
    """(exit status, episodes that were published for certain) of a process that was killed there."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            grow_and_die(path, operation, exchanges, episodes, writes)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writes)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with os.fdopen(reads, "rb") as file:
        return status, max(file.read(), default=0)


# From nothing: a first file, and the same grown. From one episode: the same grown, and a second file.
@pytest.mark.rotating(2)
@pytest.mark.parametrize(("begun", "exchanges"), [(1, True), (0, False)], ids=["exchange", "two renames"])
def test_death_before_each_single_file_operation_leaves_a_readable_set(
    begun, exchanges, tmp_path, monkeypatch, library, whole
):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a kill, unlike a power cut, loses nothing that was written
    path, operation, status, end = tmp_path / "lab/set", 0, -signal.SIGKILL, begun + 2
    absent_after_publishing, found, continued = 0, set(), set()
    while status == -signal.SIGKILL:
        operation += 1
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        if begun:
            shutil.copytree(library / str(begun), path)
        status, published = killed(path, operation, exchanges, EPISODES[:end])
        assert status in (0, -signal.SIGKILL)
        certain = max(begun, published)
        left = tree(path)
        if path.exists():
            (n,) = (n for n in whole if whole[n] == left)  # byte for byte a set that the readers have accepted
            assert certain <= n <= certain + 1
            found.add(n)
        else:
            assert certain == 0 or not exchanges
            absent_after_publishing += certain > 0
        # All that the next writer sees of the moment of death.
        scene = (path.exists(), *sorted(file.name for file in path.parent.glob(".*/*")), certain)
        if scene in continued:
            continue
        continued.add(scene)
        with Writer(path, SPEC, META, resume=True) as writer:
            assert len(writer.seeds) >= certain  # also what was hidden between two renames is found again
            for episode in EPISODES[len(writer.seeds) : end + 1]:
                writer.add(episode)
        assert tree(path) == whole[end + 1]
        assert [file.name for file in path.parent.iterdir()] == ["set"]
    assert operation > 50 and len(continued) > 5 and found == set(range(max(begun, 1), end + 1))
    # The fallback has a window, of one operation in each publication after the first; the exchange has none.
    assert absent_after_publishing == (0 if exchanges else 1)
