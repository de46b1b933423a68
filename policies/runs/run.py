"""A run folder: one training run on disk, which can be interrupted at any time and resumed exactly.

    config.yaml       the resolved configuration
    metrics.jsonl     one line of numbers per logged step; keys under ``time/`` differ between equal runs, others do
                      not; those that end in ``_s`` are totals of all sittings
    tensorboard/      the same numbers for TensorBoard
    tracking.json     by which other trackers know this run, where some are asked for (`tracking.py`)
    checkpoints/      00001000/, 00002000/, ...
    best/             the policy to deploy, if it is better than the start; how it was chosen lies in candidate/,
                      start.json and confirm.json (`best.py`)

A training loop reads like this; ``steps`` counts from 1 to ``total`` and stops early, after a step that knows it is the
last (``run.stopping``), once Ctrl-C was pressed:

    with Run(out, config, resume=resume) as run:
        if checkpoint := run.latest():
            learner.load_state_dict(checkpoint.children["learner"].state)
        for step in run.steps(total):
            metrics = learner.update()
            if step % log_every == 0:
                run.log(step, metrics)
            if step % save_every == 0 or step == total or run.stopping:
                run.save(step, {"policy": dict(config=..., state=...), "learner": dict(config=..., state=...)})

Log before saving: resuming cuts ``metrics.jsonl`` back to the step of the checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from tqdm import tqdm

from ..core.config import differences, to_data
from ..core.errors import BurnishError
from ..core.files import below, growing, locked, move, named, refuse_link, remove, replace
from ..core.ranks import ALONE, Ranks
from .checkpoint import Checkpoint, load, newest, number, numbered, prune, save
from .interrupt import Stop, interruptible
from .manifest import parse, plain_yaml
from .stopwatch import Stopwatch
from .tracking import IDENTITY, TRACKERS, Trackers

# Is told every line that is logged; a true answer stops the run as Ctrl-C would.
OnLog = Callable[[int, Mapping[str, float]], Any]

# Seconds that add up, and no rates.
_TOTAL = re.compile(r"time/(?!.*_per_s$).*_s")
CONFIG, METRICS, CHECKPOINTS, TENSORBOARD, LOCK = "config.yaml", "metrics.jsonl", "checkpoints", "tensorboard", ".lock"
START = "start.json"  # the evaluation of the policy that the run starts from (`best.py`)
# Everything that a run writes, besides its empty folder of checkpoints, before there is a policy of it.
BEFORE_A_POLICY = (CONFIG, METRICS, TENSORBOARD, START, IDENTITY, *TRACKERS)
LARGEST_METRICS = 1 << 28  # bytes; a hundred thousand lines of a long log have half of it


class Run:
    """The folder is touched on entering the ``with`` block, and only once nothing stands against it.

    With ``resume`` a new or empty folder is started afresh, so that the same command may be repeated until it is done.
    So is, with ``resume`` or without, the folder of a run that failed before it had saved anything.
    ``changeable`` names the settings (dotted; a name covers what is below it) that may differ from the saved ones.
    Where stderr is no terminal there is no progress bar, but a line every ``progress_every_s`` seconds if that is set.
    ``trackers`` are rows of the table in `tracking.py` that are told the numbers too, and so is ``on_log``. Of several
    ``ranks`` the first has such a run, and the others follow it (``FollowingRun``). A caller of several runs hears a
    Ctrl-C for them (``stop``), and has the progress of one of them ``shown``;
    without ``say_fresh`` no line says that there is nothing to resume. Progress is ``counted`` in steps, or up to
    so many of a unit, by how many there are after a step.
    """

    def __init__(
        self,
        path: Path | str,
        config: Any,
        *,
        resume: bool = False,
        changeable: Collection[str] = ("resume",),
        keep: int = 3,
        tensorboard: bool = True,
        progress_every_s: float | None = None,
        trackers: Sequence[str] = (),
        on_log: OnLog | None = None,
        ranks: Ranks = ALONE,
        stop: Stop | None = None,
        shown: bool = True,
        say_fresh: bool = True,
        counted: tuple[int, str, Callable[[int], int]] | None = None,
    ) -> None:
        if keep < 1:
            raise BurnishError(f"keep={keep} would remove every checkpoint; it must be at least 1")
        self.path = Path(path)
        try:
            self._config_text = yaml.safe_dump(to_data(config), sort_keys=False, allow_unicode=True)
        except yaml.YAMLError as error:
            raise BurnishError(f"the configuration of a run must be plain data: {error}") from error
        self.config: dict[str, Any] = plain_yaml(self._config_text)
        self.checkpoints = self.path / CHECKPOINTS
        self.start = 0  # the step of the checkpoint that this run continues; 0 for a new run
        self.stopping = False  # this step is the last one: save, the loop ends after it
        self._resume, self._changeable, self._keep = resume, frozenset(changeable), keep
        self._tensorboard, self._progress_every_s = tensorboard, progress_every_s
        self._trackers, self._on_log = Trackers(trackers), on_log
        self._latest: Checkpoint | None = None
        self._ranks, self._shown, self._say_fresh, self._stop_of_caller = ranks, shown, say_fresh, stop
        self._counted = counted
        self.watch = Stopwatch()  # of what happens between the steps: "evaluation", "saving"
        self._before: dict[str, float] = {}  # seconds of earlier sittings
        self._stop = Stop()
        self._exit = ExitStack()

    def __enter__(self) -> Run:
        with ExitStack() as stack:
            self._check()
            taken = f"another process is writing {self.path}; wait for it, or use another out="
            stack.enter_context(locked(named(self.path) / LOCK, taken))
            resumed = self._check()  # once more, because the process that had the lock may have saved meanwhile
            for each in below(self.path, CHECKPOINTS).iterdir():
                refuse_link(each)
            if not resumed:
                for name in BEFORE_A_POLICY:
                    remove(self.path / name)
            if resumed:
                self._latest = newest(self.checkpoints)
            elif self._resume and self._say_fresh:
                sys.stderr.write(f"nothing was saved in {self.path} yet: this run begins at its first step\n")
            self.start = self._latest.state["step"] if self._latest else 0
            self._before = self._rewind()
            replace(self.path / CONFIG, self._config_text)
            self._metrics = stack.enter_context(growing(self.path / METRICS))
            self._writer = None
            if self._tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

                purge = self.start + 1 if resumed else None
                # Files of its own, whose names could not be known before.
                suffix = f".{secrets.token_hex(4)}"
                folder = below(self.path, TENSORBOARD)
                self._writer = SummaryWriter(str(folder), purge_step=purge, filename_suffix=suffix)
                stack.callback(self._writer.close)
            stack.callback(self._trackers.close)
            self._trackers.open(self.path, self.config, self.start)
            self._stop = self._stop_of_caller or stack.enter_context(interruptible())
            self._opened_s = time.perf_counter()
            self._ranks.of_first(self.start)  # the others begin now
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    @property
    def interrupted(self) -> bool:
        """Ctrl-C was pressed, whether or not a step has seen it yet."""
        return self._stop.requested

    def latest(self) -> Checkpoint | None:
        """The checkpoint to continue from, None for a new run. Handed over once, so that its memory can be freed."""
        latest, self._latest = self._latest, None
        return latest

    def steps(self, total: int) -> Iterator[int]:
        """``start + 1, ..., total``, with a progress bar. A stop is noticed before a step, never after one, so that
        every step can see in ``stopping`` whether it has to save."""
        if self._latest is not None:
            raise RuntimeError("this run is resumed: load what run.latest() returns before the first step")
        began_s = shown_s = time.perf_counter()
        terminal = sys.stderr.isatty()
        most, unit, reached = self._counted or (total, "step", lambda step: step)
        initial = min(reached(self.start), most)
        with progress_bar(most, unit, initial, shown=self._ranks.first and self._shown) as bar:
            for step in range(self.start + 1, total + 1):
                self.stopping = self._ranks.any(self._stop.requested)
                yield step
                now = min(reached(step), most)
                bar.update(now - bar.n)
                now_s = time.perf_counter()
                every_s = self._progress_every_s if self._shown else None
                if not terminal and every_s is not None and (now_s - shown_s >= every_s or step == total):
                    shown_s = now_s
                    meter = tqdm.format_meter(now, most, now_s - began_s, initial=initial, unit=unit, ncols=100)
                    sys.stderr.write(meter + "\n")
                if self.stopping:
                    return

    def log(self, step: int, metrics: Mapping[str, Tensor | float]) -> None:
        row = self._row(metrics)
        # JSON knows no NaN: such numbers are written as words, which float() reads.
        line = {name: value if math.isfinite(value) else repr(value) for name, value in row.items()}
        self._metrics.write(json.dumps({"step": step, **line}) + "\n")
        self._metrics.flush()
        if self._writer is not None:
            for name, value in row.items():
                self._writer.add_scalar(name, value, step)
        self._trackers.log(step, row)
        self._tell(step, row)

    def save(
        self,
        step: int,
        children: Mapping[str, Mapping[str, Any]],
        *,
        metrics: Mapping[str, Any] | None = None,
    ) -> Path:
        os.fsync(self._metrics.fileno())  # a checkpoint must never survive the metrics that led to it
        target = self.checkpoints / number(step)
        before = next(reversed(numbered(self.checkpoints)), None)
        save(target, config=self.config, state={"step": step}, metrics=metrics, children=children, before=before)
        prune(self.checkpoints, self._keep)
        return target

    def _row(self, metrics: Mapping[str, Tensor | float]) -> dict[str, float]:
        """Tensors become numbers here and nowhere earlier: this is where the device is waited for."""
        row = {name: float(value) for name, value in metrics.items()}
        row |= {**self.watch.metrics(), "time/elapsed_s": time.perf_counter() - self._opened_s}
        return {name: x + self._before.get(name, 0.0) for name, x in row.items()}

    def _tell(self, step: int, row: Mapping[str, float]) -> None:
        if self._on_log is not None and self._on_log(step, row):
            self._stop.requested = True

    def _check(self) -> bool:
        """Whether there is a run to continue; whatever stands against it is said before anything is touched."""
        if not occupied(self.path, self._resume):
            return False
        if not (self.path / CONFIG).is_file():
            raise BurnishError(f"{self.path} is not a run folder, since it has no {CONFIG}; use another out=")
        different = [
            f"{name} ({old!r} saved, {new!r} asked)"
            for name, old, new in differences(parse(self.path / CONFIG, plain_yaml), self.config)
            if not any(name == free or name.startswith(f"{free}.") for free in self._changeable)
        ]
        if different:
            shown = ", ".join(different[:3]) + (f" and {len(different) - 3} more" if len(different) > 3 else "")
            raise BurnishError(f"{self.path} was made with other settings: {shown}; restore them or use another out=")
        return True

    def _rewind(self) -> dict[str, float]:
        """Undo what came after the checkpoint: an interrupted and resumed run ends up equal to an uninterrupted one.
        Returns the seconds that earlier sittings took, as far as they are logged, by the names in the log."""
        for path in numbered(self.checkpoints):
            if int(path.name) > self.start:  # broken, else it would be the latest
                move(path, path.with_name(f"{path.name}.broken-{time.time_ns()}"))
        prune(self.checkpoints, self._keep)
        path = self.path / METRICS
        if path.exists():
            kept = [line for line in _lines(path) if 0 <= _step(line) <= self.start]
            kept = kept if self._latest is not None else []
            replace(path, "".join(f"{line}\n" for line in kept))
            rows = [json.loads(line) for line in kept]
            return {name: float(x) for row in rows for name, x in row.items() if _TOTAL.fullmatch(name)}
        return {}


class UnsavedRun(Run):
    """A run without a folder: what is logged is handed on, what would be saved is not."""

    def __init__(self, on_log: OnLog | None = None) -> None:
        super().__init__("", {}, tensorboard=False, on_log=on_log)

    def __enter__(self) -> UnsavedRun:
        self._stop = self._exit.enter_context(interruptible())
        self._opened_s = time.perf_counter()
        return self

    def log(self, step: int, metrics: Mapping[str, Tensor | float]) -> None:
        self._tell(step, self._row(metrics))

    def save(self, step: int, children: Mapping[str, Mapping[str, Any]], **unused: Any) -> Path:
        return self.path


class FollowingRun(UnsavedRun):
    """The run of a rank that is not the first: it begins where the first one does, in the same folder, and writes
    nothing."""

    def __init__(self, path: Path | str, ranks: Ranks) -> None:
        super().__init__()
        self.path, self.checkpoints, self._ranks = Path(path), Path(path) / CHECKPOINTS, ranks

    def __enter__(self) -> FollowingRun:
        super().__enter__()
        self.start = self._ranks.of_first(0)
        if self.start:
            self._latest = load(self.checkpoints / number(self.start))
        return self


def occupied(path: Path | str, resume: bool) -> bool:
    """Whether something lies where a run is to be written; then only ``resume`` may go on. Verbs ask at first."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise BurnishError(f"{path} is a file, so no run can be written there; use another out=")
    if not path.exists() or _holds_nothing(path):
        return False
    if not resume:
        raise BurnishError(f"{path} is not empty; use resume=true or another out=")
    return True


def find_policy(path: Path | str, device: torch.device | str = "cpu") -> Checkpoint:
    """The policy in ``path``: a run folder (its newest readable checkpoint), one of its checkpoints, or the policy."""
    path = Path(path)
    if (path / CHECKPOINTS).is_dir():
        found = newest(path / CHECKPOINTS, device, child="policy")
        if found is None:
            raise BurnishError(f"the run {path} has saved no checkpoint yet")
        return found
    return load(path / "policy" if (path / "policy").is_dir() else path, device)


def read_metrics(path: Path | str) -> list[dict[str, float]]:
    """The lines of ``metrics.jsonl`` in the run folder ``path``; a last line that was torn by a kill is left out."""
    lines = _lines(Path(path) / METRICS)
    return [{name: float(value) for name, value in json.loads(line).items()} for line in lines if _step(line) >= 0]


def progress_bar(total: int, unit: str, initial: int = 0, shown: bool = True) -> tqdm:
    """On a terminal; silent elsewhere. Its size is given, because a terminal that claims to have no rows or columns (as
    in some containers) would be shown an empty bar."""
    size = shutil.get_terminal_size()
    terminal = sys.stderr.isatty()
    columns = min(100, size.columns)
    return tqdm(
        total=total, initial=initial, unit=unit, disable=not (terminal and shown), ncols=columns, nrows=size.lines
    )


@contextmanager
def episodes_bar(total: int, begun: int = 0) -> Iterator[Callable[[int, int], None]]:
    """A progress bar, for the argument ``progress`` of `evaluate` and of `stream`; ``begun`` episodes are over."""
    with progress_bar(total, "episode", begun) as bar:

        def show(finished: int, _total: int) -> None:
            bar.update(begun + finished - bar.n)

        yield show


def _holds_nothing(path: Path) -> bool:
    """The folder is empty, or a run failed there before its first checkpoint and its first candidate."""
    names = {entry.name for entry in path.iterdir()}
    if names <= {LOCK}:
        return True
    began = names >= {LOCK, CHECKPOINTS} and names <= {LOCK, CHECKPOINTS, *BEFORE_A_POLICY}
    return began and not any((path / CHECKPOINTS).iterdir())


def _lines(path: Path) -> list[str]:
    """Of a run that may be untrusted: to open a pipe, or to read a device, may take for ever."""
    size = path.stat().st_size
    if not path.is_file() or size > LARGEST_METRICS:
        raise BurnishError(f"{path} is no file of at most {LARGEST_METRICS} bytes, and so no log of a run")
    return path.read_text(encoding="utf-8").splitlines()


def _step(line: str) -> int:
    """The step of a line of metrics, or -1 if it is torn."""
    try:
        return json.loads(line)["step"]
    except (ValueError, RecursionError):
        return -1
