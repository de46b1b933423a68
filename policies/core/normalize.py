"""Affine scalers that are saved with the policy, because their two numbers per dimension are buffers.

Three ways to fit: ``minmax`` maps the data onto [-1, 1], ``standard`` to zero mean and unit deviation, ``quantile``
maps the 1st and 99th percentile onto -1 and 1 (outliers land outside; nothing is ever clipped). A dimension that does
not move in the data is centred and keeps its unit: dividing by its tiny spread would turn sensor noise into signal.

A policy that begins without data is fitted while it acts: ``Running`` merges what it sees into one mean and deviation
(Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", equation 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from .errors import BurnishError
from .spec import ObsSpec, dtype_of

# Half range or deviation, in the units of the data, below which a dimension counts as constant. A servo measures an
# angle to a milliradian and a half, and what varies by less in simulation would be noise on a robot.
FLOOR = 1e-3


class Scaling(Enum):
    """The kinds of affine scalers: none, range to [-1, 1], mean and deviation, or quantiles to [-1, 1]."""

    none = "none"
    minmax = "minmax"
    standard = "standard"
    quantile = "quantile"


class Affine(nn.Module):
    """``x -> (x - shift) / scale``, elementwise over the trailing dimensions; the identity until it is fitted.

    Applying it is calling it: ``apply`` means something else to every nn.Module.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(tuple(shape)))
        self.register_buffer("scale", torch.ones(tuple(shape)))

    @torch.no_grad()
    def fit(self, data: Tensor, kind: Scaling, floor: float = FLOOR) -> None:
        """``data`` is (..., *shape); all leading dimensions are samples."""
        if data.shape[data.ndim - self.shift.ndim :] != self.shift.shape:
            raise BurnishError(f"cannot fit a scaler of shape {tuple(self.shift.shape)} to {tuple(data.shape)}")
        # float64, so that the mean and deviation of a million samples are right.
        rows = data.to(self.shift.device, torch.float64).reshape(-1, *self.shift.shape)
        if len(rows) == 0 or not torch.isfinite(rows).all():
            raise BurnishError("cannot fit a scaler to data that is empty or holds NaN or infinity; clean the data")
        shift, scale = _moments(rows, kind)
        self.shift.copy_(shift)
        self.scale.copy_(_floored(scale, floor))

    def forward(self, x: Tensor) -> Tensor:
        """In the precision of the policy, whatever that of ``x``."""
        return (x.to(self.shift.dtype) - self.shift) / self.scale


def _floored(scale: Tensor, floor: float = FLOOR) -> Tensor:
    return torch.where(scale < floor, 1.0, scale)


def _moments(rows: Tensor, kind: Scaling) -> tuple[Tensor, Tensor]:
    """Centre and half width (or deviation) of (n, ...)."""
    if kind is Scaling.none:
        return torch.zeros_like(rows[0]), torch.ones_like(rows[0])
    if kind is Scaling.standard:
        return rows.mean(0), rows.std(0, correction=0)
    if kind is Scaling.minmax:
        low, high = rows.amin(0), rows.amax(0)
    else:
        # Sorted by hand: torch.quantile refuses inputs of more than 2^24 elements.
        ordered = rows.sort(0).values
        low, high = _quantile(ordered, 0.01), _quantile(ordered, 0.99)
    return (low + high) / 2, (high - low) / 2


def _quantile(ordered: Tensor, q: float) -> Tensor:
    """Linear interpolation between the two nearest ranks of sorted (n, ...)."""
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], position - below)


class Normalizer(nn.Module):
    """One scaler per float observation; images, tokens, masks and unknown keys pass unchanged.

    Scalers have the shape of a single frame, so that all frames of a history are scaled alike.
    """

    def __init__(self, spec: ObsSpec) -> None:
        super().__init__()
        keys = [key for key in sorted(spec.shapes) if dtype_of(key) == torch.float32 and key != "goal_mask"]
        # A dot separates modules, so it may not occur within the name of one.
        self.names = {key: key.replace(".", "/") for key in keys}
        self.scalers = nn.ModuleDict({self.names[key]: Affine(spec.shapes[key]) for key in keys})

    def scaler(self, key: str) -> Affine:
        return cast(Affine, self.scalers[self.names[key]])

    def fit(self, columns: Mapping[str, Tensor], kind: Scaling) -> None:
        """``columns`` holds (..., *shape) per observation; one that the data lacks keeps its scaler as it is."""
        for key in self.names.keys() & columns.keys():
            try:
                self.scaler(key).fit(columns[key], kind)
            except BurnishError as error:
                raise BurnishError(f"the observation {key!r}: {error}") from error

    def forward(self, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: self.scaler(key)(x) if key in self.names else x for key, x in obs.items()}


def merged(moments: Tensor, rows: Tensor) -> Tensor:
    """``moments`` (3, *shape), count, mean and sum of squared deviations of what was seen, with ``rows`` (n, *shape)
    seen too."""
    count, mean, squares = moments
    total, here = count + len(rows), rows.mean(0)
    delta = here - mean
    within = (rows - here).square().sum(0)
    return torch.stack(
        [total, mean + delta * len(rows) / total, squares + within + delta.square() * count * len(rows) / total]
    )


class HasModules(Protocol):
    """A network, or anything else that is made of modules."""

    def modules(self) -> Iterator[nn.Module]: ...


class Running:
    """Fits all normalisers within ``parts`` to everything that was seen so far, as ``Scaling.standard`` would.

    Saved with a policy are the numbers in its normalisers, so it acts alike wherever it is loaded, and only
    ``absorb`` changes them. The moments behind them are for learning on.
    """

    def __init__(self, *parts: HasModules) -> None:
        found = [module for part in parts for module in part.modules() if isinstance(module, Normalizer)]
        self._scalers = {key: [each.scaler(key) for each in found if key in each.names] for key in found[0].names}
        self._moments = {
            key: torch.zeros(3, *first.shift.shape, dtype=torch.float64, device=first.shift.device)
            for key, (first, *_) in self._scalers.items()
        }

    @torch.no_grad()
    def absorb(self, obs: Mapping[str, Tensor]) -> None:
        """(..., *shape) each; all leading dimensions are samples."""
        for key in self._moments.keys() & obs.keys():
            scalers, moments = self._scalers[key], self._moments[key]
            rows = obs[key].to(moments).reshape(-1, *moments.shape[1:])
            if not len(rows):
                continue
            count, mean, squares = self._moments[key] = merged(moments, rows)
            scale = _floored((squares / count).sqrt())
            for scaler in scalers:
                scaler.shift.copy_(mean)
                scaler.scale.copy_(scale)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._moments)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._moments = {key: state[key].to(old, copy=True) for key, old in self._moments.items()}
