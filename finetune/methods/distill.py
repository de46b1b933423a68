"""Distillation: what several policies, or one that refinement put together, can do, learnt by one policy.

The teachers play in their worlds, what they did is recorded as any demonstration is, and a student imitates it.

* **Specialists into a generalist**: COMPASS (Liu et al. 2025, arXiv 2502.16372).
* **A refined policy back into one**: the last stage of ResiP (Ankile et al. 2024, arXiv 2407.16677): the base with its
  residual is rolled out, its successes are imitated, and the student may see what the teacher did not (images).
* **Consolidation**: GoRL (Zhang et al. 2025, arXiv 2512.02581) refits the generative policy so that noise N(0, I) leads
  where the noise of the steering agent led; then the agent is not needed any more, and steering can begin anew.
* **Re-ranking**: RAD-2 (2026, arXiv 2604.15308) moves a generator towards those of its draws that a critic chose: the
  teacher is the best of n draws, or EXPO, and the base is consolidated.
* **Rounds**: DAgger (Ross, Gordon and Bagnell 2011, arXiv 1011.0686): the student plays, the teacher says what it would
  have done, and the student goes on learning from all that was ever said.

**Departures.** COMPASS brings the student's distribution near to the teachers' and tells it which robot it is; here
actions are imitated with the student's own loss, and it is told nothing that its world does not show. GoRL trains a
fresh decoder on one recorded action per state, with 8 noises for each; here the base goes on from its weights, and the
teacher is asked for a new chunk whenever a state is drawn. A round of DAgger is played by the student alone (without a
mixture with the teacher), and starts from the student of the round before.

Euler steps of 1/K narrow what a flow has learnt: N(m, 0.2^2) comes out with 0.11 at K = 5, with 0.15 at K = 10. A base
of few steps is therefore more decided after consolidation than its teacher was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...offline.actors import trainable_imitator
from ...policies.build import CheckpointConfig, build_policy, loaded
from ...policies.compose import Every, Residual
from ...policies.core.errors import BurnishError
from ...policies.core.seed import derive
from ...policies.core.spec import PolicySpec
from ...policies.core.types import Metrics
from ...policies.data.episodes import Episodes
from ...policies.data.windows import Batch, Windows
from ...policies.imitate import ImitateConfig, ImitationLearner
from ...policies.nets.ema import Ema


def student_of(chosen: Any, spec: PolicySpec, *, seed: int = 0, device: torch.device | str = "cpu") -> tuple[Any, bool]:
    """The student, and whether it is a fresh one, of ``spec``; one that was trained before brings its own."""
    if not isinstance(chosen, CheckpointConfig):
        return build_policy(chosen, spec, seed=seed, device=device), True
    trained, _ = loaded(chosen, device)
    return trainable_imitator(trained, "distillation"), False


def innermost(policy: Any, name: str) -> Any:
    """A copy of the base below everything that refinement put around it, ready to be trained."""
    base: Any = policy
    while not hasattr(base, "bc_loss") and hasattr(base, "base"):
        if isinstance(base, Residual) and base.config.every is Every.step:
            raise BurnishError(
                f"{name} corrects every control tick, so it has no chunks that its base could be trained on; imitate "
                "what it does instead: policy=checkpoint policy.path=(the base), without consolidate"
            )
        base = base.base
    if base is policy:
        raise BurnishError(f"{name} is a {type(policy).__name__} without a base of its own: there is nothing to merge")
    return trainable_imitator(base, "consolidate=true")


class Asked:
    """Windows whose states were recorded and whose chunks are not: the teacher is asked whenever a state is drawn."""

    def __init__(self, windows: Windows, teacher: Any) -> None:
        self.windows, self.teacher = windows, teacher
        self._noise: torch.Generator | None = None

    def sample(self, batch: int, generator: torch.Generator) -> Batch:
        return self[self.draw(batch, generator)]

    def draw(self, batch: int, generator: torch.Generator) -> Tensor:
        """The teacher's noise comes from ``generator`` too, so its state is still all that a resume needs."""
        self._noise = generator
        return self.windows.draw(batch, generator)

    def __getitem__(self, index: Tensor) -> Batch:
        obs, _, mask = self.windows[index]
        with torch.no_grad():
            chunk = self.teacher.act(obs, generator=self._noise)
        return Batch(obs, chunk, torch.ones_like(mask))


class Distillation:
    """An imitation learner that goes on for ``rounds`` more times ``train.steps``, each on more recordings.

    ``relabelled(round, student)`` plays round 1, 2, ... and returns it; without a student it reads what is there.
    ``fit`` lets the normalisers of a fresh student be fitted; one that has learnt before keeps those it learnt with.
    ``asked`` is the teacher that is asked for chunks in place of those recorded.
    """

    def __init__(
        self,
        student: Any,
        episodes: Episodes,
        train: ImitateConfig,
        *,
        fit: bool = True,
        asked: Any = None,
        rounds: int = 0,
        relabelled: Callable[[int, Any], Episodes] | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.policy, self.episodes, self.train, self.device = student, episodes, train, device
        self.rounds, self.round, self._relabelled = rounds, 0, relabelled
        self.config = replace(train, steps=train.steps * (rounds + 1))  # what is to be trained in all
        self._asked, self._seed = asked, seed
        self._parts = self._split(episodes)
        self.learner = self._learner(fit)

    @property
    def step(self) -> int:
        return self.round * self.train.steps + self.learner.step

    @property
    def ema(self) -> Ema:
        return self.learner.ema

    @property
    def average(self) -> Any:
        return self.learner.average

    def update(self) -> Metrics:
        if self.learner.step == self.train.steps and self.round < self.rounds:
            self.ema.copy_to(self.average)
            self._enter(self.round + 1, self.average)
            self.policy.load_state_dict(self.average.state_dict())
            self.learner = self._learner(fit=False)
        return {**self.learner.update(), "round": self.round, "data/episodes": len(self.episodes)}

    def validate(self) -> Metrics:
        return self.learner.validate()

    def _enter(self, number: int, student: Any) -> None:
        assert self._relabelled is not None, "rounds need a player"
        more = self._relabelled(number, student)
        self.round = number
        self.episodes = _joined(self.episodes, more)
        self._parts = [_joined(*pair) for pair in zip(self._parts, self._split(more), strict=True)]

    def _split(self, episodes: Episodes) -> list[Episodes]:
        """For training and for validation: each round's own, so that what was kept for validation stays so."""
        fraction = self.train.valid_fraction if self.round == 0 or len(episodes) > 1 else 0.0
        return [*episodes.split(fraction, derive(self._seed, "round", self.round))]

    def _learner(self, fit: bool) -> ImitationLearner:
        seed, train, valid = derive(self._seed, "round", self.round), *self._parts
        config = replace(self.train, valid_fraction=0.0)  # they are apart already
        learner: Any = ImitationLearner(self.policy, train, config, fit=fit, seed=seed, device=self.device)
        if self._asked is not None:
            learner.windows = self._windows(train)
        learner.valid = self._windows(valid) if len(valid) else None
        return learner

    def _windows(self, part: Episodes) -> Any:
        spec, asked = self.policy.spec, self._asked
        if asked is not None:  # an agent above the base may see more than the base, so all that was recorded is there
            spec = replace(spec, obs=self.episodes.spec.obs)
        windows = Windows(part, spec, self.train.pad).to(self.device)
        return windows if asked is None else Asked(windows, asked)

    def state_dict(self) -> dict[str, Any]:
        return {"round": self.round, "learner": self.learner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        while self.round < state["round"]:
            self._enter(self.round + 1, None)
        if self.round:
            self.learner = self._learner(fit=False)
        self.learner.load_state_dict(state["learner"])


def _joined(old: Episodes, new: Episodes) -> Episodes:
    return replace(old, episodes=[*old, *new])
