"""The policy server: what is answered and in which words, one inference at a time, and a clean end."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import msgpack
import numpy as np
import pytest
import torch
from websockets.exceptions import ConnectionClosed

from burnish.policies.core.spec import ObsSpec, PolicySpec
from burnish.policies.wire.connection import Connection
from burnish.policies.wire.schema import UNUSED, UNUSED_BYTES
from burnish.real_robot.serving import gateway
from openpi_lab import content, frame
from server_lab import LIMITS, STATE, asked, dial, flow, number, process, served


class Slow:
    """Takes its time, and tells what it was asked."""

    spec = PolicySpec(ObsSpec({"state": (1,)}), LIMITS, 1, 1)

    def __init__(self):
        self.go, self.asked, self.episodes = threading.Event(), [], 0

    def act(self, obs, **given):
        number = float(obs["state"][0, 0])
        self.asked.append(number)
        if number < 0:
            raise FileNotFoundError("/secret/place of the server")
        if number > 0:
            assert self.go.wait(10)
        return torch.full((len(obs["state"]), 1, 2), float("nan") if number == 99 else 0.0)

    def reset(self):
        self.episodes += 1


# ---- what is answered ----


def test_an_answer_names_its_observation_and_its_time():
    with served(flow()) as server, dial(server) as socket:
        reply = content(asked(socket, STATE | {"obs_seq": 41}))
        assert reply["actions"].shape == (4, 2) and reply["obs_seq"] == 41
        timing = reply["server_timing"]
        assert timing["infer_ms"] > 0 and timing["wait_ms"] >= 0
        assert "obs_seq" not in content(asked(socket, STATE))
        assert server.metadata["largest_batch"] == 64 and server.metadata["schema_sha256"] == server.schema.sha256


def test_a_reset_is_confirmed_and_reaches_a_policy_that_remembers():
    policy = Slow()
    with served(policy) as server, dial(server) as socket:
        assert content(asked(socket, {"reset": True}))["reset"] is True and policy.episodes == 1
        assert content(asked(socket, number(0)))["actions"].shape == (1, 2) and policy.episodes == 1


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({}, "schema: the request lacks 'state'"),
        ([1], "malformed: a map is needed"),
        ({"state": 3}, "schema: 'state' is '<i8'"),
        ({"state": np.zeros(3)}, "schema: 'state' has shape (3,), but (2, 3)"),
        ({"state": np.full((2, 3), np.nan)}, "value: 'state' is not finite"),
        (STATE | {"noise": np.full((5, 2), np.inf)}, "value: 'noise' is not finite"),
        (STATE | {"noise": np.zeros((9, 9))}, "schema: 'noise' has shape (9, 9)"),
        (STATE | {"batch": 65}, "value: batch=65"),
        (STATE | {"seed": "x"}, "malformed: "),
        (b"\xc1", "malformed: "),
        (msgpack.packb(3), "malformed: "),
        ("text", "malformed: a frame of bytes is needed"),
    ],
    ids=str,
)
def test_a_bad_request_is_told_in_a_line_and_is_not_the_end(message, told):
    with served(flow()) as server, dial(server) as socket, dial(server) as other:
        answer = asked(socket, message)
        assert isinstance(answer, str) and answer.startswith(told) and "\n" not in answer and len(answer) < 300
        assert content(asked(other, STATE))["actions"].shape == (4, 2)
        assert content(asked(socket, STATE))["actions"].shape == (4, 2)


DROID = {
    "observation/exterior_image_1_left": np.zeros((224, 224, 3), np.uint8),
    "observation/wrist_image_left": np.zeros((480, 640, 3), np.uint8),
    "observation/joint_position": np.zeros(7),
    "observation/gripper_position": np.float32(0.5).reshape(()),
    "count": 3,
    "rate": 0.5,
    "flag": True,
    "prompt": "pick it up",
}


def test_observations_of_an_openpi_robot_that_are_not_used_change_nothing():
    noise = {"noise": np.zeros((5, 2))}
    with served(flow()) as server, dial(server) as socket:
        plain = content(asked(socket, STATE | noise))
        more = content(asked(socket, DROID | STATE | noise))
        assert np.array_equal(more["actions"], plain["actions"])
        told = asked(socket, DROID | {"State": STATE["state"]})
        assert told.startswith("schema: the request lacks 'state'"), "control: what is needed is still missed"
        assert "actions" in content(asked(socket, STATE))


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"images": {"cam_high": np.zeros((3, 4, 5), np.uint8)}}, "schema: 'images' is not asked for; the names are"),
        ({"list": [1, 2]}, "schema: 'list' is not asked for; the names are"),
        ({"nothing": None}, "schema: 'nothing' is not asked for; the names are"),
        ({f"k{i}": i for i in range(UNUSED + 9)}, "malformed: a map of"),
    ],
    ids=["nested", "list", "nil", "too many"],
)
def test_observations_that_cannot_be_passed_over_are_answered_with_a_sentence(extra, told):
    with served(flow()) as server, dial(server) as socket:
        assert asked(socket, STATE | extra).startswith(told)
        assert "actions" in content(asked(socket, STATE)), "and the connection stays"


def test_who_is_always_wrong_is_sent_away():
    with served(flow()) as server, dial(server) as socket:
        begun = time.monotonic()
        for _ in range(gateway.MISTAKES):
            assert asked(socket, {}).startswith("schema: ")
        assert time.monotonic() - begun >= gateway.MISTAKES * gateway.REFUSAL_S, "mistakes take their time"
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=5)
        assert socket.close_code == 1008


def test_what_a_policy_fails_with_stays_in_the_log(caplog):
    with served(Slow()) as server, dial(server) as socket:
        told = asked(socket, number(-1))
        assert told.startswith("failed: ") and "FileNotFoundError" in told and "secret" not in told
        assert asked(socket, number(0)) != told, "the next one is answered"
    assert "secret" in caplog.text


def test_actions_that_are_not_finite_do_not_leave():
    policy = Slow()
    policy.go.set()
    with served(policy) as server, dial(server) as socket:
        assert asked(socket, number(99)) == "failed: the policy answered with actions that are not finite"


def test_frames_above_the_limit_are_not_read():
    with served(flow(), batch=1) as server, dial(server) as socket:
        assert server.schema.limit == (2 * 3 + 5 * 2 + 1) * 8 + 4096 + UNUSED_BYTES
        socket.send(bytes(server.schema.limit + 1))
        with pytest.raises(ConnectionClosed) as refusal:
            socket.recv(timeout=5)
    assert refusal.value.rcvd.code == 1009


# ---- one inference at a time ----


def test_of_too_many_the_oldest_is_told_to_ask_again():
    """One is being answered, two wait, and a fourth comes: the one that waited longest has the oldest observation."""
    policy = Slow()
    with served(policy, queue=2) as server, ThreadPoolExecutor() as pool:
        lines = [dial(server) for _ in range(4)]
        replies = []
        for i, line in enumerate(lines):
            replies.append(pool.submit(asked, line, number(i + 1)))
            deadline = time.monotonic() + 5
            while len(server._inference._waiting) < min(i, 2) or len(policy.asked) < 2:  # the first: the start
                assert time.monotonic() < deadline
                time.sleep(0.005)
        assert replies[1].result(5).startswith("busy: ") and not replies[0].done()
        # While the policy computes, the gateway answers.
        with urllib.request.urlopen(server.url.replace("ws:", "http:") + "/healthz", timeout=2) as health:
            assert health.read() == b"OK\n"
        assert asked(lines[1], {}).startswith("schema: "), "and the refused line holds"
        policy.go.set()
        assert all("actions" in content(replies[i].result(5)) for i in (0, 2, 3))
        assert policy.asked[1:] == [1, 3, 4]
        for line in lines:
            line.close()


def test_a_busy_server_is_asked_again_by_a_patient_client():
    policy = Slow()
    with served(policy, queue=1) as server, ThreadPoolExecutor() as pool:
        clients = [Connection(server.url, timeout_s=10) for _ in range(3)]
        answers = [pool.submit(client.ask, number(1)) for client in clients]
        time.sleep(0.3)
        policy.go.set()
        assert all("actions" in answer.result(10) for answer in answers)
        for client in clients:
            client.close()


def test_who_asks_too_fast_waits_and_loses_nothing():
    with served(flow(), rate_hz=50.0) as server, dial(server) as socket:
        begun = time.monotonic()
        for _ in range(20):
            assert "actions" in content(asked(socket, STATE))
        assert time.monotonic() - begun > 20 / 50 - 0.1 - 0.05, "a burst of 0.1 s is free"


# ---- the end ----


@pytest.mark.slow
def test_a_signal_ends_it_cleanly(tmp_path):
    with process(tmp_path) as server:
        socket = dial(server)
        assert "actions" in content(asked(socket, STATE))
        os.kill(server.process.pid, signal.SIGTERM)
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=5)
        assert socket.close_code == 1001, "going away"
        assert server.process.wait(10) == 0 and server.process.stdout.read() == "no longer served\n"


def test_a_policy_that_never_returns_does_not_keep_it():
    policy = Slow()
    with served(policy) as server, dial(server) as socket:
        socket.send(frame(number(1)))
        while len(policy.asked) < 2:
            time.sleep(0.01)
        begun = time.monotonic()
        server.stop()
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=10)
        assert time.monotonic() - begun < 5
    policy.go.set()
