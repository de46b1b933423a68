"""How far the worlds of mujoco-warp go from those of MuJoCo in C: equal starts, equal actions, open loop.

    python benchmarks/warp_difference.py [--quick] [--device cpu] [--out DIR]

Running robots begin without noise and are given random actions for 100 ticks; the arm's actions are those that the
clean expert chooses in C, so that things are touched, gripped and put down. ``agree`` is the tick (median over the
worlds) from which a position or an angle differs by more than 1e-4 (m, rad), None where it never did; ``first`` that of
the first world. ``after_1`` and ``at_end`` are the median and ``worst`` the largest difference, after a tick and when
the episode of a world ends on either side; ``reward`` is the largest difference of a tick until then. ``success_*`` are
shares of episodes. ``tick_s`` is the duration of a tick in warp; on a CPU most of it is the start of its kernels.
Worlds that mujoco-warp refuses are listed with its reason.

RESULT: ``locomotion_agree`` and ``arm_agree``, the fewest ticks of agreement of a task (median over its worlds; the
length of the longest episode where they never parted), and ``success_gap``, the largest difference in success.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, embed, machine, markdown, options, page, publish, table

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.measure.evaluate import evaluation_seeds
from burnish.sim.build import ENVS, make_env
from burnish.sim.desk import Reward
from burnish.sim.experts import make_expert
from burnish.sim.task import Backend

ROBOTS = ("hopper", "walker2d", "half_cheetah", "ant", "humanoid")
ARM = ("reach", "push", "insert", "pick_place", "stack", "avoid", "tabletop")
NEAR = 1e-4  # m or rad
COLUMNS = {"task": "", "worlds": "d", "ticks": "d", "agree": "", "first": "", "after_1": ".1e", "at_end": ".1e"}
COLUMNS |= {"worst": ".1e", "reward": ".1e", "success_c": ".2f", "success_warp": ".2f", "tick_s": ".2f"}
SHOWN = {name: COLUMNS[name] for name in ("task", "ticks", "agree", "after_1", "at_end", "success_c", "success_warp")}
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "scale.md"


def compared(name: str, num: int, ticks: int, device: str) -> dict[str, Any]:
    """One row of the table: ``num`` worlds for at most ``ticks`` ticks."""
    robot = name in ROBOTS
    config = replace(ENVS[name].config(), **({"reset_noise_scale": 0.0} if robot else {"reward": Reward.dense}))
    c, warp = make_env(config, num), make_env(replace(config, backend=Backend.warp), num, device=device)
    seeds, everyone = evaluation_seeds(num), torch.ones(num, dtype=torch.bool)
    expert = None if robot else make_expert(config, num, "clean", env=c)
    a, b = ScaledEnv(c), ScaledEnv(warp)
    obs, _ = a.reset(seeds=seeds), b.reset(seeds=seeds)
    if expert is not None:
        expert.reset(everyone, seeds)
    source = torch.Generator().manual_seed(0)
    apart, rewards, spent = torch.zeros(0, num), torch.zeros(num), 0.0
    left, won = {"c": everyone, "warp": everyone}, {"c": ~everyone, "warp": ~everyone}
    for _ in range(ticks):
        random = 2 * torch.rand(num, a.spec.action.dim, generator=source) - 1
        action = random if expert is None else expert.step(obs)
        began, both = time.perf_counter(), left["c"] & left["warp"]
        theirs = b.step(action.to(device))
        spent += time.perf_counter() - began
        ours = a.step(action)
        obs = ours.obs
        for side, step in (("c", ours), ("warp", theirs)):
            if "success" in step.info:
                won[side] = won[side] | (left[side] & step.info["success"].cpu())
            left = left | {side: left[side] & ~(step.terminated | step.truncated).cpu()}
        far = _positions(c) - _positions(warp)
        # A world that has ended on either side keeps the difference that it had then.
        apart = torch.cat([apart, torch.where(both, far.abs().amax(1), apart[-1] if len(apart) else 0.0)[None]])
        rewards = torch.where(both, torch.maximum(rewards, (ours.reward - theirs.reward.cpu()).abs()), rewards)
        if not (left["c"] | left["warp"]).any():
            break
    parted = [next((t + 1 for t, x in enumerate(row) if not x <= NEAR), None) for row in apart.T.tolist()]
    median = statistics.median(len(apart) + 1 if t is None else t for t in parted)
    shares = {f"success_{side}": None if robot else float(x.float().mean()) for side, x in won.items()}
    return {
        "task": name,
        "worlds": num,
        "ticks": len(apart),
        "agree": None if median > len(apart) else median,
        "first": min((t for t in parted if t is not None), default=None),
        "after_1": float(apart[0].median()),
        "at_end": float(apart[-1].median()),
        "worst": float(apart[-1].max()),
        "reward": float(rewards.max()),
        **shares,
        "tick_s": spent / len(apart),
    }


def _positions(env: Any) -> torch.Tensor:
    return torch.as_tensor(env.physics.column("qpos").read()).cpu()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", default="cpu", help="the device of mujoco-warp (default: %(default)s)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    names, num = (("hopper", "reach"), 2) if chosen.quick else ((*ROBOTS, *ARM), 8)
    rows, refused = [], {}
    for name in names:
        ticks = 5 if chosen.quick else 100 if name in ROBOTS else ENVS[name].config().max_steps
        try:
            rows.append(compared(name, num, ticks, chosen.device))
        except BurnishError as error:
            if "pip install" in str(error):
                sys.exit("there is no mujoco-warp: pip install 'burnish[warp]'")
            refused[name] = str(error)
    result = {
        f"{what}_agree": min(row["agree"] or row["ticks"] for row in rows if row["task"] in of)
        for what, of in (("locomotion", ROBOTS), ("arm", ARM))
    }
    result["success_gap"] = max(abs(row["success_c"] - row["success_warp"]) for row in rows if row["task"] in ARM)
    about = machine(torch.device(chosen.device))
    report = {"machine": about, "quick": chosen.quick, "near": NEAR, "rows": rows, "refused": refused}
    head = f"{about['processor']}, warp's device {chosen.device}, load {about['load']}; refused: {refused or 'none'}"
    name = "warp_difference_quick" if chosen.quick else "warp_difference"
    publish(chosen.out / f"{name}.json", report, f"{head}\n\n{table(rows, COLUMNS)}", result)
    if not chosen.quick:
        page(chosen.out / name, f"{head}\n\n{markdown(rows, COLUMNS)}")
        if chosen.out == RESULTS:
            embed(DOCUMENT, name, markdown(rows, SHOWN))


if __name__ == "__main__":
    main()
