"""Recordings in the batches of every method that reads them, in the units and at the price of the world."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from burnish.finetune.build import has, prepare, prior_data
from burnish.finetune.loops import OffPolicy
from burnish.finetune.method import Recorded
from burnish.finetune.methods.dsrl import DSRLConfig, Variant
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec
from burnish.policies.data.episodes import Episode, Episodes
from seam import METHODS, SeamWorld, make_base, seam_env, seam_spec, shrunk
from source_lab import heard

LIMITS = SeamWorld(1).spec.action


def recordings(count=6, length=5):
    """Of the seam world: enough for every method that reads some."""
    spec = SeamWorld(1).spec
    low, high = torch.tensor(spec.action.low), torch.tensor(spec.action.high)
    make = torch.Generator().manual_seed(0)
    episodes = [
        Episode(
            {"state": torch.rand(length + 1, 3, generator=make)},
            low + (high - low) * torch.rand(length, 2, generator=make),
            torch.rand(length, generator=make),
            terminated=i % 2 == 0,
            truncated=i % 2 == 1,
            success=False,
            seed=i,
        )
        for i in range(count)
    ]
    return Episodes(episodes, spec)


def a_base(kind):
    return make_base(kind, replace(seam_spec(seam_env(SeamWorld(1))), action=LIMITS))


READERS = [
    (name, kind)
    for name, method in METHODS.items()
    for kind in ("flow", "squashed", "callable", "remote")
    if method.recordings is not Recorded.unused and has(a_base(kind), method.needs)
]


@pytest.mark.parametrize(("name", "kind"), READERS)
def test_recordings_are_half_of_every_batch_of_whoever_reads_them(name, kind):
    env, base = seam_env(SeamWorld(2)), a_base(kind)
    changes = {"variant": Variant.aliased} if name == "dsrl" else {}
    config = shrunk(METHODS[name].config(**changes))
    config.loop.prior_share = 1.0 if name == "dagger" else 0.5
    prior, sentence = prior_data(config, base, env, recordings())
    assert sentence.startswith("prior data: 30 decisions")
    loop = prepare(config, base, env, prior=prior, probe=kind != "remote")
    assert isinstance(loop, OffPolicy)
    loop.source, batches = heard(loop.source)
    for _ in range(12):
        metrics = loop.iterate()
    assert batches and all(math.isfinite(float(x)) for key, x in metrics.items() if "loss" in key)
    for batch in batches:  # the state of the world says which world it is
        fresh = (batch["obs"]["state"][:, 0] * 8) % 1 == 0
        recorded = 8 if name == "dagger" else 4  # which learns from people alone, and nobody takes over here
        assert fresh.tolist() == [False] * recorded + [True] * (8 - recorded)


def test_the_limits_of_the_world_say_what_a_recorded_action_was():
    env = seam_env(SeamWorld(2))
    base = make_base("callable", seam_spec(env))  # its own limits are those of the view: [-1, 1]
    config = shrunk(METHODS["residual_td3"].config(bound=0.5))
    with pytest.raises(BurnishError, match=r"episode 0 has action .* outside the limits \[-1, 1\]"):
        prior_data(config, base, env, recordings())
    prior = prior_data(config, base, env, recordings(), limits=LIMITS).replay
    held = prior.latest()
    low, high = torch.tensor(LIMITS.low), torch.tensor(LIMITS.high)
    expected = torch.cat([2 * (episode.action - low) / (high - low) - 1 for episode in recordings()])
    torch.testing.assert_close(held["executed"][:, 0, 0], expected, rtol=0, atol=1e-6)
    corrected = held["obs"]["base_action"][:, 0] + 0.5 * held["action"][:, 0, 0]
    torch.testing.assert_close(corrected, expected, rtol=0, atol=1e-6)
    wide = ActionSpec(tuple(2 * x for x in LIMITS.low), (4.0, 2.0))
    half = prior_data(METHODS["rlpd"].config(), None, env, recordings(), limits=wide).replay.latest()["action"]
    torch.testing.assert_close(half[:, 0, 0, 0], expected[:, 0] / 2, rtol=0, atol=1e-6)


def test_a_critic_of_noise_cannot_read_recordings():
    env = seam_env(SeamWorld(2))
    with pytest.raises(BurnishError, match=r"method=dsrl .* nobody knows the noise .* take method\.variant=aliased"):
        prior_data(DSRLConfig(), a_base("flow"), env, recordings())
    with pytest.raises(BurnishError, match=r"method=expo and method=rlpd and .* can use recordings"):
        prior_data(METHODS["rfs"].config(), a_base("flow"), env, recordings())
