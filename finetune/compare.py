"""Every method from one checkpoint, at one budget of control steps, on the same seeds: ``burnish compare``.

Nothing here trains. A run is the command that a person would type, `burnish finetune policy.path=BASE experiment=...`,
in a process of its own, and then `burnish evaluate` of what it left; this file decides which commands, keeps the cores
busy with them, and reads what they wrote (`comparison.py`). So a run that fails costs no other, and a comparison that
was stopped goes on from the checkpoints of its runs.

A name in ``methods`` is a shipped experiment of the task (``configs/experiment/TASK``), else a method with its default
settings, else a file: YAML as in ``configs/experiment``, for settings of one's own. Curves are on the seeds kept for
selection, by which the best run is chosen; what is said in the end is on other seeds, paired with the base.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..policies.build import load_policy, weights_of
from ..policies.core import files
from ..policies.core.config import differences, from_data, require_least, to_data
from ..policies.core.errors import BurnishError, did_you_mean, plain_text
from ..policies.core.interrupt import Stop, interruptible
from ..policies.core.manifest import parse, plain_yaml
from ..policies.core.threads import usable_cores
from .build import CHOICES, decision_ticks, require
from .comparison import COMPARISON, EVALUATIONS, RUNS, Entry, summarize, table, verdict

GROUPS: dict[str, dict[str, type]] = {}  # no setting of this verb is a choice among configurations
VIDEOS = "videos"
ABOUT = "about.json"  # the world that was evaluated in; older comparisons have none
CHANGEABLE = {"methods", "seeds", "jobs", "videos", "goal", "out", "resume", "base"}
MAIN = "import sys; from burnish.policies.core.cli import main; sys.exit(main())"
POLL_S = 0.2


@dataclass
class CompareConfig:
    base: str = ""  # the checkpoint from which every method begins
    methods: list[str] = field(default_factory=list)  # experiments of the task, methods, or files like an experiment
    seeds: int = 3
    seed: int = 0  # of the first run, and of the episodes in the end
    budget: int = 100_000  # control steps of each run
    task: str | None = None  # whose shipped experiments the names mean; null: the world of the base
    world: str | None = None  # a file like an experiment, whose env is that of all of them; null: the world of the base
    episodes: int = 200  # of the base and of each result in the end
    exams: int = 10  # trials along each run
    exam_episodes: int = 64
    worlds: int = 50  # of trials, stepped at once
    goal: float = 0.9  # success of which the time is told
    videos: int = 3  # seeds on which the base and each method's best run are filmed
    jobs: int = 0  # runs at a time; 0: one per core
    device: str = "cpu"
    out: str = "runs/compare"
    resume: bool = False

    def __post_init__(self) -> None:
        if not self.base or not self.methods:
            raise BurnishError("base=... must name a checkpoint, and methods=... at least one method; see --help")
        least = dict.fromkeys(("seeds", "budget", "episodes", "exams", "exam_episodes", "worlds"), 1)
        require_least(self, least | {"seed": 0, "videos": 0, "jobs": 0})
        if self.videos > self.episodes:
            raise BurnishError(
                f"videos={self.videos} are filmed of the first of episodes={self.episodes}; ask for fewer"
            )


class Contender(NamedTuple):
    """A method under the name it has in the tables, and what is said of it on a command line."""

    label: str
    method: str
    words: list[str]
    decisions: int  # the budget, in the unit that a run counts in


def compare(config: CompareConfig) -> int:
    base, origin = load_policy(config.base)
    world, execute = origin.get("env"), base.spec.execute
    task = config.task or (world or {}).get("name")
    chosen = {each.label: each for each in (contender(name, task, config.budget, execute) for name in config.methods)}
    for each in chosen.values():
        require(each.method, base)
    if len(chosen) < len(config.methods):
        raise BurnishError(f"methods={','.join(config.methods)} names something twice, and one name is one row")
    out = Path(config.out)
    _claim(config)
    for name in (RUNS, EVALUATIONS, VIDEOS):
        files.refuse_link(out / name)
    seeds = range(config.seed, config.seed + config.seeds)
    entries = [Entry(label, seed) for seed in seeds for label in chosen]
    with interruptible() as stop:
        player = Player(config, out, stop, len(entries))
        player.evaluate(config.base, out / EVALUATIONS / "base.json")
        with ThreadPoolExecutor(config.jobs or usable_cores()) as pool:
            list(pool.map(lambda entry: player.play(chosen[entry.method], entry), entries))
        if stop.requested:
            sys.stderr.write(f"{out}: stopped; the same command with resume=true goes on\n")
            return 130
        found = summarize(out, entries, budget=config.budget, goal=config.goal)
        about = out / EVALUATIONS / ABOUT
        found["world"] = json.loads(about.read_text(encoding="utf-8"))["world"] if about.exists() else world
        found["base"]["path"] = config.base
        found["command"] = shlex.join(["burnish", "compare", *_words(config)])
        found["burnish"] = version("burnish")
        files.replace(out / COMPARISON, json.dumps(found, indent=1) + "\n")
        best = {row["method"]: str(out / row["folder"]) for row in found["methods"] if row["runs"]}
        player.film({"base": config.base, **best})
    lines = f"{table(found)}\n\n{verdict(found)}\n{out / COMPARISON}  (burnish report compare={out})\n"
    sys.stdout.write(plain_text(lines))
    return 0 if found["best"] is not None else 1


# ---- which commands ----


def contender(name: str, task: str | None, budget: int, execute: int) -> Contender:
    experiments, path = _experiments(task), Path(name)
    if name in experiments:
        text, words, label = experiments[name], [f"experiment={task}/{name}"], name
    elif name in CHOICES:
        text, words, label = f"defaults: [override /method: {name}]", [f"method={name}"], name
    elif path.suffix in (".yaml", ".yml") and path.is_file():
        text, label = path.read_text(encoding="utf-8"), path.stem
        words = list(_as_words(_parsed(text, name)))
    else:
        raise BurnishError(
            f"methods={name} is neither an experiment of {task}, nor a method, nor a YAML file; "
            f"{did_you_mean(name, [*experiments, *CHOICES])}"
        )
    data = _parsed(text, name)
    method = next((word.removeprefix("method=") for word in _as_words(data) if word.startswith("method=")), None)
    if method is None or method not in CHOICES:
        raise BurnishError(f"{name} chooses no method: a line `- override /method: dsrl` under `defaults:` does")
    given = {key: x for key, x in data.get("method", {}).items() if key in ("execute", "view")}
    ticks = decision_ticks(from_data(CHOICES[method].config, given, "method"), execute)
    return Contender(label, method, words, -(-budget // ticks))


def _experiments(task: str | None) -> dict[str, str]:
    folder = resources.files("burnish.configs").joinpath("experiment")
    if task is None or not folder.joinpath(task).is_dir():
        return {}
    files = (f for f in folder.joinpath(task).iterdir() if f.name.endswith(".yaml"))
    return {f.name.removesuffix(".yaml"): f.read_text(encoding="utf-8") for f in files}


def _world(config: CompareConfig) -> list[str]:
    """What is said of the world on each command line; nothing where it is the base's."""
    if config.world is None:
        return []
    path = Path(config.world)
    if not path.is_file():
        raise BurnishError(f"world={config.world} is no file; it holds settings of env, as a file of methods= may")
    words = list(_as_words(_parsed(path.read_text(encoding="utf-8"), config.world)))
    if not any(word.startswith("env=") for word in words) or any(not word.startswith("env") for word in words):
        raise BurnishError(
            f"{config.world} must choose a world by a line `- override /env: insert` under `defaults:`, and say "
            f"nothing else than its settings under `env:`"
        )
    return words


def _parsed(text: str, name: str) -> Mapping[str, Any]:
    try:
        data = plain_yaml(text)
    except yaml.YAMLError as error:
        raise BurnishError(f"{name} is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(data, Mapping):
        raise BurnishError(f"{name} must hold settings as in configs/experiment, but it holds {data!r}")
    return data


def _as_words(data: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Settings as one would type them: the choices under ``defaults`` first, then every number with its dotted name."""
    for choice in data.get("defaults", []) if not place else []:
        group, option = next(iter(choice.items())) if isinstance(choice, Mapping) else (choice, None)
        if option is not None:
            yield f"{str(group).removeprefix('override ').lstrip('/')}={option}"
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _as_words(value, f"{place}{key}.")
        elif place or key != "defaults":
            yield f"{place}{key}={'null' if value is None else json.dumps(value)}"


def _words(config: CompareConfig) -> list[str]:
    """The command that repeats this comparison, without what is as it is by default."""
    usual = to_data(CompareConfig(base="-", methods=["-"]))
    shown = {key: x for key, x in to_data(config).items() if x != usual[key] and key != "resume"}
    return [f"{key}={','.join(x) if isinstance(x, list) else x}" for key, x in shown.items()]


# ---- playing them ----


def claim(path: Path, mine: Mapping[str, Any], usual: Mapping[str, Any], free: Collection[str] = ()) -> None:
    """The folder of the file ``path`` is what it was begun as: settings other than those kept there are refused, but
    for the names in ``free``. ``usual`` stands for settings that came later than the file."""
    if path.exists():
        kept = parse(path, plain_yaml)
        if not isinstance(kept, Mapping):
            raise BurnishError(f"{path} is malformed: it holds no settings; choose another out=...")
        theirs = {**usual, **kept}
        other = [name for name, *_ in differences(theirs, mine) if name.partition(".")[0] not in free]
        if other:
            raise BurnishError(f"{path.parent} was begun with another {', '.join(other)}; choose another out=...")
    files.replace(files.named(path.parent) / path.name, yaml.safe_dump(dict(mine), sort_keys=False))


def _claim(config: CompareConfig) -> None:
    path = Path(config.out) / "config.yaml"
    if path.exists() and not config.resume:
        raise BurnishError(f"{config.out} holds a comparison; resume=true continues it, or choose another out=...")
    mine = to_data(config) | {"base_sha256": weights_of(config.base), "world": _world(config) or None}
    claim(path, mine, to_data(CompareConfig("-", ["-"])), CHANGEABLE)


class Player:
    """Plays what is not there yet, and tells how far it is."""

    def __init__(self, config: CompareConfig, out: Path, stop: Stop, total: int) -> None:
        self.config, self.out, self.stop, self.total = config, out, stop, total
        self.ended, self.played, self.began = 0, 0, time.perf_counter()
        self.common = [f"device={config.device}", "threads=1"]
        self.world = _world(config)

    def play(self, chosen: Contender, entry: Entry) -> None:
        """One run and its evaluation. A failure is written down, and costs no other run."""
        if self.stop.requested:
            return
        folder = self.out / entry.folder
        if (self.out / entry.evaluation).exists():
            self.ended += 1
            return
        files.remove(folder.with_suffix(".failed"))
        try:
            files.refuse_link(folder)
            words = ["finetune", f"policy.path={self.config.base}", *chosen.words, *self._settings(chosen, entry)]
            self._burnish(words, folder.with_suffix(".log"))
            if self.stop.requested:
                return
            self.evaluate(str(folder), self.out / entry.evaluation)
        except BurnishError as error:
            files.replace(folder.with_suffix(".failed"), f"{error}\n")
            self._tell(entry, f"failed: {str(error).splitlines()[-1]}")
        else:
            self._tell(entry, "is there")

    def _settings(self, chosen: Contender, entry: Entry) -> list[str]:
        config, total = self.config, chosen.decisions
        words = [f"seed={entry.seed}", f"total={total}", f"out={self.out / entry.folder}", "resume=true", *self.common]
        words += [f"eval_every={max(1, total // config.exams)}", f"save_every={max(1, total // 4)}"]
        words += [f"log_every={max(1, total // 100)}"]
        return [*words, f"trial.episodes={config.exam_episodes}", f"trial.worlds={config.worlds}", *self.world]

    def evaluate(self, policy: str, file: Path) -> None:
        """On the seeds that nothing is chosen on."""
        if file.exists():
            return
        scratch, config = files.below(file.parent, file.stem), self.config
        words = ["evaluate", f"policy.path={policy}", f"trial.episodes={config.episodes}", f"out={scratch}"]
        words += [f"trial.worlds={config.worlds}", f"seed={config.seed}", *self.world]
        self._burnish([*words, *self.common], file.with_suffix(".log"))
        if not (scratch / "evaluation.json").exists():
            return  # stopped
        for name in ("starts.json", ABOUT):
            files.move(scratch / name, file.parent / name)  # the same in every evaluation
        files.move(scratch / "evaluation.json", file)
        files.remove(scratch)

    def film(self, policies: Mapping[str, str]) -> None:
        """All of them on the same first seeds. What cannot be filmed is left out."""
        count = self.config.videos
        for name, policy in policies.items():
            target, scratch = self.out / VIDEOS / name, self.out / VIDEOS / f".{name}"
            if count == 0 or target.exists() or self.stop.requested:
                continue
            words = [
                "evaluate",
                f"policy.path={policy}",
                f"trial.episodes={count}",
                f"videos={count}",
                f"seed={self.config.seed}",
                f"out={scratch}",
            ]
            try:
                files.refuse_link(scratch)
                self._burnish([*words, f"trial.worlds={count}", *self.world, *self.common], self.out / "videos.log")
                files.move(scratch / "videos", target)
            except (BurnishError, OSError) as error:
                sys.stderr.write(f"no films of {name}: {error}\n")
            files.remove(scratch)

    def _burnish(self, words: Sequence[str], log: Path) -> None:
        """A verb in a process of its own. It hears of a Ctrl-C by itself, but not of a SIGTERM to this one."""
        with files.fresh(files.named(log.parent) / log.name) as file:
            process = subprocess.Popen([sys.executable, "-c", MAIN, *words], stdout=file, stderr=subprocess.STDOUT)
            told = False
            while process.poll() is None:
                if self.stop.requested and not told:
                    process.send_signal(signal.SIGTERM)
                    told = True
                time.sleep(POLL_S)
        if process.returncode and not self.stop.requested:
            said = log.read_text(encoding="utf-8").strip().splitlines()[-3:]
            raise BurnishError(f"`burnish {words[0]}` ended with status {process.returncode}: " + " ".join(said))

    def _tell(self, entry: Entry, how: str) -> None:
        self.ended, self.played = self.ended + 1, self.played + 1
        minutes = (time.perf_counter() - self.began) / 60
        left = minutes / self.played * (self.total - self.ended)
        sys.stderr.write(f"{entry.name} {how} ({self.ended} of {self.total}; about {left:.0f} minutes left)\n")
