"""Models that know something beforehand, against networks: sparse sums of functions, a twin whose errors are learnt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from imagine_lab import SMALL, error, fitted, imagined, pendulums, played

from burnish.finetune.build import prepare
from burnish.finetune.loops import OffPolicyConfig
from burnish.finetune.methods.dsrl import DSRLConfig
from burnish.finetune.methods.imagine import ImagineConfig
from burnish.finetune.methods.mbpo import MBPOConfig
from burnish.finetune.methods.residual_td3 import ResidualTD3Config
from burnish.finetune.methods.rlpd import RLPDConfig
from burnish.finetune.world_model.check import examined
from burnish.finetune.world_model.env import Guard, GuardConfig
from burnish.finetune.world_model.model import Kind, WorldModel
from burnish.finetune.world_model.sindy import MOST, SINDyConfig, products, thresholded
from burnish.offline.sac import SACConfig
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import agent_spec
from burnish.sim.toy import LQR, LQRConfig, lqr_matrices
from seam import make_base, shrunk

SPARSE = replace(SMALL, kind=Kind.sindy, updates=1, sindy=SINDyConfig(degree=3))
FEW = 25  # ticks of each of 8 pendulums


@pytest.fixture(scope="module")
def networks():
    """The error of networks that saw as little."""
    return error(fitted(pendulums(), played(pendulums(), FEW), replace(SMALL, updates=400)))


def test_the_matrices_of_lqr_are_found_and_nothing_else():
    config = LQRConfig(noise=0.0, max_steps=25, limit=4.0)
    env = ScaledEnv(LQR(8, config))
    ticks = played(env, FEW)
    model = fitted(env, ticks, replace(SPARSE, sindy=SINDyConfig()))
    a, b, _, _ = (x.float() for x in lqr_matrices(config))
    # Columns of the Jacobian by differences from the centre of the data, which are exact for a linear law.
    at = torch.cat([model.states.shift[None].repeat(4, 1), torch.zeros(4, 1)], 1) + 0.1 * torch.eye(4, 3).roll(1, 0)
    zero = torch.zeros(4, dtype=torch.int64)
    after = model.predict({"state": at[:, :2]}, at[:, 2:], zero, torch.zeros(4, 2)).next_obs["state"]
    found = ((after[1:] - after[0]) / 0.1).T
    assert torch.allclose(found, torch.cat([a, 4.0 * b], 1), atol=1e-4)
    # Of the nine candidates of degree 2 five are not in the law; those that are: speed and force, and two constants.
    assert int((model.dynamics.weight[0] != 0).sum()) <= 5  # pyright: ignore[reportAttributeAccessIssue]
    assert examined(model, ticks)["ahead_20"] < 1e-3


def test_thresholding_goes_on_until_no_coefficient_is_small():
    """Against a loop that removes columns; 60 candidates that resemble each other take 12 rounds."""
    draw = np.random.default_rng(22)
    library = draw.normal(size=(90, 60)) @ (np.eye(60) + 2 * draw.normal(size=(60, 60)) / np.sqrt(60))
    target, threshold = draw.normal(size=(90, 1)), 0.08
    kept, rounds = np.arange(60), 0
    while True:
        own = library[:, kept]
        found = np.linalg.solve(own.T @ own / 90 + 1e-6 * np.eye(len(kept)), own.T @ target / 90)[:, 0]
        if (np.abs(found) >= threshold).all():
            break
        kept, rounds = kept[np.abs(found) >= threshold], rounds + 1
    wanted = np.zeros((60, 1))
    wanted[kept, 0] = found
    assert rounds > 10
    made = thresholded(torch.tensor(library), torch.tensor(target), threshold, 1e-6)
    assert torch.allclose(made, torch.tensor(wanted), atol=1e-6) and len(kept) > 1


def test_products_of_functions_need_fewer_ticks_than_networks(networks):
    ticks = played(pendulums(), FEW)
    # Over three seeds 0.004 to 0.010, where networks have 0.026 to 0.055 (0.012 from ten times as many ticks).
    assert error(fitted(pendulums(), ticks, SPARSE)) < 0.015 < networks
    wrong = fitted(pendulums(), ticks, replace(SPARSE, sindy=SINDyConfig(degree=1)))
    assert error(wrong) > 0.2, "sums without products say what a pendulum does"


def test_a_twin_with_a_wrong_mass_and_what_is_learnt_of_its_errors_beat_both_alone(networks):
    ticks, twin = played(pendulums(), FEW), pendulums(mass=0.6)
    alone = error(WorldModel(twin.spec, SPARSE, twin=twin.known_dynamics))
    hybrid = fitted(pendulums(), ticks, replace(SMALL, updates=400), twin=twin.known_dynamics)
    # Over three seeds, with 600 updates, 0.007 to 0.010; the twin alone has 0.26.
    assert error(hybrid) < 0.5 * networks and error(hybrid) < 0.1 * alone
    assert examined(hybrid, ticks)["r2"] > 0.99
    # A twin without an error leaves nothing to learn, and no noise of a unit of its own.
    exact = fitted(pendulums(), ticks, SPARSE, twin=pendulums().known_dynamics)
    assert error(exact) < 1e-4


def test_an_imagined_world_of_either_is_stepped_and_its_members_disagree_away_from_the_data():
    ticks = played(pendulums(), FEW)
    for options in ({}, {"twin": pendulums(mass=0.6).known_dynamics}):
        model = fitted(pendulums(), ticks, replace(SPARSE, sindy=SINDyConfig(degree=2)), **options)
        world = imagined(model, ticks, 8, GuardConfig(Guard.cut))
        world.reset()
        assert torch.isfinite(world.step(torch.zeros(8, 1)).obs["state"]).all()
        data = ticks.all()
        far = {"state": 5 * data["obs"]["state"]}
        assert (
            model.disagreement(far, data["action"]).mean() > 3 * model.disagreement(data["obs"], data["action"]).mean()
        )


@pytest.mark.parametrize("name", ["imagine", "mbpo"])
def test_methods_learn_on_a_twin_with_sparse_sums(name):
    config = LQRConfig(max_steps=10, limit=4.0)
    env, twin = ScaledEnv(LQR(4, config)), ScaledEnv(LQR(3, replace(config, control_hz=12.0)))
    model = replace(SPARSE, sindy=SINDyConfig(degree=1), elites=0)
    if name == "imagine":
        inner, base = shrunk(ResidualTD3Config()), make_base("gaussian", agent_spec(env.spec))
        made = ImagineConfig(inner=inner, collect=4, imagined=40, imagined_worlds=4, model=model)
    else:
        inner = RLPDConfig(loop=OffPolicyConfig(warmup=40, updates_per_decision=0.1, batch=32), sac=SACConfig())
        base, made = None, MBPOConfig(inner=inner, refit=40, rollouts=1, imagined_worlds=8, model=model)
    loop: Any = prepare(made, base, env, twin=twin, seed=1)
    loop.iterations(120)
    for _ in range(40):
        loop.iterate()
    assert loop.model.twin is not None and float(loop.model.dynamics.weight.abs().sum()) > 0
    assert "model/r2" in loop.latest and loop.latest["model/r2"] > 0.5


def test_what_cannot_be_a_model_is_refused():
    env, base = ScaledEnv(LQR(4)), make_base("flow", agent_spec(LQR(4).spec, 3))
    with pytest.raises(BurnishError, match="cannot be set to what it shows"):
        twin = ScaledEnv(LQR(4))
        twin.env = type("Hidden", (), {"spec": twin.env.spec})()  # pyright: ignore[reportAttributeAccessIssue]
        prepare(ImagineConfig(), base, env, twin=twin)
    with pytest.raises(BurnishError, match="give both the same form"):
        prepare(ImagineConfig(), base, env, twin=pendulums())
    with pytest.raises(BurnishError, match="method=dsrl learns no model on top of a twin"):
        prepare(DSRLConfig(), base, env, twin=env)
    assert len(products(40, 35, 2)) > MOST
    wide = replace(env.spec, obs=type(env.spec.obs)({"state": (35,)}))
    with pytest.raises(BurnishError, match="degree=2 makes more than 500"):
        WorldModel(wide, replace(SPARSE, sindy=SINDyConfig(degree=2)))
    with pytest.raises(BurnishError, match="degree"):
        SINDyConfig(degree=0)
    with pytest.raises(BurnishError, match="ridge"):  # candidates that are alike would have no solution
        SINDyConfig(ridge=0.0)


@pytest.mark.sim
@pytest.mark.parametrize("name", ["hopper", "walker2d", "half_cheetah"])
def test_a_simulator_says_where_an_action_leads_from_what_it_shows(name):
    from burnish.sim.build import ENVS, make_env

    def made(name: str, worlds: int) -> Any:
        return make_env(ENVS[name].config(), worlds)

    env, other = made(name, 5), made(name, 2)
    env.reset(seeds=list(range(5)))
    dice = torch.Generator().manual_seed(0)
    for _ in range(4):
        action = torch.rand(5, env.spec.action.dim, generator=dice) * 2 - 1
        before, after = {key: x.clone() for key, x in env.observe().items()}, env.step(action).obs["state"]
    found, still = (other.known_dynamics(before, u)["state"] for u in (action, torch.zeros_like(action)))
    # Speeds of 10 and more are shown as 10. What is shown is rounded to float32, and the solver begins anew.
    shown = (before["state"].abs() < 10).all(1) if name != "half_cheetah" else torch.ones(5, dtype=torch.bool)
    assert shown.any() and torch.allclose(found[shown], after[shown], atol=1e-3)
    assert not torch.allclose(still[shown], after[shown], atol=1e-2), "the action is of no matter"
    assert made("humanoid", 1).known_dynamics is None
