"""The world of the seam tests: several decisions per episode, ends of both kinds at every sub-step, and a full log.

It is ``ScriptedWorld`` with numbers of the size that networks like, actuators that a guard holds back, and a log of
every control tick. Beside it stand the bases that methods are tried on, and ears at the two places where decisions are
written down.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.finetune.method import Phase
from burnish.finetune.methods.grpo import GRPOConfig
from burnish.finetune.table import LOOPS
from burnish.finetune.table import METHODS as TABLE
from burnish.policies.build import build_policy
from burnish.policies.core.chunk import HistoryEnv
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import PolicySpec, agent_spec
from burnish.policies.core.types import Obs, Outcome, Step
from burnish.policies.diffusion import DiffusionConfig
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.flow import FlowConfig
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from burnish.policies.nets.encoder import EncoderConfig
from burnish.policies.nets.vision import VisionConfig
from scripted import TERMINATED, TRUNCATED, ScriptedWorld
from seam_check import UNIT, Checker, Place, Tick, base_chunk

EXECUTE, START, HORIZON = 3, 1, 5


class SeamWorld(ScriptedWorld):
    """An episode takes 2 n + 1 to 3 n ticks, so its third decision ends at any sub-step, in both ways."""

    def __init__(self, num_envs: int, execute: int = EXECUTE, image: bool = False, goal: bool = False) -> None:
        ends = [(2 * execute + i, kind) for i in range(1, execute + 1) for kind in (TERMINATED, TRUNCATED)]
        super().__init__([ends[i % len(ends) :] + ends[: i % len(ends)] for i in range(num_envs)], image, goal)
        self.log: list[list[Tick]] = [[] for _ in range(num_envs)]

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        low, high = (torch.tensor(limit) for limit in (self.spec.action.low, self.spec.action.high))
        margin = 0.1 * (high - low)
        guarded = torch.minimum(torch.maximum(action, low + margin), high - margin)
        step = super().step(guarded, active)
        playing = torch.ones(self.num_envs, dtype=torch.bool) if active is None else active
        reward = step.reward / 128
        for world in playing.nonzero()[:, 0].tolist():
            end = TERMINATED if step.terminated[world] else TRUNCATED if step.truncated[world] else ""
            where = int(self.episode[world]), int(self.tick[world])
            self.log[world].append(Tick(*where, tuple(guarded[world].tolist()), float(reward[world]), end))
        guarded = guarded.masked_fill(~playing[:, None], float("nan"))
        return step._replace(reward=reward, info={**step.info, "executed": guarded})

    def _obs(self) -> Obs:
        obs = super()._obs()
        return {key: x / UNIT if x.is_floating_point() else x for key, x in obs.items()}


def seam_env(world: SeamWorld, history: int = 1) -> ScaledEnv:
    """As a policy sees it."""
    return ScaledEnv(world if history == 1 else HistoryEnv(world, history))


def seam_spec(env: ScaledEnv, history: int = 1) -> PolicySpec:
    """Chunks begin before now and are longer than what is executed, so that every slice is a proper one."""
    return replace(agent_spec(env.spec, EXECUTE, history), horizon=HORIZON, start=START)


# ---- bases ----

SMALL = DenoiserConfig(
    mlp=MlpBodyConfig(hidden=[16], time_dim=8),
    encoder=EncoderConfig(vision=VisionConfig(features=4, channels=[4])),
)


def scripted_chunks(obs: Obs) -> np.ndarray:
    """The plain callable: the formula of the checker."""
    state = obs["state"].flatten(1)[:, -3:] * UNIT
    return np.array([base_chunk(Place(*(int(x) for x in row)), HORIZON, 2) for row in state.tolist()])


class Remote:
    """A slow server: it counts the rows that it is asked for, and refuses to answer the same question twice."""

    def __init__(self) -> None:
        self.rows, self.asked = 0, set()

    def __call__(self, obs: Obs, noise: Tensor) -> Tensor:
        time.sleep(0.001)
        for i in range(len(noise)):
            question = tuple(np.asarray(x[i]).tobytes() for x in (*(obs[key] for key in sorted(obs)), noise))
            if question in self.asked:
                raise AssertionError(f"asked twice: {obs['state'][i].tolist()} with noise {noise[i].tolist()}")
            self.asked.add(question)
        self.rows += len(noise)
        ramp = torch.linspace(-1, 1, HORIZON * 2).view(HORIZON, 2)
        return torch.tanh(ramp + noise.sum(1)[:, None, None] + obs["state"].flatten(1).sum(1)[:, None, None])


def make_base(kind: str, spec: PolicySpec) -> Any:
    if kind == "callable":
        return CallablePolicy(scripted_chunks, spec)
    if kind == "remote":
        return CallablePolicy(Remote(), replace(spec, noise_shape=(3,)))
    configs = {
        "flow": FlowConfig(steps=2, net=SMALL),
        "diffusion": DiffusionConfig(train_steps=8, steps=3, net=SMALL),
        "gaussian": GaussianConfig(hidden=[16], encoder=SMALL.encoder),
        "squashed": GaussianConfig(hidden=[16], squash=True, encoder=SMALL.encoder),
    }
    return build_policy(configs[kind], spec, seed=1)


# The methods that refine in our loops.
METHODS = {name: row for name, row in TABLE.items() if Phase.online in row.phases and row.loop in LOOPS}


# What a method must be told to fit these bases: chains of two steps, chunks of three executed actions.
FITTED = {"dppo": {"trained_steps": 2}, "rpd": {"execute": 2}, "grpo": {"group": 2}}


def shrunk(config: Any) -> Any:
    """Tiny networks and few, small batches, wherever a configuration speaks of them. Other settings stay."""
    small: dict[str, Any] = {"batch": 8, "minibatch": 8, "epochs": 2, "decisions_per_update": 6, "capacity": 10_000}
    small |= {"warmup": 10, "initial_updates": 1, "updates_per_decision": 1.0, "actor_every": 2, "members": 3}
    small |= {"critic_warmup": 1, "head_start": 1, "vision": VisionConfig(features=4, channels=[4])}
    changes = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("hidden", "trunk") and value:
            changes[field.name] = [16]
        elif field.name in small:
            changes[field.name] = small[field.name]
        elif dataclasses.is_dataclass(value):
            changes[field.name] = shrunk(value)
    if isinstance(config, GRPOConfig):  # it has no critic that could be warmed up
        usual = type(config.inner)().ppo.critic_warmup
        changes["inner"].ppo = replace(changes["inner"].ppo, critic_warmup=usual)
    return replace(config, **changes)


# ---- ears ----


def as_numpy(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: as_numpy(x) for key, x in tree.items()}
    return tree.detach().cpu().numpy().copy()


class Watched:
    """A view that keeps every outcome as it was handed out, with the observation that was acted on."""

    def __init__(self, env: Any) -> None:
        self.env, self.num_envs, self.device, self.spec = env, env.num_envs, env.device, env.spec
        self.heard: list[dict[str, Any]] = []
        self._obs: Any = None

    def reset(self, seeds: Any = None) -> Obs:
        obs = self.env.reset(seeds)
        self._obs = as_numpy(obs)
        return obs

    def step(self, action: Tensor) -> Outcome:
        outcome = self.env.step(action)
        facts = {name: as_numpy(x) for name, x in outcome._asdict().items() if name not in ("info", "obs")}
        self.heard.append({"obs": self._obs, **facts})
        self._obs = as_numpy(outcome.obs)
        return outcome

    def rows(self) -> dict[str, Any]:
        """(T, N, ...)"""

        def stacked(parts: list[Any]) -> Any:
            if isinstance(parts[0], dict):
                return {key: stacked([part[key] for part in parts]) for key in parts[0]}
            return np.stack(parts)

        return stacked(self.heard)

    def state_dict(self) -> dict[str, Any]:
        return self.env.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.env.load_state_dict(state)


def replay_rows(replay: Any) -> dict[str, Any]:
    """All that a replay holds, with where it led, (T, N, ...)."""
    everything = replay.gather(torch.arange(len(replay)))

    def shaped(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: shaped(value) for key, value in x.items()}
        return x.reshape(replay.filled, replay.num_envs, *x.shape[1:])

    return shaped(as_numpy(everything))


def rollout_rows(batch: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray, list[int]]:
    """A rollout's batch: rows (T, N, ...), where its next_obs is known (T, N), and the rows that it names."""
    rows = as_numpy({key: x for key, x in batch.items() if key != "bootstrap"})
    named = batch["bootstrap"]["rows"].tolist()
    shape = rows["reward"].shape
    known = np.zeros(shape, dtype=bool)
    known.reshape(-1)[named] = True
    rows["next_obs"] = {}
    for key, x in as_numpy(batch["bootstrap"]["obs"]).items():
        filled = np.full((shape[0] * shape[1], *x.shape[1:]), 0, dtype=x.dtype)
        filled[named] = x
        rows["next_obs"][key] = filled.reshape(*shape, *x.shape[1:])
    return rows, known, named


def checker(world: SeamWorld, gamma: float, execute: int, history: int) -> Checker:
    limits = world.spec.action
    return Checker(world.log, gamma=gamma, execute=execute, low=limits.low, high=limits.high, history=history)
