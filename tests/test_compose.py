"""What refinement leaves behind: neutral parts change nothing, views and policies agree, checkpoints are bitwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from burnish.policies.advised import advised
from burnish.policies.build import build_policy, describe, load_policy
from burnish.policies.compose import BestOf, Greedy, Repeated, Residual, Steered
from burnish.policies.controllers import ChunkController, controller_for
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.seed import RowNoise
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec, agent_spec
from burnish.policies.core.views import BaseEnv, Hidden, ResidualEnv
from burnish.policies.diffusion import DiffusionConfig, Sampler
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.flow import FlowConfig
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.nets.critic import CriticConfig, QEnsemble
from burnish.policies.runs import checkpoint
from burnish.policies.split_chain import SplitChain
from burnish.policies.table import COMPOSITES
from scripted import TERMINATED, TRUNCATED, ScriptedWorld

B, H, EXECUTE, A = 4, 4, 2, 2
SPEC = PolicySpec(ObsSpec({"state": (3,)}), ActionSpec((-1, -1), (1, 1)), horizon=H, execute=EXECUTE, start=1)
OBS = {"state": torch.randn(B, 3, generator=torch.Generator().manual_seed(0))}
SCRIPT = [[(5, TERMINATED), (4, TRUNCATED)], [(3, TRUNCATED), (6, TERMINATED)], [(7, TRUNCATED)]]


def base(seed=1, steps=3):
    return build_policy(FlowConfig(steps=steps), SPEC, seed=seed).eval()


def agent(shape, base_action=None, seed=2, **changes):
    """A policy over ``shape`` numbers that has something to say."""
    shapes = {"state": (3,)} | ({} if base_action is None else {"base_action": base_action})
    spec = PolicySpec(ObsSpec(shapes), ActionSpec((-1,) * shape[1], (1,) * shape[1]), shape[0], shape[0])
    config = GaussianConfig(**({"hidden": [16], "squash": True} | changes))
    return build_policy(config, spec, seed=seed).eval()


def critic(seed=3):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return QEnsemble(SPEC, CriticConfig(hidden=[16])).eval()


def residual(every="chunk", under=None, **changes):
    shape, seen = ((1, A), (A,)) if every == "step" else ((1, EXECUTE * A), (EXECUTE, A))
    return Residual(base() if under is None else under, agent(shape, seen, **changes), 0.5, every)


def steered(residual_bound=0.25):
    size = H * A + (EXECUTE * A if residual_bound is not None else 0)
    return Steered(base(), agent((1, size)), 1.5, residual_bound)


MAKERS = {
    "residual": residual,
    "steered": steered,
    "steered_latent": lambda: steered(None),
    "repeated": lambda: Steered(Repeated(base()), agent((1, A)), 1.5),
    "greedy": lambda: Greedy(base()),
    "advised": lambda: advised(base(), 2.0),
    "best_of": lambda: BestOf(base(), critic(), 5),
    "best_of_edits": lambda: BestOf(base(), critic(), 5, agent((EXECUTE, A), (EXECUTE, A)), 0.2),
    "relay": lambda: SplitChain(base(1), base(9), 2),
    "nested": lambda: residual(under=steered()),
    "deep": lambda: BestOf(residual(under=SplitChain(base(1), base(9), 1)), critic(), 3),
}


@pytest.mark.parametrize("name", MAKERS)
def test_contract(name):
    policy = MAKERS[name]()
    with torch.no_grad():
        chunk = policy.act(OBS, generator=RowNoise([1, 2, 3, 4], [0, 0, 5, 6]))
        assert chunk.shape == (B, H, A) and chunk.abs().max() <= 1
        assert torch.equal(chunk, policy.act(OBS, generator=RowNoise([1, 2, 3, 4], [0, 0, 5, 6])))
        assert torch.equal(policy.act(OBS, greedy=True), policy.act(OBS, greedy=True))
        again = policy.act(OBS, generator=RowNoise([1, 2, 3, 4], [1, 1, 6, 7]))
        assert torch.equal(chunk, again) == (name == "greedy"), "which draws nothing"
        assert torch.equal(chunk, policy.act(OBS, greedy=True)) == (name == "greedy")
        two = policy.act({k: x[[2, 0]] for k, x in OBS.items()}, generator=RowNoise([3, 1], [5, 0]))
        torch.testing.assert_close(two, chunk[[2, 0]], rtol=0, atol=1e-5)
        prefix = torch.full((B, 2, A), 0.125)
        assert torch.equal(policy.act(OBS, prefix=prefix, greedy=True)[:, :2], prefix)
        if policy.spec.noise_shape is not None:
            z = torch.randn(B, *policy.spec.noise_shape, generator=torch.Generator().manual_seed(0))
            assert torch.equal(policy.act(OBS, noise=z), policy.act(OBS, noise=z))
            assert not torch.equal(policy.act(OBS, noise=z), policy.act(OBS, noise=-z))


@pytest.mark.parametrize("name", [*MAKERS, "step"])
def test_a_checkpoint_gives_back_the_same_actions_bit_for_bit(name, tmp_path):
    policy = residual("step", under=steered()) if name == "step" else MAKERS[name]()
    checkpoint.save(tmp_path / "p", config=describe(policy, {"data": "d"}), state=policy.state_dict())
    again, origin = load_policy(tmp_path / "p")
    assert origin == {"data": "d"} and describe(again, origin) == describe(policy, origin)
    assert again.spec == policy.spec and not again.training
    everyone = torch.ones(B, dtype=torch.bool)
    for greedy in (False, True):
        mine, theirs = (controller_for(p, B, seed=7, greedy=greedy) for p in (policy, again))
        for controller in (mine, theirs):
            controller.reset(everyone)
        for _ in range(5):
            assert torch.equal(mine.step(OBS), theirs.step(OBS))


def test_every_composite_of_the_table_makes_the_round_trip():
    assert {describe(make())["policy"] for make in MAKERS.values()} | {"repeated"} == set(COMPOSITES)


def test_an_external_base_is_handed_in_again(tmp_path):
    inner = base()
    foreign = CallablePolicy(lambda obs, noise: inner.act(obs, noise=noise), inner.spec)
    policy = residual(under=foreign)
    checkpoint.save(tmp_path / "p", config=describe(policy), state=policy.state_dict())
    with pytest.raises(BurnishError, match=r"hand it in, load_policy\(path, base=\.\.\.\)") as refusal:
        load_policy(tmp_path / "p")
    assert "\n" not in str(refusal.value)
    again, _ = load_policy(tmp_path / "p", base=foreign)
    assert torch.equal(again.act(OBS, greedy=True), policy.act(OBS, greedy=True))
    with pytest.raises(BurnishError, match="the one handed in has"):
        load_policy(tmp_path / "p", base=CallablePolicy(lambda obs: None, SPEC))


def test_what_is_not_ours_is_saved_nowhere_but_as_a_base():
    foreign = CallablePolicy(lambda obs: None, SPEC)
    with pytest.raises(BurnishError, match="a CallablePolicy cannot be saved"):
        describe(foreign)
    with pytest.raises(BurnishError, match="cannot be saved"):
        describe(Residual(base(), foreign, 0.1, "chunk"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"parts": {}}, "whose parts are"),
        ({"parts": None}, "whose parts are"),
        ({"config": {"bound": -1.0, "every": "chunk"}}, "must be a positive number"),
        ({"config": {"bound": 0.5, "every": "day"}}, "is not a choice"),
        ({"policy": "os.system"}, "no policy that this version knows"),
    ],
)
def test_a_checkpoint_that_asks_for_anything_else_is_refused(change, sentence, tmp_path):
    policy = residual()
    checkpoint.save(tmp_path / "p", config=describe(policy) | change, state=policy.state_dict())
    with pytest.raises(BurnishError, match=sentence) as refusal:
        load_policy(tmp_path / "p")
    assert "\n" not in str(refusal.value)
    checkpoint.save(tmp_path / "q", config=describe(policy), state=policy.state_dict())
    with pytest.raises(BurnishError, match="as its parts were trained"):
        load_policy(tmp_path / "q", steps=2)


@torch.no_grad()
def test_neutral_parts_leave_the_base_as_it_is_bit_for_bit():
    plain, noise = base(), RowNoise([1, 2, 3, 4], [0] * 4)
    expected = plain.act(OBS, generator=noise)
    assert torch.equal(residual(zero_last=True).act(OBS, generator=RowNoise([1, 2, 3, 4], [0] * 4)), expected), (
        "a correction of zero"
    )
    assert not torch.equal(residual().act(OBS, generator=RowNoise([1, 2, 3, 4], [0] * 4)), expected), "control"
    for switch in (0, 1, 3):
        relay = SplitChain(base(), base(), switch)
        assert torch.equal(relay.act(OBS, generator=RowNoise([1, 2, 3, 4], [0] * 4)), expected)
    alone = BestOf(plain, critic(), 1)
    assert torch.equal(alone.act(OBS, greedy=True), plain.act(OBS, greedy=True))


@torch.no_grad()
def test_the_best_candidate_wins_by_the_pessimistic_value_and_only_what_is_executed_counts():
    policy = MAKERS["best_of_edits"]()
    drawn = policy.candidates(OBS, generator=RowNoise([1, 2, 3, 4], [0] * 4))
    assert drawn.shape == (B, 10, H, A)
    assert torch.equal(drawn[:, :5, :1], drawn[:, 5:, :1]), "an edit changes executed actions alone"
    assert (drawn[:, :5, 1:3] - drawn[:, 5:, 1:3]).abs().max() <= 0.2 + 1e-6
    chosen = policy.act(OBS, generator=RowNoise([1, 2, 3, 4], [0] * 4))
    for row in range(B):
        q_values = [
            min(policy.critic({"state": OBS["state"][[row]]}, c[None, 1:3])[e, 0].item() for e in range(2))
            for c in drawn[row]
        ]
        assert torch.equal(chosen[row], drawn[row, q_values.index(max(q_values))])


@torch.no_grad()
def test_a_relay_hands_over_at_the_switch():
    first, last = base(1), base(9)
    relay, x = SplitChain(first, last, 2), torch.randn(B, H, A, generator=torch.Generator().manual_seed(4))
    assert relay.num_steps == 3
    k, cond = torch.tensor([0, 1, 2, 1]), relay.encode(OBS)
    mixed = relay.transition(x, k, cond).mean
    early, late = first.transition(x, k, first.encode(OBS)).mean, last.transition(x, k, last.encode(OBS)).mean
    assert torch.equal(mixed, torch.where((k < 2)[:, None, None], early, late))
    state = x
    for k, runner in enumerate((first, first, last)):
        state = runner.transition(state, torch.full((B,), k), runner.encode(OBS)).mean
    torch.testing.assert_close(relay.act(OBS, noise=x), state.clamp(-1, 1), rtol=0, atol=1e-6)
    relay.transition(x, torch.full((B,), 2), cond)
    assert "transition" not in vars(last), "the runner itself is left alone"


@torch.no_grad()
def test_a_relay_of_diffusion_policies_injects_the_same_noise():
    config = DiffusionConfig(train_steps=20, steps=4, sampler=Sampler.ddpm)
    same = [build_policy(config, SPEC, seed=1).eval() for _ in range(2)]
    expected = same[0].act(OBS, generator=torch.Generator().manual_seed(3))
    assert torch.equal(SplitChain(same[0], same[1], 2).act(OBS, generator=torch.Generator().manual_seed(3)), expected)
    heun = build_policy(DiffusionConfig(train_steps=20, steps=4, sampler=Sampler.heun), SPEC).eval()
    with pytest.raises(BurnishError, match="sampler=heun"):
        SplitChain(same[0], heun, 2)


def test_impossible_compositions_are_refused():
    with pytest.raises(BurnishError, match="switch=4"):
        SplitChain(base(), base(), 4)
    with pytest.raises(BurnishError, match="takes noise"):
        Steered(BestOf(base(), critic(), 2), agent((1, 8)), 1.5)
    with pytest.raises(BurnishError, match="the agent chooses"):
        Steered(base(), agent((1, 3)), 1.5)
    with pytest.raises(BurnishError, match="whose noise has rows"):
        Repeated(Repeated(base()))
    with pytest.raises(BurnishError, match="no single noise"):
        BestOf(base(), critic(), 2).act(OBS, noise=torch.zeros(B, H, A))
    with pytest.raises(BurnishError, match="controller_for"):
        residual("step").act(OBS)


def worlds():
    return ScaledEnv(ScriptedWorld(SCRIPT))


@torch.no_grad()
def plays_as_on_its_view(policy, view, seen_otherwise=lambda seen: None):
    """20 ticks with ends; ``seen_otherwise`` is an observation that the net must answer differently."""
    env, controller = worlds(), controller_for(policy, 3, seed=4)
    seen, obs = view.reset(), env.reset()
    controller.reset(torch.ones(3, dtype=torch.bool))
    for _ in range(20):
        correction, other = policy.net.act(seen, greedy=True), seen_otherwise(seen)
        assert other is None or not torch.equal(policy.net.act(other, greedy=True), correction)
        felt = view.step(correction[:, 0])
        peeked = controller.peek(obs)
        action = controller.step(obs)
        assert torch.equal(action, peeked)
        # The view has asked its base for worlds that had ended too, and products of other batches round otherwise.
        torch.testing.assert_close(action, felt.info["executed"], rtol=0, atol=1e-6)
        step = env.step(action)
        ended = step.terminated | step.truncated
        seen, obs = felt.obs, step.obs
        if ended.any():
            seen, obs = view.reset(ended), env.reset(ended)
            controller.reset(ended)


def test_a_residual_per_step_plays_as_it_did_on_the_view_it_was_trained_on():
    policy = residual("step")
    view = ResidualEnv(worlds(), ChunkController(policy.base, 3, seed=4), policy.config.bound)
    assert policy.net.spec.inputs == agent_spec(view.spec).inputs
    plays_as_on_its_view(policy, view)


@pytest.mark.parametrize("observe", [[Hidden.phase], [Hidden.queue], list(Hidden)])
def test_a_residual_that_observes_the_queue_of_its_base_is_deployed_and_saved_with_it(observe, tmp_path):
    """Also around another residual, whose base has the queue."""
    under = residual("step")
    view = ResidualEnv(worlds(), controller_for(under, 3, seed=4), 0.5, observe)
    net = build_policy(GaussianConfig(hidden=[16], squash=True), agent_spec(view.spec), seed=7).eval()
    made = Residual(under, net, 0.5, "step")
    checkpoint.save(tmp_path / "p", config=describe(made), state=made.state_dict())
    policy, _ = load_policy(tmp_path / "p")
    assert policy.observe == observe
    plays_as_on_its_view(policy, view, lambda seen: {**seen, **{x.key: seen[x.key] + 0.3 for x in observe}})


@torch.no_grad()
@pytest.mark.parametrize("kind", ["residual", "steered"])
def test_a_chunk_composite_executes_what_its_view_executed(kind):
    policy: Any = residual() if kind == "residual" else steered()
    chunked = ChunkEnv(worlds(), EXECUTE, 0.9)
    if kind == "residual":
        view, net = BaseEnv(chunked, policy.base, residual=0.5, seed=4), policy.net
    else:
        view, net = BaseEnv(chunked, policy.base, latent=1.5, residual=0.25, seed=4), policy.latent
    controller = ChunkController(policy, 3, seed=4, greedy=kind == "steered")
    controller.reset(torch.ones(3, dtype=torch.bool))
    obs = view.reset()
    for _ in range(6):
        plain = {"state": obs["state"].clone()}
        outcome = view.step(net.act(obs, greedy=True))
        for tick in range(int(outcome.steps.max())):
            alive = outcome.steps > tick
            torch.testing.assert_close(controller.step(plain)[alive], outcome.executed[alive, tick], rtol=0, atol=1e-6)
        controller.reset(outcome.ended)
        if bool((outcome.steps < EXECUTE).any()):
            break  # worlds are now at different ticks of their chunks, which the controller would play at once
        obs = outcome.obs
    assert outcome.ended.any()


def test_the_state_of_a_residual_controller_is_the_whole_of_it():
    policy = residual("step")
    one, two = controller_for(policy, B, seed=5), controller_for(policy, B, seed=99)
    one.reset(torch.ones(B, dtype=torch.bool))
    for _ in range(3):
        one.step(OBS)
    two.load_state_dict(one.state_dict())
    for _ in range(4):
        assert torch.equal(one.step(OBS), two.step(OBS))
