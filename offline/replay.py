"""The one memory of decisions: a ring of T rows by N worlds, with the observations that ended an episode kept aside.

    row t of a world      obs, action, reward, discount, ended, terminated, steps, + what the learner wants
    where it led          the obs of row t + 1; where it ended: its own final observation; at the newest row: `head`

Storing each observation once halves the memory, and "the next row" is never one of another episode. The columns are
fixed by the first ``add``; storage has no opinion on them. Sampling is exact at the seams: sums over several decisions
and sequences stop at ``ended`` and at the newest row, per world, also where the ring has wrapped around.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..policies.core.errors import BurnishError
from ..policies.core.seed import generator as named_generator
from ..policies.core.tree import Tree, assign, index, leaves, map_tree, where
from ..policies.core.types import Obs, Outcome
from ..policies.data.on_disk import in_file
from ..policies.runs.state_codec import SEGMENTS
from .returns import n_step as sum_of
from .storage import Place, places, take

BASE = ("action", "reward", "discount", "ended", "terminated", "steps")
Batch = dict[str, Any]  # columns (B, ...), and "obs" and "next_obs", each an Obs
FIRST = 256  # rows that are allocated at once; then they are doubled until the capacity is reached
SEGMENT = 1 << 25  # bytes of the rows that are saved in one file
ALONE = (0, 0)  # a decision without its neighbours in time


class Replay:
    """``capacity`` counts decisions of all worlds together."""

    def __init__(
        self,
        capacity: int,
        num_envs: int = 1,
        *,
        place: Place = Place.auto,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if capacity < num_envs:
            raise BurnishError(f"a replay of capacity={capacity} cannot hold one decision of each of {num_envs} worlds")
        self.rows, self.num_envs, self.device = capacity // num_envs, num_envs, torch.device(device)
        self.added = 0  # rows ever added; row t of the ring was the latest of those with added % rows == t
        self.generator = named_generator(seed, "replay", device=device)
        self._obs: Tree = {}  # (rows so far, N, ...) each
        self._columns: Tree = {}
        self._place, self._places = place, dict[str, Place]()
        self._finals: Tree = {}  # a pool of final observations
        self._final_at = torch.full((self.rows, num_envs), -1, dtype=torch.int64, device=self.device)
        self._free: list[int] = []
        self._head: Obs = {}  # where the newest row led, per world
        self._void: Tensor | None = None  # (rows, N): decisions that are never drawn; None while there are none

    @property
    def away(self) -> bool:
        """Whether a batch comes from another memory than that of the learner, or from a file."""
        here = {Place.device} if self.device.type != "cpu" else {Place.device, Place.host}
        return not here.issuperset(self._places.values())

    @property
    def filled(self) -> int:
        return min(self.added, self.rows)

    def __len__(self) -> int:
        return self.filled * self.num_envs

    # ---- writing ----

    def record(self, obs: Obs, action: Tensor, outcome: Outcome, columns: Mapping[str, Tensor] | None = None) -> None:
        """One decision of N worlds, as the loops see it."""
        facts = {name: getattr(outcome, name) for name in BASE if name != "action"}
        self.add(obs, {"action": action, **facts, **(columns or {})}, outcome.next_obs)

    def add(self, obs: Obs, columns: Mapping[str, Tensor], next_obs: Obs) -> None:
        """``columns`` holds at least the base columns, each (N, ...). Everything is copied."""
        self._require(obs, columns, next_obs, self.num_envs)
        row = self.added % self.rows
        self._grow(row + 1)
        assign(self._obs, row, obs)
        assign(self._columns, row, columns)
        self._head = {key: next_obs[key].to(self.device, copy=True) for key in self._obs}
        if self.added >= self.rows:
            self._free += [slot for slot in self._final_at[row].tolist() if slot >= 0]
        self._final_at[row] = -1
        if self._void is not None:
            self._void[row] = False
        self._keep_finals(row, self._columns["ended"][row])
        self.added += 1

    def cut(self, worlds: Tensor | None = None) -> None:
        """The next row is not a continuation, in ``worlds`` (N,) or in all: they are about to be reset from outside,
        or a person plays. The newest row is the last of its episodes there, as if they had been truncated."""
        if self.added == 0:
            return
        row = (self.added - 1) % self.rows
        ended = self._columns["ended"][row]
        cut = torch.ones_like(ended) if worlds is None else worlds.to(self.device)
        self._keep_finals(row, cut & ~ended)
        self._columns["ended"][row] = ended | cut

    def leave_out(self, worlds: Tensor) -> None:
        """The newest row is never drawn in ``worlds`` (N,), which must not be all, and was ``cut`` before it there."""
        if self._void is None:
            self._void = torch.zeros_like(self._final_at, dtype=torch.bool)
        self._void[(self.added - 1) % self.rows] = worlds

    def _keep_finals(self, row: int, mask: Tensor) -> None:
        """Keep the head of the worlds of ``mask`` (N,) as where ``row`` led."""
        worlds = mask.nonzero()[:, 0]
        if len(worlds):
            slots = torch.tensor(self._slots(len(worlds)))
            for key, pool in self._finals.items():
                pool[slots.to(pool.device)] = self._head[key][worlds].to(pool.device)
            self._final_at[row, worlds] = slots.to(self.device)

    def extend(self, obs: Obs, columns: Mapping[str, Tensor], final: Obs) -> None:
        """T consecutive decisions of one world at once, each (T, ...), of which only the last may have ended; ``final``
        (1, ...) is where that one led."""
        count = len(columns["ended"])
        if self.num_envs != 1 or self.added + count > self.rows or bool(columns["ended"][:-1].any()):
            raise BurnishError("extend takes one episode of one world, into a replay that still has room for it")
        self._require(obs, columns, final, count)
        rows, last = slice(0, count - 1), slice(count - 1, count)
        if count > 1:
            self._grow(self.added + count)
            place = slice(self.added, self.added + count - 1)
            assign(self._obs, (place, 0), index(obs, rows))
            assign(self._columns, (place, 0), index(columns, rows))
            self._final_at[place] = -1
            self.added += count - 1
        self.add(index(obs, last), index(columns, last), final)

    def _require(self, obs: Obs, columns: Mapping[str, Tensor], next_obs: Obs, count: int) -> None:
        """``count`` rows of what this replay stores, and nothing that would broadcast: before anything is written."""
        trees = [key for key, x in columns.items() if not isinstance(x, Tensor)]
        if trees:
            raise BurnishError(f"a replay stores tensors, but {', '.join(trees)} is of another kind; store its parts")
        if not self._columns:
            self._allocate(obs, columns, next_obs)
        if columns.keys() != self._columns.keys() or obs.keys() != self._obs.keys() or obs.keys() - next_obs.keys():
            raise BurnishError(
                f"this replay holds {sorted([*self._obs, *self._columns])}, not {sorted([*obs, *columns])}: "
                "its first decision fixed what it stores"
            )
        for stored, given, rows in (
            (self._obs, obs, count),
            (self._columns, columns, count),
            (self._obs, next_obs, self.num_envs),
        ):
            for key, room in stored.items():
                if given[key].shape != (rows, *room.shape[2:]):
                    raise BurnishError(
                        f"{key!r} has shape {tuple(given[key].shape)}, but this replay needs "
                        f"{(rows, *room.shape[2:])}: its first decision fixed what it stores"
                    )

    def _allocate(self, obs: Obs, columns: Mapping[str, Tensor], next_obs: Obs) -> None:
        missing = [name for name in BASE if name not in columns] + [key for key in obs if key not in next_obs]
        if missing:
            raise BurnishError(f"a decision needs {', '.join(missing)} to be stored")
        # The facts of a decision are small, and read beside each other: they stay where the learner is.
        movable = {**obs, **{key: x for key, x in columns.items() if key not in BASE or key == "action"}}
        each = {key: math.prod(x.shape[1:]) * x.element_size() for key, x in movable.items()}
        spread = places({key: self.rows * self.num_envs * size for key, size in each.items()}, self.device, self._place)
        self._places = {**dict.fromkeys(BASE, Place.device), **spread}
        count = min(self.rows, FIRST)
        self._obs = {key: self._room(key, count, x) for key, x in obs.items()}
        self._columns = {key: self._room(key, count, x) for key, x in columns.items()}
        self._finals = {key: self._room(key, 0, x)[:, 0] for key, x in obs.items()}

    def _room(self, key: str, rows: int, like: Tensor) -> Tensor:
        """Zeros for ``rows`` rows of N worlds; a file has room for all that there may be, and needs it when written."""
        place, shape = self._places[key], like.shape[1:]
        if rows and place is Place.file:
            return in_file((self.rows, self.num_envs, *shape), like.dtype)
        device = self.device if place is Place.device else torch.device("cpu")
        return torch.zeros(rows, self.num_envs, *shape, dtype=like.dtype, device=device)

    def _grow(self, rows: int) -> None:
        """At least ``rows``, by doubling."""
        for stored in (self._obs, self._columns):
            for key, x in stored.items():
                if len(x) < rows:
                    more = min(max(rows, 2 * len(x)), self.rows) - len(x)
                    stored[key] = torch.cat([x, x.new_zeros(more, *x.shape[1:])])

    def _slots(self, count: int) -> list[int]:
        """Free places in the pool of final observations, which grows by doubling."""
        have = len(next(iter(self._finals.values())))
        if len(self._free) < count:
            more = max(count, have, 16)
            self._finals = map_tree(lambda x: torch.cat([x, x.new_zeros(more, *x.shape[1:])]), self._finals)
            self._free += range(have + more - 1, have - 1, -1)
        return [self._free.pop() for _ in range(count)]

    # ---- reading ----

    def sample(self, batch: int, *, n_step: int = 1, sequence: int = 1, around: tuple[int, int] = ALONE) -> Batch:
        """``batch`` decisions, uniformly, each with where it led.

        ``n_step`` sums up to so many decisions: reward, discount and next_obs are those of the sum, ``decisions`` says
        how many it holds, and all other columns are of the first. ``sequence`` > 1 returns (B, L, ...) columns and obs
        with ``valid`` (B, L), and next_obs of the last valid decision; rows that are not valid repeat that decision.
        ``around`` = (back, ahead) adds "around": the columns (B, back + 1 + ahead, ...) of the decisions before and
        after each, with ``valid`` where they belong to its episode.
        """
        if n_step > 1 and sequence > 1:
            raise BurnishError("a sample is a sum over n_step decisions or a sequence of them, not both")
        return self.gather(self._draw(batch), n_step=n_step, sequence=sequence, around=around)

    def several(self, batch: int, times: int, *, n_step: int = 1) -> Batch:
        """(times, batch, ...): what ``sample`` would return one after the other, read at once."""
        drawn = self.gather(torch.cat([self._draw(batch) for _ in range(times)]), n_step=n_step)
        return map_tree(lambda x: x.unflatten(0, (times, batch)), drawn)

    def gather(self, flat: Tensor, *, n_step: int = 1, sequence: int = 1, around: tuple[int, int] = ALONE) -> Batch:
        """The decisions at (B,) flat positions age * N + world, where age 0 is the oldest row."""
        age, world = flat // self.num_envs, flat % self.num_envs
        out = self._gathered(age, world, n_step, sequence)
        if around != ALONE:
            out["around"] = self._around(age, world, *around)
        return out

    def _gathered(self, age: Tensor, world: Tensor, n_step: int, sequence: int) -> Batch:
        length = max(n_step, sequence)
        if length == 1:
            row = self._row(age)
            out: Batch = self._read(self._columns, row, world)
            out["obs"] = self._read(self._obs, row, world)
            out["next_obs"] = self._after(age, world)
            return out
        ages, valid = self._run(age, world, length)
        last = ages.gather(1, valid.sum(1, keepdim=True) - 1)[:, 0]
        rows, worlds = self._row(ages), world[:, None]
        if sequence > 1:
            out = self._read(self._columns, rows, worlds)
            out["obs"] = self._read(self._obs, rows, worlds)
            out["valid"] = valid
        else:
            out = self._read(self._columns, rows[:, 0], world)
            out["obs"] = self._read(self._obs, rows[:, 0], world)
            reward, discount = (take(self._columns[key], self.device, rows, worlds) for key in ("reward", "discount"))
            out["reward"], out["discount"], out["decisions"] = sum_of(reward, discount, valid)
        out["next_obs"] = self._after(last, world)
        return out

    def latest(self, rows: int | None = None, names: Sequence[str] | None = None) -> Batch:
        """The newest ``rows`` rows, or all, in the order of time: columns and "obs", each (T, N, ...); with ``names``
        these columns alone."""
        order = self._order(rows)
        if names is not None:
            return self._read({name: self._columns[name] for name in names}, order)
        return {**self._read(self._columns, order), "obs": self._read(self._obs, order)}

    def _read(self, stored: Tree, *where: Tensor) -> Batch:
        return {key: take(x, self.device, *where) for key, x in stored.items()}

    def learnable(self, rows: int | None = None) -> Tensor:
        """(T, N), in the order of ``latest``: all but what was left out."""
        order = self._order(rows)
        return torch.ones_like(self._final_at[order], dtype=torch.bool) if self._void is None else ~self._void[order]

    def fill_in(self, column: str, world: int, values: Tensor) -> None:
        """Replace a column of the newest ``len(values)`` decisions of one world."""
        rows, stored = self._order(len(values)), self._columns[column]
        stored[rows.to(stored.device), world] = values.to(stored)

    def _draw(self, batch: int) -> Tensor:
        if len(self) == 0:
            raise BurnishError("the replay is empty; collect some decisions (warmup) before the first update")
        flat = torch.randint(0, len(self), (batch,), generator=self.generator, device=self.device)
        # A decision that was left out is drawn anew: each row holds at least one decision that was not.
        while self._void is not None:
            void = self._void[self._row(flat // self.num_envs), flat % self.num_envs].nonzero()[:, 0]
            if not len(void):
                break
            flat[void] = torch.randint(0, len(self), (len(void),), generator=self.generator, device=self.device)
        return flat

    def _row(self, age: Tensor) -> Tensor:
        """The place in the ring of the row of that age; age 0 is the oldest that is still held."""
        return (age + self.added) % self.rows if self.added > self.rows else age

    def _order(self, rows: int | None) -> Tensor:
        """The places in the ring of the newest ``rows`` rows, or of all, in the order of time."""
        first = 0 if rows is None else max(0, self.filled - rows)
        return self._row(torch.arange(first, self.filled, device=self.device))

    def _run(self, age: Tensor, world: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Ages (B, L) of consecutive decisions and which are valid: up to the first end, and none beyond the newest."""
        ages = age[:, None] + torch.arange(length, device=self.device)
        inside = ages < self.filled
        ages = ages.clamp(max=self.filled - 1)
        ended = take(self._columns["ended"], self.device, self._row(ages), world[:, None])
        before = torch.cat([torch.zeros_like(ended[:, :1]), ended[:, :-1]], 1).cumsum(1) > 0
        valid = inside & ~before
        return torch.minimum(ages, (age + valid.sum(1) - 1)[:, None]), valid

    def _around(self, age: Tensor, world: Tensor, back: int, ahead: int) -> Batch:
        ages = age[:, None] + torch.arange(-back, ahead + 1, device=self.device)
        inside = (ages >= 0) & (ages < self.filled)
        rows, worlds = self._row(ages.clamp(0, self.filled - 1)), world[:, None]
        out = self._read(self._columns, rows, worlds)
        ends = out["ended"].long()
        episode = ends.cumsum(1) - ends  # ends before each decision: equal numbers belong to one episode
        out["valid"] = inside & (episode == episode[:, back : back + 1])
        if self._void is not None:
            out["valid"] &= ~self._void[rows, worlds]
        return out

    def _after(self, age: Tensor, world: Tensor) -> Obs:
        row = self._row(age)
        following = self._row((age + 1).clamp(max=self.filled - 1))
        out = self._read(self._obs, following, world)
        out = where(age == self.filled - 1, index(self._head, world), out)
        slot = self._final_at[row, world]
        if len(next(iter(self._finals.values()))):
            out = where(slot >= 0, self._read(self._finals, slot.clamp(min=0)), out)
        return out

    # ---- keeping ----

    def _held(self) -> dict[str, Any]:
        """Everything that has a row for each row of the ring."""
        held = {"obs": self._obs, "columns": self._columns, "final_at": self._final_at}
        return held if self._void is None else {**held, "void": self._void}

    def state_dict(self) -> dict[str, Any]:
        """In segments of rows, each of which changes no more until the ring comes around to it."""
        held = self._held()
        size = sum(x[0].numel() * x.element_size() for x in leaves(held))
        step, filled = max(1, SEGMENT // size), self.filled
        return {
            "added": self.added,
            "rows": self.rows,
            "worlds": self.num_envs,
            SEGMENTS: [index(held, slice(at, min(at + step, filled))) for at in range(0, filled, step)],
            "finals": dict(self._finals),
            "free": list(self._free),
            "head": dict(self._head),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into a replay of the same capacity, number of worlds and seed."""
        segments = state.get(SEGMENTS, [state])  # older states hold all rows as one
        saved = (int(state["rows"]), int(state["worlds"] if "worlds" in state else state["final_at"].shape[1]))
        if saved != (self.rows, self.num_envs):
            raise BurnishError(
                f"the saved replay has (rows, worlds) = {saved}, this one {(self.rows, self.num_envs)}; "
                "resume with the same capacity and number of worlds"
            )
        self.added, self._free = int(state["added"]), list(state["free"])
        # Copies: the pool is written in place, and must not be shared with the state that was given.
        self._head = {key: x.to(self.device, copy=True) for key, x in state["head"].items()}
        if segments and segments[0]["obs"]:
            obs, columns = (index(segments[0][name], 0) for name in ("obs", "columns"))
            self._allocate(obs, columns, obs)
            self._grow(self.filled)
        self._finals = {key: x.to(self._finals[key].device, copy=True) for key, x in state["finals"].items()}
        self._final_at.fill_(-1)
        void = segments and "void" in segments[0]
        self._void = torch.zeros_like(self._final_at, dtype=torch.bool) if void else None
        held, at = self._held(), 0
        for segment in segments:
            rows = slice(at, at := at + len(segment["final_at"]))
            assign(held, rows, {name: segment[name] for name in held})
        self.generator.set_state(state["generator"].cpu())
