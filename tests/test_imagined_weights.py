"""Weights of rows, which the guard of an imagined world may give: what they mean to each kind of learner."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from burnish.finetune.build import has, prepare
from burnish.finetune.method import LoopKind
from burnish.finetune.methods.imagine import ImagineConfig
from burnish.finetune.methods.mbpo import MBPOConfig
from burnish.finetune.methods.rlpd import RLPDConfig
from burnish.finetune.rollout import Rollout
from burnish.finetune.table import METHODS, method_of
from burnish.finetune.world_model.env import Guard, GuardConfig
from burnish.offline.learner import Wrapping
from burnish.offline.sources import Mapped, Rows
from burnish.offline.td import row_weight
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import agent_spec
from burnish.policies.core.types import Step
from burnish.sim.point_reach import PointReach, PointReachConfig, Reward
from seam import METHODS as LEARNING
from seam import make_base, shrunk

TASK = PointReachConfig(reward=Reward.distance, goal_in_state=True, radius=0.15, max_steps=40)


def world(num_envs: int) -> ScaledEnv:
    return ScaledEnv(PointReach(num_envs, TASK, seed=5))


class Doubtful:
    """A world of one tick at a time, which says how far it is to be believed."""

    def __init__(self):
        env = world(2)
        self.env, self.num_envs, self.device, self.spec = env, 2, env.device, env.spec
        self.weights = iter([[1.0, 0.2], [0.5, 0.9]])

    def reset(self, mask=None, seeds=None):
        return self.env.reset(mask, seeds)

    def step(self, action, active=None) -> Step:
        step = self.env.step(action, active)
        return step._replace(info={**step.info, "weight": torch.tensor(next(self.weights))})


def test_a_decision_is_believed_as_far_as_its_worst_tick():
    env = ChunkEnv(Doubtful(), 2, 0.9)
    env.reset()
    outcome = env.step(torch.zeros(2, 2, 2))
    assert outcome.weight.tolist() == pytest.approx([0.5, 0.2])
    assert outcome._replace(info={}).weight.tolist() == [1.0, 1.0]
    columns = {"terminated": torch.tensor([False, False]), "steps": torch.tensor([2, 1])}
    assert row_weight({**columns, "weight": outcome.weight}, 2).tolist() == [0.5, 0.0]
    rollout = Rollout(1, 2)
    rollout.add({"state": torch.zeros(2, 1)}, {}, outcome)
    assert torch.equal(rollout.batch()["weight"][0], outcome.weight)


WEIGHED = [name for name, row in LEARNING.items() if row.weighs and row.loop is LoopKind.off_policy]


@pytest.mark.rotating(4)
@pytest.mark.parametrize("name", WEIGHED)
def test_a_row_without_weight_teaches_a_critic_nothing(name):
    env = world(4)
    kinds = (None, "flow", "squashed")
    bases = [None if kind is None else make_base(kind, agent_spec(env.spec, 3)) for kind in kinds]
    base = next(x for x in reversed(bases) if has(x, METHODS[name].needs))
    loop: Any = prepare(shrunk(METHODS[name].config()), base, env, seed=0)
    for _ in range(5):
        loop.iterate()
    before = copy.deepcopy(loop.state_dict())

    def taught(reward: float, weight: float) -> torch.Tensor:
        def told(batch: dict[str, Any]) -> dict[str, Any]:
            odd = torch.arange(len(batch["reward"])) % 2 == 1
            given = torch.where(odd, torch.tensor(weight), torch.tensor(1.0))
            return {**batch, "reward": torch.where(odd, torch.tensor(reward), batch["reward"]), "weight": given}

        loop.load_state_dict(copy.deepcopy(before))
        loop.learner.update(Mapped(loop.source, told))
        core: Any = loop.learner
        while isinstance(core, Wrapping):
            core = core.inner
        judge = core.value if name == "recap" else core.critic.online
        return torch.cat([x.flatten() for x in judge.parameters()]).detach()

    assert torch.allclose(taught(0.0, 0.0), taught(100.0, 0.0), atol=1e-6)
    assert not torch.allclose(taught(0.0, 1.0), taught(100.0, 1.0), atol=1e-6)


def test_ppo_learns_nothing_from_rows_without_weight():
    loop: Any = prepare(shrunk(METHODS["gaussian_ppo"].config()), None, world(2), seed=0)
    rollout = Rollout(6, 2)
    for _ in range(6):
        obs, _, columns, outcome = loop.decide(warm=False)
        rollout.add(obs, columns, outcome)
    learner, batch = loop.learner, rollout.batch()
    weights = [learner.network, learner.value]

    def moved(weight: float) -> bool:
        before = [x.clone() for part in weights for x in part.parameters()]
        learner.update(Rows({**batch, "weight": torch.full((6, 2), weight)}))
        after = [x for part in weights for x in part.parameters()]
        return any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))

    assert not moved(0.0) and moved(1.0)


def test_methods_that_count_all_rows_alike_are_refused():
    guard = GuardConfig(Guard.weight)
    assert method_of(ImagineConfig(RLPDConfig(), guard=guard)).view is METHODS["rlpd"].view
    bare = {**METHODS.ours, "rlpd": METHODS["rlpd"].changed(weighs=False)}
    for kind in (ImagineConfig, MBPOConfig):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(METHODS, "ours", bare)
            with pytest.raises(BurnishError, match="inner=rlpd counts all alike; take"):
                method_of(kind(RLPDConfig(), guard=guard))
            method_of(kind(RLPDConfig(), guard=GuardConfig(Guard.cut)))
