"""A model of the world that another run has learnt, for one that begins with it: its networks and scales, and the ticks
that it was fitted to (``model_from=RUN``).

So several methods, or several seeds of one, learn in what one run has played. The first fit goes on from it, with its
ticks and the new ones; its optimiser begins anew. Numbers of a model mean what they meant in its run, so that run had
the same world, actions, rewards and twin.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..policies.core.config import to_data
from ..policies.core.errors import BurnishError
from ..policies.core.spec import VISION, ActionSpec
from ..policies.core.tree import leaves
from ..policies.runs.manifest import parse, plain_yaml
from ..policies.runs.run import CONFIG
from .warm_critic import newest_of, require_like
from .world_model.model import WorldModel

# Settings of a world that change no tick of an episode that begins alike: where it is simulated, and how long it lasts.
FREE = ("backend", "max_steps", "randomize", "processes", "restart", "python", "address", "vector", "image_size")


def adopt_model(
    loop: Any, run: str, settings: Any, world: Mapping[str, Any] | None = None, limits: ActionSpec | None = None
) -> None:
    """Into ``loop`` the model, and its ticks, that the newest checkpoint of ``run`` holds. ``settings`` are those of
    the refinement, ``world`` and ``limits`` where it acts, and how far."""
    model, given = getattr(loop, "model", None), f"model_from={run}"
    if not isinstance(model, WorldModel):
        raise BurnishError(
            f"this method learns no model of the world that could begin as that of {given}; leave model_from= out, or "
            "take method=imagine or method=mbpo"
        )
    if len(loop.ticks):
        raise BurnishError(f"{given} brings the ticks that its model was fitted to; leave data= out")
    if any(key.startswith(VISION) for key in model.spec.obs.shapes):
        raise BurnishError(
            f"a model of pictures predicts what one policy's networks make of them, so it cannot begin as that of "
            f"{given}; leave model_from= out"
        )
    checkpoint = newest_of("model_from", run)
    state = checkpoint.children["learner"].state
    saved, ticks = state.get("model"), state.get("ticks")
    if not isinstance(saved, dict) or not isinstance(ticks, dict) or not ticks.get("ticks"):
        raise BurnishError(
            f"the method of {given} has learnt no such model; give a run of method=imagine or method=mbpo that has, or "
            "leave it out"
        )
    require_like("model", model.state_dict(), saved, run)
    _require_like_columns(model, ticks["ticks"], run)
    policy, kept = checkpoint.children["policy"].config, parse(Path(run) / CONFIG, plain_yaml)
    usual = {"rewards": to_data(type(settings.rewards)()), "twin": None}  # where an older run does not say it
    other = [name for name, x in usual.items() if kept.get(name, x) != to_data(getattr(settings, name))]
    there = (policy.get("origin") or {}).get("env")
    if world is not None and there and there["name"] != world["name"]:
        other.append(f"env ({there['name']})")
    elif world is not None and there:
        theirs, ours = there.get("config", {}), world.get("config", {})
        changed = {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}
        other += sorted(f"env.{key}" for key in changed.difference(FREE))
    action = to_data(model.spec.action if limits is None else limits)
    if any(policy["spec"]["action"][end] != action[end] for end in ("low", "high")):
        other.append("limits of actions")
    if other:
        raise BurnishError(f"the model of {run} was learnt with other {' and other '.join(other)}; restore them")
    model.load_state_dict(saved)
    loop.ticks.load_state_dict(ticks)
    if hasattr(loop, "show_ticks"):
        loop.show_ticks()


def _require_like_columns(model: WorldModel, ticks: Mapping[str, Any], run: str) -> None:
    """The ticks are those of a world like the model's, and finite."""
    shapes = {key: tuple(shape) for key, shape in model.spec.obs.shapes.items()}
    found = {key: tuple(x.shape[1:]) for key, x in ticks["obs"].items()}
    if (
        found != shapes
        or ticks["next_obs"].keys() != shapes.keys()
        or ticks["action"].shape[1:] != (model.spec.action.dim,)
    ):
        raise BurnishError(f"the ticks of {run} are of another world: they hold {found}, and this one shows {shapes}")
    if not all(bool(torch.isfinite(x).all()) for x in leaves(ticks)):
        raise BurnishError(f"the ticks of {run} are not all finite numbers, so no model can go on from them")
