"""The vision-language-action model against slow loops, and what follows exactly from its masks.

Its agreement with LeRobot's own is measured by `benchmarks/vla_parity.py`. Sizes are tiny and numbers float64, so an
equality holds to rounding (``CLOSE``), and each mutant below differs by far more.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from burnish.finetune.actors.denoising import DenoisingActor
from burnish.finetune.actors.noisy_flow import NoiseConfig, NoisyFlowActor
from burnish.finetune.actors.sde_flow import SDEConfig, SDEFlowActor
from burnish.policies.chain import start_noise
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import Scale
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.lerobot.features import Feature, Kind
from burnish.policies.lerobot.scaling import Normalization
from burnish.policies.trainable import Part, TrainableConfig, trainable
from burnish.policies.vla.expert import time_embedding
from burnish.policies.vla.layers import Keys, attend, rotated
from burnish.policies.vla.prefix import resized, shuffled
from burnish.policies.vla.sizes import ExpertConfig, LanguageConfig, VisionConfig
from burnish.policies.vla.smolvla import SmolVLA, SmolVLAConfig, TinyVLAConfig

CLOSE = 1e-9
TRAINED = ["flow_sde", "flow_sde_all", "reinflow", "dppo"]
SPEC = PolicySpec(
    ObsSpec({"state": (3,), "image.top": (3, 16, 16), "image.wrist": (3, 8, 16), "tokens": (5,)}),
    ActionSpec((-1.0, -2.0), (1.0, 5.0)),
    horizon=4,
    execute=2,
)
FEATURES = [
    Feature("image.top", Kind.visual, Normalization.identity),
    Feature("image.wrist", Kind.visual, Normalization.identity),
    Feature("state", Kind.state, Normalization.mean_std),
]


def config(**changes) -> SmolVLAConfig:
    sizes = {
        "vision": VisionConfig(16, 4, 12, 1, 2, 16, 2),
        "language": LanguageConfig(40, 12, 4, 4, 2, 6, 20),
        "expert": ExpertConfig(10, 4, 14),
    }
    own = {"steps": 3, "features": FEATURES, "action": Normalization.mean_std, "state_dim": 5, "action_dim": 6}
    return SmolVLAConfig(**{**own, **sizes, **changes})


def vla(spec: PolicySpec = SPEC, **changes) -> SmolVLA:
    torch.manual_seed(0)
    policy = SmolVLA(spec, config(**changes)).double()
    for parameter in policy.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    policy.action_scaling.first.copy_(torch.tensor([0.1, 1.0]))
    policy.action_scaling.second.copy_(torch.tensor([0.2, 0.5]))
    return policy


def observed(batch: int = 3, seed: int = 0):
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 40, (batch, 5), generator=source)
    for row in range(batch):
        tokens[row, 2 + row % 4 :] = -1
    images = {
        key: torch.randint(0, 256, (batch, *shape), generator=source, dtype=torch.uint8)
        for key, shape in SPEC.obs.shapes.items()
        if key.startswith("image")
    }
    return {"state": torch.randn(batch, 3, generator=source, dtype=torch.float64), **images, "tokens": tokens}


def noisy(batch: int = 3, horizon: int = 4):
    source = torch.Generator().manual_seed(1)
    return torch.randn(batch, horizon, 6, generator=source, dtype=torch.float64)


def at(value: float, batch: int = 3):
    return torch.full((batch,), value, dtype=torch.float64)


def close(a, b, within: float = CLOSE):
    torch.testing.assert_close(a, b, rtol=0, atol=within)


# ---- the parts, against loops. ----


def test_rotation_is_that_of_pairs_of_coordinates():
    x, place = torch.randn(2, 3, 2, 8, dtype=torch.float64), torch.tensor([[0, 1, 7], [4, 4, 900]])
    found = rotated(x, place)
    for b, s, h, j in torch.cartesian_prod(*map(torch.arange, (2, 3, 2, 4))).tolist():
        angle = float(place[b, s]) / 10_000 ** (2 * j / 8)
        turned = complex(x[b, s, h, j], x[b, s, h, j + 4]) * complex(math.cos(angle), math.sin(angle))
        assert abs(found[b, s, h, j] - turned.real) < CLOSE and abs(found[b, s, h, j + 4] - turned.imag) < CLOSE


def test_attention_with_shared_keys_is_the_slow_one():
    queries, rows = torch.randn(6, 3, 4, 5, dtype=torch.float64), 3  # each row of the first source serves two
    (a, b), (c, d) = torch.randn(2, rows, 4, 2, 5).double(), torch.randn(2, 6, 3, 2, 5).double()
    first, own = Keys(a, b, torch.rand(rows, 1, 4) < 0.7), Keys(c, d, torch.ones(1, 3, 3).tril() > 0)
    found = attend(queries, [first, own]).unflatten(2, (4, 5))
    for r, s, h in torch.cartesian_prod(*map(torch.arange, (6, 3, 4))).tolist():
        seen = [
            (first.keys[r // 2, t, h // 2], first.values[r // 2, t, h // 2])
            for t in range(4)
            if first.seen[r // 2, 0, t]
        ]
        seen += [(own.keys[r, t, h // 2], own.values[r, t, h // 2]) for t in range(s + 1)]
        share = torch.stack([queries[r, s, h] @ key / 5**0.5 for key, _ in seen]).softmax(0)
        close(found[r, s, h], sum(w * value for w, (_, value) in zip(share, seen, strict=True)))


def test_pixel_shuffle_collects_blocks_row_by_row():
    x = torch.arange(16 * 3.0).view(1, 16, 3)
    found = shuffled(x, 2)
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        block = [x[0, 4 * (2 * i + r) + 2 * j + c] for r in (0, 1) for c in (0, 1)]
        assert torch.equal(found[0, 2 * i + j], torch.cat(block))


@pytest.mark.parametrize("size", [(8, 8), (4, 8), (8, 4), (6, 3), (32, 16)])
def test_pictures_are_fitted_and_padded_at_the_left_and_top(size):
    x = torch.rand(2, 3, *size, dtype=torch.float64)
    found, ratio = resized(x, 8), max(size) / 8
    height, width = int(size[0] / ratio), int(size[1] / ratio)
    assert found.shape == (2, 3, 8, 8)
    close(found[..., 8 - height :, 8 - width :], 2 * F.interpolate(x, (height, width), mode="bilinear") - 1)
    assert (found[..., : 8 - height, :] == -1).all() and (found[..., : 8 - width] == -1).all()


def test_time_embedding():
    found = time_embedding(torch.tensor([0.0, 0.3, 1.0]), 12, 4e-3, 4.0)
    for b, tau in enumerate((0.0, float(torch.tensor(0.3)), 1.0)):
        for j in range(6):
            angle = 2 * math.pi * tau / (4e-3 * 1000 ** (j / 5))
            assert abs(found[b, j] - math.sin(angle)) < 1e-6 and abs(found[b, j + 6] - math.cos(angle)) < 1e-6


@pytest.mark.parametrize("late", [False, True])
def test_places_of_patches(late):
    vision = vla(vision=replace(config().vision, late=late)).model.vlm_with_expert.vlm.model.vision_model
    found = vision.places(torch.zeros(1, 16, 1)).view(4, 4)
    line = [0, 0, 1, 2] if late else [0, 1, 2, 3]
    assert found.tolist() == [[4 * i + j for j in line] for i in line]


# ---- the whole, against a joint pass with a mask of every pair. ----


def slow_velocity(policy: SmolVLA, obs, x, tau):
    """One pass over [pictures, words, state | actions], each layer with the mask of the rule: a query sees a key if
    both are valid and the key's block is not later; pictures and words are block 0, the state 1, actions one each."""
    model, vlm, expert = policy.model, policy.model.vlm_with_expert.vlm, policy.model.vlm_with_expert.lm_expert
    width = policy.config.language.width
    seen = []
    for key in ("image.top", "image.wrist"):
        found = vlm.model.vision_model(resized(obs[key].double() / 255, 16))
        seen.append(vlm.model.connector(found) * width**0.5)
    words = vlm.model.text_model.embed_tokens(obs["tokens"].clamp(min=0)) * width**0.5
    state = model.state_proj(F.pad(policy.inputs.scalings["state"](obs["state"]), (0, 2)))[:, None]
    prefix = torch.cat([*seen, words, state], 1)
    count, steps = prefix.shape[1], x.shape[1]
    pictures = count - 6
    block = torch.tensor([0] * (count - 1) + [1] + list(range(2, 2 + steps)))
    valid = torch.ones(len(x), count + steps, dtype=torch.bool)
    valid[:, pictures : pictures + 5] = obs["tokens"] >= 0
    mask = torch.zeros(len(x), count + steps, count + steps, dtype=torch.bool)
    for b in range(len(x)):
        for q in range(count + steps):
            for k in range(count + steps):
                mask[b, q, k] = block[k] <= block[q] and valid[b, q] and valid[b, k]
    place = valid.cumsum(1) - 1
    time = time_embedding(tau.float(), x.shape[2] + 4, 4e-3, 4.0).to(x)[:, None].expand(-1, steps, -1)
    acts = model.action_in_proj(x)
    acts = model.action_time_mlp_out(F.silu(model.action_time_mlp_in(torch.cat([acts, time], 2))))
    for i, (theirs, own) in enumerate(zip(vlm.model.text_model.layers, expert.layers, strict=True)):
        keys = theirs.keys(prefix, place[:, :count], mask[:, :count, :count])
        after = theirs.after(prefix, attend(theirs.queries(prefix, place[:, :count]), [keys]))
        if i % 2:
            cross = own.mapped(keys)._replace(seen=mask[:, count:, :count])
            found = attend(own.queries(acts, torch.arange(steps).expand(len(x), -1)), [cross])
        else:
            mine = own.keys(acts, place[:, count:], mask[:, count:, count:])
            found = attend(own.queries(acts, place[:, count:]), [keys._replace(seen=mask[:, count:, :count]), mine])
        prefix, acts = after, own.after(acts, found)
    return model.action_out_proj(expert.norm(acts))


def test_the_cached_prefix_gives_the_velocity_of_the_joint_pass():
    policy, obs, x, t = vla(), observed(), noisy(), torch.tensor([0.0, 0.25, 0.9], dtype=torch.float64)
    with torch.no_grad():
        close(policy.velocity(x, t, 0.0, policy.encode(obs)), -slow_velocity(policy, obs, x, 1 - t))
        assert (
            policy.velocity(x, 1 - t, 0.0, policy.encode(obs)) + slow_velocity(policy, obs, x, 1 - t)
        ).abs().max() > 1e-3


def test_a_truncated_chunk_is_the_head_of_the_whole():
    whole, head = vla(), vla(replace(SPEC, horizon=2))
    x, cond = noisy(), whole.encode(observed())
    with torch.no_grad():
        close(whole.velocity(x, at(0.3), 0.0, cond)[:, :2], head.velocity(x[:, :2], at(0.3), 0.0, cond))
        later = x + F.pad(torch.ones(3, 2, 6).double(), (0, 0, 2, 0))
        moved = whole.velocity(later, at(0.3), 0.0, cond) - whole.velocity(x, at(0.3), 0.0, cond)
        assert moved[:, :2].abs().max() == 0 and moved[:, 2:].abs().max() > 1e-3


def test_another_state_changes_no_key_of_pictures_and_words():
    policy, obs = vla(), observed()
    with torch.no_grad():
        one, other = policy.encode(obs), policy.encode({**obs, "state": obs["state"] + 1})
    for i, (a, b) in enumerate(zip(one.layers, other.layers, strict=True)):
        assert torch.equal(a.keys[:, :-1], b.keys[:, :-1]) and not torch.equal(a.keys[:, -1], b.keys[:, -1]), i


def test_padded_words_and_absent_cameras_change_nothing():
    policy, obs, x = vla(), observed(), noisy()
    longer = vla(replace(SPEC, obs=ObsSpec({**SPEC.obs.shapes, "tokens": (9,)})))
    vlm, expert = policy.model.vlm_with_expert.vlm, policy.model.vlm_with_expert.lm_expert
    parts = policy.inputs(obs, torch.float64)
    token = policy.model.state_proj(F.pad(parts[Kind.state][0], (0, 2)))
    with torch.no_grad():
        short = policy.velocity(x, at(0.5), 0.0, policy.encode(obs))
        told = {**obs, "tokens": F.pad(obs["tokens"], (0, 4), value=-1)}
        close(short, longer.velocity(x, at(0.5), 0.0, longer.encode(told)))
        heard = policy.velocity(x, at(0.5), 0.0, policy.encode({**obs, "tokens": obs["tokens"].roll(1, 0)}))
        assert (short - heard).abs().max() > 1e-3  # the control: words are read
        prefixes = []
        for pictures, present in ((parts[Kind.visual], [None, torch.zeros(3) > 0]), (parts[Kind.visual][:1], [])):
            seen, valid = vlm.look(pictures, present)
            mean, keys = vlm.model.text_model.block(seen, valid)
            prefixes.append(expert.mapped(vlm.add_state(token, mean[:, 0], keys)))
        found = [policy.velocity(x, at(0.5), 0.0, prefix) for prefix in prefixes]
    close(found[0], found[1])


def test_one_prefix_serves_several_states_of_a_row_and_rows_can_be_taken():
    policy, x = vla(), noisy(6)
    with torch.no_grad():
        cond = policy.encode(observed())
        wide = policy.velocity(x, at(0.2, 6), 0.0, cond.repeat(2))
        close(wide, policy.velocity(x, at(0.2, 6), 0.0, cond.rows([0, 0, 1, 1, 2, 2])))
        assert cond.given.shape == (3, policy.cond_dim)


# ---- units: model units, actions in [-1, 1]. ----


def test_actions_are_those_of_the_normalisation_and_padding_is_left_out():
    policy = vla()
    x = noisy()
    data = x[..., :2] * policy.action_scaling.second + policy.action_scaling.first
    close(policy.decode(x), Scale(SPEC.action).to_unit(data), 1e-6)
    action = torch.rand(3, 4, 2, dtype=torch.float64) - 0.5
    chain = policy.in_chain(action)
    assert chain.shape == x.shape and (chain[..., 2:] == 0).all()
    close(policy.decode(chain), action, 1e-6)  # limits are float32


def test_the_chain_is_lerobots_euler_grid():
    policy, obs, x = vla(), observed(), noisy()
    with torch.no_grad():
        found, cond = policy.act(obs, noise=x), policy.encode(obs)
        for k in range(3):
            x = x - policy.model.velocity(x, at(1 - k / 3).float(), cond) / 3
        close(found, policy.decode(x), 1e-6)
    prefix = torch.full((3, 2, 2), 0.25, dtype=torch.float64)
    assert torch.equal(policy.act(obs, prefix=prefix, greedy=True)[:, :2], prefix)


def actor_of(name: str, base: SmolVLA):
    if name == "dppo":
        return DenoisingActor(base, 2, min_std=0.2)
    if name == "reinflow":
        return NoisyFlowActor(base, NoiseConfig()).double()
    return SDEFlowActor(base, SDEConfig(mixed=name == "flow_sde"))


@pytest.mark.parametrize("name", TRAINED)
def test_padding_gets_neither_noise_nor_density_and_the_ratio_is_one(name):
    require_neutral_padding(name, vla(), observed())


def require_neutral_padding(name: str, base: SmolVLA, obs):
    actor: Any = actor_of(name, base)
    drawn = actor.draw(obs, generator=torch.Generator().manual_seed(0))
    steps = torch.full((3,), 2)
    with torch.no_grad():
        close(actor.log_prob(obs, drawn.trace, steps), drawn.log_prob, 1e-7)
        assert drawn.action.shape == (3, 4, 2) and drawn.action.abs().max() <= 1
        law = getattr(actor, "trained", actor).transition(noisy(), torch.full((3,), 1), base.encode(obs))
        if name == "dppo":
            law = actor._floored(law, 0.2)
        std = law.std.expand(3, 4, 6)
        assert (std[..., :2] > 0).all() and (std[..., 2:] == 0).all()
        ordinary = base.transition(noisy(), torch.full((3,), 1), base.encode(obs)).mean
        close(law.mean[..., 2:], ordinary[..., 2:])
    # Another end of the last transition, in the padding alone: the same density.
    moved = drawn.trace.clone()
    (moved[..., -1] if moved.ndim == 3 else moved[:, -1, :, 5]).add_(3.0)
    with torch.no_grad():
        close(actor.log_prob(obs, moved, steps), drawn.log_prob, 1e-7)


# ---- what is trained. ----


@pytest.mark.parametrize(("frozen", "part"), [(True, Part.all), (False, Part.head), (False, Part.lora)])
def test_what_is_frozen_is_shared_and_stays(frozen, part):
    base = vla(frozen=frozen)
    made = trainable(base, TrainableConfig(part, rank=2))
    names = {name for name, p in made.named_parameters() if p.requires_grad}
    assert names and not any(".vlm." in name for name in names)
    kept = {p.data_ptr() for p in base.parameters()}
    assert all((p.data_ptr() in kept) != p.requires_grad for p in made.parameters())
    before = {name: x.clone() for name, x in base.state_dict().items()}
    optimizer = torch.optim.Adam([p for p in made.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        made.bc_loss(
            observed(), torch.zeros(3, 4, 2).double(), generator=torch.Generator().manual_seed(0)
        ).mean().backward()
        optimizer.step()
    assert all(torch.equal(x, before[name]) for name, x in base.state_dict().items())
    assert not torch.equal(made.act(observed(), noise=noisy()), base.act(observed(), noise=noisy()))


@pytest.mark.slow
def test_imitation_fits_the_state_and_learns():
    torch.manual_seed(0)
    policy = SmolVLA(
        replace(SPEC, obs=ObsSpec({k: s for k, s in SPEC.obs.shapes.items() if k != "image.wrist"})), TinyVLAConfig()
    )
    obs = {key: x.float() if key == "state" else x for key, x in observed(16).items()}
    policy.fit({"state": 5 + 2 * obs["state"]}, None)
    close(policy.inputs.scalings["state"].first.double(), 5 + 2 * obs["state"].double().mean(0), 1e-5)
    target = torch.where(obs["tokens"][:, :1, None] > 20, 0.5, -0.5).expand(-1, 4, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for step in range(60):
        optimizer.zero_grad()
        policy.bc_loss(obs, target, generator=torch.Generator().manual_seed(step)).mean().backward()
        optimizer.step()
    with torch.no_grad():
        # Without words the best is 0, .5 away; measured .09 and less.
        assert (policy.act(obs, greedy=True) - target).abs().mean() < 0.25


# ---- refusals. ----


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: vla(replace(SPEC, history=2)), "observes one frame"),
        (lambda: vla(action_dim=1), "do not fit a model"),
        (lambda: vla(replace(SPEC, obs=ObsSpec({"state": (3,)})), features=[FEATURES[2]]), "needs 1 to 8 cameras"),
        (
            lambda: vla(replace(SPEC, obs=ObsSpec({**SPEC.obs.shapes, "goal": (2,)})), features=[]),
            "and not \\['goal'\\]",
        ),
        (lambda: VisionConfig(side=20, patch=8), "must be a multiple"),
        (lambda: LanguageConfig(heads=3, key_heads=2), "must be a multiple of key_heads"),
        (lambda: LanguageConfig(layers=1000), "language.layers=1000"),
        (lambda: config(expert=ExpertConfig(10, 3, 14)), "multiple of expert.layers=3"),
        (lambda: config(expert=ExpertConfig(10, 2, 14)), "made to attend to themselves"),
        (lambda: SmolVLAConfig(language=LanguageConfig(1 << 20, 1 << 13)), "bytes, and"),
        (lambda: vla().encode({**observed(), "tokens": torch.full((3, 5), 40)}), "has the token 40"),
        (lambda: vla().act({k: x for k, x in observed().items() if k != "tokens"}), "lacks 'tokens'"),
        (lambda: start_noise(vla().spec, noisy(), noisy()[..., :2], False, None), "the noise has shape"),
    ],
)
def test_refusals(make, sentence):
    with pytest.raises(BurnishError, match=sentence):
        make()
