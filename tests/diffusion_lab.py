"""Small diffusion policies, and a network whose answer is known, for the three files that test diffusion."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from burnish.policies.core.seed import generator
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.diffusion import DiffusionConfig, DiffusionPolicy
from burnish.policies.nets.denoiser import Cond, DenoiserConfig, MlpBodyConfig

HORIZON, ACTION = 4, 2


def make_spec(horizon: int = HORIZON, action: int = ACTION, goal: bool = False) -> PolicySpec:
    shapes: dict[str, tuple[int, ...]] = {"state": (3,)}
    if goal:
        shapes["goal"] = (2,)
    limits = ActionSpec((-1.0,) * action, (1.0,) * action)
    return PolicySpec(ObsSpec(shapes), limits, horizon, horizon, noise_shape=(horizon, action))


def small_net(width: int = 16, **fields: float) -> DenoiserConfig:
    return DenoiserConfig(
        mlp=MlpBodyConfig(hidden=[width, width], time_dim=8, layer_norm=False, residual=False), **fields
    )  # type: ignore[arg-type]


def make_policy(seed: int = 0, goal: bool = False, guidance: float = 1.0, **fields: object) -> DiffusionPolicy:
    torch.manual_seed(seed)
    net = small_net(guidance=guidance, goal_drop=0.1 if goal else 0.0)
    return DiffusionPolicy(make_spec(goal=goal), DiffusionConfig(net=net, **fields))  # type: ignore[arg-type]


def observe(batch: int, goal: bool = False) -> dict[str, Tensor]:
    made = generator(7, "obs")
    obs = {"state": torch.randn(batch, 3, generator=made, dtype=torch.float32)}
    if goal:
        obs["goal"] = torch.randn(batch, 2, generator=made, dtype=torch.float32)
    return obs


class Stub(nn.Module):
    """Stands in for the network: remembers the times that it was told, and answers by a function."""

    def __init__(self, answer) -> None:
        super().__init__()
        self.answer, self.times, self.inputs = answer, [], []

    def encode(self, obs: dict[str, Tensor], **_: object) -> Cond:
        return Cond(torch.zeros(obs["state"].shape[0], 1, dtype=torch.get_default_dtype()))

    def encode_for_loss(self, obs: dict[str, Tensor], *_: object) -> Cond:
        return self.encode(obs)

    def forward(self, x: Tensor, times: Tensor, cond: Cond) -> Tensor:
        self.times.append(times.detach().clone())
        self.inputs.append(x.detach().clone())
        return self.answer(x, times)


def stub(policy: DiffusionPolicy, answer) -> Stub:
    net = Stub(answer)
    policy.net = net  # type: ignore[assignment]
    return net
