"""SB3's off-policy agents in float64, with our weights, our batches and our noise: one update is to be the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.nets.ensemble import EnsembleMLP

OBS, ACTION, HIDDEN, ROWS, GAMMA = 5, 3, [16, 16], 32, 0.97
SPEC = PolicySpec(ObsSpec({"state": (OBS,)}), ActionSpec((-1,) * ACTION, (1,) * ACTION), horizon=1, execute=1)
EPS = 1e-30  # of Adam, so that a loss of half the size makes the same step


class Idle(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (ACTION,), np.float32)


def their_agent(kind: type, **options: Any) -> Any:
    from stable_baselines3.common.logger import Logger

    kwargs = {"net_arch": HIDDEN, "optimizer_kwargs": {"eps": EPS}}
    made = kind("MlpPolicy", Idle(), gamma=GAMMA, tau=0.01, policy_kwargs=kwargs, device="cpu", **options)
    made.set_logger(Logger(None, []))
    made.policy.double()
    for part in made.policy.modules():
        if hasattr(part, "extract_features"):
            part.extract_features = lambda obs, extractor: obs  # the one that it replaces returns to float32
    return made


def transitions(seed: int) -> dict[str, Any]:
    """A batch as our replay hands it out; a quarter of its rows terminated."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    terminated = torch.arange(ROWS) % 4 == 0
    return {
        "obs": {"state": draw(ROWS, OBS)},
        "next_obs": {"state": draw(ROWS, OBS)},
        "action": torch.rand(ROWS, 1, ACTION, generator=g) * 2 - 1,
        "reward": draw(ROWS),
        "discount": GAMMA * (~terminated).to(torch.get_default_dtype()),
        "ended": terminated,
        "terminated": terminated,
        "steps": torch.ones(ROWS, dtype=torch.int64),
    }


def hand_out(agent: Any, batch: dict[str, Any]) -> None:
    """The next batch that ``agent`` trains on."""
    from stable_baselines3.common.type_aliases import ReplayBufferSamples

    samples = ReplayBufferSamples(
        observations=batch["obs"]["state"],
        actions=batch["action"][:, 0],
        next_observations=batch["next_obs"]["state"],
        dones=batch["terminated"].double()[:, None],
        rewards=batch["reward"][:, None],
    )
    agent.replay_buffer.sample = lambda *_, **__: samples


def linears(*modules: nn.Module) -> list[nn.Linear]:
    return [part for module in modules for part in module.modules() if isinstance(part, nn.Linear)]


def weights(layers: list[nn.Linear]) -> list[Tensor]:
    return [x for layer in layers for x in (layer.weight, layer.bias)]


def members(net: EnsembleMLP) -> list[Tensor]:
    """The parameters of an ``EnsembleMLP``, member by member, as those of separate ``nn.Linear``."""
    layers: list[Any] = [part for part in net.layers if hasattr(part, "weight")]
    count = len(layers[0].weight)
    return [x for e in range(count) for part in layers for x in (part.weight[e].mT, part.bias[e, 0])]


@torch.no_grad()
def copy_weights(source: list[Tensor], target: list[Tensor]) -> None:
    assert len(source) == len(target)
    for old, new in zip(source, target, strict=True):
        new.copy_(old)


def distance(ours: list[Tensor], others: list[Tensor]) -> float:
    assert len(ours) == len(others)
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, others, strict=True))


def fixed_noise(monkeypatch: pytest.MonkeyPatch, where: str, noise: list[Tensor]) -> Callable[[], int]:
    """The function ``where`` draws ``noise``, one after the other; how many are left."""
    queue = list(noise)

    def draw(shape: Any, *_: Any, **__: Any) -> Tensor:
        given = queue.pop(0)
        return given.reshape(tuple(shape))

    monkeypatch.setattr(where, draw)
    return lambda: len(queue)
