"""Does an exported policy answer like the policy itself? The same seeds on both sides, row by row.

It compares chunks on random observations and on recorded ones, chunks that continue a prefix, and actions that are
corrected at their time. Differences are in units of [-1, 1]. Where the best of several draws is picked, two draws of
nearly the same worth may change places by rounding: a small share of the rows may differ there, and the report says how
many did. And where the policy itself, in float32, is further from itself in float64 (a solver that begins at sigma = 20
multiplies what the network says by 20), twice that distance is allowed on top, and reported as ``rounding``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ...policies.core.errors import BurnishError
from ...policies.core.seed import RowNoise
from ...policies.core.types import Obs
from ...policies.data.read import read_dataset
from . import runtime
from .bundle import Bundle, Schema, is_image, stacked_by_history
from .runtime import ExportedPolicy

TOLERANCE = 1e-5
SWAPPED = 1e-3  # share of rows in which two draws of the same worth may have changed places
ROWS = 500  # asked of torch at once
RECORDED = 1000
FEWER = 500  # rows with a prefix
LONGEST_S = 60.0  # for the answers of a slow network; the report says to how many observations they belong


def planner_and_corrections(policy: Any) -> tuple[Any, list[Any]]:
    """The policy that makes the chunks, and those that correct their actions, each at its time, the innermost first. A
    correction draws nothing, so ``Greedy`` around one is ``Greedy`` around its base."""
    per_step = getattr(policy, "per_step", False)
    if not (per_step or getattr(policy, "always_greedy", False)):
        return policy, []
    made, corrections = planner_and_corrections(policy.base)
    if per_step:
        return made, [*corrections, policy]
    return (type(policy)(made), corrections) if corrections else (policy, [])


def corrected(policy: Any, obs: Obs, action: torch.Tensor) -> torch.Tensor:
    """The action after all corrections of single actions."""
    for correction in planner_and_corrections(policy)[1]:
        action = correction.corrected(obs, action)
    return action


def report(
    policy: Any, bundle: Bundle, *, samples: int, seed: int, recorded: Mapping[str, NDArray[Any]] | None = None
) -> dict[str, Any]:
    """The largest differences, or a refusal where one is beyond ``TOLERANCE``."""
    rng = np.random.default_rng(seed)
    random = observations(policy, bundle.schema, samples, rng)
    found: dict[str, Any] = {}
    swaps = any(noise.split for noise in bundle.noise)
    # Where all that counts for the critic is committed already, all draws are worth the same, and the pick is rounding.
    longest = bundle.schema.start + bundle.schema.execute - 1 if swaps else bundle.schema.horizon
    exported = ExportedPolicy(bundle)
    found["random"] = _chunks(policy, exported, random, rng)
    if recorded is not None:
        found["recorded"] = _chunks(policy, exported, recorded, rng)
    fewer = {key: x[:FEWER] for key, x in random.items()}
    if exported.continues and longest:
        found["prefix"] = _chunks(policy, exported, fewer, rng, longest)
    if exported.ticks:
        found["tick"] = _ticks(policy, exported, fewer, rng)
    for name, said in found.items():
        allowed = TOLERANCE + 2 * said.get("rounding", 0.0)
        if said["largest"] > allowed and not (swaps and said["beyond"] <= max(1, SWAPPED * said["rows"])):
            raise BurnishError(
                f"the exported policy differs from the original by {said['largest']:.1e} on {name} observations, and "
                f"{allowed:.1e} is allowed; nothing was written"
            )
    return {"tolerance": TOLERANCE, "torch": str(torch.__version__), **found}


def largest(report: Mapping[str, Any]) -> float:
    """The largest difference that a report names, of all kinds of observations."""
    return max((x["largest"] for x in report.values() if isinstance(x, Mapping)), default=0.0)


def observations(policy: Any, schema: Schema, count: int, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Random ones, as wide as those that the policy was normalised for."""
    found: dict[str, NDArray[Any]] = {}
    scalers: dict[str, Any] = {}
    features: dict[str, Any] = {}
    for part in policy.modules() if isinstance(policy, nn.Module) else ():
        if type(part).__name__ == "ObsEncoder":
            theirs: Any = part
            scalers = {**{key: theirs.normalizer.scaler(key) for key in theirs.normalizer.names}, **scalers}
        if type(part).__name__ == "Inputs":  # of a policy that LeRobot trained
            theirs = part
            features = {x.key: theirs.scalings[x.module] for x in theirs.features}
    for key, shape in schema.obs.items():
        if is_image(key):
            found[key] = rng.integers(0, 256, (count, *shape), np.uint8)
            continue
        found[key] = rng.standard_normal((count, *shape)).astype(np.float32)
        if key in scalers:
            found[key] = found[key] * scalers[key].scale.numpy() + scalers[key].shift.numpy()
        elif key in features:
            found[key] = features[key].inverse(torch.as_tensor(found[key])).numpy()
    if schema.goal_free:
        found["goal_mask"] = rng.integers(0, 2, count).astype(np.float32)
    return found


def recorded(data: str, schema: Schema, seed: int) -> dict[str, NDArray[Any]]:
    """Observations out of recordings, with their histories."""
    episodes = list(read_dataset(data))
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(episodes), RECORDED)
    ticks = [int(rng.integers(0, len(episodes[i]))) for i in chosen]
    found: dict[str, NDArray[Any]] = {}
    for key, shape in schema.obs.items():
        lacking = [episode for episode in episodes if key not in episode.obs]
        if lacking:
            raise BurnishError(f"data={data} has no {key!r}, which the policy observes")
        back = range(1 - schema.history, 1) if schema.history > 1 and stacked_by_history(key) else [0]
        rows = [
            np.stack([episodes[i].obs[key][max(t + before, 0)].numpy() for before in back])
            for i, t in zip(chosen, ticks, strict=True)
        ]
        found[key] = np.stack(rows).reshape(RECORDED, *shape)
    return found


def _chunks(
    policy: Any,
    exported: ExportedPolicy,
    obs: Mapping[str, NDArray[Any]],
    rng: np.random.Generator,
    longest: int | None = None,
) -> dict[str, Any]:
    """With prefixes of 1 to ``longest`` actions, if that is given."""
    schema = exported.schema
    count = len(next(iter(obs.values())))
    seeds, index = rng.integers(0, 2**62, count), rng.integers(0, 1000, count)
    heads = rng.uniform(-1, 1, (count, schema.horizon, schema.dim)).astype(np.float32)
    # Rows that are asked together have prefixes of one length.
    together = ROWS // 20 if longest else ROWS
    lengths = np.repeat(rng.integers(1, longest + 1, -(-count // together)), together) if longest else None

    def answers(asked: Any) -> NDArray[Any]:
        found = []
        for begin in range(0, count, together):
            rows = slice(begin, min(begin + together, count))
            head = None if lengths is None else torch.as_tensor(heads[rows, : lengths[begin]])
            source = RowNoise(torch.as_tensor(seeds[rows]), torch.as_tensor(index[rows]))
            with torch.no_grad():
                found.append(asked.act(_tensors(obs, rows), prefix=head, generator=source).numpy())
        return np.concatenate(found)

    ours: list[NDArray[Any]] = []
    until = time.monotonic() + LONGEST_S
    while len(ours) < count and time.monotonic() < until:
        i = len(ours)
        head, noise = None if lengths is None else heads[i, : lengths[i]], runtime.RowNoise([seeds[i]], [index[i]])
        ours.append(exported.act({key: x[i] for key, x in obs.items()}, prefix=head, source=noise))
    count = len(ours)
    acting = planner_and_corrections(policy)[0]
    theirs = answers(acting)
    said = _said(np.stack(ours), theirs)
    if said["largest"] > TOLERANCE and isinstance(policy, nn.Module):
        said["rounding"] = _said(theirs, answers(copy.deepcopy(acting).double()))["largest"]
    return said


def _ticks(
    policy: Any, exported: ExportedPolicy, obs: Mapping[str, NDArray[Any]], rng: np.random.Generator
) -> dict[str, Any]:
    count = len(next(iter(obs.values())))
    actions = rng.uniform(-1, 1, (count, exported.schema.dim)).astype(np.float32)
    with torch.no_grad():
        theirs = corrected(policy, _tensors(obs, slice(0, count)), torch.as_tensor(actions)).numpy()
    ours = [exported.correct({key: x[i] for key, x in obs.items()}, actions[i]) for i in range(count)]
    return _said(np.stack(ours), theirs)


def _said(ours: NDArray[Any], theirs: NDArray[Any]) -> dict[str, Any]:
    apart = np.abs(ours.astype(np.float64) - theirs).reshape(len(ours), -1).max(1)
    return {"rows": len(ours), "largest": float(apart.max()), "beyond": int((apart > TOLERANCE).sum())}


def _tensors(obs: Mapping[str, NDArray[Any]], rows: slice) -> Obs:
    return {key: torch.as_tensor(x[rows]) for key, x in obs.items()}
