"""A policy of ours as LeRobot calls one: batches under LeRobot's names to actions in units of the robot.

Chunks, histories and corrections at single ticks are handled here, per row of the batch; LeRobot begins all rows anew
at once. LeRobot itself is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..controllers import controller_for
from ..core.errors import BurnishError
from ..core.observed import observed
from ..core.scale import Scale
from ..core.spec import stacked_by_history
from ..core.types import Controller, Obs
from ..data.lerobot_layout import column_of, is_image
from .features import Inputs, Kind


def features(policy: Any) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """Key -> (name, type, shape of a single frame) in LeRobot, of all observations that the policy reads."""
    theirs = [x for part in policy.modules() if isinstance(part, Inputs) for x in part.features]
    names = {x.key: x.name for x in theirs}
    found = {}
    for key, shape in observed(policy).items():
        framed = policy.spec.history > 1 and stacked_by_history(key)
        kind = Kind.visual if is_image(key) else Kind.environment if key == "environment_state" else Kind.state
        found[key] = names.get(key, column_of(key)), kind.value, shape[1:] if framed else shape
    return found


class Player:
    """A policy at work on a batch of worlds, all of which begin an episode at ``reset``."""

    def __init__(self, policy: nn.Module, *, seed: int = 0, greedy: bool = False, device: Any = "cpu") -> None:
        self.policy: Any = policy
        self._made = {"seed": seed, "greedy": greedy, "device": device}
        self._names = {key: name for key, (name, _, _) in features(policy).items()}
        self._scale = Scale(self.policy.spec.action, device)
        self._controller: Controller | None = None
        self._rows = 0
        self._begins = True
        self._frames: dict[str, Tensor] = {}

    def reset(self) -> None:
        self._begins = True

    def step(self, batch: Mapping[str, Any]) -> Tensor:
        """(B, A): the next action of each row."""
        obs = self._observed(batch)
        rows = len(next(iter(obs.values())))
        if self._controller is None or rows != self._rows:
            self._controller, self._rows = controller_for(self.policy, rows, **self._made), rows
            self._begins = True
        if self._begins:
            self._controller.reset(torch.ones(rows, dtype=torch.bool, device=self._made["device"]))
        return self._scale.to_actuator(self._controller.step(self._stacked(obs)))

    @torch.no_grad()
    def chunk(self, batch: Mapping[str, Any], noise: Tensor | None = None) -> Tensor:
        """(B, n, A): the actions that the policy would play from here on."""
        obs = self._stacked(self._observed(batch))
        drawn = self.policy.act(obs, noise=noise, greedy=self._made["greedy"])
        return self._scale.to_actuator(self.policy.spec.executed(drawn))

    def _observed(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Single frames (B, ...). A goal may be missing where the policy also acts without one."""
        found = {}
        for key, name in self._names.items():
            x = batch.get(name)
            if isinstance(x, Tensor):
                # LeRobot has pictures in [0, 1], where ours are bytes.
                found[key] = (x * 255).round().to(torch.uint8) if is_image(key) and x.is_floating_point() else x
            elif not (self.policy.spec.goal_free and key.startswith("goal")):
                raise BurnishError(f"the policy observes {name!r}, but is given {sorted(map(str, batch))}")
        return found

    def _stacked(self, frame: dict[str, Tensor]) -> Obs:
        """With the frames before; the first of an episode stands for those that there were not."""
        history, begins, self._begins = self.policy.spec.history, self._begins, False
        if history == 1:
            return frame
        for key, x in frame.items():
            if stacked_by_history(key):
                before = x[:, None].expand(-1, history, *x.shape[1:]) if begins else self._frames[key]
                self._frames[key] = torch.cat([before[:, 1:], x[:, None]], 1)
        return {**frame, **self._frames}
