"""explore=adversarial_surprise: whose turn it is, what it pays, and noise that traps novelty. Surprise itself has its
slow check in `mutant_checks.py`."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from burnish.finetune.exploration.adversarial_surprise import (
    AdversarialSurprise,
    AdversarialSurpriseConfig,
    Span,
)
from burnish.finetune.exploration.novelty import NoveltyConfig
from burnish.finetune.exploration.observed import ExploreConfig
from burnish.finetune.loops import OnPolicyConfig
from burnish.finetune.methods.gaussian_ppo import GaussianPPOConfig
from burnish.finetune.ppo import PPOConfig
from burnish.finetune.refinement import FinetuneConfig, refinement
from burnish.offline.sources import Rows
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.execute import Execution
from burnish.policies.core.seed import normal
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.core.tree import leaves
from burnish.policies.core.types import Obs, Step
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.nets.critic import ValueConfig
from burnish.sim.torch_world import TorchWorld

PPO = PPOConfig(epochs=4, lr=2e-3, value=ValueConfig(hidden=[32]))
AGENT = GaussianConfig(hidden=[32], zero_last=True, init_std=0.6)


def settings(**changes: Any) -> AdversarialSurpriseConfig:
    return AdversarialSurpriseConfig(**{"weight": 1.0, "turn": 8, "agent": AGENT, "ppo": PPO, **changes})


@dataclass
class CorridorConfig:
    max_steps: int = 32


class Corridor(TorchWorld[CorridorConfig]):
    """From -2 m to 3 m, and a screen of 8 numbers. Within 1 m of the beginning it shows noise, which two ticks of
    walking leave behind. Beyond 2 m it shows weaker noise, and mud there slows every step to a tenth."""

    Settings = CorridorConfig

    def _set_up(self) -> Any:
        spec = EnvSpec(ObsSpec({"state": (9,)}), ActionSpec((-1.0,), (1.0,)), 10.0, "none", self.config.max_steps)
        return spec, {"x": torch.zeros(self.num_envs, 1)}

    def _observe(self) -> Obs:
        x = self._state["x"]
        noise = normal((self.num_envs, 8), self._clock.noise("screen"))
        return {"state": torch.cat([x, noise * ((x.abs() < 1) + 0.5 * (x > 2))], 1)}

    def reset(self, mask: Any = None, seeds: Any = None) -> Obs:
        mask = self._clock.begin(mask, seeds)
        self._state = {"x": self._state["x"].masked_fill(mask[:, None], 0.0)}
        return self._observe()

    def step(self, action: Any, active: Any = None) -> Step:
        x, active = self._state["x"], self._clock.advance(active)
        moved = x + 0.5 * action.clamp(-1, 1) * torch.where(x > 2, 0.1, 1.0)
        self._state = {"x": torch.where(active[:, None], moved.clamp(-2, 3), x)}
        late = self._clock.tick >= self.config.max_steps
        return Step(self._observe(), 0.0 * late, torch.zeros_like(late), late, {})


def world(worlds: int = 4, seed: int = 0, length: int = 32, **changes: Any) -> Any:
    return AdversarialSurprise(settings(**changes), Corridor(worlds, CorridorConfig(length), seed=seed), seed)


# ---- the noise of a screen ----


def played(explore: ExploreConfig, seed: int, learns: bool = True) -> tuple[float, float, Any]:
    """Shares of the decisions in the room of noise and in the mud, of the last 5 of 20 updates of PPO; and the
    world."""
    method = GaussianPPOConfig(AGENT, ppo=PPO, loop=OnPolicyConfig(16))
    config = FinetuneConfig(method=method, explore=explore, total=10**6, seed=seed)
    _, loop = refinement(config, None, Corridor(64, seed=seed), tried=False)
    learner: Any = loop.learner
    env: Any = loop.env
    while not isinstance(env, Corridor):
        env = env.env
        if isinstance(env, AdversarialSurprise):
            found = env
            if not learns:
                env.learner.update = lambda source: {}  # type: ignore[method-assign]
    x = []
    for i in range(20):
        batch = loop.play()  # type: ignore[attr-defined]
        learner.update(Rows(batch))
        x += [batch["obs"]["state"][..., 0]] if i >= 15 else []
    where = torch.stack(x)
    return float((where.abs() < 1).float().mean()), float((where > 2).float().mean()), locals().get("found")


@pytest.mark.slow
def test_noise_that_can_be_left_traps_novelty_and_not_who_plays_against_control():
    """Over seeds 0 to 3, of the last 10 updates: mud .32 to .51, noise .26 to .40; where Control does not learn and
    with novelty mud at most .01, noise .9 and more."""
    noise, mud, env = played(settings(density=Span.turn), 0)
    assert mud > 0.4 and noise < 0.4
    obs = env.reset()
    after, _, left = env._turn(obs, torch.ones(64, dtype=torch.bool))
    assert float((after["state"][:, 0].abs() > 1).float().mean()) > 0.8, "Control leads away from the noise"
    noise, mud, env = played(settings(density=Span.turn), 0, learns=False)
    assert noise > 0.7 and mud < 0.1
    assert float(env._turn(env.reset(), torch.ones(64, dtype=torch.bool))[2].mean()) > float(left.mean()) + 0.5
    noise, mud, _ = played(NoveltyConfig(weight=1.0), 0)
    assert noise > 0.7 and mud < 0.1


# ---- its parts ----


class Told(AdversarialSurprise):
    """Who moved, as a sequence of the actions of world 0."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        step, self.moves = self.env.step, list[str]()

        def told(action: Any, active: Any = None) -> Step:
            if active is None or bool(active[0]):
                self.moves.append("E" if float(action[0, 0]) == 0.125 else "C")
            return step(action, active)

        self.env.step = told  # type: ignore[method-assign]


def test_they_take_turns_within_an_episode_and_the_last_tick_of_a_turn_is_paid():
    env: Any = Told(settings(turn=3, free=0.0), Corridor(2, CorridorConfig(10)), 0)
    env.reset()
    paid, late = [], False
    while not late:
        step = env.step(torch.full((2, 1), 0.125))
        paid.append(float(step.info["bonus"][0]))
        assert float(step.reward[0]) == paid[-1]
        late = bool(step.truncated[0])
    assert "".join(env.moves) == "EEECCCEEEC", "the episode of 10 ticks ends in Control's turn"
    assert [x != 0 for x in paid] == [False, False, True] * 2
    assert float(step.obs["state"][0, 0]) != float(env.env._state["x"][0, 0]), "it is cut where the method's turn ended"
    env.reset()
    assert env.played.tolist() == [0, 0]


def test_behind_the_last_tick_of_control_the_next_turn_begins():
    """Its value there is bootstrapped, and it learns of no time at which a turn is over."""
    env = world(2, turn=4)
    env._turn(env.reset(), torch.tensor([True, False]))
    times = [(float(x["obs"]["turn"][0, 0]), float(x["outcome"]["obs"]["turn"][0, 0])) for x in env.turns]
    assert times == [(0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 0.0)]


def test_worlds_have_turns_of_their_own_and_those_that_rest_are_not_touched():
    env = world(2, turn=2)
    env.reset()
    first = torch.tensor([True, False])
    for _ in range(2):
        env.step(torch.zeros(2, 1), first)
    assert env.env._clock.tick.tolist() == [4, 0] and env.played.tolist() == [0, 0]
    assert float(env.density[0, 0, 0]) == 2 and float(env.density[0, 1, 0]) == 1, "one of two ticks is free"
    step = env.step(torch.zeros(2, 1))
    assert env.played.tolist() == [1, 1] and step.info["bonus"].tolist() == [0, 0]


def test_a_density_of_an_episode_is_surprised_by_what_is_far_from_earlier_turns_and_one_of_a_turn_is_not():
    def second(density: Span, x: float) -> float:
        env = world(1, turn=16, length=99, density=density)
        env.observed.absorb = lambda raw: None  # type: ignore[method-assign]
        env.observed.moments = torch.tensor([[1.0], [0.0], [1.0]], dtype=torch.float64).repeat(1, 9)
        env.scale.half, env.scale.low, env.scale.high = (0 * z for z in (env.scale.half, env.scale.low, env.scale.high))
        env.reset()
        for place in (1.5, x):
            env.env._state = {"x": torch.tensor([[place]])}
            found = env._turn(env.env._observe(), torch.ones(1, dtype=torch.bool))[2]
        return float(found)

    same, apart = second(Span.episode, 1.5), second(Span.episode, -1.9)
    assert apart > same + 0.3
    assert second(Span.turn, -1.9) == pytest.approx(second(Span.turn, 1.5), abs=0.1)


def test_when_the_weight_has_faded_control_plays_no_more():
    env = world(2, turn=2, fade=6)
    env.reset()
    for _ in range(9):
        env.step(torch.zeros(2, 1))
    assert env.env._clock.tick.tolist() == [9 + 2, 9 + 2], "of one turn, behind the 4th of 6 ticks"


def test_a_resumed_game_equals_one_that_went_on():
    whole, other = world(3, turn=2), world(3, turn=2)
    whole.reset()
    for i in range(17):
        if i == 9:
            other.load_state_dict(copy.deepcopy(whole.state_dict()))
        given = torch.full((3, 1), 0.1), torch.tensor([True, True, i % 3 > 0])
        bonus = whole.step(*given).info["bonus"]
        assert i < 9 or torch.equal(bonus, other.step(*given).info["bonus"])
    mine, theirs = (env.learner.state_dict() for env in (whole, other))
    assert mine["updates"] > 1 and all(map(torch.equal, mine["actor"].values(), theirs["actor"].values()))


def test_turns_that_control_has_not_learnt_from_go_where_they_are_loaded():
    whole, other = world(3, turn=2), world(3, turn=2)
    whole.reset()
    for _ in range(2):
        whole.step(torch.zeros(3, 1), torch.tensor([True, False, False]))
    assert whole.turns
    other.device = torch.device("meta")
    other.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert {x.device.type for tick in other.turns for x in leaves(tick)} == {"meta"}


@pytest.mark.parametrize("given", [{"scale_reward": True}, {"execution": Execution.cudagraph}])
def test_what_needs_the_same_number_of_turns_each_time_is_refused(given):
    """Where episodes end differently, more turns than there are worlds come together before Control learns."""
    with pytest.raises(BurnishError, match=f"explore.ppo.{next(iter(given))}="):
        settings(ppo=replace(PPO, **given))


@pytest.mark.parametrize("given", [{"turn": 0}, {"free": 1.0}, {"gamma": 1.5}])
def test_what_makes_no_sense_is_refused(given):
    with pytest.raises(BurnishError, match=f"explore.{next(iter(given))}="):
        settings(**given)
