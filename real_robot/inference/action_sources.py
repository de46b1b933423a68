"""Action sources: a checkpoint, a bundle, or a policy server, each as one `Controller`.

    policy=checkpoint   torch, in this process; the entry point makes it, because only that may import the policies
    policy=bundle       `runtime`: NumPy, what a computer without torch would run
    policy=remote       `client`: somewhere else, on the wire of `server`

They see and say the same for the same seeds, up to rounding: the noise of a chunk is that of (episode seed, decision).
Before anything moves, `require_fit` compares what was announced with the robot's body, and `inference_ms` measures how
long a decision takes, without the first ones, which hold what happens once.

A server that does not answer raises nothing for ``patience_s``: no plan comes, so the robot holds. After that the
error goes up, and the owner of the robot brings it to rest.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...policies.core.chunk import HistoryEnv
from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges
from ...policies.core.spec import (
    ActionSpec,
    EnvSpec,
    ObsSpec,
    PolicySpec,
    check_compatible,
    says_nothing,
    unlike_names,
)
from ...policies.core.types import Controller, Obs, Step, VecEnv
from ...policies.core.wrapper import feature_names
from ...policies.wire.server_spec import sent
from ..clock import SECOND, Clock, MonotonicClock, ns
from ..env import Body, observed
from ..export.bundle import Schema, stacked_by_history
from ..export.runtime import ChunkController, ExportedPolicy, RowNoise, load
from .predictors import ClientPredictor
from .worker import BundlePredictor, Predictor

REHEARSALS = 50  # decisions that are timed
COLD = 10  # of these, the first, which are not counted
RANGE_TOLERANCE = 1e-6  # of an action's range: so much may two roundings of one limit differ


@dataclass
class BundleConfig:
    """Settings of policy=bundle: the folder."""

    path: str  # a folder that `burnish export` wrote


@dataclass
class ServedConfig:
    """Settings of policy=remote on a robot: the server, how long it is waited for, and the names that it uses."""

    url: str  # ws://host:port, wss://host:port or unix:/path
    timeout_s: float = 1.0  # time limit of one answer, in seconds
    patience_s: float = 0.5  # seconds for which a lost server is asked again, while the robot holds
    send_key: bool = False  # the key is sent in a header, to servers that know no proof of it
    keys: dict[str, str] = field(default_factory=dict)  # our name of an observation: theirs; empty: all, as they are
    prompt: str | None = None  # instruction that is sent with every observation; null: none
    execute: int | None = None  # actions of a chunk that are played; null: as announced, or all

    def __post_init__(self) -> None:
        if not self.url.startswith(("ws://", "wss://", "unix:")):
            raise BurnishError(f"url={self.url!r} is no address of a policy server; write ws://host:port or unix:/path")
        ranges = {"(0, inf)": "timeout_s", "[0, inf)": "patience_s", "[1, inf)": "execute"}
        check_ranges(self, ranges, "policy.")


@dataclass
class ActionSource:
    """``view`` is a world as the controllers see it and act in it; ``make`` a controller of so many worlds."""

    where: str
    known: PolicySpec | None
    make: Callable[[int], Controller]
    view: Callable[[VecEnv], VecEnv]
    world: Mapping[str, Any] | None = None  # for which it was trained, where it says so
    most: int = 1  # worlds that one controller has
    predictor: Callable[[], Predictor] | None = None  # makes the predictor, also in another process
    close: Callable[[], None] = field(default=lambda: None)
    learn: Callable[[EnvSpec], PolicySpec] | None = None  # of a server that says nothing of itself

    @property
    def spec(self) -> PolicySpec:
        if self.known is None:
            raise BurnishError(f"{self.where} does not say what it is, and has not been asked yet")
        return self.known


def exported(config: BundleConfig) -> ActionSource:
    """The action source of a bundle."""
    policy = load(config.path)
    origin = policy.bundle.about.get("origin")
    world = origin.get("env") if isinstance(origin, dict) else None
    return ActionSource(
        config.path,
        spec_of(policy.schema),
        lambda worlds: BundleController(policy),
        lambda env: env,  # the runtime stacks its own history, and answers in actuator units
        world if isinstance(world, dict) else None,
        predictor=partial(BundlePredictor, config.path),
    )


def served(config: ServedConfig, key: str | None = None, clock: Clock | None = None) -> ActionSource:
    """The action source of a policy server; ``key`` is the secret that it may ask for."""
    try:
        from .client import PolicyClient
    except ImportError as error:
        raise BurnishError("policy=remote needs websockets and msgpack; pip install 'burnish[serve]'") from error
    client = PolicyClient(config, key=key)

    def view(env: VecEnv) -> VecEnv:
        return env if client.spec.history == 1 else HistoryEnv(env, client.spec.history)

    def make(worlds: int) -> Controller:
        return ServerController(client, config.patience_s, clock or MonotonicClock())

    def learn(world: EnvSpec) -> PolicySpec:
        acting.known, acting.learn = client.learn(world), None
        acting.predictor = partial(ClientPredictor, config, key, acting.known)
        return acting.known

    known = None if client.silent else client.spec
    predictor = partial(ClientPredictor, config, key)
    acting = ActionSource(config.url, known, make, view, close=client.close, predictor=predictor)
    acting.learn = learn if client.silent else None
    return acting


def spec_of(schema: Schema) -> PolicySpec:
    """The policy's spec that a bundle's schema describes, of single frames."""
    single = {
        key: shape[1:] if schema.history > 1 and stacked_by_history(key) else shape for key, shape in schema.obs.items()
    }
    return PolicySpec(
        obs=ObsSpec(single),
        action=ActionSpec(schema.low, schema.high),
        horizon=schema.horizon,
        execute=schema.execute,
        start=schema.start,
        history=schema.history,
        noise_shape=schema.noise_shape,
        goal_free=schema.goal_free,
        control_hz=schema.control_hz,
        action_mode=schema.action_mode,
        pixels=schema.pixels,
        names=schema.names,
    )


def require_fit(acting: ActionSource, body: Body) -> list[str]:
    """Refuse what was made for another robot, another rate or another order of its numbers. Returns notes on
    facts that the policy does not state, which were not compared, and on numbers that it calls by other names."""
    spec, given, names = acting.spec, body.spec, feature_names(body)
    try:
        check_compatible(spec, replace(given, obs=given.obs.with_history(spec.history)))
        note = unlike_names("the policy", spec.names, "the environment", names)
    except BurnishError as error:
        raise BurnishError(f"{acting.where} does not fit this robot: {error}") from error
    rows = zip(spec.action.low, spec.action.high, given.action.low, given.action.high, strict=True)
    for i, (low, high, least, most) in enumerate(rows):
        slack = RANGE_TOLERANCE * (most - least)
        if low < least - slack or high > most + slack:
            raise BurnishError(
                f"{acting.where} does not fit this robot: coordinate {i} of its actions lies in [{low:g}, {high:g}], "
                f"and that of the robot in [{least:g}, {most:g}]; units or limits are others"
            )
    stated = {"control_hz": spec.control_hz is not None, "action_mode": not says_nothing(spec.action_mode)}
    unsaid = [name for name, known in stated.items() if not known]
    if lacking := sorted((names.keys() & {*spec.obs.shapes, "action"}) - spec.names.keys()):
        unsaid.append(f"names of {' and '.join(lacking)}")
    notes = [f"{acting.where} does not say its {x}, so this was not compared with the robot's" for x in unsaid]
    return [*notes, note] if note else notes


def inference_ms(acting: ActionSource, body: Body, seed: int) -> dict[str, float]:
    """The time of a decision on this machine once everything is warm. Nothing moves."""
    body.begin(seed)
    env, controller = acting.view(StillWorld(body)), acting.make(1)
    took = []
    for _ in range(REHEARSALS):
        obs = env.reset(None, [seed])
        controller.reset(torch.ones(1, dtype=torch.bool), [seed])
        began = time.perf_counter()
        controller.step(obs)
        took.append(1e3 * (time.perf_counter() - began))
    warm = took[COLD:]
    return {"p50": float(np.percentile(warm, 50)), "p99": float(np.percentile(warm, 99)), "first": took[0]}


class StillWorld:
    """A world in which the body stays as it is, whatever is asked of it."""

    num_envs, device = 1, torch.device("cpu")

    def __init__(self, body: Body) -> None:
        self.spec, self._body = body.spec, body
        self.asked = np.zeros(body.spec.action.dim)  # last, in the units of the actuators

    @property
    def instructions(self) -> list[str] | None:
        return getattr(self._body, "instructions", None)

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        return observed(self._body)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        self.asked, no = action[0].numpy().astype(np.float64), torch.tensor([False])
        return Step(self.reset(), torch.zeros(1), no, no, {})


class BundleController:
    """`runtime.ChunkController` in one world: single frames in, actuator units out."""

    def __init__(self, policy: ExportedPolicy) -> None:
        self._played = ChunkController(policy)

    def reset(self, mask: Tensor, seeds: Sequence[int] | None = None) -> None:
        if bool(mask[0]):
            self._played.reset(None if seeds is None else int(seeds[0]))

    def step(self, obs: Obs) -> Tensor:
        return _row(self._played.step(_sole(obs)))

    def peek(self, obs: Obs) -> Tensor:
        # It replaces what it remembers and changes none of it, so a shallow copy goes ahead alone.
        return _row(copy.copy(self._played).step(_sole(obs)))

    def state_dict(self) -> dict[str, Any]:
        return {key: x for key, x in vars(self._played).items() if key != "policy"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self._played).update(state)


class ServerController:
    """Asks a server for a chunk, plays ``execute`` actions of it, asks again."""

    def __init__(self, client: Any, patience_s: float, clock: Clock) -> None:
        self._client, self._patience_ns, self._clock = client, ns(patience_s), clock
        self._seed = self._episodes = self._decision = 0
        self._queue = np.zeros((0, client.spec.action.dim))

    def reset(self, mask: Tensor, seeds: Sequence[int] | None = None) -> None:
        if not bool(mask[0]):
            return
        self._seed = self._episodes if seeds is None else int(seeds[0])
        self._episodes += 1
        self._decision, self._queue = 0, self._queue[:0]
        self._patiently(self._client.reset)

    def step(self, obs: Obs) -> Tensor:
        queue = self._planned(obs)
        self._decision += len(self._queue) == 0
        self._queue = queue[1:]
        return _row(queue[0])

    def peek(self, obs: Obs) -> Tensor:
        return _row(self._planned(obs)[0])

    def _planned(self, obs: Obs) -> np.ndarray:
        if len(self._queue):
            return self._queue
        spec, seen = self._client.spec, _sole(obs)
        wanted = {key: sent(key, seen[key]) for key in spec.obs.shapes}
        noise: dict[str, Any] = {}
        source = RowNoise([self._seed], [self._decision])
        if spec.noise_shape is not None and "noise" in self._client.extensions:
            noise["noise"] = source.normal((1, *spec.noise_shape))[0].astype(np.float32)
        elif "seed" in self._client.extensions:
            noise["seed"] = np.int64(source.uniform((1, 1))[0, 0] * 2.0**53)
        chunk = self._patiently(lambda: self._client.act(wanted, **noise))
        return chunk[spec.start : spec.start + spec.execute]

    def _patiently(self, ask: Callable[[], Any]) -> Any:
        from .client import PolicyUnavailable

        until_ns = self._clock.now_ns() + self._patience_ns
        cause: PolicyUnavailable | None = None  # what comes after the first failure are its consequences
        while True:
            try:
                return ask()
            except PolicyUnavailable as error:
                cause, now_ns = cause or error, self._clock.now_ns()
                if now_ns >= until_ns:
                    raise cause from None
                self._clock.sleep_until_ns(min(until_ns, now_ns + SECOND // 50))

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "episodes": self._episodes, "decision": self._decision, "queue": self._queue}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seed, self._episodes = state["seed"], state["episodes"]
        self._decision, self._queue = state["decision"], state["queue"]


def _sole(obs: Obs) -> dict[str, np.ndarray]:
    return {key: x[0].numpy() for key, x in obs.items()}


def _row(action: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(action, np.float32))[None]
