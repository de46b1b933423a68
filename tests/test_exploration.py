"""Exploration as an option: what each kind pays, in closed form; that it finds what play at random does not; and every
method of the table with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from verb_lab import refused

from burnish.finetune.baselines.sb3 import View
from burnish.finetune.build import has
from burnish.finetune.exploration.adversarial_surprise import AdversarialSurpriseConfig
from burnish.finetune.exploration.build import EXPLORATIONS, Exploration, Weighted
from burnish.finetune.exploration.novelty import Novelty, NoveltyConfig, novelty
from burnish.finetune.exploration.observed import ExploreConfig
from burnish.finetune.exploration.submodular import Submodular, SubmodularConfig, gain
from burnish.finetune.loops import OnPolicyConfig
from burnish.finetune.method import LoopKind
from burnish.finetune.methods.gaussian_ppo import GaussianPPOConfig
from burnish.finetune.ppo import PPOConfig
from burnish.finetune.refinement import FinetuneConfig, refinement
from burnish.finetune.table import METHODS, ONLINE
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.rewards import RewardMap
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, agent_spec
from burnish.policies.core.types import Obs, Step, VecEnv
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.nets.critic import ValueConfig
from burnish.sim.point_reach import PointReach, PointReachConfig, Reward
from burnish.sim.torch_world import TorchWorld
from burnish.sim.toy import ConstantReward, ConstantRewardConfig
from seam import FITTED, make_base, shrunk
from seam import METHODS as LEARNING

TOY = PointReachConfig(reward=Reward.sparse, goal_in_state=True, radius=0.4, max_steps=12)
CPU = torch.device("cpu")
FITTED = {**FITTED, "recap": {"head_start": 2}}


def spec(shape: int = 2) -> EnvSpec:
    return EnvSpec(ObsSpec({"state": (shape,), "goal": (3,)}), ActionSpec((-1.0,), (1.0,)), 10.0, "none", 40)


def seen(*rows: list[float]) -> Obs:
    return {"state": torch.tensor(rows), "goal": torch.full((len(rows), 3), 1e6)}


ALL = torch.ones(2, dtype=torch.bool)


def test_novelty_is_the_mean_distance_to_the_nearest():
    archive = torch.tensor([[0.0], [1.0], [10.0]])
    assert novelty(torch.tensor([[0.0], [4.0]]), archive, 2).tolist() == [0.5, 3.5]
    assert novelty(torch.tensor([[7.0]]), archive, 99).tolist() == [pytest.approx((7 + 6 + 3) / 3)]
    assert novelty(torch.ones(2, 1), archive[:0], 3).tolist() == [0, 0], "nothing was seen that it could differ from"
    assert novelty(archive, archive, 1, own=True).tolist() == [1, 1, 9], "none is its own neighbour"
    assert novelty(archive[:1], archive[:1], 1, own=True).tolist() == [0]


def test_the_archive_is_a_uniform_sample_of_what_was_seen_while_active():
    """Of 3000 states it keeps 500: a third of the sample is from each third, +- 5 deviations (10 each)."""
    kept = Novelty(NoveltyConfig(archive=500), spec(1), 2, CPU, seed=1)
    kept.begin(seen([0.0], [0.0]), ALL)
    for i in range(3000):
        paid = kept(
            seen([0.0], [0.0]), torch.zeros(2, 1), seen([float(i)], [float("nan")]), torch.tensor([True, False])
        )
        assert paid[1] == 0 and bool(paid.isfinite().all())
    assert kept.seen == 3002 and bool(kept.archive.isfinite().all())
    thirds = torch.histc(kept.archive[:, 0], 3, 0, 3000)
    assert bool(((thirds - 500 / 3).abs() < 53).all())


def test_the_gains_of_an_episode_add_up_to_the_log_determinant_of_what_it_visited():
    made, dice = Submodular(SubmodularConfig(features=16), spec(), 2, CPU, seed=1), torch.Generator().manual_seed(0)
    first = torch.randn(2, 2, generator=dice)
    obs = {"state": first}
    made.begin(obs, ALL)
    visited = [made.features(first)]
    before = torch.eye(16) + visited[0][:, :, None] * visited[0][:, None, :]
    total = torch.zeros(2)
    for _ in range(30):
        raw = torch.randn(2, 2, generator=dice)
        total += made(obs, torch.zeros(2, 1), {"state": raw}, ALL)
        visited.append(made.features(raw))
    phi = torch.stack(visited, 1).double()
    whole = torch.eye(16) + phi.mT @ phi
    expected = (torch.logdet(whole) - torch.logdet(before.double())) / 2
    assert torch.allclose(total.double(), expected, rtol=1e-3)
    kept = made.inverse[1].clone()
    made.begin(obs, torch.tensor([True, False]))
    assert torch.equal(made.inverse[1], kept) and float(made.inverse[0].diagonal().sum()) > 14, "a new episode"


def test_a_place_that_was_visited_pays_less_each_time_and_one_far_away_pays_in_full():
    features = torch.eye(3)[:1]
    inverse, paid = torch.eye(3)[None], []
    for _ in range(3):
        found, inverse = gain(inverse, features)
        paid.append(float(found))
    assert paid == pytest.approx([torch.tensor(x).log().item() / 2 for x in (2, 3 / 2, 4 / 3)])
    assert float(gain(inverse, torch.eye(3)[1:2])[0]) == pytest.approx(paid[0])


@dataclass
class CorridorConfig:
    """A corridor of 10 m, in which an action moves by at most 0.4 m in a tick."""

    max_steps: int = 40


class Corridor(TorchWorld[CorridorConfig]):
    """Its far end is paid, and each metre on the way there costs: a learner that never came there learns to stay."""

    Settings = CorridorConfig

    def _set_up(self) -> Any:
        world = EnvSpec(ObsSpec({"state": (1,)}), ActionSpec((-1.0,), (1.0,)), 10.0, "none", self.config.max_steps)
        return world, {"x": torch.zeros(self.num_envs, 1)}

    def reset(self, mask: Any = None, seeds: Any = None) -> Obs:
        mask = self._clock.begin(mask, seeds)
        self._state = {"x": self._state["x"].masked_fill(mask[:, None], 0.0)}
        return {"state": self._state["x"]}

    def step(self, action: Any, active: Any = None) -> Step:
        new = (self._state["x"] + 0.4 * action.clamp(-1, 1)).clamp(0, 10)
        active = self._clock.advance(active)
        self._state = {"x": torch.where(active[:, None], new, self._state["x"])}
        x = self._state["x"][:, 0]
        there, late = x > 9, self._clock.tick >= self.config.max_steps
        return Step({"state": x[:, None]}, 5.0 * there - 0.02 * x, there, late & ~there, {"success": there})


def reached(explore: ExploreConfig | None, seed: int = 0) -> float:
    """Share of the episodes that come to the far end, of the last 3 of 18 updates of PPO."""
    agent, value = GaussianConfig(hidden=[32], zero_last=True), ValueConfig(hidden=[32])
    method = GaussianPPOConfig(agent, ppo=PPOConfig(lr=1e-3, value=value), loop=OnPolicyConfig(40))
    config = FinetuneConfig(method=method, explore=explore, total=10**6, seed=seed)
    _, loop = refinement(config, None, Corridor(16, seed=seed), tried=False)
    for i in range(18):
        if i == 15:
            loop.report()
        loop.iterate()
    return float(loop.report()["episode/success"])


@pytest.mark.slow
def test_novelty_comes_where_the_reward_leads_away_from():
    """Over seeds 0 to 4: 0 without it, and at least .99 with it."""
    assert reached(NoveltyConfig(weight=0.6)) > 0.9
    assert reached(None) < 0.1


class Modular(Submodular):
    """As much for each state as if no other had been visited."""

    def _visit(self, raw: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        found = super()._visit(raw, rows)
        self.inverse[:] = torch.eye(len(self.phase))
        return found


@pytest.mark.slow
def test_coverage_leads_on_and_the_same_pay_for_each_state_does_not(monkeypatch):
    """Over seeds 0 to 3: .97, .53, .8 and .97, and with equal pay 0, .1, 0 and 0."""
    assert reached(SubmodularConfig(weight=1.0)) > 0.5
    monkeypatch.setitem(EXPLORATIONS, "submodular", Exploration(SubmodularConfig, Modular))
    assert reached(SubmodularConfig(weight=1.0)) < 0.2


# ---- every kind in every method ----

KINDS = {name: row.config() for name, row in EXPLORATIONS.items() if not row.twin}
SMALL = PPOConfig(epochs=1, value=ValueConfig(hidden=[8]))
KINDS["adversarial_surprise"] = AdversarialSurpriseConfig(turn=2, agent=GaussianConfig(hidden=[8]), ppo=SMALL)
REFUSED = {name for name, row in METHODS.items() if row.loop is LoopKind.imagined} | {"dagger", "rlif", "serene"}
BASES = (None, "flow", "diffusion", "gaussian", "squashed")


def loop_of(name: str, explore: ExploreConfig | None, world: VecEnv) -> Any:
    kinds = [None if kind is None else make_base(kind, agent_spec(world.spec, 3)) for kind in BASES]
    base = next(x for x in reversed(kinds) if has(x, METHODS[name].needs))
    method = shrunk(METHODS[name].config(**FITTED.get(name, {})))
    return refinement(FinetuneConfig(method=method, explore=explore, total=10**6), base, world, tried=False)[1]


def weights(loop: Any) -> list[torch.Tensor]:
    return [x.clone() for x in loop.learner.policy.state_dict().values()]


@pytest.mark.rotating(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in LEARNING if name not in REFUSED])
def test_every_method_learns_from_what_exploration_pays_and_resumes_to_the_same_end(name, kind):
    loop, plain, again = (loop_of(name, x, PointReach(4, TOY)) for x in (KINDS[kind], None, KINDS[kind]))
    for i in range(8):
        if i == 4:
            again.load_state_dict(loop.state_dict())
        for each in (loop, plain) if i < 4 else (loop, plain, again):
            each.iterate()
    assert loop.report()["bonus"] > 0 and "bonus" not in plain.report()
    assert all(map(torch.equal, weights(loop), weights(again)))
    assert not all(map(torch.equal, weights(loop), weights(plain))), "it makes no difference"


def test_another_library_is_paid_too():
    method = ONLINE["sb3"](view=View.plain, settings={"learning_starts": 8, "batch_size": 8})
    loop = refinement(FinetuneConfig(method=method, explore=NoveltyConfig(), total=64), None, PointReach(4, TOY))[1]
    loop.iterate()
    assert loop.report()["bonus"] > 0


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_method_that_does_not_learn_from_rewards_refuses_it(name):
    with pytest.raises(BurnishError, match=f"method={name} .*leave"):
        refinement(FinetuneConfig(method=ONLINE[name](), explore=NoveltyConfig()), None, PointReach(4, TOY))


def test_recordings_and_worlds_without_numbers_are_refused(capsys):
    words = ["finetune", "method=rlpd", "env=point_reach", "explore=novelty"]
    assert "leave data= or explore= out" in refused(capsys, *words, "data=somewhere")
    assert "explore.numbers=[7] must be places from 0 to 1" in refused(capsys, *words, "explore.numbers=[7]")
    blind = EnvSpec(ObsSpec({"image.top": (3, 8, 8)}), ActionSpec((-1.0,), (1.0,)), 10.0, "none", 40)
    with pytest.raises(BurnishError, match=r"shows image.top; leave explore= out"):
        Novelty(NoveltyConfig(), blind, 2, CPU, seed=0)


def test_several_processes_are_refused():
    """Each would know of what it saw alone, and forget it with every resume."""
    with pytest.raises(BurnishError, match=r"one process alone, and processes=3 are several; take processes=1"):
        FinetuneConfig(method=ONLINE["rlpd"](), explore=NoveltyConfig(), processes=3)


def test_a_chunk_earns_the_discounted_bonus_of_its_ticks_and_the_weight_fades():
    class One:
        begin = staticmethod(lambda obs, mask: None)

        def __call__(self, obs, action, next_obs, active):
            return torch.ones(len(action))

    bonus = Weighted(One(), NoveltyConfig(weight=0.5, fade=8))
    env = ChunkEnv(RewardMap(ConstantReward(2, ConstantRewardConfig(max_steps=3)), scale=2.0, bonus=bonus), 4, 0.9)
    env.reset()
    outcome = env.step(torch.zeros(2, 4, 1))
    paid = [0.5, 0.5 * 6 / 8, 0.5 * 4 / 8]  # an episode has three ticks, each of two worlds
    assert outcome.info["bonus"].tolist() == pytest.approx([sum(paid)] * 2)
    assert outcome.reward.tolist() == pytest.approx([sum(0.9**i * (2 + x) for i, x in enumerate(paid))] * 2)


def test_what_has_faded_is_not_computed():
    class Counted:
        begun = asked = 0

        def begin(self, obs, mask):
            self.begun += 1

        def __call__(self, obs, action, next_obs, active):
            self.asked += 1
            return torch.ones(len(action))

    bonus: Any = Counted()
    env = RewardMap(ConstantReward(2, ConstantRewardConfig(max_steps=3)), bonus=Weighted(bonus, NoveltyConfig(fade=8)))
    paid = []
    for _ in range(4):
        env.reset()
        paid += [float(env.step(torch.zeros(2, 1)).info["bonus"].sum()) for _ in range(3)]
    assert [x > 0 for x in paid] == [True] * 4 + [False] * 8
    assert (bonus.asked, bonus.begun) == (4, 2)
