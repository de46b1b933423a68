"""The names of SmolVLA's weights, which are ours too: other forms of them that LeRobot has written, and their sizes.

Reading is strict. A weight that is missing, of another shape or not known is refused by its name, since a loader that
passes over it gives a policy that acts, and never succeeds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ..core.errors import BurnishError
from ..core.spec import require_bytes
from .expert import FlowModel
from .prefix import VisionLanguageModel
from .sizes import LARGEST_MODEL, ExpertConfig, LanguageConfig, VisionConfig

ALIASES = (
    (r"_orig_mod\.", ""),  # of a compiled model
    (r"text_model\.model\.", "text_model."),  # of transformers before 4.52
)
HEAD = 64  # width of every head of every published model; no file says it
VLM, EXPERT = "model.vlm_with_expert.vlm.", "model.vlm_with_expert.lm_expert."
VISION, TEXT = f"{VLM}model.vision_model.", f"{VLM}model.text_model."
LM_HEAD = f"{VLM}lm_head.weight"


def renamed(
    tensors: Mapping[str, Tensor], where: str, aliases: Iterable[tuple[str, str]] = ALIASES
) -> dict[str, Tensor]:
    """The weights under their published names."""
    found: dict[str, Tensor] = {}
    for name, x in tensors.items():
        for old, new in aliases:
            name = re.sub(old, new, name)
        if name in found:
            raise BurnishError(f"{where} holds {name!r:.120} twice, under two forms of its name")
        found[name] = x
    return found


def sizes_of(
    tensors: Mapping[str, Tensor],
    self_every: int,
    periods: tuple[float, float],
    special: list[int],
    where: str,
    late: bool = False,
) -> tuple[VisionConfig, LanguageConfig, ExpertConfig]:
    """The sizes of the model whose weights these are."""

    def shape(name: str, axes: int) -> tuple[int, ...]:
        return shape_of(tensors, name, axes, f"{where} holds no SmolVLA")

    width, _, patch, _ = shape(f"{VISION}embeddings.patch_embedding.weight", 4)
    patches = shape(f"{VISION}embeddings.position_embedding.weight", 2)[0]
    inner = shape(f"{VISION}encoder.layers.0.mlp.fc1.weight", 2)[0]
    text, wide = shape(f"{VLM}model.connector.modality_projection.proj.weight", 2)
    vision = VisionConfig(
        side=math.isqrt(patches) * patch,
        patch=patch,
        width=width,
        layers=count(tensors, f"{VISION}encoder.layers."),
        heads=max(1, width // HEAD),
        hidden=inner,
        shuffle=max(1, math.isqrt(wide // width)),
        late=late,
    )
    language = LanguageConfig(
        vocabulary=shape(f"{TEXT}embed_tokens.weight", 2)[0],
        width=text,
        layers=count(tensors, f"{TEXT}layers."),
        heads=max(1, shape(f"{TEXT}layers.0.self_attn.q_proj.weight", 2)[0] // HEAD),
        key_heads=max(1, shape(f"{TEXT}layers.0.self_attn.k_proj.weight", 2)[0] // HEAD),
        head_dim=HEAD,
        hidden=shape(f"{TEXT}layers.0.mlp.up_proj.weight", 2)[0],
        lm_head=LM_HEAD in tensors,
        special=special,
    )
    hidden, acts = shape(f"{EXPERT}layers.0.mlp.up_proj.weight", 2)
    expert = ExpertConfig(acts, count(tensors, f"{EXPERT}layers."), hidden, self_every, *periods)
    return vision, language, expert


def shape_of(tensors: Mapping[str, Tensor], name: str, axes: int, otherwise: str) -> tuple[int, ...]:
    """Of a weight with so many ``axes``; ``otherwise`` begins the sentence about one that is not there."""
    x = tensors.get(name)
    if x is None or x.ndim != axes:
        there = f"of shape {tuple(x.shape)}" if x is not None else "not there"
        raise BurnishError(f"{otherwise}: {name} with {axes} axes is needed, and it is {there}")
    return tuple(x.shape)


def count(tensors: Iterable[str], prefix: str) -> int:
    """Of numbered layers, so many that a gap among them is seen as one."""
    found = [int(match[1]) for name in tensors if (match := re.match(re.escape(prefix) + r"(\d{1,4})\.", name))]
    return max(found, default=-1) + 1


def declared(
    vision: VisionConfig, language: LanguageConfig, expert: ExpertConfig, state_dim: int, action_dim: int
) -> dict[str, torch.Size]:
    """Name and shape of every weight of a SmolVLA of these sizes, of which nothing is made."""
    return shapes_of(lambda: FlowModel(VisionLanguageModel(vision, language), language, expert, state_dim, action_dim))


def shapes_of(make: Callable[[], torch.nn.Module]) -> dict[str, torch.Size]:
    """Name and shape of every weight of a model, of which nothing is made."""
    with torch.device("meta"):
        return {f"model.{name}": x.shape for name, x in make().state_dict().items()}


def require_weights(tensors: Mapping[str, Tensor], wanted: Mapping[str, torch.Size], where: str) -> None:
    """A check that the weights are those that are ``wanted``, each by name and shape."""
    unknown, missing = sorted(tensors.keys() - wanted), sorted(wanted.keys() - tensors.keys())
    for kind, names in (("lacks", missing), ("has an unknown weight:", unknown)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise BurnishError(f"{where} {kind} {names[0]!r:.160}{more}; weights are read strictly by name")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise BurnishError(
                f"{where} has {name} of shape {tuple(tensors[name].shape)}, but {tuple(shape)} follows from its other "
                "weights"
            )
    require_bytes(4 * sum(shape.numel() for shape in wanted.values()), LARGEST_MODEL, f"the model in {where}")


def common_beginnings(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """The shortest beginnings, at a dot, that all ``names`` have and none of ``others``."""
    rest, found = set(others), []
    for name in sorted(names):
        if found and name.startswith(tuple(found)):
            continue
        parts = name.split(".")
        starts = [".".join(parts[: i + 1]) + ("." if i + 1 < len(parts) else "") for i in range(len(parts))]
        found.append(next((start for start in starts if not any(x.startswith(start) for x in rest)), name))
    return found
