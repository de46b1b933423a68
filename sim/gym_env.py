"""Any Gymnasium environment (Towers et al. 2024, arXiv 2407.17032) as worlds of ours: N copies, one after another.

This is a door, not a fast lane: each copy is stepped from Python, at about the pace of Gymnasium's ``SyncVectorEnv``.
Our simulations are in `batch.py`. Observations are converted in `gym_observation.py`.

A configuration must never run code. Gymnasium imports a module if an id says "module:Env-v0", so such ids are refused,
and arguments are plain data. Packages that register their environments on import are tried only from ``PACKAGES``.

An environment that is a function of its seed and its actions, as Gymnasium asks, can also be saved: its state is the
seed of the episode and the actions so far, which are played again. The observation tells whether that was true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from numbers import Real
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ..policies.core import tree
from ..policies.core.errors import BurnishError
from ..policies.core.spec import ActionSpec, EnvSpec, require_bytes
from ..policies.core.types import Obs, Step
from .gym_observation import Layout
from .torch_world import Clock, restored

PACKAGES = ("gymnasium_robotics", "ale_py", "metaworld")
SUCCESS = ("success", "is_success")  # what environments call it in their info
COMPATIBILITY = ("GymV21Environment", "GymV26Environment")  # they take the name of a module among their arguments
LARGEST_PLAYED = 1 << 30  # bytes of the actions of all episodes under way, which are kept to save their state
OURS = {"id": "env.id", "max_episode_steps": "env.max_steps"}  # what `gymnasium.make` takes beside the arguments


@dataclass
class GymConfig:
    id: str = "Pendulum-v1"  # as registered with Gymnasium
    kwargs: Any = None  # plain data for its constructor; on the command line 'env.kwargs={render_mode: rgb_array}'
    max_steps: int | None = None  # by default the limit it is registered with
    control_hz: float | None = None  # by default 1 / dt where the environment has a dt, else its render_fps
    action_mode: str | None = None  # what the numbers mean; by default gym:<id>, which fits that environment alone

    def __post_init__(self) -> None:
        if ":" in self.id or self.id.startswith(COMPATIBILITY):
            raise BurnishError(
                f"env.id={self.id} would import a module by its name, and a configuration must not run code; "
                "import the module in Python and give the id alone"
            )
        if self.kwargs is not None and not (isinstance(self.kwargs, Mapping) and _is_plain(self.kwargs)):
            raise BurnishError(
                f"env.kwargs={self.kwargs!r} must be a mapping of plain data: names to numbers, strings, booleans, "
                "lists and mappings of these"
            )
        for name in set(self.kwargs or {}) & set(OURS):
            raise BurnishError(f"env.kwargs cannot set {name}, which has a place of its own; give {OURS[name]}")
        if (self.max_steps is not None and self.max_steps < 1) or (
            self.control_hz is not None and self.control_hz <= 0
        ):
            raise BurnishError("gym needs max_steps and control_hz above 0, where they are given")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


class GymEnv:
    """Rows of worlds that are not active keep their last observation, and are paid nothing."""

    def __init__(
        self,
        num_envs: int,
        config: GymConfig | None = None,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config = config or GymConfig()
        self.num_envs, self.device = num_envs, torch.device(device)
        self._clock = Clock(num_envs, seed)
        self._begun = torch.zeros(num_envs, dtype=torch.bool)
        self._worlds = [_make(config) for _ in range(num_envs)]
        first = self._worlds[0]
        self._box = _action_box(first.action_space, config.id)
        self._low, self._high = self._box.low.ravel(), self._box.high.ravel()
        self._layout = Layout(first.observation_space, config.id)
        action = ActionSpec(tuple(self._low.tolist()), tuple(self._high.tolist()))
        mode = config.action_mode or f"gym:{config.id}"
        self.spec = EnvSpec(self._layout.spec, action, _control_hz(first, config), mode, _max_steps(first, config))
        self._rows = self._layout.room(num_envs)
        require_bytes(
            4 * num_envs * self.spec.max_steps * action.dim, LARGEST_PLAYED,
            f"the actions of {num_envs} episodes of env.max_steps={self.spec.max_steps}",
        )  # fmt: skip
        self._played = np.zeros((num_envs, self.spec.max_steps, action.dim), np.float32)

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        mask = self._clock.begin(mask, seeds)
        self._begun = self._begun | mask
        self._played[mask.numpy()] = 0
        for i in mask.nonzero()[:, 0].tolist():
            self._restart(i)
        return self._observe()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        tree.check(action, f"{self.num_envs} {self.spec.action.dim}")
        given = action.detach().cpu().float().numpy()
        units = self._to_units(given)
        ticks = self._clock.tick.tolist()
        active = self._clock.advance(active)
        reward, (terminated, truncated, success) = np.zeros(self.num_envs), np.zeros((3, self.num_envs), dtype=bool)
        reports_success = False
        for i in active.nonzero()[:, 0].tolist():
            if not self._begun[i]:
                raise BurnishError(f"world {i} of {self.config.id} was never reset, so it cannot step; reset it first")
            if ticks[i] >= self.spec.max_steps:
                raise BurnishError(f"world {i} of {self.config.id} was stepped after its end; reset it first")
            self._played[i, ticks[i]] = given[i]
            reward[i], terminated[i], truncated[i], info = self._advance(i, units[i])
            for key in SUCCESS:
                if key in info:
                    success[i], reports_success = bool(info[key]), True
        facts = {"executed": units.astype(np.float32)}
        if reports_success:
            facts["success"] = success
        return Step(
            self._observe(),
            torch.from_numpy(reward).float().to(self.device),
            torch.from_numpy(terminated).to(self.device),
            torch.from_numpy(truncated & ~terminated).to(self.device),
            {key: torch.from_numpy(x).to(self.device) for key, x in facts.items()},
        )

    def render(self, size: int = 128) -> Tensor:
        """(N, H, W, 3) uint8. How large, the environment decides: many take ``width`` and ``height`` as arguments."""
        if self._worlds[0].render_mode != "rgb_array":
            raise BurnishError(
                f"{self.config.id} was made without pictures; make it with 'env.kwargs={{render_mode: rgb_array}}'"
            )
        try:
            frames = [np.asarray(world.render(), np.uint8) for world in self._worlds]
        except (gymnasium.error.Error, ImportError) as error:
            raise BurnishError(f"{self.config.id} cannot be rendered: {error}") from error
        return torch.from_numpy(np.stack(frames)).to(self.device)

    def state_dict(self) -> dict[str, Any]:
        if self._worlds[0].spec is None or self._worlds[0].spec.nondeterministic:
            raise BurnishError(
                f"{self.config.id} is registered as not deterministic, so its state cannot be saved: what its seed and "
                "actions led to, they need not lead to again"
            )
        longest = int(self._clock.tick.max())
        return {
            **self._clock.state_dict(),
            "begun": self._begun.clone(),
            "played": torch.from_numpy(self._played[:, :longest].copy()),
            **{f"obs.{key}": torch.from_numpy(x.copy()) for key, x in self._rows.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The episodes under way are played again, and must lead to the observations that were saved."""
        seen = restored(self._tensors(), state, "obs.")
        self._clock.load_state_dict(state)
        self._begun = restored({"begun": self._begun}, state)["begun"]
        longest = int(self._clock.tick.max())
        room = torch.from_numpy(self._played[:, :longest])
        played = restored({"played": room}, state)["played"].numpy()
        self._played[:] = 0
        self._played[:, :longest] = played
        for i in self._begun.nonzero()[:, 0].tolist():
            self._restart(i)
            for units in self._to_units(self._played[i, : int(self._clock.tick[i])]):
                self._advance(i, units)
        if not all(np.array_equal(x, seen[key].numpy(), equal_nan=True) for key, x in self._rows.items()):
            raise BurnishError(
                f"the saved state of {self.config.id} cannot be restored: the same seed and actions lead elsewhere, "
                "because the environment is not deterministic or another version was installed"
            )

    def _restart(self, i: int) -> None:
        obs, _ = self._worlds[i].reset(seed=int(self._clock.seeds[i]))
        self._layout.write(obs, self._rows, i)

    def _advance(self, i: int, units: np.ndarray) -> tuple[float, bool, bool, Mapping[str, Any]]:
        obs, reward, terminated, truncated, info = self._worlds[i].step(units.reshape(self._box.shape))
        self._layout.write(obs, self._rows, i)
        return float(reward), bool(terminated), bool(truncated), info

    def _to_units(self, action: np.ndarray) -> np.ndarray:
        """(..., A), clipped, of the type that the environment takes."""
        return np.clip(action.astype(self._box.dtype), self._low, self._high)

    def _tensors(self) -> Obs:
        return {key: torch.from_numpy(x) for key, x in self._rows.items()}

    def _observe(self) -> Obs:
        return {key: x.clone().to(self.device) for key, x in self._tensors().items()}


def _make(config: GymConfig) -> gymnasium.Env:
    """Everything that can go wrong in an environment's constructor, as one sentence."""
    try:
        if config.id not in gymnasium.registry:
            for package in PACKAGES:
                if find_spec(package) is not None:
                    import_module(package)
        # Gymnasium's checker would test in every step what is tested here, and warn of what is none of our business.
        kwargs = {"disable_env_checker": True, **(config.kwargs or {})}
        return gymnasium.make(config.id, max_episode_steps=config.max_steps, **kwargs)
    except (
        gymnasium.error.Error,
        ImportError,
        OSError,
        TypeError,
        ValueError,
        AttributeError,
        AssertionError,
    ) as error:
        given = f" with env.kwargs={config.kwargs}" if config.kwargs else ""
        raise BurnishError(
            f"env.id={config.id} cannot be made{given} ({type(error).__name__}: {str(error).rstrip('.')}); correct it, "
            "install what is missing, or import the package that registers it"
        ) from error


def _action_box(space: spaces.Space, name: str) -> spaces.Box:
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        kind = f"Box of {space.dtype}" if isinstance(space, spaces.Box) else type(space).__name__
        raise BurnishError(
            f"env.id={name} takes actions of kind {kind}, but policies here act in real numbers; choose its continuous "
            "version, if there is one (some take 'env.kwargs={continuous: true}')"
        )
    if not space.is_bounded("both"):
        raise BurnishError(
            f"env.id={name} takes actions without limits, but policies here act between limits; register a version "
            "whose Box has finite limits"
        )
    return space


def _control_hz(world: gymnasium.Env, config: GymConfig) -> float:
    dt, fps = getattr(world.unwrapped, "dt", None), world.metadata.get("render_fps")
    if config.control_hz is not None:
        return config.control_hz
    if isinstance(dt, Real) and float(dt) > 0:
        return 1 / float(dt)
    if isinstance(fps, Real) and float(fps) > 0:
        return float(fps)
    raise BurnishError(f"env.id={config.id} does not say how often it is commanded; give env.control_hz")


def _max_steps(world: gymnasium.Env, config: GymConfig) -> int:
    limit = config.max_steps or (world.spec.max_episode_steps if world.spec is not None else None)
    if limit is None:
        raise BurnishError(f"env.id={config.id} is registered without a limit of time; give env.max_steps")
    return int(limit)
