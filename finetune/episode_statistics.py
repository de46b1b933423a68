"""Statistics of what was played: decisions, control ticks, and the episodes that ended since the last report."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..policies.core.tree import map_tree, rows
from ..policies.core.types import Metrics, Outcome


class EpisodeStatistics:
    """Counts what was played, and the episodes that ended since the last report."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.decisions = 0
        self.ticks = torch.zeros((), dtype=torch.int64, device=device)
        self._running = torch.zeros(2, num_envs, dtype=torch.float64, device=device)  # reward, ticks of this episode
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)  # episodes, reward, ticks, successes, failures
        self._won = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self.reports_success = False
        self._hands = torch.zeros(2, dtype=torch.int64, device=device)  # ticks that others played, of so many
        # intrinsic reward since the last report, of so many ticks
        self._bonus = torch.zeros(2, dtype=torch.float64, device=device)

    def note(self, outcome: Outcome, absent: Tensor | None = None) -> None:
        """One decision of each world but those that are ``absent`` (N,), of which the outcome says nothing."""
        if absent is not None:
            outcome = _without(outcome, absent)
            self.decisions -= int(absent.sum())
        self.decisions += len(outcome.reward)
        self.ticks += outcome.steps.sum()
        self._running += torch.stack([outcome.reward, outcome.steps])
        if "success" in outcome.info:
            self.reports_success = True
            self._won |= outcome.info["success"].bool()
        if "intervened" in outcome.info:
            self._hands += torch.stack([outcome.info["intervened"].sum(), outcome.steps.sum()])
        if "bonus" in outcome.info:
            self._bonus += torch.stack([outcome.info["bonus"].double().sum(), outcome.steps.sum()])
        ended = outcome.ended
        failed = outcome.terminated & ~self._won
        facts = torch.stack([torch.ones_like(self._running[0]), *self._running, self._won.double(), failed.double()])
        self._sums += (facts * ended).sum(1)
        self._running *= ~ended
        self._won &= ~ended

    def abandon(self, worlds: Tensor | None = None) -> None:
        """The episodes in progress will not be continued, in ``worlds`` (N,) or in all, and count as nothing."""
        chosen = slice(None) if worlds is None else worlds
        self._running[:, chosen] = 0
        self._won[chosen] = False

    def report(self) -> Metrics:
        """Means over the episodes since the last report; "reward" is discounted within each chunk only, and "failure"
        is an end without success before the time is over; "intervened" is the share of the ticks since then that
        a person or an expert played, where the world says it; "bonus" is the part of the rewards that exploration pays,
        per tick (`finetune/exploration`)."""
        metrics: Metrics = {"decisions": self.decisions, "control_steps": self.ticks}
        count, reward, ticks, successes, failures = self._sums.tolist()
        if count:
            metrics |= {"episode/count": count, "episode/reward": reward / count, "episode/length": ticks / count}
            if self.reports_success:
                metrics |= {"episode/success": successes / count, "episode/failure": failures / count}
        self._sums.zero_()
        theirs, known = self._hands.tolist()
        if known:
            metrics["intervened"] = theirs / known
            self._hands.zero_()
        bonus, ticks = self._bonus.tolist()
        if ticks:
            metrics["bonus"] = bonus / ticks
            self._bonus.zero_()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        kept = {name: getattr(self, f"_{name}").clone() for name in ("running", "sums", "won", "hands", "bonus")}
        return {"decisions": self.decisions, "ticks": self.ticks.clone(), "success": self.reports_success, **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decisions, self.reports_success = int(state["decisions"]), bool(state["success"])
        self.ticks = state["ticks"].to(self.ticks, copy=True)
        for name in ("running", "sums", "won", "hands", "bonus"):
            mine = getattr(self, f"_{name}")
            found = state.get(name, torch.zeros_like(mine))  # older states do not know of all
            setattr(self, f"_{name}", found.to(mine, copy=True))


def _without(outcome: Outcome, worlds: Tensor) -> Outcome:
    """In ``worlds`` (N,) nothing happened."""

    def rest(x: Tensor) -> Tensor:
        return x * rows(~worlds, x)

    facts = {name: rest(getattr(outcome, name)) for name in ("reward", "ended", "terminated", "steps")}
    return outcome._replace(**facts, info=map_tree(rest, outcome.info))
