"""`burnish pretrain` as a process: Ctrl-C saves and leaves, kill -9 loses only what came after the last checkpoint, and
either way the resumed run ends like one that was never touched: same policy, same metrics, timings excluded."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import torch

from burnish.policies.cli.cli import main
from training_lab import ending

pytestmark = pytest.mark.slow

CODE = "import sys, torch; torch.set_num_threads(1); from burnish.policies.cli.cli import main; sys.exit(main())"
WORDS = ["policy=flow", "policy.net.mlp.hidden=[32]", "train.steps=1500", "train.save_every=100", "train.log_every=10"]
WORDS += ["train.batch=32", "eval.episodes=4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "set"
    assert main(["collect", "env=two_mode", "episodes=20", f"out={out}"]) == 0
    return out


@pytest.fixture(scope="module")
def whole(data):
    assert main(["pretrain", *WORDS, f"data={data}", f"out={data.parent}/whole"]) == 0
    return ending(data.parent / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupted_process_resumes_to_the_same_end(sent, status, data, whole, tmp_path):
    command = [sys.executable, "-c", CODE, "pretrain", *WORDS, f"data={data}", f"out={tmp_path}/run", "resume=true"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run/checkpoints/00000300").exists():
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be interrupted"
        time.sleep(0.01)
    process.send_signal(sent)
    assert process.wait(timeout=60) == status
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("0*"))
    assert 300 <= int(saved[-1]) < 1500
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    metrics, weights = ending(tmp_path / "run")
    assert metrics == whole[0]
    assert torch.equal(weights, whole[1])
