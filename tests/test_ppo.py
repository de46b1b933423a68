"""The machinery of the one PPO: ratio one, minibatches, who receives which gradient, warm-up, early stop, resuming."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from burnish.finetune.loops import OnPolicy
from burnish.finetune.methods import residual_ppo
from burnish.finetune.ppo import PPO, Normalize, PPOConfig
from burnish.finetune.rollout import Rollout, flat
from burnish.finetune.surrogate import normalized
from burnish.offline.replay import Replay
from burnish.offline.sources import Rows
from burnish.policies.build import build_policy
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import agent_spec
from burnish.policies.flow import FlowConfig
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.nets.critic import ValueConfig
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from burnish.policies.runs.checkpoint import load, save
from lqr_lab import assembled
from scripted import TERMINATED, TRUNCATED, ScriptedWorld
from seam import SeamWorld, seam_env

# Ends of both kinds at every sub-step of chunks of three.
SCRIPT = [
    [(1, TERMINATED), (4, TRUNCATED), (2, TRUNCATED), (6, TERMINATED)],
    [(5, TERMINATED), (1, TRUNCATED), (3, TERMINATED), (3, TRUNCATED)],
]
EXECUTE, LENGTH = 3, 9


def settings(**changes):
    return PPOConfig(**{"epochs": 1, "minibatch": 10_000, "value": ValueConfig(hidden=[8]), **changes})


def scripted(execute=EXECUTE):
    return ChunkEnv(ScriptedWorld(SCRIPT), execute, 0.9)


def gaussian(seed=0, execute=EXECUTE, **config):
    spec = agent_spec(ScriptedWorld(SCRIPT).spec, execute)
    return build_policy(GaussianConfig(hidden=[8], **config), spec, seed=seed)


def make(seed=0, auxiliary=None, weight=None, config=None, **changes):
    actor = gaussian(seed, **(config or {}))
    learner = PPO(actor, actor, settings(**changes), num_envs=2, auxiliary=auxiliary, weight=weight, seed=seed)
    return learner, actor


def collect(learner, env, length=LENGTH, seed=0):
    rollout, obs = Rollout(length, env.num_envs), env.reset()
    source = torch.Generator().manual_seed(seed)
    for _ in range(length):
        action, columns = learner.actor.act(obs, warm=False, generator=source)
        outcome = env.step(action)
        rollout.add(obs, columns, outcome)
        obs = outcome.obs
    return rollout.batch()


class TreeTraced:
    """A policy that remembers its draw as a tree of two parts."""

    def __init__(self, actor):
        self.inner = actor

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def draw(self, obs, *, generator=None):
        drawn = self.inner.draw(obs, generator=generator)
        return drawn._replace(trace={"first": drawn.trace[:, :1], "others": {"rest": drawn.trace[:, 1:]}})

    def log_prob(self, obs, trace, steps):
        return self.inner.log_prob(obs, torch.cat([trace["first"], trace["others"]["rest"]], 1), steps)


def test_a_trace_may_be_a_tree_of_tensors():
    """Through rollout, evidence of cut chunks, minibatches and slices: bit-equal to the same trace as one tensor."""
    found = []
    for wrap in (lambda actor: actor, TreeTraced):
        actor = gaussian()
        learner = PPO(wrap(actor), actor, settings(minibatch=7, epochs=2), num_envs=2)
        learner.slice = 3
        learner.update(Rows(collect(learner, scripted())))
        found.append(list(actor.parameters()))
    assert same(*found) and not same(found[0], gaussian().parameters())
    with pytest.raises(BurnishError, match="a replay stores tensors, but trace is of another kind"):
        world = scripted()
        obs = world.reset()
        action, columns = learner.actor.act(obs, warm=False, generator=torch.Generator())
        Replay(8, 2).record(obs, action, world.step(action), columns)


@pytest.mark.parametrize("normalize", list(Normalize))
def test_slices_of_a_minibatch_add_up_to_its_own_gradient(normalize):
    """Of 18 rows, slices of 7 are uneven, so that a mean of their means would be another one."""
    found = []
    for slice_rows in (18, 7):
        learner, _ = make(normalize=normalize, target_kl=None, max_grad_norm=1e9, slice=slice_rows)
        batch = collect(learner, scripted())
        assert learner.slice == learner.forward == slice_rows
        metrics = learner.update(Rows(batch))
        gradient = torch.cat([p.grad.flatten() for p in [*learner.actor_parameters, *learner.value.parameters()]])
        found.append(
            (gradient, torch.stack([torch.as_tensor(metrics[k]) for k in ("value_loss", "policy_loss", "kl")]))
        )
    (whole, said), (sliced, said_too) = found
    assert len(batch["reward"].flatten()) == 18 and float(whole.norm()) > 1e-3
    torch.testing.assert_close(sliced, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(said_too, said, rtol=1e-4, atol=1e-5)


def log_ratio_of(actor):
    def measure(obs, rows):
        with torch.no_grad():
            return (actor.log_prob(obs, rows["trace"], rows["steps"]) - rows["log_prob"]).abs().sum(1)

    return measure


def test_advantages_are_limited_to_their_quantiles():
    given = torch.cat([torch.linspace(-1, 1, 99), torch.tensor([50.0])])
    standard = (given - given.mean()) / given.std(correction=0)
    low, high = (torch.quantile(standard, q) for q in (0.1, 0.75))
    torch.testing.assert_close(normalized(given, [0.1, 0.75]), standard.clamp(low, high))


@pytest.mark.parametrize("shift", [0.0, 0.45])
def test_both_evidences_are_of_the_same_shifted_images(shift):
    """Images move once per update, by up to one of two pixels; what was drawn without a shift is evaluated anew."""
    env = ChunkEnv(seam_env(SeamWorld(2, image=True), 2), EXECUTE, 0.9)
    actor = build_policy(GaussianConfig(hidden=[8]), agent_spec(env.spec, EXECUTE, 2), seed=0)
    learner = PPO(actor, actor, settings(image_shift=shift, epochs=2, lr=1e-9), num_envs=2)
    batch = collect(learner, env)
    noise = torch.Generator().manual_seed(0)
    key = "image.top"  # pictures of one colour would look the same wherever they are
    pictures = torch.randint(0, 255, batch["obs"][key].shape, generator=noise).to(torch.uint8)
    batch["obs"][key] = pictures.clone()
    batch["row"] = torch.arange(2 * LENGTH).view(LENGTH, 2)
    with torch.no_grad():
        drawn = actor.log_prob(flat(batch)["obs"], batch["trace"].flatten(0, 1), batch["steps"].flatten())
    batch["log_prob"], seen = drawn.view_as(batch["log_prob"]), []

    def remember(obs, rows):
        order = rows["row"].argsort()
        seen.append((obs[key][order], rows["log_prob"][order]))
        return torch.zeros(len(order))

    learner.auxiliary = {"remember": (0.0, remember), "log_ratio": (0.0, log_ratio_of(actor))}
    assert float(learner.update(Rows(batch))["log_ratio"]) < 1e-4
    assert torch.equal(batch["obs"][key], pictures)  # the rollout itself stays as it was
    (images, evidence), (again, _) = seen
    assert torch.equal(images, again)
    assert torch.equal(images, pictures.flatten(0, 1)) == (shift == 0)
    assert (float((evidence - drawn).abs().max()) > 1e-3) == (shift > 0)


def flow_base(env, execute=2, seed=0):
    net = DenoiserConfig(mlp=MlpBodyConfig(hidden=[16]))
    return build_policy(FlowConfig(steps=2, net=net), agent_spec(env.spec, execute), seed=seed)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("config", [{}, {"squash": True}, {"state_dependent_std": True}, {"log_std_bounds": [-5, 2]}])
def test_the_ratio_is_one_before_the_first_step_also_of_chunks_cut_short(config):
    learner, actor = make(config=config)
    learner.auxiliary["log_ratio"] = (1.0, log_ratio_of(actor))
    batch = collect(learner, scripted())
    metrics = learner.update(Rows(batch))
    # The likelihood sums 6 terms of float32.
    assert float(metrics["log_ratio"]) < 1e-5 and float(metrics["clip/fraction"]) == 0
    assert float(metrics["kl"]) < 1e-9
    # Control: the evidence of whole chunks, as it was drawn, differs where a chunk was cut short.
    fresh = gaussian(**config)
    flat = {key: batch[key].flatten(0, 1) for key in ("trace", "steps", "log_prob")}
    apart = log_ratio_of(fresh)({"state": batch["obs"]["state"].flatten(0, 1)}, flat)
    assert ((apart > 0.01) == (flat["steps"] < EXECUTE)).all() and (flat["steps"] < EXECUTE).any()


def test_the_ratio_is_one_on_the_residual_view():
    world = ScriptedWorld(SCRIPT)
    config = residual_ppo.ResidualPPOConfig(ppo=settings())
    env, learner = assembled(residual_ppo, config, flow_base(world), world)
    learner.auxiliary["log_ratio"] = (1.0, log_ratio_of(learner.network))
    assert float(learner.update(Rows(collect(learner, env)))["log_ratio"]) < 1e-5


@pytest.mark.parametrize(("length", "minibatch", "count"), [(9, 4, 5), (9, 5, 4), (9, 100, 1), (1, 2, 1)])
def test_every_row_is_in_exactly_one_minibatch_of_an_epoch(length, minibatch, count):
    seen = []

    def remember(obs, rows):
        seen.append(rows["row"].tolist())
        assert torch.equal(rows["extra"], 10 * rows["row"]), "columns of the actor reach the auxiliary together"
        return torch.zeros(len(rows["row"]))

    learner, _ = make(auxiliary={"remember": (1.0, remember)}, epochs=3, minibatch=minibatch)
    batch = collect(learner, scripted(), length)
    batch["row"] = torch.arange(2 * length).view(length, 2)
    batch["extra"] = 10 * batch["row"]
    learner.update(Rows(batch))
    assert len(seen) == 3 * count
    for epoch in range(3):
        parts = seen[epoch * count : (epoch + 1) * count]
        assert sorted(row for part in parts for row in part) == list(range(2 * length))
        assert max(map(len, parts)) <= minibatch and max(map(len, parts)) - min(map(len, parts)) <= 1
    assert count == 1 or seen[0] != seen[count]


def gradients(module):
    return [p.grad.clone() for p in module.parameters()]


def test_the_critic_gets_no_gradient_of_the_policy_and_the_policy_none_of_the_critic():
    free = {"max_grad_norm": 1e9}
    plain, actor = make(**free)
    batch = collect(plain, scripted())
    plain.update(Rows(copy.deepcopy(batch)))
    idle, still = make(weight=torch.zeros(1), **free)
    idle.update(Rows(copy.deepcopy(batch)))
    assert same(gradients(plain.value), gradients(idle.value)) and any(g.any() for g in gradients(plain.value))
    assert not any(g.any() for g in gradients(still)), "advantages that weigh nothing move nothing"
    blind, other = make(value_coef=0.0, **free)
    blind.update(Rows(copy.deepcopy(batch)))
    assert same(gradients(actor), gradients(other)) and all(g.any() for g in gradients(actor))
    assert not any(g.any() for g in gradients(blind.value))


def test_warm_up_trains_the_critic_alone():
    learner, actor = make(critic_warmup=2, weight_decay=0.1)
    frozen, value = copy.deepcopy(actor.state_dict()), copy.deepcopy(learner.value.state_dict())
    env = scripted()
    for update in range(3):
        metrics = learner.update(Rows(collect(learner, env, seed=update)))
        moved = not same(frozen.values(), actor.state_dict().values())
        assert moved == (update == 2) and ("kl" in metrics) == moved
        assert not same(value.values(), learner.value.state_dict().values())


def test_an_update_stops_where_the_divergence_is_reached():
    steps = []

    def count(obs, rows):
        steps.append(1)
        return torch.zeros(len(obs["state"]))

    for target, stops in ((0.01, True), (1e9, False), (None, False)):
        steps.clear()
        learner, _ = make(auxiliary={"count": (1.0, count)}, epochs=20, lr=0.05, target_kl=target)
        metrics = learner.update(Rows(collect(learner, scripted())))
        assert bool(metrics["kl_stopped"]) is stops and (len(steps) < 20) is stops
        assert not stops or float(metrics["kl"]) > 0.01


def test_rates_fall_along_half_a_cosine_and_rest():
    learner, _ = make(lr=1e-2, critic_lr=1e-3, lr_decay=4, min_lr_ratio=0.1)
    env = scripted()
    for update in range(6):
        given = float(learner.update(Rows(collect(learner, env)))["lr"])
        share = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1, update / 4)))
        assert given == pytest.approx(1e-2 * share)
        assert [float(group["lr"]) for group in learner.optimizer.param_groups] == pytest.approx([given, given / 10])


@pytest.mark.parametrize("normalize", list(Normalize))
def test_a_single_row_is_no_reason_for_nan(normalize):
    actor = gaussian()
    learner = PPO(actor, actor, settings(normalize=normalize, scale_reward=True), num_envs=1)
    learner.update(Rows(collect(learner, ChunkEnv(ScriptedWorld(SCRIPT[:1]), EXECUTE, 0.9), length=1)))
    assert all(p.isfinite().all() for p in actor.parameters())


def test_a_value_moves_at_most_by_its_clip_per_update():
    batch = collect(make()[0], scripted())
    obs = {"state": batch["obs"]["state"].flatten(0, 1)}
    moved = {}
    for limit in (None, 0.05):
        # Small steps: beyond the limit the gradient is 0, so a value stops within a step of it.
        learner, _ = make(value_clip=limit, epochs=200, critic_lr=3e-3)
        before = learner.value(obs).detach()
        learner.update(Rows(copy.deepcopy(batch)))
        moved[limit] = float((learner.value(obs) - before).abs().mean().detach())
    assert moved[None] > 10 * moved[0.05]


def loop_of(kind):
    world = ScriptedWorld(SCRIPT)
    ppo = settings(epochs=2, minibatch=5, scale_reward=True, lr_decay=10, target_kl=0.5, critic_warmup=1)
    if kind == "residual":
        config = residual_ppo.ResidualPPOConfig(ppo=ppo, agent=GaussianConfig(hidden=[8], zero_last=True), l2=0.1)
        env, learner = assembled(residual_ppo, config, flow_base(world), world)
    else:
        actor = gaussian()
        env, learner = scripted(), PPO(actor, actor, ppo, num_envs=2)
    return OnPolicy(learner, env, decisions_per_update=7)


@pytest.mark.parametrize("kind", ["gaussian", "residual"])
def test_a_resumed_run_ends_in_the_same_bits(kind, tmp_path):
    whole, first = loop_of(kind), loop_of(kind)
    for _ in range(4):
        whole.iterate()
    for _ in range(2):
        first.iterate()
    save(tmp_path / "half", config={}, state=first.state_dict())
    second = loop_of(kind)
    second.load_state_dict(load(tmp_path / "half").state)
    first.iterate()  # the first run goes on, and must not move what the second has loaded
    for _ in range(2):
        second.iterate()
    assert leaves(whole.state_dict()) == leaves(second.state_dict())
    assert leaves(whole.state_dict()) != leaves(first.state_dict())


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_abandoned_episodes_earned_is_no_part_of_the_next_ones(goes_on):
    """14 decisions of the script end in the middle of an episode. A robot begins a new one after loading."""
    first, second = loop_of("gaussian"), loop_of("gaussian")
    for _ in range(2):
        first.iterate()
    earned = first.learner.scale.state_dict()["running"]
    assert earned.any()
    world: Any = second.env
    world.env.continues = goes_on
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert torch.equal(second.learner.scale.state_dict()["running"], earned * goes_on)


def leaves(state, name=""):
    """Every tensor and number by its place, as comparable plain data."""
    if isinstance(state, torch.Tensor):
        return {name: (tuple(state.shape), state.flatten().tolist())}
    if not isinstance(state, (dict, list, tuple)):
        return {name: state}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {key: leaf for place, item in items for key, leaf in leaves(item, f"{name}/{place}").items()}


@pytest.mark.parametrize(
    "wrong",
    [
        {"image_shift": 0.5},
        {"advantage_quantiles": [0.9, 0.1]},
        {"epochs": 0},
        {"minibatch": 1},
        {"clip": 0.0},
        {"lr": math.nan},
        {"lam": 1.1},
        {"critic_warmup": -1},
        {"weight_decay": -1.0},
        {"critic_weight_decay": -1.0},
        {"value_coef": -1.0},
        {"value_clip": -1.0},
        {"target_kl": 0.0},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(BurnishError, match=f"ppo.{next(iter(wrong))}="):
        PPOConfig(**wrong)
