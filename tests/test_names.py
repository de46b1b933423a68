"""The names of the numbers that a policy has learnt from, and those of the world that it meets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_lerobot_policies import STORED
from verb_lab import refused

from burnish.offline.dataset import decisions
from burnish.policies.acting import evaluator_of
from burnish.policies.build import load_policy
from burnish.policies.cli.cli import main
from burnish.policies.core.config import to_data
from burnish.policies.core.errors import BurnishError
from burnish.policies.core.spec import ChunkConfig, EnvSpec, ObsSpec, PolicySpec
from burnish.policies.core.wrapper import feature_names
from burnish.policies.data.episodes import Episode, Episodes
from burnish.policies.data.lerobot_writer import write_lerobot
from burnish.policies.evaluator import EvalConfig
from burnish.policies.external.remote import RemoteConfig
from burnish.policies.external.table import connect
from burnish.sim.build import make_env, named, seen_by
from burnish.sim.locomotion.settings import HopperConfig
from openpi_lab import openpi

CPU = torch.device("cpu")


@pytest.fixture
def world():
    return make_env(HopperConfig(), 1)


def recorded(world, change=lambda names: names) -> Episodes:
    width, dim = world.spec.obs.shapes["state"][0], world.spec.action.dim
    episode = Episode({"state": torch.zeros(3, width)}, torch.zeros(2, dim), torch.zeros(2), False, True, False, 0)
    return Episodes([episode], world.spec, names={"state": change(feature_names(world)["state"])})


def swapped(names):
    return [names[1], names[0], *names[2:]]


def test_names_are_saved_with_a_specification(world):
    spec = recorded(world).policy_spec(ChunkConfig())
    assert PolicySpec.from_dict(spec.to_dict()).names == spec.names and spec.names["state"]
    assert "names" not in replace(spec, names={}).to_dict(), "older versions read those without"
    with pytest.raises(BurnishError, match="malformed"):
        PolicySpec.from_dict({**spec.to_dict(), "names": 3})


def test_the_same_numbers_in_another_order_are_refused(world):
    """Their shapes fit, and a policy would take one for the other without a word."""
    right, wrong = (recorded(world, change).policy_spec(ChunkConfig()) for change in (list, swapped))
    seen_by(right, world)
    with pytest.raises(BurnishError, match=r"number 0 of state, and the environment .* in another order"):
        seen_by(wrong, world)
    decisions(recorded(world), right, 0.9)
    with pytest.raises(BurnishError, match=r"the recordings .* in another order"):
        decisions(recorded(world), wrong, 0.9)


def test_names_of_a_server_are_compared_under_our_keys(world):
    wrong = recorded(world, swapped).policy_spec(ChunkConfig())
    told = wrong.to_dict() | {"obs": {"shapes": {"their/state": wrong.obs.shapes["state"]}}}
    told["names"] = {"their/state": wrong.names["state"], "action": ["a", "b", "c"]}
    with openpi(lambda message: None, {"policy_spec": to_data(told)}) as server:
        policy = connect(RemoteConfig(server.url, keys={"state": "their/state"}), world.spec)
        assert policy.spec.names == {"state": wrong.names["state"], "action": ("a", "b", "c")}
        with pytest.raises(BurnishError, match=r"number 0 of state, and the environment .* in another order"):
            seen_by(policy.spec, world)
        policy.close()


@pytest.fixture
def arms(tmp_path):
    """Recordings of an arm at 30 Hz, for LeRobot's ACT of the tests, and the same with its numbers swapped."""
    obs = {"state": torch.rand(9, 4), "environment_state": torch.rand(9, 6)}
    limits = load_policy(STORED / "act")[0].spec.action
    actions = torch.tensor([limits.low, limits.high]).mean(0).expand(8, 3)
    spec = EnvSpec(ObsSpec({key: x.shape[1:] for key, x in obs.items()}), limits, 30.0, "joint_target", 8)
    episodes = [Episode(obs, actions, torch.zeros(8), False, True, False, i) for i in range(2)]
    for name, order in (("right", ["pan", "lift", "jaw"]), ("wrong", ["jaw", "lift", "pan"])):
        write_lerobot(Episodes(episodes, spec, names={"action": order, "goal": ["g"]}), tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["pretrain", "train.steps=1", "train.batch=4"],
        ["offline", "method=iql", "steps=1", "batch=4"],
    ],
    ids=["pretrain", "offline"],
)
def test_training_that_goes_on_learns_what_the_recordings_say(arms, capsys, words):
    words = [*words, "eval.episodes=0"]
    assert main([*words, f"policy.path={STORED / 'act'}", f"data={arms}/right", f"out={arms}/run"]) == 0
    spec = load_policy(arms / "run")[0].spec
    assert (spec.control_hz, spec.action_mode) == (30.0, "joint_target")
    assert spec.names == {"action": ("pan", "lift", "jaw")}
    again = [*words, f"policy.path={arms}/run", f"data={arms}/wrong", f"out={arms}/again"]
    assert "has pan as number 0 of action, and the recordings jaw: the same" in refused(capsys, *again)
    assert main(["export", f"policy.path={arms}/run", "to=lerobot", f"out={arms}/theirs"]) == 0
    assert "which acts alike" in capsys.readouterr().out


def test_only_what_a_policy_leaves_open_is_completed(world):
    data = replace(recorded(world).policy_spec(ChunkConfig()), control_hz=30.0, action_mode="joint_target", pixels="p")
    known = replace(data, control_hz=5.0, action_mode="ee_delta", pixels="q", names={"state": ("q",) * 11})
    assert (known.completed(data), known.completed(data).names) == (known, known.names)
    for mode, learnt in ((None, "joint_target"), ("gym:A", "joint_target"), ("ee_delta", "ee_delta")):
        open_ = replace(known, control_hz=None, action_mode=mode, pixels=None, names={})
        assert (open_.completed(data), open_.completed(data).names) == (replace(data, action_mode=learnt), data.names)
    assert replace(known, action_mode="gym:A").completed(replace(data, action_mode="unknown")).action_mode == "gym:A"


@pytest.mark.parametrize("names", ["of its own", "none"])
def test_other_names_are_a_note(world, names, capsys):
    called = {"of its own": lambda found: [f"q{i}" for i in range(len(found))], "none": lambda found: found and []}
    spec = recorded(world, called[names]).policy_spec(ChunkConfig())
    spec = spec if spec.names["state"] else replace(spec, names={"state": tuple(f"state_{i}" for i in range(11))})
    evaluator_of(named(HopperConfig()), spec, EvalConfig(episodes=1, worlds=1, confirm=1), CPU)
    said = capsys.readouterr().out
    assert ("note: the policy has q0 as number 0 of state" in said) == (names == "of its own")
