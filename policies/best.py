"""The best policy of a run, which need not be its last: training may end below where it has been, and below its start.

All exams of a run are on the same seeds, those for selection, so they are paired. In the folder of the run lie

    start.json   the exam of the policy that it began with, if there was one
    best/        the policy of the best exam so far, once one was better than the start beyond doubt

Beyond doubt means that the interval of the paired difference lies above 0: of many exams the luckiest is better than
the start by chance alone, and who replaces a policy that is known wants to know that it is worth it. Among those that
are, the higher mean decides, and of equals the later one, which has learnt for longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .build import describe
from .core.checkpoint import load, save
from .core.evaluate import Evaluation, compare

BEST, START = "best", "start.json"


class Best:
    """Of the run in ``folder``, which a resumed run continues. ``origin`` is what its policies remember."""

    def __init__(self, folder: Path | str, origin: Mapping[str, Any]) -> None:
        self.path, self._start_file, self._origin = Path(folder) / BEST, Path(folder) / START, origin
        self.step, self.exam = 0, None
        self.latest: Evaluation | None = None
        self.start = Evaluation.load(self._start_file) if self._start_file.is_file() else None
        if self.path.is_dir():
            kept = load(self.path).metrics
            self.step, self.exam = kept["step"], Evaluation.from_dict(kept["exam"])

    def begin(self, exam: Evaluation) -> None:
        """With a policy that is not copied here: it lies where it lay."""
        self.start = exam
        exam.save(self._start_file)

    def offer(self, policy: Any, step: int, exam: Evaluation) -> None:
        self.latest = exam
        if _beats(exam, self.start) and (self.exam is None or _mean(exam) >= _mean(self.exam)):
            kept = {"step": step, "exam": exam.to_dict()}
            config = describe(policy, self._origin)
            save(self.path, config=config, state=policy.state_dict(), metrics=kept, overwrite=self.path.exists())
            self.step, self.exam = step, exam

    def sentence(self) -> str:
        """What to deploy."""
        if self.exam is not None:
            gained = "" if self.start is None else ": " + _difference(self.exam, self.start)
            return f"best: {self.path}, of step {self.step:,}{gained}"
        if self.start is None:
            return "best: no policy of this run has been tried"
        last = "" if self.latest is None else f"; the last one had {_difference(self.latest, self.start)}"
        return (
            "best: the policy that this began with, as far as can be told, and more trial.episodes can tell smaller "
            f"differences{last}"
        )


def _mean(exam: Evaluation) -> float:
    facts = exam.summary()
    return facts.get("success_rate", facts["return_mean"])


def _beats(exam: Evaluation, start: Evaluation | None) -> bool:
    if start is None:
        return True
    return len(exam.seeds) > 1 and compare(exam, start).difference_low > 0


def _difference(exam: Evaluation, start: Evaluation) -> str:
    before, after = _mean(start), _mean(exam)
    if len(exam.seeds) < 2:
        return f"{before:.4g} before and {after:.4g} after on one seed"
    found = compare(exam, start)
    return (
        f"{before:.4g} before and {after:.4g} after on {found.episodes} seeds for selection "
        f"(difference {found.difference:+.3g} [{found.difference_low:+.3g}, {found.difference_high:+.3g}])"
    )
