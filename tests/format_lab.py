"""Tiny datasets in the layouts in which others write them, made of the same three episodes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from conftest import demand
from PIL import Image

LENGTHS = (4, 2, 3)
BOX = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-2.0, -2.0], "high": [2.0, 2.0]}
ENV_ARGS = {"env_name": "Lift", "type": 1, "env_kwargs": {"control_freq": 25, "reward_shaping": False}}


def episodes() -> list[dict[str, Any]]:
    """T + 1 observations ``a`` (2,), ``b`` (1,), pictures (6, 5, 3), T actions (2,) and rewards; the first one
    succeeds with its last action."""
    rng, made = np.random.default_rng(0), []
    for number, length in enumerate(LENGTHS):
        reward = np.zeros(length, np.float32)
        reward[-1] = number == 0
        made.append(
            {
                "a": rng.standard_normal((length + 1, 2)),
                "b": rng.standard_normal((length + 1, 1)).astype(np.float32),
                "top": rng.integers(0, 256, (length + 1, 6, 5, 3), np.uint8),
                "action": rng.uniform(-0.9, 0.9, (length, 2)).astype(np.float32),
                "reward": reward,
                "end": np.arange(length) == length - 1,
            }
        )
    return made


def state(episode: dict[str, Any], *keys: str) -> np.ndarray:
    return np.concatenate([episode[key] for key in keys or ("a", "b")], 1).astype(np.float32)


def hdf5(path: Path, mode: str = "w") -> Any:
    return demand("h5py").File(path, mode)


def robomimic(folder: Path) -> Path:
    path = folder / "low_dim.hdf5"
    with hdf5(path) as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps(ENV_ARGS)
        for number, episode in enumerate(episodes()):
            demo = data.create_group(f"demo_{number + 9}")  # demo_10 comes after demo_9
            demo.attrs["num_samples"] = len(episode["action"])
            for key in ("a", "b", "top"):
                demo[f"obs/{key}"], demo[f"next_obs/{key}"] = episode[key][:-1], episode[key][1:]
            demo["actions"], demo["rewards"] = episode["action"].astype(np.float64), episode["reward"]
            demo["dones"], demo["states"] = episode["end"].astype(np.int64), np.zeros((len(episode["action"]), 7))
        file["mask/train"] = np.array([b"demo_9", b"demo_11"])
        file["mask/valid"] = ["demo_10"]
    return path


def minari(folder: Path) -> Path:
    data = folder / "hopper-v0" / "data"
    data.mkdir(parents=True)
    pixels = {"type": "Box", "dtype": "uint8", "shape": [6, 5, 3], "low": 0, "high": 255}
    inner = {"type": "Tuple", "subspaces": [BOX, BOX]}
    space = {"type": "Dict", "subspaces": {"inner": inner, "top": pixels, "desired_goal": BOX}}
    about = {"data_format": "hdf5", "dataset_id": "mujoco/hopper-v0", "observation_space": json.dumps(space)}
    about |= {"action_space": json.dumps(BOX), "env_spec": json.dumps({"id": "Hopper-v5", "max_episode_steps": 50})}
    (data / "metadata.json").write_text(json.dumps(about))
    with hdf5(data / "main_data.hdf5") as file:
        for number, episode in enumerate(episodes()):
            group = file.create_group(f"episode_{number}")
            group.attrs["seed"] = 40 + number
            group["observations/inner/_index_0"], group["observations/inner/_index_1"] = episode["a"], episode["b"]
            group["observations/desired_goal"] = episode["a"] + 1
            rows = group.create_dataset("observations/top", len(episode["a"]), demand("h5py").vlen_dtype(np.uint8))
            for row, frame in enumerate(episode["top"]):
                rows[row] = np.frombuffer(jpeg(frame), np.uint8)
            group["actions"], group["rewards"] = episode["action"], episode["reward"].astype(np.float64)
            group["terminations"] = episode["reward"] > 0
            group["truncations"] = episode["end"] & (episode["reward"] == 0)
            said = "success" if number else "is_success"  # both are usual
            group[f"infos/{said}"] = np.append(np.nan, episode["reward"] > 0)  # a reset says nothing of it
    return data.parent


def jpeg(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, format="JPEG")
    return file.getvalue()


def maniskill(folder: Path) -> Path:
    path = folder / "trajectory.rgb.pd_ee_delta_pos.physx_cpu.h5"
    with hdf5(path) as file:
        for number, episode in enumerate(episodes()):
            group = file.create_group(f"traj_{number}", track_order=True)
            seen = group.create_group("obs", track_order=True)
            agent = seen.create_group("agent", track_order=True)
            agent["qvel"], agent["qpos"] = (
                episode["b"],
                episode["a"],
            )  # an order that is not the alphabet's
            seen["sensor_data/base_camera/rgb"] = episode["top"]
            seen["sensor_data/base_camera/depth"] = episode["top"][..., :1].astype(np.int16)
            group["actions"], group["rewards"] = episode["action"], episode["reward"]
            group["terminated"], group["success"] = episode["reward"] > 0, episode["reward"] > 0
            group["truncated"] = episode["end"] & (episode["reward"] == 0)
            group["env_states/actors/cube"] = np.zeros((len(episode["a"]), 13))
    kwargs = {"obs_mode": "rgb", "control_mode": "pd_ee_delta_pos", "sim_config": {"control_freq": 10}}
    listed = [{"episode_id": i, "episode_seed": 40 + i, "control_mode": "pd_ee_delta_pos"} for i in range(3)]
    world = {"env_id": "PushCube-v1", "max_episode_steps": 50, "env_kwargs": kwargs}
    path.with_suffix(".json").write_text(json.dumps({"env_info": world, "episodes": listed}))
    return path


def flat(*keys: str) -> dict[str, np.ndarray]:
    """The columns of all episodes, one after the other, without final observations."""
    made = episodes()
    return {key: np.concatenate([episode[key][: len(episode["action"])] for episode in made]) for key in keys}


def following(key: str) -> np.ndarray:
    return np.concatenate([episode[key][1:] for episode in episodes()])


def d4rl(folder: Path) -> Path:
    path, columns = folder / "hopper.hdf5", flat("a", "action", "reward", "end")
    with hdf5(path) as file:
        file["observations"], file["next_observations"] = columns["a"], following("a")
        file["actions"], file["rewards"] = columns["action"], columns["reward"][:, None]
        file["terminals"] = columns["reward"] > 0
        file["timeouts"] = columns["end"] & (columns["reward"] == 0)
        file["infos/qpos"] = columns["a"]
        file["metadata/algorithm"] = "SAC"
    return path


def ogbench(folder: Path) -> Path:
    """Each trajectory has one row more than actions that led somewhere."""
    made = episodes()
    columns = {
        "observations": np.concatenate([x["a"] for x in made]).astype(np.float32),
        "actions": np.concatenate([np.append(x["action"], [[0.5, 0.5]], 0) for x in made]).astype(np.float32),
        "terminals": np.concatenate([np.append(x["end"] & False, True) for x in made]),
        "rewards": np.concatenate([np.append(x["reward"], 0) for x in made]).astype(np.float32),
        "masks": np.concatenate([np.append(1 - x["reward"], 1) for x in made]).astype(np.float32),
        "qpos": np.concatenate([x["b"] for x in made]),
    }
    np.savez_compressed(folder / "cube.npz", **columns)  # pyright: ignore[reportArgumentType]
    return folder / "cube.npz"


def plain(folder: Path) -> Path:
    columns = flat("a", "b", "top", "action", "reward", "end")
    arrays = {f"observations/{key}": columns[key] for key in ("a", "b", "top")}
    arrays |= {f"next_observations/{key}": following(key) for key in ("a", "b", "top")}
    arrays |= {"actions": columns["action"], "rewards": columns["reward"], "success": columns["reward"] > 0}
    arrays |= {"terminated": columns["reward"] > 0, "truncated": columns["end"] & (columns["reward"] == 0)}
    np.savez(folder / "mine.npz", **arrays, control_hz=30.0)  # pyright: ignore[reportArgumentType]
    return folder / "mine.npz"


WRITERS: dict[str, Callable[[Path], Path]] = {
    "robomimic": robomimic, "minari": minari, "maniskill": maniskill, "d4rl": d4rl, "ogbench": ogbench, "npz": plain,
}  # fmt: skip
