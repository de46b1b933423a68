"""``burnish quickstart``: from clumsy demonstrations to a policy that works, in the commands that a person would type.

An arm puts a peg into a hole with half a millimetre on each side. Its demonstrators insist on a wrong place, the same
one whenever the situation is the same; a flow policy imitates that too, and fails often. It is refined from one
checkpoint in two ways: by choosing the noise that it starts from, and by correcting what it does. All three are tried
on the same fresh seeds, and a page shows what came of it. Called again, it goes on where it stopped.
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from ..policies.cli import cli
from ..policies.core.config import to_data
from ..policies.core.files import refuse_link
from ..policies.core.ranges import check_ranges
from .compare.claim import claim
from .compare.compare import CompareConfig
from .compare.entrants import entrant

SETTINGS = "quickstart.yaml"

GROUPS: dict[str, dict[str, type]] = {}  # no setting of this verb is a choice among configurations


@dataclass
class QuickstartConfig:
    """Settings of `burnish quickstart`: demonstrations, imitation, methods, budget and evaluations."""

    out: str = "runs/quickstart"  # folder of everything that it makes
    demonstrations: int = 100  # episodes that the base imitates
    steps: int = 4000  # updates of imitation
    methods: list[str] = field(default_factory=lambda: ["dsrl", "residual_ppo"])  # experiments of insert
    budget: int = 60_000  # control steps of each refinement
    evaluation_episodes: int = 50  # episodes by which the better one is chosen
    episodes: int = 200  # episodes by which all are judged
    videos: int = 3  # seeds that are filmed
    seed: int = 0  # seed of every random draw

    def __post_init__(self) -> None:
        positive = "demonstrations steps budget evaluation_episodes episodes"
        check_ranges(self, {"[1, inf)": positive, "[0, inf)": "videos"})
        # A mistake is refused now, not after minutes of collecting and imitating.
        CompareConfig("base", self.methods, episodes=self.episodes, videos=self.videos)
        for name in self.methods:
            entrant(name, "insert", self.budget, execute=1)


def quickstart(config: QuickstartConfig) -> int:
    """The commands from demonstrations to a refined policy, run one after the other; exit status."""
    began, out, seed = time.monotonic(), Path(config.out), f"seed={config.seed}"
    # Data of other settings would be met by what was made of the first ones.
    kept = {name: x for name, x in to_data(config).items() if name != "out"}
    claim(out / SETTINGS, kept, to_data(QuickstartConfig()), free={"out"})
    data, base, compared = (refuse_link(out / name) for name in ("demonstrations", "bc", "compare"))
    steps = f"train.steps={config.steps}"
    for verb, *words in (
        ("collect", "env=insert", "expert=clumsy", f"episodes={config.demonstrations}", seed, f"out={data}"),
        ("pretrain", "policy=flow", "experiment=desk", f"data={data}", steps, seed, f"out={base}"),
        (
            "compare",
            f"base={base}",
            f"data={data}",
            f"methods={','.join(config.methods)}",
            "seeds=1",
            f"budget={config.budget}",
            f"evaluation_episodes={config.evaluation_episodes}",
            f"episodes={config.episodes}",
            f"videos={config.videos}",
            seed,
            f"out={compared}",
        ),
    ):
        resumed = ["resume=true"] if Path(words[-1].removeprefix("out=")).exists() else []
        if status := _run(verb, *words, *resumed):
            if verb == "compare" and status == 1:
                sys.stderr.write(f"no refinement came to an end; what was said is in {compared / 'runs'}/*.log\n")
            return status
    page = out / "report.html"
    if status := _run("report", f"compare={compared}", f"out={page}"):
        return status
    sys.stdout.write(f"\nDone in {time.monotonic() - began:.0f} s. Open {page} in a browser.\n")
    return 0


def _run(verb: str, *words: str) -> int:
    sys.stdout.write(f"\n$ burnish {verb} {shlex.join(words)}\n")
    sys.stdout.flush()
    return cli.run(verb, words)
