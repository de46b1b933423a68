"""The table of refinements: name -> configuration, builder, what it asks of the base, one line of documentation.

A base is asked for what a method uses and for nothing else, so a server of somebody else's policy is refined by every
method that only needs actions. A method joins by one row here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import Enum
from importlib import import_module
from typing import Any, NamedTuple

import torch

from ..offline.dataset import decisions
from ..offline.recorded import label_with_base
from ..offline.replay import Replay
from ..policies.core.errors import BurnishError, did_you_mean
from ..policies.core.seed import derive
from ..policies.core.spec import ActionSpec, agent_spec
from ..policies.core.types import Controller, Learner, Obs, VecEnv
from ..policies.data.episodes import Episodes
from ..policies.gaussian import GaussianPolicy
from .baselines.sb3 import SB3Config, View
from .loops import OffPolicy, OnPolicy, OnPolicyConfig
from .methods.dppo import DPPOConfig
from .methods.dsrl import DSRLConfig
from .methods.dsrl_aliased import recorded_for
from .methods.expo import EXPOConfig
from .methods.flow_sde import FlowSDEConfig
from .methods.gaussian_ppo import GaussianPPOConfig
from .methods.reinflow import ReinFlowConfig
from .methods.residual_ppo import ResidualPPOConfig
from .methods.residual_td3 import ResidualTD3Config
from .methods.rfs import RFSConfig
from .methods.rlpd import RLPDConfig
from .methods.rpd import RPDConfig
from .people.dagger import DAggerConfig
from .people.intervened_rows import InterventionUse
from .people.rlif import RLIFConfig


class Needs(Enum):
    """A requirement of a base; the value completes "needs a policy that ..."."""

    chain = "exposes its generation chain"
    flow = "is a flow"
    noise = "takes its noise from outside"
    imitator = "can go on imitating"
    actions = "acts"
    gaussian = "is a Gaussian, or none at all"
    squashed = "is a Gaussian squashed by tanh, or none at all"
    view = "its view asks for, or none at all"  # the method itself knows its views, and refuses


class Recorded(Enum):
    """The use of recordings that are given as prior data. It also decides what becomes of a person's take-overs:
    whoever can learn from what was executed in a recording can learn from what a person executed (``takeovers_of``)."""

    unused = "unused"
    played = "played"  # decisions of the base's kind
    corrections = "corrections"  # what the base would have had to be corrected by
    executed = "executed"  # what was executed, with no noise behind it


class Method(NamedTuple):
    config: type
    build: str  # "module:function", relative to this package; imported when needed
    needs: Needs
    recorded: Recorded
    doc: str


METHODS: dict[str, Method] = {
    "dppo": Method(
        DPPOConfig,
        ".methods.dppo:build",
        Needs.chain,
        Recorded.unused,
        "PPO through the last steps of a diffusion or flow",
    ),
    "reinflow": Method(
        ReinFlowConfig,
        ".methods.reinflow:build",
        Needs.flow,
        Recorded.unused,
        "PPO on a flow with learnt noise, dropped later",
    ),
    "flow_sde": Method(
        FlowSDEConfig,
        ".methods.flow_sde:build",
        Needs.flow,
        Recorded.unused,
        "PPO on one random step of a flow made an SDE",
    ),
    "gaussian_ppo": Method(
        GaussianPPOConfig,
        ".methods.gaussian_ppo:build",
        Needs.gaussian,
        Recorded.unused,
        "plain PPO, refining or from scratch",
    ),
    "residual_ppo": Method(
        ResidualPPOConfig,
        ".methods.residual_ppo:build",
        Needs.actions,
        Recorded.unused,
        "PPO on a bounded correction per tick",
    ),
    "rpd": Method(
        RPDConfig, ".methods.rpd:build", Needs.actions, Recorded.unused, "PPO on a small student near a large teacher"
    ),
    "dsrl": Method(
        DSRLConfig,
        ".methods.dsrl:build",
        Needs.noise,
        Recorded.executed,
        "SAC in the noise of a base that stays as it is",
    ),
    "residual_td3": Method(
        ResidualTD3Config,
        ".methods.residual_td3:build",
        Needs.actions,
        Recorded.corrections,
        "TD3 or SAC on a bounded correction per tick",
    ),
    "rfs": Method(
        RFSConfig,
        ".methods.rfs:build",
        Needs.noise,
        Recorded.unused,
        "noise and a correction of the chunk, chosen together",
    ),
    "expo": Method(
        EXPOConfig,
        ".methods.expo:build",
        Needs.imitator,
        Recorded.played,
        "the best of edited draws; the base only imitates",
    ),
    "rlpd": Method(
        RLPDConfig, ".methods.rlpd:build", Needs.squashed, Recorded.played, "SAC or TD3, half of each batch recordings"
    ),
    "rlif": Method(
        RLIFConfig,
        ".people.rlif:build",
        Needs.squashed,
        Recorded.played,
        "RLPD with a reward of -1 where the expert takes over: expert=",
    ),
    "dagger": Method(
        DAggerConfig,
        ".people.dagger:build",
        Needs.imitator,
        Recorded.played,
        "imitates an expert who takes over",
    ),
}

# Algorithms of other libraries, which bring the loop and the memory that the methods above share.
BASELINES: dict[str, Method] = {
    "sb3": Method(
        SB3Config, ".baselines.sb3:build", Needs.view, Recorded.unused, "SB3 as it is: view=residual|latent|plain"
    ),
}
CHOICES = METHODS | BASELINES


def method_name(config: Any) -> str:
    for name, method in CHOICES.items():
        if type(config) is method.config:
            return name
    raise BurnishError(f"{type(config).__name__} is not the configuration of a refinement; {did_you_mean('', CHOICES)}")


def intervention_use_of(config: Any) -> InterventionUse:
    """The use of decisions in which a person at a robot played."""
    if hasattr(config, "intervention"):
        return InterventionUse.taught
    stores_actions = CHOICES[method_name(config)].recorded in (Recorded.played, Recorded.executed)
    return (
        InterventionUse.executed
        if stores_actions and getattr(config, "reads_recordings", True)
        else InterventionUse.left_out
    )


def decision_ticks(config: Any, execute: int | None) -> int:
    """Control ticks of one decision of a method, which only an end cuts short; ``execute`` are those of its base's
    chunks, None without a base. A budget of control steps is so many decisions."""
    if isinstance(config, (ResidualPPOConfig, ResidualTD3Config)) or getattr(config, "view", None) is View.residual:
        return 1
    if execute is None or isinstance(config, RPDConfig) or getattr(config, "view", None) is View.plain:
        return getattr(config, "execute", 1)
    return execute


def has(base: Any, needs: Needs) -> bool:
    """Whether a base offers what is needed. Controllers act too, at control time."""
    if needs is Needs.view:
        return True
    if needs in (Needs.gaussian, Needs.squashed):
        plain = needs is Needs.gaussian
        return base is None or (isinstance(base, GaussianPolicy) and (plain or base.config.squash))
    if base is None:
        return False
    spec = getattr(base, "spec", None)
    return {
        Needs.chain: hasattr(base, "transition") and hasattr(base, "num_steps"),
        Needs.flow: hasattr(base, "velocity"),
        Needs.noise: spec is not None and spec.noise_shape is not None,
        Needs.imitator: hasattr(base, "bc_loss"),
        Needs.actions: hasattr(base, "act") or hasattr(base, "peek"),
    }[needs]


def require(name: str, base: Any) -> None:
    """Refuse a base that lacks what the method needs, naming the methods that could refine it."""
    needs = CHOICES[name].needs
    if has(base, needs):
        return
    others = [f"method={other}" for other, method in METHODS.items() if other != name and has(base, method.needs)]
    given = "no policy was given" if base is None else f"the one given is a {type(base).__name__}"
    choices = " or ".join(filter(None, [", ".join(others[:-1]), *others[-1:]]))
    raise BurnishError(f"method={name} needs a policy that {needs.value}; {given}. Try {choices}")


def prepare(
    config: Any,
    base: Any,
    env: VecEnv,
    *,
    prior: Replay | None = None,
    expert: Controller | None = None,
    limits: ActionSpec | None = None,
    samples: Obs | None = None,
    probe: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> OnPolicy[Any] | OffPolicy[Any]:
    """The loop of a method, ready to iterate: ``config`` is that of a method of the table, ``env`` a world at control
    time in policy units, ``prior`` what ``prior_data`` made of recordings. ``limits`` are those of the actuators behind
    ``env``, which the deployed policy remembers; by default the base's. ``expert`` is who takes over, in the units of
    ``env``, where the method learns from such a one.

    A base that is to be steered by its noise is probed first, on a few of ``samples`` or, where none are given, of what
    one reset of ``env`` shows. ``probe=False`` spares a base that is slow, or that was probed before.
    """
    name = method_name(config)
    require(name, base)
    if prior is not None:
        recorded_by(config)
    options: dict[str, Any] = {"seed": seed, "device": device}
    steers = CHOICES[name].needs is Needs.noise or getattr(config, "view", None) is View.latent
    if probe and steers:
        options["samples"] = env.reset() if samples is None else samples
    if hasattr(config, "intervention"):
        options["expert"] = expert
    elif expert is not None:
        learning = [f"method={other}" for other, row in METHODS.items() if "intervention" in vars(row.config())]
        raise BurnishError(
            f"method={name} has no use for an expert who takes over; leave it out, or take {' or '.join(learning)}"
        )
    module, _, function = CHOICES[name].build.partition(":")
    view, learner = getattr(import_module(module, __package__), function)(config, base, env, **options)
    if limits is None and base is not None and hasattr(base, "spec"):
        limits = base.spec.action
    if limits is not None and learner.policy.spec.action != limits:
        learner.policy.spec = replace(learner.policy.spec, action=limits)
    if name in BASELINES:
        return learner
    if isinstance(config.loop, OnPolicyConfig):
        length = config.loop.decisions_per_update
        return OnPolicy(learner, view, decisions_per_update=length, seed=seed)
    # A learner that observes nothing would have all of the prior data copied for nothing.
    if prior is not None and type(learner).observe is not Learner.observe:
        learner.observe(prior.latest()["obs"])
    replay = Replay(config.loop.capacity, env.num_envs, seed=derive(seed, "replay"), device=device)
    memory = learner.prior(replay, prior)
    return OffPolicy(learner, view, replay, config.loop, prior=memory, takeovers=intervention_use_of(config), seed=seed)


class Prior(NamedTuple):
    replay: Replay
    sentence: str  # what there is to know about it


def prior_data(
    config: Any,
    base: Any,
    env: VecEnv,
    episodes: Episodes,
    *,
    limits: ActionSpec | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Prior:
    """Recordings as decisions of the kind that the method makes in ``env``, for ``prepare(prior=...)``. ``limits`` are
    those of the actuators behind ``env``; by default the base's, or else the recording's."""
    name = method_name(config)
    require(name, base)
    kind = recorded_by(config)
    if kind is Recorded.corrections:
        gamma = config.discount.per_step(1)
        shown: dict[str, Any] = {"limits": limits, "observe": config.observe, "seed": seed, "device": device}
        replay, beyond = label_with_base(episodes, base, gamma, config.bound, **shown)
        out_of_reach = f"{beyond:.0%} of their coordinates lie further than bound={config.bound:g} from the base"
        return Prior(replay, f"prior data: {len(replay)} decisions; {out_of_reach}, where the agent cannot follow")
    if base is None:
        spec = agent_spec(env.spec, config.execute, config.history)
        spec = replace(spec, action=limits or episodes.spec.action)
    else:
        spec = replace(base.spec, action=limits or base.spec.action)
    cost = getattr(config, "reward_offset", 0.0)
    replay = decisions(
        episodes,
        replace(spec, obs=episodes.spec.obs),  # whatever the world shows, a mixture wants from both of its parts
        config.discount.per_step(spec.execute),
        reward=lambda r: r - cost,
        seed=seed,
        device=device,
    )
    if kind is Recorded.executed:
        shape = spec.noise_shape or ()
        replay = recorded_for(math.prod(shape[1:] if config.repeat else shape), replay)
    return Prior(replay, f"prior data: {len(replay)} decisions")


def recorded_by(config: Any) -> Recorded:
    """The use of recordings in this method, or a refusal where it has none."""
    name = method_name(config)
    kind = CHOICES[name].recorded
    if kind is not Recorded.unused and getattr(config, "reads_recordings", True):
        return kind
    if kind is not Recorded.unused:
        raise BurnishError(
            f"method={name} with method.variant={config.variant.value} learns from its own decisions alone, because "
            "nobody knows the noise behind a recording; take method.variant=aliased"
        )
    readers = [f"method={other}" for other, method in METHODS.items() if method.recorded is not Recorded.unused]
    raise BurnishError(f"method={name} learns from its own decisions alone; {' and '.join(readers)} can use recordings")
