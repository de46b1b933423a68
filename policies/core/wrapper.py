"""The base class of wrappers around worlds: each wrapper states only the calls that it changes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .errors import BurnishError
from .types import KnownDynamics, KnownFailure, KnownOutcome, Obs, ParametricDynamics, Saved, Step, VecEnv


@runtime_checkable
class Rendered(Protocol):
    """A world that can be looked at without being touched."""

    def render(self, size: int = 128) -> Tensor: ...


def pictures(env: Rendered, rows: Sequence[int] | None = None, size: int | None = None) -> Tensor:
    """(len(rows), H, W, 3) uint8 of the worlds ``rows``, all by default; ``size`` is the world's own choice by default.
    A world whose ``render`` takes ``rows`` draws no more than these."""
    render: Callable[..., Tensor] = env.render
    options = {} if size is None else {"size": size}
    if rows is not None and "rows" in inspect.signature(render).parameters:
        return render(**options, rows=rows)
    frames = torch.as_tensor(render(**options))
    return frames if rows is None else frames[list(rows)]


def state_names(env: Any) -> Sequence[str] | None:
    """The names of the numbers of ``state`` in the world that is behind all wrappers; None where it has no names."""
    while isinstance(env, Wrapper):
        env = env.env
    return getattr(env, "state_names", None)


def feature_names(env: Any) -> dict[str, Sequence[str]]:
    """Observation key, or "action" -> a name for each of its numbers, where the world behind all wrappers has them: as
    ``state_names`` and ``action_names``."""
    inner, sizes = innermost(env), {key: math.prod(shape) for key, shape in env.spec.obs.shapes.items()}
    found = {key: getattr(inner, f"{key}_names", None) for key in (*sizes, "action")}
    sizes["action"] = env.spec.action.dim
    return {key: list(names) for key, names in found.items() if names and len(names) == sizes[key]}


def continues(env: Any) -> bool:
    """Whether the state of the world behind ``env`` holds the episodes under way. A robot's cannot, nor that of a world
    which is not deterministic: it says ``continues = False``, at the latest when a state was loaded, its state decides
    the episodes to come, and it is reset after loading."""
    return getattr(innermost(env), "continues", True)


def repeatable(env: Any) -> bool:
    """Whether the world behind ``env`` may begin an episode once more, only to see if its seed decides the beginning.
    A robot says ``repeatable = False``: its resets cost a person's time, and no seed lays out the same scene again."""
    return getattr(innermost(env), "repeatable", True)


def instructions(env: Any) -> list[str] | None:
    """The ``instructions`` that the world behind ``env`` gives, a text for each row; None where it gives none."""
    texts = getattr(innermost(env), "instructions", None)
    return None if texts is None else list(texts)


def pictures_of(env: Any) -> Callable[[Obs], Tensor] | None:
    """The world behind ``env`` in states that it is not in: observations (B, ...) of single frames -> (B, H, W, 3)
    uint8; None where it cannot be set to what it shows. Its episodes are as before."""
    return getattr(innermost(env), "pictures_of", None)


def known_failure(env: Any) -> KnownFailure | None:
    """The rule by which the world behind ``env`` ends an episode as failed, None where it is not of what is shown."""
    return getattr(innermost(env), "known_failure", None)


def description(env: Any) -> str:
    """The sentence for the beginning of a run about the world behind ``env``: where it is stepped, how success is read;
    empty where it has none."""
    describe: Any = getattr(innermost(env), "describe", None)
    return "" if describe is None else describe()


def success_from(env: Any) -> str:
    """The setting or key by which the world behind ``env`` knows a success; empty where it need not be told."""
    say: Any = getattr(innermost(env), "success_from", None)
    return "" if say is None else say()


def info_keys(env: Any) -> str:
    """The keys of what the world behind ``env`` says of its steps, as the end of a sentence; empty where they are
    ours."""
    say: Any = getattr(innermost(env), "info_keys", None)
    return "" if say is None else say()


def innermost(env: Any) -> Any:
    """The world behind all wrappers."""
    while hasattr(env, "env"):
        env = env.env
    return env


class Wrapper:
    """A world around a world, which passes each call on unchanged; subclasses replace some."""

    def __init__(self, env: VecEnv) -> None:
        self.env, self.num_envs, self.device, self.spec = env, env.num_envs, env.device, env.spec

    @property
    def known_outcome(self) -> KnownOutcome | None:
        return getattr(self.env, "known_outcome", None)

    @property
    def known_dynamics(self) -> KnownDynamics | None:
        return getattr(self.env, "known_dynamics", None)

    @property
    def parametric_dynamics(self) -> ParametricDynamics | None:
        return getattr(self.env, "parametric_dynamics", None)

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        return self.env.reset(mask, seeds)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        return self.env.step(action, active)

    def render(self, size: int | None = None, rows: Sequence[int] | None = None) -> Tensor:
        if not isinstance(self.env, Rendered):
            raise BurnishError(f"the environment {type(self.env).__name__} cannot be rendered")
        return pictures(self.env, rows, size)

    def state_dict(self) -> dict[str, Any]:
        return {"env": self._saved().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved().load_state_dict(state["env"])

    def _saved(self) -> Saved:
        if not isinstance(self.env, Saved):
            raise BurnishError(f"the environment {type(self.env).__name__} cannot save its state")
        return self.env
