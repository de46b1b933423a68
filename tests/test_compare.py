"""Methods from one checkpoint: which commands are run, what is read from them, and that a failure costs no other."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike
from verb_lab import refused

from burnish.finetune.build import decision_ticks, prepare
from burnish.finetune.compare.compare import CompareConfig, Player, _claim
from burnish.finetune.compare.comparison import SAID, Entry, area, own, summarize, table, verdict
from burnish.finetune.compare.entrants import entrant
from burnish.finetune.loops import OffPolicyConfig
from burnish.policies.build import build_policy
from burnish.policies.cli.cli import main
from burnish.policies.core import files
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import PolicySpec
from burnish.policies.flow import FlowConfig
from burnish.policies.measure.evaluate import Evaluation
from burnish.policies.measure.statistics import interquartile_mean, stratified_bootstrap, wilson
from burnish.policies.nets.denoiser import DenoiserConfig, MlpBodyConfig
from burnish.policies.runs.interrupt import Stop
from burnish.sim.point_reach import PointReach, PointReachConfig
from seam import METHODS


def evaluation(success: list[bool]) -> Evaluation:
    n = len(success)
    return Evaluation(
        list(range(n)), [float(x) for x in success], [5] * n, success, [not x for x in success], success, success
    )


def run(out: Path, entry: Entry, curve: list[tuple[int, float, float]], success: list[bool]) -> None:
    """What a run and its evaluation leave: trials at (control steps, seconds, success)."""
    (out / entry.folder).mkdir(parents=True)
    rows = [
        {
            "step": i,
            "control_steps": steps,
            "time/elapsed_s": s,
            "time/learning_s": s / 2,
            "eval/success_rate": x,
            "eval/success_low": x - 0.1,
        }
        for i, (steps, s, x) in enumerate(curve)
    ]
    (out / entry.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation(success).save(out / entry.evaluation)


# ---- numbers ----


def noting(typed: list[list[str]]) -> Any:
    """In place of `Player._burnish`: words are noted, and an evaluation leaves its files."""

    def burnish(self: Player, words: list[str], log: Path) -> None:
        typed.append(list(words))
        if words[0] == "evaluate":
            (out,) = (Path(word.removeprefix("out=")) for word in words if word.startswith("out="))
            evaluation([True]).save(out / "evaluation.json")
            for name in ("starts.json", "about.json"):
                files.replace(out / name, '{"world": null}')

    return burnish


def average(x: ArrayLike) -> float:
    return float(np.asarray(x, dtype=np.float64).mean())


def test_the_area_is_the_mean_height_over_the_budget():
    assert area([(0, 0, 0.2), (50, 0, 0.6), (100, 0, 0.6)], 100) == pytest.approx(0.5)
    # A run whose last evaluation came before the end counts as if it had stayed there; one that overshot is cut.
    assert area([(0, 0, 0.2), (50, 0, 0.6)], 100) == pytest.approx(0.5)
    assert area([(0, 0, 0.0), (120, 0, 1.0)], 100) == pytest.approx(0.5)


def test_the_interquartile_mean_leaves_a_quarter_out_at_either_end():
    scores = [0.0, 0.1, 0.5, 0.6, 0.7, 0.8, 0.9, 100.0]
    assert interquartile_mean(scores) == pytest.approx((0.5 + 0.6 + 0.7 + 0.8) / 4)
    from scipy.stats import trim_mean

    for n in range(1, 30):
        x = np.random.default_rng(n).normal(size=n)
        assert interquartile_mean(x) == pytest.approx(trim_mean(x, 0.25))


def test_the_bootstrap_is_stratified_and_covers():
    """Strata around 0 and 10: drawn together, the mean would spread by 10 / sqrt(16); drawn apart, by their own 0.1.
    Of 200 intervals at 90 %, about 180 cover the true mean (binomial deviation 4.2; few runs make them a bit short)."""
    random = np.random.default_rng(0)
    apart = [random.normal(0, 0.1, 8), random.normal(10, 0.1, 8)]
    low, high = stratified_bootstrap(apart, average, draws=500)
    assert high - low < 0.2
    low, high = stratified_bootstrap([np.concatenate(apart)], average, draws=500)
    assert high - low > 4
    covered = 0
    for i in range(200):
        x = np.random.default_rng(i).normal(size=20)
        low, high = stratified_bootstrap([x], average, confidence=0.9, draws=300)
        covered += low < 0 < high
    assert 160 <= covered <= 192
    assert stratified_bootstrap(apart) == stratified_bootstrap(apart)
    with pytest.raises(BurnishError, match="at least one score"):
        stratified_bootstrap([[]])


def test_a_summary_reads_what_the_runs_left_and_chooses_on_the_seeds_for_selection(tmp_path):
    evaluation([True] * 4 + [False] * 16).save(tmp_path / "evaluations" / "base.json")
    # On the seeds for selection `a` ends higher, on the others `b` does: the choice must not see those.
    # It falls by updates before its first decision.
    run(tmp_path, Entry("a", 0), [(0, 0, 0.2), (0, 30, 0.1), (100, 60, 0.95)], [True] * 16 + [False] * 4)
    run(tmp_path, Entry("a", 1), [(0, 0, 0.2), (50, 30, 0.5), (100, 60, 0.6)], [True] * 12 + [False] * 8)
    run(tmp_path, Entry("b", 0), [(0, 0, 0.2), (100, 90, 0.9)], [True] * 19 + [False])
    (tmp_path / "runs" / "b-1.failed").write_text("out of memory\n")
    entries = [Entry(name, seed) for seed in (0, 1) for name in "ab"]
    found = summarize(tmp_path, entries, budget=100, goal=0.9)
    json.dumps(found, allow_nan=False)
    assert found["best"]["method"] == "a" and found["best"]["seed"] == 0 and found["best"]["final"] == 16 / 20
    rows = {row["method"]: row for row in found["methods"]}
    assert (rows["a"]["runs"], rows["a"]["failed"], rows["b"]["runs"], rows["b"]["failed"]) == (2, 0, 1, 1)
    assert (rows["a"]["low"], rows["a"]["high"]) == wilson(14, 20) and rows["a"]["mean"] == pytest.approx(0.7)
    assert rows["a"]["dip"] == pytest.approx(-0.1) and rows["b"]["dip"] == 0
    assert rows["a"]["time_to_goal_s"] is None and rows["b"]["time_to_goal_s"] == 90  # of two runs one never got there
    runs = {(row["method"], row["seed"]): row for row in found["runs"]}
    assert runs["b", 1]["status"] == "failed" and "out of memory" in runs["b", 1]["error"]
    assert runs["a", 0]["difference"] == pytest.approx(0.6) and runs["a", 0]["steps_to_goal"] == 100
    assert runs["b", 0]["timing"] == {"learning_s": 45}
    assert "a (seed 0), chosen on other seeds, has success 80.0%" in verdict(found)
    assert table(found).splitlines()[0].split()[0] == "method" and "b" in table(found)


def test_other_seeds_are_other_runs_and_other_episodes(tmp_path, monkeypatch):
    """``seed`` is that of the first run, and of the episodes in the end."""
    typed: list[list[str]] = []
    monkeypatch.setattr(Player, "_burnish", noting(typed))
    config = CompareConfig(base="b", methods=["dsrl"], seed=7, videos=1)
    player = Player(config, tmp_path, Stop(), 1)
    player.evaluate("b", tmp_path / "base.json")
    player.film({"base": "b"})
    player.play(entrant("dsrl", "insert", 1000, 4), Entry("dsrl", 7))
    assert [words[0] for words in typed[:3]] == ["evaluate", "evaluate", "finetune"]
    assert all("seed=7" in words for words in typed)


def test_runs_on_the_same_seeds_are_no_more_episodes_than_one_of_them():
    one = evaluation([True, False, True, True])
    assert own(one, one, one) == own(one) == {"final": 0.75, **dict(zip(("low", "high"), wilson(3, 4), strict=True))}
    assert own(one, evaluation([False] * 4))["final"] == 0.375
    silent = replace(one, success=None, returns=[1.0, 2.0, 3.0, 4.0])
    assert own(silent, silent) == own(silent)


# ---- commands ----


def test_names_are_experiments_then_methods_then_files(tmp_path):
    shipped = entrant("dsrl", "insert", 100_000, 4)
    assert (shipped.words, shipped.decisions, shipped.method) == (["experiment=insert/dsrl"], 25_000, "dsrl")
    assert entrant("residual_sac", "insert", 1001, 4).decisions == 1001  # one tick is one decision
    plain = entrant("dsrl", "two_mode", 1001, 4)
    assert (plain.words, plain.decisions) == (["method=dsrl"], 251)
    assert entrant("rpd", "insert", 100, 8).decisions == 25  # the experiment's student executes 4
    path = tmp_path / "mine.yaml"
    path.write_text(
        "defaults: [override /method: residual_ppo]\nworlds: 8\n"
        "method: {discount: {gamma: 0.9}, ppo: {target_kl: null}}\n"
    )
    mine = entrant(str(path), "insert", 100, 4)
    words = ["method=residual_ppo", "worlds=8", "method.discount.gamma=0.9", "method.ppo.target_kl=null"]
    assert (mine.label, mine.words, mine.decisions) == ("mine", words, 100)
    with pytest.raises(BurnishError, match="neither an experiment of insert, nor a method, nor a YAML file; did"):
        entrant("dsrrl", "insert", 100, 4)
    path.write_text("worlds: 8\n")
    with pytest.raises(BurnishError, match="chooses no method"):
        entrant(str(path), "insert", 100, 4)


@pytest.mark.parametrize("name", ["dsrl", "rfs", "reinflow", "dppo", "residual_td3", "residual_ppo", "rpd"])
def test_decisions_last_as_long_as_the_budget_counts(name):
    """Against what a loop of the method plays, in a world in which no episode ends: the control for the table."""
    env = ScaledEnv(PointReach(2, PointReachConfig(max_steps=10_000, radius=1e-9)))
    spec = PolicySpec(env.spec.obs, env.spec.action, 4, 3)
    base = build_policy(FlowConfig(steps=10, net=DenoiserConfig(mlp=MlpBodyConfig(hidden=[8]))), spec, seed=0)
    config = METHODS[name].config()
    if isinstance(config.loop, OffPolicyConfig):
        config.loop = OffPolicyConfig(warmup=100)
    loop: Any = prepare(config, base, env, probe=False)
    for _ in range(3):
        loop.decide(warm=True)
    assert int(loop.statistics.ticks) == loop.statistics.decisions * decision_ticks(config, 3)


def test_bad_input_is_one_sentence_before_anything_is_played(tmp_path, capsys):
    for words, sentence in (
        (["methods=dsrl"], "base=... must name a checkpoint"),
        (["base=nowhere", "methods=dsrl"], "nowhere"),
        (["base=x", "methods=dsrl", "seeds=0"], "seeds=0 must be at least 1"),
        (["base=x", "methods=dsrl", "episodes=2", "videos=3"], "videos=3"),
    ):
        assert sentence in refused(capsys, "compare", *words, f"out={tmp_path}/out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_changed_between_two_sittings_does_not_mix_two_settings(tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.finetune.compare.compare.weights_of", lambda base: "b")
    file = tmp_path / "my.yaml"
    config = CompareConfig(base="b", methods=[str(file)], out=str(tmp_path / "out"), resume=True)

    def claimed(warmup: int) -> None:
        file.write_text(f"defaults: [override /method: dsrl]\nmethod: {{loop: {{warmup: {warmup}}}}}\n")
        _claim(config, {"my": entrant(str(file), None, 1000, 4)})

    claimed(100)
    claimed(200)  # nothing was played yet
    (tmp_path / "out/runs/my-0").mkdir(parents=True)
    claimed(200)
    with pytest.raises(BurnishError, match="holds runs of my with other settings"):
        claimed(300)
    _claim(config, {"other": entrant("dsrl", None, 1000, 4)})


# ---- the whole ----


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    assert main(["collect", "env=point_reach", "episodes=6", f"out={folder}/data"]) == 0
    words = ["policy.net.mlp.hidden=[16]", "policy.steps=2", "train.steps=30", "eval.episodes=4", "chunk.execute=4"]
    assert main(["pretrain", "policy=flow", *words, f"data={folder}/data", f"out={folder}/base"]) == 0
    return folder / "base"


def test_a_comparison_whose_base_cannot_be_evaluated_does_not_occupy_its_folder(base, tmp_path, capsys, monkeypatch):
    def fails(self, words, log):
        raise BurnishError("this world cannot be built")

    monkeypatch.setattr(Player, "_burnish", fails)
    words = ["compare", f"base={base}", "methods=residual_ppo", f"out={tmp_path}/out"]
    for budget in (400, 800):
        assert "this world cannot be built" in refused(capsys, *words, f"budget={budget}")
    evaluation([True]).save(tmp_path / "out/evaluations/base.json")
    assert "holds a comparison" in refused(capsys, *words)


def test_what_could_not_learn_or_run_is_refused_before_anything_is_played(base, tmp_path, capsys, monkeypatch):
    played: list[list[str]] = []
    monkeypatch.setattr(Player, "_burnish", noting(played))
    (tmp_path / "mine.yaml").write_text("defaults: [override /method: residual_td3]\nmethod: {loop: {warmup: 30}}\n")
    (tmp_path / "typo.yaml").write_text("defaults: [override /method: residual_ppo]\nmethod: {bound: 7}\n")
    for words, sentence in (
        # DSRL decides for 4 ticks here, and its warm-up has 6000 decisions by default, 1000 in the experiment.
        (
            ["methods=dsrl", "budget=24000"],
            "budget=24000 control steps are 6000 decisions of dsrl and end within its warm-up",
        ),
        (
            ["methods=dsrl", "budget=4000", "task=insert"],
            "its warm-up of 1000, so nothing would be learnt; raise budget, or lower method.loop.warmup",
        ),
        ([f"methods=residual_ppo,{tmp_path}/mine.yaml", "budget=30"], "30 decisions of mine"),
        (["methods=dagger"], "dagger learns from an expert who takes over, and nothing says which"),
        ([f"methods={tmp_path}/typo.yaml"], "the settings of typo in methods= are wrong: bound=7"),
    ):
        assert main(["compare", f"base={base}", *words, f"out={tmp_path}/out"]) == 2
        said = capsys.readouterr().err
        assert sentence in said and said.count("\n") == 1
    assert not played and not (tmp_path / "out").exists()
    main(["compare", f"base={base}", f"methods={tmp_path}/mine.yaml", "budget=31", f"out={tmp_path}/out", "videos=0"])
    assert "finetune" in [words[0] for words in played], "a budget behind the warm-up is played"


def test_a_base_of_no_world_is_refused_with_the_setting_that_names_one(base, tmp_path, capsys):
    assert main(["data", "convert", f"{base.parent}/data", f"out={tmp_path}/data"]) == 0
    about = tmp_path / "data/meta/info.json"
    told = json.loads(about.read_text())
    told["burnish"]["meta"].pop("env", None)
    about.write_text(json.dumps(told))
    words = ["policy.net.mlp.hidden=[16]", "train.steps=1"]
    assert main(["pretrain", "policy=flow", *words, f"data={tmp_path}/data", f"out={tmp_path}/base"]) == 0
    out = capsys.readouterr().out
    assert "the policy is not tried" in out and f"policy.path={tmp_path}/base env=...)" in out
    assert "world=FILE" in refused(capsys, "compare", f"base={tmp_path}/base", "methods=dsrl", f"out={tmp_path}/out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_comparison_runs_fails_in_part_resumes_and_says_so(base, tmp_path, capsys, monkeypatch):
    small = "defaults: [override /method: {0}]\nworlds: 4\n"
    good, bad = tmp_path / "steady.yaml", tmp_path / "broken.yaml"
    good.write_text(small.format("residual_ppo") + "method: {loop: {decisions_per_update: 10}, agent: {hidden: [8]}}\n")
    bad.write_text(small.format("residual_ppo") + "data: nowhere\n")
    out = tmp_path / "out"
    words = [f"base={base}", f"methods={good},{bad}", "seeds=2", "budget=160", "episodes=6", "evaluations=2"]
    words += ["evaluation_episodes=4", "confirm_episodes=4", "worlds=4", "videos=0", "jobs=2", f"out={out}"]
    assert main(["compare", *words]) == 0
    printed = capsys.readouterr()
    found = json.loads((out / "compare.json").read_text())
    states = {(row["method"], row["seed"]): row["status"] for row in found["runs"]}
    expected = {"steady": "finished", "broken": "failed"}
    assert states == {(name, seed): state for name, state in expected.items() for seed in (0, 1)}
    assert "data" in next(row["error"] for row in found["runs"] if row["method"] == "broken")
    assert "steady" in printed.out and "broken-0 failed" in printed.err
    # Nothing says what the base has imitated, so only what needs no recordings is there, and how to get the rest.
    assert [row["label"] for row in found["free"]] == ["base_greedy"] and found["free"][0]["status"] == "finished"
    assert "more_imitation, iql and best_of_n are missing" in printed.out and "data=FOLDER" in printed.out
    steady = next(row for row in found["methods"] if row["method"] == "steady")
    assert steady["standing"] and steady["delivered"] is not None and steady["gradient_steps"] > 0
    assert steady["control_steps"] >= 160
    assert SAID[steady["standing"]].format(found["best_free"] or "base") in printed.out
    assert set(json.loads((out / "evaluations" / "starts.json").read_text())["values"]) == {
        str(seed) for seed in Evaluation.load(out / "evaluations" / "base.json").seeds
    }
    # Again without resume: refused. With it: what is there is not played again, what failed is tried again.
    assert main(["compare", *words]) == 2 and "resume=true continues it" in capsys.readouterr().err
    bad.write_text(good.read_text())
    before = (out / "evaluations" / "steady-0.json").stat().st_mtime_ns
    words += [f"data={base.parent}/data", "resume=true"]
    with files.locked(out / ".lock", "taken"):
        assert main(["compare", *words]) == 2 and "another process is writing" in capsys.readouterr().err
    assert main(["compare", *words]) == 0
    again = json.loads((out / "compare.json").read_text())
    assert {row["status"] for row in again["runs"]} == {"finished"}
    assert (out / "evaluations" / "steady-0.json").stat().st_mtime_ns == before
    # The same settings under two names and one seed are one result.
    finals = {(row["method"], row["seed"]): (row["final"], row["curve"][-1][2]) for row in again["runs"]}
    assert finals["broken", 0] == finals["steady", 0]
    free = {row["label"]: row for row in again["free"]}
    assert set(free) == {
        "base_greedy",
        "more_imitation",
        "more_imitation_greedy",
        "iql",
        "iql_greedy",
        "best_of_n",
    }
    assert {row["status"] for row in free.values()} == {"finished"} and not again["lacking"]
    for name in ("more_imitation", "iql", "best_of_n"):
        plan = json.loads((out / "runs" / f"{name}-0.plan").read_text())
        assert free[name]["gradient_steps"] == plan["steps"] and free[name]["control_steps"] == 0
    capsys.readouterr()
    other = tmp_path / "other.npz"
    np.savez(other, observations=np.zeros((2, 2)), actions=np.zeros((2, 2)), episode_ends=[2])
    for wrong, name in (("budget=320", "budget"), (f"data={other}", "data_sha256")):
        assert f"begun with another {name}" in refused(capsys, "compare", *words, wrong)


@pytest.mark.slow
def test_updates_for_minutes_of_a_processor_are_found_by_a_probe(base, monkeypatch):
    """Of a tiny policy some hundred fit into a second, and four times the minutes hold about four times as many:
    two probes on a busy machine differ by less than a factor of two."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    steps_in = import_module("refine_runs").steps_in
    one, two = (steps_in(minutes, "more_imitation", base=base, data=base.parent / "data") for minutes in (0.1, 0.4))
    assert one > 50 and 2 < two / one < 8
    with pytest.raises(BurnishError, match="the probe of iql ended with status 2"):
        steps_in(0.1, "iql", base=base.parent / "nothing", data=base.parent / "data")
