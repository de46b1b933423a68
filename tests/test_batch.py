"""`BatchedMujoco`: time, seeds, masks and saved states, on `reach`; and what holds for every task in the table."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import Scale
from burnish.policies.core.types import VecEnv
from burnish.sim.batch import BatchedMujoco
from burnish.sim.build import ENVS
from burnish.sim.desk import ActionMode, DeskConfig, Reward
from burnish.sim.experts import make_expert
from burnish.sim.randomize import RandomizeConfig
from burnish.sim.tasks.reach import Reach, ReachConfig

pytestmark = pytest.mark.sim

TASKS = [name for name, kind in ENVS.items() if kind.task]
# Each task, in each of its action modes.
CASES = [
    (name, mode)
    for name in TASKS
    for mode in (list(ActionMode) if issubclass(ENVS[name].config, DeskConfig) else [None])
]
IDS = [name if mode is None else f"{name}-{mode.value}" for name, mode in CASES]
ALL = RandomizeConfig(mass=0.3, friction=0.3, gains=0.2, damping=0.3, latency_s=0.05)


def made(name: str, num_envs: int, mode: ActionMode | None = None, **settings: Any) -> BatchedMujoco:
    module, attribute = ENVS[name].builder.split(":")
    task = getattr(importlib.import_module(f"burnish.sim.{module}"), attribute)
    threads, seed = settings.pop("threads", None), settings.pop("seed", 0)
    if mode is not None:
        settings["action"] = mode
    return BatchedMujoco(task(ENVS[name].config(**settings)), num_envs, threads=threads, seed=seed)


def actions(env: VecEnv, ticks: int, num_envs: int | None = None) -> Tensor:
    """Random ones; world i is given the same, whatever the number of worlds."""
    low, high = torch.tensor(env.spec.action.low), torch.tensor(env.spec.action.high)
    source = torch.Generator().manual_seed(0)
    share = torch.rand(ticks, 64, len(low), generator=source)[:, : num_envs or env.num_envs]
    return low + (high - low) * share


def play(env: VecEnv, steps: Tensor) -> list[Tensor]:
    """All that is seen and paid; worlds that end begin anew."""
    seen = []
    for action in steps:
        step = env.step(action)
        seen += [step.obs["state"].clone(), step.reward, step.terminated, step.truncated, *step.info.values()]
        ended = step.terminated | step.truncated
        seen.append(env.reset(ended)["state"].clone())
    return seen


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def first(seen: list[Tensor], count: int) -> list[Tensor]:
    return [x[:count] for x in seen]


# ---- every task ----


@pytest.mark.parametrize(("name", "mode"), CASES, ids=IDS)
def test_same_seeds_same_episodes_whatever_the_worlds_and_threads(name, mode):
    runs = []
    for num_envs, threads, seed in ((5, 2, 0), (5, 1, 7), (2, 2, 0)):
        env = made(name, num_envs, mode, threads=threads, seed=seed)
        begun = env.reset(seeds=range(10, 10 + num_envs))["state"].clone()
        steps = (env.step(action) for action in actions(env, 12))
        runs.append([begun, *(x for step in steps for x in (step.obs["state"].clone(), step.reward, step.terminated))])
    assert same(runs[0], runs[1])
    assert same(first(runs[0], 2), runs[2])
    assert not torch.equal(runs[0][0][0], runs[0][0][1]), "other seeds, other episodes"


@pytest.mark.parametrize(("name", "mode"), CASES, ids=IDS)
def test_what_is_not_active_stays_as_it_was_to_the_last_bit(name, mode):
    env = made(name, 4, mode)
    env.reset()
    play(env, actions(env, 6))
    active = torch.tensor([True, False, True, False])
    for advance in (lambda: env.step(actions(env, 1)[0], active), lambda: env.reset(active)):
        before = {key: x.clone() for key, x in env.state_dict().items()}
        advance()
        after = env.state_dict()
        assert all(torch.equal(after[key][~active], x[~active]) for key, x in before.items())
        changed = after["physics"] != before["physics"]
        assert changed.any(dim=1).tolist() == active.tolist()


def check_restore(name: str, mode: ActionMode | None, ticks: int) -> None:
    env = made(name, 3, mode)
    env.reset()
    steps = actions(env, 10 + ticks)
    play(env, steps[:10])
    saved = {key: x.clone() for key, x in env.state_dict().items()}
    other = made(name, 3, mode)
    other.reset()
    play(other, steps[3:7])  # it has been elsewhere
    other.load_state_dict(saved)
    assert same(play(env, steps[10:]), play(other, steps[10:]))


@pytest.mark.parametrize(("name", "mode"), CASES, ids=IDS)
def test_a_restored_world_goes_on_bit_for_bit(name, mode):
    check_restore(name, mode, 25)


@pytest.mark.rotating(4)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), CASES, ids=IDS)
def test_a_restored_world_goes_on_bit_for_bit_for_500_steps(name, mode):
    check_restore(name, mode, 500)


def warnings(env: BatchedMujoco) -> Iterator[str]:
    for world, data in enumerate(env.physics.data):
        for kind, number in enumerate(data.warning.number.tolist()):
            if number:
                yield f"world {world}: {mujoco.mjtWarning(kind).name}"


def check_random_play(name: str, mode: ActionMode | None, num_envs: int, ticks: int) -> None:
    env = made(name, num_envs, mode)
    source = torch.Generator().manual_seed(1)
    obs = env.reset()
    for action in actions(env, ticks):
        step = env.step(action, torch.rand(num_envs, generator=source) < 0.95)
        assert not list(warnings(env))  # a reset would forget them
        assert step.reward.isfinite().all() and step.reward.shape == (num_envs,)
        assert all(len(x) == num_envs for x in step.info.values())
        ended = step.terminated | step.truncated | (torch.rand(num_envs, generator=source) < 0.03)
        seeds = torch.randint(2**62, (num_envs,), generator=source).tolist()
        for obs in (step.obs, env.reset(ended, seeds)):
            assert env.spec.obs.check(obs) == num_envs and obs.keys() == env.spec.obs.shapes.keys()
            assert all(x.isfinite().all() and x.dtype == torch.float32 for x in obs.values())


@pytest.mark.parametrize(("name", "mode"), CASES, ids=IDS)
def test_random_resets_and_steps(name, mode):
    check_random_play(name, mode, 10, 20)


@pytest.mark.rotating(4)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), CASES, ids=IDS)
def test_ten_thousand_random_resets_and_steps(name, mode):
    check_random_play(name, mode, 50, 200)


# ---- what one task shows for all ----


def test_masked_resets_take_the_seeds_of_their_rows():
    env = made("reach", 4)
    begun = env.reset(seeds=[1, 2, 3, 4])["state"].clone()
    play(env, actions(env, 5))
    again = env.reset(torch.tensor([False, True, False, True]), [9, 2, 9, 4])["state"]
    assert torch.equal(again[[1, 3]], begun[[1, 3]])
    assert not torch.equal(again[[0, 2]], begun[[0, 2]])


def test_a_world_that_is_not_active_is_judged_without_consequence():
    """The goal is everywhere, so each tick counts; the world that waits must not count on."""
    env = made("reach", 2, radius=1.0, hold=1000)
    env.reset()
    for active in ([True, True], [True, False], [True, False]):
        env.step(actions(env, 1)[0], torch.tensor(active))
    assert env.task.memory["held"].tolist() == [3, 1]


def test_an_episode_is_cut_at_its_last_tick():
    env = made("reach", 2, max_steps=4)
    env.reset()
    cut = [env.step(action).truncated.tolist() for action in actions(env, 4)]
    assert cut == [[False, False]] * 3 + [[True, True]]


def test_a_late_action_acts_from_its_physics_step_on():
    """Against one world stepped by hand: the last targets for so many steps, then the new ones."""
    env = made("reach", 3, ActionMode.joint_target, randomize=RandomizeConfig(latency_s=0.05))
    env.reset(seeds=[2, 3, 4])
    late, skip = env._late.tolist(), env.task.frame_skip
    assert len(set(late)) == 3 and all(0 <= k <= skip for k in late)
    model = env.physics.model
    by_hand = [mujoco.MjData(model) for _ in late]
    for data, state in zip(by_hand, env.physics.state(), strict=True):
        mujoco.mj_setState(model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    for action in actions(env, 5):
        env.step(action)
        for data, wanted, k in zip(by_hand, action.double().numpy(), late, strict=True):
            mujoco.mj_step(model, data, k)
            data.ctrl[:] = wanted
            mujoco.mj_step(model, data, skip - k)
    assert np.array_equal(env.physics.column("qpos").read(), np.stack([data.qpos for data in by_hand]))


def test_a_latency_beyond_a_tick_is_refused():
    with pytest.raises(BurnishError, match=r"latency_s=0\.06 is longer than a control tick of 0\.05 s"):
        made("reach", 1, randomize=RandomizeConfig(latency_s=0.06))


def test_randomised_worlds_are_functions_of_their_seeds():
    runs = []
    for num_envs, before in ((3, []), (3, [77, 78, 79]), (1, [])):
        env = made("reach", num_envs, randomize=ALL)
        if before:  # what was drawn for earlier episodes leaves no trace
            env.reset(seeds=before)
            play(env, actions(env, 3))
        env.reset(seeds=range(num_envs))
        runs.append(play(env, actions(env, 15)))
    assert same(runs[0], runs[1]) and same(first(runs[0], 1), runs[2])
    plain = made("reach", 3)
    plain.reset(seeds=range(3))
    assert not same(play(plain, actions(plain, 15)), runs[0])


@pytest.mark.parametrize("name", ["reach", "half_cheetah"])
def test_randomised_worlds_are_restored(name):
    change = dataclasses.replace(ALL, latency_s=0.0) if name == "half_cheetah" else ALL
    runs = []
    env = made(name, 3, randomize=change)
    env.reset()
    steps = actions(env, 160)
    play(env, steps[:10])
    saved = {key: x.clone() for key, x in env.state_dict().items()}
    for world in (env, made(name, 3, randomize=change), made(name, 3)):
        world.load_state_dict(saved)
        runs.append(play(world, steps[10:]))
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])  # the same state goes elsewhere without the models


def test_the_state_of_other_worlds_is_refused():
    saved = made("reach", 3).state_dict()
    with pytest.raises(BurnishError, match="not one of this world: it has another number or size of worlds"):
        made("reach", 2).load_state_dict(saved)
    with pytest.raises(BurnishError, match="not one of this world"):
        made("reach", 3).load_state_dict({})


class Forgiving(Reach):
    autoreset = True


@pytest.mark.parametrize(("task", "visible"), [(Reach, True), (Forgiving, False)])
def test_a_world_that_diverges_is_seen_to(task, visible):
    """MuJoCo would reset it in silence, in the middle of an episode: the control shows that it does."""
    env = BatchedMujoco(task(ReachConfig(reward=Reward.dense)), 3)
    env.reset()
    env.physics.column("qvel").write(np.full((3, 1), 1e12), np.array([1]))
    state = env.step(actions(env, 1)[0]).obs["state"]
    broken = ~state.isfinite().all(dim=1) | (state.abs() > 1e6).any(dim=1)
    assert broken.tolist() == [False, visible, False]


def test_pictures_are_handed_on_without_a_copy():
    env = made("reach", 2)
    picture = np.zeros((2, 3, 8, 8), np.uint8)

    class Drawn:
        def draw(self, rows):
            return {"image.front": picture}

    setattr(env, "_pixels", Drawn())  # noqa: B010
    seen = env.reset()["image.front"]
    assert seen.data_ptr() == picture.ctypes.data
    picture[1] = 7
    assert (seen[1] == 7).all()


def test_wrong_shapes_are_refused():
    env = made("reach", 2)
    env.reset()
    with pytest.raises(ValueError, match="expected shape"):
        env.step(torch.zeros(3, env.spec.action.dim))
    with pytest.raises(ValueError, match="expected shape"):
        env.step(torch.zeros(2, env.spec.action.dim), torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("name", ["reach", "insert"])
def test_what_is_derived_is_known_right_after_a_restore(name):
    """Whoever looks at the world itself before the next step sees it: an expert, a reset of other worlds, a camera."""
    env = made(name, 3)
    expert = make_expert(name, 3, env=env)
    obs, everyone = env.reset(seeds=[1, 2, 3]), torch.ones(3, dtype=torch.bool)
    expert.reset(everyone, [1, 2, 3])
    scale = Scale(env.spec.action)
    for _ in range(8):
        obs = env.step(scale.to_actuator(expert.step(obs))).obs
    kept = {key: x.clone() for key, x in env.state_dict().items()}
    script = {key: x.clone() for key, x in expert.state_dict().items()}
    expected, seen = expert.peek(obs), obs["state"].clone()

    other = made(name, 3)
    other.load_state_dict(kept)
    again = make_expert(name, 3, env=other)
    again.load_state_dict(script)
    torch.testing.assert_close(again.peek(obs), expected, rtol=0, atol=1e-6)  # rounding of the kinematics
    untouched = other.reset(torch.tensor([True, False, False]), [9, 9, 9])["state"][1:]
    torch.testing.assert_close(untouched, seen[1:], rtol=0, atol=1e-5)
