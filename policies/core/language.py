"""Instructions as a policy reads them: worlds speak text, ``Spoken`` adds it to each observation as ``tokens``.

Numbers are made of text by the tokenizer of the policy (`policies/vla/words.py`). A policy that wants the text itself,
such as one behind a server, reads by ``Letters``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .errors import BurnishError
from .seed import derive
from .spec import ObsSpec, PolicySpec, Words
from .types import Obs, Step, VecEnv
from .wrapper import Wrapper, instructions

# The label of a chunk, behind the instruction, for a policy that learns from good and bad (`policies/advised.py`).
POSITIVE, NEGATIVE = "Advantage: positive", "Advantage: negative"


class Spoken(Wrapper):
    """A world whose ``instructions`` are observed as ``tokens`` (N, L) int64, -1 behind the end of each.

    With ``swap``, the instructions that this world gives, each row is told another than its own, which the seed of its
    episode chooses. The world goes by its own: a policy that follows words then fails, and one that does not, does not.
    """

    def __init__(self, env: VecEnv, words: Words | None, swap: Sequence[str] = ()) -> None:
        super().__init__(env)
        if instructions(env) is None:
            raise BurnishError(
                "the policy reads instructions, and this world gives none; take a world of several tasks, such as "
                "env=discs, or on a robot instruction=..."
            )
        if words is None:
            raise BurnishError("the policy reads instructions, but nothing says by which tokenizer")
        if swap and len(set(swap)) < 2:
            raise BurnishError(f"words can be swapped between two instructions or more, and there is only {swap[0]!r}")
        self._words, self._swap, self._seeds = words, sorted(set(swap)), [0] * env.num_envs
        self.spec = replace(env.spec, obs=ObsSpec({**env.spec.obs.shapes, "tokens": (words.length,)}))
        self._texts: list[str] = []
        self._tokens = torch.empty(0)

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        obs = self.env.reset(mask, seeds)
        self._seeds = self._seeds if seeds is None else [int(seed) for seed in seeds]
        return self._heard(obs)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.env.step(action, active)
        return step._replace(obs=self._heard(step.obs))

    def _heard(self, obs: Obs) -> Obs:
        texts = instructions(self.env) or []
        if self._swap:
            texts = [self._other(text, seed) for text, seed in zip(texts, self._seeds, strict=True)]
        if texts != self._texts:
            self._texts, self._tokens = texts, self._words.ids(texts).to(self.device)
        return {**obs, "tokens": self._tokens}

    def _other(self, text: str, seed: int) -> str:
        others = [other for other in self._swap if other != text]
        return others[derive(seed, "swap") % len(others)]


def unworded(spec: PolicySpec) -> PolicySpec:
    """Of a policy that is told in text: without the tokens that are made of it here."""
    return spec if spec.words is None else replace(spec, obs=without_tokens(spec.obs), words=None)


def without_tokens(obs: ObsSpec) -> ObsSpec:
    """All that is observed but the instruction."""
    return ObsSpec({key: shape for key, shape in obs.shapes.items() if key != "tokens"})


def padded(rows: Sequence[Sequence[int]], length: int) -> Tensor:
    """(B, length) int64, -1 behind the end of each row."""
    return torch.tensor([[*row, *[-1] * (length - len(row))] for row in rows], dtype=torch.int64).view(-1, length)


class Letters:
    """Text as its bytes in UTF-8, from which it can be had again."""

    def __init__(self, length: int = 256) -> None:
        self.length = length

    def ids(self, texts: Sequence[str]) -> Tensor:
        rows = [list(text.encode()) for text in texts]
        if (longest := max(map(len, rows), default=0)) > self.length:
            raise BurnishError(f"an instruction of {longest} bytes is longer than the {self.length} allowed")
        return padded(rows, self.length)

    def texts(self, ids: Tensor) -> list[str]:
        return [bytes(x for x in row if x >= 0).decode(errors="replace") for row in ids.tolist()]
