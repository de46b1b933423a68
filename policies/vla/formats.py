"""The types of LeRobot's vision-language-action policies whose folders are read and written (`lerobot.py`): what a user
chooses, and what each type does its own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..core.errors import BurnishError
from ..core.execute import Precision
from ..lerobot.checkpoint import Given

Weights = dict[str, Tensor]
# Settings of any type that say nothing of how a policy acts; padding is masked.
PASSED = {
    *("empty_cameras", "freeze_vision_encoder", "train_expert_only", "optimizer_grad_clip_norm"),
    *("scheduler_decay_steps", "scheduler_decay_lr", "rtc_config", "tokenizer_max_length"),
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


class Format(NamedTuple):
    """A type of policy, as config.json names it."""

    type: str
    policy: str  # its name in our table of policies
    length: int  # tokens of an instruction, where config.json does not say
    tokenizer: str  # name of its tokenizer on the hub, which its processor holds
    unsaid: int  # tokens that it knows beyond the table of words
    causal: bool  # the first actions of a chunk do not depend on those behind them
    fixed: Mapping[str, Any]  # settings that must have this value, as the published models have it
    passed: set[str]  # settings that say nothing of how it acts
    read: set[str]  # settings that `config_of` reads
    weights: Callable[[Weights, str], Weights]  # those of a folder, under the published names
    config_of: Callable[[Given, Weights, Choices], Any]  # settings of ours; config.json must agree with the weights
    refusal: Callable[[Any], str | None]  # why LeRobot could not load a policy
    stored: Callable[[Any, Weights], Weights]  # the weights of a policy, as LeRobot wants to find them
    settings: Callable[[Any], dict[str, Any]]  # of config.json, beside those of every type
    before: Sequence[str]  # steps of its first processor, in their order


def periods_of(given: Given) -> tuple[float, float]:
    """The shortest and the longest wave of the embedding of the time."""
    first, last = given.settings.get("min_period", 4e-3), given.settings.get("max_period", 4.0)
    if not all(isinstance(x, (int, float)) and 0 < x < 1e6 for x in (first, last)):
        raise BurnishError(f"{given.path} has the malformed periods {(first, last)!r:.80}")
    return float(first), float(last)
