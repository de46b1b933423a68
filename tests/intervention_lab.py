"""A world in which a person plays known ticks and only what they do is rewarded; every method on it, and an ear.

Whatever a learner is told of rewards shows whether it takes the person's deeds for its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from burnish.finetune.build import prepare
from burnish.finetune.loops import OffPolicy
from burnish.finetune.people.intervened_rows import InterventionUse
from burnish.finetune.people.interventions import Demonstrations
from burnish.finetune.table import ONLINE, method_of
from burnish.offline.sources import Mapped
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, agent_spec
from burnish.policies.core.types import Obs, Step
from burnish.policies.flow import FlowConfig, FlowPolicy
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig

LENGTH, EXECUTE = 7, 2  # ticks of an episode, whose last chunk is cut short; ticks of a decision
TAKEN = (2, 3, 5)  # ticks that the person plays in world 0: one whole decision, and half of another
DEED, RICHES = 0.75, 1000.0  # what they play, and what it earns; nothing else earns anything
CREDIT = RICHES / 10  # between what values of a fresh critic come to and what a credit would


class Robot:
    """``told``: the world says who played (None: nobody ever takes over, and it says so)."""

    device = torch.device("cpu")
    supervisor = object()

    def __init__(self, num_envs: int = 1, told: bool | None = True, taken: Sequence[int] = TAKEN) -> None:
        self.num_envs, self.told, self.taken = num_envs, told, taken
        limits = ActionSpec((-1.0,), (1.0,))
        self.spec = EnvSpec(ObsSpec({"state": (2,)}), limits, 10.0, "test", LENGTH)
        self.tick = torch.zeros(num_envs, dtype=torch.int64)
        self.theirs = self.all = 0

    def reset(self, mask: Tensor | None = None, seeds: Sequence[int] | None = None) -> Obs:
        self.tick = torch.zeros_like(self.tick) if mask is None else self.tick.masked_fill(mask, 0)
        return self._obs()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        active = torch.ones(self.num_envs, dtype=torch.bool) if active is None else active
        first = torch.arange(self.num_envs) == 0
        theirs = first & torch.isin(self.tick, torch.tensor(self.taken)) & (self.told is not None)
        called = first & torch.isin(self.tick + 1, torch.tensor(self.taken)) & ~theirs & (self.told is not None)
        self.theirs, self.all = self.theirs + int((theirs & active).sum()), self.all + int(active.sum())
        self.tick = self.tick + active
        executed = torch.where(theirs[:, None], torch.full_like(action, DEED), action.clamp(-1, 1))
        facts = {"intervened": theirs, "called": called} if self.told is not False else {}
        ends = torch.zeros(self.num_envs, dtype=torch.bool)
        return Step(self._obs(), RICHES * theirs, ends, self.tick >= LENGTH, {"executed": executed, **facts})

    def _obs(self) -> Obs:
        return {"state": torch.stack([self.tick / LENGTH, torch.arange(self.num_envs)], 1).float()}

    def state_dict(self) -> dict[str, Any]:
        return {"tick": self.tick}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tick = state["tick"]


def base(world: Any) -> FlowPolicy:
    torch.manual_seed(0)
    net = DenoiserConfig(mlp=MlpBodyConfig(hidden=[8], time_dim=4))
    return FlowPolicy(agent_spec(world.spec, execute=EXECUTE), FlowConfig(steps=2, net=net))


LOOP = {"warmup": 4, "initial_updates": 0, "batch": 32, "updates_per_decision": 1.0, "n_step": 2}
SLOW = {"lr": 1e-3, "actor_lr": 1e-3, "actor_every": 1}
CHUNK = {"horizon": EXECUTE, "execute": EXECUTE}
AGENT = {"agent": {"hidden": [8]}, "critic": {"members": 2, "hidden": [8]}}
PLAIN_PPO = {"epochs": 1, "minibatch": 8, "normalize": "none", "scale_reward": False, "value": {"hidden": [8]}}
ON_POLICY = {"ppo": PLAIN_PPO, "loop": {"decisions_per_update": 16}}
SEARCH = {"samples": 8, "prior_samples": 2, "elites": 2, "steps": 1}
LATENT = {"latent": 8, "encoder_hidden": [8], "hidden": [8], "bins": 11}
# Every method that people may interrupt, in its variants: (name, whether it needs a base, settings).
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "dppo": ("dppo", True, {**ON_POLICY, "trained_steps": 2}),
    "reinflow": ("reinflow", True, ON_POLICY),
    "flow_sde": ("flow_sde", True, ON_POLICY),
    "gaussian_ppo": ("gaussian_ppo", False, {**ON_POLICY, "execute": EXECUTE}),
    "residual_ppo": ("residual_ppo", True, ON_POLICY),
    "rpd": ("rpd", True, {**ON_POLICY, "execute": EXECUTE}),
    "dsrl": ("dsrl", True, {"loop": LOOP, "sac": {**SLOW, **AGENT}}),
    "dsrl_aliased": ("dsrl", True, {"variant": "aliased", "loop": LOOP, "sac": {**SLOW, **AGENT}}),
    "residual_td3": ("residual_td3", True, {"loop": LOOP, "td3": {**SLOW, **AGENT}}),
    "residual_sac": ("residual_td3", True, {"algorithm": "sac", "loop": LOOP, "sac": {**SLOW, **AGENT}}),
    "rfs": ("rfs", True, {"loop": LOOP, "sac": {**SLOW, **AGENT}}),
    "expo": ("expo", True, {"loop": LOOP, **SLOW, "edit": {"hidden": [8]}, "critic": AGENT["critic"], "count": 2}),
    "rlpd": ("rlpd", False, {"execute": EXECUTE, "loop": LOOP, "sac": {**SLOW, **AGENT}}),
    "rlpd_td3": ("rlpd", False, {"algorithm": "td3", "execute": EXECUTE, "loop": LOOP, "td3": {**SLOW, **AGENT}}),
    "tdmpc": ("tdmpc", False, {"loop": {**LOOP, "n_step": 1}, "agent": {**SEARCH, "model": LATENT}}),
    "rlif": ("rlif", False, {"execute": EXECUTE, "loop": {**LOOP, "n_step": 1}, "sac": {**SLOW, **AGENT}}),
    "dagger": ("dagger", True, {"loop": {"batch": 32, "prior_share": 1.0}}),
    "iql": ("iql", False, {"chunk": CHUNK, "loop": LOOP, "lr": 1e-3, "gaussian": {"hidden": [8]}}),
    "cql": ("cql", False, {"chunk": CHUNK, "loop": LOOP, "count": 2, **AGENT}),
    "td3_bc": ("td3_bc", False, {"chunk": CHUNK, "loop": LOOP, **SLOW, **AGENT}),
    "fql": ("fql", True, {"loop": LOOP, "one_step": {"hidden": [8]}, "critic": AGENT["critic"]}),
    "recap": (
        "recap",
        False,
        {
            "chunk": CHUNK,
            "loop": {**LOOP, "n_step": 1},
            "head_start": 2,
            "value": {"hidden": [8]},
            "flow": {"net": {"mlp": {"hidden": [16]}}},
        },
    ),
    "q_chunking": ("q_chunking", True, {"loop": LOOP, "critic": AGENT["critic"], "count": 2}),
}
TAUGHT = {"rlif", "dagger"}


def changed(config: Any, settings: dict[str, Any]) -> Any:
    """Nested settings over the defaults of each method."""
    made = {}
    for name, value in settings.items():
        now = getattr(config, name)
        nested = is_dataclass(now) and isinstance(value, dict)
        made[name] = changed(now, value) if nested else type(now)[value] if isinstance(now, Enum) else value
    return replace(config, **made)


def configured(case: str) -> Any:
    name, _, settings = CASES[case]
    return changed(ONLINE[name](), settings)


def meaning(case: str) -> InterventionUse:
    return method_of(configured(case)).interventions


def prepared(case: str, world: Any) -> Any:
    _, based, _ = CASES[case]
    return prepare(configured(case), base(world) if based else None, world, probe=False, seed=1)


def listened(loop: Any) -> list[dict[str, Tensor]]:
    """Whatever the learner of ``loop`` will be told: reward or return, and the action that it holds responsible."""
    told: list[dict[str, Tensor]] = []
    if isinstance(loop, OffPolicy):
        learn = loop.learner.update
        inner = getattr(loop.learner, "inner", None) if isinstance(loop.prior, Demonstrations) else None

        def listen(batch: dict[str, Any]) -> dict[str, Any]:
            told.append({"worth": batch["reward"], "action": batch.get("executed", batch["action"])})
            return batch

        def update(source: Any) -> Any:
            return learn(Mapped(source, listen))

        if inner is None:
            loop.learner.update = update
        else:  # it makes rewards of its own of what people did
            learn, inner.update = inner.update, update
    else:
        ppo = loop.learner if hasattr(loop.learner, "_descend") else loop.learner.ppo
        for kind, descend in list(ppo._descend.items()):

            def descent(rows: dict[str, Any], descend: Any = descend) -> Any:
                told.append({"worth": torch.maximum(rows["target"], rows["advantage"]), "state": rows["obs"]["state"]})
                return descend(rows)

            ppo._descend[kind] = descent
    return told


def play(loop: Any, decisions: int = 64) -> dict[str, float]:
    for _ in range(-(-decisions // loop.decisions_per_iteration)):
        loop.iterate()
    return {name: float(x) for name, x in loop.report().items()}


def credited(told: list[dict[str, Tensor]]) -> bool:
    """Whether anything of what the person earned was told of an action that was not theirs."""
    theirs = [(rows.get("action", torch.zeros(len(rows["worth"]), 1, 1)) == DEED).flatten(1).any(1) for rows in told]
    return any(bool((rows["worth"][~mask] > CREDIT).any()) for rows, mask in zip(told, theirs, strict=True))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other
