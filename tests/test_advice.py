"""The traps that an agent may learn to sit in: they are there, the advice names them, and what it advises helps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asynchronous_lab import PLAIN, Telling, Threads, telling, together
from burnish.finetune.advice import EPISODES, advised, entropy_trap, putting_off, waiting
from burnish.finetune.build import prepare
from burnish.finetune.loops import OffPolicy, OffPolicyConfig
from burnish.finetune.methods.dsrl import DSRLConfig, latent_sac
from burnish.finetune.methods.residual_td3 import ResidualTD3Config
from burnish.offline.returns import Discount, Per
from burnish.offline.sac import soft_agent
from burnish.policies.controllers import controller_for
from burnish.policies.core.rewards import RewardMap
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import PolicySpec
from burnish.policies.core.types import Obs, Step
from burnish.policies.core.wrapper import Wrapper
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.measure.evaluate import evaluate, evaluation_seeds
from burnish.policies.nets.critic import CriticConfig
from burnish.sim.point_reach import PointReach, PointReachConfig, Reward

WORLD = PointReachConfig(reward=Reward.sparse, goal_in_state=True, max_steps=24, radius=0.1)
WORLDS = 8


def world(num_envs: int = WORLDS, seed: int = 0, **changes: Any) -> ScaledEnv:
    return ScaledEnv(PointReach(num_envs, PointReachConfig(**{**vars(WORLD), **changes}), seed=seed))


def base() -> CallablePolicy:
    """Goes towards the goal for 4 ticks at half the speed, blown about by its noise; one of four episodes arrives."""
    spec = world(1).spec

    def towards(obs: Obs, noise: Tensor) -> Tensor:
        way = obs["state"][:, 2:] - obs["state"][:, :2]
        way = way / way.norm(dim=1, keepdim=True).clamp(min=0.05)
        return (0.5 * way[:, None] + 0.7 * noise).expand(-1, 4, 2)

    return CallablePolicy(towards, PolicySpec(spec.obs, spec.action, 4, 4, noise_shape=(1, 2)))


def steered(seed: int = 0, env: Any = None, shift: float = 0.0, **changes: Any) -> OffPolicy[Any]:
    """DSRL with the temperature and the entropy in the target that it begins with by default."""
    sizes: dict[str, Any] = {"agent": soft_agent(hidden=[64, 64]), "critic": CriticConfig(hidden=[64, 64])}
    config = DSRLConfig(
        discount=Discount(0.97, Per.chunk),
        loop=OffPolicyConfig(warmup=500, updates_per_decision=0.5, batch=128),
        sac=latent_sac(lr=1e-3, actor_lr=1e-3, **sizes, **changes),
    )
    loop = prepare(config, base(), RewardMap(env or world(seed=seed), shift=shift), seed=seed, probe=False)
    assert isinstance(loop, OffPolicy)
    return loop


def played(loop: OffPolicy, decisions: int) -> OffPolicy[Any]:
    for _ in range(decisions // WORLDS):
        loop.iterate()
    return loop


def success(policy: Any) -> float:
    return evaluate(world(50), controller_for(policy, 50), evaluation_seeds(200)).summary()["success_rate"]


OTHERS = [pytest.mark.slow, pytest.mark.rotating(2)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=OTHERS) for seed in (1, 2))])
def test_the_trap_and_the_way_out_of_it(seed):
    """Success after 4000 decisions in 15 recorded seeds: 0.025 to 0.055 as it begins by default, 0.75 to 0.775 where
    time costs something; the base has 0.26. The bounds are half way from the base."""
    before = success(base())
    trapped, free = (played(steered(seed, shift=shift), 4000) for shift in (0.0, -1.0))
    assert entropy_trap(trapped.learner, trapped.replay) is not None
    assert entropy_trap(free.learner, free.replay) is None
    assert success(trapped.learner.policy) < before - 0.12
    assert success(free.learner.policy) > before + 0.25


def test_the_advice_names_both_sides_and_the_ways_out():
    loop = played(steered(), 600)
    sentence = entropy_trap(loop.learner, loop.replay)
    assert sentence is not None
    for word in ("0 until success", "going on is worth", "rewards.shift=-1", "sac.backup_entropy=false", "sac.alpha"):
        assert word in sentence


@pytest.mark.parametrize(
    "loop",
    [
        lambda: steered(shift=-1.0),  # time costs something
        lambda: steered(backup_entropy=False),  # nothing is paid for entropy
        lambda: steered(alpha=1e-5),  # too little is paid
        lambda: steered(env=world(reward=Reward.distance)),  # rewards that are negative
        lambda: steered(env=world(reward=Reward.dense, terminate=False)),  # paid at every tick, and no end
    ],
    ids=["cost of time", "no bonus", "cold", "distance", "dense"],
)
def test_nothing_is_advised_where_there_is_no_trap(loop):
    found = played(loop(), 600)
    assert entropy_trap(found.learner, found.replay) is None


def test_what_going_on_is_worth_is_the_bonus_over_one_minus_gamma():
    """The sentence's number against the formula, with an entropy measured on draws of its own."""
    loop = played(steered(tune_alpha=False, alpha=0.5), 600)
    sentence = entropy_trap(loop.learner, loop.replay)
    assert sentence is not None
    said = float(sentence.partition("going on is worth ")[2].split()[0])
    agent = loop.learner.inner.agent
    obs = {key: x.flatten(0, 1) for key, x in loop.replay.latest()["obs"].items()}
    entropy = -float(agent.draw(obs, generator=torch.Generator().manual_seed(1)).log_prob.mean())
    # A whole chunk is discounted by .97; of the few that an end cut short the discount is nearer to 1. The entropy is
    # that of some hundred draws: two coordinates, whose log-density deviates by about 1.
    assert said == pytest.approx(0.5 * entropy / 0.03, rel=0.2)


class Cliff(Wrapper):
    """Who is further than a metre from the goal has failed, and the episode is over."""

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.env.step(action, active)
        lost = (step.obs["state"][:, 2:] - step.obs["state"][:, :2]).norm(dim=1) > 1
        return step._replace(terminated=step.terminated | lost, truncated=step.truncated & ~lost)


@pytest.mark.parametrize(
    ("cliff", "shift", "warned"), [(True, -1.0, True), (True, 0.0, False), (False, -1.0, False), (False, 0.0, False)]
)
def test_a_cost_of_time_is_warned_of_where_episodes_end_by_failing(cliff, shift, warned):
    env = Cliff(world()) if cliff else world()
    loop, lines = played(steered(env=env, shift=shift, backup_entropy=False), 600), []
    metrics = advised(loop, lines.append)()
    assert metrics["advice/quitting_trap"] == warned and len(lines) == warned
    # The base itself, which played the warm-up, falls in about half of its episodes.
    assert 0.3 < metrics["episode/failure"] < 0.8 if cliff else metrics["episode/failure"] == 0
    assert metrics["episode/failure"] + metrics["episode/success"] <= 1
    if warned:
        for word in ("every decision costs", "rewards.shift=0", "env.reward=dense"):
            assert word in lines[0]


class Silent(Wrapper):
    """Reports no success, and pays nothing for it if ``paid`` is false."""

    def __init__(self, env: Any, paid: bool) -> None:
        super().__init__(env)
        self.paid = paid

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = self.env.step(action, active)
        info = {name: x for name, x in step.info.items() if name != "success"}
        return step._replace(info=info, reward=step.reward * self.paid)


@pytest.mark.parametrize("paid", [True, False])
def test_a_world_that_reports_no_success_is_told_of_none(paid):
    loop, lines = played(steered(env=Silent(world(), paid)), 600), []
    metrics = advised(loop, lines.append)()
    assert "episode/success" not in metrics and metrics["advice/entropy_trap"] == paid
    assert len(lines) == paid and "success" not in "".join(lines)
    if paid:
        assert "until the end of an episode, where finishing is worth 1," in lines[0]


class Reporting:
    """A loop with the replay of another, whose reports are given."""

    def __init__(self, loop: OffPolicy[Any], reports: list[dict[str, float]]) -> None:
        self.learner, self.replay, self.statistics = loop.learner, loop.replay, loop.statistics
        self.report = iter(reports).__next__


@pytest.mark.parametrize(
    ("success", "q", "count", "warned"),
    [
        (0.30, 1.2, EPISODES, True),
        (0.36, 1.2, EPISODES, False),  # noise: more than half of what it was
        (0.30, 0.7, EPISODES, False),  # the critic has noticed
        (0.30, 1.2, EPISODES - 1, False),  # too few to say
    ],
)
def test_success_that_falls_while_the_critic_promises_more_is_being_put_off(success, q, count, warned):
    before = [{"episode/success": 0.1, "q/mean": 0.1}, {"episode/success": 0.7, "q/mean": 0.8}]
    reports = [{"episode/count": 50.0, **row} for row in before]
    reports.append({"episode/count": float(count), "episode/success": success, "q/mean": q})
    lines: list[str] = []
    loop: Any = Reporting(steered(), reports)
    report = advised(loop, lines.append)
    assert [report()["advice/putting_off"] for _ in range(3)] == [0, 0, warned] and len(lines) == warned
    if warned:
        assert "from 70% to 30%" in lines[0] and "rewards.shift=-0.02" in lines[0]


def test_a_run_that_goes_on_remembers_how_good_it_was():
    def report(success: float, q: float) -> dict[str, float]:
        return {"episode/count": 50, "episode/success": success, "q/mean": q}

    def said(past: list[dict[str, float]]) -> float:
        loop: Any = SimpleNamespace(
            learner=SimpleNamespace(entropy_bonus=None),
            replay=[],
            statistics=SimpleNamespace(reports_success=True),
            report=lambda: report(0.2, 3.0),
        )
        return float(advised(loop, print, lambda: past)()["advice/putting_off"])

    assert said([report(0.8, 1.0), {"step": 3}]) == 1 and said([]) == 0


def test_metrics_of_a_run_are_enough_to_say_it():
    loop = played(steered(backup_entropy=False), 600)
    metrics = advised(loop, print)()
    best = {**metrics, "episode/success": 1.0, "q/mean": metrics["q/mean"] - 1}
    assert metrics["episode/count"] >= EPISODES and putting_off(best, metrics) and not putting_off(metrics, metrics)


def test_an_advice_is_said_once_and_counted_every_time():
    loop, lines = played(steered(), 600), []
    report = advised(loop, lines.append)
    assert [report()["advice/entropy_trap"] for _ in range(2)] == [1.0, 1.0]
    assert len(lines) == 1
    # A deterministic learner earns nothing by entropy, and has no such number.
    quiet = ResidualTD3Config(loop=OffPolicyConfig(warmup=16, initial_updates=1, updates_per_decision=0))
    other = prepare(quiet, base(), world(), seed=0)
    other.iterate()
    assert "advice/entropy_trap" not in advised(other, lines.append)()


# ---- who waits ----


@pytest.mark.parametrize(
    ("actors", "learner", "actor", "said"),
    [
        (1, 0.8, 0.0, "worlds=20 processes=6"),
        (8, 0.75, 0.2, "worlds=104 processes=27"),
        (8, 0.0, 0.8, "worlds=8 processes=3"),
        (1, 0.1, 0.7, "loop.updates_per_decision"),
        (2, 0.6, 0.6, None),  # each waits for the slowest of all, and the numbers fit
        (1, 0.4, 0.4, None),
    ],
)
def test_a_run_that_waits_says_how_many_actors_are_worth_it(
    actors: int, learner: float, actor: float, said: str | None
):
    sentence = waiting(actors, 4, {"time/learner_waits": learner, "time/actor_waits": actor})
    assert sentence is None if said is None else sentence is not None and said in sentence


def test_waiting_in_the_warm_up_is_no_reason():
    both: Any = together(telling, Telling(PLAIN), launch=Threads())
    waits = {"time/learner_waits": 0.9, "time/actor_waits": 0.0}
    behind = {**waits, "asynchronous/staleness": 1.0}
    reports = iter([waits, behind, behind, behind])
    both.report = lambda: next(reports)
    lines: list[str] = []
    report = advised(both, lines.append)
    assert [report().get("advice/waiting") for _ in range(4)] == [None, None, 1.0, 1.0]
    assert len(lines) == 1 and "worlds=20 processes=11" in lines[0]
