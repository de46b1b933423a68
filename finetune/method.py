"""A method as a row of the table (`table.py`): its settings, how it is built, and the facts that the loops read.

A method of another package is the same row, announced as an entry point and read when it is asked for:

    [project.entry-points."burnish.methods"]
    my_method = "my_package.my_method:METHOD"        # METHOD = Method("one line about it", ...)

It is then chosen by ``method=my_method``. A name in the table cannot be taken over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from importlib import import_module
from typing import Any, TypeVar

from ..offline.dataset import BehindCut
from ..policies.core.types import Learner
from .loops import Assembly, Loop
from .people.intervened_rows import InterventionUse

NONE = type(None)
Made = TypeVar("Made")
Named = str | Callable[..., Made]  # a function, or "module:function", relative to `burnish.finetune`


class Phase(Enum):
    """The phases in which a method learns: from recordings, or from what is played."""

    offline = "offline"  # `burnish offline`: from recordings alone
    online = "online"  # `burnish finetune`: from what is played, with recordings or without


class Needs(Enum):
    """A requirement of a base; the value completes "needs a policy that ..."."""

    chain = "exposes its generation chain"
    flow = "is a flow"
    noise = "takes its noise from outside"
    imitator = "can go on imitating"
    actions = "acts"
    gaussian = "is a Gaussian or acts by tokens, or none at all"
    squashed = "is a Gaussian squashed by tanh, or none at all"
    trainable = "can go on imitating, or none at all"
    denoiser = "makes its chunk of noise and can go on imitating, or none at all"
    planner = "plans in a latent model, or none at all"
    view = "its view asks for, or none at all"  # the method itself knows its views, and refuses

    @property
    def optional(self) -> bool:
        return self.value.endswith("or none at all")


class Recorded(Enum):
    """The use of recordings that are given as prior data."""

    unused = "unused"
    played = "played"  # decisions of the base's kind
    corrections = "corrections"  # what the base would have had to be corrected by
    executed = "executed"  # what was executed, with no noise behind it
    ticks = "ticks"  # every control tick, for a model of the world


class LoopKind(Enum):
    """The loop in which a method learns online."""

    on_policy = "learns from what was just played"
    off_policy = "learns from a replay"
    imagined = "has another method learn from a model of the world"
    episodes = "scores whole episodes of many policies"
    library = "has the loop and the memory of another library"


class View(Enum):
    """The choice of a method at each decision, which says how long that is."""

    chunk = "chunks like those of the base; without a base, of its own"
    own = "chunks of its own"
    latent = "the noise of the base for each of its chunks, which is probed first"
    residual = "a correction of each action of the base"
    plain = "each action"

    @property
    def per_tick(self) -> bool:
        return self in (View.residual, View.plain)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row. ``build(config, base, env, *, seed, device, ...)`` makes the view and the learner of the online phase.
    ``learner(config, policy, *, seed, device)`` makes a learner that needs no world, for the offline phase; online it
    goes on by itself (`methods/offline_to_online.py`) unless ``build`` is given too. Each phase has its own settings,
    because one without a world has no use for a loop."""

    doc: str  # one line
    config: type = NONE  # the settings of the online phase; NONE: it has no such phase
    build: Named[Assembly[Any, Any] | Loop[Any]] = ""
    offline: type = NONE  # the settings of the offline phase
    learner: Named[Learner] = ""
    needs: Needs = Needs.actions  # of the base
    recordings: Recorded = Recorded.unused
    why_unused: str = "learns from its own decisions alone"
    # the value behind a cut, in the returns that recordings bring with each decision; None: they bring none
    returns: BehindCut | None = None
    interventions: InterventionUse = InterventionUse.left_out
    loop: LoopKind = LoopKind.off_policy
    view: View = View.chunk
    # its critic, or its PPO, counts a row as much as an imagined world says (guard=weight; `world_model/env.py`)
    weighs: bool = False
    varies: Callable[[Any, Method], Method] | None = None  # (settings, row) -> row: facts that depend on the settings

    @property
    def phases(self) -> frozenset[Phase]:
        given = {Phase.online: self.config, Phase.offline: self.offline}
        return frozenset(phase for phase, config in given.items() if config is not NONE)

    def settings(self, phase: Phase) -> type:
        return self.config if phase is Phase.online else self.offline

    def with_settings(self, config: Any) -> Method:
        """The row as it is with these settings."""
        return self if self.varies is None else self.varies(config, self)

    def changed(self, **facts: Any) -> Method:
        return replace(self, **facts)


def resolved(build: Named[Made]) -> Callable[..., Made]:
    """The builder itself, imported where it is named as "module:function"."""
    if not isinstance(build, str):
        return build
    module, _, function = build.partition(":")
    return getattr(import_module(module, __package__), function)
