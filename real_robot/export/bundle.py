"""The exported form of a policy: a folder of data, in which nothing can run.

    policy.json    what it sees and does (`Schema`), which noise it takes, where it comes from, and the sha256 of the
                   other files
    policy.onnx    the network that makes a chunk of actions out of an observation, noise and committed actions
    tick.onnx      if there is one: the network that corrects each action (`base_action`) when its time has come
    parity.json    how far it is from the policy that it was exported from, measured at export

`read` believes nothing: other files than these, links, pipes, duplicate or unknown keys, NaN, sizes beyond the limits
below and hashes that differ are refused, each by a sentence, and nothing outside the folder is opened. The networks run
within the bounds of `network.py`. Hashes find damage, not forgers: a forged bundle can act badly, and against that
there is the guard.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import Refused

VERSION = 2
POLICY, PARITY = "policy.json", "parity.json"
PLAN, TICK = "policy.onnx", "tick.onnx"
LIMITS = {POLICY: 16 * 2**20, PARITY: 2**20, PLAN: 512 * 2**20, TICK: 512 * 2**20}
MAX_NUMBERS = 2**24  # of one observation, and of all noise of a decision
MAX_CHUNK = 2**18


@dataclass(frozen=True)
class Schema:
    """Inputs and outputs. Shapes are those of one observation, with ``history`` frames in front where it is stacked.

    A chunk of ``horizon`` actions in [-1, 1] begins ``start`` ticks before now; ``execute`` of them are played, and
    [-1, 1] stands for [low, high], the actuators' limits in training."""

    obs: Mapping[str, tuple[int, ...]]
    low: tuple[float, ...]
    high: tuple[float, ...]
    horizon: int
    execute: int
    start: int = 0
    history: int = 1
    goal_free: bool = False  # may be asked without its goal
    noise_shape: tuple[int, ...] | None = None  # of what ``act(noise=)`` takes
    control_hz: float | None = None
    action_mode: str | None = None  # what the numbers of an action mean
    pixels: str | None = None  # how the cameras of training were drawn
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # observation or "action": of its numbers

    def __post_init__(self) -> None:
        for name, least in (("horizon", 1), ("execute", 1), ("start", 0), ("history", 1)):
            if type(getattr(self, name)) is not int or getattr(self, name) < least:
                raise Refused(
                    f"{name}={getattr(self, name)!r} of the policy must be a whole number of at least {least}"
                )
        if self.start + self.execute > self.horizon:
            raise Refused(f"start={self.start} and execute={self.execute} exceed horizon={self.horizon} of the policy")
        if not (0 < len(self.low) == len(self.high) and all(a < b for a, b in zip(self.low, self.high, strict=True))):
            raise Refused("the limits of the policy's actions need low < high, number by number")
        if not self.obs or self.horizon * len(self.low) > MAX_CHUNK:
            raise Refused("the policy observes nothing, or its chunk is beyond all sizes")
        if sum(map(math.prod, self.obs.values())) > MAX_NUMBERS:
            raise Refused(f"what the policy observes is too large: more than {MAX_NUMBERS} numbers at once")
        for key, shape in self.obs.items():
            stack = shape[:1] if stacked_by_history(key) and self.history > 1 else (self.history,)
            if stack != (self.history,):
                raise Refused(f"the observation {key!r} has the shape {shape}, which lacks its history")
        if self.control_hz is not None and not 0 < self.control_hz < math.inf:
            raise Refused(f"control_hz={self.control_hz} of the policy must be a positive number")

    @property
    def dim(self) -> int:
        return len(self.low)

    @classmethod
    def from_data(cls, data: Any) -> Schema:
        known = {f.name for f in fields(cls)}
        given = _object(data, "schema")
        if not {"obs", "low", "high", "horizon", "execute"} <= set(given) <= known:
            raise Refused(f"the schema of the bundle holds {sorted(given)[:20]}, and should hold {sorted(known)}")
        changes: dict[str, Any] = {
            "obs": {key: _shape(shape, key) for key, shape in _object(given["obs"], "schema.obs").items()},
            "low": _numbers(given["low"], "low"),
            "high": _numbers(given["high"], "high"),
        }
        changes["names"] = {key: _words(x, key) for key, x in _object(given.get("names", {}), "schema.names").items()}
        if given.get("noise_shape") is not None:
            changes["noise_shape"] = _shape(given["noise_shape"], "noise_shape")
        if given.get("control_hz") is not None:
            changes["control_hz"] = _numbers([given["control_hz"]], "control_hz")[0]
        words = (given.get("action_mode"), given.get("pixels"))
        if type(given.get("goal_free", False)) is not bool or not all(x is None or isinstance(x, str) for x in words):
            raise Refused("goal_free of the policy must be true or false, action_mode and pixels words or null")
        return cls(**{**given, **changes})


def stacked_by_history(key: str) -> bool:
    """Whether an observation is stacked over time where the policy has a history."""
    return key in ("state", "environment_state") or key.startswith("image.")


def is_image(key: str) -> bool:
    """Whether an observation key is that of a camera or of a goal image."""
    return key.startswith(("image.", "goal_image."))


@dataclass(frozen=True)
class NoiseInput:
    """Standard normals that the network reads under the name ``noise.<position in the list>``."""

    shape: tuple[int, ...]
    rows: int = 1  # candidates
    split: bool = False  # each candidate has a stream of its own
    drawn: bool = True  # False: zero, unless it is given

    @classmethod
    def from_data(cls, data: Any) -> NoiseInput:
        given = _object(data, "noise")
        if set(given) != {f.name for f in fields(cls)}:
            raise Refused(f"a noise of the bundle holds {sorted(given)[:20]}")
        made = cls(_shape(given["shape"], "noise"), given["rows"], given["split"], given["drawn"])
        right = type(made.rows) is int and 1 <= made.rows <= 4096 and type(made.split) is type(made.drawn) is bool
        if not right or made.rows * math.prod(made.shape) > MAX_NUMBERS or (made.rows > 1 and not made.split):
            raise Refused(f"a noise of the bundle makes no sense: {str(data)[:100]}")
        return made


@dataclass(frozen=True)
class Bundle:
    """An exported policy in memory: schema, ONNX networks as bytes, and facts about its origin."""

    schema: Schema
    networks: Mapping[str, bytes]  # PLAN, and TICK if it has one
    noise: tuple[NoiseInput, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)  # kind of policy, revisions, hashes of data, world
    parity: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not {PLAN} <= set(self.networks) <= {PLAN, TICK}:
            raise Refused(f"the networks of a bundle are {PLAN} and {TICK}, not {sorted(self.networks)[:10]}")
        if sum(noise.rows * math.prod(noise.shape) for noise in self.noise) > MAX_NUMBERS:
            raise Refused(f"the policy draws more than {MAX_NUMBERS} numbers of noise for one decision")


def write(bundle: Bundle, folder: Path | str) -> Path:
    """Whole or not at all; a folder that is there already stays as it is."""
    from ...policies.core.errors import BurnishError  # a robot that only reads does without these two
    from ...policies.core.files import write_folder

    files = {PARITY: _json(bundle.parity), **bundle.networks}
    described = {
        "format": "burnish policy",
        "version": VERSION,
        "about": bundle.about,
        "schema": {key: x for key, x in asdict(bundle.schema).items() if x or key != "names"},  # as in older ones
        "noise": [asdict(noise) for noise in bundle.noise],
        "files": {name: _sha256(content) for name, content in files.items()},
    }
    try:
        return write_folder(folder, {**files, POLICY: _json(described)})
    except BurnishError as error:
        raise Refused(str(error)) from error


def read(folder: Path | str) -> Bundle:
    """Everything is verified before anything is believed; `runtime.load` reads the networks too."""
    content = _files(Path(folder))
    data = _object(_parse(content[POLICY], POLICY), POLICY)
    if data.get("format") != "burnish policy" or data.get("version") != VERSION:
        raise Refused(f"{folder} is no bundle of version {VERSION}, which this Burnish reads; export the policy again")
    keys = {"format", "version", "about", "schema", "noise", "files"}
    if set(data) != keys:
        raise Refused(f"{POLICY} must hold {sorted(keys)}, and holds {sorted(data)[:20]}")
    hashes = _object(data["files"], "files")
    if set(hashes) != set(content) - {POLICY}:
        raise Refused(f"{POLICY} lists the files {sorted(hashes)[:10]}, and beside it lie {sorted(content)}")
    for name, written in hashes.items():
        if _sha256(content[name]) != written:
            raise Refused(f"{name} was changed after it was written: its sha256 differs")
    if not isinstance(data["noise"], list) or len(data["noise"]) > 10_000:
        raise Refused("the noise of a bundle is a list")
    return Bundle(
        schema=Schema.from_data(data["schema"]),
        networks={name: content[name] for name in (PLAN, TICK) if name in content},
        noise=tuple(NoiseInput.from_data(x) for x in data["noise"]),
        about=_object(data["about"], "about"),
        parity=_object(_parse(content[PARITY], PARITY), PARITY),
    )


def _files(folder: Path) -> dict[str, bytes]:
    """The files of a bundle, opened by their names within the folder: no link is followed, nor any path."""
    try:
        here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise Refused(f"{folder} is no bundle: it cannot be opened as a folder ({error.strerror})") from error
    try:
        names = set(os.listdir(here))
        strange = sorted(names - set(LIMITS))
        lacking = sorted({POLICY, PARITY, PLAN} - names)
        if strange or lacking:
            what = f"holds {strange[0][:60]!r}, which is no part of one" if strange else f"lacks {lacking[0]}"
            raise Refused(f"{folder} is no bundle: it {what}")
        return {name: _content(here, name) for name in sorted(names)}
    finally:
        os.close(here)


def _content(here: int, name: str) -> bytes:
    try:
        # Without waiting, should it be a pipe.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
    except OSError as error:
        raise Refused(f"{name} of the bundle is a link, or cannot be opened ({error.strerror})") from error
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise Refused(f"{name} of the bundle is no plain file")
        if about.st_size > LIMITS[name]:
            raise Refused(f"{name} of the bundle has {about.st_size} bytes, and {LIMITS[name]} are allowed")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(LIMITS[name])
    finally:
        os.close(descriptor)


def _parse(content: bytes, name: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise Refused(f"{name} has an object in which a key stands twice")
        return found

    def constant(word: str) -> Any:
        raise Refused(f"{name} holds {word}, which is no number")

    try:
        return json.loads(content.decode(), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:  # also of text that is no UTF-8, and of nesting without end
        raise Refused(f"{name} is malformed: {' '.join(str(error).split())[:200]}") from error


def _json(data: Any) -> bytes:
    try:
        return (json.dumps(data, indent=1, allow_nan=False, sort_keys=True) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise Refused(f"a bundle holds plain data and finite numbers, and cannot hold this: {error}") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _object(data: Any, name: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise Refused(f"{name} of the bundle must be an object, and is {str(data)[:60]}")
    return data


def _shape(data: Any, name: str) -> tuple[int, ...]:
    if not isinstance(data, list | tuple) or len(data) > 8 or not all(type(n) is int and 0 <= n < 2**40 for n in data):
        raise Refused(f"{name[:60]!r} of the bundle has no sensible shape or offsets: {str(data)[:60]}")
    return tuple(data)


def _words(data: Any, name: str) -> tuple[str, ...]:
    if not isinstance(data, list | tuple) or not all(isinstance(x, str) for x in data):
        raise Refused(f"the names of {name[:60]!r} in the bundle must be a list of words, not {str(data)[:60]}")
    return tuple(data)


def _numbers(data: Any, name: str) -> tuple[float, ...]:
    given: list[Any] = list(data) if isinstance(data, list | tuple) and len(data) <= 4096 else [None]
    if not all(type(x) in (int, float) and abs(x) < 1e30 for x in given):
        raise Refused(f"{name!r} of the bundle must be finite numbers, not {str(data)[:60]}")
    return tuple(float(x) for x in given)
