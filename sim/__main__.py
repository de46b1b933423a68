"""Entry point: ``burnish collect``, demonstrations of a scripted expert or of a trained policy."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import MISSING
from tqdm import tqdm

from ..policies.build import CheckpointConfig, load_policy
from ..policies.core.chunk import HistoryEnv
from ..policies.core.cli import main
from ..policies.core.config import to_data
from ..policies.core.errors import BurnishError
from ..policies.core.seed import derive
from ..policies.core.spec import check_compatible, stacked_by_history
from ..policies.core.types import Controller, VecEnv
from ..policies.data.episodes import Episodes
from ..policies.data.lerobot_writer import write_lerobot
from ..policies.horizon import ChunkController
from .build import ENVS, env_name, make_env
from .collect import collect as record
from .experts import make_expert

GROUPS: dict[str, dict[str, type]] = {
    "env": {name: kind.config for name, kind in ENVS.items()},
    "policy": {"checkpoint": CheckpointConfig},
}


@dataclass
class CollectConfig:
    env: Any = MISSING
    expert: str = "clean"  # level of the scripted expert of that world
    policy: Any = None  # policy=checkpoint policy.path=...: a trained policy, which then acts instead of the expert
    episodes: int = 100
    worlds: int = 50  # stepped at once; does not change the result
    seed: int = 0
    out: str = "runs/data"

    def __post_init__(self) -> None:
        if self.episodes < 1 or self.worlds < 1:
            raise BurnishError(f"episodes={self.episodes} and worlds={self.worlds} must be at least 1")


def collect(config: CollectConfig) -> int:
    if Path(config.out).exists():
        raise BurnishError(f"{config.out} exists already; use another out=")
    worlds = min(config.worlds, config.episodes)
    raw = make_env(config.env, worlds)
    env, controller = _actor(config, raw)
    origin = {"env": {"name": env_name(config.env), "config": to_data(config.env)}, "seed": config.seed}
    origin |= {"policy": config.policy.path} if config.policy else {"expert": config.expert}
    seeds = [derive(config.seed, "collect", i) for i in range(config.episodes)]
    with tqdm(total=len(seeds), unit="episode", disable=not sys.stderr.isatty()) as bar:
        episodes = record(env, controller, seeds, meta=origin, progress=lambda n, total: _show(bar, n))
    if env is not raw:
        episodes = _last_frames(episodes, raw)
    write_lerobot(episodes, config.out)
    wins = sum(episode.success for episode in episodes)
    sys.stdout.write(f"{config.out}: {len(episodes)} episodes, {episodes.frames} frames, {wins} successful\n")
    return 0


def _show(bar: tqdm, finished: int) -> None:
    bar.update(finished - bar.n)


def _actor(config: CollectConfig, raw: VecEnv) -> tuple[VecEnv, Controller]:
    if config.policy is None:
        return raw, make_expert(config.env, raw.num_envs, config.expert, seed=config.seed)
    policy, _ = load_policy(config.policy.path)
    env: VecEnv = raw if policy.spec.history == 1 else HistoryEnv(raw, policy.spec.history)
    check_compatible(policy.spec, env.spec)
    if policy.spec.action != raw.spec.action:
        raise BurnishError(
            f"the policy was trained for actuator limits {policy.spec.action}, but the world has {raw.spec.action}"
        )
    return env, ChunkController(policy, raw.num_envs)


def _last_frames(episodes: Episodes, raw: VecEnv) -> Episodes:
    """Episodes on disk hold single frames; a history is stacked again when windows are cut."""
    single = [
        replace(e, obs={key: x[:, -1] if stacked_by_history(key) else x for key, x in e.obs.items()}) for e in episodes
    ]
    return Episodes(single, raw.spec, episodes.meta)


if __name__ == "__main__":
    sys.exit(main())
