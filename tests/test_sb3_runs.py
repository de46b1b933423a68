"""SB3's runs: on the command line, continued as if they had not been stopped, and refused in one sentence."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest
import torch
from verb_lab import imitating

from burnish.finetune.baselines.sb3 import Algo, SB3Config, View, build
from burnish.finetune.build import prepare
from burnish.policies.build import load_policy
from burnish.policies.cli.cli import main
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.scale import ScaledEnv
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.external.policy import CallablePolicy
from burnish.policies.runs.checkpoint import load
from burnish.policies.runs.run import read_metrics
from burnish.sim.build import make_env
from burnish.sim.point_reach import PointReachConfig
from intervention_lab import same

OFF = ("SAC", "TD3", "DDPG")
PAIRS = [(algo.value, view.value) for algo in Algo for view in View]
EVALUATION = ["eval.episodes=2", "eval.worlds=2", "eval.confirm=2"]


@pytest.fixture(autouse=True)
def _there(require):
    require("stable_baselines3")


def point():
    return ScaledEnv(make_env(PointReachConfig(max_steps=7), 4))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return imitating(tmp_path_factory.mktemp("lab"), *EVALUATION, name="flow")


def words_of(lab, algo, view):
    size = "learning_starts: 8, batch_size: 4" if algo in OFF else "n_steps: 4"
    start = ["env=point_reach"] if view == "plain" else [f"policy.path={lab}/flow"]
    given = f"method.settings={{{size}, policy_kwargs: {{net_arch: [8]}}}}"
    run = ["worlds=2", "total=24", "log_every=6", "save_every=8", *EVALUATION]
    return ["finetune", "method=sb3", f"method.algo={algo}", f"view={view}", given, *start, *run]


def learnt(checkpoint):
    return load(checkpoint).children["learner"].state


QUICK = [("SAC", "latent"), ("PPO", "residual")]
RUNS = [pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow) for pair in PAIRS]


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "view"), RUNS)
def test_a_killed_run_resumes_with_what_was_learnt_and_its_policy_acts(lab, tmp_path, algo, view):
    words = words_of(lab, algo, view)
    assert main([*words, f"out={tmp_path}/whole"]) == 0
    *_, middle, last = sorted((tmp_path / "whole/checkpoints").iterdir())
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed/checkpoints" / last.name)
    assert main([*words, f"out={tmp_path}/killed", "resume=true"]) == 0
    again = tmp_path / "killed/checkpoints" / last.name
    for name in ("num_timesteps", "_n_updates"):
        assert learnt(again)["counters"][name] == learnt(last)["counters"][name] > learnt(middle)["counters"][name]
    assert not same(learnt(again)["parameters"], learnt(middle)["parameters"])
    if algo in OFF:  # rows that were remembered are still there, and the last of them ends
        old, new = (learnt(checkpoint)["replay"]["columns"] for checkpoint in (middle, again))
        count = len(old["rewards"][""])
        for name in ("observations", "actions", "rewards"):
            assert same(old[name], {key: x[:count] for key, x in new[name].items()})
        assert (new["dones"][""][count - 1] == 1).all()
        assert len(new["rewards"][""]) > count
    assert main(["evaluate", f"policy.path={tmp_path}/killed", *EVALUATION]) == 0
    _, origin = load_policy(tmp_path / "whole")
    assert origin["method"] == "sb3" and origin["env"]["name"] == "point_reach"
    tried = [int(line["step"]) for line in read_metrics(tmp_path / "whole") if "eval/episodes" in line]
    assert tried == [*([] if view == "plain" else [0]), int(last.name)]


def test_their_zip_is_written_on_request_and_never_otherwise(lab, tmp_path, capsys):
    from stable_baselines3 import SAC

    words = words_of(lab, "SAC", "residual")
    assert main([*words, f"out={tmp_path}/without"]) == 0 and not list((tmp_path / "without").rglob("*.zip"))
    capsys.readouterr()
    assert main([*words, f"out={tmp_path}/with", "method.keep_zip=true"]) == 0
    assert "it is pickle" in capsys.readouterr().out
    theirs = SAC.load(tmp_path / "with/sb3.zip")
    ours = load_policy(tmp_path / "with")[0].net
    obs = {key: torch.randn(5, 2) for key in ("base_action", "goal", "state")}
    with torch.no_grad():
        mine = ours.act(obs, greedy=True)[:, 0].numpy()

    observed = {key: x.numpy() for key, x in obs.items()}
    np.testing.assert_allclose(theirs.predict(observed, deterministic=True)[0], mine, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["method.algo=SAK"], "expected one of [SAC, TD3, DDPG, PPO, A2C]"),
        (["view=sideways"], "expected one of [residual, latent, plain]"),
        (["method.settings={lerning_rate: 1}"], "no 'lerning_rate' for method.algo=SAC; did you mean 'learning_rate'?"),
        (["method.settings={n_epochs: 3}"], "no 'n_epochs' for method.algo=SAC"),
        (["method.settings={gamma: 0.9}"], "since it is method.discount.gamma"),
        (["method.settings={use_sde: true}"], "could not log, deploy or resume"),
        (["method.settings={learning_rate: fast}"], "learning_rate='fast' must be a number"),
        (["method.settings={batch_size: 0}"], "batch_size=0 must be at least 1"),
        (["method.settings={train_freq: [1, episode]}"], "train_freq=[1, 'episode'] must be a whole number"),
        (["method.settings={ent_coef: much}"], "SB3 refuses the settings of method.algo=SAC: could not convert"),
        (["method.settings={policy_kwargs: {net_arc: [3]}}"], "did you mean 'net_arch'?"),
        (["method.settings={policy_kwargs: {activation_fn: rellu}}"], "did you mean 'relu'?"),
        (["method.settings=3"], "must be a mapping of plain data"),
        (["method.settings={policy_kwargs: 3}"], "policy_kwargs=3 must be a mapping"),
        (["method.bound=-1"], "bound=-1.0 must be a positive number"),
        (["method.explore_std=-1"], "explore_std=-1.0"),
        (["view=plain"], "the policy that was given would not be used"),
        (["view=plain", "method.bound=1"], "view=plain has none"),
        (["total=50"], "within the 100 of SB3's learning_starts"),
        (["data={lab}/data"], "method=sb3 learns from its own decisions alone"),
        (
            ["method=dsrl", "view=latent"],
            "view=latent is a choice of method=sb3; method=dsrl has",
        ),
    ],
)
def test_mistakes_are_one_sentence_and_leave_no_run_behind(lab, tmp_path, capsys, words, sentence):
    given = [word.format(lab=lab) if "{lab}" in word else word for word in words]
    start = ["finetune", "method=sb3", f"policy.path={lab}/flow", f"out={tmp_path}/run"]
    if words[0].startswith("method=dsrl"):
        start.remove("method=sb3")
    capsys.readouterr()
    assert main([*start, *given]) == 2
    out, err = capsys.readouterr()
    assert sentence in err and err.startswith("burnish finetune: ") and err.count("\n") == 1, err
    assert "Traceback" not in out and not (tmp_path / "run").exists()


def test_a_view_without_its_base_is_refused():
    for view in (View.residual, View.latent):
        with pytest.raises(BurnishError, match=f"view={view.name} refines a policy, but no policy was given"):
            build(SB3Config(view=view), None, point())
    spec = PolicySpec(ObsSpec({"state": (2,), "goal": (2,)}), ActionSpec((-1, -1), (1, 1)), 2, 2)
    mute = CallablePolicy(lambda obs: torch.zeros(len(obs["state"]), 2, 2), spec)
    with pytest.raises(BurnishError, match="view=latent chooses the noise of its base, but a CallablePolicy"):
        prepare(SB3Config(view=View.latent), mute, point())
    loop = prepare(SB3Config(settings={"learning_starts": 4}), mute, point())  # a black box can be corrected
    loop.iterate()
    deaf = CallablePolicy(
        lambda obs, noise: torch.zeros(len(noise), 2, 2), PolicySpec(**{**vars(spec), "noise_shape": (2,)})
    )
    with pytest.raises(BurnishError, match="this base ignores its noise"):
        prepare(SB3Config(view=View.latent), deaf, point())
    assert "probe" not in prepare(SB3Config(view=View.latent), deaf, point(), probe=False).learner.describe()


def test_without_sb3_a_sentence_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("burnish.finetune.baselines.")]:
        if not name.endswith(".sb3"):
            monkeypatch.delitem(sys.modules, name)
            monkeypatch.delattr(sys.modules["burnish.finetune.baselines"], name.rpartition(".")[2], raising=False)
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(BurnishError, match=r"pip install 'burnish\[sb3\]'"):
        build(SB3Config(view=View.plain), None, point())
