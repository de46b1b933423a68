"""Low-rank adapters in the files of PEFT: W + (alpha / r) B A, read into weights, or written from a trained policy.

    adapter_config.json          r, lora_alpha, the layers that are changed, the base
    adapter_model.safetensors    base_model.model.<layer>.lora_A.weight (r, inputs), .lora_B.weight (outputs, r)

The layers that are changed are those of the file. The base that it names is not opened: it is given by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ..core import files
from ..core.errors import BurnishError
from ..lerobot.stored import read_json, tensors_of
from ..trainable import LowRank
from .names import renamed

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Settings of PEFT with the values by which the change is the one above; others may change it.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None,),
    "target_parameters": (None, []),
}


def merged(weights: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The weights of a base, changed as the adapter in ``folder`` says."""
    settings = read_json(folder / CONFIG)
    for name, plain in PLAIN.items():
        if name in settings and settings[name] not in plain:
            raise BurnishError(f"{folder / CONFIG} has {name}={settings[name]!r:.60}, which is not read")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise BurnishError(f"{folder / CONFIG} needs a rank r of at least 1 and a finite lora_alpha")
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    found = {name.removeprefix(PREFIX): x.float() for name, x in tensors_of(folder / WEIGHTS).items()}
    found = renamed(found, str(folder))
    changed = dict(weights)
    for name, x in found.items():
        layer, _, part = name.rpartition(".lora_")
        if part == "B.weight":
            continue
        target = f"{layer}.weight" if part == "A.weight" else name  # the others are whole (modules_to_save)
        if target not in weights:
            raise BurnishError(f"{folder} changes {target!r:.160}, and the base has no such weight")
        new = x
        if part == "A.weight":
            up = found.get(f"{layer}.lora_B.weight")
            if up is None or up.ndim != 2 or x.shape[0] != rank or up.shape[1] != rank:
                raise BurnishError(f"{folder} has no two matrices of rank {rank} for {layer!r:.160}")
            if (len(up), x.shape[1]) != tuple(weights[target].shape):
                raise BurnishError(f"{folder} changes {target!r:.160} by a matrix of another shape than it has")
            new = weights[target].float() + scale * (up @ x)
        if new.shape != weights[target].shape:
            raise BurnishError(f"{folder} replaces {target!r:.160} by one of another shape")
        changed[target] = new
    return changed


def write(policy: nn.Module, folder: Path, base: str) -> None:
    """The low-rank changes of a policy that was made by ``trainable(part=lora)``; ``base`` is what they stand on."""
    stored: dict[str, Tensor] = {}
    layers: list[str] = []
    rank, alpha = 0, 0.0
    for name, part in policy.named_modules():
        if isinstance(part, LowRank):
            layer = name.partition(".parametrizations.")[0]
            rank, alpha = part.config.rank, part.config.alpha
            spare = rank - len(part.down)  # a small layer has fewer, and PEFT wants the same rank everywhere
            down, up = (x.detach().cpu() for x in (part.down, part.up))
            stored[f"{PREFIX}{layer}.lora_A.weight"] = torch.cat([down, down.new_zeros(spare, down.shape[1])])
            stored[f"{PREFIX}{layer}.lora_B.weight"] = torch.cat([up, up.new_zeros(len(up), spare)], 1)
            layers.append(layer)
    if not layers:
        raise BurnishError(f"a {type(policy).__name__} without low-rank changes has no adapter to write")
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": layers,
        "modules_to_save": None,
        "inference_mode": True,
    }
    files.new(folder)
    files.write_new(folder / CONFIG, json.dumps(settings, indent=2))
    files.write_new(folder / WEIGHTS, safetensors.torch.save({name: x.contiguous() for name, x in stored.items()}))
