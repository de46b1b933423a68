"""Policies as LeRobot's own checkpoints: the way back of `checkpoint.py`, under the same names.

``files(policy)`` gives the files of a folder that LeRobot loads as it loads its own: settings, weights, and two
processors with the statistics of the normalisation. Actions are written as limits (``MIN_MAX``) where the policy's
are bounded, because that is all that is left of their normalisation here. A policy that LeRobot has no settings for
is refused with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from ..core.config import to_data
from ..core.errors import BurnishError
from ..core.spec import ActionSpec, PolicySpec
from ..diffusion import Sampler
from ..nets.resnet import Norm
from ..runs.state_codec import separate
from ..schedule import Spacing, train_indices
from .act import LeRobotACT
from .diffusion import LeRobotDiffusion, VisionBackboneConfig
from .features import Feature, Inputs
from .names import ACT, BEFORE, BEHIND, CHAIN, CHOICES, CONFIG, DILATED, NORMALISER, STEPS, UNET, VISION, WEIGHTS
from .scaling import EPSILON, Normalization

STATISTICS = "{}_step_{}_{}.safetensors"  # of a processor's step


class Written(NamedTuple):
    """A policy in the words of a type of LeRobot's."""

    settings: dict[str, Any]
    inputs: Inputs
    weights: dict[str, Tensor]
    action: Normalization
    statistics: dict[str, Tensor]  # of the action


def files(policy: Any) -> dict[str, bytes]:
    """By name. The normalisation of all observations of one type must be of one kind."""
    write = KINDS.get(type(policy))
    if write is None:
        raise BurnishError(f"LeRobot has no policy of its own that is a {type(policy).__name__}")
    spec, written = policy.spec, write(policy)
    features = written.inputs.features
    shown = {x.name: {"type": x.kind.value, "shape": list(spec.obs.shapes[x.key])} for x in features}
    acted = {"action": {"type": "ACTION", "shape": [spec.action.dim]}}
    modes = _modes(features) | {"ACTION": written.action.value}
    settings = {
        **written.settings,
        **{"n_obs_steps": spec.history, "n_action_steps": spec.execute, "device": "cpu", "push_to_hub": False},
        **{"input_features": shown, "output_features": acted, "normalization_mapping": modes},
    }
    of_inputs = {
        f"{x.name}.{statistic}": getattr(written.inputs.scalings[x.module], part)
        for x in features
        for part, statistic in zip(("first", "second"), x.normalization.statistics, strict=False)
    }
    kept = {**of_inputs, **{f"action.{name}": x for name, x in written.statistics.items()}}
    normaliser = {"eps": EPSILON, "norm_map": modes}
    return {
        CONFIG: as_json(settings),
        WEIGHTS: safetensors.torch.save(separate(written.weights)),
        **processor(BEFORE, {**normaliser, "features": {**shown, **acted}}, kept),
        **processor(BEHIND, {**normaliser, "features": acted}, kept),
    }


def processor(file: str, normaliser: Mapping[str, Any] | None, statistics: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The steps that are known for a processor, and the file of statistics that its normaliser names, if it has one."""
    name, steps, kept = file.removesuffix(".json"), list[Any](), {}
    configs = {"rename_observations_processor": {"rename_map": {}}, "device_processor": {"device": "cpu"}}
    for step in STEPS[file]:
        if step != NORMALISER[file]:
            steps.append({"registry_name": step, "config": configs.get(step, {})})
        elif normaliser is not None:
            state_file = STATISTICS.format(name, len(steps), step)
            steps.append({"registry_name": step, "config": dict(normaliser), "state_file": state_file})
            kept[state_file] = safetensors.torch.save(separate(statistics))
    return {file: as_json({"name": name, "steps": steps}), **kept}


def _modes(features: Sequence[Feature]) -> dict[str, str]:
    modes: dict[str, str] = {}
    for x in features:
        if modes.setdefault(x.kind.value, x.normalization.value) != x.normalization.value:
            raise BurnishError(f"LeRobot normalises all of {x.kind.value} alike, and this policy does not")
    return modes


def _ends(action: ActionSpec) -> dict[str, Tensor]:
    return {"min": torch.tensor(action.low), "max": torch.tensor(action.high)}


def as_json(data: Any) -> bytes:
    """A JSON file as LeRobot lays it out."""
    return (json.dumps(data, indent=4, allow_nan=False) + "\n").encode()


def _named(names: Mapping[str, str], data: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that came later are not in ``data`` where they have their default, which is LeRobot's too."""
    return {theirs: data[ours] for theirs, ours in names.items() if ours in data}


def _require_horizon(spec: PolicySpec, levels: int) -> None:
    if spec.horizon % 2**levels or spec.start != spec.history - 1:
        raise BurnishError(
            f"LeRobot's U-Net of {levels} levels makes chunks of a multiple of {2**levels} actions that begin at the "
            f"oldest observation; this policy has horizon={spec.horizon}, history={spec.history}, start={spec.start}"
        )


def _diffusion(policy: LeRobotDiffusion) -> Written:
    config: Any = policy.config
    net = config.net
    data: dict[str, Any] = to_data(config)
    if config.sampler is Sampler.ddim and config.eta > 0:
        raise BurnishError(f"LeRobot's DDIM adds no noise, but this policy has eta={config.eta}")
    if not torch.equal(policy.indices.cpu(), train_indices(config.train_steps, config.steps, Spacing.whole)):
        raise BurnishError(f"LeRobot visits other noise levels than spacing={config.spacing.value} does")
    if config.clip is None:
        raise BurnishError("the policy clips no actions, while its actions are cut at their limits; LeRobot does both")
    _require_horizon(policy.spec, len(net.channels))
    settings = {"type": "diffusion", "horizon": policy.spec.horizon, "num_inference_steps": config.steps}
    settings |= {"clip_sample": True, "use_group_norm": net.vision.norm is Norm.group}
    settings |= _named(CHAIN, data) | _named(UNET, data["net"]) | _looks(net.vision, data["net"]["vision"])
    for theirs, (ours, known) in CHOICES.items():
        settings[theirs] = next(name for name, called in known.items() if called == data[ours])
    state = {name.removeprefix("net."): x for name, x in policy.state_dict().items()}
    weights = {f"diffusion.{name}": x for name, x in state.items() if not name.startswith("inputs.")}
    return Written(settings, policy.net.inputs, weights, Normalization.min_max, _ends(policy.spec.action))


def _looks(config: VisionBackboneConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    """LeRobot computes the crop of a resized picture from a ratio."""
    looks = _named(VISION, data)
    if config.resize is None or config.crop is None:
        return looks
    ratio = (config.crop[0] + 0.5) / config.resize[0]
    if [int(side * ratio) for side in config.resize] != config.crop or ratio >= 1:
        raise BurnishError(
            f"LeRobot crops a resized picture by one ratio, but {config.crop} is none of {config.resize}"
        )
    return looks | {"crop_ratio": ratio}


def _act(policy: LeRobotACT) -> Written:
    config, scaling = policy.config, policy.action_scaling
    settings = {"type": "act", "chunk_size": policy.spec.horizon, DILATED: config.dilate_last}
    # The weights are all here: LeRobot need not fetch those that training of the cameras once began with.
    settings |= {**_named(ACT, to_data(config)), "pretrained_backbone_weights": None}
    weights = {name: x for name, x in policy.state_dict().items() if name.startswith("model.")}
    pairs = zip(config.action.statistics, ("first", "second"), strict=False)
    statistics = {name: getattr(scaling, part) for name, part in pairs}
    return Written(settings, policy.inputs, weights, config.action, _ends(policy.spec.action) | statistics)


KINDS: dict[type, Callable[[Any], Written]] = {LeRobotDiffusion: _diffusion, LeRobotACT: _act}
