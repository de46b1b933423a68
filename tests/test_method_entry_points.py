"""Methods and models of rewards of other packages: one file each, outside the tree, found by their entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from burnish.finetune.method import Phase
from burnish.finetune.table import GROUP, METHODS, Settings, Table
from burnish.policies.runs.run import read_metrics

HERE = Path(__file__).parent
ENTRIES = f"""[{GROUP}]
acme_recurrent = acme_recurrent:METHOD
acme_broken = acme_recurrent:MISSING
acme_number = acme_recurrent:NUMBER
acme_on_policy = acme_recurrent:ON_POLICY
iql = acme_recurrent:METHOD

[burnish.rewards]
acme_near = acme_rewards:near
acme_wrong = acme_rewards:wrong
acme_nothing = acme_rewards:nothing
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """An installed distribution, as pip would leave it."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    for name in ("acme_recurrent", "acme_rewards"):
        (folder / f"{name}.py").write_text((HERE / "acme" / f"{name}.py").read_text(encoding="utf-8"))
    return folder


def burnish(site, *words):
    """A verb in a process of its own, which sees the package."""
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    code = "import sys; from burnish.policies.cli.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)


FEW = ["env=point_reach", "env.max_steps=12", "worlds=4", "total=64", "log_every=8", "save_every=32"]
FEW += ["eval.episodes=2", "eval.worlds=2", "eval.confirm=2"]


def test_a_recurrent_learner_of_another_package_is_trained_by_its_name(site, tmp_path):
    words = ["finetune", "method=acme_recurrent", *FEW, "method.loop.warmup=16", "method.loop.batch=8"]
    whole = burnish(site, *words, f"out={tmp_path}/whole")
    assert whole.returncode == 0, whole.stderr
    assert "method=acme_broken (acme_recurrent:MISSING) is left out" in whole.stderr
    assert "method=acme_number (acme_recurrent:NUMBER) is left out" in whole.stderr
    assert "ON_POLICY) is left out: has no OnPolicyConfig as loop, but its row says LoopKind.on_policy" in whole.stderr
    assert "method=iql (acme_recurrent:METHOD) is left out: has the name of another method" in whole.stderr
    logged = [line for line in read_metrics(tmp_path / "whole") if "memory/oldest" in line]
    assert logged and max(line["memory/oldest"] for line in logged) == 12  # a memory lives as long as an episode
    offered = next(x for x in burnish(site, "finetune", "--help").stdout.splitlines() if x.startswith("  method="))
    assert offered.endswith("|acme_recurrent")
    (last,) = sorted((tmp_path / "whole/checkpoints").iterdir())[-1:]
    again = burnish(site, *words, f"out={tmp_path}/whole", "resume=true")
    assert again.returncode == 0 and "nothing is trained" in again.stdout and last.exists()
    refused = burnish(site, "finetune", "method=acme_recurrent", *FEW, "method.hidden=0")
    assert refused.returncode == 2 and "hidden=0 must be at least 1" in refused.stderr


def test_its_memory_is_what_it_learns_with(site, monkeypatch):
    """A cue is shown at the first tick and asked for at all others. Without a memory the error of an answer is 1."""
    monkeypatch.syspath_prepend(site)
    acme = import_module("acme_recurrent")

    monkeypatch.setattr("burnish.finetune.table.METHODS._installed", None)
    errors = {memory: acme.recall_error(METHODS["acme_recurrent"], remembers=memory) for memory in (True, False)}
    # Recorded on 5 seeds: at most 0.002 with the memory, 0.99 to 1.02 where each tick is told to be a beginning.
    assert errors[True] < 0.3 and errors[False] > 0.8, errors


@pytest.mark.slow
def test_a_model_of_rewards_takes_the_place_of_the_worlds(site, tmp_path):
    data = ["collect", "env=point_reach", "env.max_steps=12", "episodes=6", f"out={tmp_path}/data"]
    assert burnish(site, *data).returncode == 0
    nets = ["method.critic.hidden=[8]", "method.agent.hidden=[8]", "method.loop.warmup=16", "method.loop.batch=8"]
    words = ["finetune", "method=td3_bc", *FEW, *nets, f"data={tmp_path}/data", "pretrain_updates=50"]
    ran = burnish(site, *words, "rewards.model=acme_near", f"out={tmp_path}/run")
    assert ran.returncode == 0, ran.stderr
    rewards = [line["episode/reward"] for line in read_metrics(tmp_path / "run") if "episode/reward" in line]
    assert rewards and all(100 <= x <= 100 * 12 for x in rewards)  # the model pays 100 a tick; the world less than 0
    for name, sentence in (
        ("acme_wrong", "rewards.model=acme_wrong answered with shape (12, 1)"),
        ("acme_nothing", "which is no model of rewards"),
        ("acme_nea", "did you mean 'acme_near'"),
    ):
        refused = burnish(site, *words, f"rewards.model={name}", f"out={tmp_path}/{name}")
        assert refused.returncode == 2 and sentence in refused.stderr, refused.stderr


def test_a_phase_offers_its_methods_alone():
    table = Table(METHODS.ours)
    table._installed = {}
    assert set(Settings(Phase.offline, table)) == {"iql", "cql", "td3_bc", "fql", "q_chunking", "recap"}
    assert "dppo" in Settings(Phase.online, table) and "dppo" not in Settings(Phase.offline, table)
