"""The world that a model imagines, as a `VecEnv`: methods train in it unchanged, and none learns that it is imagined.

An episode follows one member of the ensemble (NEUBAY, arXiv 2512.04341), with its noise sampled, and begins at an
observation that was played or recorded. Noise, member and beginning belong to (seed, tick), so imagined evaluations are
paired; the matrix products behind them round otherwise for another number of worlds, and a model may amplify that.

**Guards** act where the members disagree more than ``limit`` times as much as anywhere in the data: ``cut``
truncates there (NEUBAY), so that values behind it are bootstrapped; ``halt`` terminates and pays minus ``penalty``
(MOReL, 2005.05951); ``penalty`` pays minus ``penalty`` times the disagreement at every tick (MOPO, 2005.13239), in
units of that limit; ``weight`` lets a row count 1 / (1 + (disagreement / limit)^2), an inverse variance (WIMLE,
2602.14351): in the losses of critics and values, in the surrogate of PPO, and in what IQL (``awr``) and RECAP imitate.
Other losses of actors, which climb a critic or imitate, and further terms of PPO count all rows alike. ``verify``
counts a success only where a second member, with other noise and the same actions, has one too (RAW-Dream,
2605.12334); a success that it denies pays as a tick without one, by the known reward of such
ticks or by what that member says.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...policies.core import tree
from ...policies.core.chunk import HistoryEnv
from ...policies.core.clock import Clock, restored
from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges, require_usual
from ...policies.core.seed import generator as named_generator
from ...policies.core.spec import stacked_by_history
from ...policies.core.types import Obs, Step, VecEnv
from .model import WorldModel, ends_of
from .ticks import Ticks, previous

KEY = (5, 20)  # ticks before a success between which starts=key begins
LEAST = 1e-9  # disagreement, by which a guard may divide
MEASURED = 10_000  # ticks, drawn at random of more, among which the largest disagreement is looked for


class Guard(enum.Enum):
    """The answers to a model that does not know: none, truncate, terminate, pay for it, or learn less from it."""

    none = "none"
    cut = "cut"
    halt = "halt"
    penalty = "penalty"
    weight = "weight"


class Starts(enum.Enum):
    """The observations at which imagined episodes begin."""

    first = "first"  # where episodes began
    any = "any"  # anywhere
    key = "key"  # shortly before a success, and where episodes began, in equal parts (WoVR, arXiv 2602.13977)


@dataclass
class GuardConfig:
    """Settings of the guard of an imagined world."""

    kind: Guard = Guard.cut  # answer to disagreement above the limit
    limit: float = 1.5  # limit, in multiples of the largest disagreement on real ticks
    penalty: float = 1.0  # paid by halt once, and by penalty for a disagreement at the limit
    verify: bool = False  # a success counts where a second member has one too

    def __post_init__(self) -> None:
        check_ranges(self, {"(0, inf)": "limit", "[0, inf)": "penalty"}, "guard.")
        if self.kind not in (Guard.halt, Guard.penalty):
            require_usual(self, GuardConfig, "penalty", f"with guard.kind={self.kind.value}", "guard.")


class ImaginedEnv:
    """N worlds of ``model``. ``begin`` gives it the ticks that episodes begin at, before its first reset; ``horizon``
    is the number of ticks after which an episode is truncated; 0: as many as in the world."""

    continues = True

    def __init__(
        self,
        model: WorldModel,
        num_envs: int,
        guard: GuardConfig,
        *,
        starts: Starts = Starts.first,
        horizon: int = 0,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model, self.guard, self.starts = model, guard, starts
        self.num_envs, self.device = num_envs, torch.device(device)
        self.spec = replace(model.spec, max_steps=horizon or model.spec.max_steps)
        self.horizon = self.spec.max_steps  # may be changed later
        self.limit = float("inf")
        self._clock = Clock(num_envs, seed, device)
        self._played: Obs = {}  # what was seen in real episodes
        self._pool = torch.zeros(0, dtype=torch.int64, device=device)  # rows of it at which episodes begin
        self._begun = self._pool  # the row at which each world began last, where it just did
        self._before: Tensor | None = None  # the row before each row, itself where an episode began
        self._own_start = False  # world i begins at row i of them
        self._late = 0  # how many of them, the last ones, come shortly before a success
        self._obs: Obs = {}
        self._shadow: Obs = {}  # the same episodes as a second member sees them
        self._member = torch.zeros(2, num_envs, dtype=torch.int64, device=device)
        self._seen = torch.zeros(num_envs, device=device)  # the highest score of success that the second has had
        self._knows_success = model.known is not None
        self.unknown = torch.zeros(2, dtype=torch.int64, device=device)  # ticks beyond the limit, and all

    def begin(self, ticks: Ticks, limit: float | None = None) -> None:
        """Episodes begin at these ticks from now on; without a ``limit`` it is that of the model as it is."""
        self._own_start, data = False, ticks.all()
        self._knows_success = ticks.knows_success or self.model.known is not None
        first = data["first"] if self.starts is not Starts.any else torch.ones_like(data["first"])
        late = shortly_before_success(data) if self.starts is Starts.key else torch.zeros_like(first)
        self._late = int(late.sum())
        self._pool = torch.cat([first.nonzero()[:, 0], late.nonzero()[:, 0]]).to(self.device)
        self._played = tree.to({key: data["obs"][key] for key in self.spec.obs.shapes}, self.device)
        self._before = previous(data["episode"]).to(self.device)
        self.limit = self._limit(data) if limit is None else limit

    def _limit(self, data: Mapping[str, Any]) -> float:
        """That of the model on these ticks, or on ``MEASURED`` of them, the same ones of the same number."""
        action, rows = data["action"], slice(None)
        if len(action) > MEASURED:
            drawn = torch.randperm(len(action), generator=named_generator(len(action), "measured"))
            rows: Any = drawn[:MEASURED].to(action.device)
        found = float(self.model.disagreement(tree.index(data["obs"], rows), action[rows]).amax())
        return self.guard.limit * max(found, LEAST)

    def begin_at(self, obs: Obs) -> None:
        """From now on each world begins at its own row of ``obs``."""
        self._played, self._own_start = dict(obs), True
        self._pool = self._before = torch.arange(self.num_envs, device=self.device)

    def behind(self, history: int) -> Obs:
        """(N, history, ...): the frames that a policy saw where each world began, which it just did; oldest first."""
        assert self._before is not None, "it has begun"
        rows = [self._begun]
        for _ in range(history - 1):
            rows.append(self._before[rows[-1]])
        back = torch.stack(rows[::-1], 1)
        return {key: x[back] for key, x in self._played.items() if stacked_by_history(key)}

    def state(self) -> Tensor:
        """(N, D): the numbers that the model moves, as they are."""
        return self.model.state_of(self._obs)

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        if not len(self._pool):
            raise BurnishError("an imagined world begins at ticks that were played; call begin(ticks) first")
        mask = self._clock.begin(mask, seeds)
        dice = self._clock.noise("imagined start").uniform((self.num_envs, 4)).to(self.device)
        size, members = len(self._pool), len(self.model.elites)
        row = (dice[:, 0] * (size - self._late)).long()
        if self._late:
            row = torch.where(dice[:, 3] < 0.5, size - self._late + (dice[:, 0] * self._late).long(), row)
        row = torch.arange(self.num_envs, device=row.device) if self._own_start else row.clamp(max=size - 1)
        self._begun = self._pool[row]
        begun = tree.index(self._played, self._begun)
        self._obs = tree.where(mask, begun, self._obs) if self._obs else begun
        if self.guard.verify:
            self._shadow = tree.where(mask, begun, self._shadow) if self._shadow else begun
        own = (dice[:, 1] * members).long()
        other = (own + 1 + (dice[:, 2] * (members - 1)).long()) % members
        self._member = torch.where(mask, self.model.elites[torch.stack([own, other])], self._member)
        self._seen = self._seen.masked_fill(mask, 0.0)
        return dict(self._obs)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        tree.check(action, f"{self.num_envs} {self.spec.action.dim}")
        action = action.to(self.device).float().clamp(-1, 1)
        everyone, active = active is None, self._clock.advance(active)
        dim = sum(self.model.sizes)
        # The first half is the same whether or not a second one is drawn.
        noise = self._clock.noise("imagined tick").normal((self.num_envs, dim * (1 + self.guard.verify))).to(action)
        here = self.model.predict(self._obs, action, self._member[0], noise[:, :dim])
        success, reward, score = here.success, here.reward, here.score[:, 0]
        if self.guard.verify:
            there = self.model.predict(self._shadow, action, self._member[1], noise[:, dim:])
            self._shadow = tree.where(active, there.next_obs, self._shadow)
            self._seen = torch.where(active, torch.maximum(self._seen, there.score[:, 0]), self._seen)
            score = torch.minimum(score, self._seen)
            success = here.success & (self._seen > self.model.thresholds[0])
            instead = torch.where(self.model.known_reward, self.model.rewards[0], there.reward)
            reward = torch.where(here.success & ~success, instead, reward)
        self._obs = here.next_obs if everyone else tree.where(active, here.next_obs, self._obs)
        terminated = here.failure | (success & self.model.success_ends)
        beyond = (here.uncertainty > self.limit) & ~terminated
        self.unknown += torch.stack([beyond & active, active]).sum(1)
        truncated = self._clock.tick >= self.horizon
        if self.guard.kind is Guard.cut:
            truncated = truncated | beyond
        elif self.guard.kind is Guard.halt:
            terminated, reward = terminated | beyond, torch.where(beyond, -self.guard.penalty, reward)
        elif self.guard.kind is Guard.penalty:
            reward = reward - self.guard.penalty * here.uncertainty / self.limit
        info = {"executed": action, "score": score}
        if self._knows_success:
            info["success"] = success
        if self.guard.kind is Guard.weight:
            info["weight"] = 1 / (1 + (here.uncertainty / self.limit).square())
        return Step(dict(self._obs), reward.float(), terminated, truncated & ~terminated, info)

    def share_unknown(self) -> float:
        """The share of the ticks since the last call in which the members disagreed beyond the limit."""
        beyond, total = self.unknown.tolist()
        self.unknown.zero_()
        return beyond / max(total, 1)

    def state_dict(self) -> dict[str, Any]:
        """Without the model and the ticks, which are saved once, beside it."""
        tensors = {"member": self._member, "seen": self._seen, "unknown": self.unknown}
        return {
            **self._clock.state_dict(),
            **tree.map_tree(torch.clone, tensors),
            "limit": self.limit,
            "obs": dict(self._obs),
            "shadow": dict(self._shadow),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._clock.load_state_dict(state)
        own = {"member": self._member, "seen": self._seen, "unknown": self.unknown}
        self._member, self._seen, self.unknown = restored(own, state).values()
        self.limit = float(state["limit"])
        self._obs, self._shadow = (tree.to(state[name], self.device) for name in ("obs", "shadow"))


class ImaginedHistory(HistoryEnv):
    """Imagined worlds with the last frames. Those of an episode that begins amid a real one are what was seen there."""

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        obs = super().reset(mask, seeds)
        own: Any = self.env
        behind = own.behind(self.history)
        self._frames = behind if mask is None else tree.where(mask, behind, self._frames)
        return {**obs, **self._frames}


def stacked(env: ImaginedEnv, history: int) -> VecEnv:
    """``env`` with as many frames as the policy sees."""
    return env if history == 1 else ImaginedHistory(env, history)


def shortly_before_success(data: Mapping[str, Any]) -> Tensor:
    """(T,): ticks between ``KEY`` before the first success of their episode. Ticks of an episode need not be
    neighbours in memory, where many worlds were written at once."""
    _, owner = data["episode"].unique(return_inverse=True)
    order = owner.argsort(stable=True)
    success = ends_of(data)[0][order]
    place = torch.arange(len(order), device=order.device)
    count = int(owner.max()) + 1
    never = len(order) + KEY[1] + 1
    won_at = torch.full((count,), never, device=order.device).scatter_reduce(
        0, owner[order][success], place[success], "amin"
    )
    before = won_at[owner[order]] - place
    chosen = (before >= KEY[0]) & (before <= KEY[1]) & (won_at[owner[order]] < never)
    return torch.zeros_like(chosen).scatter(0, order, chosen)
