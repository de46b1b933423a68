"""`BatchedWarp`: formulas on tensors beside `BatchedMujoco`, on the same physics; then mujoco-warp's own physics.

Where mujoco-warp is missing the first part plays alone. CI has none: 140 MB are fetched, and the kernels of one robot
compile for 25 seconds of a CPU.
"""

from __future__ import annotations

import sys
from typing import Any

import mujoco
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from warp_lab import TensorPhysics, task_of

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.types import Saved, VecEnv
from burnish.sim.batch import BatchedMujoco
from burnish.sim.build import ENVS, make_env
from burnish.sim.desk import ActionMode, Observe, Reward
from burnish.sim.experts import make_expert
from burnish.sim.guard import GuardConfig
from burnish.sim.locomotion.settings import HopperConfig
from burnish.sim.randomize import FactorsConfig, RandomizeConfig
from burnish.sim.task import Backend
from burnish.sim.tasks.reach import ReachConfig
from burnish.sim.warp_batch import BatchedWarp

pytestmark = pytest.mark.sim

ROBOTS = ("half_cheetah", "hopper", "walker2d", "ant", "humanoid")
ARM = ("reach", "push", "insert", "pick_place", "stack", "avoid", "tabletop")
LIMIT = 7  # ticks of an episode
SEEDS = [11, (1 << 40) + 7, 13]


def settings_of(name: str) -> dict[str, Any]:
    """Robots begin without noise, which is drawn otherwise on a device; the arm is paid for coming nearer."""
    return {"max_steps": LIMIT, **({"reset_noise_scale": 0.0} if name in ROBOTS else {"reward": Reward.dense})}


def on_stand_in(name: str, **settings: Any) -> BatchedWarp:
    return BatchedWarp(task_of(name, **{**settings_of(name), **settings}), 3, physics=TensorPhysics)


def on_warp(name: str, **settings: Any) -> BatchedWarp:
    pytest.importorskip("mujoco_warp")
    return BatchedWarp(task_of(name, **{**settings_of(name), **settings}), 3)


def in_c(name: str, **settings: Any) -> BatchedMujoco:
    return BatchedMujoco(task_of(name, **{**settings_of(name), **settings}), 3, threads=1)


def actions(env: VecEnv, ticks: int) -> torch.Tensor:
    low, high = torch.tensor(env.spec.action.low), torch.tensor(env.spec.action.high)
    return low + (high - low) * torch.rand(ticks, 3, len(low), generator=torch.Generator().manual_seed(0))


def difference(ours: VecEnv, c: VecEnv, ticks: int) -> float:
    """The largest difference of observations and rewards, in which each world misses some ticks and begins anew in the
    middle; ends and successes must be equal."""
    apart = (ours.reset(seeds=SEEDS)["state"] - c.reset(seeds=SEEDS)["state"]).abs().max().item()
    for tick, action in enumerate(actions(c, ticks)):
        active = torch.tensor([(tick + i) % 3 > 0 for i in range(3)])
        a, b = ours.step(action, active), c.step(action, active)
        assert torch.equal(a.terminated[active], b.terminated[active])
        assert torch.equal(a.truncated[active], b.truncated[active])
        assert a.info.keys() == b.info.keys()
        if "success" in b.info:
            assert torch.equal(a.info["success"][active], b.info["success"][active])
        pairs = [(a.obs["state"], b.obs["state"]), (a.reward[active], b.reward[active])]
        if tick % 4 == 3:
            anew, seeds = torch.tensor([False, True, tick % 8 == 3]), [tick, tick + 1, tick + 2]
            pairs.append((ours.reset(anew, seeds)["state"], c.reset(anew, seeds)["state"]))
        apart = max(apart, *((x - y).abs().max().item() for x, y in pairs))
    return apart


# ---- formulas, time, masks and states, on MuJoCo in C behind tensors ----

# Float64 formulas in the same order; NumPy and torch round sines otherwise, by 1e-16 of what is at most 500 times as
# large in an observation, and a contact lets that grow. Then all is rounded to float32.
ROUNDING = 2e-5


@pytest.mark.parametrize("name", [*ROBOTS, *ARM])
def test_formulas_on_tensors_are_those_in_numpy(name):
    assert difference(on_stand_in(name), in_c(name), 2 * LIMIT) < ROUNDING


@pytest.mark.parametrize("name", ARM)
def test_joint_targets_too(name):
    mode = {"action": ActionMode.joint_target}
    assert difference(on_stand_in(name, **mode), in_c(name, **mode), LIMIT) < ROUNDING


@pytest.mark.parametrize(
    ("name", "settings"), [("reach", {"radius": 0.1, "hold": 2}), ("push", {"position_m": 0.04, "angle_rad": 0.7})]
)
def test_success_is_the_same_too(name, settings):
    assert difference(on_stand_in(name, **settings), in_c(name, **settings), LIMIT) < ROUNDING
    env = on_stand_in(name, **settings)
    env.reset(seeds=SEEDS)
    won = [env.step(action).info["success"] for action in actions(env, 3)]
    assert torch.stack(won).any() and not torch.stack(won).all(), "so both were compared"


def test_another_mass_is_another_world():
    heavier = on_stand_in("hopper", factors=FactorsConfig(mass=1.1))
    assert difference(heavier, in_c("hopper"), 3) > 100 * ROUNDING


@pytest.mark.parametrize("name", ["hopper", "insert"])
def test_an_episode_ends_at_its_limit(name):
    env = on_stand_in(name)
    env.reset(seeds=SEEDS)
    for tick, action in enumerate(actions(env, LIMIT)):
        step = env.step(action)
        assert step.truncated.tolist() == [tick == LIMIT - 1 and not x for x in step.terminated.tolist()]


@pytest.mark.parametrize("made", [on_stand_in, pytest.param(on_warp, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["hopper", "pick_place"])
def test_a_saved_state_goes_on_and_rows_that_stand_by_keep_every_bit(name, made):
    env, other = made(name), made(name)
    assert all(isinstance(env, kind) for kind in (VecEnv, Saved))
    env.reset(seeds=SEEDS)
    steps = actions(env, 4)
    for action in steps[:2]:
        env.step(action)
    saved, before = env.state_dict(), env.observe()["state"].clone()
    step = env.step(steps[2], torch.tensor([True, False, True]))
    after = env.observe()["state"]
    assert torch.equal(after[1], before[1]) and not torch.equal(after[0], before[0])
    middle = env.reset(torch.tensor([False, False, True]))["state"]
    assert torch.equal(middle[:2], after[:2]) and not torch.equal(middle[2], after[2])
    end = env.step(steps[3])

    other.load_state_dict(saved)
    again = other.step(steps[2], torch.tensor([True, False, True]))
    other.reset(torch.tensor([False, False, True]))
    last = other.step(steps[3])
    for one, two in ((step, again), (end, last)):
        assert torch.equal(one.obs["state"], two.obs["state"]) and torch.equal(one.reward[[0, 2]], two.reward[[0, 2]])
    with pytest.raises(BurnishError, match="saved state of a world"):
        other.load_state_dict({})


def test_robots_begin_on_noise_of_their_seed_alone():
    """Uniform within the scale of the settings: the mean of squares of a uniform number in [-1, 1] is 1/3, of 2304
    numbers within 0.05 of it at six standard deviations."""
    task = task_of("hopper", reset_noise_scale=0.1)
    env = BatchedWarp(task, 192, physics=TensorPhysics)
    env.reset(seeds=list(range(192)))
    qpos, qvel = (env.physics.column(name).read() for name in ("qpos", "qvel"))
    start = torch.tensor(env.physics.model.qpos0)
    drawn = torch.cat([qpos - start, qvel], dim=1) / 0.1
    assert drawn.abs().max() <= 1 and (drawn.square().mean() - 1 / 3).abs() < 0.05
    few = BatchedWarp(task_of("hopper", reset_noise_scale=0.1), 2, physics=TensorPhysics)
    few.reset(seeds=[5, 3])
    assert torch.equal(few.physics.column("qpos").read(), qpos[[5, 3]])


class NothingToTheHost(TorchDispatchMode):
    """On a GPU each of these operations waits until the host has read a number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        asks = name in ("_local_scalar_dense", "nonzero", "masked_select", "equal")
        places = args[1] if name.startswith("index") and isinstance(args[1], list) else []
        asks |= any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in places)
        assert not asks, f"{name} copies to the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "made"),
    [
        *((name, on_stand_in) for name in ("walker2d", "ant", "push", "insert", "stack", "avoid", "tabletop")),
        pytest.param("push", on_warp, marks=pytest.mark.slow),  # its physics is the same in all of them, and slow
    ],
)
def test_nothing_is_copied_to_the_host(name, made):
    env = made(name)
    mask, few = torch.tensor([True, False, True]), actions(env, 3)
    env.reset()
    with NothingToTheHost():
        env.reset(mask)
        env.step(few[0])
        env.step(few[1], mask)
    with pytest.raises(AssertionError, match="copies to the host"), NothingToTheHost():
        few[mask]


def test_films_show_the_worlds(require):
    env, c = on_stand_in("insert"), in_c("insert")
    env.reset(seeds=SEEDS)
    c.reset(seeds=SEEDS)
    frames = env.render(64)
    assert frames.shape == (3, 64, 64, 3) and torch.equal(frames, c.render(64))
    assert torch.equal(env.render(64, [2]), frames[[2]]) and not torch.equal(frames[0], frames[1])


# ---- what is refused ----


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("push", {"observe": Observe.pixels}, "no cameras"),
        ("push", {"randomize": RandomizeConfig(mass=0.1)}, "no randomize"),
        ("reach", {"guard": GuardConfig(velocity=2.0, acceleration=9.0)}, "no guard"),
        ("hopper", {"cameras": ["track"]}, "no cameras"),
    ],
)
def test_it_says_what_it_has_not(name, settings, words):
    with pytest.raises(BurnishError, match=f"{words}.*env.backend=mujoco"):
        make_env(ENVS[name].config(backend=Backend.warp, **settings), 2)


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    with pytest.raises(BurnishError, match=r"pip install 'burnish\[warp\]'"):
        make_env(HopperConfig(backend=Backend.warp), 2)


def test_experts_stay_with_numpy():
    config = ReachConfig(backend=Backend.warp)
    env = BatchedWarp(task_of("reach", backend=Backend.warp), 2, physics=TensorPhysics)
    with pytest.raises(BurnishError, match="plans with NumPy"):
        make_expert(config, 2, env=env)


# ---- mujoco-warp, on its CPU device ----


@pytest.mark.slow
def test_what_it_cannot_simulate_is_refused():
    pytest.importorskip("mujoco_warp")
    from burnish.sim.warp_physics import WarpPhysics

    model = mujoco.MjModel.from_xml_string("<mujoco><option noslip_iterations='3'/></mujoco>")
    with pytest.raises(BurnishError, match=r"noslip.*env\.backend=mujoco"):
        WarpPhysics(model, 1, torch.device("cpu"))


# Float32 at a tolerance of 1e-6, over seven ticks of 4 to 40 physics steps, with speeds up to 10 and units of the arm's
# observations as small as 2 mm and 0.01 rad. Measured: 8e-6, 9e-5, 4e-5, 7e-5, 3e-5
# (`benchmarks/warp_difference.py` goes on until they part). A mass that is a twentieth larger makes ten times as much.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["hopper", "walker2d", "reach", "push", "humanoid"])
def test_physics_is_that_of_c_mujoco_until_contacts_differ(name):
    assert difference(on_warp(name), in_c(name), LIMIT) < 5e-4


@pytest.mark.slow
def test_a_slightly_larger_mass_is_noticed():
    assert difference(on_warp("hopper", factors=FactorsConfig(mass=1.05)), in_c("hopper"), LIMIT) > 5e-3


@pytest.mark.slow
def test_equal_seeds_play_equal_episodes():
    played = []
    for _ in range(2):
        env = on_warp("hopper", reset_noise_scale=0.1)
        seen = [env.reset(seeds=SEEDS)["state"]]
        seen += [env.step(action).obs["state"] for action in actions(env, 3)]
        played.append(torch.stack(seen))
    assert torch.equal(*played) and not torch.equal(played[0][:, 0], played[0][:, 1])
