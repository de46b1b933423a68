"""Hostile checkpoints, datasets, bundles and settings: each is a good one with one thing changed by a stranger.

Whoever changes a checkpoint can also seal it again (its hashes protect against damage, not against malice), so these
are sealed. ``CANARY`` in a name or a text marks what must never run; ``root/outside`` is what must never be touched.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
import yaml

from burnish.policies.build import describe
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.data.lerobot import write_lerobot
from burnish.policies.runs import checkpoint
from burnish.policies.runs.manifest import MANIFEST, write_manifest
from burnish.real_robot.export.bundle import write
from export_lab import by_hand, small

CONFIG, STATE, TENSORS = checkpoint.FILES


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch CANARY",))


@dataclass(frozen=True)
class Artefact:
    """``words`` may say {path} (the changed copy), {root} and {out}; ``harmless`` may be loaded."""

    of: str  # the good thing that it is a copy of
    change: Callable[[Path], Any]
    way: str
    words: tuple[str, ...] = ("{path}",)
    harmless: bool = False


def good(folder: Path) -> None:
    """What the hostile ones are made from."""
    policy = small()
    checkpoint.save(folder / "checkpoint", config=describe(policy), state=policy.state_dict())
    write(by_hand(), folder / "bundle")
    rng = torch.Generator().manual_seed(0)
    episodes = [
        Episode(
            obs={"state": torch.randn(6, 3, generator=rng)}, action=torch.randn(5, 2, generator=rng).clamp(-1, 1),
            reward=torch.ones(5), terminated=True, truncated=False, success=True, seed=seed, task="reach",
        )
        for seed in range(2)
    ]  # fmt: skip
    spec = EnvSpec(ObsSpec({"state": (3,)}), ActionSpec((-1.0, -1.0), (1.0, 1.0)), 10.0, "velocity", 5)
    write_lerobot(Episodes(episodes, spec, {}), folder / "dataset")
    (folder / "calibration").mkdir()
    rows = {"a": {"id": 1, "min_tick": 700, "max_tick": 3000}}
    (folder / "calibration" / "arm.json").write_text(json.dumps({"joints": rows}))
    (folder / "nothing").mkdir()
    (folder / "nothing" / "it.onnx").write_bytes(pickle.dumps(Payload()))


# ---- checkpoints ----


def sealed(change: Callable[[Path], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        change(folder)
        (folder / MANIFEST).unlink(missing_ok=True)
        write_manifest(folder, checkpoint.FILES, [], {})

    return apply


def text(name: str, content: str | bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def settings(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = yaml.safe_load((folder / CONFIG).read_text())
        change(data)
        (folder / CONFIG).write_text(yaml.safe_dump(data))

    return sealed(apply)


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        safetensors.torch.save_file(change(safetensors.torch.load_file(folder / TENSORS)), folder / TENSORS)

    return sealed(apply)


def header(**entries: Any) -> Callable[[Path], None]:
    """A safetensors file whose header says what is not there."""

    def apply(folder: Path) -> None:
        words = json.dumps(entries).encode()
        (folder / TENSORS).write_bytes(len(words).to_bytes(8, "little") + words + bytes(64))

    return sealed(apply)


def manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Listed, and sealed over it."""

    def apply(folder: Path) -> None:
        from burnish.policies.runs.manifest import _seal

        data = json.loads((folder / MANIFEST).read_text())
        change(data)
        (folder / MANIFEST).write_text(_seal({k: v for k, v in data.items() if k != "sha256"}))

    return apply


def replaced(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return apply


def link(to: str) -> Callable[[Path], Any]:
    return lambda path: path.symlink_to(to.format(root=path.parents[2]))


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(97 + i)}: &{chr(97 + i)} [{', '.join([f'*{chr(96 + i)}'] * 10)}]\n" for i in range(1, 12)
)
DEEP = "[" * 100_000
SECRET = "outside/secret"


def checkpoint_of(change: Callable[[Path], Any], harmless: bool = False) -> Artefact:
    return Artefact("checkpoint", change, "command", ("export", "policy.path={path}", "out={out}/b"), harmless)


CHECKPOINTS = {
    "pickle for tensors": sealed(text(TENSORS, pickle.dumps(Payload()))),
    "torch file for tensors": sealed(lambda folder: torch.save({"a": torch.zeros(2)}, folder / TENSORS)),
    "pickle for state": sealed(text(STATE, pickle.dumps(Payload()))),
    "pickle for config": sealed(text(CONFIG, pickle.dumps(Payload()))),
    "yaml apply": sealed(text(CONFIG, "!!python/object/apply:os.system ['touch CANARY']")),
    "yaml new": sealed(text(CONFIG, "policy: !!python/object/new:os.system ['touch CANARY']")),
    "yaml name": sealed(text(CONFIG, "policy: !!python/name:os.system ''")),
    "yaml module": sealed(text(CONFIG, "policy: !!python/module:CANARY ''")),
    "yaml laughs": sealed(text(CONFIG, LAUGHS + "policy: flow\nconfig: *l\n")),
    "yaml laughs as name": sealed(text(CONFIG, LAUGHS + "policy: *l\n")),
    "yaml of itself": sealed(text(CONFIG, "&a {policy: flow, config: *a, spec: *a}")),
    "yaml deep": sealed(text(CONFIG, DEEP)),
    "yaml merge": sealed(text(CONFIG, "&a {<<: *a, policy: flow}")),
    "target": settings(lambda data: data["config"].update(_target_="os.system", command="touch CANARY")),
    "target of the net": settings(lambda data: data["config"].update(net={"_target_": "builtins.eval", "x": "CANARY"})),
    "interpolation": settings(lambda data: data.update(policy="${oc.env:CANARY_SECRET}")),
    "policy of another module": settings(lambda data: data.update(policy="os:system")),
    "policy by path": settings(lambda data: data.update(policy="../../outside/CANARY")),
    "policy that is a list": settings(lambda data: data.update(policy=["flow"])),
    "callable of the system": settings(
        lambda data: data.update(
            policy="external", kind="callable", config={"name": "os:system"},
            world={"obs": {"shapes": {}}, "action": {"low": [-1], "high": [1]}, "control_hz": 1, "action_mode": "",
                   "max_steps": 1},
        )
    ),
    "onnx that is not there": settings(
        lambda data: data.update(
            policy="external", kind="onnx", config={"path": "CANARY/nowhere.onnx"},
            world={"obs": {"shapes": {}}, "action": {"low": [-1], "high": [1]}, "control_hz": 1, "action_mode": "",
                   "max_steps": 1},
        )
    ),
    "parts of itself": settings(lambda data: data.update(policy="repeated", parts={"base": {"policy": "repeated"}})),
    "huge observation": settings(lambda data: data["spec"]["obs"]["shapes"].update(state=[10**12])),
    "huge horizon": settings(lambda data: data["spec"].update(horizon=10**11, execute=1)),
    "huge net": settings(lambda data: data["config"]["net"]["mlp"].update(hidden=[10**9, 10**9])),
    "negative shape": settings(lambda data: data["spec"]["obs"]["shapes"].update(state=[-3])),
    "limits that are no numbers": settings(lambda data: data["spec"]["action"].update(low=["x", "y"])),
    "tensors of 2^60 bytes": sealed(text(TENSORS, (2**60).to_bytes(8, "little") + b"{}")),
    "offsets beyond": header(a={"dtype": "F32", "shape": [4], "data_offsets": [0, 2**50]}),
    "shape of 10^12": header(a={"dtype": "F32", "shape": [10**12], "data_offsets": [0, 16]}),
    "offsets backwards": header(a={"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}),
    "dtype that is none": header(a={"dtype": "O", "shape": [4], "data_offsets": [0, 16]}),
    "name that climbs": header(**{"../../outside/CANARY": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}),
    "header twice the same": sealed(
        lambda folder: (folder / TENSORS).write_bytes(
            (w := b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],'
                  b'"data_offsets":[0,4]}}')
            and len(w).to_bytes(8, "little") + w + bytes(4)
        )
    ),
    "weights of another type": tensors(lambda found: {k: x.to(torch.int8) for k, x in found.items()}),
    "weights of another shape": tensors(lambda found: {k: x.reshape(-1)[:1].clone() for k, x in found.items()}),
    "no weights": tensors(lambda found: {"x": torch.zeros(1)}),
    "weights that are not finite": tensors(lambda found: {k: x * np.nan for k, x in found.items()}),
    "state deep": sealed(text(STATE, DEEP)),
    "state with a mark": sealed(text(STATE, '{"a": {"$import": "CANARY"}}')),
    "state with tensors elsewhere": sealed(text(STATE, '{"a": {"$tensor": "../../outside/secret"}}')),
    "state of pairs": sealed(text(STATE, '{"$dict": [[["a"], 1]]}')),
    "state that is a list": sealed(text(STATE, "[]")),
    "tensors outside": replaced(TENSORS, link("{root}/outside/secret")),
    "config outside": replaced(CONFIG, link("{root}/outside/secret")),
    "config of zeroes": replaced(CONFIG, link("/dev/zero")),
    "manifest of zeroes": replaced(MANIFEST, link("/dev/zero")),
    "manifest is a pipe": replaced(MANIFEST, os.mkfifo),
    "config is a pipe": replaced(CONFIG, os.mkfifo),
    "tensors are a folder": replaced(TENSORS, Path.mkdir),
    "manifest lists outside": manifest(lambda data: data["files"].update({"../outside/secret": {"size": 1}})),
    "manifest lists absolutely": manifest(lambda data: data["files"].update({"/etc/passwd": {"size": 1}})),
    "manifest lists a hidden child": manifest(lambda data: data["files"].update({"../manifest.json": {"size": 1}})),
    "manifest lists lists": manifest(lambda data: data.update(files=[["config.yaml"]])),
    "manifest deep": text(MANIFEST, DEEP),
    "manifest of another schema": manifest(lambda data: data.update(schema=10**30)),
}  # fmt: skip

# ---- datasets ----


def info(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = json.loads((folder / "meta" / "info.json").read_text())
        change(data)
        (folder / "meta" / "info.json").write_text(json.dumps(data))

    return apply


def frames(change: Callable[[pa.Table], pa.Table], name: str = "data/chunk-000/file-000.parquet") -> Callable:
    def apply(folder: Path) -> None:
        table = change(pq.read_table(folder / name))
        pq.write_table(table, folder / name)

    return apply


def column(name: str, values: Any, of: str = "data/chunk-000/file-000.parquet") -> Callable[[Path], None]:
    def change(table: pa.Table) -> pa.Table:
        made = values(len(table)) if callable(values) else values
        at = table.column_names.index(name)
        return table.set_column(at, name, made)

    return frames(change, of)


def extension(table: pa.Table) -> pa.Table:
    """What made pyarrow before 14.0.1 unpickle."""
    field = pa.field("action", table.schema.field("action").type, metadata={
        b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickle.dumps(Payload()),
    })  # fmt: skip
    at = table.column_names.index("action")
    return table.set_column(at, field, table["action"])


EPISODES = "meta/episodes/chunk-000/file-000.parquet"
DATA = "data/chunk-000/file-000.parquet"
DATASETS = {
    "path that climbs": info(lambda data: data.update(data_path="../outside/secret.parquet")),
    "path from the root": info(lambda data: data.update(data_path="/etc/passwd")),
    "path with attributes": info(lambda data: data.update(data_path="data/{chunk_index.__class__.__mro__}.parquet")),
    "path of a gigabyte": info(lambda data: data.update(data_path="{chunk_index:>3000000000}")),
    "path that is a list": info(lambda data: data.update(data_path=["x"])),
    "path with a zero byte": info(lambda data: data.update(data_path="data/\0.parquet")),
    "counts beyond": info(lambda data: data.update(total_episodes=10**30, total_frames=-1)),
    "rate that is no number": info(lambda data: data.update(fps=float("nan"))),
    "rate without end": info(lambda data: data.update(fps=float("inf"))),
    "shape of 10^12": info(lambda data: data["features"]["observation.state"].update(shape=[10**12])),
    "negative shape": info(lambda data: data["features"]["action"].update(shape=[-2])),
    "video that is not there": info(lambda data: data["features"]["observation.state"].update(dtype="video")),
    "features that climb": info(
        lambda data: data["features"].update(
            {"observation.images.../../CANARY": {"dtype": "image", "shape": [2, 2, 3]}}
        )
    ),
    "target": info(lambda data: data["burnish"].update(_target_="os.system", obs={"_target_": "os.system"})),
    "limits that are no numbers": info(lambda data: data["burnish"].update(action={"low": ["CANARY"], "high": [None]})),
    "info deep": text("meta/info.json", DEEP),
    "info pickled": text("meta/info.json", pickle.dumps(Payload())),
    "info is a pipe": replaced("meta/info.json", os.mkfifo),
    "info of zeroes": replaced("meta/info.json", link("/dev/zero")),
    "frames are a pipe": replaced(DATA, os.mkfifo),
    "frames pickled": replaced(DATA, lambda path: path.write_bytes(pickle.dumps(Payload()))),
    "frames cut": lambda folder: os.truncate(folder / DATA, 200),
    "actions pickled": column("action", lambda n: pa.array([pickle.dumps(Payload())] * n)),
    "actions with an extension": frames(extension),
    "actions ragged": column("action", lambda n: pa.array([[0.0] * (i % 3) for i in range(n)])),
    "actions missing": column("action", lambda n: pa.nulls(n)),
    "episodes beyond": column("length", lambda n: pa.array([2**62] * n), EPISODES),
    "episodes negative": column("episode_index", lambda n: pa.array([-(2**62)] * n), EPISODES),
    "chunks that climb": column("data/chunk_index", lambda n: pa.array([-1] * n), EPISODES),
    "tasks are a pipe": replaced("meta/tasks.parquet", os.mkfifo),
}

# What is nowhere read may say anything.
PASSED_OVER = {"features that climb", "actions with an extension"}

# ---- bundles: those with wrong contents are in test_bundle.py; these are for who opens files ----

BUNDLES = {
    "policy is a pipe": replaced("policy.json", os.mkfifo),
    "policy of zeroes": replaced("policy.json", link("/dev/zero")),
    "network outside": replaced("policy.onnx", link("{root}/outside/secret")),
    "policy deep": text("policy.json", DEEP),
    "policy pickled": text("policy.json", pickle.dumps(Payload())),
    "parity is a pipe": replaced("parity.json", os.mkfifo),
}

CALIBRATIONS = {
    "deep": text("arm.json", DEEP),
    "a pipe": replaced("arm.json", os.mkfifo),
    "of zeroes": replaced("arm.json", link("/dev/zero")),
    "pickled": text("arm.json", pickle.dumps(Payload())),
}

# ---- settings ----

EVALUATE = ("evaluate", "policy.path={root}/good/nothing")
SETTINGS = {
    "environment": ("evaluate", "policy.path=${oc.env:CANARY_SECRET}"),
    "decoded": ("evaluate", "policy.path=x", "seed=${oc.decode:'__import__(\"os\").system(\"touch CANARY\")'}"),
    "resolver that is none": ("evaluate", "policy.path=${python:CANARY}"),
    "interpolation of itself": ("evaluate", "policy.path=${policy.path}"),
    "target": (*EVALUATE, "policy._target_=os.system"),
    "target added": (*EVALUATE, "+policy._target_=os.system"),
    "target forced": (*EVALUATE, "++_target_=os.system"),
    "run folder": (*EVALUATE, "hydra.run.dir={root}/outside/run"),
    "output folder": (*EVALUATE, "hydra.output_subdir={root}/outside/run"),
    "search path": ("pretrain", "data=x", "hydra.searchpath=[file://{root}/outside]", "experiment=evil"),
    "callbacks": (*EVALUATE, "hydra.callbacks={evil: {_target_: os.system, command: 'touch CANARY'}}"),
    "launcher": (*EVALUATE, "hydra/launcher=evil"),
    "config folder": (*EVALUATE, "--config-dir={root}/outside"),
    "config path": (*EVALUATE, "--config-path", "../../outside"),
    "config name": (*EVALUATE, "--config-name=../../outside/evil"),
    "group that climbs": ("evaluate", "policy=../../../outside/evil"),
    "group from the root": ("evaluate", "policy={root}/outside/evil"),
    "group of a package": ("pretrain", "data=x", "policy=pkg://os/CANARY"),
    "group elsewhere": (*EVALUATE, "env@_global_=../../outside/evil"),
    "experiment that climbs": ("pretrain", "data=x", "experiment=../../../outside/evil"),
    "defaults": (*EVALUATE, "defaults=[../../outside/evil]"),
    "a million values": (*EVALUATE, "seed=range(0,100000000)"),
    "a verb of another module": ("os:system",),
    "a verb that climbs": ("../../outside/evil",),
    "callable": ("evaluate", "policy=callable", "policy.name=os:system", "env=point_reach"),
    "callable by path": ("evaluate", "policy=callable", "policy.name={root}/outside/evil.py", "env=point_reach"),
    "onnx that is pickled": ("evaluate", "policy=onnx", "policy.path={root}/good/nothing/it.onnx", "env=point_reach"),
}  # fmt: skip

ARTEFACTS: dict[str, Artefact] = {
    **{f"checkpoint: {name}": checkpoint_of(change) for name, change in CHECKPOINTS.items()},
    **{
        f"dataset: {name}": Artefact("dataset", x, "dataset", harmless=name in PASSED_OVER)
        for name, x in DATASETS.items()
    },
    **{f"bundle: {name}": Artefact("bundle", change, "bundle") for name, change in BUNDLES.items()},
    **{
        f"calibration: {name}": Artefact("calibration", change, "calibration", ("{path}/arm.json",))
        for name, change in CALIBRATIONS.items()
    },
    **{f"settings: {name}": Artefact("nothing", lambda folder: None, "command", x) for name, x in SETTINGS.items()},
}
