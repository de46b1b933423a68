"""Evaluations during training: on seeds kept for selection, and at the end on fresh ones (`best.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .best import Best
from .cli.machine import say
from .controllers import controller_for
from .core.errors import BurnishError
from .core.ranges import check_ranges
from .core.types import VecEnv
from .core.wrapper import info_keys, success_from
from .measure.evaluate import Evaluation, evaluate, evaluation_seeds
from .runs.run import episodes_bar
from .sharding import placed


@dataclass
class EvalConfig:
    """Settings of the evaluations of a run: the number of episodes, worlds at once, and final confirmation."""

    episodes: int = 100  # episodes of each evaluation; 0: nothing is tried, and training needs no world for it
    worlds: int = 50  # worlds that are stepped at once; changes the result by no more than rounding
    greedy: bool = False  # act from noise 0
    confirm: int = 256  # fresh episodes on which a run decides at its end what it delivers (best.py)

    def __post_init__(self) -> None:
        check_ranges(self, {"[0, inf)": "episodes", "[1, inf)": "worlds confirm"}, "eval.")

    def require_episodes(self) -> None:
        """For an evaluation that is no part of a training."""
        if self.episodes == 0:
            raise BurnishError("episodes=0 plays nothing; an evaluation needs at least 1")


class Evaluator:
    """An evaluation during training; the best goes to ``best``, where that is set."""

    def __init__(self, env: VecEnv, config: EvalConfig, device: torch.device) -> None:
        self.best: Best | None = None
        self._env, self._config, self._device, self._noted = env, config, device, False
        # Not the seeds on which `burnish evaluate` reports: a selection must not choose the seeds of its own result.
        self._seeds = evaluation_seeds(config.episodes, stream="select")

    def _play(self, policy: Any, seeds: Sequence[int]) -> Evaluation:
        with placed(policy, self._device):
            controller = controller_for(policy, self._env.num_envs, greedy=self._config.greedy, device=self._device)
            with episodes_bar(len(seeds)) as progress:
                return evaluate(self._env, controller, seeds, progress=progress)

    def confirm(self, start: Any, last: Any, step: int) -> None:
        """At the end of a run: decide on fresh seeds what it delivers (``best.py``)."""
        if self.best is not None:
            seeds = evaluation_seeds(self._config.confirm, stream="confirm")

            def examine(name: str, policy: Any) -> Evaluation:
                say(f"the {name} plays {len(seeds)} fresh episodes, which decide what this run delivers")
                return self._play(policy, seeds)

            self.best.confirm(start, last, step, examine)

    def __call__(self, policy: Any, step: int, *, start: bool = False) -> dict[str, Any]:
        """``start``: it is the one that the training begins with."""
        evaluation = self._play(policy, self._seeds)
        say(f"step {step}, on seeds kept for selection: {in_words(evaluation)}")
        if not self._noted and (note := unreported(self._env, evaluation)):
            say(note)
        self._noted = True
        if self.best is not None:
            if start:
                self.best.begin(evaluation)
            else:
                self.best.offer(policy, step, evaluation)
        return {f"eval/{key}": value for key, value in evaluation.summary().items()}


def unreported(env: VecEnv, result: Evaluation) -> str:
    """A note for a world of others whose steps said nothing of success; empty where one did."""
    source = "" if result.success is not None else success_from(env)
    if not source:
        return ""
    return f"note: no step reported {source}; env.success=KEY names another key of its info{info_keys(env)}"


def in_words(result: Evaluation) -> str:
    """One line on an evaluation: success with its interval if reported, mean return and mean length."""
    facts = result.summary()
    words = [f"{len(result.seeds)} episodes"]
    if "success_rate" in facts:
        low, high = facts["success_low"], facts["success_high"]
        words.insert(0, f"success {facts['success_rate']:.1%} [{low:.1%}, {high:.1%}]")
    return ", ".join([*words, f"return {facts['return_mean']:.2f}", f"length {facts['length_mean']:.1f}"])
