"""The policies that verbs start from and the evaluators that try them, in the worlds that settings name.

Shared by the entry points, and as free as they are to import ``sim``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..sim.build import make_env, origin_of, world_for
from .build import CheckpointConfig, loaded
from .cli.machine import say
from .core.errors import BurnishError
from .core.language import Letters, Spoken
from .core.spec import ChunkConfig, PolicySpec, unlike_names
from .core.wrapper import description, feature_names, instructions
from .data.episodes import Episodes
from .data.lerobot import Mine
from .data.read import read_dataset
from .evaluator import EvalConfig, Evaluator
from .external.table import connect, place_of


def acting_policy(chosen: Any, device: torch.device, env: Any) -> tuple[Any, dict[str, Any]]:
    """The policy of ``policy=...``, and its origin. ``env`` is the configured world, without which nobody knows what
    the actions of another library's policy mean."""
    if isinstance(chosen, CheckpointConfig):
        return loaded(chosen, device)
    if env is None:
        raise BurnishError(f"{place_of(chosen)} does not say which world it is for; give env=...")
    world = make_env(env, 1, device=device)
    if instructions(world) is not None and getattr(chosen, "prompt", "") is None:
        world = Spoken(world, Letters())  # who wants text is told the world's own
    return connect(chosen, world.spec, world.reset()), {"env": origin_of(env)}


def starting_policy(chosen: Any, device: torch.device, env: Any = None) -> tuple[Any, dict[str, Any]]:
    """The policy of ``policy=...`` and its origin; nothing where none was chosen."""
    return (None, {}) if chosen is None else acting_policy(chosen, device, env)


def complete(policy: Any, episodes: Episodes) -> PolicySpec:
    """The specification of ``policy``, in which recordings say from now on what it left open of rate, actions, pictures
    and names."""
    for part in (policy, getattr(policy, "base", policy)):  # `Advised` is saved as its base
        part.spec = part.spec.completed(episodes.policy_spec(ChunkConfig()))
    return policy.spec


def recordings(path: str, mine: Mine | None = None) -> Episodes:
    """The episodes of a dataset, with pictures where they are ``mine``; a line says what its reader had to fill in."""
    episodes = read_dataset(path, mine=mine)
    if notes := episodes.meta.get("notes"):
        say(f"{path}: {'; '.join(notes)}")
    return episodes


def evaluator_of(
    data: Mapping[str, Any] | None, spec: PolicySpec, config: EvalConfig, device: torch.device, quiet: bool = False
) -> Evaluator | None:
    """None where no world is known, or none is wanted. A line says what world it is, unless it is ``quiet``."""
    if config.episodes == 0:
        say("eval.episodes=0: the policy is not tried, so nothing is known of its success, and no best/ is chosen")
        return None
    if data is None:
        return None
    worlds = min(config.worlds, max(config.episodes, config.confirm))
    try:
        world = world_for(spec, data, worlds, device)
    except BurnishError as error:
        raise BurnishError(f"{error}. To train without trying the policy, give eval.episodes=0") from error
    if not quiet and (line := description(world)):
        say(line)
    if note := unlike_names("the policy", spec.names, "the environment", feature_names(world)):
        say(f"note: {note}")
    return Evaluator(world, config, device)
