"""Pictures of measured results, drawn without a display. Numbers come from evaluations and logs, never by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .evaluate import Evaluation

# Distinguishable for colour-blind eyes (Okabe and Ito 2008).
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


class Disc(NamedTuple):
    """Something round in a plane: an obstacle or a goal."""

    x: float
    y: float
    radius: float
    colour: str
    label: str


class Panel(NamedTuple):
    label: str
    paths: Sequence[Tensor]  # each (T + 1, 2)
    evaluation: Evaluation | None = None  # None: nothing was evaluated (demonstrations)
    losses: Sequence[tuple[int, float]] = ()


def draw(panels: Sequence[Panel], scene: Sequence[Disc], path: Path, title: str) -> None:
    """Above the paths of each panel; below success with its 95 % Wilson interval beside the training loss."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(panels), 6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    halves: Any = figure.subfigures(2, 1)
    above, below = halves
    for axes, panel in zip(above.subplots(1, len(panels), sharex=True, sharey=True), panels, strict=True):
        _draw_paths(axes, panel, scene)
    bars, curves = below.subplots(1, 2)
    judged = [panel for panel in panels if panel.evaluation is not None]
    for place, (panel, colour) in enumerate(zip(judged, COLOURS, strict=False)):
        assert panel.evaluation is not None
        facts = panel.evaluation.summary()
        rate, low, high = (facts[key] for key in ("success_rate", "success_low", "success_high"))
        bars.bar(place, rate, color=colour, width=0.6)
        bars.errorbar(place, rate, [[rate - low], [high - rate]], color="black", capsize=4)
        bars.annotate(f"{rate:.0%}", (place, high), ha="center", va="bottom", xytext=(0, 3), textcoords="offset points")
        if panel.losses:
            steps, losses = zip(*panel.losses, strict=True)
            curves.plot(steps, losses, color=colour, label=panel.label, linewidth=1)
    bars.set_xticks(range(len(judged)), [panel.label.replace(", ", "\n") for panel in judged])
    bars.set_ylim(0, 1.1)
    bars.set_ylabel("success")
    curves.set_yscale("log")
    curves.set_xlabel("updates")
    curves.set_ylabel("training loss")
    curves.set_title("each policy has a loss of its own: compare shapes, not heights", fontsize=8)
    curves.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes in (bars, curves):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_paths(axes: Any, panel: Panel, scene: Sequence[Disc]) -> None:
    from matplotlib.patches import Circle

    for disc in scene:
        axes.add_patch(Circle((disc.x, disc.y), disc.radius, color=disc.colour, linewidth=0))
        axes.text(disc.x, disc.y, disc.label, ha="center", va="center", fontsize=8)
    for line in panel.paths:
        axes.plot(*line.T.tolist(), color="#222222", alpha=0.25, linewidth=0.8)
        axes.plot(*line[-1:].T.tolist(), ".", color="#222222", markersize=3)
    axes.set_title(panel.label, fontsize=10)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
