"""``policy=callable``: packages announce policies by name, and nothing else can be named."""

from __future__ import annotations

import sys

import pytest
import torch

from burnish.policies.build import build_policy, describe, load_policy
from burnish.policies.cli.cli import main
from burnish.policies.compose import Residual
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ActionSpec, ObsSpec, PolicySpec
from burnish.policies.external.plugins import CallableConfig, InstalledPolicy
from burnish.policies.gaussian import GaussianConfig
from burnish.policies.runs import checkpoint
from burnish.policies.runs.run import read_metrics
from burnish.sim.build import make_env

PACKAGE = '''
import torch
from burnish.policies.core.spec import PolicySpec
from burnish.policies.external.policy import CallablePolicy

def towards(world):
    """Half-hearted, in [-1, 1]."""
    spec = PolicySpec(world.obs, world.action, 4, 2, control_hz=world.control_hz, action_mode=world.action_mode)
    def act(obs):
        return (4 * (obs["goal"] - obs["state"]))[:, None].expand(-1, 4, -1)
    return CallablePolicy(act, spec)

class Wrong:
    def __init__(self, world):
        self.spec = towards(world).spec
    def act(self, obs, **given):
        return torch.zeros(len(obs["state"]), 3, 2)

def nothing(world):
    return "a policy"

def lost(world):
    raise RuntimeError("no weights here")

class Crashing(Wrong):
    def act(self, obs, **given):
        raise RuntimeError("no idea")
'''
ENTRIES = """[burnish.policies]
towards = acme_policies:towards
wrong = acme_policies:Wrong
nothing = acme_policies:nothing
lost = acme_policies:lost
crashing = acme_policies:Crashing
broken = acme_policies:missing
twice = acme_policies:towards

[console_scripts]
script = acme_policies:towards
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Two installed distributions, as pip would leave them."""
    site = tmp_path / "site"
    for name, entries in (("one", ENTRIES), ("two", "[burnish.policies]\ntwice = acme_policies:Wrong\n")):
        folder = site / f"{name}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(entries)
    (site / "acme_policies.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(site)
    yield
    sys.modules.pop("acme_policies", None)


WORLD = make_env("point_reach", 1).spec
OBS = {"state": torch.zeros(3, 2), "goal": torch.full((3, 2), 0.1)}


def test_a_name_leads_to_a_policy_for_this_world(package):
    policy = InstalledPolicy(CallableConfig("towards"), WORLD)
    assert policy.spec.horizon == 4 and policy.world == WORLD
    torch.testing.assert_close(policy.act(OBS), torch.full((3, 4, 2), 0.4))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("toward", "did you mean 'towards'"),
        ("script", "no installed package announces"),
        ("acme_policies:towards", "that the user has not named; say BURNISH_IMPORT=acme_policies"),
        ("os:system", "that the user has not named"),
        ("broken", "which is broken"),
        ("twice", "is ambiguous: it is acme_policies:Wrong and acme_policies:towards"),
        ("nothing", "which is no policy"),
        ("lost", r"policy.name=lost could not be made \(RuntimeError: no weights here\)"),
    ],
)
def test_other_names_are_refused(package, name, sentence):
    with pytest.raises(BurnishError, match=sentence):
        InstalledPolicy(CallableConfig(name), WORLD)


def test_a_callable_of_a_module_that_the_user_names(package, monkeypatch):
    monkeypatch.setenv("BURNISH_IMPORT", "acme_policies,lost_module")
    torch.testing.assert_close(
        InstalledPolicy(CallableConfig("acme_policies:towards"), WORLD).act(OBS), torch.full((3, 4, 2), 0.4)
    )
    for name in ("os:system", "acme_policies.deeper:towards"):
        with pytest.raises(BurnishError, match="that the user has not named"):
            InstalledPolicy(CallableConfig(name), WORLD)
    for name in ("acme_policies:absent", "lost_module:make"):
        with pytest.raises(BurnishError, match=f"policy.name={name} cannot be imported"):
            InstalledPolicy(CallableConfig(name), WORLD)


def test_answers_are_checked(package):
    with pytest.raises(BurnishError, match="answered with actions of shape"):
        InstalledPolicy(CallableConfig("wrong"), WORLD).act(OBS)
    with pytest.raises(BurnishError, match=r"policy.name=crashing failed to act \(RuntimeError: no idea\)"):
        InstalledPolicy(CallableConfig("crashing"), WORLD).act(OBS)


def test_a_checkpoint_remembers_the_name(package, tmp_path, monkeypatch):
    spec = PolicySpec(ObsSpec({"state": (2,), "base_action": (2, 2)}), ActionSpec((-1,) * 2, (1,) * 2), 2, 2)
    made = Residual(
        InstalledPolicy(CallableConfig("towards"), WORLD), build_policy(GaussianConfig(), spec), 0.5, "chunk"
    )
    checkpoint.save(tmp_path / "p", config=describe(made), state=made.state_dict())
    again, _ = load_policy(tmp_path / "p")
    assert torch.equal(again.act(OBS), made.act(OBS)) and describe(again) == describe(made)
    monkeypatch.undo()
    with pytest.raises(BurnishError, match="no installed package announces a policy as 'towards'"):
        load_policy(tmp_path / "p")


def test_the_verbs_take_a_name(package, tmp_path, capsys):
    base = ["policy=callable", "policy.name=towards", "env=point_reach"]
    assert main(["evaluate", *base, "eval.episodes=10"]) == 0
    assert "towards: success 100.0%" in capsys.readouterr().out
    nets = ["critic.hidden=[8]", "critic.members=2", "agent.hidden=[8]"]
    few = [f"method.td3.{net}" for net in nets] + [
        "worlds=2",
        "total=16",
        "method.loop.warmup=8",
        "method.loop.batch=8",
    ]
    few += [
        "method.loop.initial_updates=1",
        "log_every=4",
        "save_every=8",
        "eval.episodes=2",
        "eval.worlds=2",
        "eval.confirm=2",
    ]
    assert main(["finetune", "method=residual_td3", *base, *few, f"out={tmp_path}/run"]) == 0
    assert main(["evaluate", f"policy.path={tmp_path}/run", "eval.episodes=2"]) == 0
    assert read_metrics(tmp_path / "run")[0]["eval/success_rate"] == 1.0
    assert main(["doctor", *base, "worlds=2"]) == 0 and "It takes no noise" in capsys.readouterr().out
    settings = "worlds: 2\nmethod: {loop: {decisions_per_update: 4}, agent: {hidden: [8]}}\n"
    (tmp_path / "small.yaml").write_text(f"defaults: [override /method: residual_ppo]\n{settings}")
    out = tmp_path / "improved"
    few = ["steps=40", "eval.episodes=2", "eval.worlds=2", "eval.confirm=4", f"methods={tmp_path}/small.yaml,dsrl"]
    assert main(["improve", *base, *few, f"out={out}"]) == 0
    said = capsys.readouterr().out
    assert "dsrl does not fit" in said and "so the base is delivered" in said, "it cannot be better than always"
    assert not (out / "policy").exists() and "policy: towards" in said, "which no checkpoint can hold"
    assert main(["evaluate", "policy=callable", "policy.name=os.system", "env=point_reach"]) == 2
