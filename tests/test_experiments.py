"""The experiments that are shipped: each composes, is of the method that its name says, and has its task's budget."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from burnish import configs
from burnish.finetune.__main__ import GROUPS, FinetuneConfig
from burnish.finetune.table import method_name
from burnish.policies.cli.cli import compose, to_object
from burnish.policies.core.errors import BurnishError
from burnish.sim.build import env_name

ROOT = Path(__file__).resolve().parents[1]
# Those of tasks of other packages are in test_public_tasks.py.
ALL = sorted((Path(configs.__file__).parent / "experiment").glob("*/*.yaml"))
EXPERIMENTS = [path for path in ALL if "sparse" not in f"{path.parent.name} {path.read_text()}"]
BUDGET = {"insert_hidden": 200_000}  # control steps; of other tasks 100 000
FEW = {"imagine": 14_400}  # methods that are made for fewer
KINDS = {"dsrl_aliased": "dsrl", "dsrl_timed": "dsrl", "residual_sac": "residual_td3"}  # one method, another variant
EVERY_TICK = ("residual_td3", "residual_ppo", "gaussian_ppo")  # others decide once in the 4 ticks that bases execute


def composed(path):
    words = [f"experiment={path.parent.name}/{path.stem}"]
    return to_object(compose("finetune", FinetuneConfig, GROUPS["finetune"], words))


@pytest.mark.rotating(3)
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_experiment_is_what_its_name_says_at_the_budget_of_its_task(path):
    config = composed(path)
    name = method_name(config.method)
    assert name == KINDS.get(path.stem, path.stem)
    assert (path.stem == "dsrl_aliased") == (
        getattr(config.method, "variant", None) is not None and config.method.variant.value == "aliased"
    )
    if name == "residual_td3":
        assert config.method.algorithm.value == path.stem.removeprefix("residual_")
    assert config.total * (1 if name in EVERY_TICK else 4) == FEW.get(name, BUDGET.get(path.parent.name, 100_000))
    # Those that change the world name the task that they are of; the others take it from the base.
    assert config.env is None or env_name(config.env) == path.parent.name


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield import_module("refine_quality")
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def runs(benchmark):
    return import_module("refine_runs")


def test_the_benchmark_has_an_experiment_for_every_run(benchmark):
    wanted = {f"{task}/{method}" for task in benchmark.TASKS for method in benchmark.methods_of(task)}
    assert wanted <= {f"{path.parent.name}/{path.stem}" for path in EXPERIMENTS}
    bases = import_module("refine_bases").BASES
    others = {"discs_vla", "tabletop_vla"}  # of vla_quality.py
    assert {path.name.partition("-")[0] for path in bases.iterdir()} <= {*benchmark.TASKS, *others}


@pytest.mark.rotating(2)
@pytest.mark.parametrize("task", ["push", "pick_place", "hopper"])  # of which there was a search
def test_an_experiment_has_the_settings_that_won_the_search(benchmark, runs, task):
    for method in benchmark.RANKED:
        winner = runs.Case(benchmark.SUITE, task, method, 0, False, ROOT / "benchmarks/results/refine_quality", 0)
        assert runs.configured(f"experiment={task}/{method}").method == winner.config.method, method


@pytest.mark.rotating(2)
@pytest.mark.parametrize("task", ["push", "hopper"])
def test_every_method_has_the_same_search(benchmark, runs, task):
    """As many different trials for each method, the first of them the shipped experiment, all of one discount."""
    for method in benchmark.methods_of(task):
        trials = [tuple(benchmark.trial_settings(task, method, trial)) for trial in range(benchmark.TRIALS + 1)]
        assert trials[0] == () and len(set(trials)) == len(trials), method
        for trial in (0, benchmark.TRIALS):
            case = runs.Case(benchmark.SUITE, task, method, 0, False, Path("nowhere"), 0, trial=trial)
            assert case.config.method.discount.per_step(4) == benchmark.TASKS[task].gamma, method
    with pytest.raises(BurnishError):
        runs.configured("experiment=push/dsrl", "method.bounds=1")  # a setting that does not exist is refused
