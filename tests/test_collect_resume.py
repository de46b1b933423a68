"""`burnish collect` as a process that may end at any time: Ctrl-C, kill -9, and going on afterwards."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from lerobot_sets import tree
from verb_lab import refused

import burnish.sim.__main__ as verbs
import lerobot_v3_reader
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.data import lerobot_writer
from burnish.policies.data.lerobot import read_lerobot

WORDS = ["collect", "env=two_mode", "expert=noisy", "worlds=6", "seed=4"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "set"
    assert main([*WORDS, "episodes=20", f"out={out}"]) == 0
    return out


def test_what_is_remembered(whole):
    meta = read_lerobot(whole).meta
    assert meta["env"]["name"] == "two_mode" and meta["expert"] == "noisy" and meta["seed"] == 4
    assert set(meta["generator"]) == {"burnish", "task"} and meta["sim_state"] is False
    assert meta["env"]["config"]["max_steps"] == 60


@pytest.mark.slow
def test_a_shorter_set_is_lengthened_to_the_same_bytes(whole, tmp_path, capsys):
    out = f"out={tmp_path}/set"
    assert main([*WORDS, "episodes=7", out, "resume=true"]) == 0  # there is nothing yet: it starts afresh
    assert "exists already" in refused(capsys, *WORDS, "episodes=20", out)
    before = tree(tmp_path / "set")
    assert "7 episodes already, more than episodes=6" in refused(capsys, *WORDS, "episodes=6", out, "resume=true")
    for changed in ("seed=5", "expert=clean", "env.noise=0.01", "sim_state=true"):
        assert "cannot continue it" in refused(capsys, *WORDS, "episodes=20", out, "resume=true", changed)
    assert tree(tmp_path / "set") == before
    assert main([*WORDS, "episodes=7", out, "resume=true"]) == 0
    assert "has its 7 episodes already; nothing is recorded" in capsys.readouterr().out
    assert main([*WORDS, "episodes=20", out, "resume=true"]) == 0
    assert tree(tmp_path / "set") == tree(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_ctrl_c_publishes_what_is_there_and_says_how_to_go_on(whole, tmp_path, capsys, monkeypatch):
    stream = verbs.stream

    def pressed(*arguments, **options):
        for tick, ready in enumerate(stream(*arguments, **options)):
            if tick == 50:
                signal.raise_signal(signal.SIGINT)
            yield ready

    out = f"out={tmp_path}/set"
    with monkeypatch.context() as patch:
        patch.setattr(verbs, "stream", pressed)
        assert main([*WORDS, "episodes=20", out]) == 130
    said = capsys.readouterr().out
    kept = len(read_lerobot(tmp_path / "set"))
    assert 0 < kept < 20
    assert f"stopped after {kept} of 20 episodes; continue with resume=true" in said
    lerobot_v3_reader.read(tmp_path / "set")
    assert main([*WORDS, "episodes=20", out, "resume=true"]) == 0
    assert tree(tmp_path / "set") == tree(whole)


def test_a_world_that_fails_keeps_what_was_recorded_and_says_how_to_go_on(whole, tmp_path, capsys, monkeypatch):
    stream = verbs.stream

    def failing(*arguments, **options):
        for tick, ready in enumerate(stream(*arguments, **options)):
            if tick == last:
                raise BurnishError("the world failed")
            yield ready

    words = [*WORDS, "episodes=20", f"out={tmp_path}/set"]
    monkeypatch.setattr(verbs, "PUBLISH_EVERY_S", 1e9)  # only the first episode is published by itself
    with monkeypatch.context() as patch:
        patch.setattr(verbs, "stream", failing)
        last = 1  # before an episode has ended
        assert refused(capsys, *words).endswith("the world failed") and list(tmp_path.iterdir()) == []
        last = 50
        said = refused(capsys, *words)
    kept = len(read_lerobot(tmp_path / "set"))
    assert 1 < kept < 20 and f"the world failed; {tmp_path}/set keeps the {kept} episodes before that" in said
    assert "or continue it with resume=true" in refused(capsys, *words)
    assert main([*words, "resume=true"]) == 0
    assert tree(tmp_path / "set") == tree(whole)


def test_ctrl_c_before_the_first_episode_leaves_nothing(tmp_path, monkeypatch):
    def pressed(*_, **__):
        signal.raise_signal(signal.SIGINT)
        yield []

    monkeypatch.setattr(verbs, "stream", pressed)
    assert main([*WORDS, "episodes=20", f"out={tmp_path}/set"]) == 130
    assert list(tmp_path.iterdir()) == []


def version(path: Path) -> int:
    """Another number for each publication: the folder itself is another one."""
    return path.stat().st_ino if path.exists() else 0


def collect_and_be_killed(words: list[str], path: Path, wait_s: float) -> int:
    """Exit status of the verb in a process that is killed so long after its first publication."""
    before, child = version(path), os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os._exit(main([*words, f"out={path}"]))
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while version(path) == before and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(wait_s)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_two_dozen_kills_leave_a_readable_set_each_time(tmp_path, monkeypatch):
    """The verb itself, publishing as often as it can, killed at random instants and called again."""
    monkeypatch.setattr(verbs, "PUBLISH_EVERY_S", 0.0)
    monkeypatch.setattr(lerobot_writer, "PATIENCE", 0)
    monkeypatch.setattr(lerobot_writer, "MEGABYTE", 150)  # 15 kB a file: a few episodes
    torch.set_num_threads(1)  # a forked child must not wait for threads that stayed behind
    chance, words = random.Random(0), [*WORDS, "episodes=2000", "resume=true"]
    path, kept = tmp_path / "set", 0
    for _ in range(24):
        status = collect_and_be_killed(words, path, chance.uniform(0.0, 0.1))
        assert status == -signal.SIGKILL  # it did not fail, and there was more to record
        now = lerobot_v3_reader.read(path)[-1]["episode_index"] + 1
        assert now > kept and len(read_lerobot(path)) == now
        kept = now
        left = [file.name for file in tmp_path.iterdir() if file != path]
        assert len(left) == 1 and left[0].startswith(".set.")  # of this writer; those before it were cleared away
    asked = [*WORDS, f"episodes={kept + 10}"]
    assert main([*asked, f"out={path}", "resume=true"]) == 0
    assert main([*asked, f"out={tmp_path}/whole"]) == 0
    assert tree(path) == tree(tmp_path / "whole")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["set", "whole"]


@pytest.mark.slow
def test_another_policy_at_the_same_path_cannot_continue_a_set(tmp_path, capsys, monkeypatch):
    data, run = f"{tmp_path}/data", f"{tmp_path}/run"
    train = ["policy=gaussian", "policy.hidden=[8]", "train.batch=8", "train.steps=2", "eval.episodes=1"]
    assert main([*WORDS, "episodes=3", f"out={data}"]) == 0
    assert main(["pretrain", *train, f"data={data}", f"out={run}"]) == 0
    act = ["collect", "policy=checkpoint", f"policy.path={run}", "worlds=2", f"out={tmp_path}/drawn"]
    assert main([*act, "episodes=2"]) == 0
    assert main([*act, "episodes=4", "resume=true"]) == 0
    assert read_lerobot(tmp_path / "drawn").meta["policy"]["path"] == run
    load = verbs.loaded

    def trained_on(*arguments, **options):
        policy, origin = load(*arguments, **options)
        with torch.no_grad():
            next(policy.parameters()).mul_(2)
        return policy, origin

    monkeypatch.setattr(verbs, "loaded", trained_on)
    assert "policy.sha256" in refused(capsys, *act, "episodes=6", "resume=true")
