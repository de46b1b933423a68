"""`burnish deploy ... chunks=...`: inference while the arm moves. Each mode: tests/test_realtime_chunking.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from burnish.policies.cli.cli import main

pytestmark = pytest.mark.real_time

POLICY = Path(__file__).resolve().parents[1] / "benchmarks" / "refined" / "insert"
EPISODES = 2


def deploy(*words: str) -> int:
    return main(["deploy", f"policy.path={POLICY}", "robot=twin", f"episodes={EPISODES}", "compare=false", *words])


@pytest.fixture(autouse=True)
def policy() -> None:
    if not POLICY.is_dir():
        pytest.skip("benchmarks/ is not in this copy")


def played(folder: Path, *words: str) -> dict:
    assert deploy("realtime=false", f"out={folder}", *words) == 0
    return json.loads((folder / "deploy.json").read_text())


def test_a_queue_without_latency_plays_what_is_played_without_it(tmp_path: Path):
    plain, queued = played(tmp_path / "plain"), played(tmp_path / "queued", "chunks=queue")
    assert plain["robot"] == queued["robot"]
    assert "chunks" not in plain and queued["chunks"]["late"] == queued["chunks"]["waited"] == 0


def test_inference_takes_its_time_and_is_reported(tmp_path: Path):
    plain = played(tmp_path / "plain", "chunks=queue")
    slow = played(tmp_path / "slow", "chunks=queue", "latency.mean_s=0.06")
    again = played(tmp_path / "again", "chunks=queue", "latency.mean_s=0.06")
    assert slow["robot"] == again["robot"] != plain["robot"]
    assert slow["chunks"]["latency_ms_p50"] == pytest.approx(60) and plain["chunks"]["latency_ms_p50"] == 0


def test_an_answer_in_real_time_can_be_guided_to_the_old_chunk(tmp_path: Path):
    """A refined policy: what steers the flow's noise passes the prefix on."""
    words = ("chunks=realtime", "chunks.reach=8", "chunks.rehearsals=6", "latency.mean_s=0.06")
    put, guided = (played(tmp_path / hold, *words, f"chunks.hold={hold}") for hold in ("inpaint", "guide"))
    assert put["robot"] != guided["robot"] and guided["chunks"]["answers"] > EPISODES


def test_a_process_of_its_own_infers_in_real_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Only that it comes to an end, with answers: how well a busy machine keeps time is not asked here."""
    assert deploy("chunks=queue", f"out={tmp_path}", "safety.silent_ramp_s=30", "chunks.patience_s=20") == 0
    found = json.loads((tmp_path / "deploy.json").read_text())["chunks"]
    assert found["answers"] >= EPISODES and found["latency_ms_p50"] > 0
    assert "inference beside the robot takes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["latency.mean_s=0.1", "realtime=false"], "give chunks= and realtime=false"),
        (["chunks=queue", "latency.mean_s=0.1"], "give chunks= and realtime=false"),
        (["chunks=queue", "chunks.patience_s=2"], "must be below safety.silent_ramp_s"),
        (["chunks=queue", "chunks.share=2"], "chunks.share=2.0 must lie in (0, 1]"),
        (["chunks=queue", "chunks.hold=guide"], "chunks.hold=guide is for realtime alone"),
        (["chunks=queue", "dry_run=true"], "nothing is to be moved here"),
        (["chunks=queue", "realtime=false", "latency.mean_s=5"], "would be over before the next one is there"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert deploy(*words) == 2
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said
