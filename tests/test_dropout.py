"""An ACT drops out in its loss alone, by the generator that it is given."""

from __future__ import annotations

import torch
from test_lerobot_policies import STORED, recorded

from burnish.finetune.api import load
from burnish.offline.iql import IQLConfig
from burnish.offline.iql import build as build_iql
from burnish.offline.q_chunking import QChunkingConfig
from burnish.offline.q_chunking import build as build_chunking
from burnish.offline.recap import RecapConfig, Worse
from burnish.offline.recap import build as build_recap
from burnish.policies.core.seed import generator


def test_dropout_is_drawn_by_the_generator_of_the_loss():
    """So a run repeats and resumes exactly, and the generators of torch itself stay as they were."""
    policy, obs = load(STORED / "act").train(), recorded("act")[0]
    target = torch.zeros(len(obs["state"]), *policy.spec.chunk_shape)
    assert policy.config.dropout > 0

    def losses(*sources):
        torch.manual_seed(int(torch.randint(1 << 30, ())))  # as in another process
        before = torch.get_rng_state()
        found = [policy.bc_loss(obs, target, generator=source).detach() for source in sources]
        assert torch.equal(torch.get_rng_state(), before)
        return found

    one, again, other = (generator(seed, "noise") for seed in (0, 0, 1))
    first, second, third = losses(one, one, other)
    assert torch.equal(first, losses(again)[0])
    policy.eval()
    still, moved = losses(generator(0, "noise"), generator(1, "noise"))
    assert not torch.equal(first, second) and not torch.equal(first, third) and not torch.equal(first, still)
    assert not torch.equal(still, moved), "z is drawn without dropout too"


def test_what_acts_never_drops_out():
    """A learner trains, plays and delivers one policy, in training mode: it plays as the policy that it was given, and
    as itself again. Equal to the bit, since nothing is drawn."""
    given, (obs, *_) = load(STORED / "act"), recorded("act")
    learners = [
        build_iql(IQLConfig(), given),
        build_chunking(QChunkingConfig(count=1), given),
        build_recap(RecapConfig(worse=Worse.left_out), given),
    ]
    with torch.no_grad():
        chunk = given.act(obs)
        for learner in learners:
            played = learner.actor.act(obs, warm=False, generator=torch.Generator()).action
            assert torch.equal(played, given.spec.executed(chunk)) and torch.equal(learner.policy.act(obs), chunk)
            trained = getattr(learner, "flow", learner.policy)
            assert trained.training and not trained.model.training
