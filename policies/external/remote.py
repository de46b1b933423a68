"""``policy=remote``: a policy behind a websocket, as a frozen base or to be measured, on openpi's protocol.

Any server of it will do: openpi's own, one of another library that speaks it, ``burnish serve``. Raw observations
leave here: pictures as (H, W, 3) uint8, everything else as it is, under the names that ``keys`` gives.
The answer is a chunk in the units of the actuators, which becomes [-1, 1] by the same limits as in `scale.py`.

A server says in its metadata what else it understands, and is asked for nothing that it did not announce:

    extensions    ["batch", "noise", "seed", ...]
                  batch   a request may hold ``batch`` = B, and B rows of everything, ``largest_batch`` at most
                  prompt  it reads a ``prompt``, a text, or with ``batch`` a list of B
                  noise   ``noise`` starts the generation: then latent methods work, and draws belong to their episodes
                  seed    ``seed`` makes its own draws repeatable, where there is no noise to give
    policy_spec   a `PolicySpec` as plain data; without it the horizon is learnt by asking once

In a world that gives instructions, each row's own is its ``prompt``, unless the settings name one for all. A list is
sent only where the rows of a request are told different things.

``reset`` is a name of the same list that stateless policies have no use for. A key for the server comes from the
environment variable BURNISH_API_KEY, is written nowhere, and goes to no address that a checkpoint names. An address
that only a checkpoint names is connected to where it is one of this machine.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor

from ..core.errors import BurnishError
from ..core.language import Letters, without_tokens
from ..core.ranges import check_ranges
from ..core.scale import Scale
from ..core.seed import Noise, RowNoise
from ..core.spec import EnvSpec, PolicySpec, dtype_of
from ..core.types import ActOptions, Obs
from ..wire.server_spec import sent, shown, spec_from_server, wanted
from .policy import CallablePolicy, checked

API_KEY = "BURNISH_API_KEY"


@dataclass
class RemoteConfig:
    """Settings of `policy=remote`: the URL, the names that the server uses, and limits of a request."""

    url: str  # address of the server: ws://host:port
    keys: dict[str, str] = field(default_factory=dict)  # our name of an observation: theirs; empty: all, as they are
    prompt: str | None = None  # instruction that is sent with every observation; null: the world's own, if any
    execute: int | None = None  # actions of a chunk that are played; null: as announced, or all
    batch: int = 64  # rows of one request, where the server takes several
    timeout_s: float = 120.0  # time limit of one answer, in seconds

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("ws", "wss") and bool(parts.hostname)
        except ValueError:
            parts, known = None, False
        if parts is None or not known:
            raise BurnishError(f"url={self.url!r} is no address of a policy server; write ws://host:port")
        if parts.username or parts.password:
            raise BurnishError(
                f"a url is written into checkpoints, so it must hold no secrets; put the key into {API_KEY}"
            )
        check_ranges(self, {"[1, inf)": "batch execute", "(0, inf)": "timeout_s"}, "policy.")


def doubt(config: RemoteConfig, checkpoint: str) -> str:
    """Why a checkpoint's word is not enough to connect; empty where it is. A server there would be shown what
    the robot sees. A path could be an order to some other server of this machine."""
    parts = urlsplit(config.url)
    try:
        here = parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        here = False
    if not here:
        return "that is another machine, which would be shown all observations"
    return "" if not (parts.path.strip("/") or parts.query) else "that is more than an address of this machine"


class RemotePolicy:
    """A policy behind a connection to its server, as one of this world, frozen.

    ``sample`` are observations of the world, of which the first is asked about where the server says too little.
    """

    seeds_beside_noise = False  # whether a server that takes noise draws more by itself

    def __init__(self, config: RemoteConfig, world: EnvSpec, sample: Obs | None = None, *, keyed: bool = True) -> None:
        try:
            from ..wire.connection import Connection
        except ImportError as error:
            raise BurnishError("policy=remote needs websockets and msgpack; pip install 'burnish[serve]'") from error
        self.config, self.world = config, world
        self._letters = Letters() if config.prompt is None and "tokens" in world.obs.shapes else None
        key = os.environ.get(API_KEY) if keyed else None
        connection = Connection(config.url, timeout_s=config.timeout_s, api_key=key)
        self._meet(connection, f"the server at {config.url}", config.keys)
        data = self._connection.metadata.get("policy_spec")
        self.spec = self._reading(self._asked(sample) if data is None else self._spec_from_server(data))
        self._scale = Scale(self.spec.action)

    def _meet(self, connection: Any, where: str, names: Mapping[str, str]) -> None:
        """``names`` are the server's names of observations by ours."""
        self._connection, self._where, self._names = connection, where, names
        said = connection.metadata.get("extensions")
        self.extensions = {str(name) for name in said} if isinstance(said, list) else set()

    def act(self, obs: Obs, **how: Unpack[ActOptions]) -> Tensor:
        seeds, generator = None, how.get("generator")
        drawn = self.spec.noise_shape is None or self.seeds_beside_noise
        if drawn and "seed" in self.extensions and generator is not None:
            seeds = _seeds(generator, len(next(iter(obs.values()))))
        return CallablePolicy(partial(self._ask, seeds=seeds), self.spec).act(obs, **how)

    def close(self) -> None:
        self._connection.close()

    def _reading(self, spec: PolicySpec) -> PolicySpec:
        """Instructions reach this policy as the bytes of their text, unless the server asks for tokens itself."""
        if self._letters is None or "tokens" in spec.obs.shapes:
            self._letters = None
            return spec
        return spec.reading(self._letters)

    def _ask(self, seen: Obs, noise: Tensor | None = None, seeds: Tensor | None = None) -> Tensor:
        """(B, H, A) in [-1, 1], in as few requests as the server allows."""
        texts = [] if self._letters is None else self._letters.texts(seen["tokens"])
        seen = seen if self._letters is None else {key: x for key, x in seen.items() if key != "tokens"}
        columns = {self._names.get(key, key): _sent(key, x) for key, x in seen.items()}
        columns |= {name: _sent(name, x) for name, x in (("noise", noise), ("seed", seeds)) if x is not None}
        rows, several = len(next(iter(columns.values()))), "batch" in self.extensions
        most = self._connection.metadata.get("largest_batch")
        size = min(self.config.batch, most if type(most) is int and most > 0 else self.config.batch) if several else 1
        chunks = []
        for first in range(0, rows, size):
            count = min(size, rows - first)
            part = slice(first, first + count) if several else first
            message: dict[str, Any] = {name: x[part] for name, x in columns.items()}
            if texts:
                some = texts[first : first + count]
                message["prompt"] = some[0] if len(set(some)) == 1 else some
            actions = self._actions(message | ({"batch": count} if several else {}))
            expected = (count, *self.spec.chunk_shape) if several else self.spec.chunk_shape
            chunks.append(checked(actions, expected).reshape(count, *self.spec.chunk_shape))
        return self._scale.to_unit(torch.cat(chunks))

    def _actions(self, message: dict[str, Any]) -> np.ndarray:
        if self.config.prompt is not None:
            message["prompt"] = self.config.prompt
        reply = self._connection.ask(message)
        actions = reply.get("actions")
        if not isinstance(actions, np.ndarray):
            raise BurnishError(f"{self._where} answered without actions, but with {sorted(map(str, reply))}")
        return actions

    def _spec_from_server(self, data: Any) -> PolicySpec:
        spec = spec_from_server(data, self._names, self._where)
        noise = spec.noise_shape if "noise" in self.extensions else None
        return replace(spec, noise_shape=noise, execute=self.config.execute or spec.execute)

    def _asked(self, sample: Obs | None) -> PolicySpec:
        """Of a server that announces nothing: what its answer to one observation shows."""
        world = self.world if self._letters is None else replace(self.world, obs=without_tokens(self.world.obs))
        shapes, names = world.obs.shapes, wanted(self._names, world)
        blank = {key: torch.zeros(1, *shapes[key], dtype=dtype_of(key)) for key in names}
        seen = blank if sample is None else {key: sample[key][:1] for key in names}
        message: dict[str, Any] = {self._names.get(key, key): _sent(key, x)[0] for key, x in seen.items()}
        if self._letters is not None:
            message["prompt"] = "" if sample is None else self._letters.texts(sample["tokens"][:1])[0]
        actions = self._actions(message)
        spec = shown(actions, world, names, self._where)
        noise = actions.shape if "noise" in self.extensions else None
        return replace(spec, noise_shape=noise, execute=self.config.execute or spec.execute)


def _sent(key: str, x: Tensor) -> np.ndarray:
    return sent(key, x.detach().cpu().numpy())


def _seeds(source: Noise, rows: int) -> Tensor:
    """One per row, of its own stream where it has one."""
    if isinstance(source, RowNoise):
        return (source.uniform((rows, 1)) * 2.0**53).long()[:, 0]
    draw = partial(torch.randint, 2**53)
    if not isinstance(source, torch.Generator):
        return source.draw(draw, (rows,), 0)
    return draw((rows,), generator=source, device=source.device)
