"""From the table of methods to a loop that is ready: what a base must have, the learner, and recordings as decisions.

A base is asked for what a method uses and for nothing else, so a server of another's policy is refined by every method
that only needs actions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ..offline.dataset import decisions
from ..offline.recorded import label_with_base
from ..offline.replay import Replay
from ..policies.core.errors import BurnishError
from ..policies.core.seed import derive
from ..policies.core.spec import ActionSpec, ChunkConfig, EnvSpec, PolicySpec, chunk_spec
from ..policies.core.types import Controller, KnownDynamics, Obs, VecEnv
from ..policies.data.episodes import Episodes
from ..policies.gaussian import GaussianPolicy
from ..policies.planner import PlannerPolicy
from ..policies.vla.bins import BinsPolicy
from .data_parallel import on_policy
from .loops import Assembly, Loop, OffPolicy
from .method import LoopKind, Needs, Phase, Recorded, View, resolved
from .methods import offline_to_online
from .methods.dsrl_aliased import recorded_for
from .people.intervened_rows import InterventionUse
from .people.interventions import supervisor_of
from .table import METHODS, method_name, method_of
from .world_model.ticks import recorded_ticks


def decision_ticks(config: Any, execute: int | None) -> int:
    """Control ticks of one decision of a method, which only an end cuts short; ``execute`` are those of its base's
    chunks, None without a base. A budget of control steps is so many decisions."""
    view = method_of(config).view
    if view.per_tick:
        return 1
    return own_chunk(config).execute if execute is None or view is View.own else execute


def own_chunk(config: Any) -> ChunkConfig:
    """The chunk of what a method makes without a base."""
    config = getattr(config, "inner", config)
    execute = getattr(config, "execute", 1)
    return getattr(config, "chunk", ChunkConfig(execute, execute, history=getattr(config, "history", 1)))


def has(base: Any, needs: Needs) -> bool:
    """Whether a base offers what is needed. Controllers act too, at control time."""
    if base is None:
        return needs.optional
    spec = getattr(base, "spec", None)
    imitates = hasattr(base, "bc_loss")
    return {
        Needs.chain: hasattr(base, "transition") and hasattr(base, "num_steps"),
        Needs.flow: hasattr(base, "velocity"),
        Needs.noise: spec is not None and spec.noise_shape is not None,
        Needs.imitator: imitates,
        Needs.actions: hasattr(base, "act") or hasattr(base, "peek"),
        Needs.gaussian: isinstance(base, GaussianPolicy | BinsPolicy),
        Needs.squashed: isinstance(base, GaussianPolicy) and base.config.squash,
        Needs.trainable: imitates,
        Needs.denoiser: imitates and spec is not None and spec.noise_shape == spec.chunk_shape,
        Needs.planner: isinstance(base, PlannerPolicy),
        Needs.view: True,
    }[needs]


def require(config: Any, base: Any) -> None:
    """Refuse a base that lacks what the method needs, naming the methods that could refine it."""
    name, needs = method_name(config), method_of(config).needs
    if has(base, needs):
        return
    able = (other for other, row in METHODS.items() if Phase.online in row.phases and row.loop is not LoopKind.library)
    others = [f"method={other}" for other in able if other != name and has(base, METHODS[other].needs)]
    given = "no policy was given" if base is None else f"the one given is a {type(base).__name__}"
    choices = " or ".join(filter(None, [", ".join(others[:-1]), *others[-1:]]))
    raise BurnishError(f"method={name} needs a policy that {needs.value}; {given}. Try {choices}")


def prepare(
    config: Any,
    base: Any,
    env: VecEnv,
    *,
    prior: Any = None,
    pretrain_updates: int = 0,
    expert: Controller | None = None,
    twin: VecEnv | None = None,
    limits: ActionSpec | None = None,
    samples: Obs | None = None,
    probe: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Loop[Any]:
    """The loop of a method, ready to iterate: ``config`` is that of a method of the table, ``env`` a world at control
    time in policy units, ``prior`` what ``prior_data`` made of recordings, from which alone the first
    ``pretrain_updates`` updates learn, before anything is played. ``limits`` are those of the actuators behind ``env``,
    which the deployed policy remembers; by default the base's. ``expert`` is who takes over, in the units of ``env``,
    where the method learns from such a one; ``twin`` is a simulation of the world, in those units too, that a learned
    model stands on.

    A base that is to be steered by its noise is probed first, on a few of ``samples`` or, where none are given, of what
    one reset of ``env`` shows. ``probe=False`` spares a base that is slow, or that was probed before.
    """
    name, row = method_name(config), method_of(config)
    require(config, base)
    if prior is not None:
        recorded_by(config)
    elif pretrain_updates:
        raise BurnishError(f"pretrain_updates={pretrain_updates} learn from recordings alone; name them: data=FOLDER")
    if limits is None and base is not None and hasattr(base, "spec"):
        limits = base.spec.action
    options: dict[str, Any] = {"seed": seed, "device": device}
    if probe and row.view is View.latent:
        options["samples"] = env.reset() if samples is None else samples
    if row.interventions is InterventionUse.taught:
        options["expert"] = expert
    elif expert is not None:
        learning = [f"method={other}" for other, x in METHODS.items() if x.interventions is InterventionUse.taught]
        raise BurnishError(
            f"method={name} has no use for an expert who takes over; leave it out, or take {' or '.join(learning)}"
        )
    if row.interventions is InterventionUse.refused and supervisor_of(env) is not None:
        raise BurnishError(
            f"method={name} would take the actions of the supervisor, who may take the robot over, for those of its "
            "policy; leave the supervisor out, or take another method, such as method=residual_td3"
        )
    if twin is not None and row.loop is not LoopKind.imagined:
        learning = [f"method={other}" for other, x in METHODS.items() if x.loop is LoopKind.imagined]
        raise BurnishError(
            f"method={name} learns no model on top of a twin; leave it out, or take {' or '.join(learning)}"
        )
    if row.loop is LoopKind.imagined:
        if pretrain_updates:
            raise BurnishError(f"method={name} learns from what it imagines; leave pretrain_updates= out")
        options["twin"] = dynamics_of(twin, env)
        options["prepare"] = partial(prepare, limits=limits, device=device)
        options |= {"recordings": prior, "history": frames(config, base)}
    if row.build:
        made = resolved(row.build)(config, base, env, **options)
    else:
        options |= {"recordings": prior, "limits": limits}
        made = offline_to_online.build(resolved(row.learner), config, base, env, **options)
    learner = made.learner
    if limits is not None and learner.policy.spec.action != limits:
        learner.policy.spec = replace(learner.policy.spec, action=limits)
    if not isinstance(made, Assembly):
        return made
    view, learner = made
    if row.loop is LoopKind.on_policy:
        if pretrain_updates:
            raise BurnishError(f"method={name} learns from what was just played, so it cannot be pretrained so")
        return on_policy(learner, view, config.loop.decisions_per_update, seed)
    kept = {"place": config.loop.place, "seed": derive(seed, "replay"), "device": device}
    replay = Replay(config.loop.capacity, env.num_envs, **kept)
    options = {"prior": learner.prior(replay, prior), "pretrain_updates": pretrain_updates}
    return OffPolicy(learner, view, replay, config.loop, **options, interventions=row.interventions, seed=seed)


def dynamics_of(twin: VecEnv | None, env: VecEnv) -> KnownDynamics | None:
    """The twin's word on where an action leads, or a refusal of one that cannot say."""
    if twin is None:
        return None
    if (twin.spec.obs, twin.spec.action) != (env.spec.obs, env.spec.action):
        raise BurnishError(
            f"the twin shows and takes {twin.spec.obs.shapes} and {twin.spec.action.dim} actions, the world "
            f"{env.spec.obs.shapes} and {env.spec.action.dim}; a twin simulates that world, so give both the same form"
        )
    if (known := getattr(twin, "known_dynamics", None)) is None:
        raise BurnishError(
            "this twin cannot be set to what it shows, because that is not its whole state; leave twin= out, or take "
            "a world whose state is seen, such as lqr, half_cheetah, hopper or walker2d"
        )
    return known


def frames(config: Any, base: Any) -> int:
    """The number of observations that a policy sees at once: of the base, or of what the method makes without one."""
    return base.spec.history if hasattr(base, "spec") else own_chunk(config).history


class Prior(NamedTuple):
    """Recordings as decisions of a method, or as ticks, with a sentence about them."""

    replay: Any  # a `Replay`, or the `Ticks` of a model
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
    require(config, base)
    kind, row = recorded_by(config), method_of(config)
    if kind is Recorded.ticks:
        seen = env.spec.obs.without_history(frames(config, base))
        actions = limits or (episodes.spec.action if base is None else base.spec.action)
        found = recorded_ticks(episodes, actions, seen, env.spec.action_mode, device)
        return Prior(found, f"prior data: {len(found)} ticks of {len(episodes)} episodes, for the model of the world")
    if kind is Recorded.corrections:
        if config.features:
            raise BurnishError(
                "with method.features=true an agent learns from what the base makes of pictures, and recordings hold "
                "the pictures; leave data or method.features out"
            )
        if config.offset.half_life:
            raise BurnishError(
                f"method.offset.half_life={config.offset.half_life} lets corrections last, and recordings are not told "
                "as such; refine without prior data, or with method.offset.half_life=0"
            )
        gamma = config.discount.per_step(1)
        shown: dict[str, Any] = {"limits": limits, "observe": config.observe, "seed": seed, "device": device}
        replay, beyond = label_with_base(episodes, base, gamma, config.bound, **shown)
        out_of_reach = f"{beyond:.0%} of their coordinates lie further than bound={config.bound:g} from the base"
        return Prior(replay, f"prior data: {len(replay)} decisions; {out_of_reach}, where the agent cannot follow")
    if base is None:
        spec = fresh_spec(config, env.spec, limits or episodes.spec.action)
    else:
        spec = replace(base.spec, action=limits or base.spec.action)
    replay = decisions(
        episodes,
        replace(spec, obs=episodes.spec.obs),  # whatever the world shows, a mixture wants from both of its parts
        config.discount.per_step(spec.execute),
        returns=row.returns,
        seed=seed,
        device=device,
    )
    if kind is Recorded.executed:
        shape = spec.noise_shape or ()
        replay = recorded_for(math.prod(shape[1:] if config.repeat else shape), replay)
    return Prior(replay, f"prior data: {len(replay)} decisions")


def fresh_spec(config: Any, world: EnvSpec, limits: ActionSpec) -> PolicySpec:
    """The spec of what a method makes without a base."""
    return chunk_spec(world, own_chunk(config), limits)


def recorded_by(config: Any) -> Recorded:
    """The use of recordings in this method, or a refusal where it has none."""
    name, row = method_name(config), method_of(config)
    if row.recordings is not Recorded.unused:
        return row.recordings
    if row.varies is not None and METHODS[name].recordings is not Recorded.unused:
        raise BurnishError(f"method={name} {row.why_unused}")
    readers = [f"method={other}" for other, x in METHODS.items() if x.recordings is not Recorded.unused]
    raise BurnishError(f"method={name} {row.why_unused}; {' and '.join(readers)} can use recordings")
