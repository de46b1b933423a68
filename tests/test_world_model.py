"""Learned worlds: what the ensemble learns of worlds whose dynamics are known, and the imagined world as a `VecEnv`."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from imagine_lab import SMALL, TrueModel, fitted, imagined, placed, played

from burnish.finetune.world_model.check import FEWEST, calibrate_success, examined, require_both, spearman
from burnish.finetune.world_model.env import Guard, GuardConfig, ImaginedEnv, Starts, shortly_before_success
from burnish.finetune.world_model.model import WorldModel
from burnish.finetune.world_model.ticks import Tape, Ticks
from burnish.policies.core.chunk import HistoryEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import ObsSpec
from burnish.policies.measure.evaluate import evaluate, evaluation_seeds
from burnish.sim.point_reach import PointReach, PointReachConfig, Reward
from burnish.sim.toy import LQR, ConstantReward, LQRConfig, lqr_matrices

# A radius (m) so wide that random play succeeds in a third of its episodes.
REACHING = PointReachConfig(reward=Reward.sparse, goal_in_state=True, radius=0.5, max_steps=25)


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


@pytest.mark.parametrize("kind", list(Guard))
def test_guards_act_where_the_members_disagree(reach, kind):
    _, ticks, _ = reach
    world = imagined(TrueModel(REACHING, doubt=2.0), ticks, 64, GuardConfig(kind, penalty=0.5), starts=Starts.any)
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


def test_what_cannot_be_learnt_is_refused(reach):
    env, ticks, _ = reach
    pictures = ObsSpec({"image.top": (3, 8, 8), "state": (4,)})
    with pytest.raises(BurnishError, match="the policy sees image"):
        WorldModel(type(env.spec)(**{**env.spec.__dict__, "obs": pictures}), SMALL)
    require_both(ticks)
    never = Ticks()
    never.add({**ticks.all(), "success": torch.zeros(len(ticks), dtype=torch.bool)})
    never.knows_success = True
    with pytest.raises(BurnishError, match=f"0 with success: a model needs at least {FEWEST} of each"):
        require_both(never)
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
