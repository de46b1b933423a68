"""The numbers of an observation that exploration looks at, in deviations of all that was seen so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...policies.core.errors import BurnishError
from ...policies.core.normalize import FLOOR, merged
from ...policies.core.ranges import check_ranges
from ...policies.core.spec import EnvSpec, dtype_of
from ...policies.core.types import Obs


@dataclass
class ExploreConfig:
    """Settings that all kinds of exploration have."""

    weight: float = 0.3  # factor on the intrinsic reward
    fade: int = 0  # control ticks of all worlds together, over which the weight falls to 0; 0: it stays
    # places of the numbers that count, in the observations of numbers in alphabetical order; empty: all
    numbers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_ranges(self, {"(0, inf)": "weight", "[0, inf)": "fade"}, "explore.")

    def weight_after(self, ticks: int) -> float:
        """The weight when so many control ticks of all worlds together were played."""
        return self.weight * (max(0.0, 1 - ticks / self.fade) if self.fade else 1)


class Observed:
    """Observations as vectors (N, D), of length 1 where each number is one deviation from 0."""

    def __init__(
        self, config: ExploreConfig, world: EnvSpec, device: torch.device | str = "cpu", where: str = "explore"
    ) -> None:
        shapes = world.obs.shapes
        self.keys = sorted(x for x in shapes if dtype_of(x) == torch.float32 and not x.startswith("goal"))
        count = sum(int(torch.Size(shapes[key]).numel()) for key in self.keys)
        if not count:
            raise BurnishError(
                f"exploration compares numbers, but this world shows {', '.join(sorted(shapes))}; leave explore= "
                "out, or take a world that shows a state"
            )
        if not all(0 <= i < count for i in config.numbers):
            raise BurnishError(f"{where}.numbers={config.numbers} must be places from 0 to {count - 1}")
        self.chosen = config.numbers or list(range(count))
        self.moments = torch.zeros(3, len(self.chosen), dtype=torch.float64, device=device)

    def __len__(self) -> int:
        return len(self.chosen)

    def raw(self, obs: Obs) -> Tensor:
        """(N, D) in the units of the world."""
        return torch.cat([obs[key].flatten(1) for key in self.keys], 1)[:, self.chosen].float()

    def absorb(self, raw: Tensor) -> None:
        """Have it count in the deviations."""
        if len(raw):
            self.moments = merged(self.moments, raw.double())

    def scaled(self, raw: Tensor) -> Tensor:
        count, mean, squares = self.moments
        deviation = (squares / count.clamp(min=1)).sqrt()
        deviation = torch.where(deviation < FLOOR, 1.0, deviation)
        return ((raw - mean) / deviation / len(self) ** 0.5).to(raw)

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = state["moments"].to(self.moments, copy=True)
