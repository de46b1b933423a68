"""Stable-Baselines3 on our views: its algorithms as they are, with our worlds, bases, checkpoints and evaluations.

Raffin et al. 2021, "Stable-Baselines3: Reliable Reinforcement Learning Implementations" (JMLR 22(268)). An algorithm
trains on one of three views:

    residual   control time: it corrects the base's action at every tick, and sees that action  (``ResidualEnv``)
    latent     decision time: it chooses the noise that the base starts from                    (``BaseEnv``)
    plain      control time: no base, from scratch

``settings`` are the words of SB3's own constructors, with SB3's own defaults. The result is a policy of ours that
acts as SB3's does, and is deployed and refined further without SB3 (`actor.py`). A run is saved as plain data
and resumes as SB3 does, with new episodes (`training.py`); SB3's own zip, which is pickle, is written on request
(``keep_zip``) and never read.

**Departures.** SB3 knows one discount for all transitions. At decision time that is gamma^n of a full chunk of n
ticks; rewards inside a chunk are discounted exactly, but where an episode was cut off after s < n ticks the bootstrap
has gamma^n instead of gamma^s. Truncations bootstrap from where the action led, terminations do not: SB3's own rule,
fed with both. SB3's critics also learn from chunks that were cut short, which ours leave out. Observations pass through
our encoder, with the base's normalisers, instead of SB3's flattening: so pictures are looked at by our network instead
of SB3's NatureCNN. TD3 and DDPG explore with ``explore_std``, because SB3 gives them no noise unless told, and without
it they never leave what their first weights say. A robot with a supervisor is refused, because SB3 takes the actions
of a person who intervenes for those of its policy. State-dependent exploration (gSDE) is refused: no policy of ours can
express it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...offline.critics import adopt_normalizers
from ...offline.returns import Discount
from ...policies.build import build_policy
from ...policies.compose import Every, Residual, Steered
from ...policies.controllers import controller_for
from ...policies.core.chunk import ChunkEnv
from ...policies.core.config import LATER
from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import derive
from ...policies.core.spec import EnvSpec, agent_spec, check_compatible
from ...policies.core.types import Obs, VecEnv
from ...policies.core.views import BaseEnv, Hidden, ResidualEnv
from ...policies.gaussian import GaussianPolicy
from ...policies.gymnasium_adapters import as_sb3
from ...policies.nets.encoder import EncoderConfig, ObsEncoder
from ..episode_statistics import EpisodeStatistics
from ..methods.latent import latent_view, steerable

if TYPE_CHECKING:
    from .training import Training


class Algo(Enum):
    """SB3's algorithms for continuous actions, by SB3's names."""

    SAC = "SAC"
    TD3 = "TD3"
    DDPG = "DDPG"
    PPO = "PPO"
    A2C = "A2C"


DETERMINISTIC = (Algo.TD3, Algo.DDPG)


class View(Enum):
    """The quantity that an algorithm of SB3 controls: a correction, the noise of the base, or the robot itself."""

    residual = "residual"
    latent = "latent"
    plain = "plain"


# Where ``bound`` is null; as in our own residual and latent methods.
BOUNDS = {View.residual: 0.1, View.latent: 1.5}


@dataclass
class SB3Config:
    """Settings of method=sb3: the algorithm, what it controls, and arguments of SB3's constructor."""

    algo: Algo = Algo.SAC  # algorithm of Stable-Baselines3
    view: View = View.residual  # quantity that the agent controls: a correction, the noise of the base, or the robot
    # Arguments of SB3's constructor; null: its own. 'method.settings={learning_rate: 1e-3, policy_kwargs: {net_arch:
    # [64, 64]}}'
    settings: Any = None
    # Bound of the correction, in units of the action range (null: 0.1), or of each coordinate of the noise (null: 1.5).
    bound: float | None = None
    explore_std: float = 0.1  # deviation of the Gaussian noise that TD3 and DDPG play, in units of the agent's action
    discount: Discount = field(default_factory=Discount)  # discount of later rewards
    keep_zip: bool = False  # SB3's own zip is kept too, which is pickle: sb3.zip in the run folder
    # facts about the base's chunk that are observed too, with view=residual
    observe: list[Hidden] = field(default_factory=list, metadata=LATER)

    def __post_init__(self) -> None:
        check_ranges(self, {"(0, inf)": "bound"})
        if self.bound is not None and self.view is View.plain:
            raise BurnishError(f"bound={self.bound} limits what is done to a base, and view=plain has none")
        if self.observe and self.view is not View.residual:
            raise BurnishError(
                f"observe= shows where a base is in its chunk at each tick; view={self.view.value} has none"
            )
        check_ranges(self, {"[0, inf)": "explore_std"})
        if not isinstance(self.settings or {}, Mapping) or not _is_plain(self.settings):
            raise BurnishError(
                f"settings={self.settings!r} must be a mapping of plain data, names to numbers, strings, lists and "
                "mappings; for objects and schedules train with SB3 itself, on as_sb3(view)"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(x) for key, x in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, (str, int, float, type(None)))


class Prepared(NamedTuple):
    """A view, and what follows from it."""

    view: VecEnv | BaseEnv
    gamma: float  # per decision of the view
    history: int
    deployed: Callable[[GaussianPolicy], Any]  # what the agent becomes a part of
    about: str


def prepare_view(config: SB3Config, base: Any, env: VecEnv, samples: Obs | None, seed: int) -> Prepared:
    """The world as SB3's algorithm sees it, and how its agent becomes a policy on the base."""
    where = f"method=sb3 view={config.view.value}"
    per_tick = config.discount.per_step(1)
    if config.view is View.plain:
        if base is not None:
            raise BurnishError(
                f"{where} starts from nothing, so the policy that was given would not be used; leave policy= out and "
                "name the world, env=..., or take view=residual or view=latent"
            )
        return Prepared(env, per_tick, 1, lambda agent: agent, "from scratch")
    if base is None or not hasattr(base, "act"):
        given = "no policy was given" if base is None else f"a {type(base).__name__} was given"
        raise BurnishError(
            f"{where} refines a policy, but {given}; give policy=checkpoint policy.path=..., or take view=plain"
        )
    check_compatible(base.spec, env.spec)
    history, bound = base.spec.history, config.bound or BOUNDS[config.view]
    if config.view is View.residual:
        controller = controller_for(base, env.num_envs, seed=derive(seed, "base"), device=env.device)
        view = ResidualEnv(env, controller, bound, config.observe)
        return Prepared(
            view, per_tick, history, lambda agent: Residual(base, agent, bound, Every.step), f"bound {bound:g}"
        )
    base, found = steerable(base, where, False, samples, bound)
    n = base.spec.execute
    gamma = config.discount.per_step(n)
    about = f"bound {bound:g}" + ("" if found is None else f"; probe of the base: {found.sentence()}")
    view = latent_view(base, env, gamma, latent=bound, seed=seed)
    return Prepared(view, gamma**n, history, lambda agent: Steered(base, agent, bound), about)


def build(
    config: SB3Config,
    base: Any,
    env: VecEnv,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    samples: Obs | None = None,
) -> Training:
    """``base`` is a policy, or None for ``view=plain``. With ``samples`` a base to be steered is probed first."""
    try:
        from . import actor, settings, training
    except ImportError as error:
        raise BurnishError(
            "method=sb3 needs Stable-Baselines3, which is not installed; pip install 'burnish[sb3]'"
        ) from error
    statistics = EpisodeStatistics(env.num_envs, env.device)
    made = prepare_view(config, base, training.Noted(env, statistics), samples, seed)
    spec = agent_spec(made.view.spec, 1, made.history)
    randomness = training.Randomness(derive(seed, "sb3"), device)
    with randomness.at_work():
        encoder = ObsEncoder(spec, EncoderConfig())
        adopt_normalizers(encoder, base)
        model = settings.make_model(
            config, as_sb3(made.view), actor.seen_through(encoder, keys(made.view.spec)), made.gamma, seed, device
        )
    agent = build_policy(actor.settings_like(model), spec, device=device)
    view = made.view if isinstance(made.view, BaseEnv) else ChunkEnv(made.view, 1, made.gamma)
    about = f"{config.algo.value} on view={config.view.value}, discount {made.gamma:.4g} per decision, {made.about}"
    deployed = made.deployed(agent)
    return training.Training(model, view, agent, deployed, statistics, randomness, about, config.keep_zip)


def keys(spec: EnvSpec) -> dict[str, str]:
    """Our name of an observation by that in ``as_sb3``, which has no dots."""
    return {key.replace(".", "_"): key for key in spec.obs.shapes}


def train(
    config: SB3Config,
    base: Any,
    env: VecEnv,
    total: int,
    *,
    callbacks: Sequence[Any] = (),
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Training:
    """From Python: one call of SB3's ``learn`` for ``total`` decisions, with SB3's own callbacks. The ``policy`` of the
    answer is what is deployed, its ``model`` is SB3's."""
    training = build(config, base, env, seed=seed, device=device)
    training.learn(total, callbacks)
    return training
