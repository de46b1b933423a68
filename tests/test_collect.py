"""Collection: one episode per seed, in order, the same whatever the number of worlds."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.types import Controller
from burnish.sim.build import make_env
from burnish.sim.collect import collect
from burnish.sim.experts import make_expert
from burnish.sim.point_reach import Order, PointReachConfig
from burnish.sim.toy import ConstantRewardConfig

SEEDS = [11, 3, 7, 19, 2, 5, 23, 31, 13, 17, 29]  # more than the worlds, not sorted, and no multiple of their number
NOISY_REACH = PointReachConfig(noise=0.2, image=True)
DRIVEN_REACH = PointReachConfig(order=Order.acceleration, noise=0.5, max_steps=25)  # ends in both ways


def recorded(config, num_envs, seeds=SEEDS, level="noisy"):
    return collect(
        make_env(config, num_envs, seed=num_envs), make_expert(config, num_envs, level, seed=num_envs), seeds
    )


@pytest.mark.parametrize("config", [NOISY_REACH, DRIVEN_REACH, "two_mode"])
def test_the_number_of_worlds_changes_nothing(config):
    three, seven = recorded(config, 3), recorded(config, 7)
    assert [e.seed for e in three] == SEEDS == [e.seed for e in seven]
    for ours, theirs in zip(three, seven, strict=True):
        assert torch.equal(ours.action, theirs.action) and torch.equal(ours.reward, theirs.reward)
        assert all(torch.equal(x, theirs.obs[key]) for key, x in ours.obs.items())
        for name in ("terminated", "truncated", "success"):
            assert getattr(ours, name) == getattr(theirs, name)
    # The control: other seeds are other episodes.
    assert len({tuple(e.obs["state"][-1].tolist()) for e in three}) == len(SEEDS)


def test_an_episode_replays_from_its_seed_and_its_actions():
    """What was recorded is what was executed: the noisy hand exceeds the limits, and the record is clipped."""
    for episode in recorded(DRIVEN_REACH, 4):
        env = make_env(DRIVEN_REACH, 1)
        obs = env.reset(seeds=[episode.seed])
        assert torch.equal(obs["state"][0], episode.obs["state"][0])
        for t, action in enumerate(episode.action):
            step = env.step(action[None])
            assert torch.equal(step.obs["state"][0], episode.obs["state"][t + 1])
            assert torch.equal(step.reward[0], episode.reward[t])
            assert bool(step.terminated | step.truncated) == (t == len(episode) - 1)
        assert (bool(step.terminated), bool(step.truncated)) == (episode.terminated, episode.truncated)


def test_both_ends_are_recorded_as_what_they_are():
    episodes = recorded(DRIVEN_REACH, 4)
    assert all(e.terminated != e.truncated for e in episodes)
    assert all(e.success == e.terminated for e in episodes)
    assert {e.terminated for e in episodes} == {True, False}
    assert all(len(e) == 25 for e in episodes if e.truncated)


def test_actions_are_in_actuator_units():
    peak = max(float(e.action.abs().max()) for e in recorded(DRIVEN_REACH, 4))
    assert peak == 4.0  # m/s^2, the limit; a controller's own numbers end at 1


def test_progress_and_meta():
    heard = []
    env, controller = make_env("point_reach", 4), make_expert("point_reach", 4)
    episodes = collect(env, controller, SEEDS, progress=lambda *at: heard.append(at), meta={"level": "clean"})
    assert heard[-1] == (11, 11) and [n for n, _ in heard] == sorted(n for n, _ in heard)
    assert episodes.meta == {"level": "clean"} and episodes.spec == env.spec


def test_more_worlds_than_seeds():
    (episode,) = recorded("two_mode", 5, seeds=[4])
    (alone,) = recorded("two_mode", 1, seeds=[4])
    assert torch.equal(episode.action, alone.action)


def test_refusals():
    with pytest.raises(BurnishError, match="at least one seed"):
        recorded("two_mode", 2, seeds=[])

    config = ConstantRewardConfig(max_steps=3)
    env = make_env(config, 2)
    never = torch.zeros(2, dtype=torch.bool)
    endless = env.step
    env.step = lambda action, active=None: endless(action, active)._replace(truncated=never)  # type: ignore[method-assign]

    class Still:
        def reset(self, mask, seeds=None): ...

        def step(self, obs):
            return torch.zeros(2, 1)

    with pytest.raises(BurnishError, match="max_steps=3"):
        collect(env, cast(Controller, Still()), [1, 2])
