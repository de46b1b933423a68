"""The policy server's places: they are not kept by silence, and without a key not by asking for ever either."""

from __future__ import annotations

import time

import pytest
from test_gateway import KEY, STATE, asked, dial
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from burnish.policies.wire.connection import Connection
from burnish.real_robot.serving import gateway
from openpi_lab import content
from server_lab import flow, served


def test_places_are_not_kept_by_silence():
    with served(flow(), clients=2, receive_s=0.5) as server:
        first, second, third = (dial(server) for _ in range(3))
        for socket in (first, second):
            assert "actions" in content(asked(socket, STATE))
        assert asked(third, STATE).startswith("busy: all 2 places")
        time.sleep(0.6)
        assert "actions" in content(asked(second, STATE))
        assert "actions" in content(asked(third, STATE)) and "actions" in content(asked(second, STATE))
        with pytest.raises(ConnectionClosed):  # it was silent longest
            first.recv(timeout=5)
        second.close()
        third.close()


def test_local_clients_that_ask_nothing_shut_nobody_out():
    """Polite ones: they come in, and stay; and then ask once, and stay."""
    with served(flow()) as server:
        idle = [dial(server) for _ in range(server.config.clients)]
        with dial(server) as late:
            assert "actions" in content(asked(late, STATE)), "at once"
        assert all("actions" in content(asked(socket, STATE)) for socket in idle)
        client = Connection(server.url, timeout_s=2)
        assert "actions" in client.ask(STATE), "it asks again while it is told that the server is busy"
        client.close()
        for socket in idle:
            socket.close()


class Crowd:
    """Clients that go on asking one after the other; how often each was served, and what the refused were told."""

    def __init__(self, sockets):
        self.sockets, self.served, self.told = sockets, [0] * len(sockets), set()

    def ask(self):
        for i, socket in enumerate(self.sockets):
            reply = asked(socket, STATE)
            if isinstance(reply, bytes):
                self.served[i] += 1
            else:
                self.told.add(reply)

    def until(self, done, patience_s):
        end = time.monotonic() + patience_s
        while not done() and time.monotonic() < end:
            self.ask()
            time.sleep(0.01)


def test_local_clients_that_go_on_asking_shut_nobody_out(monkeypatch):
    """None of them is ever silent; each must have its turn, those that lose a place too."""
    monkeypatch.setattr(gateway, "SILENT_S", 60.0)
    monkeypatch.setattr(gateway, "HELD_S", 1.0)
    with served(flow(), clients=4, receive_s=60.0) as server:
        crowd = Crowd([dial(server) for _ in range(4)])
        crowd.ask()
        assert crowd.served == [1] * 4
        newcomers = [dial(server) for _ in range(3)]
        crowd.sockets += newcomers
        crowd.served += [0] * 3
        crowd.ask()
        assert crowd.served == [2] * 4 + [0] * 3, "nobody loses a place within HELD_S"
        crowd.until(lambda: min(crowd.served) >= 5, 60)
        assert min(crowd.served) >= 5, crowd.served
        crowd.until(lambda: any("the place of this client went to" in words for words in crowd.told), 60)
        assert any(words.startswith("busy: all 4 places") for words in crowd.told)
        lost = [words for words in crowd.told if words.startswith("busy: the place of this client went to one that")]
        assert lost and "ask again within 1 s" in lost[0] and "a key, which keeps a place" in lost[0]
        for socket in crowd.sockets:
            socket.close()


def test_a_place_goes_to_the_client_that_has_waited_longest(monkeypatch):
    """Of three clients for one place two ask all the time: a place that went to the next who asks would be theirs."""
    monkeypatch.setattr(gateway, "SILENT_S", 60.0)
    monkeypatch.setattr(gateway, "HELD_S", 0.3)
    with served(flow(), clients=1, receive_s=60.0) as server:
        crowd = Crowd([dial(server) for _ in range(2)])
        crowd.ask()
        seldom = Crowd([dial(server)])
        for _ in range(20):
            seldom.ask()
            crowd.until(lambda: False, 0.15)
        assert seldom.served[0] >= 2, "its turn comes after two held times of 0.3 s, and 3 s are ten of them"
        for socket in crowd.sockets + seldom.sockets:
            socket.close()


def test_a_place_that_is_left_goes_to_the_client_that_has_waited_longest_too(monkeypatch):
    """Two that hand the place to each other, by closing, shut nobody out."""
    monkeypatch.setattr(gateway, "HELD_S", 60.0)
    with served(flow(), clients=1, receive_s=60.0) as server:
        first, late, second = Crowd([dial(server)]), Crowd([dial(server)]), Crowd([dial(server)])
        for crowd in (first, late, second):
            crowd.ask()
        assert (first.served, late.served, second.served) == ([1], [0], [0])
        first.sockets[0].close()
        second.until(lambda: False, 0.3)
        late.ask()
        assert (late.served, second.served) == ([1], [0])
        for crowd in (late, second):
            crowd.sockets[0].close()


def test_a_place_behind_a_key_is_not_given_up(monkeypatch):
    """The control of the test above; those that wait know the key too."""
    monkeypatch.setattr(gateway, "SILENT_S", 60.0)
    monkeypatch.setattr(gateway, "HELD_S", 0.1)
    shown = {"Authorization": f"Api-Key {KEY}"}
    with served(flow(), key=KEY, clients=2, receive_s=60.0) as server:
        owners = Crowd([dial(server, additional_headers=shown) for _ in range(2)])
        for round in range(1, 6):
            time.sleep(0.15)
            with connect(server.url, compression=None, additional_headers=shown) as late:
                assert late.recv(timeout=10).startswith("busy: all 2 places")
            owners.ask()
            assert owners.served == [round] * 2
        for socket in owners.sockets:
            socket.close()
