"""Where a replay keeps its columns: memory that grows, files, and host memory beside a GPU."""

from __future__ import annotations

import shutil
import tempfile
import threading

import pytest
import torch

from aim_lab import Aim
from burnish.finetune.build import prepare
from burnish.finetune.loops import OffPolicyConfig
from burnish.finetune.methods.rlpd import RLPDConfig
from burnish.offline import replay as replays
from burnish.offline import storage
from burnish.offline.replay import FIRST, Replay
from burnish.offline.sources import Mixture, ahead
from burnish.policies.core import prefetch
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.tree import leaves
from burnish.policies.runs import checkpoint


def a_row(size: int, picture: torch.Tensor) -> tuple[dict, dict, dict]:
    n = len(picture)
    never = torch.zeros(n, dtype=torch.bool)
    facts = {"reward": torch.zeros(n), "discount": torch.ones(n), "ended": never, "terminated": never}
    facts |= {"action": torch.zeros(n, 1, size), "steps": torch.ones(n, dtype=torch.int64)}
    return {"image.top": picture, "state": torch.zeros(n, 2)}, facts, {"image.top": picture, "state": torch.ones(n, 2)}


def pictures(row: int, side: int = 8) -> torch.Tensor:
    return torch.full((2, 3, side, side), row % 251, dtype=torch.uint8)


def test_memory_is_taken_as_it_is_needed():
    replay = Replay(1_000_000, 2)
    replay.add(*a_row(1, pictures(0)))
    assert len(replay._obs["state"]) == FIRST and replay.rows == 500_000
    for row in range(1, FIRST + 2):
        replay.add(*a_row(1, pictures(row)))
    assert len(replay._obs["state"]) == 2 * FIRST
    assert replay.latest()["obs"]["image.top"][:, 0, 0, 0, 0].tolist() == [row % 251 for row in range(FIRST + 2)]


def test_pictures_that_memory_cannot_hold_are_kept_in_a_file(monkeypatch, tmp_path):
    """A ring that has gone around, beside one in memory; nothing of the file is left, by name, while it is used."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    plain, spilled = Replay(40, 2, seed=1), Replay(40, 2, seed=1)
    for row in range(27):
        plain.add(*a_row(1, pictures(row)))
    monkeypatch.setattr(prefetch, "free_bytes", lambda device: 40 * 100)  # the pictures alone have 40 * 192 bytes
    with pytest.warns(UserWarning, match=r"image\.top of the replay may grow to"):
        spilled.add(*a_row(1, pictures(0)))
    for row in range(1, 27):
        spilled.add(*a_row(1, pictures(row)))
    assert spilled._places == {**plain._places, "image.top": storage.Place.file} and not list(tmp_path.iterdir())
    one, two = plain.sample(64, n_step=2), spilled.sample(64, n_step=2)
    assert all(torch.equal(one[part]["image.top"], two[part]["image.top"]) for part in ("obs", "next_obs"))
    with pytest.warns(UserWarning):
        again = Replay(40, 2, seed=1)
        again.load_state_dict(spilled.state_dict())
    assert torch.equal(again.sample(8)["obs"]["image.top"], spilled.sample(8)["obs"]["image.top"])


def test_a_replay_that_nothing_can_hold_is_refused_before_anything_is_played(monkeypatch):
    """A million decisions with a picture of 128 by 128: 46 GiB. The control: the file system has room."""
    monkeypatch.setattr(prefetch, "free_bytes", lambda device: 8 * 2**30)
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 20 * 2**30))
    with pytest.raises(BurnishError, match=r"needs 45\.8 GiB.*smaller loop\.capacity"):
        Replay(1_000_000, 2).add(*a_row(1, pictures(0, 128)))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 200 * 2**30))
    with pytest.warns(UserWarning, match="which is slower"):
        Replay(1_000_000, 2).add(*a_row(1, pictures(0, 128)))


@pytest.mark.parametrize("place", [x for x in storage.Place if x is not storage.Place.auto])
def test_the_place_that_a_setting_names_is_taken_or_refused(monkeypatch, place):
    def made(capacity):
        replay = Replay(capacity, 2, place=place)
        replay.add(*a_row(1, pictures(7)))
        return replay

    monkeypatch.setattr(prefetch, "free_bytes", lambda device: 2**20)
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 2**20))
    replay = made(40)
    assert {replay._places[key] for key in ("image.top", "state", "action")} == {place}
    assert replay.away == (place is storage.Place.file) and int(replay.sample(1)["obs"]["image.top"].max()) == 7
    with pytest.raises(BurnishError, match=rf"loop\.place={place.value} is to hold .*loop\.place=auto"):
        made(100_000)


@pytest.mark.parametrize("second", [None, {"n": 3}, {"around": (1, 1)}])
def test_batches_that_are_drawn_ahead_are_those_of_the_source(second):
    """Updates that ask once, and updates of which every other one asks for something else as well. In the end the
    generators are where they would be, and the control: without that they are not."""
    memories = [Replay(40, 2, seed=seed) for seed in (1, 2)]
    for replay in memories:
        for row in range(15):
            replay.add(*a_row(1, pictures(row)))
    source = Mixture(*memories, batch=8, share=None)
    generators = [replay.generator for replay in memories]
    begun, states = [x.get_state() for x in generators], []

    def asked(sources, threads):
        for generator, state in zip(generators, begun, strict=True):
            generator.set_state(state)
        sample, batches = Mixture.sample, []

        def noted(self, *given, **options):
            threads.add(threading.current_thread())
            return sample(self, *given, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Mixture, "sample", noted)
            for number, each in enumerate(sources):
                batches.append(each.sample())
                if second is not None and number % 2:
                    batches.append(each.sample(**second))
        states.append([x.get_state() for x in generators])
        return [x for batch in batches for x in leaves(batch)]

    one, two = set(), set()
    plain, drawn = asked([source] * 6, one), asked(ahead(source, memories, 6), two)
    assert len(plain) == len(drawn) and all(map(torch.equal, plain, drawn)) and len(one) == 1 < len(two)
    assert all(map(torch.equal, *states))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch.Prefetch, "put_back", lambda self: setattr(self, "_next", None))
        other = asked(ahead(source, memories, 6), set())
    assert all(map(torch.equal, plain, other)) == (second is None)


def test_a_replay_in_a_file_teaches_the_same():
    def learnt(place):
        sizes = {"capacity": 64, "warmup": 8, "updates_per_decision": 2, "batch": 8, "place": place}
        config = RLPDConfig(loop=OffPolicyConfig(**sizes))
        loop = prepare(config, None, Aim(2, 0), seed=3)
        for _ in range(12):
            loop.iterate()
        assert loop.replay.away == (place is storage.Place.file)
        return list(leaves({"loop": loop.replay.latest(), "agent": dict(loop.learner.policy.state_dict())}))

    assert all(map(torch.equal, learnt(storage.Place.device), learnt(storage.Place.file)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pictures_that_the_gpu_cannot_hold_are_kept_in_host_memory(monkeypatch):
    plain, moved = Replay(40, 2, seed=1, device="cuda"), Replay(40, 2, seed=1, device="cuda")
    for replay, free in ((plain, 2**40), (moved, 40 * 100)):
        monkeypatch.setattr(prefetch, "free_bytes", lambda device, free=free: free if device.type == "cuda" else 2**40)
        for row in range(27):
            replay.add(*a_row(1, pictures(row)))
    assert moved._obs["image.top"].device.type == "cpu" and plain._obs["image.top"].device.type == "cuda"
    one, two = plain.sample(64)["obs"]["image.top"], moved.sample(64)["obs"]["image.top"]
    assert two.device.type == "cuda" and torch.equal(one, two)


def test_a_checkpoint_adds_the_rows_that_came_since_the_last_one(tmp_path, monkeypatch):
    """Segments of four rows of two worlds, in a ring of twelve rows."""
    replay = Replay(24, 2)
    size = sum(x.numel() * x.element_size() for tree in a_row(1, pictures(0))[:2] for x in tree.values())
    monkeypatch.setattr(replays, "SEGMENT", 4 * size + size // 2)

    def saved(adds, before=None):
        for _ in range(adds):
            replay.add(*a_row(1, pictures(replay.added)))
        path = checkpoint.save(tmp_path / str(replay.added), config={}, state=replay.state_dict(), before=before)
        return path, [file.stat().st_ino for file in sorted(path.glob("part-*"))]

    first, a = saved(6)
    second, b = saved(5, first)
    assert len(a) == 2 and len(b) == 3
    assert b[0] == a[0] and b[1] != a[1], "a full segment is shared, one that has grown is not"
    third, c = saved(3, second)  # rows 0 and 1 are written over, and row 11 for the first time
    assert len(c) == 3 and c[0] != b[0] and c[1] == b[1] and c[2] != b[2]
    shutil.rmtree(first)
    shutil.rmtree(second)
    twin = Replay(24, 2)
    twin.load_state_dict(checkpoint.load(third).state)
    assert torch.equal(twin.latest()["obs"]["image.top"], replay.latest()["obs"]["image.top"])
    assert twin.latest()["obs"]["image.top"][:, 0, 0, 0, 0].tolist() == list(range(2, 14))


def test_a_state_of_older_versions_holds_all_rows_as_one():
    replay, twin = Replay(12, 2), Replay(12, 2)
    for row in range(5):
        replay.add(*a_row(1, pictures(row)))
    state = replay.state_dict()
    (rows,) = state.pop("segments")
    del state["worlds"]
    twin.load_state_dict({**state, **rows})
    assert twin.latest()["obs"]["image.top"][:, 0, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
