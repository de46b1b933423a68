"""What a person does who takes a robot over is credited to no choice of the policy's, in any method.

The control is the same world, which keeps to itself who played: there the credit must be seen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from burnish.finetune.baselines.sb3 import View
from burnish.finetune.build import prepare
from burnish.finetune.people.dagger import corrected
from burnish.finetune.people.intervened_rows import InterventionUse, as_executed
from burnish.finetune.ppo import PPO, RewardScale
from burnish.finetune.processes.actor_process import as_row, of_rows
from burnish.finetune.rollout import Rollout
from burnish.finetune.table import METHODS, ONLINE
from burnish.offline.replay import Replay
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.execute import Execution
from burnish.policies.core.scale import ScaledEnv
from burnish.real_robot.env import RobotEnv
from burnish.real_robot.robots import TwinRobot, stage_for
from burnish.real_robot.safety.safe_robot import Safety
from burnish.real_robot.supervisor import NOTHING, Scripted, Word
from burnish.sim.mirror import Mirror
from burnish.sim.tasks.reach import ReachConfig
from intervention_lab import (
    CASES,
    CREDIT,
    DEED,
    EXECUTE,
    LENGTH,
    RICHES,
    TAUGHT,
    Robot,
    credited,
    listened,
    meaning,
    play,
    prepared,
    same,
)


def test_every_method_of_the_table_is_tried_or_refuses_a_supervisor():
    refusing = {name for name in ONLINE if METHODS[name].interventions is InterventionUse.refused}
    assert {name for name, _, _ in CASES.values()} == set(ONLINE) - refusing
    assert refusing == {"imagine", "mbpo", "sb3", "grpo", "serene"}
    settings = ONLINE["sb3"](view=View.plain)
    with pytest.raises(BurnishError, match="would take the actions of the supervisor"):
        prepare(settings, None, Robot())
    alone = Robot(told=False)
    alone.supervisor = None
    pytest.importorskip("stable_baselines3")
    prepare(settings, None, alone)


@pytest.mark.rotating(3)
@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if case not in TAUGHT])
def test_no_choice_of_the_policy_is_credited_with_what_a_person_did(case, num_envs):
    world = Robot(num_envs)
    loop = prepared(case, world)
    told = listened(loop)
    report = play(loop)
    assert told and not credited(told)
    assert report["intervened"] == pytest.approx(world.theirs / world.all, rel=1e-6) and world.theirs
    kind = meaning(case)
    rich = torch.cat([rows["worth"] for rows in told]) > CREDIT
    # What was executed is learnt from where actions are what is learnt about, and nowhere else.
    assert bool(rich.any()) == (kind is InterventionUse.executed)
    assert report.get("q/return", 0.0) < CREDIT or kind is InterventionUse.executed

    secret = prepared(case, Robot(num_envs, told=False))
    told = listened(secret)
    assert "intervened" not in play(secret)
    if kind is InterventionUse.executed and case != "rlpd" and case != "rlpd_td3":
        return  # these read ``executed`` in any case
    assert credited(told), "the measure does not see a wrong credit"


@pytest.mark.parametrize("case", sorted(TAUGHT))
def test_who_was_made_for_take_overs_gets_them_as_they_are(case):
    loop = prepared(case, Robot())
    assert loop.interventions is InterventionUse.taught
    told = listened(loop)
    report = play(loop)
    rows = loop.replay.latest()
    assert bool((rows["reward"] > CREDIT).any()), "they are stored"
    per_episode = -(-LENGTH // EXECUTE)
    assert rows["ended"][:, 0].tolist() == [t % per_episode == per_episode - 1 for t in range(len(rows["ended"]))]
    assert "intervened" not in report, "the learner says it itself"
    if case == "rlif":
        assert told and max(float(rows["worth"].max()) for rows in told) == 0
    else:
        flat = {key: x.flatten(0, 1) for key, x in rows.items() if key != "obs"}
        action, count = corrected(flat, relabel=False)
        assert bool((count > 0).any()) and bool((action[count == EXECUTE] == DEED).all())


@pytest.mark.parametrize("case", CASES)
def test_where_nobody_takes_over_not_a_bit_is_different(case):
    if case in TAUGHT:
        return  # they need to be told who played
    knows, does_not = prepared(case, Robot(2, told=None)), prepared(case, Robot(2, told=False, taken=()))
    assert play(knows, 32).pop("intervened") == 0
    play(does_not, 32)
    one, other = knows.state_dict(), does_not.state_dict()
    for state in (one, other):
        state.pop("ledger")
    assert same(one, other)


# ---- what is left out is as if it had not been; what came before it ended there ----


def test_a_take_over_ends_a_rollout_like_its_last_row():
    """The oracle is the same learner on rollouts that were begun anew behind each take-over, and ended before it."""
    loop = prepared("gaussian_ppo", Robot())
    kept = []
    for _ in range(12):
        obs, _, columns, outcome = loop.decide(warm=False)
        kept.append((obs, columns, outcome))
    others = [not bool(outcome.valid) for _, _, outcome in kept]
    assert sum(others) == 6 and not others[0]

    def rows(decisions: list[Any]) -> dict[str, Any]:
        rollout = Rollout(len(decisions), 1)
        for decision in decisions:
            rollout.add(*decision)
        return loop.learner._prepare(rollout.batch())[0]

    whole, parts, run = rows(kept), [], []
    for decision, theirs in [*zip(kept, others, strict=True), (None, True)]:
        if theirs and run:
            parts.append(rows(run))
            run = []
        elif not theirs:
            run.append(decision)
    for name in ("advantage", "target", "value", "log_prob", "action", "steps"):
        torch.testing.assert_close(whole[name], torch.cat([part[name] for part in parts]), msg=name)
    assert len(whole["advantage"]) == 6 and len(parts) > 2


def test_rewards_of_others_do_not_scale_ours():
    g = torch.Generator().manual_seed(0)
    reward, discount = torch.rand(9, 1, generator=g), torch.full((9, 1), 0.9)
    own = torch.ones(9, 1, dtype=torch.bool)
    own[3:5] = False
    ended = torch.zeros_like(own)
    ended[2] = True  # the seam, which who calls puts there
    among, apart = RewardScale(1), RewardScale(1)
    found = among(torch.where(own, reward, RICHES), discount, ended, 1e9, own)
    apart(reward[:3], discount[:3], ended[:3], 1e9)
    expected = apart(reward[5:], discount[5:], ended[5:], 1e9)
    torch.testing.assert_close(found[5:], expected)
    misled = RewardScale(1)
    assert float(misled(torch.where(own, reward, RICHES), discount, ended, 1e9)[5]) < float(expected[0]) / 100


@pytest.mark.parametrize("case", ["gaussian_ppo", "reinflow"])
def test_recorded_minibatches_keep_their_size(case):
    loop = prepared(case, Robot())
    ppo: PPO = loop.learner if case == "gaussian_ppo" else loop.learner.ppo
    ppo.config = replace(ppo.config, minibatch=16, execution=Execution.cudagraph)  # as a GPU replays them
    told = listened(loop)
    play(loop)
    assert len(told) == 4 and {len(rows["worth"]) for rows in told} == {16} and not credited(told)


@pytest.mark.parametrize("case", [case for case in CASES if case not in TAUGHT])
def test_while_a_person_plays_everything_nothing_is_learnt_and_afterwards_all_goes_on(case):
    world = Robot(taken=range(LENGTH))
    loop = prepared(case, world)
    told = listened(loop)
    report = play(loop, 32)
    assert report["intervened"] == 1
    assert bool(told) == (meaning(case) is InterventionUse.executed)
    world.taken = ()
    play(loop, 32)
    assert told and not credited(told)


def remembered(num_envs: int, decisions: int) -> Replay:
    """By a method that leaves out what a person played."""
    loop = prepared("residual_td3", Robot(num_envs))
    for _ in range(decisions):
        loop.store(*loop.played(warm=True), warm=True)
    return loop.replay


@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_replay_never_draws_what_was_left_out_nor_sums_across_it(num_envs):
    replay = remembered(num_envs, 21)
    assert len(replay) == (21 - 9 if num_envs == 1 else 21 * 2)
    batch = replay.sample(4000, n_step=3)
    assert not (batch["reward"] != 0).any()
    first = batch["obs"]["state"]  # (tick / LENGTH, world)
    tick = (first[:, 0] * LENGTH).round().long()
    ours = first[:, 1] == 0
    assert set(tick[ours].tolist()) == {0, 1, 4, 6}, "what a person played was drawn"
    led = (batch["next_obs"]["state"][:, 0] * LENGTH).round().long()
    # Of three decisions that may be summed: up to the state in which somebody took over, or to the end of the episode.
    for start, reached in {0: 2, 1: 2, 4: 5, 6: 7}.items():
        assert (led[ours & (tick == start)] == reached).all()
    assert (led[~ours] == (tick[~ours] + 3).clamp(max=LENGTH)).all()
    if num_envs == 2:
        assert set(tick[~ours].tolist()) == set(range(LENGTH))
        assert replay.learnable().sum() == 21 * 2 - 9


def test_what_was_left_out_stays_out_where_a_run_is_taken_up_again_and_where_the_ring_is_full():
    replay = remembered(2, 21)
    other = Replay(replay.rows * 2, 2)
    other.load_state_dict(replay.state_dict())
    other.generator.set_state(replay.generator.get_state())
    assert same(other.sample(64, n_step=2), replay.sample(64, n_step=2))
    world = Robot(2)
    loop = prepared("residual_td3", world)
    loop.replay = Replay(2 * 5, 2)  # less than an episode: rows that were left out are written over
    for _ in range(40):
        loop.store(*loop.played(warm=True), warm=True)
        assert not (loop.replay.sample(64, n_step=3)["reward"] != 0).any()
    assert not loop.replay.learnable().all()
    world.taken = ()
    for _ in range(5):
        loop.store(*loop.played(warm=True), warm=True)
    assert loop.replay.learnable().all()


@pytest.mark.parametrize("case", ["residual_td3", "dppo"])
def test_what_was_saved_before_take_overs_were_known_is_taken_up(case):
    loop = prepared(case, Robot(taken=()))
    play(loop, 16)
    state = loop.state_dict()
    del state["ledger"]["hands"]
    assert "void" not in state.get("replay", {})
    other = prepared(case, Robot(taken=()))
    other.load_state_dict(state)
    play(other, 16)


def test_who_played_reaches_the_other_process():
    here, there = prepared("rlpd", Robot(2)), prepared("rlpd", Robot(2))
    for _ in range(12):
        decision = here.played(warm=True)
        here.store(*decision, warm=True)
        row = as_row(*decision)
        there.store(*of_rows([row], torch.device("cpu")), warm=True)
    assert same(here.replay.latest(), there.replay.latest())
    assert bool((here.replay.latest()["action"] == DEED).any())


def test_a_decision_tells_of_each_tick_who_played_it():
    view = ChunkEnv(Robot(2), 4, 0.9)
    view.reset()
    first, second = (view.step(torch.zeros(2, 4, 1)) for _ in range(2))
    assert first.info["intervened"].int().tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    assert second.info["intervened"].int().tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]], "the fourth was not executed"
    assert first.valid.tolist() == second.valid.tolist() == [False, True]
    asked = torch.full((2, 4, 1), -0.5)
    played = as_executed(asked, second)[..., 0].tolist()
    assert played == [[0.0, DEED, 0.0, -0.5], [-0.5] * 4]
    assert ChunkEnv(Robot(2, told=None), 4, 0.9).step(asked).valid.all()
    assert ChunkEnv(Robot(2, told=False), 4, 0.9).step(asked).valid.all()
    over = Robot(2, taken=(5, LENGTH))  # in world 0 the episode is over when its last tick comes, which nobody plays
    over.tick = torch.tensor([5, 0])
    assert ChunkEnv(over, 4, 0.9).step(asked).info["intervened"].int().tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.sim
def test_on_a_robot_what_the_supervisor_plays_is_stored_as_theirs_or_not_at_all():
    hand = torch.tensor([1.0, -1.0, 0.5])
    ticks, theirs = 10, (3, 6, 7)  # of an episode; half of one decision of two ticks, and all of another

    def supervised() -> ScaledEnv:
        body = Mirror(ReachConfig(max_steps=ticks))
        person = Scripted(lambda obs, tick: Word(action=hand.numpy()) if tick % ticks in theirs else NOTHING)
        stage = stage_for(TwinRobot({"velocity": 0.5}), body, Safety(rate_hz=100), realtime=False, supervisor=person)
        return ScaledEnv(RobotEnv(body, stage, supervisor=person))

    loop = prepared("rlpd", supervised())
    for _ in range(10):
        loop.iterate()
    by_hand = (loop.replay.latest()["action"][:, 0] == hand).all(-1)
    assert by_hand.tolist() == 2 * [[False, False], [False, True], [False, False], [True, True], [False, False]]
    assert loop.report()["intervened"] == pytest.approx(0.3)
    loop.env.env.env.close()

    loop = prepared("residual_td3", supervised())
    for _ in range(2 * ticks):
        loop.iterate()
    assert len(loop.replay) == 2 * (ticks - len(theirs))
    ended = loop.replay.latest()["ended"][:, 0]
    assert ended.tolist() == 2 * [False, False, True, False, True, False, True]  # 0 1 2 | 4 5 | 8 9
    loop.env.env.env.env.close()
