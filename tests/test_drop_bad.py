"""`burnish data convert drop_bad=true`: the good episodes of a set of any format, and a word on each of the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_lerobot import make_episodes

from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.data.lerobot import write_lerobot
from burnish.policies.data.lerobot_sim_state import read_sim_state
from burnish.policies.data.read import read_dataset
from format_lab import LENGTHS, WRITERS, hdf5

torch.set_num_threads(1)

FLAT = sum(LENGTHS[:1])  # first row of the second episode in a file of flat arrays


def lerobot(folder: Path) -> Path:
    return write_lerobot(make_episodes(3), folder / "set")


def spoilt(name: str, path: Path, value: float) -> None:
    """Its second episode holds ``value`` among its numbers."""
    grouped = {"robomimic": "data/demo_10/actions", "minari": "episode_1/rewards", "maniskill": "traj_1/obs/agent/qpos"}
    if name == "lerobot":
        rewrite(path, "next.reward", 1, value)
    elif path.suffix == ".npz":
        with np.load(path) as arrays:
            columns = {key: np.array(x) for key, x in arrays.items()}
        column = columns["rewards"] if name == "npz" else columns["observations"]
        column[FLAT + (name == "ogbench")] = value  # OGBench has a row more in each
        np.savez(path, **columns)  # pyright: ignore[reportArgumentType]
    else:
        with hdf5(path if path.is_file() else path / "data" / "main_data.hdf5", "r+") as file:
            file[grouped.get(name, "observations")][0 if name in grouped else FLAT] = value


def rewrite(folder: Path, column: str, row: int, value: Any) -> None:
    (path,) = folder.glob("data/*/*.parquet")
    table = pq.read_table(path)
    values = table[column].to_pylist()
    values[row] = value
    at = table.column_names.index(column)
    pq.write_table(table.set_column(at, table.field(at), pa.array(values, table.field(at).type)), path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [*WRITERS, "lerobot"])
def test_the_good_episodes_of_every_format_are_kept(name, value, tmp_path, capsys):
    path = {**WRITERS, "lerobot": lerobot}[name](tmp_path)
    good = read_dataset(path)
    spoilt(name, path, value)
    kind = "NaN" if np.isnan(value) else "an infinite value"
    for words in (["info", str(path)], ["convert", str(path), f"out={tmp_path}/refused"]):
        assert main(["data", *words]) == 2
        said = capsys.readouterr().err
        assert f": it has {kind} in" in said and f"burnish data convert {path} out=... drop_bad=true" in said
    assert not (tmp_path / "refused").exists()
    assert main(["data", "convert", str(path), f"out={tmp_path}/kept", "drop_bad=true"]) == 0
    said = capsys.readouterr().out
    assert "1 of 3 episodes cannot be used" in said and "episode 1: " in said and f"{kind} in" in said
    kept = read_dataset(tmp_path / "kept")
    assert len(kept) == 2
    for one, two in zip(kept, (good[0], good[2]), strict=True):
        assert torch.equal(one.action, two.action) and torch.equal(one.reward, two.reward) and one.seed == two.seed
        assert all(torch.equal(x, one.obs[key]) for key, x in two.obs.items())


def test_a_set_without_bad_episodes_is_converted_whole(tmp_path, capsys):
    path = WRITERS["npz"](tmp_path)
    assert main(["data", "convert", str(path), f"out={tmp_path}/kept", "drop_bad=true"]) == 0
    assert "cannot be used" not in capsys.readouterr().out and len(read_dataset(tmp_path / "kept")) == 3


def test_numbers_are_those_of_the_set_with_its_bad_episodes(tmp_path, capsys):
    """Numbers in `episodes=`, and in the lists of robomimic, of which demo_9 and demo_11 are for training."""
    path = WRITERS["robomimic"](tmp_path)
    spoilt("robomimic", path, float("nan"))
    words = ["data", "convert", str(path), "drop_bad=true"]
    assert main([*words, f"out={tmp_path}/all"]) == 0
    assert read_dataset(tmp_path / "all").meta["masks"] == {"train": [0, 1], "valid": []}
    assert main([*words, f"out={tmp_path}/last", "episodes=1:"]) == 0
    last = read_dataset(tmp_path / "last")
    assert [len(episode) for episode in last] == [LENGTHS[2]] and last.meta["masks"] == {"train": [0], "valid": []}
    assert main([*words, f"out={tmp_path}/none", "episodes=1"]) == 2
    assert (
        "has no episode that can be used: the first has" in capsys.readouterr().err and not (tmp_path / "none").exists()
    )


def test_an_episode_without_actions_is_dropped_wherever_it_stands(tmp_path, capsys):
    """The first one says nothing on how the others have to look."""
    path = WRITERS["robomimic"](tmp_path)
    with hdf5(path, "r+") as file:
        for name in ("actions", "rewards", "obs/a", "obs/b", "obs/top", "next_obs/a", "next_obs/b", "next_obs/top"):
            rows = file[f"data/demo_9/{name}"][:0]
            del file[f"data/demo_9/{name}"]
            file[f"data/demo_9/{name}"] = rows.reshape(0) if name == "actions" else rows
    with pytest.raises(BurnishError, match=r"episode 0 of .* cannot be used: it has no actions; .*drop_bad=true"):
        read_dataset(path)
    assert main(["data", "convert", str(path), f"out={tmp_path}/kept", "drop_bad=true"]) == 0
    assert "episode 0: it has no actions" in capsys.readouterr().out
    assert [len(episode) for episode in read_dataset(tmp_path / "kept")] == list(LENGTHS[1:])


def test_a_set_of_bad_episodes_alone_is_refused(tmp_path, capsys):
    path = tmp_path / "bad.npz"
    np.savez(path, observations=np.full((4, 2), np.nan), actions=np.zeros((4, 1)), episode_ends=[2, 4])
    assert main(["data", "convert", str(path), f"out={tmp_path}/kept", "drop_bad=true"]) == 2
    said = capsys.readouterr().err
    assert "has no episode that can be used" in said and "NaN in 'state'" in said and not (tmp_path / "kept").exists()


def test_states_of_the_simulator_stay_with_their_episodes(tmp_path):
    episodes = make_episodes(3)
    states = [{"t": torch.full((len(x) + 1,), float(number))} for number, x in enumerate(episodes)]
    pairs = zip(episodes, states, strict=True)
    path = write_lerobot(replace(episodes, episodes=[replace(x, sim_state=s) for x, s in pairs]), tmp_path / "set")
    rewrite(path, "next.reward", 1, float("nan"))
    assert main(["data", "convert", str(path), f"out={tmp_path}/kept", "drop_bad=true"]) == 0
    assert [float(read_sim_state(tmp_path / "kept", number, 0)["t"]) for number in (0, 1)] == [0.0, 2.0]


@pytest.mark.parametrize("do", ["info", "stats", "show"])
def test_other_actions_have_no_use_for_the_setting(do, tmp_path, capsys):
    assert main(["data", do, str(lerobot(tmp_path)), "drop_bad=true"]) == 2
    assert "has no use for drop_bad=" in capsys.readouterr().err
