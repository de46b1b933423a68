"""Entry point: ``burnish collect``, demonstrations of a scripted expert or of a trained policy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..policies.build import CheckpointConfig, load_policy
from ..policies.core.chunk import HistoryEnv
from ..policies.core.cli import main
from ..policies.core.config import to_data
from ..policies.core.errors import BurnishError
from ..policies.core.run import progress_bar, require_writable
from ..policies.core.seed import derive
from ..policies.core.spec import check_compatible, stacked_by_history
from ..policies.core.types import Controller, VecEnv
from ..policies.data.episodes import Episodes
from ..policies.data.lerobot_writer import write_lerobot
from ..policies.horizon import controller_for
from .build import ENVS, env_name, make_env, world_from
from .collect import collect as record
from .experts import make_expert
from .two_mode import TwoModeConfig

GROUPS: dict[str, dict[str, dict[str, type]]] = {
    "collect": {
        "env": {name: kind.config for name, kind in ENVS.items()},
        "policy": {"checkpoint": CheckpointConfig},
    },
}


@dataclass
class CollectConfig:
    env: Any = None  # two_mode by default; with a policy, the world that it was trained for
    expert: str | None = None  # level of the scripted expert of that world, clean by default
    policy: Any = None  # policy=checkpoint policy.path=...: a trained policy, which then acts instead of the expert
    episodes: int = 100
    worlds: int = 50  # stepped at once; changes what a network does by no more than rounding
    seed: int = 0
    out: str = "runs/data"

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.worlds < 1:
            raise BurnishError(f"episodes={self.episodes} and worlds={self.worlds} must be at least 1")
        if self.expert is not None and self.policy is not None:
            raise BurnishError(f"expert={self.expert} and policy=checkpoint cannot both act; give one of them")


def collect(config: CollectConfig) -> int:
    if Path(config.out).exists():
        raise BurnishError(f"{config.out} exists already; use another out=")
    require_writable(Path(config.out).parent)
    worlds = min(config.worlds, config.episodes)
    if config.policy is None:
        world, made_by = config.env or TwoModeConfig(), {"expert": config.expert or "clean"}
        raw = env = make_env(world, worlds)
        controller: Controller = make_expert(world, worlds, made_by["expert"], seed=config.seed)
    else:
        chosen = config.policy
        policy, trained = load_policy(chosen.path, steps=chosen.steps, guidance=chosen.guidance)
        world, made_by = config.env or _world_of(trained), {"policy": chosen.path}
        raw = make_env(world, worlds)
        env, controller = _seen_by(policy, raw), controller_for(policy, worlds)
    origin = {"env": {"name": env_name(world), "config": to_data(world)}, "seed": config.seed, **made_by}
    seeds = [derive(config.seed, "collect", i) for i in range(config.episodes)]
    with progress_bar(len(seeds), "episode") as bar:
        episodes = record(env, controller, seeds, meta=origin, progress=lambda n, total: _show(bar, n))
    if env is not raw:
        episodes = _last_frames(episodes, raw)
    write_lerobot(episodes, config.out)
    wins = sum(episode.success for episode in episodes)
    size = f"{len(episodes)} episodes, {episodes.frames} frames, {wins} successful"
    sys.stdout.write(f"{config.out}: {env_name(world)}, {size}\n")
    return 0


def _show(bar: tqdm, finished: int) -> None:
    bar.update(finished - bar.n)


def _world_of(origin: Mapping[str, Any]) -> Any:
    data = origin.get("env")
    if not data:
        raise BurnishError("this policy does not say which world it was trained for; give env=...")
    return world_from(data)


def _seen_by(policy: Any, raw: VecEnv) -> VecEnv:
    """Histories stacked; actions stay in the world's units, and must be those that the policy learnt."""
    env: VecEnv = raw if policy.spec.history == 1 else HistoryEnv(raw, policy.spec.history)
    check_compatible(policy.spec, env.spec)
    if policy.spec.action != raw.spec.action:
        raise BurnishError(
            f"the policy was trained for actuator limits {policy.spec.action}, but the world has {raw.spec.action}"
        )
    return env


def _last_frames(episodes: Episodes, raw: VecEnv) -> Episodes:
    """Episodes on disk hold single frames; a history is stacked again when windows are cut."""
    single = [
        replace(e, obs={key: x[:, -1] if stacked_by_history(key) else x for key, x in e.obs.items()}) for e in episodes
    ]
    return Episodes(single, raw.spec, episodes.meta)


if __name__ == "__main__":
    sys.exit(main())
