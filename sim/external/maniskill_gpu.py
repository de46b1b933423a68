"""ManiSkill's batched simulation as worlds of ours: N worlds on one GPU, whose tensors never leave it.

ManiSkill has two habits that worlds of ours may not have, and both are kept from the caller here.

* It resets a world whose episode has ended by itself, if asked to. It is not asked.
* Of the seeds of a reset most tasks use the first alone, for all worlds that are reset together: the numbers of a world
  then depend on its neighbours, and worlds are not paired. So each world is reset in a call of its own, with its seed
  in the first place; ``seed_each=False`` resets all at once. Shapes that are drawn when a scene is built (the pegs of
  PegInsertionSide) belong to the number of a world on a GPU, not to its seed.

**Rows that are not active.** One simulation moves all worlds at once. Such a row keeps its last observation, its
clock and its seed, but its physics goes on under a command that holds the robot still; a step in which no row is active
moves nothing. A row that has missed a step cannot go on where it was, so it must be reset before it acts again, as a
row whose episode has ended must anyway; anything else is refused.

Two things are as ManiSkill gives them. Contacts are those of the last step, so the first observation of an episode may
show a grasp of the one before. And physics on a GPU need not give equal numbers twice.

On a CPU there can be one world; so `maniskill_world.py` and this file can be compared there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...policies.core import tree
from ...policies.core.clock import Clock
from ...policies.core.errors import BurnishError
from ...policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from ...policies.core.types import Obs, Step
from .maniskill import ManiSkillConfig
from .maniskill_world import begin, box_of, read, registered_limit, simulate
from .settings import Reward

SEEDS = (1 << 31) - 1  # seeds here have 63 bits, NumPy's 32


class ManiSkillEnv:
    """``simulation`` is for tests; by default it is made of ``config``. A state does not hold the episodes under way:
    ManiSkill restores positions and speeds, but not the contacts that its physics remembers. With env.backend=cpu and
    worker processes they go on."""

    continues = False

    def __init__(
        self,
        num_envs: int,
        config: ManiSkillConfig | None = None,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        simulation: Any = None,
    ) -> None:
        self.config = config = config or ManiSkillConfig()
        gpu = config.on_gpu()
        if num_envs > 1 and not gpu and simulation is None:
            raise BurnishError(
                f"ManiSkill simulates one world per process on a CPU, but {num_envs} were asked for; play them in a "
                "pool of processes, or set env.backend=gpu"
            )
        if gpu and simulation is None and not torch.cuda.is_available():
            raise BurnishError("env.backend=gpu needs a CUDA device, and torch finds none; set env.backend=cpu")
        registered = None if config.max_steps else registered_limit(config)
        self._simulation = simulation or simulate(config, num_envs, gpu)
        self.num_envs, self.device = num_envs, torch.device(device or self._simulation.device)
        if num_envs > 1 and getattr(self._simulation, "reconfiguration_freq", 0):
            raise BurnishError(
                f"env.id={config.id} builds its scene anew in every episode, which a batch of worlds cannot do one by "
                "one; play it with env.backend=cpu"
            )
        self._own = torch.device(self._simulation.device)  # of the simulation; ours may be another
        self._clock = Clock(num_envs, seed, self._own)
        box = box_of(config, self._simulation)
        self._low, self._high = (torch.as_tensor(x, device=self._own) for x in (box.low, box.high))
        # A command of differences or speeds holds a robot still at zero, one of positions where it is repeated.
        mode = str(self._simulation.control_mode)
        self._rests_at_zero = "delta" in mode or ("vel" in mode and "pos" not in mode)
        self._command = ((self._low + self._high) / 2).repeat(num_envs, 1)
        self._ready = torch.zeros(num_envs, dtype=torch.bool, device=self._own)
        self._succeeded = torch.zeros_like(self._ready)
        self._seen = self._read(self._simulation.get_obs())
        shapes = {key: tuple(x.shape[1:]) for key, x in self._seen.items()}
        action = ActionSpec(tuple(box.low.tolist()), tuple(box.high.tolist()))
        hz, limit = float(self._simulation.control_freq), config.limit(registered)
        self.spec = EnvSpec(ObsSpec(shapes), action, hz, mode, limit)
        self._about = config.about_limit(registered)

    def describe(self) -> str:
        """For the first line of a run."""
        where = f"{self.num_envs} worlds in one simulation on {self._own}, {self.spec.control_hz:g} Hz"
        return f"{self._about}; {where}, success by {self.success_from()}"

    def success_from(self) -> str:
        """The key by which a step says that it is a success."""
        return "success in its info"

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        mask = self._clock.begin(mask, seeds)
        rows = mask.nonzero()[:, 0]
        each = self.config.seed_each and self.num_envs > 1
        for together in rows.split(1 if each else self.num_envs):
            seen = self._begin(together)
        if len(rows):
            self._seen = tree.where(mask, self._read(seen), self._seen)  # the last call has seen all of them
        self._ready, self._succeeded = self._ready | mask, self._succeeded & ~mask
        return self._given()

    def _begin(self, rows: Tensor) -> Any:
        """The numbers of an episode come from the first seed, for all of ``rows``; some tasks read that of each row."""
        seeds = (self._clock.seeds & SEEDS).tolist()
        seeds[0] = seeds[int(rows[0])]
        with torch.no_grad():
            if self.num_envs == 1:
                return begin(self._simulation, seeds[0], self.config.rebuild)
            return self._simulation.reset(seed=seeds, options={"env_idx": rows})[0]

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        tree.check(action, f"{self.num_envs} {self.spec.action.dim}")
        active = None if active is None else active.to(self._own)
        self._refuse_what_is_not_ready(active)
        active = self._clock.advance(active)
        rows = active[:, None]
        held = torch.zeros_like(self._command) if self._rests_at_zero else self._command
        asked = action.detach().to(self._own, torch.float32).clamp(self._low, self._high)
        self._command = torch.where(rows, asked, held)
        never = torch.zeros_like(active)
        if not bool(active.any()):
            facts = {"executed": self._command, "success": never}
            return self._step(torch.zeros(self.num_envs, device=self._own), never, never, facts)
        with torch.no_grad():
            seen, reward, _, _, info = self._simulation.step(self._command)
        self._seen = tree.where(active, self._read(seen), self._seen)
        terminated = info["fail"].bool() if "fail" in info else never
        facts = {"executed": self._command}
        if "success" in info:
            facts["success"] = info["success"].bool() & active
            if self.config.end_at_success:
                terminated = terminated | facts["success"]
        if self.config.reward is Reward.until_success:
            reward = self._until_success(facts)
        terminated = terminated & active
        truncated = active & (self._clock.tick >= self.spec.max_steps) & ~terminated
        self._ready = active & ~(terminated | truncated)
        return self._step(torch.where(active, reward.float(), 0.0), terminated, truncated, facts)

    def _until_success(self, facts: dict[str, Tensor]) -> Tensor:
        if "success" not in facts:
            raise BurnishError(f"env.reward=until_success needs to know of success, and {self.config.id} reports none")
        self._succeeded = self._succeeded | facts["success"]
        return -(~self._succeeded).float()

    def _step(self, reward: Tensor, terminated: Tensor, truncated: Tensor, facts: dict[str, Tensor]) -> Step:
        info = {key: x.to(self.device) for key, x in facts.items()}
        ends = terminated.to(self.device), truncated.to(self.device)
        return Step(self._given(), reward.to(self.device), *ends, info)

    def _refuse_what_is_not_ready(self, active: Tensor | None) -> None:
        late = ~self._ready if active is None else active & ~self._ready
        if bool(late.any()):
            raise BurnishError(
                f"world {int(late.nonzero()[0])} of {self.config.id} was never reset, has ended, or stood by while "
                "others moved; reset it before it acts"
            )

    def render(self, size: int = 128) -> Tensor:
        """(N, H, W, 3) uint8. How large, the task decides."""
        if not self.config.film:
            raise BurnishError(f"{self.config.id} was made without pictures for films; set env.film=true")
        return self._simulation.render().to(self.device)

    def state_dict(self) -> dict[str, Any]:
        return self._clock.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._clock.load_state_dict(state)
        self._ready[:] = False

    def close(self) -> None:
        self._simulation.close()

    def _read(self, seen: Any) -> Obs:
        """In memory of its own: the next step may draw into that of the simulation."""
        return {
            "state" if key == "state" else f"image.{key}": (x if x.dtype != torch.uint8 else x.movedim(3, 1)).clone()
            for key, x in read(self.config, seen).items()
        }

    def _given(self) -> Obs:
        return {key: x.to(self.device) for key, x in self._seen.items()}
