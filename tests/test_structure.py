"""The walls of the house, read from the syntax trees: who may import whom, and what no file may contain.

A rule is a function from one module to complaints. Each is shown to be able to fail by ``CONTROLS``: small sources that
it must complain about, beside near misses that it must let pass.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("policies", "sim", "offline", "finetune", "real_robot", "configs")
# Besides the `__main__.py` files: `finetune.api` is the command line for programs, and entry points share the others.
# They make the worlds that settings name, so they may import ``sim``, and only entry points may import them.
ENTRY_POINTS = ("finetune.api", "finetune.refinement", "policies.acting")
LINES = 400  # The hard limit; half of it is where a file should think about splitting.


@dataclass(frozen=True)
class Module:
    path: str  # Relative to the root: "policies/core/types.py".
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def name(self) -> str:
        """Dotted, without the leading ``burnish``: "policies.core.types"; a package is named like its folder."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_entry_point(self) -> bool:
        return self.path.endswith("__main__.py") or self.name in ENTRY_POINTS

    def within(self, *prefixes: str) -> bool:
        return inside(self.name, prefixes)

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name); ours appear as "burnish.…", whether written relatively or absolutely.

        ``from x import y`` counts as "x.y", because y may be a module. Imports by name count too, where the name is
        written out.
        """
        package = ["burnish", *Path(self.path).parent.parts]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                start = package[: len(package) + 1 - node.level] if node.level else []
                base = ".".join([*start, *filter(None, [node.module])])
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Call) and last_name(node.func) == "import_module":
                for name in (
                    a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)
                ):
                    level = len(name) - len(name.lstrip("."))
                    start = package[: len(package) + 1 - level] if level else []
                    yield node.lineno, ".".join([*start, name.lstrip(".")])


def inside(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def last_name(node: ast.AST) -> str:
    """``f`` and ``a.b.f`` are both called "f"."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def nodes(module: Module, kind: type) -> Iterator:
    return (node for node in ast.walk(module.tree) if isinstance(node, kind))


# ---- who may import whom: the first line that fits a module holds. ----

POLICY_SIDE = tuple(
    f"real_robot.{name}"
    for name in (
        *("env", "recorder", "robots", "joints", "deployment", "shadow", "camera_observations", "serving"),
        *(f"export.{module}" for module in ("exporter", "parity")),
        *(f"inference.{module}" for module in ("client", "action_sources", "predictors", "realtime_chunking")),
    )
)
PHYSICS_SIDE = tuple(f"real_robot.{name}" for name in ("safety.collision", "drivers.twin", "emulators"))
# The rooms of `policies` that hold no policy.
SHARED = tuple(f"policies.{room}" for room in ("core", "data", "measure", "runs", "wire", "cli"))
WALLS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("policies.core",), ("policies.core",)),
    (("policies.measure",), ("policies.core", "policies.measure")),
    (("policies.wire",), ("policies.core", "policies.wire")),
    (("policies.runs",), ("policies.core", "policies.measure", "policies.runs")),
    (("policies.cli",), ("policies.core", "policies.runs", "policies.cli")),
    (("policies.external.onnx",), ("policies", "real_robot.export.network")),  # a leaf, as below
    (("policies",), ("policies",)),
    (("offline",), ("offline", "policies")),
    (("finetune",), ("finetune", "offline", "policies")),
    (("sim.guard",), ("sim", *SHARED, "real_robot.safety.guard")),  # a leaf
    (("sim",), ("sim", *SHARED)),
    (POLICY_SIDE, ("real_robot", *SHARED)),
    # These import the standard library alone.
    (("real_robot",), ("real_robot", *(f"policies.core.{name}" for name in ("errors", "files", "parent", "ranges")))),
    (("configs",), ()),
)

# Heavy packages have one door each.
DOORS: dict[str, tuple[str, ...]] = {
    "mujoco": ("sim", *PHYSICS_SIDE),
    "mani_skill": ("sim", *PHYSICS_SIDE),
    "diffusers": ("policies.diffusion",),
    "h5py": ("policies.data.formats.hdf5",),
    "transformers": ("policies.vla", "policies.external.lerobot_server"),
    "tokenizers": ("policies.vla.words",),
    "msgpack": ("policies.wire.codec", "policies.wire.schema"),
    "websockets": ("policies.wire.connection", "real_robot.serving.gateway"),
    "onnxruntime": ("real_robot.export.network",),
    "dynamixel_sdk": ("real_robot.drivers",),
    "scservo_sdk": ("real_robot.drivers",),
    "rtde_control": ("real_robot.drivers",),
    "rtde_receive": ("real_robot.drivers",),
    "cv2": ("real_robot.camera",),
    "hydra": ("policies.cli.cli", "policies.cli.overrides"),
    "omegaconf": ("policies.cli.cli",),
    "stable_baselines3": ("policies.gymnasium_adapters", "finetune.baselines"),
    "gymnasium.vector": ("policies.gymnasium_adapters", "finetune.baselines"),
    "huggingface_hub": ("policies.lerobot.hub",),
    "wandb": ("policies.runs.tracking",),
    "trackio": ("policies.runs.tracking",),
    "rerun": ("policies.runs.tracking",),
    "ray": ("policies.cli.ray_tasks",),
    "warp": ("sim.warp_physics",),
    "mujoco_warp": ("sim.warp_physics",),
    "lerobot": ("policies.lerobot.plugin", "policies.external.lerobot_server"),
}


def walls(module: Module) -> Iterator[str]:
    if module.is_entry_point:
        return
    allowed = next(targets for sources, targets in WALLS if module.within(*sources))
    for line, name in module.imports():
        ours = name.removeprefix("burnish.")
        if name != ours and not inside(ours, allowed):
            yield f"{line}: {module.name} may import {allowed or 'nothing'} of ours, not {ours}"
        # Who could import an entry point could import whatever that may; a package only hands its own on.
        hands_on = module.path.endswith("__init__.py") and inside(ours, (module.name,))
        if (inside(ours, ENTRY_POINTS) or "__main__" in ours.split(".")) and not hands_on:
            yield f"{line}: {ours} is an entry point, which only entry points may import"
        control_side = module.within("real_robot") and not module.within(*POLICY_SIDE)
        if control_side and (inside(ours, POLICY_SIDE) or inside(name, ("torch",))):
            yield f"{line}: {module.name} runs on the robot without torch, so it cannot import {ours}"


def no_library_in_main(module: Module) -> Iterator[str]:
    """A `__main__` file holds verbs, their settings and their groups; what several modules call has a module."""
    for line, name in module.imports():
        _, main, taken = name.partition(".__main__.")
        if main and name.startswith("burnish.") and taken != "GROUPS" and not taken.endswith("Config"):
            yield f"{line}: {taken} is imported from a __main__ file; move it to a module"


def doors(module: Module) -> Iterator[str]:
    if module.is_entry_point:
        return
    used = [(node.lineno, ast.unparse(node)) for node in nodes(module, ast.Attribute) if node.attr == "vector"]
    used = [(line, "gymnasium.vector") for line, text in used if text in ("gym.vector", "gymnasium.vector")]
    for line, name in [*module.imports(), *used]:
        for package, gateway in DOORS.items():
            if inside(name, (package,)) and not module.within(*gateway):
                yield f"{line}: {package} may be imported in {gateway} only"


def relative_imports(module: Module) -> Iterator[str]:
    for node in nodes(module, (ast.Import, ast.ImportFrom)):  # type: ignore[arg-type]
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        if not getattr(node, "level", 0) and any(inside(name, ("burnish", *FOLDERS)) for name in names):
            yield f"{node.lineno}: inside the package, imports of our own are relative"


# ---- what no file may contain. ----

PICKLES = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
EXECUTES = ("torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec", "__import__")
VAGUE = {"utils", "util", "common", "misc", "helpers", "helper"}
GYMNASIUM_FACES = ("policies.gymnasium_adapters", "sim.external")


def executes_nothing(module: Module) -> Iterator[str]:
    """No pickle, and no way for a configuration or a checkpoint to run code."""
    for line, name in module.imports():
        if inside(name, PICKLES) or name.endswith(".instantiate") or name in EXECUTES:
            yield f"{line}: {name} can run code that comes with data"
    for node in nodes(module, ast.Call):
        called = ast.unparse(node.func)
        if called in EXECUTES or last_name(node.func) == "instantiate":
            yield f"{node.lineno}: {called} can run code that comes with data"
        if any(keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False" for keyword in node.keywords):
            yield f"{node.lineno}: allow_pickle reads pickles"
    for node in nodes(module, ast.Constant):
        if node.value == "_target_":
            yield f"{node.lineno}: _target_ would name code in a configuration"


YAML_DOOR = "policies.runs.manifest"


def reads_plain_yaml(module: Module) -> Iterator[str]:
    """What is a few lines with anchors can be more than any memory, so YAML is read by ``plain_yaml`` alone."""
    if module.name == YAML_DOOR:
        return
    for node in ast.walk(module.tree):
        named = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        for name in [*named, last_name(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""]:
            if name in ("safe_load", "safe_load_all", "SafeLoader", "CSafeLoader"):
                yield f"{getattr(node, 'lineno', 0)}: {name}; use plain_yaml of {YAML_DOOR}"


def silent(module: Module) -> Iterator[str]:
    yield from (f"{n.lineno}: print" for n in nodes(module, ast.Call) if ast.unparse(n.func) == "print")


def names_what_it_catches(module: Module) -> Iterator[str]:
    yield from (f"{n.lineno}: bare except" for n in nodes(module, ast.ExceptHandler) if n.type is None)


def nothing_is_done(module: Module) -> Iterator[str]:
    """An end is terminated or truncated; only the faces to Gymnasium and SB3 know the other word."""
    if module.within(*GYMNASIUM_FACES):
        return
    for node in ast.walk(module.tree):
        fields = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname", "value")]
        if "done" in [field for field in fields if isinstance(field, str)]:
            yield f"{getattr(node, 'lineno', 0)}: done; say terminated, truncated or ended"


def explains_itself(module: Module) -> Iterator[str]:
    if module.tree.body and not ast.get_docstring(module.tree):  # An empty `__init__` has nothing to explain.
        yield "1: no module docstring"


def short(module: Module) -> Iterator[str]:
    count = len(module.source.splitlines())
    if count > LINES:
        yield f"{count}: more than {LINES} lines"


def named_after_a_topic(module: Module) -> Iterator[str]:
    yield from (f"1: {part} says nothing" for part in module.name.split(".") if part in VAGUE)


Rule = Callable[[Module], Iterator[str]]
EVERYWHERE: tuple[Rule, ...] = (silent, names_what_it_catches, explains_itself, short, named_after_a_topic)
IN_THE_PACKAGE: tuple[Rule, ...] = (
    walls,
    no_library_in_main,
    doors,
    relative_imports,
    executes_nothing,
    nothing_is_done,
)
WHERE_WE_READ: tuple[Rule, ...] = (reads_plain_yaml,)  # tests may read as others do


@cache
def modules(*folders: str) -> list[Module]:
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return [Module(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]


@pytest.mark.parametrize("rule", [*EVERYWHERE, *IN_THE_PACKAGE, *WHERE_WE_READ], ids=lambda rule: rule.__name__)
def test_the_tree_obeys(rule: Rule):
    found = modules(*FOLDERS) + (modules("tests", "benchmarks") if rule in EVERYWHERE else [])
    found += modules("benchmarks", "docs") if rule in WHERE_WE_READ else []
    assert len(found) >= len(FOLDERS), "the tree was not found, so nothing was examined"
    complaints = [f"{module.path}:{complaint}" for module in found for complaint in rule(module)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_no_configuration_names_code():
    files = [file for pattern in ("*.yaml", "*.yml") for file in (ROOT / "configs").rglob(pattern)]
    assert [file.name for file in files if "_target_" in file.read_text(encoding="utf-8")] == []


# rule -> (path, source, does the rule complain?)
CONTROLS: list[tuple[Rule, str, str, bool]] = [
    (walls, "policies/core/a.py", "from ..flow import FlowPolicy", True),
    (walls, "policies/core/a.py", "def f():\n    from ..data import episodes", True),
    (walls, "policies/core/a.py", "from .types import Obs", False),
    (walls, "policies/core/__init__.py", "from .types import Obs", False),
    (walls, "policies/nets/a.py", "from ...offline import critics", True),
    (walls, "policies/data/a.py", "from ..core.types import Obs", False),
    (walls, "policies/__main__.py", "from ..sim import toy", False),
    (walls, "finetune/api.py", "from ..sim import toy", False),
    (walls, "finetune/a.py", "from .api import load", True),
    (walls, "finetune/a.py", "from ..policies.__main__ import world_for", True),
    (walls, "finetune/a.py", "from .refinement import scene", True),
    (walls, "policies/a.py", "from .acting import acting_policy", True),
    (walls, "finetune/refinement.py", "from ..sim.build import make_env", False),
    (walls, "finetune/__init__.py", "def f():\n    from . import api", False),
    (walls, "finetune/__main__.py", "from ..policies.__main__ import world_for", False),
    (walls, "sim/a.py", "from ..policies import flow", True),
    (walls, "sim/a.py", "from ..policies.data.episodes import Episode", False),
    (walls, "sim/tasks/a.py", "import importlib\nimportlib.import_module('burnish.finetune.ppo')", True),
    (walls, "sim/a.py", "from importlib import import_module\nimport_module('..offline.td', __package__)", True),
    (walls, "sim/a.py", "from importlib import import_module\nimport_module('.toy', __package__)", False),
    (walls, "offline/a.py", "from ..sim.toy import LQR", True),
    (walls, "offline/a.py", "from ..finetune import ppo", True),
    (walls, "finetune/a.py", "from .. import sim", True),
    (walls, "finetune/a.py", "from ..offline.td import td_target", False),
    (walls, "real_robot/safety/guard.py", "from ...policies.core import types", True),
    (walls, "real_robot/safety/guard.py", "import torch", True),
    (walls, "real_robot/export/bundle.py", "from ..policies.core.files import replace", False),
    (walls, "real_robot/control/loop.py", "from ..serving.server import Server", True),
    (walls, "real_robot/drivers/a.py", "from ..adapter import Adapter", False),
    (walls, "real_robot/env.py", "import torch\nfrom ..policies.core.types import Obs", False),
    (walls, "real_robot/env.py", "from ..policies.flow import FlowPolicy", True),
    (walls, "sim/guard.py", "from ..real_robot.safety.guard import JointGuard", False),
    (walls, "sim/batch.py", "from ..real_robot.safety.guard import JointGuard", True),
    (walls, "configs/__init__.py", "from ..policies import core", True),
    (no_library_in_main, "finetune/api.py", "from .__main__ import GROUPS, refinement", True),
    (no_library_in_main, "offline/__main__.py", "from ..policies.__main__ import acting_policy", True),
    (no_library_in_main, "finetune/api.py", "from .__main__ import GROUPS, FinetuneConfig", False),
    (doors, "policies/flow.py", "import mujoco", True),
    (doors, "policies/cli/doctor.py", "from importlib import import_module\nimport_module('mujoco')", True),
    (doors, "sim/tasks/a.py", "import mujoco.viewer", False),
    (doors, "sim/a.py", "import mujoco_other", False),
    (doors, "real_robot/safety/guard.py", "import mujoco", True),
    (doors, "real_robot/emulators/a.py", "import mujoco", False),
    (doors, "policies/flow.py", "def f():\n    from diffusers import DDPMScheduler", True),
    (doors, "policies/diffusion.py", "from diffusers import DDPMScheduler", False),
    (doors, "policies/nets/a.py", "import transformers", True),
    (doors, "policies/external/remote.py", "def f():\n    from websockets.sync.client import connect", True),
    (doors, "policies/wire/connection.py", "from websockets.sync.client import connect", False),
    (doors, "policies/external/policy.py", "import onnxruntime", True),
    (doors, "policies/external/onnx.py", "from .core.errors import BurnishError", False),
    (doors, "policies/runs/run.py", "from omegaconf import OmegaConf", True),
    (doors, "sim/__main__.py", "import hydra", False),
    (doors, "policies/runs/run.py", "def f():\n    import wandb", True),
    (doors, "policies/runs/tracking.py", "import rerun", False),
    (doors, "finetune/ppo.py", "import stable_baselines3", True),
    (doors, "sim/a.py", "import gymnasium as gym\ngym.vector.SyncVectorEnv", True),
    (doors, "sim/a.py", "from gymnasium import vector", True),
    (doors, "policies/gymnasium_adapters.py", "from gymnasium.vector import VectorEnv", False),
    (relative_imports, "sim/a.py", "from burnish.policies.core import types", True),
    (relative_imports, "sim/a.py", "import policies.core", True),
    (relative_imports, "sim/a.py", "from ..policies.core import types\nimport simple", False),
    (executes_nothing, "sim/a.py", "import pickle", True),
    (executes_nothing, "sim/a.py", "import torch\ntorch.load('x')", True),
    (executes_nothing, "sim/a.py", "eval('1')", True),
    (executes_nothing, "sim/a.py", "exec('1')", True),
    (executes_nothing, "sim/a.py", "network.eval()", False),
    (executes_nothing, "sim/a.py", "import hydra\nhydra.utils.instantiate(config)", True),
    (executes_nothing, "sim/a.py", "from hydra.utils import instantiate", True),
    (executes_nothing, "sim/a.py", "config = {'_target_': 'os.system'}", True),
    (executes_nothing, "sim/a.py", "numpy.load(file, allow_pickle=True)", True),
    (executes_nothing, "sim/a.py", "numpy.load(file, allow_pickle=False)", False),
    (reads_plain_yaml, "sim/a.py", "import yaml\nyaml.safe_load('1')", True),
    (reads_plain_yaml, "sim/a.py", "from yaml import safe_load as read", True),
    (reads_plain_yaml, "sim/a.py", "parse(path, yaml.safe_load)", True),
    (reads_plain_yaml, "policies/runs/manifest.py", "class Plain(yaml.SafeLoader): ...", False),
    (reads_plain_yaml, "sim/a.py", "yaml.safe_dump({})\nplain_yaml('1')", False),
    (silent, "sim/a.py", "print(1)", True),
    (silent, "sim/a.py", "'print(1)'", False),
    (names_what_it_catches, "sim/a.py", "try:\n    f()\nexcept:\n    g()", True),
    (names_what_it_catches, "sim/a.py", "try:\n    f()\nexcept OSError:\n    g()", False),
    (nothing_is_done, "offline/a.py", "done = terminated", True),
    (nothing_is_done, "offline/a.py", "batch['done']", True),
    (nothing_is_done, "offline/a.py", "batch.done", True),
    (nothing_is_done, "offline/a.py", "def f(done): ...", True),
    (nothing_is_done, "offline/a.py", "f(done=1)", True),
    (nothing_is_done, "policies/data/a.py", "row['next.done']", False),
    (nothing_is_done, "sim/external/worlds.py", "done = terminated | truncated", False),
    (explains_itself, "sim/a.py", "import math", True),
    (explains_itself, "sim/a.py", "'''What it is.'''", False),
    (short, "sim/a.py", "x = 1\n" * 401, True),
    (short, "sim/a.py", "x = 1\n" * 400, False),
    (named_after_a_topic, "sim/utils.py", "", True),
    (named_after_a_topic, "policies/common/__init__.py", "", True),
    (named_after_a_topic, "policies/nets/mlp.py", "", False),
]


@pytest.mark.parametrize(("rule", "path", "source", "complains"), CONTROLS)
def test_each_rule_can_fail(rule: Rule, path: str, source: str, complains: bool):
    assert bool(list(rule(Module(path, source)))) == complains


def test_each_rule_has_controls_of_both_kinds():
    for rule in (*EVERYWHERE, *IN_THE_PACKAGE, *WHERE_WE_READ):
        assert {complains for other, _, _, complains in CONTROLS if other is rule} == {True, False}
