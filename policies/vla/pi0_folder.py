"""pi0 and pi0.5 in LeRobot's folders: their names, sizes and settings; `lerobot.py` reads and writes by them.

The way back to words (``paligemma.lm_head``) is the table of words, or weights of its own, depending on what wrote a
folder: one of the two means both, and where a file holds two that differ, both are kept.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ..core.errors import BurnishError
from ..lerobot import checkpoint as folders
from . import names
from .formats import Choices, Format, Weights, periods_of
from .pi0 import Pi0, Pi0Config, Pi0Model
from .sizes import ExpertConfig, LanguageConfig, VisionConfig

ALIASES = (
    (r"_orig_mod\.", ""),  # of a compiled model
    (r"^(?!model\.)", "model."),  # of openpi
    (r"vision_tower\.(?!vision_model\.)", "vision_tower.vision_model."),  # of transformers behind 5.5
)
# Of every published model; no weight says it.
HEADS, KEY_HEADS, VISION_HEADS = 8, 1, 16
VARIANTS = {(2048, 18, 16384): "gemma_2b", (1024, 18, 4096): "gemma_300m"}  # width, layers and hidden width of a Gemma
PUBLISHED = Pi0Config()
ROOT = "model.paligemma_with_expert."
VISION, TEXT = f"{ROOT}paligemma.model.vision_tower.vision_model.", f"{ROOT}paligemma.model.language_model."
EXPERT, PROJECTOR = f"{ROOT}gemma_expert.model.", f"{ROOT}paligemma.model.multi_modal_projector.linear.weight"
TABLE, HEAD = f"{TEXT}embed_tokens.weight", f"{ROOT}paligemma.lm_head.weight"
EXPERT_HEAD = f"{ROOT}gemma_expert.lm_head.weight"


def weights_of(weights: Weights, where: str) -> Weights:
    """The weights of a folder under the names of ours."""
    found = names.renamed(weights, where, ALIASES)
    if HEAD in found and TABLE not in found:
        found[TABLE] = found.pop(HEAD)
    elif HEAD in found and torch.equal(found[HEAD], found[TABLE]):
        del found[HEAD]
    return found


def config_of(given: folders.Given, weights: Weights, chosen: Choices) -> Pi0Config:
    """Settings, of which the sizes are those of the weights."""
    where, adaptive = str(given.path), given.settings["type"] == PI05.type
    if chosen.late:
        raise BurnishError("policy.late=true is for a SmolVLA; leave it out")

    def shape(name: str, axes: int = 2) -> tuple[int, ...]:
        return names.shape_of(weights, name, axes, f"{where} holds no {given.settings['type']}")

    def hidden(place: str) -> int:
        return shape(f"{place}layers.0.mlp.up_proj.weight")[0]

    def layers(place: str) -> int:
        return names.count(weights, f"{place}layers.")

    patch = shape(f"{VISION}embeddings.patch_embedding.weight", 4)[2]
    places, seen = shape(f"{VISION}embeddings.position_embedding.weight")
    vocabulary, width = shape(TABLE)
    acting = shape("model.action_in_proj.weight")[0]
    size = shape(f"{TEXT}layers.0.self_attn.k_proj.weight")[0] // KEY_HEADS
    config = Pi0Config(
        steps=folders.whole_of(given, "num_inference_steps", 10),
        features=list(given.inputs.values()),
        action=given.action,
        state_dim=folders.whole_of(given, "max_state_dim", 32),
        action_dim=folders.whole_of(given, "max_action_dim", 32),
        vision=VisionConfig(
            side=math.isqrt(places) * patch,
            patch=patch,
            width=seen,
            layers=layers(f"{VISION}encoder."),
            heads=VISION_HEADS,
            hidden=shape(f"{VISION}encoder.layers.0.mlp.fc1.weight")[0],
            shuffle=1,
        ),
        language=LanguageConfig(
            vocabulary, width, layers(TEXT), HEADS, KEY_HEADS, size, hidden(TEXT), lm_head=HEAD in weights
        ),
        expert=ExpertConfig(acting, layers(EXPERT), hidden(EXPERT), 1, *periods_of(given)),
        adaptive=adaptive,
        expert_head=EXPERT_HEAD in weights,
    )
    side = given.settings.get("image_resolution", [224, 224])
    if list(side) != [config.vision.side] * 2:
        raise BurnishError(
            f"{where} says image_resolution is {side!r:.60}, but its weights are those of {config.vision.side}"
        )
    made = names.shapes_of(lambda: Pi0Model(config, config.state_dim, config.action_dim))
    names.require_weights(weights, made, where)
    return config


def refusal(policy: Pi0) -> str | None:
    """A reason why LeRobot could not load it: it knows the published sizes alone."""
    config, known = policy.config, PUBLISHED.language
    language = replace(config.language, lm_head=False, width=known.width, layers=known.layers, hidden=known.hidden)
    if replace(config.vision, side=PUBLISHED.vision.side) != PUBLISHED.vision or language != known:
        return "has other sizes than PaliGemma"
    if not all(variant_of(part) for part in (config.language, config.expert)):
        return f"has other sizes than {' and '.join(VARIANTS.values())}"
    return None


def variant_of(sizes: LanguageConfig | ExpertConfig) -> str | None:
    """The name in LeRobot of a Gemma of these sizes."""
    return VARIANTS.get((sizes.width, sizes.layers, sizes.hidden))


def stored(policy: Pi0, weights: Weights) -> Weights:
    """With both ways to words, which LeRobot wants to find, and does not use."""
    found = {HEAD: weights[TABLE].clone(), **weights}
    width, rows = policy.config.expert.width, policy.config.language.vocabulary
    return {EXPERT_HEAD: torch.zeros(rows, width, dtype=torch.bfloat16), **found}


def settings(policy: Pi0) -> dict[str, Any]:
    """Of config.json."""
    config = policy.config
    return {
        "paligemma_variant": variant_of(config.language),
        "action_expert_variant": variant_of(config.expert),
        "num_inference_steps": config.steps,
        "image_resolution": [config.vision.side] * 2,
        "max_state_dim": config.state_dim,
        "dtype": "bfloat16" if config.bfloat16 else "float32",
    }


PI0 = Format(
    type="pi0",
    policy="pi0",
    length=48,
    tokenizer="google/paligemma-3b-pt-224",
    unsaid=Pi0.unsaid,
    causal=False,
    fixed={"use_relative_actions": False, "use_visual_memory": False, "use_proprioceptive_memory": False},
    passed={
        *("dtype", "relative_exclude_joints", "action_feature_names", "rtc_training_max_delay", "memory_frames"),
        *("memory_stride", "memory_temporal_attention_every", "time_sampling_beta_alpha", "time_sampling_beta_beta"),
        *("time_sampling_scale", "time_sampling_offset"),
        *("paligemma_variant", "action_expert_variant"),  # the weights say it
    },
    read={
        *("max_state_dim", "max_action_dim", "chunk_size", "num_inference_steps", "min_period", "max_period"),
        "image_resolution",
    },
    weights=weights_of,
    config_of=config_of,
    refusal=refusal,
    stored=stored,
    settings=settings,
    before=(
        *("rename_observations_processor", "to_batch_processor", "pi0_new_line_processor", "tokenizer_processor"),
        *("device_processor", "normalizer_processor"),
    ),
)
PI05 = PI0._replace(
    type="pi05",
    length=200,
    before=(
        *("rename_observations_processor", "to_batch_processor", "normalizer_processor"),
        *("pi05_prepare_state_tokenizer_processor_step", "tokenizer_processor", "device_processor"),
    ),
)


def form_of(config: Any) -> Format | None:
    """The type of a policy with such settings, if it is one of these."""
    return (PI05 if config.adaptive else PI0) if isinstance(config, Pi0Config) else None
