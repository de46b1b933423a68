"""What no training changes is written once in a run: later checkpoints hold the same file under a name of their own."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import torch

from burnish.policies.build import load_policy, saved_policy
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.runs import checkpoint
from burnish.policies.runs.checkpoint import TENSORS
from burnish.policies.runs.manifest import MANIFEST, _seal
from burnish.real_robot.export.exporter import source

EVALUATION = ["eval.episodes=2", "eval.worlds=2", "eval.confirm=2"]
RUN = [
    "worlds=2",
    "total=24",
    "log_every=4",
    "save_every=8",
    "method.loop.warmup=8",
    "method.loop.batch=8",
    *EVALUATION,
]


@pytest.fixture
def state():
    return {"base": {"w": torch.randn(64, 64), "b": torch.zeros(64)}, "head": torch.randn(4)}


def saved(path, state, before=None, frozen=True):
    still = [state["base"]["w"], state["base"]["b"]] if frozen else []
    child = {"config": {}, "state": state, "frozen": still}
    return checkpoint.save(path, config={}, state={"step": 1}, children={"policy": child}, before=before)


def frozen(path):
    """The file of what no training changes."""
    (file,) = path.glob("frozen*")
    return file


def renamed(path, name):
    """A checkpoint whose file of frozen parts has another name, sealed as if it had been written so."""
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"] = {name if key.startswith("frozen") else key: x for key, x in manifest["files"].items()}
    frozen(path).rename(path / name)
    (path / MANIFEST).write_text(_seal(manifest))


def test_the_same_bytes_are_one_file_and_each_checkpoint_stands_alone(tmp_path, state):
    first = saved(tmp_path / "1", state)
    state["head"] += 1
    second = saved(tmp_path / "2", state, before=first)
    files = [frozen(path / "policy") for path in (first, second)]
    assert files[0].stat().st_ino == files[1].stat().st_ino
    assert (second / "policy" / TENSORS).stat().st_size < 0.05 * files[1].stat().st_size
    shutil.rmtree(first)  # as a run prunes it
    shutil.copytree(second, tmp_path / "away")
    for path in (second, tmp_path / "away"):
        found = checkpoint.load(path / "policy").state
        assert torch.equal(found["base"]["w"], state["base"]["w"]) and torch.equal(found["head"], state["head"])


def test_other_bytes_are_another_file(tmp_path, state):
    first = saved(tmp_path / "1", state)
    state["base"]["w"][0, 0] += 1  # the same tensor, with another number in it
    second = saved(tmp_path / "2", state, before=first)
    assert frozen(first / "policy").stat().st_ino != frozen(second / "policy").stat().st_ino
    assert not torch.equal(*(checkpoint.load(x / "policy").state["base"]["w"] for x in (first, second)))


def test_a_link_in_the_place_of_the_old_file_is_not_followed(tmp_path, state):
    first = saved(tmp_path / "1", state)
    old = frozen(first / "policy")
    old.rename(tmp_path / "elsewhere")
    old.symlink_to(tmp_path / "elsewhere")
    second = saved(tmp_path / "2", state, before=first)
    new = frozen(second / "policy")
    assert not new.is_symlink() and new.stat().st_ino != (tmp_path / "elsewhere").stat().st_ino
    checkpoint.load(second / "policy")
    with pytest.raises(BurnishError, match="symbolic link"):
        checkpoint.load(first / "policy")


@pytest.mark.parametrize("damage", ["flipped", "missing", "unlisted"])
def test_a_damaged_file_is_refused(tmp_path, state, damage):
    path = saved(tmp_path / "1", state, frozen=damage != "unlisted") / "policy"
    if damage == "flipped":
        content = bytearray(frozen(path).read_bytes())
        content[-1] ^= 1
        frozen(path).write_bytes(content)
    elif damage == "missing":
        frozen(path).unlink()
    else:  # a file that no manifest lists is not read
        (path / "frozen-0.safetensors").write_bytes(b"not tensors")
        assert torch.equal(checkpoint.load(path).state["head"], state["head"])
        return
    with pytest.raises(BurnishError, match=r"frozen-[0-9a-f]{64}\.safetensors"):
        checkpoint.load(path)


def test_the_name_is_the_hash_of_the_content_and_an_older_one_had_none(tmp_path, state):
    path = saved(tmp_path / "1", state) / "policy"
    assert frozen(path).name == f"frozen-{hashlib.sha256(frozen(path).read_bytes()).hexdigest()}.safetensors"
    renamed(path, "frozen.safetensors")  # as it was called before
    assert torch.equal(checkpoint.load(path).state["base"]["w"], state["base"]["w"])
    for name in (f"frozen-{'0' * 64}.safetensors", "frozen-x.safetensors"):
        renamed(path, name)
        with pytest.raises(BurnishError, match="not the name of its content"):
            checkpoint.load(path)


@pytest.mark.parametrize("method", ["residual_td3", "dsrl"])
def test_a_refinement_writes_its_base_once(tmp_path, method):
    assert main(["collect", "env=point_reach", "env.max_steps=12", "episodes=4", f"out={tmp_path}/data"]) == 0
    large = ["policy=flow", "policy.steps=2", "policy.net.mlp.hidden=[512,512]", "train.steps=3", "train.batch=8"]
    assert main(["pretrain", *large, f"data={tmp_path}/data", f"out={tmp_path}/bc", *EVALUATION]) == 0
    algorithm = "td3" if method == "residual_td3" else "sac"
    nets = [f"method.{algorithm}.{name}" for name in ("critic.hidden=[8]", "critic.members=2", "agent.hidden=[8]")]
    words = ["finetune", f"method={method}", f"policy.path={tmp_path}/bc", *RUN, *nets, f"out={tmp_path}/run"]
    assert main([*words, "method.loop.initial_updates=1"]) == 0
    kept = sorted((tmp_path / "run/checkpoints").iterdir())
    assert len(kept) >= 2 and len({frozen(path / "policy").stat().st_ino for path in kept}) == 1
    base = frozen(kept[-1] / "policy").stat().st_size
    trained = sum(path.stat().st_size for path in (kept[-1] / "policy").iterdir() if not path.name.startswith("frozen"))
    assert trained < 0.05 * base, (trained, base)
    (refined, _), (given, _) = load_policy(tmp_path / "run"), load_policy(tmp_path / "bc")
    same = zip(refined.base.state_dict().values(), given.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    saved = saved_policy(tmp_path / "run")
    assert source(saved, "")["checkpoint"]["sha256"], "an export names the checkpoint that it is of"


def test_what_two_children_share_is_written_by_the_first(tmp_path):
    weight = torch.randn(8, 8, dtype=torch.complex64)
    policy = {"w": weight}
    learner = {
        "w": weight,
        "view": weight[1:],
        "turned": weight.t(),
        "conjugate": weight.conj(),
        "same": weight.clone(),
    }
    children = {name: {"config": {}, "state": state} for name, state in (("policy", policy), ("learner", learner))}
    path = checkpoint.save(tmp_path / "1", config={}, state={}, children=children)
    skeleton = json.loads((path / "learner/state.json").read_text())
    assert {name for name, x in skeleton.items() if x["$tensor"] == "policy:w"} == {"w"}
    found = checkpoint.load(path).children["learner"].state
    assert all(torch.equal(found[name], x) for name, x in learner.items())
    with pytest.raises(BurnishError, match=r"state\.json is malformed: 'policy:w'"):
        checkpoint.load(path / "learner")
