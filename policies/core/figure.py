"""Pictures of measured results, drawn without a display. Numbers come from evaluations and logs, never by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .evaluate import Evaluation

# Distinguishable for colour-blind eyes (Okabe and Ito 2008).
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


class Panel(NamedTuple):
    label: str
    evaluation: Evaluation
    losses: Sequence[tuple[int, float]]


def draw(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Success with its 95 % Wilson interval beside the training loss, one colour per policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    bars, curves = figure.subplots(1, 2, width_ratios=(3, 4))
    for place, (panel, colour) in enumerate(zip(panels, COLOURS, strict=False)):
        facts = panel.evaluation.summary()
        rate, low, high = (facts[key] for key in ("success_rate", "success_low", "success_high"))
        bars.bar(place, rate, color=colour, width=0.6)
        bars.errorbar(place, rate, [[rate - low], [high - rate]], color="black", capsize=4)
        bars.annotate(f"{rate:.0%}", (place, high), ha="center", va="bottom", xytext=(0, 3), textcoords="offset points")
        if panel.losses:
            steps, losses = zip(*panel.losses, strict=True)
            curves.plot(steps, losses, color=colour, label=panel.label, linewidth=1)
    bars.set_xticks(range(len(panels)), [panel.label.replace(", ", "\n") for panel in panels])
    bars.set_ylim(0, 1.1)
    bars.set_ylabel("success")
    bars.set_title(title, fontsize=10)
    curves.set_yscale("log")
    curves.set_xlabel("updates")
    curves.set_title("training loss (not comparable between policies)", fontsize=10)
    curves.legend(frameon=False)
    for axes in (bars, curves):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
