"""Fixed seeds, one episode each: success with its interval, and two controllers compared on the same seeds.

An episode depends on its seed and on nothing else: not on the number of worlds, not on the world that played it, not
on what the other worlds did (up to the rounding of a network's matrix products, which know how many rows they have).
Two evaluations over one seed list are therefore paired, episode by episode.

Not every world keeps that promise. So `evaluate` first begins the first episodes twice and takes a few equal steps in
them, and an `Evaluation` remembers whether equal seeds led to equal observations and rewards (``repeatable``). Where
they did not, `compare` uses the tests of independent episodes, and says so. Dice that fall later are not seen here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ..core import tree
from ..core.errors import BurnishError
from ..core.files import named, replace
from ..core.seed import derive
from ..core.types import Controller, VecEnv
from ..core.wrapper import instructions
from .checks import Replays, beginning, refuse_endless, refuse_non_finite
from .statistics import (
    fisher_exact,
    mcnemar_exact,
    mean_interval,
    paired_difference,
    unpaired_difference,
    unpaired_mean_difference,
    wilson,
)
from .video import Film

OTHER_EPISODES = "equal seeds begin different episodes in this world"


def evaluation_seeds(count: int, *, stream: str = "evaluate", base: int = 0) -> list[int]:
    """The first ``count`` seeds of a named stream. Choose checkpoints on "select" and report on "evaluate": streams
    are 63-bit hashes of their name, so they share no seed with each other or with what training derives."""
    return [derive(base, "episode", stream, i) for i in range(count)]


@dataclass(frozen=True)
class Evaluation:
    """One row per seed, in the order of ``seeds``. The two success lists are None where the world reports none."""

    seeds: list[int]
    returns: list[float]  # undiscounted
    lengths: list[int]  # control steps
    terminated: list[bool]
    truncated: list[bool]
    success: list[bool] | None = None  # at any step of the episode
    success_at_end: list[bool] | None = None  # at its last step
    repeatable: bool = True  # equal seeds begin equal episodes; files of older versions do not say
    instructions: list[str] | None = None  # with which each began, where the world gives any

    def __post_init__(self) -> None:
        if not isinstance(self.repeatable, bool):
            raise BurnishError(f"an evaluation is malformed: repeatable={self.repeatable!r:.40} must be true or false")
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "repeatable"}
        required = {"seeds", "returns", "lengths", "terminated", "truncated"}
        sizes = {name: len(x or ()) for name, x in columns.items() if x is not None or name in required}
        if not self.seeds or len(set(sizes.values())) > 1:
            raise BurnishError(f"an evaluation needs one value per seed and at least one seed, got lengths {sizes}")
        if not all(map(math.isfinite, self.returns)):
            raise BurnishError("an evaluation holds a return that is not finite, so it has no mean")

    def summary(self, confidence: float = 0.95) -> dict[str, float]:
        """Plain numbers. A number that is not known has no key: success where the world reports none, and the
        interval of the mean return after a single episode."""
        count = len(self.seeds)
        result: dict[str, float] = {"episodes": count}
        if self.success is not None:
            result["success_rate"] = sum(self.success) / count
            result["success_low"], result["success_high"] = wilson(sum(self.success), count, confidence)
        if self.success_at_end is not None:
            result["success_at_end_rate"] = sum(self.success_at_end) / count
        result["return_mean"] = math.fsum(self.returns) / count
        if count > 1:
            result["return_low"], result["return_high"] = mean_interval(self.returns, confidence)
        result["length_mean"] = sum(self.lengths) / count
        return result

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Evaluation:
        try:
            return cls(**data)
        except TypeError as error:
            raise BurnishError(f"a stored evaluation is malformed: {error}") from error

    def save(self, path: Path | str) -> None:
        """JSON, atomic: a reader sees the old file or the new one."""
        path, text = Path(path), json.dumps(self.to_dict(), allow_nan=False)
        replace(named(path.parent) / path.name, text)

    @classmethod
    def load(cls, path: Path | str) -> Evaluation:
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BurnishError(f"the evaluation {path} cannot be read: {error}") from error
        if not isinstance(data, dict):
            raise BurnishError(f"the evaluation {path} is malformed: it holds no table of lists")
        return cls.from_dict(data)


@torch.no_grad()
def evaluate(
    env: VecEnv,
    controller: Controller,
    seeds: Sequence[int],
    *,
    video: Path | str | None = None,
    video_seeds: Sequence[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Play every seed once. ``env`` takes actions as the controller gives them (in [-1, 1] behind ``ScaledEnv``).

    The worlds work through the list: who is finished takes the next seed, and who finds none waits inactive. With a
    folder ``video``, each episode of ``video_seeds`` becomes ``seed_<n>_success.mp4`` or ``seed_<n>_failure.mp4``
    there. ``progress`` is told (episodes finished, episodes in all).

    All worlds are begun and stepped twice before that, to see whether they honour their seeds; a world that says
    ``repeatable = False``, such as a robot, is not asked, and counts as one that does not.
    """
    if not hasattr(controller, "step"):
        raise BurnishError(f"a {type(controller).__name__} is not a controller; wrap a policy in ChunkController")
    seeds = [int(s) for s in seeds]
    if not seeds or len(set(seeds)) < len(seeds):
        raise BurnishError(
            "an evaluation needs at least one seed, and no seed twice: a repeated episode is no evidence"
        )
    film = Film(env, video, video_seeds, seeds)
    try:
        return _play(env, controller, seeds, film, progress or (lambda finished, total: None))
    finally:
        film.close()


def _play(
    env: VecEnv, controller: Controller, seeds: list[int], film: Film, progress: Callable[[int, int], None]
) -> Evaluation:
    worlds, device = env.num_envs, env.device
    waiting = iter(range(len(seeds)))
    episode = [next(waiting, None) for _ in range(worlds)]  # which row of the result each world plays, None: none
    world_seeds = [seeds[i % len(seeds)] for i in range(worlds)]  # idle worlds are reset too, so all rows are defined
    active = torch.tensor([e is not None for e in episode], device=device)

    everyone = torch.ones(worlds, dtype=torch.bool, device=device)
    obs, honours = beginning(env, everyone, world_seeds)
    controller.reset(everyone, world_seeds)
    refuse_non_finite(obs, active, world_seeds)
    film.shoot(world_seeds, active)

    returns = torch.zeros(worlds, dtype=torch.float64, device=device)
    lengths = torch.zeros(worlds, dtype=torch.int64, device=device)
    succeeded = torch.zeros(worlds, dtype=torch.bool, device=device)
    never = torch.zeros(worlds, dtype=torch.bool, device=device)
    first_texts = instructions(env)
    texts = [""] * len(seeds) if first_texts is None else [first_texts[i % worlds] for i in range(len(seeds))]
    reports_success, finished, again = False, 0, Replays()
    rows: list[tuple[float, int, bool, bool, bool, bool]] = [(math.nan, 0, False, False, False, False)] * len(seeds)

    while finished < len(seeds):
        action = controller.step(obs)
        refuse_non_finite({"action": action}, active, world_seeds)
        step = env.step(action, active)
        reports_success = reports_success or "success" in step.info
        success = step.info.get("success", never)
        refuse_non_finite({**step.obs, "reward": step.reward, "success": success}, active, world_seeds)

        # Rows outside `active` are undefined: every read below is masked, and the observation keeps its last good row.
        obs = tree.where(active, step.obs, obs)
        returns = returns + torch.where(active, step.reward, 0.0)
        lengths = lengths + active
        succeeded = succeeded | (active & success.bool())
        ended = active & (step.terminated | step.truncated)
        film.shoot(world_seeds, active)
        if not ended.any():
            refuse_endless(lengths, active, env.spec.max_steps, world_seeds)
            continue

        lost = step.info.get("lost", never).tolist()
        columns = (returns, lengths, step.terminated, step.truncated, succeeded, success.bool())
        table = list(zip(*(column.tolist() for column in columns), strict=True))
        fresh = torch.zeros(worlds, dtype=torch.bool)
        for world in ended.nonzero().flatten().tolist():
            row = episode[world]
            assert row is not None, "only active worlds end"
            if lost[world]:
                again.count(row, seeds[row])
                fresh[world] = True
                film.drop(seeds[row])
                continue
            rows[row], finished = table[world], finished + 1
            film.cut(seeds[row], rows[row][4] if reports_success else None)
            following = episode[world] = next(waiting, None)
            if following is not None:
                fresh[world], world_seeds[world] = True, seeds[following]
        progress(finished, len(seeds))

        begins = fresh.to(device)
        active = (active & ~ended) | begins
        if fresh.any():
            controller.reset(begins, world_seeds)
            obs = tree.where(begins, env.reset(begins, world_seeds), obs)
            for world in fresh.nonzero().flatten().tolist() if first_texts is not None else ():
                texts[episode[world] or 0] = (instructions(env) or texts)[world]
            refuse_non_finite(obs, begins, world_seeds)
            returns, lengths = returns.masked_fill(begins, 0.0), lengths.masked_fill(begins, 0)
            succeeded = succeeded & ~begins
            film.shoot(world_seeds, begins)

    again.tell()
    by_seed = [list(column) for column in zip(*rows, strict=True)]
    returned, length, terminated, truncated, *successes = by_seed
    once, at_end = successes if reports_success else (None, None)
    said = None if first_texts is None else texts
    return Evaluation(seeds, returned, length, terminated, truncated, once, at_end, honours, said)


@dataclass(frozen=True)
class _Comparison:
    episodes: int  # of a
    b_episodes: int
    unpaired: str  # why the episodes are no pairs; empty where they are
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _of(self, a: str, b: str, of: str) -> str:
        if not self.unpaired:
            return f"{a} and {b} {of} {self.episodes} paired seeds"
        return f"not paired: {self.unpaired}; {a} {of} {self.episodes} and {b} {of} {self.b_episodes} episodes"


@dataclass(frozen=True)
class Comparison(_Comparison):
    """``a`` against ``b`` by success. A win is a seed on which only ``a`` succeeded; only pairs have wins."""

    a_rate: float
    a_low: float
    a_high: float
    b_rate: float
    b_low: float
    b_high: float
    difference: float  # a minus b, with the interval of the pairs, or of two independent rates
    difference_low: float
    difference_high: float
    wins: int | None
    losses: int | None
    ties: int | None
    p_value: float  # two-sided: exact McNemar of pairs, else Fisher's exact test

    def sentence(self, a: str = "a", b: str = "b") -> str:
        test = (
            f"Fisher's exact p = {self.p_value:.2g}"
            if self.unpaired
            else f"{self.wins} wins, {self.losses} losses, {self.ties} ties, exact McNemar p = {self.p_value:.2g}"
        )
        both = self._of(
            f"{a} succeeds in {self.a_rate:.1%} [{self.a_low:.1%}, {self.a_high:.1%}]",
            f"{b} in {self.b_rate:.1%} [{self.b_low:.1%}, {self.b_high:.1%}]",
            "of",
        )
        return (
            f"{both}: difference {self.difference:+.1%} [{self.difference_low:+.1%}, {self.difference_high:+.1%}], "
            f"{test} ({self.confidence:.0%} intervals)"
        )


@dataclass(frozen=True)
class ReturnComparison(_Comparison):
    """``a`` against ``b`` by undiscounted returns, with Student's intervals, or Welch's where there are no pairs."""

    a_mean: float
    a_low: float
    a_high: float
    b_mean: float
    b_low: float
    b_high: float
    difference: float  # a minus b, with the interval of the mean of the pairs' differences, or of two means
    difference_low: float
    difference_high: float

    def sentence(self, a: str = "a", b: str = "b") -> str:
        both = self._of(
            f"{a} returns {self.a_mean:.4g} [{self.a_low:.4g}, {self.a_high:.4g}]",
            f"{b} {self.b_mean:.4g} [{self.b_low:.4g}, {self.b_high:.4g}]",
            "over",
        )
        return (
            f"{both}: difference {self.difference:+.4g} [{self.difference_low:+.4g}, {self.difference_high:+.4g}] "
            f"({self.confidence:.0%} intervals)"
        )


def compare(a: Evaluation, b: Evaluation, confidence: float = 0.95) -> Comparison | ReturnComparison:
    """By success if both report it, else by returns: pair by pair where one seed list was played and both honour their
    seeds, else as independent episodes."""
    known = a.success is not None and b.success is not None
    return compare_two(a, b, confidence) if known else compare_returns(a, b, confidence)


def why_unpaired(a: Evaluation, b: Evaluation) -> str:
    """Empty where the episodes of ``a`` and ``b`` are pairs."""
    if not (a.repeatable and b.repeatable):
        return OTHER_EPISODES
    return "" if a.seeds == b.seeds else "the two evaluations ran different seed lists"


def compare_returns(a: Evaluation, b: Evaluation, confidence: float = 0.95) -> ReturnComparison:
    """The difference of two mean returns with its interval, paired by seed where both used the same ones."""
    if min(len(a.seeds), len(b.seeds)) < 2:
        raise BurnishError("a comparison of returns needs at least 2 seeds: one episode says nothing of the spread")
    unpaired, numbers = why_unpaired(a, b), []
    for values in (a.returns, b.returns):
        numbers += [math.fsum(values) / len(values), *mean_interval(values, confidence)]
    if unpaired:
        numbers += unpaired_mean_difference(a.returns, b.returns, confidence)
    else:
        each = [x - y for x, y in zip(a.returns, b.returns, strict=True)]
        numbers += [math.fsum(each) / len(each), *mean_interval(each, confidence)]
    return ReturnComparison(len(a.seeds), len(b.seeds), unpaired, confidence, *numbers)


def compare_two(a: Evaluation, b: Evaluation, confidence: float = 0.95) -> Comparison:
    """By success."""
    if a.success is None or b.success is None:
        raise BurnishError("a comparison needs success, which the world of these evaluations does not report")
    unpaired = why_unpaired(a, b)
    of_a, of_b = (sum(a.success), len(a.seeds)), (sum(b.success), len(b.seeds))
    a_low, a_high = wilson(*of_a, confidence)
    b_low, b_high = wilson(*of_b, confidence)
    wins = losses = ties = None
    if unpaired:
        difference, low, high = unpaired_difference(of_a, of_b, confidence)
        p_value = fisher_exact(of_a, of_b)
    else:
        pairs = list(zip(a.success, b.success, strict=True))
        wins, losses = sum(x and not y for x, y in pairs), sum(y and not x for x, y in pairs)
        ties = len(pairs) - wins - losses
        difference, low, high = paired_difference(a.success, b.success, confidence)
        p_value = mcnemar_exact(wins, losses)
    return Comparison(
        episodes=of_a[1],
        b_episodes=of_b[1],
        unpaired=unpaired,
        confidence=confidence,
        a_rate=of_a[0] / of_a[1],
        a_low=a_low,
        a_high=a_high,
        b_rate=of_b[0] / of_b[1],
        b_low=b_low,
        b_high=b_high,
        difference=difference,
        difference_low=low,
        difference_high=high,
        wins=wins,
        losses=losses,
        ties=ties,
        p_value=p_value,
    )
