"""Learned worlds: what the ensemble learns of worlds whose dynamics are known, and the imagined world as a `VecEnv`."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from imagine_lab import REACHING, SMALL, TrueModel, fitted, imagined, pendulums, placed, played

from burnish.finetune.world_model.check import FEWEST, calibrate_success, examined, lacking, spearman
from burnish.finetune.world_model.env import Guard, GuardConfig, ImaginedEnv, Starts, shortly_before_success
from burnish.finetune.world_model.model import Fit, WorldModel
from burnish.finetune.world_model.sindy import SINDyConfig
from burnish.finetune.world_model.ticks import Tape, Ticks, looked_at, previous
from burnish.policies.core.chunk import HistoryEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import ObsSpec
from burnish.policies.measure.evaluate import evaluate, evaluation_seeds
from burnish.sim.point_reach import PointReach
from burnish.sim.toy import LQR, ConstantReward, LQRConfig, lqr_matrices


@pytest.fixture(scope="module")
def lqr():
    env = ScaledEnv(LQR(16, LQRConfig(noise=0.0, max_steps=20, limit=4.0)))
    ticks = played(env, 120)
    return env, ticks, fitted(env, ticks)


@pytest.fixture(scope="module")
def reach():
    env = ScaledEnv(PointReach(16, REACHING, seed=3))
    ticks = played(env, 150)
    return env, ticks, fitted(env, ticks)


def test_linear_dynamics_are_learnt(lqr):
    _, ticks, model = lqr
    a, b, _, _ = (x.float() for x in lqr_matrices(LQRConfig()))
    data = ticks.split()[1]
    true = data["obs"]["state"] @ a.T + 4.0 * data["action"] @ b.T
    zero = torch.zeros(len(true), dtype=torch.int64)
    found = model.predict(data["obs"], data["action"], zero, torch.zeros(len(true), 2)).next_obs["state"]
    change = true - data["obs"]["state"]
    # A model that predicts no change has an error of 1 in this unit; 600 updates reach 0.03 to 0.06 over five seeds.
    assert float((found - true).std() / change.std()) < 0.15
    facts = examined(model, ticks)
    assert facts["r2"] > 0.95 and facts["ahead_5"] < 0.3
    shuffled = {**data, "action": data["action"].roll(1, 0)}
    other = model.predict(shuffled["obs"], shuffled["action"], zero, torch.zeros(len(true), 2)).next_obs["state"]
    assert float((other - true).std() / change.std()) > 0.3, "the action does not matter to the model"


def test_a_reward_that_is_known_is_no_prediction():
    env = ScaledEnv(ConstantReward(4))
    ticks = played(env, 20)
    model = WorldModel(env.spec, SMALL)
    model.prepare(ticks)
    assert bool(model.known_reward) and model.rewards[0] == 1.0
    world = imagined(model, ticks, 4, GuardConfig(Guard.none))
    world.reset()
    assert world.step(torch.zeros(4, 1)).reward.tolist() == [1.0] * 4


def test_success_is_imagined_as_often_as_it_happens(reach):
    _, ticks, model = reach
    facts = examined(model, ticks)
    assert bool(model.known_reward) and model.rewards.tolist()[:2] == [0.0, 1.0]
    # Held out are a fifth of some 110 episodes; the threshold makes the numbers of episodes equal, not the episodes.
    # A score of chance would find a success with the probability of one, about a third.
    assert facts["recall"] > 0.5 and facts["false_alarms"] < 0.3

    class Slow:
        """Goes to the goal, and is there in time if it begins near."""

        def reset(self, mask, seeds=None): ...

        def step(self, obs):
            return 0.5 * (obs["state"][:, 2:] - obs["state"][:, :2]).clamp(-1, 1)

    world = imagined(model, ticks, 64, GuardConfig(Guard.none))
    seeds = evaluation_seeds(64)
    for share in (0.25, 0.5):
        calibrate_success(world, world, Slow(), share, seeds)
        rate = evaluate(world, Slow(), seeds).summary()["success_rate"]
        assert abs(rate - share) <= 4 / 64  # scores that round to 1 are ties


def test_the_true_dynamics_give_what_the_world_gives(reach):
    _, ticks, _ = reach
    here = imagined(TrueModel(REACHING), ticks, 16, GuardConfig(Guard.none, verify=True), starts=Starts.any)
    real = placed(PointReach(16, REACHING), here.reset())
    active = torch.ones(16, dtype=torch.bool)
    dice = torch.Generator().manual_seed(1)
    for _ in range(25):
        action = torch.rand(16, 2, generator=dice) * 2 - 1
        ours, theirs = here.step(action, active), real.step(action, active)
        for x, y in (
            (ours.obs["state"], theirs.obs["state"]),
            (ours.reward, theirs.reward),
            (ours.terminated, theirs.terminated),
            (ours.truncated, theirs.truncated),
            (ours.info["success"], theirs.info["success"]),
        ):
            assert torch.equal(x[active], y[active])
        active &= ~(ours.terminated | ours.truncated)
    assert not active.any()


def test_rows_outside_the_mask_stay_and_a_saved_state_goes_on(reach):
    _, ticks, model = reach

    def world():
        return imagined(model, ticks, 6, GuardConfig(Guard.none, verify=True), seed=4)

    one, action = world(), torch.full((6, 2), 0.3)
    before = one.reset()["state"].clone()
    some = torch.tensor([True, False, True, False, True, False])
    after = one.step(action, some).obs["state"]
    assert torch.equal(after[~some], before[~some]) and not torch.equal(after[some], before[some])
    assert torch.equal(one.reset(~some)["state"][some], after[some])
    state, other = copy.deepcopy(one.state_dict()), world()
    other.load_state_dict(state)
    for _ in range(4):
        x, y = one.step(action), other.step(action)
        assert torch.equal(x.obs["state"], y.obs["state"]) and torch.equal(x.info["success"], y.info["success"])
    seeds = list(range(6))
    again = [world().reset(seeds=seeds)["state"] for _ in range(2)]
    assert torch.equal(*again) and not torch.equal(again[0], world().reset(seeds=[x + 9 for x in seeds])["state"])


def test_a_saved_world_goes_on_where_it_is_loaded(reach):
    _, ticks, model = reach
    options = GuardConfig(Guard.none, verify=True)
    world, elsewhere = imagined(model, ticks, 2, options), ImaginedEnv(model, 2, options, device="meta")
    world.reset()
    elsewhere.load_state_dict(world.state_dict())
    assert {x.device.type for x in (*elsewhere._obs.values(), *elsewhere._shadow.values())} == {"meta"}


@pytest.mark.parametrize("kind", list(Guard))
def test_guards_act_where_the_members_disagree(reach, kind):
    _, ticks, _ = reach
    paid = {"penalty": 0.5} if kind in (Guard.halt, Guard.penalty) else {}
    world = imagined(TrueModel(REACHING, doubt=2.0), ticks, 64, GuardConfig(kind, **paid), starts=Starts.any)
    world.limit = 1.0
    lost = world.reset()["state"][:, 0] < 0
    step = world.step(torch.zeros(64, 2))
    beyond, other = lost & ~step.info["success"], ~lost & ~step.info["success"]
    assert beyond.sum() > 5 and other.sum() > 5
    found = {
        "terminated": step.terminated[beyond].float().mean(),
        "truncated": step.truncated[beyond].float().mean(),
        "reward": step.reward[beyond].mean(),
    }
    expected = {
        Guard.none: {"terminated": 0, "truncated": 0, "reward": 0},
        Guard.cut: {"terminated": 0, "truncated": 1, "reward": 0},
        Guard.halt: {"terminated": 1, "truncated": 0, "reward": -0.5},
        Guard.penalty: {"terminated": 0, "truncated": 0, "reward": -1.0},  # 0.5 for each limit of disagreement
        Guard.weight: {"terminated": 0, "truncated": 0, "reward": 0},
    }[kind]
    assert {key: float(x) for key, x in found.items()} == expected
    assert not (step.terminated | step.truncated)[other].any() and not step.reward[other].any()
    assert world.share_unknown() == float(beyond.sum()) / 64 and world.share_unknown() == 0
    assert ("weight" in step.info) == (kind is Guard.weight)
    if kind is Guard.weight:  # 1 / (1 + 2^2), where members disagree twice as much as at the limit
        assert torch.allclose(step.info["weight"][lost], torch.tensor(0.2)) and (step.info["weight"][~lost] == 1).all()
    # Worlds that do not tick are neither moved nor counted, whatever becomes of the others.
    some = torch.arange(64) < 32
    before = {key: x.clone() for key, x in world.state_dict().items() if isinstance(x, torch.Tensor) and len(x) == 64}
    seen = world._obs["state"].clone()
    world.step(torch.full((64, 2), 0.5), some)
    world.reset(some)
    assert torch.equal(world._obs["state"][~some], seen[~some]) and world.unknown[1] == 32
    after = world.state_dict()
    assert "tick" in before and all(torch.equal(after[key][~some], x[~some]) for key, x in before.items())


def test_key_starts_lie_shortly_before_a_success():
    length, number = torch.arange(60), torch.tensor([0] * 30 + [1] * 30)
    success = torch.zeros(60, dtype=torch.bool)
    success[29] = True  # only the first episode succeeds, at its end
    mixed = torch.arange(60).view(2, 30).T.flatten()  # as two worlds are written at once
    data = {"episode": number, "success": success, "terminated": success}
    chosen = shortly_before_success({key: x[mixed] for key, x in data.items()})
    assert sorted(length[mixed][chosen].tolist()) == list(range(9, 25))  # 5 to 20 ticks before tick 29


def test_a_history_is_taken_apart():
    env = HistoryEnv(ScaledEnv(LQR(2, LQRConfig(max_steps=5))), 3)
    tape = Tape(env, Ticks(), history=3)
    first = tape.reset()["state"][:, -1].clone()
    second = tape.step(torch.ones(2, 1)).obs["state"][:, -1].clone()
    tape.step(torch.zeros(2, 1), torch.tensor([True, False]))
    data = tape.ticks.all()
    assert tape.single_frames.obs == ObsSpec({"state": (2,)})
    assert torch.equal(data["obs"]["state"][:2], first) and torch.equal(data["next_obs"]["state"][:2], second)
    assert data["episode"].tolist() == [0, 1, 0] and data["first"].tolist() == [True, True, False]
    assert data["action"][:, 0].tolist() == [1, 1, 0]


def test_the_frames_behind_a_tick_are_those_of_its_episode():
    episode = torch.tensor([0, 1, 0, 1, 0, 2])  # as two worlds are written at once
    assert previous(episode).tolist() == [0, 1, 0, 1, 2, 5]
    assert previous(episode[[0, 2, 4]]).tolist() == [0, 0, 1], "of a single one the first has none behind it"


@pytest.mark.parametrize("ends", [False, True])
def test_rewards_of_what_never_happened_are_zero(ends):
    env = ScaledEnv(LQR(1, LQRConfig()))
    rows, no = torch.randn(20, 2), torch.zeros(20, dtype=torch.bool)
    ticks = Ticks()
    facts = {"reward": torch.full((20,), 3.0), "terminated": no | ends, "success": no, "first": ~no}
    seen = {"obs": {"state": rows}, "next_obs": {"state": rows + 1}, "action": torch.rand(20, 1)}
    ticks.add({**seen, **facts, "episode": torch.arange(20)})
    model = WorldModel(env.spec, SMALL)
    model.prepare(ticks)
    assert model.rewards.tolist() == ([0, 0, 3] if ends else [3, 0, 0])


# ---- what a fit costs ----


def test_a_fit_is_examined_on_so_many_ticks_of_whole_episodes(lqr, monkeypatch):
    _, ticks, model = lqr
    held, asked = ticks.split()[1], []
    assert looked_at(held)["episode"].shape == held["episode"].shape, "all of few"
    monkeypatch.setattr("burnish.finetune.world_model.ticks.LOOKED_AT", 50)
    some = looked_at(held)
    assert 50 <= len(some["episode"]) < 50 + 20 < len(held["episode"])
    for number in some["episode"].unique():
        assert (some["episode"] == number).sum() == (held["episode"] == number).sum()
    assert torch.equal(some["obs"]["state"], looked_at(held)["obs"]["state"]), "a resumed run sees the same"

    def counted(given, obs, action, *rest):
        asked.append(len(action))
        return given(obs, action, *rest)

    for name in ("changes_of", "predict"):
        monkeypatch.setattr(model, name, partial(counted, getattr(model, name)))
    monkeypatch.setattr("burnish.finetune.world_model.check.BEGINNINGS", 10)
    examined(model, ticks)
    assert asked[0] == len(some["episode"]) and max(asked[1:]) <= 10 and len(asked) == 1 + 5 + 20


def test_the_limit_is_measured_on_so_many_ticks(lqr, monkeypatch):
    _, ticks, model = lqr
    whole = imagined(model, ticks, 2, GuardConfig(limit=2.0)).limit
    doubt = model.disagreement(ticks.all()["obs"], ticks.all()["action"])
    assert whole == pytest.approx(2 * float(doubt.amax()))
    monkeypatch.setattr("burnish.finetune.world_model.env.MEASURED", 100)
    some = [imagined(model, ticks, 2, GuardConfig(limit=2.0)).limit for _ in range(2)]
    assert 0 < some[0] == some[1] <= whole
    asked: list[int] = []
    monkeypatch.setattr(model, "disagreement", lambda obs, action: asked.append(len(action)) or doubt)
    world = imagined(model, ticks, 2, GuardConfig())
    world.begin(ticks, 7.0)
    assert asked == [100] and world.limit == 7.0, "a limit that is known is not measured"


def test_a_twin_is_asked_once_about_each_tick():
    env, asked = pendulums(), []
    known: Any = env.known_dynamics

    def twin(obs, action):
        asked.append(len(action))
        return known(obs, action)

    ticks, model = played(env, 25), WorldModel(env.spec, SMALL, twin=twin)
    for count in (1, 2):
        model.prepare(ticks)
        Fit(model, 0).steps(ticks.split()[0], 1)
        model.choose_elites(ticks)
        assert asked == [8 * 25] * count
        led = model.state_of(ticks.all()["next_obs"])
        assert torch.allclose(model.expected_in(ticks.all()).to(led), led, atol=1e-5)
        ticks.add({**played(env, 25, seed=count).all(), "episode": torch.arange(200) + 200 * count})
    other = Ticks()
    other.load_state_dict(copy.deepcopy(ticks.state_dict()))
    model.prepare(other)
    assert asked == [200, 200, 200] and "expected" not in ticks.state_dict()["ticks"]
    old = Ticks()
    old.load_state_dict({key: x for key, x in ticks.state_dict().items() if key != "expected"})
    model.prepare(old)
    assert asked[3:] == [600], "an older state knows nothing of it"
    assert torch.equal(model.expected_in(other.all()), model.expected_in(old.all()))


def test_what_cannot_be_learnt_is_refused(reach):
    env, ticks, _ = reach
    pictures = ObsSpec({"image.top": (3, 8, 8), "state": (4,)})
    with pytest.raises(BurnishError, match="the policy sees image"):
        WorldModel(type(env.spec)(**{**env.spec.__dict__, "obs": pictures}), SMALL)
    assert not lacking(ticks)
    never = Ticks()
    never.add({**ticks.all(), "success": torch.zeros(len(ticks), dtype=torch.bool)})
    never.knows_success = True
    assert f"0 succeeded: a model needs at least {FEWEST} successes" in lacking(never)
    for kind in (Guard.cut, Guard.none, Guard.weight):
        with pytest.raises(BurnishError, match=rf"guard\.penalty=2\.0 is not read with guard\.kind={kind.value}"):
            GuardConfig(kind, penalty=2.0)
    with pytest.raises(BurnishError, match=r"model\.sindy is not read with model\.kind=ensemble"):
        replace(SMALL, sindy=SINDyConfig(degree=3))
    with pytest.raises(BurnishError, match="no tick was played"):
        Ticks().all()
    with pytest.raises(BurnishError, match="call begin"):
        ImaginedEnv(TrueModel(REACHING), 2, GuardConfig()).reset()


def test_worlds_follow_the_members_that_are_right_about_ticks_they_have_not_seen(lqr):
    env, ticks, model = lqr
    chosen = WorldModel(env.spec, replace(SMALL, elites=2), seed=1)
    chosen.load_state_dict({**model.state_dict(), "elites": chosen.elites})
    with torch.no_grad():  # the first member is spoilt
        chosen.dynamics.layers[-1].bias[0] += 1.0  # pyright: ignore
    chosen.choose_elites(ticks)
    assert chosen.elites.tolist() == [1, 2]
    world = imagined(chosen, ticks, 64, GuardConfig(Guard.none, verify=True))
    world.reset()
    assert world._member.unique().tolist() == [1, 2] and (world._member[0] != world._member[1]).all()


def test_rank_correlation():
    x = torch.tensor([3.0, 1.0, 2.0, 9.0])
    assert spearman(x, x.exp()) == pytest.approx(1.0) and spearman(x, -x) == pytest.approx(-1.0)
