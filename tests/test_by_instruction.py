"""Success for each instruction: in an evaluation, with swapped words, in the table of a comparison and on its page."""

from __future__ import annotations

import json
from typing import Any

import pytest
from verb_lab import refused

from burnish.finetune.compare.comparison import BASE, instruction_table
from burnish.finetune.compare.report.instructions import Cell, instructions_of
from burnish.finetune.compare.report.read import Comparison, Entry
from burnish.policies.build import build_policy, describe
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import ChunkConfig, chunk_spec
from burnish.policies.flow import FlowConfig
from burnish.policies.measure.by_instruction import by_instruction, lines
from burnish.policies.measure.evaluate import Evaluation, evaluate, evaluation_seeds
from burnish.policies.runs.checkpoint import save
from burnish.policies.vla.words import Words
from burnish.sim.build import make_env, named
from burnish.sim.discs import SENTENCES, DiscsConfig
from burnish.sim.experts import make_expert

BLIND = DiscsConfig(image=False)


def told(texts: list[str], success: list[bool]) -> Evaluation:
    n, no = len(texts), [False] * len(texts)
    return Evaluation(list(range(n)), [0.0] * n, [1] * n, no, no, success, success, instructions=texts)


def test_counts_and_intervals():
    evaluation = told(["b", "a", "a", "b", "a"], [True, True, False, True, False])
    found = by_instruction(evaluation)
    assert list(found) == ["a", "b"] and found["a"]["episodes"] == 3 and found["b"]["success_rate"] == 1
    assert found["a"]["success_low"] < 1 / 3 < found["a"]["success_high"]
    assert list(lines(evaluation))[-1] == "  mean over 2 instructions 66.7%, worst 33.3%"
    assert by_instruction(Evaluation([1], [0.0], [1], [True], [False])) == {}
    assert Evaluation.from_dict(evaluation.to_dict()) == evaluation
    assert by_instruction(evaluation, evaluation) == found  # the same seeds twice tell nothing more
    with pytest.raises(BurnishError, match="one value per seed"):
        Evaluation([1, 2], [0.0] * 2, [1] * 2, [True] * 2, [False] * 2, instructions=["a"])


@pytest.mark.parametrize("worlds", [3, 12])
def test_an_evaluation_knows_what_each_episode_was_told(worlds: int):
    seeds = evaluation_seeds(10)
    env: Any = make_env(BLIND, worlds)
    found = evaluate(ScaledEnv(env), make_expert(BLIND, worlds, env=env), seeds)
    alone: Any = make_env(BLIND, 10)
    alone.reset(None, seeds)
    assert found.instructions == alone.instructions
    quiet: Any = make_env("two_mode", 2)
    assert evaluate(ScaledEnv(quiet), make_expert("two_mode", 2), seeds[:2]).instructions is None


def test_the_table_of_a_comparison():
    base, method = told(["a", "b\x1b"], [False, True]), told(["a", "b\x1b"], [True, True])
    found = {"instructions": {BASE: by_instruction(base), "dppo": by_instruction(method)}}
    (text,) = instruction_table(found)
    assert [line.split() for line in text.strip().splitlines()] == [
        ["success", "by", "instruction", "episodes", "base", "dppo"],
        ["a", "1", "0", "1"],
        ["b\\x1b", "1", "1", "1"],
    ]
    assert not list(instruction_table({})) and not list(instruction_table({"instructions": {BASE: {"a": {}}}}))


def test_the_page_of_a_comparison():
    made = Comparison.__new__(Comparison)
    runs = [Entry("dppo", 0), Entry("dppo", 1)]
    shown = {
        "base": told(["a", "b"], [False, True]),
        "dppo-0": told(["a", "b"], [True, True]),
        "dppo-1": told(["a", "b"], [False, True]),
    }
    for name, value in {"evaluations": shown, "runs": runs}.items():
        object.__setattr__(made, name, value)
    found = instructions_of(made)
    assert found is not None and found.columns == ["base", "dppo"]
    (text, episodes, (first, second)), _ = found.rows
    assert (text, episodes, first.value, second.value) == ("a", 1, 0.0, 0.5) and isinstance(second, Cell)
    object.__setattr__(made, "evaluations", {"dppo-0": shown["dppo-0"]})
    assert instructions_of(made) is None


def test_words_are_swapped_on_the_command_line(tmp_path: Any, capsys: Any):
    spec = chunk_spec(make_env(BLIND, 1).spec, ChunkConfig(4, 2))
    for name, made in (("hears", spec.reading(Words.of(SENTENCES))), ("deaf", spec)):
        policy = build_policy(FlowConfig(steps=1), made)
        save(tmp_path / name, config=describe(policy, {"env": named(BLIND)}), state=policy.state_dict())
    common = ["evaluate", "eval.episodes=12", "eval.worlds=4", "threads=1"]
    assert main([*common, f"policy.path={tmp_path / 'hears'}", "swap_words=true", f"out={tmp_path / 'out'}"]) == 0
    said = capsys.readouterr().out
    assert "with swapped words: success" in said and "mean over" in said
    kept = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert set(kept["instructions"]) <= set(SENTENCES) and len(kept["instructions"]) == 12
    assert "reads none" in refused(capsys, *common, f"policy.path={tmp_path / 'deaf'}", "swap_words=true")
