"""Networks: shapes, gradients, and each against a slower way to say the same thing."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.seed import generator
from burnish.policies.nets.ema import Ema
from burnish.policies.nets.mlp import MLP, Activation, SinusoidalTime
from burnish.policies.nets.unet1d import UNet1d, UNetConfig
from burnish.policies.nets.vision import VisionConfig, VisionNet, random_shift

Made = TypeVar("Made")


def seeded(make: Callable[..., Made], *args: Any, **kwargs: Any) -> Made:
    """Constructors draw from torch's global generator; here as in production they do so under a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(*args, **kwargs)


def gradients(net: nn.Module, output: Tensor) -> dict[str, Tensor | None]:
    weight = torch.randn(output.shape, generator=generator(1, "projection"), dtype=output.dtype)
    net.zero_grad()
    (output * weight).sum().backward()
    return {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("residual", [False, True])
def test_gradients_reach_all_of_an_mlp(activation: Activation, residual: bool) -> None:
    net = seeded(MLP, 4, 3, [8, 8], activation=activation, layer_norm=True, residual=residual)
    x = torch.randn(16, 4, generator=generator(0, "x"))
    for name, gradient in gradients(net, net(x)).items():
        assert gradient is not None and gradient.abs().sum() > 0, name


def test_mlp_shapes_and_zero_start() -> None:
    x = torch.randn(2, 7, 4, generator=generator(0, "x"))
    assert MLP(4, 3, [8])(x).shape == (2, 7, 3)
    assert (MLP(4, 3, [8], zero_last=True)(x) == 0).all()
    assert not (MLP(4, 3, [8])(x) == 0).any()


def test_sinusoidal_time_is_its_formula() -> None:
    times = torch.tensor([[0.0, 0.1], [0.5, 1.0]], dtype=torch.float64)
    frequency = [1000 * 10000 ** (-i / 7) for i in range(8)]
    expected = [
        [[math.sin(t * f) for f in frequency] + [math.cos(t * f) for f in frequency] for t in row]
        for row in times.tolist()
    ]
    # The constants are float32: angles of up to 1000 are right to 1000 * 2^-23 = 1e-4.
    torch.testing.assert_close(SinusoidalTime(16).double()(times), torch.tensor(expected).double(), rtol=0, atol=2e-4)


def test_a_hundred_diffusion_steps_are_told_apart() -> None:
    embedded = SinusoidalTime(64)(torch.linspace(0, 1, 101))
    distance = torch.cdist(embedded, embedded) + 1e3 * torch.eye(101)
    assert distance.min() > 0.5  # of at most 2 * sqrt(32)


@pytest.mark.parametrize("dim", [2, 7])
def test_sinusoidal_time_refuses_odd_dimensions(dim: int) -> None:
    with pytest.raises(BurnishError, match="even"):
        SinusoidalTime(dim)


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("horizon", [1, 2, 3, 5, 7, 8, 13])
def test_unet_takes_any_horizon(levels: int, horizon: int) -> None:
    net = seeded(UNet1d, 3, 6, UNetConfig([8, 16, 24][:levels], groups=4)).double()
    draw = generator(0, "x")
    x, cond = torch.randn(2, horizon, 3, generator=draw).double(), torch.randn(2, 6, generator=draw).double()
    y = net(x, cond)
    assert y.shape == x.shape
    # The documented padding: zeros behind the chunk, up to a multiple of 2^(levels - 1), which is then cut.
    padded = F.pad(x, (0, 0, 0, -horizon % 2 ** (levels - 1)))
    torch.testing.assert_close(y, net(padded, cond)[:, :horizon], rtol=0, atol=0)


def test_unet_connects_every_action_with_every_other_and_with_the_condition() -> None:
    net = seeded(UNet1d, 2, 6, UNetConfig(channels=[8, 16, 24], groups=4)).double()
    draw = generator(0, "x")
    x, cond = torch.randn(1, 8, 2, generator=draw).double(), torch.randn(1, 6, generator=draw).double()
    by_x, by_cond = torch.autograd.functional.jacobian(lambda x, cond: net(x, cond), (x, cond))
    assert (by_x.abs().sum((0, 2, 3, 5)) > 0).all()
    assert (by_cond.abs() > 0).all()
    # And with the right derivatives, so that nothing is cut off from training.
    assert torch.autograd.gradcheck(net, (x.requires_grad_(), cond.requires_grad_()), fast_mode=True)


def test_unet_skips_lead_around_the_coarse_levels() -> None:
    net = seeded(UNet1d, 2, 6, UNetConfig([8, 16, 24], groups=4)).double()
    x, cond = torch.randn(1, 8, 2, generator=generator(0, "x")).double(), torch.ones(1, 6).double()

    def depends() -> bool:
        return not torch.allclose(net(x, cond), net(x + 1, cond))

    # Nothing enters the third level; what the second level saw still arrives.
    nn.init.zeros_(net.get_parameter("shrink.1.weight"))
    assert depends()
    # Nothing enters the second level: from the first there is no skip, as in Diffuser.
    nn.init.zeros_(net.get_parameter("shrink.0.weight"))
    assert not depends()


@pytest.mark.parametrize(
    "wrong", [{"channels": [8, 12]}, {"channels": []}, {"kernel": 4}, {"groups": 0}], ids=lambda w: next(iter(w))
)
def test_unet_refuses_impossible_settings(wrong: dict) -> None:
    with pytest.raises(BurnishError, match="unet"):
        UNetConfig(**wrong)


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 84, 84), (4, 128, 96), (3, 4, 4), (3, 1, 9)])
def test_vision_takes_any_size(shape: tuple[int, ...]) -> None:
    net = seeded(VisionNet, shape, VisionConfig())
    images = torch.randint(0, 256, (3, *shape), generator=generator(0, "x"), dtype=torch.uint8)
    y = net(images)
    assert y.shape == (3, 64) and y.isfinite().all()
    # A row does not depend on the others, to float32 rounding.
    torch.testing.assert_close(net(images[1:2]), y[1:2], rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in net.parameters()) < 400_000


def crops(image: np.ndarray, pad: int) -> dict[tuple[int, int], np.ndarray]:
    """Every crop of a replicated border, by NumPy: (M, H, W) -> offset -> (M, H, W)."""
    height, width = image.shape[1:]
    padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)), mode="edge")
    offsets = itertools.product(range(2 * pad + 1), repeat=2)
    return {(i, j): padded[:, i : i + height, j : j + width] for i, j in offsets}


def test_random_shift_is_a_random_crop_of_a_replicated_border() -> None:
    pad = 2
    images = torch.randint(0, 256, (300, 2, 3, 6, 9), generator=generator(0, "images"), dtype=torch.uint8)
    shifted = random_shift(images, pad, generator(0, "shift"))
    assert shifted.dtype == torch.uint8 and shifted.shape == images.shape
    seen = set()
    for before, after in zip(images.flatten(1, 2).numpy(), shifted.flatten(1, 2).numpy(), strict=True):
        # One offset explains all channels and both frames of the history.
        matching = [offset for offset, crop in crops(before, pad).items() if np.array_equal(crop, after)]
        assert len(matching) == 1
        seen.update(matching)
    # 25 offsets, 300 draws: one is never drawn with probability below 25 * (24/25)^300 = 1e-4; the seed is fixed.
    assert len(seen) == (2 * pad + 1) ** 2


def test_random_shift_is_repeatable_and_may_be_nothing() -> None:
    images = torch.randint(0, 256, (8, 3, 12, 16), generator=generator(0, "images"), dtype=torch.uint8)
    again = [random_shift(images, 3, generator(5, "shift")) for _ in range(2)]
    assert torch.equal(*again)
    assert not torch.equal(again[0], random_shift(images, 3, generator(6, "shift")))
    assert torch.equal(random_shift(images, 0, generator(5, "shift")), images)


def network() -> nn.Sequential:
    """With float and integer buffers."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def wander(net: nn.Module, seed: int) -> None:
    draw = generator(seed, "wander")
    with torch.no_grad():
        for x in itertools.chain(net.parameters(), net.buffers()):
            x.add_(torch.randn(x.shape, generator=draw).to(x.dtype) if x.is_floating_point() else 1)


@pytest.mark.parametrize("warmup", [False, True])
def test_ema_is_a_slow_loop(warmup: bool) -> None:
    net = seeded(network).double()
    ema = Ema(net, 0.7, warmup)
    mean = [p.detach().numpy().copy() for p in net.parameters()]
    for n in range(30):
        wander(net, n)
        ema.update(net)
        decay = min(0.7, (1 + n) / (10 + n)) if warmup else 0.7
        mean = [decay * m + (1 - decay) * p.detach().numpy() for m, p in zip(mean, net.parameters(), strict=True)]
    averaged = copy.deepcopy(net)
    ema.copy_to(averaged)
    for p, m in zip(averaged.parameters(), mean, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), m, rtol=1e-12, atol=1e-12)
    for mine, latest in zip(averaged.buffers(), net.buffers(), strict=True):
        assert torch.equal(mine, latest)


def test_ema_does_not_round_small_updates_away() -> None:
    net = seeded(network).bfloat16()
    with torch.no_grad():
        net.get_parameter("0.weight").fill_(1.0)
        ema = Ema(net, 0.999, warmup=False)
        net.get_parameter("0.weight").fill_(2.0)
    for _ in range(100):
        ema.update(net)
    expected = 2 - 0.999**100
    # float32 accumulates 100 roundings of 2^-24 at most.
    torch.testing.assert_close(ema.parameters["0.weight"], torch.full((4, 3), expected), rtol=0, atol=1e-5)


def test_ema_resumes_exactly() -> None:
    def run(interrupt: bool) -> dict[str, Tensor]:
        net = seeded(network)
        ema = Ema(net)
        for n in range(6):
            wander(net, n)
            ema.update(net)
            if interrupt and n == 2:
                state = copy.deepcopy(ema.state_dict())
                ema = Ema(net)
                ema.load_state_dict(state)
        assert ema.count == 6
        return ema.parameters | ema.buffers

    whole, resumed = run(False), run(True)
    assert all(torch.equal(x, resumed[name]) for name, x in whole.items())


def test_ema_refuses() -> None:
    with pytest.raises(BurnishError, match="decay"):
        Ema(network(), 1.0)
    with pytest.raises(BurnishError, match="name or shape"):
        Ema(network()).load_state_dict(Ema(nn.Linear(3, 4)).state_dict())
