"""Every way to a world plays the same contract: in process, in a pool, in another Python, over TCP.

The reference is a slow loop over the bare environment, one episode after the other: the episode of a seed, under
actions that are a function of the seed and the tick. A row of worlds is somewhere in the episode of some seed, and its
next step is the next one of that episode, whatever the other rows do, and in whichever row, process and order.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch

from burnish import configs
from burnish.policies.cli.cli import compose, to_object
from burnish.policies.core.config import from_data
from burnish.sim.__main__ import GROUPS, CollectConfig
from burnish.sim.external import world_server
from burnish.sim.external.maniskill import hosted
from burnish.sim.external.settings import GymConfig, RemoteConfig, Reward
from burnish.sim.external.worlds import ExternalEnv

LIMIT = 12  # steps of an episode
SHORT = 4  # of one that is drawn slowly, whose other times are shorter likewise
SEEDS = [11, (1 << 40) + 7, 13, 14, 15, 16]  # of which the first begin, and the others follow in turn
NUM, TICKS, SAVED = 3, 34, 17  # worlds; ticks; when the state is saved
UNTIL = {"end_at_success": True, "reward": "until_success"}
WORLDS: dict[str, dict[str, Any]] = {
    "pendulum": {"id": "Pendulum-v1"},
    "pendulum_until": {"id": "Pendulum-v1", "success_reward": -0.7, **UNTIL},  # some of its episodes succeed
    "pusht": {"id": "gym_pusht/PushT-v0", "package": "gym_pusht", "control_hz": 10.0},
    "fetch": {"id": "FetchReach-v4", "package": "gymnasium_robotics"},
    "meta_world": {"id": "Meta-World/MT1", "package": "metaworld", "kwargs": {"env_name": "reach-v3", "seed": 0}},
    "ogbench": {"id": "cube-single-singletask-task1-v0", "package": "ogbench"},
}
WAYS = ("in_process", "pool", "remote", "tcp")
PACKAGES = {"metaworld": "metaworld", "maniskill": "mani_skill", "robosuite": "robosuite", "ogbench": "ogbench"}
PACKAGES |= {"pusht": "gym_pusht", "fetch": "gymnasium_robotics"}
PICTURES = ("pusht_pixels", "maniskill_push_cube_rgb")
FOLDER = Path(configs.__file__).parent / "env"
PRESETS = sorted(path.stem for word in PACKAGES for path in FOLDER.glob(f"{word}_*.yaml"))
SLOWLY = "maniskill_push_cube_rgb"  # a software renderer draws 40 pictures a second


def case(name: str, way: str) -> Any:
    mark = pytest.mark.maniskill if name.startswith("maniskill") else pytest.mark.sim
    return pytest.param(name, way, marks=[] if name.startswith("pendulum") else [pytest.mark.slow, mark])


CASES = [case(name, way) for name in WORLDS for way in WAYS] + [case(name, "pool") for name in PRESETS]
CASES.append(case("pusht_pixels", "in_process"))


class Bare(NamedTuple):
    """A tick of an episode."""

    obs: dict[str, np.ndarray]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None


def action_of(seed: int, tick: int, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.random.default_rng([seed, tick]).uniform(low, high).astype(np.float32)


def flat(obs: Any) -> dict[str, np.ndarray]:
    """The rule of observations for these worlds, once more."""
    if not isinstance(obs, dict):
        return {"state": np.asarray(obs, np.float32).ravel()}
    pictures = {"main" if key == "pixels" else key: x for key, x in obs.items() if x.dtype == np.uint8}
    found = {f"image.{key}": np.moveaxis(x, 2, 0) for key, x in pictures.items()}
    state = [x.astype(np.float32).ravel() for key, x in sorted(obs.items()) if key != "desired_goal" and x.ndim == 1]
    goal = {"goal": obs["desired_goal"].astype(np.float32)} if "desired_goal" in obs else {}
    return {"state": np.concatenate(state), **goal, **found}


@cache
def settings_of(name: str) -> GymConfig:
    if name in WORLDS:
        return from_data(GymConfig, WORLDS[name], "env")
    config = to_object(compose("collect", CollectConfig, GROUPS["collect"], [f"env={name}"])).env
    return config if isinstance(config, GymConfig) else hosted(config, NUM)


def limit_of(name: str) -> int:
    return SHORT if name == SLOWLY else LIMIT


@cache
def episodes(name: str) -> dict[int, list[Bare]]:
    """Of each seed, by the bare environment; the last tick is that of the limit, or of the first success."""
    limit, config = limit_of(name), settings_of(name)
    kwargs = dict(config.kwargs or {})
    maker = world_server.load(config.id) if ":" in config.id else world_server.installed(config.id)
    if maker is not None:
        env: Any = maker(**kwargs)
    else:
        env = gymnasium.make(config.id, max_episode_steps=limit, **kwargs)
    low, high, dtype = env.action_space.low, env.action_space.high, env.action_space.dtype
    found = {}
    for seed in SEEDS:
        cut = seed % (1 << 31)
        random.seed(cut)
        np.random.seed(cut)
        env.unwrapped._np_random = np.random.default_rng(cut)
        if config.id == "robosuite":
            env.unwrapped.rng.bit_generator.state = np.random.PCG64(cut).state
        ticks = [Bare(flat(env.reset(seed=cut)[0]))]
        while not (ticks[-1].terminated or ticks[-1].truncated):
            action = action_of(seed, len(ticks) - 1, low, high).astype(dtype)
            obs, reward, terminated, truncated, info = env.step(action)
            late = len(ticks) == limit
            assert not terminated and truncated <= late, "so the limit is what ends them"
            words = [bool(info[word]) for word in ("success", "is_success") if word in info]
            won = words[0] if words else None
            if config.success_reward is not None:
                won = bool(reward >= config.success_reward)
            ends = config.end_at_success and won is True
            paid = float(reward) if config.reward is Reward.given else -float(not won)
            ticks.append(Bare(flat(obs), paid, ends, late and not ends, won))
        found[seed] = ticks
    return found


@contextlib.contextmanager
def served(config: GymConfig) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["--listen", address, "--id", config.id, "--kwargs", json.dumps(config.kwargs or {})]
    words += ["--package", config.package] if config.package else []
    process = subprocess.Popen(
        [sys.executable, str(Path(world_server.__file__)), *words], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None and "serving" in process.stderr.readline()
        yield address
    finally:
        process.kill()
        process.wait()  # not for the end of its output, which what it forked has too


class Player:
    """Plays some worlds, and knows of each row which tick of which seed's episode it is at."""

    def __init__(self, env: ExternalEnv, name: str) -> None:
        self.env, self.reference = env, episodes(name)
        self.low, self.high = np.array(env.spec.action.low), np.array(env.spec.action.high)
        self.seeds, self.ticks, self.begun = SEEDS[:NUM], [0] * NUM, NUM

    def begin(self) -> None:
        self.compare(self.env.reset(seeds=self.seeds))

    def play(self, start: int, end: int) -> None:
        for tick in range(start, end):
            active = [(tick + i) % 3 > 0 for i in range(NUM)]
            action = [action_of(self.seeds[i], self.ticks[i], self.low, self.high) for i in range(NUM)]
            step = self.env.step(torch.from_numpy(np.stack(action)), torch.tensor(active))
            self.ticks = [t + a for t, a in zip(self.ticks, active, strict=True)]
            now = [self.reference[self.seeds[i]][self.ticks[i]] for i in range(NUM)]
            self.compare(step.obs)
            assert step.terminated.tolist() == [a and x.terminated for a, x in zip(active, now, strict=True)]
            assert step.truncated.tolist() == [a and x.truncated for a, x in zip(active, now, strict=True)]
            assert step.reward.tolist() == [np.float32(x.reward) if a else 0 for a, x in zip(active, now, strict=True)]
            if self.reference[SEEDS[0]][-1].success is None:
                assert "success" not in step.info
            else:
                won = [bool(a and x.success) for a, x in zip(active, now, strict=True)]
                assert step.info["success"].tolist() == won
            if (ended := step.terminated | step.truncated).any():
                self.again(ended)

    def again(self, ended: torch.Tensor) -> None:
        """A new episode in the rows that ended, on seeds that another row may have had before."""
        for i in ended.nonzero()[:, 0].tolist():
            self.seeds = [*self.seeds[:i], SEEDS[self.begun % len(SEEDS)], *self.seeds[i + 1 :]]
            self.ticks[i], self.begun = 0, self.begun + 1
        self.compare(self.env.reset(ended, self.seeds))

    def compare(self, obs: dict[str, torch.Tensor]) -> None:
        assert self.env.spec.obs.check(obs) == NUM
        for i in range(NUM):
            for key, x in self.reference[self.seeds[i]][self.ticks[i]].obs.items():
                assert np.array_equal(obs[key][i].numpy(), x), f"{key} of row {i}, tick {self.ticks[i]}"


@pytest.mark.parametrize(("name", "way"), CASES)
def test_the_contract(require, name, way, monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    if not name.startswith("pendulum"):
        require(settings_of(name).package or PACKAGES[name.partition("_")[0]])
    settings, limit = settings_of(name), limit_of(name)
    saved_at, last = SAVED * limit // LIMIT, TICKS * limit // LIMIT + (limit < LIMIT)
    with contextlib.ExitStack() as stack:
        config = replace(settings, max_steps=limit, processes=0 if way == "in_process" else 2)
        given = {**vars(config), "processes": 1}
        if way == "tcp":  # its server has the arguments and the package
            address = stack.enter_context(served(settings))
            config = RemoteConfig(**{**given, "kwargs": None, "package": None}, address=address)
        elif way == "remote":
            config = RemoteConfig(**given, python=sys.executable)
        player = Player(ExternalEnv(NUM, config), name)
        assert any(key.startswith("image.") for key in player.env.spec.obs.shapes) == (name in PICTURES)
        player.begin()
        player.play(0, saved_at)
        saved, place = player.env.state_dict(), (player.seeds, list(player.ticks), player.begun)
        assert any(0 < t < limit for t in player.ticks), "in mid-episode"
        player.play(saved_at, last)
        assert player.begun >= 2 * NUM, "every row had an end"
        other = Player(ExternalEnv(NUM, config), name)
        other.env.load_state_dict(saved)
        assert other.env.continues
        other.seeds, other.ticks, other.begun = place
        other.play(saved_at, last)
        player.env.close()
        other.env.close()


def test_a_reference_that_differs_is_seen():
    player = Player(ExternalEnv(NUM, GymConfig(max_steps=LIMIT, processes=0)), "pendulum")
    player.begin()
    player.play(0, 3)
    player.ticks[1] -= 1
    with pytest.raises(AssertionError, match="row 1"):
        player.play(3, 6)
