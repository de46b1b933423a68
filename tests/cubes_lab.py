"""What the tests of pick_place and stack do with cubes: put them by hand, play experts, look at the physics."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from burnish.policies.core.scale import ScaledEnv
from burnish.policies.measure.evaluate import Evaluation, evaluate, evaluation_seeds
from burnish.sim.batch import BatchedMujoco
from burnish.sim.build import ENVS, make_env
from burnish.sim.desk import Reward
from burnish.sim.experts import make_expert
from burnish.sim.experts.scripted import Script, ScriptedExpert
from burnish.sim.tasks import cubes

HOLD = (0.0, 0.0, 0.0, 0.0, cubes.OPEN)  # an action by which the tool stays and the gripper is open


def worlds(task: str, num_envs: int, **settings: Any) -> BatchedMujoco:
    env = make_env(ENVS[task].config(**settings), num_envs)
    assert isinstance(env, BatchedMujoco)
    return env


def put(env: BatchedMujoco, offset: Any, wait: int = 4) -> np.ndarray:
    """Reset, put the cubes so far from their goals, (N, 3) metres, and wait some ticks: who has succeeded by then."""
    task: Any = env.task
    env.reset(seeds=range(env.num_envs))
    everyone = np.arange(env.num_envs)
    task.cube.put(everyone, task.goal() + np.asarray(offset), np.zeros(env.num_envs))
    success = np.zeros(env.num_envs, bool)
    for _ in range(wait):
        step = env.step(torch.tensor(HOLD).repeat(env.num_envs, 1))
        success |= step.info["success"].numpy()
        assert torch.equal(step.terminated, step.info["success"])
        assert ((step.reward == 1) == step.terminated).all()
    return success


def played(task: str, level: str, episodes: int = 64, script: Script | None = None) -> Evaluation:
    """By the expert of that level, or by ``script``."""
    env = worlds(task, episodes)
    expert = make_expert(task, episodes, level, env=env) if script is None else ScriptedExpert(env, script)
    return evaluate(ScaledEnv(env), expert, evaluation_seeds(episodes))


def random_actions(env: BatchedMujoco, ticks: int, seed: int = 0) -> torch.Tensor:
    """(ticks, N, A) in actuator units; each row of N draws the same, whatever N is."""
    low, high = torch.tensor(env.spec.action.low), torch.tensor(env.spec.action.high)
    drawn = torch.rand(ticks, 1, len(low), generator=torch.Generator().manual_seed(seed))
    return (low + (high - low) * drawn).repeat(1, env.num_envs, 1)


def demonstration(task: str, num_envs: int = 16) -> dict[str, np.ndarray]:
    """Along the clean expert's episodes, each (T, N): the dense reward, whether the world is still under way, whether
    the cube is held and lifted, where it is in the hand (T, N, 3), and how deep things overlap that touch a cube."""
    raw = worlds(task, num_envs, reward=Reward.dense)
    env, expert, cube, hand = ScaledEnv(raw), make_expert(task, num_envs, env=raw), raw.task.cube, raw.task.hand
    seeds = evaluation_seeds(num_envs)
    obs, active = env.reset(seeds=seeds), torch.ones(num_envs, dtype=torch.bool)
    expert.reset(active, seeds)
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("reward", "active", "carried", "place", "overlap")}
    while active.any():
        step = env.step(expert.step(obs), active)
        obs = step.obs
        found["reward"].append(step.info["shaped"].numpy())
        found["active"].append(active.numpy().copy())
        found["carried"].append(cubes.held(hand, cube) & (cube.position()[:, 2] > 0.04))
        found["place"].append(cubes.in_hand(hand, cube))
        found["overlap"].append(np.array([max(-data.contact.dist, default=0.0) for data in raw.physics.data]))
        active = active & ~(step.terminated | step.truncated)
    return {name: np.stack(x) for name, x in found.items()}


def check_rising(reward: np.ndarray, active: np.ndarray) -> None:
    """An episode's dense reward ends at 1, by way of near, held, over the goal and let go; what it loses on the way is
    what a tool swings while it slows down, a hundredth."""
    change = np.diff(reward, axis=0) * active[1:]
    assert np.maximum(-change, 0).sum(axis=0).max() < 0.02
    for stage in (0.25, 0.5, 0.65, 0.8, 0.85):
        assert ((np.abs(reward - stage) < 0.06) & active).any(axis=0).all(), stage
    assert (np.where(active, reward, 0).max(axis=0) == 1).all()


def check_grasp(place: np.ndarray, carried: np.ndarray, overlap: np.ndarray) -> None:
    """While it is carried a cube does not slip in the fingers by as much as a millimetre, and nothing overlaps by half
    of one (99 %: the instant at which something hits the desk is spared)."""
    for i in range(place.shape[1]):
        grasped = place[carried[:, i], i]
        assert len(grasped) > 5 and np.linalg.norm(grasped - grasped[0], axis=1).max() < 0.001
    assert np.quantile(overlap, 0.99) < 0.0005
