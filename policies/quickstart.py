"""``burnish quickstart``: the commands that a newcomer would type, one after the other, and a picture of the outcome.

In the two-mode world the demonstrators pass an obstacle above or below. A least-squares policy learns their mean, which
runs into it; a flow policy learns both ways, and a shortcut model does so in a single step. Every number that is
printed or drawn was measured in this very run.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .core import cli
from .core.errors import BurnishError
from .core.evaluate import Evaluation
from .core.figure import Panel, draw

# Policy -> what the legend says of it.
CONTENDERS = {
    "least_squares": "least squares",
    "flow": "flow, 10 steps",
    "shortcut": "shortcut, 1 step",
}


@dataclass
class QuickstartConfig:
    out: str = "runs/quickstart"
    demonstrations: int = 400
    steps: int = 4000
    episodes: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.demonstrations, self.steps, self.episodes) < 1:
            raise BurnishError("demonstrations, steps and episodes must be at least 1")


def quickstart(config: QuickstartConfig) -> int:
    began = time.monotonic()
    out = Path(config.out)
    data = out / "demonstrations"
    if not data.exists():
        _run("collect", "env=two_mode", "expert=noisy", f"episodes={config.demonstrations}", f"out={data}")
    for policy in CONTENDERS:
        settings = [f"policy={policy}", f"data={data}", f"out={out / policy}", f"train.steps={config.steps}"]
        if (out / policy).exists():
            settings.append("resume=true")
        status = _run("pretrain", *settings, f"seed={config.seed}", "trial.episodes=50")
        if status != 0:
            return status
    for policy in CONTENDERS:
        where = f"out={out / 'evaluation' / policy}"
        _run("evaluate", f"policy.path={out / policy}", f"trial.episodes={config.episodes}", where, "videos=2")
    results = {name: Evaluation.load(out / "evaluation" / name / "evaluation.json") for name in CONTENDERS}
    panels = [Panel(label, results[name], _losses(out / name / "metrics.jsonl")) for name, label in CONTENDERS.items()]
    draw(panels, out / "quickstart.png", f"two_mode: success on {config.episodes} fresh seeds")
    sys.stdout.write(
        f"\nDone in {time.monotonic() - began:.0f} s. Look at {out / 'quickstart.png'}; videos are in "
        f"{out / 'evaluation'}; learning curves: tensorboard --logdir {out}\n"
    )
    return 0


def _run(verb: str, *words: str) -> int:
    sys.stdout.write(f"\n$ burnish {verb} {shlex.join(words)}\n")
    sys.stdout.flush()
    return cli.run(verb, words)


def _losses(path: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]
