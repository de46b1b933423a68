"""RECAP: a policy that is told the advantage begins as its base, learns what the word means, acts as told "good"."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from verb_lab import refused

import mdp
from burnish.finetune.api import load, save
from burnish.offline.recap import RecapConfig, Worse
from burnish.policies.advised import Advised, advised
from burnish.policies.build import build_policy
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.language import NEGATIVE, POSITIVE
from burnish.policies.core.seed import generator
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.diffusion import DiffusionConfig
from burnish.policies.features import require_features
from burnish.policies.flow import FlowConfig
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.nets.critic import ValueConfig
from burnish.policies.nets.denoiser import Body, DenoiserConfig, MlpBodyConfig
from burnish.policies.nets.encoder import EncoderConfig
from burnish.policies.nets.unet1d import UNetConfig
from burnish.policies.vla.sizes import ExpertConfig, LanguageConfig, VisionConfig
from burnish.policies.vla.smolvla import TinyVLAConfig
from burnish.policies.vla.words import Words
from offline_lab import FLOW, WIDTH, build, recorded
from training_lab import train_offline

SPEC = PolicySpec(
    ObsSpec({"state": (3,), "goal": (2,), "base_action": (4, 2), "image.front": (3, 16, 16)}),
    ActionSpec((-1.0,) * 2, (1.0,) * 2),
    horizon=4,
    execute=2,
    history=2,
)
ROWS = 3
MLP = MlpBodyConfig(hidden=[16, 16], time_dim=8)
KINDS = {
    "flow": FlowConfig(steps=3, net=DenoiserConfig(mlp=MLP)),
    "trunk": FlowConfig(steps=3, net=DenoiserConfig(mlp=MLP, encoder=EncoderConfig(trunk=[12]))),
    "unet": FlowConfig(steps=2, net=DenoiserConfig(Body.unet, unet=UNetConfig(channels=[8, 8], groups=4))),
    "diffusion": DiffusionConfig(net=DenoiserConfig(mlp=MLP)),
    "gaussian": GaussianConfig(hidden=[16]),
}
CONFIG = RecapConfig(
    share=0.4, flow=FLOW, value=ValueConfig(hidden=WIDTH), lr=3e-3, actor_lr=3e-3, tau=0.1, head_start=50
)
# Shares of the best return on 5 seeds: the base 0.35 to 0.51, labelled 0.73 to 0.83, left out 0.78 to 0.97, which is
# 0.29 to 0.61 more than the base of the seed; by shuffled advantages 0.21 to 0.34.
LIFTED, FAILED, UPDATES = 0.2, 0.5, 200


def seen():
    draw = torch.Generator().manual_seed(3)
    pictures = torch.randint(0, 256, (ROWS, 2, 3, 16, 16), dtype=torch.uint8, generator=draw)
    floats = {"state": (ROWS, 2, 3), "goal": (ROWS, 2), "base_action": (ROWS, 4, 2)}
    return {"image.front": pictures} | {key: torch.randn(shape, generator=draw) for key, shape in floats.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_it_begins_as_its_base(kind):
    base = build_policy(KINDS[kind], SPEC, seed=1).eval()
    told, obs = advised(base), seen()
    noise = torch.randn(ROWS, *SPEC.chunk_shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(told.act(obs, noise=noise), base.act(obs, noise=noise))
        assert told.spec == base.spec and advised(told) is told
        for name, weight in told.base.named_parameters():  # a negative control: the new column is read
            if weight.ndim > 1 and weight.shape != base.get_parameter(name).shape:
                weight += 0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
        assert not torch.allclose(told.act(obs, noise=noise), base.act(obs, noise=noise))
        poor = {**obs, "advantage": torch.full((ROWS, 1), -1.0)}
        assert not torch.allclose(told.act(obs, noise=noise), told.act(poor, noise=noise))


def test_guidance_goes_further_along_what_the_word_changes():
    told = advised(build_policy(replace(KINDS["flow"], steps=1), SPEC, seed=1).eval())
    obs, noise = seen(), torch.zeros(ROWS, *SPEC.chunk_shape)
    with torch.no_grad():
        first = next(p for p in told.base.net.body.parameters() if p.ndim == 2)
        first += 0.02 * torch.randn(first.shape, generator=torch.Generator().manual_seed(2))
        plain = told.base.velocity(noise, torch.zeros(ROWS), 0.0, told.base.encode(told.with_advantage(obs)))
        none = {**obs, "advantage": torch.zeros(ROWS, 1)}
        free = told.base.velocity(noise, torch.zeros(ROWS), 0.0, told.base.encode(told.with_advantage(none)))
        wide = advised(told, 3.0)
        found = wide.base.velocity(noise, torch.zeros(ROWS), 0.0, wide.base.encode(wide.with_advantage(obs)))
    torch.testing.assert_close(found, free + 3 * (plain - free))
    assert not torch.allclose(plain, free)
    with pytest.raises(BurnishError, match="is for flow and diffusion policies, and this is a GaussianPolicy"):
        advised(build_policy(KINDS["gaussian"], SPEC), 2.0)


def vla(words):
    shapes = ObsSpec({"image.front": (3, 16, 16), "state": (3,)})
    spec = PolicySpec(shapes, ActionSpec((-1.0,) * 2, (1.0,) * 2), horizon=4, execute=2).reading(words)
    small = {"vision": VisionConfig(16, 4, 8, 1, 2, 8, 2), "language": LanguageConfig(32, 8, 2, 2, 1, 4, 8)}
    return build_policy(TinyVLAConfig(steps=2, action_dim=5, expert=ExpertConfig(8, 2, 8), **small), spec, seed=1)


def test_a_model_that_reads_is_told_in_words():
    words = Words.of(["reach the red disc", "reach it"])
    told, tokens = Advised(vla(words)), words.ids(["reach the red disc", "reach it", "reach it"])
    advantage = torch.tensor([[1.0], [-1.0], [0.0]])
    heard = told.with_advantage({"tokens": tokens, "advantage": advantage})
    assert set(heard) == {"tokens"}
    wanted = words.ids([f"reach the red disc {POSITIVE}", f"reach it {NEGATIVE}", "reach it"])
    assert torch.equal(heard["tokens"], wanted) and not torch.equal(wanted[0], tokens[0])
    assert torch.equal(told.with_advantage({"tokens": tokens})["tokens"][0], wanted[0]), "who acts is told the best"
    full = words.ids(["reach the red disc the red disc the red disc"])  # the end of the instruction gives way
    assert torch.equal(told.with_advantage({"tokens": full})["tokens"][0, -3:], words.ids([POSITIVE])[0, :3])
    assert told.sentences("meta") is told.sentences("meta"), "they are brought to a device once"


def test_a_model_that_is_told_in_words_is_saved_and_acts_as_before(tmp_path):
    told = Advised(vla(words := Words.of(["reach the red disc"]))).eval()
    save(told, tmp_path / "told")
    loaded = load(tmp_path / "told")
    obs = {"image.front": torch.zeros(2, 3, 16, 16, dtype=torch.uint8), "state": torch.zeros(2, 3)}
    obs["tokens"] = words.ids(["reach the red disc", "reach it"])
    one, two = (policy.act(obs, generator=generator(0, "act")) for policy in (told, loaded))
    assert torch.equal(one, two) and not torch.equal(one, told.base.act(obs, generator=generator(0, "act")))
    with pytest.raises(BurnishError, match=r"features=true remembers .* plain instruction"):
        require_features(loaded, "features=true")
    assert require_features(loaded.base, "features=true") is loaded.base


@pytest.mark.parametrize("text", ["go", "go\n"])
def test_an_instruction_ends_with_one_line_break(monkeypatch, text):
    words = Words.of(["go"])
    lines = SimpleNamespace(encode=lambda line: SimpleNamespace(ids=[int(x == "\n") for x in line]))
    monkeypatch.setattr(words, "_tokenizer", lambda: lines)
    assert words.ids([text])[0].tolist() == [0, 0, 1, -1] and words.ids([text], end="")[0].tolist() == [0, 0, -1, -1]


def test_who_cannot_be_told_is_refused():
    words = Words.of(["a b"], length=2)  # both sentences are cut before they differ
    with pytest.raises(BurnishError, match="knows no difference between 'Advantage: positive'"):
        advised(vla(words))
    guided = FlowConfig(net=DenoiserConfig(mlp=MLP, goal_drop=0.1, guidance=2.0))
    with pytest.raises(BurnishError, match="guided by its goal or by the advantage"):
        advised(build_policy(guided, SPEC))


@pytest.mark.parametrize("settings", [{"drop": 0.0}, {"worse": Worse.left_out}])
def test_guidance_needs_rows_that_are_told_and_rows_that_are_not(settings):
    with pytest.raises(BurnishError, match=r"method\.guidance=2\.0 goes from"):
        RecapConfig(guidance=2.0, **settings)
    assert RecapConfig(**settings).guidance == 1


def test_the_best_share_is_told_so_and_some_rows_are_told_nothing():
    learner = build(CONFIG, None, mdp.SPEC, seed=0)
    advantage = torch.randn(20_000, generator=generator(0, "advantage"))
    told = learner.labels(advantage)[:, 0]
    shares = torch.stack([(told == x).float().mean() for x in (1, -1, 0)])
    # Their deviation is at most 0.004.
    torch.testing.assert_close(shares, torch.tensor([0.4 * 0.8, 0.6 * 0.8, 0.2]), rtol=0, atol=0.015)
    assert advantage[told == 1].min() > advantage[told == -1].max()


@pytest.mark.parametrize(("method", "words"), [("offline", ["n_step=5"]), ("finetune", ["method.loop.n_step=5"])])
def test_steps_that_it_does_not_sum_up_are_refused(method, words, tmp_path, capsys):
    data = ["data=no/such/folder", "env=point_reach", f"out={tmp_path}/out"]
    assert "is not read by recap" in refused(capsys, method, "method=recap", *data, *words)


def lifted(seed, shuffle=False, worse=Worse.labelled):
    """A flow that imitates the data, refined on the same data; (score before, score after)."""
    data = recorded(seed)
    base = build(replace(CONFIG, worse=Worse.left_out, share=0.999, head_start=0), None, mdp.SPEC, data=data, seed=seed)
    train_offline(base, data, batch=256, total=100)
    learner = build(replace(CONFIG, worse=worse), copy.deepcopy(base.policy), mdp.SPEC, data=data, seed=seed)
    if shuffle:
        labels = learner.labels
        learner.labels = lambda advantage: labels(advantage[torch.randperm(len(advantage), generator=learner.noise)])
    train_offline(learner, data, batch=256, total=UPDATES)
    return mdp.score(base.policy), mdp.score(learner.policy)


@pytest.mark.slow
@pytest.mark.parametrize("worse", list(Worse))
def test_it_lifts_a_base_and_shuffled_advantages_do_not(worse):
    before, after = lifted(0, worse=worse)
    assert after > before + LIFTED
    assert lifted(0, True, worse)[1] < FAILED
