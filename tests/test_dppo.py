"""DPPO: ratios, samplers, network calls, derivatives, options, deployment, resume, and that it learns.

The exact policy gradient is in test_chain_gradient.py.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from aim_lab import Aim, aim_error, blind_base
from burnish.finetune.actors.denoising import DenoisingActor
from burnish.finetune.loops import OnPolicy, OnPolicyConfig
from burnish.finetune.methods import dppo
from burnish.finetune.methods.dppo import DPPOConfig
from burnish.finetune.ppo import PPOConfig
from burnish.finetune.surrogate import Reduction, clipped_surrogate
from burnish.policies.build import build_policy, describe
from burnish.policies.chain import sample_chain
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.execute import Execution
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.seed import generator
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.diffusion import DiffusionConfig, Sampler
from burnish.policies.flow import FlowConfig
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.nets.critic import ValueConfig
from burnish.policies.schedule import Prediction, Spacing
from diffusion_lab import small_net
from scripted import TERMINATED, TRUNCATED, ScriptedWorld
from training_lab import check_resumed

# Chunks of 4 begin one action before now; 2 of them are executed.
SPEC = PolicySpec(ObsSpec({"state": (3,)}), ActionSpec((-1.0, -1.0), (1.0, 1.0)), 4, 2, 1)
KINDS = ("flow", "ddpm", "ddim")
BASE_ETA = 0.3


def make_base(kind: str, steps: int, width: int = 8, **fields: Any) -> Any:
    if kind == "flow":
        config: Any = FlowConfig(steps=steps, net=small_net(width))
    else:
        eta = BASE_ETA if kind == "ddim" else 0.0
        fields = {"sampler": Sampler[kind], "eta": eta, "spacing": Spacing.trailing} | fields
        config = DiffusionConfig(steps=steps, net=small_net(width), **fields)
    return build_policy(config, SPEC).eval().requires_grad_(False)


def observe(batch: int, seed: int = 0) -> dict[str, Tensor]:
    return {"state": torch.randn(batch, 3, generator=generator(seed, "obs"))}


def full(batch: int) -> Tensor:
    return torch.full((batch,), SPEC.execute)


def small_config(trained_steps: int, **fields: Any) -> DPPOConfig:
    ppo = {"minibatch": 16, "epochs": 2, "lr": 1e-2, "value": ValueConfig(hidden=[8])} | fields.pop("ppo", {})
    made = PPOConfig(**({"clip": 0.05, "reduction": Reduction.mean_dim} | ppo))
    return DPPOConfig(trained_steps=trained_steps, ppo=made, loop=OnPolicyConfig(6), **fields)


def scripted() -> ScaledEnv:
    """Episodes that end at every place of a chunk of 2, in both ways."""
    script = [[(3, TERMINATED), (4, TRUNCATED)], [(1, TRUNCATED), (2, TERMINATED)], [(5, TRUNCATED), (1, TERMINATED)]]
    return ScaledEnv(ScriptedWorld(script))


def make_loop(config: DPPOConfig, base: Any, env: Any, seed: int = 0) -> OnPolicy:
    made = dppo.build(config, base, env, seed=seed)
    return OnPolicy(made.learner, made.env, decisions_per_update=config.loop.decisions_per_update, seed=seed)


# ---- sampler and density ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", range(1, 11))
def test_the_ratio_is_one_before_the_first_update(kind: str, steps: int):
    base, obs = make_base(kind, steps), observe(5)
    for trained in range(1, steps + 1):
        actor = DenoisingActor(base, trained)
        draw = actor.draw(obs, generator=generator(trained, "draw"))
        assert draw.action.shape == (5, 4, 2) and draw.trace.shape == (5, trained + 1, 4, 2)
        again = actor.log_prob(obs, draw.trace, full(5))
        # float32: sums of up to 8 terms of size 3, each rounded to 1e-6 or so of a network in another batch.
        torch.testing.assert_close(again, draw.log_prob, rtol=0, atol=1e-4)
        short = actor.log_prob(obs, draw.trace, torch.tensor([0, 1, 2, 1, 0]))
        torch.testing.assert_close(short[:, :-1], again[:, :-1], rtol=0, atol=0)
        assert short[0, -1] == 0 and short[4, -1] == 0 and short[2, -1] == again[2, -1]
        assert actor.coordinates.tolist() == [8.0] * (trained - 1) + [4.0]
        assert torch.equal(draw.action, draw.trace[:, -1].clamp(-1, 1))


def test_the_ratio_is_one_through_the_loop_with_partial_chunks():
    """The first and only minibatch is evaluated before its step."""
    config = small_config(2, ppo={"epochs": 1, "minibatch": 1000, "reduction": Reduction.sum})
    for kind in KINDS:
        base = make_base(kind, 3)
        metrics = make_loop(config, base, scripted()).iterate()
        assert metrics["kl"] < 1e-8 and metrics["clip/fraction"] == 0
        # An actor that remembers another density than the one it is trained by is found out.
        loop = make_loop(config, base, scripted())
        loop.learner.actor.actor = DenoisingActor(base, 2, min_logprob_std=0.15)
        assert loop.iterate()["kl"] > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trained", [1, 2, 4])
def test_without_a_floor_it_is_the_base(float64, kind: str, trained: int):
    base, obs = make_base(kind, 4), observe(5)
    actor = DenoisingActor(base, trained, min_std=1e-14, eta=BASE_ETA)
    draw = actor.draw(obs, generator=generator(1, "draw"))
    torch.testing.assert_close(draw.action, base.act(obs, generator=generator(1, "draw")), rtol=0, atol=1e-11)
    # With its floor, the steps that are not trained remain what they were.
    noisy = DenoisingActor(base, trained).draw(obs, generator=generator(1, "draw"))
    source = generator(1, "draw")
    start = torch.randn(5, 4, 2, generator=source)
    states = sample_chain(base, start, base.encode(obs), generator=source, inject=kind != "flow")
    assert torch.equal(noisy.trace[:, 0], states[4 - trained])
    assert (noisy.action - draw.action).abs().max() > 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trained", [1, 3, 5])
def test_a_draw_costs_k_network_calls_and_a_likelihood_one(kind: str, trained: int):
    actor, calls = DenoisingActor(make_base(kind, 5), trained), []
    for name in ("frozen", "trained"):
        getattr(actor, name).net.register_forward_pre_hook(
            lambda _, args, name=name: calls.append((name, len(args[0])))
        )
    draw = actor.draw(observe(7))
    assert calls == [("frozen", 7)] * (5 - trained) + [("trained", 7)] * trained
    calls.clear()
    actor.log_prob(observe(7), draw.trace, full(7))
    assert calls == [("trained", 7 * trained)]


def test_guidance_is_part_of_the_likelihood():
    spec = PolicySpec(ObsSpec({"state": (3,), "goal": (2,)}), SPEC.action, 4, 2, 1)
    base = build_policy(FlowConfig(steps=3, net=small_net(8, guidance=2.0, goal_drop=0.1)), spec).eval()
    actor, obs = DenoisingActor(base, 2), observe(5) | {"goal": torch.ones(5, 2)}
    draw = actor.draw(obs)
    torch.testing.assert_close(actor.log_prob(obs, draw.trace, full(5)), draw.log_prob, rtol=0, atol=1e-4)
    unguided = DenoisingActor(build_policy(FlowConfig(steps=3, net=small_net(8)), spec), 2)
    unguided.load_state_dict(actor.state_dict())
    assert (unguided.log_prob(obs, draw.trace, full(5)) - draw.log_prob).abs().max() > 1e-2


def test_the_published_liberties():
    base, obs = make_base("flow", 3), observe(200)
    plain, clipped = DenoisingActor(base, 3), DenoisingActor(base, 3, noise_clip=0.5)
    for actor, low, high in ((plain, 2.0, math.inf), (clipped, 0.0, 0.5)):
        trace = actor.draw(obs, generator=generator(0, "draw")).trace
        assert low < trace[:, 0].abs().max() <= high
    draw = plain.draw(obs, generator=generator(0, "draw"))
    wide = DenoisingActor(base, 3, min_logprob_std=0.2)
    torch.testing.assert_close(wide.draw(obs, generator=generator(0, "draw")).trace, draw.trace)
    mean = base.transition(draw.trace[:, 0], torch.zeros(200, dtype=torch.int64), base.encode(obs)).mean
    expected = torch.distributions.Normal(mean, 0.2).log_prob(draw.trace[:, 1]).sum((1, 2))
    torch.testing.assert_close(wide.log_prob(obs, draw.trace, full(200))[:, 0], expected)
    clamped = DenoisingActor(base, 3, density_clamp=[-1.0, 1.0])
    density = torch.distributions.Normal(mean, 0.1).log_prob(draw.trace[:, 1]).clamp(-1, 1).sum((1, 2))
    torch.testing.assert_close(clamped.log_prob(obs, draw.trace, full(200))[:, 0], density)


# ---- derivatives ----


@pytest.mark.parametrize("kind", ["flow", "ddim"])
def test_the_surrogate_has_the_right_gradient(float64, kind: str):
    fields = {} if kind == "flow" else {"clip": None, "prediction": Prediction.eps}
    actor, obs = DenoisingActor(make_base(kind, 4, width=3, **fields), 2), observe(4)
    trace = actor.draw(obs, generator=generator(0, "draw")).trace
    steps, advantage = torch.tensor([0, 1, 2, 2]), torch.tensor([1.0, -0.5, 0.7, -2.0])
    old = actor.log_prob(obs, trace, steps).detach()

    def loss(*_: Tensor) -> Tensor:
        log_ratio = (actor.log_prob(obs, trace, steps) - old) / actor.coordinates
        return clipped_surrogate(log_ratio, advantage, torch.tensor([0.9, 1.0]), torch.tensor([0.1, 0.2]))

    trained = [p for p in actor.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) > 50
    assert torch.autograd.gradcheck(loss, trained)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_trained_copy_moves(kind: str):
    base = make_base(kind, 3).requires_grad_(True)
    before = {name: x.clone() for name, x in base.state_dict().items()}
    loop = make_loop(small_config(2, bc_coef=0.1), base, scripted())
    actor, value = loop.learner.network, copy.deepcopy(loop.learner.value.state_dict())
    assert "bc" in loop.iterate()
    for name, x in before.items():
        assert torch.equal(base.state_dict()[name], x) and torch.equal(actor.frozen.state_dict()[name], x), name
    for name, parameter in actor.trained.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    assert all(not torch.equal(value[name], x) for name, x in loop.learner.value.named_parameters())
    assert all(p.requires_grad for p in base.parameters())
    assert not any(p.requires_grad for p in actor.frozen.parameters())
    assert sum(p.numel() for p in loop.learner.actor_parameters) == sum(p.numel() for p in base.parameters())


# ---- what is deployed ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trained", [1, 3])
def test_the_deployed_policy_is_the_bases_sampler_with_the_trained_weights(kind: str, trained: int):
    base, obs = make_base(kind, 3), observe(5)
    loop = make_loop(small_config(trained), base, scripted())
    policy, actor = loop.learner.policy, loop.learner.network

    def act(chosen: Any) -> Tensor:
        with torch.no_grad():
            return chosen.act(obs, generator=generator(0, "act"))

    assert torch.equal(act(policy), act(base))
    loop.iterate()
    assert not torch.equal(act(policy), act(base))
    last = policy if trained == 3 else policy.last
    for name, parameter in actor.trained.named_parameters():
        assert dict(last.named_parameters())[name].data_ptr() == parameter.data_ptr(), name
    if kind == "ddim":
        assert (actor.trained.config.eta, last.config.eta, actor.frozen.config.eta) == (1.0, BASE_ETA, BASE_ETA)
    assert describe(policy)["policy"] == ("relay" if trained == 1 else {"flow": "flow"}.get(kind, "diffusion"))
    # It follows a learner that is restored, too.
    other = make_loop(small_config(trained), base, scripted())
    state = loop.learner.state_dict()
    assert not any(name.startswith("frozen.") for name in state["actor"])
    state["actor"] |= {f"frozen.{name}": x for name, x in base.state_dict().items()}  # as older states are
    other.learner.load_state_dict(state)
    assert torch.equal(act(other.learner.policy), act(policy))


def test_what_was_refined_can_be_refined_again():
    """Its transitions are evaluated one by one, because what it knows of an observation is not ours to repeat."""
    obs, relay = observe(5), DenoisingActor(make_base("ddim", 4), 2).deployed()
    actor = DenoisingActor(relay, 3)
    draw = actor.draw(obs, generator=generator(0, "draw"))
    torch.testing.assert_close(actor.log_prob(obs, draw.trace, full(5)), draw.log_prob, rtol=0, atol=1e-4)
    deployed = actor.deployed()
    ours, theirs = (chosen.act(obs, generator=generator(0, "act")) for chosen in (deployed, relay))
    assert torch.equal(ours, theirs)
    assert next(deployed.last.parameters()).data_ptr() == next(actor.trained.parameters()).data_ptr()


def test_the_noisy_base_is_the_actor_before_its_first_update():
    base, obs = make_base("ddim", 3), observe(5)
    loop = make_loop(small_config(2), base, scripted())
    actor = loop.learner.network
    before = actor.draw(obs, generator=generator(0, "draw")).trace
    loop.iterate()
    assert not torch.equal(actor.draw(obs, generator=generator(0, "draw")).trace, before)
    assert torch.equal(actor.draw(obs, generator=generator(0, "draw"), last=actor.noisy_base()).trace, before)


def test_the_imitation_loss_begins_at_the_entropy_and_grows_with_distance():
    actor, obs = DenoisingActor(make_base("flow", 3), 2), observe(4000)
    base = actor.noisy_base()
    entropy = 0.5 * (1 + math.log(2 * math.pi * 0.1**2))
    with torch.no_grad():
        loss = dppo.imitation_loss(actor, base, generator(0, "bc"), obs)
        assert (loss.mean() - entropy).abs() < 4 * loss.std() / 4000**0.5
        for parameter in actor.trained.parameters():
            parameter += 0.1
        assert dppo.imitation_loss(actor, base, generator(0, "bc"), obs).mean() > entropy + 0.1


# ---- through the loop ----


def test_one_trained_step_works_end_to_end():
    loop = make_loop(small_config(1, clip_base=0.001), make_base("ddpm", 4), scripted())
    assert loop.learner.clip.tolist() == pytest.approx([0.05])
    for _ in range(2):
        metrics = loop.iterate()
        assert all(math.isfinite(float(x)) for x in metrics.values())


def test_clip_and_weight_grow_towards_the_clean_end():
    learner = make_loop(small_config(3, clip_base=0.01, gamma_denoising=0.9), make_base("flow", 4), scripted()).learner
    grown = (math.exp(1.5) - 1) / (math.exp(3) - 1)
    assert learner.clip.tolist() == pytest.approx([0.01, 0.01 + 0.04 * grown, 0.05])
    assert learner.weight.tolist() == pytest.approx([0.81, 0.9, 1.0])


@pytest.mark.parametrize(("reduction", "low", "high"), [("mean_dim", 4, 8), ("mean_dim_and_step", 4, 8), ("sum", 1, 1)])
def test_it_says_how_strong_its_clip_is(reduction: str, low: int, high: int):
    config = small_config(3, ppo={"reduction": Reduction[reduction]})
    said = make_loop(config, make_base("flow", 4), scripted()).learner.describe()
    bounds = [f"{count * math.log(1.05):.3g}" for count in (low, high)]
    assert ("by at most " + (bounds[0] if low == high else " to ".join(bounds))) in said


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_how_far_it_is_from_its_base(kind: str):
    """From the same noise, so that a policy that did not learn is at no distance, also where sampling is random."""
    still = make_loop(small_config(2, ppo={"critic_warmup": 1}), make_base(kind, 3), scripted())
    assert still.iterate()["base_distance"] == 0
    loop, obs = make_loop(small_config(2), make_base(kind, 3), scripted()), {}
    loop.learner.watch, watch = lambda rows: [obs.update(rows["obs"]), watch(rows)][1], loop.learner.watch
    told = loop.iterate()["base_distance"]
    with torch.no_grad():
        policies = (loop.learner.policy, loop.learner.network.frozen)
        ours, theirs = (policy.act(obs, generator=torch.Generator().manual_seed(0)) for policy in policies)
    assert told == pytest.approx(float((ours - theirs).square().mean().sqrt())) and told > 1e-3


def test_a_resumed_run_is_the_same_run():
    check_resumed(lambda seed: make_loop(small_config(2, bc_coef=0.1), make_base("ddim", 3), scripted(), seed), 1, 1)


def test_what_it_refuses():
    gaussian = build_policy(GaussianConfig(hidden=[4]), SPEC)
    solver = build_policy(DiffusionConfig(steps=4, sampler=Sampler.heun, net=small_net(8)), SPEC)
    for base, steps, words in (
        (gaussian, 1, "does not show any"),
        (lambda obs: obs, 1, "does not show any"),
        (solver, 1, "sampler=heun"),
        (make_base("flow", 3), 4, "between 1 and the 3"),
    ):
        with pytest.raises(BurnishError, match=words):
            dppo.build(small_config(steps), base, scripted())
    for fields in (
        {"trained_steps": 0},
        {"gamma_denoising": 1.1},
        {"eta": -0.1},
        {"min_std": 0.0},
        {"clip_base": -1.0},
        {"density_clamp": [1.0, 0.0]},
        {"bc_coef": -1.0},
        {"bc_coef": 1.0, "ppo": PPOConfig(execution=Execution.cudagraph)},
    ):
        with pytest.raises(BurnishError):
            DPPOConfig(**fields)


# ---- it learns ----


@pytest.fixture(scope="module")
def blind() -> Any:
    return blind_base()


def error_after(base: Any, seed: int, negative_control: bool) -> float:
    ppo = {"minibatch": 128, "epochs": 5, "clip": 0.1, "lr": 3e-3, "critic_lr": 3e-3, "value": ValueConfig(hidden=[32])}
    config = small_config(2, ppo=ppo)
    config.loop = OnPolicyConfig(8)
    loop = make_loop(config, base, Aim(64, seed=seed, negative_control=negative_control), seed=seed)
    for _ in range(25):
        loop.iterate()
    return aim_error(loop.learner.policy)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_to_aim(blind: Any, seed: int):
    """20 seeds ended between 0.015 and 0.041; the base has 0.36, and a policy that does not look 1/3 at best."""
    assert error_after(blind, seed, negative_control=False) < 0.08


def test_it_learns_nothing_from_noise(blind: Any):
    """8 seeds ended between 0.33 and 0.42."""
    assert error_after(blind, 0, negative_control=True) > 0.25
