"""Evaluation on a scripted world: every number is known from the seed, and rows that must not be read are poisoned."""

import json
import math
from dataclasses import replace

import av
import numpy as np
import pytest
import torch

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.seed import EpisodeSeeds, RowNoise, derive
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.policies.core.types import Step
from burnish.policies.core.wrapper import Wrapper
from burnish.policies.measure.evaluate import Evaluation, compare, evaluate, evaluation_seeds
from burnish.policies.measure.statistics import mean_interval, wilson
from report_lab import write_mp4

SEEDS = [11, 4, 25, 7, 0, 90, 3, 18, 6, 41, 2]


def length_of(seed):
    return 2 + seed % 5


def reward_of(seed, tick, action):
    """Computed in float32, as the world does."""
    return torch.tensor(seed % 7, dtype=torch.float32) - tick + action


def success_ticks(seed):
    """Nowhere, in the middle only, or at the last tick."""
    return {0: set(), 1: {1}, 2: {length_of(seed)}}[seed % 3]


class Script:
    """Rows outside ``mask`` and ``active`` come back poisoned: with NaN, or with values that look like a triumph."""

    def __init__(self, num_envs, poison=math.nan, reports_success=True, broken=None, endless=False):
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.spec = EnvSpec(ObsSpec({"state": (2,)}), ActionSpec((-1.0,), (1.0,)), 25.0, "none", 6)
        self.poison, self.reports_success = poison, reports_success
        self.broken, self.endless = broken, endless  # (what, seed): an episode with NaN at its tick 2, or at its start
        self.seeds, self.tick = [None] * num_envs, [0] * num_envs
        self.begun = []

    def observe(self, rows):
        obs = torch.full((self.num_envs, 2), self.poison)
        for i in rows:
            broken = self.broken in (("state", self.seeds[i]), ("start", self.seeds[i]))
            broken = broken and self.tick[i] == (2 if self.broken[0] == "state" else 0)
            obs[i] = torch.tensor([math.nan if broken else self.seeds[i], self.tick[i]])
        return {"state": obs}

    def reset(self, mask=None, seeds=None):
        rows = range(self.num_envs) if mask is None else mask.nonzero().flatten().tolist()
        for i in rows:
            self.seeds[i], self.tick[i] = seeds[i], 0
            self.begun.append(seeds[i])
        return self.observe(rows)

    def step(self, action, active=None):
        rows = active.nonzero().flatten().tolist()
        reward = torch.full((self.num_envs,), self.poison)
        terminated, truncated, success = (torch.ones(self.num_envs, dtype=torch.bool) for _ in range(3))
        for i in rows:
            self.tick[i] += 1
            seed, tick = self.seeds[i], self.tick[i]
            over = tick >= length_of(seed) and not self.endless
            reward[i] = (
                math.nan if self.broken == ("reward", seed) and tick == 2 else reward_of(seed, tick, action[i, 0])
            )
            terminated[i], truncated[i] = over and seed % 2 == 0, over and seed % 2 == 1
            success[i] = tick in success_ticks(seed)
        info = {"success": success} if self.reports_success else {}
        return Step(self.observe(rows), reward, terminated, truncated, info)


class Filmed(Script):
    def render(self):
        """12 x 17 pixels, so one side is odd; red on the ticks of odd number, blue on the others."""
        frames = torch.full((self.num_envs, 12, 17, 3), 255, dtype=torch.uint8)
        for i in range(self.num_envs):
            frames[i] = torch.tensor([200, 20, 20] if self.tick[i] % 2 else [20, 20, 200], dtype=torch.uint8)
        return frames


class Noisy:
    """Acts by its own clock and the seed it was told, so a reset of the wrong rows changes what follows."""

    def __init__(self, num_envs, broken=None):
        self.seeds, self.clock = torch.zeros(num_envs, dtype=torch.int64), torch.zeros(num_envs, dtype=torch.int64)
        self.broken, self.told = broken, []

    def reset(self, mask, seeds=None):
        self.told.append((mask.clone(), list(seeds)))
        self.seeds = torch.where(mask, torch.tensor(seeds), self.seeds)
        self.clock = self.clock.masked_fill(mask, 0)

    def step(self, obs):
        assert (obs["state"].abs() < 1e6).all(), "the controller was shown a poisoned row"
        action = RowNoise(self.seeds, self.clock).uniform((len(self.seeds), 1)).float()
        self.clock = self.clock + 1
        return torch.where((self.seeds == self.broken)[:, None], math.nan, action) if self.broken else action


def expected(seeds):
    """The same episodes, one by one, in a plain loop."""
    returns = []
    for seed in seeds:
        total = 0.0
        for tick in range(1, length_of(seed) + 1):
            action = RowNoise([seed], [tick - 1]).uniform((1, 1)).float()[0, 0]
            total += float(reward_of(seed, tick, action))
        returns.append(total)
    return Evaluation(
        seeds=list(seeds),
        returns=returns,
        lengths=[length_of(s) for s in seeds],
        terminated=[s % 2 == 0 for s in seeds],
        truncated=[s % 2 == 1 for s in seeds],
        success=[bool(success_ticks(s)) for s in seeds],
        success_at_end=[length_of(s) in success_ticks(s) for s in seeds],
    )


@pytest.mark.parametrize("worlds", [1, 3, 8, 16])  # 16 worlds for 11 seeds: some never play
@pytest.mark.parametrize("poison", [math.nan, 1e6])
def test_result_is_that_of_each_seed_alone_for_any_number_of_worlds(worlds, poison):
    assert evaluate(Script(worlds, poison), Noisy(worlds), SEEDS) == expected(SEEDS)


def test_control_the_poison_is_there_and_would_be_seen():
    env = Script(2, 1e6)
    env.reset(torch.tensor([True, True]), [4, 7])
    step = env.step(torch.zeros(2, 1), torch.tensor([True, False]))
    assert (
        step.reward[1] == 1e6 and step.info["success"][1] and step.terminated[1] and (step.obs["state"][1] == 1e6).all()
    )


@pytest.mark.parametrize("worlds", [1, 3])
def test_control_a_controller_that_is_not_restarted_for_each_seed_gives_another_result(worlds):
    class Deaf(Noisy):
        def reset(self, mask, seeds=None):
            self.seeds = torch.where(mask, torch.tensor(seeds), self.seeds)  # but the clock runs on

    assert evaluate(Script(worlds), Deaf(worlds), SEEDS).returns != expected(SEEDS).returns


def test_each_seed_is_played_once_and_resets_touch_only_the_worlds_that_begin():
    env, controller = Script(3), Noisy(3)
    evaluate(env, controller, SEEDS)
    # Begun twice, each seed in another world, to see whether its episode is the same.
    assert env.begun[:6] == [SEEDS[1], SEEDS[2], SEEDS[0], *SEEDS[:3]]
    env.begun = env.begun[6:]
    assert sorted(env.begun) == sorted(SEEDS)
    begun = [
        seed for mask, seeds in controller.told for seed, begins in zip(seeds, mask.tolist(), strict=True) if begins
    ]
    assert begun == env.begun


class Wilful(Script):
    """Begins whatever episode comes next."""

    def reset(self, mask=None, seeds=None):
        return super().reset(mask, [len(self.begun) + i for i in range(self.num_envs)])


class Placed(Script):
    """Each world has its own way to begin, whatever the seed."""

    def observe(self, rows):
        return {"state": super().observe(rows)["state"] + torch.arange(self.num_envs)[:, None]}


class Diced(Script):
    """Begins as its seed says, and goes on as it likes."""

    def observe(self, rows):
        under_way = torch.tensor(self.tick)[:, None] > 0
        return {"state": super().observe(rows)["state"] + under_way * torch.rand(self.num_envs, 1)}


class Unrepeatable(Script):
    repeatable = False


class Passed(Wrapper):
    def step(self, action, active=None):
        return self.env.step(action, active)


@pytest.mark.parametrize("world", [Wilful, Placed, Diced])
def test_a_world_that_ignores_its_seed_gives_no_pairs(world):
    found = evaluate(world(3), Noisy(3), SEEDS)
    assert not found.repeatable
    words = compare(found, found).sentence("it", "itself")
    assert words.startswith("not paired: equal seeds begin different episodes in this world; it succeeds in ")
    control = evaluate(Script(3), Noisy(3), SEEDS)
    assert control.repeatable and "paired seeds" in compare(control, control).sentence()


@pytest.mark.parametrize("wrap", [lambda env: env, Passed, lambda env: Passed(Passed(env))])
def test_a_robot_is_not_reset_to_find_out(wrap):
    env = Unrepeatable(1)
    found = evaluate(wrap(env), Noisy(1), SEEDS)
    assert env.begun == SEEDS and not found.repeatable
    assert found == replace(expected(SEEDS), repeatable=False)


def test_success_is_absent_where_the_world_reports_none():
    result = evaluate(Script(3, reports_success=False), Noisy(3), SEEDS)
    assert result == replace(expected(SEEDS), success=None, success_at_end=None)
    assert not any(key.startswith("success") for key in result.summary())


@pytest.mark.parametrize("what, key", [("state", "state"), ("start", "state"), ("reward", "reward")])
@pytest.mark.parametrize("worlds", [1, 4])  # seed 25 begins after a reset of its own, or with all worlds at once
def test_a_number_that_is_not_finite_is_refused_with_its_seed(what, key, worlds):
    env = Script(worlds, broken=(what, 25))
    with pytest.raises(BurnishError, match=f"'{key}' is not finite in the episode of seed 25"):
        evaluate(env, Noisy(worlds), SEEDS)
    assert env.tick[env.seeds.index(25)] == (0 if what == "start" else 2)  # at once, not when it had spread


def test_an_action_that_is_not_finite_is_refused_before_the_world_sees_it():
    env = Script(1)
    with pytest.raises(BurnishError, match="'action' is not finite in the episode of seed 11"):
        evaluate(env, Noisy(1, broken=11), SEEDS)
    assert env.tick == [0]


def test_an_episode_without_an_end_is_refused():
    with pytest.raises(BurnishError, match="runs past its max_steps=6"):
        evaluate(Script(2, endless=True), Noisy(2), SEEDS)


@pytest.mark.parametrize("seeds", [[], [1, 2, 1]])
def test_seed_lists_that_are_no_evidence_are_refused(seeds):
    with pytest.raises(BurnishError, match="at least one seed, and no seed twice"):
        evaluate(Script(2), Noisy(2), seeds)


def test_progress_counts_to_the_end():
    told = []
    evaluate(Script(3), Noisy(3), SEEDS, progress=lambda finished, total: told.append((finished, total)))
    assert told == sorted(set(told)) and told[-1] == (len(SEEDS), len(SEEDS))


def test_summary():
    result, count = expected(SEEDS), len(SEEDS)
    summary = result.summary()
    wins, at_end = sum(result.success or []), sum(result.success_at_end or [])
    assert 0 < at_end < wins < count  # the script tells the two kinds of success apart
    assert (summary["success_low"], summary["success_high"]) == wilson(wins, count)
    assert summary["success_rate"] == wins / count and summary["episodes"] == count
    assert summary["success_at_end_rate"] == at_end / count
    assert summary["return_mean"] == pytest.approx(np.mean(result.returns))
    assert (summary["return_low"], summary["return_high"]) == mean_interval(result.returns)
    assert summary["length_mean"] == np.mean(result.lengths)
    json.dumps(summary, allow_nan=False)
    assert "return_low" not in expected(SEEDS[:1]).summary()  # one episode says nothing of the spread


def test_saved_and_loaded_again(tmp_path, monkeypatch):
    path, result = tmp_path / "deep" / "evaluation.json", expected(SEEDS)
    result.save(path)
    assert Evaluation.load(path) == result == Evaluation.from_dict(json.loads(json.dumps(result.to_dict())))

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", stopped)  # the last instant before the new file takes its name
    with pytest.raises(KeyboardInterrupt):
        expected(SEEDS[:2]).save(path)
    assert Evaluation.load(path) == result


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"seeds": [1]}', '{"seeds": 1, "returns": 2, "lengths": 3, "terminated": 4, "truncated": 5}'],
)
def test_a_file_that_holds_no_evaluation_is_refused(tmp_path, text):
    path = tmp_path / "evaluation.json"
    path.write_text(text)
    with pytest.raises(BurnishError, match="evaluation"):
        Evaluation.load(path)
    with pytest.raises(BurnishError, match="cannot be read"):
        Evaluation.load(tmp_path / "missing.json")


def test_an_evaluation_refuses_uneven_columns_and_returns_that_are_not_finite():
    result = expected(SEEDS)
    with pytest.raises(BurnishError, match="one value per seed"):
        replace(result, success=result.success[:-1])
    with pytest.raises(BurnishError, match="not finite"):
        replace(result, returns=[math.nan, *result.returns[1:]])


def test_evaluation_seeds_share_nothing_with_each_other_or_with_training():
    # 63-bit numbers: among the 25 000 here a chance meeting has probability 25 000^2 / 2^64, below 1e-10.
    report, select = evaluation_seeds(1000), evaluation_seeds(1000, stream="select")
    training, episode_seeds = [], EpisodeSeeds(0, 1000)
    for _ in range(20):
        training += episode_seeds.begin(torch.ones(1000, dtype=torch.bool)).tolist()
    everything = [*report, *select, *training, *evaluation_seeds(1000, base=1), *(derive(0, i) for i in range(1000))]
    assert len(set(everything)) == len(everything)
    assert evaluation_seeds(10) == report[:10]  # a longer evaluation extends a shorter one
    assert all(0 <= seed < 2**63 for seed in report)


def decode(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        facts = stream.average_rate, stream.codec_context.pix_fmt, stream.codec_context.name
        return facts, np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])


def test_mp4_holds_the_frames_and_roughly_their_colours(tmp_path):
    frames = np.zeros((9, 13, 18, 3), np.uint8)
    frames[:, :, :9], frames[:, :, 9:] = (200, 30, 30), (30, 30, 200)
    frames[5:] = frames[5:, :, ::-1]  # the sides change places
    facts, decoded = decode(write_mp4(tmp_path / "a.mp4", iter(frames), 12.5))
    assert decoded.shape == (9, 14, 18, 3)  # padded to even sides
    assert facts == (12.5, "yuv420p", "h264")
    # H.264 is lossy and halves the colour resolution, so the patches are compared away from their seam, to 12 of 255.
    padded = np.concatenate([frames, frames[:, -1:]], axis=1)
    for patch in (np.s_[:, :, 2:7], np.s_[:, :, 11:16]):
        assert np.abs(decoded[patch].astype(int) - padded[patch].astype(int)).max() <= 12
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


def test_mp4_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = write_mp4(tmp_path / "a.mp4", np.zeros((2, 8, 8, 3), np.uint8), 10)
    before = path.read_bytes()
    bad = [
        [],
        np.zeros((2, 8, 8, 4), np.uint8),
        np.zeros((2, 8, 8, 3)),
        [np.zeros((s, 8, 3), np.uint8) for s in (8, 9)],
    ]
    for frames in bad:
        with pytest.raises(BurnishError, match="video"):
            write_mp4(path, frames, 10)
    with pytest.raises(BurnishError, match="fps=0"):
        write_mp4(path, np.zeros((2, 8, 8, 3), np.uint8), 0)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


@pytest.mark.parametrize("worlds", [1, 3])
def test_evaluation_films_the_chosen_seeds(tmp_path, worlds):
    (tmp_path / "seed_25_failure.mp4").write_bytes(b"of an earlier policy")
    (tmp_path / "seed_4_failure.mp4").write_bytes(b"not evaluated now")
    evaluate(Filmed(worlds), Noisy(worlds), SEEDS, video=tmp_path, video_seeds=[25, 18])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "seed_18_failure.mp4",
        "seed_25_success.mp4",
        "seed_4_failure.mp4",
    ]
    for name, seed in (("seed_18_failure.mp4", 18), ("seed_25_success.mp4", 25)):
        facts, frames = decode(tmp_path / name)
        assert facts[0] == 25 and len(frames) == length_of(seed) + 1  # the first frame is before any action
        middle = frames[:, 6, 8].astype(int)
        assert [bool(red > blue) for red, _, blue in middle] == [tick % 2 == 1 for tick in range(len(frames))]


def test_film_names_no_success_where_none_is_reported(tmp_path):
    evaluate(Filmed(2, reports_success=False), Noisy(2), SEEDS, video=tmp_path, video_seeds=[7])
    assert [p.name for p in tmp_path.iterdir()] == ["seed_7.mp4"]


def test_film_requests_that_cannot_be_met_are_refused(tmp_path):
    with pytest.raises(BurnishError, match=r"Script has no render"):
        evaluate(Script(2), Noisy(2), SEEDS, video=tmp_path, video_seeds=[7])
    with pytest.raises(BurnishError, match=r"video seeds \[5\] are not among"):
        evaluate(Filmed(2), Noisy(2), SEEDS, video=tmp_path, video_seeds=[7, 5])
    with pytest.raises(BurnishError, match="without a folder"):
        evaluate(Filmed(2), Noisy(2), SEEDS, video_seeds=[7])


def test_an_error_in_the_middle_leaves_no_half_film(tmp_path):
    env = Filmed(2, endless=True)
    env.spec = replace(env.spec, max_steps=80)  # more frames than the encoder holds back before it writes
    with pytest.raises(BurnishError, match="runs past"):
        evaluate(env, Noisy(2), SEEDS, video=tmp_path, video_seeds=[11])
    assert list(tmp_path.iterdir()) == []
