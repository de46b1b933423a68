"""Composite policies, which refinement makes of a base; deployable with this folder alone.

``Residual``  the base, corrected: a + bound * net(obs, a), per control tick or per chunk; per tick the corrections may
              last (`core/offset.py`).
``Steered``   the base, whose noise an agent chooses (and, if it likes, a correction of the chunk on top).
``BestOf``    the best of several draws of the base in the eyes of a critic, each also in an edited version.
``Repeated``  the base, with one noise vector for all of its rows: a smaller space to steer in.
``Greedy``    the base from noise 0, however it is asked.

``SplitChain`` of `split_chain.py` is one chain whose first steps are one policy's, the others another's.

Each is a ``Policy`` itself, so they nest. Exploration noise that training added is not deployed: a correction is always
its mean. Noise in the place of the base's own is drawn, unless ``greedy``. Parts may be policies that are
not ours; they are then handed in again at loading (`build.load_policy`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .chain import committed, draws, start_noise, with_prefix
from .controllers import ChunkController, controller_for
from .core.config import LATER
from .core.errors import BurnishError
from .core.offset import OFFSET, OffsetConfig
from .core.ranges import check_ranges
from .core.seed import Noise, RowNoise
from .core.spec import PolicySpec, require_bytes
from .core.tree import map_tree
from .core.types import ActOptions, Controller, Masked, Obs, Policy, Prefix, Pull
from .core.views import Hidden, ahead, require_chunks
from .features import featured
from .gaussian import GaussianPolicy
from .nets.critic import QEnsemble

MOST_DRAWS, LARGEST_DRAWS = 1024, 1 << 28  # of one decision; bytes of the observations that they are asked about


def _with_executed(spec: PolicySpec, chunk: Tensor, executed: Tensor, prefix: Prefix | None) -> Tensor:
    """``chunk`` with another executed slice; actions that are committed already stay what they are."""
    whole = torch.cat([chunk[:, : spec.start], executed, chunk[:, spec.start + spec.execute :]], 1)
    return with_prefix(whole, committed(prefix))


def corrected(action: Tensor, correction: Tensor, bound: float) -> Tensor:
    """The action plus the bounded correction, clipped to [-1, 1]."""
    return (action + bound * correction.reshape(action.shape)).clamp(-1, 1)


def picked(candidates: Tensor, choice: Tensor) -> Tensor:
    """(B, M, ...), (B,) -> (B, ...): of each row the one that was chosen."""
    return candidates[torch.arange(len(choice), device=choice.device), choice]


class Every(Enum):
    """The rate of a residual's corrections: at each control tick, or once for each decision."""

    step = "step"  # one control tick: the net sees one action of the base, and corrects it
    chunk = "chunk"  # one decision: it sees and corrects the executed slice


@dataclass
class ResidualConfig:
    """Configuration of a policy that adds corrections of at most ``bound`` to the actions of its base."""

    bound: float
    every: Every
    offset: OffsetConfig = field(default_factory=OffsetConfig, metadata=LATER)

    def __post_init__(self) -> None:
        check_ranges(self, {"(0, inf)": "bound"}, "residual.")
        if self.offset.half_life and self.every is Every.chunk:
            raise BurnishError(
                f"residual.offset.half_life={self.offset.half_life} lets corrections last from tick to tick, but these "
                "are of whole chunks; leave it 0"
            )


class Residual(nn.Module):
    """``net`` acts on the view it was trained on: ``ResidualEnv`` (every step) or ``BaseEnv(residual=)`` (chunk).
    Whether it observes what the base's queue hides is written in its specification."""

    def __init__(
        self,
        base: Policy,
        net: GaussianPolicy,
        bound: float,
        every: Every | str,
        offset: OffsetConfig | None = None,
    ) -> None:
        super().__init__()
        self.base, self.net = base, net
        self.config = ResidualConfig(bound, Every(every), offset or OffsetConfig())
        self.offset = self.config.offset.at(net.spec.control_hz)
        self.spec = base.spec

    def act(self, obs: Obs, **how: Unpack[ActOptions]) -> Tensor:
        if self.per_step:
            raise BurnishError(
                "a residual per step answers to what it sees at each control tick, so it has no chunk to give; "
                "`burnish distill teachers=FOLDER` makes one policy of it that has, `burnish export` (without "
                "method.observe and method.offset) a bundle that corrects each tick; in Python, play it with "
                "controller_for(policy, num_envs)"
            )
        chunk = self.base.act(obs, **how)
        return _with_executed(self.spec, chunk, self.corrected(obs, self.spec.executed(chunk)), how.get("prefix"))

    def corrected(self, obs: Obs, action: Tensor) -> Tensor:
        """``action`` is the base's: (B, A) per step, (B, n, A) per chunk."""
        return corrected(action, self.correction(obs, action), self.config.bound)

    def correction(self, obs: Obs, action: Tensor) -> Tensor:
        """Of that action, in units of the bound: the net's, or the offset that it has moved."""
        obs = featured(obs, self.base, self.net.spec.obs)
        found = self.net.act({**obs, "base_action": action}, greedy=True).reshape(action.shape)
        return self.offset.after(obs[OFFSET], found) if self.offset else found

    @property
    def per_step(self) -> bool:
        """Single actions are corrected, each at its tick."""
        return self.config.every is Every.step

    @property
    def observe(self) -> list[Hidden]:
        return [x for x in Hidden if x.key in self.net.spec.obs.shapes]

    def controller(self, num_envs: int, *, seed: int = 0, greedy: bool = False, device: Any = "cpu") -> Controller:
        if self.per_step:
            return ResidualController(self, num_envs, seed=seed, greedy=greedy, device=device)
        return ChunkController(self, num_envs, seed=seed, greedy=greedy, device=device)


class ResidualController:
    """The base plays its chunks; every action of theirs is corrected when its tick has come."""

    def __init__(
        self, policy: Residual, num_envs: int, *, seed: int = 0, greedy: bool = False, device: Any = "cpu"
    ) -> None:
        self.policy, self.observe = policy, policy.observe
        self.base: Any = controller_for(policy.base, num_envs, seed=seed, greedy=greedy, device=device)
        require_chunks(self.base, self.observe)
        self._offset = torch.zeros(num_envs, policy.spec.action.dim, device=device)

    @property
    def execute(self) -> int:
        return self.base.execute

    def ahead(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """Of the base, before any correction: those to come depend on what will be observed then."""
        return self.base.ahead(obs)

    def reset(self, mask: Tensor, seeds: Sequence[int] | None = None) -> None:
        self.base.reset(mask, seeds)
        self._offset = self._offset.masked_fill(mask[:, None], 0.0)

    def peek(self, obs: Obs) -> Tensor:
        return self._corrected(self._seen(obs), self.base.peek(obs))[0]

    def step(self, obs: Obs) -> Tensor:
        action, correction = self._corrected(self._seen(obs), self.base.step(obs))
        if self.policy.offset:
            self._offset = correction
        return action

    def _seen(self, obs: Obs) -> Obs:
        lasting = {OFFSET: self._offset} if self.policy.offset else {}
        return {**obs, **ahead(self.base, obs, self.observe), **lasting}

    @torch.no_grad()
    def _corrected(self, obs: Obs, action: Tensor) -> tuple[Tensor, Tensor]:
        correction = self.policy.correction(obs, action)
        return corrected(action, correction, self.policy.config.bound), correction

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict()} | ({"offset": self._offset} if self.policy.offset else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state["base"])
        self._offset = state.get("offset", self._offset).to(self._offset.device)


@dataclass
class RepeatedConfig:
    """Configuration of a policy whose one action is played at each tick of the chunk; it has no settings."""

    pass


class Repeated(nn.Module):
    """Noise (W,) in place of (R, W): the one vector stands in every row, as DSRL did for pi0."""

    def __init__(self, base: Policy) -> None:
        super().__init__()
        shape = base.spec.noise_shape
        if shape is None or len(shape) < 2:
            raise BurnishError(f"one noise vector per chunk needs a base whose noise has rows; this one takes {shape}")
        self.base, self.config, self.count = base, RepeatedConfig(), shape[0]
        self.spec = replace(base.spec, noise_shape=shape[1:])

    def act(
        self,
        obs: Obs,
        *,
        noise: Tensor | None = None,
        prefix: Prefix | None = None,
        greedy: bool = False,
        generator: Noise | None = None,
    ) -> Tensor:
        vector = start_noise(self.spec, _like(obs), noise, greedy, generator)
        rows = vector[:, None].expand(-1, self.count, *vector.shape[1:])
        return self.base.act(obs, noise=rows, prefix=prefix, greedy=greedy, generator=generator)


@dataclass
class GreedyConfig:
    """Configuration of a policy that plays its base from noise 0; it has no settings."""

    pass


class Greedy(nn.Module):
    """It draws nothing, so there is nothing in it to steer or to train; its actions can be corrected."""

    always_greedy = True

    def __init__(self, base: Policy) -> None:
        super().__init__()
        self.base, self.config = base, GreedyConfig()
        self.spec = replace(base.spec, noise_shape=None)

    def act(self, obs: Obs, **how: Unpack[ActOptions]) -> Tensor:
        if how.get("noise") is not None:
            raise BurnishError("this policy always begins at noise 0; leave noise= out")
        how["greedy"] = True
        return self.base.act(obs, **how)

    def controller(self, num_envs: int, *, seed: int = 0, greedy: bool = False, device: Any = "cpu") -> Controller:
        return controller_for(self.base, num_envs, seed=seed, greedy=True, device=device)


@dataclass
class SteeredConfig:
    """Configuration of a base whose noise, and perhaps action, is chosen by an agent within these bounds."""

    latent_bound: float
    residual_bound: float | None = None

    def __post_init__(self) -> None:
        check_ranges(self, {"(0, inf)": "latent_bound residual_bound"}, "steered.")


class Steered(nn.Module):
    """``latent`` acts on ``BaseEnv(latent=, residual=)``: (B, 1, D), the noise first, then the correction.

    ``greedy`` is the mean of the latent; otherwise the latent is drawn, as it was in training, and the correction is
    its mean. Its own noise (1, L) is the standard normal behind that draw.
    """

    def __init__(
        self, base: Policy, latent: GaussianPolicy, latent_bound: float, residual_bound: float | None = None
    ) -> None:
        super().__init__()
        if base.spec.noise_shape is None:
            raise BurnishError("only a policy that takes noise can be steered; this one has no noise_shape")
        self.base, self.latent = base, latent
        self.config = SteeredConfig(latent_bound, residual_bound)
        self._size = math.prod(base.spec.noise_shape)
        self._residual = base.spec.execute * base.spec.action.dim if residual_bound is not None else 0
        if latent.spec.chunk_shape != (1, self._size + self._residual):
            raise BurnishError(
                f"the agent chooses {latent.spec.chunk_shape} numbers, but the noise has {self._size} and the "
                f"correction {self._residual}"
            )
        self.spec = replace(base.spec, noise_shape=(1, self._size))

    def act(
        self,
        obs: Obs,
        *,
        noise: Tensor | None = None,
        prefix: Prefix | None = None,
        greedy: bool = False,
        generator: Noise | None = None,
    ) -> Tensor:
        obs = featured(obs, self.base, self.latent.spec.obs)
        z = start_noise(self.spec, _like(obs), noise, greedy, generator)
        choice = self.latent.act(obs, noise=F.pad(z, (0, self._residual)))[:, 0]
        w = (self.config.latent_bound * choice[:, : self._size]).view(-1, *(self.base.spec.noise_shape or ()))
        chunk = self.base.act(obs, noise=w, prefix=prefix, greedy=greedy, generator=generator)
        if self.config.residual_bound is None:
            return chunk
        executed = corrected(self.spec.executed(chunk), choice[:, self._size :], self.config.residual_bound)
        return _with_executed(self.spec, chunk, executed, prefix)


def _like(obs: Obs) -> Tensor:
    """A tensor whose rows, type and device are those of the noise for ``obs``."""
    first = next(iter(obs.values()))
    return torch.zeros(len(first), device=first.device)


@dataclass
class BestOfConfig:
    """Configuration of a policy that plays the best of ``count`` draws of its base by a critic."""

    count: int
    edit_bound: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, {"[1, inf); a draw is chosen": "count", "[0, inf)": "edit_bound"}, "best_of.")


class BestOf(nn.Module):
    """``count`` draws of the base, and an edited version of each; the highest minimum over the critic's members wins.

    ``edit`` observes the executed draw too, as ``base_action``. ``greedy`` considers the base's greedy chunk alone, and
    its mean edit.
    """

    def __init__(
        self,
        base: Policy,
        critic: QEnsemble,
        count: int,
        edit: GaussianPolicy | None = None,
        edit_bound: float = 0.0,
    ) -> None:
        super().__init__()
        self.base, self.critic, self.edit = base, critic, edit
        self.config = BestOfConfig(count, edit_bound)
        self.draws: int = count * _draws(base)
        if self.draws > MOST_DRAWS:
            raise BurnishError(f"best_of.count={count} comes to {self.draws} draws in all, more than {MOST_DRAWS}")
        require_bytes(self.draws * base.spec.inputs.nbytes, LARGEST_DRAWS, f"what {self.draws} draws observe")
        self.spec = replace(base.spec, noise_shape=None)

    def act(
        self,
        obs: Obs,
        *,
        noise: Tensor | None = None,
        prefix: Prefix | None = None,
        greedy: bool = False,
        generator: Noise | None = None,
    ) -> Tensor:
        if noise is not None:
            raise BurnishError("the best of several draws has no single noise to start from; leave noise= out")
        obs = featured(obs, self.base, self.critic.spec.obs)
        chunks = self.candidates(obs, prefix=prefix, greedy=greedy, generator=generator)
        return picked(chunks, self.best(obs, chunks))

    def best(self, obs: Obs, chunks: Tensor) -> Tensor:
        """(B, M, H, A) -> (B,): the chunk whose executed slice the critic prefers."""
        executed = chunks[:, :, self.spec.start : self.spec.start + self.spec.execute]
        return self.critic(obs, executed).amin(0).argmax(1)

    def candidates(
        self, obs: Obs, *, prefix: Prefix | None = None, greedy: bool = False, generator: Noise | None = None
    ) -> Tensor:
        """(B, M, H, A): the draws, then their edited versions. All draws of all rows are one call of the base."""
        batch, count = len(next(iter(obs.values()))), 1 if greedy else self.config.count
        fixed = None if prefix is None else _repeated(prefix, count)
        source = generator.split(count) if isinstance(generator, RowNoise) else generator
        drawn = draws(self.base, obs, count, prefix=fixed, greedy=greedy, generator=source)
        if self.edit is None:
            return drawn.unflatten(0, (batch, count))
        executed = self.spec.executed(drawn)
        many = map_tree(lambda x: x.repeat_interleave(count, 0), obs)
        change = self.edit.act({**many, "base_action": executed}, greedy=greedy, generator=source)
        edited = _with_executed(self.spec, drawn, corrected(executed, change, self.config.edit_bound), fixed)
        return torch.cat([x.unflatten(0, (batch, count)) for x in (drawn, edited)], 1)


def _repeated(prefix: Prefix, count: int) -> Prefix:
    if isinstance(prefix, Pull):
        return prefix._replace(actions=prefix.actions.repeat_interleave(count, 0))
    if isinstance(prefix, Masked):
        return Masked(*(x.repeat_interleave(count, 0) for x in prefix))
    return prefix.repeat_interleave(count, 0)


def _draws(policy: Any) -> int:
    """Of the bases within each other, how many their draws come to."""
    while policy is not None and not isinstance(policy, BestOf):
        policy = getattr(policy, "base", None)
    return 1 if policy is None else policy.draws
