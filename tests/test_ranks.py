"""Several processes train as one: the same draws, the same gradients, the same checkpoints; and a rank that dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from ranks_lab import weights
from safetensors.torch import load_file
from test_imitate import CONFIGS, TRAIN, learner
from verb_lab import refused

from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.ranks import ALONE, Ranks, joined
from burnish.policies.core.seed import SharedGenerator, generator, integers, normal, uniform
from burnish.policies.runs.checkpoint import newest

CODE = "import sys, torch; torch.set_num_threads(1); from burnish.policies.cli.cli import main; sys.exit(main())"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Sums over 16 rows in two parts differ in their last digit. An update at a rate of 1e-3 moves a weight by 1e-3.
ROUNDING = 1e-5
# A verb and more of its settings -> iterations between two checkpoints, and all of a run
RUNS = {
    "pretrain": (100, 2000),
    "pretrain train.shard=true": (50, 600),
    "finetune method=gaussian_ppo method.agent.hidden=[16]": (4, 100),
    "finetune method=flow_sde method.ppo.shard=true policy.path=BASE": (4, 100),
}


# ---- draws ----


DRAWS = {
    "normal": lambda rows, source: normal((rows, 3), source),
    "uniform": lambda rows, source: uniform((rows,), source),
    "integers": lambda rows, source: integers(-2, 3, (2, rows, 1), source, dim=1).transpose(0, 1),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_ranks_draw_together_what_one_process_draws(kind):
    alone = generator(0, "noise")
    shared = [SharedGenerator(generator(0, "noise"), rank, 3) for rank in range(3)]
    for _ in range(2):
        whole = DRAWS[kind](12, alone)
        parts = [DRAWS[kind](4, each) for each in shared]
        assert torch.equal(torch.stack(parts, 1).flatten(0, 1), whole)
        assert not torch.equal(torch.cat(parts), whole), "the control: rows are shared out one by one, not in blocks"
    assert all(torch.equal(each.generator.get_state(), alone.get_state()) for each in shared)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("size", [2, 8])  # 4 of 16 rows train the shortcut: of 8 ranks some have none
def test_the_losses_of_the_rows_are_those_of_one_process(kind, size):
    """With pictures, whose random shift is drawn too."""
    made = learner(kind, TRAIN, image=True)
    rows = torch.arange(16) * 3
    whole = made.windows[rows]
    wanted = made.policy.bc_loss(whole.obs, whole.action, mask=whole.mask, generator=generator(0, "noise"))
    found = torch.zeros_like(wanted)
    for ranks in (Ranks(rank, size) for rank in range(size)):
        part = made.windows[ranks.rows(rows)]
        draws = ranks.generator(generator(0, "noise"))
        found[ranks.rank :: size] = made.policy.bc_loss(part.obs, part.action, mask=part.mask, generator=draws)
    torch.testing.assert_close(found, wanted)
    other = made.policy.bc_loss(whole.obs, whole.action, mask=whole.mask, generator=generator(1, "noise"))
    assert not torch.allclose(other, wanted), "the control: other draws give other losses"


# ---- processes ----


@pytest.mark.slow
def test_two_ranks_learn_what_one_process_learns(tmp_path):
    lab = [*TORCHRUN, str(Path(__file__).with_name("ranks_lab.py")), str(tmp_path)]
    subprocess.run(lab, check=True, capture_output=True, timeout=120)
    both = [load_file(str(tmp_path / f"{rank}.safetensors")) for rank in (0, 1)]
    for kind in CONFIGS:
        assert torch.equal(both[0][kind], both[1][kind]), "ranks never part"
        assert (both[0][kind] - weights(kind)).abs().max() < ROUNDING, kind
    assert (both[0]["gaussian"] - weights("gaussian", seed=1)).abs().max() > 1e-2, "the control"


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.parametrize("case", RUNS)
def test_a_rank_dies_and_any_number_of_ranks_goes_on(case, tmp_path):
    """One process, which is stopped; then two ranks, of which one is killed; then one again: as one in one sitting."""
    (verb, *more), (every, total) = case.split(), RUNS[case]
    if verb == "pretrain":
        assert main(["collect", "env=two_mode", "expert=noisy", "episodes=8", f"out={tmp_path}/data"]) == 0
        words = [verb, "policy=flow", "policy.net.mlp.hidden=[16]", f"data={tmp_path}/data", "train.batch=16"]
        words += [f"train.steps={total}", f"train.save_every={every}"]
    else:  # an iteration is 8 decisions in 4 worlds
        if "policy.path=BASE" in more:
            more[-1] = f"policy.path={tmp_path}/base"
            world = ["env=point_reach", "env.noise=0.2"]
            assert main(["collect", *world, "expert=noisy", "episodes=8", f"out={tmp_path}/data"]) == 0
            words = ["pretrain", "policy=flow", "policy.net.mlp.hidden=[16]", f"data={tmp_path}/data", "train.steps=20"]
            assert main([*words, "train.batch=16", "eval.episodes=0", f"out={tmp_path}/base"]) == 0
        words = [verb, "env=point_reach", "env.noise=0.2", "worlds=4", "method.loop.decisions_per_update=8"]
        words += [f"total={32 * total}", f"save_every={32 * every}"]
    words += ["eval.episodes=2", "eval.confirm=2", *more]
    assert main([*words, f"out={tmp_path}/whole"]) == 0
    words += [f"out={tmp_path}/run", "resume=true"]
    one = [sys.executable, "-c", CODE, *words]

    process = subprocess.Popen(one, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(tmp_path / "run", process, every)
    process.terminate()
    assert process.wait(timeout=60) == 130
    stopped = step(tmp_path / "run")

    process = subprocess.Popen(
        [*TORCHRUN, "--no-python", *one], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(tmp_path / "run", process, stopped + every)
    ranks = sorted(psutil.Process(process.pid).children(), key=lambda each: int(each.environ()["RANK"]))
    ranks[1].send_signal(signal.SIGKILL)
    said = process.communicate(timeout=60)[0]
    assert process.returncode != 0 and not any(each.is_running() for each in ranks)
    assert said.count(f"burnish {verb}: rank 0 of 2 has lost another rank") == 1, said
    assert "resume=true goes on" in said and stopped < step(tmp_path / "run") < total

    assert main(words) == 0
    mine, theirs = (newest(tmp_path / name / "checkpoints").children["policy"].state for name in ("run", "whole"))
    assert mine.keys() == theirs.keys()
    assert max(float((mine[name].double() - theirs[name].double()).abs().max()) for name in mine) < ROUNDING


def step(run: Path) -> int:
    """Of the newest checkpoint."""
    return max((int(path.name) for path in run.glob("checkpoints/0*")), default=0)


def wait_for(run: Path, process: subprocess.Popen, least: int) -> None:
    deadline = time.monotonic() + 60
    while step(run) < least:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"not killed yet, the run ended ({process.wait()}): {process.communicate()[0]}")
        time.sleep(0.01)


# ---- refusals ----


def test_one_process_is_alone():
    with joined("cuda:1") as (ranks, device):
        assert ranks is ALONE and device == "cuda:1"


def test_what_cannot_be_shared_is_refused(monkeypatch, capsys):
    with pytest.raises(BurnishError, match=r"train\.batch=15 does not divide among 2 ranks"):
        learner(train=type(TRAIN)(batch=15), ranks=Ranks(0, 2))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BurnishError, match="device=cuda:1 is one device for several ranks"), joined("cuda:1"):
        pass
    assert "torchrun started 2 processes of a command that is one" in refused(capsys, "evaluate", "policy.path=nowhere")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # another program's WORLD_SIZE
    assert main(["evaluate", "policy.path=nowhere"]) == 2
    assert "torchrun" not in capsys.readouterr().err
