"""BatchedMujoco: N worlds of one MuJoCo task as a `VecEnv`; no subprocess, no pipe, no Python per world but the call.

A task says what is in the world and what counts (`Task`), as array operations over (N, ...); this file gives it time:
seeds, episodes, latency, randomised models, pictures, truncation, saved state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import mujoco
import numpy as np
import torch
from torch import Tensor

from ..policies.core import tree
from ..policies.core.clock import Clock, restored
from ..policies.core.errors import BurnishError
from ..policies.core.seed import derive as derive_seed
from ..policies.core.spec import ObsSpec
from ..policies.core.types import KnownDynamics, KnownFailure, KnownOutcome, Obs, ParametricDynamics, Step
from .guard import Guarding, Limits
from .physics import Array, Physics, Rows
from .pixels import Pixels, film_camera
from .randomize import SCALED_FIELDS, randomize, scaled
from .task import Draw, PixelConfig, Task, Verdict


class Shaper(Protocol):
    """A stage between a task and its actuators: set-points ``parts`` times per tick, instead of one that is held.
    It belongs to the worlds, so its state is saved with them."""

    parts: int
    changed: Array  # (N,) in how many parts of the episode so far a set-point was not what was asked

    def begin(self, ctrl: Array, rows: Rows) -> None:
        """The worlds ``rows`` begin at rest at the set-points ``ctrl`` (N, nu)."""
        ...

    def shape(self, ctrl: Array, rows: Rows | None) -> Array:
        """(N, nu) to be held for a part of a tick; the worlds that are not in ``rows`` stay as they are."""
        ...

    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class BatchedMujoco:
    """``seed`` starts the sequence of episodes of each world, where ``reset`` is not given seeds."""

    def __init__(
        self,
        task: Task,
        num_envs: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        threads: int | None = None,
    ) -> None:
        self.task: Any = task  # whatever its quantities are called; what is asked of it here is `Task`
        self.num_envs, self.device = num_envs, torch.device(device)
        self.version, self.config = task.version, task.config
        model = mujoco.MjModel.from_xml_string(task.mjcf())
        if not task.autoreset:
            model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
        self.physics = Physics(model, num_envs, threads)
        task.bind(self.physics)
        self.spec = task.spec
        self.state_names: Sequence[str] | None = getattr(task, "state_names", None)
        self.action_names: Sequence[str] | None = getattr(task, "action_names", None)
        self._pixels = self._film = None
        if task.pixels is not None:
            self._pixels = Pixels(self.physics, task.pixels)
            seen = ObsSpec({**task.spec.obs.shapes, **self._pixels.shapes})
            self.spec = replace(task.spec, obs=seen, pixels="lavish" if task.pixels.lavish else "plain")
        tick_s = task.frame_skip * model.opt.timestep
        if task.randomize is not None and task.randomize.latency_s > tick_s * (1 + 1e-9):
            raise BurnishError(
                f"randomize.latency_s={task.randomize.latency_s:g} is longer than a control tick of {tick_s:g} s, and "
                "an action cannot be later than the next one; lower it, or control more slowly"
            )
        self._derive = tuple(getattr(mujoco, name) for name in task.derive)
        # Worlds are on the CPU wherever the learner is, and so are their clocks.
        self._clock = Clock(num_envs, seed)
        self._low, self._high = (np.array(x) for x in (task.spec.action.low, task.spec.action.high))
        self._shape = (num_envs, len(self._low))
        self.shaper: Shaper | None = None
        self._late = np.zeros(num_envs, np.int64)  # physics steps until an action reaches the actuators
        self._last_ctrl = np.zeros((num_envs, model.nu))
        if task.guard is not None and task.guard.any():
            self.guard(task.guard.limits(model.actuator_ctrlrange))

    @property
    def instructions(self) -> list[str] | None:
        """The instruction of each world, where the task tells its episodes apart by words."""
        return getattr(self.task, "instructions", None)

    def guard(self, limits: Limits) -> None:
        """From now on set-points keep ``limits``, whatever is asked, and ``info["guarded"]`` says in how many parts of
        the episode so far they are not what was asked."""
        task, nu = self.task, self.physics.model.nu
        if task.randomize is not None and task.randomize.latency_s > 0:
            raise BurnishError("a guard and late actions cannot be had at once; set randomize.latency_s=0")
        if len(limits.lower) != nu:
            raise BurnishError(f"limits of {len(limits.lower)} actuators for a world of {nu}")
        self.shaper = Guarding(limits, self.num_envs, task.frame_skip, 1 / self.spec.control_hz)
        self.shaper.begin(self._last_ctrl, np.arange(self.num_envs))

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        mask = self._clock.begin(None if mask is None else mask.cpu(), seeds)
        rows = mask.nonzero()[:, 0].numpy()
        if len(rows):
            self._randomize(rows)
            self.physics.reset(rows)
            self.task.begin(rows, Draw(self._clock))
            self.physics.forward(rows, self._derive)
            self.task.settle(rows)
            self._last_ctrl[rows] = self.physics.ctrl()[rows]
            if self.shaper is not None:
                self.shaper.begin(self._last_ctrl, rows)
        return self.observe(rows)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        if action.shape != self._shape:
            tree.check(action, "{} {}".format(*self._shape))  # says what is wrong with it
        ticking = self._clock.advance(None if active is None else active.cpu())
        rows = None if active is None else ticking.nonzero()[:, 0].numpy()
        wanted = action.detach().cpu().numpy().astype(np.float64)
        executed = np.minimum(np.maximum(wanted, self._low), self._high)
        ctrl = self.task.control(executed, rows)
        self._advance(ctrl, rows)
        verdict = self._judge(executed, ticking if active is not None else None)
        truncated = (self._clock.tick.numpy() >= self.spec.max_steps) & ~verdict.terminated
        info = {key: self._tensor(x) for key, x in verdict.info.items()}
        if verdict.success is not None:
            info["success"] = self._tensor(verdict.success)
        info["executed"] = self._tensor(executed)
        if self.shaper is not None:
            info["guarded"] = self._tensor(self.shaper.changed.copy())
        reward, terminated, truncated = (self._tensor(x) for x in (verdict.reward, verdict.terminated, truncated))
        return Step(self.observe(rows), reward, terminated, truncated, info)

    @property
    def known_outcome(self) -> KnownOutcome | None:
        judge = getattr(self.task, "known_outcome", None)
        if judge is None or "state" not in self.spec.obs.shapes or self._pixels is not None:
            return None

        def known(before: Obs, after: Obs) -> tuple[Tensor, Tensor, Tensor]:
            states = (x["state"].cpu().numpy().astype(np.float64) for x in (before, after))
            reward, success, failure = map(self._tensor, judge(*states))
            return reward, success, failure

        return known

    @property
    def known_failure(self) -> KnownFailure | None:
        failed = getattr(self.task, "known_failure", None)
        if failed is None or not self.task.shows_all() or self._pixels is not None:
            return None
        return lambda obs: self._tensor(failed(obs["state"].cpu().numpy().astype(np.float64)))

    @property
    def known_dynamics(self) -> KnownDynamics | None:
        """Of worlds that are not played: their states are replaced."""
        return self._dynamics({})

    @property
    def parametric_dynamics(self) -> ParametricDynamics | None:
        """Of worlds that are not played, and not randomised: their states and models are replaced."""
        if self._dynamics({}) is None or (self.task.randomize is not None and self.task.randomize.any()):
            return None

        def dynamics(factors: Mapping[str, float]) -> KnownDynamics:
            known = self._dynamics(factors)
            assert known is not None, "was asked before"
            return known

        return dynamics

    def _dynamics(self, factors: Mapping[str, float]) -> KnownDynamics | None:
        place = getattr(self.task, "place_at", None)
        if place is None or not self.task.shows_all() or self._pixels is not None or self.shaper is not None:
            return None

        def known(obs: Obs, action: Tensor) -> Obs:
            found = []
            for i in range(self.num_envs) if factors else ():
                scaled(self.physics.own_model(i, SCALED_FIELDS), factors, self.physics.data[i])
            for state, wanted in zip(obs["state"].split(self.num_envs), action.split(self.num_envs), strict=True):
                rows = np.arange(len(state))
                given, asked = np.zeros((self.num_envs, state.shape[1])), np.zeros(self._shape)
                given[rows], asked[rows] = state.cpu().numpy(), wanted.detach().cpu().numpy()
                self.physics.reset(rows)
                place(given, rows)
                ctrl = self.task.control(asked.clip(self._low, self._high), rows)
                self.physics.step(ctrl, self.task.frame_skip, rows, self._derive)
                found.append(self._tensor(self.task.observe()["state"][rows]))
            for i in range(self.num_envs) if factors else ():
                scaled(self.physics.own_model(i, SCALED_FIELDS), {}, self.physics.data[i])
            return {**obs, "state": torch.cat(found)}

        return known

    def _judge(self, executed: Array, ticking: Tensor | None) -> Verdict:
        """All worlds are judged, but only those that ticked remember it."""
        if ticking is None:
            return self.task.judge(executed)
        idle = (~ticking).nonzero()[:, 0].numpy()
        kept = {key: x[idle] for key, x in self.task.memory.items()}
        verdict = self.task.judge(executed)
        for key, x in kept.items():
            self.task.memory[key][idle] = x
        return verdict

    def _advance(self, ctrl: Array, rows: Rows | None) -> None:
        """One control tick. An action that is late by k physics steps lets the one before it act so much longer."""
        skip = self.task.frame_skip
        if self.shaper is not None:
            self._advance_shaped(self.shaper, ctrl, rows)
        elif self._late.any():
            self.physics.step(self._last_ctrl, self._late, rows)
            self.physics.step(ctrl, skip - self._late, rows, self._derive)
        else:
            self.physics.step(ctrl, skip, rows, self._derive)
        if rows is None:
            self._last_ctrl[:] = ctrl
        else:
            self._last_ctrl[rows] = ctrl[rows]

    def _advance_shaped(self, shaper: Shaper, ctrl: Array, rows: Rows | None) -> None:
        """A tick in parts, each with the set-points that the shaper makes of ``ctrl``: of what it was asked before, not
        of what physics made of that, so all of them are known when the tick begins."""
        shaped = [shaper.shape(ctrl, rows) for _ in range(shaper.parts)]
        self.physics.play(shaped, self.task.frame_skip // shaper.parts, rows, self._derive)

    def _randomize(self, rows: Rows) -> None:
        config = self.task.randomize
        if config is None or not config.any():
            return
        fields, step_s = config.changed(), self.physics.model.opt.timestep
        seeds = self._clock.seeds
        for i in rows.tolist():
            model = self.physics.own_model(i, fields) if fields else self.physics.model  # latency needs no model
            generator = np.random.default_rng(derive_seed(int(seeds[i]), "randomize"))
            late_s = randomize(model, config, generator, self.physics.data[i])
            self._late[i] = round(late_s / step_s)

    def observe(self, rows: Rows | None = None) -> Obs:
        """The present observation; pictures of worlds outside ``rows`` are those of the last time."""
        obs = {key: self._tensor(x) for key, x in self.task.observe().items()}
        if self._pixels is not None:
            obs |= {key: torch.from_numpy(x).to(self.device) for key, x in self._pixels.draw(rows).items()}
        return obs

    def _tensor(self, x: np.ndarray) -> Tensor:
        """Memory is shared with NumPy, but for the cast to float32."""
        x = x.astype(np.float32) if x.dtype == np.float64 else x
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.device)

    def render(self, size: int = 256, rows: Sequence[int] | None = None) -> Tensor:
        """(N, size, size, 3) uint8, or of the worlds ``rows`` alone: for films, so with shadows and smooth edges."""
        if self._film is None or self._film.size != size:
            self._film = Pixels(self.physics, PixelConfig((film_camera(self.physics.model),), size, lavish=True))
        chosen = np.arange(self.num_envs) if rows is None else np.asarray(rows, np.int64)
        (frames,) = self._film.draw(chosen).values()
        return torch.from_numpy(frames[chosen].transpose(0, 2, 3, 1)).to(self.device)

    @property
    def pictures_of(self) -> Callable[[Obs], Tensor] | None:
        """The world 0 in states that it shows, one after the other; all worlds are as before."""
        place = getattr(self.task, "place_at", None)
        if place is None or not self.task.shows_all():
            return None

        def drawn(obs: Obs) -> Tensor:
            kept, first, found = self.physics.state(), np.zeros(1, np.int64), []
            for state in obs["state"].cpu().numpy():
                place(np.tile(state, (self.num_envs, 1)), first)
                found.append(self.render(128, [0]))
            self.physics.restore(kept, self._derive)
            return torch.cat(found)

        return drawn

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._clock.state_dict(),
            "physics": torch.from_numpy(self.physics.state()),
            "last_ctrl": torch.from_numpy(self._last_ctrl.copy()),
            **{f"task.{key}": torch.from_numpy(x.copy()) for key, x in self.task.memory.items()},
            **({} if self.shaper is None else {f"shaper.{key}": x for key, x in self.shaper.state_dict().items()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("physics") is None or state["physics"].shape != self.physics.state().shape:
            raise BurnishError("the saved state is not one of this world: it has another number or size of worlds")
        if self.shaper is None and any(key.startswith("shaper.") for key in state):
            raise BurnishError("the saved state is one of guarded worlds, and these have no guard; set env.guard")
        self._clock.load_state_dict(state)
        self._randomize(np.arange(self.num_envs))  # a function of the seeds, so it need not be saved
        self.physics.restore(state["physics"].numpy(), self._derive)
        mine = {key: torch.from_numpy(x) for key, x in self.task.memory.items()}
        for key, x in restored(mine, state, "task.").items():
            self.task.memory[key][...] = x.numpy()
        self._last_ctrl[:] = restored({"last_ctrl": torch.from_numpy(self._last_ctrl)}, state)["last_ctrl"].numpy()
        if self.shaper is not None:
            self.shaper.load_state_dict(restored(self.shaper.state_dict(), state, "shaper."))
        if self._pixels is not None:
            self._pixels.draw(None)
