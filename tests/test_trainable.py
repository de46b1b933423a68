"""The part of a policy that is trained, what it shares with its base, and what a checkpoint writes of it."""

from __future__ import annotations

import shutil

import pytest
import torch
from verb_lab import imitating

import flow_lab as lab
from burnish.policies.build import load_policy
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.runs.checkpoint import TENSORS
from burnish.policies.trainable import LowRank, Part, TrainableConfig, lora_of, merge_lora, shared, trainable

EVALUATION = ["eval.episodes=2", "eval.worlds=2", "eval.confirm=2"]
LORA = TrainableConfig(Part.lora, rank=2, alpha=4.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a flow whose encoder has weights."""
    net = ["policy.net.mlp.hidden=[256,256]", "policy.net.encoder.trunk=[64]"]
    return imitating(tmp_path_factory.mktemp("base"), *net, *EVALUATION) / "bc"


def memory(*policies):
    """Bytes of all parameters, each place in memory once."""
    places = {p.data_ptr(): p.nbytes for policy in policies for p in policy.parameters()}
    return sum(places.values())


def act(policy):
    with torch.no_grad():
        return policy.act(lab.seen(policy, 5), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("part", list(Part))
def test_what_is_not_trained_is_shared_and_the_base_is_left_alone(base, part):
    policy, _ = load_policy(base)
    before = {name: x.clone() for name, x in policy.state_dict().items()}
    made, watched = trainable(policy, TrainableConfig(part, rank=2)), shared(policy)
    trained = [p for p in made.parameters() if p.requires_grad]
    names = [name for name, p in made.named_parameters() if p.requires_grad]
    assert memory(policy, made, watched) == memory(policy) + sum(p.nbytes for p in trained)
    assert {Part.all: True, Part.head: False, Part.lora: True}[part] == any("encoder" in name for name in names)
    assert torch.equal(act(made), act(policy))  # nothing is changed by the copy
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    for _ in range(2):  # at first only U of a low-rank change has a gradient
        optimizer.zero_grad()
        made.bc_loss(lab.seen(policy, 8), torch.zeros(8, *policy.spec.chunk_shape)).mean().backward()
        optimizer.step()
    assert not torch.equal(act(made), act(policy))
    assert all(p.requires_grad for p in policy.parameters())
    assert all(torch.equal(x, before[name]) for name, x in policy.state_dict().items())
    assert torch.equal(act(watched), act(policy))


def test_a_low_rank_change_has_its_rank_and_merges_into_a_plain_policy(base):
    policy, _ = load_policy(base)
    made = trainable(policy, LORA)
    for part in made.modules():
        if isinstance(part, LowRank):
            torch.nn.init.normal_(part.up)
    changed, lively = act(made), made.net.body
    assert not torch.equal(changed, act(policy)) and lora_of(made) is not None
    merge_lora(made)
    assert lora_of(made) is None and made.state_dict().keys() == policy.state_dict().keys()
    assert torch.equal(act(made), changed) and lively is made.net.body
    for name, weight in policy.state_dict().items():
        change = made.state_dict()[name] - weight
        if weight.ndim == 2 and name.endswith("weight"):
            rank = int(torch.linalg.matrix_rank(change.double(), rtol=1e-5))
            assert rank == min(2, *weight.shape), name
        else:
            assert not change.any(), name


@pytest.mark.parametrize("part", ["head", "lora"])
@pytest.mark.parametrize("method", ["reinflow", "dppo", "flow_sde"])
def test_a_run_trains_the_part_writes_little_and_resumes(base, tmp_path, method, part):
    words = ["finetune", f"method={method}", f"policy.path={base}", f"method.train.part={part}", "method.train.rank=2"]
    words += ["worlds=2", "total=32", "log_every=1", "save_every=8", *EVALUATION]
    words += ["method.ppo.value.hidden=[8]", "method.ppo.minibatch=8"]
    words += ["method.loop.decisions_per_update=2"] + (["method.trained_steps=1"] if method == "dppo" else [])
    assert main([*words, f"out={tmp_path}/whole"]) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(max((tmp_path / "cut/checkpoints").iterdir()))
    assert main([*words, f"out={tmp_path}/cut", "resume=true"]) == 0
    policies = [load_policy(tmp_path / name)[0] for name in ("whole", "cut")]
    given = load_policy(base)[0]
    states = [policy.state_dict() for policy in policies]
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())
    assert not torch.equal(act(policies[0]), act(given))
    encoder = next(name for name in states[0] if "encoder" in name and name.endswith("weight"))
    started = given.state_dict()[encoder.removeprefix("last.").removeprefix("first.")]
    assert torch.equal(states[0][encoder], started) or part == "lora"
    kept = sorted((tmp_path / "whole/checkpoints").iterdir())[-1]
    size = sum(p.nbytes for p in given.parameters())
    written = {name: (kept / name / TENSORS).stat().st_size for name in ("policy", "learner")}
    assert len([*(kept / "policy").glob("frozen-*")]) == 1
    if part == "lora":  # a copy of the base would be more than all of it
        assert written["policy"] < 0.1 * size and written["learner"] < 0.5 * size, (written, size)


def test_refusals(base):
    policy, _ = load_policy(base)
    with pytest.raises(BurnishError, match="outside its encoder"):
        trainable(torch.nn.ModuleDict({"encoder": torch.nn.Linear(2, 2)}), TrainableConfig(Part.head))
    with pytest.raises(BurnishError, match="no linear"):
        trainable(torch.nn.LayerNorm(3), LORA)
    with pytest.raises(BurnishError, match="rank=0"):
        TrainableConfig(Part.lora, rank=0)
    assert memory(policy)
