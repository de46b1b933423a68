"""Tasks of the DeepMind Control Suite (Tassa et al. 2018, arXiv 1801.00690) as environments: ``env=dm_control``.

A step holds its action for ``repeat`` ticks of the task and is paid their sum. The parts of an observation stay apart,
under the names that the suite gives them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


class ControlSuite(gymnasium.Env):
    """``task`` is DOMAIN-NAME, such as cartpole-swingup or ball_in_cup-catch."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, task: str = "walker-walk", repeat: int = 2, render_mode: str | None = None) -> None:
        from dm_control import suite

        domain, _, name = task.partition("-")
        if (domain, name) not in suite.ALL_TASKS or repeat < 1:
            known = ", ".join(f"{a}-{b}" for a, b in suite.ALL_TASKS)
            raise ValueError(f"task={task}, repeat={repeat}: a task is one of {known}, and is repeated once at least")
        self._random, self._repeat, self.render_mode = np.random.RandomState(0), repeat, render_mode
        self._env = suite.load(domain, name, task_kwargs={"random": self._random})
        self.dt = repeat * self._env.control_timestep()
        action = self._env.action_spec()
        self.action_space = spaces.Box(action.minimum.astype(np.float32), action.maximum.astype(np.float32))
        shapes = {key: (int(np.prod(x.shape)),) for key, x in self._env.observation_spec().items()}
        self.observation_space = spaces.Dict(
            {key: spaces.Box(-np.inf, np.inf, shape, np.float32) for key, shape in shapes.items()}
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._random.seed(seed)
        return self._seen(self._env.reset()), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        reward = 0.0
        for _ in range(self._repeat):
            found = self._env.step(action)
            reward += found.reward
            if found.last():
                break
        terminated = found.last() and found.discount == 0
        return self._seen(found), reward, terminated, found.last() and not terminated, {}

    def render(self) -> np.ndarray:
        return self._env.physics.render(height=240, width=320, camera_id=0)

    def _seen(self, found: Any) -> dict[str, np.ndarray]:
        return {key: np.ravel(x).astype(np.float32) for key, x in found.observation.items()}
