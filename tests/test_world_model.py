"""Learned worlds: what the ensemble learns of worlds whose dynamics are known, and the imagined world as a `VecEnv`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from burnish.finetune.world_model.check import FEWEST, calibrate_success, examined, require_both, spearman
from burnish.finetune.world_model.env import Guard, GuardConfig, ImaginedEnv, Starts, shortly_before_success
from burnish.finetune.world_model.model import Fit, ModelConfig, Prediction, WorldModel
from burnish.finetune.world_model.ticks import Tape, Ticks
from burnish.policies.core.chunk import HistoryEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import ObsSpec
from burnish.policies.core.types import VecEnv
from burnish.policies.measure.evaluate import evaluate, evaluation_seeds
from burnish.sim.point_reach import PointReach, PointReachConfig, Reward
from burnish.sim.toy import LQR, ConstantReward, LQRConfig, lqr_matrices

RADIUS = 0.5  # m; so wide that random play succeeds in a third of its episodes
SMALL = ModelConfig(members=3, hidden=[64, 64], updates=600)


def played(env: VecEnv, ticks: int, seed: int = 0) -> Ticks:
    """So many ticks of uniformly random actions in every world of ``env``, which takes actions in [-1, 1]."""
    tape, dice = Tape(env, Ticks()), torch.Generator().manual_seed(seed)
    tape.reset()
    for _ in range(ticks):
        step = tape.step(torch.rand(env.num_envs, env.spec.action.dim, generator=dice) * 2 - 1)
        if bool((ended := step.terminated | step.truncated).any()):
            tape.reset(ended)
    return tape.ticks


def fitted(env: VecEnv, ticks: Ticks, config: ModelConfig = SMALL) -> WorldModel:
    model = WorldModel(env.spec, config, seed=1)
    model.prepare(ticks)
    Fit(model, 2).steps(ticks.split()[0], config.updates)
    model.calibrate(ticks)
    return model


@pytest.fixture(scope="module")
def lqr():
    env = ScaledEnv(LQR(16, LQRConfig(noise=0.0, max_steps=20, limit=4.0)))
    ticks = played(env, 120)
    return env, ticks, fitted(env, ticks)


def reaching(num_envs: int = 16) -> ScaledEnv:
    config = PointReachConfig(reward=Reward.sparse, goal_in_state=True, radius=RADIUS, max_steps=25)
    return ScaledEnv(PointReach(num_envs, config, seed=3))


@pytest.fixture(scope="module")
def reach():
    env = reaching()
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
    imagined = ImaginedEnv(model, 4, GuardConfig(Guard.none))
    imagined.begin(ticks)
    imagined.reset()
    assert imagined.step(torch.zeros(4, 1)).reward.tolist() == [1.0] * 4


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

    imagined = ImaginedEnv(model, 64, GuardConfig(Guard.none))
    imagined.begin(ticks)
    seeds = evaluation_seeds(64)
    for share in (0.25, 0.5):
        calibrate_success(imagined, imagined, Slow(), share, seeds)
        rate = evaluate(imagined, Slow(), seeds).summary()["success_rate"]
        assert abs(rate - share) <= 4 / 64  # scores that round to 1 are ties


class TrueModel(WorldModel):
    """The dynamics of PointReach themselves, in place of a fit; members disagree by ``doubt`` left of x = 0."""

    def __init__(self, env: VecEnv, doubt: float = 0.0):
        super().__init__(env.spec, SMALL)
        self.doubt = doubt
        self.known_reward.fill_(True)
        self.rewards.copy_(torch.tensor([0.0, 1.0, 0.0]))

    def predict(self, obs, action, member, noise):
        state = obs["state"].clone()
        state[:, :2] = (state[:, :2] + action / 20.0).clamp(-1, 1)
        success = (state[:, :2] - state[:, 2:]).square().sum(1).sqrt() <= RADIUS
        nothing = torch.zeros_like(success)
        beyond = self.doubt * (obs["state"][:, 0] < 0)
        score = torch.stack([success.float(), nothing.float()], 1)
        return Prediction({"state": state}, success.float(), success, nothing, score, beyond)


def test_the_true_dynamics_give_what_the_world_gives(reach):
    env, ticks, _ = reach
    imagined = ImaginedEnv(TrueModel(env), 16, GuardConfig(Guard.none, verify=True), starts=Starts.any)
    imagined.begin(ticks)
    real, seen = reaching(), imagined.reset()
    real.reset()
    raw: Any = real.env
    start, goal = seen["state"].clone().split(2, 1)
    raw._state = {"position": start, "velocity": torch.zeros_like(start), "goal": goal}
    active = torch.ones(16, dtype=torch.bool)
    dice = torch.Generator().manual_seed(1)
    for _ in range(25):
        action = torch.rand(16, 2, generator=dice) * 2 - 1
        ours, theirs = imagined.step(action, active), real.step(action, active)
        for x, y in (
            (ours.obs["state"], theirs.obs["state"]),
            (ours.reward, theirs.reward),
            (ours.terminated, theirs.terminated),
            (ours.truncated, theirs.truncated),
            (ours.info["success"], theirs.info["success"]),
        ):
            assert torch.allclose(x[active].float(), y[active].float(), atol=1e-6)
        active &= ~(ours.terminated | ours.truncated)
    assert not active.any()


def test_rows_outside_the_mask_stay_and_a_saved_state_goes_on(reach):
    _, ticks, model = reach

    def world():
        made = ImaginedEnv(model, 6, GuardConfig(Guard.none, verify=True), seed=4)
        made.begin(ticks)
        return made

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
    env, ticks, _ = reach
    imagined = ImaginedEnv(TrueModel(env, doubt=2.0), 64, GuardConfig(kind, penalty=0.5), starts=Starts.any)
    imagined.begin(ticks)
    imagined.limit = 1.0
    lost = imagined.reset()["state"][:, 0] < 0
    step = imagined.step(torch.zeros(64, 2))
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
    }[kind]
    assert {key: float(x) for key, x in found.items()} == expected
    assert not (step.terminated | step.truncated)[other].any() and not step.reward[other].any()
    assert imagined.share_unknown() == float(beyond.sum()) / 64 and imagined.share_unknown() == 0


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
        ImaginedEnv(TrueModel(env), 2, GuardConfig()).reset()


def test_rank_correlation():
    x = torch.tensor([3.0, 1.0, 2.0, 9.0])
    assert spearman(x, x.exp()) == pytest.approx(1.0) and spearman(x, -x) == pytest.approx(-1.0)
