"""A small vision-language-action model has parts of its own: words that shape what it sees (FiLM), and several draws of
noise and time for each window. Against slow loops in float64; equalities hold to rounding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from burnish.policies.core.errors import BurnishError
from burnish.policies.core.ranks import Ranks
from burnish.policies.core.seed import generator, normal
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.flow import sample_time
from burnish.policies.trainable import Remember
from burnish.policies.vla.lerobot import write
from burnish.policies.vla.prefix import Stem, VisionModel, resized
from burnish.policies.vla.sizes import ExpertConfig, LanguageConfig, VisionConfig
from burnish.policies.vla.smolvla import LATEST, TIMES, SmolVLA, TinyVLAConfig

SPEC = PolicySpec(
    ObsSpec({"state": (3,), "image.top": (3, 16, 16), "tokens": (5,)}), ActionSpec((-1.0, -1.0), (1.0, 1.0)), 4, 2
)
TOKENS = torch.tensor([[3, 1, -1, -1, -1], [4, 4, 2, 0, 7]])


def small(film: bool = True, draws: int = 1) -> SmolVLA:
    torch.manual_seed(0)
    vision = VisionConfig(16, 4, 12, 1, 2, 16, 2, stem=True, film=film)
    sizes = {"vision": vision, "language": LanguageConfig(40, 12, 2, 4, 2, 6, 20), "expert": ExpertConfig(10, 2, 14)}
    return SmolVLA(SPEC, TinyVLAConfig(**sizes, draws=draws)).double()


def observed(tokens: torch.Tensor = TOKENS):
    source = torch.Generator().manual_seed(1)
    picture = torch.randint(0, 256, (1, 3, 16, 16), generator=source, dtype=torch.uint8).expand(2, -1, -1, -1)
    return {"state": torch.zeros(2, 3, dtype=torch.float64), "image.top": picture, "tokens": tokens}


def test_words_scale_and_shift_every_channel_of_every_patch():
    vlm = small().model.vlm_with_expert.vlm
    vision, words = vlm.model.vision_model, vlm.model.text_model.embed_tokens.weight
    pictures = resized(observed()["image.top"].double() / 255, 16)
    patches = vision.embeddings.patch_embedding(pictures)
    rows = []
    for b, said in enumerate(((3, 1), (4, 4, 2, 0, 7))):
        summary = sum(math.sqrt(12) * words[word] for word in said) / math.sqrt(len(said))
        change = vision.film.weight @ summary + vision.film.bias
        x = torch.stack([patches[b, :, i, j] * (1 + change[:12]) + change[12:] for i in range(4) for j in range(4)])
        x = (x + vision.embeddings.position_embedding.weight)[None]
        for layer in vision.encoder.layers:
            x = layer(x)
        rows.append(vlm.model.connector(vision.post_layernorm(x))[0] * math.sqrt(12))
    found, _ = vlm.look([observed()["image.top"].double() / 255], said=vlm.sum_of(TOKENS))
    torch.testing.assert_close(found, torch.stack(rows), rtol=0, atol=1e-9)


@pytest.mark.parametrize("film", [True, False])
def test_the_same_picture_is_seen_otherwise_for_other_words_with_film_alone(film):
    policy = small(film)
    seen, silent = (
        policy.features(observed(tokens), Remember.embeddings)["features.embeddings"]
        for tokens in (TOKENS, torch.full_like(TOKENS, -1))
    )
    assert torch.equal(*seen) is not film
    assert silent.isfinite().all() and torch.equal(*silent)


def test_the_loss_is_the_mean_over_draws_of_which_the_first_is_pure_noise():
    policy, obs = small(draws=3), observed()
    action = torch.rand(2, 4, 2, dtype=torch.float64) * 2 - 1
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]) > 0
    found = policy.bc_loss(obs, action, mask=mask, generator=torch.Generator().manual_seed(5))
    source = torch.Generator().manual_seed(5)
    noise = normal((6, 4, 2), source, dtype=torch.float64)
    t = LATEST * sample_time(TIMES, (6,), source, noise)
    for row in range(2):
        losses = []
        one = {key: x[row : row + 1] for key, x in obs.items()}
        for draw in range(3):
            start, at = noise[3 * row + draw], t[3 * row + draw] * (draw > 0)
            x = (1 - at) * start + at * action[row]
            v = policy.velocity(x[None], at[None], 0.0, policy.encode(one))[0]
            losses.append((v - (action[row] - start)).square()[mask[row]].mean())
        torch.testing.assert_close(found[row], torch.stack(losses).mean(), rtol=0, atol=1e-9)


def test_ranks_draw_for_their_rows_what_one_process_draws():
    policy, obs = small(draws=3), observed()
    action = torch.rand(2, 4, 2, dtype=torch.float64) * 2 - 1
    wanted = policy.bc_loss(obs, action, generator=generator(0, "noise"))
    for ranks in (Ranks(0, 2), Ranks(1, 2)):
        own = ranks.rows(torch.arange(2))
        part = {key: x[own] for key, x in obs.items()}
        found = policy.bc_loss(part, action[own], generator=ranks.generator(generator(0, "noise")))
        torch.testing.assert_close(found, wanted[own], rtol=0, atol=1e-9)


def test_one_draw_is_at_a_time_of_its_own():
    """The control of the test above: a single draw, as published, is not at pure noise."""
    policy, times = small(draws=1), []
    inner = policy.velocity
    policy.velocity = lambda x, t, d, cond: times.append(t) or inner(x, t, d, cond)
    policy.bc_loss(observed(), torch.zeros(2, 4, 2, dtype=torch.float64))
    assert (times[0] > 0).all()


def test_no_lerobot_folder_holds_such_a_model(tmp_path):
    plain = small()
    plain.config = replace(plain.config, vision=replace(plain.config.vision, stem=False))
    with pytest.raises(BurnishError, match="looks in ways of its own"):
        write(plain, tmp_path / "folder")


@pytest.mark.parametrize("patch", [2, 4, 6, 8, 16])
def test_the_stem_of_any_patch_misses_no_pixel(patch):
    side = 4 * patch
    pictures = torch.rand(1, 3, side, side, dtype=torch.float64, requires_grad=True)
    found = Stem(8, patch).double()(pictures)
    assert found.shape == (1, 8, 4, 4)
    (influence,) = torch.autograd.grad(found.square().sum(), pictures)
    assert bool((influence != 0).all())


@pytest.mark.parametrize("norm", [True, False])
def test_a_channel_of_the_normalised_stem_says_where_it_differs_from_itself(norm):
    torch.manual_seed(0)
    found = Stem(8, 4, norm).double()(torch.rand(2, 3, 16, 16, dtype=torch.float64))
    mean, variance = found.mean((2, 3)), found.var((2, 3), correction=0)
    # The variance is 1 up to the 1e-5 that keeps a constant channel from being divided by 0.
    assert norm == torch.allclose(mean, torch.zeros_like(mean), atol=1e-9)
    assert norm == torch.allclose(variance, torch.ones_like(variance), atol=1e-2)


def scenes(count: int, source: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures of one background with a red thing of two pixels across, and where it lies, of mean 0 and variance 1."""
    place = torch.randint(2, 28, (count, 2), generator=source)
    pictures = torch.full((count, 3, 32, 32), -0.2)
    pictures[:, :, :10] = -1.0
    pictures[:, :2, 4:14, 14:18] = 0.7
    for picture, (row, column) in zip(pictures, place.tolist(), strict=True):
        picture[:, row : row + 2, column : column + 2] = torch.tensor([0.7, -0.7, -0.7])[:, None, None]
    return pictures, (place.float() - 14.5) / 7.5


def unexplained(norm: bool) -> float:
    """The share of the variance of that place that is left to a small tower after 300 updates."""
    torch.manual_seed(0)
    tower = VisionModel(VisionConfig(32, 4, 32, 1, 4, 64, 2, stem=True, instance_norm=norm), 8)
    look, out = torch.nn.MultiheadAttention(32, 4, batch_first=True), torch.nn.Linear(32, 1)
    query = torch.nn.Parameter(0.1 * torch.randn(2, 32))
    parts = [*tower.parameters(), *look.parameters(), *out.parameters(), query]
    optimizer, source = torch.optim.Adam(parts, 2e-3), generator(0, "scenes")

    def error(count: int) -> torch.Tensor:
        pictures, place = scenes(count, source)
        tokens = tower(pictures)
        found, _ = look(query.expand(count, -1, -1), tokens, tokens)
        return (out(found)[..., 0] - place).square().mean()

    for _ in range(300):
        optimizer.zero_grad()
        error(32).backward()
        optimizer.step()
    with torch.no_grad():
        return float(error(256))


@pytest.mark.slow
def test_a_small_thing_is_found_before_a_large_background_with_the_norm_alone():
    # Of three seeds .01 to .08 were left with it, and .96 to 1.09 without.
    assert unexplained(norm=True) < 0.4 and unexplained(norm=False) > 0.8
