"""A reflex: a critic of risk, asked at the control rate, that can make the robot more careful and nothing else.

A critic says how risky it is to do what was asked in the state at hand. Its risk becomes an advice, PASS, SLOW with a
share of the speed, or BRAKE, which reaches the guard as a share of the speed limits (0 to brake, `JointGuard`'s
``speed``), before the request does. So the guard's theorem is untouched, whatever the critic says: a critic that is
wrong, random, slow or broken costs speed, never safety. A risk that is not a number, a critic that raises, and one that
took longer than its budget all mean BRAKE.

Hysteresis keeps it from trembling: a limit of risk that was passed holds until the risk has been below a lower one for
some ticks in a row.

Reference. Bresa: risk critic Q_risk(s, a) ~ E[sum gamma^t cost], evaluated faster than the policy, arXiv 2503.21989.
**Departures.** Its recovery policy is replaced by the guard's own braking, which is proved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..adapter import RobotSpec, RobotState
from ..clock import Clock, MonotonicClock, ns
from ..errors import Refused
from .settings import Safety

Array = NDArray[np.float64]


class Critic(Protocol):
    """The risk of asking for ``q_target`` in this state: any number; what is large is decided by `ReflexSettings`."""

    def __call__(self, state: RobotState, q_target: Array) -> float: ...


class Advice(StrEnum):
    """The three answers of a reflex."""

    PASS = "pass"
    SLOW = "slow"
    BRAKE = "brake"


@dataclass(frozen=True)
class ReflexSettings:
    """Settings of a reflex: the risks at which it slows and brakes, and how it is released."""

    slow_risk: float = 0.2  # from here on slow
    brake_risk: float = 0.5  # from here on brake
    release: float = 0.8  # the share of a limit below which risk must fall to be released from it
    release_ticks: int = 10  # so many ticks in a row
    slow_share: float = 0.3  # of the speed limits
    budget_s: float = 0.002  # a critic that takes longer is late, and late is BRAKE

    def __post_init__(self) -> None:
        if not 0 < self.slow_risk <= self.brake_risk < np.inf:
            raise Refused(f"a reflex needs 0 < slow_risk <= brake_risk, got {self.slow_risk:g} and {self.brake_risk:g}")
        if not (0 < self.release <= 1 and 0 < self.slow_share < 1 and self.release_ticks >= 1 and self.budget_s > 0):
            raise Refused("a reflex needs release in (0, 1], slow_share in (0, 1), release_ticks >= 1 and budget_s > 0")


class Reflex:
    """An advisor of `SafeRobot`: called with the newest state and the request, it returns the share of the speed."""

    def __init__(self, critic: Critic, settings: ReflexSettings | None = None, clock: Clock | None = None) -> None:
        self.settings = settings or ReflexSettings()
        self.counts: Counter[str] = Counter()  # advices given, and troubles: "raised", "late", "no_number"
        self._critic, self._clock = critic, clock or MonotonicClock()
        self._advice, self._calm = Advice.PASS, 0

    @property
    def advice(self) -> Advice:
        return self._advice

    def __call__(self, state: RobotState, request: Any) -> float:
        self._advice = self._next(self._risk(state, request))
        self.counts[self._advice.value] += 1
        return {Advice.PASS: 1.0, Advice.SLOW: self.settings.slow_share, Advice.BRAKE: 0.0}[self._advice]

    def _risk(self, state: RobotState, request: Any) -> float:
        """An unknown risk counts as the greatest."""
        began_ns = self._clock.now_ns()
        try:
            risk = float(self._critic(state, np.array(request, np.float64)))
        except Exception:  # a critic may fail in whatever way
            self.counts["raised"] += 1
            return np.inf
        if self._clock.now_ns() - began_ns > ns(self.settings.budget_s):
            self.counts["late"] += 1
            return np.inf
        if np.isnan(risk):
            self.counts["no_number"] += 1
            return np.inf
        return risk

    def _next(self, risk: float) -> Advice:
        settings = self.settings
        advice = self._level(risk, 1.0)
        held = self._level(risk, settings.release)
        order = list(Advice)
        if order.index(advice) >= order.index(self._advice):
            self._calm = 0
            return advice
        if order.index(held) >= order.index(self._advice):
            self._calm = 0
            return self._advice
        self._calm += 1
        if self._calm < settings.release_ticks:
            return self._advice
        self._calm = 0
        return held

    def _level(self, risk: float, share: float) -> Advice:
        if risk >= share * self.settings.brake_risk:
            return Advice.BRAKE
        return Advice.SLOW if risk >= share * self.settings.slow_risk else Advice.PASS


class MlpCritic:
    """A small network on (q, qd, q_target - q): weights (inputs, outputs) and biases (outputs,) of layers with ReLU
    between them; the last has one output, whose logistic is the risk. Weights come as arrays, from any file format."""

    def __init__(self, weights: Sequence[Array], biases: Sequence[Array]) -> None:
        layers = [(np.asarray(w, np.float64), np.asarray(b, np.float64)) for w, b in zip(weights, biases, strict=True)]
        shapes = [w.shape for w, _ in layers]
        fits = bool(layers) and all(w.ndim == 2 and b.shape == w.shape[1:] for w, b in layers)
        if not fits or any(a[1] != b[0] for a, b in pairwise(shapes)) or shapes[-1][1] != 1:
            raise Refused(f"layers of a critic must fit each other and end in one number, got weights {shapes}")
        if shapes[0][0] % 3 or not all(np.isfinite(w).all() and np.isfinite(b).all() for w, b in layers):
            raise Refused("a critic takes q, qd and q_target - q, three numbers per joint, and has finite weights")
        self._layers = layers
        self.joints = shapes[0][0] // 3

    def __call__(self, state: RobotState, q_target: Array) -> float:
        x = np.concatenate([state.q, state.qd, q_target - state.q])
        for w, b in self._layers[:-1]:
            x = np.maximum(x @ w + b, 0)
        w, b = self._layers[-1]
        # tanh does not overflow where the exponential of a logistic would.
        return 0.5 + 0.5 * float(np.tanh(0.5 * (x @ w + b)[0]))


def write_critic(path: Path | str, weights: Sequence[Array], biases: Sequence[Array]) -> None:
    """A safetensors file in float32, with "weight.0" (inputs, outputs), "bias.0" (outputs,), "weight.1", ..."""
    from safetensors.numpy import save

    from ...policies.core.files import replace  # which a robot that only reads does without

    MlpCritic(weights, biases)  # what is no critic is not written
    named = {f"weight.{i}": w for i, w in enumerate(weights)} | {f"bias.{i}": b for i, b in enumerate(biases)}
    replace(path, save({name: np.array(x, np.float32, order="C") for name, x in named.items()}))


def read_critic(path: Path | str) -> MlpCritic:
    """The critic of risk in a safetensors file; malformed content is refused."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise Refused(f"the critic {path} cannot be read: {error.strerror}") from error
    try:
        tensors = load(content)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:  # the last three of types that NumPy lacks
        raise Refused(f"{path} is no critic: {error}") from error
    count = len(tensors) // 2
    if set(tensors) != {f"{kind}.{i}" for kind in ("weight", "bias") for i in range(count)}:
        raise Refused(f"{path} is no critic: it holds {sorted(tensors)[:6]}, and should hold weight.0, bias.0, ...")
    weights, biases = ([tensors[f"{kind}.{i}"].astype(np.float64) for i in range(count)] for kind in ("weight", "bias"))
    return MlpCritic(weights, biases)


def reflex_of(spec: RobotSpec, safety: Safety, clock: Clock) -> Reflex | None:
    """The one that the settings of a robot ask for."""
    if not safety.reflex:
        return None
    critic = read_critic(safety.reflex)
    if critic.joints != len(spec.joints):
        raise Refused(f"{safety.reflex} is a critic of {critic.joints} joints, and {spec.name} has {len(spec.joints)}")
    settings = ReflexSettings(
        slow_risk=safety.reflex_slow, brake_risk=safety.reflex_brake, budget_s=safety.reflex_budget_s
    )
    return Reflex(critic, settings, clock)
