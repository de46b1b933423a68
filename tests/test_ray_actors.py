"""Actors on a cluster of Ray: one is killed, a node is lost, the learner is killed, and the run ends whole."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from asynchronous_lab import RUN, Telling, all_gone, begun, descendants, newest_step, telling, together, within
from burnish.finetune import refinement
from burnish.finetune.loops import OffPolicy, OffPolicyConfig
from burnish.finetune.methods.dsrl import DSRLConfig, latent_sac
from burnish.finetune.processes import asynchronous
from burnish.finetune.processes.actor_process import ActorConfig
from burnish.finetune.processes.ray_actors import RayActor, RayActors, packed
from burnish.finetune.refinement import FinetuneConfig
from burnish.policies.build import SmolVLALoadConfig, build_policy, describe, load_policy
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.execute import Execution
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.flow import FlowConfig
from burnish.policies.runs.checkpoint import number, save
from burnish.policies.runs.run import read_metrics

ACTOR = b"ray::RayActor"
SAID = r"acting process \d of 2 died \(Actor(Died|Unavailable)Error\); another one begins, \d+ decisions are kept"


def test_without_ray_it_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BurnishError, match=r"on=ray needs Ray; pip install 'burnish\[ray\]'"):
        RayActors()


def test_an_actor_on_ray_acts_line_by_line_on_a_core(monkeypatch):
    """Whatever the learner does on its GPU."""
    told: list[Any] = []
    monkeypatch.setattr(refinement, "RayActors", lambda address: SimpleNamespace(launch=None, share=None))
    monkeypatch.setattr(refinement, "Asynchronous", lambda loop, make, config, *more, **options: told.append(config))
    recorded = DSRLConfig(sac=latent_sac(execution=Execution.cudagraph))
    config = FinetuneConfig(method=recorded, worlds=4, processes=3, on="ray", device="cuda", total=10)
    refinement.in_processes(config, cast("Any", OffPolicy.__new__(OffPolicy)))
    (theirs,) = told
    assert theirs.method == DSRLConfig(sac=latent_sac()) and (theirs.device, theirs.threads) == ("cpu", 1)


def test_an_actor_reads_the_files_of_the_policy_that_the_learner_sent(tmp_path):
    """Of a run the policy alone, of a dataset what describes it; a name on a hub stays. Nothing of the learner's disk
    is there when the actor begins."""
    spec = PolicySpec(ObsSpec({"state": (3,)}), ActionSpec((-1.0,) * 2, (1.0,) * 2), horizon=2, execute=1)
    policy = build_policy(FlowConfig(), spec)
    child = {"config": describe(policy), "state": policy.state_dict()}
    replay = {"state": {"replay": torch.zeros(9)}, "config": {}}
    save(tmp_path / "run" / "checkpoints" / number(5), config={}, state={}, children={"policy": child, "rest": replay})
    for name in ("words.json", "set/meta/info.json", "set/meta/stats.json", "set/data/rows.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    named = {"path": f"{tmp_path}/run", "words": f"{tmp_path}/words.json", "stats": f"{tmp_path}/set", "base": "me/hub"}
    config = FinetuneConfig(policy=SmolVLALoadConfig(**named), method=DSRLConfig())
    sent = packed(config)
    assert not any("rest" in name for given in sent.values() for name in given.contents)
    for left in ("run", "set"):
        shutil.rmtree(tmp_path / left)
    found: list[Any] = []

    def make(config: FinetuneConfig, seed: int) -> Any:
        chosen = config.policy
        assert chosen is not None
        found.extend([load_policy(chosen.path)[0], Path(chosen.words).read_text(), chosen.base])
        found.append({x.name for x in Path(chosen.stats).rglob("*.*")})
        raise BurnishError("enough")

    actor = RayActor([])
    actor.play("/nowhere", make, config, ActorConfig(seed=1, warm=0, ahead=0, rows=None), (), sent)
    theirs, *rest = found
    assert all(torch.equal(x, theirs.state_dict()[name]) for name, x in policy.state_dict().items())
    assert rest == ["words.json", "me/hub", {"info.json", "stats.json"}]
    assert b"enough" in actor.fetch()[0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without cores, and two nodes with two cores each."""
    ray = pytest.importorskip("ray")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    node = {"object_store_memory": 10**8, "include_dashboard": False}
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **node})
    try:
        made.nodes = [made.add_node(num_cpus=2, **node) for _ in range(2)]
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def acting_under(pid: int) -> list[int]:
    """The processes of our actors among the descendants of ``pid``."""
    found = []
    for child in descendants(pid):
        with suppress(OSError):  # it has ended meanwhile
            found += [child] * Path(f"/proc/{child}/cmdline").read_bytes().startswith(ACTOR)
    return found


@pytest.mark.rotating(3, case=0)
def test_an_actor_that_is_killed_on_ray_is_begun_anew(cluster, monkeypatch):
    monkeypatch.setattr(asynchronous, "PATIENCE_S", 300.0)  # on a busy machine one may begin long after the other
    config = Telling(OffPolicyConfig(capacity=4000, warmup=8, updates_per_decision=0.75, batch=4), 0.002, actors=2)
    actors, told = RayActors(cluster.address), []
    options: dict[str, Any] = {"actors": 2, "launch": actors.launch, "share": actors.share, "tell": told.append}
    both = together(telling, config, **options)
    with within(300):
        for _ in range(20):
            both.iterate()
        mine = acting_under(os.getpid())
        assert len(mine) == 2 and both.loop.statistics.decisions == 80 and both.updates == int(0.75 * (80 - 8))
        os.kill(mine[0], signal.SIGKILL)
        while both.deaths < 1 or not all(slot.handles[-1].rows for slot in both._slots):
            both.iterate()
        assert mine[0] not in acting_under(os.getpid()) and len(acting_under(os.getpid())) == 2
        assert both.updates == int(0.75 * (both.loop.statistics.decisions - 8))
        assert both.loop.statistics.decisions == int(both.replay.learnable().sum()) > 80
        heard = both.replay.latest()["heard"]
        both.close()
        assert all_gone(acting_under(os.getpid()), 10)
    assert len(told) == 1 and re.search(SAID, told[0]), told
    assert (heard.max(0).values > 0).all(), "both hear of new weights"


@pytest.mark.rotating(3, case=1)
def test_an_accident_on_ray_is_told_with_its_reason(cluster):
    def tell(line: str) -> None:
        raise InterruptedError(line)

    actors = RayActors(cluster.address)
    both = together(telling, Telling(OffPolicyConfig(), trouble="bug"), launch=actors.launch, tell=tell)
    with within(300), pytest.raises(InterruptedError, match=r"process died \(RuntimeError: an accident\); another"):
        both.iterate()
    both.close()


LONG = ["worlds=6", "total=6000", "log_every=600", "save_every=240", "processes=3"]  # 1000 rows


@pytest.mark.rotating(3, case=2)
def test_a_run_on_ray_survives_an_actor_and_a_node(cluster, tmp_path, capsys):
    """First an actor is killed, then the node of one is lost, while the run goes on."""

    def raylet(node: Any) -> int:
        return node.all_processes["raylet"][0].process.pid

    lost = []

    def kill() -> None:
        for saved in (100, 500):
            while newest_step(tmp_path / "run") < saved or not acting_under(os.getpid()):
                time.sleep(0.01)
            if saved == 100:
                lost.append(acting_under(os.getpid())[0])
                os.kill(lost[0], signal.SIGKILL)
            else:
                lost.append(next(node for node in cluster.nodes if acting_under(raylet(node))))
                cluster.remove_node(lost[1], allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with within(300):
        assert main([*RUN, *LONG, f"on=ray:{cluster.address}", f"out={tmp_path}/run"]) == 0
    killer.join(timeout=10)
    assert len(lost) == 2, "somebody was not killed"
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("acting process")]
    last = read_metrics(tmp_path / "run")[-1]
    assert len(said) == last["asynchronous/deaths"] >= 2 and all(re.search(SAID, line) for line in said)
    assert last["step"] == 1000 and 6000 <= last["decisions"] < 6006
    assert last["asynchronous/updates_per_decision"] == pytest.approx(0.5, abs=1 / 5958)  # one may be owed


@pytest.mark.rotating(3, case=3)
def test_a_learner_that_is_killed_leaves_no_actor_on_ray_and_the_run_is_resumed(cluster, tmp_path):
    words = [*LONG, "total=1200", f"on=ray:{cluster.address}"]
    process, _, saved = begun(tmp_path / "run", *words)
    mine = acting_under(os.getpid())
    assert len(mine) == 2
    process.kill()
    process.wait(timeout=10)
    assert all_gone(mine, 20), "somebody goes on acting"
    with within(200):
        assert main([*RUN, *words, f"out={tmp_path}/run", "resume=true"]) == 0
    lines = read_metrics(tmp_path / "run")
    assert 0 < saved < 200 and lines[-1]["step"] == 200
    assert lines[-1]["decisions"] == 1200 and lines[-1]["asynchronous/updates_per_decision"] == 0.5
