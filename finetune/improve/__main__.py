"""Entry point: ``burnish improve``. A policy, a world, a budget; the methods are chosen by racing them."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...policies.acting import acting_policy
from ...policies.best import ERROR, criterion, difference
from ...policies.build import ACTING, describe, identity_of, load_policy, where_of
from ...policies.cli.cli import compose, main, to_object
from ...policies.cli.machine import prepare_machine, say, say_delivered
from ...policies.compose import Greedy
from ...policies.controllers import controller_for
from ...policies.core import files
from ...policies.core.config import to_data
from ...policies.core.errors import BurnishError, reason
from ...policies.core.ranges import check_ranges
from ...policies.core.types import Obs, VecEnv
from ...policies.diffusion import Sampler
from ...policies.evaluator import EvalConfig, in_words, unreported
from ...policies.external.table import EXTERNAL_KINDS
from ...policies.measure.evaluate import Evaluation, evaluate, evaluation_seeds, why_unpaired
from ...policies.runs.checkpoint import save
from ...policies.runs.interrupt import interruptible
from ...policies.runs.run import CONFIG, METRICS, episodes_bar, read_metrics
from ...sim.build import WORLDS, origin_of, world_for
from ..__main__ import GROUPS as FINETUNE
from ..build import decision_ticks, has, prepare
from ..compare.claim import claim, owned, require_room
from ..compare.comparison import BASE, RUNS
from ..compare.entrants import entrant, settled
from ..compare.free_baselines import BASE_GREEDY
from ..fit import Fit, compatibility
from ..loops import OffPolicy
from ..method import View
from ..refinement import FinetuneConfig, carry_out, refinement
from ..table import method_name, method_of
from ..warmup import warmup_of
from .race import CANDIDATES, EVALUATIONS, OF_GREEDY, RACE, Budget, Preparation, Race, Stopped, Trained, table

GROUPS: dict[str, dict[str, Mapping[str, type]]] = {"improve": {"policy": ACTING, "env": WORLDS}}
POLICY, PAGE = "policy", "improve.md"
SETTINGS = "improve"  # the experiments whose settings entrants have
HORIZONS = (20, 200)  # least and largest 1 / (1 - gamma), in control ticks
EVER = 1_000_000  # decisions that no run reaches within minutes
PROBED = 5  # updates that are timed


@dataclass
class ImproveConfig:
    """Settings of `burnish improve`: a policy, a world, and a budget of steps or minutes."""

    policy: Any = None  # policy to improve: policy.path=FOLDER, or another kind
    env: Any = None  # world; by default the one that the policy was trained for
    minutes: float = 0.0  # minutes of the clock for everything; 0: as many as steps take
    steps: int = 0  # control steps of training, of all entrants together, instead of minutes
    # entrants, the preferred ones first: experiments of `improve`, methods, or files like an experiment
    methods: list[str] = field(default_factory=lambda: ["residual_sac", "residual_ppo", "dsrl"])
    eval: EvalConfig = field(default_factory=lambda: EvalConfig(episodes=64))  # evaluations on the way and at the end
    out: str = "runs/improved"  # folder of the race; the policy to deploy is in its policy/
    seed: int = 0  # seed of every random draw
    device: str = "cpu"  # device of the networks: cpu, cuda, cuda:1
    threads: int = 0  # CPU threads of torch; 0: as torch chooses
    resume: bool = False  # continue the race that an interrupted call left at out=

    def __post_init__(self) -> None:
        check_ranges(self, {"[0, inf)": "minutes steps"})
        if (self.minutes > 0) == (self.steps > 0):
            raise BurnishError("a race needs one budget: minutes=20 of the clock, or steps=100000 of training")
        self.eval.require_episodes()
        if self.eval.greedy or not self.methods:
            raise BurnishError("eval.greedy=true and methods=[] leave nothing to race: noise 0 takes part by itself")


def improve(config: ImproveConfig) -> int:
    """A race of the methods that fit, one policy confirmed and saved, and a page about it; exit status."""
    if config.policy is None:
        raise BurnishError("policy.path=... must name the policy to improve; see --help")
    device, out = prepare_machine(config.device, config.threads), Path(config.out)
    base, origin = acting_policy(config.policy, device, config.env)
    world = origin_of(config.env) or origin.get("env")
    if world is None:
        raise BurnishError("nothing says which world the policy is for; give env=...")
    trainer = OfWorlds(config, base, {**origin, "env": world, "base": where_of(config.policy)}, device)
    trainer.require_budget()
    began = time.monotonic()
    trainer.open()
    start_s = time.monotonic() - began
    _claim(config, base)
    with interruptible() as stop, owned(out):
        budget = Budget(config.steps, config.minutes, config.eval.episodes, config.eval.confirm, config.eval.worlds)
        race = Race(out, base, budget, trainer, stop, start_s=start_s)
        try:
            start = race.evaluated(BASE, "select")
            if not race.record.shares:
                _require_success(config, world, start)
            free = race.free()
            fits = trainer.enter(start, free)
            for fit in fits:
                if not fit.fits:
                    say(f"{fit.method} does not fit: {fit.reason}")
            raced = race.plan({fit.method: trainer.before(fit.method) for fit in fits if fit.fits})
            if config.minutes and not (raced or race.record.raced) and any(fit.fits for fit in fits):
                raise BurnishError(
                    f"minutes={config.minutes:g} leave no method that fits the time to learn; raise minutes, with "
                    f"another out= or without {out}"
                )
            race.run(raced)
            chosen, start = race.confirm()
        except Stopped:
            say(f"{out}: stopped; the same command with resume=true goes on")
            return 130
    name = race.choose() if race.record.delivered else BASE
    delivered = race.policy(name)
    if isinstance(delivered, nn.Module):
        trainer.save(delivered, out / POLICY)
    text = page(race, fits, chosen, start)
    files.replace(files.named(out) / PAGE, f"# The race of `burnish improve`\n\n```\n{text}\n```\n")
    say(text)
    where = f"{out / POLICY}" if isinstance(delivered, nn.Module) else where_of(config.policy)
    if not isinstance(delivered, nn.Module):
        say(f"{out} has no {POLICY}/: the base is delivered, which is not ours to save, and stays where it is")
    say_delivered(where, world)
    return 0


class OfWorlds:
    """The ``Trainer`` of a base in the worlds that settings name."""

    def __init__(self, config: ImproveConfig, base: Any, origin: dict[str, Any], device: torch.device) -> None:
        self.config, self.base, self.origin, self.device = config, base, origin, device
        self.settings: dict[str, FinetuneConfig] = {}
        self.warmups: dict[str, int] = {}  # control steps
        self.updates: dict[str, int] = {}  # that follow the warm-up
        self.own_discount: set[str] = set()  # entrants whose file says it
        self.starts: dict[str, Any] = {}
        self._worlds: dict[Any, VecEnv] = {}
        self._said: set[str] = set()  # lines that each share would repeat
        own = {"policy": None, "env": config.env, "seed": config.seed, "resume": True, "device": config.device}
        for name in config.methods:
            chosen = entrant(name, SETTINGS, config.steps or EVER, base.spec.execute)
            label = chosen.label
            if label in (BASE, *self.settings) or label.endswith(OF_GREEDY):
                raise BurnishError(f"methods={name} has the name of another row; name it once, or rename the file")
            words = [f"total={chosen.decisions}", f"save_every={chosen.decisions}"]
            made = settled(chosen, composed, *words)
            out = str(Path(config.out) / RUNS / label)
            self.settings[label] = replace(made, **own, threads=config.threads, out=out)
            ticks = decision_ticks(made.method, base.spec.execute)
            if any(word.startswith("method.discount") for word in chosen.words):
                self.own_discount.add(label)
            decisions, _, self.updates[label] = warmup_of(made.method)
            self.warmups[label] = decisions * ticks

    def require_budget(self) -> None:
        """Refuse steps within which no method that may fit would learn."""
        found = {fit.method: self.warmups[fit.method] for fit in self.fits(None) if fit.fits}
        if found and self.config.steps and min(found.values()) >= self.config.steps:
            listed = ", ".join(f"{name} {steps:,}" for name, steps in found.items())
            raise BurnishError(
                f"steps={self.config.steps} end within the warm-up of every method that fits ({listed} control steps), "
                "so nothing would be learnt; raise steps or, in a file of methods=, lower method.loop.warmup"
            )

    def fits(self, samples: Obs | None) -> list[Fit]:
        """Whether each entrant fits and may race."""
        known = {fit.method: fit for fit in compatibility(self.base, samples)}
        found = {name: known[method_name(made.method)] for name, made in self.settings.items()}
        found = {name: fit._replace(reason=fit.reason + self._way_in(name, fit)) for name, fit in found.items()}
        return [fit._replace(method=name, fits=fit.fits and fit.raced) for name, fit in found.items()]

    def _way_in(self, name: str, fit: Fit) -> str:
        """The setting with which a method of noise fits, where it does not because a diffusion draws its own."""
        latent = method_of(self.settings[name].method).view is View.latent
        drawn = getattr(getattr(self.base, "config", None), "sampler", None) is Sampler.ddpm
        return "; policy.sampler=ddim draws none" if latent and drawn and not fit.fits else ""

    def enter(self, start: Evaluation, free: Mapping[str, float]) -> list[Fit]:
        """Whether each entrant fits. A method that only needs actions begins at noise 0 where that is better."""
        greedy = free.get(BASE_GREEDY, float("-inf")) > free[BASE]
        for name, made in self.settings.items():
            if hasattr(made.method, "discount") and name not in self.own_discount:
                made.method.discount = type(made.method.discount)(discount_of(start))
            if hasattr(made.method, "trained_steps"):
                made.method.trained_steps = min(made.method.trained_steps, self.base.num_steps)
            at_0 = Greedy(self.base) if greedy else None
            fits_at_0 = at_0 is not None and has(at_0, method_of(made.method).needs)
            self.starts[name] = at_0 if fits_at_0 else self.base
            self.starts[name].origin = self.origin
        return self.fits(self._world(self.base).reset())

    def before(self, name: str) -> Preparation:
        """A few initial updates are timed, on a few decisions in the worlds of the base: they cost no control steps,
        but minutes. One that breaks here breaks in its share."""
        count, settings = self.updates[name] if self.config.minutes else 0, self.settings[name]
        try:
            loop = count and prepare(
                settings.method, self.starts[name], self._world(self.base), probe=False, device=self.device
            )
            if not isinstance(loop, OffPolicy):
                return Preparation(self.warmups[name])
            for _ in range(1 + loop.config.n_step):
                loop.advance()
            loop.learn(1)
            began = time.monotonic()
            loop.learn(PROBED)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:  # of anybody's world or method
            say(f"{name}: its updates could not be timed ({reason(error)})")
            return Preparation(self.warmups[name])
        return Preparation(self.warmups[name], count * (time.monotonic() - began) / PROBED)

    def open(self) -> None:
        """The worlds of the base are made, as every entrant makes its own; those that it cannot act in are refused."""
        self._world(self.base).reset()

    def train(self, entrant: str, enough: Callable[[int], bool], begin: Callable[[], None]) -> Trained | None:
        settings = self.settings[entrant]
        folder = Path(settings.out)
        logged = read_metrics(folder) if (folder / METRICS).is_file() else []
        steps = int(max((row.get("control_steps", 0) for row in logged), default=0))
        if steps and enough(steps):  # stopped between the end of a share and its evaluation
            return Trained(self.load(folder), steps, self._learnt(entrant, logged[-1].get("gradient_steps")))
        work, loop = refinement(settings, self.starts[entrant], tried=False, tell=self._tell)
        work.origin = {**work.origin, "base": self.origin["base"]}
        status = carry_out(settings, work, loop, begin=begin, pause=lambda: enough(int(loop.statistics.ticks)))
        if status:
            return None
        learnt = self._learnt(entrant, getattr(loop, "gradient_steps", None))
        return Trained(loop.learner.policy, int(loop.statistics.ticks), learnt)

    def _learnt(self, entrant: str, updates: float | None) -> bool:
        """Whether an entrant with so many updates, where they are counted, is beyond the initial ones."""
        return updates is None or updates > self.updates[entrant]

    def play(self, policy: Any, stream: str, episodes: int) -> Evaluation:
        env = self._world(policy)
        controller = controller_for(policy, env.num_envs, device=self.device)
        with episodes_bar(episodes) as progress:
            seeds = evaluation_seeds(episodes, stream=stream, base=self.config.seed)
            found = evaluate(env, controller, seeds, progress=progress)
        self._tell(unreported(env, found))
        return found

    def _tell(self, line: str) -> None:
        if line and line not in self._said:
            say(line)
        self._said.add(line)

    def save(self, policy: Any, path: Path) -> None:
        save(path, config=describe(policy, self.origin), state=policy.state_dict(), overwrite=path.exists())

    def load(self, path: Path) -> Any:
        return load_policy(path, self.device, base=None if isinstance(self.base, nn.Module) else self.base)[0]

    def _world(self, policy: Any) -> VecEnv:
        spec = policy.spec
        key = spec.history, spec.action
        if key not in self._worlds:
            self._worlds[key] = world_for(spec, self.origin["env"], self.config.eval.worlds, self.device)
        return self._worlds[key]


def composed(words: Sequence[str]) -> FinetuneConfig:
    """The settings of a run from words of a command line."""
    return to_object(compose("finetune", FinetuneConfig, FINETUNE["finetune"], words))


def discount_of(start: Evaluation) -> float:
    """Of a control tick: it looks ahead for twice as long as an episode of the base lasts."""
    least, largest = HORIZONS
    return round(1 - 1 / min(max(2 * statistics.mean(start.lengths), least), largest), 4)


def _claim(config: ImproveConfig, base: Any) -> None:
    """The folder is empty, or holds this very race."""
    out = Path(config.out)
    for name in (RUNS, EVALUATIONS, CANDIDATES, POLICY):
        files.refuse_link(out / name)
    require_room(out, "race", config.resume)
    free = {"resume", "threads", "out", "policy.path", "policy.base"}
    free |= {f"policy.{name}" for kind in EXTERNAL_KINDS.values() for name in kind.free}
    claim(out / CONFIG, to_data(config) | {"identity": to_data(identity_of(config.policy, base))}, {}, free)


def _require_success(config: ImproveConfig, world: Mapping[str, Any], start: Evaluation) -> None:
    """Refuse a key of success that was named and that the base's episodes never reported; the folder is free again."""
    key = (world.get("config") or {}).get("success")
    if key is None or start.success is not None:
        return
    for name in (f"{EVALUATIONS}/select-{BASE}.json", RACE):
        files.remove(Path(config.out) / name)
    raise BurnishError(
        f"no step of {len(start.seeds)} episodes of the base reported env.success={key}, so nothing says which "
        "succeed; name another key of its info, or env.success=null to race for returns"
    )


def page(race: Race, fits: list[Fit], chosen: Evaluation, start: Evaluation) -> str:
    """A table of all that played, the evidence, and the cost."""
    rows, way = [], f"{criterion(start)} on the way"
    free, scores, steps = race.free(), race.scores(), {}
    for share in race.record.shares:
        steps[share["entrant"]] = steps.get(share["entrant"], 0) + share["steps"]
    failed, winner = race.record.failed, race.choose().removesuffix(OF_GREEDY)
    best = {**free, **{name: max(x) for name, x in scores.items() if name not in failed or name == winner}}
    for name in sorted(best, key=lambda name: -best[name]):
        row = {"policy": name, "steps": f"{steps.get(name, 0):,}"}
        row[way] = " ".join(f"{x:.4g}" for x in scores.get(name, [free.get(name, 0.0)]))
        rows.append(row | {"end": _end(race, name)})
    out = {fit.method: fit.reason for fit in fits if not fit.fits} | (race.record.dropped or {}) | failed
    for name, why in out.items():
        lost = race.record.lost.get(name, 0)
        rows.append({"policy": name, "steps": f"{lost:,}", way: "", "end": f"out: {why}"})
    found, low, high = difference(chosen, start, 1 - ERROR)
    unpaired = why_unpaired(chosen, start)
    evidence = (
        f"On {len(start.seeds)} fresh seeds {race.choose()} has {in_words(chosen)}; the base has {in_words(start)}; "
        f"the difference is {found:+.3g} [{low:+.3g}, {high:+.3g}]{f' (not paired: {unpaired})' if unpaired else ''}."
    )
    result = "It is delivered." if race.record.delivered else "That is not beyond doubt, so the base is delivered."
    evaluated, minutes = race.record.evaluation_steps, race.seconds() / 60
    spent = f"{race.trained_steps():,} steps of training, {evaluated:,} of evaluation, {minutes:.1f} min"
    return f"{table(rows)}\n\n{evidence}\n{result}\nSpent: {spent}."


def _end(race: Race, name: str) -> str:
    chosen, free = race.choose(), name in (BASE, BASE_GREEDY)
    if chosen == name or (chosen == f"{name}{OF_GREEDY}" and not free):
        return f"chosen{' from noise 0' if chosen != name else ''}"
    return "free" if free else "beaten" if name in race.best() else "has not learnt to act yet"


if __name__ == "__main__":
    sys.exit(main())
