"""A comparison beyond one process: as tasks of a Ray cluster, of which a node dies, and as an array job of SLURM. Its
numbers are those of one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from verb_lab import refused

from burnish.finetune.compare.slurm import array_script, waiting_runs
from burnish.policies.cli.cli import main
from burnish.policies.cli.executors import Processes, executor
from burnish.policies.cli.storage import Storage
from burnish.policies.core import files
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.threads import usable_cores
from burnish.policies.runs.interrupt import Stop

# ---- Ray, which not everybody has: a stand-in that answers as told ----


class Cancelled(Exception):
    """As `ray.exceptions.TaskCancelledError`."""


class Lost(Exception):
    """As `ray.exceptions.RayError`."""


def stand_in(answer: Any) -> Any:
    """``answer`` is given once a stop was passed on, or at once if it is no Cancelled."""
    module: Any = ModuleType("ray")
    module.asked, module.cancelled = {}, []

    def remote(**options):
        module.asked |= options
        return lambda play: SimpleNamespace(remote=lambda *given: module.asked.update(given=given) or "task")

    def get(task):
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(tasks, timeout):
        over = bool(module.cancelled) or not isinstance(answer, Cancelled)
        return (tasks, []) if over else ([], tasks)

    module.__dict__.update(remote=remote, get=get, wait=wait, cancel=module.cancelled.append)
    module.__dict__.update(is_initialized=lambda: True)
    module.exceptions = SimpleNamespace(TaskCancelledError=Cancelled, RayError=Lost)
    return module


def test_a_task_has_its_resources_and_may_lose_nodes(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", ray := stand_in(3))
    monkeypatch.setenv("BURNISH_IMPORT", "json")
    runs = executor("ray", "cuda")
    assert runs.play(["evaluate"], tmp_path / "log", Stop()) == 3
    assert ray.asked["num_cpus"] == 1 and ray.asked["num_gpus"] == 1 and ray.asked["max_retries"] > 0
    assert ray.asked["max_calls"] == 1, "a task is a process of its own"
    words, log, folder, variables, _ = ray.asked["given"]
    assert (words, log, folder) == (["evaluate"], str(tmp_path / "log"), os.getcwd())
    assert variables == {"BURNISH_IMPORT": variables["BURNISH_IMPORT"], "BURNISH_CORES": "1"}
    assert "json" in variables["BURNISH_IMPORT"].split(",")
    assert runs.jobs(7) == 7
    executor("ray")
    assert ray.asked["num_gpus"] == 0
    executor("ray", "cuda", cores=3, gpus=0.25)
    assert (ray.asked["num_cpus"], ray.asked["num_gpus"]) == (3, 0.25)


def test_a_run_keeps_to_its_cores(monkeypatch, tmp_path):
    monkeypatch.setattr("burnish.policies.core.threads.os.sched_getaffinity", lambda pid: range(7))
    for given, found in (("2", 2), ("9", 7), ("0", 1), ("", 7), ("many", 7)):
        monkeypatch.setenv("BURNISH_CORES", given)
        assert usable_cores() == found
    assert [executor("local", cores=cores).jobs(9) for cores in (0, 1, 3, 9)] == [7, 7, 2, 1]
    assert executor("local", cores=1).play(["doctor"], tmp_path / "log", Stop()) in (0, 1)
    assert "1 usable" in (tmp_path / "log").read_text()


def test_a_stop_is_passed_on_and_a_loss_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", ray := stand_in(Cancelled()))
    assert executor("ray").play(["finetune"], tmp_path / "log", Stop(requested=True)) == 130
    assert ray.cancelled == ["task"]
    monkeypatch.setitem(sys.modules, "ray", stand_in(Lost("its node died")))
    with pytest.raises(BurnishError, match="Ray has lost `burnish finetune`: its node died"):
        executor("ray").play(["finetune"], tmp_path / "log", Stop())


def test_bad_places_are_one_sentence_before_anything_is_played(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BurnishError, match=r"on=ray needs Ray; pip install 'burnish\[ray\]'"):
        executor("ray:10.0.0.1:6379")
    assert isinstance(executor("local"), Processes)
    words = ["compare", "base=x", "methods=dsrl", f"out={tmp_path}/out"]
    for place in ("moon", "rayon", "local:x"):
        assert f"on={place} is no place for runs" in refused(capsys, *words, f"on={place}")
    assert not (tmp_path / "out").exists()


# ---- SLURM ----


def test_free_baselines_wait_for_a_run_and_failures_for_nobody(tmp_path):
    for name in ("evaluations", "runs"):
        (tmp_path / name).mkdir()

    def waiting():
        return waiting_runs(tmp_path, ["base", "a-0", "a-1"], ["iql-0"])

    assert waiting() == ["base", "a-0", "a-1"]
    (tmp_path / "evaluations/base.json").touch()
    (tmp_path / "runs/a-0.failed").touch()
    assert waiting() == ["a-1"]
    (tmp_path / "runs/a-1.failed").touch()
    assert waiting() == [], "nothing says how long a free baseline is to be trained"
    (tmp_path / "evaluations/a-1.json").touch()
    assert waiting() == ["iql-0"]
    (tmp_path / "evaluations/iql-0.json").touch()
    assert waiting() == []


def test_a_script_is_safe_with_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["base=a b", "methods=$(touch planted)"]
    text = array_script(["dsrl-0", "$(touch planted)"], words, tmp_path, gpu=True)
    assert "#SBATCH --array=0-1\n" in text and "#SBATCH --gres=gpu:1\n" in text
    shown = text.replace("exec ", 'printf "%s\\n" ')
    found = subprocess.run(["bash", "-c", shown], env={"SLURM_ARRAY_TASK_ID": "1"}, capture_output=True, text=True)
    assert found.stdout.splitlines()[-3:] == [*words, "only=$(touch planted)"] and not (tmp_path / "planted").exists()
    assert "gres" not in array_script(["dsrl-0"], words, tmp_path, gpu=False)
    fewer = array_script(["dsrl-0", "dsrl-1"], words, tmp_path, gpu=False, jobs=2, cores=4)
    assert (
        "#SBATCH --array=0-1%2\n" in fewer
        and "--cpus-per-task=4\n" in fewer
        and 'BURNISH_CORES="${SLURM_CPUS_PER_TASK:-4}"\n' in fewer
    )


def sbatch_words(line: str) -> list[str]:
    """The arguments in a line of a script, as `sbatch` finds them: quotes group, a backslash counts in them too, and
    what follows a # is a comment."""
    found, word, quote, place = [], "", "", 0
    while place < len(line):
        sign = line[place]
        if sign == "\\":
            place += 1
            word += line[place]
        elif sign == quote:
            quote = ""
        elif not quote and sign in "'\"":
            quote = sign
        elif not quote and (sign == "#" or sign.isspace()):
            found, word = [*found, word], ""
            if sign == "#":
                break
        else:
            word += sign
        place += 1
    return [x for x in [*found, word] if x]


@pytest.mark.parametrize("name", ["plain", "a b", "#1", "it's", 'say "so"', "a\\b", "50%a"])
def test_sbatch_finds_the_folder_of_a_script(tmp_path, name):
    lines = array_script(["dsrl-0"], ["base=x"], tmp_path / name, gpu=False).splitlines()
    line = next(x for x in lines if "--output" in x)
    wanted = str(tmp_path / name).replace("%", "%%")
    assert sbatch_words(line.removeprefix("#SBATCH ")) == [f"--output={wanted}/slurm-%a.log"]


def test_a_line_break_in_a_folder_is_no_command(tmp_path):
    with pytest.raises(BurnishError, match="has a line break"):
        array_script(["dsrl-0"], ["base=x"], tmp_path / "a\ntouch planted #", gpu=False)


@pytest.mark.parametrize("here", [True, False])
def test_a_task_imports_from_the_places_of_who_wrote_its_script(tmp_path, monkeypatch, here):
    (tmp_path / "acme_here.py").touch()
    monkeypatch.setenv("BURNISH_IMPORT", "acme_here")
    if here:
        monkeypatch.syspath_prepend(tmp_path)
    text = array_script(["dsrl-0"], ["base=none"], tmp_path, gpu=False)
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "0"}
    said = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True).stderr
    assert "burnish compare: " in said and ("acme_here, which cannot be imported" in said) is not here, said


# ---- the whole ----

STEADY = """defaults: [override /method: residual_ppo]
worlds: 4
method: {loop: {decisions_per_update: 10}, agent: {hidden: [8]}}
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("compared")
    assert main(["collect", "env=point_reach", "episodes=6", f"out={folder}/data"]) == 0
    small = ["policy.net.mlp.hidden=[16]", "policy.steps=2", "train.steps=30", "eval.episodes=4", "chunk.execute=4"]
    assert main(["pretrain", "policy=flow", *small, f"data={folder}/data", f"out={folder}/base"]) == 0
    (folder / "steady.yaml").write_text(STEADY)
    found = [
        "compare",
        f"base={folder}/base",
        f"methods={folder}/steady.yaml",
        "seeds=2",
        "episodes=6",
        "evaluations=2",
    ]
    return [*found, "evaluation_episodes=4", "confirm_episodes=4", "worlds=4", "videos=0"]


def runs_of(out: Path) -> dict[int, Any]:
    """All that a run has learnt and shown, by its seed; without its seconds."""
    found = json.loads((out / "compare.json").read_text())
    assert [row["status"] for row in found["runs"]] == ["finished", "finished"], found["runs"]
    rows = {
        row["seed"]: (row["final"], row["difference"], [point[2:] for point in row["curve"]]) for row in found["runs"]
    }
    ends = {seed: json.loads((out / f"evaluations/steady-{seed}.json").read_text()) for seed in rows}
    return {seed: (rows[seed], ends[seed]["returns"]) for seed in rows}


@pytest.mark.parametrize("status", [0, 2])
def test_nodes_that_share_no_folders_are_noticed_at_once(words, tmp_path, monkeypatch, capsys, status):
    monkeypatch.setitem(sys.modules, "ray", stand_in(status))
    said = refused(capsys, *words, "budget=160", "on=ray", f"out={tmp_path}/out")
    assert "is not here; nodes must share the folder of out=..." in said


def test_a_storage_does_not_mix_with_what_is_here(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", stand_in(0))
    monkeypatch.chdir(tmp_path)
    files.write_folder(tmp_path / "made", {"config.yaml": "{}"})
    storage = Storage(f"file://{tmp_path}/kept")
    command = [*words, "budget=160", "on=ray", f"storage=file://{tmp_path}/kept", "out=far"]
    storage.send(tmp_path / "made", "far/runs/steady-0")
    assert "holds runs of far already; resume=true continues them" in refused(capsys, *command)
    files.write_folder(tmp_path / "other", {"mine": "kept"})
    storage.send(tmp_path / "made", "other")
    said = refused(capsys, *command, "out=other", "resume=true")
    assert "is not empty and holds no comparison" in said and (tmp_path / "other/mine").read_text() == "kept"
    files.replace(tmp_path / "made/.lock", "")  # a comparison sends that too
    storage.send(tmp_path / "made", "far")
    assert "far was begun with another" in refused(capsys, *command, "resume=true")
    assert (tmp_path / "far/runs/steady-0/config.yaml").exists() and (tmp_path / "far/.lock").exists()


@pytest.fixture
def here(monkeypatch) -> None:
    """Verbs of this machine are played in this process, which starts more quickly."""

    def play(self, words, log, stop):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        return main(list(words))

    monkeypatch.setattr(Processes, "play", play)
    monkeypatch.setattr(Processes, "jobs", lambda self, count: 1)


@pytest.mark.slow
@pytest.mark.sim
def test_an_array_job_gives_the_comparison_of_one_machine(words, tmp_path, capsys, here):
    words = [*words, "budget=160"]
    assert main([*words, f"out={tmp_path}/local"]) == 0
    out = tmp_path / "array"
    command = [*words, "on=slurm", f"out={out}"]
    assert main(command) == 0
    assert "plays 3 runs" in capsys.readouterr().out and not (out / "compare.json").exists()
    subprocess.run(["bash", str(out / "slurm.sh")], env={**os.environ, "SLURM_ARRAY_TASK_ID": "0"}, check=True)
    assert (out / "evaluations/base.json").exists()
    for wave in (("steady-0", "steady-1"), ("base_greedy-0",)):
        assert main([*command, "resume=true"]) == 0
        assert f"plays {len(wave)} runs" in capsys.readouterr().out and not (out / "compare.json").exists()
        for name in wave:
            assert name in (out / "slurm.sh").read_text()
            assert main([*words, f"out={out}", f"only={name}"]) == 0
    assert main([*command, "resume=true"]) == 0
    found = runs_of(out)
    assert found == runs_of(tmp_path / "local")
    assert found[0] != found[1], "the control: another seed is another run"


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("shared", ["folders", "storage"])
def test_a_comparison_on_ray_loses_a_node_and_nothing_else(words, tmp_path, monkeypatch, here, shared):
    """Two nodes with a core each. One is killed when both runs have saved and none has ended."""
    ray = pytest.importorskip("ray")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    words = [*words, "budget=12000"]
    assert main([*words, f"out={tmp_path}/local"]) == 0
    out = played = tmp_path / "ray"
    if shared == "storage":
        played = tmp_path / "home"
        played.mkdir()
        monkeypatch.setenv("HOME", str(played))
        words = [*words, f"storage=file://{tmp_path}/kept"]
    node = {"object_store_memory": 10**8, "include_dashboard": False}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **node})
    try:
        nodes = [cluster.add_node(num_cpus=1, **node) for _ in range(2)]

        def kill() -> None:
            while sum(any(saved.glob("0*")) for saved in played.glob("**/runs/*/checkpoints")) < 2:
                time.sleep(0.01)
            cluster.remove_node(nodes[1], allow_graceful=False)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        assert main([*words, f"on=ray:{cluster.address}", f"out={out}"]) == 0
        killer.join(timeout=1)
        assert not killer.is_alive(), "no node was killed"
    finally:
        ray.shutdown()
        cluster.shutdown()
    sittings = sorted(len(list((out / f"runs/steady-{seed}/tensorboard").iterdir())) for seed in (0, 1))
    assert sittings == [1, 2], "one run was lost, and went on from its checkpoint"
    assert runs_of(out) == runs_of(tmp_path / "local")


NODE = """import json, sys
from burnish.policies.cli import ray_tasks, storage
storage.SEND_S = 0.05
words, keys, *rest = json.loads(sys.argv[1])
sys.exit(ray_tasks.play_away(words, {int(n): key for n, key in keys.items()}, *rest))
"""


class Nodes:
    """A stand-in of Ray: each task is a process in a home and a working folder of its own. The first that refines is
    killed once its first checkpoint was sent, and played again on another node, as Ray does it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.played, self.killed = folder, list[str](), False

    def play(self, *given: Any) -> int:
        self.played.append(given[0][0])
        process = self.start(given)
        if given[0][0] == "finetune" and not self.killed:
            (number,) = (n for n, word in enumerate(given[0]) if word.startswith("out="))
            listed = self.folder / f"storage/folders/{given[1][number]}.json"
            while not (listed.exists() and "checkpoints/" in listed.read_text()):
                assert process.poll() is None, "it ended before it was killed"
                time.sleep(0.01)
            process.kill()
            process.wait()
            self.killed = True
            process = self.start(given)
        return process.wait()

    def start(self, given: Any) -> subprocess.Popen[Any]:
        home = self.folder / f"node-{len(list(self.folder.glob('node-*')))}"
        home.mkdir(parents=True)
        command = [sys.executable, "-c", NODE, json.dumps(given)]
        return subprocess.Popen(command, cwd=home, env={**os.environ, "HOME": str(home)})

    def module(self) -> Any:
        ray = stand_in(None)
        ray.remote = lambda **options: lambda play: SimpleNamespace(remote=self.play)
        ray.get = lambda status: status
        return ray


@pytest.mark.slow
@pytest.mark.sim
def test_nodes_that_share_a_storage_alone_give_the_comparison_of_one_machine(words, tmp_path, monkeypatch, capsys):
    words = [*words, "budget=1600"]
    assert main([*words, f"out={tmp_path}/local"]) == 0
    nodes = Nodes(tmp_path / "nodes")
    monkeypatch.setitem(sys.modules, "ray", nodes.module())
    monkeypatch.chdir(tmp_path)
    command = [*words, "on=ray", f"storage=file://{nodes.folder}/storage", "out=far", "jobs=1"]
    assert main(command) == 0
    assert nodes.killed and nodes.played.count("finetune") == 2
    assert "each leaves its log, once it has ended, in far/runs/*.log" in capsys.readouterr().err
    assert runs_of(Path("far")) == runs_of(Path("local"))
    sittings = sorted(len(list(Path(f"far/runs/steady-{seed}/tensorboard").iterdir())) for seed in (0, 1))
    assert sittings == [1, 2], "one run was lost, and went on from its checkpoint"
    before = runs_of(Path("far"))
    nodes.played.clear()
    files.remove(Path("far"))
    assert main([*command, "resume=true"]) == 0
    assert nodes.played == [], "all that has ended is in the storage"
    assert runs_of(Path("far")) == before
