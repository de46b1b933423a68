"""The table of policies: name -> configuration, builder, one line of documentation."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from .advised import AdvisedConfig
from .compose import BestOfConfig, GreedyConfig, RepeatedConfig, ResidualConfig, SteeredConfig
from .core.errors import BurnishError, did_you_mean
from .diffusion import DiffusionConfig
from .flow import FlowConfig
from .gaussian import GaussianConfig
from .lerobot.act import LeRobotACTConfig
from .lerobot.diffusion import LeRobotDiffusionConfig
from .nets.critic import CriticConfig
from .one_step import OneStepConfig
from .planner import PlannerConfig
from .split_chain import SplitChainConfig
from .vla.bins import BinsConfig
from .vla.pi0 import Pi0Config
from .vla.smolvla import SmolVLAConfig, TinyVLAConfig


class PolicyKind(NamedTuple):
    """One row of the table of policies: its configuration, its builder and its line of documentation."""

    config: type
    build: str  # "module:class", relative to this package; imported when needed
    doc: str
    language: bool = False  # it reads instructions; others do where they are asked to


POLICIES: dict[str, PolicyKind] = {
    "flow": PolicyKind(FlowConfig, ".flow:FlowPolicy", "flow matching; with shortcut=true also in 1, 2 or 4 steps"),
    "diffusion": PolicyKind(
        DiffusionConfig, ".diffusion:DiffusionPolicy", "DDPM training; DDPM, DDIM, Heun or DPM sampling"
    ),
    "gaussian": PolicyKind(
        GaussianConfig, ".gaussian:GaussianPolicy", "one Gaussian, plain or tanh; least squares or likelihood"
    ),
    "tiny_vla": PolicyKind(
        TinyVLAConfig, ".vla.smolvla:SmolVLA", "vision-language-action model of the kind of SmolVLA, small", True
    ),
    "bins": PolicyKind(
        BinsConfig, ".vla.bins:BinsPolicy", "tokens: 256 bins per number, on the model of tiny_vla", True
    ),
}


class CompositeKind(NamedTuple):
    """The fields of ``config`` and the ``parts`` are the arguments that the class is made with."""

    config: type
    build: str
    parts: tuple[str, ...]
    optional: tuple[str, ...] = ()


# Results of refinement. They are not configured: methods make them, and checkpoints hold them.
COMPOSITES: dict[str, CompositeKind] = {
    "residual": CompositeKind(ResidualConfig, ".compose:Residual", ("base", "net")),
    "steered": CompositeKind(SteeredConfig, ".compose:Steered", ("base", "latent")),
    "repeated": CompositeKind(RepeatedConfig, ".compose:Repeated", ("base",)),
    "advised": CompositeKind(AdvisedConfig, ".advised:Advised", ("base",)),
    "greedy": CompositeKind(GreedyConfig, ".compose:Greedy", ("base",)),
    "best_of": CompositeKind(BestOfConfig, ".compose:BestOf", ("base", "critic"), ("edit",)),
    "relay": CompositeKind(SplitChainConfig, ".split_chain:SplitChain", ("first", "last")),
}
# A part that is no policy itself.
CRITIC = PolicyKind(CriticConfig, ".nets.critic:QEnsemble", "what the actions are worth")
# The student of offline/fql.py, distilled from another policy. It cannot imitate, so `burnish pretrain` has none.
ONE_STEP = PolicyKind(OneStepConfig, ".one_step:OneStepPolicy", "observation and noise to a chunk, in one pass")
# Trained by finetune/methods/tdmpc.py.
PLANNER = PolicyKind(PlannerConfig, ".planner:PlannerPolicy", "plans in a latent model, with a prior and critics")
# Trained by LeRobot: read from its checkpoints (lerobot/checkpoint.py), and refined.
LEROBOT = {
    "lerobot_diffusion": PolicyKind(LeRobotDiffusionConfig, ".lerobot.diffusion:LeRobotDiffusion", "of LeRobot"),
    "lerobot_act": PolicyKind(LeRobotACTConfig, ".lerobot.act:LeRobotACT", "of LeRobot"),
    "smolvla": PolicyKind(SmolVLAConfig, ".vla.smolvla:SmolVLA", "of LeRobot"),
    "pi0": PolicyKind(Pi0Config, ".vla.pi0:Pi0", "of LeRobot"),
}
KINDS: dict[str, PolicyKind | CompositeKind] = {
    **POLICIES,
    **COMPOSITES,
    **LEROBOT,
    "critic": CRITIC,
    "one_step": ONE_STEP,
    "planner": PLANNER,
}


def policy_name(config: Any) -> str:
    """The name in the table of policies under which a configuration of this type stands."""
    for name, kind in KINDS.items():
        if type(config) is kind.config:
            return name
    raise BurnishError(f"{type(config).__name__} is not the configuration of a policy; {did_you_mean('', POLICIES)}")


def maker(kind: PolicyKind | CompositeKind) -> Any:
    """The class of a row, imported now."""
    module, _, name = kind.build.partition(":")
    return getattr(import_module(module, __package__), name)
