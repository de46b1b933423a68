"""The exported form: what is written is what is read, and what a stranger could put there is refused by a sentence."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from burnish.real_robot.errors import Refused
from burnish.real_robot.export import bundle as bundles
from burnish.real_robot.export.bundle import (
    LIMITS,
    PARITY,
    POLICY,
    TENSORS,
    decode_tensors,
    encode_tensors,
    read,
    write,
)
from burnish.real_robot.export.runtime import load
from export_lab import by_hand

OBS = {"state": np.array([0.1, -0.2, 0.3], np.float32)}
NOISE = np.zeros((2, 2), np.float32)


def test_what_is_written_is_what_is_read(tmp_path):
    made = by_hand()
    found = read(write(made, tmp_path / "deep" / "b"))
    assert sorted(p.name for p in (tmp_path / "deep" / "b").iterdir()) == [PARITY, POLICY, TENSORS]
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["b"], "a scratch folder was left behind"
    assert found.schema == made.schema and found.noise == made.noise and found.about == made.about
    assert found.programs == made.programs and found.parity == made.parity
    assert all(np.array_equal(found.tensors[name], x) for name, x in made.tensors.items())
    expected = np.clip(made.tensors["w"] @ OBS["state"] + 0.1, -1, 1).reshape(2, 2)
    np.testing.assert_allclose(load(tmp_path / "deep" / "b").act(OBS, noise=NOISE), expected, atol=1e-7)


def test_a_folder_that_is_there_stays_as_it_is(tmp_path):
    write(by_hand(), tmp_path / "b")
    before = (tmp_path / "b" / POLICY).read_bytes()
    with pytest.raises(Refused, match="not overwritten"):
        write(by_hand(about={}), tmp_path / "b")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(Refused, match="not overwritten"):
        write(by_hand(), tmp_path / "link")
    assert (tmp_path / "b" / POLICY).read_bytes() == before and not (tmp_path / "nowhere").exists()


def test_the_tensors_are_safetensors():
    """Both ways, against the package of the format's makers."""
    made = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b.1": np.array(2.5, np.float32)}
    for found in (safetensors.numpy.load(encode_tensors(made)), decode_tensors(safetensors.numpy.save(made))):
        assert found.keys() == made.keys()
        assert all(np.array_equal(found[name], x) and found[name].shape == x.shape for name, x in made.items())


# ---- hostile bundles: each changes one thing of a good one. ----


def edit(folder: Path, change, name: str = POLICY) -> None:
    data = json.loads((folder / name).read_bytes())
    change(data)
    (folder / name).write_text(json.dumps(data))


def ops(change):
    return lambda folder: edit(folder, lambda data: change(data["programs"]["plan"]["ops"]))


def text(old: str, new: str):
    def change(folder: Path) -> None:
        before = (folder / POLICY).read_text()
        assert old in before
        (folder / POLICY).write_text(before.replace(old, new, 1))

    return change


def schema(**changes):
    return lambda folder: edit(folder, lambda data: data["schema"].update(changes))


def tensors(**changes):
    """Other numbers, with hashes that fit them: what a forger would write."""

    def change(folder: Path) -> None:
        held = {**read(folder).tensors, **changes}
        (folder / TENSORS).write_bytes(safetensors.numpy.save(held))
        sums = {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in held.items()}
        edit(folder, lambda data: data.update(tensors=sums))

    return change


def content(change):
    return lambda folder: (folder / TENSORS).write_bytes(change((folder / TENSORS).read_bytes()))


def table(**entries):
    """A safetensors file with a table of one's own."""

    def change(folder: Path) -> None:
        head = json.dumps(entries).encode()
        (folder / TENSORS).write_bytes(len(head).to_bytes(8, "little") + head + b"\0" * 64)

    return change


def tensors_of_another(folder: Path) -> None:
    (folder / TENSORS).write_bytes(safetensors.numpy.save({"other": np.zeros(3, np.float32)}))


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


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


def network(folder: Path) -> None:
    """A program that says it is a network, and brings none."""
    edit(folder, lambda data: data["programs"].update(plan={}))


def doubled(items: list) -> None:
    """Rows that double at every step, to 2^40 of them."""
    for i in range(40):
        name = items[-1]["out"]
        items.append({"op": "concat", "in": [name, name], "out": f"twice{i}", "axis": 0})


HOSTILE = {
    "unknown_op": (ops(lambda x: x[0].update(op="exec")), "is unknown; this version knows"),
    "op_of_another_type": (ops(lambda x: x.insert(0, {"op": ["linear"]})), "no object that names its op"),
    "unknown_setting": (ops(lambda x: x[1].update(path="/etc/passwd")), "unknown setting 'path'"),
    "huge_width": (ops(lambda x: x[0].update(width=2**31 - 1)), "hold more than"),
    "huge_rows": (ops(doubled), "hold more than"),
    "huge_observation": (schema(obs={"state": [2**20, 2**20]}), "too large"),
    "huge_shape": (table(w=entry([2**39, 2**39], 0, 64)), "cannot lie in bytes"),
    "huge_horizon": (schema(horizon=2**60, execute=2), "beyond all sizes"),
    "cycle": (ops(lambda x: x[0].update({"in": ["clipped", "noise.0"]})), "which nothing before it has made"),
    "itself": (ops(lambda x: x[1].update({"in": ["clipped"]})), "which nothing before it has made"),
    "value_made_twice": (ops(lambda x: x[1].update(out="obs.state")), "must make one new value"),
    "missing_output": (lambda f: edit(f, lambda d: d["programs"]["plan"].update(output="x")), "none of its operations"),
    "nan_weight": (tensors(b=np.array([0, np.nan, 0, 0], np.float32)), "holds NaN or infinity"),
    "nan_in_json": (text('"low": -1.0', '"low": NaN'), "which is no number"),
    "infinity_by_digits": (text('"low": -1.0', '"low": -1e999'), "needs a finite number"),
    "wrong_hash": (content(flipped), "was changed after it was written"),
    "wrong_hash_of_report": (lambda f: (f / PARITY).write_text("{}"), "was changed after it was written"),
    "missing_tensor": (ops(lambda x: x[0].update(weight="v")), "which the bundle does not hold"),
    "wrong_shape": (tensors(w=np.zeros((4, 2), np.float32)), "needs 'weight' of shape"),
    "tensor_nobody_lists": (tensors_of_another, "is in only one of"),
    "wrong_dtype": (table(w=entry([4, 4], 0, 64, "I32")), "only F32 is allowed"),
    "truncated": (content(lambda x: x[:-5]), "cut off"),
    "truncated_table": (content(lambda x: x[:20]), "cut off"),
    "no_safetensors": (content(lambda x: b"PK\x03\x04" * 20), "cut off or no safetensors"),
    "overlap": (table(w=entry([8], 0, 32), b=entry([8], 16, 48)), "cut off or has gaps"),
    "bytes_left": (table(w=entry([8], 0, 32)), "belong to no tensor"),
    "duplicate_keys": (text('"version"', '"version": 1, "version"'), "a key stands twice"),
    "deep_nesting": (lambda f: (f / POLICY).write_text("[" * 200_000), "is malformed"),
    "deep_nesting_of_table": (
        content(lambda x: (200_000).to_bytes(8, "little") + b'{"a":' * 40_000 + x),
        "is malformed",
    ),
    "endless_number": (text('"horizon": 2', '"horizon": ' + "9" * 5000), "is malformed"),
    "no_utf8": (lambda f: (f / POLICY).write_bytes(b'{"a": "\xff"}'), "is malformed"),
    "absolute_path": (lambda f: edit(f, lambda d: d["files"].update({"/etc/passwd": "0" * 64})), "lists the files"),
    "path_upwards": (lambda f: edit(f, lambda d: d["files"].update({"../outside/x": "0"})), "lists the files"),
    "link_to_tensors": (link(TENSORS), "is a link"),
    "link_to_policy": (link(POLICY), "is a link"),
    "pipe": (pipe, "is no plain file"),
    "folder_in_its_place": (lambda f: ((f / PARITY).unlink(), (f / PARITY).mkdir()), "is no plain file"),
    "extra_file": (lambda f: (f / "setup.py").write_text("raise SystemExit"), "no part of one"),
    "extra_folder": (lambda f: (f / "__pycache__").mkdir(), "no part of one"),
    "lacking_file": (lambda f: (f / PARITY).unlink(), "lacks parity.json"),
    "another_version": (lambda f: edit(f, lambda d: d.update(version=2)), "export the policy again"),
    "unknown_key": (lambda f: edit(f, lambda d: d.update(hook="os.system")), "must hold"),
    "unknown_schema": (schema(teleport=True), "should hold"),
    "wrong_chunk": (schema(horizon=3), "pins something else than a chunk"),
    "limits_swapped": (schema(low=[2.0, 0.0]), "need low < high"),
    "noise_nobody_draws": (schema(noise_shape=[7]), "none of its programs reads such"),
    "many_candidates": (
        lambda f: edit(f, lambda d: d["noise"][0].update(rows=2**40, split=True)),
        "makes no sense",
    ),
    "other_program": (lambda f: edit(f, lambda d: d["programs"].update(boot={})), "the programs of a bundle"),
    "no_program": (network, "neither operations nor a network"),
    "network_that_is_none": (
        lambda f: (
            (f / "policy.onnx").write_bytes(b"no model"),
            edit(f, lambda d: d["programs"].update(plan={})),
            edit(f, lambda d: d["files"].update({"policy.onnx": hashlib.sha256(b"no model").hexdigest()})),
        ),
        "no network that onnxruntime can run",
    ),
}

_watched: list[tuple[str, str]] | None = None
ACTS = {"exec", "compile", "subprocess.Popen", "os.system", "os.exec", "os.remove", "os.rename", "socket.connect"}


def _hook(event: str, arguments: tuple) -> None:
    if _watched is not None and (event in ACTS or event == "open"):
        _watched.append((event, str(arguments[0]) if arguments else ""))


sys.addaudithook(_hook)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bundles_are_refused(tmp_path, name, require):
    """Python itself reports what is opened and run meanwhile: nothing outside the folder, and no code."""
    global _watched
    if name == "network_that_is_none":
        require("onnxruntime")
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
    monkeypatch.setitem(bundles.LIMITS, TENSORS, 50)
    with pytest.raises(Refused, match="50 are allowed"):
        read(folder)


def test_what_is_no_folder_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(Refused, match="is no bundle"):
            read(path)


def test_tensors_of_other_types_are_not_written():
    for x in (np.zeros(3), np.zeros((4, 4), np.float32)[:, ::2]):
        with pytest.raises(Refused, match="contiguous float32"):
            encode_tensors({"x": x})


def test_a_bundle_is_checked_before_it_is_written():
    with pytest.raises(Refused, match="the programs of a bundle"):
        by_hand(programs={})
    with pytest.raises(Refused, match="exceed horizon"):
        replace(by_hand().schema, execute=3)
