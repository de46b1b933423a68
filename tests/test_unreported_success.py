"""A key of success that no step reports: each verb says so once, and a number that is a return is called one."""

from __future__ import annotations

import json

import pytest
from verb_lab import refused

from burnish.policies.cli.cli import main

WORLD = ["env=gym", "env.id=odd_worlds:Passing", "env.max_steps=3"]
EVAL = ["eval.episodes=2", "eval.worlds=2", "eval.confirm=2", "threads=1"]
NOTE = "note: no step reported env.success=morred; env.success=KEY names another key of its info; its info has success"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    words = ["method=tdmpc", "method.loop.warmup=4", "method.loop.initial_updates=0", "method.loop.batch=4"]
    out = tmp_path_factory.mktemp("run")
    assert main(["finetune", *words, *WORLD, *EVAL, "worlds=2", "total=6", f"out={out}"]) == 0
    return out


@pytest.mark.parametrize(("key", "number"), [("morred", "return"), ("success", "success")])
def test_finetuning_says_once_that_nothing_reports_success(base, key, number, tmp_path, capsys):
    words = [f"policy.path={base}", "method=residual_ppo", "worlds=2", "method.loop.decisions_per_update=3", "total=6"]
    assert main(["finetune", *words, *WORLD, f"env.success={key}", *EVAL, f"out={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert said.count(NOTE) == (key == "morred") and f"on 2 fresh seeds the start has {number} " in said
    assert f"env=gym env.id=odd_worlds:Passing env.max_steps=3 env.success={key})" in said, "the words that try it"


def test_a_race_refuses_a_named_key_that_nothing_reports_and_takes_the_right_one(base, tmp_path, capsys):
    (tmp_path / "quick.yaml").write_text(
        "defaults: [override /method: residual_ppo]\nworlds: 2\nmethod: {loop: {decisions_per_update: 3}}\n"
    )
    words = [f"policy.path={base}", f"methods={tmp_path}/quick.yaml", "steps=30", f"out={tmp_path}/out"]
    words += [*WORLD, "env.kwargs={at: 9}", *EVAL]
    assert "no step of 2 episodes of the base reported env.success=morred" in refused(
        capsys, "improve", *words, "env.success=morred"
    )
    assert main(["improve", *words]) == 0, "the folder is free"
    said = capsys.readouterr().out
    assert said.count("2 worlds in") == 1, "each share would repeat it"
    assert "success on the way" in said and "policy.path=" in said and "env=...)" in said, (
        "settings are more than names"
    )
    assert len(json.loads((tmp_path / "out/race.json").read_text())["shares"]) > 1
