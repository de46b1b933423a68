"""Small flows for the tests of what refines them, a linear one with a known gradient, and a world to learn in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from burnish.finetune.loops import OnPolicy
from burnish.policies.controllers import ChunkController
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec, agent_spec
from burnish.policies.core.types import Draw
from burnish.policies.flow import FlowConfig, FlowPolicy
from burnish.policies.nets.denoiser import Body, DenoiserConfig, MlpBodyConfig
from burnish.policies.nets.unet1d import UNetConfig
from burnish.sim.build import make_env
from burnish.sim.point_reach import PointReachConfig
from negative_controls import NegativeControl

A = 2
# name -> horizon, execute, start, and settings of the flow
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "whole": (3, 3, 0, {}),
    "longer": (4, 2, 0, {}),
    "late": (4, 2, 1, {}),
    "shortcut": (3, 2, 0, {"shortcut": True}),
    "guided": (3, 2, 0, {"guidance": 2.5}),
    "unet": (4, 2, 0, {"body": Body.unet}),
}


def flow(case: str = "longer", steps: int = 3, seed: int = 0) -> FlowPolicy:
    horizon, execute, start, settings = CASES[case]
    guidance = settings.get("guidance", 1.0)
    shapes: dict[str, tuple[int, ...]] = {"state": (3,)}
    if guidance != 1:
        shapes["goal"] = (2,)
    net = DenoiserConfig(
        body=settings.get("body", Body.mlp),
        mlp=MlpBodyConfig(hidden=[16, 16], time_dim=8),
        unet=UNetConfig(channels=[8, 16], groups=4, time_dim=8),
        guidance=guidance,
        goal_drop=0.1 if guidance != 1 else 0.0,
    )
    spec = PolicySpec(ObsSpec(shapes), ActionSpec((-1,) * A, (1,) * A), horizon, execute, start=start)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return FlowPolicy(spec, FlowConfig(steps=steps, shortcut=settings.get("shortcut", False), net=net))


def grid(case: str) -> list[int]:
    """The numbers of steps that a flow of this case can take."""
    if case == "unet":  # slow
        return [1, 2, 5]
    return [1, 2, 4, 8] if case == "shortcut" else list(range(1, 11))


def seen(policy: Any, batch: int, seed: int = 1) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    dtype = torch.get_default_dtype()
    return {k: torch.randn(batch, *s, generator=source, dtype=dtype) for k, s in policy.spec.obs.shapes.items()}


def drawn(actor: Any, batch: int = 8, seed: int = 3) -> tuple[dict[str, Tensor], Draw]:
    obs = seen(actor, batch)
    with torch.no_grad():
        return obs, actor.draw(obs, generator=torch.Generator().manual_seed(seed))


def full(actor: Any, batch: int = 8) -> Tensor:
    return torch.full((batch,), actor.spec.execute)


def perturbed(module: torch.nn.Module, scale: float = 0.3, seed: int = 2) -> None:
    """No parameter stays at zero, where half the tests would say nothing."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p += scale * torch.randn(p.shape, generator=source, dtype=p.dtype)


def groups_of(gradient: Callable[[torch.Generator], Tensor], count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Mean and standard error of ``count`` independent estimates."""
    source = torch.Generator().manual_seed(seed)
    found = torch.stack([gradient(source) for _ in range(count)])
    return found.mean(0), found.std(0) / count**0.5


WORLD = PointReachConfig(dim=1, goal_in_state=True, terminate=False, control_hz=5.0, max_steps=10)


def learnt(
    build: Callable[..., Any], config: Any, seed: int, iterations: int, *, noise: bool = False
) -> Iterator[float]:
    """The mean reward per tick of the deployed policy, before and after learning from a random start."""
    world = make_env(WORLD, 32, seed=seed)
    spec = agent_spec(world.spec, 2)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = DenoiserConfig(mlp=MlpBodyConfig(hidden=[32, 32], time_dim=16))
        base = FlowPolicy(spec, FlowConfig(steps=3, net=net))
    env, learner = build(config, base, NegativeControl(world) if noise else world, seed=seed)
    yield score(base)
    loop = OnPolicy(learner, env, decisions_per_update=config.loop.decisions_per_update, seed=seed)
    for _ in range(iterations):
        loop.iterate()
    yield score(learner.policy)


def score(policy: Any, worlds: int = 256) -> float:
    world = make_env(replace(WORLD), worlds, seed=99)
    everyone = torch.ones(worlds, dtype=torch.bool)
    controller = ChunkController(policy, worlds, seed=5)
    controller.reset(everyone)
    obs, total = world.reset(), 0.0
    for _ in range(WORLD.max_steps):
        step = world.step(controller.step(obs))
        obs, total = step.obs, total + float(step.reward.mean())
    return total / WORLD.max_steps
