"""Returns and the clipped surrogate against slow loops, Stable-Baselines3, and finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from burnish.finetune.ppo import RewardScale
from burnish.finetune.surrogate import (
    Reduction,
    clip_fraction,
    clip_schedule,
    clipped_surrogate,
    denoising_weight,
    divisor,
    effective_clip,
    gae,
    kl_k3,
)
from burnish.offline.returns import Discount, Per, lambda_returns, returns_to_go

pytestmark = pytest.mark.usefixtures("float64")

KINDS = ["mixed", "one_row", "all_terminal", "truncated_last", "no_ends"]
LAM, GAMMA = 0.8, 0.9


def rollout(kind, seed=0, length=7, worlds=3):
    """(reward, discount, ended, value, next_value); chunks of 1 to 3 ticks, so discounts differ from row to row."""
    source = torch.Generator().manual_seed(seed)
    length = 1 if kind == "one_row" else length
    shape = (length, worlds)
    reward, value, following = (torch.randn(shape, generator=source) for _ in range(3))
    terminated, truncated = (torch.rand(shape, generator=source) < 0.25 for _ in range(2))
    if kind == "all_terminal":
        terminated = torch.ones(shape, dtype=torch.bool)
    if kind in ("truncated_last", "no_ends"):
        terminated, truncated = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        truncated[-1] = kind == "truncated_last"
    ended = terminated | truncated
    # Inside an episode where a decision led is what the next one sees.
    for t in range(length - 1):
        following[t] = torch.where(ended[t], following[t], value[t + 1])
    steps = torch.randint(1, 4, shape, generator=source)
    return reward, GAMMA**steps * ~terminated, ended, value, following


def loops(reward, discount, ended, following):
    """For every row the discounts and rewards from it to the end of its episode or rollout: one list per row."""
    r, d, e, f = (x.numpy() for x in (reward, discount, ended, following))
    length, worlds = r.shape
    for t in range(length):
        for i in range(worlds):
            last = next((s for s in range(t, length) if e[s, i]), length - 1)
            yield t, i, [(r[s, i], d[s, i], f[s, i]) for s in range(t, last + 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_gae_is_the_discounted_sum_of_errors(kind):
    reward, discount, ended, value, following = rollout(kind)
    advantage, target = gae(reward, discount, ended, value, following, LAM)
    for t, i, path in loops(reward, discount, ended, following):
        expected, factor = 0.0, 1.0
        for k, (r, d, v) in enumerate(path):
            expected += factor * (r + d * v - float(value[t + k, i]))
            factor *= LAM * d
        assert float(advantage[t, i]) == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(target, advantage + value)


@pytest.mark.parametrize("kind", KINDS)
def test_lambda_returns_mix_all_n_step_returns(kind):
    reward, discount, ended, value, following = rollout(kind)
    mixed = lambda_returns(reward, discount, ended, following, LAM)
    whole = returns_to_go(reward, discount, ended, following)
    for t, i, path in loops(reward, discount, ended, following):
        n_step, total, factor = [], 0.0, 1.0
        for r, d, v in path:
            total += factor * r
            factor *= d
            n_step.append(total + factor * v)
        weights = [(1 - LAM) * LAM**k for k in range(len(path) - 1)] + [LAM ** (len(path) - 1)]
        assert float(mixed[t, i]) == pytest.approx(float(np.dot(weights, n_step)), abs=1e-12)
        assert float(whole[t, i]) == pytest.approx(n_step[-1], abs=1e-12)
    # The advantage is the same thing, seen from the value.
    torch.testing.assert_close(gae(reward, discount, ended, value, following, LAM)[1], mixed)


def test_what_lies_behind_a_termination_is_never_read():
    reward, discount, ended, value, following = rollout("all_terminal")
    poison = torch.full_like(following, torch.nan)
    assert gae(reward, discount, ended, value, poison, LAM)[0].isfinite().all()
    assert lambda_returns(reward, discount, ended, poison, LAM).isfinite().all()


def test_gae_equals_stable_baselines(require):
    """One tick per decision. SB3 knows one flag, and has the bootstrap of a truncation added to its reward."""
    buffers = require("stable_baselines3.common.buffers")
    spaces = require("gymnasium.spaces")
    source = torch.Generator().manual_seed(1)
    length, worlds = 40, 5
    reward, value = (torch.randn(length, worlds, generator=source) for _ in range(2))
    final, last = torch.randn(length, worlds, generator=source), torch.randn(worlds, generator=source)
    terminated = torch.rand(length, worlds, generator=source) < 0.1
    truncated = torch.rand(length, worlds, generator=source) < 0.1
    terminated[-1, :2], truncated[-1, :3] = torch.tensor([True, False]), torch.tensor([False, True, False])
    truncated &= ~terminated
    ended = terminated | truncated
    box = spaces.Box(-1, 1, (1,))
    theirs = buffers.RolloutBuffer(length, box, box, "cpu", LAM, GAMMA, worlds)
    begins = np.ones(worlds)
    for t in range(length):
        # As OnPolicyAlgorithm.collect_rollouts does it: r + gamma V(final observation), where the time was over.
        paid = reward[t] + GAMMA * final[t] * truncated[t]
        theirs.add(np.zeros((worlds, 1)), np.zeros((worlds, 1)), paid.numpy(), begins, value[t], torch.zeros(worlds))
        begins = ended[t].numpy().astype(float)
    theirs.compute_returns_and_advantage(last, begins)
    following = torch.where(ended, final, torch.cat([value[1:], last[None]]))
    advantage, target = gae(reward, GAMMA * ~terminated, ended, value, following, LAM)
    # Their buffer is float32.
    np.testing.assert_allclose(advantage.numpy(), theirs.advantages, atol=1e-5)
    np.testing.assert_allclose(target.numpy(), theirs.returns, atol=1e-5)
    wrong, _ = gae(reward, GAMMA * ~ended, ended, value, following, LAM)
    assert np.abs(wrong.numpy() - theirs.advantages).max() > 0.1


def test_a_discount_per_chunk_is_spread_over_its_ticks():
    assert Discount(0.9, Per.chunk).per_step(4) ** 4 == pytest.approx(0.9)
    assert Discount(0.9).per_step(4) == 0.9


def surrogate_inputs(factors=3, seed=2):
    source = torch.Generator().manual_seed(seed)
    log_ratio = 0.3 * torch.randn(16, factors, generator=source)
    weight, clip = torch.tensor([0.5, 0.8, 1.0])[:factors], torch.tensor([0.05, 0.1, 0.2])[:factors]
    return log_ratio, torch.randn(16, generator=source), weight, clip


def test_the_clipped_surrogate_is_its_definition():
    log_ratio, advantage, weight, clip = surrogate_inputs()
    total = 0.0
    for b in range(16):
        for j in range(3):
            ratio, scaled = math.exp(log_ratio[b, j]), float(advantage[b] * weight[j])
            clipped = min(max(ratio, 1 - float(clip[j])), 1 + float(clip[j]))
            total += min(ratio * scaled, clipped * scaled)
    assert float(clipped_surrogate(log_ratio, advantage, weight, clip)) == pytest.approx(-total / 48)
    outside = [abs(math.exp(x) - 1) > float(clip[j]) for row in log_ratio for j, x in enumerate(row)]
    assert 0 < sum(outside) < 48
    assert float(clip_fraction(log_ratio, clip)) == pytest.approx(sum(outside) / 48)


def test_the_clipped_surrogate_has_the_right_derivative():
    log_ratio, advantage, weight, clip = surrogate_inputs()
    assert torch.autograd.gradcheck(lambda x: clipped_surrogate(x, advantage, weight, clip), log_ratio.requires_grad_())
    # At ratio 1 it is the policy gradient: -A w / (B J), although both sides of the minimum tie there.
    at_one = torch.zeros(16, 3, requires_grad=True)
    clipped_surrogate(at_one, advantage, weight, clip).backward()
    torch.testing.assert_close(at_one.grad, -advantage[:, None] * weight / 48)


def test_a_factor_beyond_its_clip_moves_only_back():
    """Gradient 0 where a larger ratio would pay (A > 0, r > 1 + clip) and where a smaller one would."""
    log_ratio = torch.log(torch.tensor([[1.3], [1.3], [0.7], [0.7]])).requires_grad_()
    advantage, one = torch.tensor([1.0, -1.0, -1.0, 1.0]), torch.ones(1)
    clipped_surrogate(log_ratio, advantage, one, 0.2 * one).backward()
    assert [bool(g != 0) for g in log_ratio.grad[:, 0]] == [False, True, False, True]


def test_k3_is_the_divergence_and_is_never_negative():
    """Of N(0, 1) from N(0.3, 1), whose divergence is 0.3^2 / 2; samples come from the first."""
    x = torch.randn(400_000, 1, generator=torch.Generator().manual_seed(3))
    log_ratio = -0.5 * (x - 0.3).square() + 0.5 * x.square()
    each = log_ratio.exp() - 1 - log_ratio
    assert float(kl_k3(log_ratio)) == pytest.approx(0.045, abs=4 * float(each.std()) / 400_000**0.5)
    assert (each >= 0).all() and float(kl_k3(torch.zeros(3, 2))) == 0


def test_the_effective_clip_says_how_far_a_summed_likelihood_may_move():
    coordinates, transitions = torch.tensor([28.0, 28.0]), torch.tensor([1.0, 4.0])
    of = {kind: divisor(kind, coordinates, transitions).tolist() for kind in Reduction}
    assert of[Reduction.sum] == [1, 1]
    assert of[Reduction.mean_dim] == [28, 7]
    assert of[Reduction.mean_dim_and_step] == [28, 28]
    limits = effective_clip(torch.tensor([0.01, 0.2]), torch.tensor([28.0, 1.0]))
    torch.testing.assert_close(limits, torch.tensor([28 * math.log(1.01), math.log(1.2)]))
    # Just inside the limit the summed log-likelihood is still pushed up, just outside it no longer is.
    for share, moves in ((0.99, True), (1.01, False)):
        summed = (share * limits).detach().requires_grad_()
        ratio = (summed / torch.tensor([28.0, 1.0]))[None]
        clipped_surrogate(ratio, torch.ones(1), torch.ones(2), torch.tensor([0.01, 0.2])).backward()
        assert [bool(g != 0) for g in summed.grad] == [moves, moves]


def test_schedules_over_the_chain():
    growing = clip_schedule(5, 0.001, 0.01)
    assert float(growing[0]) == pytest.approx(0.001) and float(growing[-1]) == pytest.approx(0.01)
    assert (growing.diff() > 0).all() and (growing.diff().diff() > 0).all()
    assert clip_schedule(1, 0.001, 0.01).tolist() == [0.01]
    torch.testing.assert_close(denoising_weight(3, 0.9), torch.tensor([0.81, 0.9, 1.0]))


def test_reward_scale_is_the_deviation_of_the_running_return():
    source = torch.Generator().manual_seed(4)
    scale, returns, running = RewardScale(2), [], np.zeros(2)
    for _ in range(3):
        reward = 3 * torch.randn(6, 2, generator=source)
        terminated = torch.rand(6, 2, generator=source) < 0.2
        ended = terminated | (torch.rand(6, 2, generator=source) < 0.2)
        discount = 0.9 * ~terminated
        given = scale(reward, discount, ended, clip=1.0)
        for t in range(6):
            for i in range(2):
                running[i] += float(reward[t, i])
                returns.append(running[i])
                running[i] = 0.0 if ended[t, i] else float(discount[t, i]) * running[i]
        expected = np.clip(reward.numpy() / np.std(returns), -1, 1)
        np.testing.assert_allclose(given.numpy(), expected, rtol=1e-9)
        assert (np.abs(expected) == 1).any()


def test_reward_scale_is_kept_and_not_shared():
    one, other = RewardScale(2), RewardScale(2)
    facts = (torch.full((4, 2), 0.9), torch.zeros(4, 2, dtype=torch.bool), 10.0)
    reward = torch.randn(4, 2, generator=torch.Generator().manual_seed(5))
    one(reward, *facts)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(reward, *facts), other(reward, *facts))
    assert not torch.equal(RewardScale(2)(reward, *facts), one(reward, *facts))
