"""Pretraining by imitation: windows over episodes, a schedule, a moving average, and exact resume.

The policy that is evaluated and saved is the moving average of the weights. Evaluation is a callback, because nothing
here knows a simulator. Everything that a further update depends on is in ``state_dict``. Several ranks train as one
process does (`core/ranks.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from .build import describe
from .core.errors import BurnishError
from .core.execute import Execution, Precision, autocast, execution
from .core.normalize import Scaling
from .core.prefetch import Prefetch
from .core.ranges import check_ranges
from .core.ranks import ALONE, Ranks, whole
from .core.seed import Generator, generator
from .core.types import Metrics, Obs
from .data.episodes import Episodes
from .data.windows import Pad, Windows
from .nets.ema import Ema
from .runs.module_state import restore, state_of
from .runs.run import Run
from .runs.training_loop import refuse_diverged, to_end, train
from .sharding import gathered, placed, sharded, shares
from .trainable import copied


class Schedule(Enum):
    """The courses of the learning rate after warm-up: constant, or a half cosine down."""

    constant = "constant"
    cosine = "cosine"


class PadLoss(Enum):
    """The treatment of padded actions behind the end of an episode: left out of the loss, or trained on."""

    mask = "mask"  # padding is no data
    train = "train"  # padding is trained as if it were data


@dataclass
class ImitateConfig:
    """Settings of imitation: updates, batch, learning rate and its schedule, moving average, and padding."""

    steps: int = 10_000  # updates
    batch: int = 256  # windows of each update
    lr: float = 1e-3  # learning rate at its highest
    weight_decay: float = 1e-6  # weight decay of AdamW
    warmup: int = 200  # updates in which the learning rate rises
    schedule: Schedule = Schedule.cosine  # schedule of the learning rate
    min_lr_ratio: float = 0.01  # share of the learning rate that is left in the end
    ema: float = 0.999  # factor of the average of the weights, at every update
    clip_grad: float = 1.0  # norm to which gradients are clipped
    # each of several ranks holds its share of parameters, gradients and moments (FSDP2), in place of all
    shard: bool = False
    valid_fraction: float = 0.05  # share of the episodes that are kept for validation
    pad: Pad = Pad.repeat  # actions behind the end of an episode
    pad_loss: PadLoss = PadLoss.mask  # treatment of those actions in the loss
    normalize: Scaling = Scaling.minmax  # scaling of observations and actions
    precision: Precision = Precision.float32  # precision of matrix products
    execution: Execution = Execution.eager  # execution of an update: eager, or compiled, or CUDA graphs
    log_every: int = 100  # updates between two rows of metrics
    eval_every: int = 0  # updates between two evaluations; 0: only at the end
    save_every: int = 1000  # updates between two checkpoints

    def __post_init__(self) -> None:
        ranges = {
            "[1, inf)": "steps batch log_every save_every",
            "[0, inf)": "warmup eval_every weight_decay",
            "(0, inf)": "lr clip_grad",
            "[0, 1)": "ema valid_fraction",
            "[0, 1]": "min_lr_ratio",
        }
        check_ranges(self, ranges, "train.")


def learning_rate(config: ImitateConfig, step: int) -> float:
    """A function of the step alone: warm up linearly, then stay or follow half a cosine down to the least."""
    warm = min(1.0, (step + 1) / max(config.warmup, 1))
    if config.schedule is Schedule.constant:
        return config.lr * warm
    progress = min(1.0, max(0.0, (step - config.warmup) / max(1, config.steps - config.warmup)))
    low = config.min_lr_ratio
    return config.lr * warm * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


class ImitationLearner:
    """Updates a policy on windows; ``average`` is the policy to use. ``fit`` lets its normalisers be fitted to the
    data; a policy that has learnt before reads its inputs through those that it learnt with."""

    def __init__(
        self,
        policy: Any,
        episodes: Episodes,
        config: ImitateConfig,
        *,
        fit: bool = True,
        seed: int = 0,
        device: torch.device | str = "cpu",
        ranks: Ranks = ALONE,
    ) -> None:
        ranks.require_share(config.batch, "train.batch")
        self.policy, self.config, self.device, self.ranks = policy, config, torch.device(device), ranks
        train, valid = episodes.split(config.valid_fraction, seed)
        windows = Windows(train, policy.spec, config.pad, ranks)
        for module in policy.modules() if fit else ():
            if hasattr(module, "normalizer"):
                module.normalizer.fit(windows.columns, config.normalize)
        self.windows = windows.to(device)
        self._sharded = config.shard and ranks.size > 1
        if self._sharded and config.execution is not Execution.eager:
            raise BurnishError(
                f"train.execution={config.execution.value} does not go with train.shard=true; take eager"
            )
        # Pictures of episodes that are shared out lie with the first rank, and so does a whole policy.
        self._shared = windows.shared
        tries = ranks.first or not (self._sharded or self._shared)
        self.valid = Windows(valid, policy.spec, config.pad).to(device) if len(valid) and tries else None
        if self._sharded:
            self.policy, self.average = sharded(policy, ranks, self.device), policy
        else:
            self.average = copied(policy)
        self.average.eval().requires_grad_(False)
        self.ema = Ema(self.policy, config.ema)
        # A tensor, because a recorded graph would keep a number forever.
        self.rate = torch.tensor(config.lr, device=self.device)
        graphed = config.execution is Execution.cudagraph
        if graphed and ranks.size > 1:
            raise BurnishError("train.execution=cudagraph records one process; several ranks take eager or compile")
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=self.rate, weight_decay=config.weight_decay, fused=True, capturable=graphed
        )
        self.rows = generator(seed, "rows")  # which windows; on the CPU, so that devices draw alike
        # Ranks that send each other pictures do so in one order, without threads.
        ahead = self.windows.away and not self._shared
        self._batches = Prefetch(self._draw, [self.rows], self.device, more=ahead)
        self.noise = generator(seed, "noise", device=device)
        self._draws = ranks.generator(self.noise)
        self.step = 0
        self._seed = seed
        compiled = Execution.eager if graphed else config.execution
        loss = execution(self._mean_loss, compiled, device=device)
        self._loss = loss if self._sharded else ranks.averaged(self.policy, loss)
        mode = Execution.cudagraph if graphed else Execution.eager
        self._descend = execution(self._descent, mode, device=device, generators=[self.noise])

    def _descent(self, obs: Obs, action: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """One step down the loss of one batch: (loss, norm of its gradient)."""
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device, self.config.precision):
            loss = self._loss(obs, action, mask, self._draws)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.clip_grad)
        self.optimizer.step()
        return loss.detach(), whole(norm)

    def _mean_loss(self, obs: Obs, action: Tensor, mask: Tensor | None, draws: Generator) -> Tensor:
        return self.policy.bc_loss(obs, action, mask=mask, generator=draws).mean()

    def update(self) -> Metrics:
        rate = learning_rate(self.config, self.step)
        self.rate.fill_(rate)
        batch = self._batches.sample()
        mask = batch["mask"] if self.config.pad_loss is PadLoss.mask else None
        loss, norm = self._descend(batch["obs"], batch["action"], mask)
        self.ema.update(self.policy)
        self.step += 1
        return {"loss": self.ranks.mean(loss), "grad_norm": norm, "lr": rate}

    def _draw(self) -> dict[str, Any]:
        """The windows of the next update, those of this rank."""
        index = self.windows.draw(self.config.batch, self.rows)
        return (self.windows.share(index) if self._shared else self.windows[self.ranks.rows(index)])._asdict()

    @torch.no_grad()
    def validate(self, batches: int = 8) -> Metrics:
        """The loss of the averaged policy on held-out episodes; always the same windows and the same noise."""
        self.ema.copy_to(self.average)
        if self.valid is None:
            return {}
        rows = generator(self._seed, "valid rows")
        noise = generator(self._seed, "valid noise", device=self.device)
        losses = []
        with placed(self.average, self.device):
            for _ in range(batches):
                batch = self.valid.sample(self.config.batch, rows)
                mask = batch.mask if self.config.pad_loss is PadLoss.mask else None
                losses.append(self.average.bc_loss(batch.obs, batch.action, mask=mask, generator=noise).mean())
        return {"valid_loss": torch.stack(losses).mean()}

    def _parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("policy", "ema", "optimizer", "rows", "noise")}

    def state_dict(self) -> dict[str, Any]:
        self._batches.put_back()
        state = state_of(self._parts())
        if self._sharded:
            frozen = {name: p for name, p in self.average.named_parameters() if name not in self.ema.parameters}
            state = gathered({**state, "policy": state["policy"] | frozen}, self.ranks)
        return {**state, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batches.put_back()
        if self._sharded:
            if self.ranks.first:
                self.average.load_state_dict(state["policy"])  # what is frozen
            state = shares(state, self.policy)
        restore(self._parts(), state)
        self.step = state["step"]
        self.ema.copy_to(self.average)


def imitate(
    learner: ImitationLearner,
    run: Run,
    *,
    evaluate: Callable[[Any, int], Metrics] | None = None,
    origin: dict[str, Any] | None = None,
) -> bool:
    """Train until ``config.steps``; False if a Ctrl-C ended it early (saved; resume continues exactly)."""
    config = learner.config
    latest = run.latest()
    if latest is not None:
        learner.load_state_dict(latest.children["learner"].state)

    def evaluation(step: int) -> Metrics:
        metrics = learner.validate()
        return {**metrics, **(evaluate(learner.average, step) if evaluate is not None else {})}

    def children() -> dict[str, Any]:
        learner.ema.copy_to(learner.average)
        refuse_diverged(learner.average)
        policy = {"config": describe(learner.average, origin), "state": learner.average.state_dict()}
        return {"policy": policy, "learner": {"config": {}, "state": learner.state_dict()}}

    turns = train(
        run,
        config.steps,
        learner.update,
        children,
        log_every=config.log_every,
        save_every=config.save_every,
        eval_every=config.eval_every,
        evaluate=evaluation,
    )
    return to_end(turns)
