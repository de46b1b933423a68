"""Folders in a storage. `test_executors.py` plays a comparison whose nodes share nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from pathlib import Path

import pytest
from verb_lab import refused

from burnish.finetune.compare.claim import restore
from burnish.policies.cli import ray_tasks
from burnish.policies.cli.ray_tasks import key_of, named_paths, play_away, stored
from burnish.policies.cli.storage import Storage
from burnish.policies.core import files
from burnish.policies.core.errors import BurnishError


def content(folder: Path) -> dict[str, str]:
    return {x.relative_to(folder).as_posix(): x.read_text() for x in folder.rglob("*") if x.is_file()}


@pytest.fixture
def made(tmp_path) -> Path:
    files.write_folder(tmp_path / "made", {"a": "one", "deep/b": "two", "deep/er/c": "one"})
    return tmp_path / "made"


def test_a_folder_arrives_as_it_was_sent_last(made, tmp_path):
    storage, there = Storage(f"file://{tmp_path}/kept"), tmp_path / "there"
    assert not storage.fetch("run", there)
    storage.send(made, "run")
    assert storage.fetch("run", there) and content(there) == content(made)
    kept = [x for x in (tmp_path / "kept/files").rglob("*") if x.is_file()]
    assert len(kept) == 2, "equal content is kept once"
    times = [x.stat().st_mtime_ns for x in kept]
    files.remove(made / "deep/er")
    (made / "a").write_text("three")
    (made / "link").symlink_to("/etc/hostname")
    (there / "stale").write_text("of an earlier time")
    storage.send(made, "run")
    assert storage.fetch("run", there) and content(there) == {"a": "three", "deep/b": "two"}
    assert not (there / "deep/er").exists(), "an empty folder could pass for a checkpoint"
    assert [x.stat().st_mtime_ns for x in kept] == times, "what is there is not sent again"
    storage.send(made, "flat", deep=1)
    storage.send(made / "a", "flat/file")
    assert storage.fetch("flat", tmp_path / "flat") and content(tmp_path / "flat") == {"a": "three"}
    assert storage.fetch("flat/file", tmp_path / "one") and (tmp_path / "one").read_text() == "three"
    assert storage.keys("flat/") == ["flat/file"] and storage.keys("other/") == []


def test_while_a_folder_is_sent_readers_find_a_whole_one(made, tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.policies.cli.storage.SEND_S", 0.01)
    storage, reader = Storage(f"file://{tmp_path}/kept"), Storage(f"file://{tmp_path}/kept")
    with storage.sending(made, "run", "checkpoints"):
        files.write_folder(made / ".scratch", {"x": "y"})
        files.new(made / "checkpoints")
        files.move(made / ".scratch", made / "checkpoints/1")
        until = time.monotonic() + 20
        while not (reader.fetch("run", tmp_path / "there") and (tmp_path / "there/checkpoints/1/x").exists()):
            assert time.monotonic() < until, "a new checkpoint was not sent"
            time.sleep(0.01)
        (made / "a").write_text("later")
    assert reader.fetch("run", tmp_path / "there") and (tmp_path / "there/a").read_text() == "later"


def test_what_is_damaged_or_leads_outside_is_refused(made, tmp_path, capsys):
    storage = Storage(f"file://{tmp_path}/kept")
    storage.send(made, "run")
    listed = tmp_path / "kept/folders/run.json"
    listed.write_text(json.dumps({"../planted": json.loads(listed.read_text())["a"]}))
    with pytest.raises(BurnishError, match="outside of its folder"):
        storage.fetch("run", tmp_path / "there")
    assert not (tmp_path / "planted").exists()
    storage.send(made, "run")
    for file in (tmp_path / "kept/files").rglob("*"):
        if file.is_file():
            file.write_text("other")
    with pytest.raises(BurnishError, match="is damaged in file://"):
        storage.fetch("run", tmp_path / "there")
    assert content(tmp_path / "there") == {}
    with pytest.raises(BurnishError, match="storage=moon://x cannot be used"):
        Storage("moon://x")
    (tmp_path / "kept/folders/run.json").unlink()
    files.remove(tmp_path / "kept/folders")
    (tmp_path / "kept/folders").write_text("no folder")
    with pytest.raises(BurnishError, match="cannot be read or written"):
        storage.send(made, "run")
    said = refused(capsys, "compare", "base=x", "methods=dsrl", "storage=s3://x", f"out={tmp_path}/out")
    assert "storage=s3://x is for on=ray" in said


@pytest.mark.parametrize("name", ["runs/../../planted", "/planted", "runs/..\\planted", "C:/planted", "runs/D:planted"])
def test_names_that_lead_outside_on_any_system_are_refused(name, made, tmp_path):
    """A storage of objects, other than a file system, hands any name back as it is."""
    storage = Storage(f"memory://{tmp_path}")
    storage.send(made, "run")
    ours = storage.listed("run") or {}
    assert storage.keys("") == ["run"] and storage.fetch("run", tmp_path / "there")
    remote, root = storage._remote, storage._root
    remote.pipe(f"{root}/folders/run.json", json.dumps({name: ours["a"]}).encode())
    remote.pipe(f"{root}/folders/{name}.json", json.dumps({".": ours["a"]}).encode())
    for look in (lambda: storage.fetch("run", tmp_path / "there"), lambda: storage.keys("")):
        with pytest.raises(BurnishError, match="outside of its folder; take another storage"):
            look()
    assert content(tmp_path / "there") == content(made), "nothing was removed"


def test_a_comparison_is_not_fetched_through_a_link(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Storage(f"file://{tmp_path}/kept").send(made, "out/runs/made")
    files.new(tmp_path / "out")
    (tmp_path / "out/runs").symlink_to(tmp_path)
    (made / "mine").write_text("kept")
    with pytest.raises(BurnishError, match="runs is a link to another place"):
        restore(Path("out"), f"file://{tmp_path}/kept", resume=True)
    assert (made / "mine").exists()


def test_a_file_is_read_again_once_it_has_changed(made, tmp_path, monkeypatch):
    def sent() -> list[str]:
        summed: list[str] = []
        with monkeypatch.context() as patch:
            sha256 = hashlib.sha256
            patch.setattr("hashlib.sha256", lambda: summed.append("a file") or sha256())
            Storage(f"file://{tmp_path}/kept").send(made / "a", "a")
        return summed

    assert len(sent()) == len(sent()) == 1, "one that was written just now may change within the same tick of a clock"
    os.utime(made / "a", ns=(0, 10**18))
    assert len(sent()) == 1 and sent() == []
    (made / "a").write_text("two")  # as long as before
    assert len(sent()) == 1
    assert Storage(f"file://{tmp_path}/kept").fetch("a", made / "a.again")
    assert content(made)["a.again"] == "two"


@pytest.mark.parametrize(("verb", "left"), [("evaluate", []), ("finetune", ["bc"])])
def test_what_one_task_alone_reads_leaves_the_node(verb, left, made, tmp_path, monkeypatch):
    url, node = f"file://{tmp_path}/kept", tmp_path / "node"
    Storage(url).send(made, "bc")

    def played(words, log, modules, places):
        policy, out = (Path(word.partition("=")[2]) for word in words[1:])
        assert content(policy) == content(made)
        files.write_folder(out, {"x": "made"})
        log.parent.mkdir(exist_ok=True)
        log.touch()
        return 0

    monkeypatch.setenv("HOME", str(node))
    monkeypatch.setattr(ray_tasks, "_played", played)
    assert play_away([verb, "policy.path=bc", "out=made"], {1: "bc", 2: "out/made"}, "out/log", [], [], url) == 0
    assert Storage(url).fetch("out/made", tmp_path / "got") and content(tmp_path / "got") == {"x": "made"}
    assert [x.parent.name for x in node.rglob("a")] == left and not list(node.rglob("x"))


def test_a_lock_without_a_refusal_is_waited_for(tmp_path):
    order, begun = [], threading.Event()

    def other() -> None:
        begun.set()
        with files.locked(tmp_path / "turn"):
            order.append("other")

    thread = threading.Thread(target=other)
    with files.locked(tmp_path / "turn"):
        thread.start()
        begun.wait(5)
        time.sleep(0.3)
        order.append("first")
    thread.join(5)
    assert order == ["first", "other"]


def test_words_name_what_is_sent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("bc", "cpu"):
        (tmp_path / name).mkdir()
    words = ["finetune", "policy.path=bc", "device=cpu", "out=../runs/x", "data=", "policy.base=ws://host:1"]
    words += ["policy.stats=owner/name", 'critic_from="bc"']  # the latter as a file of settings says it
    assert named_paths(words) == {1: Path("bc"), 3: Path("../runs/x"), 7: Path("bc")}
    assert named_paths(["evaluate", "policy.path=owner/name"]) == {}, "a name on a hub is none here"
    assert key_of(Path("bc")) == key_of(tmp_path / "bc") == "bc"
    assert key_of(Path("../runs/x")) == (tmp_path.parent / "runs/x").as_posix().lstrip("/")


@pytest.mark.parametrize(
    ("here", "settings", "counts"), [("200", "a", "sent"), ("600", "a", "here"), ("200", "b", "here")]
)
def test_of_a_run_the_later_checkpoint_counts_here_or_there(here, settings, counts, tmp_path, monkeypatch):
    """Of the same run: one with other settings in the same folder is another."""
    monkeypatch.chdir(tmp_path)
    url, run = f"file://{tmp_path}/kept", tmp_path / "run"
    files.write_folder(run, {"checkpoints/00000400/x": "sent", "checkpoints/00000200/x": "sent", "config.yaml": "a"})
    Storage(url).send(run, "run")
    files.remove(run)
    files.write_folder(run, {f"checkpoints/00000{here}/x": "here", "config.yaml": settings})
    with stored(["finetune", "out=run"], tmp_path / "log", url) as keys:
        assert Storage(url).fetch(keys[1], tmp_path / "node")
    found = content(tmp_path / "node")
    assert found.pop("config.yaml") == settings and set(found.values()) == {counts}
