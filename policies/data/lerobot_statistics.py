"""Exact statistics of a dataset's columns, in the shape that LeRobot v3.0 stores them.

**Departures.** LeRobot samples images and averages the quantiles of episodes; here every pixel counts, and quantiles
are those of the whole column (as ``numpy.quantile``, linear interpolation).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
Statistics = dict[str, np.ndarray]


def of_vectors(values: np.ndarray) -> Statistics:
    """(F, n) of any numeric or bool type -> each (n,), and count (1,)."""
    values = values.astype(np.float64)
    found = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    levels = np.quantile(values, list(QUANTILES.values()), axis=0)
    return {**found, "count": np.array([len(values)]), **dict(zip(QUANTILES, levels, strict=True))}


def image_histogram(frames: np.ndarray) -> np.ndarray:
    """(F, C, H, W) uint8 -> (C, 256) counts: all that exact statistics of any number of images need."""
    channels = torch.from_numpy(frames).transpose(0, 1).flatten(1)
    # NumPy's bincount converts every pixel to int64 first, and takes several times as long.
    return np.stack([torch.bincount(channel, minlength=256).numpy() for channel in channels])


def of_images(histogram: np.ndarray, frames: int) -> Statistics:
    """(C, 256) counts -> each (C, 1, 1) on the scale [0, 1], and count (1,) in frames."""
    levels = np.arange(256) / 255
    total = histogram.sum(1, keepdims=True)
    mean = (histogram * levels).sum(1, keepdims=True) / total
    std = np.sqrt((histogram * (levels - mean) ** 2).sum(1, keepdims=True) / total)
    below = histogram.cumsum(1)

    def ranked(rank: int) -> np.ndarray:
        """(C, 1): the pixel value of that rank (0-based) in each channel."""
        return levels[(below <= rank).sum(1, keepdims=True)]

    def quantile(share: float) -> np.ndarray:
        position = share * (int(total[0, 0]) - 1)
        low, part = int(position), position - int(position)
        return ranked(low) * (1 - part) + ranked(min(low + 1, int(total[0, 0]) - 1)) * part

    found = {"min": ranked(0), "max": ranked(int(total[0, 0]) - 1), "mean": mean, "std": std}
    found |= {name: quantile(share) for name, share in QUANTILES.items()}
    return {name: x[:, :, None] for name, x in found.items()} | {"count": np.array([frames])}


class Tally:
    """The data for exact statistics of a growing set: the low-dimensional columns themselves (4 bytes a number, for
    their quantiles), and of each camera a histogram."""

    def __init__(self, vectors: Iterable[str]) -> None:
        self._values: dict[str, list[np.ndarray]] = {name: [] for name in vectors}
        self._histograms: dict[str, np.ndarray] = {}
        self._frames = 0

    def add(self, vectors: Mapping[str, np.ndarray], histograms: Mapping[str, np.ndarray]) -> None:
        """The next frames: each (F, n), and for cameras the ``image_histogram`` of theirs."""
        for name, x in vectors.items():
            self._values[name].append(x)
        for name, x in histograms.items():
            self._histograms[name] = self._histograms.get(name, 0) + x
        self._frames += len(next(iter(vectors.values())))

    def total(self) -> dict[str, Statistics]:
        self._values = {name: [np.concatenate(parts)] for name, parts in self._values.items()}
        found = {name: of_vectors(x) for name, (x,) in self._values.items()}
        return found | {name: of_images(x, self._frames) for name, x in self._histograms.items()}
