"""SERENE: novelty search over the weights of a small policy, and emitters where it comes across rewards. No gradients.

    burnish finetune method=serene env=... method.rewarding=0.5 "method.numbers=[0,1]"

Paolo et al. 2021 (SERENE, arXiv 2102.03140). The *behaviour* of a policy is what it saw at the end of an episode.
*Novelty search* (Lehman and Stanley 2011): of a population and its mutants the most novel go on, those whose behaviours
are farthest from the nearest of an archive, however little they earned. Each that earned more than ``rewarding`` may
become an *emitter*: a few mutants of it, which evolve by what they earn alone. A ``period`` of episodes belongs to the
search, the next one to emitters, in turns. New emitters are tried for ``bootstrap`` generations, the most novel first,
and kept if they improved; of those that are kept, one that no other surpasses in novelty and improvement goes on until
its best has not risen for ``patience`` generations.

STAX (Paolo et al. 2022, arXiv 2111.01919), with ``code``: novelty is of a code that an autoencoder learns of the
behaviours, after the first search, two searches later, then three, and so on. Which of the population go on, novelty or
*surprise* says, each in every second generation by chance: surprising is what the code cannot give back.

**Departures.** Distances are in deviations of all behaviours so far. An emitter keeps its ancestor among its members,
and stops by ``patience``, where the published rule compares medians over hundreds of generations; what it finds is
stored if it is the best of the emitter so far, and nothing goes from it into the archive of the search. Behaviours are
numbers that the world shows, in STAX too, where they are pictures. Each policy plays one episode, so where episodes
begin at random the best may have been lucky. Generations after the first have so many more mutants that no world idles;
the period does not count these. Of candidates the ``CANDIDATES`` most novel stay, of rewarding behaviours a sample of
``REWARDED``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ...policies.build import build_policy
from ...policies.core import tree
from ...policies.core.config import LATER
from ...policies.core.ranges import check_ranges
from ...policies.core.seed import derive
from ...policies.core.seed import generator as named_generator
from ...policies.core.spec import agent_spec, check_compatible
from ...policies.core.types import Learns, Metrics, Obs, VecEnv
from ...policies.gaussian import GaussianConfig, GaussianLoss, GaussianPolicy
from ...policies.nets.mlp import Activation
from ..episode_statistics import EpisodeStatistics
from ..exploration.behaviour_code import BehaviourCode
from ..exploration.emitters import Emitter, Tried, apart, front, together
from ..exploration.novelty import keep_sample, novelty
from ..exploration.observed import ExploreConfig, Observed
from ..world_model.ticks import newest
from .rlpd import starting_from

CANDIDATES = 300
REWARDED = 5000


class Selection(enum.Enum):
    """The policies of which the search makes the next ones."""

    novelty = "novelty"
    score = "score"  # plain evolution, without emitters, for comparison


def _agent() -> GaussianConfig:
    return GaussianConfig(hidden=[16], activation=Activation.tanh, squash=True)


@dataclass
class SereneConfig:
    """Settings of SERENE: the network, the search, and its emitters."""

    agent: GaussianConfig = field(default_factory=_agent)  # the network whose weights are searched; it acts by its mean
    history: int = 1  # observations that are stacked, the newest among them
    rewarding: float = 0.0  # sum of the rewards of an episode above which an emitter may begin there
    # places of the numbers that make up a behaviour, in the observations of numbers in alphabetical order; empty: all
    numbers: list[int] = field(default_factory=list)
    population: int = 10  # policies from which the search goes on
    offspring: int = 2  # mutants of each policy in a generation
    spread: float = 1.0  # deviation of the weights of the first population from those of the network
    sigma: float = 0.05  # deviation of a mutant's weights from those of its parent
    select: Selection = Selection.novelty  # policies that the search goes on with
    # numbers of a code of behaviours that is learnt, by which they are compared (STAX); 0: they are as they are
    code: int = field(default=0, metadata=LATER)
    code_steps: int = field(default=1000, metadata=LATER)  # minibatches of 64 behaviours in each fit of the code
    neighbours: int = 15  # nearest behaviours, whose mean distance is the novelty
    archived: int = 5  # mutants of each generation that the archive keeps, drawn at random
    period: int = 1000  # episodes of search, and then of emitters, in turns; not those of worlds that would idle
    emitter: int = 6  # policies of an emitter
    bootstrap: int = 6  # generations after which a new emitter must have improved
    patience: int = 20  # generations without a better policy, after which an emitter ends

    def __post_init__(self) -> None:
        counts = "history population offspring neighbours archived period emitter patience"
        check_ranges(self, {"[1, inf)": counts, "[4, inf)": "bootstrap", "(0, inf)": "spread sigma"})
        check_ranges(self, {"[0, inf)": "code", "[1, inf)": "code_steps"})


def build(
    config: SereneConfig, base: GaussianPolicy | None, env: VecEnv, *, seed: int = 0, device: torch.device | str = "cpu"
) -> SereneLoop:
    """A loop of its own: policies are compared by whole episodes, each of which one world plays."""
    if base is None:
        spec = agent_spec(env.spec, history=config.history)
        agent: GaussianPolicy = build_policy(config.agent, spec, seed=derive(seed, "agent"), device=device)
    else:
        agent = starting_from(base)
        check_compatible(agent.spec, env.spec)
    agent.config = replace(agent.config, loss=GaussianLoss.least_squares)  # without noise, as it is scored
    return SereneLoop(config, agent.eval(), env, seed)


def shared(parents: Tensor, count: int, worlds: int) -> Tensor:
    """The parents of at least ``count`` mutants, so many that no world idles: each as often, or once less."""
    count = -(-count // worlds) * worlds
    return parents[torch.arange(count, device=parents.device) * len(parents) // count]


class SereneLoop(Learns):
    """An iteration is one episode of every world, each with a policy of its own. It is its own learner; the policy is
    the best so far."""

    replay, pretraining = None, 0

    def __init__(self, config: SereneConfig, agent: GaussianPolicy, env: VecEnv, seed: int) -> None:
        self.config, self.policy, self.seed = config, agent, seed
        self.env: Any = env
        shown = replace(env.spec, obs=env.spec.obs.without_history(agent.spec.history))
        self.observed = Observed(ExploreConfig(numbers=config.numbers), shown, env.device, "method")
        self.code = self._untrained_code()
        self.searches = 0  # that have ended
        self.statistics = EpisodeStatistics(env.num_envs, torch.device(env.device))
        self.generator = named_generator(seed, "serene")
        own = parameters_to_vector(agent.trunk.parameters()).detach()
        self.nothing = Tried(own[:0].view(0, len(own)), own.new_zeros(0, len(self.observed)), own.new_zeros(0))
        self.population = self.tried = self.nothing  # of the search; and of the generation under way
        self.archive = self.rewarded = self.nothing.behaviour  # of the search; and a sample of what earned a reward
        self.found = 0  # policies that earned a reward
        self.candidates, self.emitters = list[Emitter](), list[Emitter]()  # not tried yet, and those that improved
        self.turn: Emitter | None = None  # the emitter whose generation it is; None: the search
        self.emitting, self.spent = False, 0  # whether this period is for emitters, and how much of it is over
        self.iteration, self.best = 0, float("-inf")
        self.counted = config.population  # episodes of this generation that count for the period
        self.asked = self._mutants(own.repeat(config.population, 1), config.spread)  # policies of this generation

    def _untrained_code(self) -> BehaviourCode | None:
        if not self.config.code:
            return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "code"))
            return BehaviourCode(len(self.observed), self.config.code).to(self.env.device)

    @property
    def learner(self) -> SereneLoop:
        return self

    @property
    def decisions_per_iteration(self) -> int:
        return self.env.num_envs * -(-self.env.spec.max_steps // self.policy.spec.execute)

    def iterations(self, total: int) -> int:
        return -(-total // self.decisions_per_iteration)

    # ---- a generation ----

    def iterate(self) -> Metrics:
        begun = len(self.tried.score)
        self.tried = self.tried.and_(self._play(self.asked[begun : begun + self.env.num_envs]))
        self.iteration += 1
        if len(self.tried.score) == len(self.asked):
            generation, self.tried = self.tried, self.nothing
            self._learn(generation)
            self.spent += self.counted
            self.turn = self._next()
            self.asked = self._offspring()
        return {}

    def _learn(self, generation: Tried) -> None:
        self.observed.absorb(generation.behaviour)
        if (score := float(generation.score.max())) > self.best:
            self.best = score
            vector_to_parameters(generation.genome[generation.score.argmax()], self.policy.trunk.parameters())
        if self.turn is None:
            self._search(generation)
        else:
            self._emit(self.turn, generation)

    def _search(self, generation: Tried) -> None:
        config, everyone = self.config, self.population.and_(generation)
        if config.select is Selection.novelty:
            new = self._interest(everyone.behaviour)
            for i in (generation.score > config.rewarding).nonzero()[:, 0].tolist():
                away = torch.cdist(generation.genome[i : i + 1], everyone.genome)[0]
                sigma = float(away[away > 0].min()) / 3 if bool((away > 0).any()) else config.sigma
                one = generation.rows(slice(i, i + 1))
                self.candidates.append(Emitter(one, one.behaviour[0], sigma, float(one.score)))
                self._remember(one.behaviour)
            if len(self.candidates) > CANDIDATES:
                kept = self._novelty_of(self.candidates).topk(CANDIDATES).indices.sort().values
                self.candidates = [self.candidates[i] for i in kept.tolist()]
        else:
            new = everyone.score
        drawn = torch.randperm(len(generation.score), generator=self.generator)[: config.archived]
        self.archive = torch.cat([self.archive, generation.behaviour[drawn]])
        self.population = everyone.rows(new.argsort(descending=True, stable=True)[: config.population])

    def _interest(self, behaviour: Tensor) -> Tensor:
        """(N,): by what policies go on, their novelty or their surprise."""
        if self.code is not None and bool(torch.rand((), generator=self.generator) < 0.5):
            return self.code.surprise(self.observed.scaled(behaviour))
        return self._novelty(behaviour, behaviour, self.archive, self.rewarded)

    def _search_ended(self) -> None:
        """The code is fitted to all that is kept, after 1, 3, 6, 10, ... searches."""
        self.searches += 1
        if self.code is not None and isqrt(8 * self.searches + 1) ** 2 == 8 * self.searches + 1:
            kept = torch.cat([self.archive, self.population.behaviour, self.rewarded])
            self.code.fit(self.observed.scaled(kept), self.config.code_steps, self.generator)

    def _emit(self, emitter: Emitter, generation: Tried) -> None:
        better = emitter.go_on(generation, self.config.emitter)
        self._remember(better.behaviour)
        if len(emitter.means) == self.config.bootstrap:
            self.turn = None
            if emitter.improvement > 0:
                self.emitters.append(emitter)
        elif len(emitter.means) > self.config.bootstrap and emitter.still >= self.config.patience:
            self.turn = None

    def _remember(self, behaviour: Tensor) -> None:
        """Of policies that earned a reward."""
        room = max(0, REWARDED - len(self.rewarded))
        self.rewarded = torch.cat([self.rewarded, behaviour[:room]])
        keep_sample(self.rewarded, behaviour[room:], self.found + len(behaviour[:room]), self.generator)
        self.found += len(behaviour)

    def _next(self) -> Emitter | None:
        """The emitter whose generation is next; None: the search's."""
        config, turn = self.config, self.turn
        new = turn is not None and len(turn.means) < config.bootstrap  # it is not left before it could improve
        if self.spent >= config.period and not new:
            self.emitters += [turn] if turn is not None else []
            self.spent, self.emitting, turn = 0, not self.emitting, None
            if self.emitting:
                self._search_ended()
        if not self.emitting or turn is not None:
            return turn
        if self.candidates and self.spent < config.period * 2 / 3:
            return self.candidates.pop(int(self._novelty_of(self.candidates).argmax()))
        if self.emitters:
            gains = torch.tensor([emitter.improvement for emitter in self.emitters])
            best = front(torch.stack([self._novelty_of(self.emitters).to(gains), gains], 1)).nonzero()[:, 0]
            return self.emitters.pop(int(best[torch.randint(len(best), (), generator=self.generator)]))
        self.emitting, self.spent = False, 0
        return None

    def _novelty_of(self, emitters: list[Emitter]) -> Tensor:
        return self._novelty(torch.stack([emitter.ancestor for emitter in emitters]), self.rewarded)

    def _novelty(self, behaviour: Tensor, *others: Tensor) -> Tensor:
        points, beside = self.observed.scaled(behaviour), self.observed.scaled(torch.cat(others))
        if self.code is not None:
            points, beside = self.code.code(points), self.code.code(beside)
        return novelty(points, beside, self.config.neighbours, own=True)

    def _offspring(self) -> Tensor:
        config, turn = self.config, self.turn
        parents, sigma = (self.population, config.sigma) if turn is None else (turn.members, turn.sigma)
        each = config.offspring if turn is None or turn.means else config.emitter
        self.counted = each * len(parents.genome)
        return self._mutants(shared(parents.genome, self.counted, self.env.num_envs), sigma)

    def _mutants(self, genome: Tensor, sigma: float) -> Tensor:
        return genome + sigma * torch.randn(genome.shape, generator=self.generator).to(genome)

    # ---- an episode of each ----

    @torch.no_grad()
    def _play(self, genome: Tensor) -> Tried:
        env, execute, worlds = self.env, self.policy.spec.execute, self.env.num_envs
        row = torch.arange(worlds, device=genome.device)
        active = (row < len(genome)).to(env.device)
        crowd = genome[row.clamp(max=len(genome) - 1)]
        seeds = [derive(self.seed, "episode", self.iteration, world) for world in range(worlds)]
        obs, score, tick = env.reset(torch.ones_like(active), seeds), torch.zeros(worlds, device=env.device), 0
        chunk = torch.zeros(())
        while bool(active.any()):
            if tick % execute == 0:
                chunk = self._chunks(crowd, obs)
                self.statistics.decisions += int(active.sum())
            step = env.step(chunk[:, tick % execute], active)
            score += torch.where(active, step.reward, 0)
            obs, tick = tree.where(active, step.obs, obs), tick + 1
            self.statistics.ticks += active.sum()
            self.statistics.reports_success |= "success" in step.info
            active = active & ~(step.terminated | step.truncated)
        behaviour = self.observed.raw(newest(obs, self.policy.spec.history))
        return Tried(genome, behaviour[: len(genome)].to(genome), score[: len(genome)].to(genome))

    def _chunks(self, genome: Tensor, obs: Obs) -> Tensor:
        """(N, n, A): the mean of a policy for each world, of weights of its own."""
        trunk, spec = self.policy.trunk, self.policy.spec
        names, shapes = zip(*((name, x.shape) for name, x in trunk.named_parameters()), strict=True)
        parts = genome.split([shape.numel() for shape in shapes], 1)
        weights = {n: x.view(-1, *shape) for n, x, shape in zip(names, parts, shapes, strict=True)}

        def one(own: dict[str, Tensor], seen: Tensor) -> Tensor:
            return functional_call(trunk, own, (seen[None],))[0]

        out = vmap(one)(weights, self.policy.encoder(obs))
        mean = out[:, : spec.horizon * spec.action.dim].view(-1, *spec.chunk_shape)
        return spec.executed(torch.tanh(mean))

    # ---- reports and state ----

    def report(self) -> Metrics:
        counts = {"archive": len(self.archive), "rewarded": self.found, "emitters": len(self.emitters)}
        counts["emitters_untried"] = len(self.candidates)
        found = {f"serene/{name}": float(count) for name, count in counts.items()}
        best = {"serene/best": self.best} if self.statistics.decisions else {}
        return {**self.statistics.report(), **found, **best}

    def deliver(self, folder: Path) -> str:
        return f"{self.found} policies earned a reward, the best {self.best:.4g}"

    def state_dict(self) -> dict[str, Any]:
        kept = ("archive", "rewarded", "found", "asked", "counted", "emitting", "spent", "searches", "iteration")
        return {
            **{name: getattr(self, name) for name in kept},
            "best": self.best if self.iteration else None,
            "policy": self.policy.state_dict(),
            "population": tuple(self.population),
            "tried": tuple(self.tried),
            "candidates": together(self.candidates),
            "emitters": together(self.emitters),
            "turn": None if self.turn is None else self.turn.state_dict(),
            "observed": self.observed.state_dict(),
            **({} if self.code is None else {"code": self.code.state_dict()}),
            "statistics": self.statistics.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = self.nothing.genome.device
        tensors = (state[name].to(device, copy=True) for name in ("archive", "rewarded", "asked"))
        self.archive, self.rewarded, self.asked = tensors
        self.found = int(state.get("found", len(self.rewarded)))  # older states kept all, and counted all
        self.counted = int(state.get("counted", len(self.asked)))
        self.emitting, self.spent = bool(state["emitting"]), int(state["spent"])
        self.iteration = int(state["iteration"])
        self.best = float("-inf") if state["best"] is None else float(state["best"])
        self.policy.load_state_dict(state["policy"])
        self.population, self.tried = (Tried.loaded(state[name], device) for name in ("population", "tried"))
        self.candidates, self.emitters = (apart(state[name], device) for name in ("candidates", "emitters"))
        self.turn = None if state["turn"] is None else Emitter.loaded(state["turn"], device)
        self.observed.load_state_dict(state["observed"])
        if self.code is not None:
            self.code.load_state_dict(state["code"])
        self.searches = int(state.get("searches", 0))  # older states have none
        self.statistics.load_state_dict(state["statistics"])
        self.generator.set_state(state["generator"].cpu())
