"""Policies from the table (`table.py`), fresh or from their checkpoints.

A policy's checkpoint is a folder that holds everything needed to act: which policy, its settings, its specification,
its weights and normalisers. Nothing in it can run code: the name must be in the table, the settings must fit.

A policy that is put together from others (`compose.py`) describes its parts beside its settings, each in the same way
and so on down. A policy that is not ours is described as ``external``: its specification, and the settings by which
`external/table.py` finds it again; a policy that only a program can make is handed in at loading.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .compose import Greedy
from .core.config import LATER, from_data, to_data
from .core.errors import BurnishError, did_you_mean, reason
from .core.execute import Precision
from .core.seed import derive
from .core.spec import PolicySpec
from .diffusion import DiffusionConfig, Sampler
from .external.table import EXTERNAL_KINDS, described, identity, place_of, reconnect
from .lerobot.checkpoint import CONFIG, fingerprint
from .lerobot.checkpoint import find as find_lerobot
from .lerobot.checkpoint import load as load_lerobot
from .lerobot.stored import read_json
from .partial import completed
from .runs.checkpoint import Checkpoint
from .runs.run import CHECKPOINTS, find_policy
from .table import COMPOSITES, KINDS, POLICIES, PolicyKind, maker, policy_name
from .trainable import LoRAConfig, add_lora, lora_of, merge_lora
from .vla import lerobot as vla_folders
from .vla.words import Words, WordsConfig

EXTERNAL = "external"
Changes = tuple[int | None, Sampler | None, float | None]  # of steps, sampler and guidance


@dataclass
class CheckpointConfig:
    """``policy=checkpoint policy.path=...``: a policy that was saved before, and how it shall act."""

    path: str  # folder of a run or of a checkpoint
    steps: int | None = None  # another number of generation steps than it was saved with
    sampler: Sampler | None = None  # another sampler of a diffusion policy than it was saved with
    guidance: float | None = None  # another weight of the goal
    base: str | None = None  # place of the policy that this one refines, if it has moved or is left out here
    keys: dict[str, str] = field(default_factory=dict)  # our name of an observation: that of a LeRobot checkpoint
    # LeRobot dataset whose statistics a LeRobot checkpoint has, in place of its own
    stats: str | None = field(default=None, metadata=LATER)
    greedy: bool = field(default=False, metadata=LATER)  # it acts from noise 0, whatever is asked of it


@dataclass
class SmolVLALoadConfig(CheckpointConfig):
    """``policy=smolvla policy.path=...``: a SmolVLA in a folder of LeRobot, and what that folder leaves open."""

    words: str | None = None  # its tokenizer.json, which is not in the folder
    statistics: str | None = None  # group of statistics, of a model that was trained on several robots
    stats: str | None = None  # LeRobot dataset whose statistics are taken instead; here it is as old as the others
    without: list[str] = field(default_factory=list)  # cameras of the model that are not there, such as image.camera3
    adapter: str | None = None  # folder of a low-rank adapter (PEFT) that is merged into the weights
    horizon: int | None = None  # actions of a chunk; the first ones do not depend on those that are left out
    execute: int | None = None  # actions of a chunk that are played
    # patches have the places of those before them: for a model that was trained with transformers 4.55 to 4.57
    late: bool = False
    # number format of the vision-language model, which is not trained; bfloat16 takes half the memory
    frozen_dtype: Precision = field(default=Precision.float32, metadata=LATER)


@dataclass
class Pi0LoadConfig(SmolVLALoadConfig):
    """``policy=pi0 policy.path=...``: a pi0 or pi0.5 in a folder of LeRobot, and what that folder leaves open."""


def build_policy(config: Any, spec: PolicySpec, *, seed: int = 0, device: torch.device | str = "cpu") -> Any:
    """A fresh policy; the same seed gives the same weights on every device."""
    make = maker(KINDS[policy_name(config)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "weights"))
        policy = _made(make, spec, config)
    return policy.to(device)


def _made(make: Any, spec: PolicySpec, config: Any) -> nn.Module:
    """The tokenizer of a policy that reads instructions is a part of it, so its checkpoints hold that too."""
    policy: nn.Module = make(spec, config)
    if isinstance(spec.words, Words):
        policy.words = spec.words
    return policy


def describe(policy: Any, origin: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of a policy's config.yaml in a checkpoint; ``origin`` is where it was trained (world, data)."""
    return {**_description(policy), "origin": to_data(dict(origin or {}))}


def _description(policy: Any, foreign: bool = False) -> dict[str, Any]:
    """``foreign`` allows a policy that is not ours: a base may be one, what was trained on it may not."""
    config = getattr(policy, "config", None)
    if all(type(config) is not kind.config for kind in KINDS.values()):
        if not foreign:
            raise BurnishError(f"a {type(policy).__name__} cannot be saved: {did_you_mean('', KINDS)}")
        return {"policy": EXTERNAL, "config": {}, "spec": to_data(policy.spec.to_dict()), **described(policy)}
    name = policy_name(config)
    plain = {"policy": name, "config": to_data(config), "spec": to_data(policy.spec.to_dict())}
    if name not in COMPOSITES:
        lora, words = lora_of(policy), getattr(policy, "words", None)
        read = {} if words is None else {"words": to_data(words.config)}
        return {**plain, **read, **({} if lora is None else {"lora": to_data(lora)})}
    kind = COMPOSITES[name]
    parts = {part: getattr(policy, part) for part in (*kind.parts, *kind.optional)}
    made = {part: _description(x, foreign=part == "base") for part, x in parts.items() if x is not None}
    return {**plain, "parts": made}


def weights_of(path: str | Path) -> str:
    """Which weights a path leads to: a run that is trained on leads elsewhere."""
    if (theirs := find_lerobot(path)) is not None:
        return fingerprint(theirs)
    return hashlib.sha256((find_policy(path).path / "manifest.json").read_bytes()).hexdigest()


def files_of(path: Path) -> tuple[Path, list[Path]]:
    """The files that are read where a policy's setting names a file, a folder of a policy, or a dataset for its
    statistics; and the folder in which they lie."""
    if path.is_file():
        return path.parent, [path]
    inside = (path / CHECKPOINTS).is_dir() or (path / "policy").is_dir()
    folder = find_lerobot(path) or (find_policy(path).path if inside else path)
    described = folder / "meta" if (folder / "meta" / "info.json").is_file() else folder
    return folder, [x for x in described.rglob("*") if x.is_file()]


def saved_policy(
    path: str | Path, keys: Mapping[str, str] | None = None, chosen: CheckpointConfig | None = None
) -> Checkpoint:
    """The checkpoint that ``path`` leads to: of a run, of one of its policies, or of LeRobot, whose observations can be
    given other names (``keys``); ``chosen`` says more of a SmolVLA."""
    if (theirs := find_lerobot(path)) is not None:
        if read_json(theirs / CONFIG).get("type") in vla_folders.FORMATS:
            named = {name: getattr(chosen, name) for name in vla_folders.Choices._fields if hasattr(chosen, name)}
            return vla_folders.load(theirs, vla_folders.Choices(**{**named, "keys": keys or {}}))
        return load_lerobot(theirs, keys, chosen and chosen.stats)
    if isinstance(chosen, SmolVLALoadConfig):
        raise BurnishError(
            f"{path} holds no SmolVLA or pi0 of LeRobot; take policy=checkpoint for a policy that Burnish saved"
        )
    given = {"keys": keys and dict(keys), "stats": chosen and chosen.stats}
    for name, x in given.items():
        if x:
            raise BurnishError(f"policy.{name}={x} is for checkpoints of LeRobot, and {path} is none")
    return find_policy(path)


def restore_policy(
    saved: Checkpoint,
    device: torch.device | str = "cpu",
    *,
    steps: int | None = None,
    sampler: Sampler | None = None,
    guidance: float | None = None,
    base: Any = None,
) -> Any:
    """``base`` stands in for every part that is external, and for weights that are left out (`partial.py`): a policy,
    or the place where it is now."""
    state = completed(saved.state, base, saved.path)
    if isinstance(base, str) and state is saved.state and not _has_external(saved.config):
        raise BurnishError(f"policy.base={base} says where a policy is that is not ours, but {saved.path} refines none")
    try:
        policy = _assemble(saved.config, str(saved.path), base, (steps, sampler, guidance), state=state)
    except BurnishError:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        # Settings that fit their dataclasses and still make no network: of a size that no memory has, of no size.
        raise BurnishError(
            f"the config.yaml in {saved.path} describes no policy that can be built: {reason(error)}"
        ) from error
    if not isinstance(policy, nn.Module):
        return policy
    try:
        policy.load_state_dict(state)
    except RuntimeError as error:
        raise BurnishError(f"the weights in {saved.path} do not fit its config.yaml: {error}".split("\n")[0]) from error
    merge_lora(policy)
    return policy.to(device).eval()


def _assemble(
    data: Any,
    where: str,
    base: Any,
    changes: Changes = (None, None, None),
    *,
    state: Mapping[str, Any],
    prefix: str = "",
) -> Any:
    """``state`` is that of the whole policy; the names of this part of it begin with ``prefix``."""
    name = data.get("policy") if isinstance(data, Mapping) else None
    if name == EXTERNAL:
        spec = PolicySpec.from_dict(data.get("spec", {}))
        found = reconnect(data, where, base) if base is None or isinstance(base, str) else base
        if found.spec != spec:
            raise BurnishError(f"{where} refines a policy of {spec}, but the one handed in has {found.spec}")
        return found
    if not isinstance(name, str) or name not in KINDS:
        raise BurnishError(
            f"{where} holds no policy that this version knows: policy={name!r}; {did_you_mean(str(name), POLICIES)}"
        )
    kind = KINDS[name]
    settings = _adapted(from_data(kind.config, data.get("config", {}), "policy"), *changes)
    if isinstance(kind, PolicyKind):
        spec, lora, read = PolicySpec.from_dict(data.get("spec", {})), data.get("lora"), data.get("words")
        if read is not None:
            spec = spec.reading(Words(from_data(WordsConfig, read, "words")))
        adapter = None if lora is None else from_data(LoRAConfig, lora, "lora")
        _require_tensors(maker(kind), settings, spec, adapter, where, state, prefix)
        policy = build_policy(settings, spec)
        return policy if adapter is None else add_lora(policy, adapter)
    parts = data.get("parts")
    given = set(parts) if isinstance(parts, Mapping) else set()
    if not set(kind.parts) <= given <= {*kind.parts, *kind.optional}:
        raise BurnishError(f"{where} holds a {name} policy, whose parts are {kind.parts}, but it lists {sorted(given)}")
    made = {
        part: _assemble(description, where, base, state=state, prefix=f"{prefix}{part}.")
        for part, description in data["parts"].items()
    }
    return maker(kind)(**made, **vars(settings))


def _require_tensors(
    make: Any,
    settings: Any,
    spec: PolicySpec,
    lora: LoRAConfig | None,
    where: str,
    state: Mapping[str, Any],
    prefix: str,
) -> None:
    """The sizes that a checkpoint declares are those of the tensors that lie in it. That is seen before anything of
    these sizes is made: on the device "meta" a network consists of its shapes."""
    with torch.device("meta"):
        policy = _made(make, spec, settings)
        declared = (policy if lora is None else add_lora(policy, lora)).state_dict()
    for name, x in declared.items():
        found = state.get(prefix + name)
        if not isinstance(found, torch.Tensor) or found.shape != x.shape:
            there = f"of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else "not there"
            raise BurnishError(
                f"the weights in {where} do not fit its config.yaml: {prefix}{name} is declared of shape "
                f"{tuple(x.shape)}, and is {there}"
            )


def _has_external(data: Any) -> bool:
    if not isinstance(data, Mapping):
        return False
    parts = data.get("parts")
    inside = parts.values() if isinstance(parts, Mapping) else ()
    return data.get("policy") == EXTERNAL or any(map(_has_external, inside))


def load_policy(
    path: str | Path,
    device: torch.device | str = "cpu",
    *,
    steps: int | None = None,
    sampler: Sampler | None = None,
    guidance: float | None = None,
    base: Any = None,
    keys: Mapping[str, str] | None = None,
    chosen: CheckpointConfig | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The policy saved at ``path``, and its origin. ``steps``, ``sampler``, ``guidance`` change how it acts. ``base``
    is the policy that is not ours, where such a one was refined, or the place where it is now. ``keys`` are other names
    for the observations of a checkpoint of LeRobot."""
    saved = saved_policy(path, keys, chosen)
    policy = restore_policy(saved, device, steps=steps, sampler=sampler, guidance=guidance, base=base)
    origin = saved.config.get("origin", {})
    return policy, origin if isinstance(origin, dict) else {}


def loaded(
    chosen: CheckpointConfig, device: torch.device | str = "cpu", base: Any = None
) -> tuple[Any, dict[str, Any]]:
    """The policy of ``policy=checkpoint``, and its origin; ``base`` is one that ``policy.base`` cannot name."""
    changes = {name: getattr(chosen, name) for name in ("steps", "sampler", "guidance", "keys")}
    policy, origin = load_policy(
        chosen.path, device, base=chosen.base if base is None else base, chosen=chosen, **changes
    )
    return (Greedy(policy) if chosen.greedy else policy), origin


def _adapted(settings: Any, steps: int | None, sampler: Sampler | None, guidance: float | None) -> Any:
    """Other settings, checked like all others, and remembered when the policy is saved again."""
    name = policy_name(settings)
    if name in COMPOSITES and (steps, sampler, guidance) != (None, None, None):
        raise BurnishError(
            f"a {name} policy acts as its parts were trained to; leave steps, sampler and guidance as they are"
        )
    if steps is not None and not hasattr(settings, "steps"):
        raise BurnishError(f"steps={steps}: a {name} policy acts in a single step")
    if sampler is not None and not isinstance(settings, DiffusionConfig):
        raise BurnishError(f"sampler={sampler.value}: only diffusion policies have samplers, and this is a {name} one")
    changed = {name: x for name, x in (("steps", steps), ("sampler", sampler)) if x is not None}
    settings = replace(settings, **changed)
    if guidance is not None:
        if not hasattr(getattr(settings, "net", None), "guidance"):
            raise BurnishError(f"guidance={guidance}: a {name} policy has no guidance")
        settings = replace(settings, net=replace(settings.net, guidance=guidance))
    return settings


# A policy that was saved, by Burnish or by LeRobot.
SAVED: dict[str, type] = {"checkpoint": CheckpointConfig, "smolvla": SmolVLALoadConfig, "pi0": Pi0LoadConfig}
# A policy that acts already: saved, or of another library.
ACTING: dict[str, type] = {
    **SAVED,
    **{name: kind.config for name, kind in EXTERNAL_KINDS.items()},
}


def where_of(chosen: Any) -> str:
    """The place that a chosen policy comes from: a checkpoint's folder, or the path, URL or name of an external one."""
    return chosen.path if isinstance(chosen, CheckpointConfig) else place_of(chosen)


def identity_of(chosen: Any, policy: Any = None) -> Any:
    """The weights that a path leads to; of a ``policy`` that is not ours, the facts that can be seen of it."""
    if chosen is None:
        return None
    return weights_of(chosen.path) if isinstance(chosen, CheckpointConfig) else identity(policy)
