"""Entry point: ``burnish finetune``. A policy, a method, a world."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from ..policies.build import ACTING
from ..policies.cli.cli import main
from ..policies.core.ranks import joined
from ..policies.runs.run import occupied
from ..sim.build import WORLDS
from .exploration.build import SETTINGS
from .refinement import FinetuneConfig, carry_out, refinement
from .seeds import each_seed, refine_together
from .table import ONLINE

GROUPS: dict[str, dict[str, Mapping[str, type]]] = {
    "finetune": {
        "policy": ACTING,
        "method": ONLINE,
        "env": WORLDS,
        "explore": SETTINGS,
    },
}


def finetune(config: FinetuneConfig) -> int:
    """A refinement from its settings to a delivered run folder, or one for each of several seeds; exit status. The
    processes that `torchrun` started carry it out together."""
    if config.seeds > 1:
        return refine_together((each, *refinement(each)) for each in each_seed(config))
    with joined(config.device) as (ranks, device):
        if ranks.first:
            occupied(config.out, config.resume)
        with ranks.own_worlds():
            parts = refinement(config if device == config.device else replace(config, device=device))
        return carry_out(config, *parts)


if __name__ == "__main__":
    sys.exit(main())
