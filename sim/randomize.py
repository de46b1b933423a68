"""Domain randomisation (Tobin et al. 2017, arXiv 1703.06907): functions of (model, generator), drawn anew each episode.

Every quantity starts from its nominal value, so an episode is a function of its own seed and of none before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..policies.core.errors import BurnishError, did_you_mean
from ..policies.core.ranges import check_ranges

if TYPE_CHECKING:
    import mujoco


@dataclass
class RandomizeConfig:
    """Ranges; 0 leaves a quantity alone. A share of 0.3 multiplies by a number in [0.7, 1.3]."""

    mass: float = 0.0  # share by which masses change, of each body by itself, its inertia with it
    friction: float = 0.0  # share by which friction changes, one number for the whole world
    gains: float = 0.0  # share by which gains change, of each servo by itself
    damping: float = 0.0  # share by which damping changes, of each joint by itself
    latency_s: float = 0.0  # largest delay of an action, in seconds, at most one control tick
    camera_m: float = 0.0  # largest displacement of a camera along each axis, in m
    camera_rad: float = 0.0  # largest turn of a camera about each axis, in rad
    camera_fovy: float = 0.0  # share by which each camera's vertical field of view changes

    def __post_init__(self) -> None:
        check_ranges(
            self,
            {"[0, 1)": "mass friction gains damping camera_fovy", "[0, inf)": "latency_s camera_m camera_rad"},
            "randomize.",
        )

    def any(self) -> bool:
        return any(vars(self).values())

    def changed(self) -> tuple[str, ...]:
        """The fields of the model that ``randomize`` writes, whose nominal values it expects to find."""
        return tuple(name for kind in QUANTITIES if kind.amount(self) for name in kind.fields)


@dataclass
class FactorsConfig:
    """Factors on the whole world, the same in every episode: a world that differs from the nominal one."""

    mass: float = 1.0  # factor on the masses and inertias of all bodies
    friction: float = 1.0  # factor on all frictions
    gains: float = 1.0  # factor on the gains of all servos and motors
    damping: float = 1.0  # factor on the damping of all joints

    def __post_init__(self) -> None:
        check_ranges(self, {"(0, inf)": "mass friction gains damping"}, "factors.")

    def changed(self) -> dict[str, float]:
        """The factors that are not 1, by the name of their quantity."""
        return {name: factor for name, factor in vars(self).items() if factor != 1}


def _scale(shape: int | tuple[int, ...], share: float, generator: np.random.Generator) -> np.ndarray:
    return 1 + share * generator.uniform(-1, 1, shape)


def mass(model: mujoco.MjModel, config: RandomizeConfig, generator: np.random.Generator) -> None:
    """The masses and inertias of all bodies, scaled by one random factor for each body."""
    scale = _scale((model.nbody, 1), config.mass, generator)
    model.body_mass[:] *= scale[:, 0]
    model.body_inertia[:] *= scale


def friction(model: mujoco.MjModel, config: RandomizeConfig, generator: np.random.Generator) -> None:
    """One factor for all: in a contact the larger of two frictions counts, so independent ones would mostly be high."""
    scale = _scale((), config.friction, generator)
    model.geom_friction[:] *= scale
    model.pair_friction[:] *= scale


def gains(model: mujoco.MjModel, config: RandomizeConfig, generator: np.random.Generator) -> None:
    """Gain and bias together, so that a position servo still comes to rest at its target; a motor becomes stronger or
    weaker."""
    scale = _scale((model.nu, 1), config.gains, generator)
    model.actuator_gainprm[:] *= scale
    model.actuator_biasprm[:] *= scale


def damping(model: mujoco.MjModel, config: RandomizeConfig, generator: np.random.Generator) -> None:
    """The damping of all joints, scaled by one random factor for each degree of freedom."""
    model.dof_damping[:] *= _scale(model.dof_damping.shape, config.damping, generator)


def camera_place(model: mujoco.MjModel, config: RandomizeConfig, generator: np.random.Generator) -> None:
    """The places of all cameras, moved by up to ``camera_m`` metres along each axis."""
    model.cam_pos[:] += config.camera_m * generator.uniform(-1, 1, (model.ncam, 3))


def camera_direction(model: mujoco.MjModel, config: RandomizeConfig, generator: np.random.Generator) -> None:
    """A small turn in the camera's own frame: the quaternion of a rotation vector, multiplied from the right."""
    turn = config.camera_rad * generator.uniform(-1, 1, (model.ncam, 3))
    angle = np.sqrt((turn * turn).sum(axis=1, keepdims=True))
    w, v = np.cos(angle / 2), turn * np.sinc(angle / (2 * np.pi)) / 2
    w0, v0 = model.cam_quat[:, :1].copy(), model.cam_quat[:, 1:].copy()
    model.cam_quat[:, :1] = w0 * w - (v0 * v).sum(axis=1, keepdims=True)
    model.cam_quat[:, 1:] = w0 * v + w * v0 + np.cross(v0, v)


def camera_fovy(model: mujoco.MjModel, config: RandomizeConfig, generator: np.random.Generator) -> None:
    """The vertical field of view of each camera, scaled by a random factor."""
    model.cam_fovy[:] *= _scale((model.ncam,), config.camera_fovy, generator)


class Quantity(NamedTuple):
    """A property that can be randomised: its amount in the settings, the change, and the model's fields."""

    amount: Callable[[RandomizeConfig], float]
    change: Callable[[mujoco.MjModel, RandomizeConfig, np.random.Generator], None]
    fields: tuple[str, ...]
    derives: bool = False  # constants of the model follow from it


# In the order in which they are drawn.
QUANTITIES = (
    Quantity(lambda config: config.mass, mass, ("body_mass", "body_inertia"), derives=True),
    Quantity(lambda config: config.friction, friction, ("geom_friction", "pair_friction")),
    Quantity(lambda config: config.gains, gains, ("actuator_gainprm", "actuator_biasprm")),
    Quantity(lambda config: config.damping, damping, ("dof_damping",)),
    Quantity(lambda config: config.camera_m, camera_place, ("cam_pos",), derives=True),
    Quantity(lambda config: config.camera_rad, camera_direction, ("cam_quat",), derives=True),
    Quantity(lambda config: config.camera_fovy, camera_fovy, ("cam_fovy",)),
)

# Quantities that one factor scales for the whole world, by their names.
SCALED = {kind.change.__name__: kind for kind in QUANTITIES if kind.change in (mass, friction, gains, damping)}
SCALED_FIELDS = tuple(name for kind in SCALED.values() for name in kind.fields)


def scaled(model: mujoco.MjModel, factors: Mapping[str, float], scratch: mujoco.MjData) -> None:
    """Changes ``model``, whose ``SCALED_FIELDS`` hold nominal values, in place; ``scratch`` is overwritten."""
    for name, factor in factors.items():
        if name not in SCALED:
            raise BurnishError(f"there is no parameter {name!r} of this world; {did_you_mean(name, SCALED)}")
        for field in SCALED[name].fields:
            getattr(model, field)[...] *= factor
    _derive(model, scratch)


def randomize(
    model: mujoco.MjModel, config: RandomizeConfig, generator: np.random.Generator, scratch: mujoco.MjData
) -> float:
    """Changes ``model``, which holds nominal values, in place; returns the latency of this episode in seconds.
    ``scratch`` is overwritten."""
    drawn = [kind for kind in QUANTITIES if kind.amount(config)]
    for kind in drawn:
        kind.change(model, config, generator)
    if any(kind.derives for kind in drawn):
        _derive(model, scratch)
    return generator.uniform(0, config.latency_s)


def _derive(model: mujoco.MjModel, scratch: mujoco.MjData) -> None:
    """Compute again what the compiler derived from masses and cameras: the inverse weights by which the solver makes
    contacts and limits as stiff as they are meant to be, the masses of subtrees (centres of mass, and what Gymnasium's
    bodies observe), and the places of cameras that follow a body. The extent of the scene stays: it sets how near and
    how far is drawn, and a model may state its own."""
    import mujoco

    extent, center = model.stat.extent, model.stat.center.copy()
    mujoco.mj_setConst(model, scratch)
    model.stat.extent, model.stat.center[:] = extent, center
