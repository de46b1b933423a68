"""Every script of benchmarks/ runs, ends in the RESULT line of its issue, and writes what it says into a JSON file.

Speeds depend on the machine, so they are bounded only by what no machine can do; what can be known is exact.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SHARED = {"control_parts", "measure", "revisions", "runners", "sim_peers", "envpool_loop"}
SHARED |= {"lerobot_worker", "lerobot_worlds", "vla_worker", "scale_model", "scale_parts"}
SHARED |= {
    "refine_bases",
    "refine_minutes",
    "refine_runs",
    "refine_settings",
    "refine_tables",
    "public_bases",
    "published_dppo",
}
LEVELS = ("pictures", "embeddings", "keys")
KEYS = {
    "bases": {
        "worst_clean_expert",
        "tasks",
        "refinable_tasks",
        "smaller_hole_success",
        "insert_overlap_median",
        "insert_overlap_p99",
        "insert_tight_overlap_median",
        "insert_tight_overlap_p99",
    },
    "absolute_targets": {f"{task}_{what}" for task in ("insert", "push") for what in ("base", "plain", "offset")},
    "cross_embodiment": {
        f"{task}_{what}"
        for task in ("insert", "push")
        for what in ("base", "base_greedy", "other", "specialist", "imitation", "generalist", "told")
    },
    "lift_quality": {
        "missing",
        *(f"{robot}_{way}" for robot in ("hopper", "walker2d") for way in ("carried", "fresh", "sac")),
    },
    "mbpo_quality": {
        *(f"{task}_{way}" for task in ("pendulum", "hopper") for way in ("sac", "sac_more", "mbpo", "shuffled")),
    },
    "vla_quality": {
        f"vla_{world}{what}"
        for world in ("", "discs_")
        for what in ("mean_change", "worst_instruction", "swap_control")
    },
    "onpolicy_speed": {
        "steps_per_s_reinflow",
        "steps_per_s_dppo",
        "update_peak_share",
        "sim_over_raw",
        "reinflow_over_dppo",
        "reinflow_over_dppo_4",
    },
    "imagine_quality": {
        *(f"insert_{what}" for what in ("imagine", "imagine_data", "unguarded", "dsrl", "fewer_steps")),
        *(f"insert_{inside}_residual" for inside in ("imagine", "unguarded")),
        *(f"{task}_{steps}" for task in ("push", "pick_place") for steps in ("20k", "100k")),
    },
    "imagine_speed": {"imagined_over_bare", "imagined_over_raw", "fit_s"},
    "improve": {"improve_median_change", "improve_regret"},
    "outside_speed": {"pool_over_async", "pool_over_limit", "pool_over_registered", "pusht"},
    "outside_experts": {"worst_clean", "noisy", "clumsy", "tasks"},
    "policy_speed": {"train_peak_share", "act_p99_us"},
    "ray_overhead": {"ray_overhead"},
    "seeds_speed": {f"seeds8_over_1_{x}" for x in ("cpu", "cuda") if x == "cpu" or torch.cuda.is_available()},
    "scale_costs": {"predicted_over_measured", "predicted_over_simulated", "actors_until_learner_bound"},
    "public_tasks": {"tasks_above_90", "best_median_change", "free_beaten", "missing"},
    "two_mode": {
        "flow_success",
        "shortcut_success",
        "diffusion_success",
        "least_squares_success",
        "worst_share_gap",
    },
    "quickstart": {"pooled_low", "worst", "base", "base_worst", "minutes", "seeds"},
    "refine_quality": {
        "greedy_beaten",
        "delivered_worse",
        "insert_best",
        "push_best",
        "pick_place_best",
        "insert_minutes",
    },
    "chunks": {
        "reference",
        *(f"{way}_{name}" for way in ("queue", "ensemble", "inpaint", "guide") for name in ("success", "beyond")),
    },
    "lerobot_round_trip": {
        "parity",
        "act_differ",
        *(f"{name}_{at}" for name in ("act", "diffusion") for at in ("lerobot", "burnish", "refined", "back")),
    },
    "lerobot_owner": {"minutes", "cpu_minutes", "base", "refined"},
    "control_loop": {
        "loop200_p999_us",
        "idle200_p999_us",
        "loop200_miss_share",
        "infer_p99_us",
        "infer_best_p99_us",
        "guard_us",
        "parity",
    },
    "rehearsal": {"simulation", "twin", "emulated", "gentle", "gentle_refined", "guarded"},
    "residual_observations": {"insert_residual_ppo_gain"},
    "render_speed": {"over_renderer", "over_plain_renderer", "frames_per_s"},
    "sim_speed": {"of_raw", "over_async", "over_sync", "over_envpool", "half_cheetah_over_async"},
    "from_scratch": {f"{name}_over_sb3" for name in ("sac", "sac_normalized", "td3", "td3_normalized", "ppo")},
    "same_numbers": {"equal", "of"},
    "tdmpc_quality": {"tdmpc_over_published", "tdmpc_over_sac", "tasks"},
    "sizes": {
        *(f"{name}_{what}" for name in ("dppo", "residual_td3", "dsrl") for what in ("live", "added")),
        *("lines", "lines_before", "long_files", "cycles", "duplicates"),
    },
    "vla_parity": {f"vla_{what}" for what in ("actions", "spread", "loss", "back", "tensors")},
    "vla_speed": {
        *(f"{what}_{level}" for what in ("collected_per_s", "learnt_per_s", "kept_mb") for level in LEVELS),
        *("collected_peak_share", "learnt_peak_share", "load_s", "decision_s", "peak_gb", "peak_gb_bfloat16"),
    },
    "warp_difference": {"locomotion_agree", "arm_agree", "success_gap"},
    "warp_speed": {"warp_over_c_hopper"},
    "update_speed": {"sac_over_sb3", "sac_peak_share", "ppo_flow_peak_share"},
}

pytestmark = pytest.mark.slow


def turn(name: str) -> pytest.MarkDecorator:
    """All tests of a script's quick run are played together, by one run of the tests in three."""
    return pytest.mark.rotating(3, case=list(KEYS).index(name))


EACH = pytest.mark.parametrize("name", [pytest.param(name, marks=turn(name)) for name in KEYS])


def run(name: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *options]
    variables = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=variables)


def result(stdout: str) -> dict[str, float]:
    last = stdout.splitlines()[-1].split()
    assert last[0] == "RESULT", stdout
    return {key: float(value) for key, value in (pair.split("=") for pair in last[1:])}


class Quick(dict[str, tuple[Path, str]]):
    """name -> (folder of the JSON files, stdout) of one quick run of a script, made when it is asked for."""

    def __init__(self, made: pytest.TempPathFactory) -> None:
        self._made = made

    def __missing__(self, name: str) -> tuple[Path, str]:
        folder = self._made.mktemp(name)
        (folder / f"{name}.json").write_text("a full result")
        process = run(name, "--quick", "--out", str(folder))
        if any(f"there is no {what}" in process.stderr for what in ("LeRobot", "Ray", "mujoco-warp")):
            pytest.skip(process.stderr.strip())
        assert process.returncode == 0, process.stderr
        self[name] = folder, process.stdout
        return self[name]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Quick:
    return Quick(tmp_path_factory)


def report(quick: Quick, name: str) -> dict[str, Any]:
    return json.loads((quick[name][0] / f"{name}_quick.json").read_text())


def test_the_table_of_the_rehearsal_is_that_of_its_file(tmp_path: Path):
    results, docs = BENCHMARKS / "results", BENCHMARKS.parent / "docs" / "robots.md"
    (tmp_path / "rehearsal.json").write_text((results / "rehearsal.json").read_text())
    assert run("rehearsal", "--report", "--out", str(tmp_path)).returncode == 0
    made = (tmp_path / "rehearsal.md").read_text()
    assert made == (results / "rehearsal.md").read_text()
    assert "<!-- rehearsal -->\n" + made[made.index("| robot") :] + "<!-- end -->" in docs.read_text()


def test_the_path_of_an_owner_was_measured_as_it_is_printed():
    text = (BENCHMARKS.parent / "docs" / "lerobot.md").read_text(encoding="utf-8")
    printed = "".join(re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).splitlines()
    written = json.loads((BENCHMARKS / "results" / "lerobot_owner.json").read_text(encoding="utf-8"))
    assert len(printed) > 10 and not written["quick"]
    assert [row["printed"] for row in written["rows"]] == [x for x in printed if not x.startswith("export ")]
    made = (BENCHMARKS / "results" / "lerobot_owner.md").read_text(encoding="utf-8")
    assert "<!-- lerobot_owner -->\n" + made[made.index("| command") :] + "<!-- end -->" in text


def shared(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_percentiles_are_those_of_numpy():
    measure = shared("measure")
    samples = np.random.default_rng(0).lognormal(size=57)
    for percent in (0, 50, 99, 100):
        assert measure.percentile(samples.tolist(), percent) == pytest.approx(np.percentile(samples, percent))


def test_an_older_revision_is_asked_in_its_own_words(tmp_path: Path):
    """Evaluations were set by `trial.*`, before policies/evaluator.py; `eval.*` ended its commands with status 2."""
    revisions, words = shared("revisions"), ["seed=3", "eval.episodes=2", "eval.confirm=2", "out=eval.x"]
    assert revisions.translated(BENCHMARKS.parent, words) == words
    assert revisions.translated(tmp_path, words) == ["seed=3", "trial.episodes=2", "trial.confirm=2", "out=eval.x"]


def test_every_script_is_known_here():
    assert {path.stem for path in BENCHMARKS.glob("*.py")} - SHARED == KEYS.keys()


@pytest.mark.slow
@EACH
def test_the_last_line_is_the_result_and_so_is_the_file(quick: Quick, name: str):
    printed, written = result(quick[name][1]), report(quick, name)
    assert printed.keys() == KEYS[name]
    assert printed == pytest.approx(written["result"], rel=1e-3)  # four digits are printed
    assert written["quick"] is True
    assert {"date", "machine"} <= written.keys()
    assert {"processor", "cores", "threads", "torch"} <= written["machine"].keys()


@EACH
def test_a_quick_run_leaves_the_full_result_alone(quick: Quick, name: str):
    assert (quick[name][0] / f"{name}.json").read_text() == "a full result"


@turn("bases")
def test_nothing_fits_a_smaller_hole(quick: Quick):
    found = report(quick, "bases")["result"]
    assert found["smaller_hole_success"] == 0 and found["worst_clean_expert"] > 0.9
    assert found["insert_overlap_p99"] < 0.5 and found["insert_tight_overlap_p99"] < 0.75, "shares of the clearance"


@turn("policy_speed")
def test_policy_speed_counts_the_flops_of_an_update(quick: Quick):
    """By hand: each layer of a x b weights costs 2ab per row forward, again for the gradient of its weights, and again
    for that of its input, which the first layer does not need."""
    layers = [20 * 256, 256 * 256, 256 * 256, 256 * 16 * 7]
    by_hand = 2 * 256 * (3 * sum(layers) - layers[0])
    row = next(row for row in report(quick, "policy_speed")["rows"] if row["policy"] == "gaussian")
    assert row["flops_per_update"] == by_hand


@turn("policy_speed")
def test_policy_speed_is_consistent(quick: Quick):
    written = report(quick, "policy_speed")
    assert written["machine"]["threads"] == 1
    for row in written["rows"]:
        assert 0 < row["act_p50_us"] <= row["act_p99_us"]
        assert row["gflop_per_s"] == pytest.approx(row["flops_per_update"] * row["samples_per_s"] / 256 / 1e9)
        # The peak is a median of the same machine's best products; a third above it would be a wrong count.
        assert 0 < row["peak_share"] < 1.33
    kinds = {(row["policy"], row["body"], row["camera"], row["steps"]): row for row in written["rows"]}
    assert len(kinds) == len(written["rows"])
    few, many = (kinds["flow", "mlp", "none", steps]["act_p50_us"] for steps in (4, 10))
    assert few < many  # whatever the machine
    one_step, ten_steps = kinds["flow shortcut", "mlp", "none", 1], kinds["flow", "mlp", "none", 10]
    assert written["result"] == {
        "train_peak_share": ten_steps["peak_share"],
        "act_p99_us": one_step["act_p99_us"],
    }


@turn("update_speed")
def test_update_speed_counts_the_flops_of_an_update(quick: Quick):
    """By hand, SAC: the target (both networks forward), the critic (forward, weights, the input of its second layer),
    the actor (both forward, through the critic to its input, and the actor's own weights and inputs). The last layer
    of a critic is a sum, which does not count."""
    actor, critic = [17 * 256, 256 * 256, 256 * 12], [23 * 256, 256 * 256] * 2
    target = sum(actor) + sum(critic)
    of_critic = 2 * sum(critic) + 2 * 256 * 256
    of_actor = sum(actor) + 2 * sum(critic) + 2 * sum(actor) - actor[0]
    row = next(row for row in report(quick, "update_speed")["rows"] if row["learner"] == "sac")
    assert row["flops_per_update"] == 2 * 256 * (target + of_critic + of_actor)


@turn("update_speed")
def test_update_speed_is_consistent(quick: Quick):
    written = report(quick, "update_speed")
    rows = {row["learner"]: row for row in written["rows"]}
    assert len(rows) == len(written["rows"])
    for row in rows.values():
        assert row["gflop_per_s"] == pytest.approx(row["flops_per_update"] * row["updates_per_s"] / 1e9)
        assert 0 < row["peak_share"] < 1.33
    assert [name for name, row in rows.items() if row["over_sb3"] is not None] == ["sac"]
    assert rows["sac"]["updates_per_s"] > rows["sac, 10 members"]["updates_per_s"]
    assert written["result"] == {
        "sac_over_sb3": rows["sac"]["over_sb3"],
        "sac_peak_share": rows["sac"]["peak_share"],
        "ppo_flow_peak_share": rows["ppo_flow"]["peak_share"],
    }


@turn("sim_speed")
def test_sim_speed_is_consistent(quick: Quick):
    written = report(quick, "sim_speed")
    rows = {row["task"]: row for row in written["rows"]}
    assert list(rows) == ["half_cheetah", "ant", "humanoid", "insert"]
    assert written["setting"]["threads"] == 2
    installed = written["versions"]["envpool"].startswith("envpool==")
    for name, row in rows.items():
        assert row["worlds"] == 16
        # Both do the same steps. Blocks of a tenth of a second on a busy machine can be off by a lot, but not by this.
        assert 0 < row["ours"] < 10 * row["limit"]
        assert (row["envpool"] is not None) == (installed and name != "insert")
        assert (row["threads"] is not None) == (name in ("half_cheetah", "ant"))
    found = written["result"]
    for key in ("of_raw", "over_async", "over_sync"):
        assert found[key] == min(row[key] for row in rows.values())
    assert found["half_cheetah_over_async"] == rows["half_cheetah"]["over_async"]
    assert (found["over_envpool"] > 0) == installed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["policy_speed", "update_speed"])
def test_a_missing_device_is_one_sentence_and_status_2(name: str):
    process = run(name, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert process.returncode == 2
    assert "--device=cuda needs a CUDA device" in process.stderr.splitlines()[-1]
