"""Interventions: when a person or an expert takes over, what is played then, and what of it is kept.

Human-gated control: HG-DAgger, Kelly et al. 2018 (arXiv 1810.02890). Simulated interveners, at random or for a reason:
RLIF, Luo et al. 2023 (arXiv 2311.12996), section 5. The expert is any ``Controller``, in the units of the policy;
its skill is its own affair. Its attention is described here: it may react late, or miss what it should have seen.

    rule = disagreement, patience = 1, late = 1, hold = 2; decisions of n = 3 ticks

    tick          0  1  2 | 3  4  5 | 6  7  8 | 9 10 11
    seen wrong       x    |         |       x |             after the tick, by what was played in it
    plays         p  p  p | e  e  e | p  p  p | p  e  e     p the policy, e the expert
    called           1    |    0    |    0    |    1        the decision in which, or right behind which, hands change

A person sees what the robot did and not what it means to do: the tick that was played is judged, and hands change
before the next. The rest of a chunk when hands change is not executed; the expert's actions stand in its place, so
that a decision keeps its n ticks. The robot is handed back between two decisions only, ``hold`` ticks after it was
taken or as soon after that as one ends, because in between the policy has no chunk that fits what it sees.

Whether the expert takes over depends on (episode seed, tick), on what is played and seen, and on nothing else: not on
the other worlds, nor on how many there are.

All of that is a simulated person (``InterventionEnv``). Beside a robot stands a real one, who is asked by the robot's
world (``real_robot.env.RobotEnv``) and takes over and gives back whenever they like (``ReportedEnv``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ...offline.replay import ALONE, Batch
from ...offline.sources import joined
from ...policies.core.chunk import ChunkEnv
from ...policies.core.errors import BurnishError
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import EpisodeSeeds, RowNoise, derive
from ...policies.core.seed import generator as named_generator
from ...policies.core.spec import stacked_by_history
from ...policies.core.tree import check, map_tree, to, where
from ...policies.core.types import Controller, Decisions, Obs, Outcome, Step, VecEnv
from ...policies.core.wrapper import Wrapper


class Rule(Enum):
    """The condition on which the expert takes over."""

    random = "random"  # chance
    disagreement = "disagreement"  # a coordinate of the action is too far from what the expert would have done


@dataclass
class InterventionConfig:
    """Settings of a scripted expert as a person: when it takes over, how late, and for how long."""

    rule: Rule = Rule.disagreement  # rule by which the expert takes over
    probability: float = 0.1  # probability of a takeover in each tick, with rule=random
    # difference of the largest coordinate at which the expert takes over, in units of the action range [-1, 1], with
    # rule=disagreement
    threshold: float = 0.5
    patience: int = 1  # ticks in succession that must be wrong
    late: int = 0  # ticks that the policy goes on playing while the person reacts
    miss: float = 0.0  # share of the occasions that nobody notices; then nobody looks for ``hold`` ticks
    hold: int = 4  # ticks until the robot is handed back, at the end of a decision

    def __post_init__(self) -> None:
        check_ranges(
            self,
            {"[0, 1]": "probability miss", "[0, inf)": "threshold late", "[1, inf)": "patience hold"},
            "intervention.",
        )


class InterventionEnv(Wrapper):
    """Executes the action that it is given, or the expert's. Decisions take ``execute`` ticks, counted from the reset.

    Without an expert nobody ever takes over. The expert is asked at every tick, so that it stays in step with the
    worlds; a world that is not active must be reset before it is used again, because the expert moves on.
    """

    def __init__(
        self,
        env: VecEnv,
        expert: Controller | None,
        config: InterventionConfig,
        *,
        execute: int = 1,
        history: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(env)
        self.expert, self.config, self.execute, self.history = expert, config, execute, history
        self._everyone = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self._seeds = EpisodeSeeds(seed, self.num_envs, self.device)
        zero = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._fresh = {
            "tick": zero,
            "wrong": zero,  # ticks in succession
            "due": zero - 1,  # ticks until hands change; -1: nobody is about to; below: nobody looks
            "held": zero - 1,  # ticks that the expert has played; -1: the policy has the robot
            "label": torch.zeros(self.num_envs, self.spec.action.dim, device=self.device),
        }
        self._state, self._obs = dict(self._fresh), Obs()

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        chosen = self._everyone if mask is None else mask
        self._obs = self.env.reset(mask, seeds)
        if self.expert is not None:
            self.expert.reset(chosen, seeds)
        self._seeds.begin(chosen, seeds)
        self._state = where(chosen, self._fresh, self._state)
        return self._obs

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        check(action, f"{self.num_envs} {self.spec.action.dim}")
        state, begins = dict(self._state), self._state["tick"] % self.execute == 0
        state["held"] = state["held"].masked_fill(begins & (state["held"] >= self.config.hold), -1)
        holds = state["held"] >= 0
        guide = self._guide(action)
        step = self.env.step(torch.where(holds[:, None], guide, action), active)
        self._obs = step.obs

        taken = _at(state["tick"], self.execute) & holds[:, None]
        state["label"] = torch.where(begins[:, None], guide, state["label"])
        called = self._watch(state, action, guide, holds, step.terminated | step.truncated)
        state["tick"] = state["tick"] + 1
        self._state = state
        # The world knows best what its actuators got, where it says so.
        executed = {"executed": torch.where(holds[:, None], guide, action)}
        facts = {"intervened": holds, "called": called, "taken": taken, "label": state["label"]}
        return step._replace(info={**executed, **step.info, **facts})

    def _guide(self, action: Tensor) -> Tensor:
        """(N, A): what the expert does here, or would do. It sees the present alone."""
        if self.expert is None:
            return action
        stacked = {key for key in self._obs if self.history > 1 and stacked_by_history(key)}
        seen = {key: x[:, -1] if key in stacked else x for key, x in self._obs.items()}
        return self.expert.step(seen).to(action)

    def _watch(self, state: dict[str, Tensor], action: Tensor, guide: Tensor, holds: Tensor, ended: Tensor) -> Tensor:
        """Whether hands change before the next tick (N,); counts what was seen in ``state``."""
        config = self.config
        # Salted, because worlds and policies draw from the bare episode seed.
        noise = RowNoise(self._seeds.current ^ derive(0, "intervention"), state["tick"])
        chance, attention = noise.uniform((self.num_envs, 2)).unbind(1)
        if config.rule is Rule.random:
            wrong = chance < config.probability
        else:
            wrong = (action - guide).abs().amax(1) > config.threshold
        wrong &= (state["due"] == -1) & ~holds & (self.expert is not None)
        count = (state["wrong"] + 1) * wrong
        noticed = count >= config.patience
        missed = noticed & (attention < config.miss)
        due = state["due"].masked_fill(noticed, config.late).masked_fill(missed, -2 - config.hold)
        called = (due == 0) & ~ended
        state["wrong"] = count.masked_fill(noticed, 0)
        state["due"] = torch.where(due >= 0, due - 1, (due + 1).clamp(max=-1))
        state["held"] = (state["held"] + holds).masked_fill(called, 0)
        return called

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "expert": None if self.expert is None else self.expert.state_dict(),
            "seeds": self._seeds.state_dict(),
            "state": dict(self._state),
            "obs": map_tree(torch.clone, self._obs),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.expert is not None:
            self.expert.load_state_dict(state["expert"])
        self._seeds.load_state_dict(state["seeds"])
        self._state, self._obs = to(state["state"], self.device), to(state["obs"], self.device)


class ReportedEnv(Wrapper):
    """A world that says itself who played a tick (``intervened``) and whether a person takes over behind it
    (``called``); what they played is in ``executed``. A robot that is given back in the middle of a decision goes on
    with what is left of the chunk."""

    def __init__(self, env: VecEnv, execute: int = 1) -> None:
        super().__init__(env)
        self.execute = execute
        self._tick = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        self._tick = torch.zeros_like(self._tick) if mask is None else self._tick.masked_fill(mask, 0)
        return self.env.reset(mask, seeds)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.env.step(action, active)
        taken = _at(self._tick, self.execute) & step.info["intervened"][:, None]
        self._tick = self._tick + 1
        return step._replace(info={**step.info, "taken": taken})

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "tick": self._tick}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._tick = state["tick"].to(self.device)


def _at(tick: Tensor, execute: int) -> Tensor:
    """(N, n): which tick of its decision each world is at."""
    return torch.arange(execute, device=tick.device) == (tick % execute)[:, None]


def supervisor_of(env: Any) -> Any:
    """The supervisor of the robot behind all wrappers; None in simulated worlds."""
    while isinstance(env, Wrapper):
        env = env.env
    return getattr(env, "supervisor", None)


class Supervised(Outcome):
    """An outcome that also says who acted; learners store these facts like any other (``Learner.columns``)."""

    __slots__ = ()

    @property
    def intervened(self) -> Tensor:
        """(N, n): the expert played this tick."""
        return self.info["intervened"]

    @property
    def called(self) -> Tensor:
        """(N,): an intervention began in this decision behind its first tick, or begins with the next."""
        return self.info["called"]

    @property
    def label(self) -> Tensor:
        """(N, A): what the expert did in the first tick, or would have done; one who cannot be asked has nothing to say
        of ticks that they did not play."""
        return self.info.get("label", self.executed[:, 0])


class SupervisedEnv:
    """``ChunkEnv`` with a person beside the robot."""

    def __init__(self, env: InterventionEnv | ReportedEnv, gamma: float) -> None:
        self.env, self.execute = ChunkEnv(env, env.execute, gamma), env.execute
        self.num_envs, self.device, self.spec = env.num_envs, env.device, env.spec
        self.reset = self.env.reset
        self.state_dict, self.load_state_dict = self.env.state_dict, self.env.load_state_dict

    def step(self, chunk: Tensor) -> Supervised:
        outcome = self.env.step(chunk)
        return Supervised(*outcome._replace(info={**outcome.info, "intervened": outcome.info["taken"]}))


def supervised(
    config: Any, env: VecEnv, expert: Controller | None, *, execute: int, history: int, seed: int
) -> SupervisedEnv:
    """The worlds that a method learns on: its ``intervention`` describes how ``expert`` takes over; without an expert,
    the person beside the robot does."""
    gamma = config.discount.per_step(execute)
    if expert is not None or supervisor_of(env) is None:
        options: dict[str, Any] = {"execute": execute, "history": history, "seed": derive(seed, "intervention")}
        return SupervisedEnv(InterventionEnv(env, expert, config.intervention, **options), gamma)
    if config.intervention != InterventionConfig():
        raise BurnishError(
            "intervention= describes when a scripted expert takes over; the supervisor of this robot decides that "
            "alone, so leave it out"
        )
    return SupervisedEnv(ReportedEnv(env, execute), gamma)


WINDOW = 1000  # ticks of all worlds together: the memory of the share under intervention


class Demonstrations:
    """Demonstrations as the prior data of a method: recordings, and decisions of the replay by others.

    It stands where the loop expects a ``Replay``, and copies nothing: a decision that the expert made from its first
    tick on lies in the replay of the loop, and is a demonstration for as long as it does. Recordings and such decisions
    are equally likely to be drawn. Recordings pay nothing: who learns from people does not know the reward of the task.
    ``everything``: all decisions are demonstrations, because the expert said to each what it would have done.
    """

    def __init__(
        self, replay: Decisions, recordings: Decisions | None = None, *, everything: bool = False, seed: int = 0
    ) -> None:
        self.replay, self.recordings, self.everything = replay, recordings, everything
        self.device = replay.device
        self.generator = named_generator(seed, "lessons", device=replay.device)
        # These follow from the replay, so they are not saved: rows looked at; where demonstrations are, as (row
        # since the beginning) * worlds + world; and of each of the latest rows, ticks of the expert and ticks in all.
        self._seen = 0
        self._places = torch.zeros(0, dtype=torch.int64, device=replay.device)
        self._latest = torch.zeros(0, 2, dtype=torch.int64, device=replay.device)

    def __len__(self) -> int:
        return self._recorded + len(self._found())

    @property
    def share(self) -> Tensor:
        """Of the latest ticks, those that the expert played."""
        self._look()
        helped, ticks = self._latest.sum(0)
        return helped / ticks.clamp(min=1)  # none in pretraining

    def sample(self, batch: int, *, n_step: int = 1, sequence: int = 1, around: tuple[int, int] = ALONE) -> Batch:
        """Like ``Replay.sample``. Before the first demonstration, it is what the policy did itself."""
        options: dict[str, Any] = {"n_step": n_step, "sequence": sequence, "around": around}
        found, count = self._found(), self._recorded
        if count + len(found) == 0:
            return self.replay.sample(batch, **options)
        picked = torch.randint(count + len(found), (batch,), generator=self.generator, device=self.device)
        parts = []
        if self.recordings is not None:
            chosen = picked[picked < count].to(self.recordings.device)
            parts.append(_as_intervention(self.recordings.gather(chosen, **options)))
        if len(self.replay):  # else there is nothing to gather from, as in pretraining
            parts.append(self.replay.gather(found[picked[picked >= count] - count], **options))
        return joined(*parts) if len(parts) > 1 else parts[0]

    @property
    def _recorded(self) -> int:
        return 0 if self.recordings is None else len(self.recordings)

    def _found(self) -> Tensor:
        """The demonstrations in the replay, as positions for its ``gather``."""
        self._look()
        return self._places - self._oldest

    @property
    def _oldest(self) -> int:
        return (self.replay.added - self.replay.filled) * self.replay.num_envs

    def _look(self) -> None:
        """At what is new in the replay."""
        replay, worlds = self.replay, self.replay.num_envs
        if replay.added < self._seen:  # it was loaded anew
            self._seen, self._places, self._latest = 0, self._places[:0], self._latest[:0]
        new = min(replay.added - self._seen, replay.filled)
        if new == 0:
            return
        rows = replay.latest(new)
        intervened, steps = rows["intervened"], rows["steps"]
        taught = (intervened[..., 0] | self.everything) & replay.learnable(new)
        places = torch.cat([self._places, taught.flatten().nonzero()[:, 0] + (replay.added - new) * worlds])
        self._places, self._seen = places[places >= self._oldest], replay.added
        ticks = torch.stack([intervened.sum((1, 2)), steps.sum(1)], 1)
        kept = max(1, WINDOW // (worlds * intervened.shape[2]))
        self._latest = torch.cat([self._latest, ticks])[-kept:]


def _as_intervention(recorded: Batch) -> Batch:
    """A recording, as if its author had taken the robot over from the beginning."""
    action = recorded["action"]
    real = torch.arange(action.shape[-2], device=action.device) < recorded["steps"][..., None]
    facts = {"intervened": real, "called": torch.zeros_like(recorded["ended"]), "label": action[..., 0, :]}
    if "around" in recorded:
        facts["around"] = _as_intervention(recorded["around"])
    return {**recorded, **facts, "reward": torch.zeros_like(recorded["reward"])}
