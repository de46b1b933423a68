"""pi0 and pi0.5 against a joint pass written out on their weights, and what follows from their masks.

Their agreement with SmolVLA's own parts is in `test_vla.py`, whose tiny sizes, float64 and ``CLOSE`` these tests share.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import tokenizers
import torch
from test_vla import FEATURES, SPEC, TRAINED, at, close, noisy, require_neutral_padding
from test_vla import observed as seen_by_smolvla
from torch.nn import functional as F

from burnish.policies.advised import Advised
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.language import NEGATIVE
from burnish.policies.core.spec import ObsSpec
from burnish.policies.lerobot.features import Kind
from burnish.policies.lerobot.scaling import Normalization
from burnish.policies.trainable import Part, Remember, TrainableConfig, trainable
from burnish.policies.vla.expert import time_embedding
from burnish.policies.vla.pi0 import Pi0, Pi0Config
from burnish.policies.vla.prefix import resized
from burnish.policies.vla.sizes import ExpertConfig, LanguageConfig, VisionConfig
from burnish.policies.vla.words import Words

LENGTH = 64  # tokens of a prompt
SPOKEN = replace(SPEC, obs=ObsSpec({**SPEC.obs.shapes, "tokens": (LENGTH,)}))
TASKS = ["go\n", "lift it up\n", "a_b c\n"]


def letters(length: int = LENGTH) -> Words:
    """A tokenizer of the kind of Gemma's: a space becomes a sign, and a letter a token; <bos> comes first."""
    known = ["<bos>", "▁", *"abcdefghijklmnopqrstuvwxyzATS0123456789,:;-_\n"]
    model = tokenizers.models.BPE(vocab={x: i for i, x in enumerate(known)}, merges=[], unk_token="<bos>")
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    joined = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse()]
    made.decoder = tokenizers.decoders.Sequence(joined)
    made.add_special_tokens([tokenizers.AddedToken("<bos>", special=True)])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return Words.parsed(made.to_str().encode(), length)


def pi0(adaptive: bool = False, spec=SPOKEN, **changes) -> Pi0:
    torch.manual_seed(0)
    sizes = {
        "vision": VisionConfig(16, 4, 12, 1, 2, 16, 1),
        "language": LanguageConfig(60, 12, 3, 4, 1, 6, 20),
        "expert": ExpertConfig(10, 3, 14, 1),
    }
    own = {"steps": 3, "features": FEATURES, "action": Normalization.mean_std, "state_dim": 5, "action_dim": 6}
    policy = Pi0(spec, Pi0Config(adaptive=adaptive, **{**own, **sizes, **changes})).double()
    for parameter in policy.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    policy.action_scaling.first.copy_(torch.tensor([0.1, 1.0]))
    policy.action_scaling.second.copy_(torch.tensor([0.2, 0.5]))
    policy.words = letters()
    return policy


def observed(seed: int = 0):
    return {**seen_by_smolvla(seed=seed), "tokens": letters().ids(TASKS)}


KINDS = pytest.mark.parametrize("adaptive", [False, True])


# ---- the whole, against a joint pass on the weights alone. ----


def slow_velocity(policy: Pi0, obs, tokens, x, tau):
    """One pass over [pictures, words | state | actions]: a query sees a key if both are valid and the key's block is
    not later. ``tokens`` is the whole prompt; a pi0.5 has no block of the state."""
    config, weights = policy.config, policy.state_dict()
    root = "model.paligemma_with_expert."
    text, expert = f"{root}paligemma.model.language_model.", f"{root}gemma_expert.model."

    def linear(name, x):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name, x, time):
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        if f"{name}.weight" in weights:
            return x * (1 + weights[f"{name}.weight"]), 1.0
        scale, shift, gate = linear(f"{name}.dense", time)[:, None].chunk(3, -1)
        return x * (1 + scale) + shift, gate

    vision = policy.vlm.model.vision_tower.vision_model
    pictures = [vision(resized(obs[key].double() / 255, 16, centred=True)) for key in ("image.top", "image.wrist")]
    seen = [linear(f"{root}paligemma.model.multi_modal_projector.linear", found) for found in pictures]
    words = weights[f"{text}embed_tokens.weight"][tokens.clamp(min=0)] * math.sqrt(12)
    prefix = torch.cat([*seen, words], 1)
    time, acts = time_embedding(tau.float(), 10, 4e-3, 4.0).double(), linear("model.action_in_proj", x)
    if config.adaptive:
        time = F.silu(linear("model.time_mlp_out", F.silu(linear("model.time_mlp_in", time))))
        suffix, later = acts, [1] * x.shape[1]
    else:
        both = torch.cat([acts, time[:, None].expand_as(acts)], 2)
        acts = linear("model.action_time_mlp_out", F.silu(linear("model.action_time_mlp_in", both)))
        state = linear("model.state_proj", F.pad(policy.inputs.scalings["state"](obs["state"]), (0, 2)))
        suffix, later = torch.cat([state[:, None], acts], 1), [1] + [2] * x.shape[1]
    blocks = [0] * prefix.shape[1] + later
    valid = torch.ones(len(x), len(blocks), dtype=torch.bool)
    valid[:, prefix.shape[1] - LENGTH : prefix.shape[1]] = tokens >= 0
    mask = torch.tensor([[key <= query for key in blocks] for query in blocks]) & valid[:, None] & valid[:, :, None]
    place = (valid.cumsum(1) - 1).double()
    angle = place[:, None, :, None] / 10_000 ** (torch.arange(3).double() / 3)
    turn = torch.polar(torch.ones_like(angle), angle)

    def turned(x):
        pairs = torch.complex(x[..., :3], x[..., 3:]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    for i in range(3):
        sides = [(f"{text}layers.{i}.", prefix), (f"{expert}layers.{i}.", suffix)]
        normed = [norm(f"{name}input_layernorm", part, time) for name, part in sides]
        q, k, v = (
            torch.cat(
                [linear(f"{name}self_attn.{x}_proj", n) for (name, _), (n, _) in zip(sides, normed, strict=True)], 1
            )
            .unflatten(2, (-1, 6))
            .transpose(1, 2)
            for x in "qkv"
        )
        scores = turned(q) @ turned(k).transpose(2, 3) / math.sqrt(6)
        share = scores.masked_fill(~mask[:, None], -1e300).softmax(-1)
        found = (share @ v).transpose(1, 2).flatten(2).split([prefix.shape[1], suffix.shape[1]], 1)
        done = []
        for (name, part), (_, gate), attended in zip(sides, normed, found, strict=True):
            part = part + gate * linear(f"{name}self_attn.o_proj", attended)
            inner, gate = norm(f"{name}post_attention_layernorm", part, time)
            up = F.gelu(linear(f"{name}mlp.gate_proj", inner), approximate="tanh") * linear(f"{name}mlp.up_proj", inner)
            done.append(part + gate * linear(f"{name}mlp.down_proj", up))
        prefix, suffix = done
    out, _ = norm(f"{expert}norm", suffix[:, -x.shape[1] :], time)
    return linear("model.action_out_proj", out)


def prompts(policy: Pi0, obs):
    """The whole prompt of each row, written out by hand for the states of `observed`."""
    if not policy.config.adaptive:
        return obs["tokens"]
    lines = []
    for task, state in zip(("go", "lift it up", "a b c"), obs["state"].tolist(), strict=True):
        bins = [min(math.floor((x + 1) * 128), 255) if x >= -1 else -1 for x in state]
        lines.append(f"Task: {task}, State: {' '.join(map(str, bins))};\nAction: ")
    return letters().ids(lines, end="")


@KINDS
def test_the_cached_prefix_gives_the_velocity_of_the_joint_pass(adaptive):
    policy, obs, x = pi0(adaptive), observed(), noisy()
    t = torch.tensor([0.0, 0.25, 0.9], dtype=torch.float64)
    with torch.no_grad():
        found = policy.velocity(x, t, 0.0, policy.encode(obs))
        close(found, -slow_velocity(policy, obs, prompts(policy, obs), x, 1 - t))
        assert (found + slow_velocity(policy, obs, prompts(policy, obs), x, t)).abs().max() > 1e-3  # the control


def test_a_state_is_written_as_lerobot_writes_it():
    policy, obs = pi0(adaptive=True), observed()
    obs["state"][0] = torch.tensor([-1.5, -1.0, 1.5])
    words = policy.words
    assert isinstance(words, Words)
    text = words.texts(policy._words(obs))
    assert text[0] == "Task: go, State: -1 0 255;\nAction: " and text[2].startswith("Task: a b c, State: ")
    with torch.no_grad():
        other = policy.encode({**obs, "state": obs["state"] + 0.5})
        assert not torch.equal(policy.encode(obs).layers[1].keys, other.layers[1].keys)
    del policy.words
    with pytest.raises(BurnishError, match=r"give policy\.words"):
        policy.encode(obs)


@KINDS
def test_an_advantage_is_told_without_a_second_beginning(adaptive):
    """Texts of Gemma's tokenizer begin with <bos>, which stands in front of the instruction alone."""
    words = letters()
    told = Advised(pi0(adaptive, replace(SPOKEN, words=words)))
    heard = told.with_advantage({"tokens": words.ids(["go"]), "advantage": torch.tensor([[-1.0]])})["tokens"]
    assert int((heard == 0).sum()) == 1 and words.texts(heard) == [f"go\n{NEGATIVE}\n"]


# ---- what follows from the masks. ----


@KINDS
def test_a_truncated_chunk_is_not_the_head_of_the_whole(adaptive):
    whole, head = pi0(adaptive), pi0(adaptive, replace(SPOKEN, horizon=2))
    x, cond = noisy(), whole.encode(observed())
    with torch.no_grad():
        full = whole.velocity(x, at(0.3), 0.0, cond)
        assert (full[:, :2] - head.velocity(x[:, :2], at(0.3), 0.0, cond)).abs().max() > 1e-3
        later = x + F.pad(torch.ones(3, 2, 6).double(), (0, 0, 2, 0))
        assert (whole.velocity(later, at(0.3), 0.0, cond) - full)[:, :2].abs().max() > 1e-3


def test_the_prefix_never_sees_the_state_nor_the_state_an_action():
    policy, obs = pi0(), observed()
    with torch.no_grad():
        one, other = policy.encode(obs), policy.encode({**obs, "state": obs["state"] + 1})
    for i, (a, b) in enumerate(zip(one.layers, other.layers, strict=True)):
        assert torch.equal(a.keys[:, :-1], b.keys[:, :-1]) and not torch.equal(a.keys[:, -1], b.keys[:, -1]), i
    assert torch.equal(one.given[:, :12], other.given[:, :12]) and one.given.shape == (3, policy.cond_dim)


@KINDS
def test_padded_words_and_absent_cameras_change_nothing(adaptive):
    policy, obs, x = pi0(adaptive), observed(), noisy()
    longer = pi0(adaptive, replace(SPEC, obs=ObsSpec({**SPEC.obs.shapes, "tokens": (LENGTH + 4,)})))
    longer.words = letters(LENGTH + 4)
    with torch.no_grad():
        short = policy.velocity(x, at(0.5), 0.0, policy.encode(obs))
        told = {**obs, "tokens": F.pad(obs["tokens"], (0, 4), value=-1)}
        close(short, longer.velocity(x, at(0.5), 0.0, longer.encode(told)))
        heard = policy.velocity(x, at(0.5), 0.0, policy.encode({**obs, "tokens": obs["tokens"].roll(1, 0)}))
        assert (short - heard).abs().max() > 1e-3  # the control: words are read
        pictures, found = policy.inputs(obs, torch.float64)[Kind.visual], []
        for shown, present in ((pictures, [None, torch.zeros(3) > 0]), (pictures[:1], [])):
            mean, keys = policy.vlm.text.block(*policy.vlm.look(shown, present))
            cond = policy.with_state(obs, mean[:, 0], keys)
            found.append(policy.velocity(x, at(0.5), 0.0, cond))
    close(found[0], found[1])


@pytest.mark.parametrize("size", [(8, 8), (4, 8), (8, 3), (32, 12)])
def test_pictures_are_padded_at_both_ends(size):
    x = torch.rand(1, 3, *size, dtype=torch.float64)
    found, ratio = resized(x, 8, centred=True), max(size) / 8
    height, width = int(size[0] / ratio), int(size[1] / ratio)
    top, left = (8 - height) // 2, (8 - width) // 2
    inner = found[..., top : top + height, left : left + width]
    close(inner, 2 * F.interpolate(x, (height, width), mode="bilinear") - 1)
    found[..., top : top + height, left : left + width] = -1
    assert (found == -1).all()


# ---- as a policy of ours. ----


@KINDS
def test_the_chain_is_lerobots_euler_grid(adaptive):
    policy, obs, x = pi0(adaptive), observed(), noisy()
    action = torch.rand(3, 4, 2, dtype=torch.float64) - 0.5
    close(policy.decode(policy.in_chain(action)), action, 1e-6)  # limits are float32
    with torch.no_grad():
        found, cond = policy.act(obs, noise=x), policy.encode(obs)
        wide = policy.velocity(x.repeat_interleave(2, 0), at(0.2, 6), 0.0, cond.repeat(2))
        close(wide[::2], policy.velocity(x, at(0.2), 0.0, cond))
        for k in range(3):
            x = x - policy.model.velocity(x, at(1 - k / 3).float(), cond) / 3
        close(found, policy.decode(x), 1e-6)


@KINDS
@pytest.mark.parametrize("level", [Remember.embeddings, Remember.keys])
def test_what_is_remembered_gives_the_same_prefix(level, adaptive):
    policy, obs = pi0(adaptive), observed()
    kept = policy.features(obs, level)
    policy.feature_shapes(level).check(kept)
    one, other = policy.encode(kept), policy.encode(obs)
    close(one.given, other.given)
    for a, b in zip(one.layers, other.layers, strict=True):
        assert torch.equal(a.seen, b.seen)
        close(a.keys * a.seen[:, 0, :, None, None], b.keys * b.seen[:, 0, :, None, None])


@KINDS
@pytest.mark.parametrize("name", TRAINED)
def test_padding_gets_neither_noise_nor_density_and_the_ratio_is_one(name, adaptive):
    require_neutral_padding(name, pi0(adaptive), observed())


@KINDS
@pytest.mark.parametrize(("part", "frozen"), [(Part.all, True), (Part.head, False), (Part.lora, False)])
def test_what_acts_is_trained_and_the_rest_shared(part, frozen, adaptive):
    base = pi0(adaptive, frozen=frozen, expert_head=True)
    made = trainable(base, TrainableConfig(part, rank=2))
    names = {name for name, p in made.named_parameters() if p.requires_grad}
    assert not any(".paligemma." in name or ".lm_head." in name for name in names)
    if part is Part.lora:  # two matrices for the queries and values of 3 layers, and the maps of numbers and tokens
        assert len(names) == 2 * (2 * 3 + (4 if adaptive else 5))
    kept = {p.data_ptr() for p in base.parameters()}
    assert all((p.data_ptr() in kept) != p.requires_grad for p in made.parameters())
    loss = made.bc_loss(observed(), torch.zeros(3, 4, 2).double(), generator=torch.Generator().manual_seed(0))
    loss.mean().backward()
    assert all(p.grad is not None for name, p in made.named_parameters() if name in names and ".paligemma." not in name)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"expert": ExpertConfig(10, 1, 14, 1)}, "stands beside every layer"),
        ({"expert": ExpertConfig(10, 3, 14, 3)}, "expert.self_every=3"),
        ({"vision": VisionConfig(16, 4, 12, 1, 2, 16, 2)}, "vision.shuffle=1"),
    ],
)
def test_refusals(changes, sentence):
    with pytest.raises(BurnishError, match=sentence):
        pi0(**changes)
