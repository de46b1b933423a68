"""One of the processes of test_sharding.py: trains policies of which it holds a share, and leaves what came of them.

torchrun --nproc-per-node 2 sharding_lab.py FOLDER [UPDATES]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from test_imitate import CONFIGS, TRAIN, StopAt, episodes, learner
from torch import Tensor

from burnish.policies.core.execute import Precision
from burnish.policies.core.ranks import ALONE, Ranks, joined
from burnish.policies.data.episodes import Episode, Episodes, share
from burnish.policies.imitate import ImitationLearner, imitate
from burnish.policies.runs.run import FollowingRun
from burnish.policies.vla.sizes import ExpertConfig, LanguageConfig, VisionConfig
from burnish.policies.vla.smolvla import TinyVLAConfig

STEPS, STOP = 20, 9
# Odd widths, which two ranks cannot share evenly.
VLA = TinyVLAConfig(
    vision=VisionConfig(16, 4, 12, 1, 2, 15, 2, stem=True),
    language=LanguageConfig(41, 12, 2, 4, 2, 6, 21),
    expert=ExpertConfig(10, 2, 13),
    frozen=True,
    draws=2,
)
KINDS = {"flow": CONFIGS["flow"], "vla": VLA, "vla_bfloat16": replace(VLA, frozen_dtype=Precision.bfloat16)}


def made(kind: str, ranks: Ranks = ALONE, steps: int = STEPS, data: Episodes | None = None) -> ImitationLearner:
    train = replace(TRAIN, steps=steps, shard=True)
    return learner(KINDS[kind], train, image=kind != "flow", data=data, ranks=ranks)


def shared(ranks: Ranks) -> Episodes:
    """The episodes as a rank reads them that has the pictures of its share alone."""
    whole = episodes(image=True)
    mine = share(len(whole), TRAIN.valid_fraction, 0, ranks)
    return replace(whole, episodes=[each if i in mine else hidden(each) for i, each in enumerate(whole)])


def hidden(episode: Episode) -> Episode:
    black = {key: torch.zeros_like(x) if key.startswith("image.") else x for key, x in episode.obs.items()}
    return replace(episode, obs=black, elsewhere=True)


def run(kind: str, path: Path, ranks: Ranks = ALONE, stop: int = STEPS + 1) -> ImitationLearner:
    """The learner of a run in ``path``, which is begun or gone on with."""
    found = made(kind, ranks)
    whole = StopAt(path, {}, tensorboard=False, resume=True, ranks=ranks, stop=stop)
    with whole if ranks.first else FollowingRun(path, ranks) as each:
        imitate(found, each)
    return found


def weights(found: ImitationLearner) -> Tensor:
    """All weights and their moving average, as one process has them; of another rank than the first nothing."""
    state = found.state_dict()
    parts = [state["policy"][name] for name, _ in found.policy.named_parameters()]
    return torch.cat([x.detach().float().flatten() for x in (*parts, *state["ema"]["parameters"].values())])


def trained(
    kind: str, ranks: Ranks = ALONE, steps: int = STEPS, apart: bool = False, data: Episodes | None = None
) -> Tensor:
    found = made(kind, ranks, steps, data)
    if apart:
        for part in found.policy.modules():
            if hasattr(part, "set_custom_reduce_scatter"):
                part.set_custom_reduce_scatter(Unreduced())
    for _ in range(steps):
        found.update()
    return weights(found)


class Unreduced:
    """Gradients of this rank's rows alone, in place of the mean of all."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def held(found: ImitationLearner) -> dict[str, int]:
    """Bytes that this process holds between two updates."""

    def size(tensors: Any) -> int:
        local = [getattr(x, "_local_tensor", x).untyped_storage() for x in tensors]
        return sum({x.data_ptr(): x.nbytes() for x in local}.values())

    parameters = [*found.policy.parameters()]
    moments = [x for row in found.optimizer.state.values() for x in row.values() if x.ndim]
    return {
        "trained": size(p for p in parameters if p.requires_grad),
        "frozen": size(p for p in parameters if not p.requires_grad),
        "gradients": size(p.grad for p in parameters if p.grad is not None),
        "moments": size(moments),
        "average": size(found.ema.parameters.values()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, updates = Path(sys.argv[1]), [*map(int, sys.argv[2:])]
    with joined("cpu") as (ranks, _):
        left: dict[str, Tensor] = {f"{kind}/long": trained(kind, ranks, n) for n in updates for kind in ("flow", "vla")}
        for kind in () if updates else KINDS:
            run(kind, folder / "two" / kind, ranks, STOP)
            run(kind, folder / "one" / kind, ranks)
            found = run(kind, folder / "both" / kind, ranks)
            left |= {f"{kind}/{name}": torch.tensor(x) for name, x in held(found).items()}
        if not updates:
            left["apart"] = trained("vla", ranks, apart=True)
            left["shared"] = trained("vla", ranks, data=shared(ranks))
        if not ranks.first:
            left = {name: x for name, x in left.items() if not x.is_meta}
    save_file(left, str(folder / f"{ranks.rank}.safetensors"))
