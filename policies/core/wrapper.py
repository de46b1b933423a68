"""What every world around a world passes through, so that the wrappers state only what they change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from .errors import BurnishError
from .types import Obs, VecEnv


class Saved(Protocol):
    """A world whose state can be taken out and put back, bit for bit."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Rendered(Protocol):
    """A world that can be looked at without being touched."""

    def render(self, size: int = 128) -> Tensor: ...


class Wrapper:
    def __init__(self, env: VecEnv) -> None:
        self.env, self.num_envs, self.device, self.spec = env, env.num_envs, env.device, env.spec

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        return self.env.reset(mask, seeds)

    def render(self, size: int = 128) -> Tensor:
        return self._able("render", Rendered).render(size)

    def state_dict(self) -> dict[str, Any]:
        return {"env": self._able("state_dict", Saved).state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._able("load_state_dict", Saved).load_state_dict(state["env"])

    def _able(self, method: str, kind: type) -> Any:
        if not hasattr(self.env, method):
            raise BurnishError(f"the environment {type(self.env).__name__} does not offer {method}()")
        return cast(kind, self.env)
