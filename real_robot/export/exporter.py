"""``burnish export``: a policy as a bundle (`bundle.py`), which a robot runs without torch (`runtime.py`).

A policy of ours becomes a list of operations (`lowering_policies.py`), refined ones together with their base. What has
no such form (a temporal U-Net, cameras) becomes an ONNX network; ``onnx=true`` writes one in any case. The export then
has to answer like the policy (`parity.py`), or nothing is written; the report lies in the bundle.

**Departures.** Networks are written by tracing and not by torch's newer exporter: a policy decides by numbers which it
knows (which of two runners takes step k), and tracing follows them.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...policies.core.config import to_data
from ...policies.core.errors import BurnishError
from ...policies.core.seed import RowNoise
from ...policies.core.spec import PolicySpec, dtype_of
from ...policies.core.time_limit import first_act
from ...policies.runs import manifest
from ...policies.runs.checkpoint import FILES
from ...policies.runs.run import find_policy
from ..errors import RobotError
from . import bundle as bundles
from .bundle import Bundle, NoiseInput, Schema
from .lowering import Lowering, NotLowered
from .lowering_policies import act, corrects, tick
from .parity import corrected, planner, recorded, report
from .runtime import GOAL_GIVEN, ExportedPolicy, load


@dataclass
class ExportConfig:
    out: str  # the folder of the bundle, which must not exist yet
    onnx: bool = False  # a network for onnxruntime also where operations suffice
    data: str | None = None  # recordings, whose observations are tried beside random ones
    samples: int = 10_000  # random observations on which the export must answer as the policy does
    seed: int = 0  # of these

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise BurnishError(f"samples={self.samples}: an export is compared with its policy once at least")


def export(config: ExportConfig, policy: Any, about: Mapping[str, Any] | None = None) -> ExportedPolicy:
    """Writes the bundle, and returns it as a robot loads it. ``about`` is where the policy comes from (`source`)."""
    if Path(config.out).exists():
        raise BurnishError(f"out={config.out} exists already and is not overwritten; choose another name")
    made = assembled(policy, onnx=config.onnx, about=about)
    seen = None if config.data is None else recorded(config.data, made.schema, config.seed)
    try:
        measured = report(policy, made, samples=config.samples, seed=config.seed, recorded=seen)
        bundles.write(replace(made, parity=measured), config.out)
        return load(config.out)
    except RobotError as error:
        raise BurnishError(str(error)) from error


def source(path: Path | str) -> dict[str, Any]:
    """Of a saved policy: the revision that trained it, the hash of its checkpoint, the world and the data."""
    saved = find_policy(path)
    written, _ = manifest.read_manifest(saved.path, FILES)
    kept = {key: written.get(key) for key in ("burnish", "torch", "git", "sha256")}
    return {"checkpoint": kept, "origin": saved.config.get("origin", {}), "policy": saved.config.get("policy")}


def assembled(policy: Any, *, onnx: bool = False, about: Mapping[str, Any] | None = None) -> Bundle:
    """A bundle in memory, without its report."""
    _require_modules(policy)
    _require_no_queue(policy)
    programs: dict[str, dict[str, Any]] = {}
    networks: dict[str, bytes] = {}
    shapes = observed(policy)
    low = Lowering()
    wanted = ["plan", "tick"] if corrects(policy) else ["plan"]
    for name in wanted:
        # Both programs share the tensors and the noise of one `Lowering`, and each has operations of its own.
        low.ops, noise = [], len(low.noise)
        try:
            output = tick(low, policy, "base_action") if name == "tick" else act(low, planner(policy))
            programs[name] = {"ops": low.ops, "output": output}
        except NotLowered:
            programs[name] = {}
            del low.noise[noise:]
        if onnx or not programs[name]:
            drawn, networks[name] = network(policy, shapes, name)
            if not programs[name]:
                low.noise += drawn
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
    )
    used = {item[key] for p in programs.values() for item in p.get("ops", ()) for key in item if key in TENSORS}
    tensors = {name: x.numpy() for name, x in low.tensors.items() if name in used}
    said = to_data({"class": type(policy).__name__, "exported_by": manifest.burnish_version(), **(about or {})})
    try:
        return Bundle(schema, programs, tuple(low.noise), tensors, networks, said)
    except RobotError as error:
        raise BurnishError(str(error)) from error


def _require_modules(policy: Any) -> None:
    if not isinstance(policy, nn.Module):
        raise BurnishError(f"a {type(policy).__name__} is not made of torch modules, so it cannot be exported")


def _require_no_queue(policy: Any) -> None:
    shown = [x.name for part in policy.modules() if corrects(part) for x in part.observe]
    if shown:
        raise BurnishError(
            f"its correction observes the {' and '.join(shown)} of the chunk that its base plays (method.observe), "
            "which a bundle's program of a tick is not given; refine without method.observe to export it"
        )


TENSORS = ("weight", "bias", "shift", "scale", "tensor", "support")  # the settings of operations that name a tensor


def observed(policy: Any) -> dict[str, tuple[int, ...]]:
    """The observations that the policy and all of its parts read."""
    shapes = dict(policy.spec.inputs.shapes)
    for part in policy.modules() if isinstance(policy, nn.Module) else ():
        if type(part).__name__ == "ObsEncoder":
            theirs: Any = part
            for key, shape in theirs._full.shapes.items():
                if shapes.setdefault(key, shape) != shape and key != "base_action":
                    raise BurnishError(f"the parts of the policy observe {key!r} in different shapes")
    return {key: shape for key, shape in shapes.items() if key not in ("base_action", "goal_mask")}


class _Given(RowNoise):
    """Noise that is handed in, or zeros whose shapes are remembered."""

    def __init__(self, given: list[Tensor] | None) -> None:
        self.given, self.shapes = given, []

    def uniform(self, shape: Any) -> Tensor:
        raise BurnishError("a policy that picks the best of several draws is exported only where it needs no network")

    def normal(self, shape: Any) -> Tensor:
        self.shapes.append(tuple(shape[1:]))
        return torch.zeros(tuple(shape)) if self.given is None else self.given.pop(0)


class _Acting(nn.Module):
    """A policy as a function of arrays, in the order of ``names``."""

    def __init__(self, policy: Any, program: str, keys: list[str], fixed: bool) -> None:
        super().__init__()
        self.policy, self.program, self.keys, self.fixed = policy, program, keys, fixed

    def forward(self, *given: Tensor) -> Tensor:
        left = list(given)
        obs = {key: left.pop(0) for key in self.keys}
        if any(key.startswith("goal") for key in self.keys):
            obs["goal_mask"] = left.pop(0)[:, 0]
        if self.program == "tick":
            return corrected(self.policy, obs, left.pop(0))
        if self.fixed:
            return planner(self.policy).act(obs, noise=left.pop(0))
        return planner(self.policy).act(obs, generator=_Given(left))


def network(policy: Any, shapes: Mapping[str, tuple[int, ...]], program: str) -> tuple[list[NoiseInput], bytes]:
    """An ONNX model of one row, and the noise that it reads."""
    keys = sorted(shapes)
    blank = {key: torch.zeros(1, *shapes[key], dtype=dtype_of(key)) for key in keys}
    feed = {f"obs.{key}": x for key, x in blank.items()}
    if any(key.startswith("goal") for key in keys):
        feed[GOAL_GIVEN] = torch.ones(1, 1)
    noise: list[NoiseInput] = []
    fixed = False
    if program == "tick":
        feed["base_action"] = torch.zeros(1, policy.spec.action.dim)
    else:
        asked = _Given(None)
        try:
            with torch.no_grad(), first_act():
                planner(policy).act(blank, generator=asked)
        except BurnishError:
            raise
        except Exception as error:  # a policy may hold one that is not ours, which raises what it likes
            raise _unwritten(policy, error) from error
        # Who has noise, but draws none, acts by its mean unless it is handed noise.
        spec: PolicySpec = policy.spec
        fixed = spec.noise_shape is not None and not asked.shapes
        drawn = [spec.noise_shape or ()] if fixed else asked.shapes
        noise = [NoiseInput(tuple(shape), drawn=not fixed) for shape in drawn]
        feed |= {f"noise.{i}": torch.zeros(1, *x.shape) for i, x in enumerate(noise)}
    try:
        with warnings.catch_warnings(), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")  # that numbers which are known become constants is what we want
            torch.onnx.export(
                _Acting(policy, program, keys, fixed).eval(),
                tuple(feed.values()),
                file := Path(folder) / "policy.onnx",
                input_names=list(feed),
                output_names=["actions"],
                opset_version=17,
                dynamo=False,
            )
            return noise, file.read_bytes()
    except (ImportError, RuntimeError, torch.onnx.OnnxExporterError) as error:
        raise _unwritten(policy, error) from error


def _unwritten(policy: Any, error: Exception) -> BurnishError:
    words = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return BurnishError(f"a {type(policy).__name__} cannot be written as a network: {words}")
