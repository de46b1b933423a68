"""pi0 and pi0.5 in LeRobot's folders: every name and shape, other forms of them, statistics, and refusals.

The names are written out here as the published files have them, not taken from the model; sizes are scaled down.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_pi0 import LENGTH, letters
from test_vla_folders import STATISTICS, features, step

from burnish.policies.build import Pi0LoadConfig, describe, load_policy, loaded
from burnish.policies.core.errors import BurnishError
from burnish.policies.lerobot.export import export
from burnish.policies.runs.checkpoint import save
from burnish.policies.vla import pi0_folder
from burnish.policies.vla.lerobot import write
from burnish.policies.vla.names import shapes_of
from burnish.policies.vla.pi0 import Pi0Config, Pi0Model

ROOT = "model.paligemma_with_expert."
VISION = f"{ROOT}paligemma.model.vision_tower.vision_model."
TEXT, EXPERT = f"{ROOT}paligemma.model.language_model.", f"{ROOT}gemma_expert.model."
HEAD, TABLE, OWN_HEAD = (
    f"{ROOT}paligemma.lm_head.weight",
    f"{TEXT}embed_tokens.weight",
    f"{ROOT}gemma_expert.lm_head.weight",
)
FULL = {"v": 1152, "patch": 14, "places": 256, "vh": 4304, "w": 2048, "h": 16384, "e": 1024, "eh": 4096}
FULL |= {"head": 256, "rows": 257152, "vision": 27, "layers": 18}
SMALL = {"v": 32, "patch": 4, "places": 16, "vh": 20, "w": 24, "h": 28, "e": 16, "eh": 20}
SMALL |= {"head": 6, "rows": 60, "vision": 1, "layers": 2}
QUANTILES = {
    f"{name}.{q}": sign * torch.ones(2)
    for name in ("action", "observation.state")
    for q, sign in (("q01", -2), ("q99", 3))
}


def published(s, adaptive: bool) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight."""
    found: dict[str, tuple[int, ...]] = {}
    both = lambda name, *shape: {f"{name}.weight": shape, f"{name}.bias": shape[:1]}  # noqa: E731
    found |= both(f"{VISION}embeddings.patch_embedding", s["v"], 3, s["patch"], s["patch"])
    found[f"{VISION}embeddings.position_embedding.weight"] = (s["places"], s["v"])
    for i in range(s["vision"]):
        at = f"{VISION}encoder.layers.{i}."
        for name in ("q", "k", "v", "out"):
            found |= both(f"{at}self_attn.{name}_proj", s["v"], s["v"])
        found |= both(f"{at}layer_norm1", s["v"]) | both(f"{at}layer_norm2", s["v"])
        found |= both(f"{at}mlp.fc1", s["vh"], s["v"]) | both(f"{at}mlp.fc2", s["v"], s["vh"])
    found |= both(f"{VISION}post_layernorm", s["v"])
    found |= both(f"{ROOT}paligemma.model.multi_modal_projector.linear", s["w"], s["v"])
    found |= {TABLE: (s["rows"], s["w"]), HEAD: (s["rows"], s["w"]), OWN_HEAD: (s["rows"], s["e"])}
    for place, width, hidden in ((TEXT, s["w"], s["h"]), (EXPERT, s["e"], s["eh"])):
        timed = adaptive and place == EXPERT
        norm = lambda name, width=width, timed=timed: (  # noqa: E731
            both(f"{name}.dense", 3 * width, width) if timed else {f"{name}.weight": (width,)}
        )
        for i in range(s["layers"]):
            at, queries = f"{place}layers.{i}.", 8 * s["head"]
            sizes = {"q": (queries, width), "k": (s["head"], width), "v": (s["head"], width), "o": (width, queries)}
            found |= {f"{at}self_attn.{name}_proj.weight": shape for name, shape in sizes.items()}
            sizes = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
            found |= {f"{at}mlp.{name}_proj.weight": shape for name, shape in sizes.items()}
            found |= norm(f"{at}input_layernorm") | norm(f"{at}post_attention_layernorm")
        found |= norm(f"{place}norm")
    e = s["e"]
    found |= both("model.action_in_proj", e, 32) | both("model.action_out_proj", 32, e)
    if adaptive:
        return found | both("model.time_mlp_in", e, e) | both("model.time_mlp_out", e, e)
    found |= both("model.state_proj", e, 32)
    return found | both("model.action_time_mlp_in", e, 2 * e) | both("model.action_time_mlp_out", e, e)


@pytest.mark.parametrize(("adaptive", "count"), [(False, 778), (True, 813)])
def test_all_names_and_shapes(adaptive, count):
    wanted, usual = published(FULL, adaptive), Pi0Config()
    assert len(wanted) == count
    language = replace(usual.language, lm_head=True)
    config = replace(usual, language=language, adaptive=adaptive, expert_head=True)
    found = shapes_of(lambda: Pi0Model(config, 32, 32))
    assert {name: tuple(shape) for name, shape in found.items()} == wanted
    with torch.device("meta"):
        used = sum(x.numel() for x in Pi0Model(replace(usual, adaptive=adaptive), 32, 32).parameters())
    assert abs(used / 1e9 - (3.35 if adaptive else 3.24)) < 0.02  # as published


def weights_for(adaptive=False):
    source = torch.Generator().manual_seed(0)
    shapes = published(SMALL, adaptive)
    weights = {name: 0.1 * torch.randn(shape, generator=source) for name, shape in shapes.items()}
    weights[HEAD] = weights[TABLE].clone()
    return {
        name: x.bfloat16() if "paligemma.model.language_model" in name or name == HEAD else x
        for name, x in weights.items()
    }


def folder_of(path, adaptive=False, change=None, statistics=None, extra=(), **settings):
    """A folder as LeRobot writes one; ``change`` edits the weights, ``extra`` are more steps of the first processor."""
    path.mkdir()
    weights = weights_for(adaptive)
    save_file(weights if change is None else change(weights), path / "model.safetensors")
    mode = "QUANTILES" if adaptive else "MEAN_STD"
    mapping = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    config = {
        **{"type": "pi05" if adaptive else "pi0", "n_obs_steps": 1, "normalization_mapping": mapping},
        "input_features": features("observation.images.base_0_rgb", "observation.images.empty_camera_0"),
        "output_features": {"action": {"type": "ACTION", "shape": [2]}},
        **{"chunk_size": 6, "n_action_steps": 4, "image_resolution": [16, 16], "num_inference_steps": 2},
        **{"tokenizer_max_length": LENGTH, "dtype": "bfloat16", "paligemma_variant": "gemma_2b", "empty_cameras": 1},
        **{"use_relative_actions": False, "time_sampling_offset": 0.001, "rtc_config": None, "optimizer_lr": 2.5e-5},
    }
    (path / "config.json").write_text(json.dumps(config | settings))
    scaled, still = {"eps": 1e-8, "features": {}, "norm_map": mapping}, {"enabled": False}
    told = "pi05_prepare_state_tokenizer_processor_step" if adaptive else "pi0_new_line_processor"
    lists = {
        "pre": [
            *(step("rename_observations_processor", rename_map={}), step("to_batch_processor"), step(told)),
            *(step("tokenizer_processor", max_length=LENGTH), step("device_processor", device="cpu")),
            *(step("relative_actions_processor", **still), step("normalizer_processor", **scaled), *extra),
        ],
        "post": [
            *(step("unnormalizer_processor", **scaled), step("absolute_actions_processor", **still)),
            step("device_processor", device="cpu"),
        ],
    }
    for name, steps in lists.items():
        entry = next(x for x in steps if x["registry_name"].endswith("normalizer_processor"))
        entry["state_file"] = f"policy_{name}processor_state.safetensors"
        save_file(statistics or (QUANTILES if adaptive else STATISTICS), path / entry["state_file"])
        (path / f"policy_{name}processor.json").write_text(json.dumps({"name": name, "steps": steps}))
    return path


@pytest.fixture
def words(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(letters().file.numpy().tobytes())
    return str(tmp_path / "tokenizer.json")


def read(path, **choices):
    return loaded(Pi0LoadConfig(str(path), **choices))[0]


def chunk(policy):
    source = torch.Generator().manual_seed(1)
    picture = torch.randint(0, 256, (2, 3, 12, 16), generator=source, dtype=torch.uint8)
    obs = {"state": 5 * torch.randn(2, 2, generator=source), "image.base_0_rgb": picture}
    with torch.no_grad():
        noise = torch.randn(2, 6, 32, generator=source)
        return policy.act({**obs, "tokens": letters().ids(["go", "lift it"])}, noise=noise)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_folder_is_read_strictly_and_written_back_bitwise(adaptive, tmp_path, words, monkeypatch):
    policy = read(folder_of(tmp_path / "theirs", adaptive), words=words)
    assert policy.spec.horizon == 6 and policy.spec.execute == 4 and policy.spec.noise_shape == (6, 32)
    assert policy.config.adaptive == adaptive and sorted(policy.spec.obs.shapes) == [
        "image.base_0_rgb",
        "state",
        "tokens",
    ]
    with pytest.raises(BurnishError, match="has other sizes than PaliGemma"):
        write(policy, tmp_path / "ours")
    monkeypatch.setattr(pi0_folder, "PUBLISHED", policy.config)
    monkeypatch.setattr(pi0_folder, "VARIANTS", {(24, 2, 28): "gemma_2b", (16, 2, 20): "gemma_300m"})
    write(policy, tmp_path / "ours")
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert old.keys() == new.keys()
    assert all(torch.equal(x, new[name]) and x.dtype == new[name].dtype for name, x in old.items())
    kept = next((tmp_path / "ours").glob("policy_preprocessor_step_*_normalizer_processor.safetensors"))
    stored = load_file(kept)
    assert all(torch.equal(x, stored[name]) for name, x in (QUANTILES if adaptive else STATISTICS).items())
    again = read(tmp_path / "ours", words=words)
    assert again.config == policy.config and again.spec == policy.spec
    assert torch.equal(chunk(again), chunk(policy))
    save(tmp_path / "saved", config=describe(policy), state=policy.state_dict())
    assert torch.equal(chunk(load_policy(tmp_path / "saved")[0]), chunk(policy))


@pytest.mark.parametrize("adaptive", [False, True])
def test_it_is_exported_to_lerobot(adaptive, tmp_path, words, monkeypatch):
    policy, silent = (read(folder_of(tmp_path / x, adaptive), words=y) for x, y in (("a", words), ("b", None)))
    monkeypatch.setattr(pi0_folder, "PUBLISHED", policy.config)
    monkeypatch.setattr(pi0_folder, "VARIANTS", {(24, 2, 28): "gemma_2b", (16, 2, 20): "gemma_300m"})
    assert "acts alike within 0.0e+00" in export(policy, {}, tmp_path / "ours")
    assert torch.equal(chunk(read(tmp_path / "ours", words=words)), chunk(policy))
    if adaptive:  # it cannot be tried without its tokenizer
        with pytest.raises(BurnishError, match=r"give policy\.words"):
            export(silent, {}, tmp_path / "none")
        assert not (tmp_path / "none").exists()


def without(*names):
    return lambda weights: {key: x for key, x in weights.items() if key not in names}


FORMS = {
    "openpi": lambda w: {name.removeprefix("model."): x for name, x in w.items()},
    "compiled": lambda w: {name.replace("model.", "model._orig_mod.", 1): x for name, x in w.items()},
    "later": lambda w: {name.replace("vision_tower.vision_model.", "vision_tower."): x for name, x in w.items()},
    "tied": without(TABLE),
    "no way to words": without(HEAD, OWN_HEAD),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_the_names_give_the_same_policy(form, tmp_path):
    expected = chunk(read(folder_of(tmp_path / "plain")))
    found = read(folder_of(tmp_path / "other", change=FORMS[form]))
    assert torch.equal(chunk(found), expected)
    assert not any("paligemma.lm_head" in name for name in found.state_dict())


def test_a_way_to_words_of_its_own_is_kept_and_not_used(tmp_path):
    policy = read(folder_of(tmp_path / "other", change=lambda w: w | {HEAD: w[HEAD] + 1}))
    assert torch.equal(policy.state_dict()[HEAD], policy.state_dict()[TABLE].bfloat16().add(1).float())
    assert torch.equal(chunk(policy), chunk(read(folder_of(tmp_path / "plain"))))


LAST = "model.action_out_proj.weight"


@pytest.mark.parametrize(
    ("settings", "change", "choices", "sentence"),
    [
        ({}, without(LAST), {}, r"lacks 'model.action_out_proj.weight'"),
        ({}, without(TABLE, HEAD), {}, "holds no pi0"),
        ({}, lambda w: w | {"model.surplus": torch.zeros(1)}, {}, r"unknown weight: 'model.surplus'"),
        ({}, lambda w: w | {LAST: torch.zeros(31, 16)}, {}, r"action_out_proj.weight of shape \(31, 16\)"),
        ({}, lambda w: w | {LAST.removeprefix("model."): w[LAST].clone()}, {}, "twice"),
        ({"type": "pi05"}, None, {}, r"lacks 'model.*dense"),
        ({"image_resolution": [224, 224]}, None, {}, "image_resolution is"),
        ({"use_relative_actions": True}, None, {}, "use_relative_actions=True"),
        ({"temperature": 2.0}, None, {}, "settings that are not known here"),
        ({}, None, {"horizon": 3}, r"policy.horizon=3: the actions of a pi0 see each other"),
        ({}, None, {"late": True}, r"policy.late=true"),
        ({"extra": [step("relative_actions_processor", enabled=True)]}, None, {}, "the step 'relative_actions_pro"),
    ],
)
def test_a_folder_that_is_not_certain_is_refused(settings, change, choices, sentence, tmp_path):
    path = folder_of(tmp_path / "theirs", change=change, **settings)
    with pytest.raises(BurnishError, match=sentence):
        read(path, **choices)
