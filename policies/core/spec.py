"""Specifications: the inputs and outputs of worlds and policies, as plain data, and whether two of them fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .errors import BurnishError, plain

T = TypeVar("T")
Names = Mapping[str, Sequence[str]]  # observation key, or "action" -> a name for each of its numbers, where there are
# Limits of a specification from a file. Four cameras of 1920 x 1080 pixels are 25 MB, and a chunk of 50
# actions of 32 numbers is 6 kB. The length counts by itself: a convolution over it has as many rows of its width.
LARGEST_OBS, LARGEST_CHUNK, LONGEST_CHUNK = 1 << 25, 1 << 20, 1 << 12  # bytes, bytes, actions
MOST_KEYS, MOST_AXES = 256, 8
UNKNOWN = "unknown"  # the action_mode of recordings that do not say what their actions mean
OF_A_WORLD = "gym:"  # action modes that begin so only name the world that the actions are for


def require_bytes(size: int, most: int, what: str) -> None:
    """A check that ``size`` bytes are at most ``most``; else a BurnishError that names ``what`` needs them."""
    if size > most:
        raise BurnishError(f"{what} would need {min(size, 10**30):.3g} bytes, and {most} are allowed")


VISION = "vision."


def vision_key(key: str) -> str:
    """The key of what a policy's own network makes of the camera ``key``, in the place of its picture."""
    return VISION + key.removeprefix("image.")


def stacked_by_history(key: str) -> bool:
    """History is kept of what the robot senses, not of what it was told (goals, tokens)."""
    return key in ("state", "environment_state") or key.startswith(("image.", VISION))


def is_image(key: str) -> bool:
    """Whether an observation key is that of a camera or of a goal image."""
    return key.startswith(("image.", "goal_image."))


def dtype_of(key: str) -> torch.dtype:
    """The dtype of an observation by its key: uint8 for images, int64 for tokens, else float32."""
    if is_image(key):
        return torch.uint8
    return torch.int64 if key == "tokens" else torch.float32


@dataclass(frozen=True)
class ObsSpec:
    """Shape of each observation key, without the leading batch dimension."""

    shapes: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", {k: tuple(int(d) for d in s) for k, s in self.shapes.items()})

    @property
    def nbytes(self) -> int:
        """Of one observation."""
        return sum(dtype_of(key).itemsize * math.prod(shape) for key, shape in self.shapes.items())

    def check(self, obs: Mapping[str, Tensor]) -> int:
        """Refuse an observation of the wrong keys, shape or type; returns its batch size."""
        batch = None
        for key, shape in self.shapes.items():
            if key not in obs:
                raise BurnishError(f"the observation lacks {key!r}; it has {sorted(obs)}")
            x = obs[key]
            if tuple(x.shape[1:]) != shape:
                needed = ", ".join(map(str, ("B", *shape)))
                raise BurnishError(f"the observation {key!r} has shape {tuple(x.shape)}, but ({needed}) is needed")
            # float64 is welcome where float32 is: formulae are tested in it, and normalisers convert.
            wanted = dtype_of(key)
            if x.dtype != wanted and not (wanted.is_floating_point and x.is_floating_point()):
                raise BurnishError(f"the observation {key!r} is {x.dtype}, but {wanted} is needed")
            if batch is not None and x.shape[0] != batch:
                raise BurnishError(f"the observation {key!r} has {x.shape[0]} rows, but others have {batch}")
            batch = x.shape[0]
        if batch is None:
            raise BurnishError("the observation specification is empty")
        return batch

    def with_history(self, history: int) -> ObsSpec:
        if history == 1:
            return self
        return ObsSpec({k: (history, *s) if stacked_by_history(k) else s for k, s in self.shapes.items()})

    def without_history(self, history: int) -> ObsSpec:
        """Single frames again."""
        if history == 1:
            return self
        return ObsSpec({k: s[1:] if stacked_by_history(k) else s for k, s in self.shapes.items()})


@dataclass(frozen=True)
class ActionSpec:
    """Actuator limits; policies speak [-1, 1], which ``ScaledEnv`` maps onto [low, high]."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", tuple(float(v) for v in self.low))
        object.__setattr__(self, "high", tuple(float(v) for v in self.high))
        if len(self.low) != len(self.high) or not all(a < b for a, b in zip(self.low, self.high, strict=False)):
            raise BurnishError(f"action limits need low < high in every dimension, got {self.low} and {self.high}")

    @property
    def dim(self) -> int:
        return len(self.low)


@dataclass(frozen=True)
class EnvSpec:
    """The specification of a world: its observations and actions, control rate in Hz and longest episode in ticks."""

    obs: ObsSpec
    action: ActionSpec
    control_hz: float
    action_mode: str  # what the numbers mean: "velocity", "joint_target", "ee_delta", ...; may say nothing
    max_steps: int
    pixels: str | None = None  # how cameras are drawn ("plain", "lavish"); None: without cameras, or unknown

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EnvSpec:
        """Of what a file or a server says."""
        return _read(cls, data).checked()

    def checked(self) -> EnvSpec:
        require_obs(self.obs, 1)
        if type(self.max_steps) is not int or self.max_steps < 1:
            raise BurnishError(f"a specification is malformed: max_steps={self.max_steps!r:.40} is no number of steps")
        _require_numbers(self.action, self.control_hz)
        return self


class Words(Protocol):
    """Instructions as numbers: the text of a world as the key ``tokens`` of an observation."""

    @property
    def length(self) -> int: ...

    def ids(self, texts: Sequence[str]) -> Tensor:
        """(B, length) int64, -1 behind the end of a text."""
        ...


@dataclass(frozen=True)
class PolicySpec:
    """``obs`` holds single frames; with ``history`` > 1 sensed keys arrive as (B, history, ...), oldest first.

    A chunk of ``horizon`` actions begins ``start`` steps before now; ``[start, start + execute)`` is executed.
    """

    obs: ObsSpec
    action: ActionSpec
    horizon: int
    execute: int
    start: int = 0
    history: int = 1
    noise_shape: tuple[int, ...] | None = None  # what ``act(noise=)`` takes; set by the policy itself
    goal_free: bool = False  # trained to act without its goal too; set by the policy itself
    control_hz: float | None = None
    action_mode: str | None = None
    pixels: str | None = None
    names: Names = field(default_factory=dict, compare=False, repr=False)  # as the recordings call the numbers
    words: Words | None = field(default=None, compare=False, repr=False)  # how ``tokens`` are made; not in ``to_dict``

    def __post_init__(self) -> None:
        if self.horizon < 1 or self.execute < 1 or self.history < 1 or self.start < 0:
            raise BurnishError("horizon, execute and history must be at least 1, and start at least 0")
        if self.start + self.execute > self.horizon:
            raise BurnishError(
                f"start={self.start} + execute={self.execute} exceeds horizon={self.horizon}: "
                "the chunk has too few actions to execute; raise horizon or lower execute"
            )

    @property
    def chunk_shape(self) -> tuple[int, int]:
        return self.horizon, self.action.dim

    @property
    def inputs(self) -> ObsSpec:
        """The shapes that ``act`` really receives."""
        return self.obs.with_history(self.history)

    def executed(self, chunk: Tensor) -> Tensor:
        """(B, H, A) -> (B, n, A): the slice that is sent to the actuators."""
        return chunk[:, self.start : self.start + self.execute]

    def reading(self, words: Words) -> PolicySpec:
        """Of a policy that reads instructions too."""
        return replace(self, obs=ObsSpec({**self.obs.shapes, "tokens": (words.length,)}), words=words)

    def completed(self, other: PolicySpec) -> PolicySpec:
        """A specification in which ``other`` says what this one leaves open of rate, actions, pictures and names."""
        mine, theirs = self.action_mode, other.action_mode
        return replace(
            self,
            control_hz=self.control_hz or other.control_hz,
            action_mode=theirs if not mine or (says_nothing(mine) and not says_nothing(theirs)) else mine,
            pixels=self.pixels or other.pixels,
            names={k: x for k, x in other.names.items() if k in (*self.obs.shapes, "action")} | dict(self.names),
        )

    def to_dict(self) -> dict[str, Any]:
        left_out = {"words"} if self.names else {"words", "names"}
        return {key: x for key, x in asdict(replace(self, words=None)).items() if key not in left_out}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PolicySpec:
        made = replace(_read(cls, data), words=None)
        require_obs(made.obs, made.history)
        sizes = [made.horizon, made.execute, made.start, *(made.noise_shape or ())]
        if not all(type(x) is int and x >= 0 for x in sizes) or len(made.noise_shape or ()) > MOST_AXES:
            raise BurnishError(f"a specification is malformed: {sizes!r:.200} must be whole numbers of at least 0")
        if made.horizon > LONGEST_CHUNK:
            raise BurnishError(f"a chunk of horizon={made.horizon} actions is longer than the {LONGEST_CHUNK} allowed")
        require_bytes(4 * math.prod(made.chunk_shape), LARGEST_CHUNK, f"a chunk of horizon={made.horizon}")
        require_bytes(4 * math.prod(made.noise_shape or ()), LARGEST_CHUNK, f"noise_shape={made.noise_shape}")
        _require_numbers(made.action, made.control_hz)
        return made


def _read(kind: type[T], data: Any) -> T:
    try:
        fields = dict(data)
        fields["obs"] = ObsSpec(fields["obs"]["shapes"])
        fields["action"] = ActionSpec(**fields["action"])
        if "names" in fields:
            fields["names"] = {str(key): tuple(map(str, each)) for key, each in fields["names"].items()}
        if fields.get("noise_shape") is not None:
            fields["noise_shape"] = tuple(int(d) for d in fields["noise_shape"])
        return kind(**fields)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, BurnishError):
            raise
        raise BurnishError(f"a specification is malformed: {error!r:.200}") from error


def require_obs(obs: ObsSpec, history: int) -> None:
    """One observation of a foreign specification, with all frames of its history, has a size that one can have."""
    if len(obs.shapes) > MOST_KEYS or max(map(len, obs.shapes.values()), default=0) > MOST_AXES:
        raise BurnishError(f"an observation has more than {MOST_KEYS} keys, or one of more than {MOST_AXES} axes")
    if not all(isinstance(key, str) for key in obs.shapes):
        raise BurnishError("a specification is malformed: an observation is called by a name")
    sizes = [history, *(d for shape in obs.shapes.values() for d in shape)]
    if not all(type(x) is int and x >= 0 for x in sizes):
        raise BurnishError(f"a specification is malformed: {sizes!r:.200} must be whole numbers of at least 0")
    require_bytes(obs.with_history(history).nbytes, LARGEST_OBS, f"an observation of history={history}")


def _require_numbers(action: ActionSpec, control_hz: float | None) -> None:
    numbers = [*action.low, *action.high, 1.0 if control_hz is None else control_hz]
    if not all(isinstance(x, (int, float)) and abs(x) <= 1e30 for x in numbers) or not numbers[-1] > 0:
        raise BurnishError("a specification is malformed: its limits must be finite numbers, and its rate positive")


def agent_spec(env: EnvSpec, execute: int = 1, history: int = 1) -> PolicySpec:
    """The spec that a policy must have to act in ``env``, a world or view whose sensed keys are stacked ``history``
    deep: chunks of ``execute`` actions, all of them executed. Its actions are in [-1, 1], as
    everywhere behind ``ScaledEnv``."""
    dim = env.action.dim
    return PolicySpec(
        obs=env.obs.without_history(history),
        action=ActionSpec((-1.0,) * dim, (1.0,) * dim),
        horizon=execute,
        execute=execute,
        history=history,
        control_hz=env.control_hz,
        action_mode=env.action_mode,
        pixels=env.pixels,
    )


@dataclass
class ChunkConfig:
    """The sizes of observations and chunks. A chunk begins ``start`` steps before now."""

    horizon: int = 8  # actions in a chunk
    execute: int = 4  # actions of each chunk that are played
    start: int = 0  # position in the chunk of the first action that is played
    history: int = 1  # observations that are stacked, the newest among them


def chunk_spec(env: EnvSpec, chunk: ChunkConfig, limits: ActionSpec | None = None) -> PolicySpec:
    """The spec of a policy that begins from nothing in ``env``, in chunks; ``limits`` are those of the actuators."""
    spec = agent_spec(env, history=chunk.history)
    return replace(spec, action=limits or spec.action, horizon=chunk.horizon, execute=chunk.execute, start=chunk.start)


def says_nothing(action_mode: str | None) -> bool:
    """Whether an ``action_mode`` leaves open what the numbers of an action mean."""
    return not action_mode or action_mode == UNKNOWN or action_mode.startswith(OF_A_WORLD)


def require_like_actions(ours: str, mode: str | None, theirs: str, other: str | None) -> None:
    """Refuse two action modes that both say what their numbers mean, and differ. ``ours`` and ``theirs`` name them."""
    if not (says_nothing(mode) or says_nothing(other) or mode == other):
        raise BurnishError(
            f"{ours} acts with action_mode={mode}, but {theirs} with action_mode={other}, so equal numbers are other "
            f"actions; where both words mean the same, say so: env.action_mode={mode} with env=gym or env=remote, or "
            "action_mode of the entry burnish in meta/info.json of recordings; env=maniskill has env.control_mode"
        )


def unlike_names(ours: str, names: Names, theirs: str, others: Names) -> str:
    """A note on numbers that both name, each in its own words; empty where there are none. Refuse the same names in
    another order: the numbers would be taken for each other."""
    notes = []
    for key in sorted(names.keys() & others.keys()):
        mine, other = list(names[key]), list(others[key])
        nameless = [f"{key}_{i}" for i in range(len(mine))], []
        if mine == other or mine in nameless or other in nameless:
            continue
        k = next((i for i, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]), 0)
        said = f"{ours} has {plain(mine[k], 80)} as number {k} of {key}, and {theirs} {plain(other[k], 80)}"
        if sorted(mine) == sorted(other):
            raise BurnishError(f"{said}: the same numbers in another order; arrange them alike, and learn anew")
        notes.append(f"{said}: numbers are matched by their places")
    return "; ".join(notes)


def check_compatible(policy: PolicySpec, env: EnvSpec) -> None:
    """``env`` is the world as the policy would see it (after history stacking and scaling)."""
    needed, given = policy.inputs.shapes, env.obs.shapes
    spared = {key for key in needed if policy.goal_free and key.startswith("goal")}
    missing = sorted(key for key in needed.keys() - given.keys() - spared if vision_key(key) not in given)
    if missing:
        raise BurnishError(
            f"the policy needs the observations {missing}, but the environment gives {sorted(given)}; where only names "
            "differ, policy.keys={NAME HERE: NAME OF THE POLICY} says so, of LeRobot's policies and of servers. One of "
            "ours learns them from its recordings: `burnish data convert ... rename=OLD:NEW`"
        )
    for key, shape in needed.items():
        if key in given and given[key] != shape:
            raise BurnishError(
                f"the policy needs {key!r} of shape {shape}, but the environment gives {given[key]}; it was trained in "
                "another world, or on another observation of this one"
            )
    if policy.action.dim != env.action.dim:
        raise BurnishError(f"the policy acts in {policy.action.dim} dimensions, the environment in {env.action.dim}")
    require_like_actions("the policy", policy.action_mode, "the environment", env.action_mode)
    if policy.control_hz not in (None, env.control_hz):
        raise BurnishError(
            f"the policy was trained with control_hz={policy.control_hz:g}, but the environment has "
            f"control_hz={env.control_hz:g}: its actions would last longer or shorter than those that it learnt from"
        )
    looks = any(key.startswith("image.") for key in needed)
    if looks and None not in (policy.pixels, env.pixels) and policy.pixels != env.pixels:
        raise BurnishError(
            f"the policy was trained on {policy.pixels} pictures, but the environment draws {env.pixels} ones, which "
            "look different to it; let the environment draw as in training"
        )
