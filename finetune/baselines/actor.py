"""Our encoder in front of SB3's networks, and SB3's actor as a policy of ours.

SB3 trains behind the ``ObsEncoder`` that the deployed policy will have, so that goals, histories, pictures and
normalisers mean the same to both, and the rest of an actor is a list of linear layers:

    SAC          tanh of a Gaussian whose mean and spread are two heads
    TD3, DDPG    tanh of a mean
    PPO, A2C     a Gaussian with one spread for all states, clipped
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...policies.core.errors import BurnishError
from ...policies.core.spec import dtype_of
from ...policies.gaussian import GaussianConfig, GaussianLoss, GaussianPolicy
from ...policies.nets.encoder import ObsEncoder
from ...policies.nets.mlp import Activation

# SB3 clamps the log spread of SAC to these, and that of PPO and A2C not at all.
SAC_LOG_STD, ANY_LOG_STD = [-20.0, 2.0], [-30.0, 30.0]
# A policy without a spread: noise that is asked for all the same (Steered draws some) moves nothing.
NO_STD = 1e-8


class Seen(nn.Module):
    """``ObsEncoder`` as SB3 wants its feature extractors. Each network of SB3 gets a copy of its own."""

    def __init__(self, space: Any, encoder: ObsEncoder, keys: Mapping[str, str]) -> None:
        super().__init__()
        self.encoder, self.keys, self.features_dim = copy.deepcopy(encoder), dict(keys), encoder.dim

    def forward(self, observed: Any) -> Tensor:
        """SB3 has made floats of everything; whole numbers up to 255 survive that."""
        named = observed if isinstance(observed, dict) else {"state": observed}
        return self.encoder({self.keys[name]: x.to(dtype_of(self.keys[name])) for name, x in named.items()})


def seen_through(encoder: ObsEncoder, keys: Mapping[str, str]) -> dict[str, Any]:
    """The part of SB3's ``policy_kwargs`` that puts ``encoder`` in front of its networks."""
    options = {"encoder": encoder, "keys": keys}
    return {"features_extractor_class": Seen, "features_extractor_kwargs": options, "normalize_images": False}


class Parts(NamedTuple):
    """The parts of an actor of SB3."""

    encoder: ObsEncoder
    hidden: list[nn.Module]  # linear layers and activations by turns
    heads: list[nn.Linear]  # the mean, and the log spread where it depends on the state
    log_std: Tensor | None  # where it does not


def parts_of(model: Any) -> Parts:
    """The encoder, layers, heads and deviation of the actor within a model of SB3."""
    policy = model.policy
    if hasattr(policy, "mlp_extractor"):
        hidden = list(policy.mlp_extractor.policy_net)
        return Parts(policy.pi_features_extractor.encoder, hidden, [policy.action_net], policy.log_std)
    actor = policy.actor
    if hasattr(actor, "latent_pi"):
        return Parts(actor.features_extractor.encoder, list(actor.latent_pi), [actor.mu, actor.log_std], None)
    *hidden, last, _ = actor.mu  # behind the last layer stands a tanh
    return Parts(actor.features_extractor.encoder, hidden, [last], None)


def settings_like(model: Any) -> GaussianConfig:
    """The settings of the policy that can act as the actor of ``model`` does."""
    parts = parts_of(model)
    shape: dict[str, Any] = {"hidden": [x.out_features for x in parts.hidden if isinstance(x, nn.Linear)]}
    for module in parts.hidden:
        if not isinstance(module, nn.Linear):
            shape["activation"] = _activation(module)
    if len(parts.heads) == 2:
        return GaussianConfig(squash=True, state_dependent_std=True, init_std=1.0, log_std_bounds=SAC_LOG_STD, **shape)
    if parts.log_std is not None:
        return GaussianConfig(init_std=1.0, log_std_bounds=ANY_LOG_STD, **shape)
    return GaussianConfig(squash=True, loss=GaussianLoss.least_squares, init_std=NO_STD, min_std=NO_STD / 10, **shape)


def _activation(module: nn.Module) -> Activation:
    for activation in Activation:
        if type(activation.make()) is type(module):
            return activation
    raise BurnishError(f"SB3's actor has a {type(module).__name__}, which no policy of ours can express")


@torch.no_grad()
def copy_actor(model: Any, agent: GaussianPolicy) -> None:
    """Give ``agent``, made with ``settings_like``, what SB3's actor has learnt."""
    parts = parts_of(model)
    agent.encoder.load_state_dict(parts.encoder.state_dict())
    *ours, last = [layer for layer in agent.trunk.modules() if isinstance(layer, nn.Linear)]
    for mine, other in zip(ours, [x for x in parts.hidden if isinstance(x, nn.Linear)], strict=True):
        mine.load_state_dict(other.state_dict())
    last.weight.copy_(torch.cat([head.weight for head in parts.heads]))
    last.bias.copy_(torch.cat([head.bias for head in parts.heads]))
    if parts.log_std is not None:
        agent.raw_std.copy_(parts.log_std.view_as(agent.raw_std))
