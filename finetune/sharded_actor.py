"""A policy that PPO trains and of which each rank holds its share: parameters, gradients and moments (`sharding.py`).

The worlds of a rank are played, and its rows are learnt, by layers that are gathered when they compute. The first rank
keeps the whole policy besides, in the memory of the CPU, with what each update has made of it: it is tried and saved.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..policies.core.errors import BurnishError
from ..policies.core.execute import Execution
from ..policies.core.ranks import sharing, whole
from ..policies.sharding import divide, gathered, share_of, shares_of_moments

if TYPE_CHECKING:
    from .ppo import PPOConfig

ASKED = ("draw", "log_prob", "entropy_rate")  # what a loop and an update ask of an actor


def divides(config: PPOConfig) -> bool:
    """Whether each of several ranks holds a share of what is made now."""
    return config.shard and sharing().size > 1


def home(method: Any, device: torch.device | str) -> torch.device:
    """Where the base of ``method`` lies, and an actor until it is divided."""
    ppo = getattr(getattr(method, "inner", method), "ppo", None)
    return torch.device("cpu" if ppo is not None and divides(ppo) else device)


class WholeActor:
    """Each rank holds all of an actor. ``policy`` is what is deployed."""

    divided = False

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def add_up_gradients(self) -> None:
        """Of an actor that is divided, behind the way back; of a whole one the learner does it."""

    def publish(self) -> None:
        """After an update, ``policy`` has the numbers that came of it."""

    def state_of_one(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state of a learner as one process has it."""
        return state

    def own_part(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """This rank's part of it."""
        return state


class ShardedActor(WholeActor):
    """``actor`` is divided in place. ``policy`` becomes a copy, whole on the first rank, whose fixed numbers are the
    base's own."""

    divided = True

    def __init__(self, actor: Any, policy: Any, device: torch.device) -> None:
        trained = {p.data_ptr() for p in actor.parameters() if p.requires_grad}
        # Parameters of its own, on the base's numbers: those of the actor move to the device when it is divided.
        fixed = {id(p): nn.Parameter(p.detach(), False) for p in policy.parameters() if p.data_ptr() not in trained}
        names = {p.data_ptr(): name for name, p in actor.named_parameters()}
        known = [names.get(p.data_ptr()) for p in policy.parameters()]
        super().__init__(copy.deepcopy(policy, fixed))
        self.actor, self.ranks = actor, sharing()
        if not self.ranks.first:
            self.policy.to("meta")
        self._kept = {name: p for name, p in zip(known, self.policy.parameters(), strict=True) if name is not None}
        divide(actor, self.ranks, device, *(name for name in ASKED if hasattr(actor, name)))

    def add_up_gradients(self) -> None:
        """They are the mean of all ranks; rows count by their share of the whole minibatch."""
        for p in self.actor.parameters():
            if p.grad is not None:
                p.grad *= self.ranks.size

    @torch.no_grad()
    def publish(self) -> None:
        """All ranks take part."""
        for name, shared in self.actor.named_parameters():
            if name in self._kept and shared.requires_grad:
                found = whole(shared)
                if self.ranks.first:
                    self._kept[name].copy_(found)

    def state_of_one(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The first rank has it, in the memory of its policy, so that a checkpoint has both once."""
        kept = {name: p.detach() for name, p in self._kept.items()}
        other = {name: x for name, x in state["actor"].items() if name not in kept}
        actor = {**state["actor"], **gathered(other, self.ranks), **kept}
        return {**state, "actor": actor, "optimizer": gathered(state["optimizer"], self.ranks)}

    def own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        named, trained = self.actor.state_dict(), [p for p in self.actor.parameters() if p.requires_grad]
        actor = {name: share_of(x, named.get(name)) for name, x in state["actor"].items()}
        return {**state, "actor": actor, "optimizer": shares_of_moments(state["optimizer"], trained)}


def shared_out(
    actor: Any, policy: Any, config: PPOConfig, device: torch.device, *, seen_as_features: bool
) -> WholeActor:
    """``actor``, of which each rank keeps its share where the settings want it."""
    if sharing().size > 1 and config.execution is not Execution.eager:
        raise BurnishError(
            f"ppo.execution={config.execution.value} records the update of one process; several ranks take eager"
        )
    if not divides(config):
        return WholeActor(policy)
    if not isinstance(policy, nn.Module) or not hasattr(policy, "transition"):
        raise BurnishError(
            f"ppo.shard=true divides a policy that is trained itself, such as a flow, and a {type(policy).__name__} is "
            "none; leave it out"
        )
    if seen_as_features:
        raise BurnishError(
            "ppo.shard=true divides the network that train.remember=... looks with; leave one of them out"
        )
    if getattr(actor, "switch", 0):
        raise BurnishError(
            f"ppo.shard=true divides what is trained, and the first {actor.switch} steps of the chain are played by "
            f"the base, which each rank would hold whole; take method.trained_steps={actor.num_steps}"
        )
    return ShardedActor(actor, policy, device)
