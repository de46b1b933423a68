"""The two-mode world end to end, by the verbs that a user types: what imitates both ways passes, their mean crashes.

Thresholds are those of the project: at least 0.95 for the generative policies where least squares stays under 0.5, and
each way taken as often as in the data, within 10 points. `benchmarks/two_mode.py` records three seeds of each.
"""

from __future__ import annotations

import pytest
import torch

from burnish.policies.cli.cli import main
from burnish.policies.data.lerobot import read_lerobot
from burnish.policies.measure.evaluate import Evaluation

pytestmark = [pytest.mark.slow, pytest.mark.rotating(2)]
STEPS = {"shortcut": 8000}  # of imitation; a shortcut learns two things


def upper_share(path):
    """Of the episodes that passed the obstacle at x = 0, the share above it."""
    states = [e.obs["state"] for e in read_lerobot(path) if e.success]
    return float(torch.tensor([float(s[s[:, 0] >= 0][0, 1]) > 0 for s in states]).float().mean())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("two_mode") / "data"
    assert main(["collect", "env=two_mode", "expert=noisy", "episodes=400", f"out={out}"]) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["flow", "shortcut", "diffusion", "least_squares"])
def test_imitation_of_both_ways(policy, data, tmp_path):
    words = [f"policy={policy}", "experiment=two_mode", f"data={data}", f"out={tmp_path}/run", "eval.episodes=50"]
    assert main(["pretrain", *words, f"train.steps={STEPS.get(policy, 4000)}"]) == 0
    where = [f"policy.path={tmp_path}/run", f"out={tmp_path}/eval", "eval.episodes=400"]
    assert main(["evaluate", *where]) == 0
    success = Evaluation.load(tmp_path / "eval/evaluation.json").summary()["success_rate"]
    if policy == "least_squares":
        assert success < 0.5
        return
    assert success >= 0.95
    words = ["env=two_mode", "policy=checkpoint", f"policy.path={tmp_path}/run", "episodes=400"]
    assert main(["collect", *words, f"out={tmp_path}/drawn"]) == 0
    assert abs(upper_share(tmp_path / "drawn") - upper_share(data)) < 0.1
