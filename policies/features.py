"""The output of a frozen network in the place of an observation's pictures, for agents, values, critics and models.

Of a vision-language model ``features`` (B, W) is all of it in one vector, and what `encode` of the model reads stands
beside it, under the name of the level at which it is remembered. Of other policies of ours ``vision.NAME`` is what the
network of the camera ``image.NAME`` makes of it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .core.errors import BurnishError
from .core.observed import FEATURES
from .core.spec import VISION, ObsSpec
from .core.types import Obs
from .nets.encoder import ObsEncoder
from .trainable import Remember

EMBEDDINGS, KEYS = (f"{FEATURES}.{level.value}" for level in (Remember.embeddings, Remember.keys))


def require_features(policy: Any, setting: str) -> Any:
    """The model in ``policy`` that has ``features``: its own, or that of its base."""
    found: Any = policy
    while not hasattr(found, "features") and hasattr(found, "base"):
        if getattr(found, "speaks", False):
            raise BurnishError(
                f"{setting} remembers what a model makes of its plain instruction, and this policy tells its model the "
                "advantage behind that; leave it out"
            )
        found = found.base
    if hasattr(found, "features"):
        return found
    for part in found.modules() if isinstance(found, nn.Module) else ():
        if isinstance(part, ObsEncoder) and part.cameras:
            return part
    raise BurnishError(
        f"{setting} takes the output of a network that looks at pictures, and a {type(found).__name__} has none of "
        "ours; leave it out"
    )


def featured(obs: Obs, base: Any, seen: ObsSpec) -> Obs:
    """``obs`` with the features of ``base``, where an agent that sees ``seen`` was trained on them."""
    if FEATURES not in seen.shapes and not any(key.startswith(VISION) for key in seen.shapes):
        return obs
    return require_features(base, "an agent that sees features").features(obs, Remember.keys)


def summarized(seen: ObsSpec) -> ObsSpec:
    """``seen`` without what the model alone reads: the vector of features, and the rest."""
    return ObsSpec({key: shape for key, shape in seen.shapes.items() if key not in read_alone(seen)})


def read_alone(seen: ObsSpec) -> set[str]:
    """The keys of ``seen`` that the model alone reads."""
    return {key for key in seen.shapes if key.startswith(f"{FEATURES}.")}
