"""Simulator states on disk: any frame of a recording can be entered again, and what follows is the recording."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from verb_lab import refused

import lerobot_v3_reader
from burnish.policies.cli.cli import main
from burnish.policies.core.clock import Clocked
from burnish.policies.core.errors import BurnishError
from burnish.policies.data import lerobot_writer
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.data.lerobot import read_lerobot, write_lerobot
from burnish.policies.data.lerobot_sim_state import read_sim_state
from burnish.sim.build import make_env, world_from
from burnish.sim.point_reach import PointReach

WORLD = ["env=point_reach", "env.order=acceleration", "env.noise=0.5", "env.image=true", "env.max_steps=15"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("states") / "set"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lerobot_writer, "MEGABYTE", 200)  # 20 kB a file
        words = ["expert=noisy", "episodes=7", "worlds=3", "sim_state=true", f"out={out}"]
        assert main(["collect", *WORLD, *words]) == 0
    assert len(list(out.glob("sim_state/chunk-000/*"))) == len(list(out.glob("data/chunk-000/*"))) > 1
    return out


def replays(folder: Path, number: int, frame: int, at: int) -> bool:
    """Does the episode go on from ``frame`` as it was recorded, in a world restored from the state of frame ``at``?"""
    episodes = read_lerobot(folder)
    episode = episodes[number]
    env: Any = make_env(world_from(episodes.meta["env"]), 1, seed=99)
    env.reset()
    env.load_state_dict(read_sim_state(folder, number, at))
    for t in range(frame, len(episode)):
        step = env.step(episode.action[t][None])
        if not all(torch.equal(x[0], episode.obs[key][t + 1]) for key, x in step.obs.items()):
            return False
    return bool(step.terminated) == episode.terminated


def test_a_world_restored_in_mid_episode_goes_on_as_recorded(folder):
    for number in range(7):
        assert replays(folder, number, frame=5, at=5)
    assert replays(folder, 3, frame=0, at=0)
    assert not replays(folder, 3, frame=5, at=6), "another frame's state is another future"


def test_several_worlds_are_restored_from_rows(folder):
    episodes = read_lerobot(folder)
    rows = [read_sim_state(folder, 2, 4), read_sim_state(folder, 5, 9)]
    env: Any = make_env(world_from(episodes.meta["env"]), 2)
    env.reset()
    env.load_state_dict({key: torch.cat([row[key] for row in rows]) for key in rows[0]})
    step = env.step(torch.stack([episodes[2].action[4], episodes[5].action[9]]))
    for key, x in step.obs.items():
        assert torch.equal(x, torch.stack([episodes[2].obs[key][5], episodes[5].obs[key][10]]))


def test_the_set_stays_one_for_lerobot_and_without_states_is_the_same(folder, tmp_path):
    frames = lerobot_v3_reader.read(folder)
    assert main(["collect", *WORLD, "expert=noisy", "episodes=7", "worlds=5", f"out={tmp_path}/plain"]) == 0
    plain = lerobot_v3_reader.read(tmp_path / "plain")
    assert not (tmp_path / "plain/sim_state").exists()
    assert [frame["observation.state"] for frame in frames] == [frame["observation.state"] for frame in plain]
    assert [frame["action"] for frame in frames] == [frame["action"] for frame in plain]


def test_every_bit_and_every_type_comes_back(tmp_path):
    strange = torch.tensor([math.nan, -0.0, math.inf, 5e-324, -math.nan], dtype=torch.float64)
    payload = torch.tensor([0x7FF8000000000123], dtype=torch.int64).view(torch.float64)  # a NaN of its own
    g = torch.Generator().manual_seed(0)
    made = read_lerobot(write_lerobot(some_episodes(g, strange, payload), tmp_path / "set"))
    state = some_episodes(torch.Generator().manual_seed(0), strange, payload)[0].sim_state
    for t in range(len(made[0]) + 1):
        row = read_sim_state(tmp_path / "set", 0, t)
        assert list(row) == list(state)
        for key, x in state.items():
            assert row[key].dtype == x.dtype and row[key].shape == (1, *x.shape[1:])
            assert row[key].numpy().tobytes() == x[t].numpy().tobytes(), key


def some_episodes(g: torch.Generator, strange: torch.Tensor, payload: torch.Tensor) -> Episodes:
    env = PointReach(1)
    steps = 4
    state = {
        "double": strange,
        "payload": payload.repeat(5),
        "matrix": torch.randn(5, 2, 3, generator=g),
        "count": torch.randint(-(2**62), 2**62, (5,), generator=g),
        "byte": torch.randint(0, 255, (5, 3), generator=g, dtype=torch.uint8),
        "flag": torch.rand(5, generator=g) > 0.5,
        "none": torch.zeros(5, 0),
    }
    obs = {key: torch.zeros(steps + 1, *shape) for key, shape in env.spec.obs.shapes.items()}
    action, reward = torch.zeros(steps, env.spec.action.dim), torch.zeros(steps)
    return Episodes([Episode(obs, action, reward, True, False, True, 0, sim_state=state)], env.spec)


def test_what_is_not_there_is_one_sentence(folder, tmp_path):
    for episode, frame, words in ((7, 0, "7 episodes, but none of number 7"), (0, 16, "between 0 and"), (0, -1, "-1")):
        with pytest.raises(BurnishError, match=words):
            read_sim_state(folder, episode, frame)
    with pytest.raises(BurnishError, match="cannot be read"):
        read_sim_state(tmp_path, 0, 0)
    episodes = read_lerobot(folder)
    write_lerobot(episodes, tmp_path / "plain")
    with pytest.raises(BurnishError, match="without simulator states"):
        read_sim_state(tmp_path / "plain", 0, 0)


def test_a_row_group_of_another_episode_is_noticed(folder, tmp_path):
    import shutil

    shutil.copytree(folder, tmp_path / "set")
    path = tmp_path / "set/sim_state/chunk-000/file-000.parquet"
    with pq.ParquetFile(path) as parquet:
        groups = [parquet.read_row_group(i) for i in range(parquet.num_row_groups)]
    with pq.ParquetWriter(path, groups[0].schema) as writer:
        for group in reversed(groups):
            writer.write_table(group)
    with pytest.raises(BurnishError, match="other frames than those of episode 0"):
        read_sim_state(tmp_path / "set", 0, 0)


def test_worlds_that_cannot_save_their_state_are_refused(tmp_path, capsys, monkeypatch):
    words = ["collect", "env=point_reach", "episodes=2", "sim_state=true", f"out={tmp_path}/set"]
    monkeypatch.delattr(Clocked, "state_dict")  # which the world inherits
    assert "the world point_reach cannot save its state" in refused(capsys, *words)
    monkeypatch.setattr(PointReach, "state_dict", lambda self: {"clock": torch.zeros(7)}, raising=False)
    assert "['clock'] holds no row per world" in refused(capsys, *words)
    assert list(tmp_path.iterdir()) == []
