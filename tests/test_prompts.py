"""Instructions on the wire: a server that reads a prompt for each row, a client that sends them, a robot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from burnish.policies.acting import acting_policy
from burnish.policies.build import build_policy
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.language import Letters, Spoken
from burnish.policies.core.spec import ChunkConfig, chunk_spec
from burnish.policies.external.remote import RemoteConfig, RemotePolicy
from burnish.policies.external.table import described, reconnect
from burnish.policies.flow import FlowConfig
from burnish.policies.vla.words import Words
from burnish.policies.wire.codec import pack
from burnish.policies.wire.schema import PROMPT, Field, Refusal, Schema
from burnish.real_robot.env import with_instruction
from burnish.real_robot.inference.action_sources import StillWorld
from burnish.sim.build import make_env, seen_by
from burnish.sim.discs import SENTENCES, DiscsConfig
from openpi_lab import openpi
from server_lab import served

BLIND = DiscsConfig(image=False)
FIELDS = {"state": Field((2,), ("<f4",), "<f4")}


def hearing() -> Any:
    spec = chunk_spec(make_env(BLIND, 1).spec, ChunkConfig(4, 2)).reading(Words.of(SENTENCES))
    return build_policy(FlowConfig(steps=1), spec).eval()


def world(num: int = 5) -> Any:
    return Spoken(make_env(BLIND, num), Letters())


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_a_served_policy_is_told_what_each_row_is(batch: int):
    policy, env = hearing(), world()
    obs = env.reset(None, range(5))
    ours = seen_by(policy.spec, make_env(BLIND, 5)).reset(None, range(5))
    noise = torch.randn(5, 4, 2, generator=torch.Generator().manual_seed(0))
    with served(policy, batch=batch) as server:
        assert "prompt" in server.metadata["extensions"]
        assert "tokens" not in server.metadata["policy_spec"]["obs"]["shapes"]
        remote = RemotePolicy(RemoteConfig(server.url), env.spec, obs)
        torch.testing.assert_close(remote.act(obs, noise=noise), policy.act(ours, noise=noise), atol=1e-5, rtol=0)
        # One prompt for all, of the settings, takes the place of the world's own.
        fixed = RemotePolicy(RemoteConfig(server.url, prompt=SENTENCES[0]), make_env(BLIND, 1).spec, ours)
        same = {**ours, "tokens": policy.words.ids([SENTENCES[0]] * 5)}
        torch.testing.assert_close(fixed.act(ours, noise=noise), policy.act(same, noise=noise), atol=1e-5, rtol=0)
        silent = RemotePolicy(RemoteConfig(server.url), make_env(BLIND, 1).spec, ours)
        with pytest.raises(BurnishError, match="prompt"):
            silent.act(ours)


def test_a_server_of_others_gets_a_text_where_all_rows_are_told_the_same():
    env = world(3)
    obs = env.reset(None, [0, 1, 2])
    texts = list(env.env.instructions)
    answer = np.zeros((4, 2), np.float32)
    with openpi(lambda message: answer) as server:
        policy = RemotePolicy(RemoteConfig(server.url), env.spec, obs)
        policy.act(obs)
        assert [x["prompt"] for x in server.requests] == [texts[0], *texts] and "tokens" not in server.requests[0]
        assert reconnect_spec(policy, server.url) == policy.spec
    with openpi(lambda message: np.zeros((message["batch"], 4, 2), np.float32) if "batch" in message else answer,
                {"extensions": ["batch"]}) as server:  # fmt: skip
        policy = RemotePolicy(RemoteConfig(server.url), env.spec, obs)
        policy.act(obs)
        policy.act({**obs, "tokens": obs["tokens"][:1].expand(3, -1)})
        assert [x["prompt"] for x in server.requests[1:]] == [texts, texts[0]]


def reconnect_spec(policy: Any, url: str) -> Any:
    return reconnect(described(policy), "here", url).spec


def test_the_verbs_hand_in_what_the_world_says():
    with openpi(lambda message: np.zeros((4, 2), np.float32)) as server:
        policy, _ = acting_policy(RemoteConfig(server.url), torch.device("cpu"), BLIND)
        assert policy.spec.obs.shapes["tokens"] == (256,) and server.requests[0]["prompt"] in SENTENCES
        env = seen_by(policy.spec, make_env(BLIND, 2))
        obs = env.reset(None, [5, 6])
        policy.act(obs)
        assert [x["prompt"] for x in server.requests[1:]] == make_told([5, 6])


def make_told(seeds: list[int]) -> list[str]:
    env: Any = make_env(BLIND, len(seeds))
    env.reset(None, seeds)
    return env.instructions


def frame(**fields: Any) -> bytes:
    return pack({"state": np.zeros(2, np.float32), **fields})


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, "schema"),
        ({"prompt": ["a", "b"]}, "schema"),
        ({"prompt": []}, "schema"),
        ({"prompt": 3}, "malformed"),
        ({"prompt": [3]}, "malformed"),
        ({"prompt": ["a"] * 9}, "malformed"),
        ({"prompt": [["a"]]}, "malformed"),
        ({"prompt": "x" * (PROMPT + 1)}, "malformed"),
    ],
)
def test_prompts_that_are_none_are_refused(fields: dict[str, Any], code: str):
    schema = Schema(FIELDS, 4, prompts=True)
    assert schema.read(frame(prompt="a")).prompts == ["a"]
    with pytest.raises(Refusal) as refusal:
        schema.read(frame(**fields))
    assert refusal.value.code.value == code
    assert schema.sha256 != Schema(FIELDS, 4).sha256


def test_prompts_of_several_rows():
    schema = Schema(FIELDS, 4, prompts=True)
    rows = {"state": np.zeros((3, 2), np.float32), "batch": 3}
    assert schema.read(pack({**rows, "prompt": ["a", "b", "a"]})).prompts == ["a", "b", "a"]
    assert schema.read(pack({**rows, "prompt": "a"})).prompts == ["a"] * 3
    assert Schema(FIELDS, 4).read(frame(prompt="a")).arrays.keys() == {"state"}, "elsewhere it means nothing"


def test_a_robot_is_told():
    policy = hearing()

    class Body:
        spec = make_env(BLIND, 1).spec

        def observe(self) -> dict[str, np.ndarray]:
            return {"state": np.zeros((1, 8), np.float32)}

    with pytest.raises(BurnishError, match="instruction="):
        seen_by(policy.spec, StillWorld(Body()))  # type: ignore[arg-type]
    obs = seen_by(policy.spec, StillWorld(with_instruction(Body(), SENTENCES[4]))).reset()
    assert torch.equal(obs["tokens"], policy.words.ids([SENTENCES[4]]))
    assert policy.act(obs).shape == (1, 4, 2)
