"""Trackers for the numbers of a run: wandb, trackio and rerun, each of them an extra, behind one interface.

``metrics.jsonl`` and TensorBoard are written by `run.py`, always and first. A tracker is a guest: that its package is
missing is said before anything is trained, and whatever goes wrong with it later costs one warning and the tracker,
never the training.

All trackers know a run by the identity in its ``tracking.json``, so a resumed run goes on where it is shown already.
Resuming may repeat steps that came after the checkpoint. They are told again, at the same steps and with the same
numbers: none of these services can take a number back.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import yaml

from ..core.errors import BurnishError, did_you_mean, reason
from ..core.files import below, for_guests, replace, vacant
from .checkpoint import number
from .manifest import parse

IDENTITY = "tracking.json"
PROJECT = "burnish"
FINISH_S = 120  # what wandb may take to upload what is left; after that the data stays on the disk

_ID = re.compile(r"[0-9a-f]{8}")
_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """The interface of a tracker: metrics of a step by name, and an end."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Tracked:
    """The facts of a run for a tracker. ``id`` and ``name`` are the same in every sitting; each begins at ``start``."""

    id: str
    name: str
    folder: Path
    config: Mapping[str, Any]
    start: int


class Wandb:
    """https://wandb.ai, or offline in the run folder, from where ``wandb sync`` uploads it: so if there is no key, if
    the server cannot be reached, or as WANDB_MODE says. WANDB_PROJECT and WANDB_ENTITY choose the place."""

    def __init__(self, wandb: Any, run: Tracked) -> None:
        for_guests(run.folder, "wandb")  # where it writes
        self._run = wandb.init(
            id=run.id,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            mode=None if _reachable(wandb) else "offline",
            resume="allow",
            reinit="create_new",  # the caller may have a wandb run of its own
            settings=wandb.Settings(**_taken(wandb.Settings, console="off", finish_timeout=FINISH_S)),
        )
        # Its own steps only go up, but those of a resumed run may repeat: ours is one more number, the horizontal axis.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


def _reachable(wandb: Any) -> bool:
    """Asked beforehand, because ``wandb.init`` would ask for a key at the keyboard, and a failed one blocks its id."""
    if "WANDB_MODE" in os.environ:
        return True  # or not: the user has decided
    try:
        found, why = wandb.login(**_taken(wandb.login, prompt=False, verify=True)), "there is no key, see `wandb login`"
    except Exception as error:  # no network, a wrong key, a proxy: whatever it is, it records offline
        found, why = False, reason(error)
    if not found:
        _log.warning("wandb records offline, for `wandb sync` to upload: %s", why)
    return found


def _taken(call: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those that ``call`` takes: the wandb that LeRobot pins (0.24) lacks some, and may ask for a key in a terminal."""
    return {name: value for name, value in arguments.items() if name in inspect.signature(call).parameters}


class Trackio:
    """On this machine; ``trackio show --project burnish`` shows it. TRACKIO_DIR says where, and TRACKIO_SPACE_ID or
    TRACKIO_SERVER_URL send it elsewhere."""

    def __init__(self, trackio: Any, run: Tracked) -> None:
        self._trackio = trackio
        self._run = trackio.init(project=PROJECT, name=run.name, config=dict(run.config), resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()  # of the run begun last: it knows but one at a time


class Rerun:
    """Files for the viewer of rerun. None can be continued, so each sitting writes one, named by the step that it
    begins after; opened together they are one recording. Sittings that begin alike replace each other."""

    def __init__(self, rerun: Any, run: Tracked) -> None:
        self._rerun = rerun
        folder = below(run.folder, "rerun")
        self._recording = rerun.RecordingStream(PROJECT, recording_id=run.id)
        self._recording.save(str(vacant(folder / f"{number(run.start)}.rrd")))
        settings = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
        self._recording.log("config", rerun.TextDocument(settings), static=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._recording.set_time("step", sequence=step)
        for name, value in metrics.items():
            self._recording.log(name.split("/"), self._rerun.Scalars(value))

    def close(self) -> None:
        self._recording.flush()
        self._recording.disconnect()


class TrackerKind(NamedTuple):
    """``make`` is called with the imported package and with what is tracked. The extra is called like the row."""

    package: str
    make: Callable[[Any, Tracked], Tracker]
    doc: str


TRACKERS: dict[str, TrackerKind] = {
    "wandb": TrackerKind("wandb", Wandb, "Weights & Biases; offline without a key or a network"),
    "trackio": TrackerKind("trackio", Trackio, "Hugging Face's Trackio, on this machine"),
    "rerun": TrackerKind("rerun", Rerun, "files for the viewer of Rerun, in the run folder"),
}


class Trackers:
    """The trackers of one run, in the order in which they were named; nothing is opened before ``open``."""

    def __init__(self, names: Sequence[str]) -> None:
        self._packages = {name: _package(name) for name in names}
        self._open: dict[str, Tracker] = {}

    def open(self, folder: Path, config: Mapping[str, Any], start: int) -> None:
        for name, package in self._packages.items():

            def begin(name: str = name, package: Any = package) -> None:
                run = Tracked(**_identity(folder), folder=folder, config=config, start=start)
                self._open[name] = TRACKERS[name].make(package, run)

            self._survive(name, begin)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, tracker in list(self._open.items()):
            self._survive(name, lambda tracker=tracker: tracker.log(step, metrics))

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._survive(name, tracker.close)
        self._open.clear()

    def _survive(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever it is: it is a guest's
            self._open.pop(name, None)
            _log.warning(
                "track=%s failed and is switched off, the training goes on: %s (%s)",
                name,
                reason(error),
                type(error).__name__,
            )


def _package(name: str) -> Any:
    if name not in TRACKERS:
        raise BurnishError(f"track={name} is not a choice; {did_you_mean(name, TRACKERS)}")
    try:
        return import_module(TRACKERS[name].package)
    except Exception as error:  # packages that do not fit each other raise whatever they like
        raise BurnishError(
            f"track={name} needs a package that does not load ({reason(error)}); pip install 'burnish[{name}]'"
        ) from error


def _identity(folder: Path) -> dict[str, str]:
    """By which a run is known to its trackers, wherever its folder goes; made when it is first tracked."""
    path = folder / IDENTITY
    if not path.exists():
        made = secrets.token_hex(4)
        replace(path, json.dumps({"id": made, "name": f"{folder.resolve().name}-{made}"}) + "\n")
    data = parse(path, json.loads)
    if not isinstance(data, dict) or not all(isinstance(data.get(key), str) for key in ("id", "name")):
        raise BurnishError(f"{path} is malformed: it must hold an id and a name")
    if not _ID.fullmatch(data["id"]):
        raise BurnishError(f"{path} is malformed: the id {data['id']!r} must be eight hexadecimal digits")
    return {"id": data["id"], "name": data["name"]}
