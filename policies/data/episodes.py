"""Episodes in memory.

Actions stay in actuator units in an ``Episode``, as they do on disk; ``Windows`` maps them onto [-1, 1], where policies
speak. An episode of T actions holds T + 1 observations: ``obs[t]`` is what was seen before ``action[t]``, ``reward[t]``
is what that action earned, and ``obs[T]`` is where the last action led (offline learning needs it to bootstrap after a
truncation; imitation never acts on it).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import tree
from ..core.config import to_data
from ..core.errors import BurnishError
from ..core.ranks import Ranks
from ..core.scale import Scale
from ..core.seed import generator as named_generator
from ..core.spec import ActionSpec, ChunkConfig, EnvSpec, Names, ObsSpec, PolicySpec
from ..core.types import Obs

Bad = dict[int, str]  # number of an episode that cannot be used -> the reason
Mine = Callable[[int], Collection[int]]  # the number of all episodes -> the numbers of those that are wanted
ASSUMED_HZ = 20.0  # where nothing says how often a world is commanded
# Notes of a reader on what the data lack, and how it was filled in.
NO_REWARD = "there is no reward: it is zero"
NO_SUCCESS = "nothing says which episodes succeed: none counts as a success"
NO_ENDS = "nothing says how episodes end: they count as truncated"
NO_END = "recordings that stop without an end count as truncated"
DONE_ALONE = "next.done may be an end or a time limit: episodes that do not end in success count as truncated"
NO_FINAL = "final observations are missing: the last observation is repeated"
NO_LIMITS = "action limits are the range of the data"
NO_RATE = f"nothing says at which rate actions were sent: {ASSUMED_HZ:g} Hz are assumed"
PASSED_OVER = "columns passed over: "  # and their names
REPAIR = "; repair or drop that episode"


@dataclass(eq=False)
class Episode:
    """One recording: T actions in actuator units between T + 1 observations."""

    obs: Obs  # each (T + 1, ...); the last row is the final observation
    action: Tensor  # (T, A) float32
    reward: Tensor  # (T,) float32
    terminated: bool  # the future after the last row is worth nothing
    truncated: bool  # the future is worth something, but the recording stops
    success: bool
    seed: int
    task: str = ""
    sim_state: dict[str, Tensor] | None = None  # the world's ``state_dict`` at each observation, each (T + 1, ...)
    extra: dict[str, Tensor] = field(default_factory=dict)  # further columns, each (T, n): nothing that is observed
    elsewhere: bool = False  # its pictures were not read, because another rank has them: here they are black

    def __post_init__(self) -> None:
        name = f"the episode of seed {self.seed}"
        if self.action.ndim != 2 or len(self.action) == 0:
            raise BurnishError(f"{name} needs at least one action, as (T, A), but has {tuple(self.action.shape)}")
        steps = len(self)
        if tuple(self.reward.shape) != (steps,):
            raise BurnishError(f"{name} has {steps} actions, but rewards of shape {tuple(self.reward.shape)}")
        for key, x in self.obs.items():
            if x.ndim == 0 or len(x) != steps + 1:
                raise BurnishError(
                    f"{name} has {steps} actions, so {key!r} needs {steps + 1} rows (the last is the final "
                    f"observation), but it has shape {tuple(x.shape)}"
                )
        for key, x in (self.sim_state or {}).items():
            if x.ndim == 0 or len(x) != steps + 1:
                raise BurnishError(f"{name} needs {steps + 1} rows of state {key!r}, but it has {tuple(x.shape)}")
        for key, x in self.extra.items():
            if x.ndim != 2 or len(x) != steps:
                raise BurnishError(f"{name} needs {steps} rows in {key!r}, as (T, n), but it has {tuple(x.shape)}")
        for key, x in {**self.extra, **self.obs, "action": self.action, "reward": self.reward}.items():
            if key in ("action", "reward") and x.dtype != torch.float32:
                raise BurnishError(f"{name} has {key!r} as {x.dtype}, but torch.float32 is needed")
            if x.is_floating_point() and not bool(torch.isfinite(x).all()):
                row = int((~torch.isfinite(x)).reshape(len(x), -1).any(1).nonzero()[0, 0])
                kind = "NaN" if bool(torch.isnan(x[row]).any()) else "an infinite value"
                raise BurnishError(f"{name} has {kind} in {key!r}, first in row {row}{REPAIR}")

    def __len__(self) -> int:
        return len(self.action)


@dataclass(eq=False)
class Episodes:
    """Recordings of one world. ``spec`` says what the numbers mean; ``meta`` is plain JSON data on their origin."""

    episodes: list[Episode]
    spec: EnvSpec
    meta: dict[str, Any] = field(default_factory=dict)
    names: Names = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, episode in enumerate(self.episodes):
            check_fits(episode, self.spec, number)

    def __len__(self) -> int:
        return len(self.episodes)

    def __iter__(self) -> Iterator[Episode]:
        return iter(self.episodes)

    def __getitem__(self, number: int) -> Episode:
        return self.episodes[number]

    @property
    def frames(self) -> int:
        return sum(len(episode) for episode in self.episodes)

    @property
    def control_hz(self) -> float | None:
        """Actions per second, None where it is only assumed."""
        return None if NO_RATE in self.meta.get("notes", ()) else self.spec.control_hz

    def policy_spec(self, chunk: ChunkConfig) -> PolicySpec:
        """Of a fresh policy that learns from these recordings."""
        return PolicySpec(
            obs=self.spec.obs,
            action=self.spec.action,
            control_hz=self.control_hz,
            action_mode=self.spec.action_mode,
            pixels=self.spec.pixels,
            names={key: tuple(names) for key, names in self.names.items()},
            **to_data(chunk),
        )

    def split(self, fraction: float, seed: int) -> tuple[Episodes, Episodes]:
        """(train, valid): whole episodes, about ``fraction`` of them for validation, the same for the same seed.

        Each side keeps at least one episode, unless ``fraction`` is 0, which leaves the validation side empty.
        """
        parts = split(len(self), fraction, seed)
        train, valid = (replace(self, episodes=[self.episodes[i] for i in part]) for part in parts)
        return train, valid


def split(total: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """The numbers of the episodes for training, and of those for validation (``Episodes.split``)."""
    if not 0 <= fraction < 1:
        raise BurnishError(f"the validation fraction must lie in [0, 1), got {fraction}")
    if fraction > 0 and total < 2:
        raise BurnishError(f"{total} episode cannot be split; record more, or set train.valid_fraction=0")
    held_out = min(max(round(fraction * total), 1), total - 1) if fraction > 0 else 0
    order = torch.randperm(total, generator=named_generator(seed, "split")).tolist()
    chosen = set(order[:held_out])
    return [i for i in range(total) if i not in chosen], sorted(chosen)


def share(total: int, fraction: float, seed: int, ranks: Ranks) -> set[int]:
    """The numbers of the episodes whose pictures a rank reads: of those for training every ``size``-th; the first rank,
    which evaluates, also those for validation."""
    train, valid = split(total, fraction, seed)
    if len(train) < ranks.size:
        raise BurnishError(f"share_episodes=true divides {len(train)} episodes among {ranks.size} ranks; leave it out")
    return {*train[ranks.rank :: ranks.size], *(valid if ranks.first else ())}


@contextmanager
def usable(number: int, path: Path, bad: Bad | None) -> Iterator[None]:
    """An episode of ``path`` that cannot be used is refused, or noted in ``bad`` where that is given."""
    try:
        yield
    except BurnishError as error:
        why = re.sub(r"^the episode of seed \d+ ", "it ", str(error).removesuffix(REPAIR))  # a file may know no seeds
        if bad is None:
            raise BurnishError(
                f"episode {number} of {path} cannot be used: {why}; repair it, or leave such episodes out: "
                f"burnish data convert {shlex.quote(str(path))} out=... drop_bad=true"
            ) from error
        bad[number] = why


def why_empty(bad: Bad | None) -> str:
    """The end of a sentence on a set without a single episode."""
    first = re.sub("^it ", "the first ", next(iter((bad or {}).values()), ""))
    return f"has no episode that can be used: {first}" if bad else "holds no episodes"


def check_fits(episode: Episode, spec: EnvSpec, number: int) -> None:
    """Refuse an episode whose observations or actions are not those of ``spec``."""
    extra = sorted(set(episode.obs) - set(spec.obs.shapes))
    if extra:
        raise BurnishError(f"episode {number} has observations {extra}, which its specification does not name")
    try:
        spec.obs.check(episode.obs)
    except BurnishError as error:
        raise BurnishError(f"episode {number} does not fit its specification: {error}") from error
    if episode.action.shape[1] != spec.action.dim:
        raise BurnishError(
            f"episode {number} has actions of {episode.action.shape[1]} dimensions, "
            f"but its specification has {spec.action.dim}"
        )


def with_tokens(episodes: Episodes, policy: PolicySpec) -> Episodes:
    """With the tasks of the episodes as ``tokens``, where a policy reads them: on disk they are text."""
    words = policy.words
    if words is None or "tokens" in episodes.spec.obs.shapes:
        return episodes
    known: dict[str, Tensor] = {}
    for number, episode in enumerate(episodes):
        if not episode.task:
            raise BurnishError(f"the policy reads instructions, but episode {number} of the data has no task")
        if episode.task not in known:
            known[episode.task] = words.ids([episode.task])
    spoken = [
        replace(each, obs={**each.obs, "tokens": known[each.task].expand(len(each) + 1, -1)}) for each in episodes
    ]
    obs = ObsSpec({**episodes.spec.obs.shapes, "tokens": (words.length,)})
    return replace(episodes, episodes=spoken, spec=replace(episodes.spec, obs=obs))


def action_limits(episodes: Iterable[Episode], floor: float = 1e-3) -> ActionSpec:
    """The range that the data covers, for data that came without actuator limits.

    A dimension that hardly moves is widened to ``floor`` (actuator units), so that scaling never divides by nothing.
    """
    parts = [episode.action.double() for episode in episodes]
    if not parts:
        raise BurnishError("action limits cannot be fitted to no episodes")
    low = torch.stack([x.amin(0) for x in parts]).amin(0)
    high = torch.stack([x.amax(0) for x in parts]).amax(0)
    widen = ((floor - (high - low)) / 2).clamp(min=0)
    return ActionSpec(tuple((low - widen).tolist()), tuple((high + widen).tolist()))


# Beyond the limits by this share of half the range is rounding, which is clipped; more is an error in the data.
LIMIT_TOLERANCE = 1e-3


def scaled_actions(episodes: Episodes, limits: ActionSpec) -> Tensor:
    """(F, A): the actions of all frames in [-1, 1], by the map that execution inverts. Actions outside are refused."""
    action = torch.cat([episode.action for episode in episodes])
    tree.check(action, f"F {limits.dim}")
    scale = Scale(limits, action.device)
    if not bool(torch.isfinite(scale.half).all()):
        raise BurnishError(f"actions can be scaled only between finite limits, got {limits.low} and {limits.high}")
    outside = ((action - scale.centre).abs() > (1 + LIMIT_TOLERANCE) * scale.half).nonzero()
    if len(outside) > 0:
        frame, dim = outside[0].tolist()
        ends = torch.tensor([len(episode) for episode in episodes]).cumsum(0)
        number = int(torch.searchsorted(ends, frame, right=True))
        row = frame - (int(ends[number - 1]) if number else 0)
        raise BurnishError(
            f"episode {number} has action {float(action[frame, dim]):g} in row {row}, dimension {dim}, outside the "
            f"limits [{limits.low[dim]:g}, {limits.high[dim]:g}]; correct them, or fit them to the data (action_limits)"
        )
    return scale.to_unit(action)
