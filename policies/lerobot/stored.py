"""The files of a LeRobot folder: JSON, tensors, and the statistics of its data, wherever they lie.

Nothing here follows a link or unpickles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ..core.errors import BurnishError
from ..core.files import is_plain
from ..data.lerobot_layout import key_of
from ..runs.checkpoint import check_header
from ..runs.manifest import parse
from .names import BEFORE, BEHIND, CONFIG, NORMALISER, STEPS
from .scaling import EPSILON

TYPES = ("STATE", "ENV", "VISUAL", "ACTION")  # of features
# Steps that do what `policies/vla/words.py` and `policies/vla/pi0.py` do.
SPEAKING = ("smolvla_new_line_processor", "pi0_new_line_processor", "tokenizer_processor")
SPEAKING += ("pi05_prepare_state_tokenizer_processor_step",)
RELATIVE = ("relative_actions_processor", "absolute_actions_processor")  # steps that do nothing where not enabled
_FILE = re.compile(r"[A-Za-z0-9_.-]{1,120}\.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint; a BurnishError where it holds none."""
    found = parse(path, json.loads)
    if not isinstance(found, dict):
        raise BurnishError(f"{path} is malformed: it must hold an object")
    return found


def tensors_of(path: Path) -> dict[str, Tensor]:
    """All tensors of a file."""
    if not is_plain(path):
        raise BurnishError(f"{path} is missing, or is no plain file")
    check_header(path)
    try:
        return {name: x.clone() for name, x in safetensors.torch.load_file(path).items()}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise BurnishError(f"{path} is malformed: {error}") from error


def is_weight(name: str) -> bool:
    """Not a statistic, which the model held too before LeRobot 0.4."""
    return not name.startswith(("normalize_inputs.", "normalize_targets.", "unnormalize_outputs."))


def statistics_in(
    folder: Path, settings: Mapping[str, Any], state: Mapping[str, Tensor], named: Collection[str]
) -> dict[str, dict[str, Tensor]]:
    """By feature and statistic: of the processors, or of the buffers that the model held before LeRobot 0.4. Inputs
    that a processor renames must be ``named``."""
    found: dict[str, dict[str, Tensor]] = {}
    if (folder / BEFORE).is_file() or (folder / BEHIND).is_file():
        for file in (BEFORE, BEHIND):
            for name, x in _processor(folder, file, settings, named).items():
                feature, _, statistic = name.rpartition(".")
                found.setdefault(feature, {})[statistic] = x
        return found
    features = [*settings["input_features"], *settings["output_features"]]
    flat = {feature.replace(".", "_"): feature for feature in features}
    for name, x in state.items():
        if is_weight(name):
            continue
        head, _, rest = name.partition(".buffer_")
        called, _, statistic = rest.rpartition(".")
        if called in flat:
            robot = head.partition(".")[2]  # of a policy that was trained on several
            found.setdefault(f"{robot}.{flat[called]}".lstrip("."), {})[statistic] = x
    return found


def _processor(folder: Path, file: str, settings: Mapping[str, Any], named: Collection[str]) -> dict[str, Tensor]:
    """The statistics of a processor; one with a step that changes numbers in another way is refused."""
    mapping, steps = settings["normalization_mapping"], read_json(folder / file).get("steps")
    if not isinstance(steps, list):
        raise BurnishError(f"{folder / file} lists no steps")
    found: dict[str, Tensor] = {}
    for step in steps:
        name = step.get("registry_name") if isinstance(step, Mapping) else None
        if name in RELATIVE and (step.get("config") or {}) == {**(step.get("config") or {}), "enabled": False}:
            continue
        if name not in STEPS[file] and not (file == BEFORE and name in SPEAKING):
            raise BurnishError(
                f"{folder / file} has the step {name!r:.60}, which is not known here and may change what the policy "
                f"sees or does; {', '.join(STEPS[file])} are known"
            )
        config = step.get("config") or {}
        if not isinstance(config, Mapping) or not isinstance(config.get("norm_map", {}), Mapping):
            raise BurnishError(f"{folder / file} has a malformed step {name!r}: {config!r:.200}")
        if name == "rename_observations_processor" and (renames := config.get("rename_map")):
            _require_named(folder / file, renames, settings["input_features"], named)
        if config.get("float_dtype") not in (None, "float32"):
            raise BurnishError(f"{folder / file} computes in {config['float_dtype']!r:.40}; only float32 is read")
        if name == NORMALISER[file]:
            own = {kind: config.get("norm_map", {}).get(kind, "IDENTITY") for kind in TYPES}
            same = own == {kind: mapping.get(kind, "IDENTITY") for kind in TYPES}
            if not same or config.get("eps", EPSILON) != EPSILON or config.get("normalize_observation_keys"):
                raise BurnishError(f"{folder / file} normalises otherwise than {CONFIG} says: {config!r:.300}")
            kept = step.get("state_file")
            if not isinstance(kept, str) or not _FILE.fullmatch(kept):
                raise BurnishError(f"{folder / file} names no file of statistics (state_file={kept!r:.80})")
            found |= tensors_of(folder / kept)
    return found


def _require_named(file: Path, renames: Any, inputs: Mapping[str, Any], named: Collection[str]) -> None:
    """Refuse a map of names of a robot to ``inputs``, unless ``named`` says of each what it is called here."""
    if not isinstance(renames, Mapping) or not all(isinstance(x, str) for x in renames.values()):
        raise BurnishError(f"{file} has a malformed rename_map: {renames!r:.200}")
    unsaid = {
        key_of(str(theirs), image=inputs[name]["type"] == "VISUAL"): name
        for theirs, name in renames.items()
        if name in inputs and not {name, key_of(name, image=True), key_of(name, image=False)} & {*named}
    }
    if unsaid:
        said = ", ".join(f"{key}: {name}" for key, name in unsaid.items())
        raise BurnishError(
            f"{file} renames observations; say what they are called in this world, as in 'policy.keys={{{said:.300}}}'"
        )


def statistics_of_dataset(folder: Path, features: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Of a LeRobot dataset: the ``features`` of its meta/stats.json, or of all its episodes together (version 2.1)."""
    whole, each = folder / "meta" / "stats.json", folder / "meta" / "episodes_stats.jsonl"
    apart = each.is_file() and not whole.exists()
    rows = parse(each, _by_line) if apart else [read_json(whole)]
    found: dict[str, dict[str, Tensor]] = {}
    for feature in features:
        for row in rows:
            if not isinstance(row.get(feature), Mapping):
                raise BurnishError(f"{folder} has no statistics of {feature}; it has {sorted(row)!r:.200}")
        try:
            names = rows[0][feature]
            stacked = {str(x): torch.tensor([row[feature][x] for row in rows], dtype=torch.float64) for x in names}
            found[feature] = _together(stacked) if apart else {name: x[0] for name, x in stacked.items()}
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise BurnishError(f"{each if apart else whole} has malformed statistics of {feature}") from error
    return found


def _by_line(text: str) -> list[dict[str, Any]]:
    """The statistics of each episode."""
    rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    if not rows or not all(isinstance(row, dict) and isinstance(row.get("stats"), dict) for row in rows):
        raise ValueError("each line must hold the statistics of an episode")
    return [row["stats"] for row in rows]


def _together(x: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of all frames, from those of E episodes, each (E, ...): their means are weighted by their frames."""
    share = x["count"].reshape(len(x["mean"]), *(1,) * (x["mean"].dim() - 1)) / x["count"].sum()
    mean = (share * x["mean"]).sum(0)
    variance = (share * (x["std"] ** 2 + (x["mean"] - mean) ** 2)).sum(0)
    return {"min": x["min"].amin(0), "max": x["max"].amax(0), "mean": mean, "std": variance.sqrt()}
