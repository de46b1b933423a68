"""The two-mode world: demonstrators pass an obstacle above or below, and the mean of their actions runs into it.

400 episodes are recorded, each policy is pretrained on them by the configuration `experiment=two_mode`, and acts on
fresh seeds. Reported for each policy and seed: success with its 95 % Wilson interval, and how far the share of episodes
that pass above is from that of the demonstrations.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from measure import machine, options, publish, table

from burnish.policies.__main__ import GROUPS, PretrainConfig
from burnish.policies.build import build_policy
from burnish.policies.cli.cli import compose, to_object
from burnish.policies.controllers import ChunkController
from burnish.policies.core.config import to_data
from burnish.policies.core.seed import derive
from burnish.policies.core.spec import PolicySpec
from burnish.policies.data.episodes import Episodes
from burnish.policies.imitate import ImitationLearner
from burnish.policies.measure.evaluate import evaluation_seeds
from burnish.policies.measure.statistics import wilson
from burnish.sim.build import make_env
from burnish.sim.collect import collect
from burnish.sim.experts import make_expert

POLICIES = ("flow", "shortcut", "diffusion", "least_squares")


def upper_share(episodes: Episodes) -> float | None:
    """Of the episodes that passed the obstacle at x = 0, the share that did so above it."""
    heights = [e.obs["state"][(e.obs["state"][:, 0] >= 0).nonzero()[:1, 0], 1] for e in episodes if e.success]
    passed = torch.cat(heights) if heights else torch.zeros(0)
    return float((passed > 0).float().mean()) if len(passed) else None


def demonstrations(count: int) -> Episodes:
    seeds = [derive(0, "collect", i) for i in range(count)]
    return collect(make_env("two_mode", 50), make_expert("two_mode", 50, "noisy"), seeds)


def imitated(name: str, seed: int, data: Episodes, steps: int | None, episodes: int) -> dict[str, Any]:
    """Pretrain one policy and let it act on ``episodes`` fresh seeds."""
    words = [f"policy={name}", "experiment=two_mode", "data=unused", f"seed={seed}"]
    words += [f"train.steps={steps}"] if steps else []
    config: PretrainConfig = to_object(compose("pretrain", PretrainConfig, GROUPS["pretrain"], words))
    spec = PolicySpec(data.spec.obs, data.spec.action, **to_data(config.chunk))
    learner = ImitationLearner(build_policy(config.policy, spec, seed=seed), data, config.train, seed=seed)
    start = time.perf_counter()
    while learner.step < config.train.steps:
        learner.update()
    spent = time.perf_counter() - start
    learner.ema.copy_to(learner.average)
    played = collect(make_env("two_mode", 100), ChunkController(learner.average, 100), evaluation_seeds(episodes))
    wins = sum(e.success for e in played)
    low, high = wilson(wins, episodes)
    return {
        "policy": name,
        "seed": seed,
        "updates": config.train.steps,
        "train_s": spent,
        "generation_steps": getattr(learner.average, "num_steps", 1),
        "success": wins / episodes,
        "success_low": low,
        "success_high": high,
        "upper_share": upper_share(played),
    }


def main() -> None:
    chosen = options(__doc__).parse_args()
    torch.set_num_threads(1)
    data = demonstrations(400)
    share = upper_share(data)
    assert share is not None, "the expert passes the obstacle"
    seeds, steps, episodes = ((0,), 200, 100) if chosen.quick else ((0, 1, 2), None, 500)
    rows = []
    for name in POLICIES:
        for seed in seeds:
            rows.append(imitated(name, seed, data, steps, episodes))
            sys.stderr.write(f"{name} seed {seed}: success {rows[-1]['success']:.3f}\n")
    # The worst seed of what should succeed, and the best of what should not.
    result = {f"{name}_success": min(r["success"] for r in rows if r["policy"] == name) for name in POLICIES}
    result["least_squares_success"] = max(r["success"] for r in rows if r["policy"] == "least_squares")
    shares = [r["upper_share"] for r in rows if r["policy"] != "least_squares" and r["upper_share"] is not None]
    result["worst_share_gap"] = max((abs(x - share) for x in shares), default=1.0)
    report = {"machine": machine(torch.device("cpu")), "quick": chosen.quick, "episodes": len(data)}
    report |= {"upper_share_of_data": share, "rows": rows}
    columns = {"policy": "", "seed": "", "generation_steps": "", "updates": ",", "train_s": ".0f", "success": ".3f"}
    columns |= {"success_low": ".3f", "success_high": ".3f", "upper_share": ".3f"}
    name = "two_mode_quick.json" if chosen.quick else "two_mode.json"
    publish(chosen.out / name, report, table(rows, columns), result)


if __name__ == "__main__":
    main()
