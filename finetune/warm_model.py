"""A model of the world that another run has learnt, for one that begins with it: its networks and scales, and the ticks
that it was fitted to (``model_from=RUN``).

So several methods, or several seeds of one, learn in what one run has played, and a model of a simulation goes on in
the world. The first fit goes on from it, with its ticks and the new ones; its optimiser begins anew.
"""

from __future__ import annotations

from typing import Any

from ..policies.core.errors import BurnishError
from .warm_critic import learner_of, require_like
from .world_model.model import WorldModel


def adopt_model(loop: Any, run: str) -> None:
    """Into ``loop`` the model, and its ticks, that the newest checkpoint of ``run`` holds."""
    model = getattr(loop, "model", None)
    if not isinstance(model, WorldModel):
        raise BurnishError(
            f"this method learns no model of the world that could begin as that of model_from={run}; leave model_from= "
            "out, or take method=imagine or method=mbpo"
        )
    if len(loop.ticks):
        raise BurnishError(f"model_from={run} brings the ticks that its model was fitted to; leave data= out")
    state = learner_of("model_from", run)
    if not {"model", "ticks"} <= state.keys() or not isinstance(state["ticks"], dict):
        raise BurnishError(
            f"the method of model_from={run} learns no such model; give a run of method=imagine or method=mbpo, or "
            "leave it out"
        )
    saved, known = state["model"], state["ticks"]
    require_like("model", model.state_dict(), saved, run)
    if not bool((saved["high"] > saved["low"]).any()):
        raise BurnishError(f"{run} has not fitted its model yet; let it go on (resume=true), or leave model_from= out")
    if (known["expected"] is not None) is not (model.twin is not None):
        raise BurnishError(
            f"the model of {run} was learnt {'on top of a' if model.twin is None else 'without a'} twin, and this one "
            "is not; give this run the same twin="
        )
    model.load_state_dict(saved)
    loop.ticks.load_state_dict(known)
