"""The vision-language model: pictures, words and state to the keys and values that actions are made from.

    pictures  -> SigLIP -> pixel shuffle and projection, times sqrt(width)  |  words -> embeddings, times sqrt(width)
    state     -> one token, as it is projected

Pictures and words are one block, the state is the next: a token sees its own block and those before it. So pictures and
words never see the state, and the state is passed alone through the layers: where only its projection is trained, it is
all that an update has to compute again. Positions count valid tokens, so absent cameras and padded words take none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .layers import LLAMA, Keys, Layer, RMSNorm, Style
from .sizes import LanguageConfig, VisionConfig


class Prefix(NamedTuple):
    """An encoded observation: what every step of a generation reads. Some of its tokens may be padding."""

    layers: list[Keys]  # of each layer of the language model
    given: Tensor  # (B, 2 W): the mean of pictures and words, and the state, behind the last layer
    length: Tensor  # (B,) valid tokens: the position of the first action

    def rows(self, index: Any) -> Prefix:
        """The rows of an index, slice or mask."""
        layers = [Keys(*(x[index] for x in keys)) for keys in self.layers]
        return Prefix(layers, self.given[index], self.length[index])

    def repeat(self, times: int) -> Prefix:
        """Every row ``times`` times in a row. The keys serve them all, so only the small parts are repeated."""
        return Prefix(self.layers, self.given.repeat_interleave(times, 0), self.length.repeat_interleave(times, 0))


def resized(pictures: Tensor, side: int, centred: bool = False) -> Tensor:
    """(B, C, H, W) in [0, 1] -> (B, C, side, side) in [-1, 1]: as large as fits, upwards too, and black at the left and
    at the top, or with half of that black at each end."""
    height, width = pictures.shape[2:]
    ratio = max(width / side, height / side)
    size = int(height / ratio), int(width / ratio)
    if size != (height, width):
        pictures = F.interpolate(pictures, size, mode="bilinear", align_corners=False)
    black = side - size[0], side - size[1]
    top, left = (x // 2 if centred else x for x in black)
    return F.pad(pictures, (left, black[1] - left, top, black[0] - top)) * 2 - 1


def shuffled(tokens: Tensor, scale: int) -> Tensor:
    """(B, S S, W) -> (B, (S / scale)^2, scale^2 W): a token collects a square block, row by row."""
    side = math.isqrt(tokens.shape[1])
    blocks = tokens.unflatten(1, (side // scale, scale, side // scale, scale))  # row, row in block, column, ...
    return blocks.transpose(2, 3).flatten(3).flatten(1, 2)


class Parts(nn.Module):
    """A name in the paths of published weights, for the ``parts`` behind it."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class Stem(nn.Module):
    """Two strided convolutions that also see where a pixel lies. Small models do not learn from plain patches: with
    them, language was not followed at all (.10 of episodes against .93 of three tasks). Nor do they find what is small
    before a large background, until ``norm`` takes that away (`tests/test_vla_small.py`)."""

    def __init__(self, width: int, patch: int, norm: bool = False) -> None:
        super().__init__()
        self.norm = F.instance_norm if norm else nn.Identity()
        stride = patch // 2
        kernel = max(3, stride + 1)  # no pixel lies between two of them
        self.first = nn.Conv2d(5, width // 2, 3, 2, 1)
        self.second = nn.Conv2d(width // 2, width, kernel, stride, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        line = torch.linspace(-1, 1, pictures.shape[-1], dtype=pictures.dtype, device=pictures.device)
        places = torch.stack(torch.meshgrid(line, line, indexing="ij")).expand(len(pictures), -1, -1, -1)
        return self.norm(self.second(F.gelu(self.norm(self.first(torch.cat([pictures, places], 1))))))


class VisionAttention(nn.Module):
    """Attention of the patches to each other, with biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (each(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for each in maps)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class VisionMLP(nn.Module):
    """Two linear maps with a GELU by tanh between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class VisionLayer(nn.Module):
    """A layer of SigLIP: normalisation before each part, biases, GELU by tanh."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.width
        self.self_attn = VisionAttention(width, config.heads)
        self.mlp = VisionMLP(width, config.hidden)
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width, 1e-6), nn.LayerNorm(width, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class VisionModel(nn.Module):
    """SigLIP: (B, 3, side, side) in [-1, 1] -> (B, tokens, width). With FiLM (Perez et al. 2018, arXiv 1709.07871) it
    looks for what the words say: without, a small model needs over a thousand updates to find that they matter."""

    def __init__(self, config: VisionConfig, words: int) -> None:
        super().__init__()
        width, patch = config.width, config.patch
        look = Stem(width, patch, config.instance_norm) if config.stem else nn.Conv2d(3, width, patch, patch)
        self.embeddings = Parts(patch_embedding=look, position_embedding=nn.Embedding(config.patches, width))
        self.encoder = Parts(layers=nn.ModuleList(VisionLayer(config) for _ in range(config.layers)))
        self.post_layernorm = nn.LayerNorm(width, 1e-6)
        self.late = config.late
        if config.film:
            self.film = nn.Linear(words, 2 * width)
            nn.init.normal_(self.film.weight, std=words**-0.5)  # large: from the start other words look at other things
            nn.init.zeros_(self.film.bias)
        nn.init.normal_(self.embeddings.position_embedding.weight, std=width**-0.5)

    def forward(self, pictures: Tensor, said: Tensor | None = None) -> Tensor:
        """``said`` (B, words): the sum of the words of a row."""
        x = self.embeddings.patch_embedding(pictures).flatten(2).transpose(1, 2)
        if said is not None and hasattr(self, "film"):
            scale, shift = self.film(said)[:, None].chunk(2, 2)
            x = x * (1 + scale) + shift
        x = x + self.embeddings.position_embedding(self.places(x))
        for layer in self.encoder.layers:
            x = layer(x)
        return self.post_layernorm(x)

    def places(self, tokens: Tensor) -> Tensor:
        """The number of each patch in the table of places, row by row."""
        side = math.isqrt(tokens.shape[1])
        line = (torch.arange(side, device=tokens.device) - int(self.late)).clamp(min=0)
        return (line[:, None] * side + line).flatten()


class Connector(nn.Module):
    """Tokens of a picture, fewer and wider, in the width of the language model."""

    def __init__(self, vision: VisionConfig, width: int) -> None:
        super().__init__()
        self.scale = vision.shuffle
        wide = vision.width * vision.shuffle**2
        self.modality_projection = Parts(proj=nn.Linear(wide, width, bias=False))
        nn.init.normal_(self.modality_projection.proj.weight, std=(wide * width) ** -0.5)  # times sqrt(width): 1

    def forward(self, tokens: Tensor) -> Tensor:
        return self.modality_projection.proj(shuffled(tokens, self.scale))


class TextModel(nn.Module):
    """The language model, block by block."""

    def __init__(self, config: LanguageConfig, style: Style = LLAMA) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        sizes = (config.width, config.heads, config.key_heads, config.head_dim, config.hidden)
        self.layers = nn.ModuleList(Layer(*sizes, style=style) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, style)
        nn.init.normal_(self.embed_tokens.weight, std=config.width**-0.5)  # times sqrt(width): 1

    def block(self, x: Tensor, valid: Tensor, before: Sequence[Keys] = ()) -> tuple[Tensor, list[Keys]]:
        return block(self, x, valid, before)


def block(model: Any, x: Tensor, valid: Tensor, before: Sequence[Keys] = ()) -> tuple[Tensor, list[Keys]]:
    """Tokens x (B, S, W), of which ``valid`` (B, S) are no padding, behind the blocks ``before``: what the ``layers``
    and the ``norm`` of a model make of them, and the keys of each layer. They see each other, and all that is valid
    before them."""
    position = valid.long().cumsum(1) - 1  # ONNX counts no booleans
    if before:
        position = position + before[0].seen[:, 0].sum(1, keepdim=True)
    made: list[Keys] = []
    for i, layer in enumerate(cast("list[Layer]", [*model.layers])):
        x, own = layer(x, position, before[i : i + 1], valid[:, None])
        made += own
    return model.norm(x), made


def joined(before: Sequence[Keys], keys: Sequence[Keys]) -> list[Keys]:
    """Of each layer, the keys of a block behind those ``before`` it."""
    return [Keys(*(torch.cat(pair, d) for d, pair in zip((1, 1, 2), zip(a, b, strict=True), strict=True)))
            for a, b in zip(before, keys, strict=True)]  # fmt: skip


@functools.cache
def ids_on(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """Made once: an act that is recorded as a CUDA graph can bring no numbers from the host."""
    with torch.inference_mode(False):
        return torch.tensor(tokens, dtype=torch.int64, device=device)


class VisionLanguageModel(nn.Module):
    """SmolVLM without its way back to words; ``lm_head`` keeps those weights, which nothing here uses."""

    def __init__(self, vision: VisionConfig, language: LanguageConfig) -> None:
        super().__init__()
        self.side, self.width, self.special = vision.side, language.width, language.special
        self.tokens = vision.patches // vision.shuffle**2
        self.model = Parts(
            vision_model=VisionModel(vision, language.width),
            connector=Connector(vision, language.width),
            text_model=TextModel(language),
        )
        if language.lm_head:
            self.lm_head = nn.Linear(language.width, language.vocabulary, bias=False)

    @property
    def picture_tokens(self) -> int:
        """Of one picture, with the marks around it."""
        return self.tokens + (len(self.special) + 1 if self.special else 0)

    @property
    def dtype(self) -> torch.dtype:
        """Its number format, in which its output is, but for what `add_state` returns."""
        return self.text.embed_tokens.weight.dtype

    @property
    def text(self) -> TextModel:
        return self.model.text_model

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.text.embed_tokens(tokens)

    def seen(self, picture: Tensor, said: Tensor | None = None) -> Tensor:
        """The tokens of a picture (B, 3, H, W) in [0, 1]; ``said`` (B, W) is the sum of its words."""
        shown = resized(picture, self.side).to(self.dtype)
        return self.model.connector(self.model.vision_model(shown, said)) * math.sqrt(self.width)

    def look(
        self, pictures: Sequence[Tensor], present: Sequence[Tensor | None] = (), said: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The tokens of all cameras, pictures (B, 3, H, W) in [0, 1], and which are valid: those of a camera that is
        ``present`` (B,) in a row. ``said`` (B, W): the sum of its words."""
        seen, valid = [], []
        for i, picture in enumerate(pictures):
            found = self.seen(picture, said)
            seen.append(found)
            here = present[i] if i < len(present) else None
            here = torch.ones(len(picture), dtype=torch.bool, device=picture.device) if here is None else here
            valid.append(here[:, None].expand(-1, found.shape[1]))
            if self.special:  # marks around each picture, which are valid whether it is there or not, and not scaled
                marks = self.embedded(ids_on(tuple(self.special), picture.device)).expand(len(picture), -1, -1)
                seen[-1] = torch.cat([marks, seen[-1], marks[:, :1]], 1)
                valid[-1] = F.pad(valid[-1], (len(self.special), 1), value=True)
        return torch.cat(seen, 1), torch.cat(valid, 1)

    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L) int64, -1 where there is no word."""
        valid = tokens >= 0
        return self.embedded(tokens.clamp(min=0)) * math.sqrt(self.width), valid

    def sum_of(self, words: Tensor | None) -> Tensor | None:
        """(B, W) what the words of a row say in sum, of variance 1."""
        if words is None:
            return None
        spoken, real = self.read(words)
        count = real.sum(1, keepdim=True).clamp(min=1).to(spoken.dtype)
        return torch.where(real[..., None], spoken, 0.0).sum(1) / count.sqrt()

    def understand(self, x: Tensor, words: Tensor | None) -> tuple[Tensor, list[Keys]]:
        """The first block, of the tokens ``x`` of all cameras and of the words: the mean of what its valid tokens
        become (B, W), and its keys."""
        valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if words is not None:
            spoken, real = self.read(words)
            x, valid = torch.cat([x, spoken], 1), torch.cat([valid, real], 1)
        out, keys = self.text.block(x, valid)
        kept = torch.where(valid[..., None], out, 0.0)
        return kept.sum(1) / valid.sum(1, keepdim=True), keys

    def add_state(self, token: Tensor, mean: Tensor, before: Sequence[Keys]) -> Prefix:
        """The second block: the token (B, W) of the state, behind the first; all in the number format of the token."""
        valid = torch.ones(len(token), 1, dtype=torch.bool, device=token.device)
        out, keys = self.text.block(token[:, None].to(self.dtype), valid, before)
        both = [Keys(a.to(token.dtype), b.to(token.dtype), seen) for a, b, seen in joined(before, keys)]
        given = torch.cat([mean, out[:, 0]], 1).to(token.dtype)
        return Prefix(both, given, both[0].seen[:, 0].sum(1))
