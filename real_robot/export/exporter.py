"""``burnish export``: a policy as a bundle (`bundle.py`), which a robot runs without torch (`runtime.py`).

A policy becomes an ONNX network, refined ones together with their base. The export then has to answer like the policy
(`parity.py`), or nothing is written; the report lies in the bundle.

**Departures.** Networks are written by tracing and not by torch's newer exporter: a policy decides by numbers which it
knows (which of two runners takes step k), and tracing follows them.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...policies.core.config import to_data
from ...policies.core.errors import BurnishError, reason
from ...policies.core.language import unworded
from ...policies.core.observed import observed
from ...policies.core.seed import RowNoise
from ...policies.core.spec import PolicySpec, dtype_of
from ...policies.core.time_limit import first_act
from ...policies.core.types import Masked
from ...policies.runs import manifest
from ...policies.runs.checkpoint import FILES, Checkpoint
from ..errors import RobotError
from . import bundle as bundles
from .bundle import PLAN, TICK, Bundle, NoiseInput, Schema
from .network import folded
from .parity import corrected, planner_and_corrections, recorded, report
from .runtime import BASE_ACTION, GOAL_GIVEN, PREFIX, PREFIX_KNOWN, ExportedPolicy, load


class To(Enum):
    """The forms of an exported policy: a bundle that runs without torch, or a policy that LeRobot loads."""

    bundle = "bundle"
    lerobot = "lerobot"


@dataclass
class ExportConfig:
    """Settings of an export: its folder and form, and the observations on which it is compared with the policy."""

    out: str  # the folder that is written, which must not exist yet
    to: To = To.bundle  # form: a bundle that a robot runs, or a policy of LeRobot's
    instruction: str | None = None  # instruction that a bundle follows, of a policy that reads one
    data: str | None = None  # recordings, whose observations are tried beside random ones
    samples: int = 10_000  # random observations on which the export must answer as the policy does
    seed: int = 0  # seed of these observations

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise BurnishError(f"samples={self.samples}: an export is compared with its policy once at least")
        for name, usual in (("instruction", None), ("data", None), ("samples", 10_000), ("seed", 0)):
            if self.to is To.lerobot and getattr(self, name) != usual:
                raise BurnishError(f"{name}={getattr(self, name)} is for a bundle; leave it out with to=lerobot")


def export(config: ExportConfig, policy: Any, about: Mapping[str, Any] | None = None) -> ExportedPolicy:
    """Writes the bundle, and returns it as a robot loads it. ``about`` is where the policy comes from (`source`)."""
    if Path(config.out).exists():
        raise BurnishError(f"out={config.out} exists already and is not overwritten; choose another name")
    policy = instructed(policy, config.instruction)
    made = assembled(policy, about=about)
    seen = None if config.data is None else recorded(config.data, made.schema, config.seed)
    try:
        measured = report(policy, made, samples=config.samples, seed=config.seed, recorded=seen)
        bundles.write(replace(made, parity=measured), config.out)
        return load(config.out)
    except RobotError as error:
        raise BurnishError(str(error)) from error


class Instructed(nn.Module):
    """``base``, which reads instructions, with one for ever: a bundle has no tokenizer."""

    base: Any
    tokens: Tensor

    def __init__(self, base: Any, instruction: str) -> None:
        super().__init__()
        self.base, self.spec, self.instruction = base, unworded(base.spec), instruction
        self.register_buffer("tokens", base.spec.words.ids([instruction]))

    def act(self, obs: Mapping[str, Tensor], **how: Any) -> Tensor:
        count = len(next(iter(obs.values())))
        return self.base.act({**obs, "tokens": self.tokens.expand(count, -1)}, **how)


def instructed(policy: Any, instruction: str | None) -> Any:
    """A policy that reads instructions, told one of them; another one as it is."""
    reads = getattr(policy.spec, "words", None) is not None
    if reads and instruction is None:
        raise BurnishError(
            "the policy reads instructions, and a bundle has no tokenizer; say which one it is to follow, "
            "instruction='...', or serve the policy: burnish serve"
        )
    if instruction is not None and not reads:
        raise BurnishError(f"instruction={instruction!r:.80}: the policy reads none; leave it out")
    if reads and planner_and_corrections(policy)[1]:
        raise BurnishError(
            "the policy reads instructions and corrects single actions, which no bundle can; play it as it is, burnish "
            "deploy policy.path=FOLDER, or make one policy of it that has chunks, burnish distill teachers=FOLDER"
        )
    return Instructed(policy, str(instruction)) if reads else policy


def source(saved: Checkpoint, weights: str) -> dict[str, Any]:
    """Of a saved policy: the revision that trained it, the hash of its checkpoint, the world and the data. Of one that
    LeRobot saved, the hash of its ``weights``."""
    kept: dict[str, Any] = {"sha256": weights}
    if (saved.path / manifest.MANIFEST).exists():
        written, _ = manifest.read_manifest(saved.path, FILES)
        kept = {key: written.get(key) for key in ("burnish", "torch", "git", "sha256")}
    return {"checkpoint": kept, "origin": saved.config.get("origin", {}), "policy": saved.config.get("policy")}


def assembled(policy: Any, *, about: Mapping[str, Any] | None = None) -> Bundle:
    """A bundle in memory, without its report."""
    _require_modules(policy)
    _require_no_memory(policy)
    shapes = {key: shape for key, shape in observed(policy).items() if key != "tokens"}  # `Instructed` holds them
    noise, plan = _plan(policy, shapes)
    networks = {PLAN: plan} | ({TICK: _tick(policy, shapes)} if planner_and_corrections(policy)[1] else {})
    spec = policy.spec
    schema = Schema(
        obs={key: tuple(shape) for key, shape in sorted(shapes.items())},
        low=spec.action.low,
        high=spec.action.high,
        horizon=spec.horizon,
        execute=spec.execute,
        start=spec.start,
        history=spec.history,
        goal_free=spec.goal_free,
        noise_shape=spec.noise_shape,
        control_hz=spec.control_hz,
        action_mode=spec.action_mode,
        pixels=spec.pixels,
        names={key: tuple(names) for key, names in spec.names.items()},
    )
    said = to_data({"class": type(policy).__name__, "exported_by": manifest.burnish_version(), **(about or {})})
    try:
        return Bundle(schema, networks, tuple(noise), said)
    except RobotError as error:
        raise BurnishError(str(error)) from error


def _require_modules(policy: Any) -> None:
    if not isinstance(policy, nn.Module):
        raise BurnishError(f"a {type(policy).__name__} is not made of torch modules, so it cannot be exported")
    inside = (x for part in policy.modules() for x in vars(part).values())
    if any(hasattr(x, "act") and not isinstance(x, nn.Module) for x in inside):
        raise BurnishError(
            "its base is a policy of another library, whose weights are not here, so no bundle can hold it; "
            "`burnish distill teachers=FOLDER` makes one policy of both that can be exported"
        )
    if (size := sum(p.nbytes for p in policy.parameters())) > (most := bundles.LIMITS[PLAN]):
        raise BurnishError(
            f"the policy has {size >> 20} MB of weights, and a bundle holds {most >> 20} MB at most; serve it instead, "
            "burnish serve, or write it for LeRobot, to=lerobot"
        )


def _require_no_memory(policy: Any) -> None:
    if any(hasattr(part, "search") for part in policy.modules()):
        raise BurnishError(
            "a planner plans in every step, from where its last plan ended, which no network of a bundle can; take it "
            "as it is, burnish deploy policy.path=..., or by burnish serve, which plans each answer anew"
        )
    corrections = planner_and_corrections(policy)[1]
    shown = [x.name for correction in corrections for x in correction.observe]
    if shown:
        raise BurnishError(
            f"its correction observes the {' and '.join(shown)} of the chunk that its base plays (method.observe), "
            f"which {TICK} of a bundle is not given; refine without method.observe to export it"
        )
    if any(correction.offset for correction in corrections):
        raise BurnishError(
            "its corrections last from tick to tick (method.offset), and a bundle remembers none; refine with "
            "method.offset.half_life=0 to export it"
        )


class _Given(RowNoise):
    """Noise that is handed in, or zeros; ``asked`` says which."""

    def __init__(self, given: list[Tensor] | None, asked: list[NoiseInput], rows: int = 1, split: bool = False) -> None:
        self._given, self._asked, self._kind = given, asked, {"rows": rows, "split": split}

    def normal(self, shape: Any) -> Tensor:
        self._asked.append(NoiseInput(tuple(shape[1:]), **self._kind))
        return torch.zeros(tuple(shape)) if self._given is None else self._given.pop(0)

    def split(self, count: int) -> _Given:
        if self._kind["split"]:
            raise BurnishError("the best of several draws within another one is not exported; refine without the outer")
        return _Given(self._given, self._asked, count, True)


class _Function(nn.Module):
    """``run`` of a policy's named arrays, as the module that is traced."""

    def __init__(self, policy: nn.Module, names: list[str], run: Callable[[Mapping[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.policy, self._names, self._run = policy, names, run

    def forward(self, *given: Tensor) -> Tensor:
        return self._run(dict(zip(self._names, given, strict=True)))


def _blank(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    blank = {f"obs.{key}": torch.zeros(1, *shapes[key], dtype=dtype_of(key)) for key in sorted(shapes)}
    return {**blank, GOAL_GIVEN: torch.ones(1, 1)} if any(key.startswith("goal") for key in shapes) else blank


def _obs(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    obs = {name.removeprefix("obs."): x for name, x in given.items() if name.startswith("obs.")}
    return {**obs, "goal_mask": given[GOAL_GIVEN][:, 0]} if GOAL_GIVEN in given else obs


def _plan(policy: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[NoiseInput], bytes]:
    """The network that makes chunks, of one row, and the noise that it reads."""
    acting, blank, noise = planner_and_corrections(policy)[0], _blank(shapes), list[NoiseInput]()
    spec: PolicySpec = policy.spec
    try:
        with torch.no_grad(), first_act():
            answer = acting.act(_obs(blank), generator=_Given(None, noise))
        if not torch.isfinite(answer).all():
            raise BurnishError("the policy answers an observation of zeros with numbers that are not finite")
    except BurnishError:
        raise
    except Exception as error:  # a policy may hold one that is not ours, which raises what it likes
        raise _unwritten(policy, error) from error
    # A policy that takes noise, but draws none, acts by its mean unless it is handed noise.
    mean = spec.noise_shape is not None and not noise
    if spec.noise_shape is not None and mean:
        noise = [NoiseInput(spec.noise_shape, drawn=False)]
    zeros = {f"noise.{i}": torch.zeros(x.rows, *x.shape) for i, x in enumerate(noise)}
    known = {PREFIX: torch.zeros(1, *spec.chunk_shape), PREFIX_KNOWN: torch.zeros(1, spec.horizon, 1)}

    def run(given: Mapping[str, Tensor]) -> Tensor:
        prefix, drawn = Masked(given[PREFIX], given[PREFIX_KNOWN] > 0.5), [given[name] for name in zeros]
        how = {"noise": drawn[0]} if mean else {"generator": _Given(drawn, [])}
        return acting.act(_obs(given), prefix=prefix, **how)

    return noise, _traced(policy, run, {**blank, **zeros, **known})


def _tick(policy: Any, shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """The network that corrects an action."""
    feed = {**_blank(shapes), BASE_ACTION: torch.zeros(1, policy.spec.action.dim)}
    return _traced(policy, lambda given: corrected(policy, _obs(given), given[BASE_ACTION]), feed)


def _traced(policy: Any, run: Callable[[Mapping[str, Tensor]], Tensor], feed: Mapping[str, Tensor]) -> bytes:
    try:
        with warnings.catch_warnings(), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")  # that numbers which are known become constants is what we want
            torch.onnx.export(
                _Function(policy, list(feed), run).eval(),
                tuple(feed.values()),
                file := Path(folder) / PLAN,
                input_names=list(feed),
                output_names=["actions"],
                opset_version=17,
                dynamo=False,
            )
            return folded(file)
    except (ImportError, RuntimeError, torch.onnx.OnnxExporterError) as error:
        raise _unwritten(policy, error) from error


def _unwritten(policy: Any, error: Exception) -> BurnishError:
    return BurnishError(f"a {type(policy).__name__} cannot be written as a network: {reason(error, 200)}")
