"""A look at a world from a process of its own: what it gives, how fast, and which of its promises it keeps.

A world that kills its process, as drivers and simulators may, costs a sentence. Episodes are compared by a print of the
reset and of each step, so that those of pictures fit through a pipe.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from ...policies.core.errors import BurnishError
from ...policies.core.spec import EnvSpec
from ...policies.core.types import Step, VecEnv
from ...policies.core.wrapper import Saved, continues
from ..build import env_name, make_env
from .settings import GymConfig, RemoteConfig
from .worlds import ExternalEnv


@dataclass
class Seen:
    """By one process, in one world."""

    spec: EnvSpec
    name: str
    prints: dict[int, list[str]] = field(default_factory=dict)  # of each episode, by its seed: the reset, every step
    stepping_s: float = 0.0
    reported: bool = False  # success, in a step at least
    won: bool = False
    not_finite: str = ""  # the first number that was observed and is not
    restored: str = ""  # why not, or nothing where it was
    # Where the spec is from; of our own worlds, from their settings.
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)  # key -> the keys of the environment
    rate_from: str = "its configuration"
    success_from: str = "the info under success"
    info_keys: str = ""  # the end of a sentence
    drawn: bool = True  # films of it can be made
    cut: int | None = None  # steps after which it cut an episode off by itself

    @property
    def steps(self) -> int:
        return sum(len(prints) - 1 for prints in self.prints.values())


def look(world: Any, episodes: Mapping[int, int | None], seconds: float, *, restores: bool = False) -> Seen:
    """One random episode for each seed, of as many steps as are given, or until its end or until the time is over."""
    with ProcessPoolExecutor(1, get_context("spawn"), _quiet) as pool:
        try:
            return pool.submit(play, world, episodes, seconds, restores).result()
        except BrokenProcessPool as error:
            name = getattr(world, "id", env_name(world))
            raise BurnishError(
                f"the process in which {name} was tried died without a word; a library or a driver that it needs may "
                "be missing or broken: see `burnish doctor`, which examines the machine"
            ) from error


def _quiet() -> None:
    """Packages may print; the doctor's own words are on standard output. Warnings of ours become sentences of his."""
    os.dup2(2, 1)
    logging.disable(logging.WARNING)


def play(world: Any, episodes: Mapping[int, int | None], seconds: float, restores: bool) -> Seen:
    """The facts found while ``episodes`` (seed -> steps, None for as many as fit) are played in a world."""
    if isinstance(world, GymConfig) and not isinstance(world, RemoteConfig):
        world = replace(world, processes=0)
    env = unchecked(world, 1)
    found = Seen(env.spec, env_name(world))
    if isinstance(env, ExternalEnv):
        found.name = env.config.label
        found.sources, found.rate_from, found.success_from = env.sources(), env.hz_from, env.success_from()
        found.drawn = env.drawn
    for seed, steps in episodes.items():
        act, prints = actions(env.spec), [_print(env.reset(seeds=[seed]))]
        deadline = None if steps else found.stepping_s + seconds / len(episodes)
        for _ in range(steps or env.spec.max_steps):
            action, began = act(), time.perf_counter()
            step = env.step(action)
            found.stepping_s += time.perf_counter() - began
            prints.append(_noted(found, step))
            if bool(step.truncated) and len(prints) <= env.spec.max_steps:
                found.cut = len(prints) - 1
            if bool(step.terminated | step.truncated) or (deadline is not None and found.stepping_s > deadline):
                break
        found.prints[seed] = prints
    if isinstance(env, ExternalEnv):
        found.info_keys = env.info_keys()
    if restores:
        found.restored = restored(env, lambda: unchecked(world, 1), *next(iter(found.prints.items())))
    return found


def unchecked(world: Any, worlds: int) -> VecEnv:
    """The worlds, also where they show what is not finite: the doctor says so, and goes on."""
    env = make_env(world, worlds)
    if isinstance(env, ExternalEnv):
        env.workers.checked = False
    return env


def actions(spec: EnvSpec, count: int = 1) -> Callable[[], Tensor]:
    """(count, A) a call, uniform between the limits; the same ones each time that they begin."""
    source = torch.Generator().manual_seed(0)
    low, high = torch.tensor(spec.action.low), torch.tensor(spec.action.high)
    return lambda: (low + (high - low) * torch.rand(count, len(low), generator=source)).clamp(low, high)


def restored(env: VecEnv, make: Callable[[], VecEnv], seed: int, prints: Sequence[str]) -> str:
    """Half an episode, its other half in a fresh world that was given the state. Nothing where it is as before."""
    if not isinstance(env, Saved):
        return "it has no state_dict and load_state_dict"
    half, act = len(prints) // 2, actions(env.spec)
    env.reset(seeds=[seed])
    for _ in range(half):
        env.step(act())
    if not continues(env):
        return "it is not deterministic, or its simulation cannot be put back"
    fresh = make()
    assert isinstance(fresh, Saved)
    fresh.load_state_dict(env.state_dict())
    if not continues(fresh):
        return "its seed and its actions, played again, led elsewhere"
    for expected in prints[1 + half :]:
        step = fresh.step(act())
        if _print(_tensors(step)) != expected:
            return "what followed differed from what follows where nothing was saved"
    return ""


def _noted(found: Seen, step: Step) -> str:
    for key, x in step.obs.items():
        if not found.not_finite and x.is_floating_point() and (bad := (~x.isfinite()).nonzero()).numel():
            found.not_finite = f"{key}[{', '.join(map(str, bad[0, 1:].tolist()))}]"
    if not found.not_finite and not bool(step.reward.isfinite().all()):
        found.not_finite = "the reward"
    if "success" in step.info:
        found.reported, found.won = True, found.won or bool(step.info["success"])
    return _print(_tensors(step))


def _tensors(step: Step) -> dict[str, Tensor]:
    return {**step.obs, "/reward": step.reward, "/terminated": step.terminated, "/truncated": step.truncated}


def _print(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for _, x in sorted(tensors.items()):
        digest.update(x.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def speed(world: Any, worlds: int, seconds: float) -> tuple[float, str]:
    """Steps of all ``worlds`` together per second, the time of resets left out; and where they were played."""
    env = unchecked(world, worlds)
    act, ends, spent_s, steps = actions(env.spec, worlds), torch.ones(worlds, dtype=torch.bool), 0.0, 0
    while spent_s < seconds:
        if bool(ends.any()):
            env.reset(ends)
        action, began = act(), time.perf_counter()
        step = env.step(action)
        spent_s += time.perf_counter() - began
        steps, ends = steps + worlds, (step.terminated | step.truncated).cpu()
    return steps / spent_s, env.place() if isinstance(env, ExternalEnv) else "this process"


def first_difference(one: Iterable[str], other: Iterable[str]) -> int | None:
    """The reset is 0, the first step 1; nothing where both are the same as far as both go."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
