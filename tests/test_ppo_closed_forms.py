"""PPO where the answer is known: the value of constant reward, the value of a linear policy by Riccati, and the exact
policy gradient of a linear-Gaussian problem with chunks that are cut short by both kinds of end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from burnish.finetune.methods import gaussian_ppo
from burnish.finetune.methods.gaussian_ppo import GaussianPPOConfig
from burnish.finetune.ppo import PPO, Normalize, PPOConfig
from burnish.finetune.rollout import Rollout
from burnish.offline.returns import Discount
from burnish.offline.sources import Rows
from burnish.policies.build import build_policy
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, agent_spec
from burnish.policies.core.types import Step
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.nets.critic import ValueConfig
from burnish.sim.build import make_env
from burnish.sim.toy import ConstantRewardConfig, LQRConfig, lqr_matrices, lqr_solve
from lqr_lab import assembled


def collect(actor, env, length, source):
    rollout, obs = Rollout(length, env.num_envs), env.reset()
    for _ in range(length):
        action, columns = actor.act(obs, warm=False, generator=source)
        outcome = env.step(action)
        rollout.add(obs, columns, outcome)
        obs = outcome.obs
    return rollout.batch()


def cut_the_future(batch):
    """What treating a truncation as a termination does to a rollout."""
    return {**batch, "discount": batch["discount"] * ~batch["ended"]}


# ---- the value of constant reward ----


@pytest.mark.slow
@pytest.mark.parametrize("execute", [1, 3])
def test_constant_reward_is_worth_its_geometric_sum_and_less_if_a_truncation_were_an_end(execute):
    """gamma 0.9: V = 10. Episodes of 5 ticks; with chunks of 3 the last one is cut short. An end after 5 ticks
    would be worth (1 - 0.9^5) / 0.1 = 4.1 at most, on average less. Observed for four seeds: 10.00 everywhere, and with
    truncations as terminations 2.7 (one tick per decision) and 3.0 (three)."""
    values = []
    for damage in (lambda batch: batch, cut_the_future):
        env = make_env(ConstantRewardConfig(max_steps=5), 4)
        ppo = PPOConfig(epochs=2, minibatch=20, critic_lr=2e-2, critic_warmup=10_000, value=ValueConfig(hidden=[16]))
        config = GaussianPPOConfig(GaussianConfig(hidden=[8]), execute=execute, ppo=ppo, discount=Discount(0.9))
        view, learner = assembled(gaussian_ppo, config, None, env)
        source = torch.Generator().manual_seed(0)
        for _ in range(40):
            learner.update(Rows(damage(collect(learner.actor, view, 10, source))))
        values.append(float(learner.value({"state": torch.ones(1, 1)}).detach()))
    assert values[0] == pytest.approx(10, abs=0.1)
    assert values[1] < 4.1


# ---- the value of a linear policy ----

LQR = LQRConfig(limit=5.0, max_steps=5, noise=0.05)
GAMMA = 0.9


def riccati_error(damage, seed):
    """Relative error (root mean square over the inner states) of the critic of u = -K x + s e, which is worth
    -x'Px - (gamma q^2 tr(P) + s^2 (R + gamma B'PB)) / (1 - gamma): exploration costs too."""
    ppo = PPOConfig(epochs=4, minibatch=256, critic_lr=3e-3, critic_warmup=10_000, value=ValueConfig(hidden=[64, 64]))
    # The gain below is one of states as they are, which a normaliser would scale.
    agent = GaussianConfig(hidden=[], init_std=0.05)
    config = GaussianPPOConfig(agent, ppo=ppo, discount=Discount(GAMMA), normalize=False)
    view, learner = assembled(gaussian_ppo, config, None, ScaledEnv(make_env(LQR, 128)), seed=seed)
    (_, b, _, r), (p, gain) = lqr_matrices(LQR), lqr_solve(LQR, GAMMA)
    linear = learner.network.trunk.layers[0]
    with torch.no_grad():
        linear.weight.copy_(-gain / LQR.limit)
        linear.bias.zero_()
    source = torch.Generator().manual_seed(seed)
    for _ in range(40):
        learner.update(Rows(damage(collect(learner.actor, view, 10, source))))
    x = torch.rand(500, 2, generator=torch.Generator().manual_seed(1)) * 1.6 - 0.8
    spread = (0.05 * LQR.limit) ** 2 * float(r + GAMMA * b.T @ p @ b)
    cost = (x.double() @ p * x.double()).sum(1) + (GAMMA * LQR.noise**2 * float(p.trace()) + spread) / (1 - GAMMA)
    wrong = learner.value({"state": x}).detach().double() + cost
    return float(wrong.square().mean().sqrt() / cost.square().mean().sqrt())


@pytest.mark.slow
def test_the_critic_learns_the_riccati_value_of_the_optimal_gain():
    """Observed for ten seeds: 0.027 to 0.064; for four with truncations as terminations: 0.46 to 0.48."""
    assert riccati_error(lambda batch: batch, seed=0) < 0.1
    assert riccati_error(cut_the_future, seed=0) > 0.3


# ---- the exact policy gradient ----

TICKS, EXECUTE, DECAY, NOISE, TAIL = 3, 2, 0.9, 0.05, 2.0
START_MEAN, START_STD = 0.2, 0.1


class Push:
    """x' = DECAY x + u + noise, reward -(x'^2 + u^2 / 2). Ends after TICKS ticks, in a truncation in every other world,
    whose future is worth -TAIL x^2."""

    def __init__(self, num_envs, seed):
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.spec = EnvSpec(ObsSpec({"state": (1,)}), ActionSpec((-1,), (1,)), 10.0, "push", TICKS)
        self.source = torch.Generator().manual_seed(seed)
        self.x, self.tick = torch.zeros(num_envs), torch.zeros(num_envs, dtype=torch.int64)
        self.terminates = torch.arange(num_envs) % 2 == 0

    def reset(self, mask=None, seeds=None):
        mask = torch.ones_like(self.terminates) if mask is None else mask
        fresh = START_MEAN + START_STD * torch.randn(self.num_envs, generator=self.source)
        self.x, self.tick = torch.where(mask, fresh, self.x), self.tick.masked_fill(mask, 0)
        return {"state": self.x[:, None]}

    def step(self, action, active=None):
        active = torch.ones_like(self.terminates) if active is None else active
        u = action[:, 0]
        new = DECAY * self.x + u + NOISE * torch.randn(self.num_envs, generator=self.source)
        self.x, self.tick = torch.where(active, new, self.x), self.tick + active
        over, reward = self.tick >= TICKS, -(new.square() + 0.5 * u.square())
        return Step({"state": self.x[:, None]}, reward, over & self.terminates, over & ~self.terminates, {})


def exact_return(weight, bias, std):
    """The expected return, from the moments of (x at the decision, x now); the rollout is 3 = 2 + 1 ticks."""
    mean = torch.tensor([START_MEAN] * 2)
    second = torch.full((2, 2), START_STD**2 + START_MEAN**2)
    total = torch.zeros(())
    for tick in range(TICKS):
        i = tick % EXECUTE
        if i == 0:
            mean, second = mean[1].expand(2), second[1, 1].expand(2, 2)
        # u = k x_c + b + s e, and x' = DECAY x + u + noise.
        u = torch.stack([weight[i], torch.zeros(())])
        u_second = u @ second @ u + 2 * bias[i] * (u @ mean) + bias[i] ** 2 + std[i] ** 2
        move = torch.stack([torch.tensor([1.0, 0.0]), u + torch.tensor([0.0, DECAY])])
        shift = torch.stack([torch.zeros(()), bias[i]])
        drift = torch.outer(move @ mean, shift)
        spread = torch.diag(torch.stack([torch.zeros(()), std[i] ** 2 + NOISE**2]))
        second = move @ second @ move.T + drift + drift.T + torch.outer(shift, shift) + spread
        mean = move @ mean + shift
        total = total - second[1, 1] - 0.5 * u_second
    return total - 0.5 * TAIL * second[1, 1]


class Known(nn.Module):
    def __init__(self):
        super().__init__()
        self.tail = nn.Parameter(torch.tensor(TAIL))

    def forward(self, obs):
        return -self.tail * obs["state"][:, 0].square()


def linear_gaussian():
    spec = agent_spec(Push(1, 0).spec, EXECUTE)
    actor = build_policy(GaussianConfig(hidden=[], init_std=0.08), spec)
    with torch.no_grad():
        actor.trunk.layers[0].weight.copy_(torch.tensor([[-0.4], [-0.2]]))
        actor.trunk.layers[0].bias.copy_(torch.tensor([0.02, -0.03]))
    return actor


def exact_gradient():
    actor = linear_gaussian()
    linear = actor.trunk.layers[0]
    std = actor.law({"state": torch.zeros(1, 1)}).std[:, 0]
    value = exact_return(linear.weight[:, 0], linear.bias, std)
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, [linear.weight, linear.bias, actor.raw_std])])


def estimates(damage, groups=12, worlds=5000):
    """(groups, 6): what the update of PPO takes for the gradient, each from its own episodes."""
    out = []
    ppo = PPOConfig(
        epochs=1, minibatch=10**6, lam=1.0, lr=1e-15, critic_lr=1e-15, max_grad_norm=1e9, normalize=Normalize.none
    )
    for group in range(groups):
        actor = linear_gaussian()
        learner: Any = PPO(actor, actor, ppo, num_envs=worlds)
        learner.value = Known()
        env = ChunkEnv(Push(worlds, seed=group), EXECUTE, 1.0)
        batch = collect(learner.actor, env, 2, torch.Generator().manual_seed(1000 + group))
        assert batch["steps"][1].eq(1).all() and batch["ended"][1].all()
        learner.update(Rows(damage(batch)))
        linear = actor.trunk.layers[0]
        # The loss is minus the mean over rows, of which an episode has two.
        out.append(-2 * torch.cat([p.grad.flatten() for p in (linear.weight, linear.bias, actor.raw_std)]))
    return torch.stack(out)


def drop_what_was_executed(batch):
    return {**batch, "steps": torch.where(batch["steps"] < EXECUTE, 0, batch["steps"])}


@pytest.mark.usefixtures("float64")
def test_the_update_of_ppo_follows_the_exact_policy_gradient():
    exact = exact_gradient()

    def errors(damage):
        found = estimates(damage)
        return (found.mean(0) - exact).abs() / (found.std(0) / len(found) ** 0.5)

    assert (errors(lambda batch: batch) < 4).all()
    # Controls: a truncation taken for a termination, and a mask that hides an executed action.
    assert errors(cut_the_future).max() > 10
    assert errors(drop_what_was_executed).max() > 10


@pytest.mark.usefixtures("float64")
def test_the_exact_return_is_that_of_simulation():
    actor, env = linear_gaussian(), ChunkEnv(Push(200_000, 7), EXECUTE, 1.0)
    learner: Any = PPO(actor, actor, PPOConfig(), num_envs=env.num_envs)
    learner.value = Known()
    batch = collect(learner.actor, env, 2, torch.Generator().manual_seed(8))
    tail = torch.zeros(2 * env.num_envs)
    tail[batch["bootstrap"]["rows"]] = Known()(batch["bootstrap"]["obs"]).detach()
    returns = batch["reward"].sum(0) + (batch["discount"] * tail.view(2, -1))[1]
    linear, std = actor.trunk.layers[0], actor.law({"state": torch.zeros(1, 1)}).std[:, 0]
    exact = float(exact_return(linear.weight[:, 0], linear.bias, std))
    assert float(returns.mean()) == pytest.approx(exact, abs=4 * float(returns.std()) / len(returns) ** 0.5)
