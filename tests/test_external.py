"""A callable as a policy: what it is asked, what it may answer, and where its noise comes from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from burnish.policies.build import build_policy
from burnish.policies.controllers import ChunkController, controller_for
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.seed import RowNoise
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.flow import FlowConfig
from scripted import TRUNCATED, ScriptedWorld

SHAPE = (4, 2)


def spec(noise=None, **changes):
    given = {"horizon": 4, "execute": 2, "start": 1, "noise_shape": noise} | changes
    return PolicySpec(ObsSpec({"state": (3,)}), ActionSpec((-1, -1), (1, 1)), **given)


def numpy_fn(obs):
    assert set(obs) == {"state"}
    return np.tanh(obs["state"].numpy()[:, None, :2] * np.ones((1, 4, 1)))


def noisy_fn(obs, noise):
    return torch.tanh(noise + obs["state"][:, None, :2])


OBS = {"state": torch.arange(12.0).view(4, 3) / 10, "base_action": torch.zeros(4, 2)}


def test_it_is_given_the_keys_of_its_spec_and_answers_in_numpy_or_torch():
    policy = CallablePolicy(numpy_fn, spec())
    chunk = policy.act(OBS)
    assert chunk.shape == (4, *SHAPE) and chunk.dtype == torch.float32
    torch.testing.assert_close(chunk[:, 0], torch.tanh(OBS["state"][:, :2]))
    same = CallablePolicy(lambda obs: torch.tanh(obs["state"])[:, None, :2].expand(-1, 4, 2), spec())
    torch.testing.assert_close(same.act(OBS), chunk)


def test_noise_is_drawn_outside_so_that_it_belongs_to_a_world():
    policy = CallablePolicy(noisy_fn, spec(SHAPE))
    four = policy.act(OBS, generator=RowNoise([1, 2, 3, 4], [0, 0, 5, 6]))
    two = policy.act({k: x[[2, 0]] for k, x in OBS.items()}, generator=RowNoise([3, 1], [5, 0]))
    assert torch.equal(two, four[[2, 0]])
    assert torch.equal(policy.act(OBS, greedy=True), noisy_fn(OBS, torch.zeros(4, *SHAPE)))
    given = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    assert torch.equal(policy.act(OBS, noise=given), noisy_fn(OBS, given))


def test_noise_may_have_another_shape_than_the_chunk():
    policy = CallablePolicy(lambda obs, noise: torch.tanh(noise.mean(1))[:, None, None].expand(-1, *SHAPE), spec((7,)))
    drawn = policy.act(OBS, generator=torch.Generator().manual_seed(0))
    assert drawn.shape == (4, *SHAPE) and drawn.unique().numel() == 4


def test_a_prefix_is_kept_and_actions_are_bounded():
    policy = CallablePolicy(lambda obs: torch.full((4, *SHAPE), 3.0), spec())
    prefix = torch.full((4, 1, 2), 0.5)
    chunk = policy.act(OBS, prefix=prefix)
    assert torch.equal(chunk[:, :1], prefix) and bool((chunk[:, 1:] == 1).all())


@pytest.mark.parametrize(
    ("fn", "sentence"),
    [
        (lambda obs: torch.zeros(4, 4, 3), r"of shape \(4, 4, 3\), but finite \(4, 4, 2\)"),
        (lambda obs: torch.zeros(1, 4, 2), r"of shape \(1, 4, 2\)"),
        (lambda obs: torch.full((4, 4, 2), float("nan")), "that are not finite"),
    ],
)
def test_a_wrong_answer_is_one_sentence(fn, sentence):
    with pytest.raises(BurnishError, match=sentence) as refusal:
        CallablePolicy(fn, spec()).act(OBS)
    assert "\n" not in str(refusal.value)


def test_an_observation_that_is_not_finite_is_no_fault_of_the_policy():
    broken = {**OBS, "state": OBS["state"].clone()}
    broken["state"].view(4, -1)[2, 1] = float("nan")
    with pytest.raises(BurnishError, match=r"world 2 gave 'state' that is not finite, first at \[1\]; mend"):
        CallablePolicy(lambda obs: obs["state"].mean() + torch.zeros(4, *SHAPE), spec()).act(broken)


def test_wrong_questions_are_refused():
    with pytest.raises(BurnishError, match="takes no noise"):
        CallablePolicy(numpy_fn, spec()).act(OBS, noise=torch.zeros(4, *SHAPE))
    with pytest.raises(BurnishError, match="the noise has shape"):
        CallablePolicy(noisy_fn, spec(SHAPE)).act(OBS, noise=torch.zeros(1, *SHAPE))
    with pytest.raises(BurnishError, match="lacks 'state'"):
        CallablePolicy(numpy_fn, spec()).act({"goal": torch.zeros(4, 2)})


def test_one_of_ours_behind_a_call_plays_as_it_does_itself():
    flow = build_policy(FlowConfig(steps=2), spec(), seed=1).eval()
    wrapped = CallablePolicy(lambda obs, noise: flow.act(obs, noise=noise).numpy(), flow.spec)
    played = []
    for policy in (flow, wrapped):
        env = ScaledEnv(ScriptedWorld([[(7, TRUNCATED)], [(5, TRUNCATED)]]))
        controller = controller_for(policy, 2, seed=3)
        assert isinstance(controller, ChunkController)
        obs = env.reset()
        controller.reset(torch.ones(2, dtype=torch.bool))
        actions = []
        for _ in range(5):
            actions.append(controller.step(obs))
            obs = env.step(actions[-1]).obs
        played.append(torch.stack(actions))
    assert torch.equal(*played)
