"""The three interfaces of the house: worlds, policies, learners.

Shapes everywhere: B batch, N worlds, H chunk horizon, n executed steps, A action dim, K generation steps,
J likelihood factors. Worlds never reset themselves; there is no ``done``: an end is *terminated* (the future is
worth nothing) or *truncated* (the future is worth something, but we stopped looking).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, runtime_checkable

import torch
from torch import Tensor

from .seed import Noise
from .spec import EnvSpec, PolicySpec

# Always a dict with a leading B or N. float32, except images (uint8, C H W) and tokens (int64). Keys:
# state, image.<cam>, goal, goal_image.<cam>, goal_mask, tokens, advantage, base_action, base_phase, base_queue,
# residual_offset, features.
Obs = dict[str, Tensor]


class Step(NamedTuple):
    """One control tick of N worlds. ``obs`` is where the action led, always: never a reset observation."""

    obs: Obs
    reward: Tensor  # (N,) float32
    terminated: Tensor  # (N,) bool
    truncated: Tensor  # (N,) bool
    # Each (N, ...). Where the world knows them: "success" (N,) bool, "executed" (N, A), and "intervened" (N,) bool:
    # a person or an expert played this tick, namely what "executed" says. An imagined world may add "weight" (N,) in
    # (0, 1]: how far its model is to be believed there; and "bonus" (N,) is the share of an intrinsic reward.
    info: dict[str, Tensor]


class Outcome(NamedTuple):
    """One decision of N worlds: up to n control ticks of a chunk, discounted here and nowhere else."""

    obs: Obs  # what to act on next: next_obs, or the reset observation where ended
    next_obs: Obs  # where the action really led
    reward: Tensor  # (N,) sum over executed ticks of gamma^i r_i
    discount: Tensor  # (N,) gamma^steps * (1 - terminated)
    ended: Tensor  # (N,) bool, terminated | truncated
    terminated: Tensor  # (N,) bool
    steps: Tensor  # (N,) int64, control ticks executed
    executed: Tensor  # (N, n, A) what the actuators got, zero after `steps`
    # as in `Step`, but "intervened" (N, n): of each tick that was executed; "weight" is the smallest of them, and
    # "bonus" their sum
    info: dict[str, Tensor]

    @property
    def valid(self) -> Tensor:
        """(N,) bool: the policy itself played every tick, so the decision says something about its choice."""
        intervened = self.info.get("intervened")
        return torch.ones_like(self.ended) if intervened is None else ~intervened.flatten(1).any(1)

    @property
    def weight(self) -> Tensor:
        """(N,): how much the row counts in a loss, 1 in a real world."""
        return self.info.get("weight", torch.ones_like(self.reward))


class Normal(NamedTuple):
    """A diagonal Gaussian; ``std`` broadcasts against ``mean`` and may be zero (a deterministic transition)."""

    mean: Tensor
    std: Tensor

    def sample(self, noise: Tensor) -> Tensor:
        return self.mean + self.std * noise

    def log_prob(self, value: Tensor) -> Tensor:
        """Elementwise, unreduced. Only meaningful where ``std > 0``."""
        z = (value - self.mean) / self.std
        return -0.5 * z.square() - torch.log(self.std) - 0.5 * math.log(2 * math.pi)


class Pull(NamedTuple):
    """A prefix that also guides: each action pulls as strongly as its weight says. The first ones, of weight 1, are
    committed; the others were meant, and may change."""

    actions: Tensor  # (B, p, A)
    weights: Tensor  # (p,) in [0, 1]
    limit: float = 5.0  # of the correction (beta)

    @property
    def committed(self) -> Tensor:
        return self.actions[:, : int((self.weights == 1).cumprod(0).sum())]


class Masked(NamedTuple):
    """A prefix whose length is known only when the policy acts, as an exported network needs it."""

    actions: Tensor  # (B, H, A)
    known: Tensor  # (B, H, 1), whether an action is committed


# Actions that a chunk has to continue: all of them committed, or a ``Pull``.
Prefix = Tensor | Pull | Masked


class Draw(NamedTuple):
    """A sampled chunk with its evidence."""

    action: Tensor  # (B, H, A)
    trace: Any  # a tensor, or a tree of them: whatever must be remembered to evaluate the draw again
    log_prob: Tensor  # (B, J)


class Decision(NamedTuple):
    """An actor's answer to the loop: the action, and the columns that its learner wants stored."""

    action: Tensor
    columns: dict[str, Tensor]


# Reward, success and failure (N,) of a control tick, computed from what a world showed before and after it alone. A
# world that can do so has it as ``known_outcome``.
KnownOutcome = Callable[[Obs, Obs], tuple[Tensor, Tensor, Tensor]]

# Whether an episode ends in failure where a world shows that, (B,) bool. A world that can say so has it as
# ``known_failure``.
KnownFailure = Callable[[Obs], Tensor]

# The observations to which actions (B, A) lead from others, each of a single frame, for any B. A world that can be set
# to what it shows has it as ``known_dynamics``.
KnownDynamics = Callable[[Obs, Tensor], Obs]

# Factors on physical parameters, by their names -> the dynamics with these. A world that knows how it depends on them
# has it as ``parametric_dynamics``.
ParametricDynamics = Callable[[Mapping[str, float]], KnownDynamics]


@runtime_checkable
class VecEnv(Protocol):
    """N worlds at control time. Rows outside ``mask`` or ``active`` are not touched.

    A world may answer in the same memory again and again: who keeps an observation beyond the next call copies it.
    A world that must not be reset only to be looked at says ``repeatable = False`` (`wrapper.repeatable`). A world that
    tells what to do has ``instructions``, a text for each row (`wrapper.instructions`).
    """

    num_envs: int
    device: torch.device
    spec: EnvSpec

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        """Reset the worlds of ``mask`` (all by default); ``seeds`` holds one number per world. Returns all N rows."""
        ...

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """``action`` is (N, A). Rows of the result outside ``active`` are undefined and must not be read."""
        ...


class ActOptions(TypedDict, total=False):
    """The keywords of ``Policy.act``, for a policy that passes them on."""

    noise: Tensor | None
    prefix: Prefix | None
    greedy: bool
    generator: Noise | None


class Policy(Protocol):
    """Stateless map from observations to action chunks in [-1, 1]; an ``nn.Module`` if trainable."""

    @property
    def spec(self) -> PolicySpec: ...

    def act(
        self,
        obs: Obs,
        *,
        noise: Tensor | None = None,
        prefix: Prefix | None = None,
        greedy: bool = False,
        generator: Noise | None = None,
    ) -> Tensor:
        """(B, H, A). ``noise`` (B, *spec.noise_shape) fixes the start of the generation; ``prefix`` (B, p, A) holds
        actions already committed, which the chunk must continue, or is a ``Pull`` towards them, which chains of
        several steps can follow and others refuse; ``greedy`` asks for the most typical chunk."""
        ...


@runtime_checkable
class Condition(Protocol):
    """An encoded observation, read at every step of a generation."""

    @property
    def given(self) -> Tensor:
        """(B, C): what it comes to in one vector."""
        ...

    def rows(self, index: Any) -> Any:
        """Those of an index, slice or mask."""
        ...

    def repeat(self, times: int) -> Any:
        """Every row ``times`` times in a row."""
        ...


class ChainPolicy(Policy, Protocol):
    """Generation is a K-step Gaussian chain: x_0 noise, x_K the action. Guidance is inside ``transition``. The states
    of a policy with ``decode`` are in units of its own, of which the first A of each row become the action."""

    @property
    def num_steps(self) -> int: ...

    def encode(self, obs: Obs) -> Any: ...

    def transition(self, x: Tensor, k: Tensor, cond: Any) -> Normal:
        """Law of x_{k+1} given x_k: x (B, H, A), k (B,) int64 in 0..K-1."""
        ...


class StochasticPolicy(Protocol):
    """A policy with a likelihood of J factors, as policy gradients need it."""

    @property
    def spec(self) -> PolicySpec: ...

    coordinates: Tensor  # (J,) how many terms factor j sums over for a full chunk
    transitions: Tensor  # (J,) how many transitions of a chain factor j joins; 1 for a Gaussian

    def draw(self, obs: Obs, *, generator: Noise | None = None) -> Draw: ...

    def log_prob(self, obs: Obs, trace: Any, steps: Tensor) -> Tensor:
        """(B, J): evidence of the first ``steps`` executed actions of the slice ``start : start + execute``."""
        ...


@runtime_checkable
class Saved(Protocol):
    """Its state can be taken out and put back, bit for bit; of a world see also ``continues``."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Controller(Saved, Protocol):
    """Stateful, control time: what evaluation, collection, views and deployment drive."""

    def reset(self, mask: Tensor, seeds: Sequence[int] | None = None) -> None: ...

    def step(self, obs: Obs) -> Tensor:
        """(N, A), and advance."""
        ...

    def peek(self, obs: Obs) -> Tensor:
        """(N, A): what ``step`` would return. Changes nothing."""
        ...


Metrics = dict[str, Tensor | float]


class Actor(Protocol):
    """All that an acting process needs."""

    def act(self, obs: Obs, *, warm: bool, generator: torch.Generator, fresh: Tensor | None = None) -> Decision:
        """One decision of N worlds. ``warm``: by the prior of the warm-up. ``fresh`` (N,) says where an episode begins,
        so that an actor with a memory forgets there; the loops always give it."""
        ...

    def state_dict(self) -> dict[str, Any]: ...


class Memory(Protocol):
    """Decisions that batches are drawn from: a replay, recordings, or a view on them."""

    generator: torch.Generator
    device: torch.device

    def __len__(self) -> int: ...

    def sample(
        self, batch: int, *, n_step: int = 1, sequence: int = 1, around: tuple[int, int] = (0, 0)
    ) -> dict[str, Any]: ...


class Decisions(Memory, Saved, Protocol):
    """Decisions in the order of time, T rows of N worlds (`offline/replay.py`)."""

    num_envs: int
    added: int  # rows ever added

    @property
    def filled(self) -> int: ...

    def latest(self, rows: int | None = None, names: Sequence[str] | None = None) -> dict[str, Any]: ...

    def learnable(self, rows: int | None = None) -> Tensor: ...

    def gather(
        self, flat: Tensor, *, n_step: int = 1, sequence: int = 1, around: tuple[int, int] = (0, 0)
    ) -> dict[str, Any]: ...

    def fill_in(self, column: str, world: int, values: Tensor) -> None: ...


class Source(Protocol):
    """The source of a learner's batches (`offline/sources.py`)."""

    def sample(
        self,
        n: int | None = None,
        *,
        n_step: int | None = None,
        sequence: int = 1,
        around: tuple[int, int] = (0, 0),
    ) -> dict[str, Any]:
        """``n`` decisions as columns (B, ...), with "obs" and "next_obs". ``n`` and ``n_step``, over how many decisions
        a reward is summed, are those of the loop unless they are given. ``sequence`` > 1 asks for (B, L, ...), and
        ``around`` = (back, ahead) for the decisions before and after each."""
        ...


class Learns(Saved, Protocol):
    """The part of a learner that a run needs, also where an algorithm of another library learns."""

    policy: Any  # the Policy that is delivered
    # what its targets pay for the entropy of a decision at observations, on average; None: nothing
    entropy_bonus: Callable[[Obs], float] | None = None

    def plan(self, updates: int) -> None:
        """Called once with the number of updates of the whole run, for schedules over it."""

    def q_values(self, batch: dict[str, Any]) -> Tensor | None:
        """(B,): what its critic expects of the decisions of a batch; None without a critic of actions."""
        return None

    def describe(self) -> str:
        """A sentence for the beginning of a run."""
        return ""


class Learner(Learns, Protocol):
    """A learner inherits from this class, and says more than ``update`` only where it has something to say."""

    columns: tuple[str, ...] = ()  # facts of an ``Outcome`` to be stored beside the base columns, such as "executed"

    afresh: bool = False  # on-policy: every rollout begins with new episodes in all worlds

    actor: Actor

    def update(self, source: Source) -> Metrics:
        """One step, on a batch of its own choice."""
        ...

    def observe(self, obs: Obs) -> None:
        """Every observation that is about to be stored; a running normaliser reads it."""

    def stored(self, replay: Decisions) -> None:
        """Called after each row of decisions was stored; a column that is known only later is filled here."""

    def abandon(self) -> None:
        """Called where the episodes in progress will not be continued; a sum that runs along them begins anew."""

    def prior(self, replay: Decisions, recordings: Decisions | None) -> Memory | None:
        """The memory that the prior share of each batch comes from; ``recordings`` is None where there are none."""
        return recordings
