"""``burnish quickstart``: the commands that a newcomer would type, one after the other, and a picture of the outcome.

In the two-mode world the demonstrators pass an obstacle above or below. A least-squares policy learns their mean, which
runs into it; a flow policy learns both ways, and a shortcut model does so in a single step. Every number that is
printed or drawn was measured by these commands; called again, it continues, and evaluates anew.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .core import cli
from .core.errors import BurnishError
from .core.evaluate import Evaluation
from .core.figure import Disc, Panel, draw
from .core.run import read_metrics
from .data.lerobot import read_lerobot

# Policy -> what the legend says of it.
CONTENDERS = {
    "least_squares": "least squares",
    "flow": "flow, 10 steps",
    "diffusion": "diffusion, 10 steps",
    "shortcut": "shortcut flow, 1 step",
}
DRAWN = 40  # paths in each panel


@dataclass
class QuickstartConfig:
    out: str = "runs/quickstart"
    demonstrations: int = 400
    steps: int = 6000
    episodes: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.demonstrations, self.steps, self.episodes) < 1:
            raise BurnishError("demonstrations, steps and episodes must be at least 1")


def quickstart(config: QuickstartConfig, scene: Sequence[Disc]) -> int:
    """Interrupted, it continues where it stopped when it is called again. ``scene`` is what the picture shows."""
    began = time.monotonic()
    out = Path(config.out)
    # Named by what was asked, so that other settings never meet old data.
    data = out / f"demonstrations_{config.demonstrations}_seed{config.seed}"
    asked = [f"episodes={config.demonstrations}", f"seed={config.seed}", "resume=true"]
    status = _run("collect", "env=two_mode", "expert=noisy", *asked, f"out={data}")
    if status != 0:
        return status
    for policy in CONTENDERS:
        settings = [f"policy={policy}", "experiment=two_mode", f"data={data}", f"out={out / policy}"]
        settings += [f"train.steps={config.steps}", f"seed={config.seed}"]
        settings += ["resume=true"] if (out / policy).exists() else []
        status = _run("pretrain", *settings)
        if status != 0:
            return status
    for policy in CONTENDERS:
        where = [f"policy.path={out / policy}", f"out={out / 'evaluation' / policy}"]
        _run(
            "evaluate",
            *where,
            f"trial.episodes={config.episodes}",
            f"seed={config.seed}",
            f"videos={min(2, config.episodes)}",
        )
        drawn = out / "paths" / policy
        shutil.rmtree(drawn, ignore_errors=True)
        # Other seeds than those of the demonstrations.
        words = ["policy=checkpoint", f"policy.path={out / policy}", f"seed={config.seed + 1}"]
        _run("collect", *words, f"episodes={DRAWN}", f"out={drawn}")
    panels = [Panel("demonstrations", _paths(data))]
    for name, label in CONTENDERS.items():
        result = Evaluation.load(out / "evaluation" / name / "evaluation.json")
        losses = [(int(row["step"]), row["loss"]) for row in read_metrics(out / name)]
        panels.append(Panel(label, _paths(out / "paths" / name), result, losses))
    picture = out / "quickstart.png"
    draw(panels, scene, picture, f"Two ways around an obstacle: success on {config.episodes} fresh seeds")
    sys.stdout.write(
        f"\nDone in {time.monotonic() - began:.0f} s. Look at {picture}; videos are in {out / 'evaluation'}; "
        f"learning curves: tensorboard --logdir {out}\n"
    )
    return 0


def _run(verb: str, *words: str) -> int:
    sys.stdout.write(f"\n$ burnish {verb} {shlex.join(words)}\n")
    sys.stdout.flush()
    return cli.run(verb, words)


def _paths(data: Path) -> list[Tensor]:
    return [episode.obs["state"][:, :2] for episode in read_lerobot(data)][:DRAWN]
