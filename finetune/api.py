"""Burnish from Python: ``load`` a policy, ``refine`` it in a world, ``evaluate`` what became of it, ``save`` that.

    from burnish.finetune import evaluate, load, refine

    policy = load("runs/bc")
    result = refine(policy, "insert", method="dsrl", total=20_000, rewards={"shift": -1}, loop={"warmup": 1000})
    print(evaluate(result.policy).summary())

This is the command line with other hands on it, and an entry point like the `__main__.py` files, which know the worlds.
Settings are composed, checked and refused by the code of the command line, and a training is the one of
``burnish finetune``: the same settings and seed lead to the same policy, bit for bit, from both.
"""

from __future__ import annotations

import hashlib
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..policies.__main__ import GROUPS as POLICY_GROUPS
from ..policies.__main__ import EvaluateConfig
from ..policies.build import ACTING, CheckpointConfig, describe, loaded, saved_policy
from ..policies.cli.cli import choices, compose, to_object
from ..policies.controllers import controller_for
from ..policies.core.config import from_data, to_data
from ..policies.core.errors import BurnishError
from ..policies.core.scale import ScaledEnv
from ..policies.core.spec import EnvSpec
from ..policies.core.types import VecEnv
from ..policies.core.wrapper import Wrapper
from ..policies.evaluator import EvalConfig
from ..policies.measure.evaluate import Evaluation, evaluation_seeds
from ..policies.measure.evaluate import evaluate as play
from ..policies.partial import completed, content
from ..policies.runs import checkpoint
from ..policies.runs.run import OnLog
from ..sim.build import WORLDS, origin_of, seen_by, world_for
from .__main__ import GROUPS
from .refinement import FinetuneConfig, carry_out, refinement
from .table import ONLINE, method_name

_OF_THE_RUN = {field.name for field in fields(FinetuneConfig)}
_GYM_ID = re.compile(r".*-v\d+")


def load(
    path: Path | str,
    device: torch.device | str = "cpu",
    *,
    steps: int | None = None,
    sampler: str | None = None,
    guidance: float | None = None,
    base: Any = None,
    keys: Mapping[str, str] | None = None,
    greedy: bool = False,
) -> Any:
    """The policy in a run folder (its newest checkpoint), in a checkpoint, saved by ``save``, or of LeRobot. It
    remembers the world that it was trained for (``origin``), where others need no env, and ``source``, where it came
    from. ``steps``, ``sampler`` and ``guidance`` change how it acts; ``base`` is where a policy is that is not ours, or
    that policy, if one was refined; ``keys`` gives the observations of a LeRobot policy other names; one that is
    ``greedy`` acts from noise 0, whatever is asked of it."""
    named = base is None or isinstance(base, str)
    given = {"path": str(path), "steps": steps, "sampler": sampler, "guidance": guidance, "greedy": greedy}
    given["keys"] = dict(keys or {})
    chosen = from_data(CheckpointConfig, given | ({"base": base} if named else {}), "load")
    policy, origin = loaded(chosen, device, base)
    return _marked(policy, origin, chosen if named else None)


def save(policy: Any, path: Path | str, *, overwrite: bool = False) -> Path:
    """A folder that ``load`` and ``policy.path=`` read. It holds the policy alone: with ``refine(out=...)`` a run is
    kept that can be continued."""
    state = policy.state_dict() if hasattr(policy, "state_dict") else {}
    config = describe(policy, getattr(policy, "origin", {}))
    saved = checkpoint.save(path, config=config, state=state, overwrite=overwrite)
    _marked(policy, config["origin"], CheckpointConfig(str(path)))
    return saved


@dataclass
class Refined:
    """The result of ``refine``: the policy, its log, and whether it went to the end."""

    policy: Any
    log: list[dict[str, float]]  # the lines of metrics.jsonl that this call led to
    finished: bool  # False: Ctrl-C or ``on_log`` ended it early, and the policy is what there was by then
    out: Path | None  # its run folder, if it has one

    def save(self, path: Path | str, *, overwrite: bool = False) -> Path:
        return save(self.policy, path, overwrite=overwrite)


def refine(
    policy: Any,
    env: Any = None,
    *,
    method: Any = None,
    total: int | None = None,
    seed: int = 0,
    out: Path | str | None = None,
    on_log: OnLog | None = None,
    **settings: Any,
) -> Refined:
    """Let ``policy`` act in ``env`` until it has decided ``total`` times in all worlds together, and learn from it.

    ``policy`` is a policy, or the path of one, or the configuration of another library's (``RemoteConfig`` and so on),
    or None for methods that can start from nothing; it is left as it is. ``env`` is the name of a world, its
    configuration, an id of Gymnasium's, or a ``VecEnv`` in actuator units; by default the world that the policy was
    trained for. ``method`` is a name, or a configuration. ``settings`` are those of ``burnish finetune``: of the run
    (``worlds``, ``eval_every``, ``experiment``, ...) and, without their ``method.``, of the method, nested or dotted.

    Without ``out`` nothing is written. ``on_log(step, numbers)`` is called with everything that is logged; a true
    answer, or a Ctrl-C, ends the training after the next step. A ``VecEnv`` is not used for evaluations, which would
    move its worlds: what is logged about the policy is then what happened while it learnt.
    """
    if out is None and (settings.get("resume") or settings.get("track")):
        raise BurnishError("resume= and track= belong to a run that is kept; name its folder: out=...")
    base, given = _base(policy)
    if "device" not in settings and hasattr(base, "parameters"):
        settings["device"] = str(next(base.parameters(), torch.empty(0)).device)
    counts = {"seed": seed} | ({} if total is None else {"total": total})
    config, world = _configured(env, method, {**counts, **settings})
    config = replace(config, policy=given, out=config.out if out is None else str(out))
    if config.processes != 1:
        raise BurnishError("processes= starts programs of their own, which read settings only: use `burnish finetune`")
    work, loop = refinement(config, base, world)
    if given is None and base is not None:
        work.identity = {**work.identity, "policy": _digest(base)}
    log: list[dict[str, float]] = []

    def note(step: int, numbers: Mapping[str, float]) -> Any:
        log.append({"step": step, **numbers})
        return on_log is not None and on_log(step, numbers)

    status = carry_out(config, work, loop, keep=out is not None, on_log=note)
    source = None if out is None else CheckpointConfig(str(out))
    return Refined(
        _marked(loop.learner.policy, work.origin, source), log, status == 0, None if out is None else Path(out)
    )


def evaluate(
    policy: Any,
    env: Any = None,
    episodes: int = 100,
    *,
    seed: int = 0,
    worlds: int = 50,
    greedy: bool = False,
) -> Evaluation:
    """The report of ``burnish evaluate``: one episode for each of the same seeds, so that two of these are paired
    (``burnish.policies.measure.evaluate.compare``). ``policy`` and ``env`` are as in ``refine``, ``worlds`` are stepped
    at once, and ``greedy`` acts from noise 0."""
    config = EvalConfig(episodes, worlds, greedy)
    config.require_episodes()
    actor = load(policy) if isinstance(policy, (str, Path)) else policy
    if not hasattr(actor, "spec"):
        raise BurnishError(f"a {type(actor).__name__} is no policy; give one that was loaded, or its path")
    words, handed = _world(env)
    device = next(actor.parameters(), torch.empty(0)).device if hasattr(actor, "parameters") else torch.device("cpu")
    if isinstance(handed, VecEnv):
        view = seen_by(actor.spec, handed)
    else:
        if words:
            placeholder = ["policy=checkpoint", "policy.path=given"]
            handed = to_object(
                compose("evaluate", EvaluateConfig, POLICY_GROUPS["evaluate"], [*placeholder, *words])
            ).env
        world = origin_of(handed) or getattr(actor, "origin", {}).get("env")
        view = world_for(actor.spec, world, config.worlds, device)
    controller = controller_for(actor, view.num_envs, greedy=config.greedy, device=device)
    return play(view, controller, evaluation_seeds(config.episodes, base=seed))


def _marked(policy: Any, origin: Mapping[str, Any], source: CheckpointConfig | None) -> Any:
    policy.origin, policy.source = dict(origin), source
    return policy


def _base(policy: Any) -> tuple[Any, Any]:
    """A policy that was handed in, or nothing, and how settings name it, or nothing."""
    if policy is None or type(policy) in ACTING.values():
        return None, policy
    if isinstance(policy, (str, Path)):
        return None, CheckpointConfig(str(policy))
    if not hasattr(policy, "spec"):
        raise BurnishError(f"a {type(policy).__name__} is no policy; give one that was loaded, or its path")
    source = getattr(policy, "source", None)
    try:
        # A policy that was trained on after loading is not the saved one.
        saved = source and completed(saved_policy(source.path).state, source.base, source.path)
        known = source is not None and _digest(policy) == _digest(saved)
    except BurnishError:
        known = False  # it has moved
    return policy, source if known else None


def _digest(policy: Any) -> str:
    """Which weights, of a policy or of its state."""
    state = policy if isinstance(policy, Mapping) else policy.state_dict() if hasattr(policy, "state_dict") else {}
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(
            f"{name} {value.dtype} {tuple(value.shape)}".encode() if isinstance(value, Tensor) else name.encode()
        )
        digest.update((content(value) if isinstance(value, Tensor) else repr(value)).encode())
    return digest.hexdigest()


# ---- what was said in Python, as the command line would say it. ----


def _configured(env: Any, method: Any, settings: dict[str, Any]) -> tuple[FinetuneConfig, VecEnv | None]:
    words, world = _world(env)
    chosen = method if method is None or isinstance(method, str) else method_name(method)
    if chosen is not None:
        words = [f"method={chosen}", *words]
    if "experiment" in settings:
        words = [f"experiment={settings.pop('experiment')}", *words]
    kind = ONLINE.get(chosen) if chosen is not None else None
    for name, value in settings.items():
        if name.partition(".")[0] in _OF_THE_RUN:
            words += _words(name, value, typing.get_type_hints(FinetuneConfig).get(name))
        elif chosen is method:
            words += _words(f"method.{name}", value, typing.get_type_hints(kind).get(name) if kind else None)
        else:
            raise BurnishError(f"{name}= is for the method, which was given as a whole; change it there")
    config: FinetuneConfig = to_object(compose("finetune", FinetuneConfig, GROUPS["finetune"], words))
    if chosen is not method:
        config = replace(config, method=method)
    if world is None:
        return config, None
    if isinstance(world, VecEnv):
        return replace(config, worlds=world.num_envs), world
    return replace(config, env=world), None


def _world(env: Any) -> tuple[list[str], Any]:
    """The words that choose it, or what was handed in: a configuration, or the worlds themselves."""
    if env is None:
        return [], None
    if isinstance(env, str):
        is_gym = _GYM_ID.fullmatch(env) and env not in choices(GROUPS["finetune"])["env"]
        return (["env=gym", *_words("env.id", env)] if is_gym else [f"env={env}"]), None
    if type(env) in WORLDS.values():
        return [], env
    if not isinstance(env, VecEnv) or not isinstance(env.spec, EnvSpec):
        raise BurnishError(
            f"env is a {type(env).__name__}, which is no world of ours; give a name, a configuration, a VecEnv, or the "
            "id by which it is registered with Gymnasium"
        )
    inner = env
    while isinstance(inner, Wrapper) and not isinstance(inner, ScaledEnv):
        inner = inner.env
    if isinstance(inner, ScaledEnv):
        raise BurnishError("env is scaled to [-1, 1] already, which is done here; give the world in actuator units")
    return [], env


def _words(name: str, value: Any, kind: Any = None) -> Iterator[str]:
    """``name=value`` for the command line; nested settings become dotted names, but for mappings that are one."""
    if is_dataclass(value) and not isinstance(value, type):
        value = to_data(value)
    if not isinstance(value, Mapping) or not (kind is None or is_dataclass(kind)):
        yield f"{name}={_written(name, value)}"
        return
    hints = {} if kind is None else typing.get_type_hints(kind)
    for key, item in value.items():
        yield from _words(f"{name}.{key}", item, hints.get(key))


def _written(name: str, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (str, Path)):
        # Between quotes only quotes, and backslashes before them or at the end, mean something else.
        text = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), str(value))
        return f"'{text}'"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_written(name, item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_written(name, item)}' for key, item in value.items())}}}"
    raise BurnishError(f"{name}={value!r} cannot be a setting; give a number, a string, a list or a mapping")
