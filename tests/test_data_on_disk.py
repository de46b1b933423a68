"""Pictures that memory cannot hold are read from the disk: the same episodes and windows, bit for bit. Those that a
verb does not look at are not unpacked at all."""

import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from conftest import demand
from test_lerobot import assert_same, bits

from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, ChunkConfig, EnvSpec, ObsSpec
from burnish.policies.data import lerobot, lerobot_images, on_disk
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.data.lerobot import read_lerobot, write_lerobot
from burnish.policies.data.mirror import Mirror, mirrored
from burnish.policies.data.read import read_dataset
from burnish.policies.data.windows import Windows
from format_lab import WRITERS, hdf5

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


def test_a_part_of_such_a_set_can_be_taken(folder, small, monkeypatch, tmp_path):
    monkeypatch.setattr(on_disk.shutil, "disk_usage", lambda _: namedtuple("usage", "free")(0))
    for words in ([], [f"episodes=0:{EPISODES}"]):  # the control
        assert main(["data", "convert", str(folder), f"out={tmp_path}/whole", *words]) == 2
    assert main(["data", "convert", str(folder), f"out={tmp_path}/part", "episodes=3"]) == 0
    assert main(["data", "convert", str(folder), f"out={tmp_path}/numbers", "keys=state"]) == 0
    assert_same(read_lerobot(tmp_path / "part"), Episodes([episode(3)], SPEC))
    assert len(read_lerobot(tmp_path / "numbers")) == EPISODES


GROUPS = {"robomimic": "data/demo_{}", "minari": "episode_{}", "maniskill": "traj_{}"}


@pytest.mark.parametrize("name", GROUPS)
def test_a_chosen_episode_is_all_that_is_read(name, tmp_path, capsys):
    path, h5py = WRITERS[name](tmp_path), demand("h5py")
    whole = read_dataset(path)
    with hdf5(path / "data/main_data.hdf5" if path.is_dir() else path, "r+") as file:
        for number in (0, 1):
            del file[place := GROUPS[name].format(number + 9 * (name == "robomimic"))]
            file[place] = h5py.SoftLink("/nowhere")
    words = ["data", "convert", str(path), f"out={tmp_path}/out"]
    for others in ([], ["episodes=1:"], ["drop_bad=true"]):
        assert main([*words, *others]) == 2 and "a link to another place" in capsys.readouterr().err, "the control"
    assert main([*words, "episodes=-1:"]) == 0
    (one,) = found = read_lerobot(tmp_path / "out")
    assert one.seed == whole[2].seed and torch.equal(one.obs["state"], whole[2].obs["state"])
    assert found.meta.get("masks") == ({"train": [0], "valid": []} if name == "robomimic" else None)
    assert main([*words, "episodes=2:1"]) == 2 and "none of the 3 episodes is chosen" in capsys.readouterr().err


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


def test_the_mirror_image_of_pictures_on_the_disk_is_there_too(folder, request):
    mirror = Mirror(flip=["image.top"], negate=["state.0"])
    memory = read_lerobot(folder)
    request.getfixturevalue("small")
    with pytest.warns(UserWarning, match=r"GiB of pictures are more than memory can hold"):
        disk = read_lerobot(folder)
    with pytest.warns(UserWarning, match=r"GiB of pictures are more than memory can hold"):
        turned = mirrored(disk, mirror)
    assert on_disk.rows_in_file([episode.obs["image.top"] for episode in turned]) is not None
    assert_same(turned, mirrored(memory, mirror))
    assert_same(disk, memory)
    parts = [episode.obs["image.top"] for episode in mirrored(memory, mirror)]
    assert on_disk.rows_in_file(parts[:1]) is None, "the control: what fits into memory stays there"


@pytest.mark.parametrize(
    ("words", "unpacked"),
    [
        (["info"], 0),
        (["info", "reference=SET"], 0),
        (["show"], 0),
        (["show", "out=e.svg"], 0),
        (["show", "episode=3", "out=e.mp4"], STEPS + 1),
        (["convert", "out=some", "episodes=3:5"], 2 * (STEPS + 1)),
        (["convert", "out=numbers", "keys=state"], 0),
        (["stats"], EPISODES * (STEPS + 1)),  # which looks for pictures that repeat others
    ],
    ids=str,
)
def test_pictures_that_are_not_looked_at_are_not_unpacked(words, unpacked, folder, tmp_path, monkeypatch):
    found, was = [], lerobot_images.decode
    monkeypatch.setattr(lerobot_images, "decode", lambda cells, shape: (found.append(len(cells)), was(cells, shape))[1])
    monkeypatch.chdir(tmp_path)
    assert main(["data", words[0], str(folder), *(word.replace("SET", str(folder)) for word in words[1:])]) == 0
    assert sum(found) == unpacked


def test_a_film_shows_its_own_episode(folder, tmp_path):
    av = pytest.importorskip("av")
    assert main(["data", "show", str(folder), "episode=3", f"out={tmp_path}/e.mp4"]) == 0
    with av.open(f"{tmp_path}/e.mp4") as film:
        means = [frame.to_ndarray(format="rgb24").mean((0, 1)) for frame in film.decode(video=0)]
    known = read_lerobot(folder)[3].obs["image.top"].float().mean((2, 3)).numpy()
    assert len(means) == STEPS + 1 and abs(means - known).mean() < 20


def test_an_episode_that_is_not_there_is_said(folder, capsys):
    for number in (EPISODES, -1):
        assert main(["data", "show", str(folder), f"episode={number}", "out=e.mp4"]) == 2
        assert f"there is no episode {number}; the set has {EPISODES}" in capsys.readouterr().err
