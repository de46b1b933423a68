"""The best policy of a run: kept once it is better than the start beyond doubt, whatever becomes of the training."""

from __future__ import annotations

import random

import pytest
import torch

from burnish.policies import __main__ as verbs
from burnish.policies.best import Best
from burnish.policies.build import build_policy, load_policy
from burnish.policies.core.cli import main
from burnish.policies.core.evaluate import Evaluation
from burnish.policies.core.run import find_policy
from burnish.policies.flow import FlowConfig
from latent_lab import SPEC

COUNT = 40


def exam(successes, count=COUNT, seed=0):
    """``successes`` of ``count`` seeds, the same ones for the same number."""
    won = set(random.Random(seed).sample(range(count), successes))
    success = [i in won for i in range(count)]
    zeros = [False] * count
    return Evaluation(list(range(count)), [float(x) for x in success], [5] * count, zeros, zeros, success, success)


def runner(returns):
    """Of a world that knows no success."""
    count = len(returns)
    return Evaluation(list(range(count)), returns, [5] * count, [False] * count, [False] * count)


def policy(seed):
    return build_policy(FlowConfig(steps=1), SPEC, seed=seed)


def test_only_what_is_better_beyond_doubt_replaces_the_start(tmp_path):
    best = Best(tmp_path, {})
    best.begin(exam(16))
    best.offer(policy(1), 1, exam(19))  # 3 of 40 more: chance
    assert best.exam is None and not best.path.exists()
    assert "policy that this began with" in best.sentence() and "+0.075" in best.sentence()
    best.offer(policy(2), 2, exam(34))
    best.offer(policy(3), 3, exam(2))
    assert best.step == 2 and "step 2" in best.sentence() and "0.4 before and 0.85 after" in best.sentence()


def test_of_those_the_highest_counts_and_of_equals_the_latest(tmp_path):
    best = Best(tmp_path, {})
    best.begin(exam(4))
    found = []
    for step, successes in enumerate((20, 30, 25, 30, 29), 1):
        best.offer(policy(step), step, exam(successes, seed=step))
        found.append(best.step)
    assert found == [1, 2, 2, 4, 4]
    kept, _ = load_policy(best.path)
    assert all(torch.equal(x, kept.state_dict()[name]) for name, x in policy(4).state_dict().items())


def test_a_run_from_nothing_begins_with_its_first_exam(tmp_path):
    best = Best(tmp_path, {})
    assert "no policy" in best.sentence()
    best.offer(policy(1), 1, exam(0))
    assert best.step == 1
    best.offer(policy(2), 2, exam(1))
    assert best.step == 2


def test_where_no_success_is_known_returns_count_by_pairs(tmp_path):
    """Each pair differs by 1 to 3, the seeds by 100: only the pairs can tell."""
    start = [100.0 * i for i in range(10)]
    best = Best(tmp_path, {})
    best.begin(runner(start))
    best.offer(policy(1), 1, runner([x + 40 * (-1) ** i for i, x in enumerate(start)]))
    assert best.exam is None
    best.offer(policy(2), 2, runner([x + 1 + i % 3 for i, x in enumerate(start)]))
    assert best.step == 2


def test_one_episode_proves_nothing(tmp_path):
    best = Best(tmp_path, {})
    best.begin(runner([0.0]))
    best.offer(policy(1), 1, runner([9.0]))
    assert best.exam is None and "on one seed" in best.sentence()


def test_a_resumed_run_goes_on_with_what_is_there(tmp_path):
    first = Best(tmp_path, {"env": None})
    first.begin(exam(10))
    first.offer(policy(1), 1, exam(35))
    again = Best(tmp_path, {"env": None})
    assert (again.step, again.exam, again.start) == (first.step, first.exam, first.start)
    again.offer(policy(2), 2, exam(30))
    assert again.step == 1
    again.offer(policy(3), 3, exam(36))
    assert Best(tmp_path, {}).step == 3


@pytest.fixture
def scripted(monkeypatch):
    """Exams whose outcome is told: by the number of the call."""

    def install(*successes):
        left = iter(successes)
        monkeypatch.setattr(verbs, "run_evaluation", lambda env, controller, seeds: exam(next(left)))

    return install


def refining(bc, out, *more):
    words = [f"policy.path={bc}", "method=residual_ppo", "worlds=2", "total=24", "log_every=4", "save_every=8"]
    words += ["method.loop.decisions_per_update=4", "method.ppo.minibatch=4", "method.ppo.epochs=1", "eval_every=8"]
    return main(["finetune", *words, f"out={out}", *more])


@pytest.fixture(scope="module")
def bc(tmp_path_factory):
    folder = tmp_path_factory.mktemp("best")
    assert main(["collect", "env=point_reach", "env.max_steps=12", "episodes=4", f"out={folder}/data"]) == 0
    small = ["policy=flow", "policy.steps=2", "policy.net.mlp.hidden=[8]", "train.steps=5", "train.batch=8"]
    words = [*small, "trial.episodes=2", f"data={folder}/data", f"out={folder}/bc"]
    assert main(["pretrain", *words]) == 0
    return folder / "bc"


def test_a_run_that_collapses_has_kept_its_best(tmp_path, bc, scripted, capsys):
    scripted(10, 38, 20, 0)
    assert refining(bc, tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert f"best: {tmp_path}/run/best, of step 8: 0.25 before and 0.95 after on 40 seeds" in said
    then = find_policy(tmp_path / "run" / "checkpoints" / "00000001").state
    kept, last = find_policy(tmp_path / "run" / "best").state, find_policy(tmp_path / "run").state
    assert kept.keys() == then.keys() and all(torch.equal(kept[name], then[name]) for name in then)
    assert any(not torch.equal(kept[name], last[name]) for name in then), "control: it went on learning"
    assert load_policy(tmp_path / "run" / "best")[1] == load_policy(tmp_path / "run")[1], "it remembers its world"


def test_a_run_that_only_loses_says_so(tmp_path, bc, scripted, capsys):
    scripted(20, 10, 21, 0)
    assert refining(bc, tmp_path / "run") == 0
    assert "best: the policy that this began with" in capsys.readouterr().out
    assert not (tmp_path / "run" / "best").exists()
    # Asked once more it has nothing to train, and still knows.
    assert refining(bc, tmp_path / "run", "resume=true") == 0
    assert "best: the policy that this began with" in capsys.readouterr().out


def test_pretraining_keeps_its_best_too(tmp_path, bc, scripted, capsys):
    scripted(3, 30, 5)
    words = [f"data={bc.parent}/data", "policy=flow", "policy.steps=2", "policy.net.mlp.hidden=[8]", "train.batch=8"]
    assert main(["pretrain", *words, "train.steps=6", "train.eval_every=2", f"out={tmp_path}/run"]) == 0
    assert f"best: {tmp_path}/run/best, of step 4" in capsys.readouterr().out
