"""The toy worlds: the contract of a VecEnv, the closed forms, and why the mean of two modes crashes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.seed import RowNoise
from burnish.policies.core.types import VecEnv
from burnish.sim.build import ENVS, env_name, make_env
from burnish.sim.experts import EXPERTS, make_expert
from burnish.sim.experts.toy import TwoModeExpert, TwoModeWay
from burnish.sim.external.maniskill import ManiSkillConfig, hosted
from burnish.sim.point_reach import Order, PointReach, PointReachConfig, Reward
from burnish.sim.toy import LQR, ConstantReward, ConstantRewardConfig, End, LQRConfig, lqr_matrices
from burnish.sim.two_mode import TwoMode, TwoModeConfig

# Every observation, every kind of noise, and episodes that end both ways within 30 ticks.
CONFIGS = [
    PointReachConfig(noise=0.3, image=True, max_steps=30),
    PointReachConfig(order=Order.acceleration, goal_in_state=True, noise=0.3, dim=3, max_steps=20),
    LQRConfig(axes=2, max_steps=20),
    ConstantRewardConfig(observe_time=True),
    ConstantRewardConfig(end=End.terminate),
    TwoModeConfig(noise=0.2),
]
NAMES = [f"{env_name(c)}{i}" for i, c in enumerate(CONFIGS)]
every_world = pytest.mark.parametrize("config", CONFIGS, ids=NAMES)


def world(kind, num_envs, seed=0) -> Any:
    """Our worlds can do more than a ``VecEnv`` must: state_dict, render."""
    return make_env(kind, num_envs, seed)


def actions(env, ticks, seeds):
    """Actions that belong to a world's seed, so that they are the same among 2 worlds and among 4."""
    limit = torch.tensor(env.spec.action.high)
    for t in range(ticks):
        noise = RowNoise(seeds, [t] * len(seeds)).normal((len(seeds), env.spec.action.dim))
        yield 0.5 * limit * noise.float()


def equal(ours, theirs, rows=slice(None), their_rows=slice(None)):
    return all(torch.equal(x[rows], theirs[key][their_rows]) for key, x in ours.items())


def flat(step):
    ends = {"reward": step.reward, "terminated": step.terminated, "truncated": step.truncated}
    return {**step.obs, **step.info, **ends}


@every_world
def test_keeps_its_contract(config):
    env = world(config, 4)
    assert isinstance(env, VecEnv)
    assert env.spec.obs.check(env.reset(seeds=[1, 2, 3, 4])) == 4
    assert set(env.reset()) == set(env.spec.obs.shapes)
    ended = torch.zeros(4, dtype=torch.bool)
    for action in actions(env, env.spec.max_steps, [1, 2, 3, 4]):
        step = env.step(10 * action)
        assert env.spec.obs.check(step.obs) == 4
        assert step.reward.shape == (4,) and step.reward.dtype == torch.float32
        assert step.terminated.dtype == step.truncated.dtype == torch.bool
        assert not bool((step.terminated & step.truncated).any())
        assert bool((step.info["executed"].abs() <= torch.tensor(env.spec.action.high)).all())
        ended |= step.terminated | step.truncated
    assert bool(ended.all())  # max_steps is kept


@every_world
def test_a_world_does_not_know_its_neighbours(config):
    """Bit for bit: world 0 and 1 of two worlds are world 1 and 3 of four, whose own seeds are others."""
    two, four = world(config, 2, seed=5), world(config, 4, seed=6)
    some, all_seeds = [101, 102], [7, 101, 8, 102]
    assert equal(two.reset(seeds=some), four.reset(seeds=all_seeds), their_rows=[1, 3])
    for a, b in zip(actions(two, 15, some), actions(four, 15, all_seeds), strict=True):
        ours, theirs = flat(two.step(a)), flat(four.step(b))
        assert equal(ours, theirs, their_rows=[1, 3])
    if not isinstance(config, ConstantRewardConfig):  # the control: the neighbours are really different
        assert not equal(ours, theirs, their_rows=[0, 2])


@every_world
def test_restoring_continues_bit_for_bit(config):
    env, other = world(config, 3, seed=1), world(config, 3, seed=1)
    env.reset()
    script = list(actions(env, 107, [1, 2, 3]))
    for action in script[:7]:
        env.step(action)
    saved = env.state_dict()
    other.load_state_dict(saved)
    for t, action in enumerate(script[7:]):
        if t % 10 == 4:  # episodes without given seeds continue their own sequence
            mask = torch.tensor([t % 20 == 4, True, False])
            assert equal(env.reset(mask), other.reset(mask))
        assert equal(flat(env.step(action)), flat(other.step(action)))
    # What was saved is a copy: the steps since have not touched it.
    other.load_state_dict(saved)
    late = world(config, 3, seed=1)
    late.load_state_dict(saved)
    assert equal(flat(late.step(script[7])), flat(other.step(script[7])))


@every_world
def test_rows_that_are_not_asked_stay(config):
    env = world(config, 4)
    env.reset(seeds=[1, 2, 3, 4])
    script = list(actions(env, 3, [1, 2, 3, 4]))
    env.step(script[0])
    moving, resting = [0, 2], [1, 3]
    before = {k: x.clone() for k, x in env.state_dict().items()}
    env.step(script[1], torch.tensor([True, False, True, False]))
    after = {k: x.clone() for k, x in env.state_dict().items()}
    assert equal(before, after, resting, resting) and not equal(before, after, moving, moving)
    env.reset(torch.tensor([True, False, True, False]), seeds=[9, 9, 8, 9])
    assert equal(after, env.state_dict(), resting, resting) and not equal(after, env.state_dict(), moving, moving)


def test_a_state_of_another_size_is_refused():
    with pytest.raises(BurnishError, match="tick"):
        world("lqr", 2).load_state_dict(world("lqr", 3).state_dict())


def test_a_world_and_a_policy_roll_different_dice():
    """A policy draws from RowNoise(episode seed, decision); a world that did too would see its numbers again."""
    seeds = list(range(500))
    env = PointReach(500, PointReachConfig())
    start = env.reset(seeds=seeds)["state"]
    policy = RowNoise(seeds, [0] * 500).uniform((500, 2))
    correlation = torch.corrcoef(torch.stack([start[:, 0], policy[:, 0].float()]))[0, 1]
    assert abs(correlation) < 4 / math.sqrt(500)  # four standard errors


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("level", ["clean", "noisy"])
def test_point_reach_expert_arrives(order, level):
    """Reachable in 60 ticks of 5 cm; standing still is the control."""
    config = PointReachConfig(order=order)
    assert run(config, make_expert(config, 200, level))["success"].float().mean() >= 0.98
    assert run(config, None)["success"].float().mean() <= 0.05  # an area of pi 0.08^2 in 1.8^2 is 0.6 %


def run(config, controller, num_envs=200, action=None):
    """Success, side and length of one episode per world, seeds 0 .. num_envs - 1."""
    env = world(config, num_envs)
    seeds = list(range(num_envs))
    obs = env.reset(seeds=seeds)
    if controller is not None:
        controller.reset(torch.ones(num_envs, dtype=torch.bool), seeds)
    limit = torch.tensor(env.spec.action.high)
    still = torch.zeros(num_envs, env.spec.action.dim) if action is None else torch.tensor(action).repeat(num_envs, 1)
    active = torch.ones(num_envs, dtype=torch.bool)
    success, length = torch.zeros_like(active), torch.zeros(num_envs)
    for _ in range(env.spec.max_steps):
        step = env.step(limit * (still if controller is None else controller.step(obs)), active)
        obs, length = step.obs, length + active
        success |= active & step.info["success"]
        active = active & ~(step.terminated | step.truncated)
    return {"success": success, "length": length, "mode": step.info.get("mode")}


def test_point_reach_rewards_and_ends():
    """One world, worked out by hand: the point is put 3 ticks of 5 cm from the edge of the goal."""
    far = 0.08 + 0.145
    for reward, expected in (
        (Reward.distance, [-(far - 0.05), -(far - 0.10), -(far - 0.15)]),
        (Reward.sparse, [0.0, 0.0, 1.0]),
    ):
        env = PointReach(1, PointReachConfig(reward=reward), dtype=torch.float64)
        env.reset()
        place = {"position": torch.zeros(1, 2), "goal": torch.tensor([[far, 0.0]], dtype=torch.float64)}
        env.load_state_dict({**env.state_dict(), **place})
        steps = [env.step(torch.tensor([[1.0, 0.0]])) for _ in range(3)]
        assert [float(s.reward) for s in steps] == pytest.approx(expected, abs=1e-12)
        assert [bool(s.terminated) for s in steps] == [False, False, True]
    dense = PointReach(1, PointReachConfig(reward=Reward.dense, terminate=False), dtype=torch.float64)
    dense.reset()
    dense.load_state_dict({**dense.state_dict(), "position": torch.zeros(1, 2), "goal": torch.tensor([[0.2, 0.0]])})
    assert float(dense.step(torch.zeros(1, 2)).reward) == pytest.approx(0.5)
    with pytest.raises(BurnishError, match="wait outside the goal"):
        PointReachConfig(reward=Reward.dense)


def test_point_reach_image_shows_the_point_and_the_goal():
    env = PointReach(1, PointReachConfig(image=True))
    env.reset()
    env.load_state_dict(
        {**env.state_dict(), "position": torch.tensor([[0.5, 0.5]]), "goal": torch.tensor([[-0.5, -0.5]])}
    )
    image = env.step(torch.zeros(1, 2)).obs["image.top"][0]
    # x = 0.5 is between columns 11 and 12, y = 0.5 between rows 3 and 4 (row 0 is on top).
    for channel, row, column in ((0, 3, 11), (1, 11, 3)):
        bright = (image[channel] == image[channel].max()).nonzero().tolist()
        assert bright == [[row, column], [row, column + 1], [row + 1, column], [row + 1, column + 1]]


@pytest.mark.parametrize("name", ["point_reach", "two_mode"])
def test_rendering_shows_the_state_and_leaves_it(name):
    env = world(name, 3)
    env.reset(seeds=[1, 2, 3])
    before = env.state_dict()
    first = env.render(64)
    assert first.shape == (3, 64, 64, 3) and first.dtype == torch.uint8
    assert equal(before, env.state_dict())
    for _ in range(4):
        env.step(torch.ones(3, 2))
    assert bool((env.render(64) != first).flatten(1).any(1).all())


def lqr_return(env, gain, gamma):
    x = env.reset(seeds=list(range(env.num_envs)))["state"]
    total, weight = torch.zeros(env.num_envs, dtype=torch.float64), 1.0
    for _ in range(env.spec.max_steps):
        u = -x @ gain.T
        step = env.step(u)
        assert torch.equal(step.info["executed"], u)  # the closed form knows no limits
        total, weight, x = total + weight * step.reward, weight * gamma, step.obs["state"]
    assert bool(step.truncated.all()) and not bool(step.terminated.any())
    return total


def test_lqr_value_is_that_of_riccati():
    """1 000 noisy rollouts of 250 steps; what is cut off is below 0.9^250 < 1e-11 of the return."""
    gamma = 0.9
    env = LQR(1000, LQRConfig(axes=2, noise=0.05, max_steps=250), dtype=torch.float64)
    p, gain = env.solve(gamma)
    value = env.value(env.reset(seeds=list(range(1000)))["state"], gamma)

    def error_in_standard_errors(returns):
        error = returns - value
        return float(error.mean() / (error.std() / math.sqrt(len(error))))

    assert abs(error_in_standard_errors(lqr_return(env, gain, gamma))) < 4
    assert error_in_standard_errors(lqr_return(env, 0.7 * gain, gamma)) < -4  # the control: another gain earns less

    # P is a fixed point, and the noise's share is what the closed form says: both without sampling.
    a, b, q, r = lqr_matrices(env.config)
    closed = a - b @ gain
    assert torch.allclose(q + gain.T @ r @ gain + gamma * closed.T @ p @ closed, p, rtol=1e-10, atol=0)
    at_rest = float(env.value(torch.zeros(1, 4), gamma))
    assert at_rest == pytest.approx(-gamma / (1 - gamma) * 0.05**2 * float(p.trace()), rel=1e-12)


def test_lqr_without_noise_is_exact():
    env = LQR(50, LQRConfig(noise=0.0, max_steps=250), dtype=torch.float64)
    _, gain = env.solve(0.9)
    returns = lqr_return(env, gain, 0.9)
    assert torch.allclose(returns, env.value(env.reset(seeds=list(range(50)))["state"], 0.9), rtol=1e-9, atol=0)


def test_constant_reward_sums():
    gamma = 0.9
    for end in End:
        env = ConstantReward(2, ConstantRewardConfig(end=end, max_steps=4), dtype=torch.float64)
        env.reset()
        steps = [env.step(torch.zeros(2, 1)) for _ in range(4)]
        total = sum(gamma**t * float(s.reward[0]) for t, s in enumerate(steps))
        last = steps[-1]
        assert bool(last.terminated.all()) == (end is End.terminate)
        assert bool(last.truncated.all()) == (end is End.truncate)
        # With the bootstrap of a truncation the sum is 1 / (1 - gamma) = 10; with that of an end it is 3.439.
        bootstrapped = total + gamma**4 * 10 * float(~last.terminated[0])
        assert bootstrapped == pytest.approx(10 if end is End.truncate else 3.439)


def test_two_mode_expert_passes_on_both_sides():
    result = run(TwoModeConfig(), make_expert("two_mode", 400), 400)
    assert result["success"].float().mean() >= 0.98
    assert float(result["length"].min()) >= 30 and float(result["length"].max()) <= 42
    assert run(TwoModeConfig(), make_expert("two_mode", 400, "noisy"), 400)["success"].float().mean() >= 0.95


@pytest.mark.parametrize("share", [0.5, 0.7, 1.0])
def test_two_mode_share_of_the_modes(share):
    result = run(TwoModeConfig(), TwoModeExpert(400, TwoModeWay(upper_share=share)), 400)
    assert set(result["mode"].tolist()) <= {0, 1}
    error = 4 * math.sqrt(share * (1 - share) / 400)  # four standard errors of a binomial share
    assert abs(float((result["mode"] == 1).float().mean()) - share) <= error


def test_two_mode_mean_of_the_demonstrations_crashes():
    """The mean of the first actions of both ways is straight ahead; so is every policy that is no more than it."""
    experts = TwoModeExpert(400)
    obs = world("two_mode", 400).reset(seeds=list(range(400)))
    experts.reset(torch.ones(400, dtype=torch.bool), list(range(400)))
    ahead, aside = experts.peek(obs).mean(0).tolist()
    assert ahead > 0.5 and abs(aside) < 4 / math.sqrt(400)  # |vy| <= 1: four standard errors at most
    result = run(TwoModeConfig(), None, 400, action=[ahead, 0.0])
    assert not bool(result["success"].any())
    assert bool((result["mode"] == -1).all())  # none even got to the obstacle's middle


def test_peek_changes_nothing_and_tells_the_next_action():
    for name in EXPERTS:
        env, expert = world(name, 3), make_expert(name, 3, "noisy")
        obs = env.reset(seeds=[1, 2, 3])
        expert.reset(torch.ones(3, dtype=torch.bool), [1, 2, 3])
        saved = expert.state_dict()
        ahead = expert.peek(obs)
        assert equal(saved, expert.state_dict())
        assert torch.equal(expert.step(obs), ahead)
        assert not torch.equal(expert.step(obs), ahead)  # the control: the errors of the hand are drawn anew
        expert.load_state_dict(saved)
        assert torch.equal(expert.step(obs), ahead)


def test_the_table_builds_every_world_and_explains_a_wrong_name():
    for name, kind in ENVS.items():
        env, asked = world(name, 2), kind.config()
        if isinstance(asked, ManiSkillConfig) and not asked.on_gpu():
            asked = hosted(asked, 2)  # on a CPU its worlds are those of env=gym
        assert env_name(env.config) == env_name(asked) and type(env.config) is type(asked)
    assert isinstance(make_env(TwoModeConfig(), 1), TwoMode)
    with pytest.raises(BurnishError, match="did you mean 'two_mode'"):
        make_env("two_modes", 1)
    with pytest.raises(BurnishError, match="no scripted expert"):
        make_expert("constant_reward", 1)
