"""The probe against bases whose spread, reach and hidden noise are known in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from burnish.finetune.build import prepare
from burnish.finetune.fit import compatibility
from burnish.finetune.method import Needs
from burnish.finetune.probe import probe, require_noise, require_steerable
from burnish.policies.build import build_policy
from burnish.policies.core.errors import BurnishError
from burnish.policies.diffusion import DiffusionConfig, Sampler
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.flow import FlowConfig
from latent_lab import SPEC, tanh_base
from seam import METHODS, SeamWorld, seam_env, seam_spec, shrunk

OBS = {"state": torch.linspace(-1, 1, 6)[:, None]}


def mixed(own: float, spec=SPEC):
    """Of unit spread 0.1 in w, and ``own`` times that from a hidden generator."""
    source = torch.Generator().manual_seed(0)
    return CallablePolicy(lambda obs, noise: 0.1 * (noise + own * torch.randn(noise.shape, generator=source)), spec)


def test_a_linear_base_is_measured_as_it_is():
    weights = torch.tensor([[0.2], [0.05]])
    base = CallablePolicy(lambda obs, noise: obs["state"][:, None] * 0.1 + weights * noise, SPEC)
    found = probe(base, OBS, draws=400, bound=1.5)
    # Relative standard error of a standard deviation from 6 * 400 draws: 1 / sqrt(2 * 2400) = 1.4 %; five of them.
    torch.testing.assert_close(found.std, weights, rtol=0.07, atol=0)
    # Uniform noise within the bound moves an action by 2 * 1.5 * weight, of a range of 2, at most and almost.
    assert bool((found.reach_bound <= 1.5 * weights).all()) and bool((found.reach_bound > 0.97 * 1.5 * weights).all())
    assert found.hidden == 0 and found.deterministic and found.steerable
    assert "same noise, same action" in found.sentence() and "\n" not in found.sentence()


def test_a_method_of_noise_is_not_raced_where_noise_reaches_less_than_a_correction():
    def raced(weight):
        base = CallablePolicy(lambda obs, noise: weight * noise, SPEC)
        return {fit.method: fit for fit in compatibility(base, OBS)}["dsrl"]

    # Noise within 1.5 reaches 1.5 * weight of half the range at most, and almost; a correction reaches 0.1.
    assert raced(0.08).raced and not raced(0.06).raced and raced(0.06).fits and "faintly" in raced(0.06).reason


@pytest.mark.parametrize("own", [0.5, 1.0, 2.0])
def test_hidden_noise_is_told_from_the_noise_that_is_given(own):
    found = probe(mixed(own), {"state": torch.zeros(16, 1)}, draws=100)
    # Under N(0, I) the share is own^2 / (1 + own^2); the box of 1.5 has variance 0.75, so the mean variance is 0.875.
    exact = own**2 / (0.875 + own**2)
    assert abs(found.hidden - exact) < 0.06
    assert not found.deterministic and "noise of its own" in found.sentence()
    assert found.steerable == (exact < 0.5)


def test_what_cannot_be_steered_is_refused_in_one_sentence_that_names_alternatives():
    ignoring = CallablePolicy(lambda obs, noise: torch.tanh(obs["state"])[:, None].expand(-1, 2, 1), SPEC)
    secret = torch.Generator().manual_seed(0)
    own = CallablePolicy(lambda obs, noise: 0.3 * torch.randn(noise.shape, generator=secret), SPEC)
    plain = CallablePolicy(lambda obs: torch.zeros(len(obs["state"]), 2, 1), replace(SPEC, noise_shape=None))
    cases = [(ignoring, "ignores its noise"), (own, "draws noise of its own"), (plain, "takes none")]
    for base, sentence in cases:
        with pytest.raises(BurnishError, match=sentence) as refusal:
            require_steerable(base, OBS, method="method=dsrl")
        assert "\n" not in str(refusal.value) and "method=residual_td3" in str(refusal.value)
    with pytest.raises(BurnishError, match="takes none"):
        require_noise(object())
    assert require_steerable(tanh_base(), OBS).steerable
    with pytest.raises(BurnishError, match="nothing to probe"):
        probe(plain, OBS)


def test_of_our_policies_flow_and_ddim_are_steerable_and_ddpm_says_that_it_adds_noise():
    flow = build_policy(FlowConfig(steps=2), SPEC, seed=1).eval()
    assert require_steerable(flow, OBS).deterministic
    ddim, ddpm = (
        build_policy(DiffusionConfig(train_steps=8, steps=4, sampler=sampler), SPEC, seed=1).eval()
        for sampler in (Sampler.ddim, Sampler.ddpm)
    )
    assert probe(ddim, OBS).deterministic
    assert not probe(ddpm, OBS).deterministic


def test_a_probe_asks_little_and_leaves_the_global_generator_alone():
    asked = []
    base = CallablePolicy(lambda obs, noise: (asked.append(len(noise)), torch.tanh(noise))[1], SPEC)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    require_steerable(base, {"state": torch.zeros(100, 1)})
    assert torch.equal(torch.rand(2), expected)
    assert asked == [8 * 32, 8 * 32], "eight observations, twice the same questions"


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.needs is Needs.noise])
def test_a_base_is_probed_unless_it_shall_be_spared(name):
    env = seam_env(SeamWorld(2))
    deaf = CallablePolicy(lambda obs, noise: torch.zeros(len(noise), 5, 2), replace(seam_spec(env), noise_shape=(3,)))
    config = shrunk(METHODS[name].config())
    with pytest.raises(BurnishError, match=f"method={name} steers its base by noise, but this base ignores its noise"):
        prepare(config, deaf, env)
    assert prepare(config, deaf, env, probe=False).learner.describe() == "the base was not probed"
    shown = []
    hearing = CallablePolicy(
        lambda obs, noise: (shown.append(obs), torch.tanh(noise[:, :1, None] * torch.ones(1, 5, 2)))[1], deaf.spec
    )
    samples = {"state": torch.arange(60.0).view(20, 3)}
    loop = prepare(config, hearing, env, samples=samples)
    assert loop.learner.describe().startswith("probe of the base: ") and loop.learner.found.steerable
    assert {int(x) for obs in shown for x in obs["state"][:, 0]} == {0, 3, 6, 9, 12, 15, 18, 21}, "eight are enough"
