"""Several comparisons on one page: what is pooled, what is not, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest
from verb_lab import refused

import report_lab
from burnish.finetune.compare.report.pooled import over, pooled, ranking
from burnish.finetune.compare.report.read import read_comparison
from burnish.policies.cli.cli import main
from burnish.policies.measure.statistics import interquartile_mean


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Insert with three seeds, in which one run of dppo failed; push with one, and without reinflow."""
    lab = tmp_path_factory.mktemp("lab")
    report_lab.comparison(lab / "insert", films=0)
    report_lab.comparison(lab / "push", seeds=1, films=0, fail=False)
    data = json.loads((lab / "push" / "compare.json").read_text())
    data["world"]["name"] = "push"
    for key in ("runs", "methods"):
        data[key] = [row for row in data[key] if row["method"] != "reinflow"]
    report_lab.write(lab / "push" / "compare.json", data)
    return lab


def finals(folder, method):
    runs = json.loads((folder / "compare.json").read_text())["runs"]
    return [run["final"] for run in runs if run["method"] == method and run["status"] == "finished"]


def test_runs_of_all_tasks_are_pooled_and_bounds_are_drawn_within_tasks(whole):
    found = pooled([read_comparison(whole / name) for name in ("insert", "push")])
    assert found["tasks"] == ["insert", "push"]
    row = next(row for row in found["rows"] if row.method == "dppo")
    scores = {name: finals(whole / name, "dppo") for name in ("insert", "push")}
    assert (len(scores["insert"]), len(scores["push"])) == (2, 1) and row.runs == 3
    assert row.iqm == interquartile_mean([*scores["insert"], *scores["push"]])
    means = {name: sum(runs) / len(runs) for name, runs in scores.items()}
    assert row.mean == pytest.approx(sum(means.values()) / 2) and row.worst == min(means.values())
    assert means[row.worst_task] == row.worst
    # Within a task of equal runs nothing varies; thrown together, the two tasks would.
    apart = over("x", {"a": [0.2, 0.2], "b": [0.8, 0.8]})
    assert (apart.iqm, apart.low, apart.high) == (0.5, 0.5, 0.5)
    # A single run on a task says nothing of other seeds.
    assert (row.low, row.high) == (None, None) and "single run" in found["verdict"].detail


def test_the_best_is_first_and_a_method_that_lacks_a_task_is_not_ranked(whole):
    found = pooled([read_comparison(whole / name) for name in ("insert", "push")])
    iqms = [row.iqm for row in found["rows"]]
    assert iqms == sorted(iqms, reverse=True) and len(iqms) == 4
    assert found["remarks"][0] == "reinflow has no finished run on push, so it is not pooled over tasks."
    assert "dppo are not as many on each task (2 on insert, 1 on push)" in " ".join(found["remarks"])
    assert found["each"]["reinflow"][1] is None and found["each"]["reinflow"][0].value > 0.9
    assert found["verdict"].sentence.startswith(f"{found['rows'][0].method} has the highest interquartile mean")
    assert ranking({"a": {"x": [1.0]}, "b": {"x": [0.5], "y": [0.5]}}, ["x", "y"], {})[0].method == "b"


def test_the_page_has_a_column_for_each_task(whole, tmp_path):
    words = [f"compare={whole}/insert,{whole}/push", f"out={tmp_path}/page.html"]
    assert main(["report", *words]) == 0
    text = (tmp_path / "page.html").read_text()
    for said in (">insert</button>", ">push</button>", "Over 2 tasks", "reinflow has no finished run on push"):
        assert said in text


def test_what_failed_and_what_was_unequal_is_said(whole, tmp_path):
    one, two = (shutil.copytree(whole / "insert", tmp_path / name) for name in ("one", "two"))
    data = json.loads((two / "compare.json").read_text())
    runs = [run if run["method"] != "dsrl" else {**run, "status": "failed"} for run in data["runs"]]
    report_lab.write(two / "compare.json", {**data, "runs": runs, "best": None, "budget": 50_000})
    found = pooled([read_comparison(one), read_comparison(two)])
    assert {row.method: row.failed for row in found["rows"]} == {
        "residual_sac": 0,
        "reinflow": 0,
        "residual_ppo": 0,
        "dppo": 2,
    }
    assert found["remarks"][0] == f"dsrl has no finished run on {two}, so it is not pooled over tasks."
    assert found["remarks"][-1].startswith("The budgets differ: 100,000 on")


def test_two_comparisons_of_one_world_go_by_their_folders(whole, tmp_path):
    other = shutil.copytree(whole / "insert", tmp_path / "again")
    found = pooled([read_comparison(whole / "insert"), read_comparison(other)])
    assert found["tasks"] == [str(whole / "insert"), str(other)]


def test_what_cannot_be_pooled_is_refused(whole, tmp_path, capsys):
    returns = report_lab.comparison(tmp_path / "hopper", seeds=1, success=False, films=0)
    for words, sentence in (
        ([f"compare={whole}/insert,{returns}", f"out={tmp_path}/page.html"], "is judged by returns"),
        ([f"compare={whole}/insert,{whole}/insert", f"out={tmp_path}/page.html"], "names a folder twice"),
        ([f"compare={whole}/insert,{whole}/push"], "give out=FILE.html"),
    ):
        assert sentence in refused(capsys, "report", *words)
    assert not (tmp_path / "page.html").exists()
