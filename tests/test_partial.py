"""Checkpoints that hold what was trained alone: smaller, resumed bit for bit, and loaded onto the very same base."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import torch
from safetensors import safe_open
from test_trainable import EVALUATION, act, base
from test_vla_folders import folder_of, read

from burnish.finetune import api
from burnish.policies.build import describe, load_policy, saved_policy
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.partial import completed, weights_elsewhere
from burnish.policies.runs.checkpoint import STATE, TENSORS, load, save
from burnish.policies.runs.manifest import MANIFEST, _seal
from burnish.policies.trainable import TrainableConfig, trainable
from burnish.policies.vla.words import Words

__all__ = ["base"]  # a fixture


def words(method, base, out, *more):
    own = {
        "flow_sde": ["method.train.part=head", "method.loop.decisions_per_update=2", "method.ppo.minibatch=8"],
        "dsrl": ["method.loop.warmup=8", "method.loop.batch=8", "method.sac.agent.hidden=[8]"],
    }[method]
    few = ["worlds=2", "total=24", "log_every=4", "save_every=8", *EVALUATION]
    return ["finetune", f"method={method}", f"policy.path={base}", *own, *few, f"out={out}", *more]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["flow_sde", "dsrl"])
def test_a_run_leaves_its_base_out_and_is_the_same_run(base, tmp_path, method):
    assert main(words(method, base, tmp_path / "whole")) == 0
    assert main(words(method, base, tmp_path / "run", "partial=true")) == 0
    shutil.rmtree(max((tmp_path / "run/checkpoints").iterdir()))
    shutil.move(base, tmp_path / "moved")
    try:
        assert main(words(method, tmp_path / "moved", tmp_path / "run", "partial=true", "resume=true")) == 0
        whole, _ = load_policy(tmp_path / "whole")
        made, _ = load_policy(tmp_path / "run", base=str(tmp_path / "moved"))
        again = api.load(tmp_path / "run", base=str(tmp_path / "moved"))
        assert torch.equal(act(made), act(whole)) and torch.equal(act(again), act(whole))
        for name in ("run", "run/candidate"):
            with pytest.raises(BurnishError, match=r"say where that is: policy\.base=FOLDER"):
                load_policy(tmp_path / name)
        assert (
            main(["evaluate", f"policy.path={tmp_path}/run", f"policy.base={tmp_path}/moved", "eval.episodes=2"]) == 0
        )
        assert main(["evaluate", f"policy.path={tmp_path}/run", "eval.episodes=2"]) == 2
        with pytest.raises(BurnishError, match=r"other ones in place of \d+ of them"):
            load_policy(tmp_path / "run", base=base_of_others(tmp_path))
    finally:
        shutil.move(tmp_path / "moved", base)
    kept = max((tmp_path / "run/checkpoints").iterdir()) / "policy"
    left_out = {name for name, _ in whole.named_parameters()} - set(saved_names(kept))
    if method == "flow_sde":
        assert len(left_out) == 2 and all(name.startswith("net.encoder.trunk.") for name in left_out)
    else:
        assert left_out == {f"base.{name}" for name, _ in whole.base.named_parameters()}


def base_of_others(folder):
    """A checkpoint of the same kind with one weight changed in its last bit."""
    saved = saved_policy(folder / "moved")
    name = next(name for name, x in saved.state.items() if "encoder.trunk" in name and x.ndim == 2)
    saved.state[name].view(torch.int32)[0, 0] ^= 1
    save(folder / "other", config=saved.config, state=saved.state)
    return str(folder / "other")


def test_a_weight_is_found_by_its_content_in_the_type_that_is_used(tmp_path):
    stored = torch.nn.ModuleList([torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)]).bfloat16()
    used = torch.nn.ModuleList([torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)])
    used.load_state_dict(stored.state_dict())
    state = {"base": used.state_dict(), "head": torch.ones(2)}
    save(tmp_path / "a", config={}, state=state, elsewhere=weights_elsewhere(used))
    read = load(tmp_path / "a").state
    for given in (stored, used):
        found = completed(read, given, "a")
        assert all(torch.equal(x, state["base"][name]) for name, x in found["base"].items())
        assert torch.equal(found["head"], state["head"])
    assert sorted(saved_names(tmp_path / "a")) == ["head"]
    assert completed({"head": state["head"]}, None, "a")["head"] is state["head"]
    with torch.no_grad():
        stored.state_dict()["1.bias"].add_(1)
    with pytest.raises(BurnishError, match="stands on 4 weights, and the base has other ones in place of 1"):
        completed(read, stored, "a")
    with pytest.raises(BurnishError, match="no base with weights"):
        weights_elsewhere(None)


def saved_names(path):
    with safe_open(path / TENSORS, "pt") as file:
        return [*file.keys()]


@pytest.mark.parametrize("name", ["sha256:float32:../x", "sha256:object:" + "0" * 64, "sha256:float32:" + "0" * 63])
def test_a_name_that_is_no_content_is_malformed(tmp_path, name):
    save(tmp_path / "a", config={}, state={"w": torch.ones(2)})
    (tmp_path / "a" / STATE).write_text(json.dumps({"w": {"$tensor": name}}))
    manifest = json.loads((tmp_path / "a" / MANIFEST).read_text())
    text = (tmp_path / "a" / STATE).read_bytes()
    manifest["files"][STATE] = {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (tmp_path / "a" / MANIFEST).write_text(_seal(manifest))
    with pytest.raises(BurnishError, match="malformed"):
        load(tmp_path / "a")


@pytest.mark.slow
def test_of_a_vision_language_action_model_the_expert_is_stored(tmp_path):
    base, words = folder_of(tmp_path / "smolvla"), tmp_path / "tokenizer.json"
    words.write_bytes(Words.of(["go"]).file.numpy().tobytes())
    given = read(base, words=str(words))
    made = trainable(given, TrainableConfig())
    with torch.no_grad():
        made.model.action_out_proj.bias += 1
    save(tmp_path / "a", config=describe(made), state=made.state_dict(), elsewhere=weights_elsewhere(given))
    named = saved_names(tmp_path / "a")
    assert not any(".vlm." in name for name in named) and any(".lm_expert." in name for name in named)
    found, _ = load_policy(tmp_path / "a", base=str(base))
    assert all(torch.equal(x, made.state_dict()[name]) for name, x in found.state_dict().items())
    other = folder_of(tmp_path / "other", change=lambda all: {n: x + 1 if "embed" in n else x for n, x in all.items()})
    with pytest.raises(BurnishError, match="other has other ones in place of 4 of them"):
        load_policy(tmp_path / "a", base=str(other))
