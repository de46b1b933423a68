"""``burnish.finetune`` from Python: the command line's own training, bit for bit, without its files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from verb_lab import imitating

from burnish.finetune import Refined, api, evaluate, load, refine, save
from burnish.finetune.__main__ import FinetuneConfig
from burnish.finetune.methods.residual_ppo import ResidualPPOConfig
from burnish.finetune.table import ONLINE
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.measure.evaluate import Evaluation, compare
from burnish.policies.runs.run import read_metrics
from burnish.sim.build import make_env
from burnish.sim.point_reach import PointReachConfig

EVALUATION = {"episodes": 2, "worlds": 2, "confirm": 2}
RUN = {"worlds": 2, "total": 24, "log_every": 4, "save_every": 8, "eval": EVALUATION}
PPO = {"loop": {"decisions_per_update": 4}, "ppo": {"minibatch": 4, "epochs": 1}}
SAC = {"critic": {"hidden": [8], "members": 2}, "agent": {"hidden": [8]}}
DSRL = {"loop": {"warmup": 8, "batch": 8, "updates_per_decision": 0.5}, "sac": SAC}
METHODS = {"residual_ppo": PPO, "reinflow": PPO, "dsrl": DSRL, "rlpd": DSRL}  # each loop, and one from nothing
WORLD = PointReachConfig(max_steps=12)


def words(settings, prefix=""):
    """What a person would type for them."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from words(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={value}".replace(" ", "")


def typed(lab, method, out, *more):
    start = ["env=point_reach", "env.max_steps=12"] if method == "rlpd" else [f"policy.path={lab}/bc"]
    settings = [*words(RUN), *words(METHODS[method], "method.")]
    return ["finetune", f"method={method}", *start, *settings, f"out={out}", *more]


def called(lab, method, **more):
    start = (None, WORLD) if method == "rlpd" else (load(f"{lab}/bc"),)
    return refine(*start, method=method, **RUN, **METHODS[method], **more)


def weights(policy):
    return {name: x.clone() for name, x in policy.state_dict().items()}


def same(a, b):
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def lines(rows):
    return [{k: repr(float(v)) for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Recordings and a flow that imitates them a little, in a world with twelve steps."""
    return imitating(tmp_path_factory.mktemp("lab"), *words({"eval": EVALUATION}))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_seed_leads_to_the_policy_of_the_command_line_and_leaves_no_file(lab, tmp_path, monkeypatch, method):
    assert main(typed(lab, method, tmp_path / "cli", "seed=3")) == 0
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result = called(lab, method, seed=3)
    assert list(Path.cwd().iterdir()) == [] and result.out is None
    expected = load(tmp_path / "cli")
    assert same(result.policy, expected) and result.finished
    assert lines(result.log) == lines(read_metrics(tmp_path / "cli"))
    assert result.policy.origin["env"] == expected.origin["env"] and result.policy.origin["method"] == method
    assert evaluate(result.policy, episodes=6) == evaluate(expected, episodes=6)
    assert not same(called(lab, method, seed=4).policy, expected), "the comparison must be able to fail"


@pytest.mark.parametrize("method", ["reinflow", "dsrl"])
def test_the_policy_that_was_given_is_left_as_it_is(lab, method):
    policy = load(lab / "bc")
    before = weights(policy)
    result = refine(policy, method=method, **RUN, **METHODS[method])
    assert all(torch.equal(x, before[name]) for name, x in policy.state_dict().items())
    assert result.policy is not policy and not same(result.policy, policy)


@pytest.mark.slow
def test_what_was_begun_here_is_finished_on_the_command_line(lab, tmp_path):
    assert main(typed(lab, "dsrl", tmp_path / "cli")) == 0
    begun = called(lab, "dsrl", out=tmp_path / "run", on_log=lambda step, numbers: step >= 6)
    assert not begun.finished and begun.log[-1]["step"] < 12
    assert main(typed(lab, "dsrl", tmp_path / "run", "resume=true")) == 0
    assert same(load(tmp_path / "run"), load(tmp_path / "cli"))
    assert lines(read_metrics(tmp_path / "run")) == lines(read_metrics(tmp_path / "cli"))
    settings = [yaml.safe_load((tmp_path / name / "config.yaml").read_text()) for name in ("cli", "run")]
    assert {key for key in settings[0] if settings[0][key] != settings[1][key]} == {"out", "resume"}
    again = called(lab, "dsrl", out=tmp_path / "run", resume=True)
    assert again.finished and again.log == [] and same(again.policy, load(tmp_path / "cli"))


def test_ctrl_c_returns_what_there_is(lab):
    heard = []

    def press(step, numbers):
        heard.append(step)
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    result, whole = called(lab, "residual_ppo", on_log=press), called(lab, "residual_ppo")
    assert heard == [0, 1, 2] and not result.finished and whole.finished and len(whole.log) == 4
    assert lines(result.log) == lines(whole.log)[:3] and not same(result.policy, whole.policy)
    assert evaluate(result.policy, episodes=2).seeds


def test_worlds_may_be_named_configured_or_handed_in(lab):
    policy = load(lab / "bc")
    settings = {"method": "residual_ppo", **RUN, **PPO}
    named = refine(policy, "point_reach", **settings, **{"env.max_steps": 12})
    configured = refine(policy, WORLD, **settings)
    handed = refine(policy, make_env(WORLD, 2, seed=0), **settings)
    assert same(named.policy, configured.policy) and same(named.policy, handed.policy)
    assert not any(name.startswith("eval/") for line in handed.log for name in line)
    assert handed.policy.origin["env"] is None and named.policy.origin["env"]["name"] == "point_reach"
    with pytest.raises(BurnishError, match="give env="):
        evaluate(handed.policy)
    by_name = evaluate(named.policy, WORLD, episodes=7)
    assert evaluate(handed.policy, make_env(WORLD, 50), episodes=7) == by_name
    assert evaluate(handed.policy, make_env(WORLD, 3), episodes=7).lengths == by_name.lengths


def test_an_id_of_gymnasium_is_a_world():
    result = refine(None, "Pendulum-v1", method="gaussian_ppo", agent={"hidden": [8]}, **RUN, **PPO)
    assert result.policy.origin["env"]["config"]["id"] == "Pendulum-v1"
    assert result.policy.spec.action.high == (2.0,)


def test_settings_are_nested_dotted_or_one_configuration(lab):
    policy = load(lab / "bc")
    nested = refine(policy, method="residual_ppo", **RUN, **PPO, bound=0.3)
    dotted = {"loop.decisions_per_update": 4, "ppo.minibatch": 4, "ppo.epochs": 1, "bound": 0.3}
    assert same(nested.policy, refine(policy, method="residual_ppo", **RUN, **dotted).policy)
    usual = ResidualPPOConfig()
    usual.loop.decisions_per_update, usual.ppo.minibatch, usual.ppo.epochs, usual.bound = 4, 4, 1, 0.3
    assert same(nested.policy, refine(policy, method=usual, **RUN).policy)
    assert not same(nested.policy, refine(policy, method="residual_ppo", **RUN, **PPO).policy)
    with pytest.raises(BurnishError, match="bound= is for the method, which was given as a whole"):
        refine(policy, method=usual, bound=0.2)


@pytest.mark.parametrize(
    "text", ["runs/a b", "it's", '"', "a\\", "a\\'b", "\\\\'", "x,y", "{a: 1}", "[1]", "null", "1e3", "=", "ü", "#"]
)
def test_any_text_arrives_as_it_is(text):
    config, _ = api._configured(None, "dsrl", {"data": text, "track": [text, "b"]})
    assert config.data == text and config.track == [text, "b"]


@pytest.mark.parametrize(
    ("settings", "read"),
    [
        ({"bound": 2}, lambda config: config.method.bound == 2.0),
        ({"bound": torch.tensor(1.25).item()}, lambda config: config.method.bound == 1.25),
        ({"variant": "aliased"}, lambda config: config.method.variant.name == "aliased"),
        ({"repeat": True}, lambda config: config.method.repeat is True),
        ({"loop": {"prior_share": None}}, lambda config: config.method.loop.prior_share is None),
        ({"sac": {"agent": {"hidden": (8, 8)}}}, lambda config: config.method.sac.agent.hidden == [8, 8]),
        # What is not said keeps the method's own default: SAC of itself would aim at another entropy.
        ({"sac": {"alpha": 0.02}}, lambda config: config.method.sac.target_entropy == 0.0),
        ({"experiment": "insert/dsrl"}, lambda config: config.rewards.shift == -1 and config.total == 25_000),
    ],
)
def test_settings_arrive_with_their_types(settings, read):
    assert read(api._configured("insert", "dsrl", settings)[0])


def test_no_method_calls_a_setting_like_one_of_the_run():
    """Keywords could not say which of the two is meant. ``view`` is one thing: the run's sets the method's."""
    run = {field.name for field in fields(FinetuneConfig)}
    both = {field.name for config in ONLINE.values() for field in fields(config)} & run
    assert both == {"view"}


def test_settings_that_are_mappings_are_passed_whole():
    config, _ = api._configured(None, "sb3", {"view": "residual", "settings": {"policy_kwargs": {"net_arch": [8]}}})
    assert config.method.settings == {"policy_kwargs": {"net_arch": [8]}} and config.view.name == "residual"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"method": "dsrll"}, "method=dsrll is not a choice; did you mean 'dsrl'"),
        ({"distill_every": 1}, "no setting 'method.distill_every'; did you mean 'method.distil_every'"),
        ({"rewards": {"shft": 1}}, "did you mean 'rewards.shift'"),
        ({"loop": {"warmpu": 1}}, "did you mean 'method.loop.warmup'"),
        ({"bound": -1}, "bound=-1"),
        ({"bound": "wide"}, "method.bound: .*wide"),
        ({"bound": object()}, "method.bound=.*cannot be a setting"),
        ({"worlds": 0}, "worlds=0 must be at least 1"),
        ({"total": 10}, "total=10 decisions end within the warm-up of 6000"),
        ({"env": "insrt"}, "env=insrt is not a choice; did you mean 'insert'"),
        ({"env": "Pendulum-v99"}, "env.id=Pendulum-v99 cannot be made"),
        ({"env": 3}, "env is a int, which is no world of ours"),
        ({"env": ScaledEnv(make_env(WORLD, 2))}, r"scaled to \[-1, 1\] already"),
        ({"env": "lqr"}, "the environment"),
        ({"policy": "nowhere"}, "nowhere"),
        ({"policy": 3}, "a int is no policy"),
        ({"policy": None}, "needs a policy that takes its noise from outside; no policy was given"),
        ({"processes": 2}, "use `burnish finetune`"),
        ({"resume": True}, "name its folder: out="),
        ({"track": ["wandb"]}, "name its folder: out="),
    ],
)
def test_mistakes_are_the_sentences_of_the_command_line(lab, change, sentence):
    given = {"policy": load(lab / "bc"), "method": "dsrl", **change}
    with pytest.raises(BurnishError, match=sentence):
        refine(given.pop("policy"), given.pop("env", None), **given)


def test_no_method_is_a_mistake_too(lab):
    with pytest.raises(BurnishError, match=r"method=\.\.\. must be given"):
        refine(load(lab / "bc"))


def test_evaluate_is_the_command(lab, tmp_path):
    assert main(["evaluate", f"policy.path={lab}/bc", "eval.episodes=60", "seed=2", f"out={tmp_path}"]) == 0
    reported = Evaluation.load(tmp_path / "evaluation.json")
    policy = load(lab / "bc")
    assert evaluate(policy, episodes=60, seed=2) == reported == evaluate(lab / "bc", WORLD, 60, seed=2)
    assert evaluate(policy, episodes=60).seeds != reported.seeds
    assert compare(evaluate(policy, episodes=60, seed=2, greedy=True), reported).episodes == 60  # paired
    with pytest.raises(BurnishError, match="episodes=0"):
        evaluate(policy, episodes=0)
    with pytest.raises(BurnishError, match="a int is no policy"):
        evaluate(3)


def test_a_saved_policy_is_the_same_policy_elsewhere(lab, tmp_path):
    result = called(lab, "dsrl")
    assert isinstance(result, Refined) and result.policy.source is None
    result.save(tmp_path / "better")
    better = load(tmp_path / "better")
    assert same(better, result.policy) and better.origin == result.policy.origin
    assert evaluate(better, episodes=5) == evaluate(result.policy, episodes=5)
    assert main(["evaluate", f"policy.path={tmp_path}/better", *words({"eval": EVALUATION})]) == 0
    with pytest.raises(BurnishError, match="exists already"):
        save(better, tmp_path / "better")
    save(load(lab / "bc"), tmp_path / "better", overwrite=True)
    assert same(load(tmp_path / "better"), load(lab / "bc"))


@pytest.mark.slow
def test_a_run_remembers_which_policy_it_began_with(lab, tmp_path):
    settings = {"method": "residual_ppo", **RUN, **PPO}

    def begun(policy, out):
        refine(policy, out=tmp_path / out, **settings)
        return yaml.safe_load((tmp_path / out / "config.yaml").read_text())

    policy = load(lab / "bc")
    named, by_path = begun(policy, "a"), begun(lab / "bc", "b")
    assert named["policy"]["path"] == str(lab / "bc") and named["identity"] == by_path["identity"]
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)  # what lies in the folder is another one now
    changed = begun(policy, "c")
    assert changed["policy"] is None and len(changed["identity"]["policy"]) == 64
    refine(policy, out=tmp_path / "c", resume=True, **settings)
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)
    with pytest.raises(BurnishError, match=r"identity\.policy"):
        refine(policy, out=tmp_path / "c", resume=True, **settings)


def test_it_works_inside_a_program_that_uses_hydra_itself(lab):
    hydra = pytest.importorskip("hydra")
    state = pytest.importorskip("hydra.core.global_hydra").GlobalHydra
    with hydra.initialize_config_module("burnish.configs", version_base="1.3"):
        mine = state.instance().hydra
        called(lab, "residual_ppo")
        assert state.instance().hydra is mine


def test_the_import_is_light_and_the_names_are_there():
    ask = (
        "import sys, burnish.finetune as f; light = 'torch' not in sys.modules; "
        "from burnish.finetune import load; assert 'refine' in dir(f) and callable(load); "
        "print(light, 'torch' in sys.modules, hasattr(f, 'refined'))"
    )
    found = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "True", "False"]
