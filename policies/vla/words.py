"""Instructions as numbers: a ``tokenizer.json`` of Hugging Face, which becomes part of the policy that reads by it.

A text ends with a line break, as SmolVLA and pi0 were trained, and is cut to ``length`` tokens; behind its end stands
-1, so that no second key says which tokens are real. Padding and truncation that the file itself asks for are not done.

The file is data: its size is bounded, nothing in it is executed, and it is parsed by the package `tokenizers`, which is
imported here alone. Its bytes are a buffer, so the checkpoint of a policy holds, and hashes, what the policy reads by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import BurnishError, reason
from ..core.language import NEGATIVE, POSITIVE, padded
from ..core.ranges import check_ranges

LARGEST_FILE = 48 << 20  # bytes; the file of PaliGemma, with 257,000 tokens, has 17 million
LONGEST = 1024  # characters of a text
UNKNOWN = "[UNK]"  # a word that a tokenizer of whole words has not seen


@dataclass
class WordsConfig:
    """Sizes of a tokenizer: of an instruction, of its vocabulary, of its file."""

    length: int = 48  # tokens of an instruction at most
    vocabulary: int = 1  # different tokens
    bytes: int = 0  # of the file

    def __post_init__(self) -> None:
        ranges = {"[1, 4096]": "length", "[1, 16777216]": "vocabulary", f"[0, {LARGEST_FILE}]": "bytes"}
        check_ranges(self, ranges, "words.")


class Words(nn.Module):
    """A tokenizer within a policy. Blank, it is filled by ``load_state_dict``."""

    file: Tensor

    def __init__(self, config: WordsConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("file", torch.zeros(config.bytes, dtype=torch.uint8))
        self._parsed: Any = None

    @classmethod
    def read(cls, path: str | Path, length: int = 48) -> Words:
        """By the tokenizer.json at ``path``."""
        try:
            with open(path, "rb") as file:
                text = file.read(LARGEST_FILE + 1)
        except OSError as error:
            raise BurnishError(f"the tokenizer {path} cannot be read: {reason(error)}") from error
        try:
            return cls.parsed(text, length)
        except BurnishError as error:
            raise BurnishError(f"{path}: {error}") from error

    @classmethod
    def of(cls, sentences: Iterable[str], length: int | None = None) -> Words:
        """A small one, of the words in ``sentences``, in lower case; by default as long as the longest of them and
        what may be said of an advantage behind it."""
        tokenizers = library()
        spaces = tokenizers.pre_tokenizers.Whitespace()
        split, advice = (
            [[word for word, _ in spaces.pre_tokenize_str(text.lower())] for text in texts]
            for texts in (sentences, (POSITIVE, NEGATIVE))
        )
        known = [UNKNOWN, *sorted({word for text in [*split, *advice] for word in text} - {UNKNOWN})]
        model = tokenizers.models.WordLevel({word: i for i, word in enumerate(known)}, unk_token=UNKNOWN)
        made = tokenizers.Tokenizer(model)
        made.normalizer, made.pre_tokenizer = tokenizers.normalizers.Lowercase(), spaces
        return cls.parsed(made.to_str().encode(), length or max(0, *map(len, split)) + max(map(len, advice)))

    @classmethod
    def parsed(cls, file: bytes, length: int) -> Words:
        """By the bytes of a tokenizer.json."""
        found = tokenizer_of(file)
        # Numbers of tokens may have gaps, so the largest decides, not their count.
        words = cls(WordsConfig(length, max(found.get_vocab(True).values(), default=0) + 1, len(file)))
        words.file.copy_(torch.frombuffer(bytearray(file), dtype=torch.uint8))
        return words

    @property
    def length(self) -> int:
        return self.config.length

    @property
    def vocabulary(self) -> int:
        """Numbers of tokens lie in [0, vocabulary)."""
        return self.config.vocabulary

    def ids(self, texts: Sequence[str], end: str = "\n") -> Tensor:
        """(B, length) int64 on the CPU, -1 behind the end of a text, which ends with ``end``."""
        longest = max(map(len, texts), default=0)
        if longest > LONGEST:
            raise BurnishError(f"an instruction of {longest} characters is longer than the {LONGEST} allowed")
        lines = [text.rstrip("\n") + end for text in texts]
        rows = [self._tokenizer().encode(line).ids for line in lines]  # few and short: threads would cost more
        if (largest := max((max(row, default=-1) for row in rows), default=-1)) >= self.vocabulary:
            raise BurnishError(f"a tokenizer said to know {self.vocabulary} tokens gives the number {largest}")
        return padded(rows, self.length)

    def texts(self, ids: Tensor) -> list[str]:
        """The texts that ``ids`` (B, L) were made of, as far as the tokenizer keeps them."""
        return [self._tokenizer().decode([token for token in row if token >= 0]) for row in ids.tolist()]

    def forward(self, texts: Sequence[str]) -> Tensor:
        return self.ids(texts)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._parsed = None

    def _tokenizer(self) -> Any:
        if self._parsed is None:
            self._parsed = tokenizer_of(self.file.cpu().numpy().tobytes())
            self._parsed.no_padding()
            self._parsed.enable_truncation(self.length)
        return self._parsed


def words_for(chosen: str | None, tasks: Sequence[str], policy: str) -> Words:
    """By the file ``chosen``; by default, or as "tasks", of the words of the ``tasks`` that the data hold."""
    if "" in tasks:
        raise BurnishError(
            f"policy={policy} reads instructions, but an episode of the data has none; give every episode a task"
        )
    return Words.of(tasks) if chosen in (None, "tasks") else Words.read(chosen)


def tokenizer_of(file: bytes) -> Any:
    """A tokenizer, by the bytes of a tokenizer.json."""
    if len(file) > LARGEST_FILE:
        raise BurnishError(f"a tokenizer of more than {LARGEST_FILE} bytes is not read")
    tokenizers = library()
    try:
        return tokenizers.Tokenizer.from_str(file.decode())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise BurnishError(f"this is no tokenizer.json that can be used: {reason(error, 200)}") from error


def library() -> Any:
    """The package `tokenizers`, or a sentence about it."""
    try:
        import tokenizers
    except ImportError as error:
        raise BurnishError("a policy that reads instructions needs tokenizers; pip install 'burnish[vla]'") from error
    return tokenizers
