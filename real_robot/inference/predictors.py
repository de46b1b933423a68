"""Predictors that need torch: a policy of ours, and a policy server over a network.

``SubprocessWorker(partial(loaded, partial(load_policy, path)))`` runs a checkpoint in a process of its own
(`worker.py`, which also has the predictor of bundles); ``SubprocessWorker(partial(ClientPredictor, config, key))`` asks
a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...policies.core.seed import RowNoise
from ...policies.core.spec import PolicySpec
from ...policies.core.types import Policy, Prefix, Pull
from ...policies.wire.server_spec import sent
from .worker import Chunk, Facts, Pulling

if TYPE_CHECKING:
    from .action_sources import ServedConfig


def facts_of(spec: PolicySpec, continues: bool) -> Facts:
    """The facts of a policy that chunking needs, from its spec."""
    return Facts(spec.horizon, spec.execute, spec.start, spec.action.dim, continues)


class PolicyPredictor:
    """A policy in torch, as a predictor."""

    def __init__(self, policy: Policy) -> None:
        self.facts = facts_of(policy.spec, continues=True)._replace(guides=True)
        self._policy = policy

    @torch.no_grad()
    def __call__(
        self, obs: Mapping[str, NDArray[Any]], prefix: Chunk | Pulling | None, seed: int, decision: int
    ) -> NDArray[Any]:
        seen = {key: torch.from_numpy(x)[None] for key, x in obs.items()}
        return self._policy.act(seen, prefix=self._prefix(prefix), generator=RowNoise([seed], [decision]))[0].numpy()

    def _prefix(self, given: Chunk | Pulling | None) -> Prefix | None:
        if given is None:
            return None
        if isinstance(given, Pulling):
            actions, weights = (torch.from_numpy(x) for x in given)
            return Pull(actions[None], weights)
        return torch.from_numpy(given)[None]


def loaded(load: Callable[[], tuple[Policy, Any]], threads: int = 1) -> PolicyPredictor:
    """For another process: ``load`` gives a policy and its origin, as `policies.build.load_policy` does."""
    if threads > 0:
        torch.set_num_threads(threads)
    return PolicyPredictor(load()[0])


class ClientPredictor:
    """Its chunks come in the units of the actuators, and become [-1, 1] by the limits that the server announces. The
    noise is sent along, or a seed, where the server says that it takes them."""

    def __init__(self, config: ServedConfig, key: str | None = None, learnt: PolicySpec | None = None) -> None:
        from .client import PolicyClient  # it needs packages that nobody else here does

        self._client = PolicyClient(config, key=key, learnt=learnt)
        spec = self._client.spec
        self.facts = facts_of(spec, continues=False)
        low, high = np.array(spec.action.low), np.array(spec.action.high)
        self._middle, self._half = (low + high) / 2, (high - low) / 2
        self._begins = False  # an episode has begun, and the server has not confirmed yet that it knows

    def __call__(
        self, obs: Mapping[str, NDArray[Any]], prefix: Chunk | Pulling | None, seed: int, decision: int
    ) -> NDArray[Any]:
        self._begins |= decision == 0
        if self._begins:
            self._client.reset()
            self._begins = False
        raw = {key: sent(key, obs[key]) for key in self._client.spec.obs.shapes}
        actions = self._client.act(raw, **self._drawn(RowNoise([seed], [decision])))
        return np.clip((actions - self._middle) / self._half, -1, 1)

    def _drawn(self, source: RowNoise) -> dict[str, Any]:
        extensions, shape = self._client.extensions, self._client.spec.noise_shape
        if "noise" in extensions and shape is not None:
            return {"noise": source.normal((1, *shape))[0].float().numpy()}
        if "seed" in extensions:
            return {"seed": (source.uniform((1, 1)) * 2.0**53).long()[0, 0].numpy()}
        return {}
