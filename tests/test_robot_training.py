"""Every kind of method trains on a twin, behind the guard; take-overs by a person teach; a run is taken up again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.finetune import refine
from burnish.finetune.build import prepare
from burnish.finetune.loops import OffPolicy, OffPolicyConfig
from burnish.finetune.people.dagger import DAggerConfig, corrected
from burnish.finetune.people.interventions import InterventionConfig, Rule
from burnish.finetune.people.rlif import RLIFConfig
from burnish.offline.sac import SACConfig, soft_agent
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.seed import EpisodeSeeds
from burnish.policies.core.spec import agent_spec
from burnish.policies.core.wrapper import continues
from burnish.policies.flow import FlowConfig, FlowPolicy
from burnish.policies.nets.critic import CriticConfig
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from burnish.policies.runs.checkpoint import numbered
from burnish.real_robot.clock import VirtualClock, ns
from burnish.real_robot.control.link import LocalLink
from burnish.real_robot.drivers.twin import Twin, TwinConfig
from burnish.real_robot.env import RobotEnv, each_anew
from burnish.real_robot.errors import RobotError
from burnish.real_robot.safety.safe_robot import Safety
from burnish.real_robot.supervisor import NOTHING, Scripted, Supervisor, Word
from burnish.sim.mirror import Mirror
from burnish.sim.tasks.reach import ReachConfig

pytestmark = pytest.mark.sim

HZ, VELOCITY, ACCELERATION = 100.0, 0.5, 5.0  # so gentle that no untrained policy keeps it by itself
TICKS = 10  # of an episode
SMALL = {"lr": 1e-2, "actor_lr": 1e-2, "actor_every": 1, "critic": {"members": 2, "hidden": [16]}}
NOTHING_LEARNT = {"updates_per_decision": 0.0}
METHODS: dict[str, dict[str, Any]] = {
    "dsrl": {"sac": {**SMALL, "agent": {"hidden": [16]}}},
    "residual_td3": {"td3": {**SMALL, "agent": {"hidden": [16]}}},
    "dppo": {"trained_steps": 2, "ppo": {"epochs": 1, "minibatch": 8}, "loop": {"decisions_per_update": 8}},
    "reinflow": {"ppo": {"epochs": 1, "minibatch": 8}, "loop": {"decisions_per_update": 8}},
}
OFF_POLICY = {"dsrl", "residual_td3"}


class Listened(Twin):
    """Remembers what it was sent, of this life."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: list[np.ndarray] = []

    def _write(self, command):
        self.sent.append(command.target.copy())
        return super()._write(command)


class Robot(RobotEnv):
    """A twin, which remembers its lives and their seeds."""

    def __init__(self, supervisor: Supervisor | None = None, seed: int = 3, link: type[LocalLink] = LocalLink) -> None:
        self.lives: list[Listened] = []
        self.begun: list[int] = []
        mirror = Mirror(ReachConfig(max_steps=TICKS))
        limits = {"velocity": VELOCITY, "acceleration": ACCELERATION}

        def connect(start: np.ndarray) -> LocalLink:
            config = TwinConfig(mirror.mjcf, joints=list(mirror.joints), start=start.tolist(), **limits)
            self.lives.append(Listened(config, VirtualClock()))
            return link(self.lives[-1], Safety(rate_hz=HZ, blend_s=0.0))

        anew = each_anew(connect)

        def stage(body: Any, seed: int) -> Any:
            self.begun.append(seed)
            return anew(body, seed)

        super().__init__(mirror, stage, seed=seed, supervisor=supervisor)

    def require_guarded(self) -> None:
        """By what arrived at the device; the excesses are those that the guard promises."""
        self.close()
        assert sum(report["setpoints"]["changed"] for report in self.reports) > 0, "the guard had nothing to do"
        for twin in self.lives:
            sent = np.stack(twin.sent)
            speed = np.diff(sent, axis=0) * HZ
            assert np.abs(speed).max(initial=0) <= VELOCITY * (1 + 1e-9)
            assert np.abs(np.diff(speed, axis=0)).max(initial=0) * HZ <= ACCELERATION * (1 + 1e-6)


def base(execute: int = 2) -> FlowPolicy:
    world = Mirror(ReachConfig()).spec
    torch.manual_seed(0)
    net = DenoiserConfig(mlp=MlpBodyConfig(hidden=[16], time_dim=8))
    return FlowPolicy(replace(agent_spec(world, execute=execute), action=world.action), FlowConfig(steps=2, net=net))


def settings(method: str, **loop: Any) -> dict[str, Any]:
    usual = (
        {"warmup": 8, "initial_updates": 0, "batch": 8, "updates_per_decision": 1.0, **loop}
        if method in OFF_POLICY
        else {}
    )
    chosen = METHODS[method]
    return {**chosen, "loop": {**chosen.get("loop", {}), **usual}}


def differ(one: Any, other: Any) -> bool:
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    return any(not torch.equal(a[key], b[key]) for key in a)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_method_trains_on_a_robot_behind_its_guard(method):
    robot, policy = Robot(), base()
    found = refine(policy, robot, method=method, total=16, **settings(method))
    assert found.finished and found.log[-1]["decisions"] == 16 and found.log[-1]["episode/count"] >= 1
    robot.require_guarded()
    if method in OFF_POLICY:
        idle = Robot()
        untaught = refine(policy, idle, method=method, total=16, **settings(method, **NOTHING_LEARNT)).policy
        again = refine(policy, Robot(), method=method, total=16, **settings(method, **NOTHING_LEARNT)).policy
        assert not differ(untaught, again), "what was not taught differs by itself"
        assert differ(found.policy, untaught)
    else:
        assert differ(found.policy, policy)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["residual_td3", "dppo"])
def test_a_run_is_interrupted_in_an_episode_and_goes_on_with_the_next(method, tmp_path):
    words = {"method": method, "total": 24, "out": tmp_path / "run", "log_every": 1, **settings(method)}
    first = Robot()
    cut = refine(base(), first, on_log=lambda step, numbers: numbers.get("decisions", 0) >= 8, **words)
    assert not cut.finished and 8 <= cut.log[-1]["decisions"] < 24
    first.close()
    second = Robot()
    found = refine(base(), second, resume=True, **words)
    assert found.finished and found.log[-1]["decisions"] == 24
    assert differ(found.policy, cut.policy)
    second.require_guarded()
    whole = EpisodeSeeds(3, 1)
    order = [int(whole.begin(torch.ones(1, dtype=torch.bool))[0]) for _ in range(len(first.begun + second.begun))]
    assert first.begun + second.begun == order, "an episode is missing, or was begun twice"


class Mortal(LocalLink):
    """A link whose control process ends by itself after so many plans."""

    plans = 0

    @property
    def alive(self) -> bool:
        return self.plans < 5

    def plan(self, *given: Any, **named: Any) -> int:
        self.plans += 1
        return super().plan(*given, **named)

    def _require_alive(self, what: str) -> None:
        if not self.alive:
            raise RobotError(f"it ended before it could {what} the robot")


def test_a_run_whose_control_process_dies_ends_in_a_sentence_and_is_resumed(tmp_path):
    words = {"method": small_rlif(warmup=6), "total": 24, "out": tmp_path / "run", "log_every": 1, "save_every": 2}
    first = Robot(holding(), link=Mortal)
    with pytest.raises(RobotError, match="ended before it could stop the robot"):
        refine(None, first, **words)
    first.close()
    assert numbered(tmp_path / "run" / "checkpoints"), "four decisions were played, and saved after two"
    found = refine(None, Robot(holding()), resume=True, **words)
    assert found.finished and found.log[-1]["decisions"] == 24


def test_what_is_saved_of_a_robot_decides_what_comes_and_cuts_what_is():
    robot = Robot()
    assert not continues(ScaledEnv(robot))
    robot.reset()
    robot.step(torch.zeros(1, 3))
    state = robot.state_dict()
    robot.reset()
    robot.load_state_dict(state)
    with pytest.raises(BurnishError, match="reset before its first step"):
        robot.step(torch.zeros(1, 3))
    robot.reset()
    assert robot.begun[1] == robot.begun[2] != robot.begun[0]
    robot.close()


def test_what_was_remembered_does_not_lead_into_the_next_life():
    def loop() -> OffPolicy[Any]:
        made = prepare(small_rlif(), None, ScaledEnv(Robot(Scripted(lambda obs, tick: NOTHING))))
        assert isinstance(made, OffPolicy)
        return made

    one, other = loop(), loop()
    for _ in range(4):
        one.iterate()
    other.load_state_dict(one.state_dict())
    assert not one.replay.latest()["ended"].any(), "the episode was still going on"
    for _ in range(3):
        other.iterate()
    assert other.replay.latest()["ended"][:, 0].tolist() == [False] * 3 + [True] + [False] * 3
    assert other.statistics.decisions == 7


# ---- take-overs ----

HAND = np.array([1.0, -1.0, 0.5])  # what the supervisor plays


def holding(*ticks: int) -> Scripted:
    """Of each episode."""
    return Scripted(lambda obs, tick: Word(action=HAND) if tick % TICKS in ticks else NOTHING)


def small_rlif(**loop: Any) -> RLIFConfig:
    sac = SACConfig(lr=1e-2, actor_lr=1e-2, agent=soft_agent(hidden=[16]), critic=CriticConfig(hidden=[16]))
    return RLIFConfig(loop=OffPolicyConfig(**{"warmup": 10, "batch": 8, "updates_per_decision": 1.0, **loop}), sac=sac)


def test_rlif_learns_from_whoever_takes_the_robot_over():
    robot = Robot(holding(3, 4, 8))
    found = refine(None, robot, method=small_rlif(), total=30)
    assert found.finished and found.log[-1]["intervened"] == pytest.approx(0.3)
    robot.require_guarded()
    alone = refine(None, Robot(holding()), method=small_rlif(), total=30)
    assert alone.log[-1]["intervened"] == 0 and differ(found.policy, alone.policy)
    untaught = refine(None, Robot(holding(3, 4, 8)), method=small_rlif(**NOTHING_LEARNT), total=30)
    assert differ(found.policy, untaught.policy)


def test_the_decision_before_a_take_over_is_blamed_and_the_person_is_not():
    loop = prepare(small_rlif(), None, ScaledEnv(Robot(holding(0, 3, 4, 8))))
    assert isinstance(loop, OffPolicy)
    for _ in range(2 * TICKS):
        loop.iterate()
    rows = loop.replay.latest()
    ticks = torch.arange(2 * TICKS) % TICKS
    assert torch.equal(rows["intervened"][:, 0, 0], torch.isin(ticks, torch.tensor([0, 3, 4, 8])))
    # At the beginning of an episode nobody has done anything yet that could have called for help.
    assert torch.equal(rows["called"][:, 0], torch.isin(ticks, torch.tensor([2, 7])))
    by_hand = rows["executed"][:, 0, 0][rows["intervened"][:, 0, 0]]
    torch.testing.assert_close(by_hand, torch.tensor(HAND, dtype=torch.float32).expand_as(by_hand))
    assert (rows["action"][:, 0, 0] - rows["executed"][:, 0, 0]).abs().max(1).values[ticks == 5].max() < 1e-5


def test_dagger_imitates_what_was_played_by_hand_and_nothing_else():
    quick = {"lr": 1e-2, "loop": OffPolicyConfig(warmup=0, batch=8, prior_share=1.0)}
    policy = base(execute=5)
    robot = Robot(holding(2, 3, 5, 6, 7))  # of two decisions: the end of neither, the beginning of the second
    taught = refine(policy, robot, method=DAggerConfig(**quick), total=8)
    assert taught.finished and taught.log[-1]["intervened"] == pytest.approx(0.5)
    robot.require_guarded()
    assert differ(taught.policy, policy)
    untaught = refine(policy, Robot(holding()), method=DAggerConfig(**quick), total=8)
    assert not differ(untaught.policy, policy), "nobody has shown anything"

    loop = prepare(DAggerConfig(**quick), base(execute=5), ScaledEnv(Robot(holding(2, 3, 5, 6, 7))))
    assert isinstance(loop, OffPolicy)
    for _ in range(2):
        loop.iterate()
    rows = {key: x[:, 0] for key, x in loop.replay.latest().items() if key != "obs"}
    assert rows["intervened"].int().tolist() == [[0, 0, 1, 1, 0], [1, 1, 1, 0, 0]]
    action, count = corrected(rows, relabel=False)
    assert count.tolist() == [0, 3] and rows["called"].tolist() == [True, False]
    torch.testing.assert_close(action[1, :3], torch.tensor(HAND, dtype=torch.float32).expand(3, 3))


def test_who_is_late_asks_again_and_plays_what_is_said_now():
    said = [NOTHING, Word(action=HAND), Word(action=-HAND), Word(success=True), NOTHING]
    robot = Robot(Scripted(lambda obs, tick: said[tick]))
    robot.reset()
    first = robot.step(torch.zeros(1, 3))
    assert bool(first.info["called"]) and not bool(first.info["intervened"])
    robot.link.wait_until_ns(robot.link.clock.now_ns() + ns(0.5))  # somebody learns
    second = robot.step(torch.zeros(1, 3))
    high = torch.tensor(robot.spec.action.high)
    assert bool(second.info["intervened"]) and second.info["executed"][0, 0] == pytest.approx(-float(high[0]))
    robot.link.wait_until_ns(robot.link.clock.now_ns() + ns(0.5))
    third = robot.step(torch.zeros(1, 3))
    assert bool(third.terminated) and bool(third.info["success"]), "a verdict was lost"
    robot.close()


def test_what_does_not_belong_to_a_person_at_a_robot_is_refused():
    ask = partial(refine, None, method="rlif", total=2000)
    with pytest.raises(
        BurnishError, match="say who intervenes, for example expert=clean or expert=noisy, or in Python a RobotEnv"
    ):
        ask(Robot())
    with pytest.raises(BurnishError, match="has a supervisor, who takes it over; leave expert= out"):
        ask(Robot(holding()), expert="clean")
    random = RLIFConfig(InterventionConfig(rule=Rule.random))
    with pytest.raises(BurnishError, match="supervisor of this robot decides that alone"):
        refine(None, Robot(holding()), method=random, total=2000)
    with pytest.raises(BurnishError, match="relabel=true asks an expert"):
        refine(base(), Robot(holding()), method=DAggerConfig(relabel=True), total=2000)


def test_the_program_of_the_documentation_learns_from_whoever_takes_over():
    page = (Path(__file__).parents[1] / "docs" / "robots.md").read_text(encoding="utf-8")
    (program,) = [part.split("```")[0] for part in page.split("```python\n")[1:] if 'method="rlif"' in part]
    said: dict = {}
    exec(compile(program, "robots.md", "exec"), said)
    assert said["result"].finished and said["robot"].reports
