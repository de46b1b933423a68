"""Settings that nothing would read are refused, in one sentence that names them; their defaults are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from token_lab import Lamp, tokens

from burnish.finetune.build import prepare
from burnish.finetune.distillation.__main__ import DistillConfig
from burnish.finetune.loops import OffPolicyConfig
from burnish.finetune.methods.dppo import DPPOConfig
from burnish.finetune.methods.dsrl import DSRLConfig, Variant
from burnish.finetune.methods.gaussian_ppo import GaussianPPOConfig
from burnish.finetune.methods.grpo import GRPOConfig
from burnish.finetune.methods.mbpo import MBPOConfig
from burnish.finetune.methods.rlpd import RLPDConfig
from burnish.finetune.ppo import Normalize, PPOConfig
from burnish.policies.build import build_policy
from burnish.policies.core.errors import BurnishError
from burnish.policies.diffusion import DiffusionConfig, Sampler
from burnish.policies.evaluator import EvalConfig
from burnish.policies.vla.bins import Factor
from seam import SMALL, SeamWorld, make_base, seam_env, seam_spec, shrunk


def built(config: Any, kind: str | None) -> Any:
    if kind == "tokens":
        return prepare(config, tokens(1, 1, 1), Lamp(8))
    env = seam_env(SeamWorld(8))
    if kind in ("ddim", "ddpm"):
        sampled = DiffusionConfig(train_steps=3, steps=3, sampler=Sampler(kind), net=SMALL)
        return prepare(config, build_policy(sampled, seam_spec(env), seed=1), env)
    return prepare(config, None if kind is None else make_base(kind, seam_spec(env)), env)


GAUSSIAN = "is not read unless a Gaussian base is refined; leave it out"
TOKENS = "is not read unless a base of tokens is refined; leave it out"
PPO_ON: list[tuple[dict[str, Any], str | None, str]] = [
    ({"std": 0.5}, None, GAUSSIAN),
    ({"std": 0.5}, "tokens", GAUSSIAN),
    ({"temperature": 1.5}, None, TOKENS),
    ({"factor": Factor.action}, "gaussian", TOKENS),
]


@pytest.mark.parametrize(("unread", "kind", "why"), PPO_ON)
def test_ppo_refuses_what_is_of_another_kind_of_base(unread: dict[str, Any], kind: str | None, why: str) -> None:
    with pytest.raises(BurnishError, match=f"method.{next(iter(unread))}=[a-z0-9.]+ {why}"):
        built(shrunk(GaussianPPOConfig(**unread)), kind)


@pytest.mark.parametrize(("read", "kind"), [({"std": 0.5}, "gaussian"), ({"temperature": 1.5}, "tokens")])
def test_ppo_takes_what_is_of_this_kind_of_base(read: dict[str, Any], kind: str) -> None:
    built(shrunk(GaussianPPOConfig(**read)), kind)


UNREAD: list[dict[str, Any]] = [
    {"normalize": Normalize.minibatch},
    {"advantage_quantiles": [0.1, 0.9]},
    {"scale_reward": True},
    {"reward_clip": 5.0},
    {"lam": 0.9},
    {"value_clip": 0.2},
    {"value_coef": 1.0},
    {"critic_lr": 1e-4},
    {"critic_warmup": 2},
]


def grouped(**inner: Any) -> Any:
    """Groups of two, and rollouts that are longer than any episode."""
    config = shrunk(GRPOConfig(group=2, **inner))
    config.loop.decisions_per_update = 100
    return config


@pytest.mark.parametrize("unread", UNREAD)
def test_grpo_refuses_what_its_inner_ppo_says_of_advantages_and_critics(unread: dict[str, Any]) -> None:
    config = grouped()
    config.inner.ppo = replace(config.inner.ppo, **unread)
    with pytest.raises(BurnishError, match=f"method.inner.ppo.{next(iter(unread))}=.* is not read by method=grpo"):
        built(config, None)


def test_grpo_goes_by_the_usual_settings_of_its_inner_method() -> None:
    """Those of dppo scale rewards, so that to leave it out would be a choice that nothing reads."""
    config = grouped(inner=DPPOConfig(trained_steps=2))
    built(config, "flow")
    config.inner.ppo = replace(config.inner.ppo, scale_reward=False)
    with pytest.raises(BurnishError, match=r"method.inner.ppo.scale_reward=False"):
        built(config, "flow")


@pytest.mark.parametrize("kind", ["flow", "ddpm"])
def test_the_noise_of_ddim_is_refused_without_ddim(kind: str) -> None:
    config = shrunk(DPPOConfig(trained_steps=2, eta=0.5))
    with pytest.raises(BurnishError, match=r"method.eta=0.5 is not read unless the base is a diffusion"):
        built(config, kind)
    built(config, "ddim")


SOON: list[tuple[Any, str]] = [
    (lambda: PPOConfig(normalize=Normalize.none, advantage_quantiles=[0.1, 0.9]), "ppo.normalize=none does not"),
    (
        lambda: MBPOConfig(RLPDConfig(loop=OffPolicyConfig(prior_share=0.25))),
        "prior_share=0.25 is not read by mbpo, where method.real",
    ),
    (lambda: DSRLConfig(distil_every=5), "distil_every=5 is not read by variant=sac"),
    (lambda: DistillConfig(["a"], eval=EvalConfig(confirm=8)), "eval.confirm=8 is not read by `burnish distill`"),
]


@pytest.mark.parametrize(("make", "sentence"), SOON)
def test_settings_that_another_one_makes_idle_are_refused(make: Any, sentence: str) -> None:
    with pytest.raises(BurnishError, match=sentence):
        make()
    DSRLConfig(Variant.aliased, distil_every=5)
