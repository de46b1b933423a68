"""Rewards in units of what they add up to, so that one learning rate of a value fits every task."""

from __future__ import annotations

import torch
from torch import Tensor

from ..policies.core.normalize import merged


class RewardScale:
    """Divides rewards by the running deviation of the forward-accumulated discounted return, per world."""

    def __init__(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        self._running = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self._moments = torch.zeros(3, dtype=torch.float64, device=device)  # count, mean, sum of squared deviations

    def __call__(
        self, reward: Tensor, discount: Tensor, ended: Tensor, clip: float, own: Tensor | None = None
    ) -> Tensor:
        """(T, N), in the order of time; the statistics include these rewards, but for those that are not our ``own``,
        before which a sum has ended."""
        for t, (r, d, end) in enumerate(zip(reward, discount, ended, strict=True)):
            self._running = r + self._running
            sums = self._running if own is None else self._running[own[t]]
            if len(sums):
                self._moments = merged(self._moments, sums)
            over = end if own is None else end | ~own[t]
            # The sum so far is worth d of itself one decision later; a new episode begins at nothing.
            self._running = torch.where(over, torch.zeros_like(self._running), d * self._running)
        deviation = (self._moments[2] / self._moments[0]).sqrt()
        return (reward / deviation.clamp(min=1e-8)).to(reward).clamp(-clip, clip)

    def abandon(self) -> None:
        """The episodes in progress will not be continued; new ones begin at nothing."""
        self._running = torch.zeros_like(self._running)

    def state_dict(self) -> dict[str, Tensor]:
        return {"running": self._running, "moments": self._moments}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        device = self._running.device
        self._running, self._moments = (state[name].to(device, copy=True) for name in ("running", "moments"))
