"""robomimic: one HDF5 file, a group ``data/demo_<i>`` for each episode, lists of names in ``mask/``.

    data            env_args, JSON: env_name, type, env_kwargs with control_freq
    data/demo_<i>   obs/<key> (T, ...), next_obs/<key>, actions (T, A), rewards (T,), dones (T,), states

Isaac Lab's recorder writes the same. ``dones`` may mean a success, the end of the file or both, so how an episode ended
is read from the rewards where these are the 0 and 1 of robomimic's tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..episodes import Bad, Episodes, Mine
from .bounds import refusal
from .hdf5 import Group
from .recording import Recording, Source, actions_of, episodes_of, json_object, picked, rate_of, with_final

ROBOSUITE = 1  # robomimic's number of that kind of world, whose actions lie in [-1, 1]
FROM_REWARDS = "successes and ends are read from the rewards"


def read(path: Path, root: Group, bad: Bad | None = None, mine: Mine | None = None) -> Episodes:
    """The episodes of a file, or those that are ``mine``, in the order of their numbers."""
    data = root.group("data")
    world = json_object(data.text("env_args"))
    kwargs = json_object(world.get("env_kwargs"))
    unit = world.get("type") == ROBOSUITE
    source = Source("robomimic", unit=unit, control_hz=rate_of(path, "control_freq", kwargs.get("control_freq")))
    if isinstance(name := world.get("env_name"), str):
        source.meta["env_name"] = name
    if "mask" in root:
        place = {name: position for position, name in enumerate(data.numbered("demo_").values())}
        lists = ((name, root.group("mask").array(name).words()) for name in root.group("mask"))
        source.meta["masks"] = {name: sorted(place[x] for x in {*words} if x in place) for name, words in lists}
    return episodes_of(path, source, _recordings(path, data, mine, source.notes), bad)


def _recordings(path: Path, data: Group, mine: Mine | None, notes: list[str]) -> Iterator[Recording]:
    for place, _, name in picked(data.numbered("demo_"), mine):
        demo = data.group(name)
        seen = demo.leaves("obs") if "obs" in demo else {}
        if not seen:
            raise refusal(
                path,
                f"has states, but no observations in {name!r}; robomimic/scripts/dataset_states_to_obs.py plays them "
                "again and writes a file that has them",
            )
        action = actions_of(path, demo.array("actions"))
        obs = {key: leaf.read() for key, leaf in seen.items()}
        if "next_obs" in demo:
            last = {key: leaf.read(-1) for key, leaf in demo.leaves("next_obs").items()}
            obs = with_final(path, obs, last)
        reward = demo.array("rewards").read() if "rewards" in demo else None
        played = Recording(obs, action, reward, place=place)
        if reward is not None and bool(np.isin(reward, (0, 1)).all()):
            notes.append(FROM_REWARDS)
            played.success, played.terminated = bool(reward.any()), bool(reward[-1:].any())
            played.truncated = not played.terminated
        yield played
