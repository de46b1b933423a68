"""A stand-in for LeRobot, with the modules, names and habits that `lerobot_server.py` relies on, in a few lines.

Its policies act by formulae: of the state, of the middle of a picture, of the length of the prompt, of noise. Its
processors double the state before, and turn actions into tens behind; and they leave an empty place for an action.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import ones

CONFIGS = """
import json, os
from types import SimpleNamespace

class Feature:
    def __init__(self, type, shape):
        self.type, self.shape = SimpleNamespace(name=type), tuple(shape)

class PreTrainedConfig:
    known = ["chunked", "steered", "deaf", "drawing", "scheduled", "single", "broken", "frozen"]

    @classmethod
    def get_known_choices(cls):
        return {name: None for name in cls.known}

    @classmethod
    def from_pretrained(cls, folder):
        with open(os.path.join(folder, "config.json")) as file:
            said = json.load(file)
        config = SimpleNamespace(use_amp=False, n_obs_steps=1)
        vars(config).update(said)
        for name in ("input_features", "output_features"):
            setattr(config, name, {key: Feature(**x) for key, x in said[name].items()})
        return config
"""
FACTORY = """
import os, sys, time
from collections import deque
from types import SimpleNamespace
import torch

class Chunked:
    def __init__(self, config):
        self.config = config
        self.reset()

    def reset(self): ...

    def predict_action_chunk(self, batch):
        return self.base(batch)

    def base(self, batch):
        assert "action" not in batch
        total = batch["observation.state"].flatten(1).sum(1)
        if "observation.images.front" in batch:
            total = total + batch["observation.images.front"][:, 2, 1, 2]
        if "task" in batch:
            total = total + torch.tensor([float(len(x)) for x in batch["task"]])
        ramp = torch.arange(float(self.config.chunk_size))
        return torch.stack([total[:, None] + ramp, total[:, None] - ramp], 2) / 10

class Steered(Chunked):
    def predict_action_chunk(self, batch, noise=None):
        return self.base(batch) + 0.1 * noise.sum(2, keepdim=True) if noise is not None else self.base(batch)

class Deaf(Chunked):
    def predict_action_chunk(self, batch, noise=None, **kwargs):
        return self.base(batch)

class Drawing(Chunked):
    def predict_action_chunk(self, batch):
        return self.base(batch) + torch.randn(len(batch["observation.state"]), 1, 1)

class Scheduler:
    def step(self, x, generator=None):
        assert isinstance(generator, list) and len(generator) == len(x)
        return x + torch.cat([torch.randn(1, *x.shape[1:], generator=source) for source in generator])

class Scheduled(Steered):  # as LeRobot's diffusion: its chunk comes out of its queues
    diffusion = SimpleNamespace(noise_scheduler=Scheduler())

    def reset(self):
        self._queues = {"observation.state": deque(maxlen=self.config.n_obs_steps), "action": deque(maxlen=4)}

    def predict_action_chunk(self, batch, noise=None):
        seen = {key: torch.stack(list(self._queues[key]), 1) for key in batch if key in self._queues}
        weights = torch.tensor([1.0, 100.0])[:, None]
        base = self.base({"observation.state": seen["observation.state"] * weights})
        noise = torch.zeros(len(base), self.config.horizon, 2) if noise is None else noise
        return base + self.diffusion.noise_scheduler.step(noise)[:, : base.shape[1]]

class Single(Chunked):
    def predict_action_chunk(self, batch):
        raise NotImplementedError

    def select_action(self, batch):
        return self.base(batch)[:, 0]

class Broken(Chunked):
    def predict_action_chunk(self, batch):
        if batch["observation.state"].any():
            raise ValueError("\\x1b[2Jthe text of a policy")
        return self.base(batch)

class Frozen(Chunked):
    def predict_action_chunk(self, batch):
        if batch["observation.state"].any():
            print("\\x1b]0;standing still", flush=True)
            time.sleep(60)
        return self.base(batch)

def get_policy_class(name):
    policy = dict(chunked=Chunked, steered=Steered, deaf=Deaf, drawing=Drawing, scheduled=Scheduled, single=Single,
                  broken=Broken, frozen=Frozen, plugged=Chunked)[name]
    def from_pretrained(folder, config, strict):
        assert strict and config.device == "cpu"
        return policy(config)
    return SimpleNamespace(from_pretrained=from_pretrained, name=name)

def make_pre_post_processors(config, folder, preprocessor_overrides):
    assert preprocessor_overrides == {"device_processor": {"device": "cpu"}}
    def before(frame):
        return {**frame, "observation.state": 2 * frame["observation.state"], "action": None}
    return before, lambda actions: 10 * actions
"""
PLUGINS = """
def register_third_party_plugins():
    from lerobot.configs.policies import PreTrainedConfig
    PreTrainedConfig.known.append("plugged")
"""


def install(folder: Path) -> Path:
    """The package, below ``folder``, which belongs on the path."""
    files = {
        "__init__": "__version__ = '0'",
        "policies/__init__": "",
        "policies/factory": FACTORY,
        "configs/__init__": "",
        "configs/policies": CONFIGS,
        "utils/__init__": "",
        "utils/import_utils": PLUGINS,
    }
    for name, text in files.items():
        path = folder / "lerobot" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def save(folder: Path, kind: str, *, picture: bool = False, **settings: object) -> Path:
    """A checkpoint as LeRobot writes it; ``settings`` are further ones of its config.json."""
    folder.mkdir(parents=True)
    features = {"observation.state": {"type": "STATE", "shape": [2]}}
    if picture:
        features["observation.images.front"] = {"type": "VISUAL", "shape": [3, 4, 5]}
        features["observation.images.empty_camera_0"] = {"type": "VISUAL", "shape": [3, 4, 5]}
    config = {
        "type": kind,
        "input_features": features,
        "output_features": {"action": {"type": "ACTION", "shape": [2]}},
        "chunk_size": 3,
        "n_action_steps": 2,
    }
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    steps = [
        {"registry_name": "device_processor", "config": {}},
        {"registry_name": "normalizer_processor", "config": {}, "state_file": "statistics.safetensors"},
    ]
    for place in ("pre", "post"):
        (folder / f"policy_{place}processor.json").write_text(json.dumps({"steps": steps}))
    save_file({"x": ones(1)}, folder / "model.safetensors")
    save_file({"x": ones(1)}, folder / "statistics.safetensors")
    return folder
