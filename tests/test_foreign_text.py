"""What others wrote is shown and not obeyed: escape sequences of servers, file names and run folders in a terminal."""

from __future__ import annotations

import json

import pytest

from burnish.policies.cli.cli import main
from burnish.policies.cli.machine import say
from burnish.policies.core.errors import LINES, LONGEST, BurnishError, plain, plain_text, reason
from burnish.policies.core.spec import EnvSpec, ObsSpec
from burnish.policies.external.remote import RemoteConfig, RemotePolicy
from burnish.policies.wire.connection import Connection, ServerBusy, ServerRefused
from burnish.real_robot.errors import RobotError
from burnish.real_robot.inference.action_sources import ServedConfig
from burnish.real_robot.inference.client import PolicyClient, PolicyUnavailable
from openpi_lab import Fail, openpi
from server_lab import LIMITS

# Colours, the title of the window, a screen that is cleared, a link, the same by C1, DEL, bell, backspaces, a line that
# is begun anew, writing from the right, an isolate, a line of Unicode's own, half a pair.
HOSTILE = (
    "\x1b[31mred", "\x1b]0;owned\x07", "\x1b[2J\x1b[H", "\x1b]8;;http://evil.example\x1b\\here", "\x9b31m",
    "\x9d0;x\x9c", "a\x7fb", "ok\b\b\b", "fine\rgone", "\u202egnp.exe", "\u2066x\u2069", "a\u2028b", "\ud800", "\x00",
)  # fmt: skip
TEXT = "".join(HOSTILE)


def shown(text: str) -> bool:
    """Nothing in it moves a cursor; lines may end."""
    return all(x.isprintable() for x in text.replace("\n", ""))


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_escape_sequences_are_written_out(text):
    assert not shown(text), "control: this one would be obeyed"
    assert shown(plain(text)) and shown(plain_text(text)) and shown(str(BurnishError(text)))


def test_words_of_every_language_stay_as_they_are():
    for text in ("déjà vu: Größe 3 µm, 機器人, робот, שלום", 'it\'s "so" \\ and ~', "🤖 fine"):
        assert plain(text) == plain_text(text) == str(BurnishError(text)) == text
    assert plain("\x1b[31m\n") == "\\x1b[31m\\n" and plain_text("one\ntwo\x1b") == "one\ntwo\\x1b"


def test_no_text_is_endless():
    assert plain("x" * 10**6) == "x" * (LONGEST - 3) + "..." and len(plain("\x1b" * 10**6)) == LONGEST
    assert plain("x" * 300, 300) == "x" * 300 and plain("x" * 301, 300) == "x" * 297 + "..."
    assert len(str(BurnishError("x\n" * 10**6)).split("\n")) == LINES


@pytest.mark.parametrize(
    ("error", "plainly", "named"),
    [
        (ValueError("too long.\nand more"), "too long", "ValueError: too long"),
        (AssertionError(), "AssertionError", "AssertionError"),
        (RuntimeError(" \n"), "RuntimeError", "RuntimeError"),
        (RuntimeError("."), "RuntimeError", "RuntimeError"),
        (OSError("a\x1b[31m"), "a\\x1b[31m", "OSError: a\\x1b[31m"),
    ],
)
def test_an_error_of_other_code_always_says_something(error, plainly, named):
    assert reason(error) == plainly and reason(error, named=True) == named
    assert len(reason(ValueError("x" * 9000), 40)) == 40


def test_a_server_cannot_write_into_the_terminal():
    """Neither in an answer, nor as it greets, nor in what it announces, nor as it leaves."""

    def answer(message):
        raise Fail(message["say"])

    hostile = TEXT.replace("\ud800", "").replace("\x00", "")  # no UTF-8; the end of a line, which splitlines looks for
    hostile = hostile.replace("\r", "").replace("\u2028", "")
    for said, kind in ((f"Traceback\n{hostile}", ServerRefused), (f"busy: {hostile}", ServerBusy)):
        with openpi(answer) as server:
            connection = Connection(server.url, timeout_s=2)
            with pytest.raises(kind, match="red") as failure:
                connection.exchange({"say": said})
            connection.close()
        assert shown(str(failure.value)) and shown(failure.value.args[0]), "also for who logs the raw words"
    names = {"obs": {"shapes": {"\x1b[31mstate": [3]}}, "\x1b]0;owned\x07": 1}
    for greeting, metadata in ((hostile, {}), (None, {"policy_spec": names})):
        with openpi(answer, metadata, greeting) as server, pytest.raises((RobotError, BurnishError)) as refusal:
            PolicyClient(ServedConfig(server.url, timeout_s=2))
        assert "server at" in str(refusal.value) and shown(str(refusal.value))

    with openpi(lambda message: {hostile: 1}, {}) as server, pytest.raises(BurnishError) as refusal:
        RemotePolicy(RemoteConfig(server.url), EnvSpec(ObsSpec({"state": (3,)}), LIMITS, 10.0, "test", 20))
    assert "answered without actions" in str(refusal.value) and shown(str(refusal.value))


def test_a_robots_client_passes_on_what_can_be_shown():
    def answer(message):
        raise Fail("\x1b]0;owned\x07no")

    with openpi(answer) as server:
        asker = PolicyClient(ServedConfig(server.url, timeout_s=2))
        with pytest.raises(PolicyUnavailable) as refusal:
            asker._exchange({"state": 1})
    assert "owned" in str(refusal.value) and shown(str(refusal.value))


@pytest.mark.parametrize(
    "words",
    [
        ["report", "run={}"],
        ["report", "compare=[{}]"],
        ["evaluate", "policy.path={}", "env=push"],
        ["offline", "method=iql", "data={}"],
        ["serve", "policy.path={}"],
        ["export", "policy.path={}", "out=never"],
    ],
    ids=lambda words: words[0] + words[1].partition("=")[0],
)
def test_no_verb_writes_the_escape_sequences_of_a_folder(words, tmp_path, capsys):
    """Its name and what is in it are a stranger's."""
    folder = tmp_path / "a\x1b]0;owned\x07b"
    folder.mkdir()
    raw = '{"\\u001b[31mformat": "\\u009b2J", "files": {"\\u202etxt": 1}}'
    for name in ("manifest.json", "config.yaml", "metrics.jsonl", "comparison.json", "info.json"):
        (folder / name).write_text(raw)
    assert main([word.format(f"'{folder}'") for word in words]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"burnish {words[0]}: ") and shown(told.err) and shown(told.out)


def test_what_a_verb_says_is_plain(capsys):
    say("success of \x1b[31mpush\n\x9b2J")
    assert capsys.readouterr().out == "success of \\x1b[31mpush\n\\x9b2J\n"
    assert json.loads(json.dumps(HOSTILE)) == list(HOSTILE), "control: files hold them as they are"
