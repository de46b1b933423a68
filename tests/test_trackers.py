"""wandb, trackio and rerun: what they do with the numbers is read back from what the real packages wrote.

The two that may be missing have strict stand-ins besides: exactly the calls that are made, with the signatures of the
real ones, which are compared with the real ones where these are installed.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import struct
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tracking_lab import train

# ---- wandb ----


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No key, no settings of the user, and no network."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def sittings(out: Path, steps: list[list[int]]) -> list[list[Any]]:
    """The records of each .wandb file, once these steps are in them: wandb's own process writes them, and on a busy
    machine it is not ready when the run is."""
    for _ in range(100):
        found = records_in(out)
        told = [[row["step"] for row in logged(records)] for records in found]
        if told == steps:
            return found
        time.sleep(0.2)
    raise AssertionError(f"{told} instead of {steps}")


def records_in(out: Path) -> list[list[Any]]:
    """A log of LevelDB (blocks of 32 KiB, crc, length, kind) of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[import-not-found]

    found = []
    for path in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        data, at, records, piece = path.read_bytes(), 7, [], b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            piece, at = piece + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # whole, or the last part
                records, piece = [*records, Record.FromString(piece)], b""
        found.append(records)
    return found


def logged(records: list[Any]) -> list[dict[str, float]]:
    """The lines that were logged, without what wandb adds."""
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def test_wandb_offline_holds_the_numbers_and_knows_the_run_again(tmp_path, nowhere, require, caplog):
    require("wandb")
    out = tmp_path / "run"
    train(out, stop_at=3, trackers=("wandb",), method={"ppo": {"clip": 0.2}})
    train(out, trackers=("wandb",), method={"ppo": {"clip": 0.2}})
    assert "wandb records offline, for `wandb sync` to upload: " in caplog.text
    assert "switched off" not in caplog.text
    parts = sittings(out, [[1, 2, 3, 4], [5, 6]])
    rows = [row for records in parts for row in logged(records)]
    assert [row["loss"] for row in rows] == [1 / step for step in range(1, 7)]
    identity = json.loads((out / "tracking.json").read_text())
    runs = [r.run for records in parts for r in records if r.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.display_name, run.project) for run in runs} == {
        (identity["id"], identity["name"], "burnish")
    }
    settings = {item.key: json.loads(item.value_json) for item in runs[0].config.update if item.key}
    assert settings["method"] == {"ppo": {"clip": 0.2}}


class StrictWandb(ModuleType):
    """What is said to it, and what it says of the network."""

    def __init__(self, answer: Any) -> None:
        super().__init__("wandb")
        self.answer, self.asked, self.started = answer, 0, []
        self.Settings = lambda *, console, finish_timeout: SimpleNamespace(console=console)

    def login(self, *, prompt: bool, verify: bool) -> bool:
        self.asked += 1
        assert verify and not prompt, "a training must not wait for somebody at the keyboard"
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def init(self, *, id, name, dir, config, project, mode, resume, reinit, settings):
        self.started.append(SimpleNamespace(id=id, project=project, mode=mode, resume=resume, reinit=reinit))
        return SimpleNamespace(
            define_metric=lambda name, *, step_metric=None: None, log=lambda row: None, finish=lambda: None
        )


@pytest.mark.parametrize(
    ("answer", "environment", "mode", "why"),
    [
        (True, {}, None, None),
        (False, {}, "offline", "there is no key"),
        (OSError("no route to host\nmore"), {}, "offline", "no route to host"),
        (OSError("never asked"), {"WANDB_MODE": "offline"}, None, None),  # which wandb reads itself
    ],
)
def test_without_key_or_network_wandb_is_told_to_stay_offline(
    tmp_path, nowhere, monkeypatch, caplog, answer, environment, mode, why
):
    wandb = StrictWandb(answer)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_PROJECT", "insertion")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    train(tmp_path / "run", trackers=("wandb",))
    (started,) = wandb.started
    assert (started.mode, started.project, started.resume, started.reinit) == (
        mode,
        "insertion",
        "allow",
        "create_new",
    )
    assert wandb.asked == (0 if environment else 1)
    assert len(caplog.messages) == (why is not None) and (why or "") in caplog.text and "more" not in caplog.text


# ---- trackio ----


def strict_trackio(said: list[Any]) -> ModuleType:
    module = ModuleType("trackio")

    def init(project, name=None, config=None, resume="never", embed=True):
        assert resume == "allow" and embed is False
        said.append(("init", project, name, config))

        def log(metrics, step=None):
            said.append(("log", step, metrics["loss"]))

        return SimpleNamespace(log=log)

    vars(module).update(init=init, finish=lambda: said.append(("finish",)))
    return module


def test_trackio_is_told_the_same_name_in_every_sitting(tmp_path, monkeypatch):
    said: list[Any] = []
    monkeypatch.setitem(sys.modules, "trackio", strict_trackio(said))
    train(tmp_path / "run", 2, trackers=("trackio",))
    train(tmp_path / "run", 4, trackers=("trackio",))
    name = json.loads((tmp_path / "run/tracking.json").read_text())["name"]
    assert said == [
        *(("init", "burnish", name, {"total": 2}), ("log", 1, 1.0), ("log", 2, 1 / 2), ("finish",)),
        *(("init", "burnish", name, {"total": 4}), ("log", 3, 1 / 3), ("log", 4, 1 / 4), ("finish",)),
    ]


def test_the_real_trackio_holds_the_numbers_of_both_sittings(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio: Any = pytest.importorskip("trackio")
    agree(strict_trackio([]).init, trackio.init)
    train(tmp_path / "run", stop_at=3, trackers=("trackio",))
    train(tmp_path / "run", trackers=("trackio",))
    name = json.loads((tmp_path / "run/tracking.json").read_text())["name"]
    (run,) = trackio.Api().runs("burnish")
    assert run.name == name and run.config["total"] == 6
    rows = importlib.import_module("trackio.sqlite_storage").SQLiteStorage.get_logs("burnish", name)
    assert [(row["step"], row["loss"]) for row in rows] == [(step, 1 / step) for step in range(1, 7)]


# ---- rerun ----


class StrictRecording:
    def __init__(self, application_id, *, recording_id=None):
        self.said = [(application_id, recording_id)]

    def save(self, path):
        Path(path).touch()
        self.said.append(Path(path).name)

    def set_time(self, timeline, *, sequence=None):
        self.said.append((timeline, sequence))

    def log(self, entity_path, entity, *extra, static=False):
        self.said.append(("/".join(entity_path) if isinstance(entity_path, list) else entity_path, entity, static))

    def flush(self):
        self.said.append("flush")

    def disconnect(self):
        self.said.append("disconnect")


def test_rerun_writes_one_file_for_each_sitting_of_one_recording(tmp_path, monkeypatch):
    made: list[StrictRecording] = []
    module = ModuleType("rerun")
    names = {
        "RecordingStream": lambda *args, **options: made.append(StrictRecording(*args, **options)) or made[-1],
        "Scalars": lambda scalars: ("scalar", scalars),
        "TextDocument": lambda text: ("text", text),
    }
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "rerun", module)
    train(tmp_path / "run", 2, trackers=("rerun",))
    train(tmp_path / "run", 4, trackers=("rerun",))
    identity = json.loads((tmp_path / "run/tracking.json").read_text())["id"]
    assert sorted(path.name for path in (tmp_path / "run/rerun").iterdir()) == ["00000000.rrd", "00000002.rrd"]
    for recording, start in zip(made, (0, 2), strict=True):
        (application, key), file, settings, *rows, flush, end = recording.said
        assert (application, key, file) == ("burnish", identity, f"0000000{start}.rrd")
        assert settings == ("config", ("text", f"total: {start + 2}\n"), True)
        assert (flush, end) == ("flush", "disconnect")
        assert [row for row in rows if row[0] in ("step", "loss")] == [
            row for step in (start + 1, start + 2) for row in (("step", step), ("loss", ("scalar", 1 / step), False))
        ]
        assert "eval/success" in [row[0] for row in rows]


def test_the_real_rerun_files_hold_the_numbers(tmp_path):
    rerun: Any = pytest.importorskip("rerun")
    for name in ("__init__", "save", "set_time", "log", "flush", "disconnect"):
        agree(getattr(StrictRecording, name), getattr(rerun.RecordingStream, name))
    train(tmp_path / "run", stop_at=3, trackers=("rerun",))
    train(tmp_path / "run", trackers=("rerun",))
    values = {}
    for path in sorted((tmp_path / "run/rerun").iterdir()):
        values |= scalars(path, "/loss")
    assert values == {step: 1 / step for step in range(1, 7)}


def scalars(path: Path, entity: str) -> dict[int, float]:
    """Step -> value."""
    chunks = importlib.import_module("rerun.chunk").RrdReader(str(path)).stream().to_chunks()
    tables = [chunk.to_record_batch() for chunk in chunks if chunk.entity_path == entity]
    columns = [zip(table["step"].to_pylist(), table["Scalars:scalars"].to_pylist(), strict=True) for table in tables]
    return {step: value for column in columns for step, (value,) in column}


def agree(ours: Any, real: Any) -> None:
    """Whatever our stand-in is called with, the real one takes by the same name or place."""
    theirs = inspect.signature(real).parameters
    for position, (name, parameter) in enumerate(inspect.signature(ours).parameters.items()):
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            assert name in theirs, f"{real} takes no {name}"
        else:
            assert position < len(theirs), f"{real} takes fewer arguments"
