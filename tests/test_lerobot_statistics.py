"""The statistics of a written set are exact, as NumPy says of all rows; and a policy can take those of a set."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_lerobot_policies import STORED

from burnish.policies.build import CheckpointConfig, SmolVLALoadConfig, loaded
from burnish.policies.core.config import to_data
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.data import lerobot_statistics as statistics
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.data.lerobot import write_lerobot
from burnish.policies.lerobot.stored import statistics_of_dataset

SPEC = EnvSpec(ObsSpec({"state": (3,), "image.front": (3, 6, 8)}), ActionSpec((-1.0,), (1.0,)), 10.0, "velocity", 9)


def test_a_written_set_has_exact_statistics(tmp_path):
    g = torch.Generator().manual_seed(0)
    listed = []
    for seed, steps in enumerate((1, 4, 7)):
        pixels = torch.randint(0, 256, (steps + 1, 3, 6, 8), generator=g, dtype=torch.uint8)
        obs = {"state": torch.randn(steps + 1, 3, generator=g), "image.front": pixels}
        listed.append(Episode(obs, torch.zeros(steps, 1), torch.ones(steps), False, True, False, seed))
    episodes = Episodes(listed, SPEC)
    folder = write_lerobot(episodes, tmp_path / "set")
    stats = json.loads((folder / "meta/stats.json").read_text())
    assert set(stats) == set(json.loads((folder / "meta/info.json").read_text())["features"])
    state = torch.cat([e.obs["state"][:-1] for e in episodes]).double().numpy()
    pixels = torch.cat([e.obs["image.front"][:-1] for e in episodes]).numpy().swapaxes(0, 1).reshape(3, -1).T / 255
    for column, values, shape in (("observation.state", state, (3,)), ("observation.images.front", pixels, (3, 1, 1))):
        found = stats[column]
        expected = {name: getattr(values, name)(0) for name in ("min", "max", "mean", "std")}
        expected |= {f"q{q:02d}": np.quantile(values, q / 100, axis=0) for q in (1, 10, 50, 90, 99)}
        assert set(found) == {*expected, "count"} and found["count"] == [12]
        for name, value in expected.items():
            assert np.shape(found[name]) == shape
            # Both sides are float64 sums of at most 576 terms of order 1: rounding stays far below 1e-12.
            np.testing.assert_allclose(np.reshape(found[name], -1), value, rtol=0, atol=1e-12)
    # Each episode's own statistics stand in its row of meta/episodes, for LeRobot's editing tools.
    row = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()[1]
    own = episodes[1].obs["image.front"][:-1].numpy()
    assert np.allclose(row["stats/observation.images.front/mean"], own.mean((0, 2, 3))[:, None, None] / 255)
    assert row["stats/observation.images.front/count"] == row["stats/observation.state/count"] == [4]


def test_quantiles_from_a_histogram_interpolate_between_ranks():
    """With seven pixels nearly every quantile lies between two of them."""
    frames = np.random.default_rng(0).integers(0, 256, (1, 2, 1, 7), dtype=np.uint8)
    found = statistics.of_images(statistics.image_histogram(frames), 1)
    for name, share in statistics.QUANTILES.items():
        expected = np.quantile(frames[0, :, 0] / 255, share, axis=1)
        np.testing.assert_allclose(found[name].reshape(-1), expected, rtol=0, atol=1e-12)


def without_ends(tmp_path):
    """A policy that does not know the ends of its actions; its statistics, which are in the dataset ``set`` beside."""
    folder, numbers = shutil.copytree(STORED / "act", tmp_path / "act"), {}
    for file in folder.glob("policy_*.safetensors"):
        numbers |= load_file(file)
        save_file({key: x for key, x in numbers.items() if key not in ("action.min", "action.max")}, file)
    stats: dict = {}
    for key, x in numbers.items():
        feature, _, statistic = key.rpartition(".")
        stats.setdefault(feature, {})[statistic] = x.tolist()
    (tmp_path / "set" / "meta").mkdir(parents=True)
    (tmp_path / "set" / "meta" / "stats.json").write_text(json.dumps(stats))
    return folder, numbers


def test_ends_of_actions_that_are_not_normalised_are_asked_for(tmp_path):
    folder, numbers = without_ends(tmp_path)
    loaded(CheckpointConfig(str(folder)))  # the control
    for file in folder.glob("*.json"):
        file.write_text(file.read_text().replace('"ACTION": "MEAN_STD"', '"ACTION": "IDENTITY"'))
    with pytest.raises(BurnishError, match=r"does not normalise its actions, .*policy\.stats=FOLDER"):
        loaded(CheckpointConfig(str(folder)))
    policy, _ = loaded(CheckpointConfig(str(folder), stats=str(tmp_path / "set")))
    np.testing.assert_allclose(policy.spec.action.low, numbers["action.min"].flatten(), rtol=1e-6)


def test_ends_of_actions_that_a_folder_lacks_are_said_and_can_be_taken_from_its_dataset(tmp_path, caplog):
    folder, numbers = without_ends(tmp_path)
    mean, std, low = (numbers[f"action.{name}"].flatten() for name in ("mean", "std", "min"))
    policy, _ = loaded(CheckpointConfig(str(folder)))
    np.testing.assert_allclose(policy.spec.action.low, mean - 3 * std, rtol=1e-6)
    assert "clipped at 3 deviations" in caplog.text and "policy.stats=FOLDER" in caplog.text
    caplog.clear()
    policy, _ = loaded(CheckpointConfig(str(folder), stats=str(tmp_path / "set")))
    np.testing.assert_allclose(policy.spec.action.low, low, rtol=1e-6)
    assert not caplog.text
    # Runs that were begun before the setting came can be continued, and so can those of a SmolVLA, which always had it.
    assert "stats" not in to_data(CheckpointConfig("a")) and "stats" in to_data(SmolVLALoadConfig("a"))
    with pytest.raises(BurnishError, match=r"policy.stats=.* is for checkpoints of LeRobot"):
        loaded(CheckpointConfig(str(tmp_path), stats=str(tmp_path / "set")))


def test_statistics_of_episodes_are_those_of_all_their_frames(tmp_path):
    """LeRobot 2.1 keeps them for each episode alone, of episodes of different lengths."""
    source = np.random.default_rng(0)
    episodes = [source.normal(k, 1 + k, (frames, 2)) for k, frames in enumerate((3, 40, 7))]
    rows = []
    for k, x in enumerate(episodes):
        own = {name: getattr(x, name)(0).tolist() for name in ("min", "max", "mean", "std")} | {"count": [len(x)]}
        picture = {name: [[[v]] for v in (*own[name], 0.5)] for name in ("min", "max", "mean", "std")}
        stats = {"action": own, "observation.images.top": picture | {"count": [len(x)]}}
        rows.append(json.dumps({"episode_index": k, "stats": stats}))
    (tmp_path / "meta").mkdir()
    path = tmp_path / "meta" / "episodes_stats.jsonl"
    path.write_text("\n".join(rows) + "\n")
    found, together = statistics_of_dataset(tmp_path, ["action", "observation.images.top"]), np.concatenate(episodes)
    for name in ("min", "max", "mean", "std"):
        # Sums of 50 float64 numbers of order 1, in another order.
        np.testing.assert_allclose(found["action"][name], getattr(together, name)(0), rtol=0, atol=1e-12)
        assert found["observation.images.top"][name].shape == (3, 1, 1)
    with pytest.raises(BurnishError, match="has no statistics of "):
        statistics_of_dataset(tmp_path, ["observation.state"])
    for text, said in (("[]\n", "malformed"), (rows[0].replace('"count": [3]', '"count": []'), "malformed statistics")):
        path.write_text(text)
        with pytest.raises(BurnishError, match=said):
            statistics_of_dataset(tmp_path, ["action"])
