"""Policies for LeRobot: its own checkpoints under its own names, and plug-in policies, checked without LeRobot.

`tests/lerobot_policies` holds what LeRobot 0.4.4 saved itself; a policy that is written back must be the same.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save_file
from test_lerobot_policies import CLOSE, NAMES, STORED, AsLeRobot, chunk_of, recorded
from verb_lab import refused

from burnish.policies.build import load_policy
from burnish.policies.cli.cli import main
from burnish.policies.compose import Greedy
from burnish.policies.controllers import controller_for
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.files import write_folder
from burnish.policies.core.offset import OffsetConfig
from burnish.policies.core.scale import Scale
from burnish.policies.core.spec import PolicySpec
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.lerobot import native
from burnish.policies.lerobot.export import INIT, PACKAGE, distance, export
from burnish.policies.lerobot.player import Player
from burnish.policies.schedule import Spacing
from burnish.real_robot.export.exporter import assembled
from burnish.real_robot.export.parity import report
from burnish.real_robot.export.runtime import ChunkController, ExportedPolicy
from burnish.sim.build import seen_by
from export_lab import residual

# Settings that LeRobot has in its files, and that say nothing of how a policy acts.
OF_TRAINING = {"use_amp", "use_peft", "repo_id", "private", "tags", "license", "pretrained_path", "drop_n_last_frames"}
OF_TRAINING |= {"crop_ratio", "crop_is_random", "pretrained_backbone_weights", "compile_model", "compile_mode"}
OF_TRAINING |= {"do_mask_loss_for_padding", "scheduler_name", "scheduler_warmup_steps", "temporal_ensemble_coeff"}


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_of_lerobot_is_written_as_lerobot_wrote_it(name, tmp_path, monkeypatch):
    files = native.files(load_policy(STORED / name)[0])
    theirs = json.loads((STORED / name / "config.json").read_text())
    ours = json.loads(files["config.json"])
    acts = {key for key in theirs if key not in OF_TRAINING and not key.startswith("optimizer_")}
    assert acts == ours.keys() - OF_TRAINING
    acts -= {"num_inference_steps", "normalization_mapping"}  # null: as in training; of cameras that are not there
    assert {key: ours[key] for key in acts} == {key: theirs[key] for key in acts}
    assert ours["normalization_mapping"].items() <= {**theirs["normalization_mapping"], "ENV": "IDENTITY"}.items()
    weights, kept = load(files["model.safetensors"]), load_file(STORED / name / "model.safetensors")
    assert weights.keys() == kept.keys() and all(torch.equal(x, kept[key]) for key, x in weights.items())
    for place in ("pre", "post"):
        steps = [json.loads(x)["steps"] for x in (files[f"policy_{place}processor.json"], _stored(name, place))]
        assert [[x["registry_name"], x.get("state_file")] for x in steps[0]] == [
            [x["registry_name"], x.get("state_file")] for x in steps[1]
        ]
    for file in (x for x in files if x.startswith("policy_") and x.endswith(".safetensors")):
        theirs = load_file(STORED / name / file)
        assert all(torch.allclose(x, theirs[key], rtol=1e-6) for key, x in load(files[file]).items())
    again, _ = load_policy(write_folder(tmp_path / "back", files))
    assert (chunk_of(again, name, monkeypatch) - recorded(name)[3]).abs().max() < CLOSE


def _stored(name, place):
    return (STORED / name / f"policy_{place}processor.json").read_text()


def test_a_checkpoint_that_acts_otherwise_is_removed(tmp_path, monkeypatch):
    policy, _ = load_policy(STORED / "act")
    assert "LeRobot's own" in export(policy, {}, tmp_path / "same")  # the control
    other, _ = load_policy(tmp_path / "same")
    other.model.action_head.bias.data += 0.01
    assert distance(policy, other) > CLOSE
    monkeypatch.setattr("burnish.policies.lerobot.export.load_policy", lambda path: (other, {}))
    with pytest.raises(BurnishError, match="acts otherwise"):
        export(policy, {}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_observations_keep_the_names_of_lerobot():
    keys = {"environment_state": "state", "state": "environment_state"}
    shown = json.loads(native.files(load_policy(STORED / "act", keys=keys)[0])["config.json"])["input_features"]
    assert shown == json.loads((STORED / "act" / "config.json").read_text())["input_features"]


def _changed(policy, **changes):
    policy.config = replace(policy.config, **changes)
    return policy


def _with_spec(policy, **changes):
    policy.spec = replace(policy.spec, **changes)
    return policy


def _spaced(policy):
    policy = _changed(policy, spacing=Spacing.trailing)
    policy.num_steps = 3
    return policy


def _mixed(policy):
    policy.net.inputs.features[1] = replace(policy.net.inputs.features[1], kind=policy.net.inputs.features[0].kind)
    return policy


REFUSED = {
    "noise in DDIM": (lambda policy: _changed(policy, eta=0.5), "eta=0.5"),
    "other noise levels": (_spaced, "spacing=trailing"),
    "no clip": (lambda policy: _changed(policy, clip=None), "clips no actions"),
    "a chunk that begins elsewhere": (lambda policy: _with_spec(policy, start=0), "start=0"),
    "a chunk of another length": (lambda policy: _with_spec(policy, horizon=6), "horizon=6"),
    "two normalisations of one type": (_mixed, "alike"),
    "another policy": (lambda policy: residual("step", policy), "a Residual"),
}


@pytest.mark.parametrize(("change", "sentence"), REFUSED.values(), ids=REFUSED)
def test_lerobot_has_no_such_policy(change, sentence):
    policy, _ = load_policy(STORED / "diffusion_ddim")
    native.files(policy)  # the control
    with pytest.raises(BurnishError, match=sentence) as refusal:
        native.files(change(policy))
    assert "\n" not in str(refusal.value)


# ---- Plug-in policies ----


@pytest.fixture(scope="module", params=[None, OffsetConfig(half_life=0.5)], ids=["of a tick", "lasting"])
def plugged(request, tmp_path_factory):
    """A policy with a correction per tick, and the folder that it was written to."""
    policy, folder = residual("step", offset=request.param).eval(), tmp_path_factory.mktemp("plugged") / "out"
    assert "plug-in" in export(policy, {"env": {"name": "reach"}}, folder)
    return policy, folder


def batches(policy, count=5, rows=3):
    source = torch.Generator().manual_seed(0)
    shapes = policy.spec.obs.shapes
    return [
        {f"observation.{k}": torch.randn(rows, *s, generator=source) for k, s in shapes.items()} for _ in range(count)
    ]


def test_a_refinement_is_written_as_a_plugin_policy(plugged):
    policy, folder = plugged
    again, origin = load_policy(folder)
    state = again.state_dict()
    assert origin == {"env": {"name": "reach"}}
    assert all(torch.equal(x, state[key]) for key, x in policy.state_dict().items())
    settings = json.loads((folder / "config.json").read_text())
    assert settings["type"] == "burnish" and settings["n_action_steps"] == policy.spec.execute
    assert settings["input_features"] == {"observation.state": {"type": "STATE", "shape": [3]}}
    for place in ("pre", "post"):
        steps = json.loads((folder / f"policy_{place}processor.json").read_text())["steps"]
        assert not any("normalizer" in step["registry_name"] for step in steps), "the policy has its own normalisation"
    assert (folder / "plugin" / PACKAGE / "__init__.py").read_text() == INIT
    assert f'name = "{PACKAGE}"' in (folder / "plugin" / "pyproject.toml").read_text()


class Config:
    """LeRobot's `PreTrainedConfig`, as far as a plug-in sees it."""

    def __init_subclass__(cls):
        cls.device = "cpu"

    @classmethod
    def register_subclass(cls, name):
        return lambda kind: cls.known.update({name: kind}) or kind

    known: dict = {}  # noqa: RUF012


class Pretrained(torch.nn.Module):
    """LeRobot's `PreTrainedPolicy`, likewise."""

    def __init__(self, config):
        super().__init__()
        self.config = config


@pytest.fixture
def plugin(monkeypatch):
    """The module `modeling_burnish` beside a LeRobot of two classes."""
    stubs = {
        "lerobot.configs.policies": {"PreTrainedConfig": Config},
        "lerobot.configs.types": {"NormalizationMode": str},
        "lerobot.policies.pretrained": {"PreTrainedPolicy": Pretrained},
    }
    for name, content in stubs.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(name))
        vars(sys.modules[name]).update(content)
    yield importlib.import_module("burnish.policies.lerobot.plugin.modeling_burnish")
    for name in [x for x in sys.modules if x.startswith("burnish.policies.lerobot.plugin.")]:
        del sys.modules[name]


def test_lerobot_plays_the_plugin_as_we_do(plugged, plugin):
    policy, folder = plugged
    kind = Config.known["burnish"]
    config = kind()
    described = json.loads((folder / "config.json").read_text())
    config.burnish, config.n_obs_steps = described["burnish"], described["n_obs_steps"]
    given = str(folder / "model.safetensors"), "cpu", False
    config.n_action_steps = policy.spec.execute + 1
    with pytest.raises(BurnishError, match=f"this policy plays with {policy.spec.execute}"):
        plugin.BurnishPolicy._load_as_safetensor(plugin.BurnishPolicy(config), *given)
    config.n_action_steps = described["n_action_steps"]
    loaded = plugin.BurnishPolicy._load_as_safetensor(plugin.BurnishPolicy(config), *given)
    controller, scale = controller_for(policy, 3), Scale(policy.spec.action)
    loaded.reset()
    controller.reset(torch.ones(3, dtype=torch.bool))
    for batch in batches(policy):
        ours = scale.to_actuator(controller.step({"state": batch["observation.state"]}))
        assert torch.equal(loaded.select_action({**batch, "task": ["reach"] * 3, "action": None}), ours)
    with pytest.raises(BurnishError, match="does not train"):
        loaded.forward({})
    with pytest.raises(BurnishError, match="does not train"):
        plugin.BurnishPolicy(config).reset()  # without weights


def test_a_player_stacks_frames_as_a_world_does():
    policy, _ = load_policy(STORED / "diffusion_ddim")
    view, player = seen_by(policy.spec, AsLeRobot(2)), Player(policy)
    controller, scale = controller_for(policy, 2), Scale(policy.spec.action)
    for seeds in ([1, 2], [3, 4]):  # the second episode forgets the frames of the first
        obs = view.reset(None, seeds)
        controller.reset(torch.ones(2, dtype=torch.bool))
        player.reset()
        for _ in range(5):
            action = controller.step(obs)
            ours = player.step({f"observation.{key}": x[:, -1] for key, x in obs.items()})
            assert torch.equal(ours, scale.to_actuator(action))
            obs = view.step(action).obs
    frame = {f"observation.{key}": x[:1, -1] for key, x in obs.items()}
    assert player.step(frame).shape == (1, 3), "another number of rows begins anew"
    with pytest.raises(BurnishError, match="environment_state"):
        player.step({"observation.state": frame["observation.state"]})


def test_pictures_come_as_shares_of_white():
    spec = load_policy(STORED / "act")[0].spec
    seen = {}

    class Looks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.spec = PolicySpec(replace(spec.obs, shapes={"image.top": (3, 2, 2)}), spec.action, 2, 1)

        def act(self, obs, **how):
            seen.update(obs)
            return torch.zeros(1, 2, 3)

    picture = torch.arange(12, dtype=torch.uint8).view(1, 3, 2, 2) * 20
    Player(Looks()).chunk({"observation.images.top": picture.float() / 255})
    assert torch.equal(seen["image.top"], picture)


@pytest.mark.parametrize("change", ["description", "shape", "link"])
def test_a_plugin_that_was_changed_is_refused(change, plugged, tmp_path):
    _, folder = plugged
    settings = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    if change == "description":
        settings["burnish"] = "flow"
    if change == "shape":
        weights = {key: x[:1].clone() for key, x in weights.items()}
    copy = write_folder(tmp_path / "copy", {"config.json": json.dumps(settings)})
    if change == "link":
        (copy / "model.safetensors").symlink_to(folder / "model.safetensors")
    else:
        save_file(weights, copy / "model.safetensors")
    sentence = {"description": "describes no policy", "shape": "do not fit", "link": "no plain file"}[change]
    with pytest.raises(BurnishError, match=sentence):
        load_policy(copy)


def test_a_base_that_is_not_ours_is_refused(tmp_path):
    base = load_policy(STORED / "act")[0]
    foreign = CallablePolicy(lambda obs: torch.zeros(1), base.spec)
    with pytest.raises(BurnishError, match="another library"):
        export(foreign, {}, tmp_path / "out")
    with pytest.raises(BurnishError, match="another library"):
        export(residual("step", foreign), {}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- The command, and bundles of such policies ----


def test_the_command_says_which_form_it_took(tmp_path, capsys):
    words = ["export", f"policy.path={STORED / 'act'}", "to=lerobot", f"out={tmp_path / 'out'}"]
    assert main(words) == 0
    assert "a checkpoint of LeRobot's own" in capsys.readouterr().out
    assert "exists already" in refused(capsys, *words)


def test_a_policy_of_lerobot_becomes_a_bundle(tmp_path):
    out = tmp_path / "out"
    assert main(["export", f"policy.path={STORED / 'act'}", f"out={out}", "samples=20"]) == 0
    assert json.loads((out / "policy.json").read_text())["about"]["policy"] == "lerobot_act"


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("greedy", [False, True])
def test_its_bundle_plays_as_it_does(name, greedy):
    """From noise 0 the actions of a diffusion need the policy in float64, which says what rounding costs it."""
    loaded, _ = load_policy(STORED / name)
    policy = Greedy(loaded) if greedy else loaded
    bundle = assembled(policy)
    report(policy, bundle, samples=20, seed=0)
    view, scale = seen_by(policy.spec, AsLeRobot(1)), Scale(policy.spec.action)
    controller, robot = controller_for(policy, 1), ChunkController(ExportedPolicy(bundle))
    obs = view.reset(None, [5])
    controller.reset(torch.ones(1, dtype=torch.bool), [5])
    robot.reset(5)
    for _ in range(6):
        frame = {key: (x[0, -1] if policy.spec.history > 1 else x[0]).numpy() for key, x in obs.items()}
        action = controller.step(obs)
        assert np.allclose(robot.step(frame), scale.to_actuator(action)[0].numpy(), atol=CLOSE)
        obs = view.step(action).obs


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    write_folder(tmp_path / "a", {"one": "1", "below/two": b"2"})
    assert (tmp_path / "a/below/two").read_bytes() == b"2"
    with pytest.raises(BurnishError, match="exists already"):
        write_folder(tmp_path / "a", {})
    with pytest.raises(OSError):
        write_folder(tmp_path / "b", {"one": "1", "one/two": "2"})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
