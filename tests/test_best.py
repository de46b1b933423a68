"""What a run delivers: chosen on some seeds, confirmed on others; its start where nothing is better beyond doubt."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from verb_lab import imitating

from burnish.policies import evaluator
from burnish.policies.acting import evaluator_of
from burnish.policies.best import Best
from burnish.policies.build import build_policy, load_policy
from burnish.policies.cli.cli import main
from burnish.policies.core.spec import PolicySpec
from burnish.policies.evaluator import EvalConfig
from burnish.policies.flow import FlowConfig
from burnish.policies.measure.evaluate import Evaluation, compare
from burnish.policies.runs.run import find_policy
from burnish.sim.build import make_env
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


def confirming(best, last, *exams, step=9):
    """Confirmation with evaluations that are told, in the order start, last, candidate."""
    left = iter(exams)
    best.confirm(policy(0), last, step, lambda *_: next(left))


def test_without_pairs_a_small_lead_is_not_beyond_doubt(tmp_path):
    """7 more successes of 40, and no loss: pairs show it, independent episodes do not."""
    start = exam(20)
    mended = [i for i, won in enumerate(start.success) if not won][:7]
    last = replace(start, success=[won or i in mended for i, won in enumerate(start.success)])
    for repeatable, name in ((True, "paired"), (False, "unpaired")):
        best = Best(tmp_path / name, {})
        best.begin(exam(20))
        confirming(best, policy(1), replace(start, repeatable=repeatable), replace(last, repeatable=repeatable))
        assert best.path.exists() == repeatable
        assert ("(not paired: equal seeds begin different episodes" in best.sentence()) != repeatable


def test_the_candidate_has_the_highest_mean_and_of_equals_the_latest(tmp_path):
    best = Best(tmp_path, {})
    best.begin(exam(40))
    found = []
    for step, successes in enumerate((20, 30, 25, 30, 29), 1):
        best.offer(policy(step), step, exam(successes, seed=step))
        found.append(best.step)
    assert found == [1, 2, 2, 4, 4] and not best.path.exists(), "a candidate is no result"
    kept, _ = load_policy(best.candidate)
    assert all(torch.equal(x, kept.state_dict()[name]) for name, x in policy(4).state_dict().items())


def test_luck_on_the_seeds_for_selection_is_not_delivered(tmp_path):
    """With one stage, as before, 38 of 40 on the seeds for selection would have been delivered."""
    best = Best(tmp_path, {})
    best.begin(exam(16))
    best.offer(policy(1), 1, exam(38))
    confirming(best, policy(2), exam(16), exam(15), exam(17))
    assert best.delivered is None and "No other is better beyond doubt" in best.sentence()
    assert "-0.025" in best.sentence() and "+0.025" in best.sentence(), "both differences are told"


def test_a_gain_that_few_episodes_could_not_tell_is_delivered(tmp_path):
    """The last policy never led on the seeds for selection, and fresh ones tell that it is better."""
    best = Best(tmp_path, {})
    best.begin(exam(16))
    best.offer(policy(1), 1, exam(19))
    best.offer(policy(9), 9, exam(18))
    confirming(best, policy(9), exam(100, 256), exam(160, 256, seed=1), exam(140, 256, seed=2))
    assert best.delivered == 9 and f"{best.path}, of step 9" in best.sentence()
    assert all(torch.equal(x, load_policy(best.path)[0].state_dict()[n]) for n, x in policy(9).state_dict().items())


@pytest.mark.parametrize(("looks", "delivered"), [(1, 9), (2, None)])
def test_the_level_is_corrected_for_the_policies_that_were_tried(tmp_path, looks, delivered):
    """Five seeds gained of 256 and none lost: above 0 with 95 % confidence (one look), not with 97.5 % (two looks)."""
    best = Best(tmp_path, {})
    start = exam(100, 256)
    won = [i for i, success in enumerate(start.success) if not success][:5]
    success = [x or i in won for i, x in enumerate(start.success)]
    last = replace(start, success=success, success_at_end=success, returns=[float(x) for x in success])
    assert compare(last, start, 0.95).difference_low > 0 > compare(last, start, 0.975).difference_low
    best.begin(start)
    best.offer(policy(1), 9 if looks == 1 else 1, start)  # where the last policy is the candidate, it is tried once
    confirming(best, policy(9), start, last, start)
    assert best.delivered == delivered


def test_a_run_from_nothing_delivers_its_candidate(tmp_path):
    best = Best(tmp_path, {})
    assert "no policy" in best.sentence()
    best.offer(policy(1), 1, exam(0))
    assert best.delivered == 1
    best.offer(policy(2), 2, exam(1))
    best.offer(policy(3), 3, exam(0))
    confirming(best, policy(3))  # plays nothing
    assert best.delivered == 2 and "of step 2" in best.sentence()


def test_where_no_success_is_known_returns_count_by_pairs(tmp_path):
    """Each pair differs by 1 to 3, the seeds by 100: only the pairs can tell."""
    start = [100.0 * i for i in range(10)]
    noisy, better = [x + 40 * (-1) ** i for i, x in enumerate(start)], [x + 1 + i % 3 for i, x in enumerate(start)]
    for name, last, delivered in (("noisy", noisy, None), ("better", better, 9)):
        best = Best(tmp_path / name, {})
        best.begin(runner(start))
        best.offer(policy(9), 9, runner(last))
        confirming(best, policy(9), runner(start), runner(last))
        assert best.delivered == delivered


def test_one_episode_proves_nothing(tmp_path):
    best = Best(tmp_path, {})
    best.begin(runner([0.0]))
    best.offer(policy(9), 9, runner([9.0]))
    confirming(best, policy(9), runner([0.0]), runner([9.0]))
    assert best.delivered is None


def test_a_resumed_run_goes_on_with_what_is_there(tmp_path):
    first = Best(tmp_path, {"env": None})
    first.begin(exam(10))
    first.offer(policy(1), 1, exam(35))
    again = Best(tmp_path, {"env": None})
    assert (again.step, again.evaluation, again.start) == (first.step, first.evaluation, first.start)
    again.offer(policy(2), 2, exam(30))
    assert again.step == 1
    confirming(again, policy(3), exam(10), exam(11), exam(35))
    decided = Best(tmp_path, {})
    assert decided.confirmed == again.confirmed and decided.delivered == 1
    confirming(decided, policy(3))  # decided once: plays nothing
    assert decided.delivered == 1


@pytest.fixture
def scripted(monkeypatch):
    """Exams whose outcome is told: by the number of the call."""

    def install(*successes):
        left = iter(successes)
        monkeypatch.setattr(evaluator, "evaluate", lambda env, controller, seeds, progress: exam(next(left)))

    return install


def refining(bc, out, *more):
    words = [f"policy.path={bc}", "method=residual_ppo", "worlds=2", "total=24", "log_every=4", "save_every=8"]
    words += ["method.loop.decisions_per_update=4", "method.ppo.minibatch=4", "method.ppo.epochs=1", "eval_every=8"]
    return main(["finetune", *words, f"out={out}", *more])


@pytest.fixture(scope="module")
def bc(tmp_path_factory):
    return imitating(tmp_path_factory.mktemp("best"), "eval.episodes=2") / "bc"


def test_a_run_that_collapses_has_kept_its_best(tmp_path, bc, scripted, capsys):
    scripted(10, 38, 20, 0, 10, 0, 38)  # along the run; then of the start, the last and the candidate
    assert refining(bc, tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert f"best: {tmp_path}/run/best, of step 8: on 40 fresh seeds the start has success 0.25, the last" in said
    then = find_policy(tmp_path / "run" / "checkpoints" / "00000001").state
    kept, last = find_policy(tmp_path / "run" / "best").state, find_policy(tmp_path / "run").state
    assert kept.keys() == then.keys() and all(torch.equal(kept[name], then[name]) for name in then)
    assert any(not torch.equal(kept[name], last[name]) for name in then), "control: it went on learning"
    assert load_policy(tmp_path / "run" / "best")[1] == load_policy(tmp_path / "run")[1], "it remembers its world"


def test_a_run_that_only_loses_says_so(tmp_path, bc, scripted, capsys):
    scripted(20, 10, 21, 0, 20, 0, 21)
    assert refining(bc, tmp_path / "run") == 0
    assert "best: the policy that this run began with" in capsys.readouterr().out
    assert not (tmp_path / "run" / "best").exists()
    # Asked once more it has nothing to train, and still knows.
    assert refining(bc, tmp_path / "run", "resume=true") == 0
    assert "best: the policy that this run began with" in capsys.readouterr().out


def test_pretraining_keeps_its_best_too(tmp_path, bc, scripted, capsys):
    scripted(3, 30, 5)
    words = [f"data={bc.parent}/data", "policy=flow", "policy.steps=2", "policy.net.mlp.hidden=[8]", "train.batch=8"]
    assert main(["pretrain", *words, "train.steps=6", "train.eval_every=2", f"out={tmp_path}/run"]) == 0
    assert f"best: {tmp_path}/run/best, of step 4" in capsys.readouterr().out


def test_a_confirmation_has_all_worlds_that_it_may_have():
    """However few episodes the trials along the run have; and no more worlds than it has episodes."""
    base = {"name": "point_reach", "config": {}}
    seen = make_env("point_reach", 1).spec
    spec = PolicySpec(seen.obs, seen.action, 4, 4)
    for config, worlds in ((EvalConfig(4, 50, confirm=256), 50), (EvalConfig(4, 50, confirm=20), 20)):
        found = evaluator_of(base, spec, config, torch.device("cpu"))
        assert found is not None and found._env.num_envs == worlds
