"""Windows against a slow explicit loop; refusals; splits without a leak."""

from dataclasses import replace

import pytest
import torch

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.data.episodes import Episode, Episodes, action_limits
from burnish.policies.data.windows import Pad, Windows

LOW, HIGH = (-2.0, 0.5), (1.0, 4.5)
SHAPES = {"state": (3,), "image.front": (3, 4, 5), "goal": (2,), "goal_mask": ()}
SPEC = EnvSpec(ObsSpec(SHAPES), ActionSpec(LOW, HIGH), control_hz=20.0, action_mode="velocity", max_steps=50)


def make_episode(steps: int, seed: int) -> Episode:
    """Values are unlike between episodes and rows, so that a window of the wrong row cannot pass unseen."""
    g = torch.Generator().manual_seed(seed)
    obs = {
        "state": torch.randn(steps + 1, 3, generator=g),
        "image.front": torch.randint(0, 256, (steps + 1, 3, 4, 5), generator=g, dtype=torch.uint8),
        "goal": torch.randn(steps + 1, 2, generator=g),
        "goal_mask": torch.ones(steps + 1),
    }
    action = torch.rand(steps, 2, generator=g) * (torch.tensor(HIGH) - torch.tensor(LOW)) + torch.tensor(LOW)
    reward = torch.randn(steps, generator=g)
    return Episode(obs, action, reward, terminated=seed % 2 == 0, truncated=seed % 2 == 1, success=True, seed=seed)


def make_episodes(lengths: list[int]) -> Episodes:
    return Episodes([make_episode(steps, seed) for seed, steps in enumerate(lengths)], SPEC)


def policy(horizon: int = 4, start: int = 0, history: int = 1) -> PolicySpec:
    return PolicySpec(SPEC.obs, SPEC.action, horizon, execute=1, start=start, history=history)


def loop_windows(episodes: Episodes, spec: PolicySpec, pad: Pad):
    """The definition, one window and one position at a time."""
    low, high = torch.tensor(LOW, dtype=torch.float64), torch.tensor(HIGH, dtype=torch.float64)
    for episode in episodes:
        steps = len(episode.action)
        for t in range(steps):
            obs = {}
            for key, x in episode.obs.items():
                if spec.history > 1 and key in ("state", "image.front"):
                    obs[key] = torch.stack([x[max(0, t - spec.history + 1 + i)] for i in range(spec.history)])
                else:
                    obs[key] = x[t]
            chunk, mask = [], []
            for j in range(spec.horizon):
                i = t - spec.start + j
                inside = 0 <= i < steps
                scaled = (2 * (episode.action[min(max(i, 0), steps - 1)].double() - low) / (high - low) - 1).float()
                chunk.append(scaled if inside or pad is Pad.repeat else torch.zeros(2))
                mask.append(inside)
            yield obs, torch.stack(chunk), torch.tensor(mask)


@pytest.mark.parametrize("pad", list(Pad))
@pytest.mark.parametrize("horizon, start, history", [(1, 0, 1), (4, 0, 1), (4, 2, 3), (16, 1, 2), (3, 2, 5)])
def test_windows_equal_the_explicit_loop(horizon, start, history, pad):
    g = torch.Generator().manual_seed(horizon)
    lengths = [1, *torch.randint(1, 12, (8,), generator=g).tolist(), 1]
    episodes, spec = make_episodes(lengths), policy(horizon, start, history)
    windows = Windows(episodes, spec, pad)
    batch = windows[torch.arange(len(windows))]
    spec.inputs.check(batch.obs)
    expected = list(loop_windows(episodes, spec, pad))
    assert len(windows) == len(expected) == episodes.frames == sum(lengths)
    for row, (obs, action, mask) in enumerate(expected):
        torch.testing.assert_close(batch.action[row], action, rtol=0, atol=1e-6)  # float32 against the loop's float64
        assert batch.mask[row].equal(mask)
        assert all(batch.obs[key][row].equal(value) for key, value in obs.items())
    assert batch.action.dtype == torch.float32 and batch.obs["image.front"].dtype == torch.uint8


def test_another_alignment_does_not_pass():
    """Negative control: the loop shifted by one step disagrees, so the comparison above can fail."""
    episodes = make_episodes([5, 7])
    batch = Windows(episodes, policy(4, start=1))[torch.arange(12)]
    shifted = [action for _, action, _ in loop_windows(episodes, policy(4, start=0), Pad.repeat)]
    assert float((batch.action - torch.stack(shifted)).abs().max()) > 0.1


def test_sampling_is_uniform_repeatable_and_returns_only_what_was_stored():
    episodes = make_episodes([1, 3, 2])
    windows = Windows(episodes, policy(2))
    g = torch.Generator().manual_seed(0)
    state = g.get_state()
    first = windows.sample(6000, g)
    g.set_state(state)
    again = windows.sample(6000, g)
    assert first.action.equal(again.action) and first.obs["state"].equal(again.obs["state"])
    stored = torch.cat([e.obs["state"][:-1] for e in episodes])
    hits = (first.obs["state"][:, None] == stored).all(-1)
    assert bool((hits.sum(1) == 1).all())  # in particular, no final observation
    # 6000 draws over 6 windows: standard deviation of a count is 28.9; 5 of them is a one-in-a-million failure.
    assert bool(((hits.sum(0) - 1000).abs() < 5 * 28.9).all())


def test_columns_hold_the_training_split_only():
    episodes = make_episodes([2, 3, 4, 5])
    train, valid = episodes.split(0.25, seed=3)
    column = Windows(train, policy()).columns["state"]
    assert column.equal(torch.cat([e.obs["state"][:-1] for e in train]))
    held_out = valid[0].obs["state"]
    assert not bool((held_out[:, None] == column).all(-1).any())


def test_split_is_by_episode_deterministic_and_complete():
    episodes = make_episodes([2] * 20)
    train, valid = episodes.split(0.2, seed=0)
    seeds = [[e.seed for e in part] for part in (train, valid)]
    assert len(valid) == 4 and sorted(seeds[0] + seeds[1]) == list(range(20))
    assert seeds == [[e.seed for e in part] for part in episodes.split(0.2, seed=0)]
    assert seeds != [[e.seed for e in part] for part in episodes.split(0.2, seed=1)]
    assert [len(part) for part in make_episodes([2, 2]).split(0.01, 0)] == [1, 1]
    assert [len(part) for part in episodes.split(0.0, 0)] == [20, 0]
    for fraction, few in ((0.5, [2]), (1.0, [2, 2]), (-0.1, [2, 2])):
        with pytest.raises(BurnishError):
            make_episodes(few).split(fraction, 0)


@pytest.mark.parametrize("key", ["state", "goal", "action", "reward"])
@pytest.mark.parametrize("value, word", [(float("nan"), "NaN"), (float("inf"), "infinite")])
def test_bad_numbers_are_refused_by_name_and_row(key, value, word):
    good = make_episode(6, seed=7)
    obs, fields = dict(good.obs), {"action": good.action.clone(), "reward": good.reward.clone()}
    target = fields if key in fields else obs
    target[key] = target[key].clone()
    target[key][4] = value
    target[key][5] = value
    with pytest.raises(BurnishError, match=rf"seed 7 has .*{word}.*'{key}', first in row 4"):
        replace(good, obs=obs, **fields)


def test_inconsistent_episodes_are_refused():
    good = make_episode(6, seed=7)
    with pytest.raises(BurnishError, match="7 rows"):
        replace(good, obs={**good.obs, "state": good.obs["state"][:-1]})
    with pytest.raises(BurnishError, match="rewards"):
        replace(good, reward=good.reward[:-1])
    with pytest.raises(BurnishError, match="at least one action"):
        replace(good, action=good.action[:0])
    with pytest.raises(BurnishError, match="float64"):
        replace(good, action=good.action.double())
    with pytest.raises(BurnishError, match=r"episode 1 .*lacks 'goal'"):
        Episodes([good, replace(good, obs={k: v for k, v in good.obs.items() if k != "goal"})], SPEC)
    with pytest.raises(BurnishError, match=r"episode 0 .*does not name"):
        Episodes([replace(good, obs={**good.obs, "extra": good.obs["goal"]})], SPEC)
    with pytest.raises(BurnishError, match="dimensions"):
        Episodes([replace(good, action=good.action[:, :1])], SPEC)


def test_actions_outside_the_limits_are_refused_and_rounding_is_clipped():
    episodes = make_episodes([3, 4])
    episodes[1].action[2, 0] = HIGH[0] + 1e-4
    assert float(Windows(episodes, policy()).action.abs().max()) <= 1
    episodes[1].action[2, 0] = HIGH[0] + 0.1
    with pytest.raises(BurnishError, match=r"episode 1 has action .* in row 2, dimension 0"):
        Windows(episodes, policy())


def test_limits_from_data_cover_it_and_never_collapse():
    episodes = make_episodes([3, 4])
    for episode in episodes:
        episode.action[:, 1] = 2.0
    limits = action_limits(episodes, floor=0.5)
    actions = torch.cat([e.action for e in episodes])
    assert limits.low[0] == float(actions[:, 0].min()) and limits.high[0] == float(actions[:, 0].max())
    assert (limits.low[1], limits.high[1]) == (1.75, 2.25)
    scaled = Windows(episodes, replace(policy(), action=limits)).action
    assert scaled[:, 1].equal(torch.zeros(7)) and float(scaled[:, 0].max()) == 1


def test_a_missing_observation_is_named():
    needs = replace(policy(), obs=ObsSpec({"state": (3,), "image.wrist": (3, 4, 5)}))
    with pytest.raises(BurnishError, match=r"image\.wrist"):
        Windows(make_episodes([3]), needs)


def test_to_keeps_the_windows():
    windows = Windows(make_episodes([3, 4]), policy(3, 1, 2))
    moved = windows.to("cpu")
    draw = [w.sample(16, torch.Generator().manual_seed(1)) for w in (windows, moved)]
    assert draw[0].action.equal(draw[1].action) and draw[0].mask.equal(draw[1].mask)
