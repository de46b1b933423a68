"""Hostile artefacts of two more kinds: those that name what lies elsewhere, and those that are larger than they look.

A path or an address in a checkpoint is a stranger's wish. A few kilobytes of parquet, YAML, JSON or PNG can be more
numbers than a machine has memory. As in `artefacts.py`, each is a good one with one thing changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from onnx import TensorProto, helper, numpy_helper

from artefacts import (
    CONFIG,
    DEEP,
    EPISODES,
    LAUGHS,
    Artefact,
    checkpoint_of,
    column,
    frames,
    header,
    info,
    link,
    replaced,
    sealed,
    settings,
    text,
)
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.data.lerobot import write_lerobot
from burnish.real_robot.export.bundle import PLAN, write
from export_lab import by_hand

SECRET = b"SECRET"  # what lies in root/outside/secret
SHA256 = hashlib.sha256(SECRET).hexdigest()
WORLD = {"obs": {"shapes": {"state": [3]}}, "action": {"low": [-1], "high": [1]}, "control_hz": 1, "action_mode": "",
         "max_steps": 1}  # fmt: skip
BESIDE = "beside.bin"


def good(folder: Path) -> None:
    """What the ones below are made from, beside the ones of `artefacts.good`."""
    rng = torch.Generator().manual_seed(0)
    obs = {"state": torch.randn(6, 3, generator=rng), "image.top": torch.zeros(6, 3, 4, 4, dtype=torch.uint8)}
    spec = EnvSpec(ObsSpec({"state": (3,), "image.top": (3, 4, 4)}), ActionSpec((-1.0,), (1.0,)), 10.0, "velocity", 5)
    episode = Episode(
        obs=obs, action=torch.zeros(5, 1), reward=torch.ones(5), terminated=True, truncated=False, success=True, seed=0,
        sim_state={"qpos": torch.zeros(6, 2)},
    )  # fmt: skip
    write_lerobot(Episodes([episode], spec, {}), folder / "pictures")
    run = folder / "run"
    run.mkdir()
    (run / CONFIG).write_text("seed: 0\nout: run\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    write(by_hand(networks={PLAN: network(inside=True)}), folder / "network")


# ---- checkpoints that name what lies elsewhere ----


def external(kind: str, **config: str) -> Artefact:
    """A policy that is not ours; {path} and {root} are filled in."""

    def change(folder: Path) -> None:
        known = {"path": str(folder), "root": str(folder.parents[1])}
        given = {name: word.format(**known) for name, word in config.items()}
        settings(lambda data: data.update(policy="external", kind=kind, config=given, world=WORLD))(folder)

    return checkpoint_of(change)


def with_file(artefact: Artefact, name: str, make: Callable[[Path], Any]) -> Artefact:
    def change(folder: Path) -> None:
        make(folder / name)
        artefact.change(folder)

    return checkpoint_of(change)


INSIDE = external("onnx", path="{path}/model.onnx", sha256=SHA256)
OUTSIDE = {
    "onnx elsewhere": external("onnx", path="{root}/outside/secret"),
    "onnx elsewhere, of a known hash": external("onnx", path="{root}/outside/secret", sha256=SHA256),
    "onnx that climbs": external("onnx", path="../outside/secret", sha256=SHA256),
    "onnx that climbs out of the checkpoint": external("onnx", path="{path}/../../outside/secret", sha256=SHA256),
    "onnx in a home": external("onnx", path="~/../../outside/secret", sha256=SHA256),
    "onnx behind a link": with_file(INSIDE, "model.onnx", link("{root}/outside/secret")),
    "onnx of zeroes": with_file(INSIDE, "model.onnx", link("/dev/zero")),
    "onnx that is a pipe": with_file(INSIDE, "model.onnx", os.mkfifo),
    "onnx that is a pipe here": external("onnx", path="pipe", sha256=SHA256),
    "onnx without a hash": with_file(external("onnx", path="{path}/it"), "it", lambda path: path.write_bytes(SECRET)),
    "server of a stranger": external("remote", url="ws://canary.invalid:9"),
    "server by its number": external("remote", url="ws://192.0.2.1:9"),
    "server that looks like this machine": external("remote", url="ws://localhost.canary.invalid:9"),
    "address of this machine with a path": external("remote", url="ws://localhost:9/shutdown?now=1"),
}


def model(seen: str, width: int, outputs: list[Any], inside: bool) -> bytes:
    """The actions are what is seen, times weights; these lie in a file in the folder that one stands in, or, as the
    good ones do, ``inside``."""
    size = int(np.prod([n for n in outputs if n != "n"]))
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[width, size])
    if inside:
        weights.raw_data = bytes(4 * width * size)
    else:
        weights.data_location = TensorProto.EXTERNAL
        for key, value in (("location", BESIDE), ("offset", "0"), ("length", str(4 * width * size))):
            weights.external_data.add(key=key, value=value)
    shape = numpy_helper.from_array(np.array([-1, *outputs[1:]]), "shape")
    nodes = [helper.make_node("MatMul", [seen, "w"], ["flat"]), helper.make_node("Reshape", ["flat", "shape"], ["out"])]
    graph = helper.make_graph(
        nodes, "policy", [helper.make_tensor_value_info(seen, TensorProto.FLOAT, [outputs[0], width])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, outputs)], [weights, shape],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()


def network(inside: bool) -> bytes:
    return model("obs.state", 3, [1, 2, 2], inside)


def beside(folder: Path) -> None:
    """The file is there, in the folder that the process stands in: so what obeys finds it."""
    (folder.parents[1] / "out" / BESIDE).write_bytes(bytes(1000))


def model_with_weights_beside(folder: Path) -> None:
    beside(folder)
    (folder / "m.onnx").write_bytes(model("state", 2, ["n", 2], inside=False))


def bundle_with_weights_beside(folder: Path) -> None:
    beside(folder)
    content = network(inside=False)
    (folder / "policy.onnx").write_bytes(content)
    data = json.loads((folder / "policy.json").read_text())
    data["files"]["policy.onnx"] = hashlib.sha256(content).hexdigest()
    (folder / "policy.json").write_text(json.dumps(data))


PLAYED = ("evaluate", "policy=onnx", "policy.path={path}/m.onnx", "env=point_reach", "eval.episodes=1")

# ---- larger than they look ----


def many(table: pa.Table, rows: int = 3_000_000) -> pa.Table:
    """The same frames, and millions of an episode that nobody lists."""
    last = table.slice(len(table) - 1)
    more = pa.concat_tables([last]).take(pa.array(np.zeros(rows, np.int8)))
    at = more.column_names.index("episode_index")
    return pa.concat_tables([table, more.set_column(at, "episode_index", pa.array(np.full(rows, 9)))])


def repeated(value: bytes, rows: int) -> pa.Array:
    """The value once, and as many references to it."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([value], pa.large_binary()))


def long_actions(folder: Path) -> None:
    """Each action has millions of zeroes: a run in the file, and gigabytes in memory."""
    numbers = 20_000_000

    def change(table: pa.Table) -> pa.Table:
        at, zeroes = table.column_names.index("action"), pa.array(np.zeros(numbers, np.float32))
        pieces = [pa.ListArray.from_arrays(pa.array([0, numbers], pa.int32()), zeroes) for _ in range(len(table))]
        return table.set_column(at, "action", pa.chunked_array(pieces))

    frames(change)(folder)


def episodes_again(folder: Path) -> None:
    """One episode, listed thousands of times."""
    table = pq.read_table(folder / EPISODES)
    pq.write_table(table.take(pa.array([0] * 5000 + [1])), folder / EPISODES)
    info(lambda data: data.update(total_episodes=5001))(folder)


def png(width: int, height: int) -> bytes:
    """A picture of one colour: a thousand times smaller than its pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    body = zlib.compress(bytes((1 + -(-width // 8)) * height), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n(CANARY) (w) file\n%%EOF\n"


def pictures(cell: Callable[[], bytes]) -> Callable[[Path], None]:
    def cells(rows: int) -> pa.Array:
        return pa.array(
            [{"bytes": cell(), "path": None}] * rows, pa.struct({"bytes": pa.binary(), "path": pa.string()})
        )

    return column("observation.images.top", cells)


def padded(name: str, what: str, times: int) -> Callable[[Path], None]:
    """One more entry of a JSON file, which nobody asks for."""

    def apply(folder: Path) -> None:
        content = (folder / name).read_text().rstrip().removesuffix("}")
        (folder / name).write_text(content + ',"more":[' + ",".join([what] * times) + "]}")

    return apply


BOMBS = {
    "millions of frames": frames(many),
    "actions of millions of numbers": long_actions,
    "actions that are long strings": column("action", lambda n: repeated(bytes(1 << 28), n)),
    "an episode thousands of times": episodes_again,
    "a promise beyond any memory": info(lambda data: data.update(total_frames=10**12)),
    "a promise that is no number": info(lambda data: data.update(total_frames="CANARY")),
    "fewer frames than there are": info(lambda data: data.update(total_frames=1)),
    "info of 60 MB": padded("meta/info.json", "[]", 20_000_000),
}
PICTURES = {
    "a picture of 170 million pixels": pictures(lambda: png(17_000, 10_000)),
    "a picture that warns of itself": pictures(lambda: png(10_000, 10_000)),
    "a picture that is a program": pictures(lambda: EPS),
    "a picture that is long": pictures(lambda: png(4, 4) + bytes(1 << 27)),
}


def states(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return info(lambda data: change(data["burnish"]["sim_state"]))


STATES = {
    "elsewhere": states(lambda data: data.update(path="../../outside/secret")),
    "from the root": states(lambda data: data.update(path="/dev/zero")),
    "of a gigabyte of path": states(lambda data: data.update(path="{chunk_index:>3000000000}")),
    "of objects": states(lambda data: data["tensors"][0].update(dtype="O")),
    "of 10^12 numbers": states(lambda data: data["tensors"][0].update(shape=[10**12])),
    "of a negative shape": states(lambda data: data["tensors"][0].update(shape=[-2])),
    "info deep": text("meta/info.json", DEEP),
    "info is a pipe": replaced("meta/info.json", os.mkfifo),
    "info of 60 MB": padded("meta/info.json", "[]", 20_000_000),
    "episodes are a pipe": replaced(EPISODES, os.mkfifo),
}

LONG_YAML = "".join(f"k{i}: [{', '.join(['x'] * 20)}]\n" for i in range(200_000))
RUN = {
    "config laughs": text(CONFIG, LAUGHS),
    "config of itself": text(CONFIG, "&a {seed: 0, method: *a}"),
    "config of megabytes": text(CONFIG, LONG_YAML),
    "config is deep": text(CONFIG, DEEP),
    "config is a link to zeroes": replaced(CONFIG, link("/dev/zero")),
    "metrics deep": text("metrics.jsonl", DEEP),
    "metrics of lists": text("metrics.jsonl", "[1]\n"),
    "metrics of zeroes": replaced("metrics.jsonl", link("/dev/zero")),
}
TORN = {"metrics deep", "metrics of zeroes"}  # a line that is none, and a log that is no file, count as absent
# Of what is verified first, only the size is left to lie about.
CHECKPOINTS = {
    "yaml of megabytes": sealed(text(CONFIG, LONG_YAML)),
    # These two are made when they are asked for: together they take 4 seconds and 300 MB.
    "state of 100 MB": sealed(lambda folder: text("state.json", "[" + "[]," * 33_000_000 + "[]]")(folder)),
    "a million names": lambda folder: header(
        **{f"x{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(10**6)}
    )(folder),
    "tensors that overlap": header(
        a={"dtype": "F32", "shape": [16], "data_offsets": [0, 64]},
        b={"dtype": "F32", "shape": [16], "data_offsets": [0, 64]},
    ),
}
# What an environment holds is looked up by ``oc.env`` of OmegaConf, and these files become words of a command line.
SECRETS = {
    "environment": "${oc.env:CANARY_SECRET}",
    "environment, hidden from the eye": "\\x24{oc.env:CANARY_SECRET}",
    "environment, within words": "x-${oc.env:CANARY_SECRET}-y",
    "environment, within another": "${oc.env:NONE,${oc.env:CANARY_SECRET}}",
    "environment, decoded": "${oc.decode:${oc.env:CANARY_SECRET}}",
    "created": "${oc.create:{a:1}}",
    "deprecated": "${oc.deprecated:env.id}",
    "keys of a mapping": "${oc.dict.keys:env}",
    "of Hydra": "${hydra:runtime.cwd}",
    "of itself": "${env.id}",
}
ASKED = {
    "id": 'defaults: [{{override /env: gym}}]\nenv: {{id: "{}"}}\n',
    "list": 'defaults: [{{override /env: reach}}]\nenv: {{cameras: ["{}"]}}\n',
    "key": 'defaults: [{{override /env: gym}}]\nenv: {{"{}": 1}}\n',
    "choice": 'defaults: [{{override /env: "{}"}}]\n',
}
TOLD = {
    **{f"world: {name}": ("world.yaml", ASKED["id"].format(word)) for name, word in SECRETS.items()},
    **{f"world: environment in a {where}": ("world.yaml", form.format(SECRETS["environment"]))
       for where, form in ASKED.items()},
    "method: environment": ("m.yaml", "defaults: [{override /method: dsrl}]\nout: '${oc.env:CANARY_SECRET}'\n"),
    "method: choice": ("m.yaml", "defaults: [{override /method: '${oc.env:CANARY_SECRET}'}]\n"),
    "world: path": ("world.yaml", ASKED["id"].format("x") + "env: {kwargs: {xml_file: ../outside/secret}}\n"),
    "world: defaults that are none": ("world.yaml", "defaults: 5\nenv: {}\n"),
    "world: a day": ("world.yaml", "defaults: [{override /env: gym}]\nenv: {id: 2026-01-01}\n"),
}  # fmt: skip
REPORT = ("report", "run={path}", "out={out}/report.html")
RESUME = ("pretrain", "data={root}/good/dataset", "policy=flow", "out={path}", "resume=true")
COMPARE = ("compare", "base={root}/good/checkpoint", "methods=dsrl", "world={path}/world.yaml", "out={out}/compare")
BY_METHOD = ("compare", "base={root}/good/checkpoint", "methods={path}/m.yaml", "out={out}/compare")
CLAIM = ("compare", "base={root}/good/checkpoint", "methods=dsrl", "resume=true", "out={path}")

ARTEFACTS: dict[str, Artefact] = {
    **{f"checkpoint: {name}": artefact for name, artefact in OUTSIDE.items()},
    **{f"checkpoint: {name}": checkpoint_of(change) for name, change in CHECKPOINTS.items()},
    "settings: onnx with weights in this folder": Artefact("nothing", model_with_weights_beside, "command", PLAYED),
    "bundle: weights in this folder": Artefact("network", bundle_with_weights_beside, "bundle"),
    **{f"dataset: {name}": Artefact("dataset", change, "dataset") for name, change in BOMBS.items()},
    **{f"dataset: {name}": Artefact("pictures", change, "dataset") for name, change in PICTURES.items()},
    **{f"states: {name}": Artefact("pictures", change, "states") for name, change in STATES.items()},
    **{f"run shown: {name}": Artefact("run", change, "command", REPORT, name in TORN) for name, change in RUN.items()},
    **{
        f"run resumed: {name}": Artefact("run", change, "command", RESUME)
        for name, change in RUN.items()
        if name.startswith("config")
    },
    **{
        f"settings: {name}": Artefact(
            "run", text(file, words), "command", COMPARE if file == "world.yaml" else BY_METHOD
        )
        for name, (file, words) in TOLD.items()
    },
    "settings: world laughs": Artefact("run", text("world.yaml", LAUGHS), "command", COMPARE),
    "settings: world is deep": Artefact("run", text("world.yaml", DEEP), "command", COMPARE),
    "comparison: config laughs": Artefact("run", text(CONFIG, LAUGHS), "command", CLAIM),
    "comparison: config of itself": Artefact("run", text(CONFIG, "&a {seed: *a}"), "command", CLAIM),
}
