"""RLPD: half of every batch is recordings, cut into decisions of the agent's kind, and a base is where it starts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import control_lab
from burnish.finetune.__main__ import GROUPS, FinetuneConfig
from burnish.finetune.build import prepare, prior_data
from burnish.finetune.loops import OffPolicy, OffPolicyConfig
from burnish.finetune.methods.rlpd import Algorithm, RLPDConfig, build
from burnish.offline.replay import Replay
from burnish.offline.returns import Discount
from burnish.offline.sac import SACConfig, soft_agent
from burnish.offline.td3 import TD3Config, deterministic_agent
from burnish.policies.build import build_policy
from burnish.policies.cli.cli import compose, to_object
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.flow import FlowConfig
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.nets.critic import CriticConfig
from burnish.sim.toy import LQR
from source_lab import heard

LIMIT = control_lab.CONFIG.limit
LENGTHS = [(7, True), (5, False), (1, True)]  # ticks of each recording, and whether it terminated
GAMMA = 0.9


def recordings() -> Episodes:
    """The reward of a tick is its own number, so that a sum tells what it holds; every state is 9, in no world."""
    spec = LQR(1, control_lab.CONFIG).spec
    episodes = []
    for seed, (length, terminated) in enumerate(LENGTHS):
        state = torch.full((length + 1, spec.obs.shapes["state"][0]), 9.0)
        action = torch.full((length, spec.action.dim), 0.5 * LIMIT)
        reward = 2.0 ** torch.arange(length)
        episodes.append(Episode({"state": state}, action, reward, terminated, not terminated, False, seed=seed))
    return Episodes(episodes, spec)


def config(algorithm: Algorithm = Algorithm.sac, **settings: Any) -> RLPDConfig:
    loop = OffPolicyConfig(capacity=100, warmup=8, updates_per_decision=20, batch=32)
    critic = CriticConfig(members=10, hidden=[16])
    sac, td3 = RLPDConfig().sac, RLPDConfig().td3
    sac.agent, sac.critic, td3.agent, td3.critic = (
        soft_agent(hidden=[16]),
        critic,
        deterministic_agent(hidden=[16]),
        critic,
    )
    return RLPDConfig(algorithm, loop=loop, sac=sac, td3=td3, **settings)


def control_env(num_envs: int = 2) -> ScaledEnv:
    return ScaledEnv(LQR(num_envs, control_lab.CONFIG))


def started(chosen: RLPDConfig, base: Any = None) -> OffPolicy[Any]:
    view, learner = build(chosen, base, control_env())
    prior = prior_data(chosen, base, control_env(), recordings()).replay
    return OffPolicy(learner, view, Replay(100, 2), chosen.loop, prior=prior)


@pytest.mark.parametrize("algorithm", list(Algorithm))
@pytest.mark.parametrize("execute", [1, 3])
def test_half_of_every_batch_is_recorded(algorithm: Algorithm, execute: int):
    loop = started(config(algorithm, execute=execute))
    loop.source, seen = heard(loop.source)
    for _ in range(7):
        loop.iterate()
    assert len(seen) == 20 * 2 * 3  # 3 iterations of 2 worlds after the warm-up of 8
    for batch in seen:
        recorded = (batch["obs"]["state"] == 9).all(1)
        assert int(recorded.sum()) == 16 and bool(recorded[:16].all())
        assert batch["action"].shape[1:] == (execute, 2)
        assert (batch["action"][:16].abs() <= 0.5).all()  # in units of the actuators it is 2
    assert loop.learner.updates == 120


@pytest.mark.parametrize("execute", [1, 3])
def test_sums_over_recordings_stop_at_their_ends(execute: int):
    prior = prior_data(config(execute=execute, discount=Discount(GAMMA)), None, control_env(), recordings()).replay
    batch = prior.gather(torch.arange(len(prior)), n_step=2)
    possible = set()
    for length, terminated in LENGTHS:
        for first in range(length):
            stop = min(first + 2 * execute, length)
            total = sum(GAMMA ** (t - first) * 2.0**t for t in range(first, stop))
            discount = 0.0 if terminated and stop == length else GAMMA ** (stop - first)
            possible.add((round(total, 3), round(discount, 4)))
    found = {(round(float(r), 3), round(float(d), 4)) for r, d in zip(batch["reward"], batch["discount"], strict=True)}
    assert found == possible


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_a_base_is_where_it_starts(algorithm: Algorithm):
    env = control_env()
    spec = PolicySpec(ObsSpec({"state": (4,)}), LQR(1, control_lab.CONFIG).spec.action, 4, 2, start=1)
    base = build_policy(GaussianConfig(hidden=[16], squash=True), spec).eval()
    base.encoder.normalizer.scaler("state").shift.fill_(0.3)
    before = copy.deepcopy(base.state_dict())
    view, learner = build(config(algorithm), base, env)
    obs = view.reset()
    assert torch.equal(learner.policy.act(obs, greedy=True), base.act(obs, greedy=True))
    assert view.execute == 2 and learner.policy.spec.horizon == 4
    for critic in (learner.critic.online, learner.critic.target):
        assert float(critic.encoder.normalizer.scaler("state").shift[0]) == pytest.approx(0.3)
    # The warm-up plays the base, not anything at all.
    played, _ = learner.actor.act(obs, warm=True, generator=torch.Generator().manual_seed(0))
    expected = base.draw(obs, generator=torch.Generator().manual_seed(0)).action[:, 1:3]
    assert torch.equal(played, expected)
    loop = started(config(algorithm), base)
    for _ in range(6):
        loop.iterate()
    assert loop.learner.updates > 0
    assert all(torch.equal(x, before[key]) for key, x in base.state_dict().items())
    assert any(not torch.equal(x, before[key]) for key, x in loop.learner.policy.state_dict().items())


def test_other_bases_are_refused_by_name():
    spec = control_lab.spec()
    for base in (build_policy(FlowConfig(), spec), build_policy(GaussianConfig(), spec)):
        with pytest.raises(BurnishError, match=r"squash=true.*expo"):
            build(config(), base, control_env())


def test_the_defaults_are_those_of_the_paper():
    chosen = RLPDConfig()
    for side in (chosen.sac, chosen.td3):
        assert (side.critic.members, side.critic.layer_norm, side.subset) == (10, True, 2)
        assert side.actor_mean and side.actor_every == 20 == chosen.loop.updates_per_decision
    assert chosen.loop.prior_share == 0.5 and chosen.sac.entropy_per_dim == -0.5
    assert isinstance(chosen.sac, SACConfig) and isinstance(chosen.td3, TD3Config)


def test_sac_and_td3_from_scratch_are_as_published_and_need_no_recordings():
    for name in ("sac", "td3"):
        words = [f"method={name}", "env=lqr"]
        chosen = to_object(compose("finetune", FinetuneConfig, GROUPS["finetune"], words)).method
        assert chosen.algorithm is Algorithm[name] and chosen.loop.updates_per_decision == 1
        assert chosen.sac == SACConfig(critic=CriticConfig(layer_norm=False)) or name == "td3"
        assert chosen.td3 == TD3Config(critic=CriticConfig(layer_norm=False)) or name == "sac"
        chosen.loop.warmup, chosen.loop.batch, chosen.loop.capacity = 4, 8, 100
        loop = prepare(chosen, None, control_env())
        for _ in range(4):
            loop.iterate()
        assert isinstance(loop, OffPolicy) and loop.prior is None and loop.learner.updates == 4


def test_chunks_count_towards_the_entropy():
    _, learner = build(config(execute=3), None, control_env())
    assert learner.temperature.target == -0.5 * 3 * 2


def test_recordings_are_told_in_the_units_of_the_world_that_they_are_mixed_with():
    """Half of the recorded limit is 0.5 there, and a quarter in a world whose actuators reach twice as far."""
    env, limits = control_env(), ActionSpec((-2 * LIMIT,) * 2, (2 * LIMIT,) * 2)
    for given, expected in ((None, 0.5), (limits, 0.25)):
        held = prior_data(config(), None, env, recordings(), limits=given).replay.latest()
        torch.testing.assert_close(held["action"], torch.full((13, 1, 1, 2), expected))
        assert torch.equal(held["action"], held["executed"])
    narrow = ActionSpec((-0.4 * LIMIT,) * 2, (0.4 * LIMIT,) * 2)
    with pytest.raises(BurnishError, match="outside the limits"):
        prior_data(config(), None, env, recordings(), limits=narrow)
