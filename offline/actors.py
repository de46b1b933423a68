"""The actors that offline methods train, and how they act when learning goes on in the world."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..policies.core.errors import BurnishError
from ..policies.core.types import Decision, Obs
from ..policies.gaussian import GaussianPolicy
from ..policies.trainable import copied


class PolicyActor:
    """Plays what the policy draws. Its warm-up is the policy too: having learnt from data, it is the best prior."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    @torch.no_grad()
    def play(self, obs: Obs, generator: torch.Generator) -> Tensor:
        return self.policy.spec.executed(self.policy.act(obs, generator=generator))

    def act(self, obs: Obs, *, warm: bool, generator: torch.Generator, fresh: Tensor | None = None) -> Decision:
        return Decision(self.play(obs, generator), {})

    def state_dict(self) -> dict[str, Any]:
        return self.policy.state_dict()


def trainable_imitator(policy: Any, method: str) -> Any:
    """A copy to be trained; the policy that is given stays as it is."""
    if not isinstance(policy, nn.Module) or not hasattr(policy, "bc_loss"):
        raise BurnishError(
            f"{method} trains the policy itself, so it needs one of our own that can imitate (flow, diffusion or "
            f"gaussian), not a {type(policy).__name__}; a policy that can only act is refined by a residual method"
        )
    return _copied(policy, method)


def trainable_tanh_gaussian(policy: Any, method: str) -> GaussianPolicy:
    """A copy to be trained; its actions must be differentiable and bounded."""
    if not isinstance(policy, GaussianPolicy) or not policy.config.squash:
        raise BurnishError(
            f"{method} climbs its critic through the action, so it needs a gaussian policy with squash=true, not a "
            f"{type(policy).__name__}; for a flow or diffusion policy take fql, or iql with extraction=best_of_n"
        )
    return _copied(policy, method)


def _copied(policy: Any, method: str) -> Any:
    """Ready to learn. Parts that a policy keeps fixed stay fixed."""
    if not any(p.requires_grad for p in policy.parameters()):
        raise BurnishError(
            f"{method} is to train a policy of which all parameters are frozen; requires_grad_(True) first"
        )
    return copied(policy).train()
