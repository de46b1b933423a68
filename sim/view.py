"""A world to look at while a policy acts in it: MuJoCo's own window where there is a screen, else films.

Both are ways to watch the same evaluation, so what is seen is what is counted.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..policies.core.errors import BurnishError
from ..policies.core.files import require_writable
from ..policies.core.ranges import check_ranges
from ..policies.core.scale import ScaledEnv
from ..policies.core.seed import derive
from ..policies.core.spec import ActionSpec
from ..policies.core.types import Controller, Obs, Step, VecEnv
from ..policies.core.wrapper import Rendered, pictures
from ..policies.measure.evaluate import Evaluation, evaluate
from .build import env_name


@dataclass
class ViewConfig:
    """Settings of `burnish view`: a world, a policy or an expert, and where films go."""

    env: Any = None  # world; two_mode by default; with a policy, the one that it was trained for
    expert: str | None = None  # level of the scripted expert of that world, clean by default
    policy: Any = None  # trained policy that acts instead of the expert: policy=checkpoint policy.path=...
    episodes: int = 3  # episodes that are played
    seed: int = 0  # seed of every random draw
    out: str | None = None  # a folder for one mp4 per episode; by default a window, or runs/view without a screen
    size: int = 384  # size of the films, in pixels; many Gymnasium environments have a size of their own

    def __post_init__(self) -> None:
        check_ranges(self, {"[16, 2048]": "size"})


def watch(
    raw: VecEnv, env: VecEnv, controller: Controller, config: ViewConfig, limits: ActionSpec | None = None
) -> int:
    """``env`` is the one world ``raw`` as the controller sees it, its actions in the world's units; ``limits`` are the
    actions that the controller's -1 and 1 stand for, if they are not those of the world."""
    if config.out is None and hasattr(raw, "physics") and _can_open_windows():
        return _in_a_window(raw, env, controller, config, limits)
    if not isinstance(raw, Rendered):
        raise BurnishError(f"{_name(raw)} draws no pictures, so there is nothing to look at; choose another env")
    raw.reset(seeds=_seeds(config)[:1])  # some environments draw nothing before that
    pictures(raw, [0], config.size)  # who cannot draw says so before anything is written
    folder = Path(config.out or "runs/view")
    require_writable(folder)
    seeds = _seeds(config)
    framed = _Framed(env, limits, config.size)
    result = evaluate(framed, controller, seeds, video=folder, video_seeds=seeds)
    for file in (path for seed in seeds for path in sorted(folder.glob(f"seed_{seed}*.mp4"))):
        sys.stdout.write(f"{file}\n")
    sys.stdout.write(_in_words(result))
    return 0


class _Framed(ScaledEnv):
    """A world whose pictures have a certain size."""

    def __init__(self, env: VecEnv, limits: ActionSpec | None, size: int) -> None:
        super().__init__(env, limits)
        self._size = size

    def render(self, size: int | None = None, rows: Sequence[int] | None = None) -> Tensor:
        return super().render(size or self._size, rows)


class _Closed(Exception):
    """The window was closed."""


class _Shown(ScaledEnv):
    """A world that is shown by ``viewer`` after each reset and step, as fast as it would run on a robot."""

    def __init__(self, env: VecEnv, limits: ActionSpec | None, viewer: Any) -> None:
        super().__init__(env, limits)
        self._viewer, self._due = viewer, time.monotonic()

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        obs = super().reset(mask, seeds)
        self._show()
        return obs

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = super().step(action, active)
        self._show()
        return step

    def _show(self) -> None:
        if not self._viewer.is_running():
            raise _Closed
        self._viewer.sync()
        # Late ticks are not made up for by fast ones.
        self._due = max(self._due + 1 / self.spec.control_hz, time.monotonic())
        time.sleep(self._due - time.monotonic() if self._due > time.monotonic() else 0)


def _in_a_window(raw: Any, env: VecEnv, controller: Controller, config: ViewConfig, limits: ActionSpec | None) -> int:
    import mujoco.viewer

    try:
        viewer = mujoco.viewer.launch_passive(raw.physics.model, raw.physics.data[0])
    except RuntimeError as error:
        raise BurnishError(f"the window cannot be opened ({error}); make films instead, with out=...") from error
    try:
        result = evaluate(_Shown(env, limits, viewer), controller, _seeds(config))
    except _Closed:
        return 0
    finally:
        viewer.close()
    sys.stdout.write(_in_words(result))
    return 0


def _can_open_windows() -> bool:
    """Asked before MuJoCo's viewer, which waits for ever where its thread finds no screen."""
    from mujoco.glfw import glfw

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bool(glfw.init())


def _name(raw: VecEnv) -> str:
    config = getattr(raw, "config", None)
    return type(raw).__name__ if config is None else env_name(config)


def _seeds(config: ViewConfig) -> list[int]:
    return [derive(config.seed, "view", i) for i in range(config.episodes)]


def _in_words(result: Evaluation) -> str:
    episodes = f"{len(result.seeds)} episodes, mean return {sum(result.returns) / len(result.seeds):.2f}"
    return f"{episodes}\n" if result.success is None else f"{episodes}, {sum(result.success)} successful\n"
