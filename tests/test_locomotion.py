"""The five running robots beside Gymnasium's own, in float64 before any cast.

Gymnasium gets our float32 actions as float64, because it would sum the squares of a float32 action in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from burnish.policies.core.config import to_data
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.measure.evaluate import evaluate
from burnish.sim.batch import BatchedMujoco
from burnish.sim.build import ENVS, make_env, world_from
from burnish.sim.collect import collect

pytestmark = pytest.mark.sim

IDS = {
    "half_cheetah": "HalfCheetah-v5",
    "hopper": "Hopper-v5",
    "walker2d": "Walker2d-v5",
    "ant": "Ant-v5",
    "humanoid": "Humanoid-v5",
}
ROBOTS = list(IDS)
FALLING = ROBOTS[1:]
# The same operations in the same order, so all differences are 0 but those of Humanoid's speed: its centre of mass is
# summed in another order, which is 1e-16 m, divided by a tick of 0.015 s (7e-15 measured).
TOLERANCE = 1e-12

# With so much noise at the beginning, an ant touches the ground at once, where forces must not be felt yet.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("half_cheetah", {"forward_reward_weight": 2.0, "ctrl_cost_weight": 0.3, "reset_noise_scale": 0.02}),
    ("hopper", {"healthy_z_range": [0.9, 1.24], "healthy_state_range": [-1.5, 1.5], "healthy_reward": 0.5}),
    ("walker2d", {"healthy_angle_range": [-0.1, 0.05], "terminate_when_unhealthy": False, "healthy_z_range": [1, 1.3]}),
    ("ant", {"contact_force_range": [-0.3, 0.5], "contact_cost_weight": 0.1, "reset_noise_scale": 0.6}),
    ("ant", {"include_cfrc_ext_in_observation": False, "healthy_z_range": [0.5, 0.8]}),
    ("humanoid", {"include_cinert_in_observation": False, "include_qfrc_actuator_in_observation": False}),
    (
        "humanoid",
        {
            "include_cvel_in_observation": False,
            "include_cfrc_ext_in_observation": False,
            "contact_cost_weight": 1e-3,
            "contact_cost_range": [0.01, 0.5],
            "terminate_when_unhealthy": False,
            "reset_noise_scale": 0.15,
        },
    ),
]


def worlds(name: str, n: int, **settings) -> tuple[Any, list]:
    """N of our worlds, and the list to which every verdict of their task is added before the cast."""
    env: Any = make_env(ENVS[name].config(**settings), n)
    verdicts: list = []
    judge = env.task.judge
    env.task.judge = lambda action: verdicts.append(judge(action)) or verdicts[-1]
    return env, verdicts


def actions(env, ticks: int) -> torch.Tensor:
    """(T, N, A), a tenth of them at the limits. A world's do not depend on how many others there are."""
    sources = [np.random.default_rng(i) for i in range(env.num_envs)]
    unit = np.stack([1.1 * s.uniform(-1, 1, (ticks, env.spec.action.dim)) for s in sources], axis=1)
    return torch.tensor(np.clip(unit, -1, 1), dtype=torch.float32) * torch.tensor(env.spec.action.high)


def compare(require, name: str, ticks: int, disturb: Callable[[Any], None] | None = None, **settings) -> dict[str, Any]:
    """The largest differences from Gymnasium; where both fall, both begin anew from the next seed."""
    require("imageio", "Gymnasium's robots are made only where imageio is")
    gymnasium = require("gymnasium")
    env, verdicts = worlds(name, 3, **settings)
    theirs = {key: tuple(x) if isinstance(x, list) else x for key, x in settings.items()}
    originals = [gymnasium.make(IDS[name], **theirs) for _ in range(3)]
    assert originals[0].action_space.high.tolist() == list(env.spec.action.high)
    seeds = [3, 4, 5]
    env.reset(seeds=seeds)
    starts = [world.reset(seed=seed)[0] for world, seed in zip(originals, seeds, strict=True)]
    apart = {"obs": np.abs(env.task.observe()["state"] - starts).max(), "reward": 0.0, "info": 0.0}
    ends, same_ends = 0, True
    for action in actions(env, ticks):
        if disturb is not None:
            disturb(env)
        step = env.step(action)
        ours, obs = verdicts[-1], env.task.observe()["state"]
        for i, world in enumerate(originals):
            their_obs, reward, terminated, truncated, info = world.step(action[i].double().numpy())
            apart["obs"] = max(apart["obs"], np.abs(their_obs - obs[i]).max())
            apart["reward"] = max(apart["reward"], abs(reward - ours.reward[i]))
            apart["info"] = max(apart["info"], *(abs(info[key] - x[i]) for key, x in ours.info.items()))
            ended = (bool(step.terminated[i]), bool(step.truncated[i]))
            same_ends &= ended == (terminated, truncated and not terminated)
        fallen = step.terminated
        if fallen.any():
            ends += int(fallen.sum())
            seeds = [seed + 100 * bool(fell) for seed, fell in zip(seeds, fallen, strict=True)]
            env.reset(fallen, seeds)
            obs = env.task.observe()["state"]
            for i in fallen.nonzero()[:, 0].tolist():
                start, _ = originals[i].reset(seed=seeds[i])
                apart["obs"] = max(apart["obs"], np.abs(start - obs[i]).max())
    return {**apart, "ends": ends, "same_ends": same_ends}


@pytest.mark.parametrize("name", ROBOTS)
def test_a_thousand_ticks_are_those_of_gymnasium(require, name):
    found = compare(require, name, 1000)
    assert found["same_ends"]
    assert max(found["obs"], found["reward"], found["info"]) <= TOLERANCE, found
    assert (found["ends"] > 3) == (name in FALLING), "robots fall, so resets were compared too"


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_settings_mean_what_they_mean_in_gymnasium(require, name, settings):
    found = compare(require, name, 60, **settings, exclude_current_positions_from_observation=False)
    assert found["same_ends"]
    assert max(found["obs"], found["reward"], found["info"]) <= TOLERANCE, found


@pytest.mark.parametrize(
    ("name", "ticks", "settings"),
    [("half_cheetah", 300, {}), ("humanoid", 100, {"terminate_when_unhealthy": False})],
)
def test_without_the_solvers_warm_start_the_ways_part(require, name, ticks, settings):
    """The control: the comparison sees what an engine that keeps less than `MjData` does would lose."""

    def forget(env) -> None:
        env.physics.column("qacc_warmstart").write(0.0)

    # 16 and 0.17 were measured; the cheetah's solver converges, so it takes a hundred ticks until chaos shows.
    assert compare(require, name, ticks, forget, **settings)["obs"] > 1e-3


@pytest.mark.parametrize("name", ROBOTS)
def test_a_world_is_the_same_among_two_or_five(name):
    seen = []
    for n in (2, 5):
        env, verdicts = worlds(name, n)
        env.reset(seeds=[7, 8, 9, 10, 11][:n])
        for t, action in enumerate(actions(env, 60)):
            active = torch.ones(n, dtype=torch.bool)
            active[0] = t % 3 != 0
            env.step(action, active)
            seen.append((n, env.task.observe()["state"][1], verdicts[-1].reward[1]))
            if t == 30:
                env.reset(torch.arange(n) == 0, [70] * n)
    two, five = ([(o, r) for m, o, r in seen if m == n] for n in (2, 5))
    assert all(np.array_equal(a, b) and r == s for (a, r), (b, s) in zip(two, five, strict=True))


@pytest.mark.parametrize("name", ROBOTS)
def test_saved_and_restored_in_mid_episode(name):
    settings = {} if name == "half_cheetah" else {"terminate_when_unhealthy": False}
    ways = []
    saved: dict[str, Any] = {}
    for original in (True, False):
        env, verdicts = worlds(name, 2, **settings)
        everything = actions(env, 530)
        if original:
            env.reset(seeds=[1, 2])
            for action in everything[:30]:
                env.step(action)
            saved = {key: x.clone() for key, x in env.state_dict().items()}
        else:
            env.load_state_dict(saved)
        # Once one world waits: what it remembers of the last tick must wait with it.
        env.step(everything[30], torch.tensor([True, False]))
        way = []
        for action in everything[30:]:
            env.step(action)
            way.append((env.task.observe()["state"], verdicts[-1].reward))
        ways.append(way)
    assert all(np.array_equal(a, b) and np.array_equal(r, s) for (a, r), (b, s) in zip(*ways, strict=True))


class Limp:
    """A controller that does nothing."""

    def __init__(self, env) -> None:
        self._action = torch.zeros(env.num_envs, env.spec.action.dim)

    def reset(self, mask, seeds=None) -> None:
        pass

    def step(self, obs):
        return self._action


def test_worlds_without_success_are_evaluated_and_collected():
    env = make_env("hopper", 2)
    found = evaluate(ScaledEnv(env), Limp(env), [1, 2, 3])
    assert found.success is None and "success_rate" not in found.summary()
    assert all(0 < length < 1000 for length in found.lengths), "a limp hopper falls"
    episodes = collect(env, Limp(env), [1, 2, 3]).episodes
    assert [len(e.reward) for e in episodes] == found.lengths
    assert all(e.terminated and not e.success for e in episodes)


def test_limits_at_infinity_are_none():
    config = world_from({"name": "hopper", "config": {"healthy_z_range": [None, 1.5]}})
    assert to_data(config)["healthy_z_range"] == [None, 1.5]
    with pytest.raises(BurnishError, match=r"must be \[low, high\] with low < high"):
        ENVS["hopper"].config(healthy_z_range=[1.0, 0.5])
    with pytest.raises(BurnishError, match="reset_noise_scale >= 0"):
        ENVS["ant"].config(reset_noise_scale=-1.0)


def test_cameras_are_seen_beside_the_state():
    env = make_env(ENVS["ant"].config(cameras=["track"], image_size=32), 1)
    assert isinstance(env, BatchedMujoco)
    assert env.spec.obs.shapes == {"state": (105,), "image.track": (3, 32, 32)}


@pytest.mark.sim
def test_a_hopper_is_drawn_as_it_would_show_itself_and_goes_on_as_if_it_had_not_been():
    """As it stands, its picture is that of ``render``; higher up another; and the next tick is the same bit for bit."""
    env, other, third = (worlds("hopper", n)[0] for n in (2, 2, 1))
    for each in (env, other):
        each.reset(seeds=[1, 2])
        obs = each.step(torch.full((2, 3), 0.5)).obs["state"].clone()
    env.step(torch.full((2, 3), -0.5))
    other.step(torch.full((2, 3), -0.5))
    again = obs[:1].repeat(2, 1)
    again[1, 0] += 0.3
    there, high = env.pictures_of({"state": again})
    assert int((there != high).sum()) > 100
    third.reset(seeds=[1])
    third.step(torch.full((1, 3), 0.5))
    assert float((third.render(128)[0].float() - there.float()).abs().mean()) < 1, "but for its place along the way"
    action = torch.full((2, 3), 0.1)
    assert torch.equal(env.step(action).obs["state"], other.step(action).obs["state"])
    assert worlds("humanoid", 1)[0].pictures_of is None
