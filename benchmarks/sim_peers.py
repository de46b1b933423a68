"""The peers of our worlds in sim_speed.py: Gymnasium's vector environments, and envpool in a process of its own."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv

from burnish.policies.gymnasium_adapters import as_gymnasium
from burnish.sim.batch import BatchedMujoco
from burnish.sim.build import ENVS

ENVPOOL = "envpool==1.2.5"
ENVPOOL_HOME = Path.home() / ".cache" / "burnish" / ENVPOOL.replace("==", "-")
ENVPOOL_LOOP = Path(__file__).resolve().parent / "envpool_loop.py"
GYMNASIUM = {"half_cheetah": "HalfCheetah-v5", "ant": "Ant-v5", "humanoid": "Humanoid-v5"}  # what others have too
ACTIONS = 64  # drawn beforehand, and played in turn


@dataclass(frozen=True)
class Effort:
    worlds: tuple[int, ...]
    rounds: int
    block: float  # seconds of a contender's turn
    burn_in: int  # ticks before the first turn, until the robots lie or stand as they usually do


def worlds(name: str, num_worlds: int, threads: int, device: str = "cpu") -> BatchedMujoco:
    module, attribute = ENVS[name].builder.split(":")
    build = getattr(importlib.import_module(f"burnish.sim.{module}"), attribute)
    return BatchedMujoco(build(ENVS[name].config()), num_worlds, threads=threads, device=device)


class Gymnasium:
    """Goes on from turn to turn."""

    def __init__(self, env: VectorEnv, effort: Effort) -> None:
        self.env, self._tick = env, 0
        box = env.single_action_space
        assert isinstance(box, gymnasium.spaces.Box)
        shape = (ACTIONS, env.num_envs, *box.shape)
        self._actions = np.random.default_rng(0).uniform(box.low, box.high, shape).astype(np.float32)
        env.reset(seed=0)
        self.ticks = effort.burn_in
        self.ticks = max(2, round(effort.block * self.play() / env.num_envs))

    def play(self) -> float:
        begin = time.perf_counter()
        for _ in range(self.ticks):
            self.env.step(self._actions[self._tick % ACTIONS])
            self._tick += 1
        return self.ticks * self.env.num_envs / (time.perf_counter() - begin)

    def close(self) -> None:
        self.env.close()


def single(name: str) -> gymnasium.Env:
    """One world for Gymnasium; in a process of its own it may use one thread, like all."""
    torch.set_num_threads(1)
    if name in GYMNASIUM:
        return gymnasium.make(GYMNASIUM[name])
    return as_gymnasium(worlds(name, 1, threads=1))


class Envpool:
    """A process that plays as many ticks as it is told, and says how long that took."""

    def __init__(self, name: str, num_worlds: int, threads: int, effort: Effort) -> None:
        command = [str(ENVPOOL_HOME / "bin/python"), str(ENVPOOL_LOOP), GYMNASIUM[name]]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self._process = subprocess.Popen([*command, str(num_worlds), str(threads)], **pipes)
        self._answer()
        self.num_worlds, self.ticks = num_worlds, effort.burn_in
        self.ticks = max(2, round(effort.block * self.play() / num_worlds))

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("envpool's process died; run envpool_loop.py by hand to see why")
        return line

    def play(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self.ticks}\n")
        self._process.stdin.flush()
        return self.ticks * self.num_worlds / float(self._answer())

    def close(self) -> None:
        self._process.communicate()


def install_envpool(quick: bool) -> str:
    """Why there is no envpool, or nothing. A quick run installs nothing."""
    finished = ENVPOOL_HOME / "installed"  # an installation that was broken off has no such file
    if finished.exists():
        return ""
    if quick:
        return "not installed; a full run installs it"
    try:
        subprocess.run([sys.executable, "-m", "venv", str(ENVPOOL_HOME)], check=True)
        pip = [str(ENVPOOL_HOME / "bin/python"), "-m", "pip", "install", "--quiet", ENVPOOL]
        subprocess.run(pip, check=True, capture_output=True, text=True)
        finished.touch()
    except subprocess.CalledProcessError as error:
        shutil.rmtree(ENVPOOL_HOME, ignore_errors=True)
        return f"could not be installed: {(error.stderr or str(error)).strip()[-300:]}"
    return ""
