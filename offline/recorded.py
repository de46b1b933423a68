"""Recordings as prior data of a residual method: as corrections of its base.

A residual agent decides at every tick and sees ``base_action``. A recording knows no base, so the base is run along the
recorded observations with the queue that it would have had: asked at ticks 0, n, 2n, ..., its n actions played between.

    tick           0    1    2    3    4    5=T      n = 2, an episode of 5 actions
    base asked     *         *         *
    base_action   b0_0 b0_1 b1_0 b1_1 b2_0 b2_1      also where the recording ends, for the bootstrap behind a cut
    residual      (a - base_action) / bound

**Residuals are not clipped.** A demonstration further than ``bound`` from the base gets a residual beyond [-1, 1]. The
agent cannot say it, but base + bound * residual is then the recorded action everywhere, so that reward and next
observation belong to the action that the critic is shown; clipped, it would be shown an action that nobody took.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..policies.core.errors import BurnishError
from ..policies.core.seed import RowNoise, derive
from ..policies.core.spec import ActionSpec, PolicySpec
from ..policies.core.tree import index, map_tree, to
from ..policies.core.types import Obs, Policy
from ..policies.core.views import Hidden, unhidden
from ..policies.data.episodes import Episodes, with_tokens
from .dataset import decisions
from .replay import Replay


class Labelled(NamedTuple):
    """A replay of recordings as corrections of a base, and the share that lies out of the corrections' reach."""

    replay: Replay
    beyond: float  # share of the recorded coordinates that lie further than ``bound`` from the base: out of reach


def episodes_of(replay: Replay) -> Iterator[tuple[Obs, dict[str, Tensor], Obs]]:
    """The episodes of a replay of one world, as ``Replay.extend`` takes them: obs and columns (T, ...), and where the
    last decision led (1, ...)."""
    held = map_tree(lambda x: x[:, 0], {k: x for k, x in replay.latest().items() if k != "obs"})
    obs = map_tree(lambda x: x[:, 0], replay.latest()["obs"])
    first = 0
    for last in held["ended"].nonzero()[:, 0].tolist():
        rows = slice(first, last + 1)
        final = replay.gather(torch.tensor([last], device=replay.device))["next_obs"]
        yield index(obs, rows), index(held, rows), final
        first = last + 1


@torch.no_grad()
def label_with_base(
    episodes: Episodes,
    base: Policy,
    gamma: float,
    bound: float,
    *,
    limits: ActionSpec | None = None,
    observe: Collection[Hidden] = (),
    seed: int = 0,
    device: torch.device | str = "cpu",
    rows: int = 1024,
) -> Labelled:
    """Recorded episodes as the decisions of a residual agent, with all observations of the recordings.

    Each chunk of the base is drawn once, all episodes together, in batches of ``rows``; its noise belongs to (episode,
    decision), as when a controller plays it. ``observe`` is that of the view. ``limits`` are those of the recorded
    actuators, by default the base's.
    """
    if not hasattr(base, "act"):
        raise BurnishError(
            f"recordings are labelled by asking a policy, but the base is a {type(base).__name__}, which only plays; "
            "give the policy itself, or refine without prior data"
        )
    spec = base.spec
    episodes = with_tokens(episodes, spec)
    like: dict[str, Any] = {key: getattr(spec, key) for key in ("history", "control_hz", "action_mode")}
    one = PolicySpec(episodes.spec.obs, limits or spec.action, horizon=1, execute=1, **like)
    pieces = list(episodes_of(decisions(episodes, one, gamma, device=device)))
    # A base with an empty queue is asked on these.
    asked = [{key: torch.cat([x[key], last[key]])[:: spec.execute] for key in spec.obs.shapes} for x, _, last in pieces]
    counts = torch.tensor([len(next(iter(seen.values()))) for seen in asked])
    seeds = torch.tensor([derive(seed, "label", i) for i in range(len(pieces))]).repeat_interleave(counts)
    number = torch.cat([torch.arange(count) for count in counts.tolist()])
    everything = {key: torch.cat([seen[key] for seen in asked]) for key in asked[0]}
    chunks = []
    for part in torch.arange(len(number)).split(rows):
        noise = RowNoise(seeds[part].to(device), number[part].to(device))
        chunks.append(spec.executed(base.act(to(index(everything, part), device), generator=noise)).float())
    plans = torch.cat(chunks).split(counts.tolist())

    out = Replay(sum(len(columns["ended"]) for _, columns, _ in pieces), seed=seed, device=device)
    beyond = torch.zeros((), dtype=torch.int64, device=device)
    for (obs, columns, final), plan in zip(pieces, plans, strict=True):
        tick = torch.arange(len(columns["ended"]) + 1, device=plan.device)
        chunk, place = plan[tick // spec.execute], tick % spec.execute
        planned = chunk[tick, place]
        shown = {"base_action": planned, **unhidden(chunk, place, observe)}
        residual = (columns["action"] - planned[:-1, None]) / bound
        beyond += (residual.abs() > 1 + 1e-6).sum()
        out.extend(
            {**obs, **index(shown, slice(None, -1))},
            {**columns, "action": residual},
            {**final, **index(shown, slice(-1, None))},
        )
    return Labelled(out, float(beyond) / (len(out) * spec.action.dim))
