"""Limits on a stored world, since a checkpoint, a dataset or a bundle may be untrusted.

Plain settings alone: numbers within bounds, truth values, short names, short lists of these. A path is none of them.
Of the arguments of a Gymnasium environment only those of a list may be said: ``xml_file`` would open any file, wait at
a pipe for ever, or ask for more memory than there is. Of packages only those that are well known, or imported already,
may be asked for, and of callables only those of the modules that the user named, and classes of environments that are
imported already; of interpreters and addresses none. The command line may say more.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

from ..core.errors import BurnishError
from ..core.imports import named_modules

# Of the environments of Gymnasium, Gymnasium-Robotics, ALE and Meta-World: what changes rewards, starts, physics and
# what is observed, and names no file, no module and no other environment.
_ARGUMENTS = """
    camera_id camera_name height render_mode width
    contact_cost_range contact_cost_weight contact_force_range ctrl_cost_weight forward_reward_weight
    healthy_angle_range
    healthy_reward healthy_state_range healthy_z_range impact_cost_range impact_cost_weight reward_control_weight
    reward_dist_weight reward_near_weight uph_cost_weight
    exclude_current_positions_from_observation include_cfrc_ext_in_observation include_cinert_in_observation
    include_cvel_in_observation include_qfrc_actuator_in_observation terminate_when_unhealthy use_contact_forces
    frame_skip main_body reset_noise_scale
    continuous domain_randomize enable_wind g goal_velocity gravity hardcore lap_complete_percent turbulence_power
    wind_power
    continuing_task position_noise_range reset_target reward_type
    continuous_action_threshold difficulty frameskip full_action_space mode obs_type repeat_action_probability
    observation_height observation_width
    env_name reward_function_version
    task repeat robots seed control_freq reward_shaping tasks_to_complete
"""
# Packages that a stored world may import: well known, and registering environments is all that their import does.
KNOWN = ("gymnasium_robotics", "metaworld", "ogbench", "gym_pusht", "mani_skill", "shimmy", "robosuite", "ale_py")
ELSEWHERE = ("python", "address")  # of worlds that live in another Python or on another machine
ARGUMENTS = frozenset(_ARGUMENTS.split())
LARGEST = 1e6  # of any number; the sizes and counts below cost memory or time
LARGEST_OF = {"max_steps": 100_000, "control_hz": 10_000, "image_size": 1024, "width": 1024, "height": 1024,
              "observation_width": 1024, "observation_height": 1024, "dim": 1024, "axes": 64,
              "frame_skip": 1000, "frameskip": 1000, "repeat": 1000, "processes": 256}  # fmt: skip
LONGEST, DEEPEST = 16, 4  # entries of a list; mappings and lists within each other
_WORD, _ID = (
    re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ .:+-]{0,79}"),
    re.compile(r"[A-Za-z0-9_.-]{1,128}([/:][A-Za-z0-9_.-]{1,128})?"),
)


class Named(dict[str, Any]):
    """A world that the user named, as the plain data that datasets and checkpoints remember. It may say what a stored
    one may not; anything that was read from a file is no ``Named``."""


def plain_world(settings: Any, where: str, way_out: str = "") -> None:
    """Refuse settings of a world that are not plain; ``where`` names in the sentence who says so, and ``way_out`` what
    to do, if not to say them on the command line."""
    found = _strange(settings, "env", 0)
    if found:
        raise BurnishError(
            f"{where} says {found}; as it may be untrusted, it may say of a world known arguments alone, and give them "
            "numbers, truth values and short names"
            + (way_out or ". Where you trust it, say it yourself, for example env=gym env.id=... 'env.kwargs={...}'")
        )


def known_elsewhere(world: Mapping[str, Any] | None, imported: Collection[str]) -> bool:
    """A file's word alone makes this world in another process, which has ``imported`` these modules and no others."""
    if world is None:
        return False
    config = world.get("config") or {}
    names = {f"env.{key}": str(config[key]) for key in ("id", "package") if config.get(key)}
    asked = any(_unasked(key, name, imported, imported) for key, name in names.items())
    return not asked and not _strange(config, "env", 0)


def modules_of_prefix(name: str) -> list[str]:
    """The importable modules that ``prefix/Name-v0`` may mean; Meta-World's is ``metaworld``."""
    prefix, slash, _ = name.partition("/")
    low = prefix.lower()
    spelled = dict.fromkeys((prefix, low, low.replace("-", "_"), low.replace("-", ""))) if slash else {}
    return [module for module in spelled if module.isidentifier() and find_spec(module) is not None]


def _unasked(key: str, value: str, imported: Collection[str], called: Collection[str]) -> str:
    """The module that a setting of a world would import, or whose code it would call, without anybody's word; empty
    where there is none. ``called`` are the modules whose callables may be called."""
    if key == "env.id" and ":" in value:
        module = value.partition(":")[0]
        root = module.partition(".")[0]
        return "" if root in called and not module.endswith(".py") else root  # which would be read as a file
    modules = [value] if key == "env.package" else modules_of_prefix(value)
    roots = [module.partition(".")[0] for module in modules]
    return next((root for root in roots if root not in KNOWN and root not in imported), "")


def _is_environment(name: str) -> bool:
    """Whether it is a class of environments in a module that this process has imported, and none of Python's own."""
    module, _, attribute = name.partition(":")
    found = vars(sys.modules[module]).get(attribute) if module in sys.modules else None
    own = module.partition(".")[0] in sys.stdlib_module_names
    return isinstance(found, type) and not own and hasattr(found, "reset") and hasattr(found, "step")


def _strange(value: Any, name: str, depth: int) -> str:
    """The parts that are not plain, in words; empty where all are."""
    last = name.rpartition(".")[2]
    if value is None or type(value) is bool:
        return ""
    if depth > DEEPEST:
        return f"{name}, which is nested too deeply"
    if type(value) in (int, float):
        most = LARGEST_OF.get(last, LARGEST)
        endless = value in (math.inf, -math.inf) and last.endswith("_range")  # a limit that is none
        return "" if abs(value) <= most or endless else f"{name}={_shown(value)}, which is beyond {most:g}"
    if name.startswith("env.") and last in ELSEWHERE and name.count(".") == 1:
        return f"{name}={_shown(value)}, and files start and reach nothing"
    if isinstance(value, str):
        if not (_ID if name == "env.id" else _WORD).fullmatch(value):
            return f"{name}={_shown(value)}, which is no name"
        if name == "env.id" and _is_environment(value):
            return ""
        roots = {module.partition(".")[0] for module in named_modules()}
        module = _unasked(name, value, sys.modules, roots) if name in ("env.id", "env.package") else ""
        return module and f"{name}={value}, which would run code of {module} (BURNISH_IMPORT={module} lets it)"
    if isinstance(value, (list, tuple)):
        if len(value) > LONGEST:
            return f"{name} of {len(value)} entries, more than {LONGEST}"
        return next(filter(None, (_strange(item, name, depth + 1) for item in value)), "")
    if isinstance(value, Mapping):
        depth = -1 if name == "env.tasks" else depth  # of a world of many tasks, each of which is a world
        for key, item in value.items():
            if not (isinstance(key, str) and _WORD.fullmatch(key)):
                return f"{name}.{key!r:.80}, which is no name"
            if name == "env.kwargs" and key not in ARGUMENTS:
                return f"{name}.{key}={_shown(item)}, an argument that is not known to be harmless"
            if found := _strange(item, f"{name}.{key}", depth + 1):
                return found
        return ""
    return f"{name}={_shown(value)}, which is no plain value"


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.120}"
    except ValueError:  # a number of thousands of digits
        return "a number without end"
