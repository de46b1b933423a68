"""A policy that is told how good what it imitates was, and acts as if told "better than usual".

The advantage of a chunk is told by its sign: 1, -1, or 0 for nothing. Where observations go through an
encoder that is one more number; a vision-language-action model reads it behind its instruction (`core/language.py`).
With ``guidance`` other than 1 a flow or diffusion goes further along what the word changes, as it does for goals
(`nets/denoiser.py`): prediction = untold + guidance * (told - untold).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from .core.errors import BurnishError
from .core.language import NEGATIVE, POSITIVE
from .core.ranges import check_ranges
from .core.spec import ObsSpec
from .core.types import ActOptions, Obs
from .nets.denoiser import Denoiser
from .nets.encoder import ADVANTAGE, ObsEncoder


@dataclass
class AdvisedConfig:
    """Configuration of a policy that acts as told that its chunk is better than usual."""

    guidance: float = 1.0

    def __post_init__(self) -> None:
        check_ranges(self, {"[0, inf)": "guidance"}, "advised.")


class Advised(nn.Module):
    """``base`` observes the advantage too: in training as ``obs["advantage"]`` (B, 1) says, else 1."""

    def __init__(self, base: Any, guidance: float = 1.0) -> None:
        super().__init__()
        self.base, self.config = base, AdvisedConfig(guidance)
        shapes = base.spec.obs.shapes
        self.spec = replace(base.spec, obs=ObsSpec({key: shapes[key] for key in shapes if key != ADVANTAGE}))
        self.speaks = ADVANTAGE not in shapes  # the advantage is told in words
        self._sentences: Tensor | None = None
        if self.speaks and base.spec.words is None:
            raise BurnishError(
                f"a {type(base).__name__} cannot be told the advantage: it has no encoder of ours and reads no words; "
                "take a flow, diffusion, gaussian or vision-language-action policy"
            )
        net = getattr(base, "net", None)
        if isinstance(net, Denoiser) and ADVANTAGE in shapes:
            if base.config.net.guidance != 1:
                raise BurnishError(
                    "a policy is guided by its goal or by the advantage, not by both; load it with policy.guidance=1"
                )
            net.guidance = guidance
        elif guidance != 1:
            raise BurnishError(
                f"guidance={guidance} by the advantage is for flow and diffusion policies, and this is a "
                f"{type(base).__name__}; leave guidance=1"
            )

    def act(self, obs: Obs, **how: Unpack[ActOptions]) -> Tensor:
        return self.base.act(self.with_advantage(obs), **how)

    def bc_loss(self, obs: Obs, action: Tensor, **options: Any) -> Tensor:
        """The loss of the base, each row under the advantage that it was told."""
        return self.base.bc_loss(self.with_advantage(obs), action, **options)

    def with_advantage(self, obs: Obs) -> Obs:
        """The observation of the base."""
        first = next(iter(obs.values()))
        advantage = obs.get(ADVANTAGE, torch.ones(len(first), 1, device=first.device))
        if not self.speaks:
            return {**obs, ADVANTAGE: advantage}
        rest = {key: x for key, x in obs.items() if key != ADVANTAGE}
        return {**rest, "tokens": _said(obs["tokens"], advantage, self.sentences(first.device))}

    def sentences(self, device: torch.device | str = "cpu") -> Tensor:
        """Of both advantages (`_sentences`). They are asked for late: a policy that is loaded has no tokenizer yet, and
        stay on that device, because a recording cannot bring them there."""
        if self._sentences is None:
            self._sentences = _sentences(self.base)
        self._sentences = self._sentences.to(device)
        return self._sentences


def advised(base: Any, guidance: float = 1.0) -> Advised:
    """``base``, taken over. It acts as before until it is trained: the new number has no weight yet."""
    if isinstance(base, Advised):
        return base if guidance == base.config.guidance else Advised(base.base, guidance)
    encoders = [part for part in base.modules() if isinstance(part, ObsEncoder)]
    if len(encoders) == 1 and ADVANTAGE not in base.spec.obs.shapes:
        base = _wider(base, encoders[0])
    made = Advised(base, guidance)
    if made.speaks:
        made.sentences()  # or a refusal
    return made


def _wider(base: Any, encoder: ObsEncoder) -> Any:
    """The same policy with one more input, whose weights are 0. The features of an encoder are the last inputs of
    every layer that reads them."""
    device = next(base.parameters()).device
    spec = replace(base.spec, obs=ObsSpec({**base.spec.obs.shapes, ADVANTAGE: (1,)}))
    with torch.random.fork_rng(devices=[]):
        made = type(base)(spec, base.config)
    if hasattr(base, "words"):
        made.words = base.words
    state, given = made.state_dict(), base.state_dict()
    for name, x in given.items():
        wide = state.get(name, x)
        if wide.shape != x.shape and wide.ndim >= 2:
            at = x.shape[1] - encoder.width + _place(made)
            x = torch.cat([x[:, :at], x.new_zeros(len(x), 1, *x.shape[2:]), x[:, at:]], 1)
        if name not in state or wide.shape != x.shape:
            raise BurnishError(
                f"a {type(base).__name__} of these sizes cannot be given one more input; make its "
                "hidden layers wider or narrower by one"
            )
        state[name] = x
    made.load_state_dict(state)
    trained = {name: p.requires_grad for name, p in base.named_parameters()}
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(trained[name])
    return made.to(device).train(base.training)


def _place(policy: nn.Module) -> int:
    """Where in the features of its encoder the advantage stands."""
    return next(part.place(ADVANTAGE) for part in policy.modules() if isinstance(part, ObsEncoder))


def _sentences(base: Any) -> Tensor:
    """(2, k): the tokens of both sentences, -1 behind the end of the shorter, without those that begin every text."""
    found = base.spec.words.ids([POSITIVE, NEGATIVE, ""])
    begun = int((found == found[0]).all(0).cumprod(0).sum())
    found = found[:2, begun:]
    if torch.equal(found[0], found[1]):
        raise BurnishError(
            f"the tokenizer of the policy knows no difference between {POSITIVE!r} and {NEGATIVE!r}; pretrain the "
            "policy again, or take another tokenizer: policy.words=FILE"
        )
    return found[:, : int((found >= 0).sum(1).max())]


def _said(tokens: Tensor, advantage: Tensor, words: Tensor) -> Tensor:
    """``tokens`` (B, L) with a sentence behind each instruction, which loses its end where both do not fit."""
    said = torch.where(advantage > 0, words[0], words[1])  # (B, k)
    length, size = tokens.shape[1], words.shape[1]
    first = (tokens >= 0).sum(1, keepdim=True).clamp(max=length - size)
    place = first + torch.arange(size, device=tokens.device)
    return torch.where(advantage == 0, tokens, tokens.scatter(1, place, said))
