"""The part of a policy that is trained: all of it, its head, or low-rank changes of its layers. The rest is shared with
the policy that it was made from, never copied.

**LoRA** (Hu et al. 2021, arXiv 2106.09685): a layer's weight W becomes W + (alpha / rank) U D, with D (rank, inputs)
drawn as a fresh layer and U (outputs, rank) at 0, so that nothing changes before the first update. W and the biases
stay as they are. A checkpoint holds U and D beside the base; loading it merges them, and a plain policy remains.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .core.config import LATER
from .core.errors import BurnishError
from .core.ranges import check_ranges

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)


class Remember(Enum):
    """The form in which an observation is kept until a policy learns from it; all but pictures of a frozen model."""

    pictures = "pictures"
    embeddings = "embeddings"  # of a vision-language model: the tokens of its pictures, to be read with the words
    keys = "keys"  # the keys and values of all its layers: nothing of it is computed again


class Part(Enum):
    """The parts of a policy that can be trained."""

    all = "all"
    head = "head"  # all but the encoder of observations; of a vision-language-action model the expert
    lora = "lora"


@dataclass
class LoRAConfig:
    """Settings of low-rank adaptation: rank, and weight of the change."""

    rank: int = 8  # rank of the change of each layer
    alpha: float = 8.0  # the change counts alpha / rank times

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf)": "rank", "(0, inf)": "alpha"}, "lora.")


@dataclass
class TrainableConfig:
    """Settings of the part of a policy that is trained."""

    # part that is trained: all; head: all but the encoder of observations; lora: low-rank changes of every layer
    part: Part = Part.all
    rank: int = 8  # rank of the change of each layer, with part=lora
    alpha: float = 8.0  # weight of the change, which counts alpha / rank times, with part=lora
    # form in which observations are kept for updates: pictures; of a frozen vision-language model embeddings or keys
    remember: Remember = field(default=Remember.pictures, metadata=LATER)

    def __post_init__(self) -> None:
        LoRAConfig(self.rank, self.alpha)


class LowRank(nn.Module):
    """A weight, and the change of it that is learnt."""

    def __init__(self, weight: Tensor, config: LoRAConfig) -> None:
        super().__init__()
        self.config = config
        outputs, inputs = weight.flatten(1).shape
        rank = min(config.rank, outputs, inputs)
        self.down = nn.Parameter(torch.empty(rank, inputs, dtype=weight.dtype, device=weight.device))
        self.up = nn.Parameter(torch.zeros(outputs, rank, dtype=weight.dtype, device=weight.device))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.config.alpha / self.config.rank * (self.up @ self.down).view_as(weight)


def copied(policy: nn.Module) -> Any:
    """A copy of ``policy`` to be trained as it is: parameters that it keeps fixed are shared."""
    return copy.deepcopy(policy, {id(p): p for p in policy.parameters() if not p.requires_grad})


def shared(policy: nn.Module) -> Any:
    """``policy`` once more, on the very same numbers, which this copy does not train. It follows every update of them;
    settings, and what is made from settings, are its own."""
    still = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in policy.parameters()}
    return copy.deepcopy(policy, still | {id(b): b.detach() for b in policy.buffers()}).eval()


def trainable(policy: nn.Module, config: TrainableConfig) -> Any:
    """A copy of ``policy`` to be trained, by its parameters with ``requires_grad``; ``policy`` itself is left alone.
    The start of LoRA is drawn from torch's global generator."""
    made = _trainable(policy, config)
    if config.remember is not Remember.pictures:
        _require_frozen_encoder(made, config)
    return made


def _trainable(policy: nn.Module, config: TrainableConfig) -> Any:
    if config.part is Part.lora:
        return add_lora(shared(policy), LoRAConfig(config.rank, config.alpha))
    given = dict(policy.named_parameters())
    names = {name for name in given if _is_trained(policy, name, config.part)}
    if not names:
        kind = type(policy).__name__
        raise BurnishError(f"a {kind} has no parameters outside its encoder; use part=all or part=lora")
    still = {id(p): nn.Parameter(p.detach(), requires_grad=False) for name, p in given.items() if name not in names}
    made = copy.deepcopy(policy, still)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name in names)
    return made.eval()


def _require_frozen_encoder(policy: Any, config: TrainableConfig) -> None:
    """A check that no update changes what is remembered of an observation."""
    level = f"train.remember={config.remember.value}"
    if not hasattr(policy, "features"):
        raise BurnishError(
            f"{level} keeps the output of a vision-language model, and a {type(policy).__name__} has none; leave it at "
            "train.remember=pictures"
        )
    if any(p.requires_grad and policy.is_encoder(name) for name, p in policy.named_parameters()):
        raise BurnishError(
            f"{level} keeps the output of the vision-language model, and train.part={config.part.value} trains that "
            "model, so what is kept would become wrong; take train.part=head or lora, or train.remember=pictures"
        )


def _is_trained(policy: Any, name: str, part: Part) -> bool:
    """A large policy says itself which of its parameters stay as they are, and which are its encoder."""
    if hasattr(policy, "is_frozen") and policy.is_frozen(name):
        return False
    encodes = policy.is_encoder(name) if hasattr(policy, "is_encoder") else "encoder" in name.split(".")
    return part is Part.all or not encodes


def add_lora(policy: nn.Module, config: LoRAConfig) -> Any:
    """In place, to every linear and convolutional layer, or to those that the policy names (``adapts``)."""
    chosen = getattr(policy, "adapts", lambda name: True)
    layers = [part for name, part in policy.named_modules() if isinstance(part, LAYERS) and chosen(name)]
    if not layers:
        raise BurnishError(f"a {type(policy).__name__} has no linear or convolutional layers; use part=all")
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, config))
    return policy


def lora_of(policy: nn.Module) -> LoRAConfig | None:
    """The settings of its low-rank changes, if there are any."""
    return next((part.config for part in policy.modules() if isinstance(part, LowRank)), None)


def merge_lora(policy: nn.Module) -> None:
    """In place: each changed weight becomes a plain one."""
    for part in [*policy.modules()]:
        if isinstance(part, LAYERS) and any(isinstance(inner, LowRank) for inner in part.modules()):
            parametrize.remove_parametrizations(part, "weight")
