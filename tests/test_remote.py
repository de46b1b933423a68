"""``policy=remote``: what is asked and how, what is believed of the answers, and that a served base is the base."""

from __future__ import annotations

import socket as sockets
import time
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import torch

from burnish.policies.build import build_policy, describe, load_policy
from burnish.policies.compose import Residual
from burnish.policies.core.config import to_data
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import Scale
from burnish.policies.core.seed import RowNoise
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec, PolicySpec, agent_spec
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.external.remote import RemoteConfig, RemotePolicy
from burnish.policies.external.table import connect, reconnect
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.runs import checkpoint
from openpi_lab import Drop, Fail, frame, openpi

LIMITS = ActionSpec((-0.5, 0.0), (1.5, 4.0))
WORLD = EnvSpec(ObsSpec({"state": (2,), "image.top": (3, 4, 5)}), LIMITS, 10.0, "test", 20)
SOURCE = torch.Generator().manual_seed(0)
OBS = {
    "state": torch.randn(5, 2, generator=SOURCE),
    "image.top": torch.randint(0, 256, (5, 3, 4, 5), generator=SOURCE, dtype=torch.uint8),
}
H = 3
KEYS = {"state": "observation/state", "image.top": "observation/image"}
EVERYTHING = {"extensions": ["noise", "batch"]}


def answered(message):
    """A chunk in the units of the actuators, for one row or for as many as were sent: it shows all that it is given."""
    state = message["observation/state"]
    shade = message["observation/image"].astype(np.float32).mean((-3, -2)) / 255  # per colour: H and W come first
    base = np.stack([np.sin(state[..., 0]) + shade[..., 2], 2 + state[..., 1]], -1)
    noise = message.get("noise", 0)
    return np.clip(base[..., None, :] + 0.1 * np.arange(H)[:, None] + 0.3 * noise, LIMITS.low, LIMITS.high)


def in_process(obs, noise=None):
    """The same in units of [-1, 1], from what a policy of ours sees."""
    message = {KEYS["state"]: obs["state"].numpy(), KEYS["image.top"]: obs["image.top"].permute(0, 2, 3, 1).numpy()}
    units = torch.as_tensor(answered(message | ({} if noise is None else {"noise": noise.numpy()}))).float()
    return Scale(LIMITS).to_unit(units)


def remote(server, **changes):
    return RemotePolicy(RemoteConfig(server.url, **({"keys": KEYS} | changes)), WORLD, OBS)


# ---- what is asked ----


def test_a_plain_server_is_asked_once_for_its_horizon_and_then_row_by_row():
    with openpi(answered) as server:
        policy = remote(server, prompt="insert the peg", execute=2)
        (probe,) = server.requests
        assert set(probe) == {*KEYS.values(), "prompt"} and probe["prompt"] == "insert the peg"
        assert probe["observation/image"].shape == (4, 5, 3) and probe["observation/image"].dtype == np.uint8
        assert np.array_equal(probe["observation/image"], OBS["image.top"][0].permute(1, 2, 0).numpy())
        assert probe["observation/state"].dtype == np.float32
        expected = PolicySpec(WORLD.obs, LIMITS, H, 2, control_hz=10.0, action_mode="test")
        assert policy.spec == expected
        actions = policy.act(OBS)
        assert len(server.requests) == 1 + len(OBS["state"]) and "batch" not in server.requests[1]
    assert actions.shape == (5, H, 2) and float(actions.abs().max()) <= 1
    torch.testing.assert_close(actions, in_process(OBS))
    with pytest.raises(BurnishError, match="takes no noise"):
        policy.act(OBS, noise=torch.zeros(5, H, 2))


def test_what_a_server_announces_is_used():
    spec = PolicySpec(ObsSpec({"state": (2,), "image.top": (3, 4, 5)}), LIMITS, H, 2, noise_shape=(H, 2), history=1)
    renamed = replace(spec, obs=ObsSpec({KEYS[key]: shape for key, shape in spec.obs.shapes.items()}))
    with openpi(answered, EVERYTHING | {"policy_spec": to_data(renamed.to_dict())}) as server:
        policy = remote(server)
        assert not server.requests and policy.spec == spec
        assert remote(server, execute=3).spec.execute == 3
        noise = torch.randn(5, H, 2, generator=SOURCE)
        actions = policy.act(OBS, noise=noise)
        (request,) = server.requests
        assert request["batch"] == 5 and np.array_equal(request["noise"], noise.numpy())
        torch.testing.assert_close(actions, in_process(OBS, noise))
        assert not torch.allclose(actions, in_process(OBS, -noise)), "control: the noise does something"
        remote(server, batch=2).act(OBS, noise=noise)
        assert [message["batch"] for message in server.requests[1:]] == [2, 2, 1]
        with pytest.raises(BurnishError, match="names \\['front'\\], but the server"):
            remote(server, keys={"image.top": "front"})


def test_a_draw_belongs_to_its_world_and_decision_in_whatever_company():
    """Noise drawn here, so a served base gives the actions of the same base in process, for 5 rows or for one."""
    local = CallablePolicy(in_process, PolicySpec(WORLD.obs, LIMITS, H, H, noise_shape=(H, 2)))
    with openpi(answered, EVERYTHING) as server:
        policy = remote(server)
        whole = policy.act(OBS, generator=RowNoise(range(5), [7] * 5))
        alone = policy.act({key: x[3:4] for key, x in OBS.items()}, generator=RowNoise([3], [7]))
        torch.testing.assert_close(whole, local.act(OBS, generator=RowNoise(range(5), [7] * 5)))
        torch.testing.assert_close(whole[3:4], alone)
        torch.testing.assert_close(policy.act(OBS, greedy=True), in_process(OBS, torch.zeros(5, H, 2)))


def test_a_server_that_takes_seeds_is_given_one_per_row():
    with openpi(answered, {"extensions": ["batch", "seed"]}) as server:
        policy = remote(server)
        policy.act(OBS, generator=RowNoise(range(5), [0] * 5))
        policy.act({key: x[2:3] for key, x in OBS.items()}, generator=RowNoise([2], [0]))
        policy.act(OBS, generator=torch.Generator().manual_seed(0))
        policy.act(OBS)
        _, whole, alone, drawn, none = server.requests
    assert whole["seed"].dtype == np.int64 and whole["seed"][2] == alone["seed"][0]
    assert len(set(whole["seed"]) | set(drawn["seed"])) == 10 and "seed" not in none


def test_actions_beyond_the_limits_are_clipped_and_a_commitment_is_kept():
    with openpi(lambda message: np.full((H, 2), 9.0, np.float32)) as server:
        assert torch.equal(remote(server).act(OBS), torch.ones(5, H, 2))
        prefix = torch.full((5, 1, 2), 0.25)
        assert torch.equal(remote(server).act(OBS, prefix=prefix)[:, :1], prefix)


# ---- what is believed ----


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (np.zeros((H, 3)), "of shape"),
        (np.zeros((H + 1, 2)), "of shape"),
        (np.zeros((1, H, 2)), "of shape"),
        (np.full((H, 2), np.nan), "not finite"),
        (np.full((H, 2), np.inf), "not finite"),
        (np.full((H, 2), 1e300), "not finite"),
        ({"action": 1}, "answered without actions, but with ['action']"),
        ({"actions": [[0.0, 0.0]]}, "answered without actions"),
        (b"\x00", "speaks another protocol"),
        (b"\xc1", "malformed"),
        (frame({"actions": np.zeros(2)}).replace(b"<f8", b"|O8"), "only bool, integers and floats"),
    ],
    ids=str,
)
def test_a_bad_answer_is_a_sentence(reply, sentence):
    with openpi(lambda message: answered(message) if len(server.requests) == 1 else reply) as server:
        policy = remote(server)
        with pytest.raises(BurnishError) as refusal:
            policy.act(OBS)
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"policy_spec": 3}, "makes no sense"),
        ({"policy_spec": {"obs": {"shapes": {"state": ["x"]}}}}, "makes no sense"),
        (
            {"policy_spec": {"obs": {"shapes": {}}, "action": {"low": [1], "high": [0]}, "horizon": 1, "execute": 1}},
            "sense",
        ),
    ],
    ids=str,
)
def test_a_bad_announcement_is_a_sentence(told, sentence):
    with openpi(answered, told) as server, pytest.raises(BurnishError, match=sentence):
        remote(server)


def test_a_horizon_cannot_be_learnt_from_nonsense():
    with (
        openpi(lambda message: np.zeros((H, 9))) as server,
        pytest.raises(BurnishError, match="takes chunks of 2 numbers"),
    ):
        remote(server)
    with openpi(answered) as server, pytest.raises(BurnishError, match=r"names \['image.side'\], but the environment"):
        remote(server, keys={"image.side": "observation/image"})


def test_a_failure_of_the_server_is_its_last_line_and_not_the_end():
    def sometimes(message):
        if len(server.requests) == 2:
            raise Fail("Traceback (most recent call last):\n  File ...\nKeyError: 'observation/state'\n")
        return answered(message)

    with openpi(sometimes) as server:
        policy = remote(server)
        with pytest.raises(BurnishError) as refusal:
            policy.act(OBS)
        assert str(refusal.value) == f"the policy server at {server.url} failed and says: KeyError: 'observation/state'"
        torch.testing.assert_close(policy.act(OBS), in_process(OBS))


def test_a_dropped_connection_is_made_anew_once():
    dropped = {3}

    def shaky(message):
        if len(server.requests) in dropped:
            raise Drop
        return answered(message)

    with openpi(shaky) as server:
        policy = remote(server)
        torch.testing.assert_close(policy.act(OBS), in_process(OBS))
        assert len(server.headers) == 2 and len(server.requests) == 1 + 5 + 1
        dropped |= {9, 10}
        with pytest.raises(BurnishError, match="dropped the connection twice"):
            policy.act(OBS)
        server.metadata = {"reset_pose": [0.0]}
        dropped |= {11}
        with pytest.raises(BurnishError, match="came back as another one"):
            policy.act(OBS)


def test_nobody_there_silence_and_a_refusal_are_sentences():
    with sockets.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"ws://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(BurnishError, match="no policy server answers at ws"):
        RemotePolicy(RemoteConfig(nowhere), WORLD)
    with (
        openpi(lambda message: time.sleep(0.5)) as server,
        pytest.raises(BurnishError, match="took longer than policy"),
    ):
        remote(server, timeout_s=0.1)
    with openpi(answered, greeting="ValueError: no weights") as server, pytest.raises(BurnishError, match="no weights"):
        remote(server)
    with openpi(answered, greeting=msgpack.packb([1])) as server, pytest.raises(BurnishError, match="another protocol"):
        remote(server)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"url": "http://a:1"}, "write ws://host:port"),
        ({"url": "localhost:8000"}, "write ws://host:port"),
        ({"url": "ws://"}, "write ws://host:port"),
        ({"url": "ws://[::1"}, "write ws://host:port"),
        ({"url": "ws://me:secret@host:1"}, "must hold no secrets"),
        ({"batch": 0}, "at least 1"),
        ({"execute": 0}, "at least 1"),
        ({"timeout_s": 0.0}, "positive"),
        ({"timeout_s": float("nan")}, "positive"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(changes, sentence):
    with pytest.raises(BurnishError, match=sentence):
        RemoteConfig(**({"url": "ws://host:1"} | changes))


# ---- what a checkpoint remembers ----


def saved_on(policy, folder):
    """A correction of ``policy`` that does something, as a checkpoint."""
    spec = agent_spec(replace(WORLD, obs=ObsSpec({**WORLD.obs.shapes, "base_action": (2,)}), action=LIMITS), 1, 1)
    spec = replace(spec, obs=ObsSpec({"state": (2,), "base_action": (H, 2)}), horizon=H, execute=H)
    torch.manual_seed(0)
    made = Residual(policy, build_policy(GaussianConfig(hidden=[8]), spec), 0.5, "chunk")
    checkpoint.save(folder, config=describe(made), state=made.state_dict())
    return made


def test_a_refined_policy_finds_its_base_again(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_API_KEY", "secret")
    with openpi(answered) as first, openpi(answered) as second:
        made = saved_on(remote(first, prompt="go"), tmp_path / "p")
        again, _ = load_policy(tmp_path / "p")
        assert torch.equal(again.act(OBS), made.act(OBS)) and describe(again) == describe(made)
        assert first.requests[-1]["prompt"] == "go"
        assert not torch.allclose(again.act(OBS), again.base.act(OBS)), "control: there is a correction"
        moved, _ = load_policy(tmp_path / "p", base=second.url)
        assert torch.equal(moved.act(OBS), made.act(OBS)) and moved.base.config.url == second.url
        # The key goes where the user said, and not where only a file says.
        assert first.headers[0]["authorization"] == second.headers[0]["authorization"] == "Api-Key secret"
        assert all("authorization" not in headers for headers in first.headers[1:])
        assert "secret" not in (tmp_path / "p/config.yaml").read_text()
        handed, _ = load_policy(tmp_path / "p", base=made.base)
        assert handed.base is made.base
    with pytest.raises(BurnishError, match=r"no policy server answers.*if it has moved, say where to: policy.base="):
        load_policy(tmp_path / "p")


@pytest.mark.parametrize(
    "url",
    [
        "ws://canary.invalid:1",
        "wss://192.0.2.1:443",
        "ws://localhost.invalid:1",
        "ws://127.0.0.1:9/order",
        "ws://[::]:9",
    ],
)
def test_a_checkpoint_leads_to_no_other_machine(url, monkeypatch):
    """What listens there would be shown all that the robot sees; so the user must say it."""
    asked = []

    def connected(url, **how):
        asked.append(url)
        raise BurnishError("asked after all")

    monkeypatch.setattr("burnish.policies.wire.connection.Connection", connected)
    config = {"kind": "remote", "config": {"url": url}, "world": to_data(WORLD)}
    with pytest.raises(BurnishError, match=r"policy\.base="):
        reconnect(config, "runs/p")
    assert not asked
    with pytest.raises(BurnishError, match="asked after all"):
        reconnect(config, "runs/p", url)
    assert asked == [url]


def test_a_base_that_is_another_one_now_is_refused(tmp_path):
    with openpi(answered) as server:
        saved_on(remote(server), tmp_path / "p")
    with openpi(lambda message: np.zeros((H + 1, 2))) as other:
        with pytest.raises(BurnishError, match="refines a policy of"):
            load_policy(tmp_path / "p", base=other.url)
        with pytest.raises(BurnishError, match="write ws://host:port"):
            load_policy(tmp_path / "p", base="somewhere")


@pytest.mark.parametrize(
    "change", [{"kind": "pickle"}, {"world": {}}, {"config": {}}, {"config": {"url": 3}}, {"world": 1}]
)
def test_a_description_that_makes_no_sense_is_refused(change, tmp_path):
    with openpi(answered) as server:
        made = saved_on(remote(server), tmp_path / "p")
        config = describe(made)
        config["parts"]["base"] |= change
        checkpoint.save(tmp_path / "q", config=config, state=made.state_dict())
        with pytest.raises(BurnishError):
            load_policy(tmp_path / "q")


def test_the_table_connects():
    with openpi(answered) as server:
        assert isinstance(connect(RemoteConfig(server.url, KEYS), WORLD, OBS), RemotePolicy)
