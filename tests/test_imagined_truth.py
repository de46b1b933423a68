"""Imagination held against what is known: LQR's optimal gain, the value of a constant reward, and every method in the
true dynamics of a toy, which gives what it gives in the toy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from imagine_lab import SMALL, BegunAt, TrueModel, fitted, imagined, played

import lqr_lab
from burnish.finetune.build import has, prepare
from burnish.finetune.methods.rlpd import RLPDConfig
from burnish.finetune.table import METHODS
from burnish.finetune.world_model.env import Guard, GuardConfig, ImaginedEnv, Starts
from burnish.finetune.world_model.record import episodes_beside
from burnish.finetune.world_model.ticks import Tape
from burnish.offline.returns import Discount
from burnish.policies.controllers import controller_for
from burnish.policies.core.spec import agent_spec
from burnish.policies.core.types import VecEnv
from burnish.policies.core.wrapper import pictures_of
from burnish.policies.measure.evaluate import evaluate
from burnish.sim.experts.toy import FeedbackExpert
from burnish.sim.point_reach import PointReach, PointReachConfig, Reward
from burnish.sim.toy import ConstantReward
from seam import FITTED, make_base, shrunk
from seam import METHODS as LEARNING

# A person's methods play no imagined worlds, and grpo learns nothing from episodes that all fail, as most do here.
INSIDE = [name for name in LEARNING if name not in ("rlif", "dagger", "grpo")]
TOY = PointReachConfig(reward=Reward.sparse, goal_in_state=True, radius=0.4, max_steps=12)


def searched_gain(world: ImaginedEnv, gains: int = 32, rounds: int = 10) -> torch.Tensor:
    """K of u = -K x, by the cross-entropy method on what ``world`` pays; each gain plays in as many worlds."""
    dice = torch.Generator().manual_seed(0)
    mean, std, each = torch.zeros(2), torch.full((2,), 3.0), world.num_envs // gains
    for episode in range(rounds):
        tried = mean + std * torch.randn(gains, 2, generator=dice)
        state = world.reset(seeds=[1000 * episode + i % each for i in range(world.num_envs)])["state"]
        total = torch.zeros(world.num_envs)
        for tick in range(lqr_lab.CONFIG.max_steps):
            force = -(tried.repeat_interleave(each, 0) * state).sum(1, keepdim=True)
            step = world.step((force / lqr_lab.CONFIG.limit).clamp(-1, 1))
            state, total = step.obs["state"], total + lqr_lab.GAMMA**tick * step.reward
        best = tried[total.view(gains, each).mean(1).topk(gains // 5).indices]
        mean, std = best.mean(0), best.std(0)
    return mean


def test_the_gain_that_is_best_in_a_learnt_lqr_is_nearly_that_of_riccati():
    env = lqr_lab.worlds(16)
    ticks = played(env, 160)
    gain = searched_gain(imagined(fitted(env, ticks), ticks, 512, GuardConfig(Guard.none)))

    def excess(gain: torch.Tensor) -> float:
        """How many times the cost of the gain of Riccati's equation, in the world itself."""
        law = lqr_lab.lqr_law(lqr_lab.CONFIG, lqr_lab.GAMMA)
        mine, best = (
            lqr_lab.cost(FeedbackExpert(x, 256))
            for x in (lambda obs: (-(obs["state"] @ gain)[:, None] / lqr_lab.CONFIG.limit).clamp(-1, 1), law)
        )
        return mine / best

    assert excess(gain) < 1.05
    assert excess(0 * gain) > 1.5 and excess(3 * gain) > 1.05, "any gain would do"


@pytest.mark.slow
def test_a_cut_leaves_the_value_of_a_constant_reward_and_a_halt_does_not():
    """1 / (1 - gamma) is 5. The model is asked where every tick is beyond its limit."""
    world, values = ConstantReward(4), {}
    ticks = played(world, 20)
    for kind in (Guard.cut, Guard.halt):
        here = imagined(fitted(world, ticks, replace(SMALL, updates=1)), ticks, 4, GuardConfig(kind, penalty=1.0))
        here.limit = -1.0
        config = shrunk(RLPDConfig(discount=Discount(0.8)))
        learner = replace(config.sac, lr=2e-3, tau=0.1, alpha=1e-6, tune_alpha=False)
        loop = replace(config.loop, warmup=100, updates_per_decision=1.5, batch=32)
        made = prepare(replace(config, sac=learner, loop=loop), None, here, seed=1)
        for _ in range(125):
            made.iterate()
        values[kind] = made.learner.q_values(made.replay.sample(64)).detach()
    assert float((values[Guard.cut] - 5).abs().max()) < 0.5
    assert float((values[Guard.halt] + 1).abs().max()) < 0.5, "a halt pays minus its penalty, and nothing follows"


def test_an_imagined_episode_in_the_true_dynamics_is_the_real_one():
    tape = Tape(PointReach(4, TOY, seed=3), played(PointReach(2, TOY, seed=3), 5))
    begun, seeds, policy = tape.ticks.episodes, [5, 6, 7, 8], make_base("gaussian", agent_spec(tape.spec))
    lengths = torch.tensor(evaluate(tape, controller_for(policy, 4), seeds).lengths)
    a, b = lengths.topk(2).indices.tolist()
    here = ImaginedEnv(TrueModel(TOY), 2, GuardConfig(Guard.none))
    given = tape.ticks, [begun + a, begun + b], [seeds[a], seeds[b]]
    assert lengths[b] > 3
    names, pairs, courses = episodes_beside(here, here, controller_for(policy, 2), *given)
    assert names == ["state 0", "state 1", "state 2", "state 3"] and len(pairs) == 2
    draw = pictures_of(tape)
    assert draw is not None
    for pair, course in zip(pairs, courses, strict=True):
        assert len(course.real["state"]) == len(pair.real)
        assert torch.equal(draw(course.real), draw(course.imagined)), "the pictures are those of what was played"
        # The noise is the same, but products round otherwise for another number of rows.
        assert len(pair.real) == len(pair.imagined) and pair.succeeded[0] == pair.succeeded[1]
        assert torch.allclose(torch.tensor(pair.real), torch.tensor(pair.imagined), atol=1e-4)
    _, others, _ = episodes_beside(here, here, controller_for(policy, 2), *given[:2], [1, 2])
    assert others[0].imagined != pairs[0].imagined, "the noise is of no matter"


def learnt(name: str, env: VecEnv, base: Any) -> list[torch.Tensor]:
    """The policy after a few iterations in ``env``."""
    config = shrunk(METHODS[name].config(**FITTED.get(name, {})))
    loop = prepare(config, base, env, seed=1)
    for _ in range(8):
        loop.iterate()
    return [x.clone() for x in loop.learner.policy.state_dict().values()]


@pytest.mark.rotating(3)
@pytest.mark.parametrize("name", INSIDE)
def test_the_true_dynamics_teach_a_method_what_the_world_teaches(name):
    ticks = played(PointReach(4, TOY, seed=3), 40)

    def here() -> ImaginedEnv:
        options = {"starts": Starts.any, "seed": 4}
        return imagined(TrueModel(TOY), ticks, 4, GuardConfig(Guard.none, verify=True), **options)

    kinds = (None, "flow", "diffusion", "gaussian", "squashed")
    bases = [None if kind is None else make_base(kind, agent_spec(here().spec, 3)) for kind in kinds]
    base = next(x for x in reversed(bases) if has(x, METHODS[name].needs))
    imagining, playing = learnt(name, here(), base), learnt(name, BegunAt(here(), TOY), base)
    other = learnt(name, BegunAt(here(), replace(TOY, radius=0.8)), base)
    assert all(torch.equal(x, y) for x, y in zip(imagining, playing, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(imagining, other, strict=True)), "the world is of no matter"
