"""Independent slow loops, each of which takes a function as its argument and raises where it is wrong.

The real functions must pass and their mutants must not: see ``test_mutants.py``. Default dtype is to be float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from burnish.finetune.surrogate import Reduction
from burnish.offline import returns, soft
from burnish.policies.core import chunk
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from scripted import TERMINATED, TRUNCATED, ScriptedWorld

NAN = float("nan")


def same(got, expected):
    got = torch.as_tensor(got, dtype=torch.float64)
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def stretch(length=9, worlds=4, seed=0):
    """T x N decisions with ends of both kinds: reward, discount, ended, value, next_value."""
    make = torch.Generator().manual_seed(seed)
    reward, value, following = torch.randn(3, length, worlds, generator=make)
    ended = torch.rand(length, worlds, generator=make) < 0.4
    terminated = ended & (torch.rand(length, worlds, generator=make) < 0.5)
    steps = torch.randint(1, 4, (length, worlds), generator=make)
    # Where nothing follows, nothing may be read.
    following = following.masked_fill(terminated, NAN)
    return reward, 0.9**steps * ~terminated, ended, value, following


def check_td_target(td_target):
    value = torch.tensor([2.0, NAN, -3.0], requires_grad=True)
    target = td_target(torch.tensor([1.0, 5.0, 0.5]), torch.tensor([0.9, 0.0, 0.25]), value)
    same(target, [1 + 0.9 * 2, 5.0, 0.5 - 0.25 * 3])
    assert not target.requires_grad


def check_gae(gae):
    for length in (1, 9):
        reward, discount, ended, value, following = stretch(length)
        advantage, target = gae(reward, discount, ended, value, following, 0.8)
        for n in range(reward.shape[1]):
            for t in range(length):
                total, factor = 0.0, 1.0
                for k in range(t, length):
                    after = 0.0 if discount[k, n] == 0 else float(discount[k, n] * following[k, n])
                    total += factor * (float(reward[k, n]) + after - float(value[k, n]))
                    if ended[k, n]:
                        break
                    factor *= 0.8 * float(discount[k, n])
                same(advantage[t, n], total)
                same(target[t, n], total + float(value[t, n]))


def check_lambda_returns(lambda_returns):
    for length in (1, 9):
        reward, discount, ended, _, following = stretch(length)
        out = lambda_returns(reward, discount, ended, following, 0.7)

        def of(t, n, length=length, reward=reward, discount=discount, ended=ended, following=following):
            if discount[t, n] == 0:
                return float(reward[t, n])
            later = float(following[t, n])
            if not ended[t, n] and t + 1 < length:
                later = 0.3 * later + 0.7 * of(t + 1, n)
            return float(reward[t, n]) + float(discount[t, n]) * later

        same(out, [[of(t, n) for n in range(reward.shape[1])] for t in range(length)])


def check_n_step(n_step):
    reward, discount, ended, _, _ = (x.T for x in stretch(5, 6))
    valid = torch.cat([torch.ones_like(ended[:, :1]), (~ended).cumprod(1).bool()[:, :-1]], 1)
    total, factor, taken = n_step(reward.masked_fill(~valid, NAN), discount.masked_fill(~valid, NAN), valid)
    for b in range(len(reward)):
        expected, carry, count = 0.0, 1.0, 0
        for k in range(reward.shape[1]):
            expected, carry, count = expected + carry * float(reward[b, k]), carry * float(discount[b, k]), count + 1
            if ended[b, k]:
                break
        same(total[b], expected)
        same(factor[b], carry)
        assert int(taken[b]) == count


def check_per_step(per_step):
    per_chunk = returns.Discount(0.8, returns.Per.chunk)
    same(per_step(per_chunk, 4) ** 4, 0.8)
    same(per_step(returns.Discount(0.8), 4), 0.8)


def check_surrogate(clipped_surrogate):
    log_ratio = torch.tensor([[0.5, -0.6], [-0.5, 0.05], [0.7, -0.8]])
    advantage, weight, clip = torch.tensor([2.0, -1.5, -1.0]), torch.tensor([1.0, 0.3]), torch.tensor([0.2, 0.1])
    total = 0.0
    for b in range(3):
        for j in range(2):
            ratio, a = math.exp(log_ratio[b, j]), float(advantage[b] * weight[j])
            near = min(max(ratio, 1 - float(clip[j])), 1 + float(clip[j]))
            total += min(ratio * a, near * a)
    same(clipped_surrogate(log_ratio, advantage, weight, clip), -total / 6)


def check_kl(kl_k3):
    x = [0.3, -0.2, 0.9]
    same(kl_k3(torch.tensor([x])), sum(math.exp(v) - 1 - v for v in x) / 3)


def check_clip_fraction(clip_fraction):
    ratios = torch.tensor([[1.05, 0.7], [1.3, 1.05]])
    same(clip_fraction(ratios.log(), torch.tensor([0.2, 0.01])), 3 / 4)


def check_clip_schedule(clip_schedule):
    same(clip_schedule(1, 0.001, 0.01), [0.01])
    shares = [(math.exp(3 * i / 4) - 1) / (math.exp(3) - 1) for i in range(5)]
    same(clip_schedule(5, 0.001, 0.01), [0.001 + 0.009 * share for share in shares])


def check_denoising_weight(denoising_weight):
    same(denoising_weight(3, 0.9), [0.81, 0.9, 1.0])


def check_divisor(divisor):
    coordinates, transitions = torch.tensor([12.0, 12.0]), torch.tensor([4.0, 3.0])
    same(divisor(Reduction.sum, coordinates, transitions), [1.0, 1.0])
    same(divisor(Reduction.mean_dim, coordinates, transitions), [3.0, 4.0])
    same(divisor(Reduction.mean_dim_and_step, coordinates, transitions), [12.0, 12.0])
    same(divisor(Reduction.mean_step, coordinates, transitions), [4.0, 3.0])


def check_effective_clip(effective_clip):
    bound = effective_clip(torch.tensor([0.2]), torch.tensor([7.0]))
    same((bound / 7.0).exp(), [1.2])  # a summed change of that size is a divided ratio of 1 + clip


def check_expectile(expectile):
    same(expectile(torch.tensor([2.0, -2.0]), 0.7), [0.7 * 4, 0.3 * 4])


def check_advantage_weight(advantage_weight):
    advantage = torch.tensor([0.5, -0.5, 1e4], requires_grad=True)
    weight = advantage_weight(advantage, 3.0, 50.0)
    same(weight, [math.exp(1.5), math.exp(-1.5), 50.0])
    assert not weight.requires_grad


def check_chunk_weight(chunk_weight):
    terminated = torch.tensor([False, True, False, True])
    same(chunk_weight(terminated, torch.tensor([3, 3, 2, 1]), 3), [1, 1, 0, 1])


def check_row_weight(row_weight):
    columns = {"terminated": torch.tensor([False, True, False]), "steps": torch.tensor([3, 1, 2])}
    same(row_weight(columns, 3), [1, 1, 0])
    same(row_weight({**columns, "weight": torch.tensor([0.5, 0.2, 0.7])}, 3), [0.5, 0.2, 0])


def check_row_mean(row_mean):
    same(row_mean(torch.tensor([[1.0, 2.0, 6.0], [4.0, 0.0, 1.0]]), torch.tensor([1.0, 0.0, 1.0])), [3.5, 2.5])
    same(row_mean(torch.tensor([3.0]), torch.zeros(1)), 0.0)


def check_pessimistic(pessimistic):
    q = torch.stack([torch.tensor([5.0, 1.0]), torch.tensor([2.0, 7.0]), torch.tensor([3.0, 3.0])])
    same(pessimistic(q), [2.0, 1.0])
    pairs = {tuple(pessimistic(q, 2, torch.Generator().manual_seed(i)).tolist()) for i in range(30)}
    assert pairs == {(2.0, 1.0), (3.0, 1.0), (2.0, 3.0)}  # the minima of the three pairs, and nothing else


def check_calibrated(calibrated):
    q = torch.tensor([[[1.0, 5.0], [-3.0, -1.0]]])
    same(calibrated(q, torch.tensor([2.0, -2.0])), [[[2.0, 5.0], [-2.0, -1.0]]])


def check_cql_gap(cql_gap):
    q, data, proposal = torch.tensor([[[1.0, 2.0, -1.0]]]), torch.tensor([[0.5]]), torch.tensor([[-0.3, -1.2, -2.0]])
    sums = sum(math.exp(float(q[0, 0, m]) / 2 - float(proposal[0, m])) for m in range(3))
    same(cql_gap(data, q, proposal, 2.0), [[2 * math.log(sums / 3) - 0.5]])


def check_soft_value(soft_value):
    same(soft_value(torch.tensor([2.0]), torch.tensor([-1.5]), torch.tensor(0.4)), [2 + 0.4 * 1.5])


def check_losses(soft_losses):
    temperature = soft.Temperature(0.5, 2.0)
    q, log_prob = torch.tensor([2.0, 4.0]), torch.tensor([-1.0, 3.0])
    loss, metrics = soft_losses(q, log_prob, temperature)
    # the actor: mean of 0.5 * log_prob - q; the temperature: -log(0.5) * (mean log_prob + 2)
    same(loss, ((-0.5 - 2) + (1.5 - 4)) / 2 + math.log(2) * (1 + 2))
    same(metrics["entropy"], -1.0)
    same(metrics["actor_loss"], ((-0.5 - 2) + (1.5 - 4)) / 2)


def check_clip(clip_each):
    """Three learners of a weight (2,) and a bias each: the norms of their gradients are 5, 0.5 and 13."""
    gradients = [torch.tensor([[3.0, 0.0], [0.3, 0.0], [3.0, 4.0]]), torch.tensor([4.0, 0.4, 12.0])]
    stacked = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(stacked, gradients, strict=True):
        p.grad = g.clone()
    clip_each([*stacked, torch.nn.Parameter(torch.zeros(3))], 2.0)
    for learner, norm in enumerate((5.0, 0.5, 13.0)):
        for p, g in zip(stacked, gradients, strict=True):
            # as torch guards the division
            same(p.grad[learner], g[learner] * min(1.0, 2 / (norm + 1e-6)))


def check_temperature(loss):
    """Entropy 1.5, target 2: alpha must rise, by (target - entropy) per unit of its logarithm."""
    temperature = soft.Temperature(0.7, 2.0)
    loss(temperature, torch.tensor([-1.0, -2.0])).backward()
    same(temperature.log_alpha.grad, -(2.0 - 1.5))


def check_smoothed(smoothed):
    out = smoothed(torch.tensor([0.0, 0.0, 0.95, -0.5]), torch.tensor([1.0, 10.0, 10.0, -10.0]), 0.2, 0.3)
    same(out, [0.2, 0.3, 1.0, -0.8])


def check_q_scale(q_scale):
    scale = q_scale(torch.tensor([2.0, -4.0], requires_grad=True))
    same(scale, 1 / 3)
    assert not scale.requires_grad


def check_polyak(polyak):
    target, online = torch.tensor([1.0]), torch.tensor([2.0])
    polyak([target], [online], 0.1)
    same(target, [1.1])
    same(online, [2.0])


def check_novelty(novelty):
    points, archive = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[0.0, 0.0], [0.0, 4.0], [30.0, 40.0]])
    same(novelty(points, archive, 2), [2.0, 4.0])
    same(novelty(points, archive, 9), [(4 + 50) / 3, (5 + 3 + 45) / 3])
    same(novelty(points, archive[:0], 2), [0.0, 0.0])
    same(novelty(archive, archive, 1, own=True), novelty(archive, archive, 2) * 2)


def check_gain(gain):
    """The determinants themselves, of I + sum of phi phi'."""
    phi = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(0))
    whole, inverse = torch.eye(4)[None], torch.eye(4)[None]
    for each in phi:
        more = whole + each[:, :, None] * each[:, None, :]
        found, inverse = gain(inverse, each)
        same(found, (torch.logdet(more) - torch.logdet(whole)) / 2)
        same(inverse, torch.linalg.inv(more))
        whole = more


def check_information(information):
    """The Schur complement that it stands for."""
    root = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
    whole = root @ root.mT + torch.eye(3)
    asked, both, rest = whole[:, :1, :1], whole[:, :1, 1:], whole[:, 1:, 1:]
    same(information(whole, 1), torch.logdet(asked - both @ torch.linalg.inv(rest) @ both.mT) / 2)
    same(information(whole, 3), torch.logdet(whole) / 2)


def seen_by_hand(x):
    """Count, mean and sum of squared deviations, after a first observation of 0 that deviates by 1."""
    every = torch.cat([x.new_zeros(1, *x.shape[1:]), x])
    mean = every.mean(0)
    return torch.stack([torch.full_like(mean, len(every)), mean, (every - mean).square().sum(0) + 1])


def check_surprise(surprise):
    x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))
    count, mean, squares = density = seen_by_hand(x[:4])
    law = torch.distributions.Normal(mean, (squares / count).sqrt())
    same(surprise(density, x[4]), -law.log_prob(x[4]).mean(1))


def check_with_seen(with_seen):
    x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    x[:, 1] = NAN  # of a world that rests
    density = seen_by_hand(x[:0])
    for row in x:
        density = with_seen(density, row, torch.tensor([True, False]))
    same(density[:, 0], seen_by_hand(x[:, 0]))
    same(density[:, 1], torch.tensor([1.0, 0.0, 1.0])[:, None].expand(3, 3))


def check_chunk_step(step):
    """The script of the worlds is the reference: see ``ScriptedWorld`` for its rewards and observations."""
    script = [[(5, TERMINATED), (4, TRUNCATED)], [(4, TRUNCATED), (6, TERMINATED)], [(6, TRUNCATED), (5, TERMINATED)]]
    env = type("Played", (chunk.ChunkEnv,), {"step": step})(ScriptedWorld(script), 3, 0.5)
    obs, place = env.reset(), [(0, 0)] * 3
    actions = torch.arange(1.0, 19.0).view(3, 3, 2)
    for _ in range(6):
        outcome = env.step(actions)
        for world, (episode, tick) in enumerate(place):
            length, kind = script[world][episode % 2]
            count = min(3, length - tick)
            ended = tick + count == length
            assert obs["state"][world].tolist() == [world, episode, tick]
            assert outcome.next_obs["state"][world].tolist() == [world, episode, tick + count]
            rewards = [100 * world + 10 * episode + tick + 1 + i for i in range(count)]
            same(outcome.reward[world], sum(0.5**i * r for i, r in enumerate(rewards)))
            same(outcome.discount[world], 0.0 if ended and kind == TERMINATED else 0.5**count)
            assert int(outcome.steps[world]) == count and bool(outcome.ended[world]) == ended
            assert bool(outcome.terminated[world]) == (ended and kind == TERMINATED)
            played = [[float(x) if i < count else 0.0 for x in actions[world, i]] for i in range(3)]
            same(outcome.executed[world], played)
            place[world] = (episode + 1, 0) if ended else (episode, tick + count)
        obs = outcome.obs


def check_executed_sum(executed_sum):
    """Coordinates [start, start + steps) of the chunk."""
    spec = PolicySpec(ObsSpec({"state": (1,)}), ActionSpec((-1.0,) * 2, (1.0,) * 2), horizon=5, execute=3, start=1)
    density = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(0))
    got = executed_sum(spec, density, torch.tensor([3, 2]))
    same(got, [sum(float(density[b, 1 + i, j]) for i in range(n) for j in range(2)) for b, n in ((0, 3), (1, 2))])


def check_normalized(normalized):
    given = torch.cat([torch.linspace(1, 3, 9), torch.tensor([50.0])])
    standard = (given - given.mean()) / given.std(correction=0)
    torch.testing.assert_close(normalized(given), standard)
    low, high = (torch.quantile(standard, q) for q in (0.2, 0.75))
    torch.testing.assert_close(normalized(given, [0.2, 0.75]), standard.clamp(low, high))


def check_value_error(value_error):
    value, target, before = torch.tensor([1.0, 1.0, 3.0]), torch.tensor([0.0, 2.0, 2.0]), torch.tensor([0.0, 0.0, 0.0])
    torch.testing.assert_close(value_error(value, target, before), torch.tensor([1.0, 1.0, 1.0]))
    # Values of at most 0.5: the second and third are off by 1.5 then, the first by 0.5, which is less than it is.
    torch.testing.assert_close(value_error(value, target, before, 0.5), torch.tensor([1.0, 2.25, 2.25]))


CHECKS: dict[str, Callable[[Any], None]] = {
    "normalized": check_normalized,
    "value_error": check_value_error,
    "td_target": check_td_target,
    "novelty": check_novelty,
    "gain": check_gain,
    "information": check_information,
    "surprise": check_surprise,
    "with_seen": check_with_seen,
    "gae": check_gae,
    "lambda_returns": check_lambda_returns,
    "n_step": check_n_step,
    "Discount.per_step": check_per_step,
    "clipped_surrogate": check_surrogate,
    "kl_k3": check_kl,
    "clip_fraction": check_clip_fraction,
    "clip_schedule": check_clip_schedule,
    "denoising_weight": check_denoising_weight,
    "divisor": check_divisor,
    "effective_clip": check_effective_clip,
    "expectile": check_expectile,
    "advantage_weight": check_advantage_weight,
    "chunk_weight": check_chunk_weight,
    "row_weight": check_row_weight,
    "row_mean": check_row_mean,
    "pessimistic": check_pessimistic,
    "calibrated": check_calibrated,
    "cql_gap": check_cql_gap,
    "soft_value": check_soft_value,
    "soft_losses": check_losses,
    "clip_each": check_clip,
    "Temperature.loss": check_temperature,
    "smoothed": check_smoothed,
    "q_scale": check_q_scale,
    "polyak": check_polyak,
    "ChunkEnv.step": check_chunk_step,
    "executed_sum": check_executed_sum,
}
