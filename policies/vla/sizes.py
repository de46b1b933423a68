"""Sizes of a vision-language-action model. The defaults are those of SmolVLA (Shukor et al. 2025, arXiv 2506.01844).

They may come from a file, so they have limits, and what they add up to is known before anything is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..core.config import LATER
from ..core.errors import BurnishError
from ..core.ranges import check_ranges
from ..core.spec import require_bytes

LARGEST_MODEL = 1 << 35  # bytes of its weights in float32


@dataclass
class VisionConfig:
    """Sizes of the model that looks at pictures."""

    side: int = 512  # pixels of a picture as the model sees it, along each side
    patch: int = 16  # pixels of a patch along each side
    width: int = 768  # width of its layers
    layers: int = 12  # layers
    heads: int = 12  # heads of attention
    hidden: int = 3072  # width inside the feed-forward parts
    shuffle: int = 4  # patches along each side that become one token
    stem: bool = False  # two convolutions that see where a pixel lies, instead of patches; for small models
    # behind each convolution of the stem, the channels of a picture are scaled to mean 0 and variance 1 over its places
    instance_norm: bool = field(default=False, metadata=LATER)
    film: bool = False  # words scale and shift the channels of every patch (FiLM); for small models
    # patches have the places of those before them, as in transformers 4.55 to 4.57, with which a model may be trained
    late: bool = False

    def __post_init__(self) -> None:
        sizes = {"[4, 2048]": "side", "[2, 256]": "patch", "[1, 16]": "shuffle", "[1, 128]": "layers heads"}
        check_ranges(self, {**sizes, "[4, 16384]": "width", "[1, 65536]": "hidden"}, "vision.")
        if self.side % (self.patch * self.shuffle) or self.width % self.heads:
            raise BurnishError(
                f"vision.side={self.side} must be a multiple of patch={self.patch} times shuffle={self.shuffle}, and "
                f"vision.width={self.width} of heads={self.heads}"
            )
        if self.stem and self.patch % 2:
            raise BurnishError(f"vision.patch={self.patch} must be even with vision.stem=true")

    @property
    def patches(self) -> int:
        return (self.side // self.patch) ** 2

    @property
    def numbers(self) -> int:
        """Parameters, about."""
        layer = 4 * self.width**2 + 2 * self.width * self.hidden
        return self.layers * layer + self.width * (3 * self.patch**2 + self.patches)


@dataclass
class LanguageConfig:
    """Sizes of the language model."""

    vocabulary: int = 49280  # rows of its table of tokens
    width: int = 960  # width of its layers
    layers: int = 16  # layers
    heads: int = 15  # heads of queries
    key_heads: int = 5  # heads of keys and values
    head_dim: int = 64  # width of a head
    hidden: int = 2560  # width inside the feed-forward parts
    lm_head: bool = False  # weights of the way back to words are kept, unused, to be written again
    # Numbers of the tokens before a picture, of which the first stands behind it too; empty: no such tokens
    special: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes = {"[1, 1048576]": "vocabulary", "[4, 16384]": "width", "[1, 128]": "layers heads key_heads"}
        check_ranges(self, {**sizes, "[2, 1024]": "head_dim", "[1, 65536]": "hidden"}, "language.")
        require_heads(self.heads, self.key_heads, self.head_dim)
        if len(self.special) > 8 or not all(0 <= token < self.vocabulary for token in self.special):
            raise BurnishError(f"language.special={self.special} must be at most 8 numbers of tokens")

    @property
    def keys_width(self) -> int:
        return self.key_heads * self.head_dim

    @property
    def numbers(self) -> int:
        """Parameters, about."""
        layer = self.width * (2 * self.heads * self.head_dim + 2 * self.keys_width + 3 * self.hidden)
        return self.layers * layer + self.vocabulary * self.width * (2 if self.lm_head else 1)


@dataclass
class ExpertConfig:
    """Sizes of the model that makes actions. Its heads are those of the language model."""

    width: int = 720  # width of its layers
    layers: int = 16  # layers; where the language model has m times as many, every m-th of them has one
    hidden: int = 2048  # width inside the feed-forward parts
    # layers of the language model of which the first attends to itself too; the others only look back
    self_every: int = 2
    min_period: float = 4e-3  # shortest wave of the embedding of the time
    max_period: float = 4.0  # longest wave

    def __post_init__(self) -> None:
        sizes = {"[4, 16384]": "width", "[1, 128]": "layers self_every", "[1, 65536]": "hidden"}
        check_ranges(self, {**sizes, "(0, inf)": "min_period max_period"}, "expert.")
        if self.width % 2:
            raise BurnishError(f"expert.width={self.width} must be even")

    def numbers(self, language: LanguageConfig) -> int:
        """Parameters, about."""
        return self.layers * self.width * (4 * language.heads * language.head_dim + 3 * self.hidden) + 3 * self.width**2


def require_heads(heads: int, key_heads: int, size: int) -> None:
    """A check that query heads can be shared among key heads, and that a head can be rotated."""
    if heads % key_heads or size % 2:
        raise BurnishError(f"heads={heads} must be a multiple of key_heads={key_heads}, and head_dim={size} even")


def require_sizes(vision: VisionConfig, language: LanguageConfig, expert: ExpertConfig) -> None:
    """A check that the three fit each other and a memory."""
    if language.layers % expert.layers:
        raise BurnishError(f"language.layers={language.layers} must be a multiple of expert.layers={expert.layers}")
    every = language.layers // expert.layers
    if any((i * every % expert.self_every == 0) != (i % expert.self_every == 0) for i in range(expert.layers)):
        raise BurnishError(
            f"with expert.layers={expert.layers} of {language.layers} and expert.self_every={expert.self_every}, "
            "layers that were made to attend to themselves would be used to look back alone, or the other way around"
        )
    total = vision.numbers + language.numbers + expert.numbers(language)
    total += vision.width * vision.shuffle**2 * language.width
    require_bytes(4 * total, LARGEST_MODEL, "a model of these sizes")


def own_layer(i: int, language: LanguageConfig, expert: ExpertConfig) -> int | None:
    """The layer of the expert beside layer ``i`` of the language model."""
    every = language.layers // expert.layers
    return i // every if i % every == 0 else None


def hidden_of(width: int) -> int:
    """The width inside the feed-forward parts of a published expert of ``width``."""
    return 256 * math.ceil(4 * (2 * width // 3) / 256)
