"""Tasks, methods and the declared search space of `refine_quality.py`.

Every method of a task has the task's discount, the same recordings if it can use any, the same number of trials from
its search space, and the same budgets. The trials and their results lie in `results/refine_quality/search/`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass

from burnish.finetune.build import recorded_by
from burnish.finetune.method import Recorded
from burnish.policies.core.errors import BurnishError


@dataclass(frozen=True)
class Task:
    gamma: float  # the discount of a control tick, for every method
    unit: float | None = None  # the return that counts as 1 where a world knows no success
    further: tuple[str, ...] = ()  # methods outside the ranking, which not every task has
    total: int | None = None  # decisions of a run; by default those of its experiment


BUDGET = 100_000  # control steps of a shipped experiment

# Ranked against each other, over tasks that all of them ran.
RANKED = ("dsrl", "rfs", "residual_sac", "residual_td3", "residual_ppo", "reinflow", "dppo", "expo", "rlpd")
FURTHER = ("dsrl_aliased", "flow_sde", "rpd", "gaussian_ppo")
TIMED = "dsrl_timed"  # where time costs something
FAMILIES = {
    "latent": ("dsrl", "dsrl_aliased", "dsrl_timed", "rfs"),
    "residual": ("residual_sac", "residual_td3", "residual_ppo"),
    "chain": ("reinflow", "dppo", "flow_sde"),
    "action": ("expo", "rpd"),  # those that make or choose actions of their own
    # They refine Gaussians, which the base is not, so they begin without any policy: the yardstick for all others.
    "from nothing": ("rlpd", "gaussian_ppo"),
    "free": ("base_greedy", "more_imitation", "iql", "best_of_n"),  # no interaction at all
}
TASKS = {
    "insert": Task(0.987, further=FURTHER),
    "insert_hidden": Task(0.987, total=BUDGET),  # its experiment plays twice as long
    "push": Task(0.995, further=FURTHER),
    "pick_place": Task(0.995, further=(TIMED,)),
    "avoid": Task(0.995),
    # The return over that of the expert of D4RL (arXiv 2004.07219) stands for success.
    "hopper": Task(0.99, unit=3234.3),
    "walker2d": Task(0.99, unit=4592.3),
}


def methods_of(task: str) -> tuple[str, ...]:
    return ("residual_ppo",) if task == "insert_hidden" else RANKED + TASKS[task].further


def family_of(method: str) -> str:
    return next(name for name, methods in FAMILIES.items() if method in methods)


def common_settings(task: str, config: object) -> list[str]:
    """Of every method on the task; a rate of decay that is not per tick would be another discount."""
    assert hasattr(config, "discount"), config
    total = [] if TASKS[task].total is None else [f"total={TASKS[task].total}"]
    return [f"method.discount.gamma={TASKS[task].gamma}", "method.discount.per=step", *total]


def reads_recordings(config: object) -> bool:
    try:
        return recorded_by(config) is not Recorded.unused
    except BurnishError:
        return False


# One space per method, for all tasks: each dimension holds alternatives, and each alternative some settings.
Alternative = Mapping[str, object]


def _each(name: str, *values: object) -> list[Alternative]:
    return [{f"method.{name}": value} for value in values]


UPDATES = _each("loop.updates_per_decision", 0.1, 0.25, 0.5)  # per decision of four ticks
UPDATES_PER_TICK = _each("loop.updates_per_decision", 0.03, 0.06, 0.12)
RATES, FAST_RATES = _each("ppo.lr", 3e-5, 1e-4, 3e-4), _each("ppo.lr", 1e-4, 3e-4, 1e-3)  # of a base; of a new net
ALPHA, LENGTHS = _each("sac.alpha", 0.005, 0.02, 0.08), _each("loop.decisions_per_update", 30, 60)
EDITS = (0.05, 0.1, 0.3)
SPACE: dict[str, list[list[Alternative]]] = {
    "dsrl": [_each("bound", 1.0, 1.5, 2.5), UPDATES, ALPHA],
    "dsrl_aliased": [_each("bound", 1.0, 1.5, 2.5), UPDATES, ALPHA],
    TIMED: [_each("bound", 1.0, 1.5, 2.5), UPDATES, ALPHA],
    "rfs": [_each("residual_bound", *EDITS), UPDATES, ALPHA],
    "residual_sac": [_each("bound", *EDITS), UPDATES_PER_TICK, _each("loop.n_step", 1, 3)],
    "residual_td3": [_each("bound", *EDITS), UPDATES_PER_TICK, _each("loop.n_step", 1, 3)],
    "residual_ppo": [
        _each("bound", *EDITS),
        FAST_RATES,
        LENGTHS,
    ],
    "reinflow": [
        [{"method.noise.min_std": x, "method.noise.max_std": 2 * x} for x in (0.025, 0.05, 0.1)],
        RATES,
        _each("ppo.clip", 0.003, 0.01),
    ],
    "dppo": [
        _each("min_std", 0.05, 0.1, 0.2),
        _each("ppo.lr", 3e-5, 1e-4, 3e-4),
        _each("loop.decisions_per_update", 10, 20),
    ],
    "flow_sde": [_each("noise.level", 0.1, 0.2, 0.4), RATES, _each("ppo.clip", 0.1, 0.2)],
    "expo": [_each("edit_bound", *EDITS), UPDATES, _each("alpha", 0.005, 0.02, 0.08)],
    "rlpd": [
        _each("loop.updates_per_decision", 0.2, 0.4, 0.8),
        ALPHA,
        _each("sac.critic.members", 2, 5),
    ],
    "rpd": [
        _each("coef", 0.3, 1.0, 5.0),
        FAST_RATES,
        LENGTHS,
    ],
    "gaussian_ppo": [
        FAST_RATES,
        LENGTHS,
        _each("ppo.scale_reward", False, True),
    ],
}
TRIALS = 10  # at most, for each method on each task


def trial_settings(task: str, method: str, trial: int) -> list[str]:
    """The changes of a trial in the shipped experiment. Trial 0 has none; after a search the experiment takes over
    the winner. The others are drawn without replacement from the whole space, in an order that is fixed by the names of
    the task and the method."""
    if trial == 0:
        return []
    points = list(itertools.product(*SPACE[method]))
    random.Random(f"{task}/{method}").shuffle(points)
    point: dict[str, object] = {}
    for alternative in points[(trial - 1) % len(points)]:
        point |= alternative
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in point.items()]
