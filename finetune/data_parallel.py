"""The on-policy loop on several processes, as `torchrun` starts them, with the numbers of one (`core/ranks.py`).

Each rank plays its share of the worlds, numbered among all of them: their seeds, the noise of a base in them and the
draws of the actor are those of one process. Before an update the ranks exchange their rollouts, so that advantages,
normalisers, reward scales and statistics see all worlds, in the order that one process has them in. Of each minibatch a
rank computes the rows that are its own, and the gradients are added up (`PPO._descent`).

A state is that of one process too: its episodes under way are gathered when it is saved and shared out when it is
loaded, so any number of ranks goes on from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional as F

from ..policies.core.chunk import DecisionEnv
from ..policies.core.errors import BurnishError
from ..policies.core.ranks import Ranks, sharing
from ..policies.core.tree import to
from ..policies.core.types import Outcome
from ..policies.runs.state_codec import decode, encode, separate
from .episode_statistics import EpisodeStatistics
from .loops import L, OnPolicy
from .method import LoopKind
from .table import METHODS, ONLINE, method_name, method_of

NOTED = ("success", "intervened", "bonus")  # facts of an outcome that a rollout lacks and `EpisodeStatistics` wants
BY_WORLD = ("env", "fresh", "obs")  # of the state of a loop, what each rank has of its own worlds


def share_of(config: Any, ranks: Ranks) -> Any:
    """The settings of a refinement for the worlds of one of ``ranks``; what cannot be shared is refused."""
    name = method_name(config.method)
    if method_of(config.method).loop is not LoopKind.on_policy:
        able = ", ".join(f"method={x}" for x in ONLINE if METHODS[x].loop is LoopKind.on_policy)
        raise BurnishError(
            f"method={name} {method_of(config.method).loop.value}, which several ranks do not share; start it without "
            f"torchrun, or take one of {able}"
        )
    if config.explore is not None:
        raise BurnishError("explore=... learns from the worlds of one process alone; leave it out, or torchrun")
    ranks.require_share(config.worlds, "worlds")
    return replace(config, worlds=config.worlds // ranks.size)


def on_policy(learner: L, env: DecisionEnv, length: int, seed: int) -> OnPolicy[L]:
    """The loop, of one process or of the ranks to which belongs what is made now."""
    ranks = sharing()
    if ranks.size == 1:
        return OnPolicy(learner, env, decisions_per_update=length, seed=seed)
    return SharedOnPolicy(learner, env, decisions_per_update=length, seed=seed, ranks=ranks)


class SharedOnPolicy(OnPolicy[L]):
    """The loop of one of ``ranks``: ``env`` holds its share of the worlds, the learner gets the decisions of all."""

    def __init__(self, learner: L, env: DecisionEnv, *, decisions_per_update: int, seed: int, ranks: Ranks) -> None:
        super().__init__(learner, env, decisions_per_update=decisions_per_update, seed=seed)
        self.ranks, self.worlds = ranks, env.num_envs * ranks.size
        self.generator: Any = ranks.generator(self.generator)
        self.statistics = EpisodeStatistics(self.worlds, env.device)
        self._infos: list[dict[str, Tensor]] = []  # of each decision of the rollout

    @property
    def decisions_per_iteration(self) -> int:
        return self.length * self.worlds

    def note(self, outcome: Outcome) -> None:
        self._infos.append({name: outcome.info[name] for name in NOTED if name in outcome.info})

    def play(self) -> dict[str, Any]:
        """The decisions of all worlds."""
        self._infos.clear()
        own, count = super().play(), self.env.num_envs
        with self.watch("exchanging"):  # and waiting for the slowest rank
            parts = exchanged({**own, "infos": self._infos}, self.ranks)
        infos, led = ([part.pop(name) for part in parts] for name in ("infos", "bootstrap"))
        batch: dict[str, Any] = interleaved(parts, count, dim=1)
        size = self.ranks.size
        rows = [x["rows"] // count * self.worlds + x["rows"] % count * size + i for i, x in enumerate(led)]
        seen = {key: torch.cat([x["obs"][key] for x in led]) for key in led[0]["obs"]}
        batch["bootstrap"] = {"rows": torch.cat(rows), "obs": seen}
        batch = to(batch, self.env.device)
        for i, info in enumerate(interleaved(infos, count)):
            row = {name: batch[name][i] for name in ("reward", "discount", "ended", "terminated", "steps")}
            self.statistics.note(Outcome({}, {}, **row, executed=row["steps"], info=to(info, self.env.device)))
        return batch

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        parts = exchanged({name: state.pop(name) for name in BY_WORLD}, self.ranks)
        state |= interleaved(parts, self.env.num_envs)
        return state | ({"obs": None} if any(x["obs"] is None for x in parts) else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state | {name: self._own(x) for name, x in state.items() if name in BY_WORLD})

    def _own(self, tree: Any) -> Any:
        """Of a state of all worlds that of this rank's."""
        if isinstance(tree, Mapping):
            return {key: self._own(x) for key, x in tree.items()}
        by_world = isinstance(tree, Tensor) and tree.ndim and len(tree) == self.worlds
        return self.ranks.rows(tree) if by_world else tree


def exchanged(tree: dict[str, Any], ranks: Ranks) -> list[dict[str, Any]]:
    """The trees of all ranks, on the CPU. They need not have the same keys or sizes."""
    form, tensors = encode({"tree": tree})
    words = torch.frombuffer(bytearray(json.dumps(form).encode()), dtype=torch.uint8)
    found = [load(data) for data in ranks.exchanged(save({**separate(tensors), "form": words}))]
    return [decode(json.loads(x.pop("form").numpy().tobytes()), x)["tree"] for x in found]


def interleaved(parts: Sequence[Any], worlds: int, dim: int = 0) -> Any:
    """One tree of those of all ranks, whose dimension ``dim`` counts their ``worlds``; the rest is alike in all. A part
    that one rank lacks is zero there: the plan of a controller, or actions of episodes longer than its own."""
    first = next((x for x in parts if x is not None), None)
    if isinstance(first, Mapping):
        known = [x for x in parts if x is not None]
        keys = dict.fromkeys(key for x in known for key in x)
        return {key: interleaved([None if x is None else x.get(key) for x in parts], worlds, dim) for key in keys}
    if isinstance(first, list):
        return [interleaved(each, worlds, dim) for each in zip(*parts, strict=True)]
    if not (isinstance(first, Tensor) and first.ndim > dim and first.shape[dim] == worlds):
        return first
    each = [torch.zeros_like(first) if x is None else x for x in parts]
    if first.ndim > dim + 1:
        longest = max(x.shape[dim + 1] for x in each)
        each = [F.pad(x, (0, 0) * (x.ndim - dim - 2) + (0, longest - x.shape[dim + 1])) for x in each]
    return torch.stack(each, dim + 1).flatten(dim, dim + 1)
