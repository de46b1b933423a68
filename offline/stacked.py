"""Several learners as one: the same method with several seeds, whose updates are one batched computation.

The networks are stacked (`torch.func`), the losses of the learner itself are vmapped over the stacks, and one fused
optimiser steps them. A small network leaves a GPU idle, where the update of eight learners can cost little more than
that of one; a CPU that one learner keeps busy gains little.

Each learner goes on as it would alone, to rounding: its weights, its moments of Adam and the scales of its observations
become rows of the stacks, in the same memory, and what it draws comes from its own generator. So it acts, is evaluated
and is saved by itself. As CUDA graphs, up to 16 updates are one recording.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ..policies.core.errors import BurnishError
from ..policies.core.execute import Execution, execution
from ..policies.core.graphed_policy import GraphedActor
from ..policies.core.seed import StackedGenerator
from ..policies.core.spec import is_image
from ..policies.core.tree import index, stack
from .actor_critic import ActorCritic
from .replay import Batch
from .sources import Mixture

AT_ONCE = 16  # updates whose batches are read from a replay at once


def require_stackable(learner: ActorCritic) -> None:
    """A refusal of a learner that cannot be one of several."""
    if learner.config.execution is Execution.compile:
        raise BurnishError("execution=compile is not known to batched seeds; use execution=eager or cudagraph")
    if pictures := [key for key in learner.agent.spec.inputs.shapes if is_image(key)]:
        raise BurnishError(
            f"the learner looks at {', '.join(pictures)}, and the batched seeds are for small networks, which pictures "
            "do not have; take seeds=1 for each seed"
        )


class Stacked:
    """``learners`` differ in their seeds alone, and are as far as each other. From now on they learn here, together."""

    def __init__(self, learners: Sequence[ActorCritic]) -> None:
        self.learners, first = learners, learners[0]
        self.joint: Any = copy.copy(first)
        for name in first.networks:
            setattr(self.joint, name, _stacked([getattr(each, name) for each in learners]))
        for each in learners:
            if isinstance(each.actor, GraphedActor):
                each.actor.forget()
        self.joint.noise = noise = StackedGenerator([each.noise for each in learners])
        networks = _Networks({name: getattr(self.joint, name) for name in first.networks})
        for name in ("_critic_loss", "_actor_loss"):
            setattr(self.joint, name, _for_each(getattr(self.joint, name), networks, noise))
        self.joint.equip()
        # Its steps are parts of a recording of several updates, and no recordings themselves.
        self.joint._step_critic, self.joint._step_actor = self.joint._critic_step, self.joint._actor_step
        self._made: dict[Any, Callable[[Batch], dict[str, Tensor]]] = {}  # by what each of several updates does
        for name in ("critic_optimizer", "actor_optimizer"):
            _share_moments(getattr(self.joint, name), [getattr(each, name) for each in learners])

    def learn(self, sources: Sequence[Mixture], count: int) -> tuple[Batch, dict[str, Tensor]]:
        """So many updates of each, on batches of its own source. The last batch, and its metrics, as trees (S, ...)."""
        batch, metrics = Batch(), dict[str, Tensor]()
        for made in range(0, count, AT_ONCE):
            drawn = stack([source.several(min(AT_ONCE, count - made)) for source in sources], 1)
            batch, metrics = index(drawn, -1), self._updates(drawn)
        for each in self.learners:
            each.updates = self.joint.updates
        return batch, metrics

    def _updates(self, drawn: Batch) -> dict[str, Tensor]:
        """One for each time of ``drawn`` (times, S, ...); as a CUDA graph all are one recording."""
        joint, before = self.joint, self.joint.updates
        after = before + len(drawn["reward"])
        how = tuple(joint.turn(update) for update in range(before + 1, after + 1))
        if how not in self._made:
            options: dict[str, Any] = {"device": joint.noise.device, "generators": joint.noise.each}
            self._made[how] = execution(self._in_turn, joint.config.execution, **options)
        metrics = self._made[how](drawn)
        joint.updates = after  # which a recording does not count
        return metrics

    def _in_turn(self, drawn: Batch) -> dict[str, Tensor]:
        metrics = dict[str, Tensor]()
        for time in range(len(drawn["reward"])):
            metrics = self.joint.learn(self.joint.shown(index(drawn, time)))
        return metrics


class _Networks(nn.Module):
    """The networks that a loss reads, under one roof, so that `functional_call` can exchange their tensors."""

    def __init__(self, networks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(networks)

    def forward(self, loss: Callable[..., Any], *arguments: Any) -> Any:
        return loss(*arguments)


def _for_each(loss: Callable[..., Any], networks: _Networks, noise: StackedGenerator) -> Callable[..., Any]:
    """``loss`` of each learner, where weights and arguments have a first dimension for it."""
    tensors = {**dict(networks.named_parameters()), **dict(networks.named_buffers())}
    learners = torch.arange(len(noise.each), device=noise.device)

    def one(own: dict[str, Tensor], learner: Tensor, *arguments: Any) -> Any:
        noise.learner = learner
        return functional_call(networks, own, (loss, *arguments))

    # Nothing is drawn by vmap itself: `noise` makes the draws of all, and hands each its own.
    return lambda *arguments: vmap(one, randomness="same")(tensors, learners, *arguments)


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]


def _stacked(networks: Sequence[nn.Module]) -> Any:
    """One network with a first dimension for each of ``networks``, of whose tensors these become the rows."""
    joint = copy.deepcopy(networks[0])
    for mine, *theirs in zip(_tensors(joint), *map(_tensors, networks), strict=True):
        mine.data = torch.stack([x.data for x in theirs])
        for x, row in zip(theirs, mine.data, strict=True):
            x.data = row
    return joint


def _share_moments(joint: torch.optim.Optimizer, each: Sequence[torch.optim.Optimizer]) -> None:
    """The state of Adam, stacked like its weights; the number of steps is one for all."""
    for mine, *theirs in zip(_trained(joint), *map(_trained, each), strict=True):
        states = [optimizer.state[x] or _fresh(x) for optimizer, x in zip(each, theirs, strict=True)]
        steps = {"step": states[0]["step"]}
        moments = {key: torch.stack([state[key] for state in states]) for key in states[0] if key != "step"}
        joint.state[mine] = {**steps, **moments}
        for place, (optimizer, x) in enumerate(zip(each, theirs, strict=True)):
            optimizer.state[x] = {**steps, **{key: rows[place] for key, rows in moments.items()}}


def _trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for group in optimizer.param_groups for x in group["params"]]


def _fresh(weight: Tensor) -> dict[str, Tensor]:
    """The state that Adam begins with."""
    step = torch.zeros((), device=weight.device)
    return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
