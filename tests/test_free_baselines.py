"""The free baselines in a comparison: what is held against them, what is said, and for how long they are trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import report_lab
from burnish.finetune.compare import free_baselines
from burnish.finetune.compare.compare import CompareConfig, Player
from burnish.finetune.compare.comparison import (
    BEATS,
    UNCLEAR,
    WORSE,
    Entry,
    delivered_by,
    summarize,
    table,
    verdict,
)
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.measure.evaluate import OTHER_EPISODES, Evaluation
from burnish.policies.measure.statistics import (
    paired_difference,
    pooled_interval,
    unpaired_difference,
    unpaired_mean_difference,
)
from burnish.policies.runs.checkpoint import save
from burnish.policies.runs.interrupt import Stop

N = 40


def evaluation(successes: int, first: int = 0) -> Evaluation:
    """So many of N, from the seed ``first`` on."""
    won = [first <= i < first + successes for i in range(N)]
    return Evaluation(list(range(N)), [float(x) for x in won], [5] * N, won, [not x for x in won], won, won)


def folder_of(out: Path, methods: dict[str, list[int]], free: dict[Entry, int], base: int = 10) -> list[Entry]:
    """What the runs of a comparison left: successes of the last policy of each run."""
    evaluation(base).save(out / "evaluations" / "base.json")
    entries = []
    for name, runs in methods.items():
        for seed, successes in enumerate(runs):
            entry = Entry(name, seed)
            (out / entry.folder).mkdir(parents=True)
            rows = [{"step": k, "eval/success_rate": 0.25, "time/elapsed_s": 60.0 * k} for k in (0, 1)]
            rows[1] |= {"control_steps": 100, "decisions": 25, "gradient_steps": 7}
            (out / entry.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            evaluation(successes).save(out / entry.evaluation)
            entries.append(entry)
    for entry, successes in free.items():
        evaluation(successes).save(out / entry.evaluation)
    return entries


GREEDY_BASE = Entry("base_greedy", 0)


def standings(found) -> dict[str, str]:
    return {row["method"]: row["standing"] for row in found["methods"]}


def test_a_method_that_equals_its_base_does_not_beat_the_greedy_base_and_a_better_one_does(tmp_path):
    entries = folder_of(tmp_path, {"still": [10], "good": [36], "bad": [1]}, {GREEDY_BASE: 14})
    found = summarize(tmp_path, entries, [GREEDY_BASE], budget=100, goal=0.9)
    assert standings(found) == {"still": UNCLEAR, "good": BEATS, "bad": WORSE}
    said = verdict(found)
    assert "the best free baseline, base_greedy, has 35.0%" in said
    assert "still does not beat base_greedy beyond doubt: -10.0%" in said
    assert "good beats base_greedy: +55.0%" in said and "bad is worse than base_greedy" in said
    # One run: the interval of its own pairs.
    row = next(row for row in found["methods"] if row["method"] == "good")
    won = paired_difference(evaluation(36).success or [], evaluation(14).success or [], 1 - 0.05 / 3)
    assert (row["over_free"], row["over_free_low"], row["over_free_high"]) == won
    lines = [line.split()[:2] for line in table(found).splitlines()[1:]]
    assert lines == [
        ["good", "method"],
        ["base_greedy", "free"],
        ["base", "base"],
        ["still", "method"],
        ["bad", "method"],
    ]
    # The control: held against the sampled base, the one that equals it would look no worse than it.
    assert next(run for run in found["runs"] if run["method"] == "still")["difference"] == 0


def test_the_yardstick_is_the_best_free_baseline(tmp_path):
    more = Entry("more_imitation", 0)
    free = {GREEDY_BASE: 14, more: 12, more._replace(how="greedy"): 33}
    entries = folder_of(tmp_path, {"good": [36]}, free)
    found = summarize(tmp_path, entries, [GREEDY_BASE, more], budget=100, goal=0.9)
    assert found["best_free"] == "more_imitation_greedy" and standings(found) == {"good": UNCLEAR}
    assert "iql and best_of_n are missing" in found["lacking"]


def test_what_is_worse_than_the_base_does_not_beat_a_noise_0_that_fails(tmp_path):
    """The base draws 20 of 40, and fails at noise 0. Control: a method that beats both."""
    entries = folder_of(tmp_path, {"worse": [9], "good": [38]}, {GREEDY_BASE: 0}, base=20)
    found = summarize(tmp_path, entries, [GREEDY_BASE], budget=100, goal=0.9)
    assert found["best_free"] == "base" and standings(found) == {"worse": WORSE, "good": BEATS}
    assert "the best free baseline, base, has 50.0%" in verdict(found)


def test_over_several_runs_both_runs_and_episodes_are_samples(tmp_path):
    """Two runs that differ: either one alone beats the baseline, and together they do not, because a third run may do
    anything: Student's t with one degree of freedom is 12.7."""
    entries = folder_of(tmp_path, {"wild": [40, 24], "calm": [38, 38]}, {GREEDY_BASE: 10})
    found = summarize(tmp_path, entries, [GREEDY_BASE], budget=100, goal=0.9)
    assert standings(found) == {"calm": BEATS, "wild": UNCLEAR}
    base = [float(x) for x in evaluation(10).success or []]
    scores = [[x - y for x, y in zip(evaluation(k).success or [], base, strict=True)] for k in (40, 24)]
    row = next(row for row in found["methods"] if row["method"] == "wild")
    assert (row["over_free"], row["over_free_low"], row["over_free_high"]) == pooled_interval(scores, 0.975)


def test_without_pairs_runs_and_the_baseline_are_independent_samples(tmp_path):
    """Control: the same counts, paired. All successes of the worse are successes of the better, so pairs tell more."""
    entries = folder_of(tmp_path, {"one": [28], "two": [28, 30]}, {GREEDY_BASE: 14})
    pairs = summarize(tmp_path, entries, [GREEDY_BASE], budget=100, goal=0.9)
    for file in sorted((tmp_path / "evaluations").iterdir()):
        replace(Evaluation.load(file), repeatable=False).save(file)
    found = summarize(tmp_path, entries, [GREEDY_BASE], budget=100, goal=0.9)
    rows = {row["method"]: row for row in found["methods"]}
    over = {name: tuple(row[f"over_free{end}"] for end in ("", "_low", "_high")) for name, row in rows.items()}
    assert over["one"] == unpaired_difference((28, N), (14, N), 0.975)
    assert over["two"] == unpaired_mean_difference([28 / N, 30 / N], [float(i < 14) for i in range(N)], 0.975)
    assert rows["one"]["difference_low"] == unpaired_difference((28, N), (10, N))[1]
    assert found["unpaired"] == OTHER_EPISODES and verdict(found).startswith(f"not paired: {OTHER_EPISODES}; ")
    assert pairs["unpaired"] == "" and verdict(pairs).startswith("one (seed 0)")
    assert found["runs"][0]["p_value"] > pairs["runs"][0]["p_value"]


def test_last_sorts_and_delivered_stands_beside_it(tmp_path):
    """Delivered is the base without best/, the last policy where that was confirmed, else what was tried of best/."""
    entries = folder_of(tmp_path, {"gated": [30], "last": [28], "candidate": [5], "old": [4]}, {})
    for name, chosen in (("last", "last"), ("candidate", "candidate"), ("old", None)):
        folder = tmp_path / Entry(name, 0).folder
        save(folder / "best", config={}, state={}, metrics={"step": 1, "evaluation": evaluation(3).to_dict()})
        facts = {"chosen": chosen, "steps": {}, "evaluations": {}}
        if chosen:
            (folder / "confirm.json").write_text(json.dumps(facts))
    evaluation(20).save(tmp_path / Entry("candidate", 0, "delivered").evaluation)
    found = summarize(tmp_path, entries, budget=100, goal=0.9)
    rows = [(row["method"], row["mean"], row["delivered"]) for row in found["methods"]]
    assert rows == [("gated", 0.75, 0.25), ("last", 0.7, 0.7), ("candidate", 0.125, 0.5), ("old", 0.1, None)]
    assert delivered_by(tmp_path / "runs" / "gated-0") == "base"
    assert found["methods"][0]["gradient_steps"] == 7 and found["methods"][0]["control_steps"] == 100


# ---- which commands, and for how long ----


class Typed:
    """Commands instead of runs: a training logs so many updates per second, an evaluation leaves its file."""

    def __init__(self, monkeypatch, rate: float = 50.0) -> None:
        self.words: list[list[str]] = []

        def burnish(player, words, log):
            self.words.append(list(words))
            named = dict(word.split("=", 1) for word in words[1:])
            out = Path(named["out"])
            out.mkdir(parents=True, exist_ok=True)
            if words[0] == "evaluate":
                evaluation(10).save(out / "evaluation.json")
                for name in ("starts.json", "about.json"):
                    (out / name).write_text("{}")
                return
            steps = int(named.get("train.steps") or named["steps"])
            rows = [{"step": k, "time/elapsed_s": 30 + k / rate} for k in (steps // 2, steps)]
            rows[1] |= {"time/elapsed_s": rows[1]["time/elapsed_s"] + 11, "time/evaluation_s": 11.0}
            (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        monkeypatch.setattr(Player, "_burnish", burnish)


@pytest.mark.parametrize(
    ("name", "verb", "words"),
    [
        ("more_imitation", "pretrain", ["policy=checkpoint", "policy.path=b", "data=d", "train.steps=3000"]),
        ("iql", "offline", ["method=iql", "policy.path=b", "data=d", "steps=3000"]),
        ("best_of_n", "offline", ["method=iql", "method.extraction=best_of_n", "steps=3000"]),
    ],
)
def test_a_free_baseline_is_trained_for_the_minutes_of_the_median_run(name, verb, words, tmp_path, monkeypatch):
    """A probe that makes 50 updates per second, without its evaluation of 11 s, and a minute to fill."""
    typed, config = Typed(monkeypatch), CompareConfig(base="b", methods=["dsrl"], data="d")
    entry = Entry(name, 0)
    Player(config, tmp_path, Stop(), 1).play_free(entry, minutes=1.0)
    probe, training, *tried = typed.words
    assert probe[0] == training[0] == verb and set(words) <= set(training) and "threads=1" in probe
    assert {word for word in probe if "steps=" in word} == {words[-1].replace("3000", str(free_baselines.PROBE))}
    greedy = ["eval.greedy=true" in each for each in tried]
    assert greedy == ([False] if name == "best_of_n" else [True, False])
    plan = json.loads((tmp_path / "runs" / f"{name}-0.plan").read_text())
    assert plan["steps"] == 3000 and plan["updates_per_s"] == pytest.approx(50)
    # Taken up again, it is the same run, however fast the machine is then.
    typed.words.clear()
    (tmp_path / entry.evaluation).unlink()
    Player(config, tmp_path, Stop(), 1).play_free(entry, minutes=9.0)
    assert [each[0] for each in typed.words] == [verb, "evaluate"] and words[-1] in typed.words[0]


def test_what_is_typed_composes():
    for name in free_baselines.TRAININGS:
        words = free_baselines.free_baseline(name, base="b", data="d", steps=100)
        assert main([*words, "--help"]) == 0
        assert main([*words, "stepps=1", "--help"]) == 2, "the check must be able to fail"


def test_the_greedy_base_is_always_played_and_fails_without_costing_others(tmp_path, monkeypatch):
    typed = Typed(monkeypatch)
    player = Player(CompareConfig(base="b", methods=["dsrl"]), tmp_path, Stop(), 1)
    player.play_free(GREEDY_BASE, minutes=1.0)
    assert [words[0] for words in typed.words] == ["evaluate"] and "eval.greedy=true" in typed.words[0]

    def fails(player, words, log):
        raise BurnishError("no imitator")

    monkeypatch.setattr(Player, "_burnish", fails)
    player = Player(CompareConfig(base="b", methods=["dsrl"], data="d"), tmp_path, Stop(), 1)
    player.play_free(Entry("iql", 0), minutes=1.0)
    evaluation(10).save(tmp_path / "evaluations" / "base.json")
    found = summarize(tmp_path, [], [GREEDY_BASE, Entry("iql", 0)], budget=1, goal=0.9)
    rows = {row["label"]: row for row in found["free"]}
    assert rows["iql"]["status"] == "failed" and "no imitator" in rows["iql"]["error"]
    assert found["best_free"] == "base_greedy" and "iql" not in found["lacking"]


def test_the_median_run_is_timed_without_its_evaluations(tmp_path):
    for k, seconds in enumerate((100, 160, 900)):
        (tmp_path / str(k)).mkdir()
        row = {"step": 1, "time/elapsed_s": seconds, "time/saving_s": 10}
        row |= {"time/evaluation_s": 20, "time/exams_s": 10}  # begun by an older version
        (tmp_path / str(k) / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert free_baselines.median_minutes([tmp_path / str(k) for k in range(3)]) == 2


# ---- the page ----


def with_free(folder: Path, standing: str) -> str:
    """The page of a comparison in which the best method, dsrl, stands so."""
    data = json.loads((folder / "compare.json").read_text())
    rows = [
        {
            "method": "base_greedy",
            "label": "base_greedy",
            "seed": 0,
            "final": 0.6,
            "low": 0.5,
            "high": 0.7,
            "minutes": 0,
        },
        {"method": "iql", "label": "iql", "seed": 0, "status": "failed", "error": "out of memory"},
    ]
    for row in data["methods"]:
        row |= {"standing": standing if row["method"] == "dsrl" else UNCLEAR, "over_free": 0.01, "delivered": 0.43}
        row |= {"over_free_low": -0.02, "over_free_high": 0.04, "gradient_steps": 12345.0, "control_steps": 100_000.0}
    lack = "the free baselines more_imitation and best_of_n are missing"
    report_lab.write(folder / "compare.json", data | {"free": rows, "lacking": lack})
    return report_lab.page(folder)


def test_the_page_says_of_a_method_that_it_does_not_beat_what_is_free(tmp_path):
    folder = report_lab.comparison(tmp_path / "c", seeds=1, films=0)
    older = report_lab.page(folder)  # of a version that knew of no free baselines
    assert "free baseline</span>" not in older and "without new episodes" not in older.lower()
    text = with_free(folder, UNCLEAR)
    said = "It does not beat base_greedy (the best without new episodes, 60.0%) beyond doubt"
    assert said in text and text.index(said) < text.index("<main>")
    assert "free baseline</span>" in text and "12,345" in text and "out of memory" in text
    assert "more_imitation and best_of_n are missing" in text and "against base_greedy" in text
    text = with_free(folder, BEATS)
    assert "It beats base_greedy" in text and "It does not beat" not in text
