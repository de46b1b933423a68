"""SB3's two memories without what somebody else played: a person at a robot, who took it over (`..takeovers`).

A replay skips such decisions, and the ones before them end there, as truncated. A rollout has a fixed length, so they
stay in it, but are never drawn; the sum over later rewards ends before them in the value of the state in which somebody
took over, which is how SB3 itself treats a truncation. Where nobody takes over, not a bit is different.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback


def heed(model: Any) -> None:
    """By the classes of its parts, afterwards: so SB3's own zip names no class of ours."""
    if hasattr(model, "replay_buffer"):
        model.replay_buffer.__class__ = own_transitions(type(model.replay_buffer))
    else:
        model.rollout_buffer.__class__ = own_rollouts(type(model.rollout_buffer))
    model.__class__ = patient(type(model))


class OutcomeCallback(BaseCallback):
    """Rollouts of SB3 are not told what the worlds said; with this callback they are."""

    def _on_step(self) -> bool:
        memory: Any = getattr(self.model, "rollout_buffer", None)
        if memory is not None:
            memory.hear(self.locals["infos"])
        return True


def by_others(infos: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """(N,): in which worlds anybody else played a tick of this decision."""
    return np.array([bool(np.any(info.get("intervened", False))) for info in infos])


def patient(kind: Any) -> type:
    class Patient(kind):
        """While somebody else plays everything, there is nothing to learn from."""

        def train(self, *args: Any, **options: Any) -> None:
            memory = self.replay_buffer if hasattr(self, "replay_buffer") else self.rollout_buffer
            if memory.worth_learning:
                super().train(*args, **options)

    return Patient


def own_transitions(kind: Any) -> type:
    class OwnTransitions(kind):
        def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, ends: Any, infos: Any) -> None:
            others = by_others(infos)
            if not others.any():
                super().add(obs, next_obs, action, reward, ends, infos)
                return
            self.cut(others)
            if others.all():
                return
            # A row is of all worlds: in place of somebody else's decision stands that of another world, once more.
            source = np.where(others, np.flatnonzero(~others)[0], np.arange(len(others)))
            row = [_taken(x, source) for x in (obs, next_obs, action, reward, ends)]
            super().add(*row, [infos[i] for i in source])
            self.cut(others)

        def cut(self, worlds: np.ndarray) -> None:
            """The newest row is the last of its episodes in ``worlds``, as if they had been truncated."""
            if self.size():
                row = (self.pos - 1) % self.buffer_size
                going_on = worlds & (self.dones[row] == 0)
                self.dones[row, going_on] = self.timeouts[row, going_on] = 1

        @property
        def worth_learning(self) -> bool:
            return self.size() > 0

    return OwnTransitions


def own_rollouts(kind: Any) -> type:
    class OwnRollouts(kind):
        def reset(self) -> None:
            super().reset()
            self.others = np.zeros((self.buffer_size, self.n_envs), dtype=bool)

        def hear(self, infos: Sequence[Mapping[str, Any]]) -> None:
            """Say which worlds a person played in the decision that is added next."""
            self.others[self.pos] = by_others(infos)

        def compute_returns_and_advantage(self, *args: Any, **options: Any) -> None:
            seam = self.others[1:] & (self.episode_starts[1:] == 0)
            self.rewards[:-1][seam] += self.gamma * self.values[1:][seam]
            self.episode_starts[1:][seam] = 1
            super().compute_returns_and_advantage(*args, **options)

        def get(self, batch_size: int | None = None) -> Iterator[Any]:
            if not self.others.any():
                yield from super().get(batch_size)
                return
            next(super().get(1))  # lays the columns out flat, world by world
            chosen = np.random.permutation(np.flatnonzero(~self.others.T.reshape(-1)))
            size = batch_size or len(chosen)
            for start in range(0, len(chosen) - 1, size):  # a last one alone has no deviation to be normalised by
                yield self._get_samples(chosen[start : start + size])

        @property
        def worth_learning(self) -> bool:
            return int((~self.others).sum()) > 1

    return OwnRollouts


def _taken(x: Any, source: np.ndarray) -> Any:
    return {key: part[source] for key, part in x.items()} if isinstance(x, Mapping) else x[source]
