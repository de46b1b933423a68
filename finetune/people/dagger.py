"""DAgger: a policy plays, a person or expert who can do better corrects it, and it goes on imitating with the
corrections.

Ross, Gordon and Bagnell 2011 (DAgger, arXiv 1011.0686): what the expert says about the states that the *policy* visits
is added to the demonstrations, and the policy is trained on the union. ``relabel=true`` asks the expert at every
decision; with ``intervention.rule=random`` it also acts there, in their mixture. Kelly et al. 2018 (HG-DAgger, arXiv
1810.02890), the default: no one is asked, and only actions of a person who holds the robot are imitated.

    who played       imitated, by a policy of n executed actions        with relabel=true
    policy           nothing                                            the first action, as the expert would have it
    policy, expert   nothing                                            likewise
    expert           all n actions                                      all n actions
    expert, policy   those of the expert                                likewise (a person at a robot gives it back so)

A chunk is what follows one observation. The expert's acts in the middle of the policy's chunk answer to another one,
which no replay of decisions holds, and so does what it would have done later in a chunk that it did not begin. So a
policy of chunks learns their later actions from interventions and recordings alone: relabelling does not replace them.

**Departures.** The union grows with every decision and is trained on at once, ``loop.updates_per_decision`` times; the
published rounds of many decisions, each followed by a training from scratch, suit learners that are soon trained. A
slow average of the weights acts and is deployed. Of a chunk longer than what is executed, the positions are learnt that
the expert played without giving the robot back. HG-DAgger's doubt of an ensemble about its own actions is left out:
there it is a measure of risk for later use, and does not enter the training.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...offline.actors import PolicyActor, trainable_imitator
from ...offline.descent import adam, descend
from ...offline.imitation import imitation_chunk, neighbours, played_around
from ...offline.returns import Discount
from ...offline.soft import polyak
from ...policies.core.errors import BurnishError
from ...policies.core.execute import Execution, execution
from ...policies.core.graphed_policy import executed_actor
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import generator as named_generator
from ...policies.core.types import Controller, Decisions, Learner, Metrics, Obs, Source, VecEnv
from ...policies.runs.module_state import restore, state_of
from ..loops import Assembly, OffPolicyConfig
from .interventions import Demonstrations, InterventionConfig, supervised


@dataclass
class DAggerConfig:
    """Settings of DAgger: when the expert takes over, and how the student imitates."""

    # rule by which a scripted expert takes over
    intervention: InterventionConfig = field(default_factory=InterventionConfig)
    relabel: bool = False  # ask the expert about every decision, not only keep what it did
    lr: float = 3e-4  # learning rate of the student
    tau: float = 0.005  # share by which the average of the weights follows, at every update; 1: there is none
    max_grad_norm: float | None = 1.0  # gradients are clipped to this norm; null: not clipped
    discount: Discount = field(default_factory=Discount)  # discount that is stored; imitation does not read it
    # amounts that are played, stored and learnt
    loop: OffPolicyConfig = field(
        default_factory=lambda: OffPolicyConfig(warmup=0, updates_per_decision=1.0, prior_share=1.0)
    )
    execution: Execution = Execution.eager  # execution of an update: eager, or compiled, or CUDA graphs

    def __post_init__(self) -> None:
        check_ranges(self, {"(0, inf)": "lr max_grad_norm", "(0, 1]": "tau"})
        if (self.loop.n_step, self.loop.prior_share) != (1, 1.0):
            raise BurnishError(
                f"dagger learns from single decisions of people, so loop.n_step={self.loop.n_step} and "
                f"loop.prior_share={self.loop.prior_share} must both be 1"
            )


def corrected(batch: dict[str, Any], relabel: bool) -> tuple[Tensor, Tensor]:
    """The actions to imitate: actions (B, n, A), and how many of them (B,), which may be none."""
    action = batch["executed"].clone()
    action[:, 0] = batch["label"]
    taken = batch["intervened"].cumprod(1).sum(1)  # up to where the robot was given back
    return action, torch.where(taken > 0, taken, int(relabel))


def corrected_around(batch: dict[str, Any]) -> dict[str, Tensor]:
    """The actions of people before and after decisions that they played too; what is said of a single tick has no
    neighbours."""
    around = played_around(batch)
    if around:
        around["real"] = around["real"] & batch["around"]["intervened"] & batch["intervened"][:, :1, None]
    return around


class DAgger(Learner):
    """``student`` is an imitator that is trained in place; its average ``policy`` acts and is deployed."""

    columns = ("executed", "intervened", "called", "label")

    def __init__(
        self,
        student: Any,
        config: DAggerConfig,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.student, self.config = student.to(device), config
        self.policy = copy.deepcopy(student).eval().requires_grad_(False)
        self.actor = executed_actor(PolicyActor(self.policy), config.execution, device)
        self.around = neighbours(student.spec)
        self.noise = named_generator(seed, "noise", device=device)
        self.optimizer = adam((p for p in student.parameters() if p.requires_grad), config.lr, config.execution)
        self._step = execution(self._descent, config.execution, device=device, generators=[self.noise])
        self._seed, self._demonstrations = seed, None

    def prior(self, replay: Decisions, recordings: Decisions | None) -> Demonstrations:
        self._demonstrations = Demonstrations(replay, recordings, everything=self.config.relabel, seed=self._seed)
        return self._demonstrations

    def update(self, source: Source) -> Metrics:
        batch = source.sample(around=self.around)
        target = corrected(batch, self.config.relabel)
        metrics = self._step(batch["obs"], *target, corrected_around(batch))
        return metrics if self._demonstrations is None else {**metrics, "intervened": self._demonstrations.share}

    def _descent(self, obs: Obs, action: Tensor, steps: Tensor, around: dict[str, Tensor]) -> Metrics:
        chunk, mask = imitation_chunk(self.student.spec, action, steps, around)
        loss = self.student.bc_loss(obs, chunk, mask=mask, generator=self.noise).mean()
        descend(self.optimizer, loss, self.config.max_grad_norm)
        polyak(self.policy.parameters(), self.student.parameters(), self.config.tau)
        return {"bc_loss": loss.detach(), "corrected": (steps > 0).float().mean()}

    def _parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("student", "policy", "optimizer", "noise")}

    def state_dict(self) -> dict[str, Any]:
        return state_of(self._parts())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore(self._parts(), state)


def build(
    config: DAggerConfig,
    base: Any,
    env: VecEnv,
    *,
    expert: Controller | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Assembly:
    """``expert`` takes over, in the units of ``env``, or the supervisor of the robot that ``env`` is; without either
    no one does, and recordings are all there is."""
    if expert is None and config.relabel:
        raise BurnishError("relabel=true asks an expert about every decision, but there is none; give expert=...")
    student = trainable_imitator(base, "method=dagger")
    spec = student.spec
    view = supervised(config, env, expert, execute=spec.execute, history=spec.history, seed=seed)
    return Assembly(view, DAgger(student, config, seed=seed, device=device))
