"""The two views: zero correction is the base bit for bit, bases are asked once, ends keep their own base actions."""

from __future__ import annotations

import pytest
import torch

from burnish.policies.build import build_policy
from burnish.policies.controllers import ChunkController
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.seed import normal
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.core.views import BaseEnv, Hidden, ResidualEnv
from burnish.policies.flow import FlowConfig
from scripted import TERMINATED, TRUNCATED, ScriptedWorld

N, EXECUTE = 3, 2
SCRIPT = [[(5, TERMINATED), (4, TRUNCATED)], [(3, TRUNCATED), (6, TERMINATED)], [(7, TRUNCATED)]]


class Base:
    """A base whose chunk depends on observation and noise; it remembers what it was asked."""

    def __init__(self, noisy=True):
        shape = (4, 2) if noisy else None
        self.spec = PolicySpec(ObsSpec({"state": (3,)}), ActionSpec((-1, -1), (1, 1)), 4, EXECUTE, 1, noise_shape=shape)
        self.asked: list[tuple] = []

    def act(self, obs, *, noise=None, prefix=None, greedy=False, generator=None):
        assert set(obs) == {"state"}, "the base sees its own observation, without what the view adds"
        drawn = noise if noise is not None else normal((len(obs["state"]), 4, 2), generator)
        for row, z in zip(obs["state"], drawn, strict=True):
            self.asked.append((*row.tolist(), *z.flatten().tolist()))
        return torch.tanh(0.1 * obs["state"][:, None, 1:] + 0.3 * drawn)


def worlds():
    return ScaledEnv(ScriptedWorld(SCRIPT))


def test_zero_residual_equals_the_base_bit_for_bit_over_whole_episodes():
    plain_world, seen_world = ScriptedWorld(SCRIPT), ScriptedWorld(SCRIPT)
    plain, base = ScaledEnv(plain_world), ChunkController(Base(), N, seed=4)
    view = ResidualEnv(ScaledEnv(seen_world), ChunkController(Base(), N, seed=4))
    everyone = torch.ones(N, dtype=torch.bool)
    obs = plain.reset()
    base.reset(everyone)
    seen = view.reset()
    for _ in range(30):
        action = base.step(obs)
        assert torch.equal(seen["base_action"], action)
        step, felt = plain.step(action), view.step(torch.zeros(N, 2))
        ended = step.terminated | step.truncated
        obs, seen = step.obs, felt.obs
        assert torch.equal(felt.obs["state"], step.obs["state"])
        assert torch.equal(felt.info["executed"], action)
        if ended.any():
            obs = plain.reset(ended)
            base.reset(ended)
            seen = view.reset(ended)
    assert torch.equal(torch.stack(plain_world.taken), torch.stack(seen_world.taken))


def test_a_residual_is_added_bounded_and_clipped():
    view = ResidualEnv(worlds(), ChunkController(Base(), N, seed=1), bound=0.5)
    base_action = view.reset()["base_action"]
    step = view.step(torch.tensor([[1.0, -1.0]] * N))
    expected = (base_action + torch.tensor([0.5, -0.5])).clamp(-1, 1)
    assert torch.equal(step.info["executed"], expected)
    assert not torch.equal(step.info["executed"], base_action), "the correction must matter"


class Turning:
    """Begins every chunk alike; how it goes on, its noise says."""

    def __init__(self):
        self.spec = PolicySpec(ObsSpec({"state": (3,)}), ActionSpec((-1, -1), (1, 1)), 3, 3, noise_shape=(3, 2))

    def act(self, obs, *, noise=None, prefix=None, greedy=False, generator=None):
        drawn = torch.tanh(normal((len(obs["state"]), 3, 2), generator))
        return torch.cat([torch.full_like(drawn[:, :1], 0.5), drawn[:, 1:]], 1)


def test_what_the_queue_of_the_base_hides_decides_its_next_action_so_that_a_tick_is_not_markov():
    """Two worlds look alike, and their bases act alike; then the bases do different things. Only the queue tells."""
    script = [[(9, TRUNCATED)], [(9, TRUNCATED)]]
    for observe in ((), tuple(Hidden)):
        controller = ChunkController(Turning(), 2, seed=4)
        view = ResidualEnv(ScaledEnv(ScriptedWorld(script)), controller, observe=observe)
        seen = view.reset()
        seen["state"][1] = seen["state"][0]  # which world it is, is not the question
        alike = {key for key, x in seen.items() if torch.equal(x[0], x[1])}
        assert alike == set(seen) - {"base_queue"} and set(view.spec.obs.shapes) == set(seen)
        after = view.step(torch.zeros(2, 2)).obs["base_action"]
        assert not torch.equal(after[0], after[1])
        if observe:
            assert torch.equal(seen["base_queue"][:, 1], after)


def test_phase_and_queue_follow_the_chunk_across_ends_of_both_kinds():
    controller = ChunkController(Turning(), N, seed=4)
    view = ChunkEnv(ResidualEnv(worlds(), controller, observe=list(Hidden)), 1, 0.9)
    seen, ended = view.reset(), torch.ones(N, dtype=torch.bool)
    place, left = torch.zeros(N), torch.zeros(N, 3, 2)
    met = set()
    for _ in range(40):
        left = torch.where((place == 0)[:, None, None], seen["base_queue"], left)
        assert torch.equal(seen["base_phase"], place[:, None] / 3)
        assert torch.equal(seen["base_queue"], left) and torch.equal(seen["base_action"], left[:, 0])
        assert not left[place == 1, 2:].any() and not left[place == 2, 1:].any()
        outcome = view.step(torch.zeros(N, 1, 2))
        place = (place + 1) % 3
        left = torch.cat([left[:, 1:], torch.zeros(N, 1, 2)], 1)
        # Where the action led, the base would have gone on; after the reset it begins anew.
        assert torch.equal(outcome.next_obs["base_phase"], place[:, None] / 3)
        held = place > 0
        assert torch.equal(outcome.next_obs["base_queue"][held], left[held])
        ended, seen = outcome.ended, outcome.obs
        met |= {(bool(t), int(p)) for t, p, e in zip(outcome.terminated, place, ended, strict=True) if e}
        place = place.masked_fill(ended, 0)
    assert len(met) >= 4, "ends of both kinds, at several places of a chunk"


def test_only_a_base_that_plays_chunks_can_show_one():
    class Expert:
        def peek(self, obs):
            return torch.zeros(N, 2)

    with pytest.raises(BurnishError, match=r"observe=\[queue\] .* Expert plays none"):
        ResidualEnv(worlds(), Expert(), observe=[Hidden.queue])  # type: ignore[arg-type]


def test_residual_view_asks_the_base_once_per_observation_and_noise():
    policy = Base()
    view = ChunkEnv(ResidualEnv(worlds(), ChunkController(policy, N)), 3, 0.9)
    view.reset()
    for _ in range(20):
        view.step(torch.zeros(N, 3, 2))
    assert len(policy.asked) == len(set(policy.asked))


@pytest.mark.parametrize("parts", [{"latent": 1.5}, {"residual": 0.2}, {"latent": 1.5, "residual": 0.2}])
def test_base_view_asks_once_and_its_sizes_fit(parts):
    policy = Base()
    view = BaseEnv(ChunkEnv(worlds(), EXECUTE, 0.9), policy, **parts)
    obs = view.reset()
    assert view.action_dim == 8 * ("latent" in parts) + 4 * ("residual" in parts)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        assert view.spec.obs.check(obs) == N
        out = view.step(torch.rand(N, view.action_dim, generator=generator) * 2 - 1)
        assert view.spec.obs.check(out.next_obs) == N
        obs = out.obs
    assert len(policy.asked) == len(set(policy.asked))


def test_zero_residual_per_chunk_executes_what_the_agent_was_shown():
    view = BaseEnv(ChunkEnv(worlds(), EXECUTE, 0.9), Base(), residual=0.3)
    shown = view.reset()["base_action"]
    for _ in range(20):
        out = view.step(torch.zeros(N, view.action_dim))
        for i in range(N):
            steps = int(out.steps[i])
            # The scripted actuators have limits of their own, so the values went to their units and back.
            torch.testing.assert_close(out.executed[i, :steps], shown[i, :steps], atol=1e-6, rtol=0)
        going = ~out.ended
        assert torch.equal(out.obs["base_action"][going], out.next_obs["base_action"][going])
        shown = out.obs["base_action"]


def test_where_a_world_was_cut_off_the_base_says_what_it_would_have_done_next():
    policy = Base()
    view = BaseEnv(ChunkEnv(worlds(), EXECUTE, 0.9), policy, residual=0.3)
    view.reset()
    cuts = terminations = 0
    for _ in range(30):
        out = view.step(torch.zeros(N, view.action_dim))
        for i in range(N):
            if out.terminated[i]:
                terminations += 1
                assert not out.next_obs["base_action"][i].any(), "a terminated future is worth nothing, nor asked"
            elif out.ended[i]:
                cuts += 1
                assert out.next_obs["base_action"][i].any()
                assert tuple(out.next_obs["state"][i].tolist()) in {q[:3] for q in policy.asked}
                assert not torch.equal(out.next_obs["base_action"][i], out.obs["base_action"][i])
    assert cuts > 5 and terminations > 5


def test_the_latent_action_is_the_noise_of_the_base():
    policy = Base()
    view = BaseEnv(ChunkEnv(worlds(), EXECUTE, 0.9), policy, latent=2.0)
    obs = view.reset()
    action = torch.rand(N, 8, generator=torch.Generator().manual_seed(2)) * 2 - 1
    out = view.step(action)
    expected = policy.act({"state": obs["state"]}, noise=2.0 * action.view(N, 4, 2))[:, 1:3]
    torch.testing.assert_close(out.executed, expected, atol=1e-6, rtol=0)


def network():
    spec = PolicySpec(ObsSpec({"state": (3,)}), ActionSpec((-1, -1), (1, 1)), 4, EXECUTE, 1)
    return build_policy(FlowConfig(steps=3), spec)


def test_a_policy_as_it_is_built_can_be_steered():
    view = BaseEnv(ChunkEnv(worlds(), EXECUTE, 0.9), network(), latent=1.5)
    view.reset()
    assert view.step(torch.zeros(N, view.action_dim)).executed.shape == (N, EXECUTE, 2)


@pytest.mark.parametrize("base", [Base, network])
@pytest.mark.parametrize("kind", ["residual", "chunk"])
@pytest.mark.parametrize("cut", range(1, 12))
def test_views_resume_exactly(kind, base, cut):
    """Bit for bit, with a real network too: what was planned in one batch is not asked again in another."""

    def make():
        if kind == "residual":
            return ChunkEnv(ResidualEnv(worlds(), ChunkController(base(), N, seed=2)), EXECUTE, 0.9)
        return BaseEnv(ChunkEnv(worlds(), EXECUTE, 0.9), base(), residual=0.3, seed=2)

    def play(view, times):
        shape = (N, EXECUTE, 2) if kind == "residual" else (N, view.action_dim)
        outs = [view.step(torch.full(shape, 0.25)) for _ in range(times)]
        return [torch.cat([o.executed.flatten(1), o.obs["base_action"].flatten(1), o.reward[:, None]], 1) for o in outs]

    view = make()
    view.reset()
    play(view, cut)
    saved = view.state_dict()
    ahead = play(view, 6)
    again = make()
    again.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(ahead, play(again, 6), strict=True))


def test_views_that_make_no_sense_are_refused():
    chunked = ChunkEnv(worlds(), EXECUTE, 0.9)
    with pytest.raises(BurnishError, match="nothing to choose"):
        BaseEnv(chunked, Base())
    with pytest.raises(BurnishError, match="takes noise"):
        BaseEnv(chunked, Base(noisy=False), latent=1.0)
    with pytest.raises(BurnishError, match="executes 2"):
        BaseEnv(ChunkEnv(worlds(), 3, 0.9), Base(), residual=0.1)
    with pytest.raises(BurnishError, match="must be positive"):
        ResidualEnv(worlds(), ChunkController(Base(), N), bound=0.0)
