"""ManiSkill: an HDF5 file with a group ``traj_<i>`` for each episode, and a JSON file of the same name beside it.

    traj_<i>   obs (T + 1, ...), actions (T, A), terminated, truncated (T,), rewards?, success?, env_states
    JSON       env_info: env_id, max_episode_steps, env_kwargs; episodes: episode_id, episode_seed, control_mode

Observations are arranged as `env=maniskill` shows them: the numbers of ``agent`` and ``extra`` in their own order as
``state``, and each camera's colours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ...core.spec import UNKNOWN
from ...runs.manifest import parse
from ..episodes import PASSED_OVER, Bad, Episodes, Mine
from .bounds import refusal
from .hdf5 import Array, Group
from .recording import Recording, Source, actions_of, ended, episodes_of, json_object, picked, rate_of, seed_of, whole

NUMBERS = (("agent",), ("extra",))  # groups whose arrays make up the state
CAMERAS = (("sensor_data",), ("sensor_param",))  # of which the colours are read
NO_JSON = "there is no JSON file beside the trajectories: seeds and the mode of the actions are unknown"


def read(path: Path, root: Group, bad: Bad | None = None, mine: Mine | None = None) -> Episodes:
    """The episodes of a file, or those that are ``mine``, in the order of their numbers."""
    source, about = Source("maniskill"), {}
    if (beside := path.with_suffix(".json")).is_file():
        about = json_object(parse(beside, json.loads))
    else:
        source.notes.append(NO_JSON)
    world, listed = json_object(about.get("env_info")), about.get("episodes")
    kwargs = json_object(world.get("env_kwargs"))
    played = [json_object(each) for each in listed] if isinstance(listed, list) else []
    modes = {x for x in (each.get("control_mode") for each in (*played, kwargs)) if isinstance(x, str)}
    if len(modes) > 1:
        raise refusal(path, f"has actions of the control modes {', '.join(sorted(modes))}; keep those of one")
    source.action_mode = next(iter(modes), UNKNOWN)
    source.unit = "delta" in source.action_mode  # in such modes all of its controllers take numbers from [-1, 1]
    source.control_hz = rate_of(path, "control_freq", json_object(kwargs.get("sim_config")).get("control_freq"))
    source.max_steps = whole(world.get("max_episode_steps"))
    source.meta |= {"env_name": world["env_id"]} if isinstance(world.get("env_id"), str) else {}
    known = ((each.get("episode_id"), seed_of(each.get("episode_seed"))) for each in played)
    seeds = {number: seed for number, seed in known if type(number) is int and seed is not None}
    return episodes_of(path, source, _recordings(path, root, seeds, source.notes, mine), bad)


def _recordings(
    path: Path, root: Group, seeds: Mapping[int, int], notes: list[str], mine: Mine | None
) -> Iterator[Recording]:
    for place, number, name in picked(root.numbered("traj_"), mine):
        played = root.group(name)
        seen = played.leaves("obs") if "obs" in played else {}
        if not seen:
            raise refusal(
                path,
                "has the states of the simulator, but no observations; `python -m mani_skill.trajectory."
                "replay_trajectory --traj-path FILE --use-env-states --obs-mode state --save-traj` plays it again and "
                "writes a file that has them",
            )
        yield Recording(
            _seen(seen, notes),
            actions_of(path, played.array("actions")),
            played.array("rewards").read() if "rewards" in played else None,
            *(ended(played.array(name)) for name in ("terminated", "truncated")),
            success=bool(played.array("success").read().any()) if "success" in played else None,
            seed=seeds.get(number, number),
            place=place,
        )


def _seen(leaves: Mapping[tuple[str, ...], Array], notes: list[str]) -> dict[tuple[str, ...], np.ndarray]:
    seen, numbers, passed = {}, [], []
    for key, leaf in leaves.items():
        if key[:1] in NUMBERS:
            x = leaf.read()
            numbers.append(x.reshape(len(x), -1).astype(np.float32))
        elif key[:1] == ("sensor_data",) and key[2:] == ("rgb",):
            seen[key[1:2]] = leaf.read()
        elif key[:1] in CAMERAS:
            passed.append(".".join(key))
        else:
            seen[key] = leaf.read()
    if passed:
        notes.append(PASSED_OVER + ", ".join(sorted(passed)))
    return {**seen, ("state",): np.concatenate(numbers, 1)} if numbers else seen
