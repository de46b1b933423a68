"""The runs of `refine_quality.py` and `public_tasks.py`: what is played, with which settings, and what is kept of it.

A run is one verb in a process of its own with one thread, here or on a node of a Ray cluster that shares the folders,
or a storage. It leaves one JSON file in the results of its suite; one that was killed goes on from its last checkpoint.
Its policies are examined, here, on seeds of the suite's own stream, which are used for no training, tuning or choice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import machine
from refine_bases import configured
from refine_minutes import add_up, known_minutes, timed
from refine_settings import RANKED, Task, family_of, reads_recordings

from burnish.finetune.__main__ import FinetuneConfig
from burnish.finetune.compare.free_baselines import UNTRIED, free_baseline, probe, steps_for
from burnish.policies.best import Best
from burnish.policies.build import load_policy
from burnish.policies.cli.executors import LOCAL, names_place
from burnish.policies.cli.ray_tasks import LOSSES, address_of, connected, enter, key_of, play_away, stored, variables
from burnish.policies.cli.verb_process import start_verb
from burnish.policies.controllers import controller_for
from burnish.policies.core import files
from burnish.policies.core.config import to_data
from burnish.policies.core.errors import BurnishError, reason
from burnish.policies.core.rewards import RewardConfig
from burnish.policies.measure.evaluate import Evaluation, evaluate, evaluation_seeds
from burnish.policies.runs.run import read_metrics
from burnish.sim.build import world_for

SEARCH_SEED, SEARCH_EPISODES = 1000, 256
QUICK = 0.01  # of the budget
COUNTING = threading.Lock()  # of a thread that counts the steps of a free baseline


def steps_in(minutes: float, name: str, *, base: str | Path, data: str | Path) -> int:
    """Updates that fit into so many minutes of one processor, whatever else the machine does meanwhile."""
    share = 1.0  # of a processor, that the probe got

    def play(command: Sequence[str]) -> None:
        nonlocal share
        began = time.monotonic()
        process = start_verb(command, stdout=subprocess.DEVNULL)
        if hasattr(os, "wait4"):  # Windows does not tell: there a busy machine gives the baseline fewer updates
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            share = (usage.ru_utime + usage.ru_stime) / (time.monotonic() - began)
        if process.wait():
            raise BurnishError(f"the probe of {name} ended with status {process.returncode}; its words were {command}")

    with tempfile.TemporaryDirectory() as scratch:
        rate = probe(name, play, Path(scratch) / "probe", base=base, data=data, words=["threads=1", *UNTRIED])
    return steps_for(minutes, rate / share)


@dataclass(frozen=True)
class Suite:
    """Tasks, their bases, and how much is played on them."""

    name: str  # stream of the reporting seeds, and name of the results
    tasks: Mapping[str, Task]
    budget: int  # control steps
    runs: Path  # folder of unfinished runs
    base: Callable[[str, int], Path]  # folder of a base
    fingerprint: Callable[[str, int], str | None]  # of the weights of a base; None where there is none
    recordings: Callable[[str], Path]  # that a task's base has imitated
    common: Callable[[str, object], list[str]]  # settings of every method on a task
    tried: Callable[[str, str, int], list[str]]  # settings of a trial of a task and a method
    episodes: int  # of a policy of a run, on the first of the seeds that the base was on
    base_episodes: int
    worlds: int  # of an evaluation
    looks: int  # evaluations of a run on the way
    selected: int  # episodes of such an evaluation
    confirmed: int  # episodes on which a run decides what it delivers

    def examined(self, path: Path, episodes: int, *, stream: str | None = None, greedy: bool = False) -> Evaluation:
        """A policy on seeds that were used for no training, tuning or choice."""
        policy, origin = load_policy(path)
        env = world_for(policy.spec, origin["env"], min(self.worlds, episodes), torch.device("cpu"))
        controller = controller_for(policy, env.num_envs, greedy=greedy)
        found = evaluate(env, controller, evaluation_seeds(episodes, stream=stream or self.name))
        if not found.repeatable:  # every table here compares episodes of equal seeds
            raise BurnishError(f"equal seeds begin different episodes in the world of {path}, so they are no pairs")
        return found

    def scores(self, task: str, evaluation: Evaluation) -> list[float]:
        """One per episode: success, or the return in the task's unit."""
        unit = self.tasks[task].unit
        if unit is None:
            assert evaluation.success is not None, task
            return [float(x) for x in evaluation.success]
        return [round(x / unit, 4) for x in evaluation.returns]


def best_trial(results: Path, task: str, method: str) -> int:
    """The winner among the logged trials; the shipped experiment where none was made."""
    found = [json.loads(path.read_text()) for path in (results / "search" / task).glob(f"{method}-*.json")]
    return max(found, key=lambda trial: (trial["score"], -trial["trial"]), default={"trial": 0})["trial"]


@dataclass(frozen=True)
class Case:
    """One run. ``trial`` is set where it belongs to the search."""

    suite: Suite
    task: str
    method: str
    seed: int
    quick: bool
    results: Path
    budget: int
    base: int = 1
    trial: int | None = None

    @property
    def name(self) -> str:
        changed = self.budget != self.suite.budget
        further = (f"-{self.budget}" if changed else "") + ("" if self.base == 1 else f"-base{self.base}")
        return f"{self.method}{further}-{self.seed if self.trial is None else self.trial}"

    @property
    def result(self) -> Path:
        searched = () if self.trial is None else ("search",)
        return self.results.joinpath(*searched, self.task, f"{self.name}.json")

    @property
    def folder(self) -> Path:
        kind = "quick" if self.quick else "full" if self.trial is None else "search"
        return self.suite.runs / kind / self.task / self.name

    @property
    def chosen(self) -> list[str]:
        """The settings that are compared: those of the experiment, of the task, and of the trial."""
        trial = best_trial(self.results, self.task, self.method) if self.trial is None else self.trial
        experiment = [f"experiment={self.task}/{self.method}"]
        common = self.suite.common(self.task, configured(*experiment).method)
        return experiment + common + self.suite.tried(self.task, self.method, trial)

    @property
    def config(self) -> FinetuneConfig:
        return configured(*self.chosen)

    @property
    def is_free(self) -> bool:
        return family_of(self.method) == "free"

    def command(self) -> list[str]:
        if self.is_free:
            return self._free()
        config = self.config
        share = QUICK if self.quick else self.budget / self.suite.budget
        total = max(1, round(config.total * share))
        start = f"env={self.task}" if family_of(self.method) == "from nothing" else f"policy.path={self._base}"
        words = ["finetune", start, *self.chosen, f"seed={self.seed}", f"total={total}", *self._run()]
        words += [f"save_every={max(1, total // 4)}", f"log_every={max(1, total // 50)}"]
        looks = 1 if self.trial is not None else 2 if self.quick else self.suite.looks
        words += [f"eval_every={max(1, total // looks)}"]
        words += [f"data={self.suite.recordings(self.task)}"] if reads_recordings(config.method) else []
        learns = self.quick and hasattr(config.method.loop, "warmup")
        return words + (["method.loop.warmup=64", "method.loop.initial_updates=16"] if learns else [])

    def _run(self) -> list[str]:
        suite = self.suite
        fewer = (16, 16) if self.quick else (suite.selected, suite.confirmed) if self.trial is None else (16, 2)
        trial = [f"eval.episodes={fewer[0]}", f"eval.worlds={suite.worlds}", f"eval.confirm={fewer[1]}"]
        return [f"out={self.folder}", "threads=1", "resume=true", *trial]

    def _free(self) -> list[str]:
        """Trained for as long as the median run of the methods, by steps that are counted once per task."""
        data = self.suite.recordings(self.task)
        with COUNTING:
            steps = self._free_steps(data)
        words = free_baseline(self.method, base=self._base, data=data, steps=steps)
        return [*words, f"seed={self.seed}", *self._run()]

    def _free_steps(self, data: Path) -> int:
        kept = self.results / self.task / "free_steps.json"
        steps = json.loads(kept.read_text()) if kept.exists() else {}
        if self.method not in steps:
            runs = [json.loads(path.read_text()) for path in kept.parent.glob("*-[0-9].json")]
            runs = [run for run in runs if run["method"] in RANKED and run["budget"] == self.suite.budget]
            minutes = [x for run in runs if (x := known_minutes(run)) is not None]
            spent = statistics.median(minutes) if minutes else 0.1
            steps[self.method] = 20 if self.quick else steps_in(spent, self.method, base=self._base, data=data)
            files.replace(files.named(kept.parent) / kept.name, json.dumps(steps) + "\n")
        return steps[self.method]

    @property
    def _base(self) -> Path:
        return self.suite.base(self.task, self.base)

    def of_base(self, greedy: bool = False) -> Evaluation:
        """Made once. The base at noise 0 is a row of its own."""
        name = ("base" if self.base == 1 else f"base{self.base}") + ("_greedy" if greedy else "")
        kept = self.results / self.task / f"{name}.json"
        if not kept.exists():
            self.suite.examined(self._base, 32 if self.quick else self.suite.base_episodes, greedy=greedy).save(kept)
        return Evaluation.load(kept)


# Words and a file for their output -> the exit status, and the seconds that they took.
Player = Callable[[Sequence[str], Path], tuple[int, dict[str, float]]]


def play(case: Case, player: Player) -> None:
    """The run, from wherever an earlier one was stopped. Its output goes into its folder; processor time adds up."""
    case.folder.parent.mkdir(parents=True, exist_ok=True)
    log, clock, sitting = (case.folder.with_suffix(f".{name}") for name in ("log", "seconds", "sitting"))
    if sitting.exists():  # the last one was killed together with this program
        add_up(clock, json.loads(sitting.read_text()))
        sitting.unlink()
    status, spent = player(case.command(), log)
    sitting.unlink(missing_ok=True)
    add_up(clock, spent)
    if status:
        raise RuntimeError(f"it ended with status {status}: {log.read_text()[-500:]}")


def played_here(words: Sequence[str], log: Path) -> tuple[int, dict[str, float]]:
    with log.open("w", encoding="utf-8") as file:
        return timed(words, file, log.with_suffix(".sitting"))


def played_there(words: Sequence[str], log: Path, folder: str) -> tuple[int, dict[str, float]]:
    """On a node."""
    enter(folder)
    return played_here(words, log)


def played_away(*given: Any) -> tuple[int, dict[str, float]]:
    """On a node that shares a storage alone."""
    before = os.times()
    status = play_away(*given)
    spent = [now - then for now, then in zip(os.times(), before, strict=True)]  # of this process and its children
    return status, {"cpu_s": sum(spent[:4]), "wall_s": spent[4]}


def player(on: str, storage: str | None = None) -> Player:
    """Where runs are played. One whose node is lost begins again on another, from its last checkpoint; the time that
    the lost node had spent on it is not counted."""
    if on == LOCAL:
        return played_here
    ray = connected(address_of(on))
    shared = played_there if storage is None else played_away
    task = ray.remote(num_cpus=1, max_calls=1, max_retries=LOSSES)(shared)

    def play_on_ray(words: Sequence[str], log: Path) -> tuple[int, dict[str, float]]:
        try:
            if storage is None:
                return ray.get(task.remote(list(words), log.absolute(), os.getcwd()))
            with stored(words, log, storage) as keys:
                places = [str(place) for place in sys.path]
                return ray.get(task.remote(list(words), keys, key_of(log), variables(1), places, storage))
        except ray.exceptions.RayError as error:
            raise BurnishError(f"Ray has lost the run of {log.stem}: {reason(error)}") from error

    return play_on_ray


def add_place(parser: argparse.ArgumentParser) -> None:
    """The options that say where runs are played."""
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core (default: %(default)s)")
    parser.add_argument("--on", default=LOCAL, metavar="PLACE", help="local, ray or ray:ADDRESS (default: %(default)s)")
    parser.add_argument("--storage", metavar="URL", help="for nodes of Ray that share no folders, as fsspec reads it")


def compared_settings(case: Case) -> dict[str, Any]:
    """Those by which a run is told from others: of the method, and of the rewards where they are changed."""
    rewards = {} if case.config.rewards == RewardConfig() else {"rewards": to_data(case.config.rewards)}
    return to_data(case.config.method) | rewards


def conclude(case: Case) -> dict[str, Any]:
    """The result of the run, as plain data."""
    suite = case.suite
    spent = json.loads(case.folder.with_suffix(".seconds").read_text())
    found: dict[str, Any] = {
        "task": case.task,
        "method": case.method,
        "seed": case.seed,
        "base": suite.fingerprint(case.task, case.base),
        "budget": case.budget,
        "settings": None if case.is_free else compared_settings(case),
        "machine": machine(torch.device("cpu")),
        "minutes": spent["cpu_s"] / 60,  # of processor time: other work on the machine does not count
        "wall_minutes": spent["wall_s"] / 60,
    }
    if case.trial is not None:
        tried = suite.scores(case.task, suite.examined(case.folder, SEARCH_EPISODES, stream="refine_search"))
        words = suite.tried(case.task, case.method, case.trial)
        return found | {"trial": case.trial, "changed": words, "score": statistics.mean(tried)}
    best = Best(case.folder, {})
    episodes = 32 if case.quick else suite.episodes
    last = suite.scores(case.task, suite.examined(case.folder, episodes))
    rows = read_metrics(case.folder)
    unit = suite.tasks[case.task].unit
    key = "eval/success_rate" if unit is None else "eval/return_mean"
    curve = [
        (row.get("control_steps", 0.0), row["time/elapsed_s"], row[key] / (unit or 1)) for row in rows if key in row
    ]
    delivered = suite.scores(case.task, case.of_base())[: len(last)] if best.delivered is None else last
    if best.delivered is not None and best.delivered != _last_step(case):
        delivered = suite.scores(case.task, suite.examined(best.path, episodes))
    return found | {
        "delivered_step": best.delivered,  # None: the base
        "last": last,
        "delivered": delivered,
        "steps": max((row.get("control_steps", 0) for row in rows), default=0),
        "gradient_steps": max((row.get("gradient_steps", 0) for row in rows), default=0),
        "seconds": {key: x for row in rows for key, x in row.items() if key.startswith("time/")},
        "curve": curve,  # control steps, seconds, score on the seeds for selection
    }


def _last_step(case: Case) -> int | None:
    confirmed = Best(case.folder, {}).confirmed
    return None if confirmed is None else confirmed["steps"]["last"]


def play_all(cases: Sequence[Case], jobs: int, on: str = LOCAL, storage: str | None = None) -> None:
    """The runs that are not there yet: first those of the methods, then those that last as long."""
    if not names_place(on):
        raise BurnishError(f"--on={on} is no place for runs; take local, ray or ray:ADDRESS")
    if storage is not None and on == LOCAL:
        raise BurnishError(f"--storage={storage} is for --on=ray; runs of this machine write to its folders alone")
    where = player(on, storage)
    left = [case for case in cases if not case.result.exists()]
    for case in {(case.task, case.base): case for case in left}.values():
        if case.trial is None:
            case.of_base()
            case.of_base(greedy=True)
        case.suite.recordings(case.task)  # once, and not by two threads
    for free in (False, True):
        chosen = [case for case in left if case.is_free == free]
        for case in () if free else chosen:
            _ = case.config  # Hydra knows no threads
        # A cluster is handed all: those that find no core wait.
        with ThreadPoolExecutor(jobs if on == LOCAL else max(1, len(chosen))) as pool:
            list(pool.map(partial(_played, where), chosen))


def _played(where: Player, case: Case) -> None:
    try:
        play(case, where)
        found = conclude(case)
        files.replace(files.named(case.result.parent) / case.result.name, json.dumps(found) + "\n")
        files.remove(case.folder)
        files.remove(case.folder.with_suffix(".seconds"))
    except (RuntimeError, OSError, BurnishError) as error:  # the others go on
        sys.stderr.write(f"{case.task} {case.name}: {error}\n")
        return
    score = found["score"] if "score" in found else statistics.mean(found["last"])
    sys.stderr.write(f"{case.task} {case.name}: {score:.3f} in {found['minutes']:.1f} minutes\n")
    sys.stderr.flush()


def valid_runs(suite: Suite, results: Path) -> list[dict[str, Any]]:
    """The committed runs of today's bases and of the settings that won the search."""
    runs = []
    for path in sorted(results.glob("*/*-[0-9].json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        if path.parent.parent != results or run["task"] not in suite.tasks:
            continue
        if run["base"] not in (suite.fingerprint(run["task"], number) for number in (1, 2)):
            continue
        case = Case(suite, run["task"], run["method"], run["seed"], False, results, suite.budget)
        if run["settings"] is None or run["settings"] == json.loads(json.dumps(compared_settings(case))):
            runs.append(run | {"minutes": known_minutes(run)})
    return runs
