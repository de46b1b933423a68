"""Our worlds as others want to see them: ``as_gymnasium``, ``as_gymnasium_vector``, ``as_sb3``.

Ours never reset themselves. Gymnasium's vector environments and Stable-Baselines3 (SB3) expect worlds that do, so the
latter two faces reset a world in the step in which it ends and hand out, beside the first observation of the new
episode, the one that the action led to. That is what a decision of ours is (``obs`` and ``next_obs`` of an
``Outcome``), so both faces stand on ``ChunkEnv`` with chunks of one action, and on ``BaseEnv`` as it is. For Gymnasium
this is ``AutoresetMode.SAME_STEP``. Its other mode answers an end with one step that ignores its action, and a learner
that does not know stores that step as an experience; ``BaseEnv`` could not offer it at all.

Actions are in the units of the environment handed in: [-1, 1] behind ``ScaledEnv`` and in the views. Observations are
one Box where ``state`` is all there is, else a Dict whose keys have an underscore for our dot (``image_top``), because
SB3 names modules after them. SB3 discounts every decision alike: behind ``BaseEnv`` choose its gamma per chunk.

Gymnasium and SB3 are imported when a face is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .core.chunk import ChunkEnv
from .core.errors import BurnishError
from .core.seed import derive
from .core.spec import EnvSpec, ObsSpec, dtype_of
from .core.types import Obs, VecEnv
from .core.views import BaseEnv
from .core.wrapper import Rendered, Wrapper

if TYPE_CHECKING:
    from gymnasium import Env, Space
    from gymnasium.vector import VectorEnv
    from stable_baselines3.common.vec_env import VecEnv as SB3VecEnv


class Reseeded(Wrapper):
    """Each episode's seed follows from the one before, as Gymnasium promises, once a seed was given at all. Until then
    the world goes its own way, which depends on the seed that it was made with. ``BaseEnv`` resets its worlds itself:
    behind it a given seed decides the first episode of each world alone."""

    def __init__(self, env: VecEnv) -> None:
        super().__init__(env)
        self._last: list[int] | None = None

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        begins = [True] * self.num_envs if mask is None else mask.tolist()
        if seeds is not None:
            self._last = list(seeds)
        elif self._last is not None:
            self._last = [derive(s, "next") if b else s for s, b in zip(self._last, begins, strict=True)]
        return self.env.reset(mask, self._last)


def as_gymnasium(env: VecEnv, render_mode: str | None = None) -> Env:
    """One world. Like every environment of Gymnasium it waits for ``reset`` after its end."""
    import gymnasium

    if env.num_envs != 1:
        raise BurnishError(
            f"a Gymnasium environment is one world, but {env.num_envs} were given; make one, or use as_gymnasium_vector"
        )
    if render_mode not in (None, "rgb_array") or (render_mode and not isinstance(env, Rendered)):
        raise BurnishError(f"{type(env).__name__} cannot be shown as {render_mode!r}; it gives rgb_array, or nothing")
    world = Reseeded(env)

    class World(gymnasium.Env):
        def __init__(self) -> None:
            self.observation_space, self.action_space = _spaces(env.spec)
            self.metadata = {"render_modes": ["rgb_array"], "render_fps": env.spec.control_hz}
            self.render_mode = render_mode

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
            super().reset(seed=seed)
            return _row(_outside(world.reset(seeds=None if seed is None else [seed])), 0), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
            step = world.step(_inside(action, env)[None])
            info = {key: x[0] for key, x in _arrays(step.info).items()}
            ends = bool(step.terminated[0]), bool(step.truncated[0] & ~step.terminated[0])
            return _row(_outside(step.obs), 0), float(step.reward[0]), *ends, info

        def render(self) -> np.ndarray | None:
            return world.render()[0].cpu().numpy() if self.render_mode else None

    return World()


def as_gymnasium_vector(env: VecEnv | BaseEnv) -> VectorEnv:
    """All worlds at once; where one ended, ``info["final_obs"]`` holds the observation that the action led to."""
    from gymnasium.vector import AutoresetMode
    from gymnasium.vector import VectorEnv as Base
    from gymnasium.vector.utils import batch_space

    worlds = _decisions(env)

    class Worlds(Base):
        def __init__(self) -> None:
            self.num_envs, self.metadata = env.num_envs, {"autoreset_mode": AutoresetMode.SAME_STEP}
            self.single_observation_space, self.single_action_space = _spaces(env.spec)
            self.observation_space = batch_space(self.single_observation_space, env.num_envs)
            self.action_space = batch_space(self.single_action_space, env.num_envs)

        def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
            return _outside(worlds.reset(_per_world(seed, env.num_envs))), {}

        def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict]:
            outcome = worlds.step(_inside(actions, env)[:, None])
            ended, terminated = outcome.ended.cpu().numpy(), outcome.terminated.cpu().numpy()
            facts = _arrays(outcome.info)
            info = _known_of(facts, ~ended)
            if ended.any():
                led_to, final = _outside(outcome.next_obs), np.full(self.num_envs, None, dtype=object)
                for i in ended.nonzero()[0].tolist():
                    final[i] = _row(led_to, i)
                info |= _known_of({"final_obs": final, "final_info": _known_of(facts, ended)}, ended)
            reward = outcome.reward.cpu().double().numpy()
            return _outside(outcome.obs), reward, terminated, ended & ~terminated, info

    return Worlds()


def as_sb3(env: VecEnv | BaseEnv) -> SB3VecEnv:
    """The vectorised environment that SB3's algorithms train on. To see returns in SB3's log, put its
    ``VecMonitor`` around."""
    try:
        from stable_baselines3.common.vec_env import VecEnv as Base
    except ImportError as error:
        raise BurnishError("as_sb3 needs Stable-Baselines3; pip install 'burnish[sb3]'") from error
    worlds = _decisions(env)

    class Worlds(Base):
        def __init__(self) -> None:
            super().__init__(env.num_envs, *_spaces(env.spec))
            self._actions = np.zeros(0)

        def reset(self) -> Any:
            given = [seed for seed in self._seeds if seed is not None]
            self._reset_seeds()
            return _outside(worlds.reset(given or None))

        def step_async(self, actions: np.ndarray) -> None:
            self._actions = actions

        def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict]]:
            outcome = worlds.step(_inside(self._actions, env)[:, None])
            ended, cut = outcome.ended.cpu().numpy(), (outcome.ended & ~outcome.terminated).tolist()
            facts, led_to = _arrays(outcome.info), _outside(outcome.next_obs)
            infos: list[dict[str, Any]] = [{key: x[i] for key, x in facts.items()} for i in range(self.num_envs)]
            for i, info in enumerate(infos):
                info["TimeLimit.truncated"] = cut[i]
                if "success" in info:
                    info["is_success"] = info["success"]  # SB3's word, from which it logs its success rate
                if ended[i]:
                    info["terminal_observation"] = _row(led_to, i)
            return _outside(outcome.obs), outcome.reward.cpu().numpy(), ended, infos

        def close(self) -> None:
            pass

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            value = None if attr_name == "render_mode" else getattr(env, attr_name)
            return [value for _ in self._get_indices(indices)]

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
            raise BurnishError(f"{attr_name} cannot be set from SB3: the worlds are one batch, built before")

        def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
            raise BurnishError(f"{method_name} cannot be called from SB3: the worlds are one batch, not objects")

        def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
            return [False for _ in self._get_indices(indices)]

    return Worlds()


def _decisions(env: VecEnv | BaseEnv) -> ChunkEnv | BaseEnv:
    return env if isinstance(env, BaseEnv) else ChunkEnv(Reseeded(env), execute=1, gamma=1.0)


def _per_world(seed: int | Sequence[int] | None, num_envs: int) -> list[int] | None:
    """Consecutive seeds for a single number, as Gymnasium has it."""
    if seed is None or isinstance(seed, Sequence):
        return seed if seed is None else list(seed)
    return [seed + i for i in range(num_envs)]


def _spaces(spec: EnvSpec) -> tuple[Space, Space]:
    """Observation and action spaces."""
    from gymnasium import spaces

    limits = np.array(spec.action.low, np.float32), np.array(spec.action.high, np.float32)
    boxes = {_name(key): _box(spec.obs, key) for key in sorted(spec.obs.shapes)}
    observed = boxes["state"] if list(boxes) == ["state"] else spaces.Dict(boxes)
    return observed, spaces.Box(*limits, dtype=np.float32)


def _box(obs: ObsSpec, key: str) -> Space:
    from gymnasium import spaces

    kind = {torch.uint8: np.uint8, torch.int64: np.int64, torch.float32: np.float32}[dtype_of(key)]
    low, high = (-np.inf, np.inf) if kind is np.float32 else (np.iinfo(kind).min, np.iinfo(kind).max)
    return spaces.Box(low, high, obs.shapes[key], kind)


def _name(key: str) -> str:
    return key.replace(".", "_")


def _outside(obs: Obs) -> Any:
    """Copies: a world may write into what it gave out, and a view still reads it."""
    arrays = {_name(key): obs[key].cpu().numpy().copy() for key in sorted(obs)}
    return arrays["state"] if list(arrays) == ["state"] else arrays


def _row(observed: Any, i: int) -> Any:
    return {key: x[i].copy() for key, x in observed.items()} if isinstance(observed, dict) else observed[i].copy()


def _arrays(info: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {key: x.cpu().numpy().copy() for key, x in info.items()}


def _known_of(facts: Mapping[str, Any], mask: np.ndarray) -> dict[str, Any]:
    """Gymnasium's way to say of which worlds something is known."""
    return {**facts, **{f"_{key}": mask.copy() for key in facts}}


def _inside(action: Any, env: VecEnv | BaseEnv) -> Tensor:
    return torch.as_tensor(np.asarray(action, np.float32), device=env.device)
