"""The output of a frozen vision-language model in the place of an observation's pictures.

``features`` (B, W) is all of it in one vector, for values, critics and agents; what `encode` of the model reads stands
beside it, under the name of the level at which it is remembered.
"""

from __future__ import annotations

from typing import Any

from .core.errors import BurnishError
from .core.spec import ObsSpec
from .core.types import Obs
from .trainable import Remember

FEATURES = "features"
EMBEDDINGS, KEYS = (f"{FEATURES}.{level.value}" for level in (Remember.embeddings, Remember.keys))


def require_features(policy: Any, setting: str) -> Any:
    """The model in ``policy`` that has features: its own, or that of its base."""
    found = policy
    while found is not None and not hasattr(found, "features"):
        found = getattr(found, "base", None)
    if found is None:
        raise BurnishError(
            f"{setting} takes the output of a vision-language model, and a {type(policy).__name__} has none; leave it "
            "out"
        )
    return found


def featured(obs: Obs, base: Any, seen: ObsSpec) -> Obs:
    """``obs`` with the features of ``base``, where an agent that sees ``seen`` was trained on them."""
    if FEATURES not in seen.shapes:
        return obs
    return require_features(base, "an agent that sees features").features(obs, Remember.keys)


def summarized(seen: ObsSpec) -> ObsSpec:
    """``seen`` without what the model alone reads: the vector of features, and the rest."""
    return ObsSpec({key: shape for key, shape in seen.shapes.items() if not key.startswith(f"{FEATURES}.")})
