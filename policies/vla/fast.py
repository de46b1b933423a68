"""FAST tokens (Pertsch et al. 2025, arXiv 2501.09747): a chunk of actions as a short sequence of numbers, and back.

    chunk (H, A) in [-1, 1] -> DCT-II over time, orthonormal -> round(scale c) -> by frequency, then by action number
    -> a character for each integer, chr(c - lowest) -> byte-level BPE by the package `tokenizers`

It is data alone: the published processor is code on a hub, which is never run here. A sequence that decodes to another
count of coefficients than H A is an invalid draw and is refused; the published decoder turns it into zeros, the mean
action, without a word. Coefficients below ``lowest`` are clipped, as published.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import BurnishError
from ..core.ranges import check_ranges
from ..core.tree import check
from .words import library, tokenizer_of


@dataclass
class FASTConfig:
    """Settings of FAST tokens; the defaults are the published ones."""

    scale: float = 10.0  # of the coefficients before they are rounded
    vocabulary: int = 2048  # different tokens
    lowest: int = -354  # least coefficient that has a character

    def __post_init__(self) -> None:
        check_ranges(self, {"(0, inf)": "scale", "[256, 65536]": "vocabulary", "[-50000, 0]": "lowest"}, "fast.")


def cosines(length: int) -> Tensor:
    """(H, H) float64: row k holds the k-th wave of the orthonormal DCT-II, so its transpose is the inverse."""
    tick, wave = torch.arange(length, dtype=torch.float64), torch.arange(length, dtype=torch.float64)[:, None]
    waves = torch.cos(math.pi / length * (tick + 0.5) * wave) * math.sqrt(2 / length)
    waves[0] /= math.sqrt(2)
    return waves


class FAST:
    """``file`` holds the bytes of a tokenizer.json."""

    def __init__(self, file: bytes, config: FASTConfig | None = None) -> None:
        self.file, self.config, self._tokenizer = file, config or FASTConfig(), tokenizer_of(file)

    @classmethod
    def fitted(cls, chunks: Tensor, config: FASTConfig | None = None) -> FAST:
        """A tokenizer made for chunks (B, H, A) in [-1, 1]; ``lowest`` becomes the least of their coefficients."""
        config = config or FASTConfig()
        found = _rounded(chunks, config)
        config = FASTConfig(config.scale, config.vocabulary, min(0, int(found.min())))
        tokenizers = library()
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=config.vocabulary,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator(_texts(found, config), trainer)
        return cls(made.to_str().encode(), config)

    def encode(self, chunks: Tensor) -> list[list[int]]:
        """The tokens of chunks (B, H, A) in [-1, 1]."""
        return [self._tokenizer.encode(text).ids for text in _texts(_rounded(chunks, self.config), self.config)]

    def decode(self, tokens: Sequence[Sequence[int]], horizon: int, dim: int) -> Tensor:
        """(B, H, A) in [-1, 1]; a BurnishError for a sequence that is no chunk of this shape."""
        found, valid = self.read(tokens, horizon, dim)
        if not bool(valid.all()):
            row = int((~valid).nonzero()[0])
            raise BurnishError(
                f"the {len(tokens[row])} tokens of row {row} do not spell the {horizon * dim} coefficients of a chunk "
                f"of {horizon} actions of {dim} numbers: an invalid draw; draw again, or end the episode as failed"
            )
        return found

    def read(self, tokens: Sequence[Sequence[int]], horizon: int, dim: int) -> tuple[Tensor, Tensor]:
        """(B, H, A), and which rows are valid (B,); the others are zero."""
        found = torch.zeros(len(tokens), horizon, dim, dtype=torch.float64)
        valid = torch.zeros(len(tokens), dtype=torch.bool)
        known = self._tokenizer.get_vocab_size()
        for i, row in enumerate(tokens):
            if not all(0 <= token < known for token in row):
                continue
            # Bytes that form no character decode to U+FFFD, which no coefficient stands for.
            text = self._tokenizer.decode(list(row), skip_special_tokens=False)
            if len(text) == horizon * dim and "\ufffd" not in text:
                found[i] = torch.tensor([ord(x) + self.config.lowest for x in text], dtype=found.dtype).view(-1, dim)
                valid[i] = True
        return (cosines(horizon).T @ (found / self.config.scale)).clamp(-1, 1).float(), valid


def _rounded(chunks: Tensor, config: FASTConfig) -> Tensor:
    """(B, H, A) int64: the coefficients, low frequencies first."""
    length = check(chunks, "B H A")["H"]
    return (config.scale * (cosines(length) @ chunks.detach().cpu().double())).round().long()


def _texts(found: Tensor, config: FASTConfig) -> list[str]:
    rows: list[list[int]] = (found.flatten(1) - config.lowest).clamp(min=0).tolist()
    return ["".join(map(chr, row)) for row in rows]
