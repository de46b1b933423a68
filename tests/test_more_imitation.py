"""``burnish pretrain policy=checkpoint``: imitation goes on where it ended, with what the policy learnt with."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from verb_lab import refused

from burnish.policies.build import load_policy
from burnish.policies.cli.cli import main
from burnish.policies.imitate import ImitationLearner
from burnish.policies.measure.evaluate import Evaluation

NET = ["policy=flow", "policy.net.mlp.hidden=[16]", "policy.steps=2"]
TRAIN = [
    "train.steps=20",
    "train.batch=16",
    "train.log_every=5",
    "train.save_every=10",
    "eval.episodes=4",
    "eval.confirm=4",
]
TRAIN += ["eval.confirm=4", "train.warmup=1", "train.ema=0.5"]  # so that 20 steps lead somewhere


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Path:
    """A base, and recordings of the same world that lie elsewhere: normalisers fitted to them would be others."""
    folder = tmp_path_factory.mktemp("lab")
    assert main(["collect", "env=two_mode", "expert=noisy", "episodes=12", f"out={folder}/data"]) == 0
    assert main(["collect", "env=two_mode", "episodes=3", "seed=7", f"out={folder}/other"]) == 0
    words = [*NET, *TRAIN, "chunk.horizon=6", "chunk.execute=3"]
    assert main(["pretrain", *words, f"data={folder}/data", f"out={folder}/base"]) == 0
    return folder


def further(lab: Path, out: Path, *words: str, base: str = "base") -> list[str]:
    start = ["pretrain", "policy=checkpoint", f"policy.path={lab}/{base}", f"data={lab}/other"]
    return [*start, *TRAIN, *words, f"out={out}"]


def parts(run: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and normalisers."""
    policy, _ = load_policy(run)
    state = policy.state_dict()
    scaled = torch.cat([x.flatten().double() for name, x in state.items() if "normalizer" in name])
    return torch.cat([p.detach().flatten() for p in policy.parameters()]), scaled


@pytest.mark.slow
def test_imitation_goes_on_from_the_weights_of_a_checkpoint_and_keeps_its_normalisers(lab, tmp_path):
    weights, scaled = parts(lab / "base")
    assert main(further(lab, tmp_path / "still", "train.lr=1e-12")) == 0
    assert main(further(lab, tmp_path / "moved")) == 0
    still, moved = parts(tmp_path / "still"), parts(tmp_path / "moved")
    assert torch.allclose(still[0], weights, atol=1e-6) and not torch.allclose(moved[0], weights, atol=1e-3)
    assert torch.equal(still[1], scaled) and torch.equal(moved[1], scaled)
    # The control: a fresh policy on these recordings has others.
    assert main(["pretrain", *NET, *TRAIN, f"data={lab}/other", f"out={tmp_path}/fresh"]) == 0
    assert not torch.equal(parts(tmp_path / "fresh")[1], scaled)
    policy, origin = load_policy(tmp_path / "moved")
    assert (policy.spec.horizon, policy.spec.execute) == (6, 3)
    assert origin["base"] == f"{lab}/base" and origin["env"]["name"] == "two_mode"


def test_the_base_is_tried_first_and_best_holds_nothing_that_does_not_beat_it(lab, tmp_path, capsys):
    assert main(further(lab, tmp_path / "run", "train.lr=1e-12")) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["step"] == 0 and "eval/success_rate" in rows[0]
    assert len(Evaluation.load(tmp_path / "run" / "start.json").seeds) >= 4
    assert not (tmp_path / "run" / "best").exists() and (tmp_path / "run" / "confirm.json").exists()
    assert "best: the policy that this run began with" in capsys.readouterr().out


def test_more_imitation_resumes_exactly(lab, tmp_path, monkeypatch):
    assert main(further(lab, tmp_path / "whole")) == 0
    update, count = ImitationLearner.update, iter(range(1000))

    def pressed(self):
        if next(count) == 12:
            signal.raise_signal(signal.SIGINT)
        return update(self)

    with monkeypatch.context() as patch:
        patch.setattr(ImitationLearner, "update", pressed)
        assert main(further(lab, tmp_path / "parts")) == 130
    (lab / "moved").symlink_to(lab / "base")  # the same weights under another path are the same run
    assert main(further(lab, tmp_path / "parts", "resume=true", base="moved")) == 0
    assert torch.equal(parts(tmp_path / "parts")[0], parts(tmp_path / "whole")[0])
    metrics = [
        [{k: x for k, x in json.loads(line).items() if not k.startswith("time/")} for line in file.open()]
        for file in (tmp_path / "parts" / "metrics.jsonl", tmp_path / "whole" / "metrics.jsonl")
    ]
    assert metrics[0] == metrics[1] and len(metrics[0]) == 5


def test_more_imitation_of_other_weights_is_another_run(lab, tmp_path, capsys):
    assert main(further(lab, tmp_path / "run")) == 0
    (lab / "run").unlink(missing_ok=True)
    (lab / "run").symlink_to(tmp_path / "run")
    capsys.readouterr()
    assert "policy_sha256" in refused(capsys, *further(lab, tmp_path / "run", "resume=true", base="run"))


def test_a_checkpoint_keeps_its_chunk_and_only_imitators_go_on(lab, tmp_path, capsys):
    refined = tmp_path / "refined"
    words = [
        f"policy.path={lab}/base",
        "total=40",
        "worlds=4",
        "eval.episodes=2",
        "eval.confirm=2",
        "method.agent.hidden=[8]",
    ]
    loop = "method.loop.decisions_per_update=10"
    assert main(["finetune", "method=residual_ppo", "policy=checkpoint", *words, loop, f"out={refined}"]) == 0
    for wrong, sentence in (
        (further(lab, tmp_path / "no", "chunk.horizon=4"), "keeps the chunk that it was trained with"),
        (further(lab, tmp_path / "no", f"policy.path={refined}"), "needs one of our own that can imitate"),
    ):
        capsys.readouterr()
        assert main(wrong) == 2
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1
        assert not (tmp_path / "no").exists()
