"""The table of policies that are not ours but that settings can name: where they are, and how they are found again.

A checkpoint of what was refined on top of one remembers its settings and the world that it was made for, as data:

    {policy: external, kind: remote, config: {url: ...}, world: {...}, spec: {...}}

so that loading it connects to it again, or says what is missing. ``place`` is the setting that says where it is:
things move, and a place can be given anew. A server is then sent the user's key; one that only a file names is not.

A checkpoint may be untrusted, and nothing tells it from an own one. So its word alone leads to no other machine and
to no file elsewhere: each kind says by ``doubt`` whether the user must say the place too (policy.base=...).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..core.config import from_data, to_data
from ..core.errors import BurnishError
from ..core.spec import EnvSpec
from ..core.types import Obs
from . import lerobot, onnx, remote
from .lerobot import LeRobotConfig, LeRobotPolicy
from .onnx import OnnxConfig, OnnxPolicy
from .plugins import CallableConfig, InstalledPolicy
from .remote import RemoteConfig, RemotePolicy


class ExternalKind(NamedTuple):
    """One row of the table of external policies: configuration, builder, and the setting that is its place."""

    config: type
    make: type  # from (config, world: EnvSpec)
    place: str  # the setting that says where it is
    free: tuple[str, ...]  # the settings that do not change what it answers
    doc: str
    # (config, checkpoint) -> why a checkpoint's word is not enough for that place; empty where it is
    doubt: Callable[[Any, str], str] = lambda config, checkpoint: ""


EXTERNAL_KINDS: dict[str, ExternalKind] = {
    "remote": ExternalKind(
        RemoteConfig,
        RemotePolicy,
        "url",
        ("url", "batch", "timeout_s"),
        "a server that speaks openpi's protocol",
        remote.doubt,
    ),
    "onnx": ExternalKind(
        OnnxConfig, OnnxPolicy, "path", ("path", "threads"), "an ONNX file, run by onnxruntime", onnx.doubt
    ),
    "lerobot": ExternalKind(
        LeRobotConfig,
        LeRobotPolicy,
        "path",
        ("path", "device", "threads", "batch", "start_s", "timeout_s"),
        "any policy of LeRobot, played by LeRobot in a Python of its own",
        lerobot.doubt,
    ),
    "callable": ExternalKind(CallableConfig, InstalledPolicy, "name", (), "a policy of an installed package"),
}


def connect(config: Any, world: EnvSpec, sample: Obs | None = None) -> Any:
    """The policy that ``config`` names, in a world; ``sample`` are observations of it, which it may be asked about."""
    if isinstance(config, RemoteConfig):
        return RemotePolicy(config, world, sample)
    return _kind(config).make(config, world)


def place_of(config: Any) -> str:
    """The path, URL or name by which an external policy is found again."""
    return getattr(config, _kind(config).place)


def identity(policy: Any) -> dict[str, Any]:
    """The identity of the policy, as far as it can be seen; its location is no part of it."""
    kind = _kind(policy.config)
    settings = {key: x for key, x in to_data(policy.config).items() if key not in kind.free}
    return {"make": kind.make.__name__, **settings, "spec": to_data(policy.spec.to_dict())}


def described(policy: Any) -> dict[str, Any]:
    """The settings that a checkpoint stores; objects that only a program can hand in are left out."""
    config = getattr(policy, "config", None)
    names = [name for name, kind in EXTERNAL_KINDS.items() if type(config) is kind.config]
    return {"kind": names[0], "config": to_data(config), "world": to_data(policy.world)} if names else {}


def reconnect(data: Mapping[str, Any], where: str, moved: str | None = None) -> Any:
    """The policy that the checkpoint ``where`` describes, at the place that it remembers or at the one given now."""
    kind = EXTERNAL_KINDS.get(str(data.get("kind")))
    if kind is None:
        raise BurnishError(
            f"{where} refines a policy that is not ours and that no checkpoint can hold: "
            "hand it in, load_policy(path, base=...)"
        )
    try:
        config = from_data(kind.config, data.get("config", {}), "policy")
        world = EnvSpec.from_dict(data["world"])
    except (KeyError, TypeError) as error:
        raise BurnishError(f"{where} describes the policy that it refines in a malformed way: {error}") from error
    if moved is None and (doubt := kind.doubt(config, where)):
        place = f"{getattr(config, kind.place)!r:.300}"
        raise BurnishError(
            f"{where} refines a policy that is not ours, at {place}, but {doubt}; where you trust it, say so: "
            f"policy.base={place}, or load_policy(path, base=...)"
        )
    try:
        if moved is not None:
            config = replace(config, **{kind.place: moved})
        if isinstance(config, RemoteConfig):
            return RemotePolicy(config, world, keyed=moved is not None)
        return kind.make(config, world)
    except BurnishError as error:
        raise BurnishError(
            f"{where} refines a policy that is not ours: {error} (if it has moved, say where to: policy.base=...)"
        ) from error


def _kind(config: Any) -> ExternalKind:
    return next(kind for kind in EXTERNAL_KINDS.values() if type(config) is kind.config)
