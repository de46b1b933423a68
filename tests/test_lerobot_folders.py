"""LeRobot's folders: where a policy is found, why one is not read, and what they may make LeRobot open elsewhere."""

from __future__ import annotations

import json
import shutil

import pytest
from test_lerobot_policies import STORED, settings
from test_lerobot_side import WORLD, step

from burnish.policies.build import load_policy
from burnish.policies.core.errors import BurnishError
from burnish.policies.external.lerobot import OPENS, PYTHON, LeRobotConfig, LeRobotPolicy
from burnish.policies.lerobot import native
from lerobot_stand_in import save


@pytest.fixture
def act(tmp_path):
    return shutil.copytree(STORED / "act", tmp_path / "act")


def training_run(folder, horizons):
    """A LeRobot run, in which each checkpoint has another horizon of execution."""
    for name, execute in horizons.items():
        inner = folder / "checkpoints" / name / "pretrained_model"
        shutil.copytree(STORED / "act", inner)
        settings(n_action_steps=execute)(inner)
    return folder


def test_a_training_run_is_found_at_each_of_its_folders(tmp_path):
    """The checkpoint that counts is the one that LeRobot's link names; without a link, the newest."""
    run = training_run(tmp_path / "act", {"900": 3, "1000": 4})

    def executed(path):
        return load_policy(path)[0].spec.execute

    assert executed(run / "checkpoints" / "900") == 3, "the folder above the policy"
    assert executed(run) == executed(run / "checkpoints") == 4
    (run / "checkpoints" / "last").symlink_to("900")
    assert executed(run) == executed(run / "checkpoints") == executed(run / "checkpoints" / "last") == 3
    other = training_run(tmp_path / "other", {"2000": 5})
    (run / "checkpoints" / "last").unlink()
    (run / "checkpoints" / "last").symlink_to(other / "checkpoints" / "2000")
    assert executed(run) == 4, "a link that leads out of the run is not followed"
    (run / "checkpoints" / "1000" / "pretrained_model" / "model.safetensors").unlink()
    assert executed(run) == 3, "one whose saving was interrupted is passed over"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("adapter_model.safetensors", r"an adapter \(PEFT\) alone; .*policy\.adapter"),
        ("model.safetensors.index.json", "in several files"),
        ("pytorch_model.bin", "pickled"),
        (None, "interrupted"),
    ],
)
def test_a_policy_without_weights_that_are_read_says_why(file, said, act):
    (act / "model.safetensors").unlink()
    if file is not None:
        (act / file).write_bytes(b"")
    with pytest.raises(BurnishError, match=f"has no model.safetensors: .*{said}"):
        load_policy(act)
    (act / "config.json").write_text("{}")  # of another library's model
    if file != "adapter_model.safetensors":
        with pytest.raises(BurnishError, match="manifest"):
            load_policy(act)


@pytest.mark.parametrize("random", [True, False])
def test_a_crop_that_training_takes_at_random_or_not_is_read_and_written(random, tmp_path):
    folder = shutil.copytree(STORED / "diffusion_ddpm", tmp_path / "it")
    settings(crop_is_random=random)(folder)
    policy, _ = load_policy(folder)
    assert policy.config.net.vision.random_crop is random
    assert json.loads(native.files(policy)["config.json"]).get("crop_is_random", True) is random


ELSEWHERE = {
    "a model in a folder": (settings(vlm_model_name="/etc"), "LeRobot open '/etc'.*BURNISH_LEROBOT_OPENS=/etc"),
    "a model of somebody": (settings(vision_encoder_name="some/body"), "LeRobot open 'some/body'"),
    "a folder beside it": (settings(model_name="folder"), "LeRobot open 'folder'"),
    "a place further in": (settings(parts=[{"anything": "../up"}]), r"LeRobot open '\.\./up'"),
    "a tokenizer elsewhere": (
        step(config={"tokenizer_name": "./here"}),
        r"postprocessor.json makes .* open '\./here'",
    ),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_what_is_elsewhere_is_not_opened_unasked(case, tmp_path, monkeypatch):
    monkeypatch.setenv(PYTHON, "/bin/false")
    folder = save(tmp_path / "it", "chunked")
    with pytest.raises(BurnishError, match="has ended"):  # the control: it would be started
        LeRobotPolicy(LeRobotConfig(str(folder)), WORLD)
    change, said = ELSEWHERE[case]
    change(folder)
    with pytest.raises(BurnishError, match=said):
        LeRobotPolicy(LeRobotConfig(str(folder)), WORLD)


def test_what_lerobot_opens_elsewhere_is_usual_or_allowed(tmp_path, monkeypatch):
    monkeypatch.setenv(PYTHON, "/bin/false")
    usual = {"tokenizer_name": "google/paligemma-3b-pt-224", "pretrained_path": "/where/it/began", "tags": ["a/b"]}
    folder = save(tmp_path / "it", "chunked", **usual, text_encoder_name="my/clip", checkpoint_path="/models/it")
    for allowed in ("", "my/clip", "/models/it"):
        monkeypatch.setenv(OPENS, allowed)
        with pytest.raises(BurnishError, match="makes LeRobot open"):
            LeRobotPolicy(LeRobotConfig(str(folder)), WORLD)
    monkeypatch.setenv(OPENS, "my/clip, /models/it")
    with pytest.raises(BurnishError, match="has ended"):
        LeRobotPolicy(LeRobotConfig(str(folder)), WORLD)
