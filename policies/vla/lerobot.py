"""SmolVLA in LeRobot's folders: read as a checkpoint of ours, and written again.

Beside what `policies/lerobot/checkpoint.py` says of such folders: the weights of the vision-language model are among
those of the policy, its tokenizer is not. A model that was trained on several robots holds a group of statistics for
each. LeRobot does not find them and passes numbers through unscaled; here one must be chosen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from ..core import files
from ..core.config import to_data
from ..core.errors import BurnishError
from ..core.execute import Precision
from ..core.spec import ActionSpec, ObsSpec, PolicySpec
from ..lerobot import checkpoint as folders
from ..lerobot.features import Feature, Kind
from ..lerobot.scaling import EPSILON, Normalization
from ..runs.checkpoint import Checkpoint
from . import names
from .lora import merged
from .sizes import hidden_of
from .smolvla import SmolVLA, SmolVLAConfig
from .words import Words

TYPE = "smolvla"
EMPTY = (
    "observation.images.empty_camera_"  # cameras that are never there: their tokens are masked, so nothing sees them
)
MARKS = ("<fake_token_around_image>", "<global-img>")  # tokens around a picture
# Settings that must have this value, as the published models have it; what else one of them does is not read.
FIXED = {"adapt_to_pi_aloha": False, "use_delta_joint_actions_aloha": False, "attention_mode": "cross_attn"}
PASSED = {
    *(
        "empty_cameras",
        "use_cache",
        "freeze_vision_encoder",
        "train_expert_only",
        "train_state_proj",
        "load_vlm_weights",
    ),
    *("optimizer_grad_clip_norm", "scheduler_decay_steps", "scheduler_decay_lr", "vlm_model_name", "pad_language_to"),
    *("prefix_length", "rtc_config", "tokenizer_max_length"),  # padding is masked
}
READ = {
    *("max_state_dim", "max_action_dim", "chunk_size", "num_steps", "num_vlm_layers", "num_expert_layers"),
    *("self_attn_every_n_layers", "expert_width_multiplier", "min_period", "max_period", "resize_imgs_with_padding"),
    "add_image_special_tokens",
}


class Choices(NamedTuple):
    """The choices of a user where a folder leaves something open."""

    keys: Mapping[str, str] = {}  # our name of an observation: theirs
    without: Sequence[str] = ()  # our names of cameras that are not there
    words: str | None = None  # tokenizer.json
    statistics: str | None = None  # group of statistics
    stats: str | None = None  # dataset whose statistics are taken
    adapter: str | None = None  # folder of a low-rank adapter
    horizon: int | None = None  # actions of a chunk
    execute: int | None = None  # of these, so many are executed
    late: bool = False  # places of patches as in transformers 4.55 to 4.57
    frozen_dtype: Precision = Precision.float32  # number format of the vision-language model


def load(folder: Path, chosen: Choices) -> Checkpoint:
    """A folder of LeRobot as one of ours."""
    settings = folders.read_json(folder / folders.CONFIG)
    listed = folders.features(folder, settings, "input_features")
    kept = {name: x for name, x in settings["input_features"].items() if not name.startswith(EMPTY)}
    for key in chosen.without:
        name = chosen.keys.get(key, key).replace("image.", "observation.images.")
        if kept.pop(name, None) is None or listed[name][0] != Kind.visual.value:
            raise BurnishError(f"{folder} has no camera {key!r:.80} to leave out; it has {sorted(kept)}")
    given = folders.given_of(folder, {**settings, "input_features": kept}, chosen.keys)
    given = given._replace(statistics=statistics_for(given, chosen))
    folders.settings_of(given, {}, FIXED, READ | PASSED)
    weights = {name: x for name, x in given.state.items() if folders.is_weight(name)}
    weights = names.renamed(weights, str(folder))
    weights.pop("model.vlm_with_expert.lm_expert.lm_head.weight", None)
    config = config_of(given, weights, chosen)
    halves = [name for name, x in weights.items() if x.dtype == torch.bfloat16]
    config.frozen_dtype = chosen.frozen_dtype
    config.bfloat16 = names.common_beginnings(halves, weights.keys() - set(halves))
    if chosen.adapter is not None:
        weights = merged(weights, Path(chosen.adapter))
    state = {name: x.float() for name, x in weights.items()} | given.scalings()
    obs = dict(given.shapes)
    read: dict[str, Any] = {}
    length = folders.whole_of(given, "tokenizer_max_length", 48)
    obs["tokens"] = (length,)
    if chosen.words is not None:
        words = Words.read(chosen.words, length)
        if words.vocabulary > config.language.vocabulary:
            raise BurnishError(
                f"{chosen.words} knows {words.vocabulary} tokens, and the model in {folder} "
                f"{config.language.vocabulary}: it is the tokenizer of another model"
            )
        read["words"] = to_data(words.config)
        state |= {f"words.{name}": x for name, x in words.state_dict().items()}
    whole = folders.whole_of(given, "chunk_size")
    horizon = chosen.horizon or whole
    if not 1 <= horizon <= whole:
        raise BurnishError(f"policy.horizon={chosen.horizon} must lie between 1 and the {whole} actions of its chunks")
    low, high = folders.limits_of(given, bounded=False)
    execute = min(chosen.execute or folders.whole_of(given, "n_action_steps"), horizon)
    spec = PolicySpec(ObsSpec(obs), ActionSpec(low, high), horizon, execute)
    data = {"policy": TYPE, "config": to_data(config), "spec": to_data(spec.to_dict()), "origin": {}, **read}
    return Checkpoint(data, state, {}, {}, folder)


def config_of(given: folders.Given, weights: Mapping[str, Tensor], chosen: Choices) -> SmolVLAConfig:
    """Settings, of which the sizes are those of the weights; config.json must agree."""
    settings, where = given.settings, str(given.path)
    every = settings.get("self_attn_every_n_layers", 2)
    every = every if type(every) is int and every > 0 else 128  # none but the first attends to itself
    periods = (settings.get("min_period", 4e-3), settings.get("max_period", 4.0))
    if not all(isinstance(x, (int, float)) and 0 < x < 1e6 for x in periods):
        raise BurnishError(f"{where} has the malformed periods {periods!r:.80}")
    special = marks(chosen.words) if settings.get("add_image_special_tokens") else []
    waves = float(periods[0]), float(periods[1])
    vision, language, expert = names.sizes_of(weights, every, waves, special, where, chosen.late)
    config = SmolVLAConfig(
        steps=folders.whole_of(given, "num_steps", 10),
        features=list(given.inputs.values()),
        action=given.action,
        state_dim=folders.whole_of(given, "max_state_dim", 32),
        action_dim=folders.whole_of(given, "max_action_dim", 32),
        vision=vision,
        language=language,
        expert=expert,
    )
    share = settings.get("expert_width_multiplier", 0.75)
    fewer = settings.get("num_expert_layers", -1)
    fewer = fewer if type(fewer) is int and fewer > 0 else language.layers
    said = {
        "num_vlm_layers": (settings.get("num_vlm_layers", 16), language.layers),
        "num_expert_layers": (fewer, expert.layers),
        "resize_imgs_with_padding": (settings.get("resize_imgs_with_padding", [512, 512]), [vision.side] * 2),
        "expert_width_multiplier": (int(language.width * share) if isinstance(share, float) else None, expert.width),
        "the hidden width of its expert": (hidden_of(expert.width), expert.hidden),
    }
    for name, (value, found) in said.items():
        if value != found:
            raise BurnishError(f"{where} says {name} is {value!r:.60}, but its weights are those of {found}")
    names.require_weights(weights, names.declared(vision, language, expert, config.state_dim, config.action_dim), where)
    return config


def marks(words: str | None) -> list[int]:
    """The numbers of the tokens around a picture, by the tokenizer."""
    if words is None:
        raise BurnishError("this model marks its pictures by tokens (add_image_special_tokens); give policy.words=...")
    added = folders.read_json(Path(words)).get("added_tokens")
    listed = [x for x in added or [] if isinstance(x, Mapping) and type(x.get("id")) is int]
    found: dict[Any, int] = {x.get("content"): x["id"] for x in listed}
    if not set(MARKS) <= found.keys():
        raise BurnishError(f"{words} has no tokens {' and '.join(MARKS)}, by which this model marks its pictures")
    return [found[mark] for mark in MARKS]


# ---- Statistics ----


def statistics_for(given: folders.Given, chosen: Choices) -> dict[str, dict[str, Tensor]]:
    """Of each feature: those of the folder, of one of its groups, or of a dataset."""
    found, where = given.statistics, given.path
    scaled = [name for name, x in given.inputs.items() if x.normalization is not Normalization.identity]
    scaled += ["action"] if given.action is not Normalization.identity else []
    if chosen.stats is not None:
        if chosen.statistics is not None:
            raise BurnishError("policy.stats and policy.statistics both say where statistics come from; leave one out")
        return {**found, **statistics_of_dataset(Path(chosen.stats), scaled)}
    groups: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, x in found.items():
        for feature in scaled:
            if name.endswith(f".{feature}"):
                group = name.removesuffix(f".{feature}").removesuffix(".buffer")
                groups.setdefault(group, {})[feature] = x
    if chosen.statistics is not None:
        if chosen.statistics not in groups:
            there = f"{sorted(groups)!r:.200}" if groups else "none"
            raise BurnishError(f"{where} has no group of statistics {chosen.statistics!r:.60}; it has {there}")
        return {**found, **groups[chosen.statistics]}
    missing = [feature for feature in scaled if feature not in found]
    if missing and groups:
        raise BurnishError(
            f"{where} has no statistics of {missing[0]}, but those of several robots, and LeRobot would pass numbers "
            f"through unscaled; take one by policy.statistics=..., of {sorted(groups)!r:.200}, or those of your own "
            "data by policy.stats=FOLDER"
        )
    return found


def statistics_of_dataset(folder: Path, features: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Of a LeRobot dataset: the ``features`` of its meta/stats.json."""
    listed = folders.read_json(folder / "meta" / "stats.json")
    found: dict[str, dict[str, Tensor]] = {}
    for feature in features:
        numbers = listed.get(feature)
        if not isinstance(numbers, Mapping):
            raise BurnishError(f"{folder} has no statistics of {feature}; it has {sorted(listed)!r:.200}")
        try:
            found[feature] = {str(name): torch.tensor(x, dtype=torch.float64) for name, x in numbers.items()}
        except (TypeError, ValueError) as error:
            raise BurnishError(f"{folder}/meta/stats.json has malformed statistics of {feature}") from error
    return found


# ---- Writing ----


def write(policy: SmolVLA, folder: Path) -> None:
    """A new folder that LeRobot loads, with the weights of ``policy`` as they were stored."""
    config = policy.config
    reason = None
    if config.vision.stem:
        reason = "looks through convolutions of its own (vision.stem)"
    elif config.language.head_dim != names.HEAD or config.vision.width != names.HEAD * config.vision.heads:
        reason = f"has heads of another width than {names.HEAD}"
    elif hidden_of(config.expert.width) != config.expert.hidden:
        reason = (
            f"has expert.hidden={config.expert.hidden}, where {hidden_of(config.expert.width)} follows from its width"
        )
    if reason:
        raise BurnishError(f"LeRobot cannot load this policy: it {reason}")
    weights = {name: x for name, x in policy.state_dict().items() if name.startswith("model.")}
    half = tuple(config.bfloat16)
    stored = {
        name: x.detach().to("cpu", torch.bfloat16 if half and name.startswith(half) else torch.float32).contiguous()
        for name, x in weights.items()
    }
    listed, statistics = features_of(policy)
    files.new(folder)
    content = {
        folders.CONFIG: json.dumps(settings_for(policy, listed), indent=4),
        folders.WEIGHTS: safetensors.torch.save(stored, {"format": "pt"}),
        **processors(policy, listed, statistics),
    }
    for name, x in content.items():
        files.write_new(folder / name, x)


def name_of(feature: Feature) -> str:
    """The name in LeRobot of an observation."""
    image = feature.kind is Kind.visual
    return f"observation.images.{feature.key.removeprefix('image.')}" if image else f"observation.{feature.key}"


def features_of(policy: SmolVLA) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Features by their names in LeRobot, the action last, and the statistics of those that are scaled."""
    listed: dict[str, dict[str, Any]] = {}
    statistics: dict[str, Tensor] = {}
    scalings = {name_of(x): policy.inputs.scaling(x) for x in policy.inputs.features}
    for feature in policy.inputs.features:
        shape = list(policy.spec.obs.shapes[feature.key])
        listed[name_of(feature)] = {"type": feature.kind.value, "shape": shape}
    listed["action"] = {"type": "ACTION", "shape": [policy.spec.action.dim]}
    for name, scaling in [*scalings.items(), ("action", policy.action_scaling)]:
        for part, statistic in zip(("first", "second"), scaling.kind.statistics, strict=False):
            statistics[f"{name}.{statistic}"] = getattr(scaling, part).detach().cpu().contiguous()
    statistics |= {  # the limits of the actions here, which are clipped to them
        f"action.{name}": torch.tensor(x)
        for name, x in (("min", policy.spec.action.low), ("max", policy.spec.action.high))
        if f"action.{name}" not in statistics
    }
    return listed, statistics


def mapping_of(policy: SmolVLA) -> dict[str, str]:
    """The normalisation of each type of feature."""
    found = {kind.value: Normalization.identity.value for kind in (Kind.visual, Kind.state)}
    return (
        found
        | {x.kind.value: x.normalization.value for x in policy.inputs.features}
        | {"ACTION": policy.config.action.value}
    )


def settings_for(policy: SmolVLA, listed: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json."""
    config, spec = policy.config, policy.spec
    fewer = -1 if config.expert.layers == config.language.layers else config.expert.layers
    return {
        "type": TYPE,
        "n_obs_steps": 1,
        "input_features": {name: x for name, x in listed.items() if name != "action"},
        "output_features": {"action": listed["action"]},
        "normalization_mapping": mapping_of(policy),
        "chunk_size": spec.horizon,
        "n_action_steps": spec.execute,
        "max_state_dim": policy.model.state_proj.in_features,
        "max_action_dim": policy.model.action_in_proj.in_features,
        "resize_imgs_with_padding": [config.vision.side] * 2,
        "tokenizer_max_length": spec.obs.shapes.get("tokens", (48,))[0],
        "num_steps": config.steps,
        "add_image_special_tokens": bool(config.language.special),
        "num_vlm_layers": config.language.layers,
        "num_expert_layers": fewer,
        "self_attn_every_n_layers": config.expert.self_every,
        "expert_width_multiplier": config.expert.width / config.language.width,
        "min_period": config.expert.min_period,
        "max_period": config.expert.max_period,
        "load_vlm_weights": False,  # they lie in the file beside this
    }


def processors(policy: SmolVLA, listed: Mapping[str, Any], statistics: Mapping[str, Tensor]) -> dict[str, str | bytes]:
    """Both processors, and the statistics that they name, under canonical names."""
    tokenizer = {
        "max_length": policy.spec.obs.shapes.get("tokens", (48,))[0],
        "task_key": "task",
        "padding_side": "right",
        "padding": "longest",
        "truncation": True,
        "tokenizer_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
    }
    scaling = {"eps": EPSILON, "features": dict(listed), "norm_map": mapping_of(policy)}
    place, behind = {"device": "cpu", "float_dtype": None}, {"features": {"action": listed["action"]}}
    steps = {
        folders.BEFORE: [
            ("rename_observations_processor", {"rename_map": {}}),
            ("to_batch_processor", {}),
            ("smolvla_new_line_processor", {}),
            ("tokenizer_processor", tokenizer),
            ("device_processor", place),
            ("normalizer_processor", scaling),
        ],
        folders.BEHIND: [("unnormalizer_processor", scaling | behind), ("device_processor", place)],
    }
    written: dict[str, str | bytes] = {}
    for file, listing in steps.items():
        entries = []
        for i, (name, config) in enumerate(listing):
            entries.append({"registry_name": name, "config": config})
            if name == folders.NORMALISER[file]:
                kept = f"{file.removesuffix('.json')}_step_{i}_{name}.safetensors"
                entries[-1]["state_file"] = kept
                written[kept] = safetensors.torch.save(dict(statistics))
        written[file] = json.dumps({"name": file.removesuffix(".json"), "steps": entries}, indent=2)
    return written
