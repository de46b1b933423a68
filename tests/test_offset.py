"""Corrections that last: equal in seconds at every rate, bounded, forgotten at the end of an episode, and observed."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_compose import base, plays_as_on_its_view, residual, worlds
from test_residual_td3 import awaken, on_script, tiny, training

from burnish.finetune.build import prior_data
from burnish.finetune.loops import OnPolicy, OnPolicyConfig
from burnish.finetune.methods import residual_ppo
from burnish.finetune.methods.residual_td3 import ResidualTD3Config
from burnish.finetune.ppo import PPOConfig
from burnish.policies.build import build_policy, describe, load_policy
from burnish.policies.compose import Residual
from burnish.policies.controllers import controller_for
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.config import to_data
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.offset import OFFSET, OffsetConfig
from burnish.policies.core.spec import agent_spec
from burnish.policies.core.views import ResidualEnv
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.runs import checkpoint
from burnish.real_robot.export.exporter import assembled
from training_lab import check_resumed

LASTING = OffsetConfig(half_life=0.3, rise=0.2)  # 3 and 2 ticks of a scripted world, whose rate is 10 Hz


def moved(config: OffsetConfig, hz: float, seconds: float, action: float, start: float = 0.0) -> float:
    at, offset = config.at(hz), torch.full((1, 1), start)
    assert at is not None
    for _ in range(round(hz * seconds)):
        offset = at.after(offset, torch.full((1, 1), action))
    return float(offset)


@pytest.mark.parametrize("hz", [10.0, 20.0, 50.0, 1000.0])
def test_rise_and_half_life_are_seconds_at_every_rate(hz: float) -> None:
    """Closed forms of do/dt = gain * a - k * o. The tolerance is that of 1000 float32 sums."""
    assert moved(LASTING, hz, 0.3, 0.0, start=0.8) == pytest.approx(0.4, abs=1e-4)
    assert moved(LASTING, hz, 0.2, 1.0) == pytest.approx(1.0, abs=1e-4)
    assert moved(LASTING, hz, 0.1, 1.0) == pytest.approx((1 - 2 ** (-1 / 3)) / (1 - 2 ** (-2 / 3)), abs=1e-4)
    assert moved(LASTING, hz, 2.0, -5.0) == -1.0, "bounded, whatever is asked for"
    assert moved(OffsetConfig(1e9, 1e-9), hz, 1 / hz, 0.5) == pytest.approx(0.5), "not in less than a tick"


def views(offset: OffsetConfig | None, bound: float = 0.5) -> ResidualEnv:
    return ResidualEnv(worlds(), controller_for(base(), 3, seed=4), bound, offset=offset)


def test_off_it_changes_nothing_and_leaves_no_trace() -> None:
    """Neither in what is played and observed, nor in states and settings that are saved."""
    plain, off = views(None), views(OffsetConfig(rise=3.0))
    assert off.spec == plain.spec and OFFSET not in off.spec.obs.shapes
    seen, other, noise = plain.reset(), off.reset(), torch.Generator().manual_seed(0)
    for _ in range(12):
        action = torch.randn(3, 2, generator=noise).clamp(-1, 1)
        step, felt = plain.step(action), off.step(action)
        assert torch.equal(step.info["executed"], felt.info["executed"])
        seen, other = step.obs, felt.obs
        assert seen.keys() == other.keys() and all(torch.equal(seen[key], other[key]) for key in seen)
    assert off.state_dict().keys() == plain.state_dict().keys() and "offset" not in to_data(ResidualTD3Config())
    assert "offset" not in describe(residual("step"))["config"]


def test_the_view_adds_the_offset_shows_it_and_forgets_it_with_the_episode() -> None:
    view, at = ChunkEnv(views(LASTING), 1, 0.9), LASTING.at(10.0)
    assert at is not None and view.spec.obs.shapes[OFFSET] == (2,)
    seen, met = view.reset(), 0
    assert not seen[OFFSET].any()
    for tick in range(16):
        action = torch.full((3, 1, 2), 0.6 if tick % 4 == 0 else 0.0)
        after = (at.decay * seen[OFFSET] + at.gain * action[:, 0]).clamp(-1, 1)
        outcome = view.step(action)
        expected = (seen["base_action"] + 0.5 * after).clamp(-1, 1)
        torch.testing.assert_close(outcome.executed[:, 0], expected)
        assert torch.equal(outcome.next_obs[OFFSET], after), "where the decision led, it goes on"
        assert torch.equal(outcome.obs[OFFSET], after.masked_fill(outcome.ended[:, None], 0.0))
        met, seen = met + int(outcome.ended.sum()), outcome.obs
    assert met > 3


def test_the_state_of_a_view_holds_its_offset() -> None:
    one, two = views(LASTING), views(LASTING)
    one.reset()
    one.step(torch.full((3, 2), 0.5))
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for _ in range(4):
        first, second = one.step(torch.zeros(3, 2)), two.step(torch.zeros(3, 2))
        assert first.obs[OFFSET].any() and torch.equal(first.info["executed"], second.info["executed"])


def lasting_policy() -> Any:
    view = views(LASTING)
    net = build_policy(GaussianConfig(hidden=[16], squash=True), agent_spec(view.spec), seed=7).eval()
    return Residual(base(), net, 0.5, "step", LASTING)


def test_a_policy_plays_and_is_saved_with_its_offset(tmp_path: Any) -> None:
    made = lasting_policy()
    checkpoint.save(tmp_path / "p", config=describe(made), state=made.state_dict())
    policy, _ = load_policy(tmp_path / "p")
    assert policy.config == made.config
    plays_as_on_its_view(policy, views(LASTING), lambda seen: {**seen, OFFSET: seen[OFFSET] + 0.3})
    with pytest.raises(AssertionError):
        plays_as_on_its_view(policy, views(OffsetConfig(half_life=3.0)))  # control: other times, other actions


def test_what_cannot_last_is_refused_in_a_sentence() -> None:
    made = lasting_policy()
    with pytest.raises(BurnishError, match="of whole chunks"):
        Residual(made.base, made.net, 0.5, "chunk", LASTING)
    with pytest.raises(BurnishError, match="a bundle remembers none"):
        assembled(made)
    with pytest.raises(BurnishError, match=r"offset\.rise=0.0 must be a positive number"):
        OffsetConfig(rise=0.0)
    with pytest.raises(BurnishError, match="the number of ticks in a second"):
        LASTING.at(None)
    with pytest.raises(BurnishError, match="recordings are not told as such"):
        prior_data(replace(tiny(), offset=LASTING), base(), worlds(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["td3", "sac"])
def test_the_critic_is_shown_what_was_executed(algorithm: str) -> None:
    """Also in the warm-up, whose noise is larger than the bound, and from a state that was loaded."""
    config = replace(tiny(algorithm, warmup=30, initial_updates=3, batch=16), bound=0.3, warm_noise=1.0, offset=LASTING)

    def fresh(seed: int) -> Any:
        assembly = on_script(config, seed=seed)
        awaken(assembly.learner.inner.agent)
        assembly.learner.columns = ("executed",)
        return training(config, assembly)

    loop, _ = check_resumed(fresh, 20, 4)
    held = loop.replay.sample(256)
    executed = loop.learner.inner.transform(held["obs"], held["action"])
    assert torch.equal(executed, held["executed"])
    assert float((executed - held["obs"]["base_action"][:, None]).abs().max()) <= 0.3 + 1e-6
    assert held["obs"][OFFSET].abs().mean() > 0.1


def test_ppo_corrects_by_it_and_deploys_it() -> None:
    loop, ppo = OnPolicyConfig(decisions_per_update=8), PPOConfig(epochs=1, minibatch=8, lr=0.1)
    config = residual_ppo.ResidualPPOConfig(bound=0.3, offset=LASTING, loop=loop, ppo=ppo)
    assembly = residual_ppo.build(config, base(), worlds(), seed=1)
    learner = assembly.learner
    metrics = OnPolicy(learner, assembly.env, decisions_per_update=8, seed=1).iterate()
    assert 0 < float(metrics["base_distance"]) <= 0.3 and learner.policy.config.offset == LASTING
    plays_as_on_its_view(learner.policy.eval(), views(LASTING, bound=0.3))
