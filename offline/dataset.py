"""Recorded episodes as decisions: what offline learning reads and prior data brings to a replay.

A policy of n executed steps decides every n ticks, but a recording has no preferred first tick: each of its n phases is
a proper sequence of decisions, and together they use every window once.

    tick        0 1 2 3 4 5 6        n = 3, an episode of 7 actions
    phase 0     [0 1 2][3 4 5][6]    the last decision is cut short: steps = 1, with the end of the episode
    phase 1       [1 2 3][4 5 6]
    phase 2         [2 3 4][5 6]

Rewards and discounts are those of ``ChunkEnv``: in-chunk discounting, gamma^steps * (1 - terminated). Recorded actions
were also executed, so the columns ``action`` and ``executed`` agree.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor, nn

from ..policies.core.errors import BurnishError
from ..policies.core.normalize import Normalizer, Scaling
from ..policies.core.spec import PolicySpec, require_like_actions, stacked_by_history, unlike_names
from ..policies.core.types import Obs
from ..policies.data.episodes import Episode, Episodes, scaled_actions, with_tokens
from .replay import Replay
from .returns import returns_to_go


class BehindCut(Enum):
    """The value that a Monte-Carlo return takes behind the cut of a recording. It was not seen, and calibration
    (Cal-QL) needs a bound from below, which only ``worst`` always is."""

    worst = "worst"  # the smallest reward of all recordings, for ever: r / (1 - gamma)
    last = "last"  # the last reward of this recording, for ever: -1 until success, as published for sparse tasks
    nothing = "nothing"  # 0, as published for dense rewards; a bound where no reward is negative


def decisions(
    episodes: Episodes,
    spec: PolicySpec,
    gamma: float,
    *,
    returns: BehindCut | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Replay:
    """A full replay (one world) of all decisions. ``gamma`` is per control tick. ``returns`` adds the column
    ``return_to_go``, and says what stands in it for what follows a truncation."""
    if len(episodes) == 0:
        raise BurnishError("there are no episodes to learn from")
    episodes = with_tokens(episodes, spec)
    require_like_actions("the policy", spec.action_mode, "the recordings", episodes.spec.action_mode)
    unlike_names("the policy", spec.names, "the recordings", episodes.names)
    if None not in (spec.control_hz, episodes.control_hz) and spec.control_hz != episodes.control_hz:
        raise BurnishError(
            f"the policy acts with control_hz={spec.control_hz}, but the recordings were made with "
            f"{episodes.control_hz}; take recordings of the policy's world"
        )
    rewards = [episode.reward for episode in episodes]
    tails = [None] * len(episodes) if returns is None else _tails(rewards, gamma, returns)
    actions = scaled_actions(episodes, spec.action).split([len(episode) for episode in episodes])
    pieces = [
        _phase(episode, spec, gamma, start, played, earned, tail)
        for episode, played, earned, tail in zip(episodes, actions, rewards, tails, strict=True)
        for start in range(min(spec.execute, len(episode)))
    ]
    replay = Replay(sum(len(columns["reward"]) for _, columns, _ in pieces), seed=seed, device=device)
    for obs, columns, final in pieces:
        replay.extend(obs, columns, final)
    return replay


def fit_normalizers(module: nn.Module, replay: Replay, kind: Scaling = Scaling.standard) -> None:
    """Scale the observations of a fresh policy as they lie in the data; what it scaled before is forgotten."""
    seen = replay.latest()["obs"]
    for part in module.modules():
        if isinstance(part, Normalizer):
            part.fit(seen, kind)


def _tails(rewards: list[Tensor], gamma: float, behind_cut: BehindCut) -> list[Tensor]:
    """The return that is assumed to follow each episode that was cut off."""
    if behind_cut is BehindCut.nothing:
        return [torch.zeros(()) for _ in rewards]
    if gamma == 1:
        raise BurnishError(
            f"behind_cut={behind_cut.value} continues a reward for ever, which has no finite worth at gamma=1; "
            "lower gamma, or take behind_cut=nothing"
        )
    worst = torch.cat(rewards).amin()
    return [(worst if behind_cut is BehindCut.worst else earned[-1]) / (1 - gamma) for earned in rewards]


def _phase(
    episode: Episode,
    spec: PolicySpec,
    gamma: float,
    start: int,
    actions: Tensor,
    rewards: Tensor,
    tail: Tensor | None,
) -> tuple[Obs, dict[str, Tensor], Obs]:
    """The decisions of one phase: obs and columns (T, ...), and the final observation (1, ...)."""
    length, n = len(episode), spec.execute
    first = torch.arange(start, length, n)
    ticks = first[:, None] + torch.arange(n)
    played = ticks < length
    taken = ticks.clamp(max=length - 1)
    steps = played.sum(1)
    in_chunk = torch.where(played, rewards[taken] * gamma ** torch.arange(n), 0.0).sum(1)
    ended = first + n >= length
    terminated = ended & episode.terminated
    action = torch.where(played[..., None], actions[taken], 0.0)
    columns = {
        "action": action,
        "executed": action,
        "reward": in_chunk,
        "discount": gamma ** steps.float() * ~terminated,
        "ended": ended,
        "terminated": terminated,
        "steps": steps,
    }
    if tail is not None:
        columns["return_to_go"] = returns_to_go(
            in_chunk[:, None], columns["discount"][:, None], ended[:, None], tail.expand(len(first), 1)
        )[:, 0]
    return _seen(episode, spec, first), columns, _seen(episode, spec, torch.tensor([length]))


def _seen(episode: Episode, spec: PolicySpec, ticks: Tensor) -> Obs:
    """Observations at ``ticks`` as the policy receives them: sensed keys with their history, oldest first."""
    out: Obs = {}
    for key in spec.obs.shapes:
        if key not in episode.obs:
            raise BurnishError(f"the policy needs {key!r}, but the recordings hold {sorted(episode.obs)}")
        if spec.history > 1 and stacked_by_history(key):
            back = torch.arange(spec.history - 1, -1, -1)
            out[key] = episode.obs[key][(ticks[:, None] - back).clamp(min=0)]
        else:
            out[key] = episode.obs[key][ticks]
    return out
