"""Hostile artefacts of a third kind: as large as the loaders allow, and by one larger.

What is at a limit may be loaded, and acted with, or be refused: within the bounds of time and memory of every other
artefact. What is above is refused. Sizes that are only declared are refused at any size, because the tensors of such a
size are not there; those of a gigabyte or two are what a machine still gives, so nothing else would stop them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from artefacts import Artefact, settings
from burnish.policies.build import build_policy, describe
from burnish.policies.chain import MOST_STEPS
from burnish.policies.core.spec import LARGEST_OBS, LONGEST_CHUNK, ActionSpec, ObsSpec, PolicySpec
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.nets.mlp import DEEPEST, WIDEST_TABLE
from burnish.policies.runs import checkpoint
from burnish.real_robot.export.bundle import MAX_CHUNK, MAX_NUMBERS, NoiseInput, write
from decompression_bombs import WORLD, external, network, with_file
from export_lab import by_hand, small

SIDE = int((LARGEST_OBS / 3) ** 0.5)  # of the largest square picture
HISTORY = LARGEST_OBS // 12  # frames of the three numbers that the good checkpoint observes
Change = Callable[[dict[str, Any]], Any]


def good(folder: Path) -> None:
    """Checkpoints and bundles that are as large as they may be, with their tensors."""

    def saved(name: str, policy: Any) -> None:
        checkpoint.save(folder / name, config=describe(policy), state=policy.state_dict())

    limits = ActionSpec((-1.0, -1.0), (1.0, 1.0))
    saved("long", small(spec=PolicySpec(ObsSpec({"state": (3,)}), limits, LONGEST_CHUNK, 1)))
    seen = {"state": (3,), "image.top": (3, SIDE, SIDE - 1)}
    seeing = PolicySpec(ObsSpec(seen), limits, 2, 2)
    saved("seeing", build_policy(GaussianConfig(hidden=[4]), seeing))
    draws = {"noise": (NoiseInput((2, 2)), NoiseInput((MAX_NUMBERS - 4,)))}
    write(by_hand(**draws), folder / "noisy")


def checkpoints(change: Change, *, harmless: bool = False, of: str = "checkpoint") -> Artefact:
    return Artefact(of, settings(change), "acted", ("{path}",), harmless)


def spec(**sizes: Any) -> Change:
    return lambda data: data["spec"].update(**sizes)


def net(**sizes: Any) -> Change:
    return lambda data: data["config"]["net"]["mlp"].update(**sizes)


def steps(count: int) -> Change:
    return lambda data: data["config"].update(steps=count)


def state(size: int) -> Change:
    return lambda data: data["spec"]["obs"]["shapes"].update(state=[size])


# Refused at any size: nothing of it lies there.
DECLARED = {
    "two widths of 20,000: 1.6 GB": net(hidden=[20_000, 20_000]),
    "a width just below 2^31": net(hidden=[2**31 - 1]),
    "a width of 10^18": net(hidden=[10**18]),
    "widths of 10^4 layers": net(hidden=[1] * 10**4),
    "an embedding of as many numbers as allowed": net(time_dim=WIDEST_TABLE),
    "a state of 30 MB": state(LARGEST_OBS // 4),
    "frames of 32 MB": spec(history=HISTORY),
    "the longest chunk": spec(horizon=LONGEST_CHUNK),
    "as many layers as allowed": net(hidden=[32] * DEEPEST),
    "normalisers of 2 GB": lambda data: data["spec"]["obs"]["shapes"].update({f"x{i}": [2**21] for i in range(100)}),
}
ABOVE = {
    "steps": steps(MOST_STEPS + 1),
    "steps without end": steps(10**9),
    "layers": net(hidden=[32] * (DEEPEST + 1)),
    "embedding": net(time_dim=WIDEST_TABLE + 2),
    "embedding just below 2^31": net(time_dim=2**31 - 2),
    "state": state(LARGEST_OBS // 4 + 1),
    "state just below 2^31": state(2**31 - 1),
    "frames": spec(history=HISTORY + 1),
    "frames just below 2^31": spec(history=2**31 - 1),
    "chunk": spec(horizon=LONGEST_CHUNK + 1),
    "chunk just below 2^31": spec(horizon=2**31 - 1),
    "axes": lambda data: data["spec"]["obs"]["shapes"].update(state=[1] * 9),
    "keys": lambda data: data["spec"]["obs"]["shapes"].update({f"x{i}": [1] for i in range(256)}),
}


def of_a_world(size: int) -> Artefact:
    """Of a policy that is not ours, which is asked about an observation of that size as soon as it is connected."""
    made = with_file(
        external("onnx", path="{path}/model.onnx", sha256=SHA256), "model.onnx", lambda path: path.write_bytes(MODEL)
    )

    def change(folder: Path) -> None:
        made.change(folder)
        world = {**WORLD, "obs": {"shapes": {"obs.state": [size]}}}
        settings(lambda data: data.update(world=world))(folder)

    return Artefact("checkpoint", change, "acted")


MODEL = network(inside=True)
SHA256 = hashlib.sha256(MODEL).hexdigest()


def bundle(**changes: Any) -> Artefact:
    """Written as a stranger can: by a writer that checks nothing."""

    def change(folder: Path) -> None:
        data = json.loads((folder / "policy.json").read_text())
        data.update({key: make(data[key]) for key, make in changes.items()})
        (folder / "policy.json").write_text(json.dumps(data))

    return Artefact("bundle", change, "played")


NOISE = {"shape": [MAX_NUMBERS], "rows": 1, "split": False, "drawn": True}
BUNDLES = {
    "noise of a hundred inputs": bundle(noise=lambda noise: [*noise, *[NOISE] * 100]),
    "noise, by one number": bundle(noise=lambda noise: [*noise, {**NOISE, "shape": [MAX_NUMBERS - 3]}]),
    "observations of 16 GB": bundle(
        schema=lambda schema: {**schema, "obs": {**schema["obs"], **{f"x{i}": [MAX_NUMBERS] for i in range(250)}}}
    ),
    "chunk": bundle(schema=lambda schema: {**schema, "horizon": MAX_CHUNK // 2 + 1}),
}

ARTEFACTS: dict[str, Artefact] = {
    **{f"limit: declared: {name}": checkpoints(change) for name, change in DECLARED.items()},
    **{f"limit: above: {name}": checkpoints(change) for name, change in ABOVE.items()},
    "limit: at: steps": checkpoints(steps(MOST_STEPS), harmless=True),
    "limit: at: chunk": checkpoints(lambda data: None, harmless=True, of="long"),
    "limit: at: picture": checkpoints(lambda data: None, harmless=True, of="seeing"),
    "limit: above: picture": checkpoints(
        lambda data: data["spec"]["obs"]["shapes"].update({"image.top": [3, SIDE, SIDE + 1]}), of="seeing"
    ),
    "limit: at: noise of a bundle": Artefact("noisy", lambda folder: None, "played", ("{path}",), True),
    "limit: declared: world of 2^28 numbers": of_a_world(2**28),
    "limit: declared: world just below 2^31": of_a_world(2**31 - 1),
    **{f"limit: above: bundle: {name}": artefact for name, artefact in BUNDLES.items()},
}
assert np.prod((3, SIDE, SIDE - 1)) + 12 <= LARGEST_OBS < np.prod((3, SIDE, SIDE + 1))
