"""SmolVLA in LeRobot's folders: every name and shape, other forms of them, statistics, adapters, and refusals.

The names are written out here as the published file has them, not taken from the model; sizes are scaled down, except
that heads stay 64 wide.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from burnish.policies.build import SmolVLALoadConfig, describe, load_policy, loaded
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.runs.checkpoint import save
from burnish.policies.trainable import LoRAConfig, TrainableConfig, add_lora, trainable
from burnish.policies.trainable import Part as Trained
from burnish.policies.vla import lora
from burnish.policies.vla.lerobot import write
from burnish.policies.vla.names import declared
from burnish.policies.vla.sizes import ExpertConfig, LanguageConfig, VisionConfig
from burnish.policies.vla.words import Words

V, X = "vlm_with_expert.vlm.", "vlm_with_expert.lm_expert."
FULL = {
    "v": 768,
    "patch": 16,
    "places": 1024,
    "vh": 3072,
    "shuffle": 4,
    "w": 960,
    "rows": 49280,
    "q": 960,
    "kv": 320,
    "h": 2560,
    "e": 720,
    "eh": 2048,
}
SMALL = {
    "v": 64,
    "patch": 4,
    "places": 16,
    "vh": 20,
    "shuffle": 2,
    "w": 128,
    "rows": 50,
    "q": 128,
    "kv": 64,
    "h": 24,
    "e": 96,
    "eh": 256,
}
TRUNK = {"vision": 12, "text": 16, "expert": 16}
TINY = {"vision": 1, "text": 2, "expert": 2}


def published(s, layers) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight."""
    found: dict[str, tuple[int, ...]] = {}
    both = lambda name, *shape: {f"{name}.weight": shape, f"{name}.bias": shape[:1]}  # noqa: E731
    vision, text = f"{V}model.vision_model.", f"{V}model.text_model."
    found |= both(f"{vision}embeddings.patch_embedding", s["v"], 3, s["patch"], s["patch"])
    found[f"{vision}embeddings.position_embedding.weight"] = (s["places"], s["v"])
    for i in range(layers["vision"]):
        at = f"{vision}encoder.layers.{i}."
        for name in ("q", "k", "v", "out"):
            found |= both(f"{at}self_attn.{name}_proj", s["v"], s["v"])
        found |= both(f"{at}layer_norm1", s["v"]) | both(f"{at}layer_norm2", s["v"])
        found |= both(f"{at}mlp.fc1", s["vh"], s["v"]) | both(f"{at}mlp.fc2", s["v"], s["vh"])
    found |= both(f"{vision}post_layernorm", s["v"])
    found[f"{V}model.connector.modality_projection.proj.weight"] = (s["w"], s["v"] * s["shuffle"] ** 2)
    found |= {f"{text}embed_tokens.weight": (s["rows"], s["w"]), f"{text}norm.weight": (s["w"],)}
    found[f"{V}lm_head.weight"] = (s["rows"], s["w"])
    for place, width, hidden, count in ((text, s["w"], s["h"], "text"), (X, s["e"], s["eh"], "expert")):
        for i in range(layers[count]):
            keys = s["kv"] if place == X and i % 2 else width
            sizes = {"q": (s["q"], width), "k": (s["kv"], keys), "v": (s["kv"], keys), "o": (width, s["q"])}
            found |= {f"{place}layers.{i}.self_attn.{name}_proj.weight": shape for name, shape in sizes.items()}
            sizes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
            found |= {f"{place}layers.{i}.mlp.{name}_proj.weight": shape for name, shape in sizes.items()}
            found |= {f"{place}layers.{i}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    found[f"{X}norm.weight"] = (s["e"],)
    found |= both("state_proj", s["w"], 32) | both("action_in_proj", s["e"], 32) | both("action_out_proj", 32, s["e"])
    found |= both("action_time_mlp_in", s["e"], 2 * s["e"]) | both("action_time_mlp_out", s["e"], s["e"])
    return {f"model.{name}": shape for name, shape in found.items()}


def test_all_500_names_and_shapes():
    wanted = published(FULL, TRUNK)
    assert len(wanted) == 500
    found = declared(VisionConfig(), LanguageConfig(lm_head=True), ExpertConfig(), 32, 32)
    assert {name: tuple(shape) for name, shape in found.items()} == wanted


STATISTICS = {
    "observation.state.mean": torch.tensor([1.6, 119.9]),
    "observation.state.std": torch.tensor([26.0, 52.0]),
    "action.mean": torch.tensor([1.7, 118.0]),
    "action.std": torch.tensor([27.0, 53.0]),
}


def features(*names):
    shapes = {name: ("VISUAL", [3, 12, 16]) for name in names} | {"observation.state": ("STATE", [2])}
    return {name: {"type": kind, "shape": shape} for name, (kind, shape) in shapes.items()}


def step(name, **config):
    return {"registry_name": name, "config": config}


def folder_of(path, statistics=STATISTICS, layers=TINY, change=None, **settings):
    """A folder as LeRobot writes one; ``change`` edits the weights."""
    path.mkdir()
    source = torch.Generator().manual_seed(0)
    weights = {name: 0.1 * torch.randn(shape, generator=source) for name, shape in published(SMALL, layers).items()}
    weights = {name: x.bfloat16() if f"{V}" in name else x for name, x in weights.items()}
    save_file(weights if change is None else change(weights), path / "model.safetensors")
    mapping = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    config = {
        **{"type": "smolvla", "n_obs_steps": 1, "normalization_mapping": mapping, "chunk_size": 8, "n_action_steps": 6},
        "input_features": features("observation.images.camera1", "observation.images.camera2"),
        "output_features": {"action": {"type": "ACTION", "shape": [2]}},
        **{"resize_imgs_with_padding": [16, 16], "num_vlm_layers": layers["text"], "num_expert_layers": 0},
        **{"expert_width_multiplier": 0.75, "tokenizer_max_length": 7, "num_steps": 2, "prefix_length": 0},
        **{"optimizer_lr": 1e-4, "scheduler_decay_lr": 2.5e-6, "rtc_config": None, "load_vlm_weights": True},
    }
    (path / "config.json").write_text(json.dumps(config | settings))
    if statistics is None:
        return path
    scaled = {"eps": 1e-8, "features": {}, "norm_map": mapping}
    lists = {
        "pre": [
            *(step("rename_observations_processor", rename_map={}), step("to_batch_processor")),
            *(step("smolvla_new_line_processor"), step("tokenizer_processor", max_length=7, tokenizer_name="x/y")),
            *(step("device_processor", device="cpu", float_dtype=None), step("normalizer_processor", **scaled)),
        ],
        "post": [step("unnormalizer_processor", **scaled), step("device_processor", device="cpu", float_dtype=None)],
    }
    for name, steps in lists.items():
        entry = next(x for x in steps if x["registry_name"].endswith("normalizer_processor"))
        entry["state_file"] = f"policy_{name}processor_state.safetensors"
        save_file(statistics, path / entry["state_file"])
        (path / f"policy_{name}processor.json").write_text(json.dumps({"name": name, "steps": steps}))
    return path


def read(path, **choices):
    return loaded(SmolVLALoadConfig(str(path), **choices))[0]


def weights_of(policy):
    return {name: x for name, x in policy.state_dict().items() if name.startswith("model.")}


def chunk(policy, **more):
    source = torch.Generator().manual_seed(1)
    obs = {"state": 50 * torch.randn(2, 2, generator=source), "tokens": torch.tensor([[3, 4, 5, -1, -1, -1, -1]] * 2)}
    for key, shape in policy.spec.obs.shapes.items():
        if key.startswith("image."):
            obs[key] = torch.randint(0, 256, (2, *shape), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    noise = torch.randn(2, 8, 32, generator=source)[:, : policy.spec.horizon]
    with torch.no_grad():
        return policy.act(obs | more, noise=noise)


@pytest.mark.slow
def test_a_folder_is_read_strictly_and_written_back_bitwise(tmp_path):
    policy = read(folder_of(tmp_path / "theirs", layers=TRUNK))
    assert policy.spec.horizon == 8 and policy.spec.execute == 6 and policy.spec.noise_shape == (8, 32)
    write(policy, tmp_path / "ours")
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert old.keys() == new.keys() and len(old) == 500
    assert all(torch.equal(x, new[name]) and x.dtype == new[name].dtype for name, x in old.items())
    stored = load_file(tmp_path / "ours" / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    assert all(torch.equal(x, stored[name]) for name, x in STATISTICS.items())
    again = read(tmp_path / "ours")
    assert again.config == policy.config and again.spec == policy.spec
    assert torch.equal(chunk(again), chunk(policy))
    save(tmp_path / "saved", config=describe(policy), state=policy.state_dict())
    assert torch.equal(chunk(load_policy(tmp_path / "saved")[0]), chunk(policy))


def test_other_forms_of_the_names_give_the_same_policy(tmp_path):
    expected = chunk(read(folder_of(tmp_path / "plain")))

    def compiled(weights):
        return {name.replace("model.", "model._orig_mod.", 1): x for name, x in weights.items()}

    def older(weights):
        kept = {
            name.replace("text_model.", "text_model.model."): x for name, x in weights.items() if "lm_head" not in name
        }
        for name, x in STATISTICS.items():
            feature, _, statistic = name.rpartition(".")
            group = "unnormalize_outputs" if feature == "action" else "normalize_inputs"
            kept[f"{group}.buffer_{feature.replace('.', '_')}.{statistic}"] = x
        return kept

    assert torch.equal(chunk(read(folder_of(tmp_path / "compiled", change=compiled))), expected)
    assert torch.equal(chunk(read(folder_of(tmp_path / "older", None, change=older))), expected)


def test_chunks_are_cut_and_cameras_left_out(tmp_path):
    path = folder_of(tmp_path / "theirs")
    whole, head = read(path), read(path, horizon=3)
    assert head.spec.horizon == 3 and head.spec.execute == 3
    torch.testing.assert_close(chunk(head), chunk(whole)[:, :3], rtol=0, atol=1e-5)
    listed = features("observation.images.camera1", "observation.images.camera2", "observation.images.empty_camera_0")
    padded = read(folder_of(tmp_path / "padded", input_features=listed, empty_cameras=1))
    assert torch.equal(chunk(padded), chunk(whole))
    assert sorted(read(path, without=["image.camera2"]).spec.obs.shapes) == ["image.camera1", "state", "tokens"]
    named = read(path, keys={"image.front": "image.camera1"}, without=["image.camera2"])
    assert "image.front" in named.spec.obs.shapes
    write(named, tmp_path / "named")  # LeRobot knows the camera by its own name alone
    written = json.loads((tmp_path / "named" / "config.json").read_text())["input_features"]
    assert set(written) == {"observation.state", "observation.images.camera1"}


GROUPS = {f"so100{kind}.buffer.{name}": x + i for i, kind in enumerate(("", "-red")) for name, x in STATISTICS.items()}


def test_statistics_of_several_robots_are_chosen_and_never_passed_over(tmp_path):
    path = folder_of(tmp_path / "theirs", GROUPS)
    with pytest.raises(BurnishError, match=r"pass numbers through unscaled; take one by policy.statistics=.*so100-red"):
        read(path)
    with pytest.raises(BurnishError, match="no group of statistics 'so101'"):
        read(path, statistics="so101")
    for group, add in (("so100", 0), ("so100-red", 1)):
        assert torch.equal(read(path, statistics=group).action_scaling.first, STATISTICS["action.mean"] + add)
    (tmp_path / "data" / "meta").mkdir(parents=True)
    numbers = {"mean": [1.0, 2.0], "std": [3.0, 4.0], "min": [-9, -9], "max": [9, 9]}
    stats = dict.fromkeys(("observation.state", "action"), numbers)
    (tmp_path / "data" / "meta" / "stats.json").write_text(json.dumps(stats))
    policy = read(path, stats=str(tmp_path / "data"))
    assert policy.action_scaling.second.tolist() == [3.0, 4.0] and policy.spec.action.high == (9.0, 9.0)


def test_the_tokenizer_becomes_part_of_the_policy(tmp_path):
    words = Words.of(["lift the red cube", "put it down"])
    (tmp_path / "tokenizer.json").write_bytes(words.file.numpy().tobytes())
    policy = read(folder_of(tmp_path / "theirs"), words=str(tmp_path / "tokenizer.json"))
    ids = policy.words.ids(["lift the red cube"])
    assert ids.shape == (1, 7) and torch.equal(ids[0, :4], words.ids(["lift the red cube"])[0, :4])
    save(tmp_path / "saved", config=describe(policy), state=policy.state_dict())
    assert torch.equal(load_policy(tmp_path / "saved")[0].words.ids(["put it down"]), policy.words.ids(["put it down"]))
    many = Words.of([" ".join(f"word{i}" for i in range(60))])
    (tmp_path / "large.json").write_bytes(many.file.numpy().tobytes())
    with pytest.raises(BurnishError, match="the tokenizer of another model"):
        read(tmp_path / "theirs", words=str(tmp_path / "large.json"))


def test_an_adapter_is_written_and_merged(tmp_path):
    path = folder_of(tmp_path / "theirs")
    made = trainable(read(path), TrainableConfig(Trained.lora, rank=4, alpha=6.0))
    for name, parameter in made.named_parameters():
        if name.endswith("parametrizations.weight.0.up"):
            torch.nn.init.normal_(parameter, std=0.3)
    lora.write(made, tmp_path / "adapter", "lerobot/smolvla_base")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    layer = "base_model.model.model.vlm_with_expert.lm_expert.layers.1.self_attn.q_proj"
    assert stored[f"{layer}.lora_A.weight"].shape == (4, 96) and stored[f"{layer}.lora_B.weight"].shape == (128, 4)
    assert len(stored) == 2 * (2 * TINY["expert"] + 5)  # queries and values of the expert, and five maps
    merged = read(path, adapter=str(tmp_path / "adapter"))
    torch.testing.assert_close(chunk(merged), chunk(made), rtol=0, atol=1e-5)
    assert (chunk(merged) - chunk(read(path))).abs().max() > 1e-3
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    for change, sentence in (({"use_dora": True}, "use_dora=True"), ({"r": 5}, "two matrices of rank 5")):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings | change))
        with pytest.raises(BurnishError, match=sentence):
            read(path, adapter=str(tmp_path / "adapter"))


def without(name):
    return lambda weights: {key: x for key, x in weights.items() if key != name}


EMBEDDED = f"model.{V}model.text_model.embed_tokens.weight"
LAST = "model.action_out_proj.weight"


@pytest.mark.parametrize(
    ("settings", "change", "choices", "sentence"),
    [
        ({}, without(LAST), {}, "lacks 'model.action_out_proj.weight'"),
        ({}, without(EMBEDDED), {}, "holds no SmolVLA"),
        ({}, lambda w: w | {"model.surplus": torch.zeros(1)}, {}, "unknown weight: 'model.surplus'"),
        ({}, lambda w: w | {LAST: torch.zeros(31, 96)}, {}, "action_out_proj.weight of shape \\(31, 96\\)"),
        ({}, lambda w: w | {LAST.replace("model.", "model._orig_mod."): w[LAST].clone()}, {}, "twice"),
        ({"num_vlm_layers": 16}, None, {}, "num_vlm_layers is 16, but its weights are those of 2"),
        ({"resize_imgs_with_padding": [512, 512]}, None, {}, "resize_imgs_with_padding"),
        ({"expert_width_multiplier": 0.5}, None, {}, "expert_width_multiplier"),
        ({"max_action_dim": 16}, None, {}, "follows from its other weights"),
        ({"adapt_to_pi_aloha": True}, None, {}, "adapt_to_pi_aloha=True"),
        ({"attention_mode": "self_attn"}, None, {}, "attention_mode"),
        ({"temperature": 2.0}, None, {}, "settings that are not known here"),
        ({"add_image_special_tokens": True}, None, {}, "give policy.words"),
        ({"use_peft": True}, None, {}, "adapter"),
        ({}, None, {"horizon": 9}, "policy.horizon=9"),
        ({}, None, {"without": ["image.side"]}, "no camera 'image.side'"),
    ],
)
def test_a_folder_that_is_not_certain_is_refused(settings, change, choices, sentence, tmp_path):
    path = folder_of(tmp_path / "theirs", change=change, **settings)
    with pytest.raises(BurnishError, match=sentence):
        read(path, **choices)


def test_what_lerobot_cannot_load_is_not_written(tmp_path):
    policy = read(folder_of(tmp_path / "theirs"))
    policy.config.vision.stem = True
    with pytest.raises(BurnishError, match="ways of its own"):
        write(policy, tmp_path / "ours")
    with pytest.raises(BurnishError, match="no adapter to write"):
        lora.write(policy, tmp_path / "adapter", "x")
    assert not (tmp_path / "ours").exists() and add_lora(policy, LoRAConfig(1)) is policy


def test_the_verb_writes_a_folder_of_lerobot(tmp_path):
    path = folder_of(tmp_path / "theirs")
    out = tmp_path / "ours"
    assert main(["export", "policy=smolvla", f"policy.path={path}", "to=lerobot", f"out={out}"]) == 0
    old, new = (load_file(x / "model.safetensors") for x in (path, out))
    assert old.keys() == new.keys() and all(torch.equal(x, new[n]) and x.dtype == new[n].dtype for n, x in old.items())
    policy = read(out)
    with torch.no_grad():  # a weight that bfloat16 no longer holds is written in float32, the others as they were
        policy.model.vlm_with_expert.vlm.model.text_model.norm.weight[0] = 1 + 2.0**-12
    write(policy, tmp_path / "trained")
    types = {name: x.dtype for name, x in load_file(tmp_path / "trained" / "model.safetensors").items()}
    assert [name for name, x in new.items() if types[name] != x.dtype] == [f"model.{V}model.text_model.norm.weight"]
