"""The common part of methods that choose a base's noise: view, agent, a prior that is the base, diagnostics.

``BaseEnv`` multiplies what an agent says by the bound, so an agent that says N(0, I) / bound plays the base exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...offline.critics import adopt_normalizers, saturation
from ...offline.learner import Wrapping
from ...offline.sac import SAC
from ...offline.soft import Warm
from ...policies.build import build_policy
from ...policies.compose import Repeated
from ...policies.core.chunk import Chunked, ChunkEnv
from ...policies.core.seed import derive
from ...policies.core.spec import agent_spec
from ...policies.core.types import Metrics, Obs, VecEnv
from ...policies.core.views import BaseEnv
from ...policies.features import read_alone, require_features
from ...policies.gaussian import GaussianConfig, GaussianPolicy
from ...policies.trainable import Remember
from ..diagnostics import distance, sampled
from ..feature_env import FeatureEnv
from ..probe import Steerability, require_noise, require_steerable
from .dsrl_aliased import AliasedLearner


def steerable(
    base: Any, method: str, repeat: bool, samples: Obs | None, bound: float
) -> tuple[Any, Steerability | None]:
    """The base as it will be steered, and how far, or a refusal. Without ``samples`` the base is not asked."""
    require_noise(base, method)
    base = Repeated(base) if repeat else base
    return base, None if samples is None else require_steerable(base, samples, method=method, bound=bound)


def latent_view(
    base: Any,
    env: VecEnv,
    gamma: float,
    *,
    latent: float,
    residual: float | None = None,
    features: bool = False,
    seed: int = 0,
) -> BaseEnv:
    """The worlds with the base's noise, and perhaps a correction, as the action. With ``features`` an observation is
    looked at once: the base acts on its keys, and the agent sees its vector of features."""
    chunked: Chunked = ChunkEnv(env, base.spec.execute, gamma)
    if features:
        chunked = FeatureEnv(chunked, require_features(base, "features=true"), Remember.keys)
    unseen = read_alone(chunked.spec.obs)
    return BaseEnv(chunked, base, latent=latent, residual=residual, unseen=unseen, seed=derive(seed, "base"))


def latent_agent(
    config: GaussianConfig, view: BaseEnv, *, seed: int = 0, device: torch.device | str = "cpu"
) -> GaussianPolicy:
    """A fresh Gaussian agent for that view, with the base's normalisation of observations."""
    spec = agent_spec(view.spec, history=view.base.spec.history)
    agent = build_policy(config, spec, seed=derive(seed, "agent"), device=device)
    adopt_normalizers(agent, view.base)
    return agent


def as_the_base(view: BaseEnv, bound: float) -> Warm:
    """The warm-up: noise from N(0, I) and no correction, which is exactly the base. Nothing is clipped: the replay
    holds, and the critic sees, actions beyond [-1, 1] that the agent itself cannot say."""

    def play(obs: Obs, generator: torch.Generator) -> Tensor:
        count = len(next(iter(obs.values())))
        out = torch.zeros(count, 1, view.action_dim, device=generator.device)
        w = torch.randn(count, view.latent_dim, generator=generator, device=generator.device)
        out[:, 0, : view.latent_dim] = w / bound
        return out

    return play


class LatentLearner(Wrapping):
    """A learner of choices, which adds how far these are from the base: from noise N(0, I), and no correction."""

    def __init__(self, inner: SAC | AliasedLearner, view: BaseEnv, found: Steerability | None) -> None:
        super().__init__(inner)
        self.agent, self.found, self._latent_dim = inner.agent, found, view.latent_dim
        self._bounds = view.latent or 0.0, view.residual or 0.0

    def describe(self) -> str:
        return "the base was not probed" if self.found is None else f"probe of the base: {self.found.sentence()}"

    def extra_metrics(self, batch: Mapping[str, Any], metrics: Mapping[str, Any]) -> Metrics:
        return self._choices(sampled(batch["obs"])) if "actor_loss" in metrics else {}

    @torch.no_grad()
    def _choices(self, obs: Obs) -> Metrics:
        agent, device = self.agent, next(iter(obs.values())).device
        mean = agent.act(obs, greedy=True)[:, 0]
        drawn = agent.act(obs, generator=torch.Generator(device).manual_seed(0))[:, 0]
        (latent, residual), zero = self._bounds, mean.new_zeros(())
        metrics: Metrics = {
            "latent/saturation": saturation(mean[:, : self._latent_dim]),
            "latent/shift": distance(latent * mean[:, : self._latent_dim], zero),  # 0 in the base
            "latent/size": distance(latent * drawn[:, : self._latent_dim], zero),  # 1 in the base
        }
        if residual:
            correction = mean[:, self._latent_dim :]
            metrics |= {
                "residual/saturation": saturation(correction),
                "base_distance": distance(residual * correction, zero),
            }
        return metrics
