"""Predictors for tests: one whose actions say where they come from, one with two opinions, and some that misbehave.
They are found by name in another process too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from burnish.policies.build import build_policy
from burnish.policies.core.seed import RowNoise
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.flow import FlowConfig
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from burnish.real_robot.clock import VirtualClock, ns
from burnish.real_robot.inference.chunk_settings import Chunks
from burnish.real_robot.inference.realtime_chunking import RealtimeChunking
from burnish.real_robot.inference.worker import Facts, InferenceRequest, Pulling, Simulated

HZ, PERIOD_S = 20.0, 0.05
EVERYONE = torch.ones(1, dtype=torch.bool)


class Telling:
    """Row j of a chunk is (tick of the observation, j, decision), and a prefix stays what it is."""

    def __init__(
        self, horizon: int = 8, execute: int = 4, start: int = 0, continues: bool = True, guides: bool = False
    ) -> None:
        self.facts = Facts(horizon, execute, start, 3, continues, guides)
        self.asked: list[InferenceRequest] = []

    def __call__(self, obs, prefix, seed, decision):
        self.asked.append(InferenceRequest(obs, prefix, seed, decision))
        tick = float(obs["state"][0])
        rows = [(tick, j, decision) for j in range(self.facts.horizon)]
        chunk = np.array(rows, np.float32)
        if isinstance(prefix, Pulling):
            prefix = prefix.actions[prefix.weights == 1]
        if prefix is not None and len(prefix):
            chunk[len(prefix) :, 2] += prefix[-1, 2]  # what follows depends on it
            chunk[: len(prefix)] = prefix
        return chunk


class Failing(Telling):
    """Does not answer the decisions of ``bad``, of any episode but the rehearsal's."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        self.bad = bad

    def __call__(self, obs, prefix, seed, decision):
        if seed and decision in self.bad:
            raise OSError("the network is down")
        return super().__call__(obs, prefix, seed, decision)


class Deciding(Telling):
    """Thinks for so long, in Python, and tells in which process."""

    def __init__(self, seconds: float, execute: int = 4) -> None:
        super().__init__(execute=execute)
        self.seconds = seconds

    def __call__(self, obs, prefix, seed, decision):
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            time.sleep(0.001)
        chunk = super().__call__(obs, prefix, seed, decision)
        chunk[:, 2] = os.getpid()
        return chunk


def refusing() -> Any:
    raise OSError("the disk is gone")


def dying() -> Any:
    class Dying(Telling):
        def __call__(self, obs, prefix, seed, decision):
            os._exit(7)

    return Dying()


@torch.enable_grad()
def two_mode(config: Any, steps: int = 400) -> Any:
    """A policy that has learnt chunks of -0.5 or of +0.5, either with equal right."""
    torch.manual_seed(0)
    spec = PolicySpec(ObsSpec({"state": (1,)}), ActionSpec((-1.0,), (1.0,)), 8, 4, control_hz=HZ)
    policy = build_policy(config, spec, seed=1)
    optimizer = torch.optim.Adam(policy.parameters(), 2e-3)
    source = torch.Generator().manual_seed(0)
    for _ in range(steps):
        side = torch.randint(0, 2, (256, 1, 1), generator=source) - 0.5
        data = (side + 0.02 * torch.randn(256, 8, 1, generator=source)).float()
        loss = policy.bc_loss({"state": torch.zeros(256, 1)}, data, generator=source).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy.eval()


def two_mode_flow() -> Any:
    return two_mode(FlowConfig(steps=10, net=DenoiserConfig(mlp=MlpBodyConfig([64, 64], 16))))


def latency(ticks: float, late: dict[int, float] | None = None) -> Callable[[int, int], float]:
    """``late``: ticks by decision, of any episode but the rehearsal's."""
    return lambda seed, decision: PERIOD_S * ((late or {}).get(decision, ticks) if seed else ticks)


def jittery(seed: int, decision: int) -> float:
    return PERIOD_S * (1.1 + 0.8 * float(RowNoise([seed], [decision]).uniform((1, 1))))


class Lab:
    """A controller on a virtual clock, of whose world nothing is known but the tick, and if ``blind`` not even that."""

    def __init__(
        self,
        predictor: Any,
        latency: Any = None,
        kind: type[RealtimeChunking] = RealtimeChunking,
        blind: bool = False,
        **chunks: Any,
    ) -> None:
        self.clock, self.predictor, self.blind = VirtualClock(), predictor, blind
        settings = Chunks(
            **({"rehearsals": 4, "forget": 1, "reach": predictor.facts.horizon - predictor.facts.start} | chunks)
        )
        self.controller = kind(Simulated(predictor, self.clock, latency), settings, HZ)

    def warm(self) -> Lab:
        self.controller.warm_up(self.obs(0))
        if hasattr(self.predictor, "asked"):
            self.predictor.asked.clear()
        return self

    def obs(self, tick: int) -> dict[str, torch.Tensor]:
        return {"state": torch.full((1, 1), 0.0 if self.blind else float(tick))}

    def play(self, ticks: int, seed: int = 5) -> np.ndarray:
        """(ticks, A) of one episode."""
        self.controller.reset(EVERYONE, [seed])
        played = []
        for tick in range(ticks):
            played.append(self.controller.step(self.obs(tick))[0].numpy())
            self.clock.advance_ns(ns(PERIOD_S))
        return np.stack(played)


ROOT = Path(__file__).resolve().parents[1]
REFINED = ROOT / "benchmarks" / "refined" / "insert"
