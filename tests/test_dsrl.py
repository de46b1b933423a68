"""DSRL: the warm-up is the base, the base is asked once, the aliased critics in closed form, and small learning."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from aim_lab import Aim, aim_error
from burnish.finetune.methods.dsrl import DSRLConfig, Variant, build, latent_sac
from burnish.finetune.methods.dsrl_aliased import distillation_loss, recorded_for
from burnish.offline.learner import columns_of
from burnish.offline.replay import Replay
from burnish.offline.returns import Discount, Per
from burnish.offline.sources import Rows
from burnish.policies.build import build_policy, describe
from burnish.policies.compose import Repeated, Steered
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.execute import Execution
from burnish.policies.core.rewards import RewardMap
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.seed import generator
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.flow import FlowConfig
from latent_lab import LOOP, SMALL, SPEC, Strict, dsrl, learnt, loop_of, tanh_base
from scripted import TERMINATED, TRUNCATED, ScriptedWorld
from training_lab import check_resumed

BOTH = pytest.mark.parametrize("variant", Variant, ids=lambda v: v.value)


def assembled(variant=Variant.sac, base=None, worlds=8, seed=0, **changes):
    config = dsrl(variant=variant, **changes)
    return config, build(config, tanh_base() if base is None else base, Aim(worlds, seed=seed), seed=seed)


# ---- the warm-up is the base ----


def differs(a, b, permutations=200):
    """Whether two samples differ: their energy distance against that of random splits of both together. All splits
    must be nearer, so one test in 201 errs."""
    both, source, half = torch.cat([a, b]), torch.Generator().manual_seed(0), len(a)
    apart = torch.cdist(both, both)

    def energy(order):
        x, y = order[:half], order[half:]
        means = [apart[p][:, q].mean() for p, q in ((x, y), (x, x), (y, y))]
        return float(2 * means[0] - means[1] - means[2])

    found = energy(torch.arange(len(both)))
    return all(energy(torch.randperm(len(both), generator=source)) < found for _ in range(permutations))


@BOTH
@pytest.mark.parametrize("bound", [0.5, 1.5, 3.0])
def test_the_warm_up_plays_the_distribution_of_the_base(variant, bound):
    base = CallablePolicy(lambda obs, noise: 0.2 * obs["state"][:, None] + 0.25 * noise, SPEC)
    _, (env, learner) = assembled(variant, base, worlds=250, bound=bound)
    obs = {"state": env.reset()["state"].clone()}
    action = learner.actor.act(obs, warm=True, generator=generator(5, "act")).action
    assert action.shape == (250, 1, 2)
    played = env.step(action).executed[..., 0]
    itself = base.act(obs, generator=generator(6, "base"))[..., 0]
    assert not differs(played, itself)
    twice = base.act(obs, noise=bound * (bound * action).view(-1, 2, 1))[..., 0]
    assert differs(twice, itself), "control: the bound applied twice is another policy"


def test_the_warm_up_is_not_clipped():
    _, (env, learner) = assembled(worlds=500)
    action = learner.actor.act(env.reset(), warm=True, generator=generator(5, "act")).action
    expected = torch.randn(500, 2, generator=generator(5, "act"))
    torch.testing.assert_close(1.5 * action[:, 0], expected)
    assert action.abs().max() > 1


# ---- what the base is asked ----


@BOTH
def test_no_base_is_asked_twice_and_none_more_than_needed(variant):
    strict = Strict()
    config, assembly = assembled(variant, CallablePolicy(strict, SPEC))
    loop = loop_of(assembly, config)
    assert strict.rows == 0, "building asks nothing"
    metrics = [loop.iterate() for _ in range(41)]  # in one of them the initial updates are made, and nothing is played
    decisions, updates = 40 * 8, assembly.learner.inner.updates
    assert updates > 80 and any("distil_loss" in m for m in metrics) == (variant is Variant.aliased)
    if variant is Variant.sac:
        assert (strict.calls, strict.rows) == (40, decisions)
    else:
        # One call per update: 64 rows for the target, and 64 more in every second one, which distils.
        assert (strict.calls, strict.rows) == (40 + updates, decisions + 64 * updates + 64 * (updates // 2))


def test_a_base_that_cannot_be_steered_is_refused():
    plain = CallablePolicy(lambda obs: torch.zeros(len(obs["state"]), 2, 1), replace(SPEC, noise_shape=None))
    with pytest.raises(BurnishError, match=r"method=dsrl chooses the noise .* try method=residual_td3"):
        assembled(base=plain)
    deaf = CallablePolicy(lambda obs, noise: 0 * noise, SPEC)
    assembled(base=deaf)  # without samples nobody asks it
    with pytest.raises(BurnishError, match=r"execution=cudagraph is for a network .* is a CallablePolicy"):
        assembled(Variant.aliased, deaf, sac=latent_sac(execution=Execution.cudagraph))
    samples = {"state": torch.zeros(4, 1)}
    with pytest.raises(BurnishError, match="ignores its noise"):
        build(dsrl(), deaf, Aim(2), samples=samples)
    learner = build(dsrl(), tanh_base(), Aim(2), samples=samples).learner
    assert learner.describe().startswith("probe of the base: the noise moves an action by 0.4")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bound": 0.0}, "bound=0.0"),
        ({"distil_every": 0}, "distil_every=0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, sentence):
    with pytest.raises(BurnishError, match=sentence):
        DSRLConfig(**change)


def test_one_vector_of_noise_may_serve_the_whole_chunk():
    seen = []
    base = CallablePolicy(lambda obs, noise: (seen.append(noise), torch.tanh(noise))[1], SPEC)
    config, assembly = assembled(base=base, repeat=True)
    assert assembly.env.spec.action.dim == 1 and isinstance(assembly.learner.policy.base, Repeated)
    loop = loop_of(assembly, config)
    for _ in range(21):  # the initial updates are one, and ask nothing
        loop.iterate()
    assembly.learner.policy.act({"state": torch.zeros(3, 1)})
    assert all(torch.equal(noise[:, 0], noise[:, 1]) for noise in seen) and len(seen) == 21
    assert describe(assembly.learner.policy)["parts"]["base"]["policy"] == "repeated"


def test_a_shift_of_rewards_counts_for_every_tick_that_was_played():
    spec = PolicySpec(ObsSpec({"state": (3,)}), ActionSpec((-1.0, -1.0), (1.0, 1.0)), 3, 3, noise_shape=(3, 2))
    base = CallablePolicy(lambda obs, noise: 0.5 * torch.tanh(noise), spec)
    outcomes = []
    for shift in (0.0, -1.0):
        world = ScaledEnv(ScriptedWorld([[(2, TERMINATED)], [(1, TRUNCATED)], [(9, TRUNCATED)]]))
        env, learner = build(dsrl(discount=Discount(0.99)), base, RewardMap(world, shift=shift))
        act = learner.actor.act(env.reset(), warm=True, generator=generator(0, "act"))
        outcomes.append(env.step(act.action))
    plain, shifted = outcomes
    torch.testing.assert_close(plain.reward - shifted.reward, torch.tensor([1.99, 1.0, 1 + 0.99 + 0.99**2]))


# ---- the aliased learner ----


def test_the_distillation_loss_teaches_each_member_its_own_number():
    q_latent = torch.tensor([[1.0, 2.0], [0.0, 4.0]], requires_grad=True)
    q_action = torch.tensor([[0.0, 2.0], [1.0, 1.0]], requires_grad=True)
    loss = distillation_loss(q_latent, q_action)
    assert loss.item() == (1 + 0) / 2 + (1 + 9) / 2
    loss.backward()
    assert q_action.grad is None
    assert torch.equal(q_latent.grad, torch.tensor([[1.0, 0.0], [-1.0, 3.0]]))


def bandit(count, source):
    """One decision per episode; the reward of a chunk is -(a_0 - 0.3)^2, and no noise is known."""
    chunk = torch.rand(count, 2, 1, generator=source) * 2 - 1
    obs = {"state": torch.rand(count, 1, generator=source) * 2 - 1}
    return {
        "obs": obs,
        "next_obs": obs,
        "executed": chunk,
        "action": torch.zeros(count, 1, 2),
        "reward": -(chunk[:, 0, 0] - 0.3).square(),
        "discount": torch.zeros(count),
        "terminated": torch.ones(count, dtype=torch.bool),
        "steps": torch.full((count,), 2),
    }


def latent_error(learner, bound):
    """RMS of Q_W(w) - r(f(w)) over the square that the agent can say."""
    u = torch.rand(512, 1, 2, generator=torch.Generator().manual_seed(9)) * 2 - 1
    with torch.no_grad():
        q = learner.latent_critic({"state": torch.zeros(512, 1)}, u).mean(0)
    truth = -(0.8 * torch.tanh(bound * u[:, 0, 0]) - 0.3).square()
    return float((q - truth).square().mean().sqrt())


@pytest.mark.parametrize("bound", [0.7, 1.5])
def test_the_latent_critic_becomes_the_critic_of_what_the_noise_leads_to(bound):
    learner = assembled(Variant.aliased, bound=bound, distil_every=1)[1].learner.inner
    source = torch.Generator().manual_seed(1)
    for _ in range(200):
        metrics = learner.update(Rows(bandit(128, source)))
    # Recorded on 8 seeds: 0.012 to 0.025; before learning 0.28 to 1.0; about the noise of the other bound 0.22 to 0.23.
    assert latent_error(learner, bound) < 0.06
    assert float(metrics["distil/explained_variance"]) > 0.9 and "saturation" in metrics
    other = 1.5 if bound == 0.7 else 0.7
    assert latent_error(learner, other) > 0.12, "control: it is learnt about noise within its own bound"


@pytest.mark.parametrize("bound", [0.5, 3.0])
def test_an_update_asks_where_the_agent_goes_next_and_where_the_prior_goes_now_in_one_call(bound):
    asked = []
    base = CallablePolicy(lambda obs, noise: (asked.append((obs["state"], noise)), torch.tanh(noise))[1], SPEC)
    _, (_, learner) = assembled(Variant.aliased, base, bound=bound, distil_every=1)
    batch = bandit(2000, torch.Generator().manual_seed(3))
    batch["next_obs"] = {"state": batch["obs"]["state"] + 10}
    learner.update(Rows(batch))
    ((state, noise),) = asked
    assert torch.equal(state, torch.cat([batch["next_obs"]["state"], batch["obs"]["state"]]))
    chosen, prior = noise[:2000], noise[2000:]
    assert 0.8 * bound < chosen.abs().max() <= bound, "the bound has its effect"
    # 4000 normals: the standard error of their deviation is 1 / sqrt(8000) = 0.011.
    assert abs(float(prior.std()) - 1) < 0.06 and abs(float(prior.mean())) < 0.08


def test_without_distillation_the_latent_critic_knows_nothing():
    learner = assembled(Variant.aliased, distil_every=10_000)[1].learner.inner
    before = copy.deepcopy(learner.latent_critic.state_dict())
    source = torch.Generator().manual_seed(1)
    for _ in range(20):
        learner.update(Rows(bandit(128, source)))
    assert all(torch.equal(x, before[name]) for name, x in learner.latent_critic.state_dict().items())
    assert latent_error(learner, 1.5) > 0.12


def changed(before, module):
    return any(not torch.equal(x, before[name]) for name, x in module.state_dict().items())


@BOTH
def test_who_receives_a_gradient(variant):
    base = build_policy(FlowConfig(steps=2), replace(SPEC, noise_shape=None), seed=1)
    learner = assembled(variant, base)[1].learner.inner
    batch = bandit(32, torch.Generator().manual_seed(2))
    batch |= {"discount": torch.full((32,), 0.9), "terminated": torch.zeros(32, dtype=torch.bool)}
    names = ["agent", "critic", "temperature"] + (["latent_critic"] if variant is Variant.aliased else [])
    parts = {name: getattr(learner, name) for name in names} | {"base": base}
    columns = columns_of(batch)
    if variant is Variant.aliased:
        columns["action"] = batch["executed"]
        steps = {
            "critic": lambda: learner._critic_step(batch["obs"], batch["next_obs"], columns, distil=True),
            "plain": lambda: learner._critic_step(batch["obs"], batch["next_obs"], columns, distil=False),
        }
    else:
        steps = {"critic": lambda: learner._critic_step(batch["obs"], batch["next_obs"], columns)}
    steps["actor"] = lambda: learner._actor_step(batch["obs"])
    table = {}
    for name, step in steps.items():
        before = {part: copy.deepcopy(module.state_dict()) for part, module in parts.items()}
        step()
        table[name] = {part for part, module in parts.items() if changed(before[part], module)}
    assert table.pop("actor") == {"agent", "temperature"}
    assert table.pop("critic") == {"critic"} | ({"latent_critic"} if variant is Variant.aliased else set())
    assert table.pop("plain", {"critic"}) <= {"critic", "latent_critic"}
    assert all(p.grad is None for p in base.parameters()), "no gradient goes through the base"
    assert all(p.grad is None for p in learner.critic.target.parameters())


def test_recordings_teach_the_critic_of_actions():
    config, assembly = assembled(Variant.aliased, loop=replace(LOOP, warmup=16, initial_updates=2))
    prior = Replay(64)
    for row in range(64):
        one = bandit(1, torch.Generator().manual_seed(row))
        columns = {"action": one["executed"], "ended": torch.ones(1, dtype=torch.bool)}
        columns |= {name: one[name] for name in ("executed", "reward", "discount", "terminated", "steps")}
        prior.add(one["obs"], columns, one["next_obs"])
    ready = recorded_for(2, prior)
    held, given = ready.latest(), prior.latest()
    assert torch.equal(held["executed"], given["action"]) and held["action"].shape == (64, 1, 1, 2)
    assert torch.equal(held["obs"]["state"], given["obs"]["state"])
    loop = loop_of(assembly, config, prior=ready)
    for _ in range(6):
        metrics = loop.iterate()
    assert assembly.learner.inner.updates > 0 and torch.isfinite(metrics["critic_loss"])


# ---- the loop ----


@BOTH
def test_resuming_is_bitwise_the_uninterrupted_run(variant):
    def fresh(seed):
        base = build_policy(FlowConfig(steps=2), replace(SPEC, noise_shape=None), seed=1).eval()
        config, assembly = assembled(variant, base, worlds=4, loop=replace(LOOP, warmup=8, initial_updates=3, batch=16))
        return loop_of(assembly, config, seed)

    whole, resumed = check_resumed(fresh, 8, 8)
    assert whole.learner.inner.updates == resumed.learner.inner.updates > 8


@BOTH
def test_saturation_and_the_opinion_of_the_critic_are_logged(variant):
    config, assembly = assembled(variant)
    loop = loop_of(assembly, config)
    for _ in range(30):
        metrics = loop.iterate()
    report = loop.report()
    for name in ("saturation", "latent/saturation"):
        assert 0 <= float(metrics[name]) <= 1
    assert 0 < float(metrics["latent/shift"]) <= 1.5 and "base_distance" not in metrics and "q/overestimate" in report
    assert isinstance(assembly.learner.policy, Steered)


@pytest.mark.slow
@BOTH
def test_it_learns_to_aim_and_noise_teaches_nothing(variant):
    # The base errs by 0.59; the best within the bound by (1 - 0.8 tanh 1.5)^3 / 3 = 0.007. Recorded on 20 seeds:
    # sac 0.053 to 0.121, aliased 0.060 to 0.151. Rewards of pure noise, 6 seeds each: 0.28 to 0.74.
    config = dsrl(variant=variant)
    errors = [aim_error(learnt(build, config, tanh_base(), seed=seed, iterations=60)) for seed in range(3)]
    assert max(errors) < 0.2, errors
    control = aim_error(learnt(build, config, tanh_base(), seed=0, iterations=60, noise=True))
    assert control > 0.2


@BOTH
def test_the_default_discount_is_per_chunk_of_ticks(variant):
    base = tanh_base()
    base.spec = replace(base.spec, horizon=4, execute=4)
    env = build(DSRLConfig(variant), base, Aim(2)).env
    assert env.env.execute == 4 and env.env.gamma**4 == pytest.approx(0.99)


def test_defaults_are_those_of_the_paper_where_they_are_named():
    config = DSRLConfig()
    assert (config.bound, config.sac.target_entropy, config.loop.updates_per_decision) == (1.5, 0.0, 5.0)
    assert config.discount == Discount(0.99, Per.chunk)
    assert config.sac.critic.members == 2 and SMALL["lr"] != config.sac.lr
