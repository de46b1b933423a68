"""Ranks that read the pictures of their own episodes alone, and learn what one process learns from all."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from lerobot_sets import write
from sharding_lab import shared
from test_imitate import TRAIN, episodes, learner
from test_ranks import CODE, ROUNDING, TORCHRUN

from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.ranks import Ranks
from burnish.policies.core.seed import generator
from burnish.policies.core.spec import PolicySpec
from burnish.policies.data import lerobot_images, lerobot_video, on_disk
from burnish.policies.data.episodes import share, split
from burnish.policies.data.lerobot import read_lerobot, write_lerobot
from burnish.policies.data.read import read_dataset
from burnish.policies.data.windows import Windows
from burnish.policies.runs.checkpoint import newest

SIZE = 3


def of(rank: int, size: int, history: int) -> Windows:
    ranks = Ranks(rank, size)
    train, _ = (shared(ranks) if size > 1 else episodes(image=True)).split(TRAIN.valid_fraction, 0)
    return Windows(
        train, PolicySpec(train.spec.obs, train.spec.action, 4, 2, history - 1, history=history), ranks=ranks
    )


def test_every_episode_has_one_rank_and_the_first_has_those_for_validation():
    parts = [share(20, 0.2, 0, Ranks(rank, SIZE)) for rank in range(SIZE)]
    train, valid = split(20, 0.2, 0)
    assert sorted(i for part in parts for i in part) == list(range(20)) and parts[0] >= set(valid)
    assert [len(part & set(train)) for part in parts] == [6, 5, 5]
    with pytest.raises(BurnishError, match="share_episodes=true divides 2 episodes among 3 ranks"):
        share(3, 0.3, 0, Ranks(0, SIZE))


@pytest.mark.parametrize("version", ["v2.1", "v3.0", "pictures"])
@pytest.mark.parametrize("kept", ["memory", "disk"])
def test_only_own_pictures_are_decoded_and_all_numbers_read(version, kept, tmp_path, monkeypatch):
    if version == "pictures":
        write_lerobot(episodes(image=True), tmp_path / "set")
    else:
        write(tmp_path / "set", version)
    whole, decoded = read_lerobot(tmp_path / "set"), []
    for place, name in ((lerobot_video, "decode"), (lerobot_images, "decode")):
        was = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *given, was=was: (decoded.append(None), was(*given))[1])
    if kept == "disk":
        monkeypatch.setattr("burnish.policies.data.lerobot.memory", lambda: 1 << 24)
        monkeypatch.setattr(on_disk.PictureFiles, "__init__", files := Files(on_disk.PictureFiles.__init__))
    found = read_lerobot(tmp_path / "set", mine=lambda total: {1, total - 1})
    per_episode = 2 if version == "pictures" else 1  # frames, and the final one
    assert len(decoded) == 2 * per_episode
    assert [each.elsewhere for each in found] == [i not in (1, len(whole) - 1) for i in range(len(whole))]
    for each, other in zip(found, whole, strict=True):
        assert torch.equal(each.action, other.action)
        for key, x in other.obs.items():
            hidden = each.elsewhere and key.startswith("image.")
            assert torch.equal(each.obs[key], torch.zeros_like(x) if hidden else x)
            assert not hidden or each.obs[key].untyped_storage().nbytes() == 1, "what was not read takes no memory"
    if kept == "disk":
        assert files.rows == [] or files.rows == [sum(len(x) + 1 for x in found if not x.elsewhere)]


class Files:
    """How many pictures a file was made for."""

    def __init__(self, was):
        self.was, self.rows = was, []

    def __get__(self, owner, kind=None):
        return lambda shapes, rows: (self.rows.append(rows), self.was(owner, shapes, rows))[1]


class Exchange:
    """What ranks send to each other, in one process: each speaks in its turn, and is answered the second time."""

    def __init__(self, patch):
        self.said: list[list[torch.Tensor]] = []
        patch.setattr(torch.distributed, "all_to_all_single", self)

    def __call__(self, found, sent, received, given):
        self.said.append([*sent.split(given)])
        if len(self.said) > SIZE:
            rank = len(self.said) - SIZE - 1
            found.copy_(torch.cat([parts[rank] for parts in self.said[:SIZE]]))
            assert [len(parts[rank]) for parts in self.said[:SIZE]] == received

    def all(self, of_rank):
        self.said.clear()
        return [of_rank(rank % SIZE) for rank in range(2 * SIZE)][SIZE:]


@pytest.mark.parametrize("history", [1, 2])
@pytest.mark.parametrize("batch", [3, 30])
def test_the_ranks_have_the_batch_of_one_process(history, batch, monkeypatch):
    """Bit for bit, so every row is drawn equally often. Of a batch of three, a rank may own nothing."""
    exchange, alone, parts = Exchange(monkeypatch), of(0, 1, history), [of(rank, SIZE, history) for rank in range(SIZE)]
    source = generator(0, "rows")
    for _ in range(10):
        index = alone.draw(batch, source)
        found = exchange.all(partial(lambda index, rank: parts[rank].share(index), index))
        wanted = [alone[Ranks(rank, SIZE).rows(index)] for rank in range(SIZE)]
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.obs.keys() == theirs.obs.keys()
            assert all(torch.equal(mine.obs[key], x) for key, x in theirs.obs.items())
            assert torch.equal(mine.action, theirs.action) and torch.equal(mine.mask, theirs.mask)
        assert batch == 3 or not torch.equal(found[0].obs["image.top"], wanted[1].obs["image.top"]), "the control"
    assert sum(len(each.columns["image.top"]) for each in parts) == len(alone), "pictures are held once"
    assert all(len(each.columns["state"]) == len(each.action) == len(alone) for each in parts), "and numbers by all"


def test_one_rank_tries_and_all_normalise_by_all_numbers(monkeypatch):
    monkeypatch.setattr(Ranks, "averaged", lambda self, network, loss: loss)
    alone = learner(image=True)
    parts = [learner(image=True, data=shared(Ranks(r, 2)), ranks=Ranks(r, 2)) for r in range(2)]
    for made in parts:
        assert all(torch.equal(x, y) for x, y in zip(alone.average.buffers(), made.average.buffers(), strict=True))
    assert parts[0].validate() == alone.validate() and parts[1].validate() == {}


@pytest.mark.slow
def test_two_ranks_that_share_episodes_learn_what_one_process_learns(tmp_path):
    """From the command line, with the policy shared too."""
    write_lerobot(episodes(image=True), tmp_path / "set")
    words = ["pretrain", "policy=gaussian", "policy.hidden=[16]", f"data={tmp_path}/set", "train.batch=16"]
    words += ["train.steps=20", "eval.episodes=0", "train.shard=true", "share_episodes=true"]
    assert main([*words, f"out={tmp_path}/one"]) == 0
    ranks = [*TORCHRUN, "--no-python", sys.executable, "-c", CODE, *words, f"out={tmp_path}/two"]
    subprocess.run(ranks, check=True, capture_output=True, timeout=120)
    one, two = (newest(tmp_path / name / "checkpoints").children["policy"].state for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert max(float((one[name].double() - two[name].double()).abs().max()) for name in one) < ROUNDING


def test_a_set_of_another_format_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", observations=np.zeros((4, 2)), actions=np.zeros((4, 1)))
    with pytest.raises(BurnishError, match="is a npz dataset, which is read whole; share_episodes=true takes those of"):
        read_dataset(tmp_path / "a.npz", mine=lambda total: range(total))
