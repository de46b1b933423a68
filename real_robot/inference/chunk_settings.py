"""Settings of real-time chunking (`realtime_chunking.py`), and counts of what happened."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ...policies.core.ranges import check_ranges
from ..errors import Refused


class Mode(Enum):
    """The ways in which one chunk follows another: end to end, averaged, or in real time."""

    queue = "queue"
    ensemble = "ensemble"
    realtime = "realtime"


class Hold(Enum):
    """The ways in which an answer is made to continue the old chunk."""

    inpaint = "inpaint"  # the committed actions are put into the answer's chain; any policy of several steps
    guide = "guide"  # and it is guided to all that is left of the old chunk, which takes a gradient per step


@dataclass
class Chunks:
    """Settings of the step from chunk to chunk."""

    mode: Mode = Mode.queue  # way in which one chunk follows another
    # Actions that may be played, from the observation's tick on; null: as many as the policy executes. A policy that
    # imitates learns the whole chunk; a refinement is rewarded for what is executed, so what comes after may be
    # anything.
    reach: int | None = None
    every: int | None = None  # ticks between questions at least; null: 1 in an ensemble, else the actions it executes
    overlap: int = 0  # more actions of the old chunk that the new one continues, in real time: smoother, later to react
    hold: Hold = Hold.inpaint  # way in which an answer in real time continues the old chunk
    # Actions are displacements: those that are skipped are owed (not in an ensemble). null: as the robot's body says.
    relative: bool | None = None
    decay: float = 0.01  # m of an ensemble's weights exp(-m i)
    share: float = 0.95  # share of the answers that come within the delay that is expected
    window: int = 100  # latencies that are remembered
    rehearsals: int = 40  # questions before the first motion
    forget: int = 5  # rehearsals, from the first on, that do not count as latencies
    # seconds with nothing to play; less than safety.silent_ramp_s, after which the robot stops anyway
    patience_s: float = 0.8

    def __post_init__(self) -> None:
        ranges = {
            "[1, inf)": "every reach window",
            "[0, inf)": "overlap decay forget",
            "(0, inf)": "patience_s",
            "(0, 1]": "share",
        }
        check_ranges(self, ranges, "chunks.", Refused)
        if self.hold is Hold.guide and self.mode is not Mode.realtime:
            raise Refused(
                f"chunks.mode={self.mode.value} continues nothing, so chunks.hold=guide is for realtime alone"
            )
        if self.forget >= self.rehearsals:
            raise Refused(
                f"chunks.rehearsals={self.rehearsals} must be more than the chunks.forget={self.forget} that do not "
                "count, or no latency is known"
            )


@dataclass
class Report:
    """Counts since the controller was made. Latencies are without those of the rehearsal's first answers."""

    questions: int = 0
    answers: int = 0
    late: int = 0  # answers that came after the tick at which they were expected
    failed: int = 0  # questions that got a reason instead of an answer
    discarded: int = 0  # answers that were not played, since the episode was over
    waited: int = 0  # ticks at which nothing was left to play
    held_s: float = 0.0  # and the time for which the arm was held then
    latencies_s: list[float] = field(default_factory=list)
    seams: list[float] = field(default_factory=list)  # largest change of an action where a chunk took over, in [-1, 1]

    def summary(self) -> dict[str, float]:
        counts = ("questions", "answers", "late", "failed", "discarded", "waited", "held_s")
        found = {name: float(getattr(self, name)) for name in counts}
        for name, values, scale in (("latency_ms", self.latencies_s, 1e3), ("seam", self.seams, 1.0)):
            if values:
                found[f"{name}_p50"], found[f"{name}_p99"] = (scale * quantile(values, x) for x in (0.5, 0.99))
        return found


def fading(committed: int, length: int) -> NDArray[np.float32]:
    """How strongly each of ``length`` old actions pulls, of which the first ``committed`` are played whatever comes:
    1, then decaying like an exponential (the soft mask of Black et al. 2025, arXiv 2506.07339)."""
    left = np.minimum(1, (length - np.arange(length)) / (length - committed + 1))
    return (left * np.expm1(left) / math.expm1(1)).astype(np.float32)


def quantile(values: Sequence[float] | deque[float], share: float) -> float:
    """One that did occur, and at least ``share`` of all are no larger."""
    return float(np.quantile(list(values), share, method="inverted_cdf"))
