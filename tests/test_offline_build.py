"""Every offline method by the same contract: resume, masks at ends, refusals, deployment, and going on in the world."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import mdp
from burnish.finetune.loops import OffPolicyConfig
from burnish.finetune.method import Phase
from burnish.finetune.table import OFFLINE, method_name
from burnish.offline.replay import Replay
from burnish.offline.sources import Rows
from burnish.policies.build import build_policy, describe, load_policy
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import ActionSpec
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.runs import checkpoint
from offline_lab import CHUNKED, CONFIGS, FLOW, SINGLE, a_batch, build, made, recorded, same
from scripted import TERMINATED, TRUNCATED, ScriptedWorld
from training_lab import run_off_policy

everyone = pytest.mark.parametrize("name", CONFIGS)


def test_the_table_knows_every_method():
    without_critic = {"recap"}  # tested by itself
    assert {method_name(config, Phase.offline) for config in CONFIGS.values()} == set(OFFLINE) - without_critic
    with pytest.raises(BurnishError, match="not the configuration of an offline method"):
        method_name(GaussianConfig(), Phase.offline)


@everyone
@pytest.mark.parametrize("spec", [SINGLE, CHUNKED], ids=["single", "chunked"])
def test_a_resumed_learner_goes_on_bit_for_bit(name, spec):
    learner = made(name, spec)
    for seed in range(3):
        learner.update(Rows(a_batch(spec, seed=seed)))
    saved = copy.deepcopy(learner.state_dict())
    resumed = made(name, spec, seed=1)
    resumed.load_state_dict(saved)
    before = copy.deepcopy(saved)
    for seed in range(3, 6):
        wanted, got = (each.update(Rows(a_batch(spec, seed=seed))) for each in (learner, resumed))
        assert all(torch.equal(torch.as_tensor(wanted[key]), torch.as_tensor(got[key])) for key in wanted | got)
    assert same(learner.policy, resumed.policy) and same(learner.critic, resumed.critic)
    # What was handed in is not what the learner goes on writing to.
    flat, unchanged = (dict(_leaves(state)) for state in (saved, before))
    assert all(torch.equal(flat[key], unchanged[key]) for key in flat)


def _leaves(tree, place=""):
    if isinstance(tree, torch.Tensor):
        yield place, tree
    for key, item in tree.items() if isinstance(tree, dict) else ():
        yield from _leaves(item, f"{place}/{key}")


@everyone
def test_only_a_truncated_chunk_is_without_a_value(name):
    """The critic after one update, with another reward and action in one row: where a chunk was cut short, or not."""

    def critic(row: int):
        learner, batch = made(name, CHUNKED), a_batch(CHUNKED)
        if row >= 0:
            batch["reward"][row] += 3
            batch["action"][row, 0] *= -1
        learner.update(Rows(batch))
        return learner.critic.online

    full, terminated_early, truncated_early = 0, 2, 3
    assert same(critic(-1), critic(truncated_early))
    assert not same(critic(-1), critic(terminated_early))
    assert not same(critic(-1), critic(full))


@everyone
@pytest.mark.parametrize("column", ["reward", "discount"])
def test_columns_that_would_broadcast_are_refused(name, column):
    batch = a_batch()
    batch[column] = batch[column][:, None]
    with pytest.raises(ValueError, match="expected shape"):
        made(name).update(Rows(batch))


@everyone
def test_the_policy_given_is_copied_and_lends_its_scales(name):
    config = CONFIGS[name]
    given = build_policy(config.policy, SINGLE, seed=7)
    normalizer = next(m for m in given.modules() if hasattr(m, "normalizer")).normalizer
    normalizer.scaler("state").shift.fill_(0.5)
    before = copy.deepcopy(given)
    learner = build(config, given, SINGLE)
    learner.update(Rows(a_batch()))
    learner.update(Rows(a_batch()))
    assert same(given, before)
    for net in (learner.critic.online, learner.critic.target):
        assert torch.equal(net.encoder.normalizer.scaler("state").shift, torch.full((3,), 0.5))


@everyone
def test_a_fresh_policy_is_fitted_to_the_data(name):
    data = recorded(0)
    learner = build(CONFIGS[name], None, mdp.SPEC, data=data)
    seen = data.latest()["obs"]["state"].flatten(0, 1)
    scaler = learner.critic.online.encoder.normalizer.scaler("state")
    torch.testing.assert_close(scaler.shift, seen.mean(0))
    torch.testing.assert_close(scaler.scale, seen.std(0, correction=0))


@everyone
def test_a_policy_that_cannot_be_trained_is_refused_by_a_sentence(name):
    stranger = CallablePolicy(lambda obs: torch.zeros(len(obs["state"]), 1, 2), SINGLE)
    with pytest.raises(BurnishError, match="not a CallablePolicy"):
        build(CONFIGS[name], stranger, SINGLE)
    with pytest.raises(BurnishError, match="make the data with the spec of the policy"):
        build(CONFIGS[name], build_policy(CONFIGS[name].policy, CHUNKED), SINGLE)


@pytest.mark.parametrize("name", ["td3_bc", "cql"])
def test_a_flow_cannot_be_climbed_through(name):
    with pytest.raises(BurnishError, match="fql, or iql with extraction=best_of_n"):
        build(CONFIGS[name], build_policy(FLOW, SINGLE), SINGLE)


@everyone
def test_what_is_deployed_loads_with_policies_alone(name, tmp_path):
    learner = made(name, CHUNKED)
    learner.update(Rows(a_batch(CHUNKED)))
    checkpoint.save(tmp_path / "p", config=describe(learner.policy), state=learner.policy.state_dict())
    loaded, _ = load_policy(tmp_path / "p")
    obs = a_batch(CHUNKED)["obs"]
    drawn = [each.act(obs, generator=torch.Generator().manual_seed(3)) for each in (learner.policy, loaded)]
    assert torch.equal(*drawn) and drawn[0].shape == (12, 5, 2) and float(drawn[0].detach().abs().max()) <= 1


@everyone
def test_learning_goes_on_in_the_world(name):
    ends = [(length, kind) for length in (2, 4, 5) for kind in (TERMINATED, TRUNCATED)]
    world = ScriptedWorld([ends, ends[1:]])
    world.spec = replace(world.spec, action=ActionSpec((-2.0, 0.0), (2.0, 1.0)))
    changes = {"calibrate": False} if name == "cal_ql" else {}
    learner = made(name, CHUNKED, **changes)
    replay = Replay(100, 2)
    loop = OffPolicyConfig(capacity=100, warmup=4, batch=8)
    metrics = run_off_policy(learner, ChunkEnv(ScaledEnv(world), 3, 0.9), replay, loop, total=24)
    assert len(replay) == 24 and all(bool(torch.as_tensor(x).isfinite().all()) for x in metrics.values())
    assert replay.latest()["action"].shape == (12, 2, 3, 2)
    assert float(learner.q_values(replay.sample(5)).isfinite().sum()) == 5


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("iql", {"expectile": 1.0}, r"expectile=1.0 must lie in \(0, 1\); 0.7 to 0.9"),
        ("iql", {"weight_cap": 0.5}, "weight_cap=0.5 must be at least 1"),
        ("iql", {"lr": 0.0}, "lr=0.0 must be a positive number"),
        ("iql", {"tau": 1.5}, "tau=1.5 must lie in"),
        ("td3_bc", {"tau": 1.5}, "tau=1.5 must lie in"),
        ("fql", {"tau": 1.5}, "tau=1.5 must lie in"),
        ("cql", {"tau": 1.5}, "tau=1.5 must lie in"),
        ("td3_bc", {"alpha": -1.0}, "alpha=-1.0 must be at least 0"),
        ("td3_bc", {"actor_every": 0}, "actor_every=0 must be at least 1"),
        ("fql", {"alpha": -1.0}, "alpha=-1.0 must be at least 0"),
        ("cql", {"count": 0}, "count=0 must be at least 1"),
        ("cql", {"weight": 0.0, "threshold": 1.0}, "needs a weight above 0"),
    ],
)
def test_settings_out_of_range_are_refused(name, changes, sentence):
    with pytest.raises(BurnishError, match=sentence):
        replace(CONFIGS[name], **changes)
