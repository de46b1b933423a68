"""Every method from one checkpoint, at one budget of control steps, on the same seeds: ``burnish compare``.

Nothing here trains. A run is the command that a person would type, `burnish finetune policy.path=BASE experiment=...`,
in a process of its own, and then `burnish evaluate` of what it left; this file decides which commands, keeps the cores
busy with them, and reads what they wrote (`comparison.py`). So a run that fails costs no other, and a comparison that
was stopped goes on from the checkpoints of its runs.

Baselines that cost no episodes are always there too (`free_baselines.py`): the base from noise 0, and with ``data=``,
for as long as the median run was trained, more imitation and offline learning of the recordings that the base has
imitated.

A name in ``methods`` is a shipped experiment of the task (``configs/experiment/TASK``), else a method with its default
settings, else a file: YAML as in ``configs/experiment``, for settings of one's own. Curves are on the seeds kept for
selection, by which the best run is chosen; what is said in the end is on other seeds, paired with the base: of the
last policy of each run, and of the one that it delivers (`policies/best.py`).
"""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...policies.best import BEST
from ...policies.build import load_policy, weights_of
from ...policies.cli.executors import LOCAL, executor, names_place
from ...policies.cli.machine import say
from ...policies.core import files
from ...policies.core.config import to_data
from ...policies.core.errors import BurnishError, plain_text
from ...policies.core.ranges import check_ranges
from ...policies.data.read import fingerprint
from ...policies.runs.interrupt import Stop, interruptible
from ...policies.runs.run import CONFIG
from ..build import require
from ..warmup import warmup_of
from . import free_baselines
from .claim import claim, keep, owned, require_own, require_room, restore, settings_of
from .comparison import (
    BASE,
    COMPARISON,
    DELIVERED,
    EVALUATIONS,
    GREEDY,
    RUNS,
    Entry,
    delivered_by,
    summarize,
    table,
    verdict,
)
from .entrants import Entrant, entrant, settled, world_words
from .free_baselines import BASE_GREEDY
from .slurm import SCRIPT, SLURM, array_script, waiting_runs

PLAN = ".plan"  # how long a free baseline is trained
VIDEOS = "videos"
ABOUT = "about.json"  # the world that was evaluated in; older comparisons have none
PLACES = {"on", "storage", "jobs", "gpus"}  # settings of where runs are played
MUTABLE = {"methods", "entrants", "seeds", "videos", "goal", "out", "resume", "base", "data"} | PLACES


@dataclass
class CompareConfig:
    """Settings of `burnish compare`: base, methods, seeds, budget, evaluations and videos."""

    base: str = ""  # the checkpoint from which every method begins
    methods: list[str] = field(default_factory=list)  # experiments of the task, methods, or files like an experiment
    seeds: int = 3  # runs of each method
    seed: int = 0  # seed of the first run, and of the episodes in the end
    budget: int = 100_000  # control steps of each run
    data: str | None = None  # the recordings that the base has imitated, for the free baselines that learn from them
    task: str | None = None  # task whose shipped experiments the names mean; null: the world of the base
    world: str | None = None  # a file like an experiment, whose env is that of all of them; null: the world of the base
    trust_world: bool = False  # world= is a file of your own, which may say of a world what a command line may
    episodes: int = 200  # episodes of the base and of each result in the end
    evaluations: int = 10  # evaluations along each run
    evaluation_episodes: int = 64  # episodes of each of these evaluations
    confirm_episodes: int = 256  # fresh ones, on which each run decides in the end what it delivers
    worlds: int = 50  # worlds of evaluations that are stepped at once
    goal: float = 0.9  # success of which the time is told
    videos: int = 3  # seeds on which the base and each method's best run are filmed
    on: str = LOCAL  # machines of the runs: local, ray, ray:HOST:PORT, or slurm, which writes an array script
    storage: str | None = None  # address for nodes of Ray that share no folders: s3://bucket/name, or another of fsspec
    jobs: int = 0  # runs at a time; 0: one per core, and on a cluster as many as it takes
    cores: int = 0  # cores of each run, for its threads and its worlds; 0: one, and on this machine all
    gpus: float = 1.0  # GPUs of each run with device=cuda on Ray; at .25 four runs share one
    device: str = "cpu"  # device of the networks: cpu, cuda, cuda:1
    out: str = "runs/compare"  # folder of all runs and of the comparison
    only: str | None = None  # the one run that this process plays, of an array script
    resume: bool = False  # keep the runs that are complete and go on

    def __post_init__(self) -> None:
        if not self.base or not self.methods:
            raise BurnishError("base=... must name a checkpoint, and methods=... at least one method; see --help")
        positive = "seeds budget episodes evaluations evaluation_episodes confirm_episodes worlds"
        check_ranges(self, {"[1, inf)": positive, "[0, inf)": "seed videos jobs cores", "(0, inf)": "gpus"})
        if self.on != SLURM and not names_place(self.on):
            raise BurnishError(f"on={self.on} is no place for runs; take local, ray, ray:HOST:PORT or slurm")
        if self.storage is not None and self.on in (LOCAL, SLURM):
            raise BurnishError(f"storage={self.storage} is for on=ray; the runs of on={self.on} write to out= alone")
        if self.on != LOCAL and ":" in self.device:
            raise BurnishError(f"device={self.device}: a task of on={self.on} sees one GPU alone; take device=cuda")
        if self.videos > self.episodes:
            raise BurnishError(f"videos={self.videos} are filmed of the episodes={self.episodes}; ask for fewer")


def compared(config: CompareConfig, settings: Callable[[Sequence[str]], Any]) -> int:
    """The comparison, run by run; exit status. ``settings`` makes those of a method of the words of a command line."""
    base, origin = load_policy(config.base)
    world, execute = origin.get("env"), base.spec.execute
    if world is None and config.world is None:
        raise BurnishError(
            f"{config.base} does not say which world it is for; give world=FILE, which `burnish doctor env=...` prints"
        )
    task = config.task or (world.get("name") if isinstance(world, Mapping) else None)
    chosen = {each.label: each for each in (entrant(name, task, config.budget, execute) for name in config.methods)}
    for each in chosen.values():
        _require_useful(each, settled(each, settings), base, config.budget)
    if len(chosen) < len(config.methods):
        raise BurnishError(f"methods={','.join(config.methods)} names something twice, and one name is one row")
    if taken := [label for label in chosen if label in (BASE, *free_baselines.NAMES)]:
        raise BurnishError(f"methods={taken[0]} has the name of another row; give the file another name")
    if config.data is not None and not Path(config.data).exists():
        raise BurnishError(f"there is no dataset at {config.data}; data=... names what the base has imitated")
    out = Path(config.out)
    seeds = range(config.seed, config.seed + config.seeds)
    entries = [Entry(label, seed) for seed in seeds for label in chosen]
    free = [Entry(name, config.seed) for name in free_baselines.NAMES if config.data is not None or name == BASE_GREEDY]
    with interruptible() as stop, ExitStack() as held:
        player = Player(config, out, stop, len(entries) + len(free))
        if config.only is None:
            require_own(out, "comparison")
            held.enter_context(owned(out))
            require_room(out, "comparison", config.resume)
            if config.storage is not None:
                restore(out, config.storage, config.resume)
            _claim(config, chosen)
        for name in (RUNS, EVALUATIONS, VIDEOS):
            files.refuse_link(out / name)

        def evaluate_base() -> None:
            player.evaluate(config.base, out / EVALUATIONS / f"{BASE}.json")

        def play_free(entry: Entry) -> None:
            ended = [out / run.folder for run in entries if (out / run.evaluation).exists()]
            if ended:
                player.play_free(entry, free_baselines.median_minutes(ended))

        runs = {entry.name: partial(player.play, chosen[entry.method], entry) for entry in entries}
        later = {entry.name: partial(play_free, entry) for entry in free}
        if config.only is not None:
            return play_alone({BASE: evaluate_base, **runs, **later}, config.only, out, stop)
        if config.on == SLURM:
            if waiting := waiting_runs(out, [BASE, *runs], list(later)):
                words = [word for word in _words(config) if not word.startswith("on=")]
                asked = {"gpu": config.device != "cpu", "jobs": config.jobs, "cores": max(1, config.cores)}
                files.replace(out / SCRIPT, array_script(waiting, words, out, **asked))
                place = shlex.quote(str(out / SCRIPT))
                say(f"sbatch {place}  (plays {len(waiting)} runs; the same command, resume=true, collects them)")
                return 0
        else:
            jobs = config.jobs or player.executor.jobs(player.total)
            evaluate_base()
            tells = "tells how far it is" if config.storage is None else "leaves its log, once it has ended,"
            sys.stderr.write(f"{player.total} runs, {jobs} at a time; each {tells} in {out / RUNS}/*.log\n")
            with ThreadPoolExecutor(jobs) as pool:
                for wave in (runs, later):
                    list(pool.map(lambda play: play(), wave.values()))
        if stop.requested:
            sys.stderr.write(f"{out}: stopped; the same command with resume=true goes on\n")
            return 130
        found = summarize(out, entries, free, budget=config.budget, goal=config.goal)
        about = out / EVALUATIONS / ABOUT
        found["world"] = json.loads(about.read_text(encoding="utf-8"))["world"] if about.exists() else world
        found["base"]["path"] = config.base
        found["command"] = shlex.join(["burnish", "compare", *_words(config)])
        found["burnish"] = version("burnish")
        files.replace(out / COMPARISON, json.dumps(found, indent=1) + "\n")
        if config.storage is not None:
            keep(out, config.storage)
        best = {row["method"]: str(out / row["folder"]) for row in found["methods"] if row["runs"]}
        player.film({BASE: config.base, **best})
    lines = f"{table(found)}\n\n{verdict(found)}\n{out / COMPARISON}  (burnish report compare={out})\n"
    sys.stdout.write(plain_text(lines))
    return 0 if found["best"] is not None else 1


def _require_useful(entrant: Entrant, method: Any, base: Any, budget: int) -> None:
    """Refuse a method that cannot refine the base, or that would not learn within the budget."""
    require(method, base)
    decisions, setting, _ = warmup_of(method)
    if entrant.decisions <= decisions:
        raise BurnishError(
            f"budget={budget} control steps are {entrant.decisions} decisions of {entrant.label} and end within "
            f"its warm-up of {decisions}, so nothing would be learnt; raise budget, or lower {setting} in a file "
            "of methods="
        )


def play_alone(plays: Mapping[str, Callable[[], None]], only: str, out: Path, stop: Stop) -> int:
    """One run of a comparison that another process began; exit status."""
    if only not in plays or not (out / CONFIG).is_file():
        raise BurnishError(f"only={only} is no run of a comparison in {out}; there are {', '.join(plays)}")
    plays[only]()
    return 130 if stop.requested else int((out / RUNS / f"{only}.failed").exists())


def _words(config: CompareConfig) -> list[str]:
    """The command that repeats this comparison, without what is as it is by default."""
    usual = to_data(CompareConfig(base="-", methods=["-"]))
    shown = {key: x for key, x in to_data(config).items() if x != usual[key] and key != "resume"}
    return [f"{key}={','.join(x) if isinstance(x, list) else x}" for key, x in shown.items()]


# ---- playing them ----


def _claim(config: CompareConfig, chosen: Mapping[str, Entrant]) -> None:
    path = Path(config.out) / CONFIG
    world = world_words(config.world, config.trust_world) or None
    mine = to_data(config) | {"base_sha256": weights_of(config.base), "world": world}
    mine["data_sha256"] = None if config.data is None else fingerprint(config.data)
    # Recordings may be named later, but not be others than those that were learnt from.
    learnt = any((Path(config.out) / RUNS).glob(f"*{PLAN}"))
    before: Any = settings_of(path).get("entrants") or {}  # older comparisons do not know them
    for label, each in chosen.items():
        # A file that was wrong from the start left a log alone, and may be corrected.
        begun = [x for x in (Path(config.out) / RUNS).glob("*/") if x.name.rpartition("-")[0] == label]
        if begun and before.get(label, each.words) != each.words:
            raise BurnishError(
                f"{config.out} holds runs of {label} with other settings, which one row must not mix; give the changed "
                "file another name, or choose another out=..."
            )
    mine["entrants"] = {**before, **{label: each.words for label, each in chosen.items()}}
    claim(path, mine, to_data(CompareConfig("-", ["-"])), MUTABLE | (set() if learnt else {"data_sha256"}))


class Player:
    """Plays what is not there yet, and tells how far it is."""

    def __init__(self, config: CompareConfig, out: Path, stop: Stop, total: int) -> None:
        self.config, self.out, self.stop, self.total = config, out, stop, total
        self.ended, self.played, self.began = 0, 0, time.perf_counter()
        on = LOCAL if config.on == SLURM else config.on
        self.executor = executor(on, config.device, config.storage, config.cores, config.gpus)
        self.common = [f"device={config.device}", f"threads={max(1, config.cores)}"]
        self.world = world_words(config.world, config.trust_world)

    def play(self, chosen: Entrant, entry: Entry) -> None:
        """One run and its evaluation."""
        folder = self.out / entry.folder

        def refine() -> None:
            words = ["finetune", f"policy.path={self.config.base}", *chosen.words, *self._settings(chosen, entry)]
            self._burnish(words, folder.with_suffix(".log"))
            if self.stop.requested:
                return
            if delivered_by(folder) == BEST:
                self.evaluate(str(folder / BEST), self.out / entry._replace(how=DELIVERED).evaluation)
            self.evaluate(str(folder), self.out / entry.evaluation)

        self._attempt(entry, refine)

    def play_free(self, entry: Entry, minutes: float) -> None:
        """A free baseline, trained for so many minutes, and its evaluation."""
        folder, name, config = self.out / entry.folder, entry.method, self.config

        def train() -> None:
            if name == BASE_GREEDY:
                return self.evaluate(config.base, self.out / entry.evaluation, free_baselines.GREEDY)
            assert config.data is not None, "only those that need no recordings are played without"
            usual = [f"seed={entry.seed}", *free_baselines.UNTRIED, *self.common, *self.world]
            steps = self._planned(entry, minutes, usual)
            words = free_baselines.free_baseline(name, base=config.base, data=config.data, steps=steps)
            self._burnish([*words, *usual, f"out={folder}", "resume=true"], folder.with_suffix(".log"))
            if self.stop.requested:
                return
            if name in free_baselines.ALSO_GREEDY:
                greedy = entry._replace(how=GREEDY)
                self.evaluate(str(folder), self.out / greedy.evaluation, free_baselines.GREEDY)
            self.evaluate(str(folder), self.out / entry.evaluation)

        self._attempt(entry, train)

    def _planned(self, entry: Entry, minutes: float, words: Sequence[str]) -> int:
        """The number of updates of a baseline. It is found once: a run that is resumed must not become another one."""
        path, config = (self.out / entry.folder).with_suffix(PLAN), self.config
        if not path.exists():
            # A name of its own, since a storage may hold the probe of an earlier call.
            scratch = path.with_name(f".{entry.name}-{secrets.token_hex(4)}")
            for left in path.parent.glob(f".{entry.name}-*"):
                files.remove(left)
            play = partial(self._burnish, log=path.with_suffix(".log"))
            where = {"base": config.base, "data": config.data or ""}
            rate = free_baselines.probe(entry.method, play, scratch, **where, words=words)
            files.remove(scratch)
            plan = {"minutes": minutes, "updates_per_s": rate, "steps": free_baselines.steps_for(minutes, rate)}
            files.replace(path, json.dumps(plan) + "\n")
        steps = json.loads(path.read_text(encoding="utf-8"))["steps"]
        sys.stderr.write(f"{entry.name}: {steps:,} updates fit into the {minutes:.1f} minutes of the median run\n")
        return steps

    def _attempt(self, entry: Entry, work: Callable[[], None]) -> None:
        """A failure is written down, and costs no other run."""
        failed = (self.out / entry.folder).with_suffix(".failed")
        if self.stop.requested:
            return
        if (self.out / entry.evaluation).exists():
            self.ended += 1
            return
        files.remove(failed)
        try:
            files.refuse_link(self.out / entry.folder)
            work()
        except BurnishError as error:
            if self.stop.requested:
                return
            files.replace(files.named(failed.parent) / failed.name, f"{error}\n")
            self._tell(entry, f"failed: {str(error).splitlines()[-1]}")
        else:
            if not self.stop.requested:
                self._tell(entry, "is there")

    def _settings(self, chosen: Entrant, entry: Entry) -> list[str]:
        config, total = self.config, chosen.decisions
        words = [f"seed={entry.seed}", f"total={total}", f"out={self.out / entry.folder}", "resume=true", *self.common]
        words += [f"eval_every={max(1, total // config.evaluations)}", f"save_every={max(1, total // 4)}"]
        words += [f"log_every={max(1, total // 100)}", f"eval.confirm={config.confirm_episodes}"]
        return [*words, f"eval.episodes={config.evaluation_episodes}", f"eval.worlds={config.worlds}", *self.world]

    def evaluate(self, policy: str, file: Path, *more: str) -> None:
        """On the seeds that nothing is chosen on."""
        if file.exists():
            return
        scratch, config = files.below(file.parent, file.stem), self.config
        words = ["evaluate", f"policy.path={policy}", f"eval.episodes={config.episodes}", f"out={scratch}", *more]
        words += [f"eval.worlds={config.worlds}", f"seed={config.seed}", *self.world]
        self._burnish([*words, *self.common], file.with_suffix(".log"))
        if self.stop.requested and not (scratch / "evaluation.json").exists():
            return
        self._require_here(scratch / "evaluation.json")
        for name in ("starts.json", ABOUT):
            files.move(scratch / name, file.parent / name)  # the same in every evaluation
        files.move(scratch / "evaluation.json", file)
        files.remove(scratch)

    def film(self, policies: Mapping[str, str]) -> None:
        """All of them on the same first seeds. Policies that cannot be filmed are left out."""
        count, missing = self.config.videos, dict[str, list[str]]()
        for name, policy in policies.items():
            target, scratch = self.out / VIDEOS / name, self.out / VIDEOS / f".{name}"
            if count == 0 or target.exists() or self.stop.requested:
                continue
            words = ["evaluate", f"policy.path={policy}", f"eval.episodes={count}", f"videos={count}"]
            words += [f"seed={self.config.seed}", f"out={scratch}"]
            try:
                files.refuse_link(scratch)
                self._burnish([*words, f"eval.worlds={count}", *self.world, *self.common], self.out / "videos.log")
                files.move(scratch / "videos", target)
            except (BurnishError, OSError) as error:
                missing.setdefault(str(error), []).append(name)
            files.remove(scratch)
        for why, names in missing.items():
            sys.stderr.write(f"no films of {', '.join(names)}: {why}\n")

    def _burnish(self, words: Sequence[str], log: Path) -> None:
        status = self.executor.play(words, log, self.stop)
        if status and not self.stop.requested:
            self._require_here(log)
            said = log.read_text(encoding="utf-8").strip().splitlines()[-3:]
            if said and said[-1].startswith(mistake := f"burnish {words[0]}: "):
                said = [said[-1].removeprefix(mistake)]
            raise BurnishError(f"`burnish {words[0]}` ended with status {status}: " + " ".join(said))

    def _require_here(self, file: Path) -> None:
        if not file.is_file():
            raise BurnishError(
                f"a task of on={self.config.on} has ended, but {file} is not here; nodes must share the folder of "
                "out=... under the same path, or take storage=..."
            )

    def _tell(self, entry: Entry, how: str) -> None:
        self.ended, self.played = self.ended + 1, self.played + 1
        minutes = (time.perf_counter() - self.began) / 60
        left = minutes / self.played * (self.total - self.ended)
        if self.config.storage is not None:
            keep(self.out, self.config.storage)
        sys.stderr.write(f"{entry.name} {how} ({self.ended} of {self.total}; about {left:.0f} minutes left)\n")
