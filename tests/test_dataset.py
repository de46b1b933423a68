"""Recordings as decisions: against a slow loop, and against the world itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from burnish.offline.dataset import BehindCut, decisions, fit_normalizers
from burnish.policies.build import build_policy
from burnish.policies.core.chunk import ChunkEnv, HistoryEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.normalize import Scaling
from burnish.policies.core.rewards import RewardConfig
from burnish.policies.core.scale import Scale, ScaledEnv
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.external.reward_models import relabelled
from burnish.policies.gaussian import GaussianConfig
from scripted import TERMINATED, TRUNCATED, ScriptedWorld

GAMMA = 0.9
ACTION = ActionSpec((-2.0, 0.0), (2.0, 1.0))
OBS = ObsSpec({"state": (2,), "goal": (1,)})


def an_episode(length: int, terminated: bool, seed: int) -> Episode:
    make = torch.Generator().manual_seed(seed)
    return Episode(
        obs={"state": torch.randn(length + 1, 2, generator=make), "goal": torch.randn(length + 1, 1, generator=make)},
        action=torch.rand(length, 2, generator=make) * torch.tensor([4.0, 1.0]) - torch.tensor([2.0, 0.0]),
        reward=torch.randn(length, generator=make),
        terminated=terminated,
        truncated=not terminated,
        success=terminated,
        seed=seed,
    )


def some(lengths=(1, 2, 3, 5, 7), terminated=(True, False)) -> Episodes:
    made = [an_episode(n, end, 10 * n + end) for n in lengths for end in terminated]
    return Episodes(made, EnvSpec(OBS, ACTION, 10.0, "test", 100))


def spec_of(execute: int, history: int = 1) -> PolicySpec:
    return PolicySpec(OBS, ACTION, horizon=execute + 2, execute=execute, start=1, history=history)


def slow(episode: Episode, spec: PolicySpec, start: int, tail: float) -> list[dict]:
    """One phase of one episode, tick by tick."""
    rows, length = [], len(episode)
    rewards = episode.reward.tolist()
    scaled = Scale(ACTION).to_unit(episode.action)
    for first in range(start, length, spec.execute):
        row = {"action": torch.zeros(spec.execute, 2), "reward": 0.0, "steps": 0}
        for i in range(spec.execute):
            if first + i < length:
                row["action"][i] = scaled[first + i]
                row["reward"] += GAMMA**i * rewards[first + i]
                row["steps"] += 1
        last = first + row["steps"]
        row["ended"] = last == length
        row["terminated"] = row["ended"] and episode.terminated
        row["discount"] = 0.0 if row["terminated"] else GAMMA ** row["steps"]
        for name, tick in (("obs", first), ("next_obs", last)):
            state = [episode.obs["state"][max(0, tick - k)] for k in range(spec.history - 1, -1, -1)]
            row[name] = {
                "state": torch.stack(state) if spec.history > 1 else state[0],
                "goal": episode.obs["goal"][tick],
            }
        row["executed"] = row["action"]
        follows = 0.0 if episode.terminated else GAMMA ** (length - first) * tail
        row["return_to_go"] = sum(GAMMA ** (t - first) * rewards[t] for t in range(first, length)) + follows
        rows.append(row)
    return rows


@pytest.mark.parametrize("history", [1, 3])
@pytest.mark.parametrize("execute", [1, 3, 4])
def test_decisions_equal_a_slow_loop(execute, history):
    spec, episodes = spec_of(execute, history), relabelled(some(), RewardConfig(10, -5))
    replay = decisions(episodes, spec, GAMMA, returns=BehindCut.worst)
    worst = min(float(episode.reward.min()) for episode in episodes) / (1 - GAMMA)
    torch.testing.assert_close(episodes[0].reward, 10 * some()[0].reward - 5)
    expected = [
        row
        for episode in episodes
        for start in range(min(execute, len(episode)))
        for row in slow(episode, spec, start, worst)
    ]
    got = replay.gather(torch.arange(len(replay)))
    assert len(replay) == len(expected)
    for name in ("action", "executed", "reward", "steps", "ended", "terminated", "discount", "return_to_go"):
        wanted = torch.stack([torch.as_tensor(row[name]) for row in expected])
        torch.testing.assert_close(got[name], wanted.to(got[name].dtype), rtol=1e-5, atol=1e-4)
    for name in ("obs", "next_obs"):
        for key in ("state", "goal"):
            assert torch.equal(got[name][key], torch.stack([row[name][key] for row in expected]))


@pytest.mark.parametrize("execute", [1, 2, 3])
def test_all_phases_use_every_window_once(execute):
    episodes = some()
    replay = decisions(episodes, spec_of(execute), GAMMA)
    assert len(replay) == episodes.frames
    assert int((replay.gather(torch.arange(len(replay)))["steps"] == execute).sum()) == sum(
        max(0, len(e) - execute + 1) for e in episodes
    )


@pytest.mark.parametrize("history", [1, 2])
def test_decisions_of_a_recording_are_those_of_the_world(history):
    """Played through ChunkEnv, recorded at control rate, and read back: the same decisions, number for number."""
    script = [(7, TERMINATED), (6, TRUNCATED), (4, TRUNCATED), (2, TERMINATED)]
    spec = PolicySpec(ObsSpec({"state": (3,)}), ACTION, horizon=3, execute=3, history=history)
    world = ScriptedWorld([script])
    control = ScaledEnv(world)
    env = ChunkEnv(HistoryEnv(control, history) if history > 1 else control, 3, GAMMA)
    make = torch.Generator().manual_seed(0)
    obs, played, recorded = env.reset(), [], []
    frames = [obs["state"][0] if history == 1 else obs["state"][0, -1]]
    while len(recorded) < len(script):
        chunk = 2 * torch.rand(1, 3, 2, generator=make) - 1
        before, world.taken = {k: x.clone() for k, x in obs.items()}, []
        outcome = env.step(chunk)
        played.append((before, chunk, outcome))
        length, kind = script[len(recorded)]
        frames += [torch.tensor([0.0, len(recorded), len(frames) + i]) for i in range(int(outcome.steps))]
        obs = outcome.obs
        if bool(outcome.ended):
            decided = (length + 2) // 3
            actions = Scale(ACTION).to_actuator(torch.cat([c[0] for _, c, _ in played[-decided:]]))[:length]
            state = torch.stack(frames)
            assert len(state) == length + 1
            rewards = 10.0 * len(recorded) + torch.arange(1, length + 1)
            ended = kind == TERMINATED
            recorded.append(Episode({"state": state}, actions, rewards, ended, not ended, ended, len(recorded)))
            frames = [obs["state"][0] if history == 1 else obs["state"][0, -1]]
    replay = decisions(Episodes(recorded, world.spec), spec, GAMMA)
    first, at = [], 0
    for length, _ in script:  # an episode has as many decisions as ticks; those of the phase of tick 0 come first
        first += range(at, at + (length + 2) // 3)
        at += length
    got = replay.gather(torch.tensor(first))
    assert len(got["reward"]) == len(played)
    for row, (before, chunk, outcome) in enumerate(played):
        assert torch.equal(got["obs"]["state"][row], before["state"][0])
        assert torch.equal(got["next_obs"]["state"][row], outcome.next_obs["state"][0])
        for name in ("reward", "discount", "ended", "terminated", "steps"):
            torch.testing.assert_close(got[name][row], getattr(outcome, name)[0])
        real = int(outcome.steps)
        torch.testing.assert_close(got["action"][row, :real], chunk[0, :real], rtol=0, atol=1e-6)
        assert not bool(got["action"][row, real:].any())


def returns(rewards, execute=1, behind_cut=BehindCut.worst, gamma=GAMMA):
    """``return_to_go`` of recordings that were cut off."""
    made = []
    for reward in rewards:
        episode = an_episode(len(reward), False, 0)
        episode.reward = torch.tensor(reward)
        made.append(episode)
    episodes = Episodes(made, EnvSpec(OBS, ACTION, 10.0, "test", 100))
    replay = decisions(episodes, spec_of(execute), gamma, returns=behind_cut)
    return replay.latest()["return_to_go"][:, 0]


def test_what_may_follow_a_cut():
    """-1 per tick, cut off: -10 everywhere with gamma 0.9, and not the sum of what was recorded; unless asked for."""
    for execute in (1, 2, 3):
        for behind_cut in (BehindCut.worst, BehindCut.last):
            torch.testing.assert_close(returns([[-1.0] * 5], execute, behind_cut), torch.full((5,), -10.0))
    summed = torch.tensor([-(1 - 0.9**n) / 0.1 for n in (5, 4, 3, 2, 1)])
    torch.testing.assert_close(returns([[-1.0] * 5], behind_cut=BehindCut.nothing), summed)
    # Success is a reward of 0 that goes on; the worst of all recordings does not know.
    both = [[-1.0, 0.0], [-1.0, -1.0]]
    for behind_cut, expected in ((BehindCut.last, [-1, 0, -10, -10]), (BehindCut.worst, [-9.1, -9, -10, -10])):
        torch.testing.assert_close(returns(both, behind_cut=behind_cut), torch.tensor(expected, dtype=torch.float32))


def test_only_the_worst_is_a_bound_from_below_whatever_follows():
    """Beside the true return of what would have followed the cut."""
    source = torch.Generator().manual_seed(0)
    lies = dict.fromkeys(BehindCut, 0)
    for _ in range(50):
        whole = torch.rand(300, generator=source) * 2 - 1.5  # dense, mostly negative; behind 300 ticks nothing counts
        truth = [float(sum(GAMMA**k * r for k, r in enumerate(whole[t:].tolist()))) for t in range(10)]
        for kind in BehindCut:
            told = returns([whole[:10].tolist(), [-1.5]], behind_cut=kind)[:10]
            lies[kind] += int((told > torch.tensor(truth) + 1e-3).sum())
    assert lies[BehindCut.worst] == 0 and min(lies[BehindCut.last], lies[BehindCut.nothing]) > 100


def test_behind_a_termination_there_is_nothing():
    episodes = some(lengths=(5,), terminated=(True,))
    told = [decisions(episodes, spec_of(1), GAMMA, returns=kind).latest() for kind in BehindCut]
    assert all(torch.equal(x["return_to_go"], told[0]["return_to_go"]) for x in told)
    expected = sum(GAMMA**t * float(r) for t, r in enumerate(episodes[0].reward))
    assert float(told[0]["return_to_go"][0, 0]) == pytest.approx(expected, abs=1e-5)


def test_without_discount_nothing_can_go_on_for_ever():
    assert float(returns([[1.0, 2.0]], behind_cut=BehindCut.nothing, gamma=1.0)[0]) == 3.0
    with pytest.raises(BurnishError, match=r"behind_cut=worst continues a reward for ever.*take behind_cut=nothing"):
        returns([[1.0, 2.0]], gamma=1.0)


def test_sums_over_several_decisions_stay_within_their_phase():
    """Two decisions of 3 ticks are 6 ticks of the recording: phases lie one behind the other, and do not mix."""
    episodes = some(lengths=(7,), terminated=(False,))
    replay = decisions(episodes, spec_of(3), GAMMA)
    got = replay.gather(torch.arange(len(replay)), n_step=2)
    reward = episodes[0].reward
    row = 3  # the first decision of phase 1, behind the three of phase 0
    assert float(got["reward"][row]) == pytest.approx(sum(0.9**t * float(reward[1 + t]) for t in range(6)), abs=1e-5)
    assert torch.equal(got["next_obs"]["state"][row], episodes[0].obs["state"][7])
    assert int(got["decisions"][2]) == 1  # the last of phase 0 ends there


def test_scales_are_fitted_to_the_data():
    episodes = some()
    policy = build_policy(GaussianConfig(hidden=[4]), spec_of(2, history=2))
    replay = decisions(episodes, policy.spec, GAMMA)
    fit_normalizers(policy, replay, Scaling.minmax)
    seen = replay.latest()["obs"]["state"].flatten(0, 2)
    scaled = policy.encoder.normalizer({"state": seen})["state"]
    assert float(scaled.detach().min()) == pytest.approx(-1.0) and float(scaled.detach().max()) == pytest.approx(1.0)


def test_refusals():
    episodes, spec = some(), spec_of(2)
    with pytest.raises(BurnishError, match="no episodes"):
        decisions(Episodes([], episodes.spec), spec, GAMMA)
    with pytest.raises(BurnishError, match=r"needs 'image\.top', but the recordings hold"):
        decisions(episodes, replace(spec, obs=ObsSpec({"image.top": (1, 2, 2)})), GAMMA)
    with pytest.raises(BurnishError, match=r"episode 0 has action 2\.\d* in row 0, .* outside the limits"):
        beyond = some()
        beyond[0].action[0, 0] = 2.1
        decisions(beyond, spec, GAMMA)
    for name, value in (("action_mode", "velocity"), ("control_hz", 50.0)):
        with pytest.raises(BurnishError, match=f"the policy acts with {name}={value}, but the recordings"):
            decisions(episodes, replace(spec, **{name: value}), GAMMA)
    for mode in (None, "unknown", "gym:Pendulum-v1"):  # controls: these say nothing that could misfit
        assert len(decisions(episodes, replace(spec, action_mode=mode), GAMMA)) > 0
