"""Discs: a dot among three coloured discs, told in words to which of them to go; nothing else says it. In pure torch.

A policy that does not follow the words finds the right disc in a third of the episodes. The world keeps the promises of
the closed-form worlds in `toy.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..policies.core import tree
from ..policies.core.ranges import check_ranges
from ..policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from ..policies.core.types import Obs, Step
from .torch_world import TorchWorld, distance, paint, pixel_distance

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 220)}
PHRASES = ("go to the {} disc", "touch the {} ball", "visit the {} circle")
SENTENCES = [phrase.format(colour) for colour in COLOURS for phrase in PHRASES]
DOT = 0.09  # m, radius of the dot: three pixels of 32 across


@dataclass
class DiscsConfig:
    """Settings of env=discs: the size of the discs, and how they are seen."""

    image: bool = True  # discs are seen in ``image.top``; without it their places are numbers of ``state``
    image_size: int = 32  # side of the picture, in pixels
    radius: float = 0.2  # radius of a disc, in m
    control_hz: float = 10.0  # control ticks per second
    max_steps: int = 30  # control ticks until an episode is truncated

    def __post_init__(self) -> None:
        check_ranges(
            self,
            {"[8, 256]": "image_size", "[0.05, 0.25]": "radius", "(0, inf)": "control_hz", "[1, inf)": "max_steps"},
        )


class Discs(TorchWorld[DiscsConfig]):
    """Reward 1 in the disc that the instruction names; there, and in every other disc, the episode ends."""

    Settings = DiscsConfig

    def _set_up(self) -> tuple[EnvSpec, dict[str, Tensor]]:
        config = self.config
        size, places = config.image_size, 2 * len(COLOURS)
        shapes = {"state": (2,), "image.top": (3, size, size)} if config.image else {"state": (2 + places,)}
        spec = EnvSpec(
            ObsSpec(shapes),
            ActionSpec((-1.0, -1.0), (1.0, 1.0)),
            config.control_hz,
            "velocity",
            config.max_steps,
            pixels="plain" if config.image else None,
        )
        zero = torch.zeros(self.num_envs, 2, device=self.device, dtype=self.dtype)
        sentence = torch.zeros(self.num_envs, device=self.device, dtype=torch.int64)
        return spec, {"dot": zero, "discs": zero[:, None].repeat(1, len(COLOURS), 1), "sentence": sentence}

    @property
    def instructions(self) -> list[str]:
        return [SENTENCES[number] for number in self._state["sentence"].tolist()]

    @property
    def wanted(self) -> Tensor:
        """(N,) the number of the disc that the instruction names."""
        return self._state["sentence"] // len(PHRASES)

    @property
    def discs(self) -> Tensor:
        """(N, 3, 2) metres: where they lie, in the order of ``COLOURS``."""
        return self._state["discs"]

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        mask = self._clock.begin(mask, seeds)
        drawn = self._clock.noise("reset").uniform((self.num_envs, 11))
        sentence = (drawn[:, 0] * len(SENTENCES)).long()
        # A third of a turn apart, give or take, so the way from the middle to one leads past no other.
        turn = drawn[:, 1, None] + torch.arange(3, device=drawn.device) / 3 + (drawn[:, 2:5] - 0.5) / 9
        away = 0.55 + 0.25 * drawn[:, 5:8]
        order = drawn[:, 8:11].argsort(1)
        around = torch.stack([away * torch.cos(2 * math.pi * turn), away * torch.sin(2 * math.pi * turn)], 2)
        discs = around.gather(1, order[..., None].expand(-1, -1, 2)).to(self.dtype)
        start = self._clock.noise("start").uniform((self.num_envs, 2)).to(self.dtype) * 0.3 - 0.15
        self._state = tree.where(mask, {"dot": start, "discs": discs, "sentence": sentence}, self._state)
        return self._observe()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        tree.check(action, f"{self.num_envs} 2")
        executed = action.to(self.dtype).clamp(-1, 1)
        dot = (self._state["dot"] + executed / self.config.control_hz).clamp(-1, 1)
        active = self._clock.advance(active)
        self._state = tree.where(active, {**self._state, "dot": dot}, self._state)
        away = torch.stack([distance(dot, disc) for disc in self.discs.unbind(1)], 1)
        within = away <= self.config.radius
        success = within.gather(1, self.wanted[:, None])[:, 0]
        terminated = within.any(1)
        truncated = (self._clock.tick >= self.config.max_steps) & ~terminated
        info = {"success": success, "executed": executed}
        return Step(self._observe(), success.to(self.dtype), terminated, truncated, info)

    def _observe(self) -> Obs:
        if self.config.image:
            picture = self.render(self.config.image_size).permute(0, 3, 1, 2).contiguous()
            return {"state": self._state["dot"], "image.top": picture}
        return {"state": torch.cat([self._state["dot"], self.discs.flatten(1)], 1)}

    def render(self, size: int = 128) -> Tensor:
        """(N, size, size, 3) uint8, on the world's device."""
        picture = torch.full((self.num_envs, size, size, 3), 235, dtype=torch.uint8, device=self.device)
        for colour, disc in zip(COLOURS.values(), self.discs.unbind(1), strict=True):
            picture = paint(picture, pixel_distance(disc, size, 1.0) <= self.config.radius, colour)
        return paint(picture, pixel_distance(self._state["dot"], size, 1.0) <= DOT, (20, 20, 20))
