"""Which methods can refine a base, each with the reason: what the table of methods asks for, and what a probe sees."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..policies.core.errors import BurnishError
from ..policies.core.types import Obs
from .build import has
from .method import LoopKind, Method, Needs, View
from .people.intervened_rows import InterventionUse
from .probe import require_steerable
from .table import METHODS, ONLINE


class Fit(NamedTuple):
    """Whether a method can refine a base."""

    method: str
    fits: bool
    reason: str  # why not; or what it does, and what it asks for besides
    raced: bool = True  # `burnish improve` takes it: it needs nothing but the base and a world, and can reach far


def compatibility(base: Any, samples: Obs | None) -> list[Fit]:
    """All methods that learn online. ``samples`` are observations on which the base is probed, for those that steer it
    by its noise; without any, its promise to use its noise is believed."""
    return [_fit(name, METHODS[name], base, samples) for name in ONLINE]


def _fit(name: str, row: Method, base: Any, samples: Obs | None) -> Fit:
    if not has(base, row.needs):
        needs = row.needs.value.removesuffix(", or none at all")
        return Fit(name, False, f"it needs a policy that {needs}, and {type(base).__name__} is none")
    if row.view is View.latent and samples is not None:
        try:
            found = require_steerable(base, samples, method=name)
        except BurnishError as error:
            return Fit(name, False, str(error).partition("; try ")[0])
        if found.faint:
            reach = f"noise reaches {float(found.reach_bound.mean()):.0%} of the range, less than corrections do"
            return Fit(name, True, f"{row.doc}; faintly: {reach}", raced=False)
    if row.needs is Needs.chain:
        sampler = getattr(getattr(base.config, "sampler", None), "value", "ddpm")
        if sampler not in ("ddpm", "ddim"):
            return Fit(name, False, f"it needs the chain of sampler=ddpm or ddim, and this base has sampler={sampler}")
        if getattr(row.config(), "trained_steps", 0) > base.num_steps:
            return Fit(name, True, f"{row.doc}; with method.trained_steps={base.num_steps} at most")
    if row.interventions is InterventionUse.taught:
        return Fit(name, True, f"{row.doc}; it needs one who takes over: expert=...", raced=False)
    if row.loop is LoopKind.library:
        return Fit(name, True, f"{row.doc}; it needs that package", raced=False)
    return Fit(name, True, row.doc)
