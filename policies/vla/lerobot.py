"""SmolVLA, and what it shares with pi0 (`pi0_folder.py`), in LeRobot's folders: read as a checkpoint of ours, and
written again.

Beside what `policies/lerobot/checkpoint.py` says of such folders: the weights of the vision-language model are among
those of the policy, its tokenizer is not. A model that was trained on several robots holds a group of statistics for
each. LeRobot does not find them and passes numbers through unscaled; here one must be chosen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ..core import files
from ..core.config import to_data
from ..core.errors import BurnishError
from ..core.spec import ActionSpec, ObsSpec, PolicySpec
from ..lerobot import checkpoint as folders
from ..lerobot.features import Kind
from ..lerobot.names import BEFORE, BEHIND, NORMALISER
from ..lerobot.scaling import EPSILON, Normalization
from ..lerobot.stored import is_weight, read_json, statistics_of_dataset
from ..runs.checkpoint import Checkpoint
from . import formats, names, pi0_folder
from .formats import Choices, Format
from .lora import merged
from .sizes import hidden_of
from .smolvla import SmolVLA, SmolVLAConfig
from .words import Words

EMPTY = (
    "observation.images.empty_camera_"  # cameras that are never there: their tokens are masked, so nothing sees them
)
MARKS = ("<fake_token_around_image>", "<global-img>")  # tokens around a picture


def load(folder: Path, chosen: Choices) -> Checkpoint:
    """A folder of LeRobot as one of ours."""
    settings = read_json(folder / folders.CONFIG)
    form = FORMATS[str(settings.get("type"))]
    listed = folders.features(folder, settings, "input_features")
    kept = {name: x for name, x in settings["input_features"].items() if not name.startswith(EMPTY)}
    for key in chosen.without:
        name = chosen.keys.get(key, key).replace("image.", "observation.images.")
        if kept.pop(name, None) is None or listed[name][0] != Kind.visual.value:
            raise BurnishError(f"{folder} has no camera {key!r:.80} to leave out; it has {sorted(kept)}")
    given = folders.given_of(folder, {**settings, "input_features": kept}, chosen.keys)
    given = given._replace(statistics=statistics_for(given, chosen))
    folders.settings_of(given, {}, form.fixed, form.read | form.passed | formats.PASSED)
    weights = {name: x for name, x in given.state.items() if is_weight(name)}
    weights = form.weights(weights, str(folder))
    config = form.config_of(given, weights, chosen)
    halves = [name for name, x in weights.items() if x.dtype == torch.bfloat16]
    config.frozen_dtype = chosen.frozen_dtype
    config.bfloat16 = names.common_beginnings(halves, weights.keys() - set(halves))
    if chosen.adapter is not None:
        weights = merged(weights, Path(chosen.adapter))
    state = {name: x.float() for name, x in weights.items()} | given.scalings()
    obs = dict(given.shapes)
    read: dict[str, Any] = {}
    length = folders.whole_of(given, "tokenizer_max_length", form.length)
    obs["tokens"] = (length,)
    if chosen.words is not None:
        words = Words.read(chosen.words, length)
        if words.vocabulary > config.language.vocabulary + form.unsaid:
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
    if horizon != whole and not form.causal:
        raise BurnishError(
            f"policy.horizon={horizon}: the actions of a {form.policy} see each other, so a chunk of fewer than "
            f"{whole} would be that of another policy; take policy.execute to play fewer of them"
        )
    low, high = folders.limits_of(given, bounded=False)
    execute = min(chosen.execute or folders.whole_of(given, "n_action_steps"), horizon)
    spec = PolicySpec(ObsSpec(obs), ActionSpec(low, high), horizon, execute)
    data = {"policy": form.policy, "config": to_data(config), "spec": to_data(spec.to_dict()), "origin": {}, **read}
    return Checkpoint(data, state, {}, {}, folder)


def weights_of(weights: formats.Weights, where: str) -> formats.Weights:
    """The weights of a folder under the names of ours; a way of the expert to words is never used."""
    found = names.renamed(weights, where)
    found.pop("model.vlm_with_expert.lm_expert.lm_head.weight", None)
    return found


def config_of(given: folders.Given, weights: formats.Weights, chosen: Choices) -> SmolVLAConfig:
    """Settings, of which the sizes are those of the weights; config.json must agree."""
    settings, where = given.settings, str(given.path)
    every = settings.get("self_attn_every_n_layers", 2)
    every = every if type(every) is int and every > 0 else 128  # none but the first attends to itself
    special = marks(chosen.words) if settings.get("add_image_special_tokens") else []
    waves = formats.periods_of(given)
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
    added = read_json(Path(words)).get("added_tokens")
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


# ---- Writing ----


def write(policy: SmolVLA, folder: Path) -> None:
    """A new folder that LeRobot loads."""
    files.write_folder(folder, content_of(policy))


def content_of(policy: SmolVLA) -> dict[str, str | bytes]:
    """The files of a folder that LeRobot loads, by name. Weights have the type that they were stored in, where it still
    holds them."""
    config, form = policy.config, form_of(policy)
    if reason := form.refusal(policy):
        raise BurnishError(f"LeRobot cannot load this policy: it {reason}")
    weights = {name: x for name, x in policy.state_dict().items() if name.startswith("model.")}
    half = tuple(config.bfloat16)
    stored = {name: x.detach().cpu().float().contiguous() for name, x in weights.items()}
    for name, x in stored.items() if half else ():
        if name.startswith(half) and torch.equal(x.bfloat16().float(), x):  # what was trained may need more digits
            stored[name] = x.bfloat16()
    listed, statistics = features_of(policy)
    return {
        folders.CONFIG: json.dumps(settings_for(policy, listed), indent=4),
        folders.WEIGHTS: safetensors.torch.save(form.stored(policy, stored), {"format": "pt"}),
        **processors(policy, listed, statistics),
    }


def form_of(policy: SmolVLA) -> Format:
    """The type of LeRobot's that a policy of ours is."""
    return pi0_folder.form_of(policy.config) or SMOLVLA


def refusal(policy: SmolVLA) -> str | None:
    """A reason why LeRobot could not load it."""
    config = policy.config
    if config.vision.stem or config.vision.film:
        return "looks in ways of its own (vision.stem, vision.film)"
    if config.language.head_dim != names.HEAD or config.vision.width != names.HEAD * config.vision.heads:
        return f"has heads of another width than {names.HEAD}"
    if hidden_of(config.expert.width) != config.expert.hidden:
        return (
            f"has expert.hidden={config.expert.hidden}, where {hidden_of(config.expert.width)} follows from its width"
        )
    return None


def features_of(policy: SmolVLA) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Features by their names in LeRobot, the action last, and the statistics of those that are scaled."""
    listed: dict[str, dict[str, Any]] = {}
    statistics: dict[str, Tensor] = {}
    scalings = {x.name: policy.inputs.scaling(x) for x in policy.inputs.features}
    for feature in policy.inputs.features:
        shape = list(policy.spec.obs.shapes[feature.key])
        listed[feature.name] = {"type": feature.kind.value, "shape": shape}
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
    config, spec, form = policy.config, policy.spec, form_of(policy)
    return {
        "type": form.type,
        "n_obs_steps": 1,
        "input_features": {name: x for name, x in listed.items() if name != "action"},
        "output_features": {"action": listed["action"]},
        "normalization_mapping": mapping_of(policy),
        "chunk_size": spec.horizon,
        "n_action_steps": spec.execute,
        "max_state_dim": getattr(policy.model, "state_proj", policy.model.action_in_proj).in_features,
        "max_action_dim": policy.model.action_in_proj.in_features,
        "tokenizer_max_length": spec.obs.shapes.get("tokens", (form.length,))[0],
        "min_period": config.expert.min_period,
        "max_period": config.expert.max_period,
        **form.settings(policy),
    }


def smolvla_settings(policy: SmolVLA) -> dict[str, Any]:
    """Of config.json."""
    config = policy.config
    return {
        "resize_imgs_with_padding": [config.vision.side] * 2,
        "num_steps": config.steps,
        "add_image_special_tokens": bool(config.language.special),
        "num_vlm_layers": config.language.layers,
        "num_expert_layers": -1 if config.expert.layers == config.language.layers else config.expert.layers,
        "self_attn_every_n_layers": config.expert.self_every,
        "expert_width_multiplier": config.expert.width / config.language.width,
        "load_vlm_weights": False,  # they lie in the file beside this
    }


def processors(policy: SmolVLA, listed: Mapping[str, Any], statistics: Mapping[str, Tensor]) -> dict[str, str | bytes]:
    """Both processors, and the statistics that they name, under canonical names."""
    form = form_of(policy)
    tokenizer = {
        "max_length": policy.spec.obs.shapes.get("tokens", (form.length,))[0],
        "task_key": "task",
        "padding_side": "right",
        "padding": "longest",
        "truncation": True,
        "tokenizer_name": form.tokenizer,
    }
    scaling = {"eps": EPSILON, "features": dict(listed), "norm_map": mapping_of(policy)}
    place, behind = {"device": "cpu", "float_dtype": None}, {"features": {"action": listed["action"]}}
    configs = {
        "rename_observations_processor": {"rename_map": {}},
        "tokenizer_processor": tokenizer,
        "device_processor": place,
        "normalizer_processor": scaling,
    }
    steps = {
        BEFORE: [(name, configs.get(name, {})) for name in form.before],
        BEHIND: [("unnormalizer_processor", scaling | behind), ("device_processor", place)],
    }
    written: dict[str, str | bytes] = {}
    for file, listing in steps.items():
        entries = []
        for i, (name, config) in enumerate(listing):
            entries.append({"registry_name": name, "config": config})
            if name == NORMALISER[file]:
                kept = f"{file.removesuffix('.json')}_step_{i}_{name}.safetensors"
                entries[-1]["state_file"] = kept
                written[kept] = safetensors.torch.save(dict(statistics))
        written[file] = json.dumps({"name": file.removesuffix(".json"), "steps": entries}, indent=2)
    return written


SMOLVLA = Format(
    type="smolvla",
    policy="smolvla",
    length=48,
    tokenizer="HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
    unsaid=SmolVLA.unsaid,
    causal=True,
    fixed={"adapt_to_pi_aloha": False, "use_delta_joint_actions_aloha": False, "attention_mode": "cross_attn"},
    passed={"use_cache", "train_state_proj", "load_vlm_weights", "vlm_model_name", "pad_language_to", "prefix_length"},
    read={
        *("max_state_dim", "max_action_dim", "chunk_size", "num_steps", "num_vlm_layers", "num_expert_layers"),
        *("self_attn_every_n_layers", "expert_width_multiplier", "min_period", "max_period"),
        *("resize_imgs_with_padding", "add_image_special_tokens"),
    },
    weights=weights_of,
    config_of=config_of,
    refusal=refusal,
    stored=lambda policy, weights: weights,
    settings=smolvla_settings,
    before=(
        *("rename_observations_processor", "to_batch_processor", "smolvla_new_line_processor", "tokenizer_processor"),
        *("device_processor", "normalizer_processor"),
    ),
)
FORMATS = {form.type: form for form in (SMOLVLA, pi0_folder.PI0, pi0_folder.PI05)}
