"""The exported form: what is written is what is read, and what a stranger could put there is refused by a sentence."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from burnish.real_robot.errors import Refused
from burnish.real_robot.export import bundle as bundles
from burnish.real_robot.export.bundle import (
    LIMITS,
    PARITY,
    PLAN,
    POLICY,
    TICK,
    read,
    write,
)
from burnish.real_robot.export.runtime import load
from export_lab import B, W, by_hand, network_by_hand

OBS = {"state": np.array([0.1, -0.2, 0.3], np.float32)}
NOISE = np.zeros((2, 2), np.float32)


def test_what_is_written_is_what_is_read(tmp_path):
    made = by_hand()
    found = read(write(made, tmp_path / "deep" / "b"))
    assert sorted(p.name for p in (tmp_path / "deep" / "b").iterdir()) == sorted([PARITY, POLICY, PLAN])
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["b"], "a scratch folder was left behind"
    assert found == made
    expected = np.clip(W @ OBS["state"] + B, -1, 1).reshape(2, 2)
    np.testing.assert_allclose(load(tmp_path / "deep" / "b").act(OBS, noise=NOISE), expected, atol=1e-7)


def test_the_loop_of_the_documentation_plays_a_bundle(tmp_path, monkeypatch):
    page = (Path(__file__).parents[1] / "docs/robots.md").read_text(encoding="utf-8")
    (program,) = [part.split("```")[0] for part in page.split("```python\n")[1:] if "ChunkController" in part]
    write(by_hand(), tmp_path / "runs" / "bundle")
    monkeypatch.chdir(tmp_path)
    said = {"state": OBS["state"]}
    exec(compile(program, "robots.md", "exec"), said)
    assert said["action"].shape == (2,)
    joints = said["joints"]
    for order in (joints, joints[::-1]):
        write(named({"action": order}), tmp_path / "other" / "runs" / "bundle")
        monkeypatch.chdir(tmp_path / "other")
        with nullcontext() if order == joints else pytest.raises(SystemExit, match="in another order"):
            exec(compile(program, "robots.md", "exec"), said)
        shutil.rmtree(tmp_path / "other")


def named(names):
    return by_hand(schema=replace(by_hand().schema, names=names))


def test_a_bundle_keeps_the_names_of_its_numbers(tmp_path):
    names = {"state": ("x", "y", "z"), "action": ("a", "b")}
    assert read(write(named(names), tmp_path / "named")).schema.names == names
    schema = json.loads((write(by_hand(), tmp_path / "bare") / POLICY).read_bytes())["schema"]
    assert "names" not in schema, "older versions read those without"


def test_a_folder_that_is_there_stays_as_it_is(tmp_path):
    write(by_hand(), tmp_path / "b")
    before = (tmp_path / "b" / POLICY).read_bytes()
    with pytest.raises(Refused, match="not overwritten"):
        write(by_hand(about={}), tmp_path / "b")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Refused, match="not overwritten"):
        write(by_hand(), tmp_path / "link")
    assert (tmp_path / "b" / POLICY).read_bytes() == before and not (tmp_path / "nowhere").exists()


# ---- hostile bundles: each changes one thing of a good one. ----


def edit(folder: Path, change, name: str = POLICY) -> None:
    data = json.loads((folder / name).read_bytes())
    change(data)
    (folder / name).write_text(json.dumps(data))


def text(old: str, new: str):
    def change(folder: Path) -> None:
        before = (folder / POLICY).read_text()
        assert old in before
        (folder / POLICY).write_text(before.replace(old, new, 1))

    return change


def schema(**changes):
    return lambda folder: edit(folder, lambda data: data["schema"].update(changes))


def another(model: bytes, name: str = PLAN):
    """Another network, with a hash that fits it: what a forger would write."""

    def change(folder: Path) -> None:
        (folder / name).write_bytes(model)
        edit(folder, lambda data: data["files"].update({name: hashlib.sha256(model).hexdigest()}))

    return change


def link(name: str):
    def change(folder: Path) -> None:
        outside = folder.parent / "outside"
        (folder / name).rename(outside / name)
        (folder / name).symlink_to(outside / name)

    return change


def pipe(folder: Path) -> None:
    (folder / PARITY).unlink()
    os.mkfifo(folder / PARITY)


def flipped(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


HOSTILE = {
    "huge_observation": (schema(obs={"state": [2**20, 2**20]}), "too large"),
    "huge_horizon": (schema(horizon=2**60, execute=2), "beyond all sizes"),
    "nan_in_json": (text('"version"', '"low": NaN, "version"'), "which is no number"),
    "infinity_by_digits": (schema(low=[-1e999, 0.0]), "which is no number"),
    "wrong_hash": (lambda f: (f / PLAN).write_bytes(flipped((f / PLAN).read_bytes())), "was changed after it was"),
    "wrong_hash_of_report": (lambda f: (f / PARITY).write_text("{}"), "was changed after it was written"),
    "duplicate_keys": (text('"version"', '"version": 2, "version"'), "a key stands twice"),
    "deep_nesting": (lambda f: (f / POLICY).write_text("[" * 200_000), "is malformed"),
    "endless_number": (text('"horizon": 2', '"horizon": ' + "9" * 5000), "is malformed"),
    "no_utf8": (lambda f: (f / POLICY).write_bytes(b'{"a": "\xff"}'), "is malformed"),
    "absolute_path": (lambda f: edit(f, lambda d: d["files"].update({"/etc/passwd": "0" * 64})), "lists the files"),
    "path_upwards": (lambda f: edit(f, lambda d: d["files"].update({"../outside/x": "0"})), "lists the files"),
    "link_to_network": (link(PLAN), "is a link"),
    "link_to_policy": (link(POLICY), "is a link"),
    "pipe": (pipe, "is no plain file"),
    "folder_in_its_place": (lambda f: ((f / PARITY).unlink(), (f / PARITY).mkdir()), "is no plain file"),
    "extra_file": (lambda f: (f / "setup.py").write_text("raise SystemExit"), "no part of one"),
    "extra_folder": (lambda f: (f / "__pycache__").mkdir(), "no part of one"),
    "extra_network": (lambda f: (f / TICK).write_bytes(network_by_hand()), "lists the files"),
    "lacking_file": (lambda f: (f / PARITY).unlink(), "lacks parity.json"),
    "lacking_network": (lambda f: (f / PLAN).unlink(), "lacks policy.onnx"),
    "another_version": (lambda f: edit(f, lambda d: d.update(version=3)), "export the policy again"),
    "unknown_key": (lambda f: edit(f, lambda d: d.update(hook="os.system")), "must hold"),
    "unknown_schema": (schema(teleport=True), "should hold"),
    "names_of_nothing": (schema(names=["a"]), "must be an object"),
    "names_that_are_none": (schema(names={"action": [1, 2]}), "must be a list of words"),
    "wrong_chunk": (schema(horizon=3), "reads 'prefix' as"),
    "limits_swapped": (schema(low=[2.0, 0.0]), "need low < high"),
    "noise_nobody_draws": (schema(noise_shape=[7]), "its network reads none such"),
    "many_candidates": (
        lambda f: edit(f, lambda d: d["noise"][0].update(rows=2**40, split=True)),
        "makes no sense",
    ),
    "network_that_is_none": (another(b"no model"), "no network that onnxruntime can run"),
    "network_of_another_observation": (another(network_by_hand("obs.camera")), "which the bundle does not observe"),
    "network_of_another_shape": (another(network_by_hand(width=4, weight=W[:, [0, 0, 1, 2]])), "reads 'obs.state' as"),
    "network_that_fails": (another(network_by_hand(weight=W[:, :2])), "cannot be run|can run by itself"),
}

_watched: list[tuple[str, str]] | None = None
ACTS = {"exec", "compile", "subprocess.Popen", "os.system", "os.exec", "os.remove", "os.rename", "socket.connect"}


def _hook(event: str, arguments: tuple) -> None:
    if _watched is not None and (event in ACTS or event == "open"):
        _watched.append((event, str(arguments[0]) if arguments else ""))


sys.addaudithook(_hook)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bundles_are_refused(tmp_path, name):
    """Python itself reports what is opened and run meanwhile: nothing outside the folder, and no code."""
    global _watched
    folder = write(by_hand(), tmp_path / "b")
    load(folder).act(OBS, noise=NOISE)  # the good one acts, and nothing is imported for the first time below
    (tmp_path / "outside").mkdir()
    change, sentence = HOSTILE[name]
    change(folder)
    _watched = []
    try:
        with pytest.raises(Refused, match=sentence) as refusal:
            load(folder)
    finally:
        seen, _watched = _watched, None
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 600
    opened = {path for event, path in seen if event == "open" and not path.isdigit()}  # a number is one of these again
    assert opened <= {str(folder), *LIMITS}
    assert {event for event, _ in seen} <= {"open"}
    assert any(seen), "the hook has seen nothing, so this proves nothing"


def test_what_is_larger_than_allowed_is_not_read(tmp_path, monkeypatch):
    folder = write(by_hand(), tmp_path / "b")
    monkeypatch.setitem(bundles.LIMITS, PLAN, 50)
    with pytest.raises(Refused, match="50 are allowed"):
        read(folder)


def test_what_is_no_folder_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(Refused, match="is no bundle"):
            read(path)


def test_a_bundle_is_checked_before_it_is_written():
    with pytest.raises(Refused, match="the networks of a bundle"):
        by_hand(networks={})
    with pytest.raises(Refused, match="exceed horizon"):
        replace(by_hand().schema, execute=3)
