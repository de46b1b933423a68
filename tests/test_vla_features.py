"""What is remembered of an observation instead of its pictures: the same losses and gradients, without looking again.

Numbers are float64, so that the levels agree to rounding (``CLOSE``, as in test_vla.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_vla import CLOSE, close, observed, vla

from burnish.finetune.actors.denoising import DenoisingActor
from burnish.finetune.actors.noisy_flow import NoiseConfig, NoisyFlowActor
from burnish.finetune.actors.sde_flow import SDEConfig, SDEFlowActor
from burnish.finetune.build import prepare, prior_data
from burnish.finetune.feature_env import FeatureEnv
from burnish.finetune.loops import OffPolicyConfig, OnPolicyConfig
from burnish.finetune.methods.dsrl import Variant
from burnish.finetune.methods.grpo import GRPOConfig
from burnish.finetune.table import METHODS
from burnish.policies.build import build_policy, describe, load_policy
from burnish.policies.chain import draws
from burnish.policies.core.chunk import ChunkEnv
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.execute import Precision
from burnish.policies.core.language import Letters, Spoken
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.seed import RowNoise
from burnish.policies.core.spec import ChunkConfig, chunk_spec
from burnish.policies.core.tree import index
from burnish.policies.data.episodes import Episodes
from burnish.policies.external.remote import RemoteConfig, RemotePolicy
from burnish.policies.flow import FlowConfig
from burnish.policies.runs.checkpoint import save
from burnish.policies.trainable import Part, Remember, TrainableConfig, trainable
from burnish.policies.vla.prefix import VisionLanguageModel
from burnish.policies.vla.sizes import ExpertConfig, LanguageConfig, VisionConfig
from burnish.policies.vla.smolvla import SmolVLA, TinyVLAConfig
from burnish.policies.vla.words import Words
from burnish.real_robot.export.exporter import ExportConfig, export
from burnish.sim.build import make_env, seen_by
from burnish.sim.discs import SENTENCES, DiscsConfig
from server_lab import served

LEVELS = [Remember.embeddings, Remember.keys]


def discs(frozen: bool = True, **changes: Any) -> SmolVLA:
    spec = chunk_spec(make_env(DiscsConfig(), 1).spec, ChunkConfig(4, 2)).reading(Words.of(SENTENCES))
    looks = VisionConfig(16, 4, 8, 1, 2, 8, 2, stem=True, instance_norm=True, film=True)  # as tiny_vla does
    small = {"vision": looks, "language": LanguageConfig(32, 8, 2, 2, 1, 4, 8)}
    settings = TinyVLAConfig(steps=2, action_dim=5, frozen=frozen, expert=ExpertConfig(8, 2, 8), **small, **changes)
    return build_policy(settings, spec, seed=1)


def actor_of(name: str, base: Any, train: TrainableConfig) -> Any:
    torch.manual_seed(3)
    if name == "dppo":
        return DenoisingActor(base, 2, train=train).double()
    if name == "reinflow":
        return NoisyFlowActor(base, NoiseConfig(), train).double()
    return SDEFlowActor(base, SDEConfig(), train).double()


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_remembered_has_the_shapes_that_it_says(level, marked):
    policy = vla(language=LanguageConfig(40, 12, 4, 4, 2, 6, 20, special=[1, 2] if marked else []))
    kept = policy.features(observed(), level)
    policy.feature_shapes(level).check(kept)
    assert policy.features(kept, level) is kept
    assert not any(key.startswith("image.") for key in kept)
    close(policy.encode(kept).given, policy.encode(observed()).given)


@pytest.mark.parametrize("part", [Part.head, Part.lora])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("method", ["flow_sde", "reinflow", "dppo"])
def test_losses_and_gradients_are_those_of_pictures(method, level, part):
    base = vla()
    actor = actor_of(method, base, TrainableConfig(part, rank=2, remember=level))
    obs = observed()
    with torch.no_grad():
        draw = actor.draw(obs, generator=torch.Generator().manual_seed(5))
    steps, found = torch.tensor([2, 1, 2]), {}
    kept = base.features(obs, level)
    other = base.features(observed(seed=9), level) | {"state": obs["state"], "tokens": obs["tokens"]}
    for name, seen in {"pictures": obs, "kept": kept, "other": other}.items():
        actor.zero_grad()
        loss = actor.log_prob(seen, draw.trace, steps).square().sum()
        loss.backward()
        found[name] = loss.detach(), {n: p.grad for n, p in actor.named_parameters() if p.grad is not None}
    (loss, gradients), (same, again), (differs, _) = found["pictures"], found["kept"], found["other"]
    torch.testing.assert_close(same, loss, rtol=CLOSE, atol=0)
    assert gradients.keys() == again.keys() and any("expert" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-7, atol=CLOSE, msg=name)
    assert abs(differs - loss) > 1e-3 * abs(loss), "the pictures do matter"


@pytest.mark.parametrize("level", LEVELS)
def test_an_end_leads_to_the_features_of_where_it_led(level):
    base = discs()
    worlds = [seen_by(base.spec, make_env(DiscsConfig(max_steps=3), 4, seed=3)) for _ in range(2)]
    plain, seen = ChunkEnv(worlds[0], 2, 0.9), FeatureEnv(ChunkEnv(worlds[1], 2, 0.9), base, level)
    plain.reset()
    seen.reset()
    for _ in range(2):
        action = torch.zeros(4, 2, plain.spec.action.dim)
        a, b = plain.step(action), seen.step(action)
        for name in ("obs", "next_obs"):
            wanted = base.features(getattr(a, name), level)
            for key, x in wanted.items():
                torch.testing.assert_close(getattr(b, name)[key], x, rtol=0, atol=1e-5)
    assert a.ended.all() and not torch.equal(b.obs["features"], b.next_obs["features"])
    assert not torch.equal(index(b.obs, 0)["state"], index(b.next_obs, 0)["state"])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("method", ["flow_sde", "reinflow", "dppo"])
def test_an_update_does_not_look_again(method, level, monkeypatch):
    base = discs(frozen_dtype=Precision.bfloat16 if level is Remember.keys else Precision.float32)
    config: Any = METHODS[method].config(train=TrainableConfig(remember=level))
    config.loop.decisions_per_update, config.ppo.epochs, config.ppo.minibatch = 4, 2, 8
    if method == "dppo":
        config.trained_steps, config.bc_coef = 1, 0.1
    loop = prepare(config, base, seen_by(base.spec, make_env(DiscsConfig(max_steps=6), 4, seed=3)), seed=1)
    update, look, counts = loop.learner.update, VisionLanguageModel.look, []

    def looking(*args: Any, **said: Any) -> Any:
        counts.append("look")
        return look(*args, **said)

    def updating(source: Any) -> Any:
        counts.append("update")
        batch = source.sample()
        assert not any(key.startswith("image.") for key in batch["obs"])
        metrics = update(source)
        assert counts[-1] == "update", "the pictures were looked at once more"
        return metrics

    monkeypatch.setattr(VisionLanguageModel, "look", looking)
    monkeypatch.setattr(loop.learner, "update", updating)
    for _ in range(2):
        loop.iterate()
    assert counts.count("look") >= 8
    raw = seen_by(base.spec, make_env(DiscsConfig(), 4, seed=5)).reset()
    assert loop.learner.policy.act(raw, greedy=True).abs().max() <= 1, "what is delivered sees pictures"


@pytest.fixture
def looks(monkeypatch) -> list[int]:
    """The rows of each look that the model takes."""
    look, counts = VisionLanguageModel.look, list[int]()

    def looking(self: VisionLanguageModel, pictures: Any, *args: Any, **said: Any) -> Any:
        counts.append(len(pictures[0]))
        return look(self, pictures, *args, **said)

    monkeypatch.setattr(VisionLanguageModel, "look", looking)
    return counts


@pytest.mark.parametrize("method", ["dsrl", "rfs"])
def test_an_agent_that_steers_sees_features_and_keeps_no_pictures(method, looks, tmp_path):
    base = discs()
    config: Any = METHODS[method].config(features=True, repeat=True)
    config.loop.warmup, config.loop.batch, config.loop.updates_per_decision, config.loop.capacity = 8, 8, 1.0, 64
    worlds = seen_by(base.spec, make_env(DiscsConfig(max_steps=5), 4, seed=3))
    loop: Any = prepare(config, base, worlds, probe=False, seed=1)
    for _ in range(6):
        metrics = loop.iterate()
    assert "critic_loss" in metrics
    # The base acts on what was seen, and an update looks at nothing: one row for each observation of a world, and one
    # more where an episode ends, after 3 decisions of 2 ticks.
    assert sum(looks) == 4 * (1 + 6 + 2)
    kept = loop.replay.sample(8)["next_obs"]
    assert kept.keys() == {"state", "tokens", "features"} and kept["features"].std(0).max() > 0
    raw, policy = seen_by(base.spec, make_env(DiscsConfig(), 4, seed=5)).reset(), loop.learner.policy
    save(tmp_path / "steered", config=describe(policy), state=policy.state_dict())
    found, noise = load_policy(tmp_path / "steered")[0], torch.randn(4, *policy.spec.noise_shape)
    wanted = policy.act(raw, noise=noise)
    assert torch.equal(found.act(raw, noise=noise), wanted)
    assert torch.equal(found.act(base.features(raw, Remember.keys), noise=noise), wanted)


@pytest.mark.parametrize("method", ["residual_ppo", "residual_td3"])
def test_an_agent_that_corrects_sees_features_and_keeps_no_pictures(method, looks, tmp_path):
    base = discs()
    config: Any = METHODS[method].config(features=True, bound=0.3)
    if method == "residual_td3":
        config.loop = OffPolicyConfig(warmup=8, batch=8, capacity=64, updates_per_decision=1.0)
    else:
        config.loop, config.ppo.minibatch, config.ppo.epochs = OnPolicyConfig(3), 8, 1
    worlds = seen_by(base.spec, make_env(DiscsConfig(max_steps=5), 4, seed=3))
    loop: Any = prepare(config, base, worlds, seed=1)
    shown = set(loop.env.spec.obs.shapes)
    assert shown == {"state", "tokens", "features", "base_action"}
    for _ in range(2 if method == "residual_ppo" else 6):
        metrics = loop.iterate()
    assert metrics.keys() & {"critic_loss", "value_loss"}
    # One row for each observation of a world, the base's decisions included: the first, 6 ticks, and one more where an
    # episode of 5 ticks ends.
    assert sum(looks) == 4 * (1 + 6 + 1)
    raw, policy = seen_by(base.spec, make_env(DiscsConfig(), 4, seed=5)).reset(), loop.learner.policy
    for x in policy.net.parameters():
        torch.nn.init.normal_(x, std=0.3)  # a fresh correction is 0 whatever it sees
    save(tmp_path / "corrected", config=describe(policy), state=policy.state_dict())
    found, action = load_policy(tmp_path / "corrected")[0], torch.zeros(4, 2)
    wanted = policy.correction(raw, action)
    assert wanted.abs().min() > 0 and torch.equal(found.correction(raw, action), wanted)
    assert torch.equal(found.correction(base.features(raw, Remember.keys), action), wanted)


def test_episodes_are_compared_by_what_is_remembered():
    base = discs()
    config: Any = METHODS["flow_sde"].config(train=TrainableConfig(remember=Remember.keys))
    grouped = GRPOConfig(inner=config, group=2, loop=OnPolicyConfig(6))
    loop = prepare(grouped, base, seen_by(base.spec, make_env(DiscsConfig(max_steps=6), 4, seed=3)), seed=1)
    assert isinstance(loop.env, FeatureEnv) and "compared" in loop.iterate()


@pytest.mark.parametrize("greedy", [False, True])
def test_several_draws_of_a_row_look_at_it_once(greedy, looks):
    policy = discs()
    obs = seen_by(policy.spec, make_env(DiscsConfig(), 3)).reset()
    fixed = torch.full((12, 1, 2), 0.25)

    with torch.no_grad():
        options = {"prefix": fixed, "greedy": greedy}
        one = draws(policy, obs, 4, generator=RowNoise([1, 2, 3], [0, 5, 9]).split(4), **options)
        other = policy.act(
            {key: x.repeat_interleave(4, 0) for key, x in obs.items()},
            generator=RowNoise([1, 2, 3], [0, 5, 9]).split(4),
            **options,
        )
    assert looks == [3, 12]
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)  # products of more rows round otherwise
    assert greedy or not torch.allclose(one[0], one[1])


def test_refusals():
    with pytest.raises(BurnishError, match=r"remember=keys .* train.part=all trains"):
        trainable(discs(frozen=False), TrainableConfig(remember=Remember.keys))
    trainable(discs(frozen=False), TrainableConfig(Part.head, remember=Remember.keys))
    policy = discs(frozen=False)
    policy.adapts = lambda name: "vision_model" in name  # type: ignore[method-assign]
    with pytest.raises(BurnishError, match=r"embeddings .* train.part=lora trains"):
        trainable(policy, TrainableConfig(Part.lora, remember=Remember.embeddings))
    flow = build_policy(FlowConfig(), chunk_spec(make_env(DiscsConfig(), 1).spec, ChunkConfig(4, 2)))
    with pytest.raises(BurnishError, match="a FlowPolicy has none"):
        trainable(flow, TrainableConfig(remember=Remember.keys))
    with pytest.raises(BurnishError, match=r"features=true takes .* a FlowPolicy has none"):
        env = ScaledEnv(make_env("point_reach", 4))
        blind = build_policy(FlowConfig(), chunk_spec(env.spec, ChunkConfig(4, 2)))
        prepare(METHODS["dsrl"].config(features=True), blind, env, probe=False)
    corrected: Any = METHODS["residual_td3"].config(features=True)  # before a single decision is played
    with pytest.raises(BurnishError, match=r"recordings hold the pictures; leave data or method\.features out"):
        prior_data(corrected, blind, env, Episodes([], make_env(DiscsConfig(), 1).spec))
    with pytest.raises(BurnishError, match=r"variant=aliased .* features=true"):
        METHODS["dsrl"].config(features=True, variant=Variant.aliased)
    config: Any = METHODS["flow_sde"].config(train=TrainableConfig(remember=Remember.keys))
    config.ppo.image_shift = 0.1
    base = discs()
    with pytest.raises(BurnishError, match=r"image_shift=0\.1 .*remember=keys"):
        prepare(config, base, seen_by(base.spec, make_env(DiscsConfig(), 4)))


def halved() -> tuple[SmolVLA, SmolVLA]:
    """A model, and the same one with its vision-language model in bfloat16."""
    pair = [vla(frozen_dtype=Precision(name)).float() for name in ("float32", "bfloat16")]
    for policy in pair:  # `vla` made the test's own choice of numbers
        policy.load_state_dict(pair[0].state_dict())
    pair[1].vlm.bfloat16()
    return pair[0], pair[1]


def test_a_model_that_is_frozen_in_bfloat16_acts_nearly_the_same():
    """bfloat16 has a relative rounding of 2^-9; after a few layers actions in [-1, 1] differ by some thousandths."""
    full, half = halved()
    obs = {key: x.float() if x.is_floating_point() else x for key, x in observed(16).items()}
    noise = torch.randn(16, 4, 6, generator=torch.Generator().manual_seed(2))
    error = (half.act(obs, noise=noise) - full.act(obs, noise=noise)).detach()
    assert 1e-6 < float(error.square().mean().sqrt()) < 5e-3 and half.act(obs, noise=noise).dtype is torch.float32
    kept = half.features(obs, Remember.keys)
    assert kept["features.keys"].dtype is kept["features"].dtype is torch.bfloat16
    assert 2 * kept["features.keys"].nbytes == full.features(obs, Remember.keys)["features.keys"].nbytes
    assert torch.equal(half.act(kept, noise=noise), half.act(obs, noise=noise)), "no rounding is added by remembering"


@pytest.mark.parametrize("method", ["flow_sde", "reinflow", "dppo"])
def test_what_is_trained_on_it_stays_float32(method):
    full, half = halved()
    obs = {key: x.float() if x.is_floating_point() else x for key, x in observed().items()}
    found = []
    for base in (full, half):
        actor = actor_of(method, base, TrainableConfig()).float()
        actor.trained.vlm.to(base.vlm.dtype) if method == "dppo" else actor.flow.vlm.to(base.vlm.dtype)
        with torch.no_grad():
            draw = actor.draw(obs, generator=torch.Generator().manual_seed(5))
        again = actor.log_prob(obs, draw.trace, torch.full((3,), 2))
        torch.testing.assert_close(again, draw.log_prob, rtol=0, atol=1e-2)  # a ratio of 1 before the first update
        again.sum().backward()
        trained = {name: p for name, p in actor.named_parameters() if p.requires_grad}
        assert all(p.dtype is torch.float32 for p in trained.values())
        assert not any(".vlm." in name for name in trained)
        found.append(torch.cat([p.grad.flatten() for p in trained.values() if p.grad is not None]))
    assert 0 < (found[1] - found[0]).norm() < 0.05 * found[0].norm()


def test_bfloat16_is_kept_by_a_checkpoint_and_refused_where_it_would_be_trained(tmp_path):
    with pytest.raises(BurnishError, match=r"frozen_dtype=bfloat16 .* policy\.frozen=true"):
        TinyVLAConfig(frozen_dtype=Precision.bfloat16)
    _, half = halved()
    save(tmp_path / "half", config=describe(half), state=half.state_dict())
    found, _ = load_policy(tmp_path / "half")
    assert found.vlm.dtype is torch.bfloat16 and found.model.state_proj.weight.dtype is torch.float32
    assert all(torch.equal(x, half.state_dict()[name]) for name, x in found.state_dict().items())


@pytest.mark.slow
def test_a_bundle_follows_one_instruction(tmp_path):
    policy = discs().eval()
    with pytest.raises(BurnishError, match=r"has no tokenizer; .* instruction='\.\.\.'"):
        export(ExportConfig(str(tmp_path / "none"), samples=4), policy)
    made = export(ExportConfig(str(tmp_path / "one"), samples=4, instruction=SENTENCES[0]), policy)
    assert "tokens" not in made.bundle.schema.obs
    seen = seen_by(policy.spec, make_env(DiscsConfig(), 1)).reset(None, [3])
    obs = {key: x[0].numpy() for key, x in seen.items() if key != "tokens"}
    noise = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(1))
    found = torch.as_tensor(made.act(obs, noise=noise[0].numpy())).view(4, 2)
    for said, same in ((SENTENCES[0], True), (SENTENCES[-1], False)):
        wanted = policy.act({**seen, "tokens": Words.of(SENTENCES).ids([said])}, noise=noise)[0].detach()
        assert torch.allclose(found, wanted, atol=1e-5) is same
    flow = build_policy(FlowConfig(), chunk_spec(make_env(DiscsConfig(), 1).spec, ChunkConfig(4, 2)))
    with pytest.raises(BurnishError, match="the policy reads none"):
        export(ExportConfig(str(tmp_path / "x"), instruction="go"), flow)


def test_a_served_model_is_told_what_each_row_is():
    policy, env = discs().eval(), Spoken(make_env(DiscsConfig(), 3), Letters())
    obs = env.reset(None, range(3))
    ours = seen_by(policy.spec, make_env(DiscsConfig(), 3)).reset(None, range(3))
    noise = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    with served(policy, batch=2) as server:
        remote = RemotePolicy(RemoteConfig(server.url), env.spec, obs)
        found = remote.act(obs, noise=noise)
    torch.testing.assert_close(found, policy.act(ours, noise=noise).detach(), atol=1e-5, rtol=0)
    assert len({tuple(row) for row in ours["tokens"].tolist()}) > 1, "the rows are told different things"
