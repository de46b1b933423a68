"""``burnish finetune seeds=N``: one process, and a run folder for each seed that is that of a run alone."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from test_finetune_cli import EVALUATION, RUN, SAC
from verb_lab import imitating, refused

from burnish.finetune import api
from burnish.offline.stacked import Stacked
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.runs.run import read_metrics

LEARNT = ["method.loop.warmup=8", "method.loop.batch=8", "method.loop.updates_per_decision=0.5", *RUN]
SCRATCH = ["finetune", "method=sac", "env=point_reach", *SAC, *LEARNT]
TD3 = [word.replace("sac", "td3") for word in SAC]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return imitating(tmp_path_factory.mktemp("lab"), *EVALUATION, name="flow")


def require_same(run: Path, other: Path) -> None:
    """All that was logged, but for the clock. The weights are float32, which 12 small updates leave at five digits."""
    lines, others = read_metrics(run), read_metrics(other)
    assert [line["step"] for line in lines] == [line["step"] for line in others] and len(lines) > 5
    for line, its in zip(lines, others, strict=True):
        mine, theirs = ({key: x for key, x in each.items() if not key.startswith("time/")} for each in (line, its))
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True)


def test_each_seed_is_a_run_of_its_own(tmp_path: Path, capsys: Any):
    assert main([*SCRATCH, "seeds=3", "seed=4", f"out={tmp_path}/all"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all-4", "all-5", "all-6"]
    assert main([*SCRATCH, "seed=5", f"out={tmp_path}/alone"]) == 0
    require_same(tmp_path / "all-5", tmp_path / "alone")
    with pytest.raises(AssertionError):
        require_same(tmp_path / "all-4", tmp_path / "alone")
    assert main(["evaluate", f"policy.path={tmp_path}/all-6", *EVALUATION]) == 0
    # It goes on by itself where it is the same run: the settings are those of a run with its seed.
    assert main([*SCRATCH, "seed=5", f"out={tmp_path}/all-5", "resume=true"]) == 0
    assert "has reached its 24 decisions already" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["method=dsrl", "policy.path={lab}/flow", *SAC],
        ["method=residual_td3", "policy.path={lab}/flow", "data={lab}/data", "method.loop.initial_updates=3", *TD3],
        ["method=rlpd", "env=point_reach", "data={lab}/data", "pretrain_updates=5", *SAC],
    ],
    ids=lambda words: words[0],
)
def test_methods_on_sac_and_td3_learn_together(lab: Path, tmp_path: Path, words: list[str]):
    command = ["finetune", *(word.format(lab=lab) for word in words), *LEARNT]
    assert main([*command, "seeds=2", f"out={tmp_path}/all"]) == 0
    assert main([*command, "seed=1", f"out={tmp_path}/alone"]) == 0
    require_same(tmp_path / "all-1", tmp_path / "alone")


@pytest.mark.slow
def test_stopped_seeds_go_on_though_one_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert main([*SCRATCH, "seeds=2", f"out={tmp_path}/whole"]) == 0
    learn, calls = Stacked.learn, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return learn(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Stacked, "learn", interrupted)
        assert main([*SCRATCH, "seeds=2", f"out={tmp_path}/half"]) == 130
    saved = [sorted(path.name for path in (tmp_path / f"half-{seed}/checkpoints").iterdir()) for seed in (0, 1)]
    assert saved[0] == saved[1] and len(saved[0]) > 1, "both had the same last step"
    shutil.rmtree(tmp_path / "half-1/checkpoints" / saved[1][-1])
    assert main([*SCRATCH, "seeds=2", f"out={tmp_path}/half", "resume=true"]) == 0
    for seed in (0, 1):
        require_same(tmp_path / f"half-{seed}", tmp_path / f"whole-{seed}")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["seeds=0"], "seeds=0"),
        (["seeds=2", "processes=2"], "seeds=2 learn together in one process"),
        (["seeds=2", "track=[rerun]"], "which tells no tracker"),
        (
            ["seeds=2", "method=gaussian_ppo", *RUN],
            "method=gaussian_ppo with these settings does not learn by SAC or TD3",
        ),
        (
            ["seeds=2", "method=sac", "method.sac.execution=compile", *LEARNT],
            "execution=compile is not known to batched",
        ),
    ],
)
def test_other_ways_are_refused_before_anything_is_written(
    words: list[str], sentence: str, tmp_path: Path, capsys: Any
):
    method = [] if any(word.startswith("method=") for word in words) else ["method=sac"]
    assert sentence in refused(capsys, "finetune", "env=point_reach", *method, *words, f"out={tmp_path}/run")
    assert not any(tmp_path.iterdir())


def test_a_program_refines_one_seed():
    with pytest.raises(BurnishError, match="seeds=2 are several runs, and this is one; use `burnish finetune`"):
        api.refine(None, method="sac", env="point_reach", seeds=2)


def test_a_link_takes_the_place_of_no_seed(tmp_path: Path, capsys: Any):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run-1").symlink_to(tmp_path / "elsewhere")
    assert "run-1" in refused(capsys, *SCRATCH, "seeds=2", f"out={tmp_path}/run")
    assert not any((tmp_path / "elsewhere").iterdir()) and not (tmp_path / "run-0").exists()
