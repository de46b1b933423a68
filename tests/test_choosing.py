"""docs/choosing.md says what its tables say: these are of the committed runs, and the sentences hold in them."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "choosing.md"


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield import_module("refine_quality")
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def tables(benchmark):
    return import_module("refine_tables")


@pytest.fixture(scope="module")
def rows(benchmark):
    return benchmark.measured(RESULTS / "refine_quality")


@pytest.mark.slow
def test_the_tables_are_those_of_the_committed_runs(tables, rows):
    text = DOCUMENT.read_text()
    for name, table in (
        ("refine_quality", tables.markdown(rows, tables.COLUMNS)),
        ("refine_quality_methods", tables.markdown(tables.over_tasks(rows), tables.OVER_TASKS)),
        ("refine_quality_verdicts", tables.markdown(tables.verdicts(rows), tables.VERDICTS)),
    ):
        assert f"<!-- {name} -->\n{table}<!-- end -->" in text, f"{name}: run refine_quality.py --report"
    assert json.loads((RESULTS / "refine_quality.json").read_text())["rows"] == rows


@pytest.mark.slow
def test_every_committed_run_counts(benchmark):
    """A run of another base, or of settings that did not win the search, would be left out without a word."""
    files = sorted(
        path for path in (RESULTS / "refine_quality").glob("*/*-[0-9].json") if path.parent.parent.name != "search"
    )
    assert len(benchmark.valid_runs(benchmark.SUITE, RESULTS / "refine_quality")) == len(files)


def test_trials_are_logged_as_they_were_declared(benchmark):
    """Each with the settings of its number, and the same number for every method of a task before it is played."""
    counts: dict[tuple[str, str], int] = {}
    for path in sorted((RESULTS / "refine_quality" / "search").glob("*/*.json")):
        trial = json.loads(path.read_text())
        task, method, number = trial["task"], trial["method"], trial["trial"]
        assert trial["changed"] == benchmark.trial_settings(task, method, number), path
        assert trial["score"] >= 0 and trial["seed"] == benchmark.SEARCH_SEED, path
        counts[task, method] = counts.get((task, method), 0) + 1
    assert all(count <= benchmark.TRIALS for count in counts.values())
    played = {path.parent.name for path in (RESULTS / "refine_quality").glob("*/*-[0-9].json")}
    for task in played:  # before that, a search may be under way
        assert len({counts.get((task, method), 0) for method in benchmark.RANKED}) == 1, task


def test_seeing_the_chunk_gains_nothing_beyond_doubt():
    found = json.loads((RESULTS / "residual_observations.json").read_text())["result"]
    pairs = [name.removesuffix("_gain") for name in found if name.endswith("_gain")]
    assert len(pairs) == 4
    assert all(found[f"{pair}_gain"] <= 2 * found[f"{pair}_error"] for pair in pairs)


def test_noise_zero_is_free_and_often_better(rows):
    """What the page says of the base without noise."""
    greedy = {row["task"]: row for row in rows if row["method"] == "base_greedy" and row["base"] == 1}
    better = {task for task, row in greedy.items() if row["gain_low"] > 0}
    said = DOCUMENT.read_text()
    for task in greedy:
        assert (f"`{task}`" in said.partition("better with noise 0")[2].partition(".")[0]) == (task in better), task
    assert greedy["insert"]["last"] == 0  # "it never succeeds"
    assert max(row["last"] for row in greedy.values()) < import_module("bases").NOISE_FREE_LIMIT


def test_more_steps_change_the_order(rows):
    """The last sentences of the list: a tenfold budget of residual_ppo, of dsrl, and of reinflow."""
    for task in ("push", "pick_place", "hopper"):
        first = [row for row in rows if (row["task"], row["base"]) == (task, 1)]
        most = max(row["last"] for row in first if row["budget"] == 100_000)
        (long,) = (row for row in first if row["budget"] == 1_000_000 and row["method"] == "residual_ppo")
        assert long["worst_last"] > most and long["minutes"] < 15, task

    def run(task, method="dsrl"):
        return json.loads((RESULTS / "refine_quality" / task / f"{method}-1000000-0.json").read_text())

    push, pick = run("push"), run("pick_place")
    assert mean(push["last"]) > 0.95 and mean(pick["last"]) < 0.3 < mean(pick["delivered"])
    assert all(success < pick["curve"][0][2] for steps, _, success in pick["curve"] if steps > 390_000)
    for task, method in (("hopper", "dsrl"), ("push", "reinflow")):
        (row,) = (x for x in rows if (x["task"], x["budget"], x["method"]) == (task, 1_000_000, method))
        assert row["gain"] < -0.1 and row["delivered"] >= row["last"] - row["gain"] - 0.02
    assert mean(run("pick_place", "dsrl_timed")["last"]) > 0.95


def test_what_the_runs_say(tables, rows):
    """The sentences of the page about the first bases and 100,000 control steps, in its order."""
    rows = [row for row in rows if row["task"] != "insert_hidden"]  # which one method alone has played
    mine = [row for row in rows if row["base"] == 1 and row["budget"] == 100_000]
    found = {row["task"]: row for row in tables.verdicts(mine)}
    assert set(found) == {"push", "pick_place", "hopper"}
    leaders = {row["best_last"].split()[0] for row in found.values()}
    assert (
        len(leaders) == 3
        and "rlpd" in found["push"]["beat_noise_0"]
        and "rlpd" in found["pick_place"]["below_the_base"]
    )
    assert found["hopper"]["beat_noise_0"] == "none"
    for task in ("push", "pick_place"):
        best, free = (float(found[task][key].split()[1]) for key in ("best_last", "best_free"))
        assert 0.1 <= round(best - free, 2) <= 0.2
    dsrl = next(row for row in mine if row["task"] == "hopper" and row["method"] == "dsrl")
    assert dsrl["gain"] < 0 and found["hopper"]["best_delivered"].startswith("dsrl")
    methods = {row["method"]: row for row in tables.over_tasks(rows)}
    assert sum(row["delivered_worse"] or 0 for row in methods.values()) == 0
    careful = sorted(methods, key=lambda name: -methods[name]["worst_gain_low"])
    assert careful[0] == "residual_ppo" and "dsrl" in careful[-3:]
    assert max(methods, key=lambda name: methods[name]["mean_last"]) == "dsrl"
    assert methods["dppo"]["beats_greedy"] == methods["reinflow"]["beats_greedy"] == 0


@pytest.mark.parametrize("effect", [0.0, 0.2])
def test_a_method_must_beat_the_greedy_base_beyond_doubt(tables, effect):
    """Five runs that are made up, on 512 seeds, and a base at noise 0 that succeeds on every other seed. Each run loses
    a tenth of these seeds, and gains as many others or more."""
    greedy = np.arange(512) % 2 == 0
    runs = [np.where(greedy, np.arange(512) % 20 != 2 * r, np.arange(512) % 20 == 2 * r + 1) for r in range(5)]
    runs = [run | (np.arange(512) % 10 < 10 * effect) for run in runs]
    found = tables.against(np.asarray(runs, dtype=float), greedy.astype(float))
    assert (found["_low"] > 0) == (effect > 0)


def test_a_delivery_is_worse_only_beyond_doubt(tables):
    base = np.arange(512) % 2 == 0
    assert not tables.worse(base[::-1].astype(float), base.astype(float)), "as good on other seeds"
    assert tables.worse((np.arange(512) % 4 == 0).astype(float), base.astype(float))


def test_what_makes_reinflow_faster(tables):
    report = json.loads((RESULTS / "onpolicy_speed.json").read_text())
    assert not report["quick"]
    columns = import_module("onpolicy_speed").COLUMNS
    assert f"<!-- onpolicy_speed -->\n{tables.markdown(report['rows'], columns)}<!-- end -->" in DOCUMENT.read_text()
    assert report["result"]["reinflow_over_dppo"] == pytest.approx(2, rel=0.15)  # "about twice"
    assert report["result"]["reinflow_over_dppo_4"] == pytest.approx(1, abs=0.1)
    assert all(row["update_s"] > row["world_s"] + row["policy_s"] + row["other_s"] for row in report["rows"])


def test_a_fixed_method_that_played_more_than_the_budget_is_not_compared_with_improve(benchmark, monkeypatch):
    improve = import_module("improve")

    def run(method, steps):
        return {"task": "push", "method": method, "base": "b", "budget": 100_000, "steps": steps, "delivered": [0, 1]}

    played = [run("fewer", 91_915), run("a round more", 103_315), run("twice", 201_000)]
    monkeypatch.setattr(improve, "valid_runs", lambda *args: played)
    monkeypatch.setattr(improve, "fingerprint", lambda task: "b")
    assert improve.fixed() == {"push": {"fewer": 0.5, "a round more": 0.5}}
