"""The observations that a policy and all of its parts read."""

from __future__ import annotations

from typing import Any

from torch import nn

from .errors import BurnishError
from .offset import OFFSET
from .spec import VISION
from .views import Hidden

# Shown to an agent by the controller that corrects its base, not by the world.
OF_A_BASE = ("base_action", OFFSET, *(hidden.key for hidden in Hidden))
FEATURES = "features"  # what the network of its base makes of an observation; of single pictures, VISION


def observed(policy: Any) -> dict[str, tuple[int, ...]]:
    """Key -> shape, of a single observation with its history. An agent may see more of a world than its base does."""
    shapes = dict(policy.spec.inputs.shapes)
    for part in policy.modules() if isinstance(policy, nn.Module) else ():
        if type(part).__name__ == "ObsEncoder":
            theirs: Any = part
            for key, shape in theirs._full.shapes.items():
                if key not in shapes and (key == FEATURES or key.startswith((f"{FEATURES}.", VISION))):
                    continue
                if shapes.setdefault(key, shape) != shape and key not in OF_A_BASE:
                    raise BurnishError(f"the parts of the policy observe {key!r} in different shapes")
    return {key: shape for key, shape in shapes.items() if key not in (*OF_A_BASE, "goal_mask")}
