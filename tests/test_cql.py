"""CQL and Cal-QL: the gap against loops and integrals, calibration, SAC at weight 0, the best policy in support."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import mdp
from burnish.offline.cql import CQL
from burnish.offline.dataset import BehindCut
from burnish.offline.replay import Replay
from burnish.offline.sac import SAC, SACConfig
from burnish.offline.sources import Rows
from burnish.offline.td import calibrated, cql_gap, uniform_log_density
from burnish.policies.build import build_policy
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.nets.critic import CriticConfig
from offline_lab import CHUNKED, CONFIGS, SINGLE, a_batch, made, same, trained, weights

# Shares of the best return on 20 seeds: all 1.0. Cuts taken for ends: 0.474 on 5 seeds. This world does not need the
# gap: SAC reaches 1.0 too (5 seeds). What the gap does is shown by the last test.
REACHED, FAILED, UPDATES = 0.9, 0.6, 120
COLUMNS = ("action", "reward", "discount", "terminated", "steps", "return_to_go")
LINE = PolicySpec(ObsSpec({"state": (3,)}), ActionSpec((-1.0,), (1.0,)), horizon=1, execute=1)
SQUARE = replace(LINE, horizon=2, execute=2)  # two actions of one number: a chunk of size 2


def gap_of(learner, batch):
    """(E, B), by the production code, with the noise that the learner has now."""
    online = learner.critic.online
    features = online.encode(batch["obs"])
    q_data = online.values(features, batch["action"])
    columns = {name: batch[name] for name in COLUMNS}
    return learner.gap(batch["obs"], batch["next_obs"], features, q_data, columns)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_gap_against_an_explicit_loop(temperature, float64):
    make = torch.Generator().manual_seed(0)
    q_data, q, log_p = torch.randn(2, 4, generator=make), torch.randn(2, 4, 5, generator=make), torch.randn(4, 5)
    gap = cql_gap(q_data, q, log_p, temperature)
    for e in range(2):
        for b in range(4):
            mean = sum(math.exp(float(q[e, b, m]) / temperature) / math.exp(float(log_p[b, m])) for m in range(5)) / 5
            assert float(gap[e, b]) == pytest.approx(temperature * math.log(mean) - float(q_data[e, b]))


def test_gap_is_derived_right(float64):
    q_data, q = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    log_p, bound = torch.randn(3, 4), torch.tensor([-9.0, 0.0, 9.0])
    assert torch.autograd.gradcheck(lambda a, b: cql_gap(a, calibrated(b, bound), log_p, 0.7), (q_data, q))


def test_gap_is_the_log_of_the_integral_over_actions():
    """Of 3 x 5000 draws the largest error of 20 seeds was 0.034; without the proposal's density it is log 2 = 0.69."""
    learner, batch = made("cql", LINE, count=5000), a_batch(LINE, rows=4)
    for parameter in learner.critic.online.net.layers[-1].parameters():
        parameter.data *= 10  # a critic that says something
    grid = (torch.arange(2000) + 0.5) / 1000 - 1
    with torch.no_grad():
        q = learner.critic.online(batch["obs"], grid.expand(4, 2000)[:, :, None, None])
        exact = (q.exp().mean(-1) * 2).log() - learner.critic.online(batch["obs"], batch["action"])
        gap = gap_of(learner, batch)
    assert float(q.std(-1).min()) > 0.05
    torch.testing.assert_close(gap, exact, rtol=0, atol=0.07)


def test_the_uniform_proposal_is_that_of_the_whole_chunk():
    """A critic that says 0 everywhere has the gap log volume = D log 2, where D counts all numbers of the chunk; of 20
    seeds the largest error was 0.009."""
    assert uniform_log_density(6) == pytest.approx(math.log(0.5**6))
    for spec, size in ((LINE, 1), (SQUARE, 2)):
        learner, batch = made("cql", spec, count=5000), a_batch(spec, rows=4)
        for parameter in learner.critic.online.net.layers[-1].parameters():
            parameter.data.zero_()
        assert learner.size == size
        with torch.no_grad():
            gap = gap_of(learner, batch)
        torch.testing.assert_close(gap, torch.full((2, 4), size * math.log(2)), rtol=0, atol=0.05)


def test_proposals_follow_the_next_state_too():
    """Another next state changes the draws; that Q is asked at this state, the integral above shows."""
    learner, batch = made("cql"), a_batch()
    seen = learner.noise.get_state()
    first = gap_of(learner, batch)
    learner.noise.set_state(seen)
    again = gap_of(learner, batch)
    assert torch.equal(first, again)
    learner.noise.set_state(seen)
    moved = gap_of(learner, {**batch, "next_obs": {"state": batch["next_obs"]["state"] + 1}})
    assert not torch.equal(first, moved)
    here, there = (learner._draws(batch[key], 3) for key in ("obs", "next_obs"))
    assert here[0].shape == there[0].shape == (12, 3, 1, 2) and here[1].shape == (12, 3)


def test_draws_belong_to_their_row():
    learner, batch = made("cql"), a_batch()
    learner.policy.raw_std.data.fill_(-50.0)  # a spread of exp(-5): each draw is next to the mean of its own row
    actions, log_prob = learner._draws(batch["obs"], 6)
    mean = learner.policy.act(batch["obs"], greedy=True)
    actions, mean = actions.detach(), mean.detach()
    assert float((actions - mean[:, None]).abs().max()) < 0.04
    assert float((mean[0] - mean[1]).abs().max()) > 0.0
    u = torch.atanh(actions[3, 2].clamp(-1 + 1e-6, 1 - 1e-6))[None]
    wanted = learner.policy.log_prob({"state": batch["obs"]["state"][3:4]}, u, torch.ones(1))
    assert float(log_prob[3, 2].detach()) == pytest.approx(float(wanted.detach()), rel=1e-2)


def test_calibration_floors_the_actions_of_the_policy_alone():
    learner, batch = made("cal_ql"), a_batch()
    seen = learner.noise.get_state()

    def gap(bound: float, calibrate: bool = True):
        learner.config = replace(learner.config, calibrate=calibrate)
        learner.noise.set_state(seen)
        return gap_of(learner, {**batch, "return_to_go": torch.full((12,), bound)})

    plain = gap(0.0, calibrate=False)
    torch.testing.assert_close(gap(-1e6), plain, rtol=0, atol=0)
    floored = gap(0.2)
    # The same draws once more, each of them by hand.
    learner.noise.set_state(seen)
    anywhere = 2 * torch.rand(12, 4, 1, 2, generator=learner.noise) - 1
    here, log_here = learner._draws(batch["obs"], 4)
    after, log_after = learner._draws(batch["next_obs"], 4)
    q = [learner.critic.online(batch["obs"], actions) for actions in (anywhere, here, after)]
    terms = [q[0] + 2 * math.log(2), q[1].clamp(min=0.2) - log_here, q[2].clamp(min=0.2) - log_after]
    expected = torch.cat(terms, 2).logsumexp(2) - math.log(12)
    torch.testing.assert_close(floored, expected - learner.critic.online(batch["obs"], batch["action"]))
    assert bool((q[0] < 0.2).any()) and not torch.allclose(floored, plain)
    # Far above Q the sampled actions of the policy are constants; those of the uniform proposal still feel the critic.
    q = torch.zeros(1, 1, 6, requires_grad=True)
    floored = torch.cat([q[:, :, :2], calibrated(q[:, :, 2:], torch.tensor([5.0]))], 2)
    cql_gap(torch.zeros(1, 1), floored, torch.zeros(1, 6)).sum().backward()
    assert bool((q.grad[0, 0, :2] > 0).all()) and bool((q.grad[0, 0, 2:] == 0).all())


def test_calibration_needs_the_returns_of_the_data():
    batch = a_batch()
    del batch["return_to_go"]
    with pytest.raises(BurnishError, match=r"decisions\(returns=BehindCut.worst\)"):
        made("cal_ql").update(Rows(batch))
    made("cql").update(Rows(batch))


@pytest.mark.parametrize("behind_cut", [BehindCut.worst, BehindCut.last])
@pytest.mark.parametrize("last_steps", [1, 2, 3])
def test_a_chunk_that_a_cut_made_shorter_goes_on_at_the_same_rate(behind_cut, last_steps):
    """-1 per tick for ever is -10 with gamma 0.9, as `decisions` says of recordings; decisions have three ticks."""
    learner, replay = made("cal_ql", CHUNKED, behind_cut=behind_cut), Replay(8)
    learner.discount, obs = 0.9**3, {"state": torch.zeros(1, 3)}
    for steps, ended in ((3, False), (3, False), (last_steps, True)):
        spent = torch.tensor([0.9**steps])
        columns = {"action": torch.zeros(1, 3, 2), "reward": (spent - 1) / 0.1, "discount": spent}
        columns |= {"ended": torch.tensor([ended]), "terminated": torch.tensor([False]), "steps": torch.tensor([steps])}
        replay.add(obs, {**columns, "return_to_go": torch.tensor([-math.inf])}, obs)
        learner.stored(replay)
    torch.testing.assert_close(replay.latest()["return_to_go"][:, 0], torch.full((3,), -10.0))


def test_a_floor_stops_lowering_the_gap():
    learner, batch = made("cql", gap_floor=100.0), a_batch()
    gap = gap_of(learner, batch)
    assert bool((gap == 100.0).all())


@pytest.mark.parametrize(("threshold", "rises"), [(-50.0, True), (50.0, False)])
def test_the_multiplier_holds_the_gap_at_its_threshold(threshold, rises):
    learner = made("cql", threshold=threshold)
    for seed in range(5):
        learner.update(Rows(a_batch(seed=seed)))
    assert (float(learner.multiplier()) > 1.0) is rises
    fixed = made("cql")
    fixed.update(Rows(a_batch()))
    assert float(fixed.multiplier()) == 1.0


def _pair(spec, weight: float, entropy: bool = False) -> tuple[CQL, SAC]:
    config = replace(CONFIGS["cql"], weight=weight, backup_entropy=entropy)
    policy = build_policy(config.policy, spec, seed=3)
    usual = SACConfig(
        lr=config.lr,
        actor_lr=config.actor_lr,
        tau=config.tau,
        backup_entropy=entropy,
        agent=config.policy,
        critic=config.critic,
    )
    return CQL(copy.deepcopy(policy), config, seed=5), SAC(copy.deepcopy(policy), usual, seed=5)


@pytest.mark.parametrize("spec", [SINGLE, CHUNKED], ids=["single", "chunked"])
@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("entropy", [False, True])
def test_weight_zero_is_sac(spec, weight, entropy):
    cql, sac = _pair(spec, weight, entropy)
    for seed in range(5):
        for learner in (cql, sac):
            learner.update(Rows(a_batch(spec, seed=seed)))
    equal = [same(cql.policy, sac.agent), same(cql.critic, sac.critic), same(cql.temperature, sac.temperature)]
    assert equal == [weight == 0] * 3


def _by_hand(critic, layer_norm, state, action):
    """[Q_1, Q_2] of one row by NumPy: linear, layer norm if there is one, ReLU; the last layer is linear alone."""
    weights = [x.detach().double().numpy() for x in critic.net.parameters()]
    per_layer = 4 if layer_norm else 2
    values = []
    for member in range(len(weights[0])):
        x = np.concatenate([state.double().numpy(), action.double().numpy().ravel()])
        for first in range(0, len(weights), per_layer):
            w, b, *norm = (p[member] for p in weights[first : first + per_layer])
            x = x @ w.reshape(len(x), -1) + b.ravel()
            if first + per_layer >= len(weights):
                break
            if norm:
                x = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * norm[0].ravel() + norm[1].ravel()
            x = np.maximum(x, 0)
        values.append(float(x[0]))
    return values


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("floor", [None, 1.4])
def test_layer_norm_backup_and_floor_are_what_their_formulae_say(layer_norm, entropy, best, floor):
    """The loss of the critic and the gap, row by row in NumPy."""
    critic = CriticConfig(hidden=[16, 16], layer_norm=layer_norm)
    options = {"backup_entropy": entropy, "max_target_backup": best, "gap_floor": floor, "alpha": 0.3}
    learner, batch = made("cql", critic=critic, **options), a_batch()
    online, target = copy.deepcopy(learner.critic.online), copy.deepcopy(learner.critic.target)
    columns, seen = {name: batch[name] for name in COLUMNS}, learner.noise.get_state()
    metrics = learner._step_critic(batch["obs"], batch["next_obs"], columns)

    learner.noise.set_state(seen)
    with torch.no_grad():
        following, dense = learner._draws(batch["next_obs"], 4 if best else 1)
        anywhere = 2 * torch.rand(12, 4, 1, 2, generator=learner.noise) - 1
        here, log_here = learner._draws(batch["obs"], 4)
        after, log_after = learner._draws(batch["next_obs"], 4)
    actions = torch.cat([anywhere, here, after], 1)
    log_density = torch.cat([torch.full((12, 4), -2 * math.log(2)), log_here, log_after], 1)
    loss, gaps = 0.0, []
    for row in range(12):
        now, then = batch["obs"]["state"][row], batch["next_obs"]["state"][row]
        worst = [min(_by_hand(target, layer_norm, then, a)) for a in following[row]]
        chosen = int(np.argmax(worst))
        value = worst[chosen] - (0.3 * float(dense[row, chosen]) if entropy else 0.0)
        wanted = float(batch["reward"][row]) + float(batch["discount"][row]) * value
        data = _by_hand(online, layer_norm, now, batch["action"][row])
        asked = [_by_hand(online, layer_norm, now, a) for a in actions[row]]
        loss += sum((q - wanted) ** 2 for q in data) / 12
        for member in range(2):
            terms = [math.exp(q[member] - float(p)) for q, p in zip(asked, log_density[row], strict=True)]
            gap = math.log(sum(terms) / 12) - data[member]
            gaps.append(gap if floor is None else max(gap, floor))
    assert float(metrics["critic_loss"]) == pytest.approx(loss, rel=1e-3)
    assert float(metrics["gap"]) == pytest.approx(sum(gaps) / 24, rel=1e-3, abs=1e-4)
    assert floor is None or 0 < sum(gap == floor for gap in gaps) < 24  # it holds some rows, and not all


def test_who_moves_whom():
    learner, batch = made("cql"), a_batch()
    columns = {name: batch[name] for name in COLUMNS}
    policy, temperature = copy.deepcopy(learner.policy), weights(learner.temperature)
    learner._step_critic(batch["obs"], batch["next_obs"], columns)
    assert same(policy, learner.policy) and torch.equal(temperature[0], learner.temperature.log_alpha)
    critic = copy.deepcopy(learner.critic)
    learner._step_actor(batch["obs"])
    assert same(critic, learner.critic) and not same(policy, learner.policy)
    assert not torch.equal(temperature[0], learner.temperature.log_alpha)


@pytest.mark.parametrize("wrong", ["log_proposal", "q_data", "bound"])
def test_shapes_that_would_broadcast_are_refused(wrong):
    """Q (E, B, M) minus a log-density (B,), or (B, 1) against (B,), mixes rows without a word."""
    given = {"q_data": torch.zeros(2, 4), "log_proposal": torch.zeros(4, 4), "bound": torch.zeros(4)}
    given[wrong] = given[wrong][..., 0] if given[wrong].ndim > 1 else given[wrong][:, None]
    with pytest.raises(ValueError, match="expected shape"):
        cql_gap(given["q_data"], calibrated(torch.zeros(2, 4, 4), given["bound"]), given["log_proposal"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cql", "cal_ql"])
def test_it_finds_the_best_policy_that_the_data_supports(name):
    assert all(mdp.score(trained(name, seed, UPDATES).policy, greedy=True) > REACHED for seed in range(3))


def test_it_does_not_where_a_cut_is_taken_for_an_end():
    assert mdp.score(trained("cql", 0, UPDATES, cut_is_end=True).policy, greedy=True) < FAILED


@pytest.mark.parametrize(("weight", "low", "high"), [(0.0, 2.3, 9.0), (1.0, 0.0, 1.7), (5.0, -9.0, -1.0)])
def test_what_the_data_never_shows_is_promised_less(weight, low, high):
    """Q of the middle region above that of the worse action that the data shows. On 6 seeds each: 2.8 to 3.1 without
    the gap, which is half way to the better one; 0.7 to 1.2 with weight 1; -2.5 to -2.1 with weight 5."""
    learner = trained("cql", 0, UPDATES, weight=weight)
    action = torch.tensor([-2 / 3, 0.0, 2 / 3])[:, None, None].expand(mdp.STATES, 3, 1, 1)
    q = learner.critic.online(mdp.observe(), action).detach().mean(0)
    worse = torch.where(mdp.EFFECT[:, 0] == mdp.LEAVE, q[:, 0], q[:, 2])
    assert low < float((q[:, 1] - worse).mean()) < high
