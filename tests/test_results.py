"""Finished evaluations compared: ours, and both forms of LeRobot's eval_info.json."""

from __future__ import annotations

import json
import random

import pytest
from verb_lab import refused

from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.measure.evaluate import Evaluation
from burnish.policies.measure.statistics import episodes_needed, fisher_exact, holm, mcnemar_exact
from burnish.policies.results import read_results


def per_episode(path, success, first=1000):
    rows = [
        {"episode_ix": i, "sum_reward": float(x), "max_reward": 1.0, "success": x, "seed": first + i}
        for i, x in enumerate(success)
    ]
    path.write_text(json.dumps({"per_episode": rows, "aggregated": {"pc_success": 0.0}}))
    return str(path)


def per_task(path, success):
    half = len(success) // 2
    tasks = [
        {
            "task_group": "g",
            "task_id": i,
            "metrics": {"sum_rewards": [float(x) for x in part], "max_rewards": [1.0] * len(part), "successes": part},
        }
        for i, part in enumerate((success[:half], success[half:]))
    ]
    path.write_text(json.dumps({"per_task": tasks, "overall": {}}))
    return str(path)


def ours(path, success, first=1000):
    count = len(success)
    blank = [False] * count
    Evaluation(list(range(first, first + count)), [0.0] * count, [1] * count, blank, blank, success).save(path)
    return str(path)


A = [True] * 6 + [False] * 14
B = [True] * 16 + [False] * 4


@pytest.mark.parametrize(("a", "b"), [(per_episode, per_episode), (ours, per_episode)])
def test_equal_seeds_are_pairs(a, b, tmp_path, capsys):
    assert main(["evaluate", f"results={a(tmp_path / 'a', A)},{b(tmp_path / 'b', B)}", f"out={tmp_path / 'out'}"]) == 0
    said = capsys.readouterr().out
    assert "20 paired seeds" in said and "10 wins, 0 losses" in said and "beyond doubt" in said
    assert "pairs if the world honours its seeds" in said
    (row,) = json.loads((tmp_path / "out/comparison.json").read_text())
    assert row["p_value"] == mcnemar_exact(10, 0) and row["difference"] == 0.5


@pytest.mark.parametrize("words", [[], ["paired=true"]])
def test_files_without_seeds_are_pairs_only_on_the_users_word(words, tmp_path, capsys):
    assert main(["evaluate", f"results={per_task(tmp_path / 'a', A)},{per_task(tmp_path / 'b', B)}", *words]) == 0
    said = capsys.readouterr().out
    assert ("paired seeds" in said) == bool(words)
    assert ("paired=true" in said) != bool(words) and ("names no seeds" in said) != bool(words)
    assert "in this world" not in said, "nothing is known of the world"
    assert (f"{fisher_exact((16, 20), (6, 20)):.2g}" in said) != bool(words)


@pytest.mark.parametrize("seeded", [ours, per_episode])
def test_numbers_of_rows_are_no_seeds(seeded, tmp_path, capsys):
    """A file with the seeds 0, 1, ... beside one that names none."""
    seeded(tmp_path / "a", A, first=0)
    per_task(tmp_path / "b", B)
    for first, second in ("ab", "ba"):
        words = ["evaluate", f"results={tmp_path}/{first},{tmp_path}/{second}"]
        assert "b, which names no seeds, with" in refused(capsys, *words, "paired=true")
        assert main(words) == 0 and "paired=true" not in capsys.readouterr().out, "the control"


def reordered(path, change):
    data = json.loads(path.read_text())
    change(data["per_task"])
    path.write_text(json.dumps(data))


def test_episodes_of_one_task_are_pairs_wherever_it_stands_in_the_file(tmp_path):
    per_task(tmp_path / "a", A)
    found = read_results(tmp_path / "a")
    reordered(tmp_path / "a", list.reverse)
    assert read_results(tmp_path / "a") == found


@pytest.mark.parametrize(("name", "value"), [("task_group", "h"), ("task_id", 7)])
def test_episodes_of_other_tasks_are_no_pairs(name, value, tmp_path, capsys):
    words = ["evaluate", f"results={per_task(tmp_path / 'a', A)},{per_task(tmp_path / 'b', B)}", "paired=true"]
    assert main(words) == 0 and "20 paired seeds" in capsys.readouterr().out  # the control
    reordered(tmp_path / "b", lambda tasks: tasks[1].update({name: value}))
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "paired seeds" not in said and "they played other tasks" in said


def test_episodes_of_two_worlds_are_no_pairs(tmp_path, capsys):
    """Nor are they refused: how far a change of the world matters is a question too. What one version does not say is
    no difference."""
    for name, success, config in (("a", A, {"gap": 1}), ("b", B, {"gap": 2}), ("c", B, {"gap": 1, "new": 3})):
        (tmp_path / name).mkdir()
        ours(tmp_path / name / "evaluation.json", success)
        world = {"name": "insert", "config": config}
        (tmp_path / name / "about.json").write_text(json.dumps({"world": world, "settings": {}}))
    files = ",".join(f"{tmp_path}/{name}/evaluation.json" for name in "abc")
    assert main(["evaluate", f"results={files}"]) == 0
    two, one = capsys.readouterr().out.split("c/evaluation.json", 1)
    assert "not paired: they played in two worlds" in two and "two worlds" not in one and "20 paired seeds" in one


def test_other_seeds_are_no_pairs(tmp_path, capsys):
    files = per_episode(tmp_path / "a", A), per_episode(tmp_path / "b", B, first=7)
    assert main(["evaluate", f"results={','.join(files)}"]) == 0
    assert "not paired: the two evaluations ran different seed lists" in capsys.readouterr().out


def test_several_are_corrected(tmp_path, capsys):
    files = [per_episode(tmp_path / name, x) for name, x in (("a", A), ("b", B), ("c", A[::-1]))]
    assert main(["evaluate", f"results={','.join(files)}"]) == 0
    assert "Holm's correction for 2 comparisons" in capsys.readouterr().out


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # by hand: 3 x .01, 2 x .03, max(.04, .06)


BAD = {
    "no success": lambda rows: rows[0].pop("success"),
    "a success that is none": lambda rows: rows[0].update(success=float("nan")),
    "a seed twice": lambda rows: rows[0].update(seed=1001),
    "a return that is a word": lambda rows: rows[0].update(sum_reward="many"),
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_malformed_files_are_refused(change, tmp_path):
    path = tmp_path / "a"
    per_episode(path, A)
    read_results(path)  # the control
    data = json.loads(path.read_text())
    change(data["per_episode"])
    path.write_text(json.dumps(data))
    with pytest.raises(BurnishError, match="no eval_info"):
        read_results(path)


@pytest.mark.parametrize(("words", "sentence"), [(["results=a"], "at least two"), ([], "must be given")])
def test_a_call_that_says_too_little(words, sentence, capsys):
    assert sentence in refused(capsys, "evaluate", *words)


@pytest.mark.parametrize("paired", [False, True])
def test_as_many_episodes_as_are_needed_show_it_four_times_of_five(paired):
    random.seed(0)
    a, b, both = 0.7, 0.5, 0.45  # both: P(both succeed); wins .25, losses .05
    count, found, draws = episodes_needed(a, b, (0.25, 0.05) if paired else None), 0, 400
    assert count is not None
    for _ in range(draws):
        if paired:
            kinds = random.choices("wlt", (a - both, b - both, 1 - a - b + 2 * both), k=count)
            p = mcnemar_exact(kinds.count("w"), kinds.count("l"))
        else:
            p = fisher_exact((sum(random.random() < a for _ in range(count)), count),
                             (sum(random.random() < b for _ in range(count)), count))  # fmt: skip
        found += p < 0.05
    # Exact tests are careful, so somewhat less than 0.8; three standard errors of 400 draws are 0.06.
    assert 0.66 < found / draws < 0.87
    assert episodes_needed(0.5, 0.5) is None
