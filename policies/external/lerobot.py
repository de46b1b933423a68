"""``policy=lerobot``: any policy of LeRobot, played by LeRobot's own code in a Python of its own.

Its environment is made by ``burnish policies add lerobot``; BURNISH_LEROBOT_PYTHON names the interpreter of another one
that has LeRobot, with a GPU, other versions or plug-ins. A server there (`lerobot_server.py`) is asked as any other
policy server. Normalisation is LeRobot's own; actions come back in units of the actuators and become [-1, 1] by the
limits of the world.

Before anything is started, the folder is looked at: weights in safetensors, and processors of registered steps alone,
since LeRobot would import whatever code another step names. Models and tokenizers that it would open elsewhere are the
usual ones of its own policies, or named by the user in BURNISH_LEROBOT_OPENS. A checkpoint of a refined policy starts
nothing by its own word: the user names the place again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.errors import BurnishError
from ..core.files import is_plain
from ..core.language import Letters
from ..core.ranges import check_ranges
from ..core.scale import Scale
from ..core.spec import EnvSpec, ObsSpec, PolicySpec
from ..lerobot.checkpoint import ADAPTER, features, find, fingerprint, observed
from ..lerobot.names import BEFORE, BEHIND, CONFIG, WEIGHTS
from ..lerobot.stored import read_json
from . import lerobot_server as server
from .recipes import ENVIRONMENTS
from .remote import RemotePolicy
from .side_process import SideProcess

PYTHON = "BURNISH_LEROBOT_PYTHON"
OPENS = "BURNISH_LEROBOT_OPENS"
USUAL = {  # defaults of the policies of LeRobot 0.4.4 and 0.6.1
    *("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "google/paligemma-3b-pt-224", "facebook/bart-large"),
    *("physical-intelligence/fast", "lerobot/fast-action-tokenizer", "allenai/MolmoAct2-FAST-Tokenizer"),
    *("helper2424/resnet10", "lerobot/resnet10", "openai/clip-vit-base-patch16", "openai/clip-vit-base-patch32"),
    *("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen3-VL-2B-Instruct", "OpenGVLab/InternVL3-1B-hf", "google/umt5-xxl"),
    *("x-square-robot/wall-oss-flow", "facebook/vjepa2-vitl-fpc64-256", "Wan-AI/Wan2.2-TI2V-5B"),
    *("Wan-AI/Wan2.2-TI2V-5B-Diffusers", "robbyant/lingbot-va-base", "allenai/MolmoAct2", "lerobot/fastwam_base"),
}
# Settings whose word is a folder or a name on the hub; and those of config.json that only say where it came from.
OPENING = re.compile(
    r".*(model|tokenizer|encoder|processor|pretrained)_name(_or_path)?|.*(_path|_repo|model_id|vlm_base)"
)
TELLING = {"pretrained_path", "repo_id", "license", "tags"}
EMPTY = "observation.images.empty_camera"  # cameras of a VLA that are not there; LeRobot fills them in


@dataclass
class LeRobotConfig:
    """Settings of `policy=lerobot`: the folder, its names of observations, and the process that plays it."""

    path: str  # folder of a LeRobot checkpoint, or its name on the Hugging Face hub
    keys: dict[str, str] = field(default_factory=dict)  # our name of an observation: theirs; empty: the usual ones
    prompt: str | None = None  # instruction, for a policy that reads one; null: the world's own, if any
    execute: int | None = None  # actions of a chunk that are played; null: as its own settings say
    device: str = "cpu"  # device of the policy: cpu, cuda, cuda:1
    threads: int = 0  # CPU threads of torch there; 0: as torch chooses
    batch: int = 64  # rows of one request
    start_s: float = 900.0  # time limit for loading, in seconds
    timeout_s: float = 120.0  # time limit of one answer, in seconds
    sha256: str | None = None  # SHA-256 of the checkpoint's files; refused if it is another

    def __post_init__(self) -> None:
        check_ranges(
            self, {"[1, inf)": "batch execute", "[0, inf)": "threads", "(0, inf)": "start_s timeout_s"}, "policy."
        )


def doubt(config: LeRobotConfig, checkpoint: str) -> str:
    """Why a checkpoint's word is not enough to start LeRobot: it never is."""
    return "a program would be started for it"


class LeRobotPolicy(RemotePolicy):
    """A policy of LeRobot in a side process, frozen."""

    def __init__(self, config: LeRobotConfig, world: EnvSpec) -> None:
        folder = find(config.path)
        if folder is None:
            raise BurnishError(
                f"{config.path} holds no policy of LeRobot: that is a folder with {CONFIG} and {WEIGHTS}, or a name on "
                "the hub, owner/name"
            )
        require_plain(folder)
        sha256 = fingerprint(folder)
        if config.sha256 not in (None, sha256):
            raise BurnishError(f"{config.path} is another policy than the one that was used: its sha256 differs")
        self.config, self.world = replace(config, sha256=sha256), world
        self._letters = Letters() if config.prompt is None and "tokens" in world.obs.shapes else None
        python = os.environ.get(PYTHON) or ENVIRONMENTS.python("lerobot")
        first = {"folder": str(folder.absolute()), "device": config.device, "threads": config.threads}
        limits = {"start_s": config.start_s, "timeout_s": config.timeout_s}
        process = SideProcess(python, first, f"LeRobot with {config.path}", **limits)
        spec, names = self._described(folder, process.metadata)
        self.spec = self._reading(spec)
        self._meet(process, process.where, names)
        self.seeds_beside_noise = True
        self._scale = Scale(self.spec.action)

    def _described(self, folder: Path, said: Mapping[str, Any]) -> tuple[PolicySpec, dict[str, str]]:
        """The specification of what the server describes, and its names by ours."""
        if said.get("version") != server.VERSION:
            raise BurnishError(f"{folder} is played by another version of lerobot_server.py than this one")
        given = {name: x for name, x in said["input_features"].items() if not name.startswith(EMPTY)}
        found = observed(folder, {"input_features": given}, self.config.keys)
        (horizon, dim), world = said["chunk"], self.world
        if dim != world.action.dim:
            raise BurnishError(f"{self.config.path} acts in {dim} dimensions, the environment in {world.action.dim}")
        data = {
            "obs": ObsSpec({key: shape for key, _, shape in found.values()}),
            "action": world.action,
            "horizon": horizon,
            "execute": self.config.execute or said["execute"],
            "history": said["history"],
            "noise_shape": said["noise"],
            "control_hz": world.control_hz,
            "action_mode": world.action_mode,
            "pixels": world.pixels,
        }
        spec = PolicySpec.from_dict(PolicySpec(**data).to_dict())
        return spec, {key: name for name, (key, _, _) in found.items()}


def require_plain(folder: Path) -> None:
    """A checkpoint that LeRobot can be given: nothing in it leads elsewhere, or makes LeRobot import code."""
    settings = read_json(folder / CONFIG)
    if settings.get("use_peft"):
        raise BurnishError(f"{folder} is not whole (use_peft): {ADAPTER}")
    features(folder, settings, "input_features")
    _require_usual(folder / CONFIG, {name: x for name, x in settings.items() if name not in TELLING})
    files = [folder / name for name in (CONFIG, WEIGHTS, BEFORE, BEHIND)]
    for file in files[2:]:
        if not file.is_file():
            raise BurnishError(
                f"{folder} has no {file.name}: it was saved before LeRobot 0.4; bring it up to date in "
                "LeRobot's Python: python -m lerobot.processor.migrate_policy_normalization --pretrained-path ..."
            )
        steps = read_json(file).get("steps")
        for step in steps if isinstance(steps, list) else [None]:
            named = isinstance(step, Mapping) and isinstance(step.get("registry_name"), str)
            if step is None or not named or "class" in step:
                raise BurnishError(
                    f"{file} has a step without a registered name ({step!r:.200}), for which LeRobot would import "
                    "code; register it in a package (lerobot_policy_...), and name it so"
                )
            _require_usual(file, step.get("config"))
            if isinstance(kept := step.get("state_file"), str):
                files.append(folder / kept)
    for file in files:
        if file.parent != folder or not is_plain(file):
            raise BurnishError(f"{file} is missing, or is no plain file of {folder}")


def _require_usual(file: Path, settings: Any) -> None:
    """Refuse settings that make LeRobot open what is neither usual nor allowed by the user."""
    allowed = {name.strip() for name in os.environ.get(OPENS, "").split(",")}
    for name in _opened(settings):
        if name not in USUAL | allowed:
            raise BurnishError(
                f"{file} makes LeRobot open {name!r:.200}, which is not in its folder and no model that LeRobot's own "
                f"policies usually open; if you trust it, allow it in the environment: {OPENS}={name:.200}"
            )


def _opened(settings: Any, key: str = "") -> Iterator[str]:
    """The places in ``settings``, at any depth: what an opening setting says, and all that looks like a path."""
    if isinstance(settings, Mapping):
        for name, x in settings.items():
            yield from _opened(x, name)
    elif isinstance(settings, list):
        for x in settings:
            yield from _opened(x, key)
    elif isinstance(settings, str) and settings and (OPENING.fullmatch(key) or {*settings} & {*"/\\~"}):
        yield settings
