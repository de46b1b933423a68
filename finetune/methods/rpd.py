"""RPD: a small policy learns from reward by PPO and, beside it, from what a large teacher would have done.

Juelg et al. 2025, "Refined Policy Distillation" (arXiv 2503.05833). The student acts and explores; the loss of PPO is
joined by ``coef`` times the distance between its mean and the action of the teacher (a vision-language-action model, or
anything else that acts) in the same state.

**Departures.** The teacher is asked once per decision, when it is made, and its answer is stored as ``teacher_action``;
the published code asks it again for every minibatch of every epoch, although the observations do not change. The
divergence from teacher to student is the closed form between two Gaussians, whose floor on the teacher's deviation
takes the place of the published clamps. Returns are bootstrapped at the time limit instead of ending with it, and
advantages are those of `surrogate.gae`, not the finite-horizon variant of ManiSkill. A student of chunks is compared on
all their actions. Published are 128 worlds and minibatches of 133 rows, with a discount of 0.8 for dense rewards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ...offline.critics import adopt_normalizers
from ...offline.returns import Discount
from ...policies.build import build_policy
from ...policies.core.chunk import ChunkEnv
from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges
from ...policies.core.ranks import sharing
from ...policies.core.spec import agent_spec, check_compatible
from ...policies.core.tree import check, map_tree
from ...policies.core.types import Actor, Decision, Obs, Policy, VecEnv
from ...policies.gaussian import GaussianConfig, GaussianPolicy
from .. import diagnostics
from ..loops import Assembly, OnPolicyConfig
from ..ppo import PPO, PPOConfig


class Distance(Enum):
    """The distances between the actions of student and teacher."""

    mse = "mse"
    l1 = "l1"
    likelihood = "likelihood"  # minus the log-density of the teacher's action under the student
    kl = "kl"  # from a Gaussian fitted to several draws of the teacher


@dataclass
class RPDConfig:
    """Settings of RPD: the student, its distance to the teacher and the weight of that, and the PPO."""

    # the student
    agent: GaussianConfig = field(default_factory=lambda: GaussianConfig(hidden=[256, 256], init_std=math.exp(-0.5)))
    execute: int = 1  # actions per decision of the student; the teacher is asked as often
    distance: Distance = Distance.mse  # distance between student and teacher
    coef: float = 1.0  # weight of that distance
    greedy_teacher: bool = False  # ask for its most typical action; for distance=kl draws are wanted
    samples: int = 10  # draws of the teacher per decision, for distance=kl
    min_teacher_std: float = 0.05  # least deviation of the teacher's Gaussian, for distance=kl
    # the PPO that updates it
    ppo: PPOConfig = field(default_factory=lambda: PPOConfig(epochs=8, lam=0.9, target_kl=0.2))
    # amounts that are played, stored and learnt
    loop: OnPolicyConfig = field(default_factory=lambda: OnPolicyConfig(decisions_per_update=50))
    discount: Discount = field(default_factory=Discount)  # discount of later rewards

    def __post_init__(self) -> None:
        least = {"[1, inf)": "execute", "[2, inf)": "samples", "[0, inf)": "coef"}
        check_ranges(self, {**least, "(0, inf)": "min_teacher_std"})
        if self.distance is Distance.kl and (self.greedy_teacher or self.agent.squash):
            raise BurnishError(
                "distance=kl compares two Gaussians, so it needs greedy_teacher=false and agent.squash=false; "
                "use distance=mse, l1 or likelihood"
            )


def distance(config: RPDConfig, student: GaussianPolicy, obs: Obs, rows: dict[str, Any]) -> Tensor:
    """(B,): mean over the coordinates of a chunk."""
    law, teacher = student.law(obs), rows["teacher_action"]
    squash = student.config.squash
    if config.distance is Distance.likelihood:
        # Teachers touch the limits, where atanh is infinite.
        u = torch.atanh(teacher.clamp(-1 + 1e-3, 1 - 1e-3)) if squash else teacher
        full = torch.full_like(rows["steps"], student.spec.execute)
        return -student.log_prob(obs, u, full)[:, 0] / student.spec.execute / student.spec.action.dim
    if config.distance is Distance.kl:
        return gaussian_kl(teacher, rows["teacher_std"], law.mean, law.std.expand_as(law.mean)).mean((1, 2))
    error = (torch.tanh(law.mean) if squash else law.mean) - teacher
    return (error.square() if config.distance is Distance.mse else error.abs()).mean((1, 2))


def gaussian_kl(mean_p: Tensor, std_p: Tensor, mean_q: Tensor, std_q: Tensor) -> Tensor:
    """KL(p, q) of each coordinate."""
    check(std_q, "B H A", check(mean_q, "B H A", check(std_p, "B H A", check(mean_p, "B H A"))))
    return torch.log(std_q / std_p) + (std_p.square() + (mean_p - mean_q).square()) / (2 * std_q.square()) - 0.5


@torch.no_grad()
def from_teacher(student: GaussianPolicy, rows: dict[str, Any]) -> Tensor:
    """In units of the action range, whatever ``distance`` is: the student's mean from the stored labels."""
    seen = diagnostics.sampled({**rows["obs"], "teacher_action": rows["teacher_action"]})
    return diagnostics.distance(student.act(seen, greedy=True), seen["teacher_action"])


class TeacherLabelledActor:
    """The student acts; what the teacher would have done is written down beside it. The update never asks."""

    def __init__(self, student: Actor, teacher: Policy, config: RPDConfig) -> None:
        self.student, self.teacher, self.config = student, teacher, config

    @torch.no_grad()
    def act(self, obs: Obs, *, warm: bool, generator: torch.Generator, fresh: Tensor | None = None) -> Decision:
        decision = self.student.act(obs, warm=warm, generator=generator, fresh=fresh)
        return Decision(decision.action, {**decision.columns, **self._labels(obs, generator)})

    def _labels(self, obs: Obs, generator: torch.Generator) -> dict[str, Tensor]:
        config, spec = self.config, self.teacher.spec
        seen = {key: obs[key] for key in spec.inputs.shapes if key in obs}
        if config.distance is not Distance.kl:
            chunk = self.teacher.act(seen, greedy=config.greedy_teacher, generator=generator)
            return {"teacher_action": spec.executed(chunk)[:, : config.execute]}
        # All draws of a state in one call.
        many = map_tree(lambda x: x.repeat_interleave(config.samples, 0), seen)
        drawn = spec.executed(self.teacher.act(many, generator=generator))[:, : config.execute]
        drawn = drawn.unflatten(0, (-1, config.samples))
        spread = drawn.std(1, correction=0).clamp(min=config.min_teacher_std)
        return {"teacher_action": drawn.mean(1), "teacher_std": spread}

    def state_dict(self) -> dict[str, Any]:
        return self.student.state_dict()


def build(config: RPDConfig, base: Any, env: VecEnv, *, seed: int = 0, device: torch.device | str = "cpu") -> Assembly:
    """``base`` is the teacher."""
    if not hasattr(base, "act"):
        raise BurnishError(
            f"method=rpd needs a teacher that can act, but got {type(base).__name__}; give policy=checkpoint or any "
            "policy, or use method=gaussian_ppo, which needs none"
        )
    check_compatible(base.spec, env.spec)
    if sharing().size > 1 and config.distance is Distance.kl:
        raise BurnishError(
            "method.distance=kl asks the teacher for several draws, which several ranks would draw otherwise than one "
            "process; take mse, l1 or likelihood, or start it without torchrun"
        )
    if config.execute > base.spec.execute:
        raise BurnishError(
            f"execute={config.execute}: the teacher executes {base.spec.execute} actions per chunk and cannot teach "
            "more; lower execute"
        )
    view = ChunkEnv(env, config.execute, config.discount.per_step(config.execute))
    spec = agent_spec(env.spec, config.execute, base.spec.history)
    student = build_policy(config.agent, spec, seed=seed, device=device)
    teaching = {"distance": (config.coef, lambda obs, rows: distance(config, student, obs, rows))}
    learner = PPO(
        student,
        student,
        config.ppo,
        num_envs=env.num_envs,
        auxiliary=teaching,
        watch=lambda rows: {"base_distance": from_teacher(student, rows)},
        seed=seed,
        device=device,
    )
    for module in (student, learner.value):
        adopt_normalizers(module, base)
    learner.actor = TeacherLabelledActor(learner.actor, base, config)
    return Assembly(view, learner)
