"""The robot's end of the policy server: asks for a chunk, believes nothing, and never waits for long.

A reply is as hostile as a request: it must be small, hold a finite chunk of exactly the announced shape, and name the
observation that it answers. Any other answer is a `PolicyUnavailable`, after which the robot plays what it has, or
stops; nobody is asked again about an observation that is old by then. A connection that was lost is made anew at the
next request, at most once in BACKOFF_S, which doubles with every failure in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...policies.core.errors import BurnishError
from ...policies.core.spec import EnvSpec, PolicySpec, dtype_of
from ...policies.wire.connection import Connection, ServerRefused, same
from ...policies.wire.server_spec import sent, shown, spec_from_server, wanted
from ..clock import SECOND, Clock, MonotonicClock, ns
from ..errors import Refused, RobotError
from .action_sources import ServedConfig

FIRST_S = 120.0  # for the first answer of all, before which a server may compile
BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0  # after the first failure, and after many
LARGEST_REPLY = 2**20  # bytes; a chunk of 50 actions of 32 joints in double precision has 13 kB


class PolicyUnavailable(RobotError):
    """No chunk, for the reason given. The client may be asked again."""


class PolicyClient:
    """``expected`` is what the robot was set up for; a server of another policy is refused. ``key`` is never sent but
    proven, unless the settings say otherwise.

    A server that announces no specification (openpi's own, or another library's) can be used once `learn` has asked it
    about an observation, or with what another client has ``learnt`` so; until then its ``spec`` is not known."""

    def __init__(
        self,
        config: ServedConfig,
        expected: PolicySpec | None = None,
        *,
        key: str | None = None,
        clock: Clock | None = None,
        learnt: PolicySpec | None = None,
    ) -> None:
        self.config, self._key, self._clock = config, key, clock or MonotonicClock()
        self._connection: Connection | None = None
        self._failures, self._not_before_ns, self._obs_seq = 0, 0, 0
        self._connect()
        assert self._connection is not None
        self.metadata = self._connection.metadata
        self._spec = self._spec_from_server(self.metadata.get("policy_spec")) or learnt
        if expected is not None and self._spec != expected:
            raise Refused(f"the server at {config.url} has another policy than the robot was set up for")

    @property
    def spec(self) -> PolicySpec:
        self._require_known()
        assert self._spec is not None
        return self._spec

    @property
    def silent(self) -> bool:
        """It announces nothing, and has not been asked."""
        return self._spec is None

    def learn(self, world: EnvSpec) -> PolicySpec:
        """The spec that an answer about ``world`` shows; its actions are in the units of that."""
        names, shapes = wanted(self.config.keys, world), world.obs.shapes
        blank = {key: np.zeros(shapes[key], str(dtype_of(key)).removeprefix("torch.")) for key in names}
        assert self._connection is not None, "the settings were checked by connecting"
        with self._connection.patient(FIRST_S):
            reply = self._exchange(self._message({key: sent(key, x) for key, x in blank.items()}))
        actions = reply.get("actions")
        if not isinstance(actions, np.ndarray):
            raise Refused(f"{self._where} answers without actions, but with {sorted(map(str, reply))}")
        self._spec = self._settled(shown(actions, world, names, self._where))
        return self._spec

    def act(self, observation: Mapping[str, NDArray[Any]], **extensions: Any) -> NDArray[np.float64]:
        """(H, A) in the units of the actuators, the first for the time of the observation, which is under our names,
        pictures as (H, W, 3). ``extensions``: ``noise`` or ``seed``, as announced."""
        self._require_known()
        unknown = sorted(set(extensions) - set(self.extensions))
        if unknown:
            raise Refused(f"the server at {self.config.url} does not announce {unknown}")
        self._obs_seq += 1
        reply = self._exchange({**self._message(observation), **extensions, **self._numbered()})
        try:
            actions = self._actions(reply)
        except PolicyUnavailable:
            self._lost()  # who answers wrongly once is not in step with us
            raise
        self._failures = 0
        return actions

    def reset(self) -> None:
        """A new episode begins. A server that does not know the word remembers nothing."""
        if "reset" in self.extensions and self._exchange({"reset": True}).get("reset") is not True:
            self._lost()
            raise PolicyUnavailable(f"the server at {self.config.url} did not confirm a reset")

    @property
    def extensions(self) -> list[str]:
        said: Any = self.metadata.get("extensions")
        return [x for x in said if isinstance(x, str)] if isinstance(said, list) else []

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _numbered(self) -> dict[str, int]:
        return {"obs_seq": self._obs_seq} if "obs_seq" in self.extensions else {}

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        self._connect()
        assert self._connection is not None
        try:
            return self._connection.exchange(message)
        except ServerRefused as error:  # busy, or our mistake: we are in step still
            raise PolicyUnavailable(str(error)) from error
        except BurnishError as error:
            self._lost()
            raise PolicyUnavailable(str(error)) from error

    def _connect(self) -> None:
        if self._connection is not None:
            return
        wait_ns = self._not_before_ns - self._clock.now_ns()
        if wait_ns > 0:
            raise PolicyUnavailable(f"{self.config.url} failed and is dialled again in {wait_ns / SECOND:.2f} s")
        try:
            made = Connection(
                self.config.url,
                timeout_s=self.config.timeout_s,
                api_key=self._key,
                prove=not self.config.send_key,
                limit=LARGEST_REPLY,
            )
            if self._failures and not same(made.metadata, self.metadata):
                made.close()
                raise BurnishError(f"the server at {self.config.url} came back as another one; start anew")
        except BurnishError as error:
            self._lost()
            raise PolicyUnavailable(str(error)) from error
        self._connection = made

    def _lost(self) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None
        pause_s = min(BACKOFF_S * 2 ** min(self._failures, 30), LONGEST_BACKOFF_S)
        self._failures += 1
        self._not_before_ns = self._clock.now_ns() + ns(pause_s)

    @property
    def _where(self) -> str:
        return f"the server at {self.config.url}"

    def _spec_from_server(self, data: Any) -> PolicySpec | None:
        try:
            return None if data is None else self._settled(spec_from_server(data, self.config.keys, self._where))
        except BurnishError as error:
            raise Refused(str(error)) from error

    def _require_known(self) -> None:
        if self.silent:
            raise Refused(f"{self._where} does not announce its policy, and has not been asked about a world yet")

    def _settled(self, spec: PolicySpec) -> PolicySpec:
        return spec if self.config.execute is None else replace(spec, execute=self.config.execute)

    def _message(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        message = {self.config.keys.get(key, key): x for key, x in observation.items()}
        return message if self.config.prompt is None else {**message, "prompt": self.config.prompt}

    def _actions(self, reply: dict[str, Any]) -> NDArray[np.float64]:
        actions, place = reply.get("actions"), self._where
        if not isinstance(actions, np.ndarray) or actions.dtype not in (np.float32, np.float64):
            raise PolicyUnavailable(f"{place} answered without actions in floating point")
        if actions.shape != self.spec.chunk_shape:
            found, needed = str(actions.shape)[:60], self.spec.chunk_shape
            raise PolicyUnavailable(f"{place} answered with actions of shape {found}, but {needed} is announced")
        if not np.isfinite(actions).all():
            raise PolicyUnavailable(f"{place} answered with actions that are not finite")
        if self._numbered() and (type(seq := reply.get("obs_seq")) is not int or seq != self._obs_seq):
            raise PolicyUnavailable(f"{place} answered about another observation than {self._obs_seq}")
        return actions.astype(np.float64)
