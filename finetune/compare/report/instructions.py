"""Success for each instruction, of the base and of each method, in a world that tells what to do."""

from __future__ import annotations

from dataclasses import dataclass

from ....policies.measure.by_instruction import by_instruction
from ....policies.measure.evaluate import Evaluation
from ..comparison import BASE
from .read import Comparison


@dataclass(frozen=True)
class Cell:
    """The success of one policy under one instruction; None where it was never told so."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ByInstruction:
    """A row for each instruction: its text, its episodes of the base, and a cell for each of ``columns``."""

    columns: list[str]
    rows: list[tuple[str, int, list[Cell]]]


def instructions_of(comparison: Comparison) -> ByInstruction | None:
    """None where the world gives fewer than two, or the base was not kept."""
    evaluations = comparison.evaluations
    runs: dict[str, list[Evaluation]] = {BASE: [evaluations[BASE]]} if BASE in evaluations else {}
    for run in comparison.runs:
        if run.name in evaluations:
            runs.setdefault(run.method, []).append(evaluations[run.name])
    found = {name: by_instruction(*each) for name, each in runs.items()}
    texts = found.get(BASE, {})
    if len(texts) < 2:
        return None
    rows = [(text, int(texts[text]["episodes"]), [_cell(found[name].get(text)) for name in found]) for text in texts]
    return ByInstruction(list(found), rows)


def _cell(row: dict[str, float] | None) -> Cell:
    return Cell() if row is None else Cell(row["success_rate"], row["success_low"], row["success_high"])
