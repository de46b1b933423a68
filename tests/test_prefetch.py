"""Learning from data that lie in a file: a thread fetches each batch ahead, and nothing else differs."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from test_imitate import TRAIN, episodes, fingerprint, learner

import mdp
from burnish.offline.loop import Offline
from burnish.offline.replay import Replay
from burnish.offline.storage import Place
from burnish.policies.core.prefetch import Prefetch
from burnish.policies.data.on_disk import in_file
from burnish.policies.data.windows import Windows
from offline_lab import CONFIGS, build, recorded

UPDATES, SAVED = 8, 5  # in all, and before what was learnt is saved and taken up by another learner


def imitating(placed: bool):
    """An imitation learner of pictures, which lie in a file."""
    data = episodes(image=True)
    if placed:
        pictures = torch.cat([episode.obs["image.top"] for episode in data])
        file = in_file(tuple(pictures.shape), pictures.dtype)
        file.copy_(pictures)
        parts = file.split([len(episode) + 1 for episode in data])
        told = [replace(x, obs={**x.obs, "image.top": part}) for x, part in zip(data, parts, strict=True)]
        data = replace(data, episodes=told)
    made = learner("gaussian", replace(TRAIN, batch=4), image=True, data=data)
    assert made.windows.away == placed
    return made, made.update


def offline(placed: bool):
    """IQL from a replay whose columns lie in a file."""
    data = recorded(0)
    if placed:
        moved = Replay(len(data), seed=0, place=Place.file)
        moved.load_state_dict(data.state_dict())
        data = moved
    assert data.away == placed
    loop = Offline(build(CONFIGS["iql"], None, mdp.SPEC, data=data, seed=0), data, batch=32)
    return loop, loop.iterate


@pytest.mark.parametrize("make", [imitating, offline])
def test_what_is_fetched_ahead_teaches_what_the_loop_would_have_read(make, monkeypatch):
    """Saved in mid-run, while a batch waits that was fetched and not asked for, and taken up by another learner. The
    control: without putting that one back the run goes on with other rows."""
    readers, read = set(), {Windows: Windows.__getitem__, Replay: Replay.gather}

    def noted(kind):
        def reads(self, *given, **options):
            readers.add(threading.current_thread())
            return read[kind](self, *given, **options)

        return reads

    monkeypatch.setattr(Windows, "__getitem__", noted(Windows))
    monkeypatch.setattr(Replay, "gather", noted(Replay))

    def learnt(placed, saved):
        readers.clear()
        made, update = make(placed)
        for number in range(UPDATES):
            if number == saved:
                state = made.state_dict()
                made, update = make(placed)
                made.load_state_dict(state)
            update()
        return fingerprint(made), len(readers - {threading.main_thread()})

    plain, aside = learnt(False, None)
    assert aside == 0
    assert learnt(True, None) == (plain, 1) and learnt(True, SAVED) == (plain, 2)
    monkeypatch.setattr(Prefetch, "put_back", lambda self: setattr(self, "_next", None))
    assert learnt(True, SAVED)[0] != plain


@pytest.mark.gpu
def test_pictures_that_a_gpu_has_no_room_for_stay_in_host_memory(monkeypatch):
    """The control: where there is room, all go there."""
    data = episodes(image=True)
    spec = learner("gaussian", image=True).policy.spec
    here = Windows(data, spec).to("cuda")
    monkeypatch.setattr("burnish.policies.core.prefetch.free_bytes", lambda device: 10_000)
    split = Windows(data, spec).to("cuda")
    assert not here.away and split.away and split.columns["image.top"].device.type == "cpu"
    one, two = (windows[torch.arange(9)] for windows in (here, split))
    assert torch.equal(one.action, two.action)
    for key, x in one.obs.items():
        assert two.obs[key].device.type == "cuda" and torch.equal(x, two.obs[key])
