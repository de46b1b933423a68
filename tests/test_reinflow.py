"""ReinFlow: its likelihood against slow formulae, one grid, who receives gradient, how strong the clip is, learning."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

import flow_lab as lab
from burnish.finetune.actors.noisy_flow import NoiseConfig, NoisyFlowActor
from burnish.finetune.loops import OnPolicy, OnPolicyConfig
from burnish.finetune.methods import reinflow
from burnish.finetune.methods.reinflow import ReinFlowConfig
from burnish.finetune.ppo import PPOConfig
from burnish.finetune.surrogate import Reduction
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.normalize import Scaling
from burnish.policies.core.spec import agent_spec
from burnish.policies.diffusion import DiffusionConfig, DiffusionPolicy
from burnish.policies.flow import FlowConfig, FlowPolicy
from burnish.policies.nets.critic import ValueConfig
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from scripted import TERMINATED, TRUNCATED, ScriptedWorld


def make(case="longer", steps=3, **noise):
    actor = NoisyFlowActor(lab.flow(case, steps), NoiseConfig(**noise))
    lab.perturbed(actor.noise)
    return actor


# ---- likelihood ----


@pytest.mark.parametrize("case", lab.CASES)
def test_the_ratio_is_one_before_any_update(case, float64):
    for steps in lab.grid(case):
        actor = make(case, steps, clip_state=steps % 2 == 0, clip_mean=steps % 3 == 0)
        obs, draw = lab.drawn(actor)
        again = actor.log_prob(obs, draw.trace, lab.full(actor))
        torch.testing.assert_close(again, draw.log_prob, rtol=0, atol=1e-10)
        # Control: another grid than that of the draw, as in the published state agents, would be noticed.
        if steps > 1:
            actor.flow.time = lambda k, last=steps - 1: k.double() / last
            assert (actor.log_prob(obs, draw.trace, lab.full(actor)) - draw.log_prob).abs().max() > 1e-4


def test_the_ratio_is_one_in_single_precision():
    actor = make("whole", 10)
    obs, draw = lab.drawn(actor, 64)
    # 66 terms of order 1 with means good to 1e-7 of a deviation of 0.1: 1e-4 is ten times what that makes.
    assert (actor.log_prob(obs, draw.trace, lab.full(actor, 64)) - draw.log_prob).abs().max() < 1e-4


@pytest.mark.parametrize("case", lab.CASES)
@pytest.mark.parametrize("initial", [False, True])
def test_the_likelihood_is_that_of_a_slow_loop(case, initial, float64):
    actor = make(case, 4, count_initial=initial)
    obs, draw = lab.drawn(actor, 4)
    spec, trace = actor.spec, draw.trace.numpy()
    played = torch.tensor([spec.execute, 1, 2, spec.execute])
    expected, cond = np.zeros(4), actor.encode(obs)
    size, unit = actor.flow.step_size, math.log(2 * math.pi)
    for b in range(4):
        if initial:
            expected[b] += sum(-0.5 * value**2 - 0.5 * unit for value in trace[b, 0].ravel())
        row = cond.rows(slice(b, b + 1))
        for k in range(4):
            x, t = draw.trace[b : b + 1, k], torch.tensor([k / 4])
            with torch.no_grad():
                mean = (x + actor.flow.velocity(x, t, size, row) / 4)[0].numpy()
                embedded: Any = actor.noise.time
                raw = actor.noise.net(torch.cat([embedded(t), row.given], 1)).view(spec.chunk_shape).numpy()
            variance = np.exp(np.log(0.1**2) + (np.tanh(raw) + 1) / 2 * (np.log(0.24**2) - np.log(0.1**2)))
            for h in range(spec.horizon):
                if k == 3 and not spec.start <= h < spec.start + int(played[b]):
                    continue
                for a in range(lab.A):
                    error = trace[b, k + 1, h, a] - mean[h, a]
                    expected[b] += -0.5 * (error**2 / variance[h, a] + np.log(variance[h, a]) + unit)
    found = actor.log_prob(obs, draw.trace, played)
    np.testing.assert_allclose(found.detach().numpy()[:, 0], expected, rtol=0, atol=1e-9)


def test_what_an_early_end_left_unplayed_has_no_influence_and_what_steers_has(float64):
    actor = make("late", 3)
    obs, draw = lab.drawn(actor)
    steps = lab.full(actor) - 1
    before = actor.log_prob(obs, draw.trace, steps)
    for h, counts in enumerate([False, True, False, False]):  # start 1, one step played
        trace = draw.trace.clone()
        trace[:, -1, h] += 0.1
        assert bool(((actor.log_prob(obs, trace, steps) - before).abs() > 1e-6).all()) == counts
        trace = draw.trace.clone()
        trace[:, 1, h] += 0.1
        assert bool(((actor.log_prob(obs, trace, steps) - before).abs() > 1e-6).all())


def test_derivatives(float64):
    actor = make("late", 2)
    obs, draw = lab.drawn(actor, 3)
    steps = torch.tensor([1, 2, 2])
    trace = draw.trace.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: actor.log_prob(obs, x, steps), (trace,))
    names = ["flow.net.body.layers.2.bias", "noise.net.layers.2.bias"]
    values = tuple(actor.get_parameter(name).detach().clone().requires_grad_() for name in names)

    def through(*new, call):
        given = dict(zip(names, new, strict=True))
        return torch.func.functional_call(_Call(actor, call), {f"actor.{k}": v for k, v in given.items()}, ())

    assert torch.autograd.gradcheck(lambda *v: through(*v, call=lambda a: a.log_prob(obs, trace, steps)), values)
    assert torch.autograd.gradcheck(lambda *v: through(*v, call=lambda a: a.entropy_rate(obs)), values)


class _Call(torch.nn.Module):
    def __init__(self, actor, call):
        super().__init__()
        self.actor, self.call = actor, call

    def forward(self):
        return self.call(self.actor)


# ---- one grid, one flow ----


@pytest.mark.parametrize("case", lab.CASES)
def test_without_noise_a_draw_is_what_the_policy_does(case, float64):
    for steps in lab.grid(case):
        actor = make(case, steps, min_std=1e-12, max_std=2e-12)
        obs, draw = lab.drawn(actor)
        acted = actor.flow.act(obs, noise=draw.trace[:, 0])
        torch.testing.assert_close(draw.action, acted, rtol=0, atol=1e-9)
        noisy = make(case, steps)
        assert (lab.drawn(noisy)[1].action - noisy.flow.act(obs, noise=draw.trace[:, 0])).abs().max() > 1e-2


def test_published_clips_are_options(float64):
    plain = lab.drawn(make(), 500)[1].trace
    assert plain[:, 1:].abs().max() > 1
    assert lab.drawn(make(clip_state=True), 500)[1].trace[:, 1:].abs().max() <= 1
    for clip in (None, 0.5):
        actor = make(clip_noise=clip)
        obs, draw = lab.drawn(actor, 500)
        law = actor.transition(draw.trace[:, 0], torch.zeros(500, dtype=torch.int64), actor.encode(obs))
        noise = ((draw.trace[:, 1] - law.mean) / law.std).detach().abs().max()
        assert float(noise) == pytest.approx(0.5) if clip else noise > 3
    actor = make(clip_mean=True)
    x = torch.full((1, 4, 2), 5.0)
    law = actor.transition(x, torch.zeros(1, dtype=torch.int64), actor.encode(lab.seen(actor, 1)))
    assert torch.equal(law.mean, torch.ones_like(x))


def test_the_upper_bound_holds_then_comes_down_and_resumes(float64):
    actor = make(decay=20, hold=0.5, floor=0.25, min_std=0.1, max_std=0.2)
    twin, bounds = make(decay=20, hold=0.5, floor=0.25, min_std=0.1, max_std=0.2), []
    obs = lab.seen(actor, 64)
    with torch.no_grad():
        last: Any = actor.noise.net.layers[-1]
        last.bias += 100  # tanh is 1: every deviation is at its upper bound
    for _ in range(25):
        bounds.append(float(actor.transition(*_first(actor, obs)).std.detach().max()))
        actor.noise.advance()
        twin.load_state_dict(actor.state_dict())
        actor = twin if len(bounds) == 15 else actor  # a resumed run goes on from where it was
    expected = [
        0.1 + 0.1 * (0.25 + 0.75 * 0.5 * (1 + math.cos(math.pi * min(max(i - 10, 0) / 10, 1)))) for i in range(25)
    ]
    assert bounds == pytest.approx(expected, abs=1e-9)
    assert bounds[10] == pytest.approx(0.2) and bounds[20:] == pytest.approx([0.125] * 5)


def _first(actor, obs):
    return torch.zeros(64, *actor.spec.chunk_shape), torch.zeros(64, dtype=torch.int64), actor.encode(obs)


# ---- who learns from what ----


def changed(module, loss):
    module.zero_grad(set_to_none=True)
    loss.backward()
    return {name for name, p in module.named_parameters() if p.grad is not None and bool((p.grad != 0).any())}


def test_gradients_reach_what_they_should(float64):
    base = lab.flow("guided")
    before = copy.deepcopy(base.state_dict())
    env = _world(goal=True)
    config = ReinFlowConfig(anchor=1.0)
    learner = reinflow.build(config, base, env).learner
    actor = learner.ppo.network
    lab.perturbed(actor.noise)
    assert learner.policy is actor.flow and actor.flow is not base
    obs, draw = lab.drawn(actor)
    everything = {name for name, _ in actor.named_parameters()}
    flow, noise = ({n for n in everything if n.startswith(part)} for part in ("flow.", "noise."))
    assert changed(actor, actor.log_prob(obs, draw.trace, lab.full(actor)).sum()) == everything
    assert changed(actor, actor.entropy_rate(obs).sum()) == noise
    distance = learner.ppo.auxiliary["anchor"][1]
    assert torch.equal(distance(obs, {"trace": draw.trace}), torch.zeros(8))
    lab.perturbed(actor.flow)
    term = distance(obs, {"trace": draw.trace})
    by_hand = _euler(actor.flow, draw.trace[:, 0], obs) - _euler(base, draw.trace[:, 0], obs)
    torch.testing.assert_close(term, by_hand.square().mean((1, 2)))
    assert changed(actor, term.sum()) == flow
    assert all(torch.equal(x, before[name]) for name, x in base.state_dict().items())
    assert all(p.grad is None for p in base.parameters())


def _euler(policy, x, obs):
    for k in range(policy.num_steps):
        x = (
            x
            + policy.velocity(x, torch.full((len(x),), k / policy.num_steps), 0.0, policy.encode(obs))
            / policy.num_steps
        )
    return x


@pytest.mark.parametrize("initial", [False, True])
def test_the_entropy_rate_is_the_mean_entropy_of_the_counted_terms(initial, float64):
    actor = make("late", 3, count_initial=initial)
    obs, cond = lab.seen(actor, 2), actor.encode(lab.seen(actor, 2))
    unit, terms = 0.5 * math.log(2 * math.pi * math.e), []
    for k in range(3):
        std = actor.transition(torch.zeros(2, 4, 2), torch.full((2,), k), cond).std
        counted = std if k < 2 else std[:, 1:3]  # of the last step, the two executed actions
        terms += (torch.log(counted) + unit).flatten(1).unbind(1)
    terms += [torch.full((2,), unit)] * (8 if initial else 0)
    assert float(actor.coordinates) == len(terms)
    torch.testing.assert_close(actor.entropy_rate(obs), torch.stack(terms).mean(0))


# ---- build, and the whole through the real loop ----


def _world(goal=False):
    ends = [(1, TERMINATED), (3, TRUNCATED), (2, TERMINATED), (5, TRUNCATED)]
    return ScriptedWorld([ends[i:] + ends[:i] for i in range(4)], goal=goal)


def small(**settings):
    ppo = {"epochs": 2, "minibatch": 16, "clip": 0.2, "value": ValueConfig(hidden=[8]), **settings.pop("ppo", {})}
    return ReinFlowConfig(ppo=PPOConfig(**ppo), loop=OnPolicyConfig(8), **settings)


def scripted_base(steps=3):
    spec = agent_spec(_world().spec, 2)
    return FlowPolicy(spec, FlowConfig(steps=steps, net=DenoiserConfig(mlp=MlpBodyConfig(hidden=[16], time_dim=8))))


def test_the_first_update_starts_at_ratio_one_though_chunks_were_cut_short():
    config = small(ppo={"epochs": 1, "minibatch": 32})
    env, learner = reinflow.build(config, scripted_base(), _world())
    metrics = OnPolicy(learner, env, decisions_per_update=8).iterate()
    assert float(metrics["kl"]) < 1e-9 and float(metrics["clip/fraction"]) == 0
    assert float(metrics["entropy"]) == pytest.approx(_rate(), abs=1e-5)


def _rate():
    """Noise begins at the geometric mean of its bounds: 20 terms of 3 steps (the horizon is executed) and x_0."""
    unit = 0.5 * math.log(2 * math.pi * math.e)
    return (3 * (0.5 * math.log(0.10 * 0.24) + unit) + unit) / 4


def test_noise_may_ignore_the_time(float64):
    actor = make("late", 3, time_dim=0)
    obs, draw = lab.drawn(actor)
    cond = actor.encode(obs)
    first, last = (actor.transition(draw.trace[:, k], torch.full((8,), k), cond).std for k in (0, 2))
    assert torch.equal(first, last) and not torch.equal(first[0], first[1])
    torch.testing.assert_close(actor.log_prob(obs, draw.trace, lab.full(actor)), draw.log_prob, rtol=0, atol=1e-10)


def test_flow_noise_of_pi_rl_clips_the_mean_over_transitions():
    """12 numbers per chunk, 4 steps and x_0: a clip of 0.2 stands for 5 log 1.2 on the summed log-ratio."""
    base = FlowPolicy(agent_spec(_world().spec, 6), FlowConfig(steps=4))
    learner = reinflow.build(small(ppo={"reduction": Reduction.mean_step}), base, _world()).learner
    assert float(learner.ppo.divisor) == 5
    assert f"{5 * math.log(1.2):.3g}" in learner.describe() and "hardly a limit" not in learner.describe()
    loose = reinflow.build(small(ppo={"reduction": Reduction.mean_step, "clip": 0.3}), base, _world()).learner
    assert "hardly a limit" in loose.describe()  # 5 log 1.3 is more than 1


def test_it_says_how_far_it_is_from_its_base():
    for warmup, moved in ((1, False), (0, True)):
        env, learner = reinflow.build(small(ppo={"critic_warmup": warmup}), scripted_base(), _world())
        metrics = OnPolicy(learner, env, decisions_per_update=8).iterate()
        assert (float(metrics["base_distance"]) > 0) == moved


def test_resuming_is_exact():
    def fresh():
        env, learner = reinflow.build(
            small(noise=NoiseConfig(decay=3, hold=0.0), anchor=0.1), scripted_base(), _world()
        )
        return OnPolicy(learner, env, decisions_per_update=8)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = scripted_base()
    torch.manual_seed(0)
    loop = fresh()
    loop.iterate()
    state = copy.deepcopy(loop.state_dict())
    torch.manual_seed(0)
    other = fresh()
    other.load_state_dict(state)
    ours, theirs = loop.iterate(), other.iterate()
    assert ours.keys() == theirs.keys() and float(ours["noise/max_std"]) < 0.24
    a, b = loop.learner.policy.state_dict(), other.learner.policy.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], x) for name, x in base.state_dict().items())


def test_the_clip_is_as_strong_as_published_and_says_so():
    """Hopper: 12 numbers per chunk, 4 steps and x_0, clip 0.01: 60 log 1.01 on the summed log-ratio."""
    spec = agent_spec(_world().spec, 6)  # 6 actions of 2
    base = FlowPolicy(spec, FlowConfig(steps=4))
    assembly = reinflow.build(ReinFlowConfig(), base, _world())
    assert float(assembly.learner.ppo.divisor) == 60
    assert f"{60 * math.log(1.01):.3g}" in assembly.learner.describe()
    assert assembly.env.gamma == pytest.approx(0.99 ** (1 / 6)) and assembly.env.execute == 6


def test_the_critic_sees_observations_as_the_base_does():
    base = scripted_base()
    base.net.encoder.normalizer.fit({"state": torch.randn(50, 3) * 7 + 2}, Scaling.standard)
    learner = reinflow.build(ReinFlowConfig(), base, _world()).learner
    ours, theirs = (net.encoder.normalizer.scaler("state") for net in (learner.ppo.value, base.net))
    assert torch.equal(ours.shift, theirs.shift) and torch.equal(ours.scale, theirs.scale)


def test_refuses_what_is_no_flow():
    world = _world()
    with pytest.raises(BurnishError, match=r"method=dppo .* residual"):
        reinflow.build(ReinFlowConfig(), DiffusionPolicy(agent_spec(world.spec, 2), DiffusionConfig()), world)
    with pytest.raises(BurnishError, match="min_std"):
        NoiseConfig(min_std=0.3, max_std=0.2)
    with pytest.raises(BurnishError, match="entropy"):
        ReinFlowConfig(entropy=-1)


def learning_config():
    ppo = PPOConfig(epochs=4, minibatch=160, clip=0.2, lr=3e-3, critic_lr=3e-3, value=ValueConfig(hidden=[32, 32]))
    return ReinFlowConfig(noise=NoiseConfig(min_std=0.1, max_std=0.3), entropy=0.0, ppo=ppo, loop=OnPolicyConfig(10))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "noise"), [(0, False), (1, False), (2, False), (0, True)])
def test_learns_to_reach(seed, noise):
    """Mean reward per tick, recorded over 20 seeds: -0.29 to -0.13; -0.70 to -0.53 if rewards are noise."""
    before, after = lab.learnt(reinflow.build, learning_config(), seed, 50, noise=noise)
    assert before < -0.5
    assert after < -0.45 if noise else after > -0.35
