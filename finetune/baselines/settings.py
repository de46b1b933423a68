"""Settings of SB3's constructors: their own words and defaults, checked before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import stable_baselines3
import torch
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecMonitor

from ...policies.core.errors import BurnishError, did_you_mean, reason
from ...policies.core.seed import derive
from ...policies.nets.mlp import Activation
from .sb3 import DETERMINISTIC, SB3Config

# Ours to give, and by which word.
OURS = {
    "policy": "follows from what is observed",
    "env": "is the view",
    "seed": "is seed=",
    "device": "is device=",
    "gamma": "is method.discount.gamma",
    "action_noise": "is method.explore_std",
}
# Objects, logs of their own, and what could be neither deployed nor continued.
WITHHELD = {"use_sde", "sde_sample_freq", "use_sde_at_warmup", "optimize_memory_usage", "replay_buffer_class"}
WITHHELD |= {"replay_buffer_kwargs", "rollout_buffer_class", "rollout_buffer_kwargs", "tensorboard_log", "verbose"}
WITHHELD |= {"_init_setup_model"}
# Of the networks. The rest of a policy's arguments are ours, or would make an actor that ours cannot express.
NETWORK = {"net_arch", "activation_fn", "log_std_init", "ortho_init", "n_critics", "optimizer_kwargs"}
NETWORK |= {"share_features_extractor"}
# Counts, which SB3 itself does not look at before it stumbles over them.
AT_LEAST_ONE = {"buffer_size", "batch_size", "train_freq", "n_steps", "n_epochs", "policy_delay", "stats_window_size"}


def make_model(
    config: SB3Config, face: Any, encoding: Mapping[str, Any], gamma: float, seed: int, device: torch.device | str
) -> Any:
    """SB3's algorithm on ``face``; ``encoding`` is the part of ``policy_kwargs`` that is ours."""
    kind, what = getattr(stable_baselines3, config.algo.value), f"method.algo={config.algo.value}"
    name = "MultiInputPolicy" if hasattr(face.observation_space, "spaces") else "MlpPolicy"
    options = dict(config.settings or {})
    _require(what, "method.settings", options, kind)
    given = options.pop("policy_kwargs", None) or {}
    if not isinstance(given, Mapping):
        raise BurnishError(f"method.settings.policy_kwargs={given!r} must be a mapping, such as {{net_arch: [64, 64]}}")
    network = dict(given)
    _require(what, "method.settings.policy_kwargs", network, kind.policy_aliases[name], NETWORK)
    if "activation_fn" in network:
        network["activation_fn"] = _activation(network["activation_fn"])
    if config.algo in DETERMINISTIC and config.explore_std > 0:
        size = face.action_space.shape[0]
        options["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, config.explore_std))
    options |= {"gamma": gamma, "policy_kwargs": {**network, **encoding}, "device": device}
    try:
        # Without a seed: SB3 would seed the global generators, and the worlds, which have seeds of their own.
        model = kind(name, VecMonitor(face), **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise BurnishError(f"SB3 refuses the settings of {what}: {reason(error)}") from error
    model.action_space.seed(derive(seed, "warm-up") % 2**32)
    return model


def _require(what: str, where: str, given: Mapping[str, Any], kind: type, among: set[str] | None = None) -> None:
    """Known names, and values of the kind of their defaults where these are numbers."""
    parameters = dict(inspect.signature(kind).parameters)
    known = (parameters.keys() if among is None else among & parameters.keys()) - OURS.keys() - WITHHELD
    for name, value in given.items():
        if name in OURS:
            raise BurnishError(f"{where}.{name} cannot be set, since it {OURS[name]}")
        if name in WITHHELD:
            raise BurnishError(f"{where}.{name} cannot be set: we could not log, deploy or resume what it makes")
        if name not in known:
            raise BurnishError(f"{where} has no {name!r} for {what}; {did_you_mean(name, known)}")
        default = parameters[name].default
        number = isinstance(default, (int, float)) and not isinstance(default, bool)
        whole = number and isinstance(default, int)
        if number and (isinstance(value, bool) or not isinstance(value, int if whole else (int, float))):
            raise BurnishError(f"{where}.{name}={value!r} must be a {'whole ' if whole else ''}number")
        if name in AT_LEAST_ONE and value < 1:
            raise BurnishError(f"{where}.{name}={value} must be at least 1")


def _activation(name: Any) -> type:
    if name not in Activation.__members__:
        raise BurnishError(
            f"method.settings.policy_kwargs.activation_fn={name!r} is not a choice; "
            f"{did_you_mean(str(name), Activation.__members__)}"
        )
    return type(Activation[name].make())
