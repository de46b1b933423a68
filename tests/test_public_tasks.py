"""The benchmark on public tasks: every run has an experiment, recipes name what they make, and counts are honest."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from burnish import configs
from burnish.finetune.__main__ import GROUPS, FinetuneConfig
from burnish.finetune.table import method_name
from burnish.policies.__main__ import GROUPS as POLICY_GROUPS
from burnish.policies.__main__ import PretrainConfig
from burnish.policies.cli.cli import compose, to_object
from burnish.policies.core.errors import BurnishError
from burnish.policies.measure.evaluate import Evaluation
from burnish.sim.__main__ import GROUPS as SIM_GROUPS
from burnish.sim.__main__ import CollectConfig

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ("pusht_pixels", "maniskill_push_cube_rgb")  # the presets that show them
EXPERIMENTS = Path(configs.__file__).parent / "experiment"


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield import_module("public_tasks")
    sys.path.remove(str(ROOT / "benchmarks"))


def finetune(*words):
    return to_object(compose("finetune", FinetuneConfig, GROUPS["finetune"], list(words)))


def pairs(benchmark):
    return [(task, method) for task in benchmark.TASKS for method in benchmark.methods_of(task)]


def test_there_are_twelve_tasks_of_five_packages(benchmark):
    assert len(benchmark.TASKS) == 12 and len(pairs(benchmark)) == 12 * 3 + 5 * 3
    packages = {task.partition("_")[0] for task in benchmark.TASKS}
    assert packages == {"metaworld", "maniskill", "robosuite", "ogbench", "pusht"}


@pytest.mark.rotating(2)
def test_an_experiment_is_the_method_s_one_configuration_in_the_world_of_its_task(benchmark):
    """So one configuration of each method is compared on all tasks, at one discount and budget."""
    plain = {method: finetune(f"experiment=sparse/{method}") for method in (*benchmark.EVERYWHERE, *benchmark.FURTHER)}
    worlds = {task: finetune("method=dsrl", f"env={task}").env for task in benchmark.TASKS}
    for task, method in pairs(benchmark):
        shipped = finetune(f"experiment={task}/{method}")
        assert shipped == replace(plain[method], env=worlds[task]), (task, method)
        assert shipped.env.reward.value == "until_success" and method_name(shipped.method) == method
        assert shipped.method.discount.per_step(4) == benchmark.TASKS[task].gamma
        every_tick = method in ("residual_td3", "residual_ppo")
        assert shipped.total * (1 if every_tick else 4) == benchmark.BUDGET, method
    for task, method in itertools.product(PICTURES, benchmark.EVERYWHERE):
        world = finetune("method=dsrl", f"env={task}").env
        wanted = replace(plain[method], env=world, method=replace(plain[method].method, features=True))
        assert finetune(f"experiment={task}/{method}") == wanted, (task, method)
    files = {f"{path.parent.name}/{path.stem}" for path in EXPERIMENTS.glob("*/*.yaml")}
    folders = {*benchmark.TASKS, "sparse"}
    assert {x for x in files if x.partition("/")[0] in folders - {"sparse"}} == {"/".join(x) for x in pairs(benchmark)}


def test_a_run_is_the_shipped_experiment(benchmark, tmp_path):
    """What a run is told from others by is what a user gets, not the settings of a trial that lie beside it."""
    trial = tmp_path / "trials" / "search" / "pusht" / "dsrl-1.json"
    trial.parent.mkdir(parents=True)
    trial.write_text(json.dumps({"score": 1.0, "trial": 1}))
    suite = benchmark.suite_of(tmp_path, False)
    case = benchmark.Case(suite, "pusht", "dsrl", 0, False, tmp_path, benchmark.BUDGET)
    assert case.config == finetune("experiment=pusht/dsrl")
    changed = benchmark.Case(suite, "pusht", "dsrl", 0, False, tmp_path, benchmark.BUDGET, trial=1)
    assert changed.config.method != case.config.method


def test_recipes_compose_and_err_as_they_say(benchmark):
    for task, recipe in benchmark.RECIPES.items():
        config = to_object(compose("collect", CollectConfig, SIM_GROUPS["collect"], recipe.collect(task)))
        assert (config.errors.bias, config.errors.noise) == (recipe.errors["bias"], recipe.errors["noise"]), task
        # Imitation averages noise away, so there is a bias; not where 3 mm are left around a peg.
        kept = config.errors.noise if task == "maniskill_peg_insertion" else config.errors.bias
        assert kept > 0, task
        words = recipe.pretrain(Path("recordings"))
        config = to_object(compose("pretrain", PretrainConfig, POLICY_GROUPS["pretrain"], words))
        assert config.train.steps == recipe.steps and (config.chunk.horizon, config.chunk.execute) == (8, 4)


# ---- what is counted ----


def results_of(benchmark, folder, rates, base=0.4, greedy=0.5, seeds=(0, 1, 2), count=200):
    """A folder of results in which method m of each task succeeds at ``rates[m]``."""
    suite = benchmark.suite_of(folder, False)
    for task in benchmark.TASKS:
        place = folder / task
        place.mkdir(parents=True)
        (place / benchmark.NOTE).write_text(json.dumps({"fingerprint": task}))
        for name, rate in (("base", base), ("base_greedy", greedy)):
            draws = np.random.default_rng(len(name)).random(count) < rate
            rows = [list(range(count)), [0.0] * count, [1] * count, [True] * count, [False] * count]
            Evaluation(*rows, success=draws.tolist(), success_at_end=draws.tolist()).save(place / f"{name}.json")
        for method, rate in rates.items():
            if method not in (*benchmark.methods_of(task), *benchmark.TRAINED_FREE):
                continue
            for seed in seeds:
                case = benchmark.Case(suite, task, method, seed, False, folder, benchmark.BUDGET)
                last = (np.random.default_rng(seed).random(count) < rate).astype(float).tolist()
                settings = (
                    None
                    if case.is_free
                    else json.loads(json.dumps(import_module("refine_runs").compared_settings(case)))
                )
                run = {"task": task, "method": method, "seed": seed, "base": task, "budget": benchmark.BUDGET}
                run |= {"settings": settings, "minutes": 2.0, "last": last, "delivered": last, "steps": 150_000}
                run |= {"gradient_steps": 1, "seconds": {"time/playing_s": 3.0, "time/learning_s": 1.0}}
                (place / f"{case.name}.json").write_text(json.dumps(run))
    return benchmark.result(benchmark.measured(suite, folder))


FREE = {"more_imitation": 0.4, "iql": 0.45, "best_of_n": 0.5}


def test_a_complete_table_is_counted(benchmark, tmp_path):
    found = results_of(benchmark, tmp_path, {"dsrl": 0.97, "residual_td3": 0.7, "residual_ppo": 0.8, **FREE})
    assert found["tasks_above_90"] == 12 and found["free_beaten"] == 12
    assert found["best_median_change"] == pytest.approx(0.57, abs=0.1)  # .97 - .4, from 200 draws each
    assert found["missing"] == 5 * 3 * 3  # reinflow, dppo and rlpd, three seeds on five tasks


def test_what_no_method_reaches_is_not_counted(benchmark, tmp_path):
    found = results_of(benchmark, tmp_path, {"dsrl": 0.5, "residual_td3": 0.5, "residual_ppo": 0.5, **FREE})
    assert found["tasks_above_90"] == 0 and found["free_beaten"] == 0


@pytest.mark.parametrize("lacking", ["free", "seed", "method"])
def test_what_is_missing_does_not_count(benchmark, tmp_path, lacking):
    rates = {"dsrl": 0.97, "residual_td3": 0.7, "residual_ppo": 0.8, **FREE}
    if lacking == "free":
        del rates["iql"]
    if lacking == "method":
        rates = {name: rate for name, rate in rates.items() if name not in benchmark.EVERYWHERE}
    found = results_of(benchmark, tmp_path, rates, seeds=(0, 1) if lacking == "seed" else (0, 1, 2))
    assert found["free_beaten"] == -1
    assert (found["tasks_above_90"] == 12) == (lacking == "free")
    assert (found["best_median_change"] == -1) == (lacking != "free")


def test_a_baseline_of_one_seed_counts(benchmark, tmp_path):
    results_of(benchmark, tmp_path, {"dsrl": 0.97, **FREE})
    for path in tmp_path.glob("*/*-[12].json"):
        if path.name.partition("-")[0] in benchmark.TRAINED_FREE:
            path.unlink()
    suite = benchmark.suite_of(tmp_path, False)
    found = benchmark.result(benchmark.measured(suite, tmp_path))
    assert found["free_beaten"] == 12 and found["missing"] == (2 * 12 + 3 * 5) * 3


def test_runs_of_another_base_are_left_out(benchmark, tmp_path):
    results_of(benchmark, tmp_path, {"dsrl": 0.97})
    suite = benchmark.suite_of(tmp_path, False)
    there = len(benchmark.valid_runs(suite, tmp_path))
    (tmp_path / "pusht" / benchmark.NOTE).write_text(json.dumps({"fingerprint": "another"}))
    assert there == 36 and len(benchmark.valid_runs(suite, tmp_path)) == 33


def test_a_world_that_does_not_honour_its_seeds_is_left_out(benchmark, tmp_path, monkeypatch):
    runs = import_module("refine_runs")
    rows = [[0, 1], [0.0, 0.0], [1, 1], [True, True], [False, False]]
    found = Evaluation(*rows, success=[True, False])
    monkeypatch.setattr(runs, "load_policy", lambda path: (SimpleNamespace(spec=None), {"env": None}))
    monkeypatch.setattr(runs, "world_for", lambda *words: SimpleNamespace(num_envs=2))
    monkeypatch.setattr(runs, "controller_for", lambda *words, **settings: None)
    suite = benchmark.suite_of(tmp_path, False)
    monkeypatch.setattr(runs, "evaluate", lambda *words: found)
    assert suite.examined(tmp_path, 2) is found, "the control"
    monkeypatch.setattr(runs, "evaluate", lambda *words: replace(found, repeatable=False))
    with pytest.raises(BurnishError, match="no pairs"):
        suite.examined(tmp_path, 2)


def test_a_run_is_played_where_it_is_told(benchmark, tmp_path, monkeypatch):
    """Ray is a stand-in here, which plays a task at once; what a node is told is enough to play it there."""
    runs = import_module("refine_runs")
    asked: dict[str, Any] = {}

    def remote(**options):
        asked.update(options)
        return lambda play: SimpleNamespace(remote=partial(travelled, play))

    def travelled(play, *given):
        """Another process gets copies."""
        return play(*pickle.loads(pickle.dumps(given)))

    lost = type("Lost", (Exception,), {})
    ray = SimpleNamespace(remote=remote, get=lambda found: found, exceptions=SimpleNamespace(RayError=lost))
    monkeypatch.setattr(runs, "connected", lambda address: asked.update(address=address) or ray)
    monkeypatch.chdir(tmp_path)
    words = ["report", "run=nowhere"]
    for on, log in (("local", Path("here")), ("ray:node:6379", Path("there"))):
        status, spent = runs.player(on)(words, log)
        assert status == 2 and 0 < spent["cpu_s"] <= 60 and "burnish report: " in log.read_text()
    assert asked["address"] == "node:6379" and asked["num_cpus"] == 1 and asked["max_retries"] > 0
    with pytest.raises(BurnishError, match="--storage=s3://x is for --on=ray"):
        runs.play_all([], 1, "local", "s3://x")

    def get(found):
        raise lost("its node died")

    ray.get = get
    with pytest.raises(BurnishError, match="Ray has lost the run of there: its node died"):
        runs.player("ray")(words, Path("there"))
    with pytest.raises(BurnishError, match="--on=moon is no place for runs"):
        runs.play_all([], 1, "moon")


def test_a_run_that_is_lost_in_any_way_leaves_no_result_and_stops_no_other(benchmark, tmp_path, monkeypatch, capsys):
    runs = import_module("refine_runs")
    suite = replace(benchmark.suite_of(tmp_path / "results", False), runs=tmp_path / "runs")
    case = benchmark.Case(suite, "pusht", "dsrl", 0, False, tmp_path / "results", benchmark.BUDGET)
    monkeypatch.setattr(runs.Case, "command", lambda case: ["report"])

    def unwritten(*given):
        raise OSError("the disk is full")

    runs._played(lambda words, log: (1, {"cpu_s": 1.0, "wall_s": 1.0}), case)  # a node that shares no folders
    assert "pusht dsrl-0: [Errno 2] No such file" in capsys.readouterr().err
    monkeypatch.setattr(runs, "conclude", lambda case: {"last": [1.0], "minutes": 2.0})
    with monkeypatch.context() as patch:
        patch.setattr("burnish.policies.core.files.move", unwritten)
        runs._played(lambda words, log: (0, {"cpu_s": 1.0, "wall_s": 1.0}), case)
    assert "pusht dsrl-0: the disk is full" in capsys.readouterr().err and not case.result.exists()
    assert json.loads(case.folder.with_suffix(".seconds").read_text())["cpu_s"] == 1.0, "of the first attempt, whole"
    runs._played(lambda words, log: (0, {"cpu_s": 1.0, "wall_s": 1.0}), case)
    assert json.loads(case.result.read_text())["last"] == [1.0] and not case.folder.with_suffix(".seconds").exists()


def test_the_time_of_a_run_that_is_killed_is_kept(benchmark, tmp_path, monkeypatch):
    runs, log = import_module("refine_runs"), tmp_path / "run.log"
    monkeypatch.setattr(import_module("refine_minutes"), "KEPT_EVERY", 0.0)
    _, spent = runs.played_here(["report", "run=nowhere"], log)
    kept = json.loads(log.with_suffix(".sitting").read_text())  # all that is there when the machine stops
    assert 0 < kept["cpu_s"] <= spent["cpu_s"] and 0 < kept["wall_s"] < spent["wall_s"]

    suite = replace(benchmark.suite_of(tmp_path / "results", False), runs=tmp_path / "runs")
    case = benchmark.Case(suite, "pusht", "dsrl", 0, False, tmp_path / "results", benchmark.BUDGET)
    monkeypatch.setattr(runs.Case, "command", lambda case: [])
    case.folder.parent.mkdir(parents=True)
    case.folder.with_suffix(".sitting").write_text('{"cpu_s": 40.0, "wall_s": 50.0}')
    for _ in range(2):
        runs.play(case, lambda words, log: (0, {"cpu_s": 1.0, "wall_s": 2.0}))
    assert json.loads(case.folder.with_suffix(".seconds").read_text()) == {"cpu_s": 42.0, "wall_s": 54.0}, "once each"


def test_minutes_of_a_run_that_lost_a_sitting_are_not_told(benchmark):
    known = import_module("refine_minutes").known_minutes
    run = {"minutes": 24.0, "wall_minutes": 28.0, "seconds": {"time/elapsed_s": 1690.0}}
    assert known(run) == 24.0 and known(run | {"seconds": {"time/elapsed_s": 5551.0}}) is None


def test_a_node_that_shares_a_storage_alone_counts_its_time(benchmark, tmp_path, monkeypatch):
    """A node is a process in a home and a working folder of its own."""
    runs, home = import_module("refine_runs"), tmp_path / "home"
    home.mkdir()

    def travelled(*given):
        code = f"""import json, sys; sys.path.insert(0, {str(Path(runs.__file__).parent)!r}); import refine_runs
words, keys, *rest = json.loads(sys.argv[1])
found = refine_runs.played_away(words, {{int(n): key for n, key in keys.items()}}, *rest)
open("found", "w").write(json.dumps(found))"""
        command = [sys.executable, "-c", code, json.dumps(given)]
        subprocess.run(command, cwd=home, env={**os.environ, "HOME": str(home)}, check=True)
        return json.loads((home / "found").read_text())

    ray = SimpleNamespace(remote=lambda **options: lambda play: SimpleNamespace(remote=travelled))
    ray.get, ray.exceptions = (lambda found: found), SimpleNamespace(RayError=OSError)
    monkeypatch.setattr(runs, "connected", lambda address: ray)
    monkeypatch.chdir(tmp_path)
    play = runs.player("ray", f"file://{tmp_path}/kept")
    words = ["collect", "env=reach", "expert=clean", "episodes=2", "out=made"]
    status, spent = play(words, Path("made.log"))
    assert status == 0 and 0.2 < spent["cpu_s"] < 120 and spent["wall_s"] > 0
    assert "2 successful" in Path("made.log").read_text() and any(Path("made").iterdir())
    status, _ = play(words, Path("again.log"))
    assert status == 2 and "made" in Path("again.log").read_text(), "what is there goes to the node, which refuses it"


def test_committed_bases_are_of_today_s_recipes(benchmark):
    for note in (ROOT / "benchmarks" / "results" / "public_tasks").glob(f"*/{benchmark.NOTE}"):
        said, recipe = json.loads(note.read_text()), benchmark.RECIPES[note.parent.name]
        assert recipe.said(note.parent.name).items() <= said.items()


def test_another_recipe_begins_anew_but_never_beside_runs(benchmark, tmp_path, monkeypatch):
    bases = import_module("public_bases")
    monkeypatch.setattr(bases, "find_policy", lambda base: type("Saved", (), {"path": base}))
    base, kept = tmp_path / "policy", tmp_path / "results" / "pusht" / benchmark.NOTE
    base.mkdir()
    (base / "state.safetensors").write_bytes(b"weights")
    recipe = benchmark.RECIPES["pusht"]
    other = replace(recipe, steps=recipe.steps + 1)
    assert recipe.folder("pusht") != other.folder("pusht")
    bases.note_base("pusht", recipe, base, 1.0, kept)
    (kept.parent / "base.json").write_text("{}")
    bases.note_base("pusht", recipe, base, 0.0, kept)  # as when it is there already
    assert json.loads(kept.read_text())["minutes"] == 1.0 and (kept.parent / "base.json").exists()
    bases.note_base("pusht", other, base, 2.0, kept)
    assert json.loads(kept.read_text())["minutes"] == 2.0 and not (kept.parent / "base.json").exists()
    (kept.parent / "dsrl-0.json").write_text("{}")
    with pytest.raises(BurnishError, match="another base"):
        bases.note_base("pusht", recipe, base, 1.0, kept)
