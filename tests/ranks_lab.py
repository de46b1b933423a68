"""One of the processes of test_ranks.py: trains each kind of policy on a shared batch, and leaves its weights.

torchrun --nproc-per-node 2 ranks_lab.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from test_imitate import CONFIGS, TRAIN, learner

from burnish.policies.core.ranks import ALONE, Ranks, joined

STEPS = 200


def weights(kind: str, ranks: Ranks = ALONE, seed: int = 0) -> torch.Tensor:
    """All weights of a small policy after ``STEPS`` updates, and of their moving average."""
    made = learner(kind, TRAIN, seed=seed, ranks=ranks)
    for _ in range(STEPS):
        made.update()
    parts = [*made.policy.parameters(), *made.ema.parameters.values()]
    return torch.cat([x.detach().flatten() for x in parts])


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined("cpu") as (ranks, _):
        found = {kind: weights(kind, ranks) for kind in CONFIGS}
    save_file(found, str(Path(sys.argv[1]) / f"{ranks.rank}.safetensors"))
