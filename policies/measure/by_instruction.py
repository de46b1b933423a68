"""Success for each instruction of an evaluation, in a world that tells what to do."""

from __future__ import annotations

from collections.abc import Iterator

from .evaluate import Evaluation
from .statistics import wilson


def by_instruction(*runs: Evaluation, confidence: float = 0.95) -> dict[str, dict[str, float]]:
    """Instruction -> ``episodes``, and ``success_rate`` with its interval ``success_low`` to ``success_high``; empty
    where the world gives none, or reports no success. Several runs of a method play the same seeds, so their episodes
    count as those of one."""
    rows: dict[str, list[bool]] = {}
    for run in runs:
        if run.instructions is None or run.success is None:
            return {}
        for text, success in zip(run.instructions, run.success, strict=True):
            rows.setdefault(text, []).append(success)
    found = {}
    for text, row in sorted(rows.items()):
        rate, episodes = sum(row) / len(row), max(1.0, len(row) / len(runs))
        low, high = wilson(rate * episodes, episodes, confidence)
        found[text] = {"episodes": episodes, "success_rate": rate, "success_low": low, "success_high": high}
    return found


def lines(evaluation: Evaluation) -> Iterator[str]:
    """One for each instruction, and where there are several the mean over them, which weighs each alike."""
    found = by_instruction(evaluation)
    for text, row in found.items():
        ends = f"[{row['success_low']:.1%}, {row['success_high']:.1%}]"
        yield f"  {text!r}: success {row['success_rate']:.1%} {ends}, {row['episodes']:.0f} episodes"
    if len(found) > 1:
        rates = [row["success_rate"] for row in found.values()]
        yield f"  mean over {len(found)} instructions {sum(rates) / len(rates):.1%}, worst {min(rates):.1%}"
