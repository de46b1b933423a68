"""The robot's end of the policy server: no reply is believed before it was examined, and no failure is waited out."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import torch
from websockets.sync.server import serve

from burnish.policies.core.config import to_data
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import Scale
from burnish.policies.core.spec import ActionSpec, EnvSpec, ObsSpec
from burnish.real_robot.clock import SECOND, VirtualClock
from burnish.real_robot.errors import Refused
from burnish.real_robot.inference.action_sources import ServedConfig
from burnish.real_robot.inference.client import PolicyClient, PolicyUnavailable
from openpi_lab import Drop, Fail, frame, openpi
from server_lab import LIMITS, SPEC, flow, served

OBS = {"state": np.zeros((2, 3), np.float32)}
TOLD = replace(SPEC, horizon=4, start=0)
METADATA = {"extensions": ["obs_seq", "reset"], "policy_spec": to_data(TOLD.to_dict())}
CHUNK = np.zeros((4, 2), np.float32)


def right(message):
    return {"actions": CHUNK, "obs_seq": message["obs_seq"]}


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr("burnish.real_robot.inference.client.BACKOFF_S", 0.01)


def client(server, expected=None, **changes):
    return PolicyClient(ServedConfig(server.url, **({"timeout_s": 5.0} | changes)), expected)


def test_a_chunk_is_that_of_the_policy():
    policy, source = flow(), torch.Generator().manual_seed(0)
    obs, noise = torch.randn(1, 2, 3, generator=source), torch.randn(1, 5, 2, generator=source)
    with served(policy) as server:
        asker = client(server, replace(policy.spec, horizon=4, start=0))
        chunks = [asker.act({"state": obs[0].numpy()}, noise=noise[0].numpy()) for _ in range(2)]
        asker.reset()
        with pytest.raises(Refused, match=r"does not announce \['prefix'\]"):
            asker.act(OBS, prefix=np.zeros((1, 2)))
        asker.close()
    expected = Scale(LIMITS).to_actuator(policy.act({"state": obs}, noise=noise)[0, 1:]).detach().numpy()
    for chunk in chunks:
        assert chunk.dtype == np.float64
        np.testing.assert_allclose(chunk, expected, atol=1e-6)


def test_a_unix_socket_serves_too(tmp_path):
    with served(flow(), unix=str(tmp_path / "p.sock")) as server:
        assert client(server).act(OBS).shape == (4, 2)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({}, "without actions"),
        ({"actions": [[0.0, 0.0]] * 4}, "without actions in floating point"),
        ({"actions": CHUNK.astype(np.int64)}, "in floating point"),
        ({"actions": CHUNK[:3]}, "shape (3, 2), but (4, 2)"),
        ({"actions": CHUNK[None]}, "shape (1, 4, 2)"),
        ({"actions": np.full((4, 2), np.nan)}, "not finite"),
        ({"actions": np.full((4, 2), -np.inf)}, "not finite"),
        ({"actions": CHUNK, "obs_seq": 1}, "about another observation than 2"),
        ({"actions": CHUNK, "obs_seq": 2.0}, "about another observation"),
        ({"actions": CHUNK, "obs_seq": True}, "about another observation"),
        ({"actions": CHUNK}, "about another observation"),
        (frame({"actions": CHUNK}).replace(b"<f4", b"|O4"), "only bool, integers and floats"),
        (msgpack.packb([1]), "speaks another protocol"),
        (b"\xc1", "malformed"),
        (bytes(2**20 + 1), "lost"),
    ],
    ids=lambda x: str(x)[:50],
)
def test_a_hostile_reply_is_no_chunk_and_the_next_one_counts(reply, words):
    def answer(message):
        return reply if message["obs_seq"] == 2 else right(message)

    with openpi(answer, METADATA) as server:
        asker = client(server)
        asker.act(OBS)
        with pytest.raises(PolicyUnavailable) as failure:
            asker.act(OBS)
        assert words in str(failure.value) and "\n" not in str(failure.value)
        time.sleep(0.02)
        assert asker.act(OBS).shape == (4, 2)


LOW, HIGH = [-1.0, -np.inf], [1.0, 1.0]
NONSENSE = [
    3,
    {"obs": {"shapes": {"state": ["x"]}}},
    *(
        to_data(TOLD.to_dict()) | change
        for change in (
            {"history": 2.5},
            {"horizon": True},
            {"start": -1},
            {"control_hz": -1.0},
            {"control_hz": float("nan")},
            {"obs": {"shapes": {"state": [-3]}}},
            {"obs": {"shapes": {"state": [2**40]}}},
            {"action": {"low": LOW, "high": HIGH}},
        )
    ),
]


@pytest.mark.parametrize("told", NONSENSE, ids=[str(i) for i in range(len(NONSENSE))])
def test_a_server_that_talks_nonsense_of_itself_is_refused(told):
    with openpi(right, {"policy_spec": told}) as server, pytest.raises(Refused, match="announces makes no sense"):
        client(server)


SEEN = ObsSpec({"state": (3,), "image.front": (3, 4, 5), "secret": (2,)})
WORLD = EnvSpec(SEEN, ActionSpec((-9.0,) * 2, (9.0,) * 2), 30.0, "x", 9)
KEYS = {"state": "observation/state", "image.front": "observation/image"}


def test_a_server_that_says_nothing_of_itself_is_asked_once():
    seen = {"state": np.arange(3, dtype=np.float32), "image.front": np.full((4, 5, 3), 7, np.uint8)}
    with openpi(lambda message: CHUNK.astype(np.float64) + 2) as server:
        asker = client(server, keys=KEYS, prompt="put it there", execute=3)
        for ask in (lambda: asker.spec, lambda: asker.act(seen)):
            with pytest.raises(Refused, match="does not announce its policy"):
                ask()
        spec = asker.learn(WORLD)
        assert (spec.horizon, spec.execute, spec.start, spec.action) == (4, 3, 0, WORLD.action)
        assert spec.obs.shapes == {"state": (3,), "image.front": (3, 4, 5)} and spec.control_hz == 30.0
        assert asker.act(seen).tolist() == [[2.0, 2.0]] * 4
    blank, asked = server.requests
    assert blank.keys() == asked.keys() == {*KEYS.values(), "prompt"} and asked["prompt"] == "put it there"
    assert blank["observation/image"].shape == (4, 5, 3) and not blank["observation/image"].any()
    assert np.array_equal(asked["observation/image"], seen["image.front"])
    with openpi(lambda message: CHUNK) as server:  # somebody else has learnt it
        known = PolicyClient(ServedConfig(server.url), learnt=spec)
        assert known.spec == spec and not server.requests


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (np.zeros((4, 3), np.float32), r"actions of shape \(4, 3\).*chunks of 2"),
        (np.zeros(2, np.float32), "actions of shape"),
        (np.zeros((0, 2), np.float32), "actions of shape"),
        ({"error": 1}, "without actions, but with"),
    ],
    ids=["width", "row", "none", "no actions"],
)
def test_an_answer_that_fits_no_world_is_refused(answer, words):
    with openpi(lambda message: answer) as server, pytest.raises((Refused, BurnishError), match=words):
        client(server).learn(WORLD)


def test_the_first_answer_may_take_longer():
    """A server that compiles at its first question; the second has to come in time."""

    def slow(message):
        time.sleep(0.6)
        return CHUNK

    with openpi(slow) as server:
        asker = client(server, timeout_s=0.2, keys={"state": "s"})
        assert asker.learn(WORLD).horizon == 4
        with pytest.raises(PolicyUnavailable, match="took longer"):
            asker.act({"state": np.zeros(3, np.float32)})


def test_a_server_whose_metadata_hold_arrays_is_the_same_when_it_comes_back():
    told = {"reset_pose": np.arange(3.0)}

    def answer(message):
        if len(server.requests) == 2:
            raise Drop
        return CHUNK

    with openpi(answer, told) as server:
        asker = client(server, keys={"state": "s"})
        asker.learn(WORLD)
        seen = {"state": np.zeros(3, np.float32)}
        with pytest.raises(PolicyUnavailable, match="was lost"):
            asker.act(seen)
        time.sleep(0.05)
        assert asker.act(seen).shape == (4, 2)
        server.metadata = {"reset_pose": np.arange(3.0) + 1}
        asker._connection.abort()
        with pytest.raises(PolicyUnavailable):
            asker.act(seen)
        time.sleep(0.05)
        with pytest.raises(PolicyUnavailable, match="another one"):
            asker.act(seen)


def test_names_that_the_world_does_not_have_are_refused():
    words = r"\['wrist'\].*the environment gives"
    with openpi(lambda message: CHUNK) as server, pytest.raises(BurnishError, match=words):
        client(server, keys={"wrist": "observation/wrist"}).learn(WORLD)


def test_another_policy_than_expected_is_refused():
    with openpi(right, METADATA) as server:
        client(server, TOLD)
        with pytest.raises(Refused, match="another policy than the robot was set up for"):
            client(server, replace(TOLD, control_hz=20.0))


def test_silence_is_waited_for_only_so_long():
    def answer(message):
        time.sleep(1.0 if message["obs_seq"] == 1 else 0.0)
        return right(message) | {"actions": np.full((4, 2), float(message["obs_seq"]))}

    with openpi(answer, METADATA) as server:
        asker = client(server, timeout_s=0.2)
        begun = time.monotonic()
        with pytest.raises(PolicyUnavailable, match="took longer than"):
            asker.act(OBS)
        assert time.monotonic() - begun < 0.9
        time.sleep(0.02)
        assert asker.act(OBS)[0, 0] == 2, "the late answer is not taken for this one"


def test_a_server_that_stops_reading_does_not_hold_the_robot():
    """A picture larger than every buffer on the way."""

    def greet_only(socket):
        socket.send(frame(METADATA))
        deaf.wait(20)

    deaf = threading.Event()
    with serve(greet_only, "127.0.0.1", 0, compression=None, max_size=None, max_queue=1) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asker = PolicyClient(ServedConfig(f"ws://127.0.0.1:{server.socket.getsockname()[1]}", timeout_s=0.3))
        picture = {"image": np.zeros((4000, 4000, 3), np.uint8)}
        begun = time.monotonic()
        with pytest.raises(PolicyUnavailable):
            asker.act(picture)
        assert time.monotonic() - begun < 5
        deaf.set()


def test_a_lost_server_is_dialled_less_and_less_often(monkeypatch):
    monkeypatch.setattr("burnish.real_robot.inference.client.BACKOFF_S", 1)
    monkeypatch.setattr("burnish.real_robot.inference.client.LONGEST_BACKOFF_S", 4)
    clock = VirtualClock()
    with openpi(right, METADATA) as server:
        asker = PolicyClient(ServedConfig(server.url), clock=clock)
        asker.act(OBS)
    waits = []
    for _ in range(5):
        with pytest.raises(PolicyUnavailable):
            asker.act(OBS)
        with pytest.raises(PolicyUnavailable, match="is dialled again in"):
            asker.act(OBS)
        waits.append((asker._not_before_ns - clock.now_ns()) / SECOND)
        clock.sleep_until_ns(asker._not_before_ns)
    assert waits == [1, 2, 4, 4, 4]


def test_a_refusal_leaves_the_connection_and_a_dropped_one_is_made_anew():
    def answer(message):
        if message["obs_seq"] == 3:
            raise Drop
        if message["obs_seq"] == 5:
            raise Fail("ValueError: no")
        return right(message)

    with openpi(answer, METADATA) as server:
        asker = client(server)
        for number in (1, 2, 3, 4, 5):
            if number in (3, 5):
                with pytest.raises(PolicyUnavailable):
                    asker.act(OBS)
                time.sleep(0.02)
            else:
                assert asker.act(OBS).shape == (4, 2)
        assert len(server.headers) == 2
        server.metadata = METADATA | {"reset_pose": [0.0]}
        for _ in range(2):  # what closed after its refusal is found out at the next request
            with pytest.raises(PolicyUnavailable, match=r"lost|came back as another one"):
                asker.act(OBS)
            time.sleep(0.05)
    with served(flow()) as server:
        asker = client(server)
        for _ in range(3):
            with pytest.raises(PolicyUnavailable, match="value: 'state' is not finite"):
                asker.act({"state": np.full((2, 3), np.nan)})
            assert asker.act(OBS).shape == (4, 2), "at once: the connection holds"


@pytest.mark.parametrize("changes", [{"timeout_s": 0.0}, {"patience_s": -1.0}, {"execute": 0}], ids=str)
def test_impossible_settings_are_refused(changes):
    with pytest.raises(BurnishError):
        ServedConfig("ws://127.0.0.1:9", **changes)
