"""Two views of a base policy at work, on which our learners and outside algorithms (SB3) train alike.

``ResidualEnv``  control time: the agent corrects the base's action at every tick and sees that action beside the state;
                 for absolute targets, by an offset that lasts (``offset.py``), which it sees too.
                 A base that plays chunks keeps more from it, unless ``observe`` shows that too (``Hidden``).
``BaseEnv``      decision time: the agent chooses the base's latent noise, a correction of its chunk, or both.

At decision time the problem is Markov where the world is: a base draws each chunk afresh from what is observed then,
and the chunk is part of what the agent observes, or of what it chooses. At control time it is not: two ticks that look
alike, with the same action of the base, may stand at different places of different chunks, and so lead to different
actions of the base. With ``observe=[phase, queue]`` it is Markov there too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from .chunk import Chunked
from .errors import BurnishError
from .offset import OFFSET, OffsetConfig
from .seed import EpisodeSeeds, RowNoise
from .spec import ActionSpec, ObsSpec
from .tree import check, index, map_tree, to
from .types import Controller, Obs, Outcome, Policy, Step, VecEnv
from .wrapper import Wrapper


class Hidden(Enum):
    """The hidden state of a base that plays chunks, for agents that correct its actions one by one."""

    phase = "phase"  # base_phase (N, 1): the share of the chunk that was played already
    queue = "queue"  # base_queue (N, n, A): the chunk's actions still to come, this tick's first, 0 behind the last

    @property
    def key(self) -> str:
        return f"base_{self.value}"


def unhidden(chunk: Tensor, place: Tensor, observe: Collection[Hidden]) -> Obs:
    """At ``place`` (N,) of the chunks (N, n, A) that are being played."""
    found, count = {}, chunk.shape[1]
    if Hidden.phase in observe:
        found[Hidden.phase.key] = (place / count).to(chunk)[:, None]
    if Hidden.queue in observe:
        tick = place[:, None] + torch.arange(count, device=chunk.device)
        rest = chunk[torch.arange(len(chunk), device=chunk.device)[:, None], tick.clamp(max=count - 1)]
        found[Hidden.queue.key] = torch.where((tick < count)[..., None], rest, 0.0)
    return found


def require_chunks(base: Controller, observe: Collection[Hidden]) -> None:
    """A check that the base plays chunks where its place within a chunk is to be observed."""
    if observe and not hasattr(base, "ahead"):
        names = ",".join(x.name for x in Hidden if x in observe)
        raise BurnishError(
            f"observe=[{names}] shows where a base is in the chunk that it plays, but a {type(base).__name__} plays "
            "none; leave observe out"
        )


def ahead(base: Any, obs: Obs, observe: Collection[Hidden]) -> Obs:
    """The hidden state of a base before ``obs``, as ``observe`` asks for it."""
    if not observe:
        return {}
    chunk, place = base.ahead(obs)
    return unhidden(chunk, place, observe)


def _without(obs: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: x for key, x in obs.items() if key not in keys}


class ResidualEnv(Wrapper):
    """Executes base + bound * action, clipped to [-1, 1]; the only owner of the base's queue. ``observe`` shows the
    agent what that queue hides. With an ``offset`` that lasts it executes base + bound * offset. The base reads the
    keys ``unseen``, and the agent does not.

    A world that is not active must be reset before it is used again: its queue moves on with the others.
    """

    def __init__(
        self,
        env: VecEnv,
        base: Controller,
        bound: float = 1.0,
        observe: Collection[Hidden] = (),
        offset: OffsetConfig | None = None,
        unseen: Collection[str] = (),
    ) -> None:
        super().__init__(env)
        if bound <= 0:
            raise BurnishError(
                f"the residual bound {bound} must be positive; it is in units of the action range [-1, 1]"
            )
        require_chunks(base, observe)
        self.base, self.bound, self.observe, self.unseen = base, bound, tuple(observe), unseen
        dim = env.spec.action.dim
        self.offset = None if offset is None else offset.at(env.spec.control_hz)
        self._offset = torch.zeros(self.num_envs, dim, device=self.device)
        shown = {"base_action": (dim,)} | ({OFFSET: (dim,)} if self.offset else {})
        if observe:
            blank = torch.zeros(1, base.execute, dim)  # pyright: ignore[reportAttributeAccessIssue]
            seen = unhidden(blank, torch.zeros(1, dtype=torch.int64), observe)
            shown |= {key: tuple(x.shape[1:]) for key, x in seen.items()}
        self.spec = replace(
            env.spec,
            obs=ObsSpec({**_without(env.spec.obs.shapes, unseen), **shown}),
            action=ActionSpec((-1.0,) * dim, (1.0,) * dim),
        )
        self._obs: Obs = {}

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        chosen = torch.ones(self.num_envs, dtype=torch.bool, device=self.device) if mask is None else mask
        self._obs = self.env.reset(mask, seeds)
        self.base.reset(chosen, seeds)
        self._offset = self._offset.masked_fill(chosen[:, None], 0.0)
        return self._seen()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        check(action, f"{self.num_envs} {self.spec.action.dim}")
        if self.offset:
            self._offset = action = self.offset.after(self._offset, action)
        total = (self.base.step(self._obs) + self.bound * action).clamp(-1, 1)
        step = self.env.step(total, active)
        self._obs = step.obs
        return step._replace(obs=self._seen(), info={"executed": total, **step.info})

    def _seen(self) -> Obs:
        lasting = {OFFSET: self._offset} if self.offset else {}
        shown = {"base_action": self.base.peek(self._obs), **ahead(self.base, self._obs, self.observe)}
        return {**_without(self._obs, self.unseen), **shown, **lasting}

    def state_dict(self) -> dict[str, Any]:
        lasting = {"offset": self._offset} if self.offset else {}
        own = {"base": self.base.state_dict(), "obs": map_tree(torch.clone, self._obs)}
        return {**super().state_dict(), **own, **lasting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.base.load_state_dict(state["base"])
        self._obs = to(state["obs"], self.device)
        self._offset = state.get("offset", self._offset).to(self.device)


class BaseEnv:
    """The agent acts once per chunk: (N, D) or (N, 1, D), the latent part first, then the residual part, in [-1, 1].

    ``latent``   the agent's noise is latent * action; without it the noise is N(0, I), drawn per (episode, decision).
    ``residual`` the executed chunk is base + residual * action; without a latent the agent sees the base's chunk as
                 ``base_action`` (N, n, A); with one it cannot, because its own choice decides the chunk.
    ``unseen``   keys of the observation that the base reads and the agent does not see.
    """

    def __init__(
        self,
        env: Chunked,
        base: Policy,
        *,
        latent: float | None = None,
        residual: float | None = None,
        unseen: Collection[str] = (),
        seed: int = 0,
    ) -> None:
        spec = base.spec
        if latent is None and residual is None:
            raise BurnishError("this view needs latent=, residual= or both: otherwise the agent has nothing to choose")
        if latent is not None and spec.noise_shape is None:
            raise BurnishError("a latent view needs a base that takes noise; this one has none. Use residual= instead")
        for name, bound in (("latent", latent), ("residual", residual)):
            if bound is not None and bound <= 0:
                raise BurnishError(f"the {name} bound {bound} must be positive")
        if env.execute != spec.execute:
            raise BurnishError(f"the base executes {spec.execute} actions per decision, the environment {env.execute}")
        self.env, self.base, self.latent, self.residual, self.unseen = env, base, latent, residual, unseen
        self.num_envs, self.device = env.num_envs, env.device
        self.latent_dim = math.prod(spec.noise_shape or ()) if latent is not None else 0
        self.residual_dim = spec.execute * spec.action.dim if residual is not None else 0
        self.action_dim = self.latent_dim + self.residual_dim
        shapes = _without(env.spec.obs.shapes, unseen)
        if latent is None:
            shapes["base_action"] = (spec.execute, spec.action.dim)
        limits = ActionSpec((-1.0,) * self.action_dim, (1.0,) * self.action_dim)
        self.spec = replace(env.spec, obs=ObsSpec(shapes), action=limits)
        self._seeds = EpisodeSeeds(seed, env.num_envs, env.device)
        self._decision = torch.zeros(env.num_envs, dtype=torch.int64, device=env.device)
        self._obs: Obs = {}

    def reset(self, seeds: Sequence[int] | None = None) -> Obs:
        everyone = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self._seeds.begin(everyone, seeds)
        self._decision = torch.zeros_like(self._decision)
        obs = self.env.reset(seeds)
        self._obs = obs if self.latent is not None else {**obs, "base_action": self._draw(obs, everyone)}
        return _without(self._obs, self.unseen)

    def step(self, action: Tensor) -> Outcome:
        action = action.flatten(1)
        check(action, f"{self.num_envs} {self.action_dim}")
        everyone = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        if self.latent is not None:
            noise = self.latent * action[:, : self.latent_dim]
            chunk = self._draw(self._obs, everyone, noise.view(-1, *(self.base.spec.noise_shape or ())))
        else:
            chunk = self._obs["base_action"]
        if self.residual is not None:
            chunk = (chunk + self.residual * action[:, self.latent_dim :].view_as(chunk)).clamp(-1, 1)
        outcome = self.env.step(chunk)
        self._decision = self._decision + 1
        if self.latent is not None:
            self._begin(outcome.ended)
            self._obs = outcome.obs
            return outcome._replace(
                obs=_without(self._obs, self.unseen), next_obs=_without(outcome.next_obs, self.unseen)
            )
        # Where a world was cut off, the base is asked twice: what it would have done next (for the bootstrap), and
        # what it does in the new episode. Elsewhere both are one; a terminated future is worth nothing, and not asked.
        cut = outcome.ended & ~outcome.terminated
        would = torch.where(cut[:, None, None], self._draw(outcome.next_obs, cut), torch.zeros_like(chunk))
        self._begin(outcome.ended)
        now = self._draw(outcome.obs, everyone)
        self._obs = {**outcome.obs, "base_action": now}
        following = torch.where(outcome.ended[:, None, None], would, now)
        led = {**outcome.next_obs, "base_action": following}
        return outcome._replace(obs=_without(self._obs, self.unseen), next_obs=_without(led, self.unseen))

    def _begin(self, ended: Tensor) -> None:
        self._seeds.begin(ended)
        self._decision = self._decision.masked_fill(ended, 0)

    def _draw(self, obs: Obs, mask: Tensor, noise: Tensor | None = None) -> Tensor:
        """The executed slice (N, n, A) of the base's chunk in the worlds of ``mask``; zero elsewhere."""
        spec = self.base.spec
        out = torch.zeros(self.num_envs, spec.execute, spec.action.dim, device=self.device)
        ask = mask.nonzero()[:, 0]
        if len(ask):
            source = RowNoise(self._seeds.current[ask], self._decision[ask])
            seen = {key: x for key, x in obs.items() if key != "base_action"}
            given = None if noise is None else noise[ask]
            with torch.no_grad():
                out[ask] = spec.executed(self.base.act(index(seen, ask), noise=given, generator=source)).to(out)
        return out

    def state_dict(self) -> dict[str, Any]:
        return {
            "env": self.env.state_dict(),
            "seeds": self._seeds.state_dict(),
            "decision": self._decision,
            "obs": map_tree(torch.clone, self._obs),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.env.load_state_dict(state["env"])
        self._seeds.load_state_dict(state["seeds"])
        self._decision, self._obs = state["decision"].to(self.device), to(state["obs"], self.device)
