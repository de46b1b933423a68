"""Guidance to what was decided before: a chain that continues the old chunk, and not merely begins like it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from burnish.policies.build import build_policy
from burnish.policies.compose import BestOf, Repeated, Residual, Steered
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.seed import RowNoise
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.core.types import Pull
from burnish.policies.diffusion import DiffusionConfig, Sampler
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.flow import FlowConfig
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.nets.critic import CriticConfig, QEnsemble
from burnish.policies.nets.denoiser import Body, DenoiserConfig, MlpBodyConfig
from burnish.policies.nets.unet1d import UNetConfig
from burnish.policies.split_chain import SplitChain
from burnish.real_robot.inference.chunk_settings import fading
from realtime_chunking_lab import two_mode

B, H, A = 400, 8, 1
SPEC = PolicySpec(ObsSpec({"state": (1,)}), ActionSpec((-1.0,), (1.0,)), H, 4, control_hz=20.0)
NET = DenoiserConfig(mlp=MlpBodyConfig([64, 64], 16), unet=UNetConfig(channels=[8, 16], groups=4, time_dim=8))
OBS = {"state": torch.zeros(B, 1)}
KINDS: dict[str, Any] = {
    "flow": FlowConfig(steps=10, net=NET),
    "shortcut": FlowConfig(steps=4, shortcut=True, net=NET),
    "ddim": DiffusionConfig(steps=10, net=NET),
    "ddpm": DiffusionConfig(steps=10, sampler=Sampler.ddpm, net=NET),
}


@cache
def learnt(kind: str) -> Any:
    """Chunks of -0.5 or of +0.5, either with equal right."""
    return two_mode(KINDS[kind])


def noise(seed: int = 3) -> RowNoise:
    return RowNoise(range(B), [seed] * B)


def old(length: int, value: float = 0.5) -> torch.Tensor:
    return torch.full((B, length, A), value)


def pull(committed: int, length: int, **other: float) -> Pull:
    return Pull(old(length), torch.from_numpy(fading(committed, length)), **other)


def changed(chunk: torch.Tensor) -> float:
    """The share of chunks that end on the other side."""
    return float((chunk[:, -1] < 0).float().mean())


def small(kind: str = "flow", seed: int = 1) -> Any:
    """Not trained, and of two observations, so that rows differ."""
    return build_policy(KINDS[kind], SPEC, seed=seed).eval()


def seen(batch: int) -> dict[str, torch.Tensor]:
    return {"state": torch.randn(batch, 1, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_guided_chunk_stays_on_the_side_of_the_old_one(kind):
    """Two of six old actions are committed. Measured over the four kinds: free, .49 to .58 of the chunks end on the
    other side; with the two put in, .29 to .38; guided, .03 to .08, and .95 to .99 of all actions are on a side."""
    policy = learnt(kind)
    free = policy.act(OBS, generator=noise())
    put = policy.act(OBS, prefix=old(2), generator=noise())
    guided = policy.act(OBS, prefix=pull(2, 6), generator=noise())
    assert changed(free) > 0.4 and changed(put) > 0.2 > 0.12 > changed(guided)
    assert float(((guided.abs() - 0.5).abs() < 0.2).float().mean()) > 0.9, "it is not pulled between the two"
    assert torch.equal(guided[:, :2], old(2))
    back = policy.act(OBS, prefix=pull(2, 6)._replace(actions=-old(6)), generator=noise())
    assert changed(back) > 0.88, "and it follows the old chunk to the other side as well"


@torch.no_grad()
def test_what_guidance_alone_holds():
    """As published, with nothing put in: weights a little below 1. Where a flow stays on its side, the committed
    actions come out as they were, up to what the data has by itself (a standard deviation of .02)."""
    policy, whole = learnt("flow"), pull(2, 6)
    alone = policy.act(OBS, prefix=whole._replace(weights=0.9999 * whole.weights), generator=noise())
    both = policy.act(OBS, prefix=whole, generator=noise())
    assert 1.5 * changed(both) < changed(alone) < 0.2
    error = (alone[:, :2] - old(2)).abs().amax((1, 2))
    assert 0 < float(error.median()) < 0.06
    weak = policy.act(OBS, prefix=pull(0, 2, limit=0.5), generator=noise())
    assert changed(weak) > 0.3, "the limit limits"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", list(Body))
def test_without_weight_it_is_the_plain_chunk_bit_for_bit(kind, body):
    config = replace(KINDS[kind], net=replace(NET, body=body))
    policy, obs = build_policy(config, SPEC, seed=2).eval(), seen(5)
    actions = torch.rand(5, 6, A, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain, nothing, something = (
            policy.act(obs, prefix=prefix, generator=RowNoise(range(5), [0] * 5))
            for prefix in (None, Pull(actions, torch.zeros(6)), Pull(actions, torch.full((6,), 0.5)))
        )
    assert torch.equal(plain, nothing) and not torch.equal(plain, something)


def test_it_is_the_published_rule():
    """Equation 2 of real-time chunking, with the whole Jacobian, row by row and step by step."""
    policy, obs = small().double(), {"state": seen(2)["state"].double()}
    source = torch.Generator().manual_seed(4)
    x = torch.randn(2, H, A, generator=source, dtype=torch.float64)
    target = torch.zeros(2, H, A, dtype=torch.float64)
    target[:, :5] = torch.rand(2, 5, A, generator=source, dtype=torch.float64)
    weights = torch.tensor([0.9, 0.8, 0.5, 0.2, 0.1], dtype=torch.float64)
    ours = policy.act(obs, noise=x, prefix=Pull(target[:, :5], weights))
    full = torch.cat([weights, torch.zeros(3, dtype=torch.float64)])
    steps, limited = policy.num_steps, set()
    cond = policy.encode(obs)
    for k in range(steps):
        t = k / steps

        def velocity(z: torch.Tensor, t: float = t) -> torch.Tensor:
            return policy.velocity(z, torch.full((2,), t, dtype=torch.float64), 0.0, cond)

        def clean(z: torch.Tensor, t: float = t) -> torch.Tensor:
            return z + (1 - t) * velocity(z)

        jacobian: Any = torch.autograd.functional.jacobian(clean, x)
        error = (full[None, :, None] * (target - clean(x))).detach()
        r = (1 - t) ** 2 / (t**2 + (1 - t) ** 2)
        scale = min(5.0, (1 - t) / (t * r)) if t else 5.0
        limited.add(scale == 5.0)
        x = (x + (velocity(x) + scale * torch.einsum("bha,bhacld->cld", error, jacobian)) / steps).detach()
    torch.testing.assert_close(ours, x.clamp(-1, 1), rtol=0, atol=1e-12)
    assert limited == {True, False}, "both sides of the limit were seen"


def test_it_asks_for_a_gradient_where_there_is_none_and_leaves_none():
    policy, obs, given = small(), seen(3), Pull(old(4)[:3], torch.from_numpy(fading(1, 4)))
    with torch.no_grad():
        quiet = policy.act(obs, prefix=given, greedy=True)
    loud = policy.act(obs, prefix=given, greedy=True)
    assert torch.equal(quiet, loud.detach()) and not quiet.requires_grad
    assert all(x.grad is None for x in policy.parameters())
    with torch.inference_mode(), pytest.raises(BurnishError, match=r"use torch\.no_grad"):
        policy.act(obs, prefix=given)


@torch.no_grad()
def test_rows_do_not_know_of_each_other():
    policy, obs = small("ddim"), seen(4)
    actions = torch.rand(4, 5, A, generator=torch.Generator().manual_seed(1))
    start = torch.randn(4, H, A, generator=torch.Generator().manual_seed(2))
    weights = torch.from_numpy(fading(2, 5))
    together = policy.act(obs, noise=start, prefix=Pull(actions, weights))
    for i in range(4):
        row = slice(i, i + 1)
        alone = policy.act({"state": obs["state"][row]}, noise=start[row], prefix=Pull(actions[row], weights))
        torch.testing.assert_close(together[row], alone, rtol=0, atol=2e-6)


def composites() -> dict[str, Any]:
    def agent(size: int, base_action: bool = False) -> Any:
        shapes = {"state": (1,)} | ({"base_action": (4, A)} if base_action else {})
        spec = PolicySpec(ObsSpec(shapes), ActionSpec((-1,) * size, (1,) * size), 1, 1)
        return build_policy(GaussianConfig(hidden=[8], squash=True), spec, seed=3).eval()

    torch.manual_seed(0)
    return {
        "relay": SplitChain(small(), small(seed=5), 4),
        "residual": Residual(small(), agent(4, True), 0.2, "chunk"),
        "repeated": Repeated(small()),
        "steered": Steered(small(), agent(H * A), 1.5),
        "best_of": BestOf(small(), QEnsemble(SPEC, CriticConfig(hidden=[8])).eval(), 3),
    }


@torch.no_grad()
def test_what_is_put_together_from_policies_passes_it_on():
    obs, actions = seen(4), 0.5 * torch.ones(4, 6, A)
    given = Pull(actions, torch.from_numpy(fading(2, 6)))
    for name, policy in composites().items():
        guided, put, free = (
            policy.act(obs, prefix=prefix, generator=RowNoise(range(4), [0] * 4))
            for prefix in (given, actions[:, :2], None)
        )
        assert torch.equal(guided[:, :2], actions[:, :2]), name
        near, further, furthest = ((x[:, 2:6] - actions[:, 2:6]).abs().mean() for x in (guided, put, free))
        assert near < 0.9 * min(further, furthest), name


@pytest.mark.parametrize(
    ("policy", "given", "sentence"),
    [
        (lambda: build_policy(GaussianConfig(hidden=[8]), SPEC, seed=1), {}, "only flow and diffusion policies"),
        (lambda: CallablePolicy(lambda obs: torch.zeros(B, H, A), SPEC), {}, "only flow and diffusion policies"),
        (lambda: build_policy(FlowConfig(steps=1, net=NET), SPEC, seed=1), {}, "act with two steps or more"),
        (lambda: build_policy(DiffusionConfig(sampler=Sampler.heun, net=NET), SPEC, seed=1), {}, "ddim and ddpm can"),
        (small, {"weights": torch.ones(3)}, r"a weight in \[0, 1\] for each of its 4 actions"),
        (small, {"weights": torch.full((4,), 1.5)}, "a weight in"),
        (small, {"limit": -1.0}, "limit=-1.0"),
        (small, {"actions": torch.zeros(B, 4, 2)}, "the prefix has shape"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_guided_is_one_sentence(policy, given, sentence):
    with pytest.raises(BurnishError, match=sentence):
        policy().act(OBS, prefix=pull(2, 4)._replace(**given))
