"""RFS: one agent chooses the noise of a frozen base and a small correction of what comes of it.

Su et al. 2026 (arXiv 2602.01789): the executed chunk is f(s, w) + bound * r, with (w, r) from one policy. The noise
changes what the base sets out to do, within its support; the correction repairs the last millimetres, which may lie
outside of it. The discount is per decision, as in DSRL.

**Departures.** From the paper we take what is chosen, not how that is optimised: here by SAC (`offline/sac.py`), off
policy, with a chunk's noise and correction as one action. The target entropy is 0 for each coordinate of the noise, as
in DSRL, and -1 for each of the correction, as in SAC: the one should stay spread, the other need not. The warm-up plays
the base itself, without correction.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...offline.critics import adopt_normalizers
from ...offline.returns import Discount, Per
from ...offline.sac import SAC, SACConfig
from ...policies.compose import Steered
from ...policies.core.config import LATER
from ...policies.core.ranges import check_ranges
from ...policies.core.types import Obs, VecEnv
from ..loops import Assembly, OffPolicyConfig
from .dsrl import latent_loop, latent_sac
from .latent import LatentLearner, as_the_base, latent_agent, latent_view, steerable


@dataclass
class RFSConfig:
    """Settings of RFS: the bounds of noise and correction, and the SAC."""

    latent_bound: float = 1.5  # bound of each coordinate of the noise
    residual_bound: float = 0.1  # bound of the correction, in units of the action range [-1, 1]
    repeat: bool = False  # one vector of noise for the whole chunk
    # the agent and its critics see the features of the base, a frozen vision-language model, instead of its pictures
    features: bool = field(default=False, metadata=LATER)
    discount: Discount = field(default_factory=lambda: Discount(0.99, Per.chunk))  # discount of later rewards
    loop: OffPolicyConfig = field(default_factory=latent_loop)  # amounts that are played, stored and learnt
    # target_entropy null: 0 per coordinate of the noise, entropy_per_dim per coordinate of the correction
    sac: SACConfig = field(default_factory=lambda: latent_sac(target_entropy=None))

    def __post_init__(self) -> None:
        check_ranges(self, {"(0, inf)": "latent_bound residual_bound"})


def build(
    config: RFSConfig,
    base: Any,
    env: VecEnv,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    samples: Obs | None = None,
) -> Assembly:
    """``base`` is any policy that takes noise. With ``samples``, a few observations, it is probed first."""
    base, found = steerable(base, "method=rfs", config.repeat, samples, config.latent_bound)
    bounds = {"latent": config.latent_bound, "residual": config.residual_bound}
    gamma = config.discount.per_step(base.spec.execute)
    view = latent_view(base, env, gamma, **bounds, features=config.features, seed=seed)
    agent = latent_agent(config.sac.agent, view, seed=seed, device=device)
    sac = config.sac
    if sac.target_entropy is None:
        sac = replace(sac, target_entropy=sac.entropy_per_dim * view.residual_dim)
    policy = Steered(base, agent, config.latent_bound, config.residual_bound)
    learner = SAC(agent, sac, policy=policy, warm=as_the_base(view, config.latent_bound), seed=seed, device=device)
    adopt_normalizers(learner.critic, base)
    return Assembly(view, LatentLearner(learner, view, found))
