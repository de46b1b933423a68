"""Q-chunking: its target written out, who moves whom, and the best policy that the data supports."""

from __future__ import annotations

import pytest
import torch

import mdp
from burnish.offline.sources import Rows
from burnish.policies.core.seed import generator
from offline_lab import CHUNKED, SINGLE, a_batch, made, trained

# Shares of the best return on 10 seeds, with 8 draws: 0.80 to 0.99. On 5 seeds one draw, which imitates, 0.26 to 0.33,
# and cuts that are taken for ends 0.44 to 0.47.
REACHED, FAILED, UPDATES = 0.7, 0.6, 200
COLUMNS = ("action", "reward", "discount", "terminated", "steps")


@pytest.mark.parametrize("spec", [SINGLE, CHUNKED], ids=["single", "chunked"])
def test_the_target_is_that_of_the_best_draw(spec):
    learner, batch = made("q_chunking", spec), a_batch(spec)
    columns = {name: batch[name] for name in COLUMNS}
    learner.noise.manual_seed(5)
    target = learner.target(batch["next_obs"], columns)
    rows = len(batch["reward"])
    obs = {key: x.repeat_interleave(8, 0) for key, x in batch["next_obs"].items()}
    with torch.no_grad():
        draws = learner.flow.act(obs, generator=generator(0, "unused").manual_seed(5))
        chunks = spec.executed(draws)
        q = learner.critic.online(obs, chunks).amin(0).view(rows, 8)
        best = chunks.unflatten(0, (rows, 8))[torch.arange(rows), q.argmax(1)]
        value = learner.critic.target(batch["next_obs"], best).mean(0)
    wanted = batch["reward"] + torch.where(batch["discount"] > 0, batch["discount"] * value, 0.0)
    torch.testing.assert_close(target, wanted)
    worst = chunks.unflatten(0, (rows, 8))[torch.arange(rows), q.argmin(1)]
    with torch.no_grad():  # a negative control: another draw is another target
        assert not torch.allclose(learner.critic.target(batch["next_obs"], worst).mean(0), value)


def test_no_gradient_of_the_critic_reaches_the_flow():
    """Rewards move the critic, and leave the flow as it is."""
    plain, paid = (made("q_chunking") for _ in range(2))
    batch = a_batch()
    plain.update(Rows(batch))
    paid.update(Rows({**batch, "reward": batch["reward"] + 5}))
    flows = [torch.cat([p.detach().flatten() for p in x.flow.parameters()]) for x in (plain, paid)]
    critics = [torch.cat([p.detach().flatten() for p in x.critic.online.parameters()]) for x in (plain, paid)]
    assert torch.equal(*flows) and not torch.equal(*critics)


@pytest.mark.slow
def test_it_finds_the_best_policy_that_the_data_supports():
    assert all(mdp.score(trained("q_chunking", seed, UPDATES).policy) > REACHED for seed in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"count": 1}, {"cut_is_end": True}], ids=["imitation", "cut is end"])
def test_it_does_not_by_imitation_or_where_a_cut_is_taken_for_an_end(change):
    assert mdp.score(trained("q_chunking", 0, UPDATES, **change).policy) < FAILED
