"""Scalers: exact ranges, exact inverses, constant dimensions, and what passes unchanged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.normalize import FLOOR, Affine, Normalizer, Scaling
from burnish.policies.core.seed import generator
from burnish.policies.core.spec import ObsSpec

SPEC = ObsSpec(
    {"state": (3,), "hand.force": (2,), "goal": (2,), "image.top": (3, 8, 8), "tokens": (4,), "goal_mask": ()}
)


def data(seed: int, rows: int, dim: int = 3) -> Tensor:
    """Dimensions of very different centre and spread."""
    draw = torch.randn(rows, dim, generator=generator(seed, "data"), dtype=torch.float64)
    return draw * torch.logspace(-2, 3, dim, dtype=torch.float64) + torch.linspace(-100, 50, dim, dtype=torch.float64)


def fitted(x: Tensor, kind: Scaling) -> Affine:
    scaler = Affine(x.shape[1:]).double()
    scaler.fit(x, kind)
    return scaler


@pytest.mark.parametrize("kind", Scaling)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 40))
def test_inverse(kind: Scaling, seed: int, rows: int) -> None:
    x = data(seed, rows)
    scaler = fitted(x, kind)
    # Also far outside the data: nothing is clipped. Centres reach 100 at double precision, so 1e-12 relative.
    for value in (x, 50 * x):
        torch.testing.assert_close(scaler(value) * scaler.scale + scaler.shift, value, rtol=1e-12, atol=1e-11)


def test_minmax_touches_both_ends() -> None:
    y = fitted(data(0, 100), Scaling.minmax)(data(0, 100))
    torch.testing.assert_close(y.amin(0), -torch.ones(3).double())
    torch.testing.assert_close(y.amax(0), torch.ones(3).double())


def test_standard_has_no_mean_and_unit_deviation() -> None:
    y = fitted(data(0, 100), Scaling.standard)(data(0, 100))
    torch.testing.assert_close(y.mean(0), torch.zeros(3).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(y.std(0, correction=0), torch.ones(3).double())


@pytest.mark.parametrize("rows", [1, 2, 7, 100, 1001])
def test_quantiles_are_those_of_torch(rows: int) -> None:
    x = data(1, rows)
    low, high = torch.quantile(x, torch.tensor([0.01, 0.99], dtype=torch.float64), dim=0)
    scaler = fitted(x, Scaling.quantile)
    torch.testing.assert_close(scaler.shift, (low + high) / 2)
    half = (high - low) / 2
    torch.testing.assert_close(scaler.scale, torch.where(half < FLOOR, 1.0, half))


def test_quantile_resists_an_outlier_and_does_not_clip_it() -> None:
    x = torch.linspace(-1, 1, 1001).double()[:, None]
    x[0] = -1e6
    y = fitted(x, Scaling.quantile)(x)
    assert y[0] < -1e5
    assert y[1:].abs().max() < 1.05
    # Control: the range of all the data squeezes everything else into one point.
    assert fitted(x, Scaling.minmax)(x)[1:].std() < 1e-5


@pytest.mark.parametrize("kind", [Scaling.minmax, Scaling.standard, Scaling.quantile])
@pytest.mark.parametrize("constant", [0.0, 0.1, -123.456, 1e7])
def test_constant_dimension_becomes_zero_and_keeps_its_unit(kind: Scaling, constant: float) -> None:
    x = torch.stack([torch.full((501,), constant), torch.linspace(0, 1, 501)], 1)
    scaler = Affine((2,))
    scaler.fit(x, kind)
    assert (scaler(x)[:, 0] == 0).all()
    assert scaler.scale[0] == 1
    assert scaler.scale[1] < 0.6  # the other dimension is scaled as ever


@pytest.mark.parametrize("kind", Scaling)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_bad_data_is_refused(kind: Scaling, bad: float | None) -> None:
    x = torch.zeros(0, 3) if bad is None else torch.tensor([[0.0, bad, 1.0], [0.0, 0.0, 0.0]])
    with pytest.raises(BurnishError, match=r"'state'.*NaN"):
        Normalizer(SPEC).fit({"state": x}, kind)


def test_wrong_shape_is_refused() -> None:
    with pytest.raises(BurnishError, match="shape"):
        Affine((3,)).fit(torch.zeros(10, 2), Scaling.minmax)


def columns() -> dict[str, Tensor]:
    draw = generator(3, "columns")
    return {
        "state": 5 + torch.randn(20, 3, generator=draw),
        "hand.force": 7 * torch.randn(20, 2, generator=draw),
        "goal": 9 * torch.randn(20, 2, generator=draw),
        "image.top": torch.randint(0, 256, (20, 3, 8, 8), generator=draw, dtype=torch.uint8),
        "tokens": torch.randint(0, 9, (20, 4), generator=draw),
        "goal_mask": torch.ones(20),
        "action": torch.randn(20, 2, generator=draw),
    }


def test_unfitted_is_the_identity() -> None:
    obs = columns()
    for key, x in Normalizer(SPEC)(obs).items():
        assert torch.equal(x, obs[key]), key


def test_floats_are_scaled_and_the_rest_passes() -> None:
    obs, normalizer = columns(), Normalizer(SPEC)
    normalizer.fit(obs, Scaling.minmax)
    scaled = normalizer(obs)
    assert scaled.keys() == obs.keys()
    for key in ("state", "hand.force", "goal"):
        torch.testing.assert_close(scaled[key].amax(0), torch.ones(scaled[key].shape[1]))
    for key in ("image.top", "tokens", "goal_mask", "action"):
        assert scaled[key] is obs[key], key


def test_every_frame_of_a_history_is_scaled_alike() -> None:
    obs, normalizer = columns(), Normalizer(SPEC)
    normalizer.fit({"state": obs["state"].view(4, 5, 3)}, Scaling.standard)
    stacked = normalizer({"state": obs["state"].view(10, 2, 3)})["state"]
    assert torch.equal(stacked.view(20, 3), normalizer(obs)["state"])


def test_scalers_are_saved() -> None:
    fit, fresh = Normalizer(SPEC), Normalizer(SPEC)
    fit.fit(columns(), Scaling.quantile)
    assert not torch.equal(fit(columns())["state"], fresh(columns())["state"])
    fresh.load_state_dict(fit.state_dict())
    for key, x in fit(columns()).items():
        assert torch.equal(x, fresh(columns())[key]), key
    assert not list(fit.parameters())
