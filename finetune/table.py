"""The table of methods: a method of ours joins by one row here, one of another package by an entry point
(`method.py`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from ..offline.cql import CQLConfig
from ..offline.fql import FQLConfig
from ..offline.iql import IQLConfig
from ..offline.q_chunking import QChunkingConfig
from ..offline.recap import RecapConfig
from ..offline.td3_bc import TD3BCConfig
from ..policies.core.errors import BurnishError, did_you_mean, reason
from .baselines.sb3 import SB3Config
from .loops import OffPolicyConfig, OnPolicyConfig
from .method import NONE, LoopKind, Method, Needs, Phase, Recorded, View
from .methods import grpo
from .methods.dppo import DPPOConfig
from .methods.dsrl import DSRLConfig, Variant
from .methods.expo import EXPOConfig
from .methods.flow_sde import FlowSDEConfig
from .methods.gaussian_ppo import GaussianPPOConfig
from .methods.imagine import ImagineConfig
from .methods.mbpo import MBPOConfig
from .methods.offline_to_online import OnlineCQL, OnlineFQL, OnlineIQL, OnlineQChunking, OnlineRecap, OnlineTD3BC
from .methods.reinflow import ReinFlowConfig
from .methods.residual_ppo import ResidualPPOConfig
from .methods.residual_td3 import ResidualTD3Config
from .methods.rfs import RFSConfig
from .methods.rlpd import RLPDConfig
from .methods.rpd import RPDConfig
from .methods.serene import SereneConfig
from .methods.tdmpc import TDMPCConfig
from .people.dagger import DAggerConfig
from .people.intervened_rows import InterventionUse
from .people.rlif import RLIFConfig
from .world_model.env import Guard

GROUP = "burnish.methods"
LOOPS = {LoopKind.on_policy: OnPolicyConfig, LoopKind.off_policy: OffPolicyConfig}  # their settings


def _dsrl(config: DSRLConfig, row: Method) -> Method:
    if config.variant is Variant.aliased:
        return row
    why = (
        f"with method.variant={config.variant.value} learns from its own decisions alone, because nobody knows the "
        "noise behind a recording; take method.variant=aliased"
    )
    return row.changed(recordings=Recorded.unused, interventions=InterventionUse.left_out, why_unused=why)


def _imagine(config: ImagineConfig | MBPOConfig, row: Method) -> Method:
    name, inner = method_name(config.inner), method_of(config.inner)
    if inner.loop not in LOOPS or inner.interventions is InterventionUse.taught:
        raise BurnishError(f"method.inner={name} does not learn in imagined worlds; take dsrl or residual_td3, say")
    if config.guard.kind is Guard.weight and not inner.weighs:
        raise BurnishError(
            f"method.guard.kind=weight lets some rows count less, and method.inner={name} counts all alike; take "
            "method.guard.kind=cut"
        )
    return row.changed(needs=inner.needs, view=inner.view)


def _mbpo(config: MBPOConfig, row: Method) -> Method:
    name, inner = method_name(config.inner), method_of(config.inner)
    own = inner.needs is Needs.planner  # it learns a model itself, from sequences
    if inner.loop is not LoopKind.off_policy or inner.learner or own:
        raise BurnishError(
            f"method.inner={name} does not mix what was played with what is imagined; take sac or residual_td3, say"
        )
    return _imagine(config, row)


def _grpo(config: grpo.GRPOConfig, row: Method) -> Method:
    name, inner = method_name(config.inner), method_of(config.inner)
    if inner.loop is not LoopKind.on_policy or inner.config is grpo.GRPOConfig:
        raise BurnishError(f"method.inner={name} is no method of PPO; take gaussian_ppo, flow_sde or dppo, say")
    build = partial(grpo.build, inner=inner.build)
    return row.changed(needs=inner.needs, view=inner.view, weighs=inner.weighs, build=build)


# The use that methods make of recordings and of decisions in which a person played.
PLAYED: dict[str, Any] = {"recordings": Recorded.played, "interventions": InterventionUse.executed}
TAUGHT: dict[str, Any] = {"recordings": Recorded.played, "interventions": InterventionUse.taught}


def _offline(name: str, config: type, online: type, needs: Needs, doc: str, **facts: Any) -> Method:
    learner = f"..offline.{name}:build"
    return Method(doc=doc, config=online, offline=config, learner=learner, needs=needs, weighs=True, **PLAYED, **facts)


def _online(name: str, config: type, doc: str, room: str = "methods", **facts: Any) -> Method:
    return Method(doc=doc, config=config, build=f".{room}.{name}:build", **facts)


_ppo = partial(_online, loop=LoopKind.on_policy, weighs=True)
_critic = partial(_online, weighs=True)
_model = partial(_online, loop=LoopKind.imagined, recordings=Recorded.ticks, interventions=InterventionUse.refused)

METHODS_OF_OURS: dict[str, Method] = {
    "dppo": _ppo("dppo", DPPOConfig, "PPO through the last steps of a diffusion or flow", needs=Needs.chain),
    "reinflow": _ppo("reinflow", ReinFlowConfig, "PPO on a flow with learnt noise, dropped later", needs=Needs.flow),
    "flow_sde": _ppo("flow_sde", FlowSDEConfig, "PPO on one random step of a flow made an SDE", needs=Needs.flow),
    "gaussian_ppo": _ppo(
        "gaussian_ppo", GaussianPPOConfig, "plain PPO, refining or from scratch", needs=Needs.gaussian
    ),
    "residual_ppo": _ppo("residual_ppo", ResidualPPOConfig, "PPO on a bounded correction per tick", view=View.residual),
    "rpd": _ppo("rpd", RPDConfig, "PPO on a small student near a large teacher", view=View.own),
    "grpo": _ppo(
        "grpo",
        grpo.GRPOConfig,
        "PPO without a critic, method.inner=: episodes that begin alike are compared",
        needs=Needs.gaussian,
        interventions=InterventionUse.refused,
        varies=_grpo,
    ),
    "dsrl": _critic(
        "dsrl",
        DSRLConfig,
        "SAC in the noise of a base that stays as it is",
        needs=Needs.noise,
        recordings=Recorded.executed,
        interventions=InterventionUse.executed,
        view=View.latent,
        varies=_dsrl,
    ),
    "residual_td3": _critic(
        "residual_td3",
        ResidualTD3Config,
        "TD3 or SAC on a bounded correction per tick",
        recordings=Recorded.corrections,
        view=View.residual,
    ),
    "rfs": _critic(
        "rfs", RFSConfig, "noise and a correction of the chunk, chosen together", needs=Needs.noise, view=View.latent
    ),
    "expo": _critic(
        "expo", EXPOConfig, "the best of edited draws; the base only imitates", needs=Needs.imitator, **PLAYED
    ),
    "rlpd": _critic("rlpd", RLPDConfig, "SAC or TD3, half of each batch recordings", needs=Needs.squashed, **PLAYED),
    "tdmpc": _online(
        "tdmpc", TDMPCConfig, "TD-MPC2: plans in a latent model that it learns", needs=Needs.planner, **PLAYED
    ),
    "rlif": _online(
        "rlif",
        RLIFConfig,
        "RLPD with a reward of -1 where the expert takes over: expert=",
        "people",
        needs=Needs.squashed,
        **TAUGHT,
    ),
    "dagger": _online(
        "dagger", DAggerConfig, "imitates an expert who takes over", "people", needs=Needs.imitator, **TAUGHT
    ),
    "iql": _offline(
        "iql",
        IQLConfig,
        OnlineIQL,
        Needs.trainable,
        "expectile values; weighted imitation, or the best of n draws of a flow",
        varies=lambda config, row: row.changed(needs=Needs.imitator) if config.frozen else row,
    ),
    "cql": _offline(
        "cql",
        CQLConfig,
        OnlineCQL,
        Needs.squashed,
        "conservative SAC; with calibrate=true Cal-QL",
        varies=lambda config, row: row.changed(returns=config.behind_cut if config.calibrate else None),
    ),
    "td3_bc": _offline(
        "td3_bc", TD3BCConfig, OnlineTD3BC, Needs.squashed, "TD3 that stays near the data; the simplest"
    ),
    "fql": _offline(
        "fql",
        FQLConfig,
        OnlineFQL,
        Needs.denoiser,
        "a flow imitates, a one-step policy distils it and climbs the critic",
    ),
    "q_chunking": _offline(
        "q_chunking",
        QChunkingConfig,
        OnlineQChunking,
        Needs.trainable,
        "a flow imitates whole chunks; the best of its draws by a critic of chunks acts and is backed up",
    ),
    "recap": _offline(
        "recap",
        RecapConfig,
        OnlineRecap,
        Needs.trainable,
        "imitates everything, told what was better than usual; acts as told that it is",
    ),
    "imagine": _model(
        "imagine", ImagineConfig, "another method, method.inner=, in a learned model of the world", varies=_imagine
    ),
    "mbpo": _model(
        "mbpo",
        MBPOConfig,
        "SAC or another, method.inner=, on what was played and more of what a model imagines",
        varies=_mbpo,
    ),
    "serene": _online(
        "serene",
        SereneConfig,
        "novelty search over weights, and emitters where it finds rewards; no gradients",
        needs=Needs.squashed,
        loop=LoopKind.episodes,
        interventions=InterventionUse.refused,
    ),
    "sb3": _online(
        "sb3",
        SB3Config,
        "SB3 as it is: view=residual|latent|plain",
        "baselines",
        needs=Needs.view,
        loop=LoopKind.library,
        interventions=InterventionUse.refused,
        varies=lambda config, row: row.changed(view=View[config.view.name]),
    ),
}


class Table(Mapping[str, Method]):
    """Our rows, and those that installed packages announce. These are imported when one of them, or all, is asked for;
    one that cannot be imported is left out with a line on standard error."""

    def __init__(self, ours: Mapping[str, Method]) -> None:
        self.ours = ours
        self._installed: dict[str, Method] | None = None

    def __getitem__(self, name: str) -> Method:
        return self.ours[name] if name in self.ours else self.installed()[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self.ours, *self.installed()))

    def __len__(self) -> int:
        return len(self.ours) + len(self.installed())

    def installed(self) -> dict[str, Method]:
        if self._installed is None:
            self._installed = {}
            for entry in entry_points(group=GROUP):
                try:
                    row = entry.load()
                    if not isinstance(row, Method) or not row.phases:
                        raise TypeError("is no burnish.finetune.method.Method with settings for a phase")
                    loop = LOOPS.get(row.loop) if Phase.online in row.phases else None
                    if loop and not isinstance(row.config().loop, loop):
                        raise TypeError(f"has no {loop.__name__} as loop, but its row says {row.loop}")
                    if entry.name in {**self.ours, **self._installed}:
                        raise TypeError("has the name of another method")
                except Exception as error:  # it is another's code, and may raise anything
                    sys.stderr.write(f"burnish: method={entry.name} ({entry.value}) is left out: {reason(error)}\n")
                    continue
                self._installed[entry.name] = row
        return self._installed


METHODS = Table(METHODS_OF_OURS)


class Settings(Mapping[str, type]):
    """Method -> its settings in ``phase``: the group ``method=`` of the command line."""

    def __init__(self, phase: Phase, table: Mapping[str, Method] = METHODS) -> None:
        self.phase, self.table = phase, table

    def __getitem__(self, name: str) -> type:
        config = self.table[name].settings(self.phase)
        if config is NONE:
            raise KeyError(name)
        return config

    def __iter__(self) -> Iterator[str]:
        return (name for name, row in self.table.items() if self.phase in row.phases)

    def __len__(self) -> int:
        return sum(1 for _ in self)


ONLINE, OFFLINE = Settings(Phase.online), Settings(Phase.offline)


def method_name(config: Any, phase: Phase = Phase.online) -> str:
    """The name in the table of methods under which a configuration of this type stands."""
    settings = ONLINE if phase is Phase.online else OFFLINE
    for name, kind in settings.items():
        if type(config) is kind:
            return name
    what = "a refinement" if phase is Phase.online else "an offline method"
    raise BurnishError(f"{type(config).__name__} is not the configuration of {what}; {did_you_mean('', settings)}")


def method_of(config: Any, phase: Phase = Phase.online) -> Method:
    """The row of these settings, with the facts that depend on them."""
    return METHODS[method_name(config, phase)].with_settings(config)
