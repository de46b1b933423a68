"""docs/choosing.md says what its tables say: these are of the committed runs, and the sentences hold in them."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from burnish.policies.core.config import differences, to_data

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "choosing.md"
STEERING = ("latent", "residual")  # families that choose or correct what a base does


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield import_module("refine_quality")
    sys.path.pop(0)


@pytest.fixture(scope="module")
def rows(benchmark):
    return {(row["task"], row["method"]): row for row in benchmark.rows_of(RESULTS / "refine_quality")}


def test_the_tables_are_those_of_the_committed_runs(benchmark, rows):
    text = DOCUMENT.read_text()
    found = list(rows.values())
    for name, table in (
        ("refine_quality", benchmark.markdown(found, benchmark.COLUMNS)),
        ("refine_quality_methods", benchmark.markdown(benchmark.over_tasks(found), benchmark.OVER_TASKS)),
    ):
        assert f"<!-- {name} -->\n{table}<!-- end -->" in text, f"{name}: run refine_quality.py --report"
    assert json.loads((RESULTS / "refine_quality.json").read_text())["rows"] == found


def test_the_committed_runs_are_of_the_experiments_as_they_are_shipped(benchmark):
    for path in sorted((RESULTS / "refine_quality").glob("*/*-[0-9].json")):
        run = json.loads(path.read_text())
        shipped = benchmark.configured(f"experiment={run['task']}/{run['method']}")
        settings = json.loads(json.dumps(to_data(shipped.method)))
        changed = [name for name, old, _ in differences(run["settings"], settings) if repr(old) != "nothing"]
        assert not changed, f"{path} was made with another {changed}"  # settings that came later do not count
        assert f"total={shipped.total}" in run["words"], path
        assert run["base"] == benchmark.fingerprint(run["task"]), path


def goal_steps(benchmark, task, method):
    """The most control steps that a run needed to its first trial at the goal."""
    runs = [json.loads(path.read_text()) for path in (RESULTS / "refine_quality" / task).glob(f"{method}-[0-9].json")]
    return max(next((steps for steps, _, rate in run["curve"] if rate >= benchmark.GOAL), 1e9) for run in runs)


def test_systematic_errors(benchmark, rows):
    for method in ("dsrl", "residual_sac"):
        assert rows["insert", method]["worst"] >= 0.95 and rows["insert", method]["seeds"] >= 3
        assert goal_steps(benchmark, "insert", method) < 100_000 / 3


def test_hidden_errors(rows):
    row = rows["insert_hidden", "residual_ppo"]
    assert row["worst"] >= 0.95 and row["seeds"] >= 3


def test_long_tasks(rows):
    change = {method: row["change"] for (task, method), row in rows.items() if task == "push"}
    replay = ("dsrl", "expo", "dsrl_aliased", "residual_td3", "rfs", "residual_sac", "rlpd")
    on_policy = ("residual_ppo", "dppo", "reinflow", "flow_sde", "rpd", "gaussian_ppo")
    assert all(change["dsrl"] > change["expo"] > change[name] > 0.2 for name in replay[2:])
    assert all(change[name] < 0.1 for name in on_policy)
    assert {*replay, *on_policy} == set(change)


def test_near_tasks(rows):
    row = rows["avoid", "reinflow"]
    assert row["seeds"] == 3 and row["worst"] == 1
    assert rows["avoid", "residual_sac"]["seeds"] == 3 and rows["avoid", "residual_sac"]["worst"] > 0.9


def test_grasps(benchmark, rows):
    mine = {method: row for (task, method), row in rows.items() if task == "pick_place"}
    assert mine.keys() == set(benchmark.SOME) and all(row["seeds"] == 3 for row in mine.values())
    assert {method for method, row in mine.items() if row["lower_bound"] <= 0} == {"reinflow", "dppo"}
    assert changes("pick_place", "reinflow") == [0, 0, 0] and changes("pick_place", "dppo").count(0) == 1
    assert min(x for method in ("reinflow", "dppo") for x in changes("pick_place", method, "last")) > 0
    most = ("residual_ppo", "dsrl")
    assert all(mine[method]["change"] > 1 / 3 > mine[other]["change"] for method in most for other in {*mine} - {*most})


def runs(task, method):
    files = sorted((RESULTS / "refine_quality" / task).glob(f"{method}-[0-9].json"))
    assert len(files) == 3
    return [json.loads(path.read_text()) for path in files]


def changes(task, method, of="compared"):
    """Of each run, paired with the base; of what was delivered, or of the last policy."""
    return [run[of]["difference"] for run in runs(task, method)]


RUNNERS = ("hopper", "walker2d")


def test_those_who_must_not_fall(benchmark, rows):
    chains = ("dppo", "reinflow")
    for method in benchmark.SOME:
        last = changes("hopper", method, "last") + changes("walker2d", method, "last")
        assert (min(last) > 0) == (method in chains), method
    for method in ("dsrl", "rfs", "residual_sac"):
        lost = [-x / rows[task, method]["base"] for task in RUNNERS for x in changes(task, method, "last")]
        assert max(lost) > 0.5, method
    base = rows["hopper", "dsrl"]["base"]
    assert all(min(changes("hopper", method)) > 0.8 * base for method in ("dsrl", "reinflow"))  # "about twice"
    improved = [method for method in benchmark.SOME if min(changes("walker2d", method)) > 0]
    assert improved == ["reinflow"]
    gained = {method: sum(x > 0 for task in RUNNERS for x in changes(task, method)) for method in benchmark.SOME}
    assert gained["residual_ppo"] == 2 and gained["residual_sac"] == 0


def test_nothing_is_delivered_that_is_worse_than_its_base(rows):
    """And without the choice it would be: the last policies are the control."""
    begun = {key: row for key, row in rows.items() if row["family"] != "from nothing"}
    lowest = min(begun, key=lambda key: begun[key]["lower_bound"])
    assert lowest == ("push", "flow_sde") and round(begun[lowest]["lower_bound"], 2) == -0.06
    for path in sorted((RESULTS / "refine_quality").glob("*/*-[0-9].json")):
        run = json.loads(path.read_text())
        if run["method"] not in ("rlpd", "gaussian_ppo"):
            assert run["compared"]["difference_high"] >= 0, f"{path} delivered what is worse than its base"
    assert {task for (task, _), row in begun.items() if row["last_lower_bound"] < -0.05} == {"push", *RUNNERS}


def test_a_student_beside_its_base(rows):
    assert rows["insert", "rpd"]["worst"] >= 0.95 and rows["insert", "rpd"]["seeds"] == 3


def test_the_minutes_that_are_quoted_were_had_by_themselves():
    """Two runs at a time, one core each, and nothing else."""
    for method in ("dsrl", "residual_ppo"):
        for path in (RESULTS / "refine_quality" / "insert").glob(f"{method}-[0-9].json"):
            assert json.loads(path.read_text())["machine"]["load"] <= 2.5


def test_chains_and_beginnings_from_nothing(benchmark, rows):
    assert all(rows["insert", method]["worst"] >= 0.95 for method in ("reinflow", "dppo"))
    assert rows["insert", "rlpd"]["worst"] >= 0.95 and rows["insert", "gaussian_ppo"]["success"] == 0
    latest = goal_steps(benchmark, "insert", "rlpd")
    assert latest < 100_000
    chosen = [row["method"] for (task, _), row in rows.items() if task == "insert" and row["family"] in STEERING]
    assert len(chosen) > 3 and all(goal_steps(benchmark, "insert", method) < latest for method in chosen)


def test_what_makes_reinflow_faster(benchmark):
    report = json.loads((RESULTS / "onpolicy_speed.json").read_text())
    assert not report["quick"]
    columns = import_module("onpolicy_speed").COLUMNS
    assert f"<!-- onpolicy_speed -->\n{benchmark.markdown(report['rows'], columns)}<!-- end -->" in DOCUMENT.read_text()
    assert report["result"]["reinflow_over_dppo"] == pytest.approx(2, rel=0.15)  # "about twice"
    assert report["result"]["reinflow_over_dppo_4"] == pytest.approx(1, abs=0.1)
    assert all(row["update_s"] > row["world_s"] + row["policy_s"] + row["other_s"] for row in report["rows"])
