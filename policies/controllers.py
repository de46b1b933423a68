"""The receding-horizon controller: ask the policy for a chunk, play n actions of it, ask again; per world.

Each world keeps its own queue, so worlds may end at different times; another instruction empties it. The noise of a
chunk belongs to (episode seed, decision index) of its world: a draw depends neither on how many worlds run nor on what
the others do. (The noise is so bit for bit; the matrix products behind it may round otherwise when another number of
worlds asks at once.)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .core.seed import EpisodeSeeds, RowNoise
from .core.time_limit import first_act
from .core.tree import index, map_tree, to, where
from .core.types import Controller, Obs, Policy


class Plan(NamedTuple):
    """Chunks already computed for ``obs`` in the worlds of ``mask``, kept so that no base is asked twice."""

    mask: Tensor  # (N,)
    obs: Obs
    chunk: Tensor  # (N, n, A)


class ChunkController:
    """The controller that plays a policy's chunks, n actions of each, in every world on its own."""

    def __init__(
        self,
        policy: Policy,
        num_envs: int,
        *,
        seed: int = 0,
        greedy: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        spec = policy.spec
        self.policy, self.greedy = policy, greedy
        self.execute = spec.execute
        self._seeds = EpisodeSeeds(seed, num_envs, device)
        self._queue = torch.zeros(num_envs, spec.execute, spec.action.dim, device=device)
        self._left = torch.zeros(num_envs, dtype=torch.int64, device=device)  # actions still in the queue
        self._decision = torch.zeros_like(self._left)
        self._plan: Plan | None = None
        self._tokens: Tensor | None = None  # the instructions by which the queues were planned
        self._acted = False  # before: its first act may be that of an untrusted policy, and has a limit of time

    def reset(self, mask: Tensor, seeds: Sequence[int] | None = None) -> None:
        self._seeds.begin(mask, seeds)
        self._left = self._left.masked_fill(mask, 0)
        self._decision = self._decision.masked_fill(mask, 0)
        if self._plan is not None:
            self._plan = self._plan._replace(mask=self._plan.mask & ~mask)

    def peek(self, obs: Obs) -> Tensor:
        return self._next(obs)[0]

    def ahead(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """The chunk (N, n, A) that ``step`` would play from, and the place (N,) in it. Changes nothing."""
        _, queue, left = self._next(obs)
        return queue, self.execute - left

    def step(self, obs: Obs) -> Tensor:
        empty = self._empty(obs)
        action, queue, left = self._next(obs)
        self._decision = self._decision + empty
        self._queue, self._left, self._plan = queue, left - 1, None
        if "tokens" in obs:
            self._tokens = obs["tokens"].clone()
        return action

    def _empty(self, obs: Obs) -> Tensor:
        """(N,) where the policy must be asked: nothing is left of a chunk, or another instruction has come since."""
        empty = self._left == 0
        if self._tokens is None or "tokens" not in obs:
            return empty
        return empty | (obs["tokens"] != self._tokens).any(1)

    def _next(self, obs: Obs) -> tuple[Tensor, Tensor, Tensor]:
        """The next action of each world, and its queue with the number of actions left before that action."""
        empty = self._empty(obs)
        queue, left = self._queue, self._left
        if bool(empty.any()):
            chunk = self._planned(obs, empty)
            queue = torch.where(empty[:, None, None], chunk, queue)
            left = left.masked_fill(empty, self.execute)
        return queue[torch.arange(len(left), device=left.device), self.execute - left], queue, left

    def _planned(self, obs: Obs, empty: Tensor) -> Tensor:
        """Chunks for the worlds of ``empty``; those planned before, on the same observation, are not asked again."""
        wanted = empty
        if self._plan is not None:
            known = self._plan.mask & _same_rows(obs, self._plan.obs)
            wanted = empty & ~known
            if not bool(wanted.any()):
                return self._plan.chunk
        ask = wanted.nonzero()[:, 0]
        noise = RowNoise(self._seeds.current[ask], self._decision[ask])
        with torch.no_grad(), nullcontext() if self._acted else first_act():
            drawn = self.policy.act(index(obs, ask), greedy=self.greedy, generator=noise)
        self._acted = True
        chunk = torch.zeros_like(self._queue) if self._plan is None else self._plan.chunk.clone()
        chunk[ask] = self.policy.spec.executed(drawn).to(chunk)
        # Worlds may reuse the memory of their observations, so the plan keeps its own copy.
        seen = map_tree(torch.clone, obs)
        if self._plan is None:
            self._plan = Plan(wanted, seen, chunk)
        else:
            self._plan = Plan(self._plan.mask | wanted, where(wanted, seen, self._plan.obs), chunk)
        return chunk

    def state_dict(self) -> dict[str, Any]:
        return {
            "seeds": self._seeds.state_dict(),
            "queue": self._queue,
            "left": self._left,
            "decision": self._decision,
            # Asked again in another batch, a network may round otherwise: what was planned is part of the state.
            "plan": None if self._plan is None else self._plan._asdict(),
            "tokens": self._tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seeds.load_state_dict(state["seeds"])
        given = {key: x for key, x in state.items() if key != "seeds" and x is not None}
        kept: dict[str, Any] = to(given, self._left.device)
        self._queue, self._left, self._decision = kept["queue"], kept["left"], kept["decision"]
        self._plan = Plan(**kept["plan"]) if "plan" in kept else None
        self._tokens = kept.get("tokens")


def controller_for(
    policy: Policy,
    num_envs: int,
    *,
    seed: int = 0,
    greedy: bool = False,
    device: torch.device | str = "cpu",
) -> Controller:
    """A controller for ``policy``: the one that it brings itself (a correction at every tick needs
    one), else a receding-horizon queue."""
    make = getattr(policy, "controller", None)
    if make is None:
        return ChunkController(policy, num_envs, seed=seed, greedy=greedy, device=device)
    return make(num_envs, seed=seed, greedy=greedy, device=device)


def _same_rows(a: Obs, b: Obs) -> Tensor:
    """(N,): the worlds whose observations agree in every bit that the policy can see."""
    return torch.stack([(a[key] == b[key]).flatten(1).all(1) for key in b]).all(0)


class Noisy:
    """``acting`` with a Gaussian noise on its actions."""

    def __init__(self, acting: Controller, std: float, seed: int) -> None:
        self.reset, self._acting, self._std = acting.reset, acting, std
        self._generator = torch.Generator().manual_seed(seed)

    def step(self, obs: Obs) -> Tensor:
        action = self._acting.step(obs)
        return action + self._std * torch.randn(action.shape, generator=self._generator).to(action)
