"""Pictures that memory cannot hold are read from the disk: the same episodes and windows, bit for bit."""

import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from test_lerobot import assert_same, bits

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, ChunkConfig, EnvSpec, ObsSpec
from burnish.policies.data import lerobot, on_disk
from burnish.policies.data.episodes import Episode, Episodes, Windows
from burnish.policies.data.lerobot import read_lerobot, write_lerobot

SIDE, EPISODES, STEPS = 128, 20, 50
PIXELS = 3 * SIDE**2
FRAMES = EPISODES * STEPS
SPEC = EnvSpec(
    ObsSpec({"state": (2,), "image.top": (3, SIDE, SIDE)}), ActionSpec((-1.0,), (1.0,)), 10.0, "velocity", STEPS
)


def episode(seed: int) -> Episode:
    g = torch.Generator().manual_seed(seed)
    colours = torch.randint(0, 256, (STEPS + 1, 3, 1, 1), generator=g, dtype=torch.uint8)
    obs = {"state": torch.randn(STEPS + 1, 2, generator=g), "image.top": colours.expand(-1, -1, SIDE, SIDE).clone()}
    return Episode(obs, torch.rand(STEPS, 1, generator=g), torch.zeros(STEPS), False, True, False, seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """49 MB of pictures."""
    return write_lerobot(
        Episodes([episode(seed) for seed in range(EPISODES)], SPEC), tmp_path_factory.mktemp("a") / "set"
    )


@pytest.fixture
def small(monkeypatch):
    """A machine whose memory holds two episodes, and the numbers of all."""
    monkeypatch.setattr(lerobot, "memory", lambda: 8 * STEPS * PIXELS)


CHUNK = ChunkConfig(horizon=4, execute=2, history=3)


def anonymous_mb() -> float:
    """Memory of this process that is no file's."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def grown_mb(folder: str) -> float:
    """By reading a set that memory cannot hold, and drawing from it, when the readers have been warmed up."""
    first = read_lerobot(folder)
    lerobot.memory = lambda: 8 * STEPS * PIXELS
    before = anonymous_mb()
    for part in read_lerobot(folder).split(0.2, seed=1):
        Windows(part, part.policy_spec(CHUNK)).sample(16, torch.Generator().manual_seed(0))
    del first
    return anonymous_mb() - before


def test_pictures_on_the_disk_are_not_in_memory(folder):
    """In a process of its own: other tests of this one leave memory to which the next ones help themselves, or not."""
    program = "import sys, test_data_on_disk as t; print(t.grown_mb(sys.argv[1]))"
    words = [sys.executable, "-W", "ignore", "-c", program, str(folder)]
    said = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    assert float(said) < 0.3 * FRAMES * PIXELS / 2**20, "the pictures are in memory after all"


def test_windows_on_the_disk_are_those_in_memory(folder, request):
    chunk = CHUNK
    memory = read_lerobot(folder)
    request.getfixturevalue("small")
    with pytest.warns(UserWarning, match=r"GiB of pictures are more than memory can hold"):
        disk = read_lerobot(folder)
    parts = [x.split(0.2, seed=1) for x in (memory, disk)]
    for one, two in zip(*parts, strict=True):  # for training, and for validation
        two_windows = Windows(two, two.policy_spec(chunk))
        drawn = two_windows.sample(16, torch.Generator().manual_seed(0))
        assert "image.top" not in two_windows.columns
        known = Windows(one, one.policy_spec(chunk)).sample(16, torch.Generator().manual_seed(0))
        assert list(drawn.obs) == list(known.obs) and drawn.obs["image.top"].shape == (16, 3, 3, SIDE, SIDE)
        assert all(bits(drawn.obs[key]) == bits(known.obs[key]) for key in known.obs)
        assert bits(drawn.action) == bits(known.action) and bits(drawn.mask) == bits(known.mask)
    assert_same(disk, memory)
    mixed = Episodes([memory[0], disk[1]], SPEC)  # control: not of one file, so they are copied
    assert "image.top" in Windows(mixed, mixed.policy_spec(chunk)).columns


def test_a_disk_without_room_is_said(folder, small, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(on_disk.shutil, "disk_usage", lambda _: usage(FRAMES * PIXELS))
    with pytest.raises(BurnishError, match=r"its pictures need 0\.0\d+ GiB, more than memory can hold.*TMPDIR"):
        read_lerobot(folder)


def test_a_file_that_cannot_be_mapped_is_said(folder, small, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("unable to mmap 1 bytes from file </tmp/x>: Cannot allocate memory (12)")

    monkeypatch.setattr(on_disk.torch, "from_file", full)
    with pytest.warns(UserWarning), pytest.raises(BurnishError, match="unable to mmap"):
        read_lerobot(folder)


def test_an_episode_that_memory_cannot_hold_is_refused(folder, monkeypatch):
    monkeypatch.setattr(lerobot, "memory", lambda: STEPS * PIXELS)
    with pytest.warns(UserWarning), pytest.raises(BurnishError, match="an episode that is larger than half of memory"):
        read_lerobot(folder)


def test_numbers_have_to_fit(folder, monkeypatch):
    monkeypatch.setattr(lerobot, "memory", lambda: 1000)
    with pytest.raises(BurnishError, match=f"promises {FRAMES} frames of 8 bytes, more than half of the"):
        read_lerobot(folder)
