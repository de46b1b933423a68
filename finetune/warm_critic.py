"""A critic that another run has learnt, for a refinement that goes on where that run ended.

The policy of a run is where the next one starts (``policy.path=RUN``), but a fresh critic has to learn first what that
policy is worth, and misleads it meanwhile. ``critic_from=RUN`` brings the critic too, with its target, and the value
that some critics are learnt from (IQL's): from recordings into the world, from a simulation into another one or onto a
robot. Optimisers begin anew, with the rates that the new run has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..offline.critics import Critic
from ..offline.learner import Wrapping
from ..policies.core.errors import BurnishError
from ..policies.runs.checkpoint import Checkpoint, newest
from ..policies.runs.run import CHECKPOINTS, CONFIG

JUDGES = ("critic", "value", "latent_critic")  # what learners call them


def adopt_critic(learner: Any, run: str) -> None:
    """Into ``learner`` the critic that the newest checkpoint of ``run`` holds."""
    while isinstance(learner, Wrapping):
        learner = learner.inner
    critic = getattr(learner, "critic", None)
    if not isinstance(critic, Critic):
        raise BurnishError(
            f"this method learns no critic that could begin as that of critic_from={run}; leave critic_from= out"
        )
    if getattr(learner, "seen", None) is not None:
        raise BurnishError(
            f"this agent learns the scales of its observations anew, and the critic of critic_from={run} would be "
            f"another one in them; begin with the policy of that run too: policy.path={run}"
        )
    judges = {name: getattr(learner, name, None) for name in JUDGES}
    adopted = {name: (part, critic_state(run, name)) for name, part in judges.items() if isinstance(part, nn.Module)}
    for judge, (part, saved) in adopted.items():
        require_like(judge, part.state_dict(), saved, run)
    for part, saved in adopted.values():
        part.load_state_dict(saved)


def require_like(part: str, own: Mapping[str, Any], saved: Mapping[str, Any], run: str) -> None:
    """The states of a ``part`` of two runs have the same tensors, or one sentence says which differ."""
    for name in sorted(own.keys() | saved.keys()):
        wanted, found = (tuple(x[name].shape) if isinstance(x.get(name), Tensor) else None for x in (own, saved))
        if wanted != found:
            raise BurnishError(
                f"the {part} of {run} is another one: {name} has {found or 'no value'}, here {wanted or 'none'}; give "
                f"this run the method of that one and its settings of the {part}, which stand in {Path(run) / CONFIG}"
            )


def newest_of(setting: str, run: str) -> Checkpoint:
    """The newest checkpoint of a run that a ``setting`` names."""
    checkpoint = newest(Path(run) / CHECKPOINTS)
    if checkpoint is None:
        raise BurnishError(f"{setting}={run} has no checkpoints; give the folder of a run, out= of its command")
    return checkpoint


def critic_state(run: str, name: str = "critic") -> dict[str, Any]:
    """Of a run of `burnish offline` or `burnish finetune`."""
    state = newest_of("critic_from", run).children["learner"].state
    state = state.get("real", state.get("inner", state))  # loops of MBPO and imagine hold that of the method within
    found = state.get("learner", {}).get(name)
    if not isinstance(found, dict):
        raise BurnishError(
            f"the method of critic_from={run} learns no {name}; give a run of one that does, or leave it out"
        )
    return found
