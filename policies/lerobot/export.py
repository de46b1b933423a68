"""A policy of ours for LeRobot: ``burnish export to=lerobot``.

Where LeRobot has policies of this kind it becomes one of LeRobot's own checkpoints (`native.py`, a SmolVLA by
`policies/vla/lerobot.py`), which is read again and must act alike, or nothing is left. Anything else, refinements among
them, becomes a plug-in policy, unless it reads instructions:

    config.json          settings of LeRobot, and the description of the policy that a checkpoint of ours has
    model.safetensors    its weights
    policy_*.json        processors, which do not change a number: the policy has its own normalisation
    plugin/              a package without code of its own, so that LeRobot finds the type "burnish"

The plug-in imports Burnish, and the folder holds data alone. A package that could do without Burnish would have to
carry the code of every policy; here code comes from what was installed, and LeRobot plays what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from ..build import EXTERNAL, SmolVLALoadConfig, describe, load_policy
from ..core.errors import BurnishError
from ..core.files import remove, write_folder
from ..core.seed import RowNoise
from ..core.spec import dtype_of
from ..runs.manifest import burnish_version
from ..runs.state_codec import separate
from ..vla import lerobot as vla
from ..vla.smolvla import SmolVLA
from . import native
from .names import BEFORE, BEHIND, CONFIG, PLUGIN, WEIGHTS
from .player import features

TOLERANCE = 1e-5  # of actions in [-1, 1]: sums of some hundred float32 products in another order
ROWS = 64  # random observations on which a native checkpoint must act as the policy does
FEW_ROWS = 2  # of a vision-language-action model, which takes seconds for each
PACKAGE = "lerobot_policy_burnish"
PYPROJECT = """[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "{package}"
version = "{version}"
description = "Policies of Burnish in LeRobot: the policy type burnish"
dependencies = ["burnish"]

[tool.setuptools]
packages = ["{package}"]
"""
INIT = '''"""LeRobot imports this package because of its name; it makes the policy type "burnish" known."""

from burnish.policies.lerobot.plugin.configuration_burnish import BurnishConfig
from burnish.policies.lerobot.plugin.modeling_burnish import BurnishPolicy
from burnish.policies.lerobot.plugin.processor_burnish import make_burnish_pre_post_processors

__all__ = ["BurnishConfig", "BurnishPolicy", "make_burnish_pre_post_processors"]
'''


def export(policy: Any, origin: Mapping[str, Any], out: Path | str) -> str:
    """Writes the folder; returns a sentence about the form that it has."""
    if not isinstance(policy, nn.Module) or _has_external(described := describe(policy, origin)):
        raise BurnishError(
            "its base is a policy of another library, whose weights are not here, so LeRobot cannot run it"
        )
    try:
        files = vla.content_of(policy) if isinstance(policy, SmolVLA) else native.files(policy)
    except BurnishError as error:
        spec: Any = policy.spec
        if "tokens" in spec.obs.shapes:
            raise BurnishError(
                f"{error}; and a plug-in policy is not told the instruction, which this one reads; serve it instead: "
                "burnish serve"
            ) from error
        write_folder(out, plugin(policy, described))
        return (
            f"a plug-in policy, since {error}. Where LeRobot runs: pip install --no-deps {out}/plugin, beside burnish; "
            f"then lerobot-eval --policy.path={out}"
        )
    written = write_folder(out, files)
    try:
        if isinstance(policy, SmolVLA):
            chosen = SmolVLALoadConfig(str(written), frozen_dtype=policy.config.frozen_dtype)
            again, _ = load_policy(written, chosen=chosen)
            again.words = getattr(policy, "words", None)  # the tokenizer is not in such a folder
            apart = distance(policy, again, FEW_ROWS)
        else:
            apart = distance(policy, load_policy(written)[0])
    except BurnishError:
        remove(written)
        raise
    if apart > TOLERANCE:
        remove(written)
        raise BurnishError(f"read again, the checkpoint acts otherwise, by {apart:.1e} of [-1, 1]; nothing was written")
    return f"a checkpoint of LeRobot's own, which acts alike within {apart:.1e}; lerobot-eval --policy.path={out}"


def plugin(policy: Any, described: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a plug-in policy, by name."""
    spec = policy.spec
    seen = {name: {"type": kind, "shape": list(shape)} for name, kind, shape in features(policy).values()}
    settings = {
        **{"type": PLUGIN, "n_obs_steps": spec.history, "n_action_steps": spec.execute, "push_to_hub": False},
        **{"input_features": seen, "output_features": {"action": {"type": "ACTION", "shape": [spec.action.dim]}}},
        **{"normalization_mapping": {}, "device": "cpu", PLUGIN: dict(described)},
    }
    weights = {f"policy.{name}": x for name, x in policy.state_dict().items()}
    package = {
        "plugin/pyproject.toml": PYPROJECT.format(package=PACKAGE, version=burnish_version()).encode(),
        f"plugin/{PACKAGE}/__init__.py": INIT.encode(),
    }
    return {
        CONFIG: native.as_json(settings),
        WEIGHTS: safetensors.torch.save(separate(weights)),
        **native.processor(BEFORE, None, {}),
        **native.processor(BEHIND, None, {}),
        **package,
    }


@torch.no_grad()
def distance(policy: Any, other: Any, rows: int = ROWS) -> float:
    """The largest difference of their chunks, of the same random observations and noise."""
    source = torch.Generator().manual_seed(0)
    obs = {}
    for key, shape in policy.spec.inputs.shapes.items():
        whole = (rows, *shape)
        image = dtype_of(key) is torch.uint8
        x = torch.randint(0, 256, whole, generator=source) if image else torch.randn(whole, generator=source)
        obs[key] = x.to(dtype_of(key))
    seeds = torch.arange(rows)
    chunks = [x.act(obs, generator=RowNoise(seeds, seeds)) for x in (policy, other)]
    return float((chunks[0] - chunks[1]).abs().max())


def _has_external(described: Any) -> bool:
    if not isinstance(described, Mapping):
        return False
    return described.get("policy") == EXTERNAL or any(map(_has_external, described.get("parts", {}).values()))
