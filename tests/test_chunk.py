"""Decision time: discounting, ends at every sub-step, partial chunks, histories; against a slow explicit loop."""

from __future__ import annotations

import itertools

import pytest
import torch

from burnish.policies.core.chunk import ChunkEnv, HistoryEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import Scale, ScaledEnv, narrower
from burnish.policies.core.spec import ActionSpec
from burnish.sim.build import make_env
from burnish.sim.point_reach import PointReachConfig
from scripted import TERMINATED, TRUNCATED, ScriptedWorld

GAMMA = 0.9


def slow_decisions(script, world, n):
    """What a chunked world of length n must report, worked out tick by tick: an endless generator of rows."""
    for episode in itertools.count():
        length, kind = script[episode % len(script)]
        tick = 0
        while tick < length:
            played = min(n, length - tick)
            rewards = [100.0 * world + 10.0 * episode + tick + i + 1 for i in range(played)]
            tick += played
            ended = tick == length
            yield {
                "reward": sum(GAMMA**i * r for i, r in enumerate(rewards)),
                "discount": 0.0 if ended and kind == TERMINATED else GAMMA**played,
                "ended": ended,
                "terminated": ended and kind == TERMINATED,
                "steps": played,
                "next": (world, episode, tick),
                "obs": (world, episode + 1, 0) if ended else (world, episode, tick),
            }


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("worlds", [1, 7])
def test_outcomes_equal_a_slow_loop_with_both_ends_at_every_sub_step(n, worlds):
    # Lengths 3n .. 4n put the end on every sub-step of a chunk, with at least three decisions an episode.
    ends = [(length, kind) for length in range(3 * n, 4 * n) for kind in (TERMINATED, TRUNCATED)]
    script = [ends[i % len(ends) :] + ends[: i % len(ends)] for i in range(worlds)]
    env = ChunkEnv(ScriptedWorld(script), n, GAMMA)
    env.reset()
    expected = [slow_decisions(script[i], i, n) for i in range(worlds)]
    generator = torch.Generator().manual_seed(0)
    seen_ends = set()
    for _ in range(40):
        chunk = torch.rand(worlds, n, 2, generator=generator)
        out = env.step(chunk)
        for i in range(worlds):
            row = next(expected[i])
            assert out.reward[i].item() == pytest.approx(row["reward"], rel=1e-6)
            assert out.discount[i].item() == pytest.approx(row["discount"], rel=1e-6)
            assert (out.ended[i].item(), out.terminated[i].item()) == (row["ended"], row["terminated"])
            assert out.steps[i].item() == row["steps"]
            assert tuple(out.next_obs["state"][i].tolist()) == row["next"]
            assert tuple(out.obs["state"][i].tolist()) == row["obs"]
            assert torch.equal(out.executed[i, : row["steps"]], chunk[i, : row["steps"]])
            assert not out.executed[i, row["steps"] :].any()
            assert out.info["success"][i].item() == row["terminated"]
            assert out.info["tick"][i].item() == row["next"][2]
            if row["ended"]:
                seen_ends.add((row["steps"], row["terminated"]))
    assert seen_ends == set(itertools.product(range(1, n + 1), (True, False))), "the script must try every kind of end"


def test_an_ended_world_is_reset_once_after_the_chunk_and_alone():
    world = ScriptedWorld([[(2, TERMINATED)], [(100, TRUNCATED)]])
    env = ChunkEnv(world, 4, GAMMA)
    env.reset(seeds=[5, 6])
    env.step(torch.zeros(2, 4, 2))
    assert world.resets == [([True, True], [5, 6]), ([True, False], None)]


def test_a_chunk_stops_early_when_every_world_has_ended():
    world = ScriptedWorld([[(1, TRUNCATED)], [(2, TERMINATED)]])
    env = ChunkEnv(world, 5, GAMMA)
    env.reset()
    env.step(torch.zeros(2, 5, 2))
    assert len(world.taken) == 2


def test_discount_treats_a_truncation_unlike_a_termination():
    """Constant reward 1 forever: V = 1 / (1 - gamma) follows from the reported discounts, but only while a truncated
    row still bootstraps; the control that calls it termination gets the wrong value."""
    env = ChunkEnv(ScriptedWorld([[(3, TRUNCATED)]]), 2, GAMMA)
    env.reset()
    rows = [env.step(torch.zeros(1, 2, 2)) for _ in range(20)]
    truth = 1 / (1 - GAMMA)
    right = wrong = truth
    for out in rows:
        steps = int(out.steps)
        earned = sum(GAMMA**i for i in range(steps))
        right = min(right, earned + float(out.discount) * truth)
        wrong = min(wrong, earned + float(out.discount * ~out.ended) * truth)
    assert right == pytest.approx(truth, rel=1e-6)
    assert wrong < 0.5 * truth


def test_bad_sizes_are_refused():
    world = ScriptedWorld([[(2, TERMINATED)]])
    with pytest.raises(BurnishError, match="execute=0"):
        ChunkEnv(world, 0, GAMMA)
    with pytest.raises(BurnishError, match=r"gamma=1\.5"):
        ChunkEnv(world, 2, 1.5)
    env = ChunkEnv(world, 2, GAMMA)
    env.reset()
    with pytest.raises(ValueError, match="expected shape"):
        env.step(torch.zeros(1, 3, 2))


@pytest.mark.parametrize("history", [2, 3])
def test_history_holds_the_last_frames_of_the_episode_and_nothing_of_the_one_before(history):
    script = [[(5, TERMINATED), (4, TRUNCATED)], [(7, TRUNCATED)]]
    env = ChunkEnv(HistoryEnv(ScriptedWorld(script, image=True, goal=True), history), 3, GAMMA)
    obs = env.reset()
    assert obs["state"].shape == (2, history, 3) and obs["goal"].shape == (2, 2)
    for _ in range(12):
        out = env.step(torch.zeros(2, 3, 2))
        for stack in (out.obs["state"], out.next_obs["state"]):
            for row in stack.tolist():
                world, episode, tick = row[-1]
                assert row == [[world, episode, max(0, tick - back)] for back in reversed(range(history))]
        assert out.next_obs["image.top"][:, -1, 0, 0, 0].tolist() == out.next_obs["state"][:, -1, 2].tolist()


def test_history_state_is_saved_and_restored():
    def play(env, times):
        return [env.step(torch.zeros(1, 2)).obs["state"] for _ in range(times)]

    env = HistoryEnv(ScriptedWorld([[(50, TRUNCATED)]]), 3)
    env.reset()
    play(env, 4)
    saved = env.state_dict()
    ahead = play(env, 3)
    env.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(ahead, play(env, 3), strict=True))


def test_scale_maps_the_ends_exactly_never_leaves_the_limits_and_inverts():
    limits = ActionSpec((-0.1, 3.0), (0.7, 3.3))
    scale = Scale(limits)
    low, high = scale.to_actuator(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    assert torch.equal(low, torch.tensor(limits.low)) and torch.equal(high, torch.tensor(limits.high))
    action = torch.rand(1000, 2, generator=torch.Generator().manual_seed(0)) * 4 - 2
    units = scale.to_actuator(action)
    assert (units >= torch.tensor(limits.low)).all() and (units <= torch.tensor(limits.high)).all()
    # float32 around 3 resolves 2.4e-7, which is 1.6e-6 of the half range 0.15.
    torch.testing.assert_close(scale.to_unit(units), action.clamp(-1, 1), atol=4e-6, rtol=0)


def test_scaled_world_gets_actuator_units_and_reports_what_it_executed_in_ours():
    world = ScriptedWorld([[(9, TRUNCATED)]])
    env = ScaledEnv(world)
    env.reset()
    step = env.step(torch.tensor([[0.5, -3.0]]))
    assert torch.equal(world.taken[0], torch.tensor([[1.0, 0.0]]))
    assert torch.equal(step.info["executed"], torch.tensor([[0.5, -1.0]]))
    assert env.spec.action == ActionSpec((-1, -1), (1, 1))
    with pytest.raises(BurnishError, match="3 dimensions"):
        ScaledEnv(world, ActionSpec((0, 0, 0), (1, 1, 1)))


def test_limits_of_a_policy_that_lie_beyond_those_of_the_world_are_other_units():
    world = ScriptedWorld([[(9, TRUNCATED)]])
    low, high = world.spec.action.low, world.spec.action.high
    ScaledEnv(world, ActionSpec((low[0] - 9, low[1]), (high[0] + 9, high[1] / 2)))  # controls: wider, and narrower
    for beyond in (ActionSpec((low[0], 50), (high[0], 100)), ActionSpec((low[0], -100), (high[0], -50))):
        with pytest.raises(BurnishError, match=r"dimension 1 of the policy's actions lies in \[.*other units"):
            ScaledEnv(world, beyond)


def test_actions_that_the_world_would_clip_are_told_once(caplog):
    world = ScriptedWorld([[(9, TRUNCATED)]])
    low, high = world.spec.action.low, world.spec.action.high
    ScaledEnv(world, ActionSpec(low, (high[0], high[1] / 2)))  # control: narrower
    assert not caplog.messages
    for _ in range(2):
        ScaledEnv(world, ActionSpec(low, (high[0] + 7, high[1] + 7)))
    (said,) = caplog.messages
    assert "dimension 0 of the policy's actions reaches" in said and "clips the rest (also in dimensions 1)" in said


def test_limits_within_those_of_the_world_are_a_note():
    world = ActionSpec((-1.0, -1.0, 0.0), (1.0, 1.0, 1.0))
    assert narrower(world, world) == narrower(ActionSpec((-9.0,) * 3, (9.0,) * 3), world) == ""
    said = narrower(ActionSpec((-1.0, -0.5, 0.0), (1.0, 0.5, 0.2)), world)
    assert "takes [-1, 1] in dimension 1 of actions" in said and "[-0.5, 0.5] (also in dimensions 2)" in said


def test_what_the_world_says_it_executed_is_what_counts():
    """A guard or a take-over inside the world changes the action; the outcome must tell."""

    class Guarded(ScriptedWorld):
        def step(self, action, active=None):
            step = super().step(action, active)
            return step._replace(info={**step.info, "executed": action.clamp(-0.25, 0.25)})

    env = ChunkEnv(Guarded([[(3, TRUNCATED)]]), 4, GAMMA)
    env.reset()
    out = env.step(torch.ones(1, 4, 2))
    assert out.executed[0, :, 0].tolist() == [0.25, 0.25, 0.25, 0.0]


def assert_equal_trees(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_chunk_of_one_is_no_chunking():
    """Decision by decision what the world itself says, tick by tick; the control is a chunk of two."""
    gamma, config = 0.9, PointReachConfig(max_steps=5)
    plain, chunked = (make_env(config, 4, seed=3) for _ in range(2))
    env = ChunkEnv(chunked, 1, gamma)
    obs = plain.reset()
    assert_equal_trees(env.reset(), obs)
    draw = torch.Generator().manual_seed(0)
    for _ in range(12):
        action = torch.rand(4, 2, generator=draw) * 2 - 1
        step, outcome = plain.step(action), env.step(action[:, None])
        ended = step.terminated | step.truncated
        assert torch.equal(outcome.reward, step.reward)
        assert torch.equal(outcome.discount, gamma * (~step.terminated).float())
        assert torch.equal(outcome.ended, ended) and torch.equal(outcome.terminated, step.terminated)
        assert outcome.steps.tolist() == [1] * 4
        assert_equal_trees(outcome.next_obs, step.obs)
        assert_equal_trees(outcome.obs, plain.reset(ended) if bool(ended.any()) else step.obs)
    assert not torch.equal(ChunkEnv(chunked, 2, gamma).step(action[:, None].expand(-1, 2, -1)).reward, step.reward)
