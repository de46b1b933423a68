"""``policy=onnx``: small models made here, and what is refused of others."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from verb_lab import refused

from burnish.policies.build import build_policy, describe, load_policy
from burnish.policies.cli.cli import main
from burnish.policies.compose import Residual
from burnish.policies.core.config import to_data
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import Scale
from burnish.policies.core.seed import RowNoise
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.external import onnx as onnx_policy
from burnish.policies.external.onnx import OnnxConfig, OnnxPolicy
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.runs import checkpoint

LIMITS = ActionSpec((-0.5, 0.0), (1.5, 4.0))
WORLD = EnvSpec(ObsSpec({"state": (3,), "goal": (2,), "image.top": (3, 4, 5)}), LIMITS, 10.0, "test", 20)
OBS = {"state": torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), "goal": torch.zeros(4, 2)}
WEIGHTS = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)  # to H = 2 times A = 2


def model(path, *, noise=False, batch="n", single=False, metadata=None, domain="", name="state"):
    """actions (B, 2, 2) = tanh(state W [+ noise]); ``single``: (B, 4)."""
    nodes = [
        helper.make_node("MatMul", [name, "w"], ["flat"]),
        helper.make_node("Reshape", ["flat", "size"], ["chunk"]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 3])]
    last = "flat" if single else "chunk"
    if noise:
        nodes.append(helper.make_node("Add", ["chunk", "noise"], ["moved"]))
        inputs.append(helper.make_tensor_value_info("noise", TensorProto.FLOAT, [batch, 2, 2]))
        last = "moved"
    nodes.append(helper.make_node("Tanh", [last], ["actions"], domain=domain))
    shape = [batch, 4] if single else [batch, 2, 2]
    outputs = [helper.make_tensor_value_info("actions", TensorProto.FLOAT, shape)]
    constants = [numpy_helper.from_array(WEIGHTS, "w"), numpy_helper.from_array(np.array([-1, 2, 2]), "size")]
    return write(path, nodes, inputs, outputs, constants, metadata, domain)


def write(path, nodes, inputs, outputs, constants=(), metadata=None, domain=""):
    graph = helper.make_graph(nodes, "policy", inputs, outputs, list(constants))
    imports = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    made = helper.make_model(graph, opset_imports=imports, ir_version=9)
    for key, value in (metadata or {}).items():
        made.metadata_props.add(key=key, value=value)
    onnx.save(made, path)
    return OnnxConfig(str(path))


def expected(state, noise=0.0):
    return torch.tanh((state @ torch.as_tensor(WEIGHTS)).view(-1, 2, 2) + noise)


def test_actions_in_the_units_of_the_actuators_become_ours(tmp_path):
    policy = OnnxPolicy(model(tmp_path / "m.onnx"), WORLD)
    assert policy.spec == PolicySpec(ObsSpec({"state": (3,)}), LIMITS, 2, 2, control_hz=10.0, action_mode="test")
    torch.testing.assert_close(policy.act(OBS), Scale(LIMITS).to_unit(expected(OBS["state"])))
    unit = OnnxPolicy(replace(policy.config, unit=True, execute=1), WORLD)
    torch.testing.assert_close(unit.act(OBS), expected(OBS["state"]))
    assert unit.spec.execute == 1 and not torch.allclose(unit.act(OBS), policy.act(OBS))
    with pytest.raises(BurnishError, match="takes no noise"):
        policy.act(OBS, noise=torch.zeros(4, 2, 2))


@pytest.mark.parametrize("batch", ["n", 1])
def test_noise_is_an_input_and_rows_go_together_or_one_by_one(tmp_path, batch):
    policy = OnnxPolicy(replace(model(tmp_path / "m.onnx", noise=True, batch=batch), unit=True), WORLD)
    assert policy.spec.noise_shape == (2, 2)
    noise = torch.randn(4, 2, 2)
    torch.testing.assert_close(policy.act(OBS, noise=noise), expected(OBS["state"], noise))
    assert not torch.allclose(policy.act(OBS, noise=-noise), expected(OBS["state"], noise))
    drawn = policy.act(OBS, generator=RowNoise(range(4), [2] * 4))
    alone = policy.act({key: x[1:2] for key, x in OBS.items()}, generator=RowNoise([1], [2]))
    torch.testing.assert_close(drawn[1:2], alone)


def test_single_actions_are_chunks_of_one(tmp_path):
    world = replace(WORLD, action=ActionSpec((-1.0,) * 4, (1.0,) * 4))
    policy = OnnxPolicy(model(tmp_path / "m.onnx", single=True), world)
    assert policy.spec.chunk_shape == (1, 4)
    torch.testing.assert_close(policy.act(OBS), expected(OBS["state"]).view(4, 1, 4))


def test_inputs_of_other_names_are_said(tmp_path):
    config = model(tmp_path / "m.onnx", name="observation")
    with pytest.raises(BurnishError, match=r"takes \['observation'\], but the environment gives"):
        OnnxPolicy(config, WORLD)
    policy = OnnxPolicy(replace(config, keys={"state": "observation"}, unit=True), WORLD)
    torch.testing.assert_close(policy.act(OBS), expected(OBS["state"]))


@pytest.mark.parametrize("last", [False, True])
def test_pictures_lie_as_the_input_says(tmp_path, last):
    """The action is the mean of the second colour, which only the right order of axes finds."""
    shape = ["n", 4, 5, 3] if last else ["n", 3, 4, 5]
    axes = [1, 2] if last else [2, 3]
    nodes = [
        helper.make_node("Cast", ["image.top"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["float"], ["colours"], axes=axes, keepdims=0),
        helper.make_node("Gather", ["colours", "two"], ["picked"], axis=1),
        helper.make_node("Div", ["picked", "full"], ["actions"]),
    ]
    inputs = [helper.make_tensor_value_info("image.top", TensorProto.UINT8, shape)]
    outputs = [helper.make_tensor_value_info("actions", TensorProto.FLOAT, ["n", 2])]
    constants = [
        numpy_helper.from_array(np.array([1, 1]), "two"),
        numpy_helper.from_array(np.float32(255), "full"),
    ]
    config = write(tmp_path / "m.onnx", nodes, inputs, outputs, constants)
    picture = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    actions = OnnxPolicy(replace(config, unit=True), WORLD).act({"image.top": picture})
    torch.testing.assert_close(actions[:, 0, 0], picture[:, 1].float().mean((1, 2)) / 255)


def test_a_model_that_says_what_it_is_is_believed(tmp_path):
    """With a history, a chunk that begins before now, and actions in [-1, 1]."""
    said = PolicySpec(ObsSpec({"state": (3,)}), LIMITS, 2, 1, start=1, control_hz=10.0)
    text = json.dumps(to_data(said.to_dict()))
    policy = OnnxPolicy(model(tmp_path / "m.onnx", metadata={"burnish.spec": text}), WORLD)
    assert policy.spec == said
    torch.testing.assert_close(policy.act(OBS), expected(OBS["state"]))
    for bad in ("{", "3", "{}", '{"obs": 3}'):
        config = model(tmp_path / "bad.onnx", metadata={"burnish.spec": bad})
        with pytest.raises(BurnishError, match="makes no sense"):
            OnnxPolicy(config, WORLD)


def test_operators_of_others_and_files_beside_it_are_refused(tmp_path):
    config = model(tmp_path / "custom.onnx", domain="somebody.else")
    with pytest.raises(BurnishError, match="without operators or files of others") as refusal:
        OnnxPolicy(config, WORLD)
    assert "\n" not in str(refusal.value)
    config = model(tmp_path / "m.onnx")
    OnnxPolicy(config, WORLD)
    large = onnx.load(tmp_path / "m.onnx")
    onnx.save(large, tmp_path / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    with pytest.raises(BurnishError, match="without operators or files of others"):
        OnnxPolicy(config, WORLD)
    (tmp_path / "m.onnx").write_bytes(b"no model")
    with pytest.raises(BurnishError, match="is no model that onnxruntime can run"):
        OnnxPolicy(config, WORLD)


@pytest.mark.parametrize(
    ("make", "changes", "sentence"),
    [
        ({}, {"path": "nowhere.onnx"}, "there is no model at nowhere.onnx"),
        ({}, {"sha256": "0" * 64}, "is another model than the one that was used"),
        ({}, {"actions": "velocity"}, r"outputs of .* are \['actions'\]"),
        ({"batch": 3}, {}, "export it with a batch of 1 or of any size"),
        ({"single": True}, {}, "takes chunks of 2 numbers"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_a_sentence(tmp_path, make, changes, sentence):
    config = model(tmp_path / "m.onnx", **make)
    with pytest.raises(BurnishError, match=sentence):
        OnnxPolicy(replace(config, **changes), WORLD)


def test_impossible_settings_are_refused():
    for changes in ({"threads": 0}, {"execute": 0}):
        with pytest.raises(BurnishError, match="at least 1"):
            OnnxConfig("m.onnx", **changes)


def test_a_refined_model_is_found_again_by_its_hash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = OnnxPolicy(model(tmp_path / "m.onnx", noise=True), WORLD)
    spec = PolicySpec(ObsSpec({"state": (3,), "base_action": (2, 2)}), ActionSpec((-1,) * 2, (1,) * 2), 2, 2)
    made = Residual(base, build_policy(GaussianConfig(hidden=[8]), spec), 0.5, "chunk")
    checkpoint.save(tmp_path / "p", config=describe(made), state=made.state_dict())
    again, _ = load_policy(tmp_path / "p")
    assert torch.equal(again.act(OBS, greedy=True), made.act(OBS, greedy=True)) and again.base.config.sha256
    (tmp_path / "m.onnx").rename(tmp_path / "moved.onnx")
    with pytest.raises(BurnishError, match=r"there is no model at .*say where to: policy.base="):
        load_policy(tmp_path / "p")
    assert load_policy(tmp_path / "p", base=str(tmp_path / "moved.onnx"))[0].base.config.path.endswith("moved.onnx")
    model(tmp_path / "m.onnx", noise=True, metadata={"version": "2"})
    with pytest.raises(BurnishError, match="is another model than the one that was used"):
        load_policy(tmp_path / "p")


def test_a_checkpoint_leads_to_no_file_elsewhere(tmp_path, monkeypatch):
    """Nothing tells a stranger's from an own one: beyond the checkpoint and this folder only the user's word counts."""
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    for folder in (elsewhere, here):
        folder.mkdir()
    base = OnnxPolicy(model(elsewhere / "m.onnx", noise=True), WORLD)
    spec = PolicySpec(ObsSpec({"state": (3,), "base_action": (2, 2)}), ActionSpec((-1,) * 2, (1,) * 2), 2, 2)
    made = Residual(base, build_policy(GaussianConfig(hidden=[8]), spec), 0.5, "chunk")
    checkpoint.save(here / "p", config=describe(made), state=made.state_dict())
    opened = []
    read = onnx_policy._read
    monkeypatch.setattr(onnx_policy, "_read", lambda config: opened.append(config.path) or read(config))
    monkeypatch.chdir(here)
    with pytest.raises(BurnishError, match=r"neither in the checkpoint nor below this folder; .* policy\.base='/"):
        load_policy(here / "p")
    assert not opened
    assert load_policy(here / "p", base=str(elsewhere / "m.onnx"))[0].base.config.sha256 == base.config.sha256
    monkeypatch.chdir(tmp_path)  # above both
    load_policy(here / "p")
    assert len(opened) == 2
    config = describe(made)
    config["parts"]["base"]["config"]["sha256"] = None
    checkpoint.save(here / "q", config=config, state=made.state_dict())
    with pytest.raises(BurnishError, match="no sha256 says which file that was"):
        load_policy(here / "q")
    # In the checkpoint itself, from wherever; and a link in it leads nowhere else.
    (here / "p" / "m.onnx").write_bytes((elsewhere / "m.onnx").read_bytes())
    config["parts"]["base"]["config"] |= {"sha256": base.config.sha256, "path": str(here / "r" / "m.onnx")}
    checkpoint.save(here / "r", config=config, state=made.state_dict())
    monkeypatch.chdir(elsewhere)
    (here / "r" / "m.onnx").write_bytes((elsewhere / "m.onnx").read_bytes())
    load_policy(here / "r")
    monkeypatch.chdir(here / "p")
    (here / "r" / "m.onnx").unlink()
    (here / "r" / "m.onnx").symlink_to(elsewhere / "m.onnx")
    with pytest.raises(BurnishError, match="neither in the checkpoint"):
        load_policy(here / "r")


def test_weights_are_not_looked_for_in_the_folder_that_one_stands_in(tmp_path, monkeypatch):
    """Where a model is given as bytes, onnxruntime would take files beside it from there: the control."""
    import onnxruntime

    config = model(tmp_path / "m.onnx")
    made = onnx.load(tmp_path / "m.onnx")
    weights = next(x for x in made.graph.initializer if x.name == "w")
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", str(WEIGHTS.nbytes))):
        weights.external_data.add(key=key, value=value)
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    (tmp_path / "w.bin").write_bytes(WEIGHTS.tobytes())
    monkeypatch.chdir(tmp_path)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    onnxruntime.InferenceSession((tmp_path / "m.onnx").read_bytes(), options, providers=["CPUExecutionProvider"])
    with pytest.raises(BurnishError, match="without operators or files of others"):
        OnnxPolicy(config, WORLD)


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(BurnishError, match="it is no file"):
            OnnxPolicy(OnnxConfig(str(path)), WORLD)


def test_the_verb_plays_a_model(tmp_path, capsys):
    """Velocities towards the goal: actions = 4 (goal - state)."""
    gain = numpy_helper.from_array(np.float32(4), "k")
    nodes = [
        helper.make_node("Sub", ["goal", "state"], ["away"]),
        helper.make_node("Mul", ["away", "k"], ["actions"]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in ("state", "goal")]
    outputs = [helper.make_tensor_value_info("actions", TensorProto.FLOAT, ["n", 2])]
    config = write(tmp_path / "m.onnx", nodes, inputs, outputs, [gain])
    words = ["evaluate", "policy=onnx", f"policy.path={config.path}", "env=point_reach", "eval.episodes=20"]
    assert main(words) == 0
    assert "success 100.0%" in capsys.readouterr().out
    assert "another model" in refused(capsys, *words, "policy.sha256=abc")
