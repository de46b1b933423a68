"""Environments that do what is allowed, or nearly: for tests of `sim/external`."""

from __future__ import annotations

import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Passing(gymnasium.Env):
    """It succeeds in one tick, ``at``, and goes on."""

    observation_space = spaces.Box(-9, 9, (1,), np.float64)
    action_space = spaces.Box(np.float32([-2, -10]), np.float32([2, 10]))

    def __init__(self, at: int = 1) -> None:
        self.at = at

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.tick = 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.tick += 1
        return self.seen(), 0.0, False, False, {"success": self.tick == self.at}

    def seen(self) -> Any:
        return np.zeros(1)


class Rounded(Passing):
    """Declares bytes, and shows them divided by 255."""

    observation_space = spaces.Box(0, 255, (1,), np.uint8)

    def seen(self) -> Any:
        return np.array([0.7])


class Wrapped(Rounded):
    """Shows an integer that is no byte."""

    def seen(self) -> Any:
        return np.array([300])


class Twins(Passing):
    """Two keys become one name."""

    observation_space = spaces.Dict({"a": spaces.Dict({"b": spaces.Box(-9, 9, (1,))}), "a.b": spaces.Box(-9, 9, (1,))})


class One:
    """An expert that acts by one number, whatever the world takes."""

    def __init__(self, env: Any) -> None: ...

    def reset(self, obs: Any, info: Any) -> None: ...

    def act(self, obs: Any, info: Any) -> Any:
        return np.array([0.5])


class Looking(One):
    """An expert that acts by what it sees first."""

    def act(self, obs: Any, info: Any) -> Any:
        return obs[:1]


class Older(Passing):
    """Draws from the generator that NumPy shares among all, which it seeds itself, and only after its first steps."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        np.random.seed(seed)
        return super().reset()

    def seen(self) -> Any:
        return np.random.uniform(size=1) if self.tick > 2 else np.zeros(1)


class Starting(Passing):
    """Starts a process, and succeeds where that says that it failed."""

    def step(self, action: Any) -> Any:
        obs, *rest, _ = super().step(action)
        return obs, *rest, {"success": subprocess.run(["false"], check=False).returncode == 1}


class Strange(Passing):
    """Has attributes of our names that mean something else, and a generator of another kind."""

    action_mode, notes = object(), 3

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.Generator(np.random.Philox())

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, self.rng.random(), *rest


class Unlucky(Passing):
    """Draws when it is made, as Meta-World draws its goals."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = np.random.uniform(size=1)

    def seen(self) -> Any:
        return self.drawn


class Late(Passing):
    """Tells of success in its last step alone, and of the tick of its simulator."""

    control_hz, dt = 10, 0.001

    def step(self, action: Any) -> Any:
        *seen, info = super().step(action)
        return *seen, info if self.tick == self.at else {}


class Huge(Passing):
    def seen(self) -> Any:
        return np.array([1e39 * self.tick])


class Refusing(Passing):
    def __init__(self) -> None:
        raise SystemExit(3)


class Silent(Passing):
    """Cannot be made, and does not say why."""

    def __init__(self) -> None:
        raise AssertionError


class Ancient:
    """An environment of the old Gym."""

    observation_space, action_space, metadata = Passing.observation_space, Passing.action_space, {"render.modes": []}

    def __init__(self) -> None:
        self._max_episode_steps = 7
        self.unwrapped = self

    def seed(self, seed: Any = None) -> Any:
        self.rng = np.random.RandomState(seed)

    def reset(self) -> Any:
        return self.rng.uniform(size=1)

    def step(self, action: Any) -> Any:
        return np.ones(1), 1.0, True, {"TimeLimit.truncated": True}

    def render(self, mode: str = "human") -> Any:
        return np.zeros((4, 4, 3), np.uint8) if mode == "rgb_array" else None

    def close(self) -> None: ...


class Leaving(Passing):
    """Leaves a file when it is closed, and warns of that."""

    def __init__(self, file: str) -> None:
        super().__init__()
        warnings.warn("it will leave a file", stacklevel=1)
        self.file = Path(file)

    def close(self) -> None:
        self.file.touch()


gymnasium.register("Odd-v0", entry_point="odd_worlds:Passing", max_episode_steps=11)


class Raising(Passing):
    """Fails in its step ``fails`` of every episode that begins with an odd seed, or ``shows`` no number there."""

    def __init__(self, fails: int = 3, shows: bool = False) -> None:
        super().__init__(99)
        self.fails, self.shows = fails, shows

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.odd = seed % 2 == 1
        return super().reset()

    def step(self, action: Any) -> Any:
        if self.odd and self.tick + 1 == self.fails and not self.shows:
            raise FloatingPointError("the solver diverged")
        super().step(action)
        number = np.nan if self.odd and self.tick == self.fails and self.shows else float(self.tick)
        return np.array([number]), float(self.tick), False, False, {"success": False}


class Unwilling(Passing):
    """Fails in so many resets on odd seeds; with a ``file`` any process is willing once that exists."""

    def __init__(self, unwilling: int, file: str | None = None) -> None:
        super().__init__()
        self.unwilling, self.file = unwilling, Path(file) if file else None

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed % 2 == 1 and self.unwilling > 0 and not (self.file and self.file.exists()):
            self.unwilling -= 1
            if self.file and not self.unwilling:
                self.file.touch()
            raise RuntimeError("the camera was not found")
        return super().reset()


class Deadly(Passing):
    """Its third step ends its process."""

    def step(self, action: Any) -> Any:
        if self.tick == 2:
            os._exit(3)
        return super().step(action)


class Flaky(Raising):
    """Fails in the third step of every second episode."""

    begun = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        found = super().reset(seed=seed)
        self.begun += 1
        self.odd = self.begun % 2 == 1
        return found
