"""Tokens: bins and cosines against loops, the likelihood of what was drawn, imitation, and FAST there and back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from token_lab import EXECUTE, HORIZON, observed, tokens

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.seed import RowNoise
from burnish.policies.vla.bins import BinsConfig, Factor, action_of, drawn, token_of
from burnish.policies.vla.fast import FAST, FASTConfig, cosines


@pytest.mark.parametrize("bins", [4, 256])
def test_bins_are_those_of_numpy_and_a_loop(bins):
    """OpenVLA: digitize among linspace(-1, 1, 256), centres between the edges, and the last token is a limit alone."""
    edges = np.linspace(-1, 1, bins)
    middles = (edges[1:] + edges[:-1]) / 2
    given = torch.cat([torch.tensor(edges), torch.linspace(-1.2, 1.2, 1001, dtype=torch.float64)])
    found = token_of(given, bins)
    for a, token, back in zip(given.tolist(), found.tolist(), action_of(found, bins).tolist(), strict=True):
        wanted = int(np.digitize(np.clip(a, -1, 1), edges))
        assert token == wanted - 1 and 0 <= token < bins
        assert back == pytest.approx(middles[min(wanted - 1, bins - 2)], abs=1e-6)
        assert abs(back - np.clip(a, -1, 1)) <= 1 / (bins - 1) + 1e-6
    assert int(token_of(torch.tensor(1.0), bins)) == bins - 1
    assert torch.equal(token_of(action_of(torch.arange(bins - 1), bins), bins), torch.arange(bins - 1))


@pytest.mark.parametrize("factor", list(Factor))
@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_the_evidence_is_that_of_the_executed_tokens(factor, temperature):
    policy = tokens(factor=factor, temperature=temperature)
    obs = observed(6)
    draw = policy.draw(obs, generator=torch.Generator().manual_seed(1))
    whole = torch.full((6,), EXECUTE)
    assert torch.equal(policy.log_prob(obs, draw.trace, whole), draw.log_prob)  # so a ratio is 1 before any step
    assert draw.log_prob.shape == (6, len(policy.coordinates)) and policy.coordinates.sum() == EXECUTE * 2
    steps = torch.tensor([0, 1, 2, 2, 1, 0])
    found, shares = (x.detach() for x in (policy.log_prob(obs, draw.trace, steps), policy.log_shares(obs)))
    for i in range(6):
        each = [sum(float(shares[i, h, a, draw.trace[i, h, a]]) for a in range(2)) for h in range(EXECUTE)]
        each = [x if h < steps[i] else 0.0 for h, x in enumerate(each)]
        wanted = [sum(each)] if factor is Factor.chunk else each
        assert found[i].tolist() == pytest.approx(wanted, abs=1e-4)
    if temperature != 1.0:  # control: another temperature in one of the passes alone is seen
        policy.config = BinsConfig(policy.config.bins, 1.0, factor, policy.config.model)
        assert (policy.log_prob(obs, draw.trace, whole) - draw.log_prob).abs().max() > 1e-3


def test_draws_are_as_likely_as_they_say():
    """20,000 draws of 5 bins: within 4 standard errors. Each row has its own numbers in whatever company it is."""
    share = torch.tensor([0.1, 0.2, 0.4, 0.25, 0.05])
    found = drawn(share.log().expand(20_000, 5), torch.randn(20_000, generator=torch.Generator().manual_seed(0)))
    counts = torch.bincount(found, minlength=5) / 20_000
    assert ((counts - share).abs() < 4 * (share * (1 - share) / 20_000).sqrt()).all()
    policy, obs = tokens(), observed(4)
    together = policy.act(obs, generator=RowNoise([5, 6, 7, 8], [0, 0, 0, 0]))
    alone = policy.act({k: x[2:3] for k, x in obs.items()}, generator=RowNoise([7], [0]))
    assert torch.equal(together[2:3], alone) and not torch.equal(together[1:2], alone)


def test_greedy_is_the_most_likely_token_and_noise_steers():
    policy, obs = tokens(), observed(3)
    assert torch.equal(policy.act(obs, greedy=True), action_of(policy.log_shares(obs).argmax(-1), policy.config.bins))
    low, high = (policy.act(obs, noise=torch.full((3, HORIZON, 2), z)) for z in (-4.0, 4.0))
    assert (low < high).all()


def test_it_imitates_by_cross_entropy():
    """Two pictures, two chunks: after 150 steps the loss falls from about log 8 to under a tenth, and padding is not
    learnt."""
    policy, obs = tokens(), observed(2)
    action = torch.tensor([[[0.9, -0.9]] * HORIZON, [[-0.4, 0.4]] * HORIZON])
    mask = torch.ones(2, HORIZON, dtype=torch.bool)
    mask[:, -1] = False
    assert float(policy.bc_loss(obs, action).mean().detach()) == pytest.approx(math.log(8), abs=0.8)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        loss = policy.bc_loss(obs, action, mask=mask).mean()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.1
    near = (policy.act(obs, greedy=True) - action)[:, :-1].abs().max()
    assert near <= 1 / 7 + 1e-6
    changed = action.clone()
    changed[:, -1] = 0.0
    assert torch.equal(policy.bc_loss(obs, changed, mask=mask), policy.bc_loss(obs, action, mask=mask))


# ---- FAST ----


def test_cosines_against_a_loop():
    for length in (1, 5, 8):
        found = cosines(length)
        for k in range(length):
            norm = math.sqrt((1 if k == 0 else 2) / length)
            for i in range(length):
                assert float(found[k, i]) == pytest.approx(norm * math.cos(math.pi / length * (i + 0.5) * k), abs=1e-12)
        torch.testing.assert_close(found @ found.T, torch.eye(length, dtype=torch.float64))


def fast(count=100):
    chunks = torch.rand(count, 8, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return FAST.fitted(chunks, FASTConfig(vocabulary=400)), chunks


def test_fast_there_and_back():
    """A coefficient is rounded by at most 1 / (2 scale), so an action moves by at most sqrt(H) times that."""
    made, chunks = fast()
    ids = made.encode(chunks)
    back = made.decode(ids, 8, 3)
    assert (back - chunks).abs().max() <= math.sqrt(8) / 20 and (back - chunks).abs().max() > 0
    assert max(map(len, ids)) < 24 * 2 and len({len(row) for row in ids}) > 1
    again = FAST(made.file, made.config)
    assert again.encode(chunks[:5]) == ids[:5] and torch.equal(again.decode(ids, 8, 3), back)


def test_low_frequencies_come_first():
    """A chunk at rest has its coefficients in front, one for each number of an action, and zeros behind."""
    made, _ = fast()
    text = made._tokenizer.decode(made.encode(torch.full((1, 8, 3), 0.5))[0])
    found = [ord(x) + made.config.lowest for x in text]
    assert found[:3] == [round(10 * 0.5 * math.sqrt(8))] * 3 and not any(found[3:])


def test_a_sequence_of_another_length_is_an_invalid_draw():
    made, chunks = fast()
    ids = made.encode(chunks[:4])
    wrong = [ids[0][:-1], ids[1], [], [*ids[3], 10_000_000], ids[2] + ids[2]]
    found, valid = made.read(wrong, 8, 3)
    assert valid.tolist() == [False, True, False, False, False] and not found[0].any()
    with pytest.raises(BurnishError, match="of row 0 do not spell the 24 coefficients"):
        made.decode(wrong, 8, 3)
    with pytest.raises(BurnishError, match=r"no tokenizer\.json"):
        FAST(b"{}")
