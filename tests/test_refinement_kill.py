"""`burnish finetune` as a process that is killed by kill -9 in mid-run: resumed, it is bit-identical from its last
checkpoint on, in physics with contacts. One method that learns from each rollout, one that remembers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burnish.policies.cli.cli import main
from burnish.policies.runs.run import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.sim, pytest.mark.rotating(2)]

CODE = "import sys, torch; torch.set_num_threads(1); from burnish.policies.cli.cli import main; sys.exit(main())"
SMALL = ["worlds=4", "eval.episodes=4", "eval.worlds=4", "eval.confirm=4", "policy.steps=2"]
METHODS = {
    "reinflow": ["total=2400", "save_every=160", "log_every=80", "method.loop.decisions_per_update=10"],
    "dsrl": [
        *("total=2000", "save_every=100", "log_every=20", "method.loop.warmup=40", "method.loop.batch=32"),
        *("method.loop.updates_per_decision=0.5", "method.sac.agent.hidden=[32]", "method.sac.critic.hidden=[32]"),
    ],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    assert main(["collect", "env=insert", "expert=clumsy", "episodes=8", f"out={folder}/data"]) == 0
    words = ["policy.net.mlp.hidden=[32]", "train.steps=50", "eval.episodes=4", "experiment=desk"]
    assert main(["pretrain", "policy=flow", *words, f"data={folder}/data", f"out={folder}/base"]) == 0
    return folder / "base"


def checkpoints(run: Path) -> dict[str, dict[str, bytes]]:
    """What each of them holds, byte by byte; the manifest has the date in it."""
    return {
        folder.name: {
            file.relative_to(folder).as_posix(): file.read_bytes()
            for file in sorted(folder.rglob("*"))
            if file.is_file() and file.name not in ("manifest.json", "config.yaml")
        }
        for folder in sorted((run / "checkpoints").iterdir())
    }


def metrics(run: Path) -> list[dict[str, str]]:
    return [{k: repr(v) for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_kill_9_in_mid_run_loses_nothing_but_time(method, base, tmp_path):
    words = ["finetune", f"policy.path={base}", f"method={method}", *SMALL, *METHODS[method]]
    command = [sys.executable, "-c", CODE, *words]
    subprocess.run([*command, f"out={tmp_path}/whole"], check=True, capture_output=True)
    whole = checkpoints(tmp_path / "whole")

    killed = [*command, f"out={tmp_path}/killed", "resume=true"]
    process = subprocess.Popen(killed, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 180
    while len(list((tmp_path / "killed/checkpoints").glob("0*"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    last = max(whole)
    assert last not in checkpoints(tmp_path / "killed")

    subprocess.run(killed, check=True, capture_output=True)
    assert checkpoints(tmp_path / "killed")[last] == whole[last]
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
