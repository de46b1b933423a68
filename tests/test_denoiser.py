"""From observations to denoised chunks: histories, hidden goals, guidance, and gradients everywhere."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from test_nets import gradients, seeded
from torch import Tensor

from burnish.policies.core import tree
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.normalize import Scaling
from burnish.policies.core.seed import generator
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.nets.denoiser import Body, Cond, Denoiser, DenoiserConfig, MlpBodyConfig
from burnish.policies.nets.encoder import EncoderConfig, ObsEncoder
from burnish.policies.nets.unet1d import UNetConfig
from burnish.policies.nets.vision import VisionConfig

SHAPES: dict[str, tuple[int, ...]] = {
    "state": (3,),
    "image.top": (3, 12, 16),
    "goal": (2,),
    "goal_image.top": (3, 12, 16),
    "goal_mask": (),
}
SMALL_NET = UNetConfig(channels=[8, 16, 24], groups=4, time_dim=8)
SMALL_VISION = VisionConfig(features=5, channels=[4, 6])
SMALL_ENCODER = EncoderConfig(vision=SMALL_VISION)


def spec_of(*keys: str, history: int = 1, horizon: int = 5, execute: int = 2) -> PolicySpec:
    obs = ObsSpec({key: SHAPES[key] for key in keys})
    return PolicySpec(obs, ActionSpec((-1.0,) * 3, (1.0,) * 3), horizon, execute, history=history)


def observe(spec: PolicySpec, batch: int = 4, seed: int = 0) -> dict[str, Tensor]:
    draw = generator(seed, "obs")
    obs = {}
    for key, shape in spec.inputs.shapes.items():
        if "image" in key:
            obs[key] = torch.randint(0, 256, (batch, *shape), generator=draw, dtype=torch.uint8)
        else:
            obs[key] = torch.ones(batch) if key == "goal_mask" else torch.randn(batch, *shape, generator=draw)
    return obs


def denoiser(
    body: Body = Body.mlp, keys: tuple[str, ...] = ("state", "goal"), num_times: int = 1, **config
) -> Denoiser:
    full = DenoiserConfig(body, MlpBodyConfig([16, 16], 8), SMALL_NET, SMALL_ENCODER, **config)
    return seeded(Denoiser, spec_of(*keys), full, num_times)


@pytest.mark.parametrize("body", Body)
@pytest.mark.parametrize("num_times", [1, 2])
@pytest.mark.parametrize("trunk", [[], [7, 9]])
def test_gradients_reach_all_of_a_denoiser(body: Body, num_times: int, trunk: list[int]) -> None:
    spec = spec_of("state", "image.top", "goal", "goal_image.top", "goal_mask", history=2)
    encoder = EncoderConfig(SMALL_VISION, trunk)
    net = seeded(Denoiser, spec, DenoiserConfig(body, MlpBodyConfig([16, 16], 8), SMALL_NET, encoder), num_times)
    draw = generator(0, "x")
    x, times = torch.randn(4, 5, 3, generator=draw), torch.rand(4, num_times, generator=draw)
    for name, gradient in gradients(net, net(x, times, net.encode(observe(spec)))).items():
        assert gradient is not None and gradient.abs().sum() > 0, name
        if name == "body.film.1.weight":
            assert (gradient.abs().sum(1) > 0).all(), "a scale or a shift of the U-Net is not used"


ALL = ("state", "image.top", "goal", "goal_image.top", "goal_mask")


def encoder(*keys: str, history: int = 1, **config) -> ObsEncoder:
    return seeded(ObsEncoder, spec_of(*keys, history=history), EncoderConfig(vision=SMALL_VISION, **config))


@pytest.mark.parametrize(
    ("keys", "history", "dim"),
    [
        (("state",), 1, 3),
        (("state",), 3, 9),
        (("state", "goal"), 1, 3 + 2 + 1),
        (("image.top",), 2, 2 * 5),
        (ALL, 2, 2 * 3 + 2 * 5 + 2 + 5 + 1),
    ],
)
def test_encoder_width(keys: tuple[str, ...], history: int, dim: int) -> None:
    net = encoder(*keys, history=history)
    assert net.dim == dim
    assert net(observe(spec_of(*keys, history=history))).shape == (4, dim)
    trunk = encoder(*keys, history=history, trunk=[11, 7])
    assert trunk(observe(spec_of(*keys, history=history))).shape == (4, trunk.dim) == (4, 7)


def test_state_passes_raw_and_normalised() -> None:
    net, obs = encoder("state"), observe(spec_of("state"))
    assert torch.equal(net(obs), obs["state"])
    net.normalizer.fit({"state": obs["state"]}, Scaling.minmax)
    torch.testing.assert_close(net(obs).amax(0), torch.ones(3))


def test_the_policy_decides_the_precision() -> None:
    net, obs = encoder(*ALL), observe(spec_of(*ALL))
    double = {key: x.double() if x.is_floating_point() else x for key, x in obs.items()}
    assert torch.equal(net(double), net(obs))
    assert copy.deepcopy(net).double()(obs).dtype == torch.float64


def test_a_row_is_encoded_as_if_it_were_alone() -> None:
    net, obs = encoder(*ALL, history=2).double(), observe(spec_of(*ALL, history=2))
    for row in range(4):
        alone = net(tree.index(obs, slice(row, row + 1)))
        torch.testing.assert_close(alone, net(obs)[row : row + 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("key", ["state", "image.top"])
def test_the_order_of_a_history_matters(key: str) -> None:
    net, obs = encoder("state", "image.top", history=2), observe(spec_of("state", "image.top", history=2))
    assert not torch.allclose(net(obs), net(obs | {key: obs[key].flip(1)}))


def test_the_order_of_keys_does_not_matter() -> None:
    obs = observe(spec_of(*ALL))
    backwards = dict(reversed(obs.items()))
    assert torch.equal(encoder(*ALL)(obs), encoder(*ALL[::-1])(backwards))


@pytest.mark.parametrize("trunk", [[], [8]])
@pytest.mark.parametrize("goal", [0.0, 1e30, math.nan, math.inf])
def test_a_dropped_row_does_not_know_its_goal(goal: float, trunk: list[int]) -> None:
    net, obs = encoder(*ALL, trunk=trunk), observe(spec_of(*ALL))
    changed = obs | {"goal": torch.full_like(obs["goal"], goal), "goal_image.top": 255 - obs["goal_image.top"]}
    drop = torch.tensor([True, False, True, False])
    before, after = net(obs, drop=drop), net(changed, drop=drop)
    assert torch.equal(before[drop], after[drop])
    # Control: the other rows do know.
    assert not torch.isclose(before[~drop], after[~drop]).all(1).any()
    # Nor does it spoil a gradient.
    hidden = tree.where(drop, changed, obs)
    net(hidden, drop=drop).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


def test_dropping_masking_and_leaving_out_are_the_same() -> None:
    net, obs = encoder(*ALL), observe(spec_of(*ALL))
    dropped = net(obs, drop=torch.ones(4, dtype=torch.bool))
    assert torch.equal(dropped, net(obs | {"goal_mask": torch.zeros(4)}))
    assert torch.equal(dropped, net({key: obs[key] for key in ("state", "image.top")}))
    unmasked = {key: x for key, x in obs.items() if key != "goal_mask"}
    assert torch.equal(net(unmasked), net(obs))
    assert not torch.equal(dropped, net(obs))


def test_augmentation_moves_images_and_nothing_else() -> None:
    net, obs = encoder("state", "image.top"), observe(spec_of("state", "image.top"))
    plain, moved = net(obs), net(obs, augment=generator(0, "augment"))
    sizes = [5, 3]  # image.top, then state: sorted
    assert torch.equal(plain.split(sizes, 1)[1], moved.split(sizes, 1)[1])
    assert not torch.equal(plain.split(sizes, 1)[0], moved.split(sizes, 1)[0])
    assert torch.equal(moved, net(obs, augment=generator(0, "augment")))


@pytest.mark.parametrize(
    "change",
    [
        {"state": None},
        {"state": torch.zeros(4, 2)},
        {"state": torch.zeros(4, 3, dtype=torch.int64)},
        {"image.top": torch.zeros(4, 3, 12, 16)},
        {"goal": None},
        {"goal": torch.zeros(3, 2)},
        {"goal_mask": torch.ones(4, 1)},
    ],
    ids=["missing", "shape", "type", "image type", "half a goal", "rows", "mask"],
)
def test_encoder_refuses(change: dict[str, Tensor | None]) -> None:
    obs = observe(spec_of(*ALL)) | change
    with pytest.raises(BurnishError, match=next(iter(change))):
        encoder(*ALL)({key: x for key, x in obs.items() if x is not None})


@pytest.mark.parametrize("shapes", [{"goal": (2,)}, {"image.top": (12, 16)}])
def test_encoder_refuses_specifications(shapes: dict[str, tuple[int, ...]]) -> None:
    spec = PolicySpec(ObsSpec(shapes), ActionSpec((-1.0,), (1.0,)), 1, 1)
    with pytest.raises(BurnishError):
        ObsEncoder(spec, EncoderConfig())


@pytest.mark.parametrize("body", Body)
@pytest.mark.parametrize("guidance", [0.0, 0.5, 1.0, 2.0])
def test_guidance_is_its_formula(body: Body, guidance: float) -> None:
    net = denoiser(body, ALL, guidance=guidance, goal_drop=0.1).double()
    obs, draw = observe(spec_of(*ALL)), generator(0, "x")
    x, times = torch.randn(4, 5, 3, generator=draw).double(), torch.rand(4, 1, generator=draw).double()
    cond = net.encode(obs)
    given = net(x, times, Cond(net.encoder(obs)))
    free = net(x, times, Cond(net.encoder({key: obs[key] for key in ("state", "image.top")})))
    assert (given - free).abs().mean() > 1e-3
    torch.testing.assert_close(net(x, times, cond), free + guidance * (given - free), rtol=0, atol=1e-12)
    assert (cond.free is None) == (guidance == 1)
    # Training fits the plain prediction.
    assert net.encode(obs, drop=torch.zeros(4, dtype=torch.bool)).free is None


@pytest.mark.parametrize("body", Body)
@pytest.mark.parametrize("num_times", [1, 2])
def test_denoiser_depends_on_everything(body: Body, num_times: int) -> None:
    net = denoiser(body, num_times=num_times).double()
    draw = generator(0, "x")
    x, times = torch.randn(4, 5, 3, generator=draw).double(), torch.rand(4, num_times, generator=draw).double()
    cond = net.encode(observe(spec_of("state", "goal")))
    assert cond.given.dtype == torch.float64 and cond.free is None
    y = net(x, times, cond)
    assert y.shape == x.shape and y.dtype == torch.float64
    others = [(x + 0.1, times, cond), (x, times, cond.rows(torch.tensor([1, 0, 3, 2])))]
    others += [(x, times + 0.1 * torch.eye(num_times).double()[i], cond) for i in range(num_times)]
    for other in others:
        assert ((net(*other) - y).flatten(1).abs().amax(1) > 1e-4).all()


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_rows_of_a_condition(guidance: float) -> None:
    net = denoiser(guidance=guidance, goal_drop=0.1).double()
    cond, draw = net.encode(observe(spec_of("state", "goal"))), generator(0, "x")
    x, times = torch.randn(6, 5, 3, generator=draw).double(), torch.rand(6, 1, generator=draw).double()
    index = torch.tensor([3, 3, 0, 1, 2, 0])
    y = net(x, times, cond.rows(index))
    for row, source in enumerate(index.tolist()):
        one = cond.rows(slice(source, source + 1))
        torch.testing.assert_close(net(x[row : row + 1], times[row : row + 1], one)[0], y[row], rtol=0, atol=1e-12)


def test_denoiser_refuses_wrong_shapes() -> None:
    net = denoiser()
    cond = net.encode(observe(spec_of("state", "goal")))
    for x, times in [((4, 5, 2), (4, 1)), ((4, 6, 3), (4, 1)), ((4, 5, 3), (4, 2)), ((4, 5, 3), (4,))]:
        with pytest.raises(ValueError, match="expected shape"):
            net(torch.zeros(x), torch.zeros(times), cond)


def test_impossible_guidance_is_refused() -> None:
    with pytest.raises(BurnishError, match="goal_drop"):
        DenoiserConfig(guidance=2.0)
    with pytest.raises(BurnishError, match="goal_drop"):
        DenoiserConfig(goal_drop=1.5)
    with pytest.raises(BurnishError, match="observes none"):
        Denoiser(spec_of("state"), DenoiserConfig(guidance=2.0, goal_drop=0.1), 1)
