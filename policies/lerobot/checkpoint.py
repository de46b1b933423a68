"""Checkpoints of LeRobot's policies, read as checkpoints of ours.

    config.json                     type and settings of the policy, its features and their normalisation
    model.safetensors               weights, read strictly by name; before LeRobot 0.4 the statistics too
    policy_preprocessor.json        steps before the policy; the normaliser names a file of statistics
    policy_postprocessor.json       steps behind it

Nothing in such a folder can run code, and no file outside is opened. Unknown settings, which may matter, are refused.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..core.config import from_data, to_data
from ..core.errors import BurnishError
from ..core.spec import ActionSpec, ObsSpec, PolicySpec
from ..data.lerobot_layout import column_of, is_image, key_of
from ..runs.checkpoint import Checkpoint
from . import hub
from .act import LeRobotACTConfig
from .diffusion import LeRobotDiffusionConfig
from .features import Feature, Kind
from .names import ACT, CHAIN, CHOICES, CONFIG, DILATED, PLUGIN, UNET, VISION, WEIGHTS
from .scaling import EPSILON, Normalization, statistics_of
from .stored import is_weight, read_json, statistics_in, statistics_of_dataset, tensors_of

_log = logging.getLogger(__name__)

INNER = "pretrained_model"  # folder of the policy inside a checkpoint of a training run
# Settings that say how it was trained, where it ran or where it was published, and nothing of how it acts.
PASSED = {
    *("type", "device", "use_amp", "push_to_hub", "repo_id", "private", "tags", "license", "pretrained_path"),
    *("pretrained_revision", "pretrained_backbone_weights", "compile_model", "compile_mode", "gradient_checkpointing"),
    *("optimizer_lr", "optimizer_betas", "optimizer_eps", "optimizer_weight_decay", "optimizer_lr_backbone"),
    *("scheduler_name", "scheduler_warmup_steps", "drop_n_last_frames", "do_mask_loss_for_padding"),
    "crop_ratio",  # crop_shape is what came of it
}
# Settings that are read here for policies of every type.
COMMON = {"n_obs_steps", "n_action_steps", "input_features", "output_features", "normalization_mapping", "use_peft"}
ADAPTER = (
    "it is an adapter (PEFT) alone; merge it into its base with LeRobot first, or, for a SmolVLA or pi0, give the base "
    "as policy.path and this folder as policy.adapter"
)
# Files of a policy without `WEIGHTS`: why, and what to do; the first that are there count.
WITHOUT = {
    "*.safetensors.index.json": "they are in several files; load it in Python and save it with safetensors as one",
    "*.bin": "they are pickled (.bin), which can run code and is not opened; load it with LeRobot and save it again",
    "*": "perhaps its saving or its download was interrupted; take another checkpoint, or fetch it again",
}
ACT_DEVIATIONS = 3.0  # limits of actions whose smallest and largest are not known, in standard deviations


class Given(NamedTuple):
    """A folder as it was read: settings, features, and statistics of each feature."""

    path: Path
    settings: dict[str, Any]
    inputs: dict[str, Feature]  # by their names in LeRobot, in their order
    shapes: dict[str, tuple[int, ...]]  # of observations here
    action: Normalization
    dim: int
    statistics: dict[str, dict[str, Tensor]]
    state: dict[str, Tensor]

    def scaling(self, kind: Normalization, feature: str, shape: Sequence[int]) -> dict[str, Tensor]:
        """The buffers of a `FeatureScaling`, checked."""
        return statistics_of(kind, feature, shape, self.statistics.get(feature, {}), str(self.path))

    def scalings(self, prefix: str = "", actions: bool = True) -> dict[str, Tensor]:
        """Those of all inputs, and of the ``actions``, in a policy whose `Inputs` stand behind ``prefix``."""
        found = {"action_scaling": self.scaling(self.action, "action", (self.dim,))} if actions else {}
        for name, x in self.inputs.items():
            place, shape = f"inputs.scalings.{x.module}", x.statistic_shape(self.shapes[x.key])
            found[place] = self.scaling(x.normalization, name, shape)
        return {f"{prefix}{place}.{part}": x for place, parts in found.items() for part, x in parts.items()}


class Made(NamedTuple):
    """A policy of ours, as a type of LeRobot's describes it."""

    policy: str  # name in the table of policies
    config: Any
    horizon: int
    start: int
    prefix: str  # of the names of its weights here, in place of "diffusion."
    bounded: bool  # its normalised actions lie in [-1, 1]


def find(path: Path | str) -> Path | None:
    """The folder of a LeRobot policy at ``path``, in it, in the checkpoints of a training run there, or of that name on
    the hub; None where there is none. One without weights that are read is refused."""
    place = hub.snapshot(str(path), (CONFIG, WEIGHTS)) if hub.is_id(path) else Path(path)
    folders = [place, place / INNER, *_checkpoints(place), *_checkpoints(place / "checkpoints")]
    folders = [folder for folder in folders if not (folder / "manifest.json").exists()]
    for folder in folders:
        if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file():
            return folder
    for folder in folders:
        adapter = (folder / "adapter_model.safetensors").is_file()
        if adapter or ((folder / CONFIG).is_file() and isinstance(read_json(folder / CONFIG).get("type"), str)):
            why = ADAPTER if adapter else next(why for files, why in WITHOUT.items() if any(folder.glob(files)))
            raise BurnishError(f"{folder} has no {WEIGHTS}: {why}")
    return None


def _checkpoints(folder: Path) -> list[Path]:
    """The policies of a LeRobot run's checkpoints: of the one that its link "last" names, then the newest first. No
    link leads out of the ``folder``."""
    numbered = sorted((x for x in folder.glob("*") if x.name.isdecimal()), key=lambda x: int(x.name), reverse=True)
    found = [folder / "last", *numbered]
    return [x / INNER for x in found if x.is_dir() and x.resolve().parent == folder.resolve()]


def fingerprint(folder: Path) -> str:
    """SHA-256 over the files that decide how the policy acts."""
    digest = hashlib.sha256()
    for file in sorted([folder / CONFIG, *folder.glob("policy_*.json"), *folder.glob("*.safetensors")]):
        with open(file, "rb") as opened:
            digest.update(file.name.encode() + hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def load(folder: Path, keys: Mapping[str, str] | None = None, stats: str | None = None) -> Checkpoint:
    """A folder of LeRobot as one of ours: configuration, specification and weights. ``keys`` gives observations other
    names: theirs, as they would be called here, by ours. ``stats`` is a dataset whose statistics are taken instead."""
    settings = read_json(folder / CONFIG)
    if settings.get("type") == PLUGIN:
        return of_plugin(settings, folder / WEIGHTS)
    kind = KINDS.get(str(settings.get("type")))
    if kind is None:
        raise BurnishError(
            f"{folder} holds a LeRobot policy of type {settings.get('type')!r:.60}; {', '.join(KINDS)} are read "
            "here, and policy=lerobot lets LeRobot itself play any"
        )
    given = given_of(folder, settings, keys or {})
    if stats is not None:
        scaled = [name for name, x in given.inputs.items() if x.normalization is not Normalization.identity]
        given = given._replace(statistics=statistics_of_dataset(Path(stats), [*scaled, "action"]))
    made = kind(given)
    state = {made.prefix + name.removeprefix("diffusion."): x for name, x in given.state.items() if is_weight(name)}
    state |= given.scalings(made.prefix, actions=not made.bounded)
    low, high = limits_of(given, made.bounded)
    spec = PolicySpec(
        obs=ObsSpec(given.shapes),
        action=ActionSpec(low, high),
        horizon=made.horizon,
        execute=whole_of(given, "n_action_steps"),
        start=made.start,
        history=whole_of(given, "n_obs_steps", 1),
    )
    data = {"policy": made.policy, "config": to_data(made.config), "spec": to_data(spec.to_dict()), "origin": {}}
    return Checkpoint(data, state, {}, {}, folder)


def of_plugin(settings: Mapping[str, Any], weights: Path) -> Checkpoint:
    """A policy of ours that was written as one of LeRobot's plug-ins (`export.py`)."""
    described = settings.get(PLUGIN)
    if not isinstance(described, Mapping):
        raise BurnishError(f"{weights.parent / CONFIG} describes no policy of Burnish")
    state = {name.removeprefix("policy."): x for name, x in tensors_of(weights).items()}
    return Checkpoint(dict(described), state, {}, {}, weights.parent)


# ---- All types ----


def given_of(folder: Path, settings: dict[str, Any], keys: Mapping[str, str]) -> Given:
    """A folder of ``settings``, read; ``keys`` as for ``load``."""
    if settings.get("use_peft"):
        raise BurnishError(f"{folder} is not whole (use_peft): {ADAPTER}")
    state = tensors_of(folder / WEIGHTS)
    mapping = settings.get("normalization_mapping")
    if not isinstance(mapping, Mapping):
        raise BurnishError(f"{folder / CONFIG} has no normalization_mapping")
    inputs, shapes = {}, {}
    for name, (key, kind, shape) in observed(folder, settings, keys).items():
        column = "" if name == column_of(key) else name
        inputs[name] = Feature(key, kind, _mode(folder, mapping.get(kind.value, "IDENTITY")), column)
        shapes[key] = shape
    outputs = features(folder, settings, "output_features")
    if list(outputs) != ["action"] or len(outputs["action"][1]) != 1:
        raise BurnishError(f"{folder} gives {sorted(outputs)!r:.200}, but one vector 'action' is needed")
    statistics = statistics_in(folder, settings, state, keys.values())
    mode = _mode(folder, mapping.get("ACTION", "IDENTITY"))
    return Given(folder, settings, inputs, shapes, mode, outputs["action"][1][0], statistics, state)


def observed(
    folder: Path, settings: Mapping[str, Any], keys: Mapping[str, str]
) -> dict[str, tuple[str, Kind, tuple[int, ...]]]:
    """The features that a policy of ``settings`` observes, by their names in LeRobot: key here, type, shape. ``keys``
    gives other keys: to a name in LeRobot, or to the key that it would have."""
    found: dict[str, tuple[str, Kind, tuple[int, ...]]] = {}
    ours, known = {theirs: key for key, theirs in keys.items()}, {kind.value for kind in Kind}
    for name, (kind, shape) in features(folder, settings, "input_features").items():
        if kind not in known:
            raise BurnishError(f"{folder} observes {name!r:.80} of the type {kind!r:.40}, which is not known here")
        usual = key_of(name, image=kind == Kind.visual.value)
        key = ours.pop(name, None) or ours.pop(usual, usual)
        wanted = 3 if kind == Kind.visual.value else 1
        if len(shape) != wanted or (wanted == 3 and shape[0] != 3):
            raise BurnishError(f"{folder} observes {name!r:.80} of shape {shape}, which does not fit its type {kind}")
        if key in [other for other, _, _ in found.values()] or is_image(key) != (wanted == 3):
            raise BurnishError(
                f"{folder}: keys must name each observation once, and pictures image.<name>, not {key!r}"
            )
        found[name] = key, Kind(kind), shape
    if ours:
        keys_here = sorted(key for key, _, _ in found.values())
        raise BurnishError(f"{folder} has no observation {min(ours)!r:.80} to rename; it has {keys_here}")
    return found


def features(folder: Path, settings: Mapping[str, Any], name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of the inputs or outputs that ``settings`` list under ``name``: type and shape."""
    found = settings.get(name)
    try:
        assert isinstance(found, Mapping) and len(found) <= 64
        read = {str(key): (str(x["type"]), tuple(x["shape"])) for key, x in found.items()}
        assert all(type(d) is int and 0 < d <= 1 << 20 for _, shape in read.values() for d in shape)
    except (AssertionError, KeyError, TypeError) as error:
        raise BurnishError(f"{folder / CONFIG} has malformed {name}; each needs a type and a shape") from error
    return read


def _mode(folder: Path, name: Any) -> Normalization:
    try:
        return Normalization(name)
    except ValueError:
        raise BurnishError(
            f"{folder} normalises by {name!r:.40}; {', '.join(mode.value for mode in Normalization)} are known"
        ) from None


def limits_of(given: Given, bounded: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The actions that -1 and 1 stand for. Of a policy whose normalised actions are ``bounded`` by -1 and 1, these;
    else the smallest and largest action of the data, or where that is not known some deviations around the mean.
    Actions that are not normalised are refused then."""
    mode = given.action
    if not bounded and {"min", "max"} <= given.statistics.get("action", {}).keys():
        mode = Normalization.min_max
    if mode is Normalization.identity and not bounded:
        raise BurnishError(
            f"{given.path} does not normalise its actions, and knows no smallest and largest one, so nothing says "
            "where they end; name the dataset that it was trained on: policy.stats=FOLDER"
        )
    if mode is Normalization.identity:
        return (-1.0,) * given.dim, (1.0,) * given.dim
    first, second = given.scaling(mode, "action", (given.dim,)).values()
    if mode is Normalization.mean_std:
        spread = second * (1.0 if bounded else ACT_DEVIATIONS)
        first, second = first - spread, first + spread
        if not bounded:
            _log.warning(
                "%s knows the mean and the deviation of its actions and not their ends, so they are clipped at %g "
                "deviations: from %s to %s; if that is too narrow, as for a gripper that seldom closes, name the "
                "dataset that it was trained on: policy.stats=FOLDER",
                *(given.path, ACT_DEVIATIONS, _short(first), _short(second)),
            )
    low = first.double().tolist()
    return tuple(low), tuple(max(b, a + EPSILON) for a, b in zip(low, second.double().tolist(), strict=True))


def _short(x: Tensor) -> str:
    return "[" + ", ".join(f"{v:.3g}" for v in x.tolist()) + "]"


def whole_of(given: Given, name: str, default: int | None = None) -> int:
    """A whole number of config.json between 1 and 4096."""
    value = given.settings.get(name, default)
    if type(value) is not int or not 1 <= value <= 4096:
        raise BurnishError(f"{given.path / CONFIG} has {name}={value!r:.40}, but a number of 1 to 4096 is needed")
    return value


def settings_of(
    given: Given, used: Mapping[str, str], fixed: Mapping[str, Any], read: Collection[str]
) -> dict[str, Any]:
    """The settings of ``used``, theirs: ours, under our names. One that is neither there, nor ``fixed`` to the value
    that is known here, nor ``read`` elsewhere, nor passed over, is refused."""
    rest = set(given.settings) - set(used) - set(fixed) - set(read) - PASSED - COMMON
    rest = {name for name in rest if given.settings[name] is not None}
    if rest:
        raise BurnishError(
            f"{given.path / CONFIG} has settings that are not known here and may change how the policy acts: "
            f"{', '.join(sorted(rest))!r:.300}"
        )
    for name, value in fixed.items():
        if given.settings.get(name, value) != value:
            raise BurnishError(
                f"{given.path / CONFIG} has {name}={given.settings[name]!r:.60}, but only {value!r} is read"
            )
    return {ours: given.settings[theirs] for theirs, ours in used.items() if theirs in given.settings}


def _choice(given: Given, name: str, choices: Mapping[Any, str]) -> str:
    """The name here of one of theirs; the first is the default."""
    value = given.settings.get(name, next(iter(choices)))
    if not isinstance(value, str | bool) or value not in choices:
        raise BurnishError(f"{given.path / CONFIG} has {name}={value!r:.60}; {', '.join(map(str, choices))} are known")
    return choices[value]


# ---- Each type ----


def _diffusion(given: Given) -> Made:
    found = settings_of(
        given,
        {**CHAIN, **UNET, **VISION},
        {"clip_sample": True},
        {*CHOICES, "num_inference_steps", "use_group_norm", "horizon"},
    )
    data = {name: found[name] for name in CHAIN.values() if name in found}
    data |= {ours: _choice(given, theirs, known) for theirs, (ours, known) in CHOICES.items()}
    data["steps"] = given.settings.get("num_inference_steps") or data.get("train_steps", 100)
    looks = {name: found[name] for name in VISION.values() if name in found}
    looks["norm"] = _choice(given, "use_group_norm", {False: "batch", True: "group"})
    data["net"] = {name: found[name] for name in UNET.values() if name in found}
    data["net"] |= {"features": to_data(list(given.inputs.values())), "vision": looks}
    config = from_data(LeRobotDiffusionConfig, data, str(given.path / CONFIG))
    if config.clip is None or config.clip > 1:
        raise BurnishError(f"{given.path} clips actions at {config.clip}, outside [-1, 1], which is not read")
    start = whole_of(given, "n_obs_steps") - 1
    return Made("lerobot_diffusion", config, whole_of(given, "horizon"), start, "net.", bounded=True)


def _act(given: Given) -> Made:
    data = settings_of(given, ACT, {"temporal_ensemble_coeff": None}, {"chunk_size", DILATED})
    data["dilate_last"] = bool(given.settings.get(DILATED, False))  # LeRobot writes 0 and 1, too
    data |= {"features": to_data(list(given.inputs.values())), "action": given.action.name}
    config = from_data(LeRobotACTConfig, data, str(given.path / CONFIG))
    return Made("lerobot_act", config, whole_of(given, "chunk_size"), 0, "", bounded=False)


KINDS: dict[str, Callable[[Given], Made]] = {"diffusion": _diffusion, "act": _act}
