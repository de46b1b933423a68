"""Instructions: the tokenizer and its file, worlds that speak, policies that hear, and what carries the key between.

The world is `discs` with the places of the discs in ``state``, so that small networks suffice.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from burnish.finetune.build import prepare
from burnish.finetune.methods.dppo import DPPOConfig
from burnish.finetune.methods.residual_td3 import ResidualTD3Config
from burnish.policies.build import build_policy, describe, load_policy, restore_policy
from burnish.policies.controllers import ChunkController
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.language import Letters, Spoken
from burnish.policies.core.spec import ActionSpec, ChunkConfig, ObsSpec, PolicySpec, chunk_spec
from burnish.policies.core.wrapper import instructions
from burnish.policies.data.episodes import with_tokens
from burnish.policies.data.info import described
from burnish.policies.data.lerobot_writer import LeRobotWriter
from burnish.policies.data.read import read_dataset
from burnish.policies.data.windows import Windows
from burnish.policies.flow import FlowConfig
from burnish.policies.nets.encoder import EncoderConfig, ObsEncoder
from burnish.policies.runs.checkpoint import save
from burnish.policies.vla.words import LARGEST_FILE, Words, WordsConfig
from burnish.sim.build import make_env, observed_by, seen_by
from burnish.sim.collect import collect
from burnish.sim.discs import SENTENCES, DiscsConfig
from burnish.sim.experts import make_expert

BLIND = DiscsConfig(image=False)


def words() -> Words:
    return Words.of(SENTENCES)


def base(history: int = 1) -> Any:
    """A small flow that reads instructions, with random weights."""
    spec = chunk_spec(make_env(BLIND, 1).spec, ChunkConfig(4, 2)).reading(words())
    return build_policy(FlowConfig(steps=2), replace(spec, history=history))


# ---- the tokenizer. ----


def test_texts_become_numbers_and_padding():
    read = words()
    ids = read.ids(["Go to the RED disc", "touch the zebra ball", ""])
    assert ids.shape == (3, read.length) and ids.dtype == torch.int64
    assert torch.equal(ids[0], read.ids(["go to the red disc\n"])[0]), "a text ends with one line break, given or not"
    assert ids[1, 2] == 0 and (ids[1] >= 0).sum() == 4, "a word that nobody has seen is unknown"
    assert (ids[2] == -1).all()
    assert len({tuple(row) for row in read.ids(SENTENCES).tolist()}) == len(SENTENCES)
    assert Words.of(SENTENCES, 3).ids(SENTENCES[:1]).shape == (1, 3), "longer texts are cut"


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}', b"[" * 9999],
)
def test_a_broken_file_is_one_sentence(content: bytes, tmp_path: Any):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BurnishError, match=r"tokenizer\.json: this is no tokenizer\.json that can be used"):
        Words.read(tmp_path / "tokenizer.json")


def test_sizes_are_bounded(tmp_path: Any):
    with open(tmp_path / "large.json", "wb") as file:
        file.truncate(LARGEST_FILE + 1)
    with pytest.raises(BurnishError, match="is not read"):
        Words.read(tmp_path / "large.json")
    with pytest.raises(BurnishError, match=r"words\.bytes"):
        WordsConfig(bytes=LARGEST_FILE + 1)
    with pytest.raises(BurnishError, match="2000 characters"):
        words().ids(["a" * 2000])
    with pytest.raises(BurnishError, match="cannot be read"):
        Words.read(tmp_path / "missing.json")
    forged = words()
    forged.config = replace(forged.config, vocabulary=3)
    with pytest.raises(BurnishError, match="said to know 3 tokens"):
        forged.ids(SENTENCES)


def test_letters_give_the_text_again():
    letters = Letters(40)
    texts = ["lift the red cube", "", "hebe den Würfel"]
    assert letters.texts(letters.ids(texts)) == texts
    with pytest.raises(BurnishError, match="41 bytes"):
        letters.ids(["x" * 41])


# ---- worlds and policies. ----


@pytest.mark.parametrize("history", [1, 2])
def test_what_a_world_says_is_observed(history: int):
    policy, raw = base(history), make_env(BLIND, 3)
    env = seen_by(policy.spec, raw)
    obs = env.reset(None, [1, 2, 3])
    assert env.spec.obs.check(obs) == 3 and obs["tokens"].shape == (3, policy.spec.words.length), "never stacked"
    assert torch.equal(obs["tokens"], policy.words.ids(instructions(raw)))
    before = obs["tokens"].clone()
    only_first = torch.tensor([True, False, False])
    later = env.reset(only_first, [7, 8, 9])["tokens"]
    assert torch.equal(later[1:], before[1:]) and torch.equal(later, policy.words.ids(instructions(raw)))
    assert policy.act(env.step(torch.zeros(3, 2)).obs).shape == (3, 4, 2)
    with pytest.raises(BurnishError, match="this world gives none"):
        seen_by(policy.spec, make_env("two_mode", 1))
    with pytest.raises(BurnishError, match="by which tokenizer"):
        seen_by(replace(policy.spec, words=None), raw)


def test_swapped_words_belong_to_the_seed():
    policy = base()
    seeds = list(range(40))

    def said(num: int, first: int = 0) -> list[list[int]]:
        env = observed_by(policy.spec, make_env(BLIND, num), SENTENCES)
        return env.reset(None, seeds[first : first + num])["tokens"].tolist()

    raw = make_env(BLIND, 40)
    raw.reset(None, seeds)
    own = policy.words.ids(instructions(raw)).tolist()
    assert all(x != y for x, y in zip(said(40), own, strict=True))
    assert said(40)[7:9] == said(2, first=7), "in whatever company a row is"
    assert len({tuple(x) for x in said(40)}) == len(SENTENCES)
    with pytest.raises(BurnishError, match="only 'go'"):
        Spoken(raw, policy.words, ["go"])


def test_the_encoder_reads_sentences_in_order():
    spec = PolicySpec(ObsSpec({"tokens": (6,), "state": (1,)}), ActionSpec((-1.0,), (1.0,)), 1, 1)
    torch.manual_seed(0)
    encoder = ObsEncoder(spec, EncoderConfig())
    read = Words.of(["put the blue one on the green"], 6)
    ids = read.ids(["put the blue on green", "put the green on blue", ""])
    a, b, nothing = encoder({"tokens": ids, "state": torch.zeros(3, 1)})
    assert (a - b).abs().max() > 0.1 and not nothing.any()
    assert 0.3 < a[1:].std() < 3


def test_another_instruction_empties_the_queue():
    policy = base()
    obs = {"state": torch.zeros(2, 8), "tokens": policy.words.ids([SENTENCES[0]] * 2)}
    changed = {**obs, "tokens": policy.words.ids([SENTENCES[0], SENTENCES[5]])}
    ours, kept = ChunkController(policy, 2), ChunkController(policy, 2)
    for controller in (ours, kept):
        controller.reset(torch.ones(2, dtype=torch.bool), [1, 2])
    assert torch.equal(ours.step(obs), kept.step(obs))
    saved = copy.deepcopy(ours.state_dict())
    heard, unheard = ours.step(changed), kept.step(obs)
    assert torch.equal(heard[0], unheard[0]) and not torch.equal(heard[1], unheard[1])
    assert ours.state_dict()["left"].tolist() == [0, 1], "row 1 has begun a new chunk of 2"
    again = ChunkController(policy, 2)
    again.load_state_dict(saved)
    assert torch.equal(again.step(changed), heard)


# ---- checkpoints. ----


def test_a_checkpoint_holds_the_tokenizer(tmp_path: Any):
    policy = base()
    save(tmp_path / "policy", config=describe(policy), state=policy.state_dict())
    loaded, _ = load_policy(tmp_path / "policy")
    assert torch.equal(loaded.spec.words.ids(SENTENCES), policy.words.ids(SENTENCES))
    assert torch.equal(copy.deepcopy(loaded).words.ids(SENTENCES), policy.words.ids(SENTENCES))
    assert "words" not in policy.spec.to_dict() and loaded.spec == policy.spec


@pytest.mark.parametrize("change", [{"bytes": 10}, {"bytes": -1}, {"length": 0}, {"path": "/etc/passwd"}])
def test_a_forged_size_is_refused(change: dict[str, Any]):
    policy = base()
    told_sizes = describe(policy)
    told_sizes["words"] = {**told_sizes["words"], **change}
    saved = type("Saved", (), {"config": told_sizes, "state": policy.state_dict(), "path": "here"})()
    with pytest.raises(BurnishError):
        restore_policy(saved)


# ---- data. ----


@pytest.fixture(scope="module")
def episodes():
    env = make_env(BLIND, 4)
    return collect(env, make_expert(BLIND, 4, env=env), list(range(12)))


def test_tasks_become_tokens_when_windows_are_cut(episodes: Any):
    assert {episode.task for episode in episodes} <= set(SENTENCES) and len({e.task for e in episodes}) > 3
    policy = base()
    windows = Windows(episodes, policy.spec)
    last = windows[torch.tensor([len(windows) - 1])]
    assert torch.equal(last.obs["tokens"], policy.words.ids([episodes[11].task]))
    assert policy.bc_loss(last.obs, last.action).isfinite().all()
    assert with_tokens(episodes, replace(policy.spec, words=None)) is episodes
    episodes_without = replace(episodes, episodes=[replace(episodes[0], task="")])
    with pytest.raises(BurnishError, match="episode 0 of the data has no task"):
        Windows(episodes_without, policy.spec)


def test_several_tasks_are_written_and_read(episodes: Any, tmp_path: Any):
    with LeRobotWriter(tmp_path / "set", episodes.spec, {}) as writer:
        for episode in episodes:
            writer.add(episode)
    again = read_dataset(tmp_path / "set")
    assert [episode.task for episode in again] == [episode.task for episode in episodes]
    counted = dict(Counter(episode.task for episode in episodes))
    assert described(str(tmp_path / "set"), again)["tasks"] == counted


# ---- refinement: one method on a replay, one on a rollout. ----


@pytest.mark.parametrize("method", ["residual_td3", "dppo"])
def test_methods_carry_the_key(method: str, episodes: Any):
    policy = base()
    env = seen_by(policy.spec, make_env(BLIND, 4, seed=3))
    if method == "dppo":
        config: Any = DPPOConfig(trained_steps=2)
        config.loop.decisions_per_update, config.ppo.epochs = 4, 1
    else:
        config = ResidualTD3Config()
        config.loop.warmup, config.loop.batch = 8, 8
    loop = prepare(config, policy, env, seed=1)
    for _ in range(3):
        loop.iterate()
    if method == "residual_td3":
        kept = loop.replay.latest()["obs"]["tokens"]
        assert kept.dtype == torch.int64 and set(map(tuple, kept.flatten(0, 1).tolist())) <= set(
            map(tuple, policy.words.ids(SENTENCES).tolist())
        )
    refined = loop.learner.policy
    assert torch.equal(refined.spec.words.file, policy.words.file)
    controller = ChunkController(refined, 4) if method == "dppo" else refined.controller(4)
    controller.reset(torch.ones(4, dtype=torch.bool), [1, 2, 3, 4])
    assert controller.step(env.reset(None, [1, 2, 3, 4])).isfinite().all()
    data = describe(refined)
    part = data if method == "dppo" else data["parts"]["base"]
    assert part["words"]["length"] == policy.words.length
